//! What a model asks of its tables, for the planner.

use std::sync::Arc;

use super::spec::ModelSpec;
use crate::sparse;
use crate::sparse::planner::Workload;
use crate::sparse::planner::access::Access;
use crate::sparse::planner::plan::{Constraints, Table};
use crate::sparse::planner::workload::{BATCH_DEFAULT, SKEW_DEFAULT};
use crate::tower::{FeatureKind, FeatureSpec};

/// Mean ids of an `ids` feature that nothing is known about.
const POOLING_GUESS: f64 = 20.0;

impl ModelSpec {
    /// The features of the user tower that read a table.
    pub fn readers<'a>(&'a self, table: &'a str) -> impl Iterator<Item = &'a FeatureSpec> {
        let features: &[FeatureSpec] = self.user.as_ref().map_or(&[], |user| &user.features);
        features.iter().filter(move |f| f.table.as_deref() == Some(table))
    }

    /// What requests ask of `tables`, with guesses where only requests can tell: 20 ids a feature of kind `ids`, a Zipf
    /// exponent of 0.8. Tables that no feature of the user tower reads are left out.
    pub fn workload(&self, tables: &[Arc<sparse::Table>]) -> Workload {
        let (mut planned, mut notes) = (Vec::new(), Vec::new());
        for table in tables.iter().map(|t| t.spec()) {
            let readers: Vec<&FeatureSpec> = self.readers(&table.name).collect();
            if readers.is_empty() {
                notes.push(format!("table `{}` is read only when items are published: not planned", table.name));
                continue;
            }
            let guessed = |f: &&FeatureSpec| if f.kind == FeatureKind::Category { 1.0 } else { POOLING_GUESS };
            planned.push(Table {
                name: table.name.clone(),
                rows: table.rows,
                width: u32::try_from(table.width).unwrap_or(u32::MAX),
                format: table.format,
                pooling: readers.iter().map(guessed).sum::<f64>() / readers.len() as f64,
                features: readers.iter().map(|f| f.source().to_owned()).collect(),
                access: Access::Zipf(SKEW_DEFAULT),
                constraints: Constraints::default(),
            });
        }
        let guess = format!(
            "`ids` taken as {POOLING_GUESS} a request; tables state no skew: taken as zipf {SKEW_DEFAULT}; --sample measures both"
        );
        notes.push(guess);
        Workload { batch: BATCH_DEFAULT, requests_per_s: None, tables: planned, notes }
    }
}
