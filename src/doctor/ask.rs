//! Asking servers, routers and stores what they have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::{ModelSeen, Observed, PartSeen, RouterSeen, ServerSeen, StoreSeen};
use crate::error::{Error, Result};
use crate::http::wire::{ModelList, PositionResponse, Problem, VersionList};
use crate::route::protocol::{Holdings, MEDIA_TYPE, PARTS_PATH, read};
use crate::snapshot::Store;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Servers that are asked side by side.
const TOGETHER: usize = 32;
/// Of each model so many of the newest versions are told.
const NEWEST: usize = 5;

/// Whom to ask.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    /// Servers, each as `HOST:PORT`, a name standing for all of its addresses.
    pub servers: Vec<String>,
    /// Routers, in the same way.
    pub routers: Vec<String>,
    /// Stores.
    pub stores: Vec<Store>,
    /// The key that servers and routers ask for.
    pub key: Option<String>,
}

/// Asks all of them.
///
/// # Errors
/// `Internal` alone: whatever does not answer is told as such.
pub fn ask(asking: &Asking) -> Result<Observed> {
    let agent =
        ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build().new_agent();
    let asker = Asker { agent, key: asking.key.clone() };
    let servers = each(&places(&asking.servers), |place| asker.server(place));
    let routers = each(&places(&asking.routers), |place| asker.router(place));
    Ok(Observed { servers: servers?, routers: routers?, stores: asking.stores.iter().map(stored).collect() })
}

/// A server's name and address, or why it has none.
struct Place {
    name: String,
    address: Result<SocketAddr>,
}

/// The addresses that names stand for.
fn places(names: &[String]) -> Vec<Place> {
    let mut places = Vec::new();
    for name in names {
        match name.to_socket_addrs() {
            Ok(found) => {
                let told = |address: SocketAddr| match address.to_string() {
                    same if same == *name => same,
                    other => format!("{other} ({name})"),
                };
                let before = places.len();
                places.extend(found.map(|address| Place { name: told(address), address: Ok(address) }));
                if places.len() == before {
                    let address = Err(Error::unavailable("the name stands for no address"));
                    places.push(Place { name: name.clone(), address });
                }
            }
            Err(e) => {
                let address = Err(Error::unavailable(format!("the name cannot be resolved: {e}")));
                places.push(Place { name: name.clone(), address });
            }
        }
    }
    places
}

/// Asks several at a time, and keeps their order.
fn each<T: Send>(places: &[Place], question: impl Fn(&Place) -> T + Sync) -> Result<Vec<T>> {
    let mut told = Vec::with_capacity(places.len());
    for some in places.chunks(TOGETHER) {
        let answers = std::thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|place| scope.spawn(|| question(place))).collect();
            asked.into_iter().map(|one| one.join()).collect::<Vec<_>>()
        });
        for answer in answers {
            told.push(answer.map_err(|_| Error::internal("a question broke"))?);
        }
    }
    Ok(told)
}

struct Asker {
    agent: ureq::Agent,
    key: Option<String>,
}

impl Asker {
    /// The status and body that a path answers.
    fn get(&self, place: &Place, path: &str) -> Result<(u16, Vec<u8>)> {
        let address = place.address.as_ref().map_err(Error::again)?;
        let mut request = self.agent.get(format!("http://{address}{path}")).header("content-type", MEDIA_TYPE);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let unanswered = |e: ureq::Error| Error::unavailable(e.to_string());
        let mut answer = request.call().map_err(unanswered)?;
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec().map_err(unanswered)?;
        Ok((answer.status().as_u16(), body))
    }

    /// What a path answers, where it does not refuse.
    fn told(&self, place: &Place, path: &str) -> Result<Vec<u8>> {
        match self.get(place, path)? {
            (200, body) => Ok(body),
            (status, body) => Err(Error::unavailable(refusal(status, &body))),
        }
    }

    fn json<T: DeserializeOwned>(&self, place: &Place, path: &str) -> Result<T> {
        let body = self.told(place, path)?;
        serde_json::from_slice(&body).map_err(|e| Error::unavailable(format!("{path}: not what a server answers: {e}")))
    }

