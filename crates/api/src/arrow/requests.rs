//! Retrieval requests in Arrow format, one per row.
//!
//! | column | meaning |
//! |---|---|
//! | `vector` | query vector, floats |
//! | `features.NAME` | values of a feature, one or a list: integers, floats, texts |
//! | `features.NAME.weights` | weights of the feature's ids |
//! | `filter` `exclude` `k` | request fields of these names; null means the shared value |
//!
//! Fields shared by all rows are in the schema's metadata under `sterling`, as the JSON of a request.

use std::collections::BTreeMap;

use arrow_schema::Schema;

use super::super::body::{Retrievals, object};
use super::super::request::{RequestRow, RetrieveRequest, Shape};
use super::super::values::{FeatureValue, List, Named, Vector};
use super::stream::{Reserve, Stream, each_row};
use sterling_core::error::{Error, Result};
use sterling_core::limits::{BATCH_REQUESTS_MAX, DIMENSION_MAX, EXCLUDE_MAX, FEATURE_IDS_MAX, FEATURES_MAX};
use sterling_core::request::{self, CallOptions, Values};
use sterling_storage::arrow::ArrowColumn;

/// Metadata key of the fields shared by all rows.
pub(super) const SHARED: &str = "sterling";
const FEATURES: &str = "features.";
const WEIGHTS: &str = ".weights";
/// Bytes of memory that a request takes per byte of shared JSON, and that an empty request takes.
const SHARED_FACTOR: usize = 4;
const REQUEST_BYTES: usize = 1024;

/// Role of a column.
#[derive(Debug)]
enum Role {
    Vector,
    Feature(String),
    Weights(String),
    Filter,
    Exclude,
    K,
}

/// Reads retrievals from an Arrow stream. An invalid row fails alone: its entry of the list holds the error.
///
/// # Errors
/// `Invalid` or `Unsupported` with the message or the column; errors of `hold`, which reserves memory for the rows.
pub fn arrow_retrievals(body: &[u8], hold: Reserve<'_>) -> Result<Retrievals> {
    let mut stream = Stream::open(body, BATCH_REQUESTS_MAX)?;
    let rows = Rows::of(stream.schema())?;
    let mut requests = Vec::new();
    while let Some((first, batch)) = stream.next(hold)? {
        hold(batch.num_rows() * (REQUEST_BYTES + SHARED_FACTOR * rows.shared_bytes))?;
        requests.extend(each_row(&batch, first, |row| row.and_then(|(columns, row)| rows.request(columns, row))));
    }
    if requests.is_empty() {
        return Err(Error::invalid(format!("body: 0 rows, expected 1 to {BATCH_REQUESTS_MAX}")));
    }
    let placed = requests.into_iter().enumerate();
    let placed = placed.map(|(n, request)| request.map_err(|e: Error| e.within(format!("requests[{n}]"))));
    Ok(Retrievals::Many(placed.collect()))
}

/// Roles of the columns of a stream.
struct Rows {
    /// Roles in column order, with the column names.
    columns: Vec<(String, Role)>,
    shared: RetrieveRequest,
    /// Length of the shared JSON.
    shared_bytes: usize,
    has_features: bool,
}

impl Rows {
    fn of(schema: &Schema) -> Result<Self> {
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        let columns = names.iter().map(|name| {
            let role = role(name, &names).ok_or_else(|| {
                Error::invalid(format!(
                    "column `{name}`: no such field of a request, expected `vector`, `features.NAME`, \
                     `features.NAME.weights`, `filter`, `exclude` or `k`"
                ))
            })?;
            Ok(((*name).to_owned(), role))
        });
        let text = schema.metadata().get(SHARED).map_or("{}", String::as_str);
        let place = |e: Error| e.within(format!("metadata `{SHARED}` of the Arrow schema"));
        let shared: RetrieveRequest = object(text.as_bytes()).map_err(place)?;
        if shared.has_user() {
            return Err(place(Error::invalid("fields `features` and `vector`: expected them as columns")));
        }
        let columns: Vec<(String, Role)> = columns.collect::<Result<_>>()?;
        let features = columns.iter().filter(|(_, role)| matches!(role, Role::Feature(_))).count();
        if features > FEATURES_MAX {
            return Err(Error::invalid(format!("body: {features} features, expected at most {FEATURES_MAX}")));
        }
        Ok(Rows { columns, shared, shared_bytes: text.len(), has_features: features > 0 })
    }

