//! Per-item tensors, `[[item.vectors]]`: encodes their rows in storage formats.
//!
//! A row is converted to its format once, when its item is published or updated. The encoded bytes are then copied unchanged to
//! slots, segments and later versions, so that quantized values are never quantized again.

use crate::model::VectorSpec;
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_embedding::format::encode_row;
use sterling_embedding::{RowFormat, Table, TableSpec, Unseen};
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::Tensors;

/// Layout of the concatenated rows of an item in all `[[item.vectors]]`.
#[derive(Clone, Debug)]
pub struct VectorRows<'a> {
    /// Tensors, each with its bytes per row.
    specs: Vec<(&'a VectorSpec, usize)>,
}

impl<'a> VectorRows<'a> {
    /// Returns the layout of these tensors, in their order.
    ///
    /// # Errors
    /// `Invalid` for a width that does not suit the format.
    pub fn of(specs: &'a [VectorSpec]) -> Result<Self> {
        let bytes = |spec: &'a VectorSpec| Ok((spec, spec.format.row_bytes(spec.width).map_err(|e| place(spec, e))?));
        Ok(VectorRows { specs: specs.iter().map(bytes).collect::<Result<_>>()? })
    }

    /// Returns the bytes of all rows of an item.
    pub fn bytes(&self) -> usize {
        self.specs.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Appends the rows of an item; `values` returns the numbers of each tensor.
    ///
    /// # Errors
    /// `Invalid` with the tensor if the count of numbers differs from the tensor's width, or if the numbers cannot be stored in its
    /// format.
    pub fn encode<'v>(&self, values: impl Fn(usize) -> &'v [f32], out: &mut Vec<u8>) -> Result<()> {
        for (n, (spec, bytes)) in self.specs.iter().enumerate() {
            let (row, from) = (values(n), out.len());
            if row.len() != spec.width {
                let what = format!("{} numbers, expected {}", row.len(), spec.width);
                return Err(place(spec, Error::invalid(what)));
            }
            out.resize(from + bytes, 0);
            encode_row(spec.format, row, &mut out[from..]).map_err(|e| place(spec, e))?;
        }
        Ok(())
    }

    /// Builds tables with one row per slot; `row` returns the rows of the item in a slot; `None` results in rows of zeros.
    ///
    /// # Errors
    /// `Overloaded` if the memory cannot be allocated.
    pub fn tables<'r>(&self, slots: usize, row: impl Fn(usize) -> Option<&'r [u8]>) -> Result<Vec<Table>> {
        let mut from = 0;
        let table = |&(spec, bytes): &(&VectorSpec, usize)| {
            let here = from..from + bytes;
            from = here.end;
            let mut zeros = vec![0; bytes];
            encode_row(spec.format, &vec![0.0; spec.width], &mut zeros)?;
            let all = Buffer::filled(slots * bytes, |out: &mut [u8]| {
                for (slot, out) in out.chunks_exact_mut(bytes).enumerate() {
                    out.copy_from_slice(row(slot).map_or(zeros.as_slice(), |row| &row[here.clone()]));
                }
            })?;
            Table::host(table_spec(&spec.name, (spec.format, spec.width), slots), all)
        };
        self.specs.iter().map(table).collect()
    }

    /// Appends the rows of one slot from the tables that [`VectorRows::tables`] made.
    pub fn read(&self, tables: &[Table], slot: Slot, out: &mut Vec<u8>) {
        for ((_, bytes), table) in self.specs.iter().zip(tables) {
            let rows = table.host_rows().map_or(&[][..], |rows| rows.bytes());
            out.extend_from_slice(&rows[slot.index() * bytes..][..*bytes]);
        }
    }
}

/// Opens the tables of a version's file, each with one row per slot.
///
/// # Errors
/// `Corrupt` with a tensor that is missing or has another shape.
pub fn open(specs: &[VectorSpec], tensors: &Tensors, slots: usize) -> Result<Vec<Table>> {
    let table = |spec: &VectorSpec| {
        let table = open_table(tensors, &spec.name, (spec.format, spec.width), slots);
        table.map_err(|e| e.within(format!("item vectors `{}`", spec.name)))
    };
    specs.iter().map(table).collect()
}

/// Opens a table with one row per slot.
pub(super) fn open_table(
    tensors: &Tensors,
    name: &str,
    (format, width): (RowFormat, usize),
    slots: usize,
) -> Result<Table> {
    let table = Table::mapped(tensors, name, format.is_quantised().then_some(format), Unseen::Zero)?;
    let found = (table.rows(), table.width(), table.spec().format);
    if found != (slots as u64, width, format) {
        return Err(Error::corrupt(format!(
            "got {} rows of {} numbers in {}, expected {slots} rows of {width} numbers in {}",
            found.0,
            found.1,
            found.2.name(),
            format.name()
        )));
    }
    Ok(table)
}

/// Returns the specification of a table with one row per slot.
pub(super) fn table_spec(name: &str, (format, width): (RowFormat, usize), slots: usize) -> TableSpec {
    TableSpec { name: name.to_owned(), rows: slots as u64, width, format, unseen: Unseen::Zero }
}

fn place(spec: &VectorSpec, e: Error) -> Error {
    e.within(format!("item.vectors `{}`", spec.name))
}
