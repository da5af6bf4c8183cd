//! `sterling serve`.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::publish::existing;
use super::say;
use crate::config::{Config, Flags, TableFlags};
use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
use crate::http::{self, App};
use crate::registry::{Options, Registry};
use crate::snapshot::Placement;
use crate::telemetry;

/// Arguments of `sterling serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Serve {
    /// Where versions are published [default: store]
    #[arg(long)]
    store: Option<PathBuf>,
    /// The address to answer on [default: 127.0.0.1:8080]
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Serve this model only
    #[arg(long)]
    model: Option<String>,
    /// A configuration file; STERLING_* variables and flags override it
    #[arg(long)]
    config: Option<PathBuf>,
    /// Place embedding tables along this plan, as `sterling plan --json` prints it
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Plan where embedding tables lie at each load, for the machines in this TOML file
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    topology: Option<PathBuf>,
    /// A node of the Redis or Valkey Cluster that holds rows of tables; several may be given
    #[arg(long, value_name = "URL")]
    remote: Vec<String>,
    /// Log as JSON lines
    #[arg(long)]
    log_json: bool,
}

impl Serve {
    pub(super) fn run(self) -> Result<()> {
        telemetry::start_logs(self.log_json);
        let tables = TableFlags { plan: self.plan, topology: self.topology, remote: self.remote };
        let flags = Flags { store: self.store, listen: self.listen, model: self.model, tables };
        let config = Config::read(self.config.as_deref(), &flags)?;
        let server = Server::bind(&config)?;
        say(format_args!("listening on http://{}", server.address()?))?;
        server.run()
    }
}

/// A server whose socket is open, so that an address in use is an error before anything else is done.
pub(super) struct Server {
    runtime: Runtime,
    listener: TcpListener,
    refresh: Duration,
    pub(super) app: Arc<App>,
}

impl Server {
    pub(super) fn bind(config: &Config) -> Result<Self> {
        telemetry::metrics();
        let placement = Placement::open(&config.tables)?;
        let store = existing(config.store.clone())?;
        if let Some(model) = config.model.as_deref().filter(|m| store.versions(m).map_or(true, |v| v.is_empty())) {
            tracing::warn!("model `{model}` has no version in {} yet, waiting for one", config.store.display());
        }
        let options = Options { only: config.model.clone(), ..Options::default() };
        let registry = Registry::new(store, placement, options);
        let app = Arc::new(App::new(registry, Engine::start(Passes, &config.engine)?));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::io("the threads of the HTTP edge", e))?;
        let listener = runtime
            .block_on(TcpListener::bind(config.listen))
            .map_err(|e| Error::io(format!("address {}", config.listen), e))?;
        Ok(Server { runtime, listener, refresh: Duration::from_millis(config.refresh_ms), app })
    }

    pub(super) fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::io("the listening socket", e))
    }

    /// Answers until SIGINT or SIGTERM, while new versions are taken in as they are published.
    pub(super) fn run(self) -> Result<()> {
        let stop = self.runtime.block_on(async { stop_signal() })?;
        self.app.registry.watch(self.refresh)?;
        self.runtime.block_on(http::serve(self.listener, self.app, stop))?;
        tracing::info!("stopped");
        Ok(())
    }
}

fn stop_signal() -> Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let wrong = |e| Error::io("signal handlers", e);
    let mut interrupt = signal(SignalKind::interrupt()).map_err(wrong)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(wrong)?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tracing::info!("stopping: what has begun is answered first");
    })
}
