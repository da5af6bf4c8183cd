//! Columns read from a mapped tensor file, without a copy.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::cell::{Cell, FLOAT_BYTES, integer_bytes, text_bytes};
use sterling_core::error::{Error, Result};
use sterling_core::spelling::nearest;
use sterling_core::units::{Slot, TermId};
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::Tensors;

/// Type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    /// Integer categories, one or several per item, also comparable.
    Integers,
    /// Text categories, one or several per item.
    Texts,
    /// One comparable number per item.
    Floats,
}

impl ColumnKind {
    /// Returns the noun for values of this kind in messages.
    pub fn plural(self) -> &'static str {
        match self {
            ColumnKind::Integers => "integers",
            ColumnKind::Texts => "texts",
            ColumnKind::Floats => "a number",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Declared {
    pub(super) name: String,
    pub(super) kind: ColumnKind,
    pub(super) filter: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Values {
    Integers(Buffer<i64>),
    Texts { offsets: Buffer<u64>, bytes: Buffer<u8> },
    Floats(Buffer<f64>),
}

/// Column of a snapshot.
#[derive(Clone, Debug)]
pub struct Column {
    declared: Declared,
    pub(super) values: Values,
    offsets: Buffer<u32>,
    codes: Buffer<u32>,
    first_term: Option<TermId>,
    is_single: bool,
    cell_bytes: usize,
}

/// All columns of a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    columns: Arc<[Column]>,
    terms: usize,
}

impl Columns {
    /// Opens the tensors of [`super::encode`] for `slots` slots.
    ///
    /// # Errors
    /// `Corrupt` with the tensor that is missing, out of range or out of order.
    pub fn open(tensors: &Tensors, slots: usize) -> Result<Self> {
        let declared: Vec<Declared> = tensors.json("columns")?;
        let mut terms = 0;
        let mut columns = Vec::with_capacity(declared.len());
        for (number, declared) in declared.into_iter().enumerate() {
            let mut column = Column::open(tensors, number, declared, slots)?;
            if column.declared.filter && column.declared.kind != ColumnKind::Floats {
                column.first_term = Some(TermId(terms as u32));
                terms += column.dictionary_len();
            }
            columns.push(column);
        }
        if terms >= u32::MAX as usize {
            return Err(Error::corrupt(format!("columns: {terms} terms, expected fewer than {}", u32::MAX)));
        }
        Ok(Columns { columns: columns.into(), terms })
    }

    /// Returns the columns in order; the number of a column is its index in this list.
    pub fn list(&self) -> std::slice::Iter<'_, Column> {
        self.columns.iter()
    }

    /// Returns the column with this number ([`Columns::number`]).
    pub fn at(&self, number: usize) -> &Column {
        &self.columns[number]
    }

    /// Returns the number of terms of all filterable categories.
    pub fn terms(&self) -> usize {
        self.terms
    }

    /// Returns a column by its name, or by its number in decimal notation.
    ///
    /// # Errors
    /// `Invalid` with the names of all columns, and the one that is nearest in spelling.
    pub fn column(&self, name: &str) -> Result<&Column> {
        self.number(name).map(|n| &self.columns[n])
    }

    /// Returns the index of the column that [`Columns::column`] returns.
    ///
    /// # Errors
    /// As [`Columns::column`].
    pub fn number(&self, name: &str) -> Result<usize> {
        let by_number = || name.parse::<usize>().ok().filter(|&n| n < self.columns.len());
        self.columns.iter().position(|c| c.declared.name == name).or_else(by_number).ok_or_else(|| {
            let known: Vec<&str> = self.columns.iter().map(|c| c.name()).collect();
            let expected = match nearest(name, &known) {
                Some(near) => format!("did you mean `{near}`? Expected one of"),
                None => "expected one of".to_owned(),
            };
            Error::invalid(format!("unknown column `{name}`, {expected}: {}", known.join(", ")))
        })
    }

    /// Returns the terms of a slot in all filterable categories.
    pub fn slot_terms(&self, slot: Slot) -> impl Iterator<Item = TermId> + '_ {
        self.columns
            .iter()
            .filter_map(|c| Some((c, c.first_term?)))
            .flat_map(move |(column, first)| column.codes(slot).iter().map(move |code| TermId(first.0 + code)))
    }

    /// Returns the hash key of a term: the name of its column and its value.
    pub fn term_key(&self, term: TermId) -> Option<Vec<u8>> {
        let column = self.columns.iter().rfind(|c| c.first_term.is_some_and(|first| first <= term))?;
        let code = term.0 - column.first_term?.0;
        let mut key = column.name().as_bytes().to_vec();
        key.push(0);
        match &column.values {
            Values::Integers(values) => key.extend(values.get(code as usize)?.to_le_bytes()),
            Values::Texts { .. } => key.extend(column.text(code).as_bytes()),
            Values::Floats(_) => return None,
        }
        Some(key)
    }
}

