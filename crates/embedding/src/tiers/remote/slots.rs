//! Slot map of the cluster, as one of its nodes reports it.

use std::collections::BTreeSet;

use redis::Value;

use super::layout::SLOTS;
use sterling_core::error::{Error, Result};

/// Address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Host name or IP address.
    pub host: String,
    /// Port for clients.
    pub port: u16,
}

impl Address {
    /// Parses `HOST:PORT` of a redirection; an empty host means the host of the node that answered.
    pub(super) fn parse(text: &str, requested: &Address) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = if host.is_empty() { &requested.host } else { host };
        Some(Address { host: host.to_owned(), port: port.parse().ok()? })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Nodes that hold the same slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeGroup {
    /// The primary first, then its replicas.
    pub(super) nodes: Vec<Address>,
}

const UNOWNED: u16 = u16::MAX;

/// Owners of all slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotMap {
    pub(super) shards: Vec<NodeGroup>,
    /// Ids of the nodes, which are stable when addresses change.
    ids: BTreeSet<String>,
    /// Index into `shards`, by slot.
    owners: Vec<u16>,
}

impl SlotMap {
    /// Returns a map without owners.
    pub(super) fn empty() -> Self {
        SlotMap { shards: Vec::new(), ids: BTreeSet::new(), owners: vec![UNOWNED; SLOTS] }
    }

    /// Returns false if the maps have no node id in common: they are of different clusters. A map without ids matches any.
    pub(super) fn is_of(&self, other: &SlotMap) -> bool {
        self.ids.is_empty() || other.ids.is_empty() || !self.ids.is_disjoint(&other.ids)
    }

    /// Returns the index of the shard that owns the slot.
    pub(super) fn owner(&self, slot: u16) -> Option<usize> {
        self.owners.get(slot as usize).filter(|&&s| s != UNOWNED).map(|&s| s as usize)
    }

    /// Returns all nodes of the map.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Address> {
        self.shards.iter().flat_map(|s| &s.nodes)
    }

    /// Parses the reply of `CLUSTER SLOTS` from the node at `requested`.
    pub(super) fn parse(reply: &Value, requested: &Address) -> Result<Self> {
        let invalid = || Error::corrupt(format!("node {requested}: got an invalid reply to CLUSTER SLOTS"));
        let Value::Array(ranges) = reply else { return Err(invalid()) };
        let mut slots = SlotMap::empty();
        for range in ranges {
            let Value::Array(parts) = range else { return Err(invalid()) };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = parts.as_slice() else { return Err(invalid()) };
            slots.ids.extend(nodes.iter().filter_map(id_of));
            let nodes: Vec<Address> = nodes.iter().filter_map(|n| node_of(n, requested)).collect();
            if !(0..SLOTS as i64).contains(first) || !(*first..SLOTS as i64).contains(last) {
                return Err(invalid());
            }
            if nodes.is_empty() {
                continue;
            }
            let shard = NodeGroup { nodes };
            let known = slots.shards.iter().position(|s| *s == shard);
            let number = known.unwrap_or_else(|| {
                slots.shards.push(shard);
                slots.shards.len() - 1
            });
            // The number fits, because there are at most as many shards as slots.
            slots.owners[*first as usize..=*last as usize].fill(number as u16);
        }
        Ok(slots)
    }
}

fn node_of(node: &Value, requested: &Address) -> Option<Address> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Int(port), ..] = parts.as_slice() else { return None };
    let host = match host {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        _ => "",
    };
    // Nodes that do not know their own name report an empty name, or `?`.
    let host = if host.is_empty() || host == "?" { &requested.host } else { host };
    Some(Address { host: host.to_owned(), port: u16::try_from(*port).ok()? })
}

fn id_of(node: &Value) -> Option<String> {
    let Value::Array(parts) = node else { return None };
    redis::from_redis_value_ref(parts.get(2)?).ok().filter(|id: &String| !id.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn node(host: &str, port: i64) -> Value {
        Value::Array(vec![Value::BulkString(host.into()), Value::Int(port), Value::BulkString("id".into())])
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
    }

    fn requested() -> Address {
        Address { host: "asked".into(), port: 1 }
    }

    #[test]
    fn ranges_of_one_shard_are_one_shard_and_gaps_are_unowned() {
        let reply = Value::Array(vec![
            range(0, 99, vec![node("a", 1), node("b", 2)]),
            range(100, 199, vec![node("c", 3)]),
            range(300, 16_383, vec![node("a", 1), node("b", 2)]),
        ]);
        let slots = SlotMap::parse(&reply, &requested()).unwrap();
        assert_eq!(slots.shards.len(), 2);
        assert_eq!((slots.owner(0), slots.owner(100), slots.owner(16_383)), (Some(0), Some(1), Some(0)));
        assert_eq!((slots.owner(200), slots.owner(299)), (None, None));
        assert_eq!(slots.nodes().count(), 3);
    }

    #[test]
    fn maps_are_of_one_cluster_by_the_ids_of_its_nodes() {
        let named = |id: &str, port: i64| {
            Value::Array(vec![Value::BulkString("a".into()), Value::Int(port), Value::BulkString(id.into())])
        };
        let map = |nodes: Vec<Value>| SlotMap::parse(&Value::Array(vec![range(0, 9, nodes)]), &requested()).unwrap();
        let (first, moved) = (map(vec![named("x", 1), named("y", 2)]), map(vec![named("z", 1), named("y", 7)]));
        let other = map(vec![named("w", 1), named("v", 2)]);
        assert!(first.is_of(&moved) && moved.is_of(&first));
        assert!(!first.is_of(&other), "equal addresses are no sign of one cluster");
        let nameless = map(vec![Value::Array(vec![Value::Nil, Value::Int(7)])]);
        assert!(first.is_of(&nameless) && nameless.is_of(&first) && SlotMap::empty().is_of(&first));
    }

    #[test]
    fn nodes_without_a_name_are_where_the_answer_came_from() {
        let nameless = Value::Array(vec![Value::Nil, Value::Int(7)]);
        let reply = Value::Array(vec![range(0, 5, vec![node("", 5), node("?", 6), nameless])]);
        let slots = SlotMap::parse(&reply, &requested()).unwrap();
        assert!(slots.nodes().all(|n| n.host == "asked"));
        assert_eq!(Address::parse(":9", &requested()).unwrap().to_string(), "asked:9");
        assert_eq!(Address::parse("::1:9", &requested()).unwrap().host, "::1");
        assert!(Address::parse("nine", &requested()).is_none() && Address::parse("a:99999", &requested()).is_none());
    }

    #[test]
    fn malformed_replies_are_rejected() {
        let bad = [
            Value::Nil,
            Value::Array(vec![Value::Int(3)]),
            Value::Array(vec![range(-1, 5, vec![node("a", 1)])]),
            Value::Array(vec![range(0, 16_384, vec![node("a", 1)])]),
            Value::Array(vec![range(7, 5, vec![node("a", 1)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(3)])]),
        ];
        for reply in bad {
            assert!(SlotMap::parse(&reply, &requested()).is_err(), "{reply:?}");
        }
        let nowhere = Value::Array(vec![range(0, 5, vec![node("a", 99_999)])]);
        assert_eq!(SlotMap::parse(&nowhere, &requested()).unwrap().owner(0), None);
    }
}
