//! `sterling route`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use super::output::announce;
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_server::config::{RouterConfig, RouterFlags, ServerFlags};
use sterling_server::http::{self, AccessControl, RouterApp, Traces};
use sterling_server::route::Fleet;
use sterling_server::startup::stop_signals;

/// Arguments of `sterling route`.
#[derive(Debug, clap::Args)]
pub(super) struct Route {
    /// Server of a shard, or a name with several addresses; repeatable
    #[arg(long, value_name = "HOST:PORT")]
    server: Vec<String>,
    /// Address to listen on [default: 127.0.0.1:8090]
    #[arg(long, value_name = "HOST:PORT", value_parser = http::address)]
    listen: Option<SocketAddr>,
    /// Configuration file; STERLING_* variables and flags override it
    #[arg(long)]
    config: Option<PathBuf>,
    /// Log as JSON lines
    #[arg(long)]
    log_json: bool,
}

impl Route {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(self.log_json);
        sterling_telemetry::metrics();
        let flags = RouterFlags { listen: self.listen, route: ServerFlags { servers: self.server } };
        let config = RouterConfig::read(self.config.as_deref(), &flags)?;
        let access = AccessControl::open(&config.access)?;
        if !access.is_guarded() && !config.listen.ip().is_loopback() {
            tracing::warn!(address = %config.listen, "every client that reaches this address may query; to require \
                                                      keys, set `access.keys` to a file of keys");
        }
        let traces = Traces::start(&config.traces)?;
        let app = Arc::new(RouterApp::new(Fleet::open(config.route.clone())?, access, traces, &config.http)?);
        let runtime = tasks::HTTP.runtime(|builder| builder.enable_all())?;
        let ended = runtime.block_on(async {
            let stops = stop_signals()?;
            let listener = http::listen_after_first_poll(config.listen, &app).await?;
            let address = listener.local_addr().map_err(|e| Error::io("listening socket", e))?;
            announce(self.log_json, format_args!("listening on http://{address}"))?;
            http::route(listener.into(), app, &config.http, stops).await
        });
        drop(runtime);
        if !ended? {
            tracing::warn!("stopped before all requests were answered");
        }
        Ok(())
    }
}
