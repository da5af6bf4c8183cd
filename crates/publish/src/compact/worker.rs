//! Thread that merges updates.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::Options;
use super::retention::release;
use crate::{MERGE_STEPS, MergedVersion, merge};
use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::VersionSelector;
use sterling_core::tasks;
use sterling_kernels::priority::{Background, Starved};
use sterling_serving::fresh::{MergeWanted, Merged, ModelUpdates, UpdateFeeds};
use sterling_serving::registry::{Loaded, Registry};
use sterling_serving::view::View;
use sterling_snapshot::Store;

/// Interval at which models are checked for due merges.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of changed items (added plus deleted) below which no merge is triggered by their number alone.
const CHANGED_MIN: f64 = 1024.0;
/// Fill level of the delta that triggers a merge, regardless of the number of changed items.
const FULL: f64 = 0.5;
/// Delay before a failed truncation of a journal is retried.
const RETRY_DELAY: Duration = Duration::from_secs(30);
/// Initial and maximum delay after a failed merge; each failure doubles it.
const WAIT: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// Merges the updates of a server's models.
pub struct Compactor {
    store: Store,
    registry: Weak<Registry>,
    feeds: Arc<UpdateFeeds>,
    options: Options,
    /// Models whose merges failed: the end of the delay before the next attempt, and the number of failures.
    failed: BTreeMap<String, (Instant, u32)>,
    /// Versions that were in memory at the last truncation of the journal.
    seen: BTreeMap<String, Vec<u64>>,
    /// Models whose journals could not be truncated, with the time of the attempt.
    kept: BTreeMap<String, Instant>,
}

impl Compactor {
    /// Creates a compactor for versions of `store`, which `registry` serves.
    pub fn new(store: Store, registry: &Arc<Registry>, feeds: Arc<UpdateFeeds>, options: Options) -> Self {
        let (failed, seen, kept) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Compactor { store, registry: Arc::downgrade(registry), feeds, options, failed, seen, kept }
    }

