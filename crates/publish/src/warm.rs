//! Answers of a version to the requests that are stored with it.

use std::path::Path;

use crate::warmup;
use sterling_core::error::Result;
use sterling_snapshot::model::WARMUP_FILE;
use sterling_snapshot::{Manifest, Placement, Snapshot};
use sterling_storage::files;

/// Answers the stored requests with the version in `folder`, which is complete except for its manifest. If `faithful`, golden
/// answers must match.
pub(super) fn answer(folder: &Path, manifest: &mut Manifest, faithful: bool) -> Result<()> {
    if !manifest.files.contains_key(WARMUP_FILE) {
        return Ok(());
    }
    manifest.write(folder)?;
    let snapshot = Snapshot::load(folder, &Placement::default())?;
    let path = folder.join(WARMUP_FILE);
    let filled = warmup::fill(&warmup::read(&path)?, snapshot, faithful)?;
    let sum = files::write_atomic(&path, |out| out.write_all(filled.as_bytes()))?;
    manifest.files.insert(WARMUP_FILE.into(), sum);
    Ok(())
}
