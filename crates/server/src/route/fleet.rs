//! Servers of a router, and the versions that they have together.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt as _};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};

use super::choice::Group;
use super::client::{Client, Outgoing};
use super::editions::{Edition, Readiness, active, editions, labelled};
use super::inquiry::{FAILED_POLLS_MAX, ReplicaGroup, Replicas};
use super::names::Names;
use super::offering::ShardedVersion;
use super::options::Options;
use super::protocol::{Holdings, Operation, PARTS_PATH, PassReply, Replied, read};
use super::shard_query::{Conditions, Extra, ShardedRequest};
use super::split::{Split, received};
use super::tls::Connector;
use crate::gather::{self, Gathered, ShardAnswer, Sharded as _};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::{Embed, Rank, Retrieve, VersionSelector};
use sterling_core::units::ItemId;
use sterling_rollout::TrafficTarget;

/// Number of servers that are polled concurrently.
const CONCURRENT_POLLS: usize = 64;
/// Timeout of a poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);

/// Server, with its last report.
pub(super) struct Known {
    client: Arc<Client>,
    pub(super) holdings: Holdings,
    /// True if the server has ever answered a poll.
    pub(super) has_answered: bool,
    /// Number of polls in a row without an answer.
    pub(super) in_vain: u32,
    /// Error of the last poll, if it failed.
    pub(super) trouble: Option<String>,
}

impl Known {
    /// Returns whether the server's last report is valid and the server is ready.
    fn is_answering(&self) -> bool {
        self.readiness() == Some(Readiness::Ready)
    }

    /// Returns how the versions that the server reported can be queried; `None` if they cannot.
    pub(super) fn readiness(&self) -> Option<Readiness> {
        let readiness = if self.holdings.is_ready { Readiness::Ready } else { Readiness::Ending };
        (self.has_answered && self.in_vain < FAILED_POLLS_MAX).then_some(readiness)
    }

    /// Returns whether the server answers polls and is ready, so that missing versions are truly absent.
    fn is_healthy(&self) -> bool {
        self.in_vain == 0 && self.holdings.is_ready
    }
}

/// Model: its versions in ascending order, the active one, and its canary and shadow.
#[derive(Default)]
pub(super) struct Model {
    pub(super) versions: Vec<Arc<ShardedVersion>>,
    active: Option<usize>,
    /// True if some shard of the active version is only at servers that are not ready.
    pub(super) is_last_resort: bool,
    pub(super) split: Split,
}

impl Model {
    pub(super) fn active(&self) -> Option<&Arc<ShardedVersion>> {
        self.versions.get(self.active?)
    }
}

/// Version in the list of a model's versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Number of the version.
    pub version: u64,
    /// Hash of the version's bytes.
    pub digest: String,
    /// True if the version is active.
    pub is_active: bool,
    /// True if every shard has enough servers.
    pub is_whole: bool,
    /// Labels that point to the version.
    pub labels: Vec<String>,
}

/// Request to all shards.
#[derive(Clone, Debug)]
pub enum FleetRequest {
    /// Retrieval of the best items.
    Retrieve(Box<Retrieve>),
    /// Scoring of given items.
    Rank(Box<Rank>),
}

/// Servers of a router and their versions.
pub struct Fleet {
    pub(super) options: Options,
    connector: Option<Arc<Connector>>,
    pub(super) known: Mutex<BTreeMap<SocketAddr, Known>>,
    names: Names,
    pub(super) groups: Mutex<BTreeMap<(String, usize, usize), Arc<Replicas>>>,
    pub(super) models: ArcSwap<BTreeMap<String, Model>>,
    pub(super) has_polled: AtomicBool,
    /// Notification that requests an early poll.
    wanted: Notify,
    pub(super) looked: Notify,
    requests: Semaphore,
    turn: AtomicUsize,
    pub(super) origin: Instant,
}

impl Fleet {
    /// Creates a fleet whose servers have not been polled yet.
    ///
    /// # Errors
    /// Fails if the configured certificates are invalid.
    pub fn open(options: Options) -> Result<Self> {
        let connector = Connector::open(&options.tls).map_err(|e| e.within("route"))?.map(Arc::new);
        Ok(Fleet {
            connector,
            requests: Semaphore::new(options.requests),
            options,
            known: Mutex::default(),
            names: Names::default(),
            groups: Mutex::default(),
            models: ArcSwap::default(),
            has_polled: AtomicBool::new(false),
            wanted: Notify::new(),
            looked: Notify::new(),
            turn: AtomicUsize::new(0),
            origin: Instant::now(),
        })
    }

