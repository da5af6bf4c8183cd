//! Forwards updates to the shards of their items.
//!
//! The updates of a shard have one order. The servers of a shard agree on this order only if the updates are in a stream that all
//! of them follow; a shard whose servers keep their own journals may have one server only. A call goes to one server, and to
//! another one only if the first cannot have executed it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::HeaderValue;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::client::{Client, Failed, Outgoing};
use super::fleet::Fleet;
use super::inquiry::ReplicaGroup;
use super::offering::ShardedVersion;
use super::protocol::{Holdings, UpdateStorage, client_header};
use crate::gather::is_absence;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::items::shard_of;
use sterling_core::locks::locked;
use sterling_core::quota::Flow;
use sterling_core::request::{Origin, VersionSelector};
use sterling_core::units::ItemId;

/// Shards of a model's active version, for calls to single shards.
pub struct ShardServers<'a> {
    fleet: &'a Fleet,
    model: String,
    served: Arc<ShardedVersion>,
    /// True if each shard must accept updates in one order.
    writes: bool,
    _place: SemaphorePermit<'a>,
}

/// Call to one shard, in the server's public API.
#[derive(Clone, Debug)]
pub struct ShardCall {
    /// Path and query.
    pub path: String,
    /// Body; `None` for a `GET`.
    pub body: Option<Bytes>,
    /// Content type of the body. The answer is JSON.
    pub media_type: &'static str,
    /// Idempotency key.
    pub key: Option<HeaderValue>,
    /// Id and trace of the call that caused this call.
    pub origin: Origin,
    /// Client of that call.
    pub flow: Flow,
}

/// Failure of a call to a shard.
#[derive(Debug)]
pub struct ShardFailure {
    /// Reason of the failure.
    pub error: Error,
    /// True if the shard may have executed the call.
    pub may_be_applied: bool,
}

impl Fleet {
    /// Returns the shards of a model.
    ///
    /// # Errors
    /// As [`Fleet::get`]; `Overloaded` if too many requests are in progress.
    pub fn shards(&self, model: &str) -> Result<ShardServers<'_>> {
        let (_place, served) = (self.place()?, self.get(model, VersionSelector::Active)?);
        Ok(ShardServers { fleet: self, model: model.into(), served, writes: false, _place })
    }

    /// Returns the shards of a model, if each of them accepts updates in one order.
    ///
    /// # Errors
    /// As [`Fleet::shards`]; `Unsupported` if a server accepts no updates, or keeps its own journal while its shard has other
    /// servers; `NotReady` if a server has not reported its journal yet.
    pub fn writable(&self, model: &str) -> Result<ShardServers<'_>> {
        let shards = ShardServers { writes: true, ..self.shards(model)? };
        (0..shards.count()).try_for_each(|shard| shards.check(shard))?;
        Ok(shards)
    }
}

/// Checks that the servers of a shard agree on one order of its updates. If the shard's server keeps its own journal, a
/// configured server that has never answered makes the result unknown.
fn check(model: &str, (shard, shards): (usize, usize), servers: &[(SocketAddr, Option<&Holdings>)]) -> Result<()> {
    let has_it = |holdings: &Holdings| {
        let mut parts = holdings.parts.iter();
        parts.any(|part| part.model == model && (part.shard as usize, part.shards as usize) == (shard, shards))
    };
    let of_shard: Vec<(SocketAddr, UpdateStorage)> = servers
        .iter()
        .filter_map(|(address, holdings)| Some((*address, (*holdings)?)))
        .filter(|(_, holdings)| has_it(holdings))
        .map(|(address, holdings)| (address, holdings.updates))
        .collect();
    if let Some((address, _)) = of_shard.iter().find(|(_, keeping)| *keeping == UpdateStorage::Nowhere) {
        return Err(Error::unsupported(format!(
            "server {address} accepts no updates; start it with `serve --updates` to accept them"
        )));
    }
    if of_shard.iter().all(|(_, keeping)| *keeping == UpdateStorage::Shared) {
        return Ok(());
    }
    if of_shard.len() > 1 {
        return Err(Error::unsupported(format!(
            "the shard has {} servers with journals of their own, so that they would miss each other's updates: \
             expected one server, or updates in a stream (`--updates nats://...`)",
            of_shard.len()
        )));
    }
    match servers.iter().find(|(_, holdings)| holdings.is_none()) {
        Some((address, _)) => Err(Error::not_ready(format!(
            "each server of the shard has its own journal, and server {address}, which has not answered yet, may be \
             another server of the shard"
        ))),
        None => Ok(()),
    }
}

