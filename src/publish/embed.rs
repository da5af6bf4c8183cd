//! The vectors of items: their own column, or the item tower over their features.

use super::request::{Progress, Stage};
use crate::columns::ItemValues;
use crate::error::{Error, Result};
use crate::items::{EMBEDDING, ID, Items};
use crate::model::{MODEL_FILE, Package};
use crate::sparse::Lookup;
use crate::tower::{FeatureKind, FeatureSpec, FeatureValues, Features};

/// Items that the item tower takes at a time.
const TOWER_BATCH: usize = 512;

/// The vectors of all items, row after row.
pub(super) fn embed(package: Option<&Package>, items: &mut Items, progress: &Progress<'_>) -> Result<Vec<f32>> {
    let Some(tower) = package.and_then(|p| p.item.as_ref()) else {
        let dense = items.dense.remove(EMBEDDING).ok_or_else(|| {
            Error::invalid(format!(
                "items: no column `{EMBEDDING}` and no vectors beside the file, expected a vector an item"
            ))
        })?;
        if let Some(want) = package.map(|p| p.spec.dimension).filter(|want| *want != dense.width) {
            return Err(Error::invalid(format!(
                "items: vectors of {} numbers, expected {want} as {MODEL_FILE} says",
                dense.width
            )));
        }
        return Ok(dense.values);
    };
    let mut vectors = Vec::new();
    for first in (0..items.len()).step_by(TOWER_BATCH) {
        let batch = first..(first + TOWER_BATCH).min(items.len());
        let features = batch.clone().map(|row| features(tower.features(), items, row)).collect::<Result<Vec<_>>>()?;
        let place = |e: Error| e.within(format!("items {} to {}", batch.start + 1, batch.end));
        let (pooled, _) = tower.lookup(&features, &Lookup::default()).map_err(place)?;
        vectors.extend_from_slice(tower.run(&pooled).map_err(place)?.data());
        progress(Stage::Embedding, batch.end, items.len());
    }
    Ok(vectors)
}

/// The features of one item, read from its columns.
fn features(specs: &[FeatureSpec], items: &Items, row: usize) -> Result<Features> {
    let mut features = Features::new();
    for source in specs.iter().map(|s| s.source()) {
        if source == ID {
            features.insert(source.into(), FeatureValues::Ids { values: vec![items.ids[row]], weights: None });
        } else if let Some(dense) = items.dense.get(source) {
            let numbers = dense.values[row * dense.width..(row + 1) * dense.width].to_vec();
            features.insert(source.into(), FeatureValues::Dense(numbers));
        } else if let Some(column) = items.columns.iter().find(|c| c.name == source) {
            let kinds = || specs.iter().filter(|s| s.source() == source).map(|s| s.kind);
            let range = |offsets: &[u32]| offsets[row] as usize..offsets[row + 1] as usize;
            let values = match &column.values {
                ItemValues::Texts { offsets, values } => FeatureValues::Categories(values[range(offsets)].to_vec()),
                ItemValues::Integers { offsets, values } if kinds().any(|k| k == FeatureKind::Ids) => {
                    FeatureValues::Ids { values: values[range(offsets)].to_vec(), weights: None }
                }
                ItemValues::Integers { offsets, values } => {
                    FeatureValues::Categories(values[range(offsets)].iter().map(i64::to_string).collect())
                }
                ItemValues::Floats(values) => {
                    FeatureValues::Dense(vec![if values[row].is_nan() { 0.0 } else { values[row] as f32 }])
                }
            };
            features.insert(source.into(), values);
        } else {
            return Err(Error::invalid(format!("items: no column `{source}`, which the item tower reads")));
        }
    }
    Ok(features)
}
