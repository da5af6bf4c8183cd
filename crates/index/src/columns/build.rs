//! Input columns of an item file, and their encoding in slot order.

use std::collections::BTreeSet;

use super::view::{ColumnKind, Declared};
use sterling_core::error::{Error, Result};
use sterling_storage::files::TensorFile;

/// Column of an item file, in the order of the file.
#[derive(Clone, Debug)]
pub struct ItemColumn {
    /// Name that filters, value models and answers use.
    pub name: String,
    /// True if filters may use the column; otherwise the column can only be returned.
    pub filter: bool,
    /// Values of all items.
    pub values: ItemValues,
}

/// Values of a column. Item `i` has the values `offsets[i]..offsets[i + 1]`; an empty range means missing.
#[derive(Clone, Debug)]
pub enum ItemValues {
    /// Integer categories, also comparable.
    Integers {
        /// Range boundaries, `[N + 1]`, ascending.
        offsets: Vec<u32>,
        /// Values of all items, concatenated.
        values: Vec<i64>,
    },
    /// Text categories.
    Texts {
        /// Range boundaries, `[N + 1]`, ascending.
        offsets: Vec<u32>,
        /// Values of all items, concatenated.
        values: Vec<String>,
    },
    /// Numbers, one per item, `[N]`; NaN means missing.
    Floats(Vec<f64>),
}

/// Memory of a heap-allocated text in addition to its characters: the `String` (24 bytes) and the rounding of the allocator.
const TEXT_BYTES: usize = 24 + 16;

/// Returns the memory of a text of a column, in bytes.
pub fn text_bytes(text: &str) -> usize {
    text.len() + TEXT_BYTES
}

impl ItemValues {
    /// Returns the number of values.
    pub fn count(&self) -> usize {
        match self {
            ItemValues::Integers { values, .. } => values.len(),
            ItemValues::Texts { values, .. } => values.len(),
            ItemValues::Floats(values) => values.len(),
        }
    }

    /// Returns the memory of the values, in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            ItemValues::Integers { offsets, values } => 4 * offsets.len() + 8 * values.len(),
            ItemValues::Texts { offsets, values } => {
                4 * offsets.len() + values.iter().map(|text| text_bytes(text)).sum::<usize>()
            }
            ItemValues::Floats(values) => 8 * values.len(),
        }
    }

    /// Returns the type of a column with these values.
    pub fn kind(&self) -> ColumnKind {
        match self {
            ItemValues::Integers { .. } => ColumnKind::Integers,
            ItemValues::Texts { .. } => ColumnKind::Texts,
            ItemValues::Floats(_) => ColumnKind::Floats,
        }
    }
}

/// Adds the tensors of `columns` to `file`. Slot `s` gets the values of item `order[s]`, or none if that is
/// [`NO_ITEM`](sterling_core::units::NO_ITEM).
///
/// # Errors
/// `Invalid` if two columns have the same name.
pub fn encode(columns: &[ItemColumn], order: &[u32], file: &mut TensorFile<'_>) -> Result<()> {
    let mut names = BTreeSet::new();
    let mut declared = Vec::new();
    for (number, column) in columns.iter().enumerate() {
        if !names.insert(&column.name) {
            return Err(Error::invalid(format!("column `{}` is given twice, expected each name once", column.name)));
        }
        let kind = match &column.values {
            ItemValues::Integers { offsets, values } => {
                let (dictionary, codes) = dictionary(values);
                file.add_owned(
                    format!("c{number}.integers"),
                    &[dictionary.len()],
                    dictionary.into_iter().copied().collect(),
                )?;
                encode_codes(number, offsets, &codes, order, file)?;
                ColumnKind::Integers
            }
            ItemValues::Texts { offsets, values } => {
                let (dictionary, codes) = dictionary(values);
                let mut ends = vec![0u64];
                ends.extend(dictionary.iter().scan(0, |at, text| {
                    *at += text.len() as u64;
                    Some(*at)
                }));
                let bytes: Vec<u8> = dictionary.iter().flat_map(|text| text.bytes()).collect();
                file.add_owned(format!("c{number}.text_offsets"), &[ends.len()], ends)?;
                file.add_owned(format!("c{number}.text_bytes"), &[bytes.len()], bytes)?;
                encode_codes(number, offsets, &codes, order, file)?;
                ColumnKind::Texts
            }
            ItemValues::Floats(values) => {
                let by_slot: Vec<f64> =
                    order.iter().map(|&row| values.get(row as usize).copied().unwrap_or(f64::NAN)).collect();
                file.add_owned(format!("c{number}.floats"), &[by_slot.len()], by_slot)?;
                ColumnKind::Floats
            }
        };
        declared.push(Declared { name: column.name.clone(), kind, filter: column.filter });
    }
    file.add_json("columns", &declared)
}

/// Returns the sorted distinct values, and for each input value its rank among them.
pub(super) fn dictionary<T: Ord>(values: &[T]) -> (Vec<&T>, Vec<u32>) {
    let mut sorted: Vec<&T> = values.iter().collect();
    sorted.sort_unstable();
    sorted.dedup();
    let codes =
        values.iter().map(|v| sorted.binary_search(&v).expect("the dictionary holds every value") as u32).collect();
    (sorted, codes)
}

/// Returns the end offset after `values` values of a column.
///
/// # Errors
/// `Invalid` if the offset exceeds 32 bits.
pub fn values_end(values: usize) -> Result<u32> {
    u32::try_from(values)
        .map_err(|_| Error::invalid(format!("{values} values in one column, expected at most {}", u32::MAX)))
}

fn encode_codes(number: usize, offsets: &[u32], codes: &[u32], order: &[u32], file: &mut TensorFile<'_>) -> Result<()> {
    let mut ends = Vec::with_capacity(order.len() + 1);
    let mut by_slot: Vec<u32> = Vec::with_capacity(codes.len());
    ends.push(0u32);
    let mut of_item = Vec::new();
    for &row in order {
        if let Some(&[from, to]) = offsets.get(row as usize..).and_then(|o| o.get(..2)) {
            of_item.clear();
            of_item.extend_from_slice(&codes[from as usize..to as usize]);
            of_item.sort_unstable();
            of_item.dedup();
            by_slot.extend_from_slice(&of_item);
        }
        ends.push(values_end(by_slot.len())?);
    }
    file.add_owned(format!("c{number}.offsets"), &[ends.len()], ends)?;
    file.add_owned(format!("c{number}.codes"), &[by_slot.len()], by_slot)
}
