//! `sterling serve`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::journals;
use super::output::{announce, say};
use super::store::check_folder;
use sterling_core::error::{Error, Kind, Result};
use sterling_cuda::Choice;
use sterling_kernels::heap;
use sterling_publish::compact::Compactor;
use sterling_publish::warmup;
use sterling_server::config::{CacheFlags, Config, Flags, TableFlags};
use sterling_server::http::{self, AccessControl, App, Sockets, Stop, Tls, Traces};
use sterling_server::route::Peers;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::fresh::{Merges, Updating};
use sterling_serving::registry::{self, Loaded, Registry, Snapshots};
use sterling_snapshot::sandbox::{Apart, Trials};
use sterling_snapshot::{Manifest, Placement, Snapshot, Store};

/// Memory of a server beside versions and requests, in MiB: threads, their working memory, connections.
const PROGRAM_MB: u64 = 512;

/// Arguments of `sterling serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Serve {
    /// Where versions are published: a folder, or a bucket such as s3://models/search [default: store]
    #[arg(long)]
    store: Option<PathBuf>,
    /// The folder that versions of a bucket are fetched to [default: ~/.cache/sterling]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Take updates of items, and keep their journals in this folder, or in streams of these servers (nats://HOST:PORT,...)
    #[arg(long, value_name = "DIR")]
    updates: Option<PathBuf>,
    /// The address to answer on [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT", value_parser = http::address)]
    listen: Option<SocketAddr>,
    /// Serve this model only
    #[arg(long)]
    model: Option<String>,
    /// Of versions that were published with --shards, serve this one, from 0 up
    #[arg(long, value_name = "N")]
    shard: Option<u32>,
    /// A configuration file; STERLING_* variables and flags override it
    #[arg(long)]
    config: Option<PathBuf>,
    /// Place embedding tables along this plan, as `sterling plan --json` prints it
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Plan where embedding tables lie at each load, for the machines in this TOML file
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    topology: Option<PathBuf>,
    /// Of a plan or topology over several hosts, be this one
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// A node of the Redis or Valkey Cluster that holds rows of tables; several may be given
    #[arg(long, value_name = "URL")]
    remote: Vec<String>,
    /// What passes run on: cpu, cuda:N for the card of number N, cuda:0,cuda:1 or cuda:all for cards that share the items, or auto for
    /// a card where one works [default: auto]
    #[arg(long)]
    device: Option<String>,
    /// Look at all that a start needs, say what is wrong, and start nothing
    #[arg(long)]
    check: bool,
    /// Log as JSON lines
    #[arg(long)]
    log_json: bool,
}

impl Serve {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(self.log_json);
        let tables = TableFlags { plan: self.plan, topology: self.topology, host: self.host, remote: self.remote };
        let (store, updates, listen, model, device) = (self.store, self.updates, self.listen, self.model, self.device);
        let cache = CacheFlags { folder: self.cache };
        let flags = Flags { store, cache, updates, listen, model, shard: self.shard, device, tables };
        let config = Config::read(self.config.as_deref(), &flags)?;
        if self.check {
            return check(&config);
        }
        let server = Server::bind(&config)?;
        let scheme = if server.sockets.tls.is_some() { "https" } else { "http" };
        announce(self.log_json, format_args!("listening on {scheme}://{}", server.address()?))?;
        if let Some(admin) = &server.sockets.admin {
            let address = admin.local_addr().map_err(|e| Error::io("the socket of administrators", e))?;
            announce(self.log_json, format_args!("administrators on {scheme}://{address}"))?;
        }
        server.run()
    }
}

/// Looks at what a start needs: configuration, keys, certificates, the plan of tables, the device, the store and the manifests
/// of the versions that would be loaded.
fn check(config: &Config) -> Result<()> {
    let access = AccessControl::open(&config.access)?;
    let scheme = if Tls::open(&config.tls)?.is_some() { "https" } else { "http" };
    let placement = Placement::open(&config.tables)?;
    let device = config.device.parse::<Choice>()?.open()?;
    let keys = if access.is_guarded() { "calls take a key" } else { "calls take no key" };
    say(format_args!("would listen on {scheme}://{}, {keys}, passes on {device}", config.listen))?;
    let store = unasked(config)?;
    prove(&store)?;
    store.renew()?;
    let models = match &config.model {
        Some(model) => vec![model.clone()],
        None => store.models()?,
    };
    let mut versions_bytes = 0;
    for model in &models {
        match store.versions(model).unwrap_or_default().last() {
            Some(&version) => {
                let folder = store.outline(model, version)?;
                let found = Manifest::read(&folder)?;
                let bytes = Snapshot::memory_bytes(&folder, &found, &placement)?;
                versions_bytes += bytes;
                say(format_args!(
                    "{model} version {version}: {} items, {} MiB of memory",
                    found.items,
                    mebibytes(bytes)
                ))?;
            }
            None => say(format_args!("{model}: no version yet"))?,
        }
    }
    if models.is_empty() {
        say(format_args!("no model in {} yet", config.store.display()))?;
    }
    let (requests, bodies) = (config.engine.memory_mb, 2 * config.http.bodies_mb as u64);
    let all = 2 * mebibytes(versions_bytes) + requests + bodies + PROGRAM_MB;
    say(format_args!(
        "memory: {all} MiB, with two versions of each model, {requests} for requests, {bodies} for bodies and answers, {PROGRAM_MB} beside them"
    ))
}