    /// Returns the configuration of the router.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Polls the servers forever; the first poll is immediate, unless they have been polled before.
    pub async fn watch(&self) -> Infallible {
        if !self.has_polled.load(Ordering::Relaxed) {
            self.look().await;
        }
        loop {
            let pause = Duration::from_millis(self.options.refresh_ms);
            // Waits for a notification or the pause, whichever ends first.
            let _ = timeout(pause, self.wanted.notified()).await;
            self.look().await;
        }
    }

    /// Polls all servers once, and determines the versions.
    pub async fn look(&self) {
        self.resolve().await;
        let clients: Vec<Arc<Client>> = locked(&self.known).values().map(|known| known.client.clone()).collect();
        let wait = Duration::from_millis(2 * self.options.refresh_ms).clamp(POLL_TIMEOUT / 8, POLL_TIMEOUT);
        let parts = Outgoing::pass(PARTS_PATH.into(), None);
        let reported = stream::iter(clients).map(|client| {
            let parts = &parts;
            async move {
                let reported = client.call(parts, Instant::now() + wait).await;
                (client.address(), reported.and_then(|body| read::<Holdings>(&body)))
            }
        });
        let reported: Vec<(SocketAddr, Result<Holdings>)> = reported.buffer_unordered(CONCURRENT_POLLS).collect().await;
        for (address, reported) in reported {
            self.learn(address, reported);
        }
        self.decide();
        self.measure();
        metrics::counter!("sterling_polls_total", "source" => "servers").increment(1);
        self.has_polled.store(true, Ordering::Relaxed);
        self.looked.notify_waiters();
    }

    /// Resolves the names of servers.
    async fn resolve(&self) {
        let there = self.names.resolve(&self.options.servers).await;
        let mut known = locked(&self.known);
        known.retain(|address, _| there.contains_key(address));
        for (address, host) in there {
            let new = || Known {
                client: Arc::new(Client::new(address, &host, &self.options.key, self.connector.clone())),
                holdings: Holdings::default(),
                has_answered: false,
                in_vain: 0,
                trouble: None,
            };
            known.entry(address).or_insert_with(new);
        }
    }

    fn learn(&self, address: SocketAddr, reported: Result<Holdings>) {
        let mut known = locked(&self.known);
        let Some(server) = known.get_mut(&address) else { return };
        match reported {
            Ok(holdings) => {
                if server.in_vain >= FAILED_POLLS_MAX {
                    tracing::info!(server = %address, "server answers again");
                }
                (server.holdings, server.has_answered, server.in_vain) = (holdings, true, 0);
                server.trouble = None;
            }
            Err(error) => {
                server.in_vain = server.in_vain.saturating_add(1);
                server.trouble = Some(error.to_string());
                if server.in_vain == FAILED_POLLS_MAX {
                    tracing::warn!(server = %address, %error, "the server does not answer; it gets no requests until \
                                                               it does");
                    server.client.forget();
                }
            }
        }
    }

    /// Determines versions and active versions from the servers' reports.
    fn decide(&self) {
        let known = locked(&self.known);
        let reported = known.values().filter_map(|server| {
            Some(((server.client.clone(), server.readiness()?), server.holdings.parts.as_slice()))
        });
        let mut found: BTreeMap<String, Vec<_>> = editions(reported)
            .into_iter()
            .map(|(name, of_model)| (name, of_model.into_iter().map(Edition::chosen).collect()))
            .collect();
        let before = self.models.load();
        // A model without servers counts as lost rather than removed, until all servers answer without it.
        let are_healthy = known.values().all(Known::is_healthy);
        for (name, old) in before.iter() {
            if found.contains_key(name) {
                continue;
            }
            match old.active().filter(|answered| !are_healthy || answered.may_answer()) {
                Some(answered) => drop(found.insert(name.clone(), vec![(answered.edition.without_servers(), false)])),
                // A metric cannot be removed; NaN triggers no alert.
                None => metrics::gauge!("sterling_route_coverage_ratio", "model" => name.clone()).set(f64::NAN),
            }
        }
        let received: BTreeSet<SocketAddr> =
            known.iter().filter(|(_, server)| server.in_vain == 0).map(|(address, _)| *address).collect();
        let mut models = BTreeMap::new();
        for (name, of_model) in found {
            let (mut of_model, are_last_resorts): (Vec<_>, Vec<bool>) = of_model.into_iter().unzip();
            let old = before.get(&name);
            let answered = old.and_then(|old| old.versions.get(old.active?));
            let answered_as = answered.map(|served| (served.edition.version, served.edition.digest.clone()));
            if let Some(answered) = answered
                && let Some(same) =
                    of_model.iter_mut().find(|e| answered_as.as_ref().is_some_and(|before| e.is(before)))
            {
                // Lost shards keep their last known number of items.
                same.items.clone_from(&answered.edition.items);
            }
            let active = active(&of_model, self.options.min_replicas, answered_as.as_ref());
            let is_new = active.is_some_and(|n| answered_as.as_ref().is_none_or(|before| !of_model[n].is(before)));
            if let Some(n) = active.filter(|_| is_new) {
                let (version, digest) = (of_model[n].version, &of_model[n].digest);
                tracing::info!(model = name, version, digest, "every shard has the version; it is active now");
                sterling_telemetry::begin_model(&name);
                metrics::gauge!("sterling_model_version", "model" => name.clone()).set(version as f64);
            }
            let old_versions = old.map_or(&[][..], |old| &old.versions);
            let versions: Vec<Arc<ShardedVersion>> =
                of_model.into_iter().map(|edition| Arc::new(self.served(edition, old_versions, &received))).collect();
            let is_last_resort = active.is_some_and(|n| are_last_resorts[n]);
            let mut model = Model { versions, active, is_last_resort, split: Split::default() };
            model.split = self.split(&name, &model, &known, old.map(|old| &old.split));
            models.insert(name, model);
        }
        drop(known);
        let used: BTreeMap<(String, usize, usize), BTreeSet<SocketAddr>> = homes(&models);
        let mut groups = locked(&self.groups);
        groups.retain(|key, _| used.contains_key(key));
        for (key, group) in groups.iter() {
            locked(group).keep(|address| used[key].contains(address));
        }
        drop(groups);
        self.models.store(Arc::new(models));
    }

