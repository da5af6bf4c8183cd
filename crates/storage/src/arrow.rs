//! Conversion of Arrow columns, from Parquet files and request bodies, to values.
//!
//! File types are those of Parquet itself. The Arrow schema that a writer stores with the file (dictionaries, views, fixed or
//! large lists) only describes its memory layout and is ignored, so that files of all writers are read alike.
//!
//! | Arrow | value |
//! |---|---|
//! | integers of up to 64 bits; unsigned integers if they fit into i64 | integer |
//! | dates, times, timestamps | integer in the unit of the file, which the log notes |
//! | floats | number |
//! | decimals | integer if the scale has no fraction digits, else number if 15 digits suffice |
//! | strings, booleans | text |
//! | lists of these | list of values, or a vector for floats |
//! | untyped nulls | missing |

use std::fmt::Debug;

use arrow_array::cast::AsArray;
use arrow_array::types::{Decimal128Type, Float16Type, Float32Type, Float64Type};
use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, Float32Array, Float64Array, Int64Array, PrimitiveArray, StringArray,
    downcast_integer_array, downcast_temporal_array,
};
use arrow_buffer::{ArrowNativeType, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, TimeUnit};

use sterling_core::error::{Error, Result};
use sterling_core::request;

/// Number of digits up to which distinct decimals are distinct f64 values.
const DIGITS_MAX: u32 = 15;
/// Largest exponent up to which powers of ten are exact in f64.
const POWER_MAX: i8 = 22;

/// Returns the element type of a list.
pub fn list_of(kind: &DataType) -> Option<&DataType> {
    match kind {
        DataType::List(inner) => Some(inner.data_type()),
        _ => None,
    }
}

/// Returns the unit of a temporal type.
pub fn unit(kind: &DataType) -> Option<&'static str> {
    match kind {
        DataType::Date32 => Some("days since 1970-01-01"),
        DataType::Date64 => Some("milliseconds since 1970-01-01"),
        DataType::Timestamp(unit, _) => Some(match unit {
            TimeUnit::Second => "seconds since 1970-01-01",
            TimeUnit::Millisecond => "milliseconds since 1970-01-01",
            TimeUnit::Microsecond => "microseconds since 1970-01-01",
            TimeUnit::Nanosecond => "nanoseconds since 1970-01-01",
        }),
        DataType::Time32(unit) | DataType::Time64(unit) => Some(match unit {
            TimeUnit::Second => "seconds since midnight",
            TimeUnit::Millisecond => "milliseconds since midnight",
            TimeUnit::Microsecond => "microseconds since midnight",
            TimeUnit::Nanosecond => "nanoseconds since midnight",
        }),
        _ => None,
    }
}

/// Types to which all Arrow types are converted.
#[derive(Debug)]
enum Values {
    Nothing,
    Integers(Int64Array),
    Texts(StringArray),
    Numbers(Float64Array),
    /// Elements of float lists.
    Vectors(Float32Array),
}

/// Value of a column in one row.
#[derive(Clone, Debug)]
pub enum Cell {
    /// No value.
    Missing,
    /// Integers.
    Integers(Vec<i64>),
    /// Strings.
    Texts(Vec<String>),
    /// A float.
    Number(f64),
    /// A list of floats.
    Vector(Vec<f32>),
}

/// Column of a batch: its values, and for list columns the range of each row.
#[derive(Debug)]
pub struct ArrowColumn {
    values: Values,
    lists: Option<(ArrayRef, OffsetBuffer<i32>)>,
}

