//! Starts a server over a store: opens the store, updates, device, registry, engine and sockets of a [`Config`].

mod signals;
mod store;
mod updates;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::config::Config;
use crate::http::{self, AccessControl, App, Sockets, Stop, Tls, Traces};
use crate::route::Peers;
use sterling_core::error::{Error, Result};
use sterling_core::tasks::{self, Runtime};
use sterling_cuda::Choice;
use sterling_kernels::heap;
use sterling_publish::compact::Compactor;
use sterling_publish::warmup;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::fresh::{Merges, Updating};
use sterling_serving::registry::{self, Loaded, Registry, Snapshots};
use sterling_snapshot::Placement;
use sterling_snapshot::sandbox::SandboxMode;

pub use signals::stop_signals;
pub use store::{check_folder, prove, store};
pub use updates::{are_streams, open_updates, with_checkpoints};

/// Creates the threads of the sockets. Each thread returns memory before it sleeps, and delays reads under overload.
fn edge_threads(app: Arc<App>) -> Result<Runtime> {
    let park = move || {
        heap::give_back();
        std::thread::sleep(app.engine.read_delay());
    };
    tasks::HTTP.runtime(|builder| builder.enable_all().on_thread_park(park))
}

/// Server with open sockets; an address in use is an error before a version is loaded.
pub struct Server {
    runtime: Runtime,
    sockets: Sockets,
    refresh: Duration,
    http: http::Options,
    app: Arc<App>,
}

impl Server {
    /// Opens the sockets and everything a server needs. Graphs that were not validated at publication run in the sandbox `trials`
    /// first.
    ///
    /// # Errors
    /// `Io` for an address in use; errors of the configuration, the store, the keys, the certificates or the device.
    pub fn bind(config: &Config, trials: SandboxMode) -> Result<Self> {
        sterling_telemetry::metrics();
        let (access, tls) = (AccessControl::open(&config.access)?, Tls::open(&config.tls)?.map(Arc::new));
        let addresses = [Some(config.listen), config.access.admin_listen].into_iter().flatten();
        for address in addresses.filter(|address| !access.is_guarded() && !address.ip().is_loopback()) {
            tracing::warn!(%address, "every client that reaches this address may make all calls; to require keys, set \
                                      `access.keys` to a file of keys");
        }
        let placement = Placement::open(&config.tables)?;
        let peers = config.tables.host.as_ref().map(|_| Peers::open(&config.peers)).transpose()?.map(Arc::new);
        let placement = match &peers {
            Some(peers) => placement.beside(peers.clone()),
            None => placement,
        };
        let cluster = placement.cluster().cloned();
        let loader = Snapshots { placement, trials, recorded: config.recorded_queries };
        let options = registry::Options {
            only: config.model.clone(),
            memory_bytes: (config.memory_mb > 0).then(|| config.memory_mb.saturating_mul(1 << 20)),
            follow: config.follow,
            ..registry::Options::default()
        };
        let store = store::open(config)?;
        let feeds = config.updates.as_ref().map(|updates| open_updates(updates, &config.streams, &store));
        let feeds = feeds.transpose()?.map(Arc::new);
        let chosen = config.device.parse::<Choice>()?.open()?;
        tracing::info!(device = %chosen, "device of the forward pass");
        let passes = Passes::on(&chosen, feeds.is_some());
        let residents = passes.residents();
        let loader = Updating { snapshots: loader, feeds: feeds.clone(), in_place: residents.is_none() };
        let warm = move |loaded: &Loaded| {
            warmup::check(loaded)?;
            // A version is loaded on the device before it may answer.
            if let Some(residents) = &residents {
                residents.upload_version(loaded.view().main());
                loaded.content().set_prepare_hook(residents.clone());
            }
            Ok(())
        };
        let registry = Registry::new(store.clone(), loader, options).with_warm_up(Arc::new(warm));
        let app = App::new(registry, Engine::start(passes, &config.engine)?, &config.http)?;
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

    /// Returns the listening address.
    ///
    /// # Errors
    /// `Io` if the system does not report the address.
    pub fn address(&self) -> Result<SocketAddr> {
        self.sockets.main.local_addr().map_err(|e| Error::io("listening socket", e))
    }

    /// Address for administrators, if it is separate.
    ///
    /// # Errors
    /// As [`Server::address`].
    pub fn admin_address(&self) -> Result<Option<SocketAddr>> {
        let admin = self.sockets.admin.as_ref().map(|admin| admin.local_addr()).transpose();
        admin.map_err(|e| Error::io("the socket of administrators", e))
    }

    /// `https` with TLS, else `http`.
    pub fn scheme(&self) -> &'static str {
        if self.sockets.tls.is_some() { "https" } else { "http" }
    }

    /// Returns the registry of the served models.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.app.registry
    }

    /// Serves until a stop signal, and loads new versions as they are published.
    ///
    /// # Errors
    /// `Io` if signals cannot be handled or a thread cannot be created.
    pub fn run(self) -> Result<()> {
        let stops = self.runtime.block_on(async { stop_signals() })?;
        self.run_until(stops)
    }

    /// Serves until it receives a [`Stop`].
    ///
    /// # Errors
    /// `Io` if a thread cannot be created.
    pub fn run_until(self, stops: UnboundedReceiver<Stop>) -> Result<()> {
        self.app.registry.watch(self.refresh)?;
        let ended = self.runtime.block_on(http::serve(self.sockets, self.app.clone(), &self.http, stops));
        match &ended {
            Ok(true) => tracing::info!("stopped"),
            Ok(false) => tracing::warn!("stopped before all requests were answered"),
            Err(_) => {}
        }
        if !matches!(ended, Ok(true)) {
            // An abandoned pass or load may still run; its threads are not joined and end with the process.
            std::mem::forget(self.app);
        }
        ended.map(drop)
    }
}
