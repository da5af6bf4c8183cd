//! Polling of the store, and loading of new versions.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::entry::{Entry, Rejection, listed};
use super::loaded::{Loaded, VersionRejection};
use super::loader::Declared;
use super::memory::Room;
use super::registry::Registry;
use sterling_core::error::{Error, Kind, Result, panic_message};
use sterling_core::locks::locked;
use sterling_core::tasks;
use sterling_kernels::priority::Background;
use sterling_snapshot::{Desired, PinnedVersion, Stamp};
use sterling_storage::objects::back_off;

/// Factor on the maximum retry delay of a version whose downloaded bytes are invalid.
const SLOWER: u32 = 10;

/// Number of loads after which a version that panics or hits another defect is no longer tried; a transient defect may be over by
/// then.
const BROKEN_LOADS: u32 = 3;

/// Version to load, or to activate if its bytes are in memory.
struct PendingVersion {
    version: u64,
    stamp: Stamp,
    why: LoadReason,
}

/// Reason to load a version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LoadReason {
    /// The version is the newest and will be activated.
    Newest,
    /// The version represents the desired one, since this revision of the desired state; for now only, if a later version that
    /// may represent it could not be read.
    Wished { revision: u64, is_for_now: bool },
    /// The desired state has this label for the version.
    Labelled(String),
    /// The version is the desired canary or shadow.
    Traffic,
    /// The bytes in memory differ from the published bytes.
    Replaced,
}

impl<T: Send + Sync> Registry<T> {
    /// Loads versions published since the last poll, and returns when that is done. A version that cannot be loaded is rejected
    /// with its reason, and the active version keeps serving.
    pub fn refresh(&self) {
        // If the store does not respond, its last known state is used.
        let _ = self.store.renew();
        let names = self.look();
        std::thread::scope(|scope| {
            for name in &names {
                if let Err(e) = tasks::LOAD.start_in(scope, move || self.update(name)) {
                    tracing::warn!(error = %e, "cannot start a thread that loads versions; retrying later");
                }
            }
        });
    }

    /// Polls the store on its own thread, as long as the registry lives. Loads run concurrently, so a slow load delays no other
    /// model. The first poll uses the known state of the store, so that an unreachable store does not delay startup if there is
    /// something to serve.
    ///
    /// # Errors
    /// `Io` if the thread cannot be started.
    pub fn watch(self: &Arc<Self>, every: Duration) -> Result<()>
    where
        T: 'static,
    {
        let registry = Arc::downgrade(self);
        let mut is_first = true;
        let look = move || {
            while let Some(registry) = registry.upgrade() {
                // If a poll panics, only that poll is lost; the next one runs as usual.
                let look = || {
                    if !std::mem::take(&mut is_first) {
                        let _ = registry.store.renew();
                    }
                    registry.look()
                };
                let names = catch_unwind(AssertUnwindSafe(look)).unwrap_or_default();
                for name in names {
                    let registry = registry.clone();
                    let update = move || registry.update(&name);
                    if let Err(e) = tasks::LOAD.start(update) {
                        tracing::warn!(error = %e, "cannot start a thread that loads versions; retrying later");
                    }
                }
                metrics::counter!("sterling_polls_total", "source" => "store").increment(1);
                drop(registry);
                std::thread::sleep(every);
            }
        };
        tasks::STORE.start(look).map(drop)
    }

    /// Returns the models that have something to load and no running load.
    fn look(&self) -> Vec<String> {
        self.judge_canaries();
        let mut names = match (&self.options.only, self.store.models()) {
            (Some(only), _) => vec![only.clone()],
            (None, Ok(models)) => models,
            (None, Err(e)) => {
                tracing::warn!(error = %e, "the store cannot be read");
                return Vec::new();
            }
        };
        self.forget(&names);
        for name in self.entries.load().keys().filter(|name| !names.contains(name)) {
            self.record_published(name, &[]);
        }
        names.iter().for_each(|name| self.receive(name));
        names.retain(|name| {
            let Some(published) = self.in_store(name) else { return false };
            self.record_published(name, &published);
            let gate = self.entries.load().get(name).map(|entry| entry.gate.clone());
            let is_free = gate.is_none_or(|gate| !matches!(gate.try_lock(), Err(std::sync::TryLockError::WouldBlock)));
            is_free && !self.due(name, &published).is_empty()
        });
        // From now on each model has an entry.
        names.iter().for_each(|name| drop(self.gate(name)));
        // The known state of a store that has not responded yet may be incomplete.
        if self.store.trouble().is_none() {
            self.is_read.store(true, Ordering::Release);
        }
        names
    }

