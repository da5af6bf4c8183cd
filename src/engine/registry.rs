//! Which versions of which models are in memory, and which one answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::ArcSwap;

use super::Model;
use crate::error::{Error, Kind, Result};
use crate::snapshot::{Placement, Snapshot, Store};
use crate::wire::{ModelInfo, Served, VersionInfo};

/// Versions of a model that stay in memory besides the active one, for pins and for rolling back.
const KEPT: usize = 1;

/// One version in memory. Requests hold it while they run: a version that is replaced drains by itself.
pub struct Loaded {
    model: Box<dyn Model>,
    info: ModelInfo,
}

impl Loaded {
    /// Takes a model.
    pub fn new(model: impl Model + 'static) -> Self {
        Loaded { info: model.info(), model: Box::new(model) }
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// What it is.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// What a reply says of it.
    pub fn served(&self) -> Served {
        Served {
            model: self.info.name.clone(),
            version: self.info.version,
            digest: self.info.digest.clone(),
            coverage: 1.0,
        }
    }
}

#[derive(Clone, Default)]
struct Entry {
    active: Option<Arc<Loaded>>,
    loaded: BTreeMap<u64, Arc<Loaded>>,
    refused: BTreeMap<u64, String>,
    /// The newest version that was looked at: rolling back stays until a newer one is published.
    newest: u64,
}

/// The models of a store.
pub struct Registry {
    store: Store,
    /// The one model to serve, or all of the store.
    only: Option<String>,
    placement: Placement,
    entries: ArcSwap<BTreeMap<String, Entry>>,
    loading: Mutex<()>,
}

impl Registry {
    /// A registry of the models of `store`, or of one of them, with their tables placed alike. Nothing is loaded yet.
    pub fn new(store: Store, only: Option<String>, placement: Placement) -> Self {
        Registry { store, only, placement, entries: ArcSwap::default(), loading: Mutex::new(()) }
    }

    /// Puts a model in memory as the active version of its name.
    pub fn insert(&self, loaded: Loaded) {
        let _guard = self.guard();
        self.swap_in(Arc::new(loaded));
    }