    fn request(&self, columns: &[ArrowColumn], row: usize) -> Result<(request::Retrieve, CallOptions, Shape)> {
        let (mut given, mut features, mut weights) = (RequestRow::default(), BTreeMap::new(), Vec::new());
        for ((name, role), column) in self.columns.iter().zip(columns) {
            let place = |e: Error| e.within(format!("column `{name}`"));
            let Some(values) = column.values(row).map_err(place)? else { continue };
            match role {
                Role::Feature(feature) => {
                    features.insert(feature.clone(), Some(FeatureValue(bounded(values).map_err(place)?)));
                }
                Role::Weights(feature) => {
                    weights.push((name, feature, finite(values, FEATURE_IDS_MAX).map_err(place)?))
                }
                Role::Vector => given.vector = Some(Vector(finite(values, DIMENSION_MAX).map_err(place)?)),
                Role::Filter => given.filter = Some(text(values).map_err(place)?),
                Role::Exclude => given.exclude = Some(List(ids(values).map_err(place)?)),
                Role::K => given.k = Some(count(values).map_err(place)?),
            }
        }
        for (name, feature, weights) in weights {
            let place = |e: Error| e.within(format!("column `{name}`"));
            let Some(Some(FeatureValue(values))) = features.get_mut(feature) else {
                return Err(place(Error::invalid(format!("got weights, but no values in `features.{feature}`"))));
            };
            let of = std::mem::replace(values, Values::Integers(Vec::new()));
            *values = of.weighted(weights).map_err(place)?;
        }
        // If features are columns, a row without values is a user without features.
        if !features.is_empty() || self.has_features && given.vector.is_none() {
            given.features = Some(Named(features));
        }
        self.shared.with(given).typed()
    }
}

fn role(name: &str, names: &[&str]) -> Option<Role> {
    Some(match name {
        "vector" => Role::Vector,
        "filter" => Role::Filter,
        "exclude" => Role::Exclude,
        "k" => Role::K,
        name => {
            let feature = name.strip_prefix(FEATURES).filter(|feature| !feature.is_empty())?;
            let weighted = name.strip_suffix(WEIGHTS).filter(|values| names.contains(values));
            match weighted.and_then(|values| values.strip_prefix(FEATURES)) {
                Some(weighted) => Role::Weights(weighted.to_owned()),
                None => Role::Feature(feature.to_owned()),
            }
        }
    })
}

fn bounded(values: Values) -> Result<Values> {
    let length = match &values {
        Values::Integers(list) => list.len(),
        Values::Numbers(_) => return finite(values, FEATURE_IDS_MAX).map(Values::Numbers),
        Values::Texts(list) => list.len(),
        Values::Weighted { ids, .. } => ids.len(),
    };
    at_most(length, FEATURE_IDS_MAX)?;
    Ok(values)
}

fn at_most(length: usize, most: usize) -> Result<()> {
    if length > most {
        return Err(Error::invalid(format!("got {length} entries, expected at most {most}")));
    }
    Ok(())
}

/// Returns the numbers if each is finite.
fn finite(values: Values, most: usize) -> Result<Vec<f32>> {
    let numbers = values.into_numbers().ok_or_else(|| Error::invalid("got texts, expected numbers"))?;
    at_most(numbers.len(), most)?;
    match numbers.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(Error::invalid(format!("got {} at index {at}, expected a finite 32-bit number", numbers[at]))),
        None => Ok(numbers),
    }
}

fn text(values: Values) -> Result<String> {
    match values {
        Values::Texts(mut texts) if texts.len() == 1 => Ok(texts.swap_remove(0)),
        _ => Err(Error::invalid("expected a text")),
    }
}

fn ids(values: Values) -> Result<Vec<i64>> {
    match values {
        Values::Integers(ids) => at_most(ids.len(), EXCLUDE_MAX).map(|()| ids),
        // Empty lists have no element type.
        Values::Numbers(none) if none.is_empty() => Ok(Vec::new()),
        _ => Err(Error::invalid("expected integers")),
    }
}

fn count(values: Values) -> Result<usize> {
    match values {
        Values::Integers(k) if k.len() == 1 => {
            usize::try_from(k[0]).map_err(|_| Error::invalid(format!("got {}, expected an integer above 0", k[0])))
        }
        _ => Err(Error::invalid("expected an integer above 0")),
    }
}
