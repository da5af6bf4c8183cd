//! Step 1: from ids of features to rows of shards.
//!
//! The bags of all features that read a table are bags of one question, feature after feature, so that a shard is asked once a
//! batch. Copies of a table share the bags: copy c of n takes the bags from `len c / n` to `len (c + 1) / n` of each feature.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::embedding::report::LookupReport;
use crate::embedding::table::Table;

/// The bags of one feature and the table they read.
#[derive(Debug)]
pub(in crate::embedding) struct FeatureBags<'a> {
    /// Its place among the tables.
    pub(in crate::embedding) table: usize,
    pub(in crate::embedding) ids: &'a [i64],
    /// `[bags + 1]`; the first one is where `ids` start.
    pub(in crate::embedding) offsets: Cow<'a, [usize]>,
    pub(in crate::embedding) weights: Option<&'a [f32]>,
    /// Sums are divided by the lengths of their bags.
    pub(in crate::embedding) mean: bool,
    /// Where each example's bags start, `[examples + 1]`, where an example has several.
    pub(in crate::embedding) examples: Option<&'a [usize]>,
}

impl FeatureBags<'_> {
    /// Where the ids of a bag stand in `ids`.
    fn range(&self, bag: usize) -> Range<usize> {
        self.offsets[bag] - self.offsets[0]..self.offsets[bag + 1] - self.offsets[0]
    }

    /// The example that a bag is of.
    pub(super) fn example(&self, bag: usize) -> usize {
        self.examples.map_or(bag, |starts| starts.partition_point(|start| start - starts[0] <= bag) - 1)
    }

    /// The length of each bag.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.offsets.windows(2).map(|w| w[1] - w[0])
    }
}

/// What the shards of some rows are asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::embedding) struct ShardQuestion {
    rows: Vec<i64>,
    offsets: Vec<usize>,
    weights: Option<Vec<f32>>,
    /// Of each feature that reads the table, the bags that are here.
    bags: Vec<Range<usize>>,
}

/// The rows of a question, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::embedding) struct Distinct {
    /// Rising.
    pub(in crate::embedding) rows: Vec<u64>,
    /// For each row of the question its place in `rows`.
    pub(in crate::embedding) places: Vec<i64>,
}

impl ShardQuestion {
    /// Rows of the shard, counted from its first, bag after bag.
    pub(in crate::embedding) fn rows(&self) -> &[i64] {
        &self.rows
    }

    /// Where each bag starts, `[bags + 1]`.
    pub(in crate::embedding) fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Weights beside the rows.
    pub(in crate::embedding) fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    /// Of each feature that reads the table, the bags that are asked for here.
    pub(in crate::embedding) fn bags(&self) -> &[Range<usize>] {
        &self.bags
    }

    /// The rows each once: what travels where a shard's rows are elsewhere.
    pub(in crate::embedding) fn distinct(&self) -> Distinct {
        let mut rows: Vec<u64> = self.rows.iter().map(|r| *r as u64).collect();
        rows.sort_unstable();
        rows.dedup();
        let place = |row: &i64| rows.partition_point(|r| *r < *row as u64) as i64;
        Distinct { places: self.rows.iter().map(place).collect(), rows }
    }
}

/// A batch, told apart by shards.
#[derive(Debug)]
pub(in crate::embedding) struct ShardedInput<'a> {
    pub(in crate::embedding) features: Vec<FeatureBags<'a>>,
    pub(super) examples: usize,
    /// `[tables, groups of the table]`; none for a table that is whole in memory.
    pub(super) questions: Vec<Vec<ShardQuestion>>,
    /// For each feature which of its table's features it is.
    pub(super) places: Vec<usize>,
}

impl ShardedInput<'_> {
    /// The features that read a table, in order.
    pub(super) fn readers(&self, table: usize) -> impl Iterator<Item = &FeatureBags<'_>> {
        self.features.iter().filter(move |f| f.table == table)
    }

    /// What the shards of table number `table` are asked: one question for each set of shards with the same rows, by copy
    /// and then by first row.
    #[cfg(test)]
    pub(in crate::embedding) fn questions(&self, table: usize) -> &[ShardQuestion] {
        &self.questions[table]
    }
}

/// Tells the bags of features apart by the shards of their tables, and counts ids. Tables that are whole in memory are passed over.
pub(in crate::embedding) fn distribute<'a>(
    tables: &[Arc<Table>],
    features: Vec<FeatureBags<'a>>,
    examples: usize,
    report: &mut LookupReport,
) -> ShardedInput<'a> {
    let mut questions: Vec<Vec<ShardQuestion>> = Vec::with_capacity(tables.len());
    let mut places = vec![0; features.len()];
    for (number, table) in tables.iter().enumerate() {
        if table.host_rows().is_some() {
            questions.push(Vec::new());
            continue;
        }
        let readers = || features.iter().enumerate().filter(|(_, f)| f.table == number);
        let weighted = readers().any(|(_, f)| f.weights.is_some());
        let empty = ShardQuestion { offsets: vec![0], weights: weighted.then(Vec::new), ..ShardQuestion::default() };
        let mut of_table = vec![empty; table.groups().len()];
        for (nth, (feature, bags)) in readers().enumerate() {
            places[feature] = nth;
            let counts = &mut report[number];
            counts.ids += bags.ids.len() as u64;
            counts.unseen += bucketise(table, bags, &mut of_table);
        }
        questions.push(of_table);
    }
    ShardedInput { features, examples, questions, places }
}

/// Adds the bags of one feature to the questions of the groups; the number of unseen ids.
fn bucketise(table: &Table, feature: &FeatureBags<'_>, questions: &mut [ShardQuestion]) -> u64 {
    let (bags, copies) = (feature.offsets.len() - 1, table.copies());
    let mut unseen = 0;
    for copy in 0..copies {
        let first = table.groups().partition_point(|g| g.copy < copy);
        let of_copy = table.groups()[first..].partition_point(|g| g.copy == copy);
        let groups = &table.groups()[first..first + of_copy];
        let questions = &mut questions[first..first + of_copy];
        let here = bags * copy / copies..bags * (copy + 1) / copies;
        questions.iter_mut().for_each(|q| q.bags.push(here.clone()));
        for bag in here {
            for at in feature.range(bag) {
                let (row, is_unseen) = table.resolve(feature.ids[at]);
                unseen += u64::from(is_unseen);
                let Some(row) = row else { continue };
                let group = groups.partition_point(|g| g.rows.end <= row);
                let question = &mut questions[group];
                question.rows.push((row - groups[group].rows.start) as i64);
                if let Some(weights) = &mut question.weights {
                    weights.push(feature.weights.map_or(1.0, |w| w[at]));
                }
            }
            questions.iter_mut().for_each(|q| q.offsets.push(q.rows.len()));
        }
    }
    unseen
}
