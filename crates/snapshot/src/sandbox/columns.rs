//! Checks item columns that the reranker reads, before an item with such columns is accepted.
//!
//! Publishing scores the items of a version. Items that are added later are checked by this module: the reranker is run for a
//! sample user and a sample candidate, for which the sandbox has shown a finite result, with the item's numbers in place of the
//! sample's. Only these numbers can thus cause an invalid result, at the cost of one candidate per item and without the item's row.

use std::sync::OnceLock;

use super::rows::{Bench, UserCandidates};
use super::samples;
use crate::model::Package;
use sterling_core::error::Result;
use sterling_graph::dense::InputRows;
use sterling_graph::tower::{self, OverArch, Threads};

/// Sample number of the candidate that is scored.
const CANDIDATE: usize = 0;
/// Maximum number of invalid items whose causing column is determined.
const NAMED_MAX: usize = 64;

/// Check of the item columns that a model's reranker reads.
#[derive(Debug)]
pub struct ColumnCheck {
    /// The reranker with all its inputs, if the served reranker is split at a precomputation.
    unsplit: Option<OverArch>,
    columns: Vec<String>,
    /// Inputs of the sample user and candidate; created for the first checked item.
    sample: OnceLock<Option<Sample>>,
}

#[derive(Debug)]
struct Sample {
    user: Vec<Vec<f32>>,
    row: Vec<f32>,
}

/// A column whose number makes an output of the reranker NaN or infinite.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidNumber {
    /// Index of the invalid item among the checked items.
    pub item: usize,
    /// Index of the column in [`ColumnCheck::columns`], if one column alone is the cause; determined for the first 64 items.
    pub column: Option<usize>,
}

impl ColumnCheck {
    /// Prepares the check of a package; `None` if its reranker reads no item columns.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub fn of(package: &Package) -> Result<Option<Self>> {
        let Some(overarch) = &package.overarch else { return Ok(None) };
        let columns: Vec<String> = overarch.declared().columns().map(str::to_owned).collect();
        if columns.is_empty() {
            return Ok(None);
        }
        Ok(Some(ColumnCheck { unsplit: package.unsplit_reranker()?, columns, sample: OnceLock::new() }))
    }

    /// Returns the names of the checked columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns those of `items` (one number per column each) for which an output of the reranker is NaN or infinity. Returns no
    /// items if the reranker cannot run, or is undefined for the sample too.
    pub fn invalid(&self, package: &Package, items: &[Vec<f32>]) -> Vec<InvalidNumber> {
        let served = package.overarch.as_ref();
        let Some(overarch) = self.unsplit.as_ref().or(served).filter(|_| !items.is_empty()) else { return Vec::new() };
        let Some(sample) = self.sample.get_or_init(|| self.sample(package, overarch)) else { return Vec::new() };
        let mut run =
            Run { check: self, overarch, sample, threads: Threads::new(1), scratch: tower::Scratch::default() };
        let invalid = run.not_finite(items);
        // Scores each invalid item again, with one column at a time replaced by the sample's number.
        let ordinary = run.ordinary();
        let named = &invalid[..invalid.len().min(NAMED_MAX)];
        let replaced = |&item: &usize| {
            let ordinary = &ordinary;
            (0..ordinary.len()).map(move |column| {
                let mut numbers = items[item].clone();
                numbers[column] = ordinary[column];
                numbers
            })
        };
        let still_invalid = run.not_finite(&named.iter().flat_map(replaced).collect::<Vec<_>>());
        let cause = |n: usize| {
            let is_cause = |column: &usize| still_invalid.binary_search(&(n * ordinary.len() + column)).is_err();
            (0..ordinary.len()).find(is_cause).filter(|_| n < named.len())
        };
        invalid.iter().enumerate().map(|(n, &item)| InvalidNumber { item, column: cause(n) }).collect()
    }

    fn sample(&self, package: &Package, overarch: &OverArch) -> Option<Sample> {
        let width = package.spec.dimension * package.spec.query_count();
        let query: Vec<f32> = (0..width).map(samples::fraction).collect();
        let mut bench = Bench::new(package, &|_| ());
        // A user without features needs no rows of tables, which may lie on other hosts.
        let user = bench.user(&query, samples::BLANK).ok()?;
        let mut row = vec![0.0; overarch.row_width()];
        samples::candidate(package, overarch, CANDIDATE, &mut row);
        let sample = Sample { user, row };
        let mut run = Run {
            check: self,
            overarch,
            sample: &sample,
            threads: Threads::new(1),
            scratch: tower::Scratch::default(),
        };
        let ordinary = run.ordinary();
        run.not_finite(&[ordinary]).is_empty().then_some(sample)
    }
}

/// Runs the reranker over items.
struct Run<'a> {
    check: &'a ColumnCheck,
    overarch: &'a OverArch,
    sample: &'a Sample,
    threads: Threads,
    scratch: tower::Scratch,
}

impl Run<'_> {
    /// Returns the numbers of the sample candidate, by column.
    fn ordinary(&self) -> Vec<f32> {
        let numbers = samples::numbers(self.overarch, &[CANDIDATE]);
        let named = self.overarch.numbers().zip(numbers).filter(|(name, _)| *name != OverArch::SIMILARITY);
        named.map(|(_, number)| number[0]).collect()
    }

    /// Returns the items, in their order, for which an output is NaN or infinity.
    fn not_finite(&mut self, items: &[Vec<f32>]) -> Vec<usize> {
        let of_sample = samples::numbers(self.overarch, &[CANDIDATE]);
        let numbers = self.overarch.numbers().zip(of_sample).map(|(name, sample)| {
            match self.check.columns.iter().position(|column| column == name) {
                Some(column) => items.iter().map(|numbers| numbers[column]).collect(),
                None => vec![sample[0]; items.len()],
            }
        });
        let numbers: Vec<Vec<f32>> = numbers.collect();
        let Sample { user, row } = self.sample;
        let rows = |given: InputRows<'_>| given.each(|_, to| to.copy_from_slice(row));
        let given =
            UserCandidates { overarch: self.overarch, user, count: items.len(), numbers: &numbers, rows: &rows };
        let mut tasks = vec![0.0; self.overarch.tasks() * items.len()];
        // A run that fails does not show whether the items are valid.
        if given.score(&self.threads, &mut self.scratch, None, &mut tasks).unwrap_or(true) {
            return Vec::new();
        }
        let mut items = self.scratch.not_finite().to_vec();
        items.sort_unstable();
        items.dedup();
        items
    }
}
