//! Update log of a model, and the threads that apply it to loaded versions.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rayon::prelude::*;

use super::calls::{Call, Calls};
use super::early::EarlyEmbeddings;
use super::embed::Embedder;
use super::merges::MergeUnderWay;
use super::state::{Fresh, IncompatibleUpdate};
use super::update::{CallAnswer, Put, Update};
use crate::registry::{Declared, Loader, Snapshots};
use crate::view::{CurrentView, Live, View};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;
use sterling_journal::{Append, Done, Follower, Journal, Journals, Record, Topic};
use sterling_kernels::priority::{self, Background};
use sterling_snapshot::{Snapshot, check_name};

/// Maximum number of updates per batch, first for visible versions, then for versions that are not visible yet, whose
/// large batches use all cores.
const TOGETHER_MAX: usize = 1024;
const TOGETHER_MAX_UNSEEN: usize = 16_384;
/// Maximum bytes of records per batch.
const TOGETHER_BYTES: usize = 64 << 20;
/// Records decoded per thread at a time.
const DECODED: usize = 1024;
/// Timeout of reading durable records.
const SILENCE: Duration = Duration::from_secs(10);
/// Time after which the thread of a released version ends.
const LINGER: Duration = Duration::from_millis(250);
/// Number of panics on the same updates after which a version stops applying updates: a transient fault does not repeat.
const PANICS_MAX: u32 = 3;
/// Interval between log lines about the same stall.
const STALL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Updates of one model.
pub struct ModelUpdates {
    journal: Box<dyn Journal>,
    calls: Mutex<Calls>,
    /// Folder of the calls whose records the journal has truncated.
    folder: Option<PathBuf>,
    /// Last truncated position; the calls up to this position are stored in `folder`.
    released: AtomicU64,
    /// Embeddings computed before their updates were durable.
    early: Arc<EarlyEmbeddings>,
    merging: Mutex<Option<MergeUnderWay>>,
    /// Error kind of the last merge, if it failed.
    unmerged: Mutex<Option<Kind>>,
    /// Last position that a published version contains, among the versions that this server has loaded or tried to load.
    published: AtomicU64,
}

impl ModelUpdates {
    /// Opens the updates of a journal, with the calls up to position `after`. Calls whose records are truncated are stored in
    /// `folder`.
    ///
    /// # Errors
    /// `Corrupt` if the stored calls cannot be read; as [`Journal::follow`].
    pub fn open(journal: Box<dyn Journal>, folder: Option<PathBuf>, after: u64) -> Result<Self> {
        let (first, until) = (journal.first(), after.min(journal.last()));
        let calls = folder.as_deref().map(Calls::read).transpose()?.unwrap_or_default();
        let feed = ModelUpdates {
            journal,
            calls: Mutex::new(calls),
            folder,
            released: AtomicU64::new(0),
            early: Arc::default(),
            merging: Mutex::default(),
            unmerged: Mutex::default(),
            published: AtomicU64::new(0),
        };
        // Versions read the journal from their own positions on and do not see earlier calls.
        if first <= until {
            let mut records = feed.journal.follow(first - 1)?;
            loop {
                let record = records.next(SILENCE)?;
                let record = record.ok_or_else(|| Error::unavailable("the journal returned no record in time"))?;
                feed.note(record.position, &Update::decode(&record.payload)?);
                if record.position >= until {
                    break;
                }
            }
        }
        Ok(feed)
    }

    /// Returns the position of the last durable update.
    pub fn last(&self) -> u64 {
        self.journal.last()
    }

    /// Returns the position of the first retained update, or of the next update if none is retained.
    pub fn first(&self) -> u64 {
        self.journal.first()
    }

    /// Returns whether other servers append too, so that later updates than [`ModelUpdates::last`] may exist.
    pub fn has_others(&self) -> bool {
        self.journal.has_others()
    }

