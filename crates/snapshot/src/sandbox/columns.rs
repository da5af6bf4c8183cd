//! Checks item columns that the reranker reads, before an item with them is accepted.
//!
//! Publishing scores the items of a version. Items that come later are checked here: the reranker is run for a sample user and a
//! sample candidate, for which the sandbox has shown it to be defined, with the numbers of the item in place of the sample's. So
//! the numbers alone decide, at the cost of one candidate per item and without the item's row.

use std::sync::OnceLock;

use super::rows::{Bench, UserCandidates};
use super::samples;
use crate::model::Package;
use sterling_core::error::Result;
use sterling_graph::dense::InputRows;
use sterling_graph::tower::{self, OverArch, Threads};

/// Sample candidate.
const CANDIDATE: usize = 0;

/// Check of the item columns that a model's reranker reads.
#[derive(Debug)]
pub struct ColumnCheck {
    /// The reranker with all its inputs, if the served one is split.
    unsplit: Option<OverArch>,
    columns: Vec<String>,
    /// Inputs of the sample; made for the first item.
    sample: OnceLock<Option<Sample>>,
}

#[derive(Debug)]
struct Sample {
    user: Vec<Vec<f32>>,
    row: Vec<f32>,
}

/// Column whose number leaves the reranker without a finite result.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidNumber {
    /// Index of the item among the checked ones.
    pub item: usize,
    /// Index of the column in [`ColumnCheck::columns`], if one column alone is the cause.
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

    /// Names of the checked columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns the items, of which `numbers` holds one number per column, for which an output of the reranker is NaN or infinity.
    /// Returns none if the reranker cannot run, or is undefined for the sample too.
    pub fn invalid(&self, package: &Package, items: &[Vec<f32>]) -> Vec<InvalidNumber> {
        let served = package.overarch.as_ref();
        let Some(overarch) = self.unsplit.as_ref().or(served).filter(|_| !items.is_empty()) else { return Vec::new() };
        let Some(sample) = self.sample.get_or_init(|| self.sample(package, overarch)) else { return Vec::new() };
        let mut run =
            Run { check: self, overarch, sample, threads: Threads::new(1), scratch: tower::Scratch::default() };
        if run.is_finite(items) {
            return Vec::new();
        }
        let invalid = |(item, numbers): (usize, &Vec<f32>)| {
            if run.is_finite(std::slice::from_ref(numbers)) {
                return None;
            }
            let ordinary = run.ordinary();
            let column = (0..numbers.len()).find(|&column| {
                let mut changed = numbers.clone();
                changed[column] = ordinary[column];
                run.is_finite(&[changed])
            });
            Some(InvalidNumber { item, column })
        };
        items.iter().enumerate().filter_map(invalid).collect()
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
        run.is_finite(&[ordinary]).then_some(sample)
    }
}

/// Run of the reranker over items.
struct Run<'a> {
    check: &'a ColumnCheck,
    overarch: &'a OverArch,
    sample: &'a Sample,
    threads: Threads,
    scratch: tower::Scratch,
}

impl Run<'_> {
    /// Returns the sample's numbers, by column.
    fn ordinary(&self) -> Vec<f32> {
        let numbers = samples::numbers(self.overarch, &[CANDIDATE]);
        let named = self.overarch.numbers().zip(numbers).filter(|(name, _)| *name != OverArch::SIMILARITY);
        named.map(|(_, number)| number[0]).collect()
    }

    fn is_finite(&mut self, items: &[Vec<f32>]) -> bool {
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
        // A run that fails says nothing about the items.
        given.score(&self.threads, &mut self.scratch, None, &mut tasks).unwrap_or(true)
    }
}