    /// Runs the compactor on its own thread, until all senders of requests are dropped.
    ///
    /// # Errors
    /// `Io` if the thread cannot be started.
    pub fn start(mut self, wanted: Receiver<MergeWanted>) -> Result<()> {
        let run = move || {
            loop {
                let requested = wanted.recv_timeout(CHECK_INTERVAL);
                let Some(registry) = self.registry.upgrade() else { return };
                match requested {
                    Ok(MergeWanted { model, reported }) => reported(self.merge(&registry, &model)),
                    // If the check panics, only this check fails; the next one runs as usual.
                    Err(RecvTimeoutError::Timeout) => {
                        let _ = catch_unwind(AssertUnwindSafe(|| self.look(&registry)));
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        tasks::COMPACTOR.start(run).map(drop)
    }

    /// Merges models and shards of which enough has changed, and truncates journals after the set of loaded versions has changed.
    fn look(&mut self, registry: &Registry) {
        let models: Vec<String> = registry.list().iter().map(|loaded| loaded.name().to_owned()).collect();
        for name in &models {
            let now: Vec<u64> = registry.all_in_memory(name).iter().map(|loaded| loaded.version()).collect();
            let waits = self.kept.get(name).is_some_and(|at| at.elapsed() < RETRY_DELAY);
            if self.seen.get(name) != Some(&now) && !waits {
                // A failed truncation, for example on a full disk, is retried even if the set of loaded versions stays the same.
                match self.truncate_unneeded(registry, name) {
                    true => drop((self.kept.remove(name), self.seen.insert(name.clone(), now))),
                    false => drop(self.kept.insert(name.clone(), Instant::now())),
                }
            }
            if !registry.get(name, VersionSelector::Active).is_ok_and(|loaded| self.is_due(&loaded)) {
                continue;
            }
            match self.merge(registry, name) {
                Ok(_) => drop(self.failed.remove(name)),
                Err(error) => {
                    let times = self.failed.get(name).map_or(0, |(_, times)| *times);
                    let wait = WAIT.0.saturating_mul(1 << times.min(16)).min(WAIT.1);
                    self.failed.insert(name.clone(), (Instant::now() + wait, times + 1));
                    tracing::warn!(model = name, %error, retry_in = ?wait, "merge failed; updates are still served from the delta");
                }
            }
        }
    }

    /// Truncates and deletes unneeded data of a model; returns false on failure.
    fn truncate_unneeded(&self, registry: &Registry, model: &str) -> bool {
        let released = release(registry, &self.store, &self.feeds, model);
        if let Err(error) = &released {
            tracing::warn!(model, %error, "journal not truncated; retrying later");
        }
        released.is_ok()
    }

    fn is_due(&self, loaded: &Loaded) -> bool {
        let view = loaded.view();
        let (drift, items) = (view.drift(), view.main().index.items() as f64);
        metrics::gauge!("sterling_stray_ratio", "model" => loaded.name().to_owned()).set(view.stray_share());
        let waits = self.failed.get(loaded.name()).is_some_and(|(until, _)| Instant::now() < *until);
        let has_changed = self.options.is_due(drift, view.stray_share()) && drift * items >= CHANGED_MIN;
        let is_long = self.has_long_replay(loaded.name(), &view);
        let is_due = has_changed || view.fullness() >= FULL || is_long;
        self.options.share > 0.0 && is_due && !waits
    }

    /// Returns whether a restarting server would have to replay too much of a journal, or would need truncated updates.
    fn has_long_replay(&self, model: &str, view: &View) -> bool {
        let Some(feed) = self.feeds.of(&view.main().manifest.topic()) else { return false };
        let backlog = feed.backlog(view);
        metrics::gauge!("sterling_journal_backlog_updates", "model" => model.to_owned()).set(backlog.updates as f64);
        metrics::gauge!("sterling_journal_backlog_bytes", "model" => model.to_owned()).set(backlog.bytes as f64);
        metrics::gauge!("sterling_journal_backlog_ratio", "model" => model.to_owned()).set(backlog.share);
        backlog.share >= 1.0 || feed.lacks(view).is_some()
    }

    /// Publishes the view of a model's active version, activates the result, and deletes superseded data.
    ///
    /// # Errors
    /// `Unsupported` for a model without updates; as [`merge`]; the reason why the version was rejected.
    pub fn merge(&self, registry: &Registry, model: &str) -> Result<Merged> {
        // A panic fails only this merge.
        let made = catch_unwind(AssertUnwindSafe(|| self.merge_active(registry, model)));
        let made = made.unwrap_or_else(|_| Err(Error::internal("the merge panicked; this is a defect")));
        let outcome = match &made {
            Ok(_) => "merged",
            Err(e) if e.kind() == Kind::Conflict => "overtaken",
            Err(_) => "failed",
        };
        metrics::counter!("sterling_merges_total", "model" => model.to_owned(), "outcome" => outcome).increment(1);
        made.map_err(|e| e.within(format!("merge of model `{model}`")))
    }

    fn merge_active(&self, registry: &Registry, model: &str) -> Result<Merged> {
        let loaded = registry.get(model, VersionSelector::Active)?;
        let view = loaded.view();
        let topic = view.main().manifest.topic();
        let feed = self.feeds.of(&topic).ok_or_else(|| Error::unsupported("the model accepts no updates"))?;
        let merged = self.merge_view(registry, &loaded, view, &feed);
        // A conflict means that another version took over, which shows the updates, so it is no failure.
        feed.note_merge(merged.as_ref().err().map(Error::kind).filter(|kind| *kind != Kind::Conflict));
        drop(loaded);
        if merged.is_ok() {
            self.truncate_unneeded(registry, model);
        }
        merged
    }

    fn merge_view(&self, registry: &Registry, loaded: &Loaded, view: Arc<View>, feed: &ModelUpdates) -> Result<Merged> {
        let (model, version) = (loaded.name(), loaded.version());
        let is_cut = view.main().manifest.shard.is_some();
        // A version that cannot be loaded would stay in the store, and the next merge would add another one.
        registry.check_room(loaded)?;
        let under_way = RunningMerge::begin(feed, model);
        let (made, background) = self.made(&view, &under_way)?;
        tracing::info!(
            model,
            version = made.version,
            position = made.position,
            lists = made.lists,
            trained = made.is_trained,
            seconds = made.seconds,
            "updates merged"
        );
        metrics::histogram!("sterling_merge_seconds", "model" => model.to_owned()).record(made.seconds);
        drop(view);
        let taken_in = match is_cut {
            true => registry.replace(model, made.version, background),
            false => registry.succeed(model, (version, made.version), background),
        };
        match taken_in {
            Ok(_) => Ok(Merged { version: made.version, position: made.position, items: made.items }),
            Err(error) => {
                if !is_cut && error.kind() != Kind::Conflict {
                    self.delete_unloadable(model, made.version);
                }
                Err(error)
            }
        }
    }

    /// Deletes a merged version that this server cannot load.
    fn delete_unloadable(&self, model: &str, version: u64) {
        match self.store.remove(model, version) {
            Ok(()) => tracing::warn!(model, version, "merged version deleted, because it cannot be loaded here"),
            Err(error) => {
                tracing::warn!(model, version, %error, "merged version can neither be loaded here nor deleted")
            }
        }
    }

    /// Publishes a view on otherwise idle CPU time; if no core is idle, on a fraction of a core that grows with the size of the
    /// delta. Returns the version and the CPU priority that was used.
    fn made(&self, view: &View, under_way: &RunningMerge<'_>) -> Result<(MergedVersion, Background)> {
        let mut background = self.options.background(view.drift());
        let merge = || merge(&self.store, view, &|steps| under_way.report_steps(steps));
        if background == Background::Last {
            let pool = Background::last_until_starved(&tasks::MERGE, self.options.threads())?;
            match catch_unwind(AssertUnwindSafe(|| pool.install(merge))) {
                Ok(made) => return Ok((made?, background)),
                Err(panic) if panic.is::<Starved>() => {
                    let much = self.options.is_due(view.drift(), view.stray_share());
                    background = Background::Raised { much };
                    let model = under_way.model;
                    tracing::info!(model, "merge found no idle core; it restarts at a higher priority");
                }
                Err(panic) => resume_unwind(panic),
            }
        }
        let made = background.pool(&tasks::MERGE, self.options.threads())?.install(merge)?;
        Ok((made, background))
    }
}

/// Running merge, for progress reports.
struct RunningMerge<'a> {
    feed: &'a ModelUpdates,
    model: &'a str,
}

impl<'a> RunningMerge<'a> {
    fn begin(feed: &'a ModelUpdates, model: &'a str) -> Self {
        let under_way = RunningMerge { feed, model };
        feed.begin_merge();
        under_way.report_start(unix_time().as_secs_f64());
        under_way.report_steps(0);
        under_way
    }

    /// Reports the number of finished steps.
    fn report_steps(&self, steps: usize) {
        let done = steps as f64 / (MERGE_STEPS + 1) as f64;
        self.feed.report_merge(done);
        metrics::gauge!("sterling_merge_progress_ratio", "model" => self.model.to_owned()).set(done);
    }

    /// Reports the Unix time of its start, or 0 at its end.
    fn report_start(&self, at: f64) {
        metrics::gauge!("sterling_merge_started_timestamp_seconds", "model" => self.model.to_owned()).set(at);
    }
}

impl Drop for RunningMerge<'_> {
    fn drop(&mut self) {
        self.report_start(0.0);
        self.report_steps(0);
        self.feed.end_merge();
    }
}
