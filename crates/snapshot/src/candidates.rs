//! Rows that the reranker reads per candidate: index rows, per-item tensors, and item columns looked up in embedding tables. Rows
//! are copied directly from their storage, one block of candidates at a time.

mod device;

use std::sync::Arc;

use super::ids::Ids;
use crate::model::{CandidateInput, ModelSpec, Package};
use sterling_core::error::{Error, Result};
use sterling_core::items::ID;
use sterling_core::units::Slot;
use sterling_embedding::{Pooling, Table};
use sterling_graph::dense::InputRows;
use sterling_graph::tower::{FeatureKind, FeatureSpec, ItemPart, Keep, Readable};
use sterling_index::columns::{Cell, Column, ColumnKind, Columns};
use sterling_index::ivf;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::pool::{self, BagSums, Bags, Rows};

pub use device::DeviceCandidates;

/// Maximum number of rows that one call looks up without an allocation: several rows of one item, or one row of each of several
/// items.
const ROWS_AT_ONCE: usize = 64;
/// Bag offsets of a lookup whose bags have one row each.
const ONE_BY_ONE: [usize; ROWS_AT_ONCE + 1] = {
    let mut offsets = [0; ROWS_AT_ONCE + 1];
    let mut n = 0;
    while n < offsets.len() {
        offsets[n] = n;
        n += 1;
    }
    offsets
};

/// Rows of candidates that the reranker reads, bound to the tensors of a snapshot.
#[derive(Debug)]
pub struct CandidateRows {
    parts: Vec<Part>,
    kernels: Kernels,
}

#[derive(Debug)]
struct Part {
    width: usize,
    lies: RowStorage,
}

/// Storage that candidate rows are read from: the tensors of a snapshot or of a segment of its delta.
#[derive(Clone, Copy, Debug)]
pub struct RowSources<'a> {
    /// Package of the model.
    pub package: &'a Package,
    /// Item columns.
    pub columns: &'a Columns,
    /// Map between slots and item ids.
    pub ids: &'a Ids,
    /// Tables of `[[item.vectors]]`, each with one row per slot.
    pub vectors: &'a [Table],
}

/// Storage of the rows of a reranker input.
#[derive(Debug)]
enum RowStorage {
    Index,
    /// Table with one row per slot.
    Kept(Table),
    /// Sum or mean of the table rows of an item's values.
    Pooled {
        looked_up: LookedUp,
        mean: bool,
    },
    /// Table rows of an item's values in sequence, padded with zeros.
    Sequence(LookedUp, Cut),
    /// Mask of a sequence: 1 for each value, then zeros; without a column, the sequence consists of the item id.
    Mask(Option<Column>),
}

/// Values of an item and the table in which the values are looked up.
#[derive(Debug)]
struct LookedUp {
    table: Arc<Table>,
    values: Keys,
}

/// Truncation of an item's values to the length of a sequence.
#[derive(Clone, Copy, Debug)]
struct Cut {
    length: usize,
    keep: Keep,
}

impl Cut {
    fn of<'a>(&self, codes: &'a [u32]) -> &'a [u32] {
        &codes[self.keep.of(codes.len(), self.length)]
    }
}

/// Table row of each value of an item; -1 for a value without a row.
#[derive(Debug)]
enum Keys {
    /// Row of each slot's item id, `[S]`.
    Id(Vec<i64>),
    /// Row of each distinct value of a column, by dictionary code.
    Codes(Column, Vec<i64>),
}

/// Rejects `[[overarch.features]]` over columns that the items lack or whose type does not suit; `column` returns the type of a
/// column.
///
/// # Errors
/// `Invalid` with the feature and the column.
pub fn check_features(spec: &ModelSpec, column: &dyn Fn(&str) -> Option<ColumnKind>) -> Result<()> {
    for feature in spec.overarch.iter().flat_map(|o| &o.features).filter(|f| f.source() != ID) {
        let source = feature.source();
        let invalid = match (feature.kind, column(source)) {
            (_, None) => {
                format!("the snapshot has no column `{source}`, expected one of its item columns, or `{ID}`")
            }
            (_, Some(ColumnKind::Floats)) => format!("column `{source}` holds numbers, expected integers or texts"),
            (FeatureKind::Ids, Some(ColumnKind::Texts)) => {
                format!("column `{source}` holds texts, expected integers for a feature of kind `ids`")
            }
            _ => continue,
        };
        return Err(Error::invalid(invalid).within(format!("overarch.features `{}`", feature.name)));
    }
    Ok(())
}

impl CandidateRows {
    /// Binds the inputs of a package's reranker. `part` is the stored item-side precomputation of the reranker, if the version
    /// has one.
    ///
    /// # Errors
    /// `Corrupt` if a tensor is missing or has an unexpected shape; as [`check_features`].
    pub fn open(from: &RowSources<'_>, part: Option<Table>) -> Result<Self> {
        let rows = from.package.overarch.iter().flat_map(|o| o.rows());
        CandidateRows::bind(from, rows, part)
    }

