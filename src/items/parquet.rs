//! Parquet files, read batch by batch.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, Float32Type, Float64Type, Int64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::builder::{Builder, Cell};
use super::{ID, Items};
use crate::error::{Error, Result};

const BATCH_ROWS: usize = 8192;

pub(super) fn read(path: &Path) -> Result<Items> {
    let file = File::open(path).map_err(|e| Error::io("items", e))?;
    let wrong = |e: &dyn std::fmt::Display| Error::invalid(format!("not a readable Parquet file: {e}"));
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| wrong(&e))?;
    let reader = reader.with_batch_size(BATCH_ROWS).build().map_err(|e| wrong(&e))?;
    let mut builder = Builder::default();
    let mut first_row = 0;
    for batch in reader {
        let batch = batch.map_err(|e| wrong(&e))?;
        read_batch(&batch, first_row, &mut builder)?;
        first_row += batch.num_rows();
    }
    Ok(builder.finish())
}

/// The few types that all others are brought to.
enum Canonical {
    Integer(ArrayRef),
    Text(ArrayRef),
    Number(ArrayRef),
    Integers(ArrayRef),
    Texts(ArrayRef),
    Vector(ArrayRef),
}

fn canonical(name: &str, column: &ArrayRef) -> Result<Canonical> {
    let list = |inner| DataType::List(Arc::new(Field::new_list_field(inner, true)));
    let to = |target: DataType, wrap: fn(ArrayRef) -> Canonical| {
        let options = CastOptions { safe: false, ..CastOptions::default() };
        cast_with_options(column, &target, &options).map(wrap).map_err(|e| {
            Error::invalid(format!("column `{name}`: {} does not become {target}: {e}", column.data_type()))
        })
    };
    match column.data_type() {
        DataType::List(f) | DataType::LargeList(f) | DataType::FixedSizeList(f, _) => match f.data_type() {
            t if t.is_integer() => to(list(DataType::Int64), Canonical::Integers),
            t if t.is_floating() => to(list(DataType::Float32), Canonical::Vector),
            t if is_text(t) => to(list(DataType::Utf8), Canonical::Texts),
            t => Err(Error::unsupported(format!(
                "column `{name}`: got lists of {t}, expected lists of integers, floats or strings"
            ))),
        },
        t if t.is_integer() => to(DataType::Int64, Canonical::Integer),
        t if t.is_floating() => to(DataType::Float64, Canonical::Number),
        t if is_text(t) => to(DataType::Utf8, Canonical::Text),
        t => Err(Error::unsupported(format!(
            "column `{name}`: got {t}, expected integers, floats, strings or lists of them"
        ))),
    }
}

fn is_text(t: &DataType) -> bool {
    match t {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Boolean => true,
        DataType::Dictionary(_, values) => is_text(values),
        _ => false,
    }
}

impl Canonical {
    fn cell(&self, row: usize) -> Result<Cell> {
        let array = match self {
            Canonical::Integer(a) | Canonical::Text(a) | Canonical::Number(a) => a,
            Canonical::Integers(a) | Canonical::Texts(a) | Canonical::Vector(a) => a,
        };
        if array.is_null(row) {
            return Ok(Cell::Missing);
        }
        let inner = |a: &ArrayRef| {
            let values = a.as_list::<i32>().value(row);
            if values.null_count() > 0 {
                return Err(Error::invalid("got a null inside a list, expected values"));
            }
            Ok(values)
        };
        Ok(match self {
            Canonical::Integer(a) => Cell::Integers(vec![a.as_primitive::<Int64Type>().value(row)]),
            Canonical::Text(a) => Cell::Texts(vec![a.as_string::<i32>().value(row).into()]),
            Canonical::Number(a) => Cell::Number(a.as_primitive::<Float64Type>().value(row)),
            Canonical::Integers(a) => Cell::Integers(inner(a)?.as_primitive::<Int64Type>().values().to_vec()),
            Canonical::Texts(a) => {
                Cell::Texts(inner(a)?.as_string::<i32>().iter().flatten().map(str::to_owned).collect())
            }
            Canonical::Vector(a) => Cell::Vector(inner(a)?.as_primitive::<Float32Type>().values().to_vec()),
        })
    }
}

fn read_batch(batch: &RecordBatch, first_row: usize, builder: &mut Builder) -> Result<()> {
    let schema = batch.schema();
    let id =
        batch.column_by_name(ID).ok_or_else(|| Error::invalid("column `id` is missing, expected 64-bit integers"))?;
    let Canonical::Integer(ids) = canonical(ID, id)? else {
        return Err(Error::invalid(format!("column `id`: got {}, expected 64-bit integers", id.data_type())));
    };
    let ids = ids.as_primitive::<Int64Type>();
    let others = schema
        .fields()
        .iter()
        .zip(batch.columns())
        .filter(|(field, _)| field.name() != ID)
        .map(|(field, column)| Ok((field.name().as_str(), canonical(field.name(), column)?)))
        .collect::<Result<Vec<_>>>()?;
    for row in 0..batch.num_rows() {
        let place = || format!("row {}", first_row + row + 1);
        if ids.is_null(row) {
            return Err(Error::invalid("column `id`: got null, expected a 64-bit integer").within(place()));
        }
        builder.begin_item(ids.value(row));
        for (name, column) in &others {
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
    use super::*;
    use arrow::array::{Float32Array, Int32Array, Int64Array, ListArray, StringArray, TimestampSecondArray};
    use parquet::arrow::ArrowWriter;

    fn round_trip(columns: Vec<(&str, ArrayRef)>) -> Result<Items> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("items.parquet");
        let batch = RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, a)| (n, a, true))).unwrap();
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

    #[test]
    fn wrong_files_are_refused_with_the_place() {
        let text = || Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef;
        for (columns, expected) in [
            (vec![("section", text())], "column `id` is missing"),
            (vec![("id", text())], "column `id`: got Utf8"),
            (vec![ids(vec![5, 5])], "id 5 stands at items 1 and 2"),
            (vec![("id", Arc::new(Int64Array::from(vec![Some(1), None])) as ArrayRef)], "row 2: column `id`: got null"),
            (
                vec![ids(vec![1, 2]), ("t", Arc::new(TimestampSecondArray::from(vec![1, 2])) as ArrayRef)],
                "column `t`: got Timestamp",
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
