//! Tables whose rows lie on a Redis or Valkey Cluster.

use std::ops::Range;
use std::sync::Arc;

use super::Table;
use crate::spec::TableSpec;
use crate::tiers::remote::{Cluster, LoadProgress, LoadReport, RemoteOptions, RemoteTable, RowSet, TableShape, load};
use sterling_core::error::Result;

impl Table {
    /// Returns a table whose rows are fetched from the cluster to which they were [loaded](Table::load).
    ///
    /// # Errors
    /// As [`RemoteTable::open`], and if the specification is invalid.
    pub fn on_cluster(
        cluster: &Arc<Cluster>,
        named: &RowSet,
        spec: TableSpec,
        options: &RemoteOptions,
    ) -> Result<Self> {
        let source = RemoteTable::open(cluster, named, &TableShape::of(&spec)?, options)?;
        Table::fetched(spec, Arc::new(source))
    }

    /// Loads the rows into a cluster; see [`load`].
    ///
    /// # Errors
    /// As [`load`]; `Unsupported` if the rows of this table are fetched from another source.
    pub fn load(
        &self,
        cluster: &Arc<Cluster>,
        named: &RowSet,
        progress: impl FnMut(LoadProgress),
    ) -> Result<LoadReport> {
        let bytes = self.bytes().map_err(|e| e.within(named))?;
        let shape = TableShape::of(&self.spec)?;
        let copy = |rows: Range<u64>, out: &mut [u8]| {
            out.copy_from_slice(&bytes[rows.start as usize * shape.row_bytes..][..out.len()]);
            Ok(())
        };
        load(cluster, named, &shape, copy, progress)
    }
}