impl ShardServers<'_> {
    /// Returns the version that answers.
    pub fn served(&self) -> &ShardedVersion {
        &self.served
    }

    /// Returns the number of shards.
    pub fn count(&self) -> usize {
        self.served.homes.len()
    }

    /// Returns the index of the shard that an item belongs to.
    pub fn home(&self, item: ItemId) -> usize {
        shard_of(item, self.count() as u32) as usize
    }

    /// Checks that the servers of a shard agree on one order of updates, according to their last reports.
    fn check(&self, shard: usize) -> Result<()> {
        let known = locked(&self.fleet.known);
        let servers: Vec<(SocketAddr, Option<&Holdings>)> =
            known.iter().map(|(address, server)| (*address, server.has_answered.then_some(&server.holdings))).collect();
        check(&self.model, (shard, self.count()), &servers)
            .map_err(|e| e.within(format_args!("shard {shard} of model `{}`", self.model)))
    }

    /// Sends a call to one server of a shard, and to others as long as none can have executed it. If no server is reachable or
    /// ready, retries after the next poll until the deadline, or until all of them count as lost.
    ///
    /// # Errors
    /// The failure of the last queried server.
    pub async fn ask(&self, shard: usize, call: ShardCall, deadline: Instant) -> Result<Bytes, ShardFailure> {
        let home = &self.served.homes[shard];
        let ShardCall { path, body, media_type, key, origin, flow } = call;
        let headers = client_header(flow).into_iter().collect();
        let call = Outgoing { headers, origin, ..Outgoing::plain(path, (body, media_type), key) };
        loop {
            let looked = self.fleet.looked.notified();
            let failure = match self.round(shard, &call, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let may_wait = !failure.may_be_applied
                && !failure.error.is_unapplied()
                && matches!(failure.error.kind(), Kind::Unavailable | Kind::NotReady);
            if !may_wait || timeout_at(deadline, looked).await.is_err() || !home.may_answer() {
                return Err(failure);
            }
            if self.writes {
                // Servers that appeared in the meantime may not have been checked.
                self.check(shard).map_err(|error| ShardFailure { error, may_be_applied: false })?;
            }
        }
    }

    /// Sends the call to each server of a shard once at most.
    async fn round(&self, shard: usize, call: &Outgoing, deadline: Instant) -> Result<Bytes, ShardFailure> {
        let home = &self.served.homes[shard];
        let none = Error::unavailable(format!("shard {shard} has no server"));
        let mut last = ShardFailure { error: none, may_be_applied: false };
        let mut rest = home.servers().to_vec();
        while let Some(server) = self.next(home, &mut rest) {
            let Failed { error, may_be_applied } = match server.try_call(call, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            let is_absent = is_absence(error.kind());
            last = ShardFailure { error, may_be_applied };
            // A server that reports that it wrote nothing has already waited for the broker, which the other servers
            // use too.
            if may_be_applied || !is_absent || last.error.is_unapplied() {
                break;
            }
        }
        Err(last)
    }

    /// Selects another server of a shard, preferring the one with the lowest load.
    fn next(&self, home: &ReplicaGroup, rest: &mut Vec<Arc<Client>>) -> Option<Arc<Client>> {
        let among: Vec<_> = rest.iter().map(|server| server.address()).collect();
        let now = self.fleet.origin.elapsed().as_micros() as u64;
        let chosen = locked(&home.group).choose(&among, now)?;
        Some(rest.swap_remove(among.iter().position(|address| *address == chosen)?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::protocol::Holding;
    use super::*;

    fn server(updates: UpdateStorage, shard: u32) -> Holdings {
        let part = Holding { model: "m".into(), shard, shards: 2, ..Holding::default() };
        Holdings { is_ready: true, updates, parts: vec![part], ..Holdings::default() }
    }

    #[test]
    fn shards_are_written_to_where_all_of_their_servers_see_it() {
        use UpdateStorage::{Alone, Nowhere, Shared};
        let of = |servers: &[Option<(UpdateStorage, u32)>]| {
            let holdings: Vec<Option<Holdings>> =
                servers.iter().map(|one| one.map(|(keeping, shard)| server(keeping, shard))).collect();
            let address = |n: usize| SocketAddr::from(([127, 0, 0, 1], n as u16 + 1));
            let servers: Vec<_> = holdings.iter().enumerate().map(|(n, one)| (address(n), one.as_ref())).collect();
            check("m", (0, 2), &servers).map_err(|e| (e.kind(), e.to_string()))
        };
        assert!(of(&[Some((Alone, 0)), Some((Alone, 1))]).is_ok());
        assert!(of(&[Some((Shared, 0)), Some((Shared, 0)), Some((Nowhere, 1)), None]).is_ok());
        for (servers, kind, reported) in [
            (&[Some((Nowhere, 0)), Some((Alone, 1))][..], Kind::Unsupported, "accepts no updates"),
            (&[Some((Shared, 0)), Some((Nowhere, 0))], Kind::Unsupported, "server 127.0.0.1:2 accepts no updates"),
            (&[Some((Alone, 0)), Some((Alone, 0))], Kind::Unsupported, "2 servers with journals of their own"),
            (&[Some((Alone, 0)), Some((Shared, 0))], Kind::Unsupported, "2 servers"),
            (&[Some((Alone, 0)), None], Kind::NotReady, "server 127.0.0.1:2, which has not answered yet"),
        ] {
            let (found, why) = of(servers).unwrap_err();
            assert!(found == kind && why.contains(reported), "{why}");
        }
    }
}