    /// Returns the failure of the journal, if any.
    pub fn trouble(&self) -> Option<String> {
        self.journal.trouble().or_else(|| self.check_end().err().map(|e| e.to_string()))
    }

    /// Records that a published version contains the updates up to a position.
    pub fn note_published(&self, position: u64) {
        self.published.fetch_max(position, Ordering::Relaxed);
    }

    /// Rejects a journal that ends before a published version, as a restored backup does: new updates would get positions that
    /// the version already contains, and the version would ignore them.
    ///
    /// # Errors
    /// `Unavailable` with both positions and the remedies.
    fn check_end(&self) -> Result<()> {
        let (last, published) = (self.journal.last(), self.published.load(Ordering::Relaxed));
        if last >= published {
            return Ok(());
        }
        Err(Error::unavailable(format!(
            "updates are not accepted: the journal ends at position {last}, but a published version contains updates up to \
             position {published}; restore the journal of that version, or remove the version from the store and restart"
        )))
    }

    /// Returns a condition that operators should look at although updates are accepted and applied.
    pub fn warning(&self) -> Option<String> {
        self.journal.warning()
    }

    /// Returns the approximate bytes of the updates after a position.
    pub fn bytes_after(&self, position: u64) -> u64 {
        self.journal.bytes_after(position)
    }

    /// Returns the running merge on this server.
    pub fn merging(&self) -> Option<MergeUnderWay> {
        *locked(&self.merging)
    }

    /// Marks the start of a merge.
    pub fn begin_merge(&self) {
        *locked(&self.merging) = Some(MergeUnderWay { since: Instant::now(), done: 0.0 });
    }

    /// Sets the progress of the running merge, a share of its steps.
    pub fn report_merge(&self, done: f64) {
        locked(&self.merging).iter_mut().for_each(|merging| merging.done = done);
    }

    /// Marks the end of a merge.
    pub fn end_merge(&self) {
        *locked(&self.merging) = None;
    }

    /// Returns the error kind of the last merge attempt on this server; `None` if it succeeded.
    pub fn unmerged(&self) -> Option<Kind> {
        *locked(&self.unmerged)
    }

    /// Records the outcome of a merge.
    pub fn note_merge(&self, failed: Option<Kind>) {
        *locked(&self.unmerged) = failed;
    }

    /// Appends updates. Calls `done`, which must not block, when the updates are durable.
    pub fn append(&self, updates: &[Update], expected: Option<u64>, done: Done) {
        let records = self.check_end().and_then(|()| updates.iter().map(Update::encode).collect());
        match records {
            Ok(records) => self.journal.append(Append { records, expected }, done),
            Err(e) => done(Err(e)),
        }
    }

