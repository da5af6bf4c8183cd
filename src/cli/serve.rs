//! `sterling serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::output::{announce, say};
use sterling_core::error::Result;
use sterling_cuda::Choice;
use sterling_kernels::memory::installed_bytes;
use sterling_server::config::{CacheFlags, Config, Flags, TableFlags};
use sterling_server::http::{self, AccessControl, Tls};
use sterling_server::startup::{Server, prove, store};
use sterling_snapshot::sandbox::{ProcessSandbox, SandboxMode};
use sterling_snapshot::{Manifest, Placement, Snapshot};

/// Memory that a server takes besides versions and requests, in MiB: threads, their buffers, connections.
const PROGRAM_MB: u64 = 512;

/// Arguments of `sterling serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Serve {
    /// Store of published versions: a folder, or a bucket such as s3://models/search [default: store]
    #[arg(long)]
    store: Option<PathBuf>,
    /// Folder for local copies of versions from a bucket [default: ~/.cache/sterling]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Accept item updates; their journals are in this folder, or in streams of these servers (nats://HOST:PORT,...)
    #[arg(long, value_name = "DIR")]
    updates: Option<PathBuf>,
    /// Address to listen on [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT", value_parser = http::address)]
    listen: Option<SocketAddr>,
    /// Serve only this model
    #[arg(long)]
    model: Option<String>,
    /// Shard to serve, of versions published with --shards, from 0
    #[arg(long, value_name = "N")]
    shard: Option<u32>,
    /// Configuration file; STERLING_* variables and flags override it
    #[arg(long)]
    config: Option<PathBuf>,
    /// Placement of embedding tables, printed by `sterling plan --json`
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Plan the placement of embedding tables at each load, for the machines in this TOML file
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    topology: Option<PathBuf>,
    /// Name of this host in a plan or topology of several hosts
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Node of the Redis or Valkey Cluster with table rows; repeatable
    #[arg(long, value_name = "URL")]
    remote: Vec<String>,
    /// Device: cpu, cuda:N, cuda:0,cuda:1 or cuda:all for several GPUs that share the items, or auto for a GPU if one
    /// works [default: auto]
    #[arg(long)]
    device: Option<String>,
    /// Check everything that a start needs, print the errors, and exit
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
        let server = Server::bind(&config, SandboxMode::ProcessSandbox(ProcessSandbox::of_this_program()?))?;
        let scheme = server.scheme();
        announce(self.log_json, format_args!("listening on {scheme}://{}", server.address()?))?;
        if let Some(address) = server.admin_address()? {
            announce(self.log_json, format_args!("administrators on {scheme}://{address}"))?;
        }
        server.run()
    }
}

/// Checks the requirements of a start: configuration, keys, certificates, the placement of tables with a sample of the rows on a
/// cluster, the device, the store and the manifests of the versions to load.
fn check(config: &Config) -> Result<()> {
    let access = AccessControl::open(&config.access)?;
    let scheme = if Tls::open(&config.tls)?.is_some() { "https" } else { "http" };
    let placement = Placement::open(&config.tables)?;
    let device = config.device.parse::<Choice>()?.open()?;
    let keys = if access.is_guarded() { "calls need a key" } else { "calls need no key" };
    say(format_args!("would listen on {scheme}://{}, {keys}, passes on {device}", config.listen))?;
    let store = store(config)?;
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
                Snapshot::check_cluster(&folder, &found, &placement).map_err(|e| e.within(model))?;
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
        "memory: {all} MiB, with two versions of each model, {requests} for requests, {bodies} for bodies and answers, {PROGRAM_MB} for the rest of the program"
    ))?;
    match installed_bytes().map(|bytes| bytes >> 20).filter(|installed| *installed < all) {
        Some(installed) => say(format_args!("warning: this machine, or the limit of its cgroup, has {installed} MiB")),
        None => Ok(()),
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
