//! Tails the update log: each loaded version applies the updates of its model, on its own thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::state::{Fresh, IncompatibleUpdate};
use super::update::Update;
use super::update_log::{ModelUpdates, UpdateFeeds};
use crate::registry::{Declared, Loader, Snapshots};
use crate::view::{CurrentView, Live};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_journal::{Follower, Record};
use sterling_kernels::priority::{self, Background};
use sterling_snapshot::Snapshot;

/// Maximum number of updates per batch, first for visible versions, then for versions that are not visible yet, whose
/// large batches use all cores.
const TOGETHER_MAX: usize = 1024;
const TOGETHER_MAX_UNSEEN: usize = 16_384;
/// Maximum bytes of records per batch.
const TOGETHER_BYTES: usize = 64 << 20;
/// Records decoded per thread at a time.
const DECODED: usize = 1024;
/// Time after which the thread of a released version ends.
const LINGER: Duration = Duration::from_millis(250);
/// Number of panics on the same updates after which a version stops applying updates: a transient fault does not repeat.
const PANICS_MAX: u32 = 3;
/// Interval between log lines about the same stall.
const STALL_LOG_INTERVAL: Duration = Duration::from_secs(60);

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
