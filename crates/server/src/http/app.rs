//! What all calls share: the models, the workers, the budget for bodies; and what connections see of that.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::access::AccessControl;
use super::asides::Asides;
use super::audit::Audit;
use super::bodies::Bodies;
use super::clock::WallClock;
use super::failures::Failures;
use super::meters::AnswerMeters;
use super::options::Options;
use super::pages::Pages;
use super::patience::patience;
use super::shadow::Shadows;
use super::tls::Validity;
use super::traces::Traces;
use super::worst::Worst;
use super::writers::Writers;
use crate::route::Peers;
use sterling_api::{ModelInfo, Served, SlowCall};
use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_embedding::tiers::remote::Cluster;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::fresh::{Backlog, Feed, Feeds, MergeUnderWay, Merges};
use sterling_serving::quota::Flow;
use sterling_serving::registry::{Loaded, Registry};
use sterling_serving::view::View;

/// The share of a snapshot that may be changed or lie beside it before `/readyz` warns ...
const FRESH_SHARE_MAX: f64 = 0.3;
/// ... where so many items do.
const FRESH_MIN: usize = 1024;
/// Share of a snapshot's items that may be of a kind that its lists were not trained on: searches that are like them scan all of these.
const STRAY_SHARE_MAX: f64 = 0.05;
/// How long a merge may take before it is told of.
const MERGE_LONG: Duration = Duration::from_secs(60);
/// How many times as much as makes a merge due a start may have to read of a journal before `/readyz` warns.
const BACKLOG_MAX: f64 = 4.0;
/// Durable updates that are not seen yet before `/readyz` warns: a second of as many as come at most.
const LAG_MAX: u64 = 10_000;
/// What every call passes, whoever answers it.
#[derive(Default)]
pub(super) struct Entrance {
    /// True once the server is to end.
    pub(super) draining: AtomicBool,
    /// Where calls are counted.
    pub(super) meters: AnswerMeters,
    /// How calls failed.
    pub(super) failures: Failures,
    /// Who may do what.
    pub(super) access: AccessControl,
    /// Where the slowest calls are kept.
    pub(super) slow: Worst<SlowCall>,
    /// Where traces go.
    pub(super) traces: Traces,
    /// From when until when the certificate that is shown is good.
    pub(super) certificate: Mutex<Option<Validity>>,
    /// Whether the clock of the machine is set while the server runs.
    pub(super) clock: WallClock,
}

impl Entrance {
    /// Takes in which certificate is shown now.
    pub(super) fn show_certificate(&self, validity: Option<Validity>) {
        *locked(&self.certificate) = validity;
        if let Some(validity) = validity {
            metrics::gauge!("sterling_certificate_life_ratio").set(validity.life_left(unix_time().as_secs()));
        }
    }

    /// What an operator should look at, whatever stands behind the sockets, a line each.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let certificate = locked(&self.certificate).and_then(|validity| validity.warning(unix_time().as_secs()));
        certificate.into_iter().chain(self.clock.warning()).chain(self.failures.warning())
    }
}

/// What stands behind the sockets.
pub(super) trait Host: Send + Sync + 'static {
    /// What calls pass.
    fn entrance(&self) -> &Entrance;

    /// What makes long answers.
    fn writers(&self) -> &Arc<Writers>;

    /// Whether a call of a caller that workers answer, with this body where it is read already, may be taken in now; takes no lock.
    fn admits(&self, flow: &dyn Fn() -> Flow, body: Option<&[u8]>) -> Result<()>;
}

/// What handlers share.
pub struct App {
    /// The models.
    pub registry: Arc<Registry>,
    /// The workers.
    pub engine: Engine<Passes>,
    pub(super) bodies: Bodies,
    pub(super) asides: Asides,
    /// What reads the store.
    pub(super) store_reads: Asides,
    /// The views that pages are slices of.
    pub(super) pages: Pages,
    pub(super) entrance: Entrance,
    pub(super) writers: Arc<Writers>,
    /// The updates of the models, where the server takes any.
    pub(super) feeds: Option<Arc<Feeds>>,
    /// Where merges of updates are asked for.
    pub(super) merges: Option<Merges>,
    /// The servers of other hosts, where tables lie over several.
    pub(super) peers: Option<Arc<Peers>>,
    /// The cluster that holds rows of tables, where there is one.
    pub(super) cluster: Option<Arc<Cluster>>,
    /// Which answers are held against exact ones.
    pub(super) audit: Audit,
    /// Which answers are held against those of other versions.
    pub(super) shadows: Shadows,
    /// How long a call waits for the position that it wants to see.
    pub(super) updates_wait: Duration,
}

