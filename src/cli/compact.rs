//! `sterling compact`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::output::say;
use super::store::StoreArgs;
use sterling_api::MergeResponse;
use sterling_bench::Target;
use sterling_core::error::{Error, Result};
use sterling_journal::wait_until_closed;
use sterling_publish::compact::{self, Compactor};
use sterling_publish::warmup;
use sterling_server::config::{Config, Flags};
use sterling_server::startup;
use sterling_serving::fresh::{Merged, Updating};
use sterling_serving::registry::{self, Registry, Snapshots};
use sterling_snapshot::sandbox::{ProcessSandbox, SandboxMode};
use sterling_snapshot::{Placement, check_name};

/// Maximum wait for a server that is ending and still has the journal open.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(5);

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
    let reported =
        sterling_bench::post(&Target::parse(url)?.with_key(key), &format!("/v1/models/{model}/items:merge"))?;
    let MergeResponse { version, position, items, .. } =
        serde_json::from_value(reported).map_err(|e| Error::unavailable(format!("{url}: invalid answer: {e}")))?;
    Ok(Merged { version, position, items })
}

/// Returns the journals of a model, or of a shard of the model, for any number of shards.
fn journals(updates: &Path, model: &str, shard: Option<u32>) -> Vec<PathBuf> {
    let Some(shard) = shard else { return Vec::from_iter(Some(updates.join(model)).filter(|folder| folder.is_dir())) };
    let beginning = format!("{model}@{shard}of");
    let entries = std::fs::read_dir(updates).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&beginning)).map(|e| e.path()).collect()
}

/// Merges in this process, without a server.
fn merge(store: &StoreArgs, updates: &Path, (model, shard): (&str, Option<u32>)) -> Result<Merged> {
    if !startup::are_streams(updates) {
        let journals = journals(updates, model, shard);
        if journals.is_empty() {
            let shard = shard.map_or(String::new(), |shard| format!("shard {shard} of "));
            return Err(Error::not_found(format!(
                "updates: {} has no journal of {shard}model `{model}`",
                updates.display()
            )));
        }
        // A server that is being stopped may still finish its requests, with the journal open.
        journals.iter().try_for_each(|folder| wait_until_closed(folder, JOURNAL_TIMEOUT))?;
    }
    let store = match shard {
        Some(shard) => startup::with_checkpoints(updates, store.existing()?.of_shard(shard)),
        None => store.existing()?,
    };
    // The prefix and the credentials of streams are read from the environment, as in a server.
    let streams = Config::read(None, &Flags::default())?.streams;
    let feeds = Arc::new(startup::open_updates(updates, &streams, &store)?);
    let snapshots = Snapshots {
        placement: Placement::whole(),
        trials: SandboxMode::ProcessSandbox(ProcessSandbox::of_this_program()?),
        recorded: 0,
    };
    let loader = Updating { snapshots, feeds: Some(feeds.clone()), in_place: true };
    let options = registry::Options { only: Some(model.into()), ..registry::Options::default() };
    let registry = Arc::new(Registry::new(store.clone(), loader, options).with_warm_up(Arc::new(warmup::check)));
    registry.refresh();
    let all_cores = compact::Options { cores: 1.0, ..compact::Options::default() };
    Compactor::new(store, &registry, feeds, all_cores).merge(&registry, model)
}
