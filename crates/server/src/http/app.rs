//! State that all calls share: models, workers, memory budgets; and the interface to it for connections.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::access::AccessControl;
use super::audit::Audit;
use super::bodies::Bodies;
use super::clock::WallClock;
use super::failures::Failures;
use super::meters::AnswerMeters;
use super::offload::Asides;
use super::options::Options;
use super::pages::Pages;
use super::shadow::Shadows;
use super::timeout_bound::patience;
use super::tls::Validity;
use super::traces::Traces;
use super::worst::Worst;
use super::writers::ChunkThreads;
use crate::route::Peers;
use sterling_api::{ModelInfo, Served, SlowCall};
use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::quota::Flow;
use sterling_embedding::tiers::remote::Cluster;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::fresh::{Backlog, MergeUnderWay, Merges, ModelUpdates, UpdateFeeds};
use sterling_serving::registry::{Loaded, Registry};
use sterling_serving::view::View;

/// Share of a snapshot that may be changed or in its delta before `/readyz` warns.
const FRESH_SHARE_MAX: f64 = 0.3;
/// Minimum number of changed or delta items for the warning of [`FRESH_SHARE_MAX`].
const FRESH_MIN: usize = 1024;
/// Maximum share of strays (items unlike those that the lists were trained on) in a snapshot without a warning: similar
/// searches scan all strays.
const STRAY_SHARE_MAX: f64 = 0.05;
/// Time after which a running merge is reported.
const MERGE_LONG: Duration = Duration::from_secs(60);
/// `/readyz` warns if a start would have to replay this many times the journal size that makes a merge due.
const BACKLOG_MAX: f64 = 4.0;
/// `/readyz` warns if this number of durable updates is not visible yet: about one second at the highest rate.
const LAG_MAX: u64 = 10_000;
/// State that every call uses, at servers and routers.
#[derive(Default)]
pub(super) struct CallState {
    /// True if the server is draining.
    pub(super) draining: AtomicBool,
    /// Metrics of calls.
    pub(super) meters: AnswerMeters,
    /// Failures of calls.
    pub(super) failures: Failures,
    /// Access control.
    pub(super) access: AccessControl,
    /// Slowest calls.
    pub(super) slow: Worst<SlowCall>,
    /// Export of traces.
    pub(super) traces: Traces,
    /// Validity of the current certificate.
    pub(super) certificate: Mutex<Option<Validity>>,
    /// Monitor of the machine's wall clock.
    pub(super) clock: WallClock,
}

impl CallState {
    /// Records the validity of the current certificate.
    pub(super) fn show_certificate(&self, validity: Option<Validity>) {
        *locked(&self.certificate) = validity;
        if let Some(validity) = validity {
            metrics::gauge!("sterling_certificate_life_ratio").set(validity.life_left(unix_time().as_secs()));
        }
    }

    /// Warnings for operators, common to servers and routers, one line each.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let certificate = locked(&self.certificate).and_then(|validity| validity.warning(unix_time().as_secs()));
        certificate.into_iter().chain(self.access.warning()).chain(self.clock.warning()).chain(self.failures.warning())
    }
}

/// Implementation behind the sockets: a server or a router.
pub(super) trait Host: Send + Sync + 'static {
    /// Returns the state that every call uses.
    fn entrance(&self) -> &CallState;

    /// Threads that compute long answers.
    fn writers(&self) -> &Arc<ChunkThreads>;

    /// Checks whether a call of this caller, with this body if it is already read, would be admitted now; takes no lock.
    fn admits(&self, flow: &dyn Fn() -> Flow, body: Option<&[u8]>) -> Result<()>;

    /// Returns whether no model of this name is served here.
    fn lacks(&self, model: &str) -> bool;
}

/// State of a server, shared by its handlers.
pub struct App {
    /// Loaded models.
    pub registry: Arc<Registry>,
    /// Queue and workers.
    pub engine: Engine<Passes>,
    pub(super) bodies: Bodies,
    pub(super) asides: Asides,
    /// Threads that read the store.
    pub(super) store_reads: Asides,
    /// Views retained for later pages.
    pub(super) pages: Pages,
    pub(super) entrance: CallState,
    pub(super) writers: Arc<ChunkThreads>,
    /// Update logs of the models, if the server accepts updates.
    pub(super) feeds: Option<Arc<UpdateFeeds>>,
    /// Requests for merges of updates.
    pub(super) merges: Option<Merges>,
    /// Servers of other hosts, if tables are spread over several hosts.
    pub(super) peers: Option<Arc<Peers>>,
    /// Redis Cluster that holds rows of tables, if one is configured.
    pub(super) cluster: Option<Arc<Cluster>>,
    /// Recall audit.
    pub(super) audit: Audit,
    /// Shadow traffic.
    pub(super) shadows: Shadows,
    /// Longest wait of a call for its required update position.
    pub(super) updates_wait: Duration,
}

