//! Item updates in Arrow format, one per row.
//!
//! | column | meaning |
//! |---|---|
//! | `id` | item id, an integer |
//! | `embedding` | vector of the item |
//! | `attributes.NAME` | an attribute; the row replaces the complete item |
//! | `set.NAME` | alternative: an attribute that changes, while all others and the vector stay |
//!
//! Null and NaN mean a missing value; in a `set` column they remove the attribute.

use arrow_array::{RecordBatch, UInt32Array};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Schema};
use arrow_select::take::take_record_batch;

use super::super::items::{PlacedItems, RefusedItem};
use super::stream::{Reserve, Stream, each_row};
use sterling_core::error::{Error, Result};
use sterling_core::items::{EMBEDDING, GivenItem, GivenValues, ID, InvalidItem, UPDATES_MAX, shard_of};
use sterling_core::limits::DIMENSION_MAX;
use sterling_core::request::Values;
use sterling_core::units::ItemId;
use sterling_storage::arrow::ArrowColumn;

const ATTRIBUTES: &str = "attributes.";
const SET: &str = "set.";
/// Memory of an item in addition to its values, in bytes.
const ITEM_BYTES: usize = 256;

/// Role of a column.
#[derive(Debug, PartialEq)]
enum Role {
    Id,
    Embedding,
    /// Attribute with its name.
    Attribute(String),
}

/// Reads the items of an upsert from an Arrow stream. An invalid item fails alone: its entry of the list holds the
/// error.
///
/// # Errors
/// `Invalid` or `Unsupported` with the message or the column; errors of `hold`, which reserves memory for the rows.
pub fn arrow_upserts(body: &[u8], hold: Reserve<'_>) -> Result<Vec<Result<GivenItem, InvalidItem>>> {
    let mut stream = Stream::open(body, UPDATES_MAX)?;
    let rows = Rows::of(stream.schema())?;
    let mut items = Vec::new();
    while let Some((first, batch)) = stream.next(hold)? {
        hold(batch.num_rows() * ITEM_BYTES)?;
        items.extend(each_row(&batch, first, |row| match row {
            Ok((columns, row)) => rows.item(columns, row),
            Err(e) => Err(InvalidItem { id: None, field: String::new(), reason: e.to_string() }),
        }));
    }
    some(items.len())?;
    Ok(items)
}

/// Divides the items of an upsert by shard: returns, per shard, the positions of its items in the call and a stream of
/// these items. Items without a readable id belong to no shard.
///
/// # Errors
/// As [`arrow_upserts`].
pub fn arrow_divided(body: &[u8], shards: usize, hold: Reserve<'_>) -> Result<(Vec<PlacedItems>, Vec<RefusedItem>)> {
    let mut stream = Stream::open(body, UPDATES_MAX)?;
    let rows = Rows::of(stream.schema())?;
    let mut parts: Vec<Part> = (0..shards).map(|_| Part::default()).collect();
    let (mut refused, mut count) = (Vec::new(), 0);
    while let Some((first, batch)) = stream.next(hold)? {
        count += batch.num_rows();
        let ids = batch.project(&[rows.id]).map_err(|e| broken(&e))?;
        let ids = each_row(&ids, first, |row| row.and_then(|(columns, row)| id(&columns[0], row)));
        let mut of_shards = vec![Vec::new(); shards];
        for (row, id) in ids.into_iter().enumerate() {
            match id {
                Ok(id) => of_shards[shard_of(ItemId(id), shards as u32) as usize].push(row as u32),
                Err(e) => {
                    let reason = e.to_string();
                    refused.push(RefusedItem { place: first + row, id: None, field: ID.into(), reason });
                }
            }
        }
        for (part, rows) in parts.iter_mut().zip(of_shards).filter(|(_, rows)| !rows.is_empty()) {
            part.places.extend(rows.iter().map(|&row| first + row as usize));
            part.write(&batch, rows).map_err(|e| broken(&e))?;
        }
    }
    some(count)?;
    let parts = parts.into_iter().map(|part| part.finish().map_err(|e| broken(&e)));
    Ok((parts.collect::<Result<_>>()?, refused))
}

/// Items of one shard.
#[derive(Default)]
struct Part {
    places: Vec<usize>,
    writer: Option<StreamWriter<Vec<u8>>>,
}

impl Part {
    fn write(&mut self, batch: &RecordBatch, rows: Vec<u32>) -> Result<(), ArrowError> {
        let of_shard = take_record_batch(batch, &UInt32Array::from(rows))?;
        if self.writer.is_none() {
            self.writer = Some(StreamWriter::try_new(Vec::new(), &batch.schema())?);
        }
        self.writer.as_mut().map_or(Ok(()), |writer| writer.write(&of_shard))
    }

