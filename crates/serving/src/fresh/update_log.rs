//! Update log of a model: appends updates, and remembers calls, early embeddings and merges.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::calls::{Call, Calls};
use super::early::EarlyEmbeddings;
use super::embed::Embedder;
use super::merges::MergeUnderWay;
use super::update::{CallAnswer, Put, Update};
use crate::view::View;
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_journal::{Append, Done, Journal, Journals, Topic};
use sterling_snapshot::check_name;

/// Timeout of reading durable records.
const SILENCE: Duration = Duration::from_secs(10);

/// Updates of one model.
pub struct ModelUpdates {
    pub(super) journal: Box<dyn Journal>,
    calls: Mutex<Calls>,
    /// Folder of the calls whose records the journal has truncated.
    folder: Option<PathBuf>,
    /// Last truncated position; the calls up to this position are stored in `folder`.
    released: AtomicU64,
    /// Embeddings computed before their updates were durable.
    pub(super) early: Arc<EarlyEmbeddings>,
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
    pub(super) fn note(&self, position: u64, update: &Update) {
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
