//! What a table is, apart from its rows: their number, width and format, and the fate of ids that are none of them.

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

/// What becomes of an id that is no row of its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unseen {
    /// It adds nothing to a sum and is a row of zeros in a sequence.
    #[default]
    Zero,
    /// It takes a row chosen by a hash of the id.
    Hash,
    /// It takes this row.
    Row(u64),
}

impl Unseen {
    /// Reads `zero`, `hash` or `row:N`.
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

/// What a table is, apart from its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Its name, for errors and reports.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Numbers of a row, D.
    pub width: usize,
    /// How they are stored.
    pub format: RowFormat,
    /// The fate of ids outside `0..rows`.
    pub unseen: Unseen,
}

impl TableSpec {
    /// Bytes of a row.
    ///
    /// # Errors
    /// `Invalid` where the width does not suit the format.
    pub fn row_bytes(&self) -> Result<usize> {
        self.format.row_bytes(self.width).map_err(|e| e.within(format!("table `{}`", self.name)))
    }

    /// The row that an id takes: none where it adds nothing. The flag says that the id was unseen.
    pub fn resolve(&self, id: i64) -> (Option<u64>, bool) {
        if (0..self.rows as i64).contains(&id) {
            return (Some(id as u64), false);
        }
        let row = match self.unseen {
            Unseen::Zero => None,
            Unseen::Hash => Some(xxhash_rust::xxh3::xxh3_64(&id.to_le_bytes()) % self.rows),
            Unseen::Row(row) => Some(row),
        };
        (row, true)
    }

    pub(crate) fn checked(self) -> Result<Self> {
        self.row_bytes()?;
        let wrong = |what: String| Err(Error::invalid(format!("table `{}`: {what}", self.name)));
        if self.rows == 0 || i64::try_from(self.rows).is_err() {
            return wrong(format!("{} rows, expected 1 to {}", self.rows, i64::MAX));
        }
        match self.unseen {
            Unseen::Row(row) if row >= self.rows => {
                wrong(format!("unseen ids take row {row}, expected one below {}", self.rows))
            }
            _ => Ok(self),
        }
    }
}
