//! Step 1 for tables on other machines: fetches rows of a cluster for all waiting requests together, before any of them occupies
//! a worker.

use std::time::Instant;

use super::work::{Prepared, Query};
use sterling_core::error::Result;
use sterling_core::request::{OnDegraded, Origin};
use sterling_embedding::Lookup;
use sterling_graph::tower::{FeatureRow, Pooled, Tower};

/// Looks up the features of waiting requests of one view, including rows of a cluster, and stores the pooled embeddings in each
/// request. Blocks until the embeddings are complete or `deadline` has passed. A failed lookup is stored in the request and
/// becomes the request's answer.
pub fn fetch(waiting: &mut [&mut Prepared], deadline: Option<Instant>) {
    let Some(view) = waiting.first().map(|prepared| prepared.view.clone()) else { return };
    let Some(tower) = &view.main().package.user else { return };
    let mut waiting: Vec<&mut Prepared> = waiting.iter_mut().filter(|p| p.needs_fetch()).map(|p| &mut **p).collect();
    let rows = waiting.iter().filter_map(|p| Some((p.features()?, p.reading.on_degraded))).collect::<Vec<_>>();
    let origin = Origin::of_several(waiting.iter().map(|prepared| &prepared.origin));
    let pooled = lookup_each(tower, &rows, Lookup { deadline, origin, ..Lookup::default() });
    for (prepared, pooled) in waiting.iter_mut().zip(pooled) {
        if let Query::Features { fetched, .. } = &mut prepared.query {
            *fetched = Some(pooled);
        }
    }
}

/// Returns the pooled embeddings of each row of features, from one lookup. Unavailable rows are always replaced by default rows
/// in the lookup; afterwards only requests whose [`OnDegraded`] forbids default rows fail.
pub(super) fn lookup_each(tower: &Tower, rows: &[(&FeatureRow, OnDegraded)], terms: Lookup) -> Vec<Result<Pooled>> {
    if rows.is_empty() {
        return Vec::new();
    }
    let features: Vec<&FeatureRow> = rows.iter().map(|(row, _)| *row).collect();
    let terms = Lookup { on_degraded: OnDegraded::DefaultRows, ..terms };
    let pooled = match tower.lookup(&features, &terms) {
        Ok((pooled, report)) => {
            tower.count(&report);
            pooled
        }
        Err(e) => return rows.iter().map(|_| Err(e.again())).collect(),
    };
    let accept = |(pooled, (row, on_degraded)): (Pooled, &(&FeatureRow, OnDegraded))| match on_degraded {
        OnDegraded::Fail if pooled.degraded_rows > 0 => {
            let (degraded, ids) = (pooled.degraded_rows, row.ids());
            Err(terms.unavailable(format_args!("{degraded} of {ids} rows of embedding tables")))
        }
        _ => Ok(pooled),
    };
    pooled.into_iter().zip(rows).map(accept).collect()
}