impl ArrowColumn {
    /// Reads a column; `first_row` is the file row number of its first row.
    ///
    /// # Errors
    /// `Unsupported` for types that are not in the table of this module; `Invalid` with the row of a value that cannot be
    /// represented.
    pub fn read(array: &ArrayRef, first_row: usize) -> Result<Self> {
        let Some(list) = array.as_list_opt::<i32>() else {
            let values = Values::read(array, false, |at| first_row + at)?;
            return Ok(ArrowColumn { values, lists: None });
        };
        // A sliced array references only part of its values.
        let (first, end) = (list.offsets()[0], list.offsets()[list.len()]);
        let offsets: ScalarBuffer<i32> = list.offsets().iter().map(|offset| offset - first).collect();
        let (offsets, values) =
            (OffsetBuffer::new(offsets), list.values().slice(first as usize, (end - first) as usize));
        let row = |at: usize| first_row + offsets.partition_point(|&offset| offset as usize <= at) - 1;
        let values = Values::read(&values, true, row)?;
        Ok(ArrowColumn { values, lists: Some((array.clone(), offsets)) })
    }

    /// Returns the values of a row; `None` for a missing value or NaN.
    ///
    /// # Errors
    /// `Invalid` for a null inside a list.
    pub fn values(&self, row: usize) -> Result<Option<request::Values>> {
        Ok(match self.cell(row)? {
            Cell::Missing => None,
            Cell::Number(number) if number.is_nan() => None,
            Cell::Number(number) => Some(request::Values::Numbers(vec![number as f32])),
            Cell::Vector(numbers) => Some(request::Values::Numbers(numbers)),
            Cell::Integers(integers) => Some(request::Values::Integers(integers)),
            Cell::Texts(texts) => Some(request::Values::Texts(texts)),
        })
    }

    /// Returns the f64 of a row, without rounding to f32, if the column holds single floats and the row has one.
    pub fn double(&self, row: usize) -> Option<f64> {
        match self {
            ArrowColumn { values: Values::Numbers(values), lists: None } => {
                values.is_valid(row).then(|| values.value(row))
            }
            _ => None,
        }
    }

    /// Returns the values of a column with one integer per row.
    pub fn integers(&self) -> Option<&Int64Array> {
        match self {
            ArrowColumn { values: Values::Integers(values), lists: None } => Some(values),
            _ => None,
        }
    }

    /// Returns the value of a row.
    ///
    /// # Errors
    /// `Invalid` for a null inside a list.
    pub fn cell(&self, row: usize) -> Result<Cell> {
        let range = match &self.lists {
            None if self.values.is_null(row) => return Ok(Cell::Missing),
            None => row..row + 1,
            Some((array, _)) if array.is_null(row) => return Ok(Cell::Missing),
            Some((_, offsets)) => offsets[row] as usize..offsets[row + 1] as usize,
        };
        if range.clone().any(|at| self.values.is_null(at)) {
            return Err(Error::invalid("got a null inside a list, expected values"));
        }
        Ok(match &self.values {
            Values::Nothing => Cell::Missing,
            Values::Integers(values) => Cell::Integers(values.values()[range].to_vec()),
            Values::Texts(values) => Cell::Texts(range.map(|at| values.value(at).to_owned()).collect()),
            Values::Numbers(values) => Cell::Number(values.value(row)),
            Values::Vectors(values) => Cell::Vector(values.values()[range].to_vec()),
        })
    }
}

impl Values {
    /// Converts an array; `row` maps a position in the array to its file row.
    fn read(array: &ArrayRef, in_lists: bool, row: impl Fn(usize) -> usize) -> Result<Self> {
        let array = array.as_ref();
        Ok(match array.data_type() {
            DataType::Null => Values::Nothing,
            kind if kind.is_floating() && in_lists => Values::Vectors(match kind {
                DataType::Float16 => array.as_primitive::<Float16Type>().unary(f32::from),
                DataType::Float32 => array.as_primitive().clone(),
                _ => array.as_primitive::<Float64Type>().unary(|number| number as f32),
            }),
            kind if kind.is_floating() => Values::Numbers(match kind {
                DataType::Float16 => array.as_primitive::<Float16Type>().unary(f64::from),
                DataType::Float32 => array.as_primitive::<Float32Type>().unary(f64::from),
                _ => array.as_primitive().clone(),
            }),
            DataType::Utf8 => Values::Texts(array.as_string().clone()),
            DataType::LargeUtf8 => Values::Texts(array.as_string::<i64>().iter().collect()),
            DataType::Utf8View => Values::Texts(array.as_string_view().iter().collect()),
            DataType::Boolean => {
                let texts = array.as_boolean().iter().map(|is| is.map(|is| if is { "true" } else { "false" }));
                Values::Texts(texts.collect())
            }
            &DataType::Decimal128(_, scale) => decimals(array.as_primitive(), scale, in_lists, row)?,
            _ => Values::Integers(downcast_integer_array!(
                array => { integers(array, row)? }
                _ => downcast_temporal_array!(
                    array => { integers(array, row)? }
                    kind => {
                        let lists = if in_lists { "lists of " } else { "" };
                        let expected = "expected integers, floats, strings, booleans or lists of them";
                        return Err(Error::unsupported(format!("got {lists}{kind}, {expected}")));
                    }
                )
            )),
        })
    }