    /// Embeds upserted items for the snapshot of a view before their updates are appended, since an item that cannot be embedded
    /// must not be acknowledged. Returns the indexes of failed items with their errors. The embeddings are retained until the
    /// updates are applied. Applies to models with an item tower: other embeddings were validated on arrival.
    ///
    /// # Errors
    /// If the tower's tables do not respond now, or memory is exhausted.
    pub fn embed<'u>(&self, view: &View, updates: impl Iterator<Item = &'u Update>) -> Result<Vec<(usize, Error)>> {
        let main = view.main();
        let put = |(place, update): (usize, &'u Update)| match update {
            Update::Put(put) => Some((place, put)),
            _ => None,
        };
        let puts: Vec<(usize, &Put)> = updates.enumerate().filter_map(put).collect();
        let embedded = Embedder::new(main.clone()).embed(&puts.iter().map(|(_, put)| *put).collect::<Vec<&Put>>());
        let (mut refused, mut made) = (Vec::new(), Vec::new());
        for ((place, put), embedded) in puts.into_iter().zip(embedded) {
            match embedded {
                Ok(embedded) => made.push((put, embedded)),
                Err(e) if e.kind().is_transient() => return Err(e),
                Err(e) => refused.push((place, e)),
            }
        }
        self.early.keep(main, made);
        Ok(refused)
    }

    /// Truncates the updates up to a position; stores the calls among them.
    ///
    /// # Errors
    /// `Io` if the calls cannot be stored; as [`Journal::release`].
    pub fn release(&self, position: u64) -> Result<()> {
        if position <= self.released.load(Ordering::Relaxed) {
            return Ok(());
        }
        let retained = self.keep_calls();
        if retained.as_ref().is_err_and(|e| e.kind() != Kind::NoSpace) {
            return retained;
        }
        self.journal.release(position)?;
        // On a full disk, truncation frees space for the calls. If the server stops before they are written, they are
        // lost.
        if retained.is_err() {
            self.keep_calls()?;
        }
        self.released.store(position, Ordering::Relaxed);
        Ok(())
    }

    /// Writes the known calls to the folder; the lock is not held during the write.
    fn keep_calls(&self) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let text = self.calls().text()?;
        Calls::write(&text, folder)
    }

    /// Begins a call with an idempotency key; returns the earlier outcome if the same call was completed.
    ///
    /// # Errors
    /// `Conflict` if the key belongs to another call, or to a call that is running.
    pub fn begin(&self, key: &str, digest: u64) -> Result<Option<Call>> {
        self.calls().begin(key, digest)
    }

    /// Ends a call. The call may be repeated if it had no effect.
    pub fn end(&self, key: &str, made: Option<Call>) {
        self.calls().end(key, made);
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        // A panic can at most leave one key unrecorded.
        locked(&self.calls)
    }

    /// Records the call that an update belongs to.
    fn note(&self, position: u64, update: &Update) {
        let (key, digest, count, answer) = match update {
            Update::Call { key, digest, count } => (key, *digest, *count, CallAnswer::default()),
            Update::AnsweredCall { key, digest, count, answer } => (key, *digest, *count, answer.clone()),
            Update::Put(_) | Update::Set { .. } | Update::Delete { .. } => return,
        };
        self.calls().remember(key, Call { digest, count, position, answer });
    }
}

/// Updates of all models of a server, with one journal per model or shard.
pub struct UpdateFeeds {
    journals: Box<dyn Journals>,
    /// Open feeds. The map is lock-free, because every answer reads it.
    open: ArcSwap<BTreeMap<Topic, Arc<ModelUpdates>>>,
    /// One lock per feed, held while the feed is opened: opening is slow if a broker is unreachable or a journal is large.
    opening: Mutex<BTreeMap<Topic, Arc<Mutex<()>>>>,
}

impl UpdateFeeds {
    /// Creates feeds over these journals.
    pub fn new(journals: impl Journals + 'static) -> Self {
        UpdateFeeds { journals: Box::new(journals), open: ArcSwap::default(), opening: Mutex::default() }
    }

    /// Returns whether other servers write and read the same updates.
    pub fn are_shared(&self) -> bool {
        self.journals.are_shared()
    }

    /// Returns the feed of a model or shard of which a version was loaded.
    pub fn of(&self, topic: &Topic) -> Option<Arc<ModelUpdates>> {
        self.open.load().get(topic).cloned()
    }

    /// Opens the feed of a model or shard. A new journal begins after position `after`.
    ///
    /// # Errors
    /// As [`Journals::open`] and [`ModelUpdates::open`].
    pub fn open(&self, topic: &Topic, after: u64) -> Result<Arc<ModelUpdates>> {
        check_name("model name", &topic.model)?;
        may_block();
        let opening = locked(&self.opening).entry(topic.clone()).or_default().clone();
        let _opening = locked(&opening);
        if let Some(feed) = self.of(topic) {
            return Ok(feed);
        }
        let (journal, folder) = (self.journals.open(topic, after)?, self.journals.folder(topic));
        let feed = Arc::new(ModelUpdates::open(journal, folder, after)?);
        self.open.rcu(|open| {
            let mut open = BTreeMap::clone(open);
            open.insert(topic.clone(), feed.clone());
            open
        });
        Ok(feed)
    }
}

