//! Categories: from a value to the id of its row.

use std::collections::HashMap;

use sterling_core::error::{Error, Result};

/// The values of a category, each with its row.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    rows: HashMap<String, i64>,
}

impl Vocabulary {
    /// One value a line; the value's line number, from 0, is its row.
    ///
    /// # Errors
    /// `Invalid` where a value comes twice.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rows = HashMap::new();
        for (row, value) in text.lines().enumerate() {
            if let Some(first) = rows.insert(value.to_owned(), row as i64) {
                return Err(Error::invalid(format!(
                    "vocabulary: `{value}` stands on lines {} and {}, expected once",
                    first + 1,
                    row + 1
                )));
            }
        }
        Ok(Vocabulary { rows })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True without values.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The row of a value, if it has one.
    pub fn row(&self, value: &str) -> Option<i64> {
        self.rows.get(value).copied()
    }

    /// The id of a value: its row, or a negative number made from the value, which is unseen in every table and so meets
    /// the table's policy (two unknown values hash to rows of their own).
    pub fn id(&self, value: &str) -> i64 {
        self.row(value).unwrap_or_else(|| xxhash_rust::xxh3::xxh3_64(value.as_bytes()) as i64 | i64::MIN)
    }
}
