//! Updates on their way to the shards that their items belong to.
//!
//! A shard has one order of updates. Its servers agree on it only where it lies in a stream that all of them follow; where they keep
//! journals of their own there may be one server. A call goes to one server, and to another one only where nothing can have been done.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::HeaderValue;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::client::{Client, Failed, Outgoing};
use super::fleet::Fleet;
use super::inquiry::Home;
use super::offering::Offering;
use super::protocol::{Holdings, Keeping};
use crate::gather::is_absence;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::request::{Origin, Which};
use sterling_core::units::ItemId;
use sterling_snapshot::shard_of;

/// The shards of the version of a model that answers, as each of them is asked by itself.
pub struct ShardServers<'a> {
    fleet: &'a Fleet,
    model: String,
    served: Arc<Offering>,
    /// Whether each of them must take updates in one order.
    writes: bool,
    _place: SemaphorePermit<'a>,
}

/// A call to one shard, as anybody could make it of its server.
#[derive(Clone, Debug)]
pub struct ShardCall {
    /// Path and query.
    pub path: String,
    /// None to ask for what lies at the path.
    pub body: Option<Bytes>,
    /// What the body is written in. The answer is JSON.
    pub media_type: &'static str,
    /// The idempotency key.
    pub key: Option<HeaderValue>,
    /// What it is made for.
    pub origin: Origin,
}

/// Why a shard did not do what it was told.
#[derive(Debug)]
pub struct ShardFailure {
    /// What went wrong.
    pub error: Error,
    /// True where it is not known whether it was done.
    pub may_be_applied: bool,
}

impl Fleet {
    /// The shards of a model.
    ///
    /// # Errors
    /// As [`Fleet::get`]; `Overloaded` where too many requests are worked on.
    pub fn shards(&self, model: &str) -> Result<ShardServers<'_>> {
        let (_place, served) = (self.place()?, self.get(model, Which::Active)?);
        Ok(ShardServers { fleet: self, model: model.into(), served, writes: false, _place })
    }

    /// The shards of a model, each of which takes updates in one order.
    ///
    /// # Errors
    /// As [`Fleet::shards`]; `Unsupported` where a server takes none, or keeps a journal of its own beside another one of its shard;
    /// `NotReady` where that cannot be told yet.
    pub fn writable(&self, model: &str) -> Result<ShardServers<'_>> {
        let shards = ShardServers { writes: true, ..self.shards(model)? };
        (0..shards.count()).try_for_each(|shard| shards.check(shard))?;
        Ok(shards)
    }
}

/// Whether the servers of a shard agree on one order of its updates, of those that a router was told of; nothing is known of those that
/// have never answered.
fn check(model: &str, (shard, shards): (usize, usize), servers: &[(SocketAddr, Option<&Holdings>)]) -> Result<()> {
    let has_it = |holdings: &Holdings| {
        let mut parts = holdings.parts.iter();
        parts.any(|part| part.model == model && (part.shard as usize, part.shards as usize) == (shard, shards))
    };
    let of_shard: Vec<(SocketAddr, Keeping)> = servers
        .iter()
        .filter_map(|(address, holdings)| Some((*address, (*holdings)?)))
        .filter(|(_, holdings)| has_it(holdings))
        .map(|(address, holdings)| (address, holdings.updates))
        .collect();
    if let Some((address, _)) = of_shard.iter().find(|(_, keeping)| *keeping == Keeping::Nowhere) {
        return Err(Error::unsupported(format!("server {address} takes no updates; `serve --updates` does")));
    }
    if of_shard.iter().all(|(_, keeping)| *keeping == Keeping::Shared) {
        return Ok(());
    }
    if of_shard.len() > 1 {
        return Err(Error::unsupported(format!(
            "it has {} servers with journals of their own, so that what one of them took the others would miss: expected one server, or updates in a stream (`--updates nats://...`)",
            of_shard.len()
        )));
    }
    match servers.iter().find(|(_, holdings)| holdings.is_none()) {
        Some((address, _)) => Err(Error::not_ready(format!(
            "its updates are in a journal of its server's own, and server {address}, which has not answered yet, may be another one of it"
        ))),
        None => Ok(()),
    }
}