    /// Records the desired state of a model in the store.
    fn receive(&self, name: &str) {
        if !self.options.follow {
            return;
        }
        match self.store.seen_desired(name) {
            Ok(desired_state) => {
                let is_known = |entry: &Entry<T>| entry.desired_state == desired_state && entry.wish_unread.is_none();
                let is_earlier = |entry: &Entry<T>| {
                    desired_state.revision < entry.desired_state.revision && entry.wish_unread.is_some()
                };
                let is_heard = |entry: &Entry<T>| is_known(entry) || is_earlier(entry);
                if !self.entries.load().get(name).map_or(desired_state == Desired::default(), is_heard) {
                    tracing::info!(
                        model = name,
                        revision = desired_state.revision,
                        desired = desired_state.reported(),
                        "desired state changed"
                    );
                    self.change(name, |entry| entry.receive(desired_state));
                }
            }
            Err(error) => {
                let why = Some(error.to_string());
                if self.entries.load().get(name).is_none_or(|entry| entry.wish_unread != why) {
                    tracing::warn!(model = name, %error, "desired state cannot be read; the last one read stays in effect");
                    self.change(name, |entry| entry.wish_unread = why);
                }
            }
        }
    }

    /// Forgets models without loaded or published versions.
    fn forget(&self, published: &[String]) {
        let is_gone = |name: &String, entry: &Entry<T>| entry.loaded.is_empty() && !published.contains(name);
        if self.entries.load().iter().any(|(name, entry)| is_gone(name, entry)) {
            let _guard = locked(&self.changing);
            let mut entries = BTreeMap::clone(&self.entries.load());
            entries.retain(|name, entry| !is_gone(name, entry));
            self.entries.store(Arc::new(entries));
        }
    }

    /// Returns the published versions of a model; `None` if the store cannot be read.
    fn in_store(&self, name: &str) -> Option<Vec<u64>> {
        let warned = |error: &Error| tracing::warn!(model = name, %error, "the store cannot be read");
        self.store.versions(name).inspect_err(warned).ok()
    }

    /// Records whether the active version is still in the store. Forgets rejections of versions that are no longer published, or
    /// that are again the same as in memory. Records of handled versions are retained, since the same bytes may return.
    fn record_published(&self, name: &str, published: &[u64]) {
        let entries = self.entries.load_full();
        let Some(entry) = entries.get(name) else { return };
        let is_mended = |version: &u64| {
            let loaded = entry.loaded.get(version).zip(self.store.stamp(name, *version));
            loaded.is_some_and(|(loaded, stamp)| self.is_current(loaded, stamp))
        };
        let is_over = |version: &u64| !published.contains(version) || is_mended(version);
        let over: Vec<u64> = entry.refused.keys().copied().filter(is_over).collect();
        if !over.is_empty() {
            self.change(name, |entry| entry.refused.retain(|version, _| !over.contains(version)));
        }
        let is_missing = entry.active.is_some_and(|active| !published.contains(&active));
        if is_missing != entry.is_missing {
            self.change(name, |entry| entry.is_missing = is_missing);
        }
    }

    /// Loads the due versions of a model, one after the other.
    fn update(&self, name: &str) {
        let gate = self.gate(name);
        let _gate = locked(&gate);
        let Some(published) = self.in_store(name) else { return };
        let mut is_found = false;
        let mut tried = BTreeSet::new();
        for due in self.due(name, &published) {
            // Once the newest version that can be loaded is in memory, older ones are not tried.
            let is_newest = due.why == LoadReason::Newest;
            if !(is_newest && is_found) && tried.insert((due.version, due.why.clone())) {
                is_found |= self.load_or_reject(name, &due) && is_newest;
            }
        }
    }

    fn gate(&self, name: &str) -> Arc<Mutex<()>> {
        self.change(name, |entry| entry.gate.clone())
    }

