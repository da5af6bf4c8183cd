//! Requests to servers, routers and stores for their state.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::stream::{self, StreamExt as _};
use serde::de::DeserializeOwned;

use super::{ModelSeen, Observed, PartSeen, RouterSeen, ServerSeen, StoreSeen};
use crate::route::protocol::{Holdings, PARTS_PATH, read};
use crate::route::{Probe, ServersTls};
use sterling_api::{ModelList, PositionResponse, Problem, VersionList};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_snapshot::Store;

/// Longest wait for one answer of a server or router.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of servers that are requested concurrently.
const TOGETHER: usize = 32;
/// Number of versions per model that are reported, the newest ones.
const NEWEST: usize = 5;

/// Processes and stores to examine.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// Servers, each as `HOST:PORT`; a name stands for all of its addresses. `https://` or `http://` before it selects the
    /// protocol.
    pub servers: Vec<String>,
    /// Routers, in the same form as `servers`.
    pub routers: Vec<String>,
    /// Stores.
    pub stores: Vec<Store>,
    /// Access key that servers and routers require.
    pub key: Option<String>,
    /// Certificates for TLS. An address without a scheme uses TLS if an authority is configured.
    pub tls: ServersTls,
}

/// Requests the state of all servers, routers and stores. A process that does not answer is included with the reason.
///
/// # Errors
/// Fails if certificates are invalid, or if a name begins with `https://` and no authority is configured.
pub fn ask(asking: &Targets) -> Result<Observed> {
    let (secure, plain) = (Probe::open(&asking.tls)?, Probe::open(&ServersTls::default())?);
    let all = asking.servers.iter().chain(&asking.routers);
    if let Some(name) = all.filter(|_| !secure.is_secure()).find(|name| name.starts_with(HTTPS)) {
        return Err(Error::invalid(format!("{name}: expected a certificate authority to verify it (`--ca`)")));
    }
    let asker = Client { secure, plain, key: asking.key.clone() };
    let runtime = tasks::CALLS.runtime_here(|builder| builder.enable_all())?;
    let (servers, routers) = runtime.block_on(async {
        let (servers, routers) = (places(&asking.servers), places(&asking.routers));
        let servers = stream::iter(&servers).map(|place| asker.server(place)).buffered(TOGETHER).collect().await;
        let routers = stream::iter(&routers).map(|place| asker.router(place)).buffered(TOGETHER).collect().await;
        (servers, routers)
    });
    Ok(Observed { servers, routers, stores: asking.stores.iter().map(stored).collect() })
}

/// Prefixes of addresses that select TLS or plain HTTP, regardless of a configured authority.
const HTTPS: &str = "https://";
const HTTP: &str = "http://";

/// Strips the scheme from an address.
pub fn host_and_port(name: &str) -> &str {
    name.strip_prefix(HTTPS).or(name.strip_prefix(HTTP)).unwrap_or(name)
}

/// Name and address of a server, or the reason why it has no address.
struct ProcessAddress {
    name: String,
    /// Host as the operator named it; the certificate must be valid for it.
    host: String,
    /// True if the scheme selects TLS; `None` without a scheme.
    is_secure: Option<bool>,
    address: Result<SocketAddr>,
}

/// Resolves names to addresses.
fn places(names: &[String]) -> Vec<ProcessAddress> {
    let mut places = Vec::new();
    for name in names {
        let is_secure = (name.starts_with(HTTPS) || name.starts_with(HTTP)).then(|| name.starts_with(HTTPS));
        let server = host_and_port(name);
        let host = server.rsplit_once(':').map_or(server, |(host, _)| host).trim_matches(['[', ']']);
        let place = |name: String, address| ProcessAddress { name, host: host.to_owned(), is_secure, address };
        match server.to_socket_addrs() {
            Ok(found) => {
                let reported = |address: SocketAddr| match address.to_string() {
                    same if same == *server => same,
                    other => format!("{other} ({server})"),
                };
                let before = places.len();
                places.extend(found.map(|address| place(reported(address), Ok(address))));
                if places.len() == before {
                    let address = Err(Error::unavailable("the name resolves to no address"));
                    places.push(place(server.to_owned(), address));
                }
            }
            Err(e) => {
                let address = Err(Error::unavailable(format!("the name cannot be resolved: {e}")));
                places.push(place(server.to_owned(), address));
            }
        }
    }
    places
}

