//! The vectors of items: their own column, or the item tower over their features.

use super::request::{Progress, Stage};
use crate::columns::ItemValues;
use crate::embedding::Lookup;
use crate::error::{Error, Result};
use crate::items::{EMBEDDING, ID, Items};
use crate::model::{MODEL_FILE, Package};
use crate::request::{Features, Values};
use crate::tower::{self, FeatureRow, FeatureSpec, Pooled, RUN_ROWS, Threads};

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
    let threads = Threads::new(std::thread::available_parallelism().map_or(1, usize::from));
    let mut scratch = tower::Scratch::default();
    let mut vectors = Vec::new();
    for first in (0..items.len()).step_by(RUN_ROWS) {
        let batch = first..(first + RUN_ROWS).min(items.len());
        let place = |e: Error| e.within(format!("items {} to {}", batch.start + 1, batch.end));
        let read = |row| {
            tower.read(features(tower.features(), items, row)?).map_err(|e| e.within(format!("item {}", row + 1)))
        };
        let rows = batch.clone().map(read).collect::<Result<Vec<FeatureRow>>>()?;
        let rows: Vec<&FeatureRow> = rows.iter().collect();
        let (pooled, _) = tower.lookup(&rows, &Lookup::default()).map_err(place)?;
        let rows: Vec<(&FeatureRow, &Pooled)> = rows.into_iter().zip(&pooled).collect();
        vectors.extend_from_slice(tower.run(&rows, &threads, &mut scratch).map_err(place)?.data());
        progress(Stage::Embedding, batch.end, items.len());
    }
    Ok(vectors)
}

/// The features of one item, read from its columns.
fn features(specs: &[FeatureSpec], items: &Items, row: usize) -> Result<Features> {
    let mut features = Features::new();
    for source in specs.iter().map(|s| s.source()) {
        let values = if source == ID {
            Values::Integers(vec![items.ids[row]])
        } else if let Some(dense) = items.dense.get(source) {
            Values::Numbers(dense.values[row * dense.width..(row + 1) * dense.width].to_vec())
        } else if let Some(column) = items.columns.iter().find(|c| c.name == source) {
            let range = |offsets: &[u32]| offsets[row] as usize..offsets[row + 1] as usize;
            match &column.values {
                ItemValues::Texts { offsets, values } => Values::Texts(values[range(offsets)].to_vec()),
                ItemValues::Integers { offsets, values } => Values::Integers(values[range(offsets)].to_vec()),
                ItemValues::Floats(values) if values[row].is_nan() => Values::Numbers(vec![0.0]),
                ItemValues::Floats(values) => Values::Numbers(vec![values[row] as f32]),
            }
        } else {
            return Err(Error::invalid(format!("items: no column `{source}`, which the item tower reads")));
        };
        features.insert(source.into(), values);
    }
    Ok(features)
}