impl App {
    /// Models and workers behind one edge.
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
            entrance: Entrance::default(),
            writers: Writers::start()?,
            feeds: None,
            merges: None,
            peers: None,
            cluster: None,
            audit: Audit::new(0.0),
            shadows: Shadows::default(),
            updates_wait: Duration::from_secs(1),
        })
    }

    /// The same edge, which tells a collector of its calls.
    pub fn with_traces(self, traces: Traces) -> Self {
        App { entrance: Entrance { traces, ..self.entrance }, ..self }
    }

    /// The same edge, which asks who calls.
    pub fn with_access(self, access: AccessControl) -> Self {
        App { entrance: Entrance { access, ..self.entrance }, ..self }
    }

    /// The same edge, which takes updates too; calls wait for a position as long as other requests have time.
    pub fn with_updates(self, feeds: Option<Arc<Feeds>>, wait: Duration) -> Self {
        App { feeds, updates_wait: wait, ..self }
    }

    /// The same edge, at which merges may be asked for.
    pub fn with_merges(self, merges: Option<Merges>) -> Self {
        App { merges, ..self }
    }

    /// The same edge, which gives servers of other hosts the rows that it holds for them.
    pub fn with_peers(self, peers: Option<Arc<Peers>>) -> Self {
        App { peers, ..self }
    }

    /// The same edge, which reports what is wrong with the cluster that holds rows of tables.
    pub fn with_cluster(self, cluster: Option<Arc<Cluster>>) -> Self {
        App { cluster, ..self }
    }

    /// The same edge, which runs this share of the retrievals again exactly, beside their answers.
    pub fn with_audit(self, share: f64) -> Self {
        App { audit: Audit::new(share), ..self }
    }

    /// What an operator should look at though all is answered, a line each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = self.registry.troubles();
        let (able, workers) = (self.engine.able_workers(), self.engine.workers());
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
                    "model `{name}`: {share} % of its snapshot are changed or lie beside it ({items} items), which slows searches: merge them"
                ));
            }
            let (strays, stray_share) = (view.strays(), view.stray_share());
            if stray_share >= STRAY_SHARE_MAX && strays >= FRESH_MIN {
                let share = (stray_share * 100.0).round();
                warnings.push(format!(
                    "model `{name}`: {strays} new items ({share} % of its snapshot) are of a kind that its lists were not trained on, which slows searches: merge them"
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
                warnings.push(format!("model `{name}`: {lag} durable updates are not seen yet"));
            }
        }
        warnings
    }

    /// The updates of a model, or of the shard of it that this server has.
    pub(super) fn feed(&self, model: &Loaded) -> Result<Arc<Feed>> {
        let feeds = self.feeds.as_ref();
        let feeds =
            feeds.ok_or_else(|| Error::unsupported("this server takes no updates; `serve --updates DIR` does"))?;
        let topic = model.view().main().manifest.topic();
        feeds.of(&topic).ok_or_else(|| Error::not_ready(format!("model `{topic}`: its updates are not followed yet")))
    }

    /// Durable updates that a view does not show.
    fn lag(&self, model: &Loaded, view: &View) -> u64 {
        self.feed(model).map_or(0, |feed| feed.last()).saturating_sub(view.position())
    }

    /// The share of the items that an answer speaks of.
    pub(super) fn coverage(&self, model: &Loaded, view: &View) -> f64 {
        covered(view.coverage(), view.items(), self.lag(model, view))
    }

    /// What an answer says of where it comes from.
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

    /// What a version is.
    pub(super) fn described(&self, model: &Loaded) -> ModelInfo {
        let labels = self.registry.labels(model.name()).unwrap_or_default();
        let labels = labels.into_iter().filter(|(_, version)| *version == model.version()).map(|(label, _)| label);
        let (labels, memory_bytes) = (labels.collect(), model.memory_bytes());
        ModelInfo { labels, memory_bytes, ..sterling_api::model_info(model.view().main()) }
    }
}

/// What an operator should know of the journal of a model that has a view.
fn journal_warnings(feed: &Feed, view: &View) -> Vec<String> {
    let Backlog { updates, bytes, share } = feed.backlog(view);
    let is_long = (share >= BACKLOG_MAX)
        .then(|| format!("a start applies {updates} updates ({} MB) to its snapshot: merge them", bytes >> 20));
    let lacks = feed.lacks(view).map(|next| {
        format!("position {next} was released, which its version needs at a restart: merge its updates before, and keep more of the stream (`max_age`, `max_msgs`, `max_bytes`)")
    });
    let unmerged = feed
        .unmerged()
        .map(|kind| format!("its updates are served, and the last merge failed ({}): the log tells why", kind.name()));
    [unmerged, feed.trouble(), feed.warning(), lacks, is_long].into_iter().flatten().collect()
}

/// The share of the items that an answer speaks of: where so many durable updates are not seen that the server counts as behind,
/// each of them may be of an item that is missing or not as it should be.
fn covered(coverage: f64, items: usize, lag: u64) -> f64 {
    match lag >= LAG_MAX {
        true => coverage * items as f64 / (items as f64 + lag as f64),
        false => coverage,
    }
}

impl Host for App {
    fn entrance(&self) -> &Entrance {
        &self.entrance
    }

    fn writers(&self) -> &Arc<Writers> {
        &self.writers
    }

    fn admits(&self, flow: &dyn Fn() -> Flow, body: Option<&[u8]>) -> Result<()> {
        self.engine.admits_within(flow, |usual| patience(body?, usual))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_behind_say_so_by_how_much_they_cover() {
        assert_eq!(covered(0.5, 100, 0), 0.5);
        assert_eq!(covered(1.0, 100, LAG_MAX - 1), 1.0, "updates that are on their way are no lag");
        assert_eq!(covered(1.0, LAG_MAX as usize, LAG_MAX), 0.5);
        assert_eq!(covered(1.0, 0, LAG_MAX), 0.0);
        let more = covered(1.0, 1_000_000, 20_000);
        assert!(more < 1.0 && covered(1.0, 1_000_000, 40_000) < more);
    }
}
