//! Events as rows of Parquet: flat columns `user.NAME`, or structs with the same fields.
//!
//! | column | is |
//! |---|---|
//! | `id` `item` `time` `type` `value` `weight` | the event's fields of these names; `time` may be a date or a timestamp |
//! | `user.NAME`, `user.NAME.weights` | the values of a feature, the weights of its ids |
//! | `labels.NAME` | a label |
//! | `context.exclude` | the items that the request excluded; other columns of `context` are ignored |
//!
//! A null means a missing field, and is rejected in `item` and for a struct `user`. NaN is rejected in every column.

use std::collections::BTreeMap;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, TimeUnit};

use super::raw::{RawEvent, RejectionReason};
use sterling_core::error::{Error, Result};
use sterling_core::items::ID;
use sterling_core::request::{Features, Values};
use sterling_storage::arrow::ArrowColumn;

const WEIGHTS: &str = ".weights";

/// Meaning of a column.
#[derive(Clone, Debug, PartialEq)]
enum Role {
    Id,
    Item,
    Time,
    Kind,
    Value,
    Weight,
    Label(String),
    Feature(String),
    Weights(String),
    Exclude,
    Ignored,
}

impl Role {
    fn of(name: &str) -> Option<Role> {
        Some(match name {
            ID => Role::Id,
            "item" => Role::Item,
            "time" => Role::Time,
            "type" => Role::Kind,
            "value" => Role::Value,
            "weight" => Role::Weight,
            "context.exclude" => Role::Exclude,
            name => match name.split_once('.')? {
                ("labels", label) => Role::Label(label.into()),
                ("context", _) => Role::Ignored,
                ("user", feature) => match feature.strip_suffix(WEIGHTS) {
                    Some(feature) => Role::Weights(feature.into()),
                    None => Role::Feature(feature.into()),
                },
                _ => return None,
            },
        })
    }
}

/// Numerator and denominator of the factor that converts a column's numbers to seconds; none for a type that is no time since
/// 1970.
fn to_seconds(kind: &DataType) -> Option<(f64, f64)> {
    Some(match kind {
        DataType::Time32(_) | DataType::Time64(_) | DataType::Duration(_) | DataType::Interval(_) => return None,
        DataType::Date32 => (86_400.0, 1.0),
        DataType::Date64 | DataType::Timestamp(TimeUnit::Millisecond, _) => (1.0, 1e3),
        DataType::Timestamp(TimeUnit::Microsecond, _) => (1.0, 1e6),
        DataType::Timestamp(TimeUnit::Nanosecond, _) => (1.0, 1e9),
        _ => (1.0, 1.0),
    })
}

/// Checks that all columns of a file are fields of events.
///
/// # Errors
/// `Invalid` with a column that is duplicate, unknown or missing, or a `time` that is not a time since 1970.
pub(super) fn check(schema: &Schema) -> Result<()> {
    let mut names = Vec::new();
    schema.fields().iter().for_each(|field| flat_names(field, "", &mut names));
    if let Some(name) = names.iter().enumerate().find(|(n, name)| names[..*n].contains(name)).map(|(_, name)| name) {
        return Err(Error::invalid(format!("column `{name}`: it occurs twice, expected once")));
    }
    if let Some(name) = names.iter().find(|name| Role::of(name).is_none()) {
        return Err(Error::invalid(format!(
            "column `{name}`: no such field of an event, expected id, item, time, type, value, weight, user.NAME, \
             labels.NAME or context.NAME"
        )));
    }
    if !names.iter().any(|name| name == "item") {
        return Err(Error::invalid("column `item` is missing, expected 64-bit integers"));
    }
    if !names.iter().any(|name| name.starts_with("user.")) {
        return Err(Error::invalid("no column of a feature, expected `user.NAME` or a struct `user`"));
    }
    let time = schema.column_with_name("time").map(|(_, field)| field.data_type());
    match time.filter(|kind| to_seconds(kind).is_none()) {
        None => Ok(()),
        Some(kind) => Err(Error::invalid(format!(
            "column `time`: got {kind}, expected seconds since 1970 as a number, a date or a timestamp"
        ))),
    }
}

fn flat_names(field: &Field, above: &str, names: &mut Vec<String>) {
    let name = format!("{above}{}", field.name());
    match field.data_type() {
        DataType::Struct(fields) => fields.iter().for_each(|field| flat_names(field, &format!("{name}."), names)),
        _ => names.push(name),
    }
}

/// Flattens columns of structs into columns named by their path.
fn flat_columns(name: String, array: &ArrayRef, columns: &mut Vec<(String, ArrayRef)>) {
    match array.data_type() {
        DataType::Struct(fields) => {
            let parts = fields.iter().zip(array.as_struct().columns());
            parts.for_each(|(field, part)| flat_columns(format!("{name}.{}", field.name()), part, columns));
        }
        _ => columns.push((name, array.clone())),
    }
}

