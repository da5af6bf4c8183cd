//! Online recall audit: runs a sample of retrievals again exactly after their answers were sent.
//!
//! One audit runs at a time, with the priority of batches. An audit is skipped if its cost estimate is too high or the engine is
//! full, so audits only use spare capacity. The audit feeds two counters, whose quotient is the recall@K of served answers. While
//! a canary is active, both versions are audited equally often regardless of their traffic shares, and results of the canary
//! count for the canary only.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::watched::Watched;
use sterling_core::error::{Error, Kind};
use sterling_core::request::{Answer, CallOptions, Content, Reading, Request, Retrieve};
use sterling_core::sampler::Sampler;
use sterling_core::units::ItemId;
use sterling_rollout::Side;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::pass::{self, Prepared};
use sterling_serving::view::View;

/// Longest time that an audit may wait and run.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Samples retrievals for the audit.
pub(super) struct Audit {
    share: f64,
    draws: Sampler,
    turn: Arc<Semaphore>,
}

/// Permission to audit one retrieval.
pub(super) struct AuditPermit {
    _permit: OwnedSemaphorePermit,
}

/// Retrieval to run again exactly.
pub(super) struct ExactRetrieval {
    prepared: Prepared,
    model: String,
    /// Set if the answer was given while a canary was active.
    watched: Option<Watched>,
    _turn: AuditPermit,
}

impl Audit {
    /// Creates an audit of a share of the retrievals.
    pub(super) fn new(share: f64) -> Self {
        Audit { share, draws: Sampler::default(), turn: Arc::new(Semaphore::new(1)) }
    }

    /// Returns a permit if the retrieval is sampled and no audit is running. `times` multiplies the share of sampled retrievals.
    pub(super) fn turn(&self, times: f64) -> Option<AuditPermit> {
        let is_drawn = self.draws.draw(self.share * times);
        let permit = || self.turn.clone().try_acquire_owned().ok();
        is_drawn.then(permit).flatten().map(|_permit| AuditPermit { _permit })
    }
}

impl ExactRetrieval {
    /// Prepares the exact form of a retrieval; `None` if it was exact already or cannot run exactly.
    pub(super) fn of(
        turn: Option<AuditPermit>,
        view: &Arc<View>,
        request: &Retrieve,
        watched: Option<&Watched>,
    ) -> Option<Self> {
        let turn = turn.filter(|_| !request.exact)?;
        let exact = exactly(request);
        let model = view.main().manifest.name.clone();
        match pass::prepare(view, Request::Retrieve(exact)) {
            Ok(prepared) => Some(ExactRetrieval { prepared, model, watched: watched.cloned(), _turn: turn }),
            Err(error) => {
                failed(&model, &error);
                None
            }
        }
    }

    /// Runs the retrieval when there is capacity, and compares the `served` items with its result.
    pub(super) async fn run(self, engine: &Engine<Passes>, served: &[ItemId]) {
        let ExactRetrieval { prepared, model, watched, _turn } = self;
        let view = prepared.view().clone();
        match engine.submit(prepared, CallOptions::background(TIMEOUT)).await {
            Ok(exact) => {
                compare_with_exact(&model, watched.as_ref(), served, &ids(&exact));
                if is_answer_of_active(watched.as_ref()) {
                    set_index_gauges(&model, &view);
                }
            }
            Err(error) => failed(&model, &error),
        }
    }
}

/// Returns the exhaustive form of a retrieval, without columns in the answer.
pub(super) fn exactly(request: &Retrieve) -> Retrieve {
    let reading = Reading { columns: Vec::new(), explain: false, ..request.reading.clone() };
    Retrieve { exact: true, probes: None, recall: None, reading, ..request.clone() }
}

/// Returns whether the active version, not a canary, gave the answer.
fn is_answer_of_active(watched: Option<&Watched>) -> bool {
    watched.is_none_or(|watched| watched.side() == Side::Active)
}

/// Compares served items with those of an exact answer, and counts the overlap.
pub(super) fn compare_with_exact(model: &str, watched: Option<&Watched>, served: &[ItemId], exact: &[ItemId]) {
    let (wanted, found) = found(served, exact);
    if let Some(watched) = watched {
        watched.audited(wanted, found);
    }
    if is_answer_of_active(watched) {
        metrics::counter!("sterling_audit_wanted_total", "model" => model.to_owned()).increment(wanted as u64);
        metrics::counter!("sterling_audit_found_total", "model" => model.to_owned()).increment(found as u64);
        count(model, "audited");
    }
}

/// Counts an audit that produced no exact answer.
pub(super) fn failed(model: &str, error: &Error) {
    let outcome = match error.kind() {
        Kind::TooCostly => "too_costly",
        Kind::Overloaded => "no_room",
        _ => "failed",
    };
    count(model, outcome);
}

/// Ids of the items in an answer.
pub(super) fn ids(answer: &Answer) -> Vec<ItemId> {
    match &answer.content {
        Content::Items(ranked) => ranked.ids.clone(),
        Content::Embedding(_) | Content::Selected(_) => Vec::new(),
    }
}

/// Returns the number of items of an exact answer, and how many of them were served.
fn found(served: &[ItemId], exact: &[ItemId]) -> (usize, usize) {
    let served: BTreeSet<ItemId> = served.iter().copied().collect();
    (exact.len(), exact.iter().filter(|id| served.contains(id)).count())
}

fn set_index_gauges(model: &str, view: &View) {
    let index = &view.main().index;
    let mean = index.items() as f64 / index.lists() as f64;
    let longest = index.list_lengths().iter().max().map_or(0.0, |&longest| f64::from(longest) / mean);
    metrics::gauge!("sterling_longest_list_ratio", "model" => model.to_owned()).set(longest);
    metrics::gauge!("sterling_drift_ratio", "model" => model.to_owned()).set(view.drift());
}

fn count(model: &str, outcome: &'static str) {
    metrics::counter!("sterling_audits_total", "model" => model.to_owned(), "outcome" => outcome).increment(1);
}
