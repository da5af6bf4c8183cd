//! `sterling compact`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::output::say;
use super::store::StoreArgs;
use sterling_api::MergeResponse;
use sterling_bench::Target;
use sterling_core::error::{Error, Result};
use sterling_publish::compact::{self, Compactor};
use sterling_publish::warmup;
use sterling_server::config::{Config, Flags};
use sterling_server::startup;
use sterling_serving::fresh::{Merged, Updating};
use sterling_serving::registry::{self, Registry, Snapshots};
use sterling_snapshot::sandbox::{Apart, Trials};
use sterling_snapshot::{Placement, check_name};

/// Arguments of `sterling compact`.
#[derive(Debug, clap::Args)]
pub(super) struct Compact {
    /// Name of the model
    model: String,
    /// Server that accepts the updates, such as http://127.0.0.1:8080; it merges them and activates the new version
    #[arg(long, value_name = "URL", required_unless_present = "updates", conflicts_with_all = ["store", "updates"])]
    server: Option<String>,
    /// Access key of the server, with the role `admin`
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Folder of the journals, if no server has it open
    #[arg(long, value_name = "DIR")]
    updates: Option<PathBuf>,
    /// Shard to merge, of versions published with --shards, from 0
    #[arg(long, value_name = "N", requires = "updates")]
    shard: Option<u32>,
    #[command(flatten)]
    store: StoreArgs,
}

impl Compact {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        check_name("model name", &self.model)?;
        let Merged { version, position, items } = match (&self.server, &self.updates) {
            (Some(url), _) => ask(url, self.key, &self.model)?,
            (None, Some(updates)) => merge(&self.store, updates, (&self.model, self.shard))?,
            (None, None) => return Err(Error::invalid("--server or --updates: expected one of them")),
        };
        let model = &self.model;
        say(format_args!("merged {model} version {version}: {items} items, updates up to position {position}"))
    }
}

/// Requests a merge from a server.
fn ask(url: &str, key: Option<String>, model: &str) -> Result<Merged> {
    let told = sterling_bench::post(&Target::parse(url)?.with_key(key), &format!("/v1/models/{model}/items:merge"))?;
    let MergeResponse { version, position, items, .. } =
        serde_json::from_value(told).map_err(|e| Error::unavailable(format!("{url}: its answer: {e}")))?;
    Ok(Merged { version, position, items })
}

/// Returns whether a folder has a journal of a model, or of a shard of it with any number of shards.
fn has_journal(updates: &Path, model: &str, shard: Option<u32>) -> bool {
    let Some(shard) = shard else { return updates.join(model).is_dir() };
    let beginning = format!("{model}@{shard}of");
    let names = std::fs::read_dir(updates).into_iter().flatten().flatten();
    names.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with(&beginning))
}

/// Merges in this process, without a server.
fn merge(store: &StoreArgs, updates: &Path, (model, shard): (&str, Option<u32>)) -> Result<Merged> {
    if !startup::are_streams(updates) && !has_journal(updates, model, shard) {
        let shard = shard.map_or(String::new(), |shard| format!("shard {shard} of "));
        return Err(Error::not_found(format!(
            "updates: {} has no journal of {shard}model `{model}`",
            updates.display()
        )));
    }
    let store = match shard {
        Some(shard) => startup::with_folds(updates, store.existing()?.of_shard(shard)),
        None => store.existing()?,
    };
    // Streams use the prefix and the credentials of the environment, as in a server.
    let streams = Config::read(None, &Flags::default())?.streams;
    let feeds = Arc::new(startup::open_updates(updates, &streams, &store)?);
    let snapshots =
        Snapshots { placement: Placement::whole(), trials: Trials::Apart(Apart::of_this_program()?), recorded: 0 };
    let loader = Updating { snapshots, feeds: Some(feeds.clone()), in_place: true };
    let options = registry::Options { only: Some(model.into()), ..registry::Options::default() };
    let registry = Arc::new(Registry::new(store.clone(), loader, options).with_warm_up(Arc::new(warmup::check)));
    registry.refresh();
    let all_cores = compact::Options { cores: 1.0, ..compact::Options::default() };
    Compactor::new(store, &registry, feeds, all_cores).merge(&registry, model)
}
