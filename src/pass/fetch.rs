//! Step 1, where it waits for other machines: rows of a cluster are fetched for all waiting requests together, before any of
//! them takes a worker.

use std::time::Instant;

use super::work::{Prepared, Query};
use crate::embedding::{Lookup, LookupReport};
use crate::error::Result;
use crate::request::OnDegraded;
use crate::tower::{FeatureRow, Pooled, Tower};

/// Looks the features of waiting requests of one view up, rows of a cluster among them, and leaves the pooled embeddings with
/// each. Blocks until they are there or `deadline` has passed. What goes wrong stays with the request and is its answer when
/// it runs.
pub fn fetch(waiting: &mut [&mut Prepared], deadline: Option<Instant>) {
    let Some(view) = waiting.first().map(|prepared| prepared.view.clone()) else { return };
    let Some(tower) = &view.main().package.user else { return };
    for on_degraded in [OnDegraded::Fail, OnDegraded::DefaultRows] {
        let alike = |p: &Prepared| p.reading.on_degraded == on_degraded && p.needs_fetch();
        let mut alike: Vec<&mut Prepared> = waiting.iter_mut().filter(|p| alike(p)).map(|p| &mut **p).collect();
        let rows: Vec<&FeatureRow> = alike.iter().filter_map(|p| p.features()).collect();
        let pooled = lookup_each(tower, &rows, &Lookup { deadline, on_degraded });
        for (prepared, pooled) in alike.iter_mut().zip(pooled) {
            if let Query::Features { fetched, .. } = &mut prepared.query {
                *fetched = Some(pooled);
            }
        }
    }
}

/// The pooled embeddings of each row. All are looked up together; where that fails each is tried alone, so that a row that
/// cannot be had fails those only that ask for it.
pub(super) fn lookup_each(tower: &Tower, rows: &[&FeatureRow], terms: &Lookup) -> Vec<Result<Pooled>> {
    let lookup = |rows: &[&FeatureRow]| {
        let (pooled, report) = tower.lookup(rows, terms)?;
        count(&report);
        Ok(pooled)
    };
    if rows.is_empty() {
        return Vec::new();
    }
    match lookup(rows) {
        Ok(pooled) => pooled.into_iter().map(Ok).collect(),
        Err(e) if rows.len() == 1 => vec![Err(e)],
        Err(_) => rows.iter().map(|row| lookup(&[*row]).map(|mut pooled| pooled.swap_remove(0))).collect(),
    }
}

fn count(report: &LookupReport) {
    for table in report {
        let labels = [("table", table.table.clone())];
        metrics::counter!("sterling_unseen_ids_total", &labels).increment(table.unseen);
        metrics::counter!("sterling_degraded_rows_total", &labels).increment(table.degraded);
    }
}