    /// Binds the inputs of the reranker's item-side precomputation.
    pub(super) fn of_part(from: &RowSources<'_>, part: &ItemPart) -> Result<Self> {
        CandidateRows::bind(from, part.reads().rows.iter(), None)
    }

    fn bind<'a>(
        from: &RowSources<'_>,
        rows: impl Iterator<Item = &'a Readable>,
        mut kept: Option<Table>,
    ) -> Result<Self> {
        let RowSources { package, columns, ids, vectors } = *from;
        let kind = |name: &str| columns.list().find(|c| c.name() == name).map(Column::kind);
        check_features(&package.spec, &kind)?;
        let part = |row: &Readable| {
            let missing = || Error::internal(format!("candidate input `{}` of the reranker has no source", row.name));
            let lies = match package.candidate_input(&row.name).ok_or_else(missing)? {
                CandidateInput::Item => RowStorage::Index,
                CandidateInput::Part => RowStorage::Kept(kept.take().ok_or_else(missing)?),
                CandidateInput::Vector(n) => RowStorage::Kept(vectors.get(n).cloned().ok_or_else(missing)?),
                CandidateInput::Feature(n) => {
                    let spec = feature(package, n)?;
                    let looked_up = look_up(spec, package, columns, ids);
                    let looked_up = looked_up.map_err(|e| e.within(format!("overarch.features `{}`", spec.name)))?;
                    match spec.is_sequence() {
                        true => RowStorage::Sequence(looked_up, cut(spec)),
                        false => RowStorage::Pooled { looked_up, mean: spec.pooling == Pooling::Mean },
                    }
                }
                CandidateInput::Mask(n) => RowStorage::Mask(match feature(package, n)?.source() {
                    ID => None,
                    source => Some(columns.column(source)?.clone()),
                }),
            };
            Ok(Part { width: row.count(), lies })
        };
        let parts = rows.map(part).collect::<Result<_>>()?;
        Ok(CandidateRows { parts, kernels: Kernels::detect()? })
    }

    /// Returns the approximate number of stored bytes that are read per candidate.
    pub fn bytes(&self, index: &ivf::Index) -> u64 {
        let of_table = |table: &Table| table.spec().row_bytes().unwrap_or(0) as u64;
        let bytes = |part: &Part| match &part.lies {
            RowStorage::Index => index.row_bytes(),
            RowStorage::Kept(table) => of_table(table),
            RowStorage::Pooled { looked_up, .. } => of_table(&looked_up.table),
            RowStorage::Sequence(looked_up, cut) => cut.length as u64 * of_table(&looked_up.table),
            RowStorage::Mask(_) => 0,
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Writes the rows of the items in some slots; the rows of an item are adjacent. Inputs with one row per item are looked up
    /// for a block of items at once, so that later rows are prefetched while earlier ones are read.
    ///
    /// # Panics
    /// If `given` has no room for all rows.
    pub fn write(&self, index: &ivf::Index, slots: &[Slot], given: InputRows<'_>) {
        let InputRows { numbers, stride, .. } = given;
        for (slots, data) in slots.chunks(ROWS_AT_ONCE).zip(numbers.chunks_mut((ROWS_AT_ONCE * stride).max(1))) {
            let mut column = 0;
            for part in &self.parts {
                self.write_part(part, index, slots, &mut BagSums { data: &mut *data, stride, column });
                column += part.width;
            }
        }
    }

    fn write_part(&self, part: &Part, index: &ivf::Index, slots: &[Slot], out: &mut BagSums<'_>) {
        let column = out.column;
        let each = |out: &mut BagSums<'_>, write: &dyn Fn(Slot, &mut [f32])| {
            let rows = out.data.chunks_mut(out.stride).zip(slots);
            rows.for_each(|(row, slot)| write(*slot, &mut row[column..][..part.width]));
        };
        match &part.lies {
            RowStorage::Index => match index.rows().stored(index.dimension()) {
                Some(stored) => self.write_single_rows(&stored, slots.iter().map(|slot| i64::from(slot.0)), out),
                None => each(out, &|slot, row| index.row(slot, row)),
            },
            RowStorage::Kept(table) => {
                self.write_single_rows(&host(table), slots.iter().map(|slot| i64::from(slot.0)), out)
            }
            RowStorage::Pooled { looked_up: LookedUp { table, values: Keys::Id(rows) }, .. } => {
                self.write_single_rows(&host(table), slots.iter().map(|slot| rows[slot.index()]), out);
            }
            RowStorage::Pooled { looked_up: LookedUp { table, values: Keys::Codes(column, rows) }, mean } => {
                let row_of = |code: &u32| rows[*code as usize];
                each(out, &|slot, row| {
                    let codes = column.codes(slot);
                    let mut taken = [0; ROWS_AT_ONCE];
                    match taken.get_mut(..codes.len()) {
                        Some(taken) => {
                            taken.iter_mut().zip(codes).for_each(|(taken, code)| *taken = row_of(code));
                            self.pool(&host(table), taken, *mean, row);
                        }
                        None => self.pool(&host(table), &codes.iter().map(row_of).collect::<Vec<i64>>(), *mean, row),
                    }
                });
            }
            RowStorage::Sequence(LookedUp { table, values }, cut) => each(out, &|slot, row| match values {
                Keys::Id(rows) => self.in_turn(&host(table), rows[slot.index()..=slot.index()].iter().copied(), row),
                Keys::Codes(column, rows) => {
                    let codes = cut.of(column.codes(slot));
                    self.in_turn(&host(table), codes.iter().map(|code| rows[*code as usize]), row);
                }
            }),
            RowStorage::Mask(column) => each(out, &|slot, row| {
                let values = column.as_ref().map_or(1, |column| column.codes(slot).len());
                let (there, padding) = row.split_at_mut(values.min(row.len()));
                there.fill(1.0);
                padding.fill(0.0);
            }),
        }
    }

    /// Writes the sum or mean of some rows of a table.
    fn pool(&self, stored: &Rows<'_>, rows: &[i64], mean: bool, out: &mut [f32]) {
        let bags = Bags { ids: rows, offsets: &[0, rows.len()], weights: None, mean };
        let stride = out.len();
        pool::pool(self.kernels, stored, &bags, &mut BagSums { data: out, stride, column: 0 });
    }

    /// Writes one table row to each row of `out`; at most [`ROWS_AT_ONCE`] rows.
    fn write_single_rows(&self, stored: &Rows<'_>, rows: impl Iterator<Item = i64>, out: &mut BagSums<'_>) {
        let (mut ids, mut count) = ([-1; ROWS_AT_ONCE], 0);
        for (id, row) in ids.iter_mut().zip(rows) {
            (*id, count) = (row, count + 1);
        }
        let bags = Bags { ids: &ids[..count], offsets: &ONE_BY_ONE[..=count], weights: None, mean: false };
        pool::pool(self.kernels, stored, &bags, out);
    }

    /// Writes rows in sequence until `out` is full, and pads `out` with zeros.
    fn in_turn(&self, stored: &Rows<'_>, mut rows: impl ExactSizeIterator<Item = i64>, out: &mut [f32]) {
        let stride = stored.width();
        let (there, padding) = out.split_at_mut((rows.len() * stride).min(out.len()));
        for data in there.chunks_mut(ROWS_AT_ONCE * stride) {
            let places = data.len() / stride;
            self.write_single_rows(stored, rows.by_ref().take(places), &mut BagSums { data, stride, column: 0 });
        }
        padding.fill(0.0);
    }
}