/// How long the start of a server waits for a store that it could do without, as what it serves was fetched before.
const PATIENCE: Duration = Duration::from_secs(2);

/// The store as the server sees it, of which nothing is asked yet.
fn unasked(config: &Config) -> Result<Store> {
    check_folder(&config.store)?;
    config.updates.as_deref().map_or(Ok(()), journals::check)?;
    let store = Store::open(&config.store, &config.cache)?;
    Ok(match config.shard {
        Some(shard) => store.of_shard(shard),
        None => store,
    })
}

/// The store of a server that starts. One that does not keep publishers apart is refused; one that does not answer is waited for
/// where nothing was fetched before.
fn open(config: &Config) -> Result<Store> {
    let store = unasked(config)?;
    let asked = {
        let store = store.clone();
        move || -> Result<()> {
            prove(&store)?;
            // Where it does not answer, what was fetched before is what there is.
            let _ = store.renew();
            Ok(())
        }
    };
    if !store.has_copies(config.model.as_deref()) {
        asked()?;
        return Ok(store);
    }
    let (tell, told) = sync_channel(1);
    let ask = move || {
        let answer = asked();
        if let Err(error) = &answer {
            tracing::error!(%error, "the store must not be published to");
        }
        // A server that serves what was fetched waits no more.
        let _ = tell.send(answer);
    };
    std::thread::Builder::new().name("store".into()).spawn(ask).map_err(|e| Error::io("a thread", e))?;
    match told.recv_timeout(PATIENCE) {
        Ok(answer) => answer?,
        Err(_) => {
            tracing::warn!(store = store.name(), "the store has not answered yet: what was fetched before is served")
        }
    }
    Ok(store)
}

/// Refuses a store that does not keep publishers apart. One that does not answer is none of those.
fn prove(store: &Store) -> Result<()> {
    match store.prove() {
        Err(e) if e.kind() == Kind::Unavailable => {
            tracing::warn!(error = %e, "the store does not answer yet");
            Ok(())
        }
        other => other,
    }
}

/// The store as a server sees it: as it is now, with the folds of its shard.
fn open_to_serve(config: &Config) -> Result<Store> {
    let store = open(config)?;
    let store = match (&config.updates, config.shard) {
        (Some(updates), Some(_)) => journals::folding(updates, store),
        _ => store,
    };
    if let Some(model) = config.model.as_deref().filter(|m| store.versions(m).map_or(true, |v| v.is_empty())) {
        let what = config.shard.map_or("version".into(), |shard| format!("version with a shard {shard}"));
        tracing::warn!("model `{model}` has no {what} in {} yet, waiting for one", config.store.display());
    }
    Ok(store)
}

