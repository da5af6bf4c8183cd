//! Public interface of the registry: looks up versions, and applies the decisions of operators.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::entry::{Entry, listed};
use super::loaded::{Loaded, VersionState};
use super::loader::Loader;
use super::memory::Memory;
use super::permits::Permits;
use crate::view::Live;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::VersionSelector;
use sterling_kernels::priority::Background;
use sterling_snapshot::{Store, check_name};

/// Options of a registry.
#[derive(Clone, Debug)]
pub struct Options {
    /// Single model to serve; `None` for all models of the store.
    pub only: Option<String>,
    /// Memory budget of all versions in bytes; by default most of the memory that is free at the start.
    pub memory_bytes: Option<u64>,
    /// Maximum number of concurrent loads.
    pub loads: usize,
    /// True if the newest published version is activated automatically.
    pub follow: bool,
    /// Wait before a retry after a transient failure: initial and maximum. The wait doubles with each failure.
    pub retry: (Duration, Duration),
    /// Minimum interval between evaluations of canaries.
    pub judged_every: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let retry = (Duration::from_secs(1), Duration::from_secs(60));
        let judged_every = Duration::from_secs(5);
        Options { only: None, memory_bytes: None, loads: 2, follow: true, retry, judged_every }
    }
}

/// Check that a version must pass before it may answer.
pub type Warm<T> = Arc<dyn Fn(&Loaded<T>) -> Result<()> + Send + Sync>;

type Entries<T> = BTreeMap<String, Entry<T>>;

/// Models of a store.
pub struct Registry<T = Live> {
    pub(super) store: Store,
    pub(super) loader: Box<dyn Loader<T>>,
    pub(super) options: Options,
    pub(super) warm: Option<Warm<T>>,
    pub(super) memory: Memory,
    pub(super) permits: Permits,
    pub(super) entries: ArcSwap<Entries<T>>,
    /// True if the store has been read; before that, unknown models may exist.
    pub(super) is_read: AtomicBool,
    /// Lock that is held briefly while entries are changed.
    pub(super) changing: Mutex<()>,
}

impl<T: Send + Sync> Registry<T> {
    /// Creates a registry of the models of `store`. No version is loaded yet.
    pub fn new(store: Store, loader: impl Loader<T> + 'static, options: Options) -> Self {
        Registry {
            store,
            loader: Box::new(loader),
            warm: None,
            memory: Memory::new(options.memory_bytes),
            permits: Permits::new(options.loads),
            entries: ArcSwap::default(),
            is_read: AtomicBool::default(),
            changing: Mutex::default(),
            options,
        }
    }

    /// Adds a warm-up that versions must pass before they may answer; versions that fail it are rejected.
    pub fn with_warm_up(mut self, warm: Warm<T>) -> Self {
        self.warm = Some(warm);
        self
    }

    /// Changes the state of a model atomically.
    pub(super) fn change<R>(&self, name: &str, change: impl FnOnce(&mut Entry<T>) -> R) -> R {
        let guard = locked(&self.changing);
        let mut entries = Entries::clone(&self.entries.load());
        let entry = entries.entry(name.to_owned()).or_default();
        let result = change(entry);
        entry.divide();
        let before = self.entries.swap(Arc::new(entries));
        // Freeing memory is slow, so it happens after the lock is released.
        drop(guard);
        drop(before);
        result
    }

    /// Reads the state of a model.
    ///
    /// # Errors
    /// `NotFound` naming the existing models; `NotReady` while the store has not been read.
    pub(super) fn entry<R>(&self, name: &str, read: impl FnOnce(&Entry<T>) -> Result<R>) -> Result<R> {
        // `is_read` is loaded before the entries, so that the entries are at least as recent.
        let is_read = self.is_read.load(Ordering::Acquire);
        let entries = self.entries.load();
        match entries.get(name) {
            Some(entry) => read(entry).map_err(|e| e.within(format!("model `{name}`"))),
            None if !is_read => Err(Error::not_ready("the store was not read yet").retry_after(Duration::from_secs(1))),
            None => Err(Error::not_found(format!(
                "model `{name}` is not served here; there are: {}",
                listed(entries.keys())
            ))),
        }
    }

    /// Returns whether the store was read and has no model of this name.
    pub fn lacks(&self, name: &str) -> bool {
        self.is_read.load(Ordering::Acquire) && !self.entries.load().contains_key(name)
    }

