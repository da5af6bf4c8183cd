//! Items that came after the main snapshot: a small snapshot of their own, without a model.
//!
//! A segment has all that a search needs of items (rows, planes and posting lists, columns, ids) in the formats of the main
//! snapshot, built and opened by the same code. So a filter means the same there, values that the main snapshot has never seen
//! have codes of the segment's own, and nothing of the main snapshot has to grow. Many items lie in the lists of the main
//! snapshot, where a search probes the same lists in both; few lie in a single list, all of which is scanned. Items of a kind that these
//! lists were not made for ([`Row::is_stray`]) lie in lists of the segment's own.

use std::borrow::Cow;

use sterling_core::error::Result;
use sterling_core::units::{NO_ITEM, Slot};
use sterling_embedding::Table;
use sterling_index::columns::{self, Cell, ColumnKind, Columns, ItemColumn, ItemValues, Value};
use sterling_index::filter;
use sterling_index::ivf::{self, Assigner, CodedRow};
use sterling_snapshot::{CandidateRows, Ids, ItemParts, RowSources, Snapshot, VectorRows, ids};
use sterling_storage::files::TensorFile;

/// The values of one attribute of an item.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Attribute {
    /// None.
    #[default]
    Missing,
    /// Of a column of integers.
    Integers(Vec<i64>),
    /// Of a column of texts.
    Texts(Vec<String>),
    /// Of a column of numbers.
    Number(f64),
}

impl Attribute {
    /// What it holds, in a word or two.
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

/// An item on its way into a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The user's id.
    pub id: i64,
    /// Its list in the main snapshot.
    pub list: u32,
    /// Whether it is unlike the items that the main snapshot's lists were made for ([`Assigner::is_stray`]).
    pub is_stray: bool,
    /// Its vector, as the main snapshot's index keeps those of its items.
    pub vector: CodedRow,
    /// The rows of `[[item.vectors]]`, as they are stored ([`VectorRows`]).
    pub kept: Vec<u8>,
    /// One a column of the main snapshot, in their order and of their kinds.
    pub attributes: Vec<Attribute>,
}

/// Items that came after the main snapshot. Nothing of it changes.
#[derive(Debug)]
pub struct Segment {
    index: ivf::Index,
    filter: filter::Index,
    columns: Columns,
    ids: Ids,
    candidates: CandidateRows,
    numbers: Vec<Vec<f32>>,
    vectors: Vec<Table>,
    /// The list of each slot in the main snapshot.
    lists: Vec<u32>,
    /// Of each slot whether it holds a stray, and how many do.
    is_stray: Vec<bool>,
    strays: usize,
    /// Bytes of its files, were it written.
    bytes: usize,
}

impl Segment {
    /// A segment of at least one row; no two have one id.
    ///
    /// # Errors
    /// `Overloaded` where the memory cannot be had.
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

    /// Bytes that it takes in memory, but for a few of each item.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The item index.
    pub fn index(&self) -> &ivf::Index {
        &self.index
    }

    /// Planes and posting lists.
    pub fn filter(&self) -> &filter::Index {
        &self.filter
    }

    /// Item columns, in the order of the main snapshot's.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Which slot holds which item.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// What the reranker reads of candidates as rows.
    pub fn candidates(&self) -> &CandidateRows {
        &self.candidates
    }

    /// The numeric columns that the reranker and the value model read, in the order of the main snapshot's.
    pub fn numbers(&self) -> &[Vec<f32>] {
        &self.numbers
    }

    /// The tensors of `[[item.vectors]]`, each a table of one row a slot.
    pub fn vectors(&self) -> &[Table] {
        &self.vectors
    }

    /// The list of a slot in the main snapshot.
    pub fn list_of(&self, slot: Slot) -> u32 {
        self.lists[slot.index()]
    }

    /// Whether the item in a slot is unlike those that the main snapshot's lists were made for.
    pub fn is_stray(&self, slot: Slot) -> bool {
        self.is_stray[slot.index()]
    }

    /// How many items are.
    pub fn strays(&self) -> usize {
        self.strays
    }

    /// The item in a slot that holds one, as it went in. `assigner` is that of the main snapshot, `rows` are those of the model.
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

/// Attributes as columns like those of `like`; `attribute` gives the one of a row, of `rows` in all, in the column of a number.
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
