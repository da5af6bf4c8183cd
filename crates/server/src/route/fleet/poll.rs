//! Polls the servers of a router, and determines the versions that they have together.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tokio::time::{Instant, timeout};

use super::super::choice::Group;
use super::super::client::{Client, Outgoing};
use super::super::editions::{Edition, active, editions, labelled};
use super::super::inquiry::{FAILED_POLLS_MAX, ReplicaGroup};
use super::super::offering::ShardedVersion;
use super::super::protocol::{Holdings, PARTS_PATH, read};
use super::super::split::{Split, received};
use super::{Fleet, Known, Model};
use sterling_core::error::Result;
use sterling_core::locks::locked;
use sterling_rollout::TrafficTarget;

/// Number of servers that are polled concurrently.
const CONCURRENT_POLLS: usize = 64;
/// Timeout of a poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);

impl Fleet {
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