/// Loads snapshots that apply the updates of their model.
pub struct Updating {
    /// Loader of the snapshots.
    pub snapshots: Snapshots,
    /// Updates of all models; `None` if the server accepts no updates.
    pub feeds: Option<Arc<UpdateFeeds>>,
    /// True if attributes change in place ([`Fresh::in_place`]).
    pub in_place: bool,
}

impl Loader<Live> for Updating {
    fn declared(&self, folder: &Path) -> Result<Declared> {
        self.snapshots.declared(folder)
    }

    fn load(&self, folder: &Path, background: Background) -> Result<Live> {
        let live = self.snapshots.load(folder, background)?;
        let main = live.view().main().clone();
        let Some(feeds) = &self.feeds else { return Ok(live) };
        let (topic, position) = (main.manifest.topic(), main.manifest.position);
        let feed = feeds.open(&topic, position)?;
        feed.note_published(position);
        let following = Following::new(feed, main, self.in_place);
        let followed = following.and_then(|following| follow(following, &live));
        followed.map_err(|e| e.within(format!("updates of {topic} after position {position}")))?;
        Ok(live)
    }
}

/// Applies all updates of the journal to a snapshot, and keeps applying new ones on its own thread.
fn follow(mut following: Following, live: &Live) -> Result<()> {
    following.catch_up()?;
    following.is_unseen = false;
    live.warn(following.misfits.warning());
    live.show(following.fresh.view()?);
    let shown = live.shared();
    priority::alone(&tasks::UPDATES)?.spawn(move || following.run(&shown));
    Ok(())
}

/// Function that applies updates and returns those that do not fit.
type Apply = fn(&mut Fresh, &[Update]) -> Result<Vec<IncompatibleUpdate>>;

/// Version that applies the updates of its journal.
struct Following {
    name: String,
    main: Arc<Snapshot>,
    /// True if attributes change in place.
    in_place: bool,
    feed: Arc<ModelUpdates>,
    records: Box<dyn Follower>,
    fresh: Fresh,
    /// Updates that were read but not applied; the first update follows the position of `fresh`.
    pending: Vec<Update>,
    /// Error that prevented reading further updates.
    failed: Option<Error>,
    /// True if `fresh` contains updates that no published view contains yet.
    is_unseen: bool,
    /// True if a panic has left the other fields inconsistent.
    is_broken: bool,
    misfits: IncompatibleUpdates,
    /// Reason for a stall of updates, and the time of its last log line.
    waits: Option<(Instant, String)>,
}

/// Counts of updates after the version's snapshot that did not fit the version.
#[derive(Default)]
struct IncompatibleUpdates {
    /// Number of updates that were not applied.
    whole: u64,
    /// Number of attributes that were removed because the new value did not fit the column.
    attributes: u64,
    last: Option<IncompatibleUpdate>,
}

impl IncompatibleUpdates {
    /// Returns a message for operators, if updates did not fit.
    fn warning(&self) -> Option<String> {
        let IncompatibleUpdates { whole, attributes, last } = self;
        let IncompatibleUpdate { position, error, .. } = last.as_ref()?;
        Some(format!(
            "{whole} updates were not applied and {attributes} attributes of updates are missing, because they do not fit this version; the last one, at position {position}: {error}; put the items again, or publish a version with them"
        ))
    }
}

