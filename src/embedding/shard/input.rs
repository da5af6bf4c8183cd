//! Step 1: from ids of features to rows of shards.
//!
//! The bags of all features that read a table are bags of one question, feature after feature, so that a shard is asked once a
//! batch. Copies of a table share the bags: copy c of n takes the bags from `len c / n` to `len (c + 1) / n` of each feature.

use std::ops::Range;
use std::sync::Arc;

use super::{ShardedTable, new_report};
use crate::embedding::lookup::LookupReport;

/// The bags of one feature and the table they read.
pub(super) struct Asked<'a> {
    pub table: usize,
    pub ids: &'a [i64],
    /// `[bags + 1]`, from 0.
    pub offsets: Vec<usize>,
    pub weights: Option<&'a [f32]>,
}

/// What the shards of some rows are asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Question {
    rows: Vec<i64>,
    offsets: Vec<usize>,
    weights: Option<Vec<f32>>,
    /// Of each feature that reads the table, the bags that are here.
    bags: Vec<Range<usize>>,
}

/// The rows of a question, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distinct {
    /// Rising.
    pub rows: Vec<u64>,
    /// For each row of the question its place in `rows`.
    pub places: Vec<i64>,
}

impl Question {
    /// Rows of the shard, counted from its first, bag after bag.
    pub fn rows(&self) -> &[i64] {
        &self.rows
    }

    /// Where each bag starts, `[bags + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Weights beside the rows.
    pub fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    /// Of each feature that reads the table, the bags that are asked for here.
    pub fn bags(&self) -> &[Range<usize>] {
        &self.bags
    }

    /// The rows each once: what travels where a shard's rows are elsewhere.
    pub fn distinct(&self) -> Distinct {
        let mut rows: Vec<u64> = self.rows.iter().map(|r| *r as u64).collect();
        rows.sort_unstable();
        rows.dedup();
        let place = |row: &i64| rows.partition_point(|r| *r < *row as u64) as i64;
        Distinct { places: self.rows.iter().map(place).collect(), rows }
    }
}

/// A batch, told apart by shards.
#[derive(Clone, Debug)]
pub struct Input {
    /// `[tables, groups of the table]`.
    pub(super) questions: Vec<Vec<Question>>,
    /// For each feature its table, and which of the table's features it is.
    pub(super) places: Vec<(usize, usize)>,
    /// For each feature the length of each bag, before rows were told apart.
    pub(super) lengths: Vec<Vec<usize>>,
    pub(super) report: LookupReport,
    examples: usize,
}

impl Input {
    /// What the shards of table number `table` are asked: one question for each set of shards with the same rows, by copy
    /// and then by first row.
    pub fn questions(&self, table: usize) -> &[Question] {
        &self.questions[table]
    }

    /// Number of examples, B.
    pub fn examples(&self) -> usize {
        self.examples
    }
}

pub(super) fn distribute(tables: &[Arc<ShardedTable>], asked: &[Asked<'_>], examples: usize) -> Input {
    let mut report = new_report(tables);
    let mut questions: Vec<Vec<Question>> = Vec::with_capacity(tables.len());
    let mut places = vec![(0, 0); asked.len()];
    for (number, table) in tables.iter().enumerate() {
        let weighted = asked.iter().any(|a| a.table == number && a.weights.is_some());
        let empty = Question { offsets: vec![0], weights: weighted.then(Vec::new), ..Question::default() };
        let mut of_table = vec![empty; table.groups.len()];
        let readers = asked.iter().enumerate().filter(|(_, a)| a.table == number);
        for (nth, (feature, reader)) in readers.enumerate() {
            places[feature] = (number, nth);
            let counts = &mut report[number];
            counts.ids += reader.ids.len() as u64;
            counts.unseen += bucketise(table, reader, &mut of_table);
        }
        questions.push(of_table);
    }
    let lengths = asked.iter().map(|a| a.offsets.windows(2).map(|w| w[1] - w[0]).collect()).collect();
    Input { questions, places, lengths, report, examples }
}

/// Adds the bags of one feature to the questions of the groups; the number of unseen ids.
fn bucketise(table: &ShardedTable, asked: &Asked<'_>, questions: &mut [Question]) -> u64 {
    let bags = asked.offsets.len() - 1;
    let mut unseen = 0;
    for copy in 0..table.copies {
        let first = table.groups.partition_point(|g| g.copy < copy);
        let groups = &table.groups[first..first + table.groups[first..].partition_point(|g| g.copy == copy)];
        let questions = &mut questions[first..first + groups.len()];
        let here = bags * copy / table.copies..bags * (copy + 1) / table.copies;
        questions.iter_mut().for_each(|q| q.bags.push(here.clone()));
        for bag in here {
            for at in asked.offsets[bag]..asked.offsets[bag + 1] {
                let (row, is_unseen) = table.spec.resolve(asked.ids[at]);
                unseen += u64::from(is_unseen);
                let Some(row) = row else { continue };
                let group = groups.partition_point(|g| g.rows.end <= row);
                let question = &mut questions[group];
                question.rows.push((row - groups[group].rows.start) as i64);
                if let Some(weights) = &mut question.weights {
                    weights.push(asked.weights.map_or(1.0, |w| w[at]));
                }
            }
            questions.iter_mut().for_each(|q| q.offsets.push(q.rows.len()));
        }
    }
    unseen
}
