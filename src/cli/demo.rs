//! `sterling demo`: the shortest way from a fresh clone to answers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::publish::publish;
use super::say;
use super::serve::Server;
use crate::config::Config;
use crate::engine::Model as _;
use crate::error::{Error, Result};
use crate::publish::{self, Publish};
use crate::snapshot::Store;
use crate::telemetry;
use crate::wire::{Item, RankRequest, RetrieveRequest};

/// Users of the held-out set that are shown: names that many readers know.
const SHOWN: [&str; 3] = ["git", "gnome-music", "jupyter-notebook"];

/// Arguments of `sterling demo`.
#[derive(Debug, clap::Args)]
pub(super) struct Demo {
    /// The model package
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/models/debian"), hide_default_value = true)]
    package: PathBuf,
    /// Where the model is published
    #[arg(long, default_value = "store")]
    store: PathBuf,
    /// The address to answer on
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
}

/// A line of the package's `heldout.jsonl`: a set of packages with some taken out.
#[derive(Deserialize)]
struct Heldout {
    user: String,
    features: Map<String, Value>,
    exclude: Vec<i64>,
    held: Vec<i64>,
}

impl Demo {
    pub(super) fn run(self) -> Result<()> {
        telemetry::start_logs(false);
        let start = Instant::now();
        std::fs::create_dir_all(&self.store).map_err(|e| Error::io(self.store.display(), e))?;
        let config = Config { store: self.store.clone(), listen: self.listen, ..Config::default() };
        let server = Server::bind(&config)?;
        let store = Store::new(&self.store);
        let name = match publish::published(&store, &self.package)? {
            Some((name, _)) => name,
            None => {
                let package = Some(self.package.clone());
                let what = Publish { package, ..Publish::default() };
                let (name, version, manifest) = publish(&store, &what)?;
                say(format_args!(
                    "published {name} version {version}: {} items, {:.1} s",
                    manifest.items,
                    start.elapsed().as_secs_f64()
                ))?;
                name
            }
        };
        server.app.registry.refresh();
        let model = server.app.registry.get(&name, Which::Active)?;
        for line in self.samples()? {
            show(&model, &line)?;
        }
        let address = server.address()?;
        say(format_args!(
            "ready after {:.2} s: http://{address}/ shows a page; ask as the README does:",
            start.elapsed().as_secs_f64()
        ))?;
        say(format_args!(
            "  curl http://{address}/v1/models/{name}:retrieve -d '{{\"features\": {{\"installed\": [0, 5873]}}, \"k\": 5, \"columns\": [\"name\"]}}'"
        ))?;
        server.run()
    }

    fn samples(&self) -> Result<Vec<Heldout>> {
        let path = self.package.join("heldout.jsonl");
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io(path.display(), e))?;
        let parse = |(n, line): (usize, &str)| {
            serde_json::from_str::<Heldout>(line)
                .map_err(|e| Error::invalid(format!("{}: line {}: {e}", path.display(), n + 1)))
        };
        let all = text.lines().enumerate().map(parse).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().filter(|line| SHOWN.contains(&line.user.as_str())).collect())
    }
}

/// Prints what a held-out user has, what was taken out, and what the model proposes.
fn show(model: &Loaded, line: &Heldout) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let names = |ids: &[i64]| -> Result<String> {
        let request = RankRequest {
            features: Some(line.features.clone()),
            vector: None,
            items: ids.to_vec(),
            columns: vec!["name".into()],
            constants: Default::default(),
            timeout_ms: None,
            explain: false,
            on_degraded: Default::default(),
        };
        let items = model.snapshot().rank(&request, deadline)?.items;
        Ok(items.iter().take(12).map(name_of).collect::<Vec<_>>().join(" ")
            + if items.len() > 12 { " ..." } else { "" })
    };
    say(format_args!("\n{} has:      {}", line.user, names(&line.exclude)?))?;
    say(format_args!("taken out:  {}", names(&line.held)?))?;
    let request = RetrieveRequest {
        exclude: line.exclude.clone(),
        k: 10,
        columns: vec!["name".into()],
        ..RetrieveRequest::for_features(line.features.clone())
    };
    let asked = Instant::now();
    let mut results = model.snapshot().retrieve(&[&request], deadline);
    let found = results.pop().unwrap_or_else(|| Err(Error::internal("no result")))?;
    let marked = |item: &Item| {
        let mark = if line.held.contains(&item.id) { "*" } else { "" };
        format!("{}{mark}", name_of(item))
    };
    say(format_args!("proposed:   {}", found.items.iter().map(marked).collect::<Vec<_>>().join(" ")))?;
    say(format_args!("            (* = was taken out; {:.1} ms)", asked.elapsed().as_secs_f64() * 1000.0))
}

fn name_of(item: &Item) -> &str {
    item.columns.get("name").and_then(Value::as_str).unwrap_or("?")
}