impl Following {
    /// Creates the version as it was published, with no later updates.
    fn new(feed: Arc<ModelUpdates>, main: Arc<Snapshot>, in_place: bool) -> Result<Self> {
        let position = main.manifest.position;
        let updates = feed.last().saturating_sub(position);
        if updates > 0 {
            let (model, version) = (&main.manifest.name, main.manifest.version);
            tracing::info!(%model, version, position, updates, "applying the updates that are newer than the version");
        }
        let fresh = Fresh::new(main.clone(), position);
        let fresh = if in_place { fresh.in_place() } else { fresh }.taking(feed.early.clone());
        Ok(Following {
            records: feed.journal.follow(fresh.position())?,
            name: main.manifest.name.clone(),
            main,
            in_place,
            fresh,
            feed,
            pending: Vec::new(),
            failed: None,
            is_unseen: false,
            is_broken: false,
            misfits: IncompatibleUpdates::default(),
            waits: None,
        })
    }

    /// Applies all durable updates; no view is shown in between.
    fn catch_up(&mut self) -> Result<()> {
        while self.fresh.position() < self.feed.last() {
            self.advance(LINGER, TOGETHER_MAX_UNSEEN, Fresh::catch_up)?;
        }
        self.fresh.caught_up()
    }

    fn run(&mut self, shown: &Weak<CurrentView>) {
        // Number of panics, and the last position of the updates that may have caused them.
        let (mut panics, mut suspect) = (0, 0);
        loop {
            // After a panic, the current view keeps answering until the updates are reapplied to the published version.
            let step = catch_unwind(AssertUnwindSafe(|| self.step(shown))).unwrap_or_else(|_| {
                self.is_broken = true;
                (panics, suspect) = (panics + 1, self.feed.last());
                let what = "the task that applies updates panicked; this is a defect";
                Err(if panics < PANICS_MAX { Error::unavailable(what) } else { Error::internal(what) })
            });
            match step {
                Ok(true) => {
                    if self.fresh.position() >= suspect {
                        panics = 0;
                    }
                    self.waits(None, shown);
                }
                Ok(false) => return,
                Err(e) if e.kind().is_transient() => {
                    self.waits(Some(e), shown);
                    std::thread::sleep(LINGER);
                }
                // The view shown last keeps answering.
                Err(e) => {
                    tracing::error!(model = self.name, error = %e, "updates are no longer applied; the current view stays");
                    shown.upgrade().iter().for_each(|shown| shown.stall(&e));
                    return;
                }
            }
        }
    }

    /// Records why updates stall (`None` if they do not), and logs changes of the reason.
    fn waits(&mut self, why: Option<Error>, shown: &Weak<CurrentView>) {
        let now = why.map(|why| why.to_string());
        let before = self.waits.as_ref().map(|(_, why)| why);
        if now.as_ref() == before && self.waits.as_ref().is_none_or(|(at, _)| at.elapsed() < STALL_LOG_INTERVAL) {
            return;
        }
        match &now {
            Some(error) => tracing::warn!(model = self.name, error, "updates cannot be applied; retrying"),
            None => tracing::info!(model = self.name, "updates are applied again"),
        }
        self.waits = now.map(|why| (Instant::now(), why));
        shown.upgrade().iter().for_each(|shown| shown.warn(self.warning()));
    }

    /// Returns a message for operators about the updates of this version.
    fn warning(&self) -> Option<String> {
        let waits = self.waits.as_ref().map(|(_, why)| format!("updates cannot be applied: {why}"));
        let reported: Vec<String> = self.misfits.warning().into_iter().chain(waits).collect();
        (!reported.is_empty()).then(|| reported.join("; "))
    }

    /// Applies and shows the next updates; returns false if the version was released.
    fn step(&mut self, shown: &Weak<CurrentView>) -> Result<bool> {
        if self.is_broken {
            if shown.strong_count() == 0 {
                return Ok(false);
            }
            let mut anew = Following::new(self.feed.clone(), self.main.clone(), self.in_place)?;
            anew.catch_up()?;
            *self = Following { is_unseen: true, waits: self.waits.take(), ..anew };
        }
        let advanced = self.advance(LINGER, TOGETHER_MAX, Fresh::apply);
        let Some(shown) = shown.upgrade() else { return Ok(false) };
        let has_trouble = self.feed.trouble().is_some();
        metrics::gauge!("sterling_journal_available", "model" => self.name.clone()).set(f64::from(!has_trouble));
        // Applied updates become visible, regardless of errors in later ones.
        let seen = self.show(&shown);
        advanced.and(seen).map(|()| true)
    }

