//! Items in columns, independent of their file format.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rayon::prelude::*;

use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_index::columns::ItemColumn;
use sterling_storage::rows::RowStore;

/// Items of one or more item files, in file order. Items are in memory, except vectors that exceed the memory limit.
#[derive(Debug, Default)]
pub struct Items {
    /// Item ids, each once.
    pub ids: Vec<i64>,
    /// Columns of categories and of numbers, by name.
    pub columns: Vec<ItemColumn>,
    /// Names of all columns in order of first appearance, including columns without a value.
    pub names: Vec<String>,
    /// Index of the first item of each file after the first.
    pub files: Vec<usize>,
    /// Vector columns by name; the column [`EMBEDDING`](sterling_core::items::EMBEDDING) is indexed if the model has no item tower.
    pub dense: BTreeMap<String, RowStore<'static>>,
}

impl Items {
    /// Returns the number of items, N.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns whether a column of this name has a value.
    pub fn has(&self, name: &str) -> bool {
        self.dense.contains_key(name) || self.columns.iter().any(|column| column.name == name)
    }

    /// Splits the items into ranges of at most `most` items. A range never crosses a file boundary, so that the ranges of a file do
    /// not depend on other files.
    pub fn runs(&self, most: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.files.iter().copied().chain([self.len()]);
        let starts = [0].into_iter().chain(self.files.iter().copied());
        let of_file = move |(start, end): (usize, usize)| {
            (start..end).step_by(most).map(move |first| first..(first + most).min(end))
        };
        starts.zip(ends).flat_map(of_file)
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.is_empty() {
            true => Err(Error::invalid("no items, expected at least one")),
            false => self.check_each(),
        }
    }

    pub(super) fn check_each(&self) -> Result<()> {
        if self.len() > limits::ITEMS_MAX {
            return Err(Error::invalid(format!("{} items, expected at most {}", self.len(), limits::ITEMS_MAX)));
        }
        if let Some([first, second]) = repeated(&self.ids) {
            return Err(Error::invalid(format!(
                "id {} occurs at items {} and {}, expected each id once",
                self.ids[second],
                first + 1,
                second + 1
            )));
        }
        for (name, dense) in &self.dense {
            check_vectors(dense, |item, number| format!("item {}, number {}", item + 1, number + 1))
                .map_err(|e| e.within(format!("column `{name}`")))?;
        }
        Ok(())
    }
}

/// Checks the width of vectors, and that their numbers are finite; `place` names a row and a column in errors.
pub(super) fn check_vectors(rows: &RowStore<'_>, place: impl Fn(usize, usize) -> String) -> Result<()> {
    let width = rows.cols();
    if width == 0 || width > limits::DIMENSION_MAX {
        let most = limits::DIMENSION_MAX;
        return Err(Error::invalid(format!("vectors of {width} numbers, expected 1 to {most}")));
    }
    rows.each(|first, chunk| match chunk.data().par_iter().position_first(|v| !v.is_finite()) {
        Some(at) => Err(Error::invalid(format!(
            "{}: got {}, expected a finite number",
            place(first + at / width, at % width),
            chunk.data()[at]
        ))),
        None => Ok(()),
    })
}

/// Returns the indices of the first two items with the first repeated id.
fn repeated(ids: &[i64]) -> Option<[usize; 2]> {
    let mut sorted = ids.to_vec();
    sorted.par_sort_unstable();
    let twice: BTreeSet<i64> = sorted.windows(2).filter(|w| w[0] == w[1]).map(|w| w[0]).collect();
    drop(sorted);
    let mut first = BTreeMap::new();
    let repeats = ids.iter().enumerate().filter(|(_, id)| twice.contains(id));
    repeats.filter_map(|(row, id)| first.insert(id, row).map(|before| [before, row])).next()
}
