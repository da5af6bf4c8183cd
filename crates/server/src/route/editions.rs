//! Determines which versions are complete over all shards, and which of them is active: a pure function of the servers' reports.

use std::collections::BTreeMap;

use super::protocol::Holding;
use sterling_core::limits::SHARDS_MAX;

/// Version of a model over all of its shards.
#[derive(Clone, Debug, PartialEq)]
pub struct Edition<S> {
    /// Name of the model.
    pub model: String,
    /// Number of the version.
    pub version: u64,
    /// Hash of the version's bytes.
    pub digest: String,
    /// Number of items per shard at publication.
    pub items: Vec<usize>,
    /// Servers of each shard.
    pub replicas: Vec<Vec<S>>,
    /// Number of servers that answer unpinned requests with this version.
    pub votes: usize,
    /// Number of servers per label that points to the version.
    pub labels: BTreeMap<String, usize>,
}

impl<S> Edition<S> {
    /// Returns whether this is the version `other`, given by its number and digest.
    pub fn is(&self, other: &(u64, String)) -> bool {
        (self.version, &self.digest) == (other.0, &other.1)
    }

    /// Returns a copy of the version without servers.
    pub(super) fn without_servers(&self) -> Self
    where
        S: Clone,
    {
        let replicas = self.replicas.iter().map(|_| Vec::new()).collect();
        Edition { replicas, votes: 0, labels: BTreeMap::new(), ..self.clone() }
    }

    /// Returns the number of servers of the shard with the fewest.
    pub fn fewest(&self) -> usize {
        self.replicas.iter().map(Vec::len).min().unwrap_or(0)
    }
}

/// State of a server: it accepts new requests, or has announced its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The server accepts requests.
    Ready,
    /// The server announced that it accepts no requests but still has its versions: it drains, or no longer follows its updates.
    Ending,
}

impl<S> Edition<(S, Readiness)> {
    /// Selects the servers to query: ready ones and, for shards without ready servers, ending ones. The flag is true if some
    /// shard has servers, but no ready one.
    pub fn chosen(self) -> (Edition<S>, bool) {
        let Edition { model, version, digest, items, replicas, votes, labels } = self;
        let is_ready = |replica: &(S, Readiness)| replica.1 == Readiness::Ready;
        let is_last_resort = replicas.iter().any(|servers| !servers.is_empty() && !servers.iter().any(is_ready));
        let chosen = replicas.into_iter().map(|servers| {
            let has_ready = servers.iter().any(is_ready);
            let requested = servers.into_iter().filter(|replica| !has_ready || is_ready(replica));
            requested.map(|(server, _)| server).collect()
        });
        let replicas = chosen.collect();
        (Edition { model, version, digest, items, replicas, votes, labels }, is_last_resort)
    }
}

/// Partial result for one version of a model, with the number of items of each known shard.
struct Found<S> {
    items_of_all: u64,
    items: Vec<Option<u64>>,
    replicas: Vec<Vec<S>>,
    votes: usize,
    labels: BTreeMap<String, usize>,
}

/// Collects all versions of all models that servers report, ascending by version. The items of all shards
/// without a server are counted as items of the first such shard.
pub fn editions<'a, S: Clone>(
    reported: impl IntoIterator<Item = (S, &'a [Holding])>,
) -> BTreeMap<String, Vec<Edition<S>>> {
    let mut found: BTreeMap<(&str, u64, &str), Found<S>> = BTreeMap::new();
    for (server, parts) in reported {
        for part in parts {
            let (shard, shards) = (part.shard as usize, part.shards as usize);
            if shard >= shards || part.shards > SHARDS_MAX {
                continue;
            }
            let entry = found.entry((&part.model, part.version, &part.digest)).or_insert_with(|| Found {
                items_of_all: part.items_of_all,
                items: vec![None; shards],
                replicas: vec![Vec::new(); shards],
                votes: 0,
                labels: BTreeMap::new(),
            });
            // A digest implies one sharding; contradicting reports are ignored.
            let says = (shards, part.items_of_all, part.items);
            let items = entry.items.get(shard).copied().flatten().unwrap_or(part.items);
            if says != (entry.items.len(), entry.items_of_all, items) {
                continue;
            }
            entry.items[shard] = Some(items);
            entry.replicas[shard].push(server.clone());
            entry.votes += usize::from(part.is_active);
            part.labels.iter().for_each(|label| *entry.labels.entry(label.clone()).or_default() += 1);
        }
    }
    let mut models: BTreeMap<String, Vec<Edition<S>>> = BTreeMap::new();
    for ((model, version, digest), found) in found {
        let Some(items) = items(&found) else { continue };
        let Found { replicas, votes, labels, .. } = found;
        let edition = Edition { model: model.into(), version, digest: digest.into(), items, replicas, votes, labels };
        models.entry(model.into()).or_default().push(edition);
    }
    models
}

