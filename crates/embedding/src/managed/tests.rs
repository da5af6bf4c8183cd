//! The map compared with a naive one, and rejected assignments.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use super::map::IdMap;
use super::*;
use crate::RowFormat;
use crate::spec::{TableSpec, Unseen};
use sterling_core::random::splitmix64;
use sterling_kernels::buffer::Buffer;

fn spec(rows: u64, unseen: Unseen) -> TableSpec {
    TableSpec { name: "users".into(), rows, width: 2, format: RowFormat::F32, unseen }
}

#[test]
fn the_map_is_a_naive_one_through_inserts_and_removals() {
    for rows in [1u64, 2, 7, 8, 50, 400] {
        let (mut map, mut naive) = (IdMap::new(rows).unwrap(), HashMap::new());
        // Few distinct ids at full load: chains over several buckets, also across the end of the array.
        let id = |n: u64| splitmix64(n % (2 * rows)) as i64;
        for n in 0..20_000u64 {
            let draw = splitmix64(n ^ rows << 32);
            let id = id(draw >> 8);
            if draw.is_multiple_of(3) {
                assert_eq!(map.remove(id), naive.remove(&id));
            } else if naive.contains_key(&id) || (naive.len() as u64) < rows {
                let row = (draw % rows) as u32;
                assert_eq!(map.insert(id, row), naive.get(&id).copied());
                naive.entry(id).or_insert(row);
            }
            if n.is_multiple_of(97) {
                let ids: Vec<i64> = (0..2 * rows).map(id_of(rows)).chain([FREE, 0, i64::MAX, -1]).collect();
                let mut found = Vec::new();
                map.rows_of(&ids, |id, row| found.push((id, row)));
                let expected: Vec<_> = ids.iter().map(|id| (*id, naive.get(id).copied())).collect();
                assert!(found == expected, "{rows} rows, after {n}");
            }
        }
    }
}

fn id_of(rows: u64) -> impl Fn(u64) -> i64 {
    move |n| splitmix64(n % (2 * rows)) as i64
}

#[test]
fn ids_have_their_rows_and_others_follow_the_policy() {
    let ids = [5, FREE, -9, 1 << 60];
    for unseen in [Unseen::Zero, Unseen::Hash, Unseen::Row(1)] {
        let spec = spec(4, unseen);
        let managed = ManagedIds::new(&spec, Buffer::copied(&ids).unwrap()).unwrap();
        assert_eq!((managed.held(), managed.row(-9), managed.row(0), managed.row(FREE)), (3, Some(2), None, None));
        let mut rows = vec![7];
        assert_eq!(managed.append_rows(&spec, &[1 << 60, 5, 0, FREE, -9], &mut rows), 2);
        let other = |id| spec.unseen_row(id).map_or(-1, |row| row as i64);
        assert_eq!(rows, [7, 3, 0, other(0), other(FREE), 2]);
    }
}

#[test]
fn invalid_assignments_are_rejected() {
    let new = |unseen, ids: &[i64]| ManagedIds::new(&spec(3, unseen), Buffer::copied(ids).unwrap());
    let reported = |unseen, ids: &[i64]| new(unseen, ids).unwrap_err().to_string();
    assert!(new(Unseen::Zero, &[FREE; 3]).unwrap().held() == 0);
    assert!(reported(Unseen::Zero, &[1, 2]).contains("table `users`: got 2 ids for 3 rows"));
    assert!(reported(Unseen::Zero, &[1, 2, 1]).contains("id 1 has rows 0 and 2, expected one"));
    assert!(reported(Unseen::Row(1), &[1, 2, 3]).contains("row 1 is reserved for unseen ids, expected no id, got 2"));
}

#[test]
fn more_ids_than_memory_holds_are_an_error() {
    let error = extended(&[FREE], usize::MAX / 64, FREE).unwrap_err();
    assert_eq!(error.kind(), sterling_core::error::Kind::Overloaded, "{error}");
    assert_eq!(extended(&[1, 2], 4, FREE).unwrap(), [1, 2, FREE, FREE]);
}
