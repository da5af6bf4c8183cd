//! Vocabularies: maps from values of a category to row ids.

use std::collections::HashMap;

use sterling_core::error::{Error, Result};

/// Values of a category, each with its row.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    rows: HashMap<String, i64>,
}

impl Vocabulary {
    /// Parses one value per line; the value's line number, from 0, is its row.
    ///
    /// # Errors
    /// `Invalid` for a duplicate value.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rows = HashMap::new();
        for (row, value) in text.lines().enumerate() {
            if let Some(first) = rows.insert(value.to_owned(), row as i64) {
                return Err(Error::invalid(format!(
                    "vocabulary: `{value}` occurs on lines {} and {}, expected once",
                    first + 1,
                    row + 1
                )));
            }
        }
        Ok(Vocabulary { rows })
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if there are no values.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the row of a value, if the vocabulary has the value.
    pub fn row(&self, value: &str) -> Option<i64> {
        self.rows.get(value).copied()
    }

    /// Returns the id of a value: its row, or a negative number derived from the value. Negative ids are unseen in every table,
    /// so the table's policy applies (two unknown values hash to different rows).
    pub fn id(&self, value: &str) -> i64 {
        self.row(value).unwrap_or_else(|| xxhash_rust::xxh3::xxh3_64(value.as_bytes()) as i64 | i64::MIN)
    }
}
