//! Servers of a router: selects versions and sends requests to their shards. `poll` determines the versions.

mod poll;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};

use super::client::Client;
use super::editions::{Readiness, labelled};
use super::inquiry::{FAILED_POLLS_MAX, Replicas};
use super::names::Names;
use super::offering::ShardedVersion;
use super::options::Options;
use super::protocol::{Holdings, Operation, PassReply, Replied};
use super::shard_query::{Conditions, Extra, ShardedRequest};
use super::split::Split;
use super::tls::Connector;
use crate::gather::{self, Gathered, ShardAnswer, Sharded as _};
use sterling_core::error::{Error, Result};
use sterling_core::request::{Embed, Rank, Retrieve, VersionSelector};
use sterling_core::units::ItemId;

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