    /// Makes applied updates visible to requests; failures are retried in the next step.
    fn show(&mut self, shown: &CurrentView) -> Result<()> {
        self.is_unseen |= self.fresh.tidy()?;
        if self.is_unseen {
            shown.warn(self.warning());
            let view = self.fresh.view()?;
            metrics::gauge!("sterling_fresh_items", "model" => self.name.clone()).set(view.fresh_items() as f64);
            metrics::gauge!("sterling_position", "model" => self.name.clone()).set(view.position() as f64);
            shown.show(view);
            self.is_unseen = false;
        }
        Ok(())
    }

    /// Applies the next updates, at most `most`, if some arrive within `wait`.
    fn advance(&mut self, wait: Duration, most: usize, apply: Apply) -> Result<()> {
        if self.pending.is_empty() {
            self.take(wait, most)?;
        }
        let before = self.fresh.position();
        let applied = apply(&mut self.fresh, &self.pending);
        self.is_unseen |= self.fresh.position() > before;
        self.pending.drain(..(self.fresh.position() - before) as usize);
        self.note(applied?);
        Ok(())
    }

    /// Counts updates that did not fit, and logs one line per batch.
    fn note(&mut self, misfits: Vec<IncompatibleUpdate>) {
        let whole = misfits.iter().filter(|misfit| misfit.is_whole).count() as u64;
        let attributes = misfits.len() as u64 - whole;
        let Some(last) = misfits.into_iter().next_back() else { return };
        let model = self.name.clone();
        metrics::counter!("sterling_updates_refused_total", "model" => model.clone()).increment(whole);
        metrics::counter!("sterling_attributes_dropped_total", "model" => model.clone()).increment(attributes);
        let IncompatibleUpdate { position, error, .. } = &last;
        tracing::warn!(
            model, updates = whole, attributes, position, %error,
            "updates do not fit this version and were skipped, completely or in some attributes; position and error belong to the last update"
        );
        self.misfits.whole += whole;
        self.misfits.attributes += attributes;
        self.misfits.last = Some(last);
    }

    /// Reads the next updates. If an error follows some updates, it is returned once those updates are applied, because a record
    /// is read only once.
    fn take(&mut self, wait: Duration, most: usize) -> Result<()> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        let (mut records, mut bytes) = (Vec::new(), 0);
        let mut next = self.records.next(wait)?;
        while let Some(record) = next.take() {
            let expected = self.fresh.position() + 1 + records.len() as u64;
            if record.position != expected {
                let position = record.position;
                self.failed =
                    Some(Error::corrupt(format!("the journal returned position {position}, expected {expected}")));
                break;
            }
            bytes += record.payload.len();
            records.push(record);
            if records.len() < most && bytes < TOGETHER_BYTES {
                match self.records.next(Duration::ZERO) {
                    Ok(more) => next = more,
                    Err(e) => self.failed = Some(e),
                }
            }
        }
        let decode = |Record { position, payload }: &Record| {
            Update::decode(payload).map_err(|e| e.within(format!("position {position}")))
        };
        let updates: Vec<Result<Update>> = match records.len() > DECODED {
            true => records.par_iter().with_min_len(DECODED).map(decode).collect(),
            false => records.iter().map(decode).collect(),
        };
        for (record, update) in records.iter().zip(updates) {
            match update {
                Ok(update) => {
                    self.feed.note(record.position, &update);
                    self.pending.push(update);
                }
                Err(e) => {
                    self.failed = Some(e);
                    break;
                }
            }
        }
        Ok(())
    }
}