struct Client {
    secure: Probe,
    plain: Probe,
    key: Option<String>,
}

impl Client {
    /// Prepares requests to a server. The key is sent in clear over a network only if the operator chose `http://`, and not
    /// before the server has answered in plain HTTP: a server that expects TLS must not receive it.
    async fn begin<'a>(&'a self, place: &'a ProcessAddress) -> Result<Questions<'a>> {
        let address = *place.address.as_ref().map_err(Error::again)?;
        let server = (address, &*place.host);
        let (is_secure, key) = (place.is_secure.unwrap_or(self.secure.is_secure()), self.key.as_deref());
        if !is_secure && key.is_some() {
            if place.is_secure.is_none() && !address.ip().is_loopback() {
                return Err(Error::unavailable(format!(
                    "not queried, because the key would be sent unencrypted: expected `--ca` for TLS, or \
                     `{HTTP}HOST:PORT` to send it anyway"
                )));
            }
            let said = self.plain.get(server, None, "/livez", ANSWER_TIMEOUT).await;
            said.map_err(|e| {
                e.within("no answer in plain HTTP, so that the key was not sent; is it a server with TLS (`--ca`)?")
            })?;
        }
        Ok(Questions { probe: if is_secure { &self.secure } else { &self.plain }, server, key })
    }

    async fn server(&self, place: &ProcessAddress) -> ServerSeen {
        let name = place.name.clone();
        match self.answering(place).await {
            Ok(seen) => ServerSeen { name, ..seen },
            Err(e) => ServerSeen { name, why: Some(e.to_string()), ..ServerSeen::default() },
        }
    }

    async fn answering(&self, place: &ProcessAddress) -> Result<ServerSeen> {
        let ask = self.begin(place).await?;
        let (is_ready, why, warnings) = ask.ready().await?;
        let holdings: Holdings = read(&ask.reported(PARTS_PATH).await?)?;
        let mut seen = ServerSeen { is_ready, why, warnings, ..ServerSeen::default() };
        for part in holdings.parts {
            let (mut position, mut lag) = (None, None);
            if part.is_active {
                // A server without updates has no position.
                let path = format!("/v1/models/{}/items:position", part.model);
                if let Ok(PositionResponse { served, durable, .. }) = ask.json(&path).await {
                    (position, lag) = (Some(served.position), Some(durable.saturating_sub(served.position)));
                }
                let path = format!("/v1/models/{}/versions", part.model);
                match ask.json::<VersionList>(&path).await {
                    Ok(states) => {
                        let refused = states.versions.into_iter();
                        seen.refused.extend(refused.filter_map(|v| Some((part.model.clone(), v.version, v.refused?))));
                    }
                    // The store of a server may be unreachable without effect on its requests.
                    Err(e) => seen.warnings.push(format!("model `{}`: its versions are not reported: {e}", part.model)),
                }
            }
            seen.parts.push(PartSeen {
                model: part.model,
                version: part.version,
                digest: part.digest,
                shard: part.shard,
                shards: part.shards,
                is_active: part.is_active,
                labels: part.labels,
                position,
                lag,
            });
        }
        Ok(seen)
    }

    async fn router(&self, place: &ProcessAddress) -> RouterSeen {
        let name = place.name.clone();
        match self.routing(place).await {
            Ok(seen) => RouterSeen { name, ..seen },
            Err(e) => RouterSeen { name, why: Some(e.to_string()), ..RouterSeen::default() },
        }
    }

