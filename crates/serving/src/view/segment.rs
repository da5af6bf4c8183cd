//! Segment of the delta: a small snapshot of added items, without a model.
//!
//! A segment holds everything that a search needs of items (rows, Bloom planes, posting lists, columns, ids) in the formats of
//! the main snapshot, built and opened by the same code. A filter therefore means the same in a segment, new values get codes of
//! the segment's own, and the main snapshot never grows. If a segment has many items, they are in the inverted lists of the main
//! snapshot, and a search probes the same lists in both. The items of a small segment are in a single list that is scanned
//! completely. Items that the lists were not trained for ([`Row::is_stray`]) are in lists of the segment's own.

use std::borrow::Cow;

use sterling_core::error::Result;
use sterling_core::units::{NO_ITEM, Slot};
use sterling_embedding::Table;
use sterling_index::columns::{self, Cell, ColumnKind, Columns, ItemColumn, ItemValues, Value};
use sterling_index::filter;
use sterling_index::ivf::{self, Assigner, CodedRow};
use sterling_snapshot::{CandidateRows, Ids, ItemParts, RowSources, Snapshot, VectorRows, ids};
use sterling_storage::files::TensorFile;

/// Values of one attribute of an item.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Attribute {
    /// No value.
    #[default]
    Missing,
    /// Values of an integer column.
    Integers(Vec<i64>),
    /// Values of a text column.
    Texts(Vec<String>),
    /// Value of a numeric column.
    Number(f64),
}

impl Attribute {
    /// Short description of the kind of value.
    pub fn kind(&self) -> &'static str {
        match self {
            Attribute::Missing => "nothing",
            Attribute::Integers(_) => "integers",
            Attribute::Texts(_) => "texts",
            Attribute::Number(_) => "a number",
        }
    }
}

impl From<Cell<'_>> for Attribute {
    fn from(cell: Cell<'_>) -> Self {
        match cell {
            Cell::Missing => Attribute::Missing,
            Cell::Integer(value) => Attribute::Integers(vec![value]),
            Cell::Integers(values) => Attribute::Integers(values),
            Cell::Float(value) => Attribute::Number(value),
            Cell::Text(value) => Attribute::Texts(vec![value.into()]),
            Cell::Texts(values) => Attribute::Texts(values.into_iter().map(str::to_owned).collect()),
        }
    }
}

impl From<&Attribute> for Value {
    fn from(attribute: &Attribute) -> Self {
        match attribute {
            Attribute::Missing => Value::Missing,
            Attribute::Integers(values) => Value::of_integers(values),
            Attribute::Texts(values) => Value::of_texts(values),
            Attribute::Number(number) => Value::Float(*number),
        }
    }
}

/// Returns the value of a slot in the column with index `number`.
pub(crate) fn stored_value(columns: &Columns, number: usize, slot: Slot) -> Value {
    (&Attribute::from(columns.at(number).cell(slot))).into()
}

/// Item to be added to a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Id of the item, as callers name it.
    pub id: i64,
    /// Inverted list in the main snapshot.
    pub list: u32,
    /// True if the item is unlike the items that the main snapshot's lists were trained for ([`Assigner::is_stray`]).
    pub is_stray: bool,
    /// Embedding, encoded like those of the main snapshot's index.
    pub vector: CodedRow,
    /// Rows of `[[item.vectors]]` in storage format ([`VectorRows`]).
    pub kept: Vec<u8>,
    /// One attribute per column of the main snapshot, in the same order and of the same kind.
    pub attributes: Vec<Attribute>,
}

/// Items added after the main snapshot. Immutable.
#[derive(Debug)]
pub struct Segment {
    index: ivf::Index,
    filter: filter::Index,
    columns: Columns,
    ids: Ids,
    candidates: CandidateRows,
    numbers: Vec<Vec<f32>>,
    vectors: Vec<Table>,
    /// Inverted list of each slot in the main snapshot.
    lists: Vec<u32>,
    /// For each slot, whether its item is unlike those that the lists were trained for (a stray); and the number of such items.
    is_stray: Vec<bool>,
    strays: usize,
    /// Bytes of the segment's files, if it were written.
    bytes: usize,
}

