//! Browsing of a catalogue: items by part of a value, and the values of a column.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::{SegmentItems, View};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_index::columns::{Cell, Column, Contains, Value};

/// Maximum number of distinct values for which items are counted; counting more would take too much memory.
pub const COUNTED_VALUES_MAX: usize = 1 << 20;
/// Maximum bytes of memory per counted value, in a map and in the sorted list.
const COUNTED_BYTES: usize = 128;

/// Values of a column.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnValues<'a> {
    /// Values, each with its number of items if they were counted ([`COUNTED_VALUES_MAX`]).
    pub values: Vec<(Category<'a>, Option<usize>)>,
    /// Number of distinct matching values; larger than the length of `values` if the values were limited.
    pub found: usize,
    /// Minimum and maximum of a numeric column; `None` if the column has no numbers.
    pub range: Option<(f64, f64)>,
}

/// Borrowed value of a category column: iterating over a column copies nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Category<'a> {
    Integer(i64),
    Text(&'a str),
}

impl View {
    /// Returns up to `most` items of which a category value contains `text`, ignoring ASCII case. Exact matches come first, then
    /// prefixes, then other matches, each ordered by value. Reads the column once.
    ///
    /// # Errors
    /// `Invalid` naming the existing columns, or if the column is not categorical.
    pub fn find(&self, column: &str, text: &str, most: usize) -> Result<Vec<Slot>> {
        let number = self.category(column)?;
        let mut found = Vec::new();
        for segment in self.all_segments() {
            let column = segment.columns.at(number);
            let holds = column.containing(text);
            let mut best = BinaryHeap::new();
            for slot in segment.unchanged(number) {
                let codes = column.codes(slot).iter().map(|&code| (holds[code as usize], code));
                let Some((held, code)) = codes.min().filter(|(held, _)| *held != Contains::Not) else { continue };
                best.push((held, code, slot));
                if best.len() > most {
                    best.pop();
                }
            }
            found.extend(segment.changed(number).filter_map(|(slot, value)| {
                let values = categories(value).into_iter().map(|value| (value.contains(text), value));
                let (held, value) = values.min().filter(|(held, _)| *held != Contains::Not)?;
                Some((held, value, segment.to_view_slot(slot)))
            }));
            found.extend(
                best.into_iter().map(|(held, code, slot)| (held, category(column, code), segment.to_view_slot(slot))),
            );
        }
        found.sort();
        Ok(found.into_iter().take(most).map(|(_, _, slot)| slot).collect())
    }

