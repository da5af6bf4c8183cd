//! Resolves ids to rows. This is the first step of every lookup: shards, caches and devices know only rows.

use std::borrow::Cow;
use std::sync::Arc;

use super::Table;
use crate::managed::{self, ManagedIds};
use crate::report::TableCounts;
use sterling_core::error::Result;
use sterling_storage::files::{TensorFile, Tensors};

impl Table {
    /// Adds managed ids that were built for this table: only these ids have rows.
    pub fn with_ids(mut self, ids: ManagedIds) -> Self {
        self.ids = Some(Arc::new(ids));
        self
    }

    /// Adds the managed ids of the file that the rows come from.
    ///
    /// # Errors
    /// `Corrupt` if the tensor is missing or has another type or shape; errors of [`ManagedIds::new`].
    pub fn with_mapped_ids(self, tensors: &Tensors) -> Result<Self> {
        let (by_row, _) = tensors.get::<i64>(&managed::tensor_name(self.name()), 1)?;
        let ids = ManagedIds::new(self.spec(), by_row)?;
        Ok(self.with_ids(ids))
    }

    /// Returns the managed ids; none if ids are row numbers.
    pub fn ids(&self) -> Option<&ManagedIds> {
        self.ids.as_deref()
    }

    /// Returns the id of a value of a category: by the vocabulary, or by XXH3 in 63 bits if ids are managed. None if the table
    /// has neither a vocabulary nor managed ids.
    pub fn category_id(&self, value: &str) -> Option<i64> {
        match (&self.vocabulary, &self.ids) {
            (Some(vocabulary), _) => Some(vocabulary.id(value)),
            (None, Some(_)) => Some((xxhash_rust::xxh3::xxh3_64(value.as_bytes()) >> 1) as i64),
            (None, None) => None,
        }
    }

    /// Returns the row of an id, or `None` if the id adds nothing, and whether the id is unseen.
    pub fn resolve(&self, id: i64) -> (Option<u64>, bool) {
        match &self.ids {
            None => self.spec.resolve(id),
            Some(ids) => match ids.row(id) {
                Some(row) => (Some(row), false),
                None => (self.spec.unseen_row(id), true),
            },
        }
    }

    /// Returns the row of each id, -1 for an id without a row, and counts the ids. Borrows `ids` if all ids are row numbers.
    pub(crate) fn rows_of<'a>(&self, ids: &'a [i64], counts: &mut TableCounts) -> Cow<'a, [i64]> {
        if self.ids.is_some() {
            let mut rows = Vec::new();
            self.append_rows(ids, counts, &mut rows);
            return Cow::Owned(rows);
        }
        counts.ids += ids.len() as u64;
        // A negative id is large as an unsigned number. Without an early exit the comparison is vectorized.
        let unseen = ids.iter().filter(|&&id| id as u64 >= self.rows()).count();
        if unseen == 0 {
            return Cow::Borrowed(ids);
        }
        counts.unseen += unseen as u64;
        Cow::Owned(ids.iter().map(|&id| self.spec.resolve(id).0.map_or(-1, |row| row as i64)).collect())
    }

    /// Appends the row of each id to `rows`, -1 for an id without a row, and counts the ids.
    pub(crate) fn append_rows(&self, ids: &[i64], counts: &mut TableCounts, rows: &mut Vec<i64>) {
        match &self.ids {
            None => rows.extend_from_slice(&self.rows_of(ids, counts)),
            Some(managed) => {
                counts.ids += ids.len() as u64;
                counts.unseen += managed.append_rows(&self.spec, ids, rows);
            }
        }
    }

    pub(super) fn encode_ids<'a>(&'a self, file: &mut TensorFile<'a>) -> Result<()> {
        match &self.ids {
            None => Ok(()),
            Some(ids) => file.add::<i64>(managed::tensor_name(self.name()), &[self.rows() as usize], ids.by_row()),
        }
    }
}