/// Returns the number of items per shard. The items of all shards without servers are counted as items of the first such
/// shard. `None` if the sum contradicts the total.
fn items<S>(found: &Found<S>) -> Option<Vec<usize>> {
    let known = found.items.iter().flatten().fold(0u64, |sum, items| sum.saturating_add(*items));
    let mut rest = found.items_of_all.checked_sub(known)?;
    let is_whole = found.items.iter().all(Option::is_some);
    if is_whole && rest > 0 {
        return None;
    }
    let items = found.items.iter().map(|items| items.unwrap_or_else(|| std::mem::take(&mut rest)) as usize);
    Some(items.collect())
}

/// Selects the version that answers unpinned requests. Among versions with enough servers per shard, the version that is active
/// at most servers answers; ties go to the version that answered `before`, then to the highest. If no version has enough
/// servers, the previous version stays.
pub fn active<S>(editions: &[Edition<S>], min_replicas: usize, before: Option<&(u64, String)>) -> Option<usize> {
    let is_before = |edition: &Edition<S>| before.is_some_and(|before| edition.is(before));
    let complete = (0..editions.len()).filter(|&n| editions[n].fewest() >= min_replicas);
    let rank = |&n: &usize| (editions[n].votes, is_before(&editions[n]), editions[n].version);
    // A version that is active nowhere was only loaded for requests that pin it.
    let desired = complete.filter(|&n| editions[n].votes > 0 || is_before(&editions[n]));
    desired.max_by_key(rank).or_else(|| editions.iter().position(is_before))
}

