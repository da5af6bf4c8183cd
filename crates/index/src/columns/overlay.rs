//! Values that have changed since the columns were written.
//!
//! Columns stay as they are, and what has become of a slot lies beside them, column by column: whoever asks for a value looks
//! there first. A column that nothing has changed in costs a filter nothing.

use std::sync::Arc;

use super::cell::Cell;
use super::operator::{Operator, Threshold};
use super::sparse::{Sparse, bits};
use sterling_core::units::Slot;

/// The values of one slot in one column, as they are now.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    Missing,
    Integer(i64),
    /// Ascending, two at least.
    Integers(Arc<[i64]>),
    Float(f64),
    Text(Arc<str>),
    /// Ascending, two at least.
    Texts(Arc<[String]>),
}

impl Value {
    /// Integers, which are a set.
    pub fn of_integers(values: &[i64]) -> Self {
        match *values {
            [] => Value::Missing,
            [one] => Value::Integer(one),
            _ => {
                let mut values = values.to_vec();
                values.sort_unstable();
                values.dedup();
                if let [one] = values[..] { Value::Integer(one) } else { Value::Integers(values.into()) }
            }
        }
    }

    /// Texts, which are a set.
    pub fn of_texts(values: &[String]) -> Self {
        match values {
            [] => Value::Missing,
            [one] => Value::Text(one.as_str().into()),
            _ => {
                let mut values = values.to_vec();
                values.sort_unstable();
                values.dedup();
                if let [one] = &values[..] { Value::Text(one.as_str().into()) } else { Value::Texts(values.into()) }
            }
        }
    }

    /// The same as columns tell it.
    pub fn cell(&self) -> Cell<'_> {
        match self {
            Value::Missing => Cell::Missing,
            Value::Integer(value) => Cell::Integer(*value),
            Value::Integers(values) => Cell::Integers(values.to_vec()),
            Value::Float(value) => Cell::Float(*value),
            Value::Text(text) => Cell::Text(text),
            Value::Texts(texts) => Cell::Texts(texts.iter().map(String::as_str).collect()),
        }
    }

    /// As rerankers and value models read it: as [`super::Column::numbers`].
    pub fn number(&self) -> f32 {
        match self {
            Value::Integer(value) => *value as f32,
            Value::Integers(values) => values[0] as f32,
            Value::Float(value) => *value as f32,
            Value::Missing | Value::Text(_) | Value::Texts(_) => 0.0,
        }
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        let beside = match self {
            Value::Missing | Value::Integer(_) | Value::Float(_) => 0,
            Value::Integers(values) => size_of_val(&**values),
            Value::Text(text) => text.len(),
            Value::Texts(texts) => size_of_val(&**texts) + texts.iter().map(String::len).sum::<usize>(),
        };
        size_of::<Value>() + beside
    }

    fn integers(&self) -> &[i64] {
        match self {
            Value::Integer(value) => std::slice::from_ref(value),
            Value::Integers(values) => values,
            _ => &[],
        }
    }

    fn is_single(&self) -> bool {
        !matches!(self, Value::Integers(_) | Value::Texts(_))
    }
}

/// What a filter asks of the values of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Predicate {
    /// One of these integers is among them.
    Integers(Vec<i64>),
    /// One of these texts is.
    Texts(Vec<String>),
    /// An integer compares so with the bound.
    Threshold(Operator, Threshold),
    /// The number compares so.
    Number(Operator, f64),
    /// There is a value.
    Present,
}

impl Predicate {
    /// Whether values hold it.
    pub fn holds(&self, value: &Value) -> bool {
        match (self, value) {
            (Predicate::Integers(wanted), value) => value.integers().iter().any(|value| wanted.contains(value)),
            (Predicate::Texts(wanted), Value::Text(text)) => wanted.iter().any(|one| **one == **text),
            (Predicate::Texts(wanted), Value::Texts(texts)) => texts.iter().any(|text| wanted.contains(text)),
            (Predicate::Threshold(operator, bound), value) => {
                value.integers().iter().any(|value| bound.holds(*operator, *value))
            }
            (Predicate::Number(operator, number), Value::Float(value)) => operator.holds(*value, *number),
            (Predicate::Present, Value::Float(value)) => !value.is_nan(),
            (Predicate::Present, value) => *value != Value::Missing,
            _ => false,
        }
    }
}

