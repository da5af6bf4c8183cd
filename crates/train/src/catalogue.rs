//! The items of a model as training sees them: which there are, and what the item tower reads of each.

use std::collections::{BTreeMap, HashMap};

use sterling_core::error::{Error, Result};
use sterling_core::tensor::Matrix;
use sterling_graph::tower::FeatureRow;
use sterling_snapshot::items::{EMBEDDING, Items};
use sterling_snapshot::model::Package;

/// Items by their places, in the order of their file.
#[derive(Debug)]
pub(crate) struct Catalogue {
    ids: Vec<i64>,
    places: HashMap<i64, u32>,
    /// What the item tower reads of each; none where items bring their vectors.
    rows: Vec<FeatureRow>,
    /// `[N, D]` where items bring their vectors, else empty.
    vectors: Vec<f32>,
}

impl Catalogue {
    /// Reads the features of all items.
    ///
    /// # Errors
    /// `Invalid` with the item, where the item tower cannot read it or its vector has another width.
    pub(crate) fn new(items: &Items, package: &Package) -> Result<Self> {
        let places = items.ids.iter().zip(0u32..).map(|(&id, place)| (id, place)).collect();
        let mut catalogue = Catalogue { ids: items.ids.clone(), places, rows: Vec::new(), vectors: Vec::new() };
        let Some(tower) = &package.item else {
            let given = items.dense.get(EMBEDDING).filter(|rows| rows.cols() == package.spec.dimension);
            let given = given.ok_or_else(|| {
                let expected = package.spec.dimension;
                Error::invalid(format!("items: no column `{EMBEDDING}` of {expected} numbers, and no item tower"))
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

    /// Number of items, N.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The ids, by their places.
    pub(crate) fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// The place of an id.
    pub(crate) fn place(&self, id: i64) -> Option<u32> {
        self.places.get(&id).copied()
    }

    /// What the item tower reads of all items, by their places; empty where items bring their vectors.
    pub(crate) fn rows(&self) -> &[FeatureRow] {
        &self.rows
    }

    /// `[N, D]` where items bring their vectors, else empty.
    pub(crate) fn vectors(&self) -> &[f32] {
        &self.vectors
    }
}
