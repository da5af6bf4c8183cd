//! Overlay of values that were updated after the columns were written.
//!
//! Columns are immutable. Updated values are stored per column and slot in an overlay that readers consult first. A column
//! without updates adds no cost to a filter.

use std::sync::Arc;

use super::cell::Cell;
use super::operator::{Operator, Threshold};
use super::sparse::{Sparse, bits};
use sterling_core::units::Slot;

/// Current values of one slot in one column.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    Missing,
    Integer(i64),
    /// At least two values, ascending.
    Integers(Arc<[i64]>),
    Float(f64),
    Text(Arc<str>),
    /// At least two values, ascending.
    Texts(Arc<[String]>),
}

impl Value {
    /// Creates a value from a set of integers.
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

    /// Creates a value from a set of texts.
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

    /// Converts the value to the representation that columns return.
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

    /// Returns the number that rerankers and value models read, as [`super::Column::numbers`].
    pub fn number(&self) -> f32 {
        match self {
            Value::Integer(value) => *value as f32,
            Value::Integers(values) => values[0] as f32,
            Value::Float(value) => *value as f32,
            Value::Missing | Value::Text(_) | Value::Texts(_) => 0.0,
        }
    }

    /// Returns the memory of the value, in bytes.
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

/// Test of a filter on the values of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Predicate {
    /// Passes if a value equals one of these integers.
    Integers(Vec<i64>),
    /// Passes if a value equals one of these texts.
    Texts(Vec<String>),
    /// Passes if an integer satisfies the comparison.
    Threshold(Operator, Threshold),
    /// Passes if the number satisfies the comparison.
    Number(Operator, f64),
    /// Passes if the item has a value.
    Present,
}

impl Predicate {
    /// Returns true if the value satisfies the test.
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

/// Values by column and slot that replace the values stored in the columns.
#[derive(Clone, Debug, Default)]
pub struct Overlay {
    columns: Vec<ColumnValues>,
    /// Number of slots with updated values.
    slots: usize,
    /// Memory of the values, in bytes.
    bytes: usize,
}

#[derive(Clone, Debug)]
struct ColumnValues {
    values: Sparse<Value>,
    /// True if no slot ever had two values.
    is_single: bool,
    /// Maximum size that the values of a slot ever had in an answer, in bytes.
    cell_bytes: usize,
}

impl Default for ColumnValues {
    fn default() -> Self {
        ColumnValues { values: Sparse::default(), is_single: true, cell_bytes: 0 }
    }
}

impl Overlay {
    /// Returns the number of slots with updated values.
    pub fn len(&self) -> usize {
        self.slots
    }

    /// Returns true if there are no updated values.
    pub fn is_empty(&self) -> bool {
        self.slots == 0
    }

    /// Returns the memory of the updated values, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if the slot has an updated value.
    pub fn contains(&self, slot: Slot) -> bool {
        self.columns.iter().any(|column| column.values.get(slot).is_some())
    }

    /// Returns true if the column has an updated value.
    pub fn has_column(&self, column: usize) -> bool {
        self.columns.get(column).is_some_and(|column| column.values.len() > 0)
    }

    /// Returns true if no slot has, or ever had, two values in the column.
    pub fn is_single(&self, column: usize) -> bool {
        self.columns.get(column).is_none_or(|column| column.is_single)
    }

    /// Returns the maximum size that the values of a slot ever had in the column, as [`Cell::bytes`] counts it.
    pub fn cell_bytes(&self, column: usize) -> usize {
        self.columns.get(column).map_or(0, |column| column.cell_bytes)
    }

    /// Returns the updated value of a slot in a column, if there is one.
    pub fn get(&self, column: usize, slot: Slot) -> Option<&Value> {
        self.columns.get(column)?.values.get(slot)
    }

    /// Returns which of the 64 slots from `word * 64` on have updated values in a column, as a bitmap, and these
    /// values.
    pub fn word(&self, column: usize, word: usize) -> (u64, &[Value]) {
        self.columns.get(column).map_or((0, &[]), |column| column.values.word(word))
    }

    /// Returns the indexes of the 64-slot words with updated values in a column, ascending.
    pub fn words(&self, column: usize) -> impl Iterator<Item = usize> + '_ {
        self.columns.get(column).into_iter().flat_map(|column| column.values.words())
    }

    /// Returns the slots with updated values in a column, ascending, with these values.
    pub fn changed(&self, column: usize) -> impl Iterator<Item = (Slot, &Value)> {
        self.words(column).flat_map(move |word| {
            let (filled, values) = self.word(column, word);
            bits(filled).map(move |bit| Slot(word as u32 * u64::BITS + bit)).zip(values)
        })
    }

    /// Sets a value.
    pub fn set(&mut self, column: usize, slot: Slot, value: Value) {
        self.slots += usize::from(!self.contains(slot));
        if self.columns.len() <= column {
            self.columns.resize_with(column + 1, ColumnValues::default);
        }
        let column = &mut self.columns[column];
        column.is_single &= value.is_single();
        column.cell_bytes = column.cell_bytes.max(value.cell().bytes());
        self.bytes += value.bytes();
        let replaced = column.values.insert(slot, value);
        self.bytes -= replaced.map_or(0, |value| value.bytes());
    }

    /// Removes all updated values of a slot.
    pub fn remove(&mut self, slot: Slot) {
        self.slots -= usize::from(self.contains(slot));
        let removed = self.columns.iter_mut().filter_map(|column| column.values.remove(slot));
        self.bytes -= removed.map(|value| value.bytes()).sum::<usize>();
    }
}
