//! Reads and writes Parquet files of items in batches; [`sterling_storage::arrow`] converts the types.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Int64Builder, ListBuilder, StringBuilder};
use arrow_array::{Array, ArrayRef, Float64Array, Int64Array, NullArray, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, Type, ZstdLevel};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::properties::WriterProperties;

use super::builder::Builder;
use super::catalogue::Items;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::items::{EMBEDDING, ID};
use sterling_index::columns::ItemValues;
use sterling_storage::arrow::{ArrowColumn, list_of, unit};

/// Maximum rows per batch.
const BATCH_ROWS: usize = 8192;
/// Maximum decoded bytes per batch; wide rows make smaller batches.
const BATCH_BYTES: u64 = 4 << 20;
/// Rows per written batch.
const WRITTEN_ROWS: usize = 1024;
/// Encoded bytes after which a row group is closed.
const GROUP_BYTES: usize = 32 << 20;

/// Opens a Parquet file and ignores the Arrow schema that its writer may have stored.
///
/// # Errors
/// `NotFound` or `Io`; `Invalid` if it is not a Parquet file.
pub fn open_parquet(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>> {
    let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    ParquetRecordBatchReaderBuilder::try_new_with_options(file, options).map_err(|e| unreadable(&e))
}

/// Returns the error of a file that is not Parquet or is truncated.
pub fn unreadable(e: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("not a readable Parquet file: {e}"))
}

/// Returns the number of rows per batch, at most `most`, whose decoded values take some megabytes.
pub fn batch_rows(file: &ParquetMetaData, most: usize) -> usize {
    let row_bytes = |group: &RowGroupMetaData| {
        let bytes: u64 = group.columns().iter().map(decoded_bytes).sum();
        bytes / group.num_rows().max(1).unsigned_abs()
    };
    let widest = file.row_groups().iter().map(row_bytes).max().unwrap_or(0);
    usize::try_from(BATCH_BYTES / widest.max(1)).unwrap_or(most).clamp(1, most)
}

/// Returns the bytes of the decoded values of a column chunk.
fn decoded_bytes(column: &ColumnChunkMetaData) -> u64 {
    // While a value is decoded, it has a definition and a repetition level.
    let level = size_of::<i16>() * 2;
    let width = level
        + match column.column_type() {
            Type::BOOLEAN => 1,
            Type::INT32 | Type::FLOAT => 4,
            Type::INT64 | Type::DOUBLE => 8,
            Type::INT96 => 12,
            // The offset of a text; the bytes of texts are added below.
            Type::BYTE_ARRAY => size_of::<i32>(),
            Type::FIXED_LEN_BYTE_ARRAY => usize::try_from(column.column_descr().type_length()).unwrap_or(0),
        };
    let texts = match column.column_type() {
        // Estimates the size if the writer recorded none: values that a dictionary repeats are not counted, but such values are
        // short.
        Type::BYTE_ARRAY => column.unencoded_byte_array_data_bytes().unwrap_or(column.uncompressed_size()),
        _ => 0,
    };
    column.num_values().unsigned_abs() * width as u64 + texts.unsigned_abs()
}

pub(super) fn read(path: &Path, builder: &mut Builder) -> Result<()> {
    let reader = open_parquet(path)?;
    check(reader.schema())?;
    let rows = batch_rows(reader.metadata(), BATCH_ROWS);
    let reader = reader.with_batch_size(rows).build().map_err(|e| unreadable(&e))?;
    let mut first_row = 0;
    for batch in reader {
        let batch = batch.map_err(|e| unreadable(&e))?;
        read_batch(&batch, first_row, builder)?;
        first_row += batch.num_rows();
    }
    Ok(())
}

