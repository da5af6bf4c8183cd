//! The JSON of what is told of a catalogue: items that were looked for, the values of a column, the shape of an index.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::info::ColumnInfo;
use super::response::Served;
use super::schemas::TextOrInteger;
use sterling_serving::view::Category;
use sterling_snapshot::Snapshot;

/// Which items are looked for.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FindRequest {
    /// The column of texts or integers to look in; the model's first one of texts where it is left out.
    pub column: Option<String>,
    /// What a value must hold, letters of ASCII in either case; left out, every value does.
    #[serde(default)]
    pub contains: String,
    /// Most items, 1 to 100.
    #[param(default = 20, minimum = 1, maximum = 100)]
    pub limit: Option<usize>,
    /// Waits until the updates up to this position are seen.
    #[serde(rename = "min_position")]
    pub _min_position: Option<u64>,
}

/// Which values of a column are looked for.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ValuesRequest {
    /// What a value must hold, letters of ASCII in either case; left out, every value does.
    #[serde(default)]
    pub contains: String,
    /// Most values, 1 to 1,000.
    #[param(default = 20, minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Waits until the updates up to this position are seen.
    #[serde(rename = "min_position")]
    pub _min_position: Option<u64>,
}

/// Items that were looked for, the closest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FindResponse {
    /// Which snapshot answered.
    #[serde(flatten)]
    pub served: Served,
    /// The items.
    pub items: Vec<FoundItem>,
}

/// An item with its attributes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FoundItem {
    /// The item.
    pub id: i64,
    /// Its attributes that the model keeps.
    #[schema(value_type = Object)]
    pub attributes: BTreeMap<String, Value>,
}

/// The values of a column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnResponse {
    /// Which snapshot answered.
    #[serde(flatten)]
    pub served: Served,
    /// The column.
    pub column: ColumnInfo,
    /// The values that were looked for: the closest first, of these those that most items have.
    pub values: Vec<ColumnValue>,
    /// How many distinct values there were.
    pub found: usize,
    /// The least number of a column of numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// The greatest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greatest: Option<f64>,
}

/// A value of a category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnValue {
    /// A text or an integer.
    #[schema(value_type = TextOrInteger)]
    pub value: Value,
    /// Items that have it; left out for columns of more than 1,048,576 distinct values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<usize>,
}

/// The shards of the version that answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShardsResponse {
    /// Which snapshot it is; `coverage` is the share of its items that lie in shards which some server has.
    #[serde(flatten)]
    pub served: Served,
    /// Through a router all that it was cut into, in their order; of a server the one that it has, which is the whole where it was not cut.
    pub shards: Vec<HeldShard>,
}

/// A shard, and who has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HeldShard {
    /// Its number, from 0 up.
    pub shard: u32,
    /// Its items: when it was published, of a server those that it searches.
    pub items: usize,
    /// Servers that have it and are ready, as they said when they were looked at last.
    pub servers: usize,
}

/// The shape of a version's index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IndexResponse {
    /// Which snapshot it is.
    #[serde(flatten)]
    pub served: Served,
    /// Items that are searched.
    pub items: usize,
    /// Those of them that do not lie in the snapshot.
    pub fresh_items: usize,
    /// The position of the last durable update, on a server that takes updates of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable: Option<u64>,
    /// Slots of the snapshot: its items, and the room at the ends of its lists.
    pub slots: usize,
    /// Lists, C.
    pub lists: usize,
    /// Items of a list at the 0th to the 100th percentile of lists.
    pub list_items: Vec<u32>,
    /// What the snapshot consists of.
    pub files: Vec<FileInfo>,
}

/// A file of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

impl From<(Category<'_>, Option<usize>)> for ColumnValue {
    fn from((value, items): (Category<'_>, Option<usize>)) -> Self {
        let value = match value {
            Category::Integer(value) => value.into(),
            Category::Text(text) => text.into(),
        };
        ColumnValue { value, items }
    }
}

/// The files of a snapshot, by name.
pub fn files(snapshot: &Snapshot) -> Vec<FileInfo> {
    let files = snapshot.manifest.files.iter();
    files.map(|(name, sum)| FileInfo { name: name.clone(), bytes: sum.bytes }).collect()
}

/// The value at the 0th to the 100th percentile of `sizes`; none of none.
pub fn percentiles(sizes: &[u32]) -> Vec<u32> {
    let mut sorted = sizes.to_vec();
    sorted.sort_unstable();
    match sorted.len().checked_sub(1) {
        Some(last) => (0..=100).map(|percent| sorted[last * percent / 100]).collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::percentiles;

    #[test]
    fn percentiles_are_of_the_sizes() {
        let sizes: Vec<u32> = (0..201).rev().collect();
        assert_eq!(percentiles(&sizes), (0..=100).map(|p| p * 2).collect::<Vec<u32>>());
        assert_eq!(percentiles(&[7]), [7; 101]);
        assert!(percentiles(&[]).is_empty());
    }
}
