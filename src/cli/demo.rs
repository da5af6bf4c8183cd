//! `sterling demo`: the shortest path from a fresh clone to answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;

use super::output::say;
use super::publish::publish;
use super::store::local_path;
use sterling_api::FeatureValue;
use sterling_core::error::{Error, Result};
use sterling_core::request::{Content, Request, Retrieve, User, VersionSelector};
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::Threads;
use sterling_index::columns::Cell;
use sterling_publish::Plan;
use sterling_server::config::Config;
use sterling_server::http;
use sterling_server::startup::Server;
use sterling_serving::pass::{self, Cpu};
use sterling_serving::view::View;
use sterling_snapshot::Store;
use sterling_snapshot::model::MODEL_FILE;
use sterling_snapshot::sandbox::{ProcessSandbox, SandboxMode};

/// Path of the model relative to the program's folder, if the program was installed from a wheel.
const INSTALLED: &str = "share/sterling/debian";
/// Path of the model in the clone from which the program was built.
const BUILT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/debian");
/// Held-out users whose recommendations are shown, chosen because many readers know the names.
const SHOWN: [&str; 3] = ["git", "gnome-music", "jupyter-notebook"];

/// Arguments of `sterling demo`.
#[derive(Debug, clap::Args)]
pub(super) struct Demo {
    /// Model package; default: the installed one, or that of the source tree
    #[arg(long)]
    package: Option<PathBuf>,
    /// Store of published versions
    #[arg(long, default_value = "store", value_parser = local_path())]
    store: PathBuf,
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080", value_parser = http::address)]
    listen: SocketAddr,
}

/// Line of the package's `heldout.jsonl`: a set of packages, some of which are held out.
#[derive(Deserialize)]
struct Heldout {
    user: String,
    features: BTreeMap<String, FeatureValue>,
    exclude: Vec<i64>,
    held: Vec<i64>,
}

impl Demo {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let start = Instant::now();
        let package = self.package()?;
        std::fs::create_dir_all(&self.store).map_err(|e| Error::io(self.store.display(), e))?;
        let config = Config { store: self.store.clone(), listen: self.listen, ..Config::default() };
        let trials = SandboxMode::ProcessSandbox(ProcessSandbox::of_this_program()?);
        let server = Server::bind(&config, trials.clone())?;
        let store = Store::new(&self.store);
        let name = match sterling_publish::published(&store, &package)? {
            Some((name, _)) => name,
            None => {
                let plan = Plan { trials, ..Plan::of_package(&package) };
                let (name, version) = publish(&store, &plan)?;
                let manifest = store.manifest(&name, version)?;
                say(format_args!(
                    "published {name} version {version}: {} items, {:.1} s",
                    manifest.items,
                    start.elapsed().as_secs_f64()
                ))?;
                name
            }
        };
        server.registry().refresh();
        let model = server.registry().get(&name, VersionSelector::Active)?;
        for line in samples(&package)? {
            show(&model.view(), &line)?;
        }
        let address = server.address()?;
        say(format_args!(
            "ready after {:.2} s: open http://{address}/ in a browser, or send a request as in the README:",
            start.elapsed().as_secs_f64()
        ))?;
        say(format_args!(
            "  curl http://{address}/v1/models/{name}:retrieve -d '{{\"features\": {{\"installed\": [0, 5873]}}, \"k\": 5, \"columns\": [\"name\"]}}'"
        ))?;
        server.run()
    }

    fn package(&self) -> Result<PathBuf> {
        if let Some(given) = &self.package {
            return Ok(given.clone());
        }
        let program = std::env::current_exe().map_err(|e| Error::io("the program", e))?;
        let prefix = program.parent().and_then(Path::parent);
        let places: Vec<PathBuf> =
            prefix.map(|prefix| prefix.join(INSTALLED)).into_iter().chain([BUILT.into()]).collect();
        let found = places.iter().find(|place| place.join(MODEL_FILE).is_file()).cloned();
        found.ok_or_else(|| {
            let places: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
            Error::not_found(format!(
                "the demo's model was not found in {}: pass its path with --package",
                places.join(" and in ")
            ))
        })
    }
}

fn samples(package: &Path) -> Result<Vec<Heldout>> {
    let path = package.join("heldout.jsonl");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(path.display(), e))?;
    let parse = |(n, line): (usize, &str)| {
        serde_json::from_str::<Heldout>(line)
            .map_err(|e| Error::invalid(format!("{}: line {}: {e}", path.display(), n + 1)))
    };
    let all = text.lines().enumerate().map(parse).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().filter(|line| SHOWN.contains(&line.user.as_str())).collect())
}

/// Prints the packages of a held-out user, the packages that were held out, and the model's proposals.
fn show(view: &Arc<View>, line: &Heldout) -> Result<()> {
    let features = || line.features.iter().map(|(name, value)| (name.clone(), value.0.clone())).collect();
    let items = |ids: &[i64]| ids.iter().copied().map(ItemId).collect::<Vec<_>>();
    let names = |ids: &[i64]| -> Result<String> {
        let slots: Vec<Slot> = items(ids).into_iter().filter_map(|id| view.slot(id)).collect();
        let names = slots.iter().take(12).map(|&slot| name(view, slot)).collect::<Result<Vec<_>>>()?.join(" ");
        Ok(names + if slots.len() > 12 { " ..." } else { "" })
    };
    say(format_args!("\n{} has:      {}", line.user, names(&line.exclude)?))?;
    say(format_args!("taken out:  {}", names(&line.held)?))?;
    let request = Retrieve { exclude: items(&line.exclude), k: 10, ..Retrieve::of(User::Features(features())) };
    let requested = Instant::now();
    let prepared = pass::prepare(view, Request::Retrieve(request))?;
    let mut answers = pass::run(&mut Cpu::new(Threads::new(1)), &[prepared], None);
    let answer = answers.pop().unwrap_or_else(|| Err(Error::internal("the pass did not answer the request")))?;
    let took = requested.elapsed();
    let Content::Items(found) = answer.content else { return Err(Error::internal("the answer has no items")) };
    let marked = |(id, &slot): (&ItemId, &Slot)| {
        let mark = if line.held.contains(&id.0) { "*" } else { "" };
        name(view, slot).map(|name| name + mark)
    };
    let proposed = found.ids.iter().zip(&found.slots).map(marked).collect::<Result<Vec<_>>>()?;
    say(format_args!("proposed:   {}", proposed.join(" ")))?;
    say(format_args!("            (* = held out; {:.1} ms)", took.as_secs_f64() * 1000.0))
}

fn name(view: &View, slot: Slot) -> Result<String> {
    match view.column("name")?.cell(slot) {
        Cell::Text(text) => Ok(text.to_owned()),
        _ => Ok("?".into()),
    }
}
