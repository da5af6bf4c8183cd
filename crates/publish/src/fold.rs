//! Checkpoint of a shard: merges a shard and its updates into another snapshot of the same version.
//!
//! A router probes the same lists in all shards of a version. A shard that merges separately therefore keeps the lists of the
//! complete version, with their centroids and calibration. Each item is in the list to which a publication would have assigned it,
//! and all other item files are rebuilt. Files that do not depend on items are taken from the published shard.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use super::catalogue::Arranged;
use super::gathered::{MergedVersion, ViewItems};
use super::write::Version;
use super::{serving, shards};
use sterling_core::error::Result;
use sterling_index::ivf::Assigner;
use sterling_serving::view::View;
use sterling_snapshot::{FoldedFrom, INDEX_FILE, Manifest, PROGRAM, Provenance, Shards, Store};

/// Merges the updates in a view of one of `shards` into a new snapshot of that shard in `store`. Does nothing without new updates.
///
/// # Errors
/// As [`Store::fold`]; `NoSpace`, `Io`.
pub(super) fn fold(store: &Store, view: &View, shards: &Shards) -> Result<MergedVersion> {
    let (start, main) = (Instant::now(), view.main());
    let mut made = MergedVersion {
        version: main.manifest.version,
        position: view.position(),
        items: view.items(),
        lists: main.index.lists(),
        is_trained: false,
        seconds: 0.0,
    };
    if made.position > main.manifest.position {
        let items = ViewItems::of(view)?;
        let mut built = Assigner::new(&main.index).arrange(items.rows()?, items.lists.clone())?;
        built.keep_first_pass(&main.index);
        let (mut arranged, alike) = items.arranged(built)?;
        arranged.built.sort_lists(&alike);
        let files = Version {
            package: Some(&main.package),
            spec: &main.package.spec,
            tables: &main.package.tables,
            recipe: &main.recipe,
            version: Some(&main.manifest),
        };
        store.fold((&main.manifest, shards), made.position, |folder| {
            let mut manifest = write((&files, &arranged), view, folder)?;
            manifest.provenance.seconds = start.elapsed().as_secs_f64();
            manifest.write(folder)
        })?;
    }
    made.seconds = start.elapsed().as_secs_f64();
    Ok(made)
}

/// Writes all files except the manifest, which is returned.
fn write((files, arranged): (&Version<'_>, &Arranged), view: &View, folder: &Path) -> Result<Manifest> {
    let (main, built) = (view.main(), &arranged.built);
    let mut sums: BTreeMap<_, _> = files.write_items(arranged, folder, built)?;
    sums.insert(INDEX_FILE.into(), arranged.write_index(folder, built)?);
    let decisions = serving::keep(&main.package, &main.manifest.decisions, folder, &mut sums)?;
    shards::share((main.package.folder(), &main.manifest), folder, &mut sums)?;
    let (items, digest) = (main.manifest.published_items(), main.manifest.published_digest());
    Ok(Manifest {
        items: view.items(),
        slots: built.order.len(),
        position: view.position(),
        folded: Some(FoldedFrom { items, digest }),
        provenance: Provenance { program: PROGRAM.into(), ..main.manifest.provenance.clone() },
        files: sums,
        decisions,
        ..main.manifest.clone()
    })
}
