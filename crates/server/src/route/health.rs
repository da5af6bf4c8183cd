//! Reports which models of a router answer, and warnings about them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use super::editions::Readiness;
use super::fleet::{Fleet, Known, Model};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// State of a server, as reported by metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Ready,
    /// Ready, but much slower than other replicas.
    Slow,
    NotReady,
    Silent,
}

impl State {
    const ALL: [(State, &str); 4] =
        [(State::Ready, "ready"), (State::Slow, "slow"), (State::NotReady, "not_ready"), (State::Silent, "silent")];
}

impl Fleet {
    /// Checks that some model answers requests that set no coverage bound.
    ///
    /// # Errors
    /// `NotReady` with the reason of each model.
    pub fn ready(&self) -> Result<()> {
        let models = self.models.load();
        let reasons: Vec<String> = models
            .iter()
            .filter_map(|(name, model)| Some(format!("model `{name}`: {}", self.unavailability(model)?)))
            .collect();
        if reasons.len() < models.len() {
            return Ok(());
        }
        if !reasons.is_empty() {
            return Err(Error::not_ready(reasons.join("; ")));
        }
        let known = locked(&self.known);
        let answering = known.values().filter(|server| state(server) == State::Ready).count();
        Err(Error::not_ready(match self.has_polled.load(Ordering::Relaxed) {
            false => "the servers have not been checked yet".into(),
            true => {
                let silent = known.values().find_map(|server| server.trouble.as_deref());
                let why = silent.map(|why| format!(": {why}")).unwrap_or_default();
                format!("{answering} of {} servers are ready, and none has a version{why}", known.len())
            }
        }))
    }

    /// Checks that a model answers requests that set no coverage bound.
    ///
    /// # Errors
    /// `NotFound` for an unknown model; `Unavailable` with the reason.
    pub fn answers(&self, name: &str) -> Result<()> {
        self.of_model(name, |model| match self.unavailability(model) {
            Some(reason) => Err(Error::unavailable(reason)),
            None => Ok(()),
        })
    }

    /// Returns why a model has no active version.
    pub(super) fn without_active(&self, model: &Model) -> String {
        let least = self.options.min_replicas;
        let lacking = model.versions.iter().filter(|served| served.edition.fewest() < least).map(|served| {
            let few = (0..).zip(served.held()).filter(|(_, (_, servers))| *servers < least);
            format!("version {} lacks {}", served.version(), shards(few.map(|(shard, _)| shard)))
        });
        let lacking: Vec<String> = lacking.collect();
        if lacking.is_empty() {
            return "its versions are in memory, and active at no server".into();
        }
        let servers = if least == 1 { "a server".to_owned() } else { format!("{least} servers") };
        format!("no version has {servers} of every shard: {}", lacking.join("; "))
    }

    fn unavailability(&self, model: &Model) -> Option<String> {
        let Some(active) = model.active() else { return Some(self.without_active(model)) };
        let is_lost = active.lost().count() == active.shards();
        (is_lost || active.coverage() < self.options.min_coverage).then(|| {
            let (of, version) = (active.shards(), active.version());
            format!("{} of {of} of version {version} has no server that is ready", shards(active.lost()))
        })
    }

    /// Warnings for operators while the router is ready, one line each.
    pub fn troubles(&self) -> Vec<String> {
        let models = self.models.load();
        let mut troubles = Vec::new();
        for (name, model) in models.iter() {
            let mut tell = |what: String| troubles.push(format!("model `{name}`: {what}"));
            if let Some(why) = self.unavailability(model) {
                tell(format!("requests fail: {why}"));
            } else if let Some(active) = model.active() {
                if active.coverage() < 1.0 {
                    tell(format!("answers lack {}, which has no server that is ready", shards(active.lost())));
                }
                if model.is_last_resort {
                    tell("all servers of a shard report that they are not ready".into());
                }
            }
            let (least, held) = (self.options.min_replicas, model.active().map(|active| active.held()));
            let few = held
                .into_iter()
                .flat_map(|held| (0..).zip(held))
                .filter(|(_, (_, servers))| (1..least).contains(servers));
            few.for_each(|(shard, (_, servers))| {
                tell(format!("shard {shard} has {servers} servers, expected {least} (`route.min_replicas`)"));
            });
            model.split.troubles().into_iter().for_each(&mut tell);
        }
        let slow = self.slow();
        for (address, server) in locked(&self.known).iter() {
            match state(server) {
                State::Silent => {
                    let why = server.trouble.as_deref().unwrap_or("no answer yet");
                    troubles.push(format!("server {address} does not answer: {why}"));
                }
                State::NotReady => troubles.push(format!("server {address} is not ready")),
                State::Ready | State::Slow => {}
            }
            if let Some(times) = slow.get(address) {
                troubles
                    .push(format!("server {address} is {times:.0} times slower than other servers of the same shard"));
            }
        }
        troubles
    }

    /// Servers that are far slower than other replicas, each with its relative latency.
    fn slow(&self) -> BTreeMap<SocketAddr, f64> {
        let now = self.origin.elapsed().as_micros() as u64;
        let mut slow: BTreeMap<SocketAddr, f64> = BTreeMap::new();
        for group in locked(&self.groups).values() {
            for (address, times) in locked(group).slow(now) {
                let most = slow.entry(address).or_insert(times);
                *most = most.max(times);
            }
        }
        slow
    }

    /// Updates the metrics with the result of the last poll.
    pub(super) fn measure(&self) {
        for (name, model) in self.models.load().iter() {
            let coverage = model.active().map_or(0.0, |active| active.coverage());
            metrics::gauge!("sterling_route_coverage_ratio", "model" => name.clone()).set(coverage);
        }
        let slow = self.slow();
        let known = locked(&self.known);
        let of = |(address, server): (&SocketAddr, &Known)| match state(server) {
            State::Ready if slow.contains_key(address) => State::Slow,
            other => other,
        };
        let states: Vec<State> = known.iter().map(of).collect();
        for (state, name) in State::ALL {
            let count = states.iter().filter(|of| **of == state).count();
            metrics::gauge!("sterling_route_servers", "state" => name).set(count as f64);
        }
    }
}

fn state(server: &Known) -> State {
    match server.readiness() {
        None => State::Silent,
        Some(Readiness::Ending) => State::NotReady,
        Some(Readiness::Ready) => State::Ready,
    }
}

/// Formats shard numbers for a message.
fn shards(numbers: impl Iterator<Item = usize>) -> String {
    let numbers: Vec<String> = numbers.map(|number| number.to_string()).collect();
    let word = if numbers.len() == 1 { "shard" } else { "shards" };
    format!("{word} {}", numbers.join(", "))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;
    use crate::route::Options;

    #[tokio::test]
    async fn polled_servers_are_not_polled_again_immediately() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let servers = vec![server.local_addr().unwrap().to_string()];
        // Each look is a connection, which is closed without an answer.
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = looks.clone();
        tokio::spawn(async move {
            while server.accept().await.is_ok() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        for was_looked_at in [true, false] {
            let options = Options { servers: servers.clone(), refresh_ms: 60_000, ..Options::default() };
            let fleet = Fleet::open(options).unwrap();
            if was_looked_at {
                fleet.look().await;
            }
            assert!(timeout(Duration::from_millis(200), fleet.watch()).await.is_err());
            assert_eq!(looks.swap(0, Ordering::Relaxed), 1, "{was_looked_at}");
        }
    }
}