/// Rejects a file without exactly one id column, and logs the units of temporal columns.
fn check(schema: &Schema) -> Result<()> {
    match schema.fields().iter().filter(|field| field.name() == ID).count() {
        0 => return Err(Error::invalid("column `id` is missing, expected 64-bit integers")),
        1 => {}
        count => return Err(Error::invalid(format!("column `id`: it occurs {count} times, expected once"))),
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

fn read_batch(batch: &RecordBatch, first_row: usize, builder: &mut Builder) -> Result<()> {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns()).map(|(field, array)| {
        let name = field.name().as_str();
        let column = ArrowColumn::read(array, first_row).map_err(|e| e.within(format!("column `{name}`")))?;
        Ok((name, field.data_type(), column))
    });
    let (ids, others): (Vec<_>, Vec<_>) =
        columns.collect::<Result<Vec<_>>>()?.into_iter().partition(|(name, ..)| *name == ID);
    let Some(ids) = ids.first().and_then(|(_, _, column)| column.integers()) else {
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

/// Writes ids and attributes: a list column per category, a plain column per number, and an untyped column if no item has a
/// value. A missing value is a null list. If no item has a value of a category, its lists are empty
/// instead of null, which keeps the type of the column.
pub(super) fn write(items: &Items, path: &Path) -> Result<()> {
    let invalid = |e: &dyn std::fmt::Display| Error::new(Kind::Io, format!("{}: {e}", path.display()));
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(usize::MAX))
        .build();
    let file = File::create_new(path).map_err(|e| Error::io(path.display(), e))?;
    let schema = batch(items, 0..0)?.schema();
    let mut writer = ArrowWriter::try_new(file, schema, Some(properties)).map_err(|e| invalid(&e))?;
    for first in (0..items.len()).step_by(WRITTEN_ROWS) {
        let rows = batch(items, first..(first + WRITTEN_ROWS).min(items.len()))?;
        let written = writer.write(&rows).and_then(|()| match writer.in_progress_size() > GROUP_BYTES {
            true => writer.flush(),
            false => Ok(()),
        });
        written.map_err(|e| invalid(&e))?;
    }
    writer.finish().map_err(|e| invalid(&e))?;
    writer.inner().sync_all().map_err(|e| Error::io(path.display(), e))
}

fn batch(items: &Items, rows: Range<usize>) -> Result<RecordBatch> {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(items.ids[rows.clone()].iter().copied()));
    let mut fields = vec![Field::new(ID, DataType::Int64, false)];
    let mut arrays = vec![ids];
    for name in items.names.iter().filter(|name| *name != EMBEDDING && !items.dense.contains_key(*name)) {
        let column = items.columns.iter().find(|column| column.name == *name);
        let values: ArrayRef = match column.map(|column| &column.values) {
            None => Arc::new(NullArray::new(rows.len())),
            Some(ItemValues::Floats(values)) => {
                Arc::new(Float64Array::from_iter_values(values[rows.clone()].iter().copied()))
            }
            Some(ItemValues::Integers { offsets, values }) => {
                let mut list = ListBuilder::new(Int64Builder::new());
                for bounds in offsets[rows.start..=rows.end].windows(2) {
                    list.values().append_slice(&values[bounds[0] as usize..bounds[1] as usize]);
                    list.append(bounds[0] < bounds[1] || values.is_empty());
                }
                Arc::new(list.finish())
            }
            Some(ItemValues::Texts { offsets, values }) => {
                let mut list = ListBuilder::new(StringBuilder::new());
                for bounds in offsets[rows.start..=rows.end].windows(2) {
                    values[bounds[0] as usize..bounds[1] as usize].iter().for_each(|v| list.values().append_value(v));
                    list.append(bounds[0] < bounds[1] || values.is_empty());
                }
                Arc::new(list.finish())
            }
        };
        fields.push(Field::new(name, values.data_type().clone(), true));
        arrays.push(values);
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).map_err(|e| Error::internal(format!("items: {e}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use arrow_array::types::{Float32Type, Int8Type, UInt64Type};
    use arrow_array::*;
    use arrow_schema::Field;
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::items::Items;
    use sterling_index::columns::ItemValues;

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
    fn parquet_and_json_lines_are_equivalent() {
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
        assert_eq!(items.dense["embedding"].all().unwrap(), [1.0, 0.0, 0.5, 2.0]);
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
    fn batches_of_wide_rows_have_few_rows() {
        let folder = tempfile::tempdir().unwrap();
        let batches = |width: usize, text: &str| {
            let path = folder.path().join(format!("{width}-{}.parquet", text.len()));
            let rows = 4_000;
            let vectors = Float64Array::from_iter_values((0..rows * width).map(|x| x as f64));
            let field = Arc::new(Field::new("item", arrow_schema::DataType::Float64, true));
            let vectors = FixedSizeListArray::try_new(field, width as i32, Arc::new(vectors), None).unwrap();
            let texts = StringArray::from_iter_values((0..rows).map(|n| format!("{n}{text}")));
            let columns: Vec<(&str, ArrayRef)> = vec![("embedding", Arc::new(vectors)), ("text", Arc::new(texts))];
            let batch = RecordBatch::try_from_iter(columns).unwrap();
            let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();
            let reader = open_parquet(&path).unwrap();
            let rows = batch_rows(reader.metadata(), BATCH_ROWS);
            let batches = reader.with_batch_size(rows).build().unwrap();
            batches.map(|batch| batch.unwrap().get_array_memory_size()).max().unwrap()
        };
        // The bytes of a batch do not depend on the width of its rows.
        for (width, text) in [(4, ""), (1536, ""), (3072, ""), (4, "long".repeat(2_000).as_str())] {
            let bytes = batches(width, text);
            assert!(bytes < 3 * BATCH_BYTES as usize, "{width} {}: {bytes}", text.len());
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
        assert_eq!(items.dense["embedding"].all().unwrap(), [1.0, -2.0, 3.0, 127.0]);
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
    fn invalid_files_are_rejected_with_the_location() {
        let text = || Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef;
        for (columns, expected) in [
            (vec![("section", text())], "column `id` is missing"),
            (vec![("id", text())], "column `id`: got Utf8"),
            (vec![ids(vec![5, 5])], "id 5 occurs at items 1 and 2"),
            (vec![("id", Arc::new(Int64Array::from(vec![Some(1), None])) as ArrayRef)], "row 2: column `id`: got null"),
            (vec![ids(vec![1, 2]), ids(vec![3, 4])], "column `id`: it occurs 2 times, expected once"),
            (vec![ids(vec![1, 2]), ("a", text()), ("a", text())], "row 1: column `a`: given twice"),
            (
                vec![("id", Arc::new(UInt64Array::from(vec![1, 1 << 63])) as ArrayRef)],
                "column `id`: row 2: got 9223372036854775808, expected integers in the range of Int64",
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
                "column `embedding`: item 1, number 1: got NaN, expected a finite number",
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
