//! The registry as those see it who ask: which version answers, and what operators decide.

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
use sterling_core::request::Which;
use sterling_kernels::priority::Background;
use sterling_snapshot::{Store, check_name};

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
    /// How often canaries are judged at most.
    pub judged_every: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let retry = (Duration::from_secs(1), Duration::from_secs(60));
        let judged_every = Duration::from_secs(5);
        Options { only: None, memory_bytes: None, loads: 2, follow: true, retry, judged_every }
    }
}

/// What a version must go through before it may answer.
pub type Warm<T> = Arc<dyn Fn(&Loaded<T>) -> Result<()> + Send + Sync>;

type Entries<T> = BTreeMap<String, Entry<T>>;

/// The models of a store.
pub struct Registry<T = Live> {
    pub(super) store: Store,
    pub(super) loader: Box<dyn Loader<T>>,
    pub(super) options: Options,
    pub(super) warm: Option<Warm<T>>,
    pub(super) memory: Memory,
    pub(super) permits: Permits,
    pub(super) entries: ArcSwap<Entries<T>>,
    /// Whether the entries are those of a store that was read; before, there may be models of which nothing is known.
    pub(super) is_read: AtomicBool,
    /// Held for moments, by who changes the entries.
    pub(super) changing: Mutex<()>,
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
            is_read: AtomicBool::default(),
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
    pub(super) fn change<R>(&self, name: &str, change: impl FnOnce(&mut Entry<T>) -> R) -> R {
        let guard = locked(&self.changing);
        let mut entries = Entries::clone(&self.entries.load());
        let entry = entries.entry(name.to_owned()).or_default();
        let result = change(entry);
        entry.divide();
        let before = self.entries.swap(Arc::new(entries));
        // What goes out of memory takes its time, and nobody waits for it.
        drop(guard);
        drop(before);
        result
    }

    /// What is known of a model.
    ///
    /// # Errors
    /// `NotFound` naming the models that there are; `NotReady` while it is not known which.
    pub(super) fn entry<R>(&self, name: &str, read: impl FnOnce(&Entry<T>) -> Result<R>) -> Result<R> {
        // Asked first: then the entries are at least those of when it was so.
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
        let loaded = self.current(name, version, Background::Steady)?;
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
        let loaded = self.current(name, version, Background::Steady)?;
        let settled = self.published(name, u64::MAX);
        self.change(name, |entry| {
            entry.insert(loaded.clone());
            entry.activate(version);
            // This server's operator decides until something else is wished.
            entry.is_wish_done = true;
            entry.settle(settled);
        });
        self.tell_active(name, &loaded, "activated");
        Ok(loaded)
    }

    /// Lets a version answer unpinned requests in the place of the one `before`, where that one still does. Nobody waits for it:
    /// it is loaded in the background.
    ///
    /// # Errors
    /// `Conflict` where another one answers by now; as [`Registry::load`].
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
            Some(active) if active == before => self.tell_active(name, &loaded, "loaded and activated"),
            Some(active) if active == version => {}
            other => {
                let other = other.map_or("none".into(), |other| format!("version {other}"));
                return Err(Error::conflict(format!("{other} is active by now, expected version {before}")));
            }
        }
        Ok(loaded)
    }

    /// Puts what stands for a version now in its place, where it is in memory. Nobody waits for it: it is loaded in the background.
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

    /// The versions of a model that are in memory, ascending.
    pub fn all_in_memory(&self, name: &str) -> Vec<Arc<Loaded<T>>> {
        let entries = self.entries.load();
        entries.get(name).map_or_else(Vec::new, |entry| entry.loaded.values().cloned().collect())
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
        self.edit(name, |entry| {
            entry.label(label, version)?;
            entry.labels_left.remove(label);
            Ok(())
        })
    }

    /// Takes a label away.
    ///
    /// # Errors
    /// `NotFound` where there is none of this name.
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

    /// What is wrong though models answer, a line each: the store does not, or something is wished of it that is not so yet.
    pub fn troubles(&self) -> Vec<String> {
        let mut troubles: Vec<String> = self.store.trouble().into_iter().collect();
        for (name, entry) in self.entries.load().iter() {
            let wished = entry.wish.version.filter(|_| !entry.is_wish_done);
            if let Some(version) = wished {
                let now = entry.active.map_or("none".into(), |active| format!("version {active}"));
                troubles.push(format!("model `{name}`: version {version} is wished in the store, {now} answers"));
            }
            match entry.active {
                Some(active) => troubles.extend(version_troubles(name, entry, active, self.options.follow)),
                None => {
                    troubles.extend(entry.refused.iter().map(|(version, refusal)| {
                        format!("model `{name}`: version {version} is refused, none answers: {}", refusal.what.reason)
                    }));
                    // The wish above says why, too.
                    let silent =
                        entry.get(Which::Active).err().filter(|_| entry.refused.is_empty() && wished.is_none());
                    troubles.extend(silent.map(|why| format!("model `{name}` does not answer: {why}")));
                }
            }
            let left = entry.labels_left.iter().filter_map(|label| Some((label, entry.wish.labels.get(label)?)));
            troubles.extend(left.map(|(label, version)| {
                format!("model `{name}`: label `{label}` is wished for version {version} in the store, and does not point there yet")
            }));
            let unread = entry.wish_unread.iter();
            troubles.extend(
                unread
                    .map(|why| format!("model `{name}`: what is wished cannot be read, what was wished stays: {why}")),
            );
        }
        troubles.extend(self.traffic_troubles());
        troubles
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

    pub(super) fn tell_active(&self, name: &str, loaded: &Loaded<T>, how: &str) {
        metrics::gauge!("sterling_model_version", "model" => name.to_owned()).set(loaded.version as f64);
        tracing::info!(model = name, version = loaded.version, digest = loaded.digest, "{how}");
    }
}

/// Versions that the store has and that are not taken in though they would serve, and served ones that it has no more or in
/// another state, a line each. The reasons name paths, which are for those who may read the model.
fn version_troubles<T>(name: &str, entry: &Entry<T>, active: u64, follows: bool) -> Vec<String> {
    let mut troubles = Vec::new();
    let why = format!("`GET /v1/models/{name}/versions` tells why");
    for (version, refused) in &entry.refused {
        let kind = refused.what.kind.name();
        if entry.loaded.contains_key(version) {
            troubles.push(format!(
                "model `{name}`: version {version} is served from memory, what the store has of it is refused ({kind}): {why}"
            ));
        } else if follows && entry.wish.version.is_none() && *version > active {
            troubles.push(format!(
                "model `{name}`: version {version} is refused ({kind}), version {active} answers: {why}"
            ));
        }
    }
    if entry.is_missing {
        troubles
            .push(format!("model `{name}`: version {active} is served from memory alone, the store has it no more"));
    }
    troubles
}
