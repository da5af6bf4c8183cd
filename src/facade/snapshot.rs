//! Published version in the memory of this process.

use std::path::Path;
use std::sync::Arc;

use sterling_core::error::{Error, Result};
use sterling_serving::view::View;
use sterling_snapshot::sandbox::SandboxMode;
use sterling_snapshot::{CacheOptions, Manifest, Placement, Store};

/// Published version, loaded and verified. Clones of a snapshot share its memory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    view: Arc<View>,
}

impl Snapshot {
    /// Loads the newest version of a model from a store: a folder, or a bucket (feature `object-store`).
    ///
    /// # Errors
    /// `NotFound` without a version; as [`Snapshot::load`].
    pub fn open(store: impl AsRef<Path>, model: &str) -> Result<Self> {
        let store = Store::open(store.as_ref(), &CacheOptions::default())?;
        store.renew()?;
        let missing = || Error::not_found(format!("model `{model}`: {} holds no version of this model", store.name()));
        let version = store.versions(model)?.pop().ok_or_else(missing)?;
        // Prevents the eviction of local files until the version is in memory.
        let held = store.ensure_local(model, version)?;
        Snapshot::load(held.folder())
    }

    /// Loads the version in a folder. Graphs that were not validated at publication are validated in this process first.
    ///
    /// # Errors
    /// `NotFound` without a manifest; `Corrupt` or `Unsupported` with the file and the reason.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        if !Manifest::read(folder)?.is_tried() {
            SandboxMode::Here.run(folder)?;
        }
        let snapshot = sterling_snapshot::Snapshot::load(folder, &Placement::default())?;
        Ok(Snapshot { view: Arc::new(View::new(Arc::new(snapshot))) })
    }

    /// Returns the name of the model.
    pub fn model(&self) -> &str {
        &self.view.main().manifest.name
    }

    /// Returns the version number.
    pub fn version(&self) -> u64 {
        self.view.main().manifest.version
    }

    /// Returns the number of items.
    pub fn items(&self) -> usize {
        self.view.items()
    }

    /// Returns the read view for [`crate::serving::pass`], for operations that this type does not offer.
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }
}
