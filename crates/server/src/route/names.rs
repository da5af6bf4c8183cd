//! Resolves the names of servers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use sterling_core::locks::locked;

/// Timeout of name resolution.
const NAMES: Duration = Duration::from_secs(2);

/// Names with their last resolved addresses.
#[derive(Debug, Default)]
pub(super) struct Names(Mutex<BTreeMap<String, Vec<SocketAddr>>>);

impl Names {
    /// Resolves names, each as `HOST:PORT`, to addresses with their host names; an address of several names gets the first. A
    /// name that cannot be resolved keeps its previous addresses.
    pub(super) async fn resolve(&self, servers: &[String]) -> BTreeMap<SocketAddr, String> {
        let lookups = servers.iter().map(|name| async move {
            let found = timeout(NAMES, tokio::net::lookup_host(name)).await;
            (name, found.map(|found| found.map(|addresses| addresses.collect::<Vec<_>>())))
        });
        let found = join_all(lookups).await;
        let mut names = locked(&self.0);
        for (name, found) in found {
            match found {
                Ok(Ok(addresses)) => drop(names.insert(name.clone(), addresses)),
                Ok(Err(error)) => tracing::warn!(name, %error, "the name of a server cannot be resolved"),
                Err(_) => tracing::warn!(name, "the name of a server was not resolved in time"),
            }
        }
        let mut there = BTreeMap::new();
        for (name, addresses) in names.iter().rev() {
            let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host);
            let host = host.trim_matches(['[', ']']);
            there.extend(addresses.iter().map(|address| (*address, host.to_owned())));
        }
        there
    }
}