/// Returns the events of a batch of rows.
pub(super) fn rows(batch: &RecordBatch, first_row: u64) -> Vec<Result<RawEvent, RejectionReason>> {
    match Columns::read(batch, first_row) {
        Ok(columns) => (0..batch.num_rows()).map(|row| columns.event(row)).collect(),
        Err(refusal) if batch.num_rows() == 1 => vec![Err(refusal)],
        // The error does not name a row: converts each row alone to find the invalid rows.
        Err(_) => (0..batch.num_rows()).flat_map(|row| rows(&batch.slice(row, 1), first_row + row as u64)).collect(),
    }
}

struct Columns {
    columns: Vec<Column>,
    /// The struct `user`, if there is one.
    user: Option<ArrayRef>,
}

struct Column {
    name: String,
    role: Role,
    kind: DataType,
    values: ArrowColumn,
}

impl Columns {
    fn read(batch: &RecordBatch, first_row: u64) -> Result<Self, RejectionReason> {
        let mut flat = Vec::new();
        let schema = batch.schema();
        for (field, array) in schema.fields().iter().zip(batch.columns()) {
            flat_columns(field.name().clone(), array, &mut flat);
        }
        let mut columns = Vec::with_capacity(flat.len());
        for (name, array) in flat {
            let Some(role) = Role::of(&name).filter(|role| *role != Role::Ignored) else { continue };
            let values =
                ArrowColumn::read(&array, first_row as usize).map_err(|e| RejectionReason::of(&name, e.to_string()))?;
            columns.push(Column { name, role, kind: array.data_type().clone(), values });
        }
        Ok(Columns { columns, user: batch.column_by_name("user").cloned() })
    }

    fn event(&self, row: usize) -> Result<RawEvent, RejectionReason> {
        if self.user.as_ref().is_some_and(|user| user.is_null(row)) {
            return Err(RejectionReason::of("user", "got null, expected the features of the request"));
        }
        let mut event = RawEvent {
            id: None,
            user: Features::new(),
            item: 0,
            time: None,
            kind: None,
            value: None,
            labels: BTreeMap::new(),
            weight: None,
            exclude: Vec::new(),
        };
        let mut weights = Vec::new();
        for Column { name, role, kind, values: column } in &self.columns {
            let refused = |e: Error| RejectionReason::of(name, e.to_string());
            let expected = |what: &str| RejectionReason::of(name, format!("got {kind}, expected {what}"));
            if column.double(row).is_some_and(f64::is_nan) {
                return Err(RejectionReason::of(name, "got NaN, expected a finite number"));
            }
            let number = || match column.double(row) {
                Some(number) => Ok(number),
                None => match column.values(row) {
                    Ok(Some(Values::Integers(numbers))) if numbers.len() == 1 => Ok(numbers[0] as f64),
                    Ok(Some(Values::Texts(texts))) if texts == ["true"] => Ok(1.0),
                    Ok(Some(Values::Texts(texts))) if texts == ["false"] => Ok(0.0),
                    _ => Err(expected("a number")),
                },
            };
            let Some(values) = column.values(row).map_err(refused)? else {
                match role {
                    Role::Item => return Err(RejectionReason::of(name, "got null, expected a 64-bit integer")),
                    _ => continue,
                }
            };
            match (role, values) {
                (Role::Feature(feature), values) => drop(event.user.insert(feature.clone(), values)),
                (Role::Weights(feature), values) => {
                    let values = values.into_numbers().ok_or_else(|| expected("numbers"))?;
                    weights.push((name, feature, values));
                }
                (Role::Item, Values::Integers(item)) if item.len() == 1 => event.item = item[0],
                (Role::Item, _) => return Err(expected("a 64-bit integer")),
                (Role::Id, Values::Integers(id)) if id.len() == 1 => event.id = Some(id[0].to_string()),
                (Role::Id, Values::Texts(id)) if id.len() == 1 => event.id = id.into_iter().next(),
                (Role::Id, _) => return Err(expected("a text or a 64-bit integer")),
                (Role::Kind, Values::Texts(kind)) if kind.len() == 1 => event.kind = kind.into_iter().next(),
                (Role::Kind, _) => return Err(expected("a text")),
                (Role::Exclude, Values::Integers(ids)) => event.exclude = ids,
                (Role::Exclude, Values::Numbers(none)) if none.is_empty() => {}
                (Role::Exclude, _) => return Err(expected("64-bit integers")),
                (Role::Time, _) => {
                    let (times, parts) = to_seconds(kind).unwrap_or((1.0, 1.0));
                    event.time = Some(number()? * times / parts);
                }
                (Role::Value, _) => event.value = Some(number()?),
                (Role::Weight, _) => event.weight = Some(number()?),
                (Role::Label(label), _) => drop(event.labels.insert(label.clone(), number()?)),
                (Role::Ignored, _) => {}
            }
        }
        for (name, feature, weights) in weights {
            let values = event.user.remove(feature);
            let values =
                values.ok_or_else(|| RejectionReason::of(name, format!("got weights, but no `user.{feature}`")))?;
            let weighted = values.weighted(weights).map_err(|e| RejectionReason::of(name, e.to_string()))?;
            event.user.insert(feature.clone(), weighted);
        }
        Ok(event)
    }
}
