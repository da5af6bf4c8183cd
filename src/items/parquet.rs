//! Parquet files, read batch by batch.
//!
//! Types are those of Parquet itself: what a writer notes of its own types beside them (dictionaries, views, fixed or large
//! lists) says how it held the values and is passed over, so that all writers read alike.
//!
//! | Parquet | becomes |
//! |---|---|
//! | integers of up to 64 bits, unsigned ones where they fit | an integer |
//! | dates, times, timestamps | an integer in the unit of the file, which a note in the log names |
//! | floats | a number |
//! | decimals | an integer where no digits stand behind the point, else a number where 15 digits are enough for it |
//! | strings, booleans | a text |
//! | lists of these | several of them, or a vector where they are floats |
//! | nulls of no type | nothing |

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::buffer::OffsetBuffer;
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Decimal128Type, Float32Type, Float64Type, Int64Type, Schema, TimeUnit};
use arrow::util::display::array_value_to_string;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use super::builder::{Builder, Cell};
use super::catalogue::{EMBEDDING, ID};
use crate::error::{Error, Result};

const BATCH_ROWS: usize = 8192;
/// Every decimal of so many digits is another f64.
const DIGITS_MAX: u32 = 15;
/// Every power of ten up to this is an f64.
const POWER_MAX: i8 = 22;

pub(super) fn read(path: &Path, builder: &mut Builder) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io("items", e))?;
    let wrong = |e: &dyn std::fmt::Display| Error::invalid(format!("not a readable Parquet file: {e}"));
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let reader = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options).map_err(|e| wrong(&e))?;
    check(reader.schema())?;
    let reader = reader.with_batch_size(BATCH_ROWS).build().map_err(|e| wrong(&e))?;
    let mut first_row = 0;
    for batch in reader {
        let batch = batch.map_err(|e| wrong(&e))?;
        read_batch(&batch, first_row, builder)?;
        first_row += batch.num_rows();
    }
    Ok(())
}

/// Refuses a file without one column of ids, and says what numbers stand for that are no plain numbers.
fn check(schema: &Schema) -> Result<()> {
    match schema.fields().iter().filter(|field| field.name() == ID).count() {
        0 => return Err(Error::invalid("column `id` is missing, expected 64-bit integers")),
        1 => {}
        count => return Err(Error::invalid(format!("column `id`: there are {count}, expected one"))),
    }
    for field in schema.fields() {
        let (name, kind) = (field.name(), list_of(field.data_type()).unwrap_or(field.data_type()));
        if let Some(unit) = unit(kind) {
            tracing::warn!("column `{name}`: {kind} is read as integers, {unit}");
        }
        if name == EMBEDDING && list_of(field.data_type()).is_none() {
            return Err(Error::invalid(format!("column `{name}`: got {kind}, expected lists of numbers")));
        }
    }
    Ok(())
}

fn list_of(kind: &DataType) -> Option<&DataType> {
    match kind {
        DataType::List(inner) => Some(inner.data_type()),
        _ => None,
    }
}

/// What a one means in a type of times.
fn unit(kind: &DataType) -> Option<&'static str> {
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

/// The few types that all others are brought to.
enum Values {
    Nothing,
    Integers(Int64Array),
    Texts(StringArray),
    Numbers(Float64Array),
    /// Of lists alone.
    Vectors(Float32Array),
}

/// A column of a batch: its values, and which of them each row has where rows have several.
struct Column {
    values: Values,
    lists: Option<(ArrayRef, OffsetBuffer<i32>)>,
}

impl Column {
    /// `first_row` is the row of the file that the array starts at.
    fn read(array: &ArrayRef, first_row: usize) -> Result<Self> {
        let Some(list) = array.as_list_opt::<i32>() else {
            let values = Values::read(array, false, |at| first_row + at)?;
            return Ok(Column { values, lists: None });
        };
        let offsets = list.offsets().clone();
        let row = |at: usize| first_row + offsets.partition_point(|&offset| offset as usize <= at) - 1;
        let values = Values::read(list.values(), true, row)?;
        Ok(Column { values, lists: Some((array.clone(), offsets)) })
    }