impl Column {
    fn open(tensors: &Tensors, number: usize, declared: Declared, slots: usize) -> Result<Self> {
        let corrupt = |what: &str| Error::corrupt(format!("column `{}`: {what}", declared.name));
        let (values, distinct) = match declared.kind {
            ColumnKind::Floats => {
                let values = Values::Floats(tensors.vector(&format!("c{number}.floats"), slots)?);
                return Ok(Column {
                    declared,
                    values,
                    offsets: Buffer::default(),
                    codes: Buffer::default(),
                    first_term: None,
                    is_single: true,
                    cell_bytes: FLOAT_BYTES,
                });
            }
            ColumnKind::Integers => {
                let (values, shape) = tensors.get::<i64>(&format!("c{number}.integers"), 1)?;
                if !values.is_sorted_by(|a, b| a < b) {
                    return Err(corrupt("the dictionary is not ascending"));
                }
                (Values::Integers(values), shape[0])
            }
            ColumnKind::Texts => {
                let (offsets, shape) = tensors.get::<u64>(&format!("c{number}.text_offsets"), 1)?;
                let (bytes, _) = tensors.get::<u8>(&format!("c{number}.text_bytes"), 1)?;
                if offsets.first() != Some(&0) || offsets.last() != Some(&(bytes.len() as u64)) || !offsets.is_sorted()
                {
                    return Err(corrupt("the offsets of the dictionary do not cover its text"));
                }
                let text = |w: &[u64]| std::str::from_utf8(&bytes[w[0] as usize..w[1] as usize]).ok();
                if !offsets.windows(2).map(text).is_sorted_by(|a, b| a.is_some() && b.is_some() && a < b) {
                    return Err(corrupt("the dictionary is not ascending UTF-8"));
                }
                (Values::Texts { offsets, bytes }, shape[0] - 1)
            }
        };
        let offsets = tensors.vector::<u32>(&format!("c{number}.offsets"), slots + 1)?;
        let (codes, _) = tensors.get::<u32>(&format!("c{number}.codes"), 1)?;
        if offsets.first() != Some(&0) || offsets.last() != Some(&(codes.len() as u32)) || !offsets.is_sorted() {
            return Err(corrupt("the offsets do not cover the codes"));
        }
        let ascending = |w: &[u32]| {
            let of_slot = &codes[w[0] as usize..w[1] as usize];
            of_slot.is_sorted_by(|a, b| a < b) && of_slot.last().is_none_or(|&c| (c as usize) < distinct)
        };
        if !offsets.windows(2).all(ascending) {
            return Err(corrupt("a slot has codes that are out of order or outside the dictionary"));
        }
        let most = offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as usize;
        let is_single = most <= 1;
        let column = Column { declared, values, offsets, codes, first_term: None, is_single, cell_bytes: 0 };
        let cell_bytes = column.largest_cell(most);
        Ok(Column { cell_bytes, ..column })
    }

    /// Returns the maximum size of a slot's values in an answer, for a column with at most `most` values per slot.
    fn largest_cell(&self, most: usize) -> usize {
        let Values::Texts { offsets, .. } = &self.values else { return integer_bytes(most) };
        let of_code = |code: usize| text_bytes((offsets[code + 1] - offsets[code]) as usize);
        let longest = (0..self.dictionary_len()).map(of_code).max().unwrap_or(0);
        if most <= 1 {
            return longest;
        }
        let of_slot = |w: &[u32]| self.codes[w[0] as usize..w[1] as usize].iter().map(|&c| of_code(c as usize)).sum();
        self.offsets.windows(2).map(of_slot).max().unwrap_or(0)
    }

    /// Returns the maximum length of the values of a slot in an answer, as [`Cell::bytes`] counts it.
    pub fn cell_bytes(&self) -> usize {
        self.cell_bytes
    }

    /// Returns the name that filters and answers use.
    pub fn name(&self) -> &str {
        &self.declared.name
    }

    /// Returns the type of the column.
    pub fn kind(&self) -> ColumnKind {
        self.declared.kind
    }

    /// Returns true if filters may use the column.
    pub fn is_filterable(&self) -> bool {
        self.declared.filter
    }

    /// Returns the number of distinct values of a category; 0 for numbers.
    pub fn dictionary_len(&self) -> usize {
        match &self.values {
            Values::Integers(values) => values.len(),
            Values::Texts { offsets, .. } => offsets.len().saturating_sub(1),
            Values::Floats(_) => 0,
        }
    }

    /// Returns the codes of a slot, ascending; empty for a column of numbers.
    pub fn codes(&self, slot: Slot) -> &[u32] {
        match self.offsets.get(slot.index()..slot.index() + 2) {
            Some(&[from, to]) => &self.codes[from as usize..to as usize],
            _ => &[],
        }
    }

    /// Returns the offsets of the codes of each slot, `[S + 1]`, and the codes of all slots.
    pub fn all_codes(&self) -> (&[u32], &[u32]) {
        (&self.offsets, &self.codes)
    }

    /// Returns the values of a float column, one per slot, NaN if missing.
    pub fn floats(&self) -> Option<&[f64]> {
        match &self.values {
            Values::Floats(values) => Some(values),
            _ => None,
        }
    }

