//! Which versions of which models are in memory, and which one answers.
//!
//! Loading, labelling and activating are three things. A version in memory answers those who pin it by its number or by a
//! label; unpinned requests go to the active one. To activate is to swap one pointer, and waits for nobody's load.
//!
//! 1. [`Registry::look`] sees what is published. A version is its name, its number *and* its bytes: what its files look like
//!    from outside (a [`Stamp`]) tells when to look closer, the digest of its manifest tells what it is.
//! 2. What is new is loaded, a few at a time, each model behind a gate of its own: its folder must be called what its
//!    manifest says, its memory must be there, the warm-up must hold. The newest then answers, unless an operator has
//!    decided otherwise since it was published.
//! 3. What cannot be loaded is refused with the reason, and the version before goes on. A passing failure is tried again,
//!    later and later; any refused version at once when its folder changes; nothing else is.
//!
//! The active version, the one before it, labelled ones and those loaded by hand stay in memory. All others are dropped, and
//! drain by themselves: a request holds its version while it runs.

mod entry;
mod load;
mod loader;
mod memory;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use crate::error::{Error, Kind, Result};
use crate::snapshot::{Snapshot, Stamp, Store, check_name};
use crate::view::View;
use entry::{Entry, listed};
use load::Permits;
use memory::{Memory, Room};

pub use load::is_passing;
pub use loader::{Declared, Loader};

/// One version in memory. Requests hold it while they run.
#[derive(Debug)]
pub struct Loaded<T = View> {
    view: Arc<T>,
    name: String,
    version: u64,
    digest: String,
    /// What its folder looked like when it was loaded.
    stamp: Option<Stamp>,
    room: Option<Room>,
}

impl Loaded {
    /// A snapshot that no registry holds.
    pub fn new(snapshot: Snapshot) -> Self {
        let (name, version) = (snapshot.manifest.name.clone(), snapshot.manifest.version);
        let digest = snapshot.digest().to_owned();
        let view = Arc::new(View::new(Arc::new(snapshot)));
        Loaded { view, name, version, digest, stamp: None, room: None }
    }
}

impl<T> Loaded<T> {
    /// What answers.
    pub fn view(&self) -> &Arc<T> {
        &self.view
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The digest of its bytes.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Bytes of memory that were planned for it.
    pub fn memory_bytes(&self) -> u64 {
        self.room.as_ref().map_or(0, Room::bytes)
    }
}

/// Which version of a model is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// The active one.
    Active,
    /// The one of this number.
    Version(u64),
    /// The one that a label points to.
    Label(&'a str),
}

/// Why a version was not taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What sort of failure it was.
    pub kind: Kind,
    /// The failure.
    pub reason: String,
    /// Loads that have failed since the folder changed last.
    pub attempts: u32,
    /// When it is tried again though its folder does not change; never, where there is none.
    pub retry_in: Option<Duration>,
}

/// The state of one version, published or in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionState {
    /// The version.
    pub version: u64,
    /// True where the store has it.
    pub published: bool,
    /// True where it is in memory.
    pub loaded: bool,
    /// True for the one that answers unpinned requests.
    pub active: bool,
    /// The labels that point to it.
    pub labels: Vec<String>,
    /// The digest of the bytes in memory.
    pub digest: Option<String>,
    /// Why what the store has of it was refused, where it was.
    pub refused: Option<Refused>,
}

/// What a registry may do.
#[derive(Clone, Debug)]
pub struct Options {
    /// The one model to serve, or all of the store.
    pub only: Option<String>,
    /// Bytes of memory that versions may take together; most of what is free at the start where none is given.
    pub memory_bytes: Option<u64>,
    /// Loads that run side by side.
    pub loads: usize,
    /// True where the newest published version is activated by itself.
    pub follow: bool,
    /// How long after a passing failure a load is tried again: after the first one, and at most. Between them the wait
    /// doubles.
    pub retry: (Duration, Duration),
}

impl Default for Options {
    fn default() -> Self {
        let retry = (Duration::from_secs(1), Duration::from_secs(60));
        Options { only: None, memory_bytes: None, loads: 2, follow: true, retry }
    }
}

/// What a version must go through before it may answer.
pub type Warm<T> = Arc<dyn Fn(&Loaded<T>) -> Result<()> + Send + Sync>;

type Entries<T> = BTreeMap<String, Entry<T>>;

/// The models of a store.
pub struct Registry<T = View> {
    store: Store,
    loader: Box<dyn Loader<T>>,
    options: Options,
    warm: Option<Warm<T>>,
    memory: Memory,
    permits: Permits,
    entries: ArcSwap<Entries<T>>,
    /// Held for moments, by who changes the entries.
    changing: Mutex<()>,
}

impl<T: Send + Sync> Registry<T> {
    /// A registry of the models of `store`. Nothing is loaded yet.
    pub fn new(store: Store, loader: impl Loader<T> + 'static, options: Options) -> Self {
        Registry {
            store,
            loader: Box::new(loader),
            warm: None,
            memory: Memory::new(options.memory_bytes),
            permits: Permits::new(options.loads),
            entries: ArcSwap::default(),
            changing: Mutex::default(),
            options,
        }
    }

    /// The same registry, whose versions go through `warm` before they may answer; one that fails it is refused.
    pub fn with_warm_up(mut self, warm: Warm<T>) -> Self {
        self.warm = Some(warm);
        self
    }

    /// Changes what is known of a model, as a whole.
    fn change<R>(&self, name: &str, change: impl FnOnce(&mut Entry<T>) -> R) -> R {
        let guard = locked(&self.changing);
        let mut entries = Entries::clone(&self.entries.load());
        let result = change(entries.entry(name.to_owned()).or_default());
        let before = self.entries.swap(Arc::new(entries));
        // What goes out of memory takes its time, and nobody waits for it.
        drop(guard);
        drop(before);
        result
    }