    async fn routing(&self, place: &ProcessAddress) -> Result<RouterSeen> {
        let ask = self.begin(place).await?;
        let (is_ready, why, mut warnings) = ask.ready().await?;
        let models: ModelList = ask.json("/v1/models").await?;
        let absent = models.unavailable.into_iter().map(|model| (format!("model `{}`: ", model.name), model.reason));
        // For callers that may see all models, `/readyz` has already reported models that lack servers.
        let fails = |model: &str| format!("{model}requests fail: ");
        let is_told = |model: &str| !is_ready || warnings.iter().any(|warning| warning.starts_with(&fails(model)));
        let untold: Vec<String> =
            absent.filter(|(model, _)| !is_told(model)).map(|(model, why)| model + &why).collect();
        warnings.extend(untold);
        let active = models.models.into_iter().map(|model| (model.name, (model.version, model.digest)));
        Ok(RouterSeen { is_ready, why, warnings, active: active.collect(), ..RouterSeen::default() })
    }
}

/// Server or router to query, with the client and the key for the queries.
struct Questions<'a> {
    probe: &'a Probe,
    server: (SocketAddr, &'a str),
    key: Option<&'a str>,
}

impl Questions<'_> {
    /// Requests a path, and returns status and body of the answer.
    async fn get(&self, path: &str) -> Result<(u16, Bytes)> {
        self.probe.get(self.server, self.key, path, ANSWER_TIMEOUT).await
    }

    /// Requests a path, and returns the body if the status is 200.
    async fn reported(&self, path: &str) -> Result<Bytes> {
        match self.get(path).await? {
            (200, body) => Ok(body),
            (status, body) => Err(Error::unavailable(refusal(status, &body))),
        }
    }

    async fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let body = self.reported(path).await?;
        serde_json::from_slice(&body)
            .map_err(|e| Error::unavailable(format!("{path}: not an answer of a Sterling server: {e}")))
    }

    /// Returns whether the server is ready, the reason if it is not, and its warnings.
    async fn ready(&self) -> Result<(bool, Option<String>, Vec<String>)> {
        let (status, body) = self.get("/readyz").await?;
        if status != 200 {
            return Ok((false, Some(refusal(status, &body)), Vec::new()));
        }
        let text = String::from_utf8_lossy(&body);
        Ok((true, None, text.lines().filter_map(|line| line.strip_prefix("warning: ")).map(str::to_owned).collect()))
    }
}

/// Formats a rejection from its status and body.
fn refusal(status: u16, body: &[u8]) -> String {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => format!("{status}: {}", problem.detail),
        Err(_) => format!("the process answers with status {status}"),
    }
}

fn stored(store: &Store) -> StoreSeen {
    match store.renew().and_then(|()| models(store)) {
        Ok(models) => StoreSeen { name: store.name(), why: None, models },
        Err(e) => StoreSeen { name: store.name(), why: Some(e.to_string()), models: Default::default() },
    }
}

fn models(store: &Store) -> Result<BTreeMap<String, ModelSeen>> {
    let names: BTreeSet<String> = store.models()?.into_iter().chain(store.sharded_models()?).collect();
    let seen = |name: String| {
        let (complete, cut, desired_state) =
            (store.versions(&name)?, store.sharded_versions(&name)?, store.desired_state(&name)?);
        let mut all: Vec<u64> = complete.iter().chain(&cut).copied().collect();
        all.sort_unstable();
        let mut reported: Vec<u64> = all.iter().rev().take(NEWEST).copied().collect();
        let wished =
            desired_state.version.iter().chain(desired_state.labels.values()).filter(|version| all.contains(version));
        reported.extend(wished);
        let digest = |version: u64| match cut.contains(&version) {
            true => store.shards(&name, version).map(|(shards, _)| (version, shards.digest())),
            false => store.manifest(&name, version).map(|manifest| (version, manifest.digest())),
        };
        // Unreadable versions are skipped: servers reject and report them.
        let versions = reported.into_iter().filter_map(|version| digest(version).ok()).collect();
        let stands = desired_state.version.map(|version| store.successor(&name, version, &complete).0);
        let traffic = desired_state.traffic.reported();
        Ok((name, ModelSeen { versions, wished: desired_state.version, stands, labels: desired_state.labels, traffic }))
    };
    names.into_iter().map(seen).collect()
}