    /// Whether it takes requests, and what it warns of.
    fn ready(&self, place: &Place) -> Result<(bool, Option<String>, Vec<String>)> {
        let (status, body) = self.get(place, "/readyz")?;
        if status != 200 {
            return Ok((false, Some(refusal(status, &body)), Vec::new()));
        }
        let text = String::from_utf8_lossy(&body);
        Ok((true, None, text.lines().filter_map(|line| line.strip_prefix("warning: ")).map(str::to_owned).collect()))
    }

    fn server(&self, place: &Place) -> ServerSeen {
        let name = place.name.clone();
        match self.answering(place) {
            Ok(seen) => ServerSeen { name, ..seen },
            Err(e) => ServerSeen { name, why: Some(e.to_string()), ..ServerSeen::default() },
        }
    }

    fn answering(&self, place: &Place) -> Result<ServerSeen> {
        let (is_ready, why, warnings) = self.ready(place)?;
        let holdings: Holdings = read(&self.told(place, PARTS_PATH)?)?;
        let mut seen = ServerSeen { is_ready, why, warnings, ..ServerSeen::default() };
        for part in holdings.parts {
            let (mut position, mut lag) = (None, None);
            if part.is_active {
                // A server without updates has none to tell.
                let path = format!("/v1/models/{}/items:position", part.model);
                if let Ok(PositionResponse { served, durable, .. }) = self.json(place, &path) {
                    (position, lag) = (Some(served.position), Some(durable.saturating_sub(served.position)));
                }
                let path = format!("/v1/models/{}/versions", part.model);
                let states: VersionList = self.json(place, &path)?;
                let refused =
                    states.versions.into_iter().filter_map(|v| Some((part.model.clone(), v.version, v.refused?)));
                seen.refused.extend(refused);
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

    fn router(&self, place: &Place) -> RouterSeen {
        let asked = self.ready(place).and_then(|(is_ready, why, _)| {
            let models: ModelList = self.json(place, "/v1/models")?;
            let active = models.models.into_iter().map(|model| (model.name, (model.version, model.digest)));
            let untold = models.unavailable.into_iter().next().map(|model| model.reason);
            Ok(RouterSeen { name: place.name.clone(), is_ready, why: why.or(untold), active: active.collect() })
        });
        asked.unwrap_or_else(|e| RouterSeen {
            name: place.name.clone(),
            why: Some(e.to_string()),
            ..RouterSeen::default()
        })
    }
}

/// What a refusal says.
fn refusal(status: u16, body: &[u8]) -> String {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => format!("{status}: {}", problem.detail),
        Err(_) => format!("it answers {status}"),
    }
}

fn stored(store: &Store) -> StoreSeen {
    match store.renew().and_then(|()| models(store)) {
        Ok(models) => StoreSeen { name: store.name(), why: None, models },
        Err(e) => StoreSeen { name: store.name(), why: Some(e.to_string()), models: Default::default() },
    }
}

fn models(store: &Store) -> Result<BTreeMap<String, ModelSeen>> {
    let names: BTreeSet<String> = store.models()?.into_iter().chain(store.cut_models()?).collect();
    let seen = |name: String| {
        let (whole, cut, wish) = (store.versions(&name)?, store.cut_versions(&name)?, store.wish(&name)?);
        let mut all: Vec<u64> = whole.iter().chain(&cut).copied().collect();
        all.sort_unstable();
        let mut told: Vec<u64> = all.iter().rev().take(NEWEST).copied().collect();
        let wished = wish.version.iter().chain(wish.labels.values()).filter(|version| all.contains(version));
        told.extend(wished);
        let digest = |version: u64| match cut.contains(&version) {
            true => store.shards(&name, version).map(|(shards, _)| (version, shards.digest())),
            false => store.manifest(&name, version).map(|manifest| (version, manifest.digest())),
        };
        // A version that cannot be read is one of those that servers refuse, and say so.
        let versions = told.into_iter().filter_map(|version| digest(version).ok()).collect();
        let stands = wish.version.map(|version| store.successor(&name, version));
        let traffic = wish.traffic.told();
        Ok((name, ModelSeen { versions, wished: wish.version, stands, labels: wish.labels, traffic }))
    };
    names.into_iter().map(seen).collect()
}