    /// Returns the minimum and maximum of an integer dictionary.
    pub fn extremes(&self) -> Option<[i64; 2]> {
        match &self.values {
            Values::Integers(values) => Some([*values.first()?, *values.last()?]),
            _ => None,
        }
    }

    /// Returns the code of a term of this column.
    pub fn code(&self, term: TermId) -> Option<u32> {
        term.0.checked_sub(self.first_term?.0).filter(|code| (*code as usize) < self.dictionary_len())
    }

    /// Resolves a value in filter syntax to its term; `None` if no item has this value.
    ///
    /// # Errors
    /// `Invalid` if the column does not support tests for values.
    pub fn term(&self, value: &str) -> Result<Option<TermId>> {
        self.check_has_terms()?;
        let rank = match &self.values {
            Values::Floats(_) => None,
            Values::Integers(values) => values.binary_search(&self.integer(value)?).ok(),
            Values::Texts { .. } => {
                let (mut low, mut high) = (0, self.dictionary_len() as u32);
                while low < high {
                    let middle = low.midpoint(high);
                    if self.text(middle) < value { low = middle + 1 } else { high = middle }
                }
                ((low as usize) < self.dictionary_len() && self.text(low) == value).then_some(low as usize)
            }
        };
        Ok(rank.zip(self.first_term).map(|(rank, first)| TermId(first.0 + rank as u32)))
    }

    /// Checks that the column supports tests for values ([`Column::term`]).
    ///
    /// # Errors
    /// `Invalid` if the column does not support tests for values.
    pub fn check_has_terms(&self) -> Result<()> {
        self.check_filterable()?;
        match &self.values {
            Values::Floats(_) => {
                let name = self.name();
                Err(Error::invalid(format!("column `{name}` holds numbers: compare it, as in `{name} < 10`")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_filterable(&self) -> Result<()> {
        let name = self.name();
        self.declared
            .filter
            .then_some(())
            .ok_or_else(|| Error::invalid(format!("column `{name}` is not filterable in this snapshot")))
    }

    /// Returns the value of a code; `Missing` for unknown codes.
    pub fn value(&self, code: u32) -> Cell<'_> {
        match &self.values {
            Values::Integers(values) => values.get(code as usize).map_or(Cell::Missing, |&n| Cell::Integer(n)),
            Values::Texts { .. } if (code as usize) < self.dictionary_len() => Cell::Text(self.text(code)),
            _ => Cell::Missing,
        }
    }

    fn text(&self, code: u32) -> &str {
        match &self.values {
            Values::Texts { offsets, bytes } => {
                let (from, to) = (offsets[code as usize] as usize, offsets[code as usize + 1] as usize);
                std::str::from_utf8(&bytes[from..to]).expect("checked when the column was opened")
            }
            _ => "",
        }
    }

    pub(super) fn integer(&self, text: &str) -> Result<i64> {
        text.parse().map_err(|_| {
            Error::invalid(format!("column `{}` holds integers: got `{text}`, expected an integer", self.name()))
        })
    }

    /// Returns the position of the slot's value on the axis of comparisons: the number itself, or the code of an
    /// integer (the first code of several integers). `None` if missing.
    pub fn place(&self, slot: Slot) -> Option<f64> {
        match &self.values {
            Values::Floats(values) => values.get(slot.index()).copied().filter(|v| !v.is_nan()),
            Values::Integers(_) => self.codes(slot).first().map(|&code| f64::from(code)),
            Values::Texts { .. } => None,
        }
    }

    /// Returns true if no slot has two values.
    pub fn is_single(&self) -> bool {
        self.is_single
    }

    /// Returns the first term of a filterable category; the terms of its codes are consecutive.
    pub fn first_term(&self) -> Option<TermId> {
        self.first_term
    }

    /// Returns the values of a slot.
    pub fn cell(&self, slot: Slot) -> Cell<'_> {
        let codes = self.codes(slot);
        match &self.values {
            Values::Floats(values) => match values.get(slot.index()) {
                Some(v) if !v.is_nan() => Cell::Float(*v),
                _ => Cell::Missing,
            },
            Values::Integers(values) => match codes {
                [] => Cell::Missing,
                [one] => Cell::Integer(values[*one as usize]),
                many => Cell::Integers(many.iter().map(|&c| values[c as usize]).collect()),
            },
            Values::Texts { .. } => match codes {
                [] => Cell::Missing,
                [one] => Cell::Text(self.text(*one)),
                many => Cell::Texts(many.iter().map(|&c| self.text(c)).collect()),
            },
        }
    }

    /// Returns one f32 per slot, as rerankers and value models read it: the number, or the smallest of several integers; 0 if
    /// missing. `None` for texts.
    pub fn numbers(&self) -> Option<Vec<f32>> {
        match &self.values {
            Values::Texts { .. } => None,
            Values::Floats(values) => Some(values.iter().map(|v| if v.is_nan() { 0.0 } else { *v as f32 }).collect()),
            Values::Integers(values) => {
                let first =
                    |w: &[u32]| if w[0] == w[1] { 0.0 } else { values[self.codes[w[0] as usize] as usize] as f32 };
                Some(self.offsets.windows(2).map(first).collect())
            }
        }
    }
}
