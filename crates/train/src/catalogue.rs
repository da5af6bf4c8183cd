//! The items of a model as training reads them: their ids, and the inputs of the item tower per item.

use std::collections::{BTreeMap, HashMap};

use sterling_core::error::{Error, Result};
use sterling_core::items::EMBEDDING;
use sterling_core::tensor::Matrix;
use sterling_graph::tower::FeatureRow;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::Package;

/// Items by index, in the order of the items file.
#[derive(Debug)]
pub(crate) struct Catalogue {
    ids: Vec<i64>,
    places: HashMap<i64, u32>,
    /// Inputs of the item tower per item; empty if the items have vectors of their own.
    rows: Vec<FeatureRow>,
    /// Item vectors `[N, D]` if the items file has them, else empty.
    vectors: Vec<f32>,
}

impl Catalogue {
    /// Reads the features of all items.
    ///
    /// # Errors
    /// `Invalid` with the item, if the item tower cannot read it or its vector has another width.
    pub(crate) fn new(items: &Items, package: &Package) -> Result<Self> {
        let places = items.ids.iter().zip(0u32..).map(|(&id, place)| (id, place)).collect();
        let mut catalogue = Catalogue { ids: items.ids.clone(), places, rows: Vec::new(), vectors: Vec::new() };
        let Some(tower) = &package.item else {
            let given = items.dense.get(EMBEDDING).filter(|rows| rows.cols() == package.spec.dimension);
            let given = given.ok_or_else(|| {
                let expected = package.spec.dimension;
                Error::invalid(format!(
                    "items: no column `{EMBEDDING}` of {expected} numbers, and no item tower, expected one of them"
                ))
            })?;
            catalogue.vectors = given.all()?;
            return Ok(catalogue);
        };
        if let Some(source) = tower.features().iter().map(|f| f.source()).find(|s| *s != "id" && !items.has(s)) {
            return Err(Error::invalid(format!("items: no column `{source}`, which the item tower reads")));
        }
        let dense: Vec<(&str, Vec<f32>, usize)> = {
            let named = tower.features().iter().filter_map(|f| Some((f.source(), items.dense.get(f.source())?)));
            named.map(|(name, rows)| Ok((name, rows.all()?, rows.cols()))).collect::<Result<_>>()?
        };
        let dense: BTreeMap<&str, Matrix<'_>> =
            dense.iter().map(|(name, rows, cols)| Ok((*name, Matrix::new(rows, *cols)?))).collect::<Result<_>>()?;
        for row in 0..items.len() {
            let vector = |name: &str| dense.get(name).map(|rows| rows.row(row).to_vec());
            let features = items.features(tower.features(), row, &vector);
            let read = tower.read(features).map_err(|e| e.within(format!("item {}", row + 1)))?;
            catalogue.rows.push(read);
        }
        Ok(catalogue)
    }

    /// Returns the number of items, N.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns the ids by item index.
    pub(crate) fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Returns the index of an item by its id.
    pub(crate) fn place(&self, id: i64) -> Option<u32> {
        self.places.get(&id).copied()
    }

    /// Returns the inputs of the item tower by item index; empty if the items have vectors of their own.
    pub(crate) fn rows(&self) -> &[FeatureRow] {
        &self.rows
    }

    /// Returns the item vectors `[N, D]` if the items file has them, else an empty slice.
    pub(crate) fn vectors(&self) -> &[f32] {
        &self.vectors
    }
}