    /// Returns a version in memory.
    ///
    /// # Errors
    /// `NotFound` naming the existing models, versions or labels; `NotReady` if no version of the model could be loaded.
    pub fn get(&self, name: &str, which: VersionSelector<'_>) -> Result<Arc<Loaded<T>>> {
        self.entry(name, |entry| entry.get(which))
    }

    /// Loads a published version and keeps it in memory; changes nothing else.
    ///
    /// # Errors
    /// `NotFound` for a version that is not published; the reason if it cannot be loaded.
    pub fn load(&self, name: &str, version: u64) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version, Background::Steady)?;
        self.change(name, |entry| {
            entry.insert(loaded.clone());
            entry.hold(version);
        });
        Ok(loaded)
    }

    /// Activates a version for unpinned requests, immediately if it is in memory. The activated version stays active
    /// until another version is published.
    ///
    /// # Errors
    /// As [`Registry::load`].
    pub fn activate(&self, name: &str, version: u64) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version, Background::Steady)?;
        let settled = self.published(name, u64::MAX);
        self.change(name, |entry| {
            entry.insert(loaded.clone());
            entry.activate(version);
            // The decision of this server's operator holds until the desired state changes.
            entry.is_desired_active = true;
            entry.settle(settled);
        });
        self.report_active(name, &loaded, "activated");
        Ok(loaded)
    }

    /// Activates a version as the successor of `before`, if `before` is still active. No caller waits: the version is loaded in
    /// the background.
    ///
    /// # Errors
    /// `Conflict` if another version is active by now; as [`Registry::load`].
    pub fn succeed(&self, name: &str, (before, version): (u64, u64), background: Background) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version, background)?;
        let settled = self.published(name, version);
        let active = self.change(name, |entry| {
            let active = entry.active;
            if active == Some(before) || active == Some(version) {
                entry.insert(loaded.clone());
                entry.activate(version);
                entry.settle(settled);
            }
            active
        });
        match active {
            Some(active) if active == before => self.report_active(name, &loaded, "loaded and activated"),
            Some(active) if active == version => {}
            other => {
                let other = other.map_or("none".into(), |other| format!("version {other}"));
                return Err(Error::conflict(format!("{other} is active by now, expected version {before}")));
            }
        }
        Ok(loaded)
    }

    /// Reloads a version that is in memory from its present files. No caller waits: the version is loaded in the background.
    ///
    /// # Errors
    /// As [`Registry::load`].
    pub fn replace(&self, name: &str, version: u64, background: Background) -> Result<Arc<Loaded<T>>> {
        let loaded = self.current(name, version, background)?;
        self.change(name, |entry| {
            if entry.loaded.contains_key(&version) {
                entry.insert(loaded.clone());
            }
        });
        Ok(loaded)
    }

    /// Returns the versions of a model in memory, ascending.
    pub fn all_in_memory(&self, name: &str) -> Vec<Arc<Loaded<T>>> {
        let entries = self.entries.load();
        entries.get(name).map_or_else(Vec::new, |entry| entry.loaded.values().cloned().collect())
    }

    /// Removes a version from memory.
    ///
    /// # Errors
    /// `NotFound` if the version is not in memory, `Conflict` if it is active or has a label.
    pub fn unload(&self, name: &str, version: u64) -> Result<()> {
        self.edit(name, |entry| entry.unload(version))
    }

    /// Points a label to a version in memory.
    ///
    /// # Errors
    /// `Invalid` for a label that is not a valid path segment, `NotFound` if the version is not in memory.
    pub fn label(&self, name: &str, label: &str, version: u64) -> Result<()> {
        check_name("label", label)?;
        self.edit(name, |entry| {
            entry.label(label, version)?;
            entry.labels_left.remove(label);
            Ok(())
        })
    }

    /// Removes a label.
    ///
    /// # Errors
    /// `NotFound` if there is no such label.
    pub fn unlabel(&self, name: &str, label: &str) -> Result<()> {
        self.edit(name, |entry| {
            entry.unlabel(label)?;
            entry.labels_left.remove(label);
            Ok(())
        })
    }

    pub(super) fn edit(&self, name: &str, edit: impl FnOnce(&mut Entry<T>) -> Result<()>) -> Result<()> {
        self.entry(name, |_| Ok(()))?;
        self.change(name, edit).map_err(|e| e.within(format!("model `{name}`")))
    }

    /// Returns the active versions of all models.
    pub fn list(&self) -> Vec<Arc<Loaded<T>>> {
        self.entries.load().values().filter_map(|entry| entry.get(VersionSelector::Active).ok()).collect()
    }

    /// Returns the labels of a model and their versions.
    ///
    /// # Errors
    /// `NotFound` for an unknown model.
    pub fn labels(&self, name: &str) -> Result<BTreeMap<String, u64>> {
        self.entry(name, |entry| Ok(entry.labels.clone()))
    }

    /// Checks that at least one model answers.
    ///
    /// # Errors
    /// `NotReady` with the reason of each model, if none does.
    pub fn ready(&self) -> Result<()> {
        let entries = self.entries.load();
        let waiting = |(name, entry): (&String, &Entry<T>)| match entry.get(VersionSelector::Active) {
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

    /// Returns problems that do not prevent answers, one line each: an unreachable store, or a desired state that is not reached
    /// yet.
    pub fn troubles(&self) -> Vec<String> {
        let mut troubles: Vec<String> = self.store.trouble().into_iter().collect();
        for (name, entry) in self.entries.load().iter() {
            let desired = entry.desired_state.version.filter(|_| !entry.is_desired_active);
            if let Some(version) = desired {
                let now = entry.active.map_or("none".into(), |active| format!("version {active}"));
                let merge = if entry.active >= Some(version) { " or a later merge of it" } else { "" };
                troubles
                    .push(format!("model `{name}`: version {version}{merge} is desired in the store, {now} answers"));
            }
            match entry.active {
                Some(active) => troubles.extend(version_troubles(name, entry, active, self.options.follow)),
                None => {
                    troubles.extend(entry.refused.iter().map(|(version, refusal)| {
                        format!(
                            "model `{name}`: version {version} was rejected, no version answers: {}",
                            refusal.what.reason
                        )
                    }));
                    // The line about the desired version above contains the reason.
                    let silent = entry
                        .get(VersionSelector::Active)
                        .err()
                        .filter(|_| entry.refused.is_empty() && desired.is_none());
                    troubles.extend(silent.map(|why| format!("model `{name}` does not answer: {why}")));
                }
            }
            let left =
                entry.labels_left.iter().filter_map(|label| Some((label, entry.desired_state.labels.get(label)?)));
            troubles.extend(left.map(|(label, version)| {
                format!(
                    "model `{name}`: label `{label}` should point to version {version}, as desired in the store, \
                         and does not yet"
                )
            }));
            let unread = entry.wish_unread.iter();
            troubles.extend(unread.map(|why| {
                format!("model `{name}`: its desired state cannot be read, the last one read stays in effect: {why}")
            }));
        }
        troubles.extend(self.traffic_troubles());
        troubles
    }

    /// Returns every published or loaded version of a model, ascending.
    ///
    /// # Errors
    /// `NotFound` for an unknown model, `Io` if the store cannot be read.
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
                refused: entry.refused.get(&version).map(|r| r.reported(now)),
            };
            Ok(all.into_iter().map(state).collect())
        })
    }

    pub(super) fn report_active(&self, name: &str, loaded: &Loaded<T>, how: &str) {
        metrics::gauge!("sterling_model_version", "model" => name.to_owned()).set(loaded.version as f64);
        tracing::info!(model = name, version = loaded.version, digest = loaded.digest, "{how}");
    }
}

/// Returns one line per published version that should serve but was rejected, and per serving version that is missing or changed
/// in the store. The reasons name paths, which only readers of the model may see.
fn version_troubles<T>(name: &str, entry: &Entry<T>, active: u64, follows: bool) -> Vec<String> {
    let mut troubles = Vec::new();
    let why = format!("`GET /v1/models/{name}/versions` has the reason");
    for (version, refused) in &entry.refused {
        let kind = refused.what.kind.name();
        if entry.loaded.contains_key(version) {
            troubles.push(format!(
                "model `{name}`: version {version} is served from memory, its files in the store were rejected \
                 ({kind}): {why}"
            ));
        } else if follows && entry.desired_state.version.is_none() && *version > active {
            troubles.push(format!(
                "model `{name}`: version {version} was rejected ({kind}), version {active} answers: {why}"
            ));
        }
    }
    if entry.is_missing {
        troubles.push(format!(
            "model `{name}`: version {active} is served from memory, the store does not have it any more"
        ));
    }
    troubles
}