impl ShardServers<'_> {
    /// The version that answers.
    pub fn served(&self) -> &Offering {
        &self.served
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.served.homes.len()
    }

    /// The shard that an item belongs to.
    pub fn home(&self, item: ItemId) -> usize {
        shard_of(item, self.count() as u32) as usize
    }

    /// Whether the servers of a shard, by what they said last, agree on one order of its updates.
    fn check(&self, shard: usize) -> Result<()> {
        let known = locked(&self.fleet.known);
        let servers: Vec<(SocketAddr, Option<&Holdings>)> =
            known.iter().map(|(address, server)| (*address, server.has_answered.then_some(&server.holdings))).collect();
        check(&self.model, (shard, self.count()), &servers)
            .map_err(|e| e.within(format_args!("shard {shard} of model `{}`", self.model)))
    }

    /// Asks one shard: one server, and others while nothing can have been done. Where none could be reached or is ready, all of them again once they were
    /// looked at, until the time is over or all are lost.
    ///
    /// # Errors
    /// Why the last server that was asked did not do it.
    pub async fn ask(&self, shard: usize, call: ShardCall, deadline: Instant) -> Result<Bytes, ShardFailure> {
        let home = &self.served.homes[shard];
        let origin = call.origin;
        let call = Outgoing { origin, ..Outgoing::plain(call.path, (call.body, call.media_type), call.key) };
        loop {
            let looked = self.fleet.looked.notified();
            let failure = match self.round(shard, &call, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let may_wait =
                !failure.may_be_applied && matches!(failure.error.kind(), Kind::Unavailable | Kind::NotReady);
            if !may_wait || timeout_at(deadline, looked).await.is_err() || !home.may_answer() {
                return Err(failure);
            }
            if self.writes {
                // Those that came meanwhile may not be those that were checked.
                self.check(shard).map_err(|error| ShardFailure { error, may_be_applied: false })?;
            }
        }
    }

    /// Asks each server of a shard once at most.
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
            if may_be_applied || !is_absent {
                break;
            }
        }
        Err(last)
    }

    /// Another server of a shard, the one first that is expected to answer soonest.
    fn next(&self, home: &Home, rest: &mut Vec<Arc<Client>>) -> Option<Arc<Client>> {
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

    fn server(updates: Keeping, shard: u32) -> Holdings {
        let part = Holding { model: "m".into(), shard, shards: 2, ..Holding::default() };
        Holdings { is_ready: true, updates, parts: vec![part], ..Holdings::default() }
    }

    #[test]
    fn shards_are_written_to_where_all_of_their_servers_see_it() {
        use Keeping::{Alone, Nowhere, Shared};
        let of = |servers: &[Option<(Keeping, u32)>]| {
            let holdings: Vec<Option<Holdings>> =
                servers.iter().map(|one| one.map(|(keeping, shard)| server(keeping, shard))).collect();
            let address = |n: usize| SocketAddr::from(([127, 0, 0, 1], n as u16 + 1));
            let servers: Vec<_> = holdings.iter().enumerate().map(|(n, one)| (address(n), one.as_ref())).collect();
            check("m", (0, 2), &servers).map_err(|e| (e.kind(), e.to_string()))
        };
        assert!(of(&[Some((Alone, 0)), Some((Alone, 1))]).is_ok());
        assert!(of(&[Some((Shared, 0)), Some((Shared, 0)), Some((Nowhere, 1)), None]).is_ok());
        for (servers, kind, said) in [
            (&[Some((Nowhere, 0)), Some((Alone, 1))][..], Kind::Unsupported, "takes no updates"),
            (&[Some((Shared, 0)), Some((Nowhere, 0))], Kind::Unsupported, "server 127.0.0.1:2 takes no updates"),
            (&[Some((Alone, 0)), Some((Alone, 0))], Kind::Unsupported, "2 servers with journals of their own"),
            (&[Some((Alone, 0)), Some((Shared, 0))], Kind::Unsupported, "2 servers"),
            (&[Some((Alone, 0)), None], Kind::NotReady, "server 127.0.0.1:2, which has not answered yet"),
        ] {
            let (found, why) = of(servers).unwrap_err();
            assert!(found == kind && why.contains(said), "{why}");
        }
    }
}
