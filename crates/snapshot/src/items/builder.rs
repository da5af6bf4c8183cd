//! Columns that grow item by item and take their type from the first typed value.

use std::collections::BTreeMap;

use super::catalogue::Items;
use sterling_core::error::{Error, Result};
use sterling_core::items::{EMBEDDING, ID};
use sterling_index::columns::{ItemColumn, ItemValues, text_bytes, values_end};
use sterling_storage::arrow::Cell;
use sterling_storage::rows::{RowWriter, Spill};

/// Returns the bytes of memory that the cell needs in a column: its offset or number, and its values.
fn bytes_of(cell: &Cell) -> u64 {
    let values = match cell {
        Cell::Integers(values) => size_of_val(values.as_slice()),
        Cell::Texts(texts) => texts.iter().map(|text| text_bytes(text)).sum(),
        Cell::Missing | Cell::Number(_) | Cell::Vector(_) => 0,
    };
    8 + values as u64
}

fn kind_of(cell: &Cell) -> &'static str {
    match cell {
        Cell::Missing => "nothing",
        Cell::Integers(_) => "integers",
        Cell::Texts(_) => "texts",
        Cell::Number(_) => "a number",
        Cell::Vector(_) => "a vector",
    }
}

enum Growing {
    Untyped,
    Integers { offsets: Vec<u32>, values: Vec<i64> },
    Texts { offsets: Vec<u32>, values: Vec<String> },
    Floats(Vec<f64>),
    Vectors(RowWriter),
}

struct Column {
    name: String,
    items: usize,
    values: Growing,
}

impl Column {
    fn kind(&self) -> &'static str {
        match self.values {
            Growing::Untyped => "nothing",
            Growing::Integers { .. } => "integers",
            Growing::Texts { .. } => "texts",
            Growing::Floats(_) => "numbers",
            Growing::Vectors(_) => "vectors",
        }
    }

    fn push(&mut self, cell: Cell, spill: &Spill) -> Result<()> {
        if matches!(self.values, Growing::Untyped) {
            self.values = match &cell {
                Cell::Missing => Growing::Untyped,
                Cell::Integers(_) => Growing::Integers { offsets: vec![0; self.items + 1], values: Vec::new() },
                Cell::Texts(_) => Growing::Texts { offsets: vec![0; self.items + 1], values: Vec::new() },
                Cell::Number(_) => Growing::Floats(vec![f64::NAN; self.items]),
                Cell::Vector(v) if v.is_empty() => return Err(self.invalid("a vector of 0 numbers", "at least one")),
                Cell::Vector(v) if self.items == 0 => Growing::Vectors(RowWriter::new(v.len(), spill.clone())),
                Cell::Vector(_) => return Err(self.invalid("a vector", "a vector on every item or on no item")),
            };
        }
        if let (Growing::Integers { .. }, Cell::Number(number)) = (&self.values, &cell) {
            self.values = self.as_floats(*number)?;
        }
        match (&mut self.values, cell) {
            (Growing::Untyped, _) => {}
            (Growing::Integers { offsets, values }, Cell::Integers(v)) => {
                values.extend(v);
                offsets.push(values_end(values.len())?);
            }
            (Growing::Texts { offsets, values }, Cell::Texts(v)) => {
                values.extend(v);
                offsets.push(values_end(values.len())?);
            }
            (Growing::Integers { offsets, .. } | Growing::Texts { offsets, .. }, Cell::Missing) => {
                offsets.push(offsets[self.items]);
            }
            (Growing::Floats(_), Cell::Number(v)) if v.is_infinite() => {
                return Err(self.invalid(&v.to_string(), "a finite number"));
            }
            (Growing::Floats(values), Cell::Number(v)) => values.push(v),
            (Growing::Floats(values), Cell::Missing) => values.push(f64::NAN),
            (Growing::Floats(values), Cell::Integers(v)) if v.len() == 1 => match exact(v[0]) {
                Some(number) => values.push(number),
                None => {
                    return Err(self.invalid(
                        &v[0].to_string(),
                        "a number that a float represents exactly, like those of earlier items",
                    ));
                }
            },
            (Growing::Vectors(rows), Cell::Integers(v)) if v.len() == rows.cols() => {
                rows.push(&v.iter().map(|&x| x as f32).collect::<Vec<f32>>())?;
            }
            (Growing::Vectors(rows), Cell::Vector(v)) if v.len() == rows.cols() => rows.push(&v)?,
            (Growing::Vectors(rows), Cell::Vector(v)) => {
                let expected = format!("{} as in earlier items", rows.cols());
                return Err(self.invalid(&format!("a vector of {} numbers", v.len()), &expected));
            }
            (_, cell) => {
                let expected = format!("{} as in earlier items", self.kind());
                return Err(self.invalid(kind_of(&cell), &expected));
            }
        }
        self.items += 1;
        Ok(())
    }

    /// Converts the column's integers to floats when a number follows that is not an integer, if every integer is exact as f64.
    fn as_floats(&self, number: f64) -> Result<Growing> {
        let Growing::Integers { offsets, values } = &self.values else { return Ok(Growing::Untyped) };
        let got = format!("a number, {number}");
        if offsets.windows(2).any(|w| w[1] - w[0] > 1) {
            return Err(self.invalid(&got, "integers, as in earlier items"));
        }
        if number.fract() == 0.0 && exact(number as i64) != Some(number) {
            return Err(self.invalid(&got, "a 64-bit integer, as in earlier items"));
        }
        if let Some(large) = values.iter().find(|v| exact(**v).is_none()) {
            let expected = format!("an integer, because the column holds {large}, which no float represents exactly");
            return Err(self.invalid(&got, &expected));
        }
        let of_item = |w: &[u32]| if w[0] == w[1] { f64::NAN } else { values[w[0] as usize] as f64 };
        Ok(Growing::Floats(offsets.windows(2).map(of_item).collect()))
    }

    fn invalid(&self, got: &str, expected: &str) -> Error {
        Error::invalid(format!("column `{}`: got {got}, expected {expected}", self.name))
    }
}