/// Selects the version that a label points to, among those with enough servers: the index of the one that most servers report.
pub fn labelled<'a, S: 'a>(
    editions: impl Iterator<Item = &'a Edition<S>>,
    min_replicas: usize,
    label: &str,
) -> Option<usize> {
    let says = |edition: &Edition<S>| edition.labels.get(label).copied().unwrap_or(0);
    let complete = editions.enumerate().filter(|(_, edition)| edition.fewest() >= min_replicas && says(edition) > 0);
    complete.max_by_key(|(_, edition)| (says(edition), edition.version)).map(|(n, _)| n)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn holding(version: u64, shard: u32, is_active: bool) -> Holding {
        let (model, digest) = ("m".to_owned(), format!("d{version}"));
        let items = [30, 50, 20][shard as usize % 3];
        Holding { model, version, digest, shard, shards: 3, items, items_of_all: 100, is_active, labels: Vec::new() }
    }

    fn chosen(reported: &[(char, Vec<Holding>)], min_replicas: usize, before: Option<u64>) -> Option<u64> {
        let models = editions(reported.iter().map(|(server, parts)| (*server, parts.as_slice())));
        let before = before.map(|version| (version, format!("d{version}")));
        let of_model = models.get("m")?;
        active(of_model, min_replicas, before.as_ref()).map(|n| of_model[n].version)
    }

    fn servers(parts: &[&[(u64, u32, bool)]]) -> Vec<(char, Vec<Holding>)> {
        let of = |parts: &&[(u64, u32, bool)]| parts.iter().map(|(v, s, a)| holding(*v, *s, *a)).collect();
        ('a'..).zip(parts.iter().map(of)).collect()
    }

    #[test]
    fn a_version_answers_if_every_shard_has_it_and_most_servers_desire_it() {
        let one = servers(&[&[(1, 0, true)], &[(1, 1, true)], &[(1, 2, true)]]);
        assert_eq!(chosen(&one, 1, None), Some(1));
        assert_eq!(chosen(&one, 2, None), None, "one server a shard is too few");
        assert_eq!(chosen(&one, 2, Some(1)), Some(1), "the active version keeps serving");
        assert_eq!(chosen(&one[..2], 1, None), None, "a shard that was never there");
        assert_eq!(chosen(&one[..2], 1, Some(1)), Some(1), "a shard that was lost");
        // The second version reaches one shard after the other.
        let flip = |two: &[u32], active: &[u32]| {
            let of = |shard: u32| {
                let is_new = active.contains(&shard);
                let mut parts = vec![(1, shard, !is_new)];
                if two.contains(&shard) {
                    parts.push((2, shard, is_new));
                }
                parts
            };
            let parts: Vec<Vec<(u64, u32, bool)>> = (0..3).map(of).collect();
            servers(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>())
        };
        for (two, active, expected) in [
            (&[0][..], &[0][..], 1),
            (&[0, 1], &[0, 1], 1),
            (&[0, 1, 2], &[], 1),
            (&[0, 1, 2], &[2], 1),
            (&[0, 1, 2], &[0, 2], 2),
            (&[0, 1, 2], &[0, 1, 2], 2),
        ] {
            assert_eq!(chosen(&flip(two, active), 1, Some(1)), Some(expected), "{two:?} {active:?}");
        }
        // With equal votes, the version that answers stays.
        let mut even = servers(&[&[(1, 0, true), (2, 0, false)], &[(1, 0, false), (2, 0, true)]]);
        for (_, parts) in &mut even {
            parts.iter_mut().for_each(|part| (part.shards, part.items_of_all) = (1, 30));
        }
        assert_eq!(
            (chosen(&even, 1, Some(1)), chosen(&even, 1, Some(2)), chosen(&even, 1, None)),
            (Some(1), Some(2), Some(2))
        );
    }

    #[test]
    fn holdings_of_servers_must_be_consistent() {
        let mut reported = servers(&[&[(1, 0, true)], &[(1, 1, true)], &[(1, 2, true)], &[(1, 2, true)]]);
        // Other bytes under the same number are another version.
        reported[3].1[0].digest = "other".into();
        let models = editions(reported.iter().map(|(server, parts)| (*server, parts.as_slice())));
        let of_model = &models["m"];
        assert_eq!(of_model.len(), 2);
        let complete = of_model.iter().find(|edition| edition.digest == "d1").unwrap();
        assert_eq!((&complete.items, &complete.replicas), (&vec![30, 50, 20], &vec![vec!['a'], vec!['b'], vec!['c']]));
        assert_eq!(of_model.iter().find(|edition| edition.digest == "other").unwrap().fewest(), 0);
        for invalid in [
            |part: &mut Holding| part.shards = 4,
            |part: &mut Holding| part.items_of_all = 101,
            |part: &mut Holding| part.shard = 3,
            |part: &mut Holding| part.shards = u32::MAX,
            |part: &mut Holding| part.items = 21,
            |part: &mut Holding| part.items = u64::MAX >> 1,
        ] {
            let mut reported = servers(&[&[(1, 0, true)], &[(1, 1, true)], &[(1, 2, true)]]);
            invalid(&mut reported[2].1[0]);
            assert_eq!(chosen(&reported, 1, None), None);
        }
        assert_eq!(chosen(&[], 1, None), None);
    }

    #[test]
    fn draining_servers_are_queried_if_no_other_has_their_shard() {
        use Readiness::{Ending, Ready};
        let chosen = |shards: [&[(char, Readiness)]; 3]| {
            let reported: Vec<_> = (0..)
                .zip(shards)
                .flat_map(|(shard, servers)| servers.iter().map(move |server| (*server, vec![holding(1, shard, true)])))
                .collect();
            let models = editions(reported.iter().map(|(server, parts)| (*server, parts.as_slice())));
            let (edition, is_last_resort) = models["m"][0].clone().chosen();
            (edition.replicas, is_last_resort)
        };
        let (a, b, c) = (('a', Ready), ('b', Ready), ('c', Ready));
        assert_eq!(chosen([&[a], &[b], &[c]]), (vec![vec!['a'], vec!['b'], vec!['c']], false));
        assert_eq!(chosen([&[a, ('d', Ending)], &[b], &[c]]).0[0], ['a'], "another one is ready");
        assert_eq!(chosen([&[('d', Ending)], &[b], &[c]]), (vec![vec!['d'], vec!['b'], vec!['c']], true));
        assert_eq!(chosen([&[], &[b], &[c]]), (vec![vec![], vec!['b'], vec!['c']], false));
    }

    #[test]
    fn labels_point_where_most_servers_say() {
        let mut reported = servers(&[&[(1, 0, true), (2, 0, false)][..]; 3]);
        for (_, parts) in &mut reported {
            parts.iter_mut().for_each(|part| (part.shards, part.items_of_all) = (1, 30));
        }
        for (n, version) in [(0, 0), (1, 1), (2, 1)] {
            reported[n].1[version].labels.push("canary".into());
        }
        let models = editions(reported.iter().map(|(server, parts)| (*server, parts.as_slice())));
        let found = |least, label| labelled(models["m"].iter(), least, label).map(|n| models["m"][n].version);
        assert_eq!((found(1, "canary"), found(1, "other"), found(4, "canary")), (Some(2), None, None));
    }
}