/// The threads of the sockets. Each gives memory back before it sleeps, and leaves requests in their sockets under overload.
fn edge_threads(app: Arc<App>) -> Result<Runtime> {
    let park = move || {
        heap::give_back();
        std::thread::sleep(app.engine.swarm());
    };
    let threads = tokio::runtime::Builder::new_multi_thread().enable_all().on_thread_park(park).build();
    threads.map_err(|e| Error::io("the threads of the HTTP edge", e))
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// A server whose sockets are open, so that an address in use is an error before a version is loaded.
pub(super) struct Server {
    runtime: Runtime,
    sockets: Sockets,
    refresh: Duration,
    http: http::Options,
    pub(super) app: Arc<App>,
}

impl Server {
    pub(super) fn bind(config: &Config) -> Result<Self> {
        sterling_telemetry::metrics();
        let (access, tls) = (AccessControl::open(&config.access)?, Tls::open(&config.tls)?.map(Arc::new));
        let addresses = [Some(config.listen), config.access.admin_listen].into_iter().flatten();
        for address in addresses.filter(|address| !access.is_guarded() && !address.ip().is_loopback()) {
            tracing::warn!(%address, "whoever reaches this address may do everything: `access.keys` names a file of keys");
        }
        let placement = Placement::open(&config.tables)?;
        let peers = config.tables.host.as_ref().map(|_| Peers::open(&config.peers)).transpose()?.map(Arc::new);
        let placement = match &peers {
            Some(peers) => placement.beside(peers.clone()),
            None => placement,
        };
        let cluster = placement.cluster().cloned();
        let trials = Trials::Apart(Apart::of_this_program()?);
        let loader = Snapshots { placement, trials, recorded: config.recorded_queries };
        let options = registry::Options {
            only: config.model.clone(),
            memory_bytes: (config.memory_mb > 0).then(|| config.memory_mb.saturating_mul(1 << 20)),
            follow: config.follow,
            ..registry::Options::default()
        };
        let store = open_to_serve(config)?;
        let feeds = config.updates.as_ref().map(|updates| journals::open(updates, &config.streams, &store));
        let feeds = feeds.transpose()?.map(Arc::new);
        let chosen = config.device.parse::<Choice>()?.open()?;
        tracing::info!(device = %chosen, "passes run here");
        let passes = Passes::on(&chosen, feeds.is_some());
        let residents = passes.residents();
        let loader = Updating { snapshots: loader, feeds: feeds.clone(), in_place: residents.is_none() };
        let warm = move |loaded: &Loaded| {
            warmup::check(loaded)?;
            // A version is on the device before it may answer.
            if let Some(residents) = &residents {
                residents.bring(loaded.view().main());
                loaded.content().make_ready_by(residents.clone());
            }
            Ok(())
        };
        let registry = Registry::new(store.clone(), loader, options).with_warm_up(Arc::new(warm));
        let app = App::new(registry, Engine::start(passes, &config.engine)?, &config.http);
        let (merges, wanted) = Merges::new();
        let merges = feeds.is_some().then_some(merges);
        let app = app
            .with_updates(feeds.clone(), Duration::from_millis(config.engine.timeout_ms))
            .with_merges(merges)
            .with_peers(peers)
            .with_cluster(cluster)
            .with_access(access)
            .with_traces(Traces::start(&config.traces)?)
            .with_audit(config.audit_share);
        let app = Arc::new(app);
        if let Some(feeds) = feeds {
            Compactor::new(store, &app.registry, feeds, config.merge.clone()).start(wanted)?;
        }
        let runtime = edge_threads(app.clone())?;
        let bind = |address: SocketAddr| {
            let bound = runtime.block_on(async { http::listen(address) });
            bound.map_err(|e| Error::io(format!("address {address}"), e))
        };
        let admin = config.access.admin_listen;
        let sockets = Sockets { main: bind(config.listen)?, admin: admin.map(bind).transpose()?, tls };
        let refresh = Duration::from_millis(config.refresh_ms);
        Ok(Server { runtime, sockets, refresh, http: config.http.clone(), app })
    }

    pub(super) fn address(&self) -> Result<SocketAddr> {
        self.sockets.main.local_addr().map_err(|e| Error::io("the listening socket", e))
    }

    /// Answers until a signal ends it, while new versions are taken in as they are published.
    pub(super) fn run(self) -> Result<()> {
        let stops = self.runtime.block_on(async { stop_signals() })?;
        self.app.registry.watch(self.refresh)?;
        let ended = self.runtime.block_on(http::serve(self.sockets, self.app.clone(), &self.http, stops));
        match &ended {
            Ok(true) => tracing::info!("stopped"),
            Ok(false) => tracing::warn!("stopped before all was answered"),
            Err(_) => {}
        }
        if !matches!(ended, Ok(true)) {
            // A pass or a load that nobody waits for may still run, and ends with the process: its threads are not joined.
            std::mem::forget(self.app);
        }
        self.runtime.shutdown_background();
        ended.map(drop)
    }
}

/// Tells the server of each signal: of SIGTERM and SIGHUP, which orchestrators and a closed terminal send, and of SIGINT, at
/// which somebody waits.
pub(super) fn stop_signals() -> Result<UnboundedReceiver<Stop>> {
    let (told, stops) = unbounded_channel();
    for (kind, stop) in [
        (SignalKind::terminate(), Stop::Drain),
        (SignalKind::hangup(), Stop::Drain),
        (SignalKind::interrupt(), Stop::Now),
    ] {
        if kind == SignalKind::hangup() && ignores_hangups() {
            continue;
        }
        let mut signals = signal(kind).map_err(|e| Error::io("signal handlers", e))?;
        let told = told.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() && told.send(stop).is_ok() {
                tracing::info!(
                    signal = kind.as_raw_value(),
                    "stopping: what has begun is answered first, a second signal ends at once"
                );
            }
        });
    }
    Ok(stops)
}

/// True where the process was started to outlive its terminal, as `nohup` does.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