/// Values by column and slot, in the place of those that columns have.
#[derive(Clone, Debug, Default)]
pub struct Overlay {
    columns: Vec<OfColumn>,
    /// Slots that have any.
    slots: usize,
    /// What the values take in memory.
    bytes: usize,
}

#[derive(Clone, Debug)]
struct OfColumn {
    values: Sparse<Value>,
    /// Whether no slot ever had two values.
    is_single: bool,
    /// Bytes of the largest values that a slot ever had.
    cell_bytes: usize,
}

impl Default for OfColumn {
    fn default() -> Self {
        OfColumn { values: Sparse::default(), is_single: true, cell_bytes: 0 }
    }
}

impl Overlay {
    /// Number of slots of which a value has changed.
    pub fn len(&self) -> usize {
        self.slots
    }

    /// True where none has.
    pub fn is_empty(&self) -> bool {
        self.slots == 0
    }

    /// Bytes that the changed values take in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// True where a value of the slot has changed.
    pub fn contains(&self, slot: Slot) -> bool {
        self.columns.iter().any(|column| column.values.get(slot).is_some())
    }

    /// True where a value of the column of a number has changed.
    pub fn has_column(&self, column: usize) -> bool {
        self.columns.get(column).is_some_and(|column| column.values.len() > 0)
    }

    /// True where no slot has, or had, two values in the column.
    pub fn is_single(&self, column: usize) -> bool {
        self.columns.get(column).is_none_or(|column| column.is_single)
    }

    /// Bytes of the largest values that a slot has, or had, in the column of a number, as [`Cell::bytes`] counts them.
    pub fn cell_bytes(&self, column: usize) -> usize {
        self.columns.get(column).map_or(0, |column| column.cell_bytes)
    }

    /// What a slot has in a column, where that has changed.
    pub fn get(&self, column: usize, slot: Slot) -> Option<&Value> {
        self.columns.get(column)?.values.get(slot)
    }

    /// Those of the 64 slots from `word * 64` on whose values in a column have changed, bit by bit, and these values.
    pub fn word(&self, column: usize, word: usize) -> (u64, &[Value]) {
        self.columns.get(column).map_or((0, &[]), |column| column.values.word(word))
    }

    /// The words of 64 slots of which some have changed in a column, ascending.
    pub fn words(&self, column: usize) -> impl Iterator<Item = usize> + '_ {
        self.columns.get(column).into_iter().flat_map(|column| column.values.words())
    }

    /// Slots that have changed in a column, ascending, with what they have now.
    pub fn changed(&self, column: usize) -> impl Iterator<Item = (Slot, &Value)> {
        self.words(column).flat_map(move |word| {
            let (filled, values) = self.word(column, word);
            bits(filled).map(move |bit| Slot(word as u32 * u64::BITS + bit)).zip(values)
        })
    }

    /// Changes a value.
    pub fn set(&mut self, column: usize, slot: Slot, value: Value) {
        self.slots += usize::from(!self.contains(slot));
        if self.columns.len() <= column {
            self.columns.resize_with(column + 1, OfColumn::default);
        }
        let column = &mut self.columns[column];
        column.is_single &= value.is_single();
        column.cell_bytes = column.cell_bytes.max(value.cell().bytes());
        self.bytes += value.bytes();
        let replaced = column.values.insert(slot, value);
        self.bytes -= replaced.map_or(0, |value| value.bytes());
    }

    /// Forgets what has changed of a slot.
    pub fn remove(&mut self, slot: Slot) {
        self.slots -= usize::from(self.contains(slot));
        let removed = self.columns.iter_mut().filter_map(|column| column.values.remove(slot));
        self.bytes -= removed.map(|value| value.bytes()).sum::<usize>();
    }
}