    fn is_null(&self, at: usize) -> bool {
        match self {
            Values::Nothing => true,
            Values::Integers(values) => values.is_null(at),
            Values::Texts(values) => values.is_null(at),
            Values::Numbers(values) => values.is_null(at),
            Values::Vectors(values) => values.is_null(at),
        }
    }
}

/// Returns the error of a value that cannot be represented, with the row of the value.
fn lost(got: &dyn Debug, row: usize, expected: &str) -> Error {
    Error::invalid(format!("got {got:?}, expected {expected}")).within(format!("row {}", row + 1))
}

/// Converts integers and temporal values of any width.
fn integers<T: ArrowPrimitiveType>(values: &PrimitiveArray<T>, row: impl Fn(usize) -> usize) -> Result<Int64Array> {
    let made: Int64Array = values.unary_opt(ArrowNativeType::to_i64);
    match (0..values.len()).find(|&at| made.is_null(at) && values.is_valid(at)) {
        Some(at) => Err(lost(&values.value(at), row(at), "integers in the range of Int64")),
        None => Ok(made),
    }
}

/// Converts decimals: to integers if the scale has no fraction digits, else to the floats of the same digits.
fn decimals(
    unscaled: &PrimitiveArray<Decimal128Type>,
    scale: i8,
    in_lists: bool,
    row: impl Fn(usize) -> usize,
) -> Result<Values> {
    let lost = |at: usize, expected: &str| lost(&format_args!("{}", unscaled.value_as_string(at)), row(at), expected);
    if scale <= 0 {
        let power = 10i128.checked_pow(u32::from(scale.unsigned_abs()));
        let complete = |at: usize| {
            let value = power.and_then(|power| unscaled.value(at).checked_mul(power)).map(i64::try_from);
            value.and_then(|v| v.ok()).ok_or_else(|| lost(at, "integers in the range of Int64"))
        };
        let values = (0..unscaled.len()).map(|at| unscaled.is_valid(at).then(|| complete(at)).transpose());
        return Ok(Values::Integers(values.collect::<Result<_>>()?));
    }
    let number = |at: usize| {
        let (mut digits, mut scale) = (unscaled.value(at), scale);
        while scale > 0 && digits % 10 == 0 {
            (digits, scale) = (digits / 10, scale - 1);
        }
        match digits.unsigned_abs() < 10u128.pow(DIGITS_MAX) && scale <= POWER_MAX {
            // Both operands are exact in f64, so their quotient is the f64 nearest to the decimal.
            true => Ok(digits as f64 / 10f64.powi(i32::from(scale))),
            false => Err(lost(at, &format!("at most {DIGITS_MAX} digits, which a float represents exactly"))),
        }
    };
    let values = (0..unscaled.len()).map(|at| unscaled.is_valid(at).then(|| number(at)).transpose());
    let values = values.collect::<Result<Float64Array>>()?;
    Ok(match in_lists {
        true => Values::Vectors(values.iter().map(|v| v.map(|v| v as f32)).collect()),
        false => Values::Numbers(values),
    })
}