    /// Returns the versions to load now: the desired one or, if there is none, the newest down to the first that was handled
    /// before; then the targets of desired labels, the canary and shadow, and versions in memory whose bytes were replaced.
    fn due(&self, name: &str, published: &[u64]) -> Vec<PendingVersion> {
        let now = Instant::now();
        let entries = self.entries.load();
        let nothing = Entry::default();
        let entry = entries.get(name).unwrap_or(&nothing);
        let seen = |version: &u64| Some((*version, self.store.stamp(name, *version)?));
        let mut due = Vec::new();
        match entry.desired_state.version {
            Some(desired) if !entry.is_desired_active => {
                let (stands, is_certain) = self.store.successor(name, desired, published);
                let why = LoadReason::Wished { revision: entry.desired_state.revision, is_for_now: !is_certain };
                let found = seen(&stands).filter(|_| is_certain || entry.active.is_none());
                due.extend(found.map(|(version, stamp)| PendingVersion { version, stamp, why }));
            }
            None if self.options.follow || entry.active.is_none() => {
                let newest = published.iter().rev().filter_map(seen);
                let newer = newest.take_while(|(version, stamp)| !entry.is_settled(*version, *stamp));
                due.extend(newer.map(|(version, stamp)| PendingVersion { version, stamp, why: LoadReason::Newest }));
            }
            _ => {}
        }
        for label in &entry.labels_left {
            let labelled = entry.desired_state.labels.get(label).and_then(seen);
            due.extend(labelled.map(|(version, stamp)| PendingVersion {
                version,
                stamp,
                why: LoadReason::Labelled(label.clone()),
            }));
        }
        let parts = entry.desired_state.traffic.targets().filter_map(|(_, target)| entry.version_of(target));
        let missing = parts.filter(|version| !entry.loaded.contains_key(version)).filter_map(|version| seen(&version));
        due.extend(missing.map(|(version, stamp)| PendingVersion { version, stamp, why: LoadReason::Traffic }));
        let in_memory = published.iter().filter_map(|version| entry.loaded.get(version).zip(seen(version)));
        let replaced = in_memory.filter(|(loaded, (_, stamp))| !self.is_current(loaded, *stamp)).map(|(_, seen)| seen);
        due.extend(replaced.map(|(version, stamp)| PendingVersion { version, stamp, why: LoadReason::Replaced }));
        due.retain(|d| !entry.waits(d.version, d.stamp, now));
        due
    }

    /// Returns published versions up to a number, each with its digest if it is known or in its manifest.
    pub(super) fn published(&self, name: &str, most: u64) -> Vec<(u64, Stamp, Option<String>)> {
        let entries = self.entries.load();
        let known = |version, stamp| {
            let entry = entries.get(name)?;
            let settled = entry.settled_digest(version).filter(|_| entry.is_settled(version, stamp));
            let loaded = entry.loaded.get(&version).filter(|l| l.stamp == Some(stamp)).map(|l| l.digest());
            settled.or(loaded).map(str::to_owned)
        };
        let declared = |version| self.declared(name, version).ok().map(|declared| declared.digest);
        let versions = self.store.versions(name).unwrap_or_default().into_iter().filter(|v| *v <= most);
        versions
            .filter_map(|version| {
                let stamp = self.store.stamp(name, version)?;
                Some((version, stamp, known(version, stamp).or_else(|| declared(version))))
            })
            .collect()
    }

    /// Reads the manifest of a published version.
    fn declared(&self, name: &str, version: u64) -> Result<Declared> {
        self.loader.declared(&self.store.outline(name, version)?)
    }

    /// Loads a due version or rejects it. Returns whether the version was loaded.
    fn load_or_reject(&self, name: &str, due: &PendingVersion) -> bool {
        if !matches!(due.why, LoadReason::Wished { .. } | LoadReason::Labelled(_) | LoadReason::Traffic)
            && self.is_back(name, due)
        {
            let settled = self.published(name, due.version);
            self.change(name, |entry| entry.settle(settled));
            return true;
        }
        let result = self
            .in_memory(name, due.version, Some(due.stamp))
            .map_or_else(|| self.ensure_local(name, due.version, due.stamp, Background::Steady), Ok);
        let Ok(loaded) = result else { return false };
        let settled = match due.why {
            // Loading a desired version marks all published versions as handled; loading a labelled one, a canary or a
            // shadow none.
            LoadReason::Wished { is_for_now: false, .. } => self.published(name, u64::MAX),
            LoadReason::Wished { .. } | LoadReason::Labelled(_) | LoadReason::Traffic => Vec::new(),
            LoadReason::Newest | LoadReason::Replaced => self.published(name, due.version),
        };
        let is_active = self.change(name, |entry| {
            let is_to_answer = match &due.why {
                LoadReason::Newest => entry.is_new_digest(&loaded),
                LoadReason::Wished { revision, .. } => {
                    !entry.is_desired_active && entry.desired_state.revision == *revision
                }
                LoadReason::Labelled(_) | LoadReason::Traffic | LoadReason::Replaced => false,
            };
            entry.insert(loaded.clone());
            if is_to_answer {
                entry.activate(due.version);
                entry.is_desired_active = !matches!(due.why, LoadReason::Wished { is_for_now: true, .. });
                // The active version represents the desired one (it may be a later merge). An earlier poll that could not read
                // the active version may have rejected the desired one, because the updates after it are truncated.
                if let Some(desired) = entry.desired_state.version {
                    entry.refused.remove(&desired);
                }
            }
            if let LoadReason::Labelled(label) = &due.why
                && entry.desired_state.labels.get(label) == Some(&due.version)
                && entry.labels_left.remove(label)
            {
                // Cannot fail: the version is in memory.
                let _ = entry.label(label, due.version);
            }
            entry.settle(settled);
            is_to_answer
        });
        if is_active {
            self.report_active(name, &loaded, "loaded and activated");
        }
        true
    }

