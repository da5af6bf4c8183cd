//! `sterling doctor`.

use std::path::PathBuf;

use serde::Serialize;

use super::output::say;
use super::store::StoreArgs;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::limits::names_server;
use sterling_core::logging::printable;
use sterling_server::config::{RouterConfig, RouterFlags, ServerFlags};
use sterling_server::doctor::{Observed, Targets, ask, host_and_port, judge};
use sterling_server::route::ServersTls;

/// Arguments of `sterling doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Doctor {
    /// Server, or a name with several addresses; https://HOST:PORT requires TLS, http://HOST:PORT disables it;
    /// repeatable
    #[arg(long, value_name = "HOST:PORT")]
    server: Vec<String>,
    /// Router, or a name with several addresses
    #[arg(long, value_name = "HOST:PORT")]
    router: Vec<String>,
    /// Store of the servers
    #[arg(long)]
    store: Vec<PathBuf>,
    /// Configuration file of a router, for its servers and their key
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// PEM file of the authorities of servers and routers; enables TLS
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file of a client certificate
    #[arg(long, value_name = "FILE", requires = "certificate_key")]
    certificate: Option<PathBuf>,
    /// PEM file of the private key of the client certificate
    #[arg(long, value_name = "FILE", requires = "certificate")]
    certificate_key: Option<PathBuf>,
    /// Access key with the role `read` for all models. Without TLS it is only sent to this machine and to
    /// http://HOST:PORT
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Maximum lag of a replica, in updates
    #[arg(long, value_name = "N", default_value_t = 1000)]
    lag: u64,
    /// Print observations and problems as one JSON object
    #[arg(long)]
    json: bool,
}

/// JSON output.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    observed: &'a Observed,
    wrong: &'a [String],
}

impl Doctor {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let tls = ServersTls { ca: self.ca, certificate: self.certificate, key: self.certificate_key };
        let mut asking = Targets { servers: self.server, routers: self.router, stores: Vec::new(), key: self.key, tls };
        if let Some(path) = &self.config {
            let flags = RouterFlags { listen: None, route: ServerFlags { servers: Vec::new() } };
            let route = RouterConfig::read(Some(path), &flags)?.route;
            // Queries the servers in the same way as the router.
            let scheme = if route.tls.ca.is_some() { "https" } else { "http" };
            asking.servers.extend(route.servers.iter().map(|server| format!("{scheme}://{server}")));
            if asking.tls.ca.is_none() {
                asking.tls = route.tls;
            }
            asking.key = asking.key.or(Some(route.key).filter(|key| !key.is_empty()));
        }
        if asking.servers.is_empty() && asking.routers.is_empty() && self.store.is_empty() {
            return Err(Error::invalid("expected a --server, a --router, a --store or a --config"));
        }
        if let Some(wrong) =
            asking.servers.iter().chain(&asking.routers).find(|name| !names_server(host_and_port(name)))
        {
            return Err(Error::invalid(format!("--server or --router: got `{wrong}`, expected HOST:PORT")));
        }
        asking.stores = self.store.iter().map(|path| StoreArgs::of(path).open_unlisted()).collect::<Result<_>>()?;
        let observed = ask(&asking)?;
        let wrong = judge(&observed, self.lag);
        if self.json {
            let report = serde_json::to_string_pretty(&Report { observed: &observed, wrong: &wrong });
            say(report.map_err(|e| Error::internal(format!("report: {e}")))?)?;
        } else {
            print_matrix(&observed)?;
            wrong.iter().try_for_each(|sentence| say(format_args!("WRONG: {}", printable(sentence))))?;
        }
        match wrong.len() {
            0 if self.json => Ok(()),
            0 => say("all is well"),
            count => Err(Error::new(Kind::Unavailable, format!("{count} problems"))),
        }
    }
}

/// Prints the matrix: one line per shard of each version on each server, then routers and stores.
fn print_matrix(observed: &Observed) -> Result<()> {
    let mut parts: Vec<_> = observed.servers.iter().flat_map(|s| s.parts.iter().map(move |part| (part, s))).collect();
    parts.sort_by(|(a, of_a), (b, of_b)| {
        (&a.model, a.shard, &of_a.name, a.version).cmp(&(&b.model, b.shard, &of_b.name, b.version))
    });
    if !parts.is_empty() {
        let head = format!("{:24} {:>7} {:28} {:>7} {:16}", "model", "shard", "server", "version", "digest");
        say(format_args!("{head} {:5} {:6} {:>10} {:>7} labels", "ready", "active", "position", "lag"))?;
    }
    for (part, server) in parts {
        let number = |number: Option<u64>| number.map_or("-".into(), |number| number.to_string());
        let yes = |is_so: bool| if is_so { "yes" } else { "no" };
        let shard = format!("{}/{}", part.shard, part.shards);
        say(format_args!(
            "{:24} {shard:>7} {:28} {:>7} {:16} {:5} {:6} {:>10} {:>7} {}",
            part.model,
            server.name,
            part.version,
            part.digest,
            yes(server.is_ready),
            yes(part.is_active),
            number(part.position),
            number(part.lag),
            part.labels.join(",")
        ))?;
    }
    for router in &observed.routers {
        for (model, (version, digest)) in &router.active {
            say(format_args!("router {}: {model} version {version} {digest}", router.name))?;
        }
    }
    for store in &observed.stores {
        for (model, seen) in &store.models {
            let versions: Vec<String> =
                seen.versions.iter().map(|(version, digest)| format!("{version} {digest}")).collect();
            let wished = seen.wished.map_or("the newest".into(), |version| format!("version {version}"));
            let wished = [vec![wished], seen.traffic.clone()].concat().join(", ");
            say(format_args!("store {}: {model} versions {}; desired is {wished}", store.name, versions.join(", ")))?;
        }
    }
    Ok(())
}
