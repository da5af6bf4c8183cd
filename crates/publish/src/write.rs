//! Files of a version, except its manifest.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::catalogue::Arranged;
use super::plan::{Progress, Stage};
use super::tables;
use sterling_core::error::{Error, Result};
use sterling_core::units::NO_ITEM;
use sterling_embedding::Table;
use sterling_index::columns::{self, Columns};
use sterling_index::filter;
use sterling_index::ivf::Built;
use sterling_snapshot::model::{MODEL_FILE, ModelSpec, Package, WARMUP_FILE};
use sterling_snapshot::{
    COLUMNS_FILE, FILTER_FILE, INDEX_FILE, MANIFEST, Manifest, PARTS_FILE, QUERIES_FILE, RECIPE_FILE, REQUESTS_FILE,
    Recipe, STRATA_FILE, VECTORS_FILE, VectorRows, ids,
};
use sterling_storage::files::{self, Checksum, TensorFile, Tensors};

/// Contents of a version's files, except its items.
pub(super) struct Version<'a> {
    pub(super) package: Option<&'a Package>,
    pub(super) spec: &'a ModelSpec,
    pub(super) tables: &'a [Arc<Table>],
    pub(super) recipe: &'a Recipe,
    /// Manifest of the version, if the package is a version's folder: files of a version never change, so they are linked.
    pub(super) version: Option<&'a Manifest>,
}

impl Version<'_> {
    /// Writes every file except the manifest; returns their checksums.
    pub(super) fn write(
        &self,
        arranged: &Arranged,
        folder: &Path,
        progress: &Progress<'_>,
    ) -> Result<BTreeMap<String, Checksum>> {
        progress(Stage::Writing, 0, 3);
        let mut sums = self.write_package(folder)?;
        progress(Stage::Writing, 1, 3);
        sums.insert(INDEX_FILE.into(), arranged.write_index(folder, &arranged.built)?);
        progress(Stage::Writing, 2, 3);
        sums.extend(self.write_items(arranged, folder, &arranged.built)?);
        progress(Stage::Writing, 3, 3);
        Ok(sums)
    }

    /// Writes the package's files and the recipe; returns their checksums.
    pub(super) fn write_package(&self, folder: &Path) -> Result<BTreeMap<String, Checksum>> {
        let own = [
            INDEX_FILE,
            FILTER_FILE,
            COLUMNS_FILE,
            VECTORS_FILE,
            PARTS_FILE,
            QUERIES_FILE,
            STRATA_FILE,
            RECIPE_FILE,
            MANIFEST,
            REQUESTS_FILE,
        ];
        if let Some(name) = self.package.iter().flat_map(|p| p.files()).find(|name| own.contains(&name.as_str())) {
            return Err(Error::invalid(format!(
                "file `{name}`: this name is reserved for a file of the version, expected another name"
            )));
        }
        let mut sums = BTreeMap::new();
        // Sample requests of a version are kept for its successors.
        let kept =
            self.version.filter(|version| version.files.contains_key(REQUESTS_FILE)).map(|_| REQUESTS_FILE.into());
        let names = |p: &'_ &Package| p.files().into_iter().chain(kept.clone());
        for (package, name) in self.package.iter().flat_map(|p| names(p).map(move |name| (p, name))) {
            let (from, to) = (package.folder().join(&name), folder.join(&name));
            let known = self.version.and_then(|version| version.files.get(&name));
            let sum = match known {
                // Creates a hard link, or a copy if the file system does not support links.
                Some(sum) if name != WARMUP_FILE && fs::hard_link(&from, &to).is_ok() => sum.clone(),
                _ if tables::is_converted(&name, package, self.tables) => {
                    tables::write(&to, &name, package, self.tables)?
                }
                _ => put(&to, &package.read_file(&name)?)?,
            };
            sums.insert(name, sum);
        }
        if self.package.is_none_or(|p| p.spec != *self.spec) {
            sums.insert(MODEL_FILE.into(), put(&folder.join(MODEL_FILE), self.spec.to_toml()?.as_bytes())?);
        }
        sums.insert(RECIPE_FILE.into(), put(&folder.join(RECIPE_FILE), self.recipe.to_toml()?.as_bytes())?);
        Ok(sums)
    }

    /// Writes the files in slot order, except the index: columns with ids, the filter index, and stored tensors per item.
    pub(super) fn write_items(
        &self,
        arranged: &Arranged,
        folder: &Path,
        built: &Built,
    ) -> Result<BTreeMap<String, Checksum>> {
        let Arranged { ids, columns, embedded, .. } = arranged;
        let mut sums = BTreeMap::new();
        let mut file = TensorFile::new();
        columns::encode(columns, &built.order, &mut file)?;
        ids::encode(ids, &built.order, &mut file)?;
        sums.insert(COLUMNS_FILE.into(), file.write(&folder.join(COLUMNS_FILE))?);
        let written = Columns::open(&Tensors::open(&folder.join(COLUMNS_FILE))?, built.order.len())?;
        let mut file = TensorFile::new();
        filter::encode(&written, &built.list_offsets, &built.list_lengths, &self.recipe.filter, &mut file)?;
        sums.insert(FILTER_FILE.into(), file.write(&folder.join(FILTER_FILE))?);
        if let Some(package) = self.package.filter(|p| !p.spec.item.vectors.is_empty()) {
            let (rows, kept) = (VectorRows::of(&package.spec.item.vectors)?, &embedded.kept);
            let row = |slot: usize| match built.order[slot] {
                NO_ITEM => None,
                item => Some(&kept[item as usize * rows.bytes()..][..rows.bytes()]),
            };
            let tables = rows.tables(built.order.len(), row)?;
            let mut file = TensorFile::new();
            tables.iter().try_for_each(|table| table.encode(&mut file))?;
            sums.insert(VECTORS_FILE.into(), file.write(&folder.join(VECTORS_FILE))?);
        }
        Ok(sums)
    }
}

impl Arranged {
    /// Writes the index of the items that `built` has slots for.
    pub(super) fn write_index(&self, folder: &Path, built: &Built) -> Result<Checksum> {
        built.write(&self.embedded.vectors, &folder.join(INDEX_FILE), self.bucket_bytes)
    }
}

fn put(path: &Path, bytes: &[u8]) -> Result<Checksum> {
    files::write_atomic(path, |out| out.write_all(bytes))
}