/// Returns the rows of a table that is completely in host memory.
fn host(table: &Table) -> Rows<'_> {
    table.host_rows().expect("the table is completely in host memory, as checked when it was bound")
}

/// Returns feature `n` of `[[overarch.features]]`.
fn feature(package: &Package, n: usize) -> Result<&FeatureSpec> {
    let spec = package.spec.overarch.iter().flat_map(|o| &o.features).nth(n);
    spec.ok_or_else(|| Error::internal("a reranker input refers to a feature that does not exist"))
}

fn cut(spec: &FeatureSpec) -> Cut {
    Cut { length: spec.length.unwrap_or(0), keep: spec.kept() }
}

fn look_up(spec: &FeatureSpec, package: &Package, columns: &Columns, ids: &Ids) -> Result<LookedUp> {
    let named = spec.table.as_deref().unwrap_or_default();
    let table = package.tables.iter().find(|t| t.name() == named);
    let table = table.ok_or_else(|| Error::internal(format!("no table `{named}`")))?.clone();
    if table.host_rows().is_none() {
        let what = "candidates are looked up in this table, expected all of its rows in this host's memory";
        return Err(Error::unsupported(format!("table `{named}`: {what}")));
    }
    let row = |id: i64| table.resolve(id).0.map_or(-1, |row| row as i64);
    let of_text = |text: &str| table.category_id(text).map_or(-1, row);
    let is_category = spec.kind == FeatureKind::Category;
    let of_integer = |n: i64| if is_category { of_text(&n.to_string()) } else { row(n) };
    let values = match spec.source() {
        ID => Keys::Id(ids.of_slots().iter().map(|&id| of_integer(id)).collect()),
        source => {
            let column = columns.column(source)?;
            let of_code = |code: u32| match column.value(code) {
                Cell::Text(text) => of_text(text),
                Cell::Integer(n) => of_integer(n),
                _ => -1,
            };
            Keys::Codes(column.clone(), (0..column.dictionary_len() as u32).map(of_code).collect())
        }
    };
    Ok(LookedUp { table, values })
}
