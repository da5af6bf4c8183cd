//! Tensors that are kept for each item, `[[item.vectors]]`: their rows in the formats in which they are stored.
//!
//! A row is brought into its format once, when its item is published or put. From then on its bytes move as they are, into slots,
//! segments and further versions: what is quantised is never quantised again.

use crate::model::VectorSpec;
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_embedding::format::encode_row;
use sterling_embedding::{RowFormat, Table, TableSpec, Unseen};
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::Tensors;

/// How the rows of an item lie side by side.
#[derive(Clone, Debug)]
pub struct VectorRows<'a> {
    /// Each with the bytes of a row.
    specs: Vec<(&'a VectorSpec, usize)>,
}

impl<'a> VectorRows<'a> {
    /// The rows of these tensors, in their order.
    ///
    /// # Errors
    /// `Invalid` for a width that does not suit the format.
    pub fn of(specs: &'a [VectorSpec]) -> Result<Self> {
        let bytes = |spec: &'a VectorSpec| Ok((spec, spec.format.row_bytes(spec.width).map_err(|e| place(spec, e))?));
        Ok(VectorRows { specs: specs.iter().map(bytes).collect::<Result<_>>()? })
    }

    /// Bytes of an item's rows together.
    pub fn bytes(&self) -> usize {
        self.specs.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Appends the rows of an item, of which `values` gives the numbers of each tensor.
    ///
    /// # Errors
    /// `Invalid` with the tensor where the numbers are not as many as its width, or cannot be stored in its format.
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

    /// Tables of one row a slot, of which `row` gives the rows of the item in a slot; without one they are zeros.
    ///
    /// # Errors
    /// `Overloaded` where the memory cannot be had.
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

    /// Appends the rows of a slot of such tables.
    pub fn read(&self, tables: &[Table], slot: Slot, out: &mut Vec<u8>) {
        for ((_, bytes), table) in self.specs.iter().zip(tables) {
            let rows = table.host_rows().map_or(&[][..], |rows| rows.bytes());
            out.extend_from_slice(&rows[slot.index() * bytes..][..*bytes]);
        }
    }
}

/// Opens the tables of the file of a version, each of one row a slot.
///
/// # Errors
/// `Corrupt` with the tensor where one is missing or of another shape.
pub fn open(specs: &[VectorSpec], tensors: &Tensors, slots: usize) -> Result<Vec<Table>> {
    let table = |spec: &VectorSpec| {
        let table = open_table(tensors, &spec.name, (spec.format, spec.width), slots);
        table.map_err(|e| e.within(format!("item vectors `{}`", spec.name)))
    };
    specs.iter().map(table).collect()
}

/// A table of one row a slot.
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
            "{} rows of {} in {}, expected {slots} of {width} in {}",
            found.0,
            found.1,
            found.2.name(),
            format.name()
        )));
    }
    Ok(table)
}

/// What a table of one row a slot is.
pub(super) fn table_spec(name: &str, (format, width): (RowFormat, usize), slots: usize) -> TableSpec {
    TableSpec { name: name.to_owned(), rows: slots as u64, width, format, unseen: Unseen::Zero }
}

fn place(spec: &VectorSpec, e: Error) -> Error {
    e.within(format!("item.vectors `{}`", spec.name))
}
