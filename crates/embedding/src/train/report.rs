//! Report of a training step: which rows changed.

/// Rows that one training step changed, per table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpdateReport {
    /// One entry per table, in the order of the tables.
    pub tables: Vec<TableUpdate>,
}

/// Rows of one table that a training step changed, and ids and rows that the step left unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableUpdate {
    /// The table's name.
    pub table: String,
    /// Changed rows, ascending.
    pub rows: Vec<u32>,
    /// Rows that were reassigned to other ids after the update, ascending, each with its new id or `managed::FREE`. These rows
    /// have the initial values of their new ids.
    pub assigned: Vec<(u32, i64)>,
    /// Number of ids without a row, which are not trained.
    pub skipped_ids: u64,
    /// Rows left unchanged because the update would have made the row or its state non-finite, or a value exceed `COMPONENT_MAX`.
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
