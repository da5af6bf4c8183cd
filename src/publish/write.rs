//! The files of a version, manifest apart.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::catalogue::Arranged;
use super::request::{Progress, Stage};
use super::tables;
use crate::columns::{self, Columns};
use crate::embedding::Table;
use crate::error::{Error, Result};
use crate::files::{self, Checksum, TensorFile, Tensors};
use crate::filter;
use crate::ivf::Built;
use crate::model::{MODEL_FILE, ModelSpec, Package};
use crate::snapshot::{
    COLUMNS_FILE, FILTER_FILE, INDEX_FILE, MANIFEST, PARTS_FILE, RECIPE_FILE, Recipe, VECTORS_FILE, candidates, ids,
};

/// What the files of a version hold.
pub(super) struct Version<'a> {
    pub(super) package: Option<&'a Package>,
    pub(super) spec: &'a ModelSpec,
    pub(super) tables: &'a [Arc<Table>],
    pub(super) arranged: &'a Arranged,
    pub(super) recipe: &'a Recipe,
}

impl Version<'_> {
    /// Writes every file but the manifest, which names them by their sums.
    pub(super) fn write(&self, folder: &Path, progress: &Progress<'_>) -> Result<BTreeMap<String, Checksum>> {
        let own = [INDEX_FILE, FILTER_FILE, COLUMNS_FILE, VECTORS_FILE, PARTS_FILE, RECIPE_FILE, MANIFEST];
        if let Some(name) = self.package.iter().flat_map(|p| p.files()).find(|name| own.contains(&name.as_str())) {
            return Err(Error::invalid(format!("file `{name}`: a version has one of its own, expected another name")));
        }
        let mut sums = self.write_items(folder, &self.arranged.built, progress)?;
        for (package, name) in self.package.iter().flat_map(|p| p.files().into_iter().map(move |name| (p, name))) {
            let (from, to) = (package.folder().join(&name), folder.join(&name));
            let sum = match tables::is_converted(&name, package, self.tables) {
                true => tables::write(&to, &name, package, self.tables)?,
                false => put(&to, &fs::read(&from).map_err(|e| Error::io(from.display(), e))?)?,
            };
            sums.insert(name, sum);
        }
        if self.package.is_none_or(|p| p.spec != *self.spec) {
            sums.insert(MODEL_FILE.into(), put(&folder.join(MODEL_FILE), self.spec.to_toml()?.as_bytes())?);
        }
        sums.insert(RECIPE_FILE.into(), put(&folder.join(RECIPE_FILE), self.recipe.to_toml()?.as_bytes())?);
        Ok(sums)
    }

    /// Writes what lies in slot order, of the items that `built` has slots for: index, columns with ids, the filter's planes, and
    /// the tensors that are kept by item.
    pub(super) fn write_items(
        &self,
        folder: &Path,
        built: &Built,
        progress: &Progress<'_>,
    ) -> Result<BTreeMap<String, Checksum>> {
        let Arranged { ids, columns, .. } = self.arranged;
        let mut sums = BTreeMap::new();
        progress(Stage::Writing, 0, 3);
        let mut file = TensorFile::new();
        built.encode(self.arranged.rows()?, &mut file)?;
        sums.insert(INDEX_FILE.into(), file.write(&folder.join(INDEX_FILE))?);
        progress(Stage::Writing, 1, 3);
        let mut file = TensorFile::new();
        columns::encode(columns, &built.order, &mut file)?;
        ids::encode(ids, &built.order, &mut file)?;
        sums.insert(COLUMNS_FILE.into(), file.write(&folder.join(COLUMNS_FILE))?);
        progress(Stage::Writing, 2, 3);
        let written = Columns::open(&Tensors::open(&folder.join(COLUMNS_FILE))?, built.order.len())?;
        let mut file = TensorFile::new();
        filter::encode(&written, &built.list_offsets, &built.list_lengths, &self.recipe.filter, &mut file)?;
        sums.insert(FILTER_FILE.into(), file.write(&folder.join(FILTER_FILE))?);
        if let Some(package) = self.package.filter(|p| !p.spec.item.vectors.is_empty()) {
            let kept = &self.arranged.embedded.kept;
            let tables = candidates::arrange(&package.spec.item.vectors, kept, &built.order)?;
            let mut file = TensorFile::new();
            tables.iter().try_for_each(|table| table.encode(&mut file))?;
            sums.insert(VECTORS_FILE.into(), file.write(&folder.join(VECTORS_FILE))?);
        }
        progress(Stage::Writing, 3, 3);
        Ok(sums)
    }
}

fn put(path: &Path, bytes: &[u8]) -> Result<Checksum> {
    files::write_atomic(path, |out| out.write_all(bytes))
}