    /// Returns whether a version that is not in memory was handled before with the same bytes in other files.
    fn is_back(&self, name: &str, due: &PendingVersion) -> bool {
        let entries = self.entries.load();
        let Some(entry) = entries.get(name).filter(|e| !e.loaded.contains_key(&due.version)) else { return false };
        entry
            .settled_digest(due.version)
            .is_some_and(|digest| self.declared(name, due.version).is_ok_and(|declared| declared.digest == digest))
    }

    /// Returns the version as it is published, loading it if necessary. A version in memory that is no longer published is
    /// returned as well.
    pub(super) fn current(&self, name: &str, version: u64, background: Background) -> Result<Arc<Loaded<T>>> {
        let stamp = self.store.stamp(name, version);
        if let Some(loaded) = self.in_memory(name, version, stamp) {
            return Ok(loaded);
        }
        // Makes a version visible that was published a moment ago.
        let _ = self.store.renew();
        let stamp = self.store.stamp(name, version);
        let known = self.store.versions(name)?;
        let Some(stamp) = stamp else {
            self.entry(name, |_| Ok(()))?;
            return Err(Error::not_found(format!(
                "version {version} of model `{name}` is not published; there are: {}",
                listed(known)
            )));
        };
        let gate = self.gate(name);
        let _gate = locked(&gate);
        match self.in_memory(name, version, Some(stamp)) {
            Some(loaded) => Ok(loaded),
            None => self.ensure_local(name, version, stamp, background),
        }
    }

    fn in_memory(&self, name: &str, version: u64, stamp: Option<Stamp>) -> Option<Arc<Loaded<T>>> {
        let entries = self.entries.load();
        let loaded = entries.get(name)?.loaded.get(&version)?;
        stamp.is_none_or(|stamp| self.is_current(loaded, stamp)).then(|| loaded.clone())
    }

    /// Returns whether the bytes in memory represent the version's present files.
    fn is_current(&self, loaded: &Loaded<T>, stamp: Stamp) -> bool {
        let folded = || self.store.folded(&loaded.name, loaded.version);
        // If the store cannot be read, the version in memory stays.
        loaded.stamp == Some(stamp) && !folded().is_ok_and(|fold| fold != loaded.fold)
    }

    /// Loads a version. Every failure, including a panic, is a rejection.
    fn ensure_local(&self, name: &str, version: u64, stamp: Stamp, background: Background) -> Result<Arc<Loaded<T>>> {
        let _permit = self.permits.take();
        self.change(name, |entry| entry.loading = Some(version));
        sterling_telemetry::begin_model(name);
        let start = Instant::now();
        let outcome =
            catch_unwind(AssertUnwindSafe(|| self.loaded(name, version, stamp, background))).unwrap_or_else(|panic| {
                Err(Error::internal(format!("the load panicked: {}; this is a defect", panic_message(&*panic))))
            });
        let label = if outcome.is_ok() { "loaded" } else { "refused" };
        metrics::counter!("sterling_loads_total", "model" => name.to_owned(), "outcome" => label).increment(1);
        match &outcome {
            Ok(loaded) => {
                let seconds = start.elapsed().as_secs_f64();
                tracing::info!(model = name, version, digest = loaded.digest, seconds, "loaded");
                self.change(name, |entry| entry.loading = None);
            }
            Err(e) => self.refuse(name, version, stamp, e),
        }
        outcome
    }

    fn loaded(&self, name: &str, version: u64, stamp: Stamp, background: Background) -> Result<Arc<Loaded<T>>> {
        let folder = self.store.folder(name, version);
        let declared = self.declared(name, version)?;
        if (declared.name.as_str(), declared.version) != (name, version) {
            return Err(Error::corrupt(format!(
                "{}: its manifest says model `{}` version {}, expected `{name}` version {version}: a version is \
                 published under its name and number, expected no copy of its folder",
                folder.display(),
                declared.name,
                declared.version
            )));
        }
        let room = self.room(name, &declared)?;
        let (content, held) = self.read(name, version, background)?;
        let Declared { name, version, digest, .. } = declared;
        if self.store.stamp(&name, version) != Some(stamp) {
            return Err(Error::not_ready(format!("{}: the folder changed while it was loaded", folder.display())));
        }
        let (stamp, fold) = (Some(stamp), held.fold());
        let loaded = Loaded { content, name, version, digest, stamp, fold, room: Some(room), _held: Some(held) };
        if let Some(warm) = &self.warm {
            warm(&loaded).map_err(|e| e.within(format!("{}: warm-up", folder.display())))?;
        }
        Ok(Arc::new(loaded))
    }

