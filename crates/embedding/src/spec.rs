//! Specification of a table without its rows: number, width and format of the rows, and the policy for unseen ids.

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

/// Policy for an id outside of the table's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unseen {
    /// An unseen id adds nothing to a sum, and gives a row of zeros in a sequence.
    #[default]
    Zero,
    /// An unseen id uses a row that is selected by a hash of the id.
    Hash,
    /// Every unseen id uses the row with this index.
    Row(u64),
}

impl Unseen {
    /// Parses `zero`, `hash` or `row:N`.
    ///
    /// # Errors
    /// `Invalid` for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        let row = || text.strip_prefix("row:").and_then(|n| n.parse().ok()).map(Unseen::Row);
        match text {
            "zero" => Ok(Unseen::Zero),
            "hash" => Ok(Unseen::Hash),
            _ => row().ok_or_else(|| Error::invalid(format!("unseen = `{text}`, expected zero, hash or row:N"))),
        }
    }
}

/// Specification of a table, without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Name, for errors and reports.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Width of a row, D.
    pub width: usize,
    /// Storage format.
    pub format: RowFormat,
    /// Policy for ids outside `0..rows`.
    pub unseen: Unseen,
}

impl TableSpec {
    /// Returns the bytes per row.
    ///
    /// # Errors
    /// `Invalid` if the width does not suit the format.
    pub fn row_bytes(&self) -> Result<usize> {
        self.format.row_bytes(self.width).map_err(|e| e.within(format!("table `{}`", self.name)))
    }

    /// Returns the row of an id, or `None` if the id adds nothing, and whether the id is unseen.
    pub fn resolve(&self, id: i64) -> (Option<u64>, bool) {
        if (0..self.rows as i64).contains(&id) {
            return (Some(id as u64), false);
        }
        (self.unseen_row(id), true)
    }

    /// Returns the row that the policy gives to an unseen id, if any.
    pub fn unseen_row(&self, id: i64) -> Option<u64> {
        match self.unseen {
            Unseen::Zero => None,
            Unseen::Hash => Some(xxhash_rust::xxh3::xxh3_64(&id.to_le_bytes()) % self.rows),
            Unseen::Row(row) => Some(row),
        }
    }

    pub(crate) fn checked(self) -> Result<Self> {
        self.row_bytes()?;
        let invalid = |what: String| Err(Error::invalid(format!("table `{}`: {what}", self.name)));
        if self.rows == 0 || i64::try_from(self.rows).is_err() {
            return invalid(format!("{} rows, expected 1 to {}", self.rows, i64::MAX));
        }
        match self.unseen {
            Unseen::Row(row) if row >= self.rows => {
                invalid(format!("unseen ids use row {row}, expected a row below {}", self.rows))
            }
            _ => Ok(self),
        }
    }
}