    fn finish(self) -> Result<PlacedItems, ArrowError> {
        let body = self.writer.map(StreamWriter::into_inner).transpose()?;
        Ok((self.places, body.unwrap_or_default()))
    }
}

fn some(count: usize) -> Result<()> {
    match count {
        0 => Err(Error::invalid(format!("body: 0 rows, expected 1 to {UPDATES_MAX}"))),
        _ => Ok(()),
    }
}

fn broken(error: &ArrowError) -> Error {
    Error::internal(format!("cannot encode items of a shard as Arrow: {error}"))
}

/// Roles of the columns of a stream.
struct Rows {
    columns: Vec<Role>,
    /// Index of the id column.
    id: usize,
    /// True if a row replaces its complete item.
    whole: bool,
}

impl Rows {
    fn of(schema: &Schema) -> Result<Self> {
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        let sets = names.iter().find(|name| name.starts_with(SET));
        if let Some((set, all)) = sets.zip(names.iter().find(|name| name.starts_with(ATTRIBUTES))) {
            return Err(Error::invalid(format!("column `{set}` beside `{all}`: expected only one of both prefixes")));
        }
        let role = |name: &&str| match *name {
            ID => Ok(Role::Id),
            EMBEDDING => Ok(Role::Embedding),
            name => {
                let attribute = name.strip_prefix(ATTRIBUTES).or(name.strip_prefix(SET));
                attribute.map(|attribute| Role::Attribute(attribute.to_owned())).ok_or_else(|| {
                    Error::invalid(format!(
                        "column `{name}`: no such field of an item, expected `id`, `embedding`, `attributes.NAME` or \
                         `set.NAME`"
                    ))
                })
            }
        };
        let columns: Vec<Role> = names.iter().map(role).collect::<Result<_>>()?;
        let id = columns.iter().position(|role| *role == Role::Id);
        let id = id.ok_or_else(|| Error::invalid("column `id` is missing, expected 64-bit integers"))?;
        Ok(Rows { columns, id, whole: sets.is_none() })
    }

    fn item(&self, columns: &[ArrowColumn], row: usize) -> Result<GivenItem, InvalidItem> {
        let unread = |e: Error| InvalidItem { id: None, field: ID.into(), reason: e.to_string() };
        let id = id(&columns[self.id], row).map_err(unread)?;
        let mut item = GivenItem { id, embedding: None, attributes: Vec::new(), whole: self.whole };
        for (role, column) in self.columns.iter().zip(columns) {
            let field = match role {
                Role::Id => continue,
                Role::Embedding => EMBEDDING.to_owned(),
                Role::Attribute(name) => GivenItem::field(self.whole, name),
            };
            let invalid = |reason: String| InvalidItem { id: Some(id), field: field.clone(), reason };
            let given = match column.double(row) {
                Some(number) if number.is_nan() => GivenValues::Missing,
                Some(number) => GivenValues::Numbers(vec![number]),
                None => column.values(row).and_then(given).map_err(|e| invalid(e.to_string()))?,
            };
            match (role, given) {
                (Role::Attribute(name), given) => item.attributes.push((name.clone(), given)),
                (_, GivenValues::Missing) => {}
                (_, given) => item.embedding = Some(vector(given).map_err(invalid)?),
            }
        }
        Ok(item)
    }
}

fn id(column: &ArrowColumn, row: usize) -> Result<i64> {
    match column.values(row)? {
        Some(Values::Integers(ids)) if ids.len() == 1 => Ok(ids[0]),
        _ => Err(Error::invalid("missing or not an integer, expected a 64-bit integer")),
    }
}

/// Converts the values of an attribute; an empty list means a missing value, as in JSON.
fn given(values: Option<Values>) -> Result<GivenValues> {
    Ok(match values {
        Some(Values::Integers(list)) if !list.is_empty() => GivenValues::Integers(list),
        Some(Values::Numbers(list)) if !list.is_empty() => {
            if let Some(at) = list.iter().position(|x| !x.is_finite()) {
                return Err(Error::invalid(format!("got {} at index {at}, expected a finite number", list[at])));
            }
            GivenValues::Numbers(list.into_iter().map(f64::from).collect())
        }
        Some(Values::Texts(list)) if !list.is_empty() => GivenValues::Texts(list),
        _ => GivenValues::Missing,
    })
}

fn vector(given: GivenValues) -> Result<Vec<f32>, String> {
    let numbers: Vec<f32> = match given {
        GivenValues::Numbers(list) => list.into_iter().map(|x| x as f32).collect(),
        GivenValues::Integers(list) => list.into_iter().map(|x| x as f32).collect(),
        _ => return Err("got texts, expected numbers".into()),
    };
    if numbers.len() > DIMENSION_MAX {
        return Err(format!("got {} numbers, expected at most {DIMENSION_MAX}", numbers.len()));
    }
    Ok(numbers)
}
