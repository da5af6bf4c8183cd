//! The features of an item, read from the item columns.

use super::catalogue::Items;
use sterling_core::error::{Error, Result};
use sterling_core::items::ID;
use sterling_core::request::{Features, Values};
use sterling_graph::tower::FeatureSpec;
use sterling_index::columns::ItemValues;

impl Items {
    /// The features of one item, read from its columns; `vector` returns the values of a vector column. A column that no item has
    /// counts as missing on each item.
    pub fn features(&self, specs: &[FeatureSpec], row: usize, vector: &dyn Fn(&str) -> Option<Vec<f32>>) -> Features {
        let mut features = Features::new();
        for source in specs.iter().map(|s| s.source()) {
            let values = if source == ID {
                Values::Integers(vec![self.ids[row]])
            } else if let Some(numbers) = vector(source) {
                Values::Numbers(numbers)
            } else if let Some(column) = self.columns.iter().find(|c| c.name == source) {
                let range = |offsets: &[u32]| offsets[row] as usize..offsets[row + 1] as usize;
                match &column.values {
                    ItemValues::Texts { offsets, values } => Values::Texts(values[range(offsets)].to_vec()),
                    // A missing value is handled as in requests: a number is 0, a list of ids is empty.
                    ItemValues::Integers { offsets, .. } if range(offsets).is_empty() => continue,
                    ItemValues::Floats(values) if values[row].is_nan() => continue,
                    ItemValues::Integers { offsets, values } => Values::Integers(values[range(offsets)].to_vec()),
                    ItemValues::Floats(values) => Values::Numbers(vec![values[row] as f32]),
                }
            } else {
                continue;
            };
            features.insert(source.into(), values);
        }
        features
    }

    /// Returns a numeric column as a reranker reads it: one number per item, the first of several, and 0 for a missing value.
    ///
    /// # Errors
    /// `Invalid` with the column if no column has this name, or if the column has texts.
    pub fn numbers(&self, name: &str) -> Result<Vec<f32>> {
        let found = self.columns.iter().find(|column| column.name == name);
        match found.map(|column| &column.values) {
            Some(ItemValues::Floats(values)) => {
                Ok(values.iter().map(|x| if x.is_nan() { 0.0 } else { *x as f32 }).collect())
            }
            Some(ItemValues::Integers { offsets, values }) => {
                let of_item = |ends: &[u32]| &values[ends[0] as usize..ends[1] as usize];
                Ok(offsets.windows(2).map(|ends| of_item(ends).first().map_or(0.0, |x| *x as f32)).collect())
            }
            Some(ItemValues::Texts { .. }) => {
                Err(Error::invalid(format!("items: column `{name}` has texts, expected numbers")))
            }
            None => Err(Error::invalid(format!("items: no column `{name}`, expected numbers"))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_index::columns::ItemColumn;

    #[test]
    fn missing_numbers_of_any_type_are_omitted() {
        let column = |name: &str, values| ItemColumn { name: name.into(), filter: true, values };
        let columns = vec![
            column("age", ItemValues::Integers { offsets: vec![0, 1, 1], values: vec![7] }),
            column("price", ItemValues::Floats(vec![2.5, f64::NAN])),
        ];
        let items = Items { ids: vec![1, 2], columns, ..Items::default() };
        let spec = |name: &str| toml::from_str(&format!("name = '{name}'\nkind = 'dense'\nwidth = 1")).unwrap();
        let specs: [FeatureSpec; 2] = [spec("age"), spec("price")];
        let of_row = |row| items.features(&specs, row, &|_| None);
        let expected = [("age", Values::Integers(vec![7])), ("price", Values::Numbers(vec![2.5]))];
        assert_eq!(of_row(0), expected.map(|(name, values)| (name.to_owned(), values)).into());
        assert_eq!(of_row(1), Features::new());
        assert_eq!(items.numbers("age").unwrap(), [7.0, 0.0]);
        assert_eq!(items.numbers("price").unwrap(), [2.5, 0.0]);
        assert!(items.numbers("none").unwrap_err().to_string().contains("no column `none`"));
    }
}