    fn guard(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of its own, so that a panic under it leaves nothing half done.
        self.loading.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Loads versions that were published since the last call and lets the newest of each model answer. A version that
    /// cannot be loaded is refused with its reason, and the one before goes on.
    pub fn refresh(&self) {
        let models = match (&self.only, self.store.models()) {
            (Some(only), _) => vec![only.clone()],
            (None, Ok(models)) => models,
            (None, Err(e)) => {
                tracing::warn!(error = %e, "the store cannot be read");
                return;
            }
        };
        for name in models {
            let known = self.entries.load().get(&name).map_or(0, |e| e.newest);
            let newer: Vec<u64> =
                self.store.versions(&name).unwrap_or_default().into_iter().filter(|v| *v > known).collect();
            // The newest that can be loaded; older ones are left alone.
            for version in newer.into_iter().rev() {
                if self.load(&name, version).is_ok() {
                    break;
                }
            }
        }
    }

    fn load(&self, name: &str, version: u64) -> Result<Arc<Loaded>> {
        let _guard = self.guard();
        if let Some(loaded) = self.entries.load().get(name).and_then(|e| e.loaded.get(&version)) {
            let loaded = loaded.clone();
            self.swap_in(loaded.clone());
            return Ok(loaded);
        }
        let outcome = Snapshot::load(&self.store.folder(name, version), &self.placement);
        let label = if outcome.is_ok() { "loaded" } else { "refused" };
        metrics::counter!("sterling_loads_total", "model" => name.to_owned(), "outcome" => label).increment(1);
        match outcome {
            Ok(snapshot) => {
                let loaded = Arc::new(Loaded::new(snapshot));
                tracing::info!(model = name, version, digest = loaded.info.digest, "loaded");
                self.swap_in(loaded.clone());
                Ok(loaded)
            }
            Err(e) => {
                tracing::error!(model = name, version, error = %e, "refused; the version before goes on");
                self.change(name, |entry| {
                    entry.refused.insert(version, e.to_string());
                    entry.newest = entry.newest.max(version);
                });
                Err(e)
            }
        }
    }

    fn swap_in(&self, loaded: Arc<Loaded>) {
        let (name, version) = (loaded.info.name.clone(), loaded.info.version);
        metrics::gauge!("sterling_model_version", "model" => name.clone()).set(version as f64);
        self.change(&name, |entry| {
            let before = entry.active.replace(loaded.clone()).map(|b| b.info.version);
            entry.loaded.insert(version, loaded.clone());
            entry.refused.remove(&version);
            entry.newest = entry.newest.max(version);
            let mut spare: Vec<u64> =
                entry.loaded.keys().copied().filter(|v| *v != version && Some(*v) != before).collect();
            let kept = KEPT - usize::from(before.is_some_and(|b| b != version)).min(KEPT);
            spare.truncate(spare.len().saturating_sub(kept));
            spare.iter().for_each(|v| drop(entry.loaded.remove(v)));
        });
    }

    fn change(&self, name: &str, change: impl Fn(&mut Entry)) {
        self.entries.rcu(|entries| {
            let mut entries = BTreeMap::clone(entries);
            change(entries.entry(name.to_owned()).or_default());
            entries
        });
    }

    /// The active version of a model, or the one that is asked for.
    ///
    /// # Errors
    /// `NotFound` naming what there is; `NotReady` where no version of the model could be loaded.
    pub fn get(&self, name: &str, version: Option<u64>) -> Result<Arc<Loaded>> {
        let entries = self.entries.load();
        let Some(entry) = entries.get(name) else {
            let known: Vec<&str> = entries.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none yet".into() } else { known.join(", ") };
            return Err(Error::not_found(format!("model `{name}` is not served here; there are: {known}")));
        };
        match version {
            None => entry.active.clone().ok_or_else(|| {
                let reasons: Vec<&str> = entry.refused.values().map(String::as_str).collect();
                Error::not_ready(format!("no version of model `{name}` could be loaded: {}", reasons.join("; ")))
            }),
            Some(version) => entry.loaded.get(&version).cloned().ok_or_else(|| {
                let loaded: Vec<String> = entry.loaded.keys().map(u64::to_string).collect();
                Error::not_found(format!(
                    "version {version} of model `{name}` is not in memory; there are: {}",
                    loaded.join(", ")
                ))
            }),
        }
    }

    /// Lets a published version answer, loading it where it is not in memory.
    ///
    /// # Errors
    /// `NotFound` for a version that is not published; the reason where it cannot be loaded.
    pub fn activate(&self, name: &str, version: u64) -> Result<Arc<Loaded>> {
        self.get(name, None).map(drop).or_else(|e| if e.kind() == Kind::NotReady { Ok(()) } else { Err(e) })?;
        let in_memory = self.entries.load().get(name).is_some_and(|e| e.loaded.contains_key(&version));
        let published = self.store.versions(name)?;
        if !in_memory && !published.contains(&version) {
            let known: Vec<String> = published.iter().map(u64::to_string).collect();
            return Err(Error::not_found(format!(
                "version {version} of model `{name}` is not published; there are: {}",
                known.join(", ")
            )));
        }
        self.load(name, version)
    }

    /// The active versions of all models.
    pub fn list(&self) -> Vec<ModelInfo> {
        self.entries.load().values().filter_map(|e| Some(e.active.as_ref()?.info.clone())).collect()
    }

    /// True where at least one model answers.
    pub fn is_ready(&self) -> bool {
        self.entries.load().values().any(|e| e.active.is_some())
    }

    /// Every published or loaded version of a model.
    ///
    /// # Errors
    /// `NotFound` for an unknown model.
    pub fn versions(&self, name: &str) -> Result<Vec<VersionInfo>> {
        let entries = self.entries.load();
        let Some(entry) = entries.get(name) else {
            return self.get(name, None).map(|_| Vec::new());
        };
        let mut all = self.store.versions(name)?;
        all.extend(entry.loaded.keys());
        all.sort_unstable();
        all.dedup();
        let active = entry.active.as_ref().map(|a| a.info.version);
        let info = |version| VersionInfo {
            version,
            active: active == Some(version),
            loaded: entry.loaded.contains_key(&version),
            refused: entry.refused.get(&version).cloned(),
        };
        Ok(all.into_iter().map(info).collect())
    }
}