    fn cell(&self, row: usize) -> Result<Cell> {
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
    /// `row` tells the row of the file that a value of the array belongs to.
    fn read(array: &ArrayRef, in_lists: bool, row: impl Fn(usize) -> usize) -> Result<Self> {
        Ok(match array.data_type() {
            DataType::Null => Values::Nothing,
            kind if kind.is_integer() || unit(kind).is_some() => {
                Values::Integers(cast(array, &DataType::Int64, row)?.as_primitive::<Int64Type>().clone())
            }
            kind if kind.is_floating() && in_lists => {
                Values::Vectors(cast(array, &DataType::Float32, row)?.as_primitive::<Float32Type>().clone())
            }
            kind if kind.is_floating() => {
                Values::Numbers(cast(array, &DataType::Float64, row)?.as_primitive::<Float64Type>().clone())
            }
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Boolean => {
                Values::Texts(cast(array, &DataType::Utf8, row)?.as_string().clone())
            }
            &DataType::Decimal128(_, scale) => decimals(array, scale, in_lists, row)?,
            kind => {
                return Err(Error::unsupported(format!(
                    "got {}{kind}, expected integers, floats, strings, booleans or lists of them",
                    if in_lists { "lists of " } else { "" }
                )));
            }
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

/// The error of a value that is lost, with its row.
fn lost(array: &ArrayRef, at: usize, row: impl Fn(usize) -> usize, expected: &str) -> Error {
    let shown = array_value_to_string(array, at).unwrap_or_default();
    Error::invalid(format!("got {shown}, expected {expected}")).within(format!("row {}", row(at) + 1))
}

fn cast(array: &ArrayRef, to: &DataType, row: impl Fn(usize) -> usize) -> Result<ArrayRef> {
    let made = cast_with_options(array, to, &CastOptions::default())
        .map_err(|e| Error::unsupported(format!("{} does not become {to}: {e}", array.data_type())))?;
    match (0..array.len()).find(|&at| made.is_null(at) && array.is_valid(at)) {
        Some(at) => Err(lost(array, at, row, &format!("what {to} holds"))),
        None => Ok(made),
    }
}

/// Decimals of a column: integers where none has digits behind the point, else the numbers of the same digits.
fn decimals(array: &ArrayRef, scale: i8, in_lists: bool, row: impl Fn(usize) -> usize) -> Result<Values> {
    let unscaled = array.as_primitive::<Decimal128Type>();
    if scale <= 0 {
        let power = 10i128.checked_pow(u32::from(scale.unsigned_abs()));
        let whole = |at: usize| {
            let value = power.and_then(|power| unscaled.value(at).checked_mul(power)).map(i64::try_from);
            value.and_then(|v| v.ok()).ok_or_else(|| lost(array, at, &row, "what Int64 holds"))
        };
        let values = (0..array.len()).map(|at| unscaled.is_valid(at).then(|| whole(at)).transpose());
        return Ok(Values::Integers(values.collect::<Result<_>>()?));
    }
    let number = |at: usize| {
        let (mut digits, mut scale) = (unscaled.value(at), scale);
        while scale > 0 && digits % 10 == 0 {
            (digits, scale) = (digits / 10, scale - 1);
        }
        match digits.unsigned_abs() < 10u128.pow(DIGITS_MAX) && scale <= POWER_MAX {
            // Of two exact numbers the quotient is the nearest f64.
            true => Ok(digits as f64 / 10f64.powi(i32::from(scale))),
            false => Err(lost(array, at, &row, &format!("at most {DIGITS_MAX} digits, which a float keeps"))),
        }
    };
    let values = (0..array.len()).map(|at| unscaled.is_valid(at).then(|| number(at)).transpose());
    let values = values.collect::<Result<Float64Array>>()?;
    Ok(match in_lists {
        true => Values::Vectors(values.iter().map(|v| v.map(|v| v as f32)).collect()),
        false => Values::Numbers(values),
    })
}

fn read_batch(batch: &RecordBatch, first_row: usize, builder: &mut Builder) -> Result<()> {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns()).map(|(field, array)| {
        let name = field.name().as_str();
        let column = Column::read(array, first_row).map_err(|e| e.within(format!("column `{name}`")))?;
        Ok((name, field.data_type(), column))
    });
    let (ids, others): (Vec<_>, Vec<_>) =
        columns.collect::<Result<Vec<_>>>()?.into_iter().partition(|(name, ..)| *name == ID);
    let [(_, _, Column { values: Values::Integers(ids), lists: None })] = ids.as_slice() else {
        let kind = ids.first().map_or(&DataType::Null, |(_, kind, _)| kind);
        return Err(Error::invalid(format!("column `id`: got {kind}, expected 64-bit integers")));
    };
    for row in 0..batch.num_rows() {
        let place = || format!("row {}", first_row + row + 1);
        if ids.is_null(row) {
            return Err(Error::invalid("column `id`: got null, expected a 64-bit integer").within(place()));
        }
        builder.begin_item(ids.value(row));
        for (name, _, column) in &others {
            let cell = column.cell(row).map_err(|e| e.within(format!("column `{name}`")).within(place()))?;
            builder.cell(name, cell).map_err(|e| e.within(place()))?;
        }
        builder.end_item().map_err(|e| e.within(place()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use arrow::array::*;
    use arrow::datatypes::{Field, Int8Type, UInt64Type};
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::columns::ItemValues;
    use crate::items::Items;

    fn round_trip(columns: Vec<(&str, ArrayRef)>) -> Result<Items> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("items.parquet");
        let field = |(name, array): &(&str, ArrayRef)| Field::new(*name, array.data_type().clone(), true);
        let schema = Schema::new(columns.iter().map(field).collect::<Vec<_>>());
        let batch = RecordBatch::try_new(schema.into(), columns.into_iter().map(|(_, a)| a).collect()).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        Items::read(&path, None)
    }

    fn ids(values: Vec<i64>) -> (&'static str, ArrayRef) {
        ("id", Arc::new(Int64Array::from(values)))
    }

    #[test]
    fn a_parquet_file_says_what_json_lines_say() {
        let vectors = ListArray::from_iter_primitive::<Float32Type, _, _>([
            Some([Some(1.0), Some(0.0)]),
            Some([Some(0.5), Some(2.0)]),
        ]);
        let items = round_trip(vec![
            ids(vec![3, 4]),
            ("embedding", Arc::new(vectors)),
            ("year", Arc::new(Int32Array::from(vec![Some(2024), None]))),
            ("section", Arc::new(StringArray::from(vec!["python", "utils"]))),
            ("price", Arc::new(Float32Array::from(vec![9.5, 1.0]))),
        ])
        .unwrap();
        assert_eq!(items.ids, [3, 4]);
        assert_eq!(items.dense["embedding"].values, [1.0, 0.0, 0.5, 2.0]);
        assert_eq!(items.columns.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["year", "section", "price"]);
    }

    fn decimals(values: Vec<i128>, precision: u8, scale: i8) -> ArrayRef {
        Arc::new(Decimal128Array::from(values).with_precision_and_scale(precision, scale).unwrap())
    }

    fn shown(items: &Items, name: &str) -> String {
        let column = items.columns.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no column {name}"));
        match &column.values {
            ItemValues::Integers { values, .. } => format!("{values:?}"),
            ItemValues::Texts { values, .. } => format!("{values:?}"),
            ItemValues::Floats(values) => format!("{values:?}"),
        }
    }

    #[test]
    fn every_type_is_read_exactly() {
        let dictionary = |values: ArrayRef| -> ArrayRef {
            Arc::new(DictionaryArray::<Int8Type>::try_new(Int8Array::from(vec![1, 0]), values).unwrap())
        };
        let vectors = FixedSizeListArray::from_iter_primitive::<Int8Type, _, _>(
            [Some([Some(1), Some(-2)]), Some([Some(3), Some(127)])],
            2,
        );
        let many = LargeListArray::from_iter_primitive::<Int8Type, _, _>([Some(vec![]), Some(vec![Some(5), Some(6)])]);
        let items = round_trip(vec![
            ids(vec![i64::MIN, i64::MAX]),
            ("embedding", Arc::new(vectors)),
            ("flags", dictionary(Arc::new(BooleanArray::from(vec![true, false])))),
            ("codes", dictionary(Arc::new(Int64Array::from(vec![10, 20])))),
            ("words", dictionary(Arc::new(LargeStringArray::from(vec!["x", "y"])))),
            ("view", Arc::new(StringViewArray::from(vec!["a", "a text too long for a view itself"]))),
            ("many", Arc::new(many)),
            ("unsigned", Arc::new(UInt64Array::from(vec![0, i64::MAX as u64]))),
            ("nothing", Arc::new(NullArray::new(2))),
            ("nulls", Arc::new(StringArray::from(vec![None::<&str>, None]))),
            ("price", decimals(vec![995, 123_456_789_012_345], 38, 2)),
            ("long", decimals(vec![9_500_000_000_000_000_000, -1], 38, 18)),
            ("sum", decimals(vec![i128::from(i64::MAX), -7], 38, 0)),
            ("day", Arc::new(Date32Array::from(vec![19_000, -1]))),
            ("seen", Arc::new(TimestampNanosecondArray::from(vec![1_700_000_000_123_456_789, 0]))),
            ("time", Arc::new(Time64MicrosecondArray::from(vec![1, 2]))),
        ]);
        let items = items.unwrap();
        assert_eq!(items.ids, [i64::MIN, i64::MAX]);
        assert_eq!(items.dense["embedding"].values, [1.0, -2.0, 3.0, 127.0]);
        for (name, expected) in [
            ("flags", "[\"false\", \"true\"]"),
            ("codes", "[20, 10]"),
            ("words", "[\"y\", \"x\"]"),
            ("view", "[\"a\", \"a text too long for a view itself\"]"),
            ("many", "[5, 6]"),
            ("unsigned", "[0, 9223372036854775807]"),
            ("price", "[9.95, 1234567890123.45]"),
            ("long", "[9.5, -1e-18]"),
            ("sum", "[9223372036854775807, -7]"),
            ("day", "[19000, -1]"),
            ("seen", "[1700000000123456789, 0]"),
            ("time", "[1, 2]"),
        ] {
            assert_eq!(shown(&items, name), expected, "{name}");
        }
        assert!(items.columns.iter().all(|c| !["nothing", "nulls"].contains(&c.name.as_str())));
    }

    #[test]
    fn wrong_files_are_refused_with_the_place() {
        let text = || Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef;
        for (columns, expected) in [
            (vec![("section", text())], "column `id` is missing"),
            (vec![("id", text())], "column `id`: got Utf8"),
            (vec![ids(vec![5, 5])], "id 5 stands at items 1 and 2"),
            (vec![("id", Arc::new(Int64Array::from(vec![Some(1), None])) as ArrayRef)], "row 2: column `id`: got null"),
            (vec![ids(vec![1, 2]), ids(vec![3, 4])], "column `id`: there are 2, expected one"),
            (vec![ids(vec![1, 2]), ("a", text()), ("a", text())], "row 1: column `a`: given twice"),
            (
                vec![("id", Arc::new(UInt64Array::from(vec![1, 1 << 63])) as ArrayRef)],
                "column `id`: row 2: got 9223372036854775808, expected what Int64 holds",
            ),
            (
                vec![
                    ids(vec![1, 2]),
                    (
                        "many",
                        Arc::new(ListArray::from_iter_primitive::<UInt64Type, _, _>([
                            Some(vec![Some(1), Some(2)]),
                            Some(vec![Some(3), Some(u64::MAX)]),
                        ])) as ArrayRef,
                    ),
                ],
                "column `many`: row 2: got 18446744073709551615",
            ),
            (
                vec![ids(vec![1, 2]), ("price", decimals(vec![10, 1_234_567_890_123_456_789], 38, 3))],
                "column `price`: row 2: got 1234567890123456.789, expected at most 15 digits",
            ),
            (
                vec![ids(vec![1]), ("sum", decimals(vec![1 << 70], 38, 0))],
                "column `sum`: row 1: got 1180591620717411303424",
            ),
            (
                vec![ids(vec![1]), ("x", Arc::new(Float64Array::from(vec![f64::INFINITY])) as ArrayRef)],
                "row 1: column `x`: got inf, expected a finite number",
            ),
            (
                vec![ids(vec![1]), ("b", Arc::new(BinaryArray::from(vec![&b"x"[..]])) as ArrayRef)],
                "column `b`: got Binary, expected integers",
            ),
            (
                vec![ids(vec![1]), ("embedding", Arc::new(Float32Array::from(vec![1.0])) as ArrayRef)],
                "column `embedding`: got Float32, expected lists of numbers",
            ),
            (
                vec![
                    ids(vec![1, 2]),
                    (
                        "embedding",
                        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>([
                            Some(vec![Some(1.0)]),
                            Some(vec![Some(1.0), Some(2.0)]),
                        ])) as ArrayRef,
                    ),
                ],
                "row 2: column `embedding`: got a vector of 2 numbers, expected 1",
            ),
            (
                vec![
                    ids(vec![1]),
                    (
                        "embedding",
                        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>([Some(vec![Some(f32::NAN)])]))
                            as ArrayRef,
                    ),
                ],
                "item 1 holds NaN",
            ),
            (vec![ids(vec![])], "no items"),
        ] {
            let error = round_trip(columns).expect_err(expected).to_string();
            assert!(error.contains(expected), "expected {expected}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.parquet");
        std::fs::write(&path, b"PAR1 this is not one").unwrap();
        assert!(Items::read(&path, None).unwrap_err().to_string().contains("not a readable Parquet file"));
    }
}
