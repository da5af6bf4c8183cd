//! Tables in device memory.

use std::sync::Arc;

use super::table::Table;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_cuda::ops::bags::TableRows;
use sterling_cuda::partition::ListCut;
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::pool::Rows;

/// Tables in the memory of a device, by name; each table is copied once.
#[derive(Debug, Default)]
pub struct DeviceTables {
    copied: Vec<(String, Arc<TableRows>)>,
}

impl DeviceTables {
    /// Returns the rows of a table on the device; copies them there on first use.
    ///
    /// # Errors
    /// `Unsupported` if this host's memory does not hold the complete table; `Overloaded` if the device has not enough memory.
    pub fn copy(&mut self, device: &Device, table: &Table) -> Result<Arc<TableRows>> {
        if let Some((_, rows)) = self.copied.iter().find(|(name, _)| name == table.name()) {
            return Ok(rows.clone());
        }
        let host = whole(table)?;
        let (format, width) = (host.format(), host.width());
        let rows = Arc::new(TableRows { bytes: device.copy(host.bytes())?, format, width });
        self.copied.push((table.name().to_owned(), rows.clone()));
        Ok(rows)
    }
}

/// Copies the rows of a GPU's partition of the item slots, from a table with one row per slot. Leaves room for `spare`
/// more rows.
///
/// # Errors
/// As [`DeviceTables::copy`].
pub fn rows_of(device: &Device, table: &Table, cut: &ListCut, spare: usize) -> Result<TableRows> {
    let rows = whole(table)?;
    let (format, width) = (rows.format(), rows.width());
    Ok(TableRows { bytes: cut.copy(device, rows.bytes(), format.row_bytes(width)?, spare)?, format, width })
}

/// Returns the rows of a table that a device may copy.
///
/// # Errors
/// `Unsupported` if this host's memory does not hold the complete table.
pub fn whole(table: &Table) -> Result<Rows<'_>> {
    table.host_rows().ok_or_else(|| not_in_memory_error(table))
}

/// Returns the rows of a table that a device may copy, as bytes.
///
/// # Errors
/// As [`whole`].
pub fn whole_bytes(table: &Table) -> Result<&Buffer<u8>> {
    table.host_bytes().ok_or_else(|| not_in_memory_error(table))
}

fn not_in_memory_error(table: &Table) -> Error {
    Error::unsupported(format!(
        "table `{}` is not completely in memory, expected all its rows in this host's memory",
        table.name()
    ))
}
