//! Filterable columns in GPU memory.

use super::view::Columns;
use sterling_core::error::Result;
use sterling_cuda::ops::words::ColumnAt;
use sterling_cuda::partition::ListCut;
use sterling_cuda::{Array, Device};

/// Codes and numbers of the filterable columns; dictionaries stay on the host.
#[derive(Debug)]
pub struct DeviceColumns {
    places: Vec<ColumnAt>,
    codes: Vec<Array<u32>>,
    floats: Vec<Array<f64>>,
}

impl DeviceColumns {
    /// Copies this GPU's partition of the filterable columns.
    ///
    /// # Errors
    /// `Overloaded` if the device has not enough memory.
    pub fn copy(device: &Device, columns: &Columns, cut: &ListCut) -> Result<Self> {
        let mut all = DeviceColumns { places: Vec::new(), codes: Vec::new(), floats: Vec::new() };
        for column in columns.list() {
            let mut place = ColumnAt::default();
            if let Some(floats) = column.floats().filter(|_| column.is_filterable()) {
                all.floats.push(cut.copy(device, floats, 1, 0)?);
                place.floats = all.floats[all.floats.len() - 1].address();
            } else if column.is_filterable() {
                let (offsets, codes) = column.all_codes();
                let (offsets, codes) = cut.gather_ragged(offsets, codes);
                let (offsets, codes) = (device.copy(&offsets)?, device.copy(&codes)?);
                (place.offsets, place.codes) = (offsets.address(), codes.address());
                all.codes.extend([offsets, codes]);
            }
            all.places.push(place);
        }
        Ok(all)
    }

    /// Returns the device addresses of the columns, in column order.
    pub fn places(&self) -> &[ColumnAt] {
        &self.places
    }

    /// Returns the device memory in bytes.
    pub fn bytes(&self) -> usize {
        self.codes.iter().map(Array::bytes).sum::<usize>() + self.floats.iter().map(Array::bytes).sum::<usize>()
    }
}
