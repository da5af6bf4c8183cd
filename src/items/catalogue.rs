//! Items in memory, in columns, whatever file they came from.

use std::collections::{BTreeMap, HashMap};

use crate::columns::ItemColumn;
use crate::error::{Error, Result};
use crate::limits;
use crate::tensor::Matrix;

/// The name of the column that holds an item's vector.
pub const EMBEDDING: &str = "embedding";
/// The name of the column that holds an item's id.
pub const ID: &str = "id";

/// A dense column `[N, width]`.
#[derive(Clone, Debug, Default)]
pub struct Dense {
    /// Numbers of all items, row after row.
    pub values: Vec<f32>,
    /// Numbers of an item.
    pub width: usize,
}

impl Dense {
    /// The column as rows.
    ///
    /// # Errors
    /// `Invalid` where the width is 0.
    pub fn matrix(&self) -> Result<Matrix<'_>> {
        Matrix::new(&self.values, self.width)
    }
}

/// A whole item file in memory, in the file's order.
#[derive(Debug, Default)]
pub struct Items {
    /// The user's ids, each once.
    pub ids: Vec<i64>,
    /// Categories and numbers, by name.
    pub columns: Vec<ItemColumn>,
    /// Vectors by name; [`EMBEDDING`] is the one that is searched where no item tower makes it.
    pub dense: BTreeMap<String, Dense>,
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

    pub(super) fn check(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::invalid("no items, expected at least one"));
        }
        if self.len() > limits::ITEMS_MAX {
            return Err(Error::invalid(format!("{} items, expected at most {}", self.len(), limits::ITEMS_MAX)));
        }
        let mut first = HashMap::with_capacity(self.len());
        for (row, id) in self.ids.iter().enumerate() {
            if let Some(before) = first.insert(id, row) {
                return Err(Error::invalid(format!(
                    "id {id} stands at items {} and {}, expected each id once",
                    before + 1,
                    row + 1
                )));
            }
        }
        for (name, dense) in &self.dense {
            if dense.width == 0 || dense.width > limits::DIMENSION_MAX {
                return Err(Error::invalid(format!(
                    "column `{name}`: vectors of {} numbers, expected 1 to {}",
                    dense.width,
                    limits::DIMENSION_MAX
                )));
            }
            if let Some(at) = dense.values.iter().position(|v| !v.is_finite()) {
                return Err(Error::invalid(format!(
                    "column `{name}`: item {} holds {}, expected a finite number",
                    at / dense.width + 1,
                    dense.values[at]
                )));
            }
        }
        Ok(())
    }
}