    /// Determines canary and shadow of a model from the reports of answering servers.
    fn split(&self, name: &str, model: &Model, known: &BTreeMap<SocketAddr, Known>, before: Option<&Split>) -> Split {
        let answering = known.values().filter(|server| server.is_answering());
        let wished = answering.flat_map(|server| &server.holdings.wished).filter(|wished| wished.model == name);
        let least = self.options.min_replicas;
        let complete = |target: TrafficTarget<'_>| {
            let versions = || model.versions.iter();
            match target {
                TrafficTarget::Version(version) => {
                    versions().find(|served| served.version() == version && served.edition.fewest() >= least)
                }
                TrafficTarget::Label(label) => {
                    let of_label = labelled(versions().map(|served| &served.edition), least, label);
                    of_label.and_then(|n| model.versions.get(n))
                }
            }
        };
        Split::of(name, received(wished), before, (model.active(), complete))
    }

    /// Creates the servable form of a version. Requests in progress on the same version of `before` also see its new servers,
    /// and whether one of these is in `received`, the servers that answered the last poll.
    fn served(
        &self,
        edition: Edition<Arc<Client>>,
        before: &[Arc<ShardedVersion>],
        received: &BTreeSet<SocketAddr>,
    ) -> ShardedVersion {
        let shards = edition.replicas.len();
        let is_same =
            |other: &ShardedVersion| (other.version(), other.digest()) == (edition.version, edition.digest.as_str());
        if let Some(same) = before.iter().find(|other| is_same(other) && other.shards() == shards) {
            for (home, servers) in same.homes.iter().zip(&edition.replicas) {
                home.found(servers.clone(), servers.iter().any(|server| received.contains(&server.address())));
            }
            return ShardedVersion { homes: same.homes.clone(), edition };
        }
        let mut groups = locked(&self.groups);
        let homes = edition.replicas.iter().enumerate().map(|(shard, servers)| {
            let seed = self.origin.elapsed().as_nanos() as u64 ^ (shard as u64) << 48;
            let group = groups.entry((edition.model.clone(), shards, shard));
            let group = group.or_insert_with(|| Arc::new(Mutex::new(Group::new(seed)))).clone();
            ReplicaGroup::new(servers.clone(), group)
        });
        ShardedVersion { homes: homes.collect(), edition }
    }

    /// Names of all models, whether they answer or not.
    pub fn models(&self) -> Vec<String> {
        self.models.load().keys().cloned().collect()
    }

    /// Lists the versions of a model.
    ///
    /// # Errors
    /// `NotFound` for an unknown model.
    pub fn versions(&self, name: &str) -> Result<Vec<Listed>> {
        self.of_model(name, |model| {
            let listed = |(n, served): (usize, &Arc<ShardedVersion>)| Listed {
                version: served.edition.version,
                digest: served.edition.digest.clone(),
                is_active: model.active == Some(n),
                is_whole: served.edition.fewest() >= self.options.min_replicas,
                labels: served.edition.labels.keys().cloned().collect(),
            };
            Ok(model.versions.iter().enumerate().map(listed).collect())
        })
    }

    /// Returns whether models are known, but none has this name.
    pub fn lacks(&self, name: &str) -> bool {
        let models = self.models.load();
        !models.is_empty() && !models.contains_key(name)
    }

    pub(super) fn of_model<R>(&self, name: &str, read: impl FnOnce(&Model) -> Result<R>) -> Result<R> {
        let models = self.models.load();
        let Some(model) = models.get(name) else {
            // If no model is known, servers may have the requested model without having reported it.
            if models.is_empty() {
                self.ready()?;
            }
            let known: Vec<&str> = models.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(Error::not_found(format!("model `{name}` is not served here; there are: {known}")));
        };
        read(model).map_err(|e| e.within(format_args!("model `{name}`")))
    }

    /// Returns the version that a request selects.
    ///
    /// # Errors
    /// `NotFound` if there is no such model, version or label; `NotReady` if not every shard has the version.
    pub fn get(&self, name: &str, pin: VersionSelector<'_>) -> Result<Arc<ShardedVersion>> {
        let least = self.options.min_replicas;
        self.of_model(name, |model| match pin {
            VersionSelector::Active => {
                model.active().cloned().ok_or_else(|| Error::not_ready(self.without_active(model)))
            }
            VersionSelector::Version(version) => {
                let of_number = || model.versions.iter().filter(|served| served.edition.version == version);
                let is_active = |served: &Arc<ShardedVersion>| {
                    model.active.is_some_and(|n| Arc::ptr_eq(&model.versions[n], served))
                };
                let found = of_number().find(|served| is_active(served) || served.edition.fewest() >= least);
                found.cloned().ok_or_else(|| match of_number().next() {
                    Some(_) => {
                        Error::not_ready(format!("version {version} has fewer than {least} servers for some shard"))
                    }
                    None => Error::not_found(format!("no server has version {version} in memory")),
                })
            }
            VersionSelector::Label(label) => {
                let of_label = labelled(model.versions.iter().map(|served| &served.edition), least, label);
                of_label.and_then(|n| model.versions.get(n)).cloned().ok_or_else(|| {
                    Error::not_found(format!("label `{label}` points to no version that every shard has"))
                })
            }
        })
    }

    fn asking<'a>(&'a self, served: &'a ShardedVersion, terms: Conditions) -> ShardedRequest<'a> {
        let views = terms.views.as_ref().map(|views| Mutex::new(views.iter().copied().enumerate().collect()));
        ShardedRequest {
            edition: &served.edition,
            homes: &served.homes,
            terms,
            views,
            past: OnceLock::new(),
            origin: self.origin,
            looked: &self.looked,
            turn: self.turn.fetch_add(1, Ordering::Relaxed) % served.homes.len().max(1),
            is_gone: AtomicBool::new(false),
        }
    }

    /// Queries all shards of a version. If a shard no longer has the version, the whole request is repeated once at the version
    /// that `pin` selects by then.
    ///
    /// # Errors
    /// Those of [`gather::retrieve`]; `Overloaded` if too many requests are in progress; `Gone` for a page whose view no longer
    /// exists at a shard.
    pub async fn work(
        &self,
        name: &str,
        (chosen, pin): (Arc<ShardedVersion>, VersionSelector<'_>),
        work: FleetRequest,
        terms: Conditions,
    ) -> Result<(Arc<ShardedVersion>, Gathered<Extra>)> {
        let _place = self.place()?;
        let mut served = self.with_current_servers(name, chosen);
        for is_again in [false, true] {
            let asking = self.asking(&served, terms.clone());
            let done = match work.clone() {
                FleetRequest::Retrieve(retrieve) => gather::retrieve(&asking, *retrieve, terms.min_coverage).await,
                FleetRequest::Rank(rank) => gather::rank(&asking, *rank, terms.min_coverage).await,
            };
            let is_gone = asking.is_gone.load(Ordering::Relaxed);
            match done {
                Err(error) if is_gone && !is_again => {
                    served = self.other(name, pin, &served, terms.deadline).await.ok_or(error)?
                }
                Err(error) => return Err(asking.past.get().map_or(error, |why| Error::gone(why.clone()))),
                Ok(gathered) => return Ok((served, gathered)),
            }
        }
        Err(Error::internal("a request was repeated more than once"))
    }

    /// Returns a version with its current servers, if they are known.
    fn with_current_servers(&self, name: &str, served: Arc<ShardedVersion>) -> Arc<ShardedVersion> {
        let models = self.models.load();
        let same = models.get(name).and_then(|model| model.versions.iter().find(|other| other.is_same(&served)));
        same.cloned().unwrap_or(served)
    }

    /// Returns the version to use after a shard lacked the chosen one: another version, or the same at other servers.
    async fn other(
        &self,
        name: &str,
        pin: VersionSelector<'_>,
        gone: &Arc<ShardedVersion>,
        deadline: Instant,
    ) -> Option<Arc<ShardedVersion>> {
        let looked = self.looked.notified();
        self.wanted.notify_one();
        let left = deadline.saturating_duration_since(Instant::now());
        timeout(left / 2, looked).await.ok()?;
        self.get(name, pin).ok().filter(|served| !Arc::ptr_eq(served, gone))
    }

    /// Runs the user tower of a version; if no shard has the version any more, of the version that `pin` selects by then.
    ///
    /// # Errors
    /// Those of [`gather::embed`].
    pub async fn embed(
        &self,
        name: &str,
        (chosen, pin): (Arc<ShardedVersion>, VersionSelector<'_>),
        embed: Embed,
        terms: Conditions,
    ) -> Result<(Arc<ShardedVersion>, ShardAnswer<Extra>)> {
        let _place = self.place()?;
        let served = self.with_current_servers(name, chosen);
        let asking = self.asking(&served, terms.clone());
        match gather::embed(&asking, embed.clone()).await {
            Err(error) if asking.is_gone.load(Ordering::Relaxed) => {
                let other = self.other(name, pin, &served, terms.deadline).await.ok_or(error)?;
                let said = gather::embed(&self.asking(&other, terms), embed).await?;
                Ok((other, said))
            }
            said => said.map(|said| (served.clone(), said)),
        }
    }

    /// Returns the attributes of an item in JSON, and the update position of the view.
    ///
    /// # Errors
    /// `NotFound` if the item's shard does not hold the item.
    pub async fn item(
        &self,
        name: &str,
        item: ItemId,
        terms: Conditions,
    ) -> Result<(Arc<ShardedVersion>, String, u64)> {
        let _place = self.place()?;
        let served = self.get(name, VersionSelector::Active)?;
        let asking = self.asking(&served, terms);
        let (reply, ..) = asking.reply(asking.home(item), &asking.write(Operation::Item(item))).await?;
        let position = reply.view.position;
        match reply.given {
            Replied::Text(Some(attributes)) => Ok((served, attributes, position)),
            Replied::Text(None) => {
                Err(Error::not_found(format!("model `{name}` holds no item {item} at position {position}")))
            }
            Replied::Pass { .. } => Err(Error::internal("a shard sent search results, expected an item")),
        }
    }

    /// Returns each shard's description of a version in JSON, or its error, in the order of the shards.
    ///
    /// # Errors
    /// As [`Fleet::get`].
    pub async fn reported(
        &self,
        name: &str,
        pin: VersionSelector<'_>,
        terms: Conditions,
    ) -> Result<(Arc<ShardedVersion>, Vec<Result<String>>)> {
        let served = self.get(name, pin)?;
        let asking = self.asking(&served, terms);
        let call = asking.write(Operation::Model);
        let reported = join_all((0..served.homes.len()).map(|shard| asking.reply(shard, &call))).await;
        let text = |said: Result<(PassReply, Arc<Client>, Duration)>| match said?.0.given {
            Replied::Text(Some(text)) => Ok(text),
            Replied::Text(None) | Replied::Pass { .. } => {
                Err(Error::internal("a shard sent no description of its version, expected one"))
            }
        };
        Ok((served, reported.into_iter().map(text).collect()))
    }

    pub(super) fn place(&self) -> Result<tokio::sync::SemaphorePermit<'_>> {
        self.requests
            .try_acquire()
            .map_err(|_| Error::overloaded(format!("{} requests are running, try again later", self.options.requests)))
    }

    /// Checks whether one more request would be admitted.
    ///
    /// # Errors
    /// As [`Fleet::work`].
    pub fn admits(&self) -> Result<()> {
        self.place().map(drop)
    }
}

/// Servers of each shard of each model, over all versions.
fn homes(models: &BTreeMap<String, Model>) -> BTreeMap<(String, usize, usize), BTreeSet<SocketAddr>> {
    let mut homes: BTreeMap<(String, usize, usize), BTreeSet<SocketAddr>> = BTreeMap::new();
    for (name, model) in models {
        for served in &model.versions {
            for (shard, home) in served.homes.iter().enumerate() {
                let servers = homes.entry((name.clone(), served.homes.len(), shard)).or_default();
                servers.extend(home.servers().iter().map(|server| server.address()));
            }
        }
    }
    homes
}
