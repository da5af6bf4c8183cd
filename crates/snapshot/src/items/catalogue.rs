//! Items in columns, whatever file they came from.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rayon::prelude::*;

use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_index::columns::ItemColumn;
use sterling_storage::rows::RowStore;

/// The name of the column that holds an item's vector.
pub const EMBEDDING: &str = "embedding";
/// The name of the column that holds an item's id.
pub const ID: &str = "id";

/// A whole item file, in the file's order: in memory but for vectors that memory was not to hold.
#[derive(Debug, Default)]
pub struct Items {
    /// The user's ids, each once.
    pub ids: Vec<i64>,
    /// Categories and numbers, by name.
    pub columns: Vec<ItemColumn>,
    /// The names of all columns in the order in which they first came, also of those without a value.
    pub names: Vec<String>,
    /// The number of the first item of each file after the first.
    pub files: Vec<usize>,
    /// Vectors by name; [`EMBEDDING`] is the one that is searched where no item tower makes it.
    pub dense: BTreeMap<String, RowStore<'static>>,
}

impl Items {
    /// Number of items, N.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Whether there is a column of this name with a value.
    pub fn has(&self, name: &str) -> bool {
        self.dense.contains_key(name) || self.columns.iter().any(|column| column.name == name)
    }

    /// The items in runs of at most so many; none goes over the end of a file, so that a file's are the same whatever is read with it.
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
                "id {} stands at items {} and {}, expected each id once",
                self.ids[second],
                first + 1,
                second + 1
            )));
        }
        for (name, dense) in &self.dense {
            let place = |e: Error| e.within(format!("column `{name}`"));
            let width = dense.cols();
            if width == 0 || width > limits::DIMENSION_MAX {
                let most = limits::DIMENSION_MAX;
                return Err(place(Error::invalid(format!("vectors of {width} numbers, expected 1 to {most}"))));
            }
            let finite =
                |first: usize, chunk: Matrix<'_>| match chunk.data().par_iter().position_first(|v| !v.is_finite()) {
                    Some(at) => Err(Error::invalid(format!(
                        "item {} holds {}, expected a finite number",
                        first + at / width + 1,
                        chunk.data()[at]
                    ))),
                    None => Ok(()),
                };
            dense.each(finite).map_err(place)?;
        }
        Ok(())
    }
}

/// The first two places of the id that is the first to come a second time.
fn repeated(ids: &[i64]) -> Option<[usize; 2]> {
    let mut sorted = ids.to_vec();
    sorted.par_sort_unstable();
    let twice: BTreeSet<i64> = sorted.windows(2).filter(|w| w[0] == w[1]).map(|w| w[0]).collect();
    drop(sorted);
    let mut first = BTreeMap::new();
    let repeats = ids.iter().enumerate().filter(|(_, id)| twice.contains(id));
    repeats.filter_map(|(row, id)| first.insert(id, row).map(|before| [before, row])).next()
}
