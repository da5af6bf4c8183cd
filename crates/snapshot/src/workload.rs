//! Estimates the lookups in a model's tables, for the planner.

use std::sync::Arc;

use crate::model::ModelSpec;
use sterling_embedding::Table;
use sterling_embedding::planner::access::Access;
use sterling_embedding::planner::workload::{BATCH_DEFAULT, Constraints, SKEW_DEFAULT, TableWorkload, Workload};
use sterling_graph::tower::{FeatureKind, FeatureSpec};

/// Assumed pooling factor of an `ids` feature.
const POOLING_GUESS: f64 = 20.0;

/// Estimates the lookups per request in a model's `tables`. Without measurements, assumes a pooling factor of 20 for features of
/// kind `ids`, full sequences, and a Zipf exponent of 0.8. Leaves out tables that no request feature reads, and tables that are
/// looked up per candidate.
pub fn workload(model: &ModelSpec, tables: &[Arc<Table>]) -> Workload {
    let (mut asked, mut notes) = (Vec::new(), Vec::new());
    for (table, managed) in tables.iter().map(|t| (t.spec(), t.ids().is_some())) {
        let readers: Vec<&FeatureSpec> = model.readers(&table.name).collect();
        if readers.is_empty() {
            notes.push(format!("table `{}` is read only when items are published: not planned", table.name));
            continue;
        }
        if model.serves_candidates(&table.name) {
            notes.push(format!(
                "table `{}` is read for each candidate: kept completely in memory, not planned",
                table.name
            ));
            continue;
        }
        let guessed = |f: &&FeatureSpec| match f.length {
            // Assumes the maximum length, because most users with a history reach the maximum.
            Some(length) => length as f64,
            None if f.kind == FeatureKind::Category => 1.0,
            None => POOLING_GUESS,
        };
        asked.push(TableWorkload {
            name: table.name.clone(),
            rows: table.rows,
            width: u32::try_from(table.width).unwrap_or(u32::MAX),
            format: table.format,
            pooling: readers.iter().map(guessed).sum::<f64>() / readers.len() as f64,
            // A sample of texts shows no ids, so text features are left out.
            features: readers.iter().filter(|f| f.kind != FeatureKind::Text).map(|f| f.source().to_owned()).collect(),
            access: Access::Zipf(SKEW_DEFAULT),
            constraints: Constraints::default(),
            train: None,
            managed,
        });
    }
    notes.push(format!(
        "`ids` assumed as {POOLING_GUESS} per request; tables state no skew: assumed as zipf {SKEW_DEFAULT}; --sample measures both"
    ));
    Workload { batch: BATCH_DEFAULT, requests_per_s: None, tables: asked, notes }
}