    /// Reads the content of a version, and returns it with the handle of its files. A damaged copy or checkpoint is replaced by
    /// its original.
    fn read(&self, name: &str, version: u64, background: Background) -> Result<(Arc<T>, PinnedVersion)> {
        let mut held = match self.store.ensure_local(name, version) {
            // If the disk is full, the previously active version is dropped, as for memory.
            Err(e) if e.kind() == Kind::NoSpace => {
                self.change(name, Entry::drop_previous);
                self.store.ensure_local(name, version)?
            }
            other => other?,
        };
        let mut content = self.loader.load(held.folder(), background);
        let mut is_last = false;
        while !is_last
            && content.as_ref().is_err_and(|e| e.kind() == Kind::Corrupt)
            && self.store.discard(name, version)?
        {
            // A new download that is corrupt too is not downloaded again.
            is_last = held.fold().is_none();
            held = self.store.ensure_local(name, version)?;
            content = self.loader.load(held.folder(), background);
        }
        Ok((Arc::new(content?), held))
    }

    /// Checks that memory suffices for another version of the size of `like`. Drops the previously active version if
    /// necessary.
    ///
    /// # Errors
    /// `NoSpace` with the free memory and the loaded versions.
    pub fn check_room(&self, like: &Loaded<T>) -> Result<()> {
        let (name, digest) = (like.name.clone(), like.digest.clone());
        let declared = Declared { name, version: like.version, digest, memory_bytes: like.memory_bytes() };
        self.room(&like.name, &declared)
            .map(drop)
            .map_err(|e| e.within("cannot reserve memory for another version of this size"))
    }

    /// Reserves memory for a version; drops the previously active version if necessary.
    fn room(&self, name: &str, declared: &Declared) -> Result<Room> {
        let need = declared.memory_bytes;
        if let Some(room) = self.memory.take(need) {
            return Ok(room);
        }
        self.change(name, Entry::drop_previous);
        self.memory.take(need).ok_or_else(|| {
            let entries = self.entries.load();
            let loaded = entries.values().flat_map(|e| e.loaded.values());
            let taken = loaded.map(|l| format!("{} version {} ({} MB)", l.name, l.version, l.memory_bytes() >> 20));
            Error::no_space(format!(
                "{name} version {}: needs {} MB of memory, {} of {} MB are free; loaded: {}",
                declared.version,
                need.div_ceil(1 << 20),
                self.memory.free() >> 20,
                self.memory.limit() >> 20,
                listed(taken)
            ))
        })
    }

    /// Returns the initial and maximum retry delay after a failure; `None` if only a change of the files helps. Downloaded files
    /// may be damaged or missing temporarily, but downloading them again is expensive.
    fn retry(&self, kind: Kind, broken: u32) -> Option<(Duration, Duration)> {
        let (first, most) = self.options.retry;
        match kind {
            kind if kind.is_transient() => Some((first, most)),
            Kind::Internal if broken < BROKEN_LOADS => Some((first, most)),
            Kind::Corrupt | Kind::NotFound if self.store.is_bucket() => Some((first, most.saturating_mul(SLOWER))),
            _ => None,
        }
    }

    fn refuse(&self, name: &str, version: u64, stamp: Stamp, error: &Error) {
        self.change(name, |entry| {
            entry.loading = None;
            let before = entry.refused.get(&version).filter(|r| r.stamp == stamp);
            let (attempts, broken) = before.map_or((0, 0), |r| (r.what.attempts, r.broken));
            let is_broken = error.kind() == Kind::Internal;
            let (attempts, broken) = (attempts.saturating_add(1), broken + u32::from(is_broken));
            let wait = self.retry(error.kind(), broken).map(|retry| back_off(retry, attempts));
            let what = VersionRejection { kind: error.kind(), reason: error.to_string(), attempts, retry_in: wait };
            tracing::error!(model = name, version, %error, attempts, retry_in = ?wait, "version rejected; the active version keeps serving");
            let again = wait.map(|wait| Instant::now() + wait);
            entry.refused.insert(version, Rejection { what, stamp, again, broken });
        });
    }
}
