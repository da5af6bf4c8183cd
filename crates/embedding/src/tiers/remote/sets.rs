//! Queries about the sets of rows in a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::{Value, pipe};

use super::cluster::{Cluster, Shared};
use super::layout::{RowSet, slot_of};
use super::manifest::{TableManifest, TableState};
use sterling_core::error::{Error, Result};

/// Timeout of queries outside of requests, while the cluster reconfigures itself.
pub(super) const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the manifest of a set, if it exists.
///
/// # Errors
/// If the cluster does not answer or the manifest is invalid.
pub fn find(cluster: &Cluster, named: &RowSet) -> Result<Option<TableManifest>> {
    let (shared, named) = (cluster.shared.clone(), named.clone());
    cluster.run(async move { find_async(&shared, &named, QUERY_TIMEOUT).await })?
}

pub(super) async fn find_async(
    shared: &Arc<Shared>,
    named: &RowSet,
    patience: Duration,
) -> Result<Option<TableManifest>> {
    let key = named.manifest_key();
    let mut question = pipe();
    question.cmd("GET").arg(&key);
    let reply = shared.on_primary(slot_of(&key), &question, patience).await.map_err(|e| e.within(named))?.pop();
    match reply {
        Some(Value::Nil) => Ok(None),
        Some(Value::BulkString(bytes)) => TableManifest::parse(named, &bytes).map(Some),
        Some(Value::ServerError(e)) => Err(Error::unavailable(format!("{named}: {e}"))),
        other => Err(Error::corrupt(format!("{named}: the manifest is {other:?}, expected a string"))),
    }
}

/// Returns the sets of the table that the cluster has data of, in order.
///
/// # Errors
/// If the cluster does not answer.
pub fn sets(cluster: &Cluster, named: &RowSet) -> Result<Vec<RowSet>> {
    let (shared, key) = (cluster.shared.clone(), named.sets_key());
    let mut question = pipe();
    question.cmd("SMEMBERS").arg(&key);
    let reply = cluster.run(async move { shared.on_primary(slot_of(&key), &question, QUERY_TIMEOUT).await })??.pop();
    let reply = reply.unwrap_or_default();
    let members = match reply {
        Value::Array(members) | Value::Set(members) => members,
        Value::ServerError(e) => return Err(Error::unavailable(format!("{named}: {e}"))),
        other => {
            return Err(Error::corrupt(format!(
                "{named}: the list of the table's sets is {other:?}, expected a Redis set"
            )));
        }
    };
    let set = |member: &Value| named.tagged(&redis::from_redis_value_ref::<String>(member).ok()?);
    let mut sets: Vec<RowSet> = members.iter().filter_map(set).collect();
    sets.sort_unstable();
    Ok(sets)
}

/// Returns the set with the content of `named`, and its manifest: a set with this name, or a complete set with a name of an
/// earlier release.
///
/// # Errors
/// As [`find`] and [`sets`].
pub fn stored(cluster: &Cluster, named: &RowSet) -> Result<Option<(RowSet, TableManifest)>> {
    if let Some(manifest) = find(cluster, named)? {
        return Ok(Some((named.clone(), manifest)));
    }
    for set in sets(cluster, named)?.into_iter().filter(|set| set.content() == named.content() && set != named) {
        if let Some(manifest) = find(cluster, &set)?.filter(|manifest| manifest.state == TableState::Complete) {
            return Ok(Some((set, manifest)));
        }
    }
    Ok(None)
}

/// Returns the complete set with the content of `named`.
///
/// # Errors
/// `NotReady` if there is no complete set, because a load may follow at any time.
pub(super) fn complete(cluster: &Cluster, named: &RowSet) -> Result<(RowSet, TableManifest)> {
    let Some((named, manifest)) = stored(cluster, named)? else {
        let others: Vec<String> = sets(cluster, named)?.iter().map(RowSet::tag).collect();
        let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        return Err(Error::not_ready(format!("{named}: not in the cluster; sets of this table: {others}")));
    };
    match manifest.state {
        TableState::Complete => Ok((named, manifest)),
        TableState::Loading => Err(Error::not_ready(format!("{named}: the load of these rows has not finished"))),
        TableState::Deleting => Err(Error::not_ready(format!("{named}: is being deleted"))),
    }
}