/// Returns the float that equals the integer, if such a float exists.
fn exact(integer: i64) -> Option<f64> {
    let float = integer as f64;
    (float as i128 == i128::from(integer)).then_some(float)
}

/// Builder of [`Items`] from item files.
pub(super) struct Builder {
    ids: Vec<i64>,
    /// Index of the first item of each file.
    files: Vec<usize>,
    /// Cells of the current file that apply to items without a value of their own, such as partition columns.
    of_file: Vec<(String, Cell)>,
    columns: Vec<Column>,
    by_name: BTreeMap<String, usize>,
    /// Storage for vector columns.
    spill: Spill,
    /// Bytes of memory of all columns except vector columns.
    taken: u64,
}

impl Builder {
    pub(super) fn new(spill: Spill) -> Self {
        let (files, of_file) = (Vec::new(), Vec::new());
        Builder { ids: Vec::new(), files, of_file, columns: Vec::new(), by_name: BTreeMap::new(), spill, taken: 0 }
    }

    /// Starts a file; `cells` apply to each item of the file that lacks these columns.
    pub(super) fn begin_file(&mut self, cells: Vec<(String, Cell)>) {
        self.files.push(self.ids.len());
        self.of_file = cells;
    }

    /// Starts an item; calls to `cell` follow, then [`Builder::end_item`].
    pub(super) fn begin_item(&mut self, id: i64) {
        self.ids.push(id);
    }

    /// Adds a cell to the current item.
    pub(super) fn cell(&mut self, name: &str, cell: Cell) -> Result<()> {
        let item = self.ids.len() - 1;
        let at = match self.by_name.get(name) {
            Some(&at) => at,
            None if name.is_empty() || name == ID => {
                return Err(Error::invalid(format!(
                    "column `{name}`: this name is reserved, expected another attribute name"
                )));
            }
            None => {
                self.columns.push(Column { name: name.into(), items: item, values: Growing::Untyped });
                self.by_name.insert(name.into(), self.columns.len() - 1);
                self.columns.len() - 1
            }
        };
        if self.columns[at].items > item {
            return Err(Error::invalid(format!("column `{name}`: given twice")));
        }
        let cell = match cell {
            Cell::Integers(numbers) if name == EMBEDDING => Cell::Vector(numbers.iter().map(|&n| n as f32).collect()),
            cell => cell,
        };
        self.taken += bytes_of(&cell);
        self.columns[at].push(cell, &self.spill)
    }

    /// Ends the item: a column without a cell takes the file's cell, or is missing on this item.
    pub(super) fn end_item(&mut self) -> Result<()> {
        let items = self.ids.len();
        let of_file = std::mem::take(&mut self.of_file);
        for (name, cell) in &of_file {
            let is_named = self.by_name.get(name).is_some_and(|&at| self.columns[at].items == items);
            if !is_named {
                self.cell(name, cell.clone())?;
            }
        }
        self.of_file = of_file;
        self.taken += size_of::<i64>() as u64;
        self.spill.check_others(self.taken)?;
        let Builder { columns, spill, .. } = self;
        columns.iter_mut().filter(|c| c.items < items).try_for_each(|c| c.push(Cell::Missing, spill))
    }

    /// Returns all items that were added. Omits columns without a value and logs their names.
    pub(super) fn finish(self) -> Result<Items> {
        let names = self.columns.iter().map(|column| column.name.clone()).collect();
        let files = self.files.into_iter().skip(1).collect();
        let mut items = Items { ids: self.ids, files, names, ..Items::default() };
        for Column { name, values, .. } in self.columns {
            let values = match values {
                Growing::Untyped => {
                    tracing::warn!("column `{name}` left out: no item has a value");
                    continue;
                }
                Growing::Vectors(rows) => {
                    items.dense.insert(name, rows.finish()?);
                    continue;
                }
                Growing::Integers { offsets, values } => ItemValues::Integers { offsets, values },
                Growing::Texts { offsets, values } => ItemValues::Texts { offsets, values },
                Growing::Floats(values) => ItemValues::Floats(values),
            };
            items.columns.push(ItemColumn { name, filter: true, values });
        }
        Ok(items)
    }
}
