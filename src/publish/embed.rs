//! The vectors of items: their own column, or the item tower over their features.

use super::request::{Progress, Stage};
use crate::columns::ItemValues;
use crate::embedding::Lookup;
use crate::error::{Error, Result};
use crate::items::{EMBEDDING, ID, Items};
use crate::model::{MODEL_FILE, Package, VectorSpec};
use crate::request::{Features, Values};
use crate::snapshot::VectorRows;
use crate::tower::{self, FeatureRow, FeatureSpec, Pooled, RUN_ROWS, Threads, Tower};

/// What is kept of all items, each row after row.
pub(super) struct Embedded {
    /// `[N, D]`
    pub(super) vectors: Vec<f32>,
    /// Those of `[[item.vectors]]`, as they are stored ([`VectorRows`]).
    pub(super) kept: Vec<u8>,
}

/// The vectors of all items, and the tensors that the package keeps of them.
pub(super) fn embed(package: Option<&Package>, items: &mut Items, progress: &Progress<'_>) -> Result<Embedded> {
    let specs = package.map_or(&[][..], |p| &p.spec.item.vectors);
    let columns: Vec<Option<Vec<f32>>> = specs.iter().map(|spec| column(spec, items)).collect::<Result<_>>()?;
    let mut made = match package.and_then(|p| p.item.as_ref()) {
        Some(tower) => run(tower, items, progress)?.into_iter(),
        None => vec![given(package, items)?].into_iter(),
    };
    let vectors = made.next().unwrap_or_default();
    let kept: Vec<Vec<f32>> =
        columns.into_iter().map(|column| column.or_else(|| made.next()).unwrap_or_default()).collect();
    let rows = VectorRows::of(specs)?;
    let mut stored = Vec::with_capacity(items.len() * rows.bytes());
    for item in 0..items.len() {
        let values = |n: usize| &kept[n][item * specs[n].width..][..specs[n].width];
        rows.encode(values, &mut stored).map_err(|e| e.within(format!("item {}", item + 1)))?;
    }
    Ok(Embedded { vectors, kept: stored })
}

/// The column of one of `[[item.vectors]]`; none where the item tower makes it.
fn column(spec: &VectorSpec, items: &Items) -> Result<Option<Vec<f32>>> {
    let Some(column) = &spec.column else { return Ok(None) };
    let place = |e: Error| e.within(format!("item.vectors `{}`", spec.name));
    let dense = items.dense.get(column).ok_or_else(|| {
        let known: Vec<&str> = items.dense.keys().map(String::as_str).collect();
        place(Error::invalid(format!("items: no column `{column}` of vectors; there are: {}", known.join(", "))))
    })?;
    match dense.width == spec.width {
        true => Ok(Some(dense.values.clone())),
        false => Err(place(Error::invalid(format!(
            "column `{column}`: vectors of {} numbers, expected {}",
            dense.width, spec.width
        )))),
    }
}

/// The vectors that items bring.
fn given(package: Option<&Package>, items: &mut Items) -> Result<Vec<f32>> {
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
    Ok(dense.values)
}

/// What the item tower makes of all items, output after output.
fn run(tower: &Tower, items: &Items, progress: &Progress<'_>) -> Result<Vec<Vec<f32>>> {
    let threads = Threads::new(std::thread::available_parallelism().map_or(1, usize::from));
    let mut scratch = tower::Scratch::default();
    let mut all: Vec<Vec<f32>> = tower.outputs().iter().map(|_| Vec::new()).collect();
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
        let made = tower.run(&rows, &threads, &mut scratch).map_err(place)?;
        all.iter_mut().zip(&made).for_each(|(all, made)| all.extend_from_slice(made.data()));
        progress(Stage::Embedding, batch.end, items.len());
    }
    Ok(all)
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