    /// What is known of a model.
    ///
    /// # Errors
    /// `NotFound` naming the models that there are.
    fn entry<R>(&self, name: &str, read: impl FnOnce(&Entry<T>) -> Result<R>) -> Result<R> {
        let entries = self.entries.load();
        match entries.get(name) {
            Some(entry) => read(entry).map_err(|e| e.within(format!("model `{name}`"))),
            None => Err(Error::not_found(format!(
                "model `{name}` is not served here; there are: {}",
                listed(entries.keys())
            ))),
        }
    }

    /// A version in memory.
    ///
    /// # Errors
    /// `NotFound` naming what there is; `NotReady` where no version of the model could be loaded.
    pub fn get(&self, name: &str, which: Which<'_>) -> Result<Arc<Loaded<T>>> {
        self.entry(name, |entry| entry.get(which))
    }

    /// Loads a published version that is not in memory, and keeps it there. Nothing else changes.
    ///
    /// # Errors
    /// `NotFound` for a version that is not published; the reason where it cannot be loaded.
    pub fn load(&self, name: &str, version: u64) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version)?;
        self.change(name, |entry| {
            entry.insert(loaded.clone());
            entry.hold(version);
        });
        Ok(loaded)
    }

    /// Lets a version answer unpinned requests, at once where it is in memory. It stays until another is published.
    ///
    /// # Errors
    /// As [`Registry::load`].
    pub fn activate(&self, name: &str, version: u64) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version)?;
        let settled = self.published(name, u64::MAX);
        self.change(name, |entry| {
            entry.insert(loaded.clone());
            entry.activate(version);
            entry.settle(settled);
        });
        self.tell_active(name, &loaded, "activated");
        Ok(loaded)
    }

    /// Takes a version out of memory.
    ///
    /// # Errors
    /// `NotFound` where it is not there, `Conflict` where it is active or has a label.
    pub fn unload(&self, name: &str, version: u64) -> Result<()> {
        self.edit(name, |entry| entry.unload(version))
    }

    /// Lets a label point to a version in memory.
    ///
    /// # Errors
    /// `Invalid` for a label that cannot stand in a path, `NotFound` where the version is not in memory.
    pub fn label(&self, name: &str, label: &str, version: u64) -> Result<()> {
        check_name("label", label)?;
        self.edit(name, |entry| entry.label(label, version))
    }

    /// Takes a label away.
    ///
    /// # Errors
    /// `NotFound` where there is none of this name.
    pub fn unlabel(&self, name: &str, label: &str) -> Result<()> {
        self.edit(name, |entry| entry.unlabel(label))
    }

    fn edit(&self, name: &str, edit: impl FnOnce(&mut Entry<T>) -> Result<()>) -> Result<()> {
        self.entry(name, |_| Ok(()))?;
        self.change(name, edit).map_err(|e| e.within(format!("model `{name}`")))
    }

    /// The active versions of all models.
    pub fn list(&self) -> Vec<Arc<Loaded<T>>> {
        self.entries.load().values().filter_map(|entry| entry.get(Which::Active).ok()).collect()
    }

    /// The labels of a model and the versions that they point to.
    ///
    /// # Errors
    /// `NotFound` for an unknown model.
    pub fn labels(&self, name: &str) -> Result<BTreeMap<String, u64>> {
        self.entry(name, |entry| Ok(entry.labels.clone()))
    }

    /// Whether at least one model answers.
    ///
    /// # Errors
    /// `NotReady` with the reason of each model, where none does.
    pub fn ready(&self) -> Result<()> {
        let entries = self.entries.load();
        let waiting = |(name, entry): (&String, &Entry<T>)| match entry.get(Which::Active) {
            Ok(_) => None,
            Err(e) => Some(format!("model `{name}`: {e}")),
        };
        let reasons: Vec<String> = entries.iter().filter_map(waiting).collect();
        if reasons.len() < entries.len() {
            return Ok(());
        }
        Err(Error::not_ready(match &self.options.only {
            _ if !reasons.is_empty() => reasons.join("; "),
            Some(only) => format!("model `{only}`, the only one to be served, was not found in the store yet"),
            None => "no model was found in the store yet".into(),
        }))
    }

    /// Every published or loaded version of a model, ascending.
    ///
    /// # Errors
    /// `NotFound` for an unknown model, `Io` where the store cannot be read.
    pub fn versions(&self, name: &str) -> Result<Vec<VersionState>> {
        let published = self.store.versions(name)?;
        let now = Instant::now();
        self.entry(name, |entry| {
            let mut all: Vec<u64> = published.iter().chain(entry.loaded.keys()).copied().collect();
            all.sort_unstable();
            all.dedup();
            let state = |version| VersionState {
                version,
                published: published.contains(&version),
                loaded: entry.loaded.contains_key(&version),
                active: entry.active == Some(version),
                labels: entry.labels.iter().filter(|(_, of)| **of == version).map(|(l, _)| l.clone()).collect(),
                digest: entry.loaded.get(&version).map(|l| l.digest.clone()),
                refused: entry.refused.get(&version).map(|r| r.told(now)),
            };
            Ok(all.into_iter().map(state).collect())
        })
    }

    fn tell_active(&self, name: &str, loaded: &Loaded<T>, how: &str) {
        metrics::gauge!("sterling_model_version", "model" => name.to_owned()).set(loaded.version as f64);
        tracing::info!(model = name, version = loaded.version, digest = loaded.digest, "{how}");
    }
}

/// Locks what guards no data of its own, so that a panic under it leaves nothing half done.
fn locked<D>(mutex: &Mutex<D>) -> MutexGuard<'_, D> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
