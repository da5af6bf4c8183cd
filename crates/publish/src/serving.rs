//! Serving-time preparation: stores the item-side part of the reranker, and checks that the version can score its items.

use std::collections::BTreeMap;
use std::path::Path;

use sterling_core::error::{Kind, Result};
use sterling_embedding::Table;
use sterling_index::columns::Columns;
use sterling_index::ivf;
use sterling_snapshot::model::{Decisions, Package};
use sterling_snapshot::sandbox;
use sterling_snapshot::{
    COLUMNS_FILE, CandidateRows, INDEX_FILE, Ids, ItemParts, PARTS_FILE, Recipe, RowSources, VECTORS_FILE, vectors,
};
use sterling_storage::files::{Checksum, TensorFile, Tensors};

/// Files of a version in slot order, as they were written.
struct WrittenFiles {
    index: ivf::Index,
    columns: Columns,
    ids: Ids,
    vectors: Vec<Table>,
}

impl WrittenFiles {
    fn open(package: &Package, folder: &Path) -> Result<Self> {
        let index = ivf::Index::open(&Tensors::open(&folder.join(INDEX_FILE))?)?;
        let tensors = Tensors::open(&folder.join(COLUMNS_FILE))?;
        let columns = Columns::open(&tensors, index.slots())?;
        let ids = Ids::open(&tensors, index.slots(), index.items())?;
        let vectors = match &package.spec.item.vectors[..] {
            [] => Vec::new(),
            specs => vectors::open(specs, &Tensors::open(&folder.join(VECTORS_FILE))?, index.slots())?,
        };
        Ok(WrittenFiles { index, columns, ids, vectors })
    }

    fn sources<'a>(&'a self, package: &'a Package) -> RowSources<'a> {
        RowSources { package, columns: &self.columns, ids: &self.ids, vectors: &self.vectors }
    }
}

/// Precomputes the item-side part of the reranker for the version in `folder`, if storing it pays off and the recipe permits it,
/// and adds its file to `files`. Finally scores the items with the reranker.
pub(super) fn prepare(
    package: &Package,
    folder: &Path,
    recipe: &Recipe,
    files: &mut BTreeMap<String, Checksum>,
) -> Result<Decisions> {
    let written = WrittenFiles::open(package, folder)?;
    let item_part = recipe.reranking.item_part.rows().map(|format| package.best_part(format)).transpose()?.flatten();
    let decisions = Decisions { item_part, ..Decisions::default() };
    let Some((parted, table)) = kept(package, &decisions, &written)? else {
        score_items(package, &written, None)?;
        return Ok(Decisions::default());
    };
    write(&table, folder, files)?;
    score_items(&parted, &written, Some(table))?;
    Ok(decisions)
}

/// Recomputes the reranker's stored item-side part for the new items of the version in `folder`. A part that cannot be stored for
/// these items is computed per candidate. Returns the serving decisions in effect.
pub(super) fn keep(
    package: &Package,
    decisions: &Decisions,
    folder: &Path,
    files: &mut BTreeMap<String, Checksum>,
) -> Result<Decisions> {
    if decisions.item_part.is_none() {
        return Ok(decisions.clone());
    }
    match kept(package, decisions, &WrittenFiles::open(package, folder)?)? {
        Some((_, table)) => write(&table, folder, files).map(|()| decisions.clone()),
        None => Ok(Decisions { item_part: None, ..decisions.clone() }),
    }
}

/// Returns the stored item-side part, and the package that reads it; `None` if the part is not or cannot be stored.
fn kept(package: &Package, decisions: &Decisions, written: &WrittenFiles) -> Result<Option<(Package, Table)>> {
    let Some(decided) = &decisions.item_part else { return Ok(None) };
    let parted = package.decided(decisions)?;
    let parts = ItemParts::work_out(&written.sources(&parted), &written.index, true)?;
    let Some(parts) = parts else {
        tracing::warn!("this build splits the reranker differently, so its item-side part is not stored");
        return Ok(None);
    };
    match parts.stored(decided.format, &written.index, &written.ids) {
        Ok(table) => Ok(Some((parted, table))),
        Err(e) if e.kind() == Kind::Invalid => {
            tracing::warn!(reason = %e, "the item-side part of the reranker is not stored");
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

fn write(table: &Table, folder: &Path, files: &mut BTreeMap<String, Checksum>) -> Result<()> {
    let mut file = TensorFile::new();
    table.encode(&mut file)?;
    files.insert(PARTS_FILE.into(), file.write(&folder.join(PARTS_FILE))?);
    Ok(())
}

fn score_items(package: &Package, written: &WrittenFiles, part: Option<Table>) -> Result<()> {
    let candidates = CandidateRows::open(&written.sources(package), part)?;
    let index = &written.index;
    sandbox::score_items(package, index, &written.columns, &|slots, given| candidates.write(index, slots, given))
}
