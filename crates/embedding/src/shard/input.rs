//! Step 1: resolves the ids of features to rows of tables.
//!
//! The bags of all features that read a table are concatenated, so that each shard gets one request per
//! batch. Replicas of a table divide the bags: replica c of n takes bags `len c / n` to `len (c + 1) / n` of each feature.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::report::LookupReport;
use crate::table::Table;

/// Bags of one feature, and the table that they read.
#[derive(Debug)]
pub(crate) struct FeatureBags<'a> {
    /// Index of the table.
    pub(crate) table: usize,
    pub(crate) ids: &'a [i64],
    /// Offsets of the bags, `[bags + 1]`; the first offset is the offset of the start of `ids`.
    pub(crate) offsets: Cow<'a, [usize]>,
    pub(crate) weights: Option<&'a [f32]>,
    /// True if sums are divided by the lengths of their bags.
    pub(crate) mean: bool,
    /// If examples have several bags, the offset of each example's bags, `[examples + 1]`.
    pub(crate) examples: Option<&'a [usize]>,
}

impl FeatureBags<'_> {
    /// Returns the range of some bags in `ids`.
    pub(super) fn range(&self, bags: &Range<usize>) -> Range<usize> {
        self.offsets[bags.start] - self.offsets[0]..self.offsets[bags.end] - self.offsets[0]
    }

    /// Returns the example of a bag.
    pub(super) fn example(&self, bag: usize) -> usize {
        self.examples.map_or(bag, |starts| starts.partition_point(|start| start - starts[0] <= bag) - 1)
    }
}

/// Bags of one feature that one replica serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Range of the feature's bags.
    pub(crate) bags: Range<usize>,
    /// Range of the feature's rows in the request.
    pub(crate) rows: Range<usize>,
}

/// Request to one replica of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyQuestion {
    /// Row of each id, bag after bag, -1 for an id without a row.
    pub(crate) rows: Vec<i64>,
    /// One entry per feature that reads the table.
    pub(crate) readings: Vec<Reading>,
}

/// Distinct rows of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Distinct {
    /// Distinct rows, ascending.
    pub(crate) rows: Vec<u64>,
    /// For each row of the request its index in `rows`, -1 for an id without a row.
    pub(crate) places: Vec<i64>,
}

impl CopyQuestion {
    /// Returns the distinct rows; remote rows are requested only once.
    pub(crate) fn distinct(&self) -> Distinct {
        let mut rows: Vec<u64> = self.rows.iter().filter_map(|row| u64::try_from(*row).ok()).collect();
        rows.sort_unstable();
        rows.dedup();
        let place = |row: &i64| match u64::try_from(*row) {
            Ok(row) => rows.partition_point(|r| *r < row) as i64,
            Err(_) => -1,
        };
        Distinct { places: self.rows.iter().map(place).collect(), rows }
    }
}

/// A batch, grouped by tables.
#[derive(Debug)]
pub(crate) struct ShardedInput<'a> {
    pub(crate) features: Vec<FeatureBags<'a>>,
    pub(super) examples: usize,
    /// Requests, `[tables, replicas of the table]`; empty for an unsharded table in memory.
    pub(crate) questions: Vec<Vec<CopyQuestion>>,
    /// For each feature, its index among the features of its table.
    pub(super) places: Vec<usize>,
}

impl ShardedInput<'_> {
    /// Returns the features that read a table, in order.
    pub(super) fn readers(&self, table: usize) -> impl Iterator<Item = &FeatureBags<'_>> {
        self.features.iter().filter(move |f| f.table == table)
    }
}

/// Resolves the ids of features to rows, and counts ids. Skips tables that are unsharded and held in memory.
pub(crate) fn distribute<'a>(
    tables: &[Arc<Table>],
    features: Vec<FeatureBags<'a>>,
    examples: usize,
    report: &mut LookupReport,
) -> ShardedInput<'a> {
    let mut questions: Vec<Vec<CopyQuestion>> = Vec::with_capacity(tables.len());
    let mut places = vec![0; features.len()];
    for (number, table) in tables.iter().enumerate() {
        if table.host_rows().is_some() {
            questions.push(Vec::new());
            continue;
        }
        let copies = table.copies();
        let mut of_table = vec![CopyQuestion::default(); copies];
        let readers = features.iter().enumerate().filter(|(_, f)| f.table == number);
        for (nth, (feature, bags)) in readers.enumerate() {
            places[feature] = nth;
            let counts = &mut report[number];
            let count = bags.offsets.len() - 1;
            for (copy, question) in of_table.iter_mut().enumerate() {
                let here = count * copy / copies..count * (copy + 1) / copies;
                let first = question.rows.len();
                table.append_rows(&bags.ids[bags.range(&here)], counts, &mut question.rows);
                question.readings.push(Reading { bags: here, rows: first..question.rows.len() });
            }
        }
        questions.push(of_table);
    }
    ShardedInput { features, examples, questions, places }
}