impl App {
    /// Creates the state of a server from its models and workers.
    ///
    /// # Errors
    /// `Io` if the system gives no threads for long answers.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Result<Self> {
        let asides = Asides::new(engine.workers());
        let (registry, bodies) = (Arc::new(registry), Bodies::new(options, asides.clone()));
        Ok(App {
            registry,
            engine,
            bodies,
            asides,
            store_reads: Asides::of_store(),
            pages: Pages::default(),
            entrance: CallState::default(),
            writers: ChunkThreads::start()?,
            feeds: None,
            merges: None,
            peers: None,
            cluster: None,
            audit: Audit::new(0.0),
            shadows: Shadows::default(),
            updates_wait: Duration::from_secs(1),
        })
    }

    /// Adds the export of traces.
    pub fn with_traces(self, traces: Traces) -> Self {
        App { entrance: CallState { traces, ..self.entrance }, ..self }
    }

    /// Adds access control.
    pub fn with_access(self, access: AccessControl) -> Self {
        App { entrance: CallState { access, ..self.entrance }, ..self }
    }

    /// Adds updates; `wait` limits the time that calls wait for an update position.
    pub fn with_updates(self, feeds: Option<Arc<UpdateFeeds>>, wait: Duration) -> Self {
        App { feeds, updates_wait: wait, ..self }
    }

    /// Adds merges of updates.
    pub fn with_merges(self, merges: Option<Merges>) -> Self {
        App { merges, ..self }
    }

    /// Adds the exchange of table rows with servers of other hosts.
    pub fn with_peers(self, peers: Option<Arc<Peers>>) -> Self {
        App { peers, ..self }
    }

    /// Adds warnings about the cluster that holds rows of tables.
    pub fn with_cluster(self, cluster: Option<Arc<Cluster>>) -> Self {
        App { cluster, ..self }
    }

    /// Adds the recall audit, for a share of the retrievals.
    pub fn with_audit(self, share: f64) -> Self {
        App { audit: Audit::new(share), ..self }
    }

    /// Warnings for operators while the server is ready, one line each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = self.registry.troubles();
        let (able, workers) = (self.engine.available_workers(), self.engine.workers());
        if able < workers {
            warnings.push(format!(
                "{able} of {workers} workers can answer, the others have ended or hang: restart the server"
            ));
        }
        warnings.extend(self.entrance.warnings());
        warnings.extend(self.peers.iter().flat_map(|peers| peers.troubles()));
        warnings.extend(self.cluster.iter().flat_map(|cluster| cluster.troubles()));
        warnings.extend(self.engine.backend().residents().iter().flat_map(|residents| residents.warnings()));
        for model in self.registry.list() {
            let (name, view) = (model.name(), model.view());
            let (drift, items) = (view.drift(), view.fresh_items() + view.changed_items());
            if drift >= FRESH_SHARE_MAX && items >= FRESH_MIN {
                let share = (drift * 100.0).round();
                warnings.push(format!(
                    "model `{name}`: {share} % of its snapshot are changed or in the delta ({items} items), which \
                     slows searches: merge them"
                ));
            }
            let (strays, stray_share) = (view.strays(), view.stray_share());
            if stray_share >= STRAY_SHARE_MAX && strays >= FRESH_MIN {
                let share = (stray_share * 100.0).round();
                warnings.push(format!(
                    "model `{name}`: {strays} new items ({share} % of its snapshot) are unlike the items that its lists were trained on, which slows searches: merge them"
                ));
            }
            let feed = self.feed(&model).ok();
            let merging = feed.as_ref().and_then(|feed| feed.merging());
            if let Some(MergeUnderWay { since, done }) = merging.filter(|merging| merging.since.elapsed() >= MERGE_LONG)
            {
                let (seconds, done) = (since.elapsed().as_secs(), (done * 100.0).round());
                warnings.push(format!(
                    "model `{name}`: a merge has been under way for {seconds} s, {done} % of its steps are done"
                ));
            }
            let of_journal = feed.iter().flat_map(|feed| journal_warnings(feed, &view));
            warnings.extend(of_journal.map(|why| format!("model `{name}`: {why}")));
            let misfits = model.content().warning();
            warnings.extend(misfits.map(|why| format!("model `{name}`, version {}: {why}", model.version())));
            let lag = self.lag(&model, &view);
            if lag >= LAG_MAX {
                warnings.push(format!("model `{name}`: {lag} durable updates are not visible yet"));
            }
        }
        warnings
    }

    /// Returns the update log of a model, or of its shard at this server.
    pub(super) fn feed(&self, model: &Loaded) -> Result<Arc<ModelUpdates>> {
        let feeds = self.feeds.as_ref();
        let feeds = feeds.ok_or_else(|| {
            Error::unsupported("this server accepts no updates; start it with `serve --updates DIR` to accept them")
        })?;
        let topic = model.view().main().manifest.topic();
        feeds.of(&topic).ok_or_else(|| Error::not_ready(format!("model `{topic}`: its update log is not read yet")))
    }

    /// Returns the number of durable updates that a view does not contain.
    fn lag(&self, model: &Loaded, view: &View) -> u64 {
        self.feed(model).map_or(0, |feed| feed.last()).saturating_sub(view.position())
    }

    /// Returns the share of the items that an answer covers.
    pub(super) fn coverage(&self, model: &Loaded, view: &View) -> f64 {
        covered(view.coverage(), view.items(), self.lag(model, view))
    }

    /// Describes the origin of an answer.
    pub(super) fn served(&self, model: &Loaded, view: &View) -> Served {
        Served {
            model: model.name().into(),
            version: model.version(),
            digest: model.digest().into(),
            coverage: self.coverage(model, view),
            position: view.position(),
            positions: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Describes a version.
    pub(super) fn described(&self, model: &Loaded) -> ModelInfo {
        let labels = self.registry.labels(model.name()).unwrap_or_default();
        let labels = labels.into_iter().filter(|(_, version)| *version == model.version()).map(|(label, _)| label);
        let (labels, memory_bytes) = (labels.collect(), model.memory_bytes());
        ModelInfo { labels, memory_bytes, ..crate::describe::model_info(model.view().main()) }
    }
}

/// Warnings about the journal of a model.
fn journal_warnings(feed: &ModelUpdates, view: &View) -> Vec<String> {
    let Backlog { updates, bytes, share } = feed.backlog(view);
    let is_long = (share >= BACKLOG_MAX)
        .then(|| format!("a restart would replay {updates} updates ({} MB): merge them", bytes >> 20));
    let lacks = feed.lacks(view).map(|next| {
        format!(
            "the update stream no longer has position {next}, which the active version needs at a restart: merge the \
             updates of the model before a restart, and keep more of the stream (`max_age`, `max_msgs`, `max_bytes`)"
        )
    });
    let unmerged = feed.unmerged().map(|kind| {
        format!("updates stay in the delta, because the last merge failed ({}): the log has the reason", kind.name())
    });
    [unmerged, feed.trouble(), feed.warning(), lacks, is_long].into_iter().flatten().collect()
}

/// Returns the share of the items that an answer covers. If the server lags, each missing update counts as an item that
/// may be missing or outdated.
fn covered(coverage: f64, items: usize, lag: u64) -> f64 {
    match lag >= LAG_MAX {
        true => coverage * items as f64 / (items as f64 + lag as f64),
        false => coverage,
    }
}

impl Host for App {
    fn entrance(&self) -> &CallState {
        &self.entrance
    }

    fn writers(&self) -> &Arc<ChunkThreads> {
        &self.writers
    }

    fn admits(&self, flow: &dyn Fn() -> Flow, body: Option<&[u8]>) -> Result<()> {
        self.engine.admits_within(flow, |usual| patience(body?, usual))
    }

    fn lacks(&self, model: &str) -> bool {
        self.registry.lacks(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lagging_servers_report_a_lower_coverage() {
        assert_eq!(covered(0.5, 100, 0), 0.5);
        assert_eq!(covered(1.0, 100, LAG_MAX - 1), 1.0, "updates that are on their way are no lag");
        assert_eq!(covered(1.0, LAG_MAX as usize, LAG_MAX), 0.5);
        assert_eq!(covered(1.0, 0, LAG_MAX), 0.0);
        let more = covered(1.0, 1_000_000, 20_000);
        assert!(more < 1.0 && covered(1.0, 1_000_000, 40_000) < more);
    }
}
