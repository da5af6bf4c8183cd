//! Rows of a cluster, fetched for all waiting requests together before any of them takes a worker.

use std::time::Instant;

use super::cpu::count_ids;
use super::prepare::{Pooled, Prepared, Query};
use crate::embedding::Lookup;
use crate::error::Result;
use crate::request::OnDegraded;
use crate::tower::{FeatureRow, Tower};

/// Looks the features of `waiting` requests of one view up, rows of a cluster among them, and leaves the pooled embeddings
/// with each. Blocks until they are there or `deadline` has passed. What goes wrong is kept with the request and is its
/// answer when it runs.
pub fn fetch(waiting: &mut [&mut Prepared], deadline: Option<Instant>) {
    for on_degraded in [OnDegraded::Fail, OnDegraded::DefaultRows] {
        let mut alike: Vec<&mut Prepared> = waiting
            .iter_mut()
            .filter(|p| p.reading.on_degraded == on_degraded && p.needs_fetch())
            .map(|p| &mut **p)
            .collect();
        let Some(view) = alike.first().map(|p| p.view.clone()) else { continue };
        let Some(tower) = &view.main().package.user else { continue };
        let terms = Lookup { deadline, on_degraded };
        let rows: Vec<&FeatureRow> = alike.iter().filter_map(|p| p.features()).collect();
        let pooled = lookup_each(tower, &rows, &terms);
        for (prepared, pooled) in alike.iter_mut().zip(pooled) {
            if let Query::Features { fetched, .. } = &mut prepared.query {
                *fetched = Some(pooled);
            }
        }
    }
}

/// The pooled embedding of each row. All are looked up together; where that fails each is tried alone, so that a row that
/// cannot be had fails those only that ask for it.
pub(super) fn lookup_each(tower: &Tower, rows: &[&FeatureRow], terms: &Lookup) -> Vec<Result<Pooled>> {
    match lookup(tower, rows, terms) {
        Ok(pooled) => pooled.into_iter().map(Ok).collect(),
        Err(e) if rows.len() == 1 => vec![Err(e)],
        Err(_) => rows
            .iter()
            .map(|row| lookup(tower, std::slice::from_ref(row), terms).map(|mut pooled| pooled.remove(0)))
            .collect(),
    }
}

fn lookup(tower: &Tower, rows: &[&FeatureRow], terms: &Lookup) -> Result<Vec<Pooled>> {
    let start = Instant::now();
    let (pooled, report) = tower.lookup(rows, terms)?;
    count_ids(&report);
    let took = start.elapsed();
    let bytes = tower.row_bytes(&report);
    let ids = report.iter().map(|t| t.ids).sum();
    let of_row = |n: usize| Pooled {
        values: pooled.example(n).to_vec(),
        degraded_rows: report.iter().filter_map(|t| t.degraded_of.get(n)).sum(),
        took,
        ids,
        bytes,
    };
    Ok((0..rows.len()).map(of_row).collect())
}
