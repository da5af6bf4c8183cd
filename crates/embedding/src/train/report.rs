//! Changes of a training step.

/// Changes of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpdateReport {
    /// One entry per table.
    pub tables: Vec<TableUpdate>,
}

/// Changes of a step in one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableUpdate {
    /// The table's name.
    pub table: String,
    /// Changed rows, ascending.
    pub rows: Vec<u32>,
    /// Rows of managed ids that changed hands after the update, ascending, each with its new id or `managed::FREE`. They have the
    /// initial values of these ids.
    pub assigned: Vec<(u32, i64)>,
    /// Ids without a row, which are not trained.
    pub skipped_ids: u64,
    /// Rows left unchanged because the update would have made row or state non-finite, or a value exceed `COMPONENT_MAX`.
    pub rejected_rows: Vec<u32>,
}

impl UpdateReport {
    /// Returns the number of updated rows of all tables.
    pub fn updated_rows(&self) -> usize {
        self.tables.iter().map(|table| table.rows.len()).sum()
    }

    /// Returns the rejected rows with their table.
    pub fn rejected_rows(&self) -> impl Iterator<Item = (&str, u32)> {
        self.tables.iter().flat_map(|t| t.rejected_rows.iter().map(move |row| (t.table.as_str(), *row)))
    }
}
