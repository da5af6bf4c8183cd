//! JSON types of the catalogue calls: item search, column values, index shape.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::info::ColumnInfo;
use super::response::Served;
use super::schemas::TextOrInteger;

/// Parameters of an item search.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FindRequest {
    /// Column of texts or integers to search; default: the model's first text column.
    pub column: Option<String>,
    /// Text that a value must contain, ignoring ASCII case; without it, every value matches.
    #[serde(default)]
    pub contains: String,
    /// Maximum number of items, 1 to 100.
    #[param(default = 20, minimum = 1, maximum = 100)]
    pub limit: Option<usize>,
    /// Waits until the updates up to this position are visible.
    #[serde(rename = "min_position")]
    pub _min_position: Option<u64>,
}

/// Parameters of a search for column values.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ValuesRequest {
    /// Text that a value must contain, ignoring ASCII case; without it, every value matches.
    #[serde(default)]
    pub contains: String,
    /// Maximum number of values, 1 to 1,000.
    #[param(default = 20, minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Waits until the updates up to this position are visible.
    #[serde(rename = "min_position")]
    pub _min_position: Option<u64>,
}

/// Matching items, the closest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FindResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// Matching items.
    pub items: Vec<FoundItem>,
}

/// An item with its attributes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FoundItem {
    /// Item id.
    pub id: i64,
    /// Attributes of the item that the model keeps.
    #[schema(value_type = Object)]
    pub attributes: BTreeMap<String, Value>,
}

/// Values of a column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// Description of the column.
    pub column: ColumnInfo,
    /// Matching values: the closest first, then by descending number of items.
    pub values: Vec<ColumnValue>,
    /// Number of matching distinct values.
    pub found: usize,
    /// Least number of a numeric column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// Greatest number of a numeric column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greatest: Option<f64>,
}

/// A value of a category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnValue {
    /// A text or an integer.
    #[schema(value_type = TextOrInteger)]
    pub value: Value,
    /// Number of items with the value; omitted for columns of more than 1,048,576 distinct values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<usize>,
}

/// Shards of the version that answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShardsResponse {
    /// Snapshot of the version; `coverage` is the share of its items in shards that a server has.
    #[serde(flatten)]
    pub served: Served,
    /// From a router: all shards in order. From a server: its shard, which is the complete version if it is not partitioned.
    pub shards: Vec<HeldShard>,
}

/// A shard and its servers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HeldShard {
    /// Shard number, from 0.
    pub shard: u32,
    /// Number of items of the shard: as published; from a server: the items that it searches.
    pub items: usize,
    /// Number of servers that have the shard and were ready at the last health check.
    pub servers: usize,
}

/// Shape of a version's index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IndexResponse {
    /// Snapshot of the version.
    #[serde(flatten)]
    pub served: Served,
    /// Items that are searched.
    pub items: usize,
    /// Items that are searched but not in the snapshot (delta).
    pub fresh_items: usize,
    /// Position of the last durable update, on a server that ingests updates of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable: Option<u64>,
    /// Slots of the snapshot: its items, and free space at the ends of inverted lists.
    pub slots: usize,
    /// Inverted lists, C.
    pub lists: usize,
    /// Items per list at the 0th to the 100th percentile of lists.
    pub list_items: Vec<u32>,
    /// Files of the snapshot.
    pub files: Vec<FileInfo>,
}

/// A file of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    /// File name.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
}
