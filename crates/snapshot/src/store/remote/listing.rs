//! Listing of a bucket's keys, which describes the contents of the store.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64;

use super::super::lease::LEASE;
use super::super::{DESIRED_FILE, number};
use crate::manifest::MANIFEST;
use crate::shards::SHARDS_FILE;
use sterling_storage::objects::Tag;

/// Object with the highest number allocated to a publication of a model.
pub(super) const GIVEN: &str = ".given";
/// Prefix of the names of files that may be added to a version later.
pub(super) const LATER: &str = "recalibration";

/// Listing of the object keys, which describe the store's contents.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) keys: BTreeMap<String, Tag>,
    /// Combined fingerprint of all objects of each version and shard, by folder name.
    pub(super) looks: BTreeMap<String, u64>,
    /// True if the listing describes the local cache, because the bucket has not answered yet.
    pub(super) is_of_cache: bool,
}

impl Seen {
    pub(super) fn of(found: Vec<(String, Tag)>) -> Self {
        let mut seen = Seen::default();
        for (key, tag) in found {
            let look = xxh3_64(format!("{key} {}", tag.mark()).as_bytes());
            for folder in folders_of(&key) {
                // Fingerprints are summed, because a sum does not depend on the order of keys.
                let looks = seen.looks.entry(folder.to_owned()).or_default();
                *looks = looks.wrapping_add(look);
            }
            if is_listed_object(&key) {
                seen.keys.insert(key, tag);
            }
        }
        seen
    }

    /// Iterates over the keys under a name.
    pub(super) fn under(&self, name: &str) -> impl Iterator<Item = (&str, &Tag)> {
        let prefix = format!("{name}/");
        let from = self.keys.range(prefix.clone()..);
        let within = from.take_while(move |(key, _)| key.starts_with(&prefix));
        within.map(move |(key, tag)| (&key[name.len() + 1..], tag))
    }

    /// Returns the versions of a model of which any object exists.
    pub(super) fn numbers(&self, model: &str) -> Vec<u64> {
        let mut numbers: Vec<u64> =
            self.under(model).filter_map(|(key, _)| key.split_once('/').and_then(|(first, _)| number(first))).collect();
        numbers.dedup();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

/// Returns the folders of the version and of the shard that an object belongs to. Ignores hidden objects, which belong to
/// publications.
fn folders_of(key: &str) -> impl Iterator<Item = &str> {
    let ends: Vec<usize> = key.match_indices('/').map(|(at, _)| at).collect();
    let is_of_version = match ends[..] {
        [model, version, ..] => number(&key[model + 1..version]).is_some(),
        _ => false,
    };
    let is_hidden = key.rsplit('/').next().is_some_and(|name| name.starts_with('.'));
    let deep = if is_of_version && !is_hidden { 1..ends.len().min(3) } else { 0..0 };
    deep.map(move |n| &key[..ends[n]])
}

fn is_listed_object(key: &str) -> bool {
    let name = key.rsplit('/').next().unwrap_or(key);
    [MANIFEST, SHARDS_FILE, LEASE, DESIRED_FILE, GIVEN].contains(&name) || name.starts_with(LATER)
}
