//! Item-side precomputation of the reranker ([`ItemPart`]) for the items of a snapshot or of a segment of its delta.

use rayon::prelude::*;

use super::candidates::{CandidateRows, RowSources};
use super::ids::Ids;
use super::vectors::{open_table, table_spec};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_embedding::format::encode_row;
use sterling_embedding::{RowFormat, Table};
use sterling_graph::dense::InputRows;
use sterling_graph::tower::{self, Candidates, ItemPart, OverArch};
use sterling_index::ivf;
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::Tensors;

/// Name of the tensor in [`super::PART_FILE`].
const TENSOR: &str = "part";
/// Number of slots that a thread processes at a time.
const SLOTS: usize = 4096;

/// Item-side precomputation for all items of an index.
#[derive(Debug)]
pub struct ItemParts {
    /// Precomputed values, `[S, width]`.
    numbers: Vec<f32>,
    width: usize,
}

impl ItemParts {
    /// Computes the values on this thread or on all threads; `None` if the reranker has no item-side part.
    ///
    /// # Errors
    /// As [`CandidateRows::open`].
    pub fn work_out(from: &RowSources<'_>, index: &ivf::Index, on_all_threads: bool) -> Result<Option<Self>> {
        let Some(part) = from.package.overarch.as_ref().and_then(OverArch::part) else { return Ok(None) };
        let items = Items::bind(from, index, part)?;
        let width = part.width();
        let mut numbers = vec![0.0; index.slots() * width];
        let run = |(n, out): (usize, &mut [f32])| items.run(n * SLOTS, out);
        match on_all_threads {
            true => numbers.par_chunks_mut(SLOTS * width).enumerate().try_for_each(run)?,
            false => numbers.chunks_mut(SLOTS * width).enumerate().try_for_each(run)?,
        }
        Ok(Some(ItemParts { numbers, width }))
    }

    /// Converts the values to a table with one row per slot; empty slots have zeros.
    ///
    /// # Errors
    /// `Invalid` with the item whose row cannot be stored in the format.
    pub fn stored(&self, format: RowFormat, index: &ivf::Index, ids: &Ids) -> Result<Table> {
        let mut is_filled = vec![false; index.slots()];
        index.filled_slots().for_each(|slot| is_filled[slot.index()] = true);
        let row = |slot: usize| is_filled[slot].then(|| &self.numbers[slot * self.width..][..self.width]);
        let item = |slot: usize| format!("item {}", ids.of_slots()[slot]);
        let table = keep(TENSOR, (format, self.width), (0..index.slots()).map(row), &item);
        table.map_err(|e| e.within("item-side values of the reranker"))
    }

    /// Converts the values to an f32 table with one row per slot, without a check for finite numbers.
    ///
    /// # Errors
    /// `Overloaded` if the memory cannot be allocated.
    pub fn unchecked(&self) -> Result<Table> {
        let spec = table_spec(TENSOR, (RowFormat::F32, self.width), self.numbers.len() / self.width);
        Table::host(spec, Buffer::copied(bytemuck::cast_slice(&self.numbers))?)
    }
}

/// Opens the table that [`ItemParts::stored`] wrote.
///
/// # Errors
/// `Corrupt` if the stored tensor has another shape.
pub(super) fn open(tensors: &Tensors, part: &ItemPart, format: RowFormat, slots: usize) -> Result<Table> {
    open_table(tensors, TENSOR, (format, part.width()), slots)
}

/// Builds a table with one row per slot; missing rows are zeros. `item` describes the item of a slot for errors.
fn keep<'a>(
    name: &str,
    (format, width): (RowFormat, usize),
    rows: impl ExactSizeIterator<Item = Option<&'a [f32]>>,
    item: &dyn Fn(usize) -> String,
) -> Result<Table> {
    let (zeros, slots) = (vec![0.0; width], rows.len());
    let row_bytes = format.row_bytes(width)?;
    let mut stored = Ok(());
    let bytes = Buffer::filled(slots * row_bytes, |out: &mut [u8]| {
        stored = out.chunks_exact_mut(row_bytes).zip(rows).enumerate().try_for_each(|(slot, (out, row))| {
            encode_row(format, row.unwrap_or(&zeros), out).map_err(|e| e.within(item(slot)))
        });
    })?;
    stored?;
    Table::host(table_spec(name, (format, width), slots), bytes)
}

/// Inputs of the precomputation for the items of an index.
struct Items<'a> {
    index: &'a ivf::Index,
    part: &'a ItemPart,
    rows: CandidateRows,
    /// Numeric inputs, `[S]` each.
    numbers: Vec<Vec<f32>>,
}

impl<'a> Items<'a> {
    fn bind(from: &RowSources<'_>, index: &'a ivf::Index, part: &'a ItemPart) -> Result<Self> {
        let column = |name: &str| {
            let numbers = from.columns.column(name)?.numbers();
            numbers.ok_or_else(|| Error::invalid(format!("column `{name}` has no numbers")))
        };
        let numbers = part.reads().number_names().map(column).collect::<Result<_>>()?;
        Ok(Items { index, part, rows: CandidateRows::of_part(from, part)?, numbers })
    }

    /// Computes the values of consecutive slots from `first` until `out` is full.
    fn run(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let count = out.len() / self.part.width();
        let numbers: Vec<&[f32]> = self.numbers.iter().map(|numbers| &numbers[first..first + count]).collect();
        let slots: Vec<Slot> = (first..first + count).map(|slot| Slot(slot as u32)).collect();
        let rows = |given: InputRows<'_>| self.rows.write(self.index, &slots[given.rows.clone()], given);
        let items = Candidates { user: &[], count, rows: &rows, numbers: &numbers };
        self.part.run(&items, &mut tower::Scratch::default(), out)
    }
}