    /// Returns up to `most` values of a column that match `text` as in [`View::find`]; equal kinds of match are ordered by
    /// descending number of items. Reads the column once. For a numeric column, returns only its range.
    ///
    /// # Errors
    /// `Invalid` naming the existing columns.
    pub fn values(&self, column: &str, text: &str, most: usize) -> Result<ColumnValues<'_>> {
        let number = self.main.columns.number(column)?;
        let main = self.main.columns.at(number);
        let range = self.range(number);
        if main.floats().is_some() {
            return Ok(ColumnValues { values: Vec::new(), found: 0, range });
        }
        if main.dictionary_len() > COUNTED_VALUES_MAX {
            let (mut best, mut found) = (BinaryHeap::new(), 0);
            for held in main.containing(text).into_iter().zip(0..).filter(|(held, _)| *held != Contains::Not) {
                found += 1;
                best.push(held);
                if best.len() > most {
                    best.pop();
                }
            }
            let values = best.into_sorted_vec().into_iter().map(|(_, code)| (category(main, code), None)).collect();
            return Ok(ColumnValues { values, found, range });
        }
        let mut counts: BTreeMap<Category<'_>, (Contains, usize)> = BTreeMap::new();
        for segment in self.all_segments() {
            let column = segment.columns.at(number);
            let holds = column.containing(text);
            let mut items = vec![0; holds.len()];
            segment.unchanged(number).flat_map(|slot| column.codes(slot)).for_each(|&code| items[code as usize] += 1);
            let held =
                holds.into_iter().zip(items).zip(0..).filter(|((held, items), _)| *held != Contains::Not && *items > 0);
            for ((held, items), code) in held {
                counts.entry(category(column, code)).or_insert((held, 0)).1 += items;
            }
            for value in segment.changed(number).flat_map(|(_, value)| categories(value)) {
                let held = value.contains(text);
                if held != Contains::Not {
                    counts.entry(value).or_insert((held, 0)).1 += 1;
                }
            }
        }
        let mut values: Vec<_> =
            counts.into_iter().map(|(value, (held, items))| (held, Reverse(items), value)).collect();
        values.sort();
        let found = values.len();
        let values = values.into_iter().take(most).map(|(_, Reverse(items), value)| (value, Some(items))).collect();
        Ok(ColumnValues { values, found, range })
    }

    /// Returns the bytes of memory that [`View::values`] takes while it counts a column.
    pub fn counting_bytes(&self, number: usize) -> usize {
        let values =
            |segment: SegmentItems<'_>| segment.columns.at(number).dictionary_len() + segment.changed(number).count();
        match self.main.columns.at(number).dictionary_len() {
            many if many > COUNTED_VALUES_MAX => many * size_of::<Contains>(),
            _ => COUNTED_BYTES * self.all_segments().map(values).sum::<usize>(),
        }
    }

    /// Returns the index of a category column.
    fn category(&self, column: &str) -> Result<usize> {
        let number = self.main.columns.number(column)?;
        match self.main.columns.at(number).floats() {
            Some(_) => {
                Err(Error::invalid(format!("column `{column}` holds numbers, expected one of texts or integers")))
            }
            None => Ok(number),
        }
    }

    fn range(&self, number: usize) -> Option<(f64, f64)> {
        let mut range: Option<(f64, f64)> = None;
        let mut see = |n: f64| range = Some(range.map_or((n, n), |(least, greatest)| (least.min(n), greatest.max(n))));
        for segment in self.all_segments() {
            let column = segment.columns.at(number);
            match column.floats() {
                Some(floats) => {
                    segment
                        .unchanged(number)
                        .map(|slot| floats[slot.index()])
                        .filter(|n| !n.is_nan())
                        .for_each(&mut see);
                }
                None => column.extremes().into_iter().flatten().for_each(|n| see(n as f64)),
            }
            segment.changed(number).for_each(|(_, value)| match value {
                Value::Float(number) => see(*number),
                _ => categories(value).iter().filter_map(Category::integer).for_each(|n| see(n as f64)),
            });
        }
        range
    }
}

impl Category<'_> {
    /// Returns the maximum bytes of the value in an answer, as [`Cell::bytes`] counts them.
    pub fn bytes(&self) -> usize {
        match *self {
            Category::Integer(value) => Cell::Integer(value).bytes(),
            Category::Text(text) => Cell::Text(text).bytes(),
        }
    }

    /// Returns how the value matches `text`, as [`Column::containing`] does for a dictionary.
    fn contains(&self, text: &str) -> Contains {
        match self {
            Category::Integer(value) => Contains::of(&value.to_string(), text),
            Category::Text(value) => Contains::of(value, text),
        }
    }

    fn integer(&self) -> Option<i64> {
        if let Category::Integer(value) = self { Some(*value) } else { None }
    }
}

/// Returns the category values of a changed item.
fn categories(value: &Value) -> Vec<Category<'_>> {
    match value {
        Value::Missing | Value::Float(_) => Vec::new(),
        Value::Integer(value) => vec![Category::Integer(*value)],
        Value::Integers(values) => values.iter().copied().map(Category::Integer).collect(),
        Value::Text(text) => vec![Category::Text(text)],
        Value::Texts(texts) => texts.iter().map(|text| Category::Text(text)).collect(),
    }
}

fn category(column: &Column, code: u32) -> Category<'_> {
    match column.value(code) {
        Cell::Integer(value) => Category::Integer(value),
        Cell::Text(text) => Category::Text(text),
        other => unreachable!("a dictionary holds integers or texts, not {other:?}"),
    }
}