impl Segment {
    /// Builds a segment of at least one row; ids are distinct.
    ///
    /// # Errors
    /// `Overloaded` if memory is exhausted.
    pub fn build(main: &Snapshot, assigner: &Assigner, rows: &[&Row]) -> Result<Self> {
        let vectors: Vec<&CodedRow> = rows.iter().map(|row| &row.vector).collect();
        let lists: Vec<u32> = rows.iter().map(|row| row.list).collect();
        let is_stray: Vec<bool> = rows.iter().map(|row| row.is_stray).collect();
        let (built, own) = assigner.arrange_delta(&vectors, &lists, &is_stray)?;
        let tensors = built.coded_in_memory(&vectors, "fresh index")?;
        let mut bytes = tensors.bytes().len();
        let index = ivf::Index::open(&tensors)?;
        let index = match own {
            Some(own) => index.with_own_lists(own),
            None => index,
        };
        let mut file = TensorFile::new();
        let attribute = |row: usize, column: usize| Cow::Borrowed(&rows[row].attributes[column]);
        columns::encode(&item_columns(&main.columns, rows.len(), attribute)?, &built.order, &mut file)?;
        let numbers: Vec<i64> = rows.iter().map(|row| row.id).collect();
        ids::encode(&numbers, &built.order, &mut file)?;
        let tensors = file.in_memory("fresh columns")?;
        bytes += tensors.bytes().len();
        let columns = Columns::open(&tensors, index.slots())?;
        let ids = Ids::open(&tensors, index.slots(), index.items())?;
        let mut file = TensorFile::new();
        filter::encode(&columns, index.list_offsets(), index.list_lengths(), &main.recipe.filter, &mut file)?;
        let tensors = file.in_memory("fresh filter")?;
        bytes += tensors.bytes().len();
        let filter = filter::Index::open(&tensors, index.list_offsets(), index.list_lengths(), columns.terms())?;
        let number = |(name, _): &(String, Vec<f32>)| columns.list().find(|c| c.name() == name)?.numbers();
        let numbers = main.numbers.iter().map(|column| number(column).unwrap_or_default()).collect();
        let of_row = |&row: &u32| rows.get(row as usize).map_or((0, false), |row| (row.list, row.is_stray));
        let (lists, is_stray): (_, Vec<bool>) = built.order.iter().map(of_row).unzip();
        let strays = is_stray.iter().filter(|is_stray| **is_stray).count();
        let row = |slot: usize| match built.order[slot] {
            NO_ITEM => None,
            row => Some(rows[row as usize].kept.as_slice()),
        };
        let vectors = VectorRows::of(&main.package.spec.item.vectors)?.tables(built.order.len(), row)?;
        let from = RowSources { package: &main.package, columns: &columns, ids: &ids, vectors: &vectors };
        let parts = ItemParts::work_out(&from, &index, false)?;
        let parts = parts.map(|parts| parts.unchecked()).transpose()?;
        for table in vectors.iter().chain(&parts) {
            bytes += table.spec().row_bytes()? * table.spec().rows as usize;
        }
        let candidates = CandidateRows::open(&from, parts)?;
        Ok(Segment { index, filter, columns, ids, candidates, numbers, vectors, lists, is_stray, strays, bytes })
    }

    /// Returns the size in memory in bytes, accurate to a few bytes per item.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the item index.
    pub fn index(&self) -> &ivf::Index {
        &self.index
    }

    /// Returns the Bloom planes and posting lists.
    pub fn filter(&self) -> &filter::Index {
        &self.filter
    }

    /// Returns the item columns, in the order of the main snapshot's.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Returns the mapping between slots and items.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Returns the candidate features that the reranker reads as rows.
    pub fn candidates(&self) -> &CandidateRows {
        &self.candidates
    }

    /// Returns the numeric columns that the reranker and the value model read, in the order of the main snapshot's.
    pub fn numbers(&self) -> &[Vec<f32>] {
        &self.numbers
    }

    /// Returns the tensors of `[[item.vectors]]`, each a table with one row per slot.
    pub fn vectors(&self) -> &[Table] {
        &self.vectors
    }

    /// Returns the inverted list of a slot in the main snapshot.
    pub fn list_of(&self, slot: Slot) -> u32 {
        self.lists[slot.index()]
    }

    /// Returns whether the item in a slot is unlike those that the main snapshot's lists were trained for.
    pub fn is_stray(&self, slot: Slot) -> bool {
        self.is_stray[slot.index()]
    }

    /// Returns the number of items unlike those that the main snapshot's lists were trained for (strays).
    pub fn strays(&self) -> usize {
        self.strays
    }

    /// Returns the item of an occupied slot, as it was added. `assigner` belongs to the main snapshot, `rows` to the model.
    pub fn item(&self, assigner: &Assigner, rows: &VectorRows<'_>, slot: Slot) -> Row {
        let mut kept = Vec::with_capacity(rows.bytes());
        rows.read(&self.vectors, slot, &mut kept);
        Row {
            id: self.ids.item(slot).0,
            list: self.lists[slot.index()],
            is_stray: self.is_stray[slot.index()],
            vector: assigner.taken(&self.index, slot),
            kept,
            attributes: self.columns.list().map(|column| column.cell(slot).into()).collect(),
        }
    }
}

/// Builds columns of the same kinds as `like`; `attribute` returns the value of a row (below `rows`) in a column.
///
/// # Errors
/// `Invalid` for more values than a column holds.
pub fn item_columns<'a>(
    like: &Columns,
    rows: usize,
    attribute: impl Fn(usize, usize) -> Cow<'a, Attribute>,
) -> Result<Vec<ItemColumn>> {
    let column = |(number, column): (usize, &columns::Column)| {
        let of_rows = (0..rows).map(|row| attribute(row, number));
        let mut offsets = vec![0u32];
        let values = match column.kind() {
            ColumnKind::Floats => ItemValues::Floats(
                of_rows.map(|value| if let Attribute::Number(number) = *value { number } else { f64::NAN }).collect(),
            ),
            ColumnKind::Integers => {
                let mut values: Vec<i64> = Vec::new();
                for value in of_rows {
                    values.extend(if let Attribute::Integers(of_row) = &*value { of_row.as_slice() } else { &[] });
                    offsets.push(columns::values_end(values.len())?);
                }
                ItemValues::Integers { offsets, values }
            }
            ColumnKind::Texts => {
                let mut values: Vec<String> = Vec::new();
                for value in of_rows {
                    values.extend_from_slice(if let Attribute::Texts(of_row) = &*value { of_row } else { &[] });
                    offsets.push(columns::values_end(values.len())?);
                }
                ItemValues::Texts { offsets, values }
            }
        };
        Ok(ItemColumn { name: column.name().into(), filter: column.is_filterable(), values })
    };
    like.list().enumerate().map(column).collect()
}
