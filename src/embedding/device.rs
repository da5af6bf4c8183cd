//! Tables in the memory of a device.

use std::sync::Arc;

use super::table::Table;
use crate::device::cpu::pool::Rows;
use crate::device::cuda::Device;
use crate::device::cuda::ops::bags::TableRows;
use crate::error::{Error, Result};

/// Tables in the memory of a device, by their names, each once.
#[derive(Debug, Default)]
pub struct DeviceTables {
    copied: Vec<(String, Arc<TableRows>)>,
}

impl DeviceTables {
    /// The rows of a table, copied where they are not there yet.
    ///
    /// # Errors
    /// `Unsupported` where the table is not whole in the memory of this host; `Overloaded` where the device has not enough memory.
    pub fn copy(&mut self, device: &Device, table: &Table) -> Result<Arc<TableRows>> {
        if let Some((_, rows)) = self.copied.iter().find(|(name, _)| name == table.name()) {
            return Ok(rows.clone());
        }
        let rows = Arc::new(rows_of(device, table, 0)?);
        self.copied.push((table.name().to_owned(), rows.clone()));
        Ok(rows)
    }
}

/// The rows of a table of its own in the memory of a device, with room for `spare` more.
///
/// # Errors
/// As [`DeviceTables::copy`].
pub fn rows_of(device: &Device, table: &Table, spare: usize) -> Result<TableRows> {
    let rows = whole(table)?;
    let more = spare * rows.format().row_bytes(rows.width())?;
    Ok(TableRows { bytes: device.copy_with_room(rows.bytes(), more)?, format: rows.format(), width: rows.width() })
}

/// The rows of a table that a device may copy.
///
/// # Errors
/// `Unsupported` where it is not whole in the memory of this host.
pub fn whole(table: &Table) -> Result<Rows<'_>> {
    table.host_rows().ok_or_else(|| Error::unsupported(format!("table `{}` is not whole in memory", table.name())))
}
