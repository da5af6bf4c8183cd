//! Shadow traffic: repeats some requests at another version after they were answered, and compares both answers.
//!
//! No client waits for a shadow request: it is prepared and run after the answer, with the priority of batches. A few
//! shadow requests run at a time. One is skipped and counted if no slot is free, its rate is exceeded or the engine is
//! full.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::slow::millis;
use super::worst::Worst;
use sterling_api::ShadowDiff;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::quota::Flow;
use sterling_core::request::{Answer, CallOptions, Content, Explain, Rank, Ranked, Reading, Request, Retrieve};
use sterling_core::tasks;
use sterling_core::units::ItemId;
use sterling_rollout::ShadowRun;
use sterling_serving::engine::{Engine, Passes};
use sterling_serving::pass;
use sterling_serving::registry::Loaded;

/// Maximum number of concurrent shadow requests, of all models.
const TOGETHER: usize = 4;
/// Longest time that a shadow request may wait and run.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Number of reported items that only one of both answers has.
const REPORTED_ITEMS_MAX: usize = 10;

/// Slots for shadow requests, and the shadow answers that differed most.
pub(super) struct Shadows {
    turns: Arc<Semaphore>,
    /// Answers that differ most.
    pub(super) worst: Worst<ShadowDiff>,
}

impl Default for Shadows {
    fn default() -> Self {
        Shadows { turns: Arc::new(Semaphore::new(TOGETHER)), worst: Worst::default() }
    }
}

/// Shadow version `S` that may repeat a call.
pub(super) struct Shadowed<S> {
    pub(super) run: Arc<ShadowRun>,
    pub(super) version: S,
    pub(super) id: String,
}

/// Request that will be repeated at a shadow after its answer.
pub(super) struct Mirrored<S = Arc<Loaded>> {
    run: Arc<ShadowRun>,
    version: S,
    request: Request,
    id: String,
    _turn: OwnedSemaphorePermit,
}

/// Compared parts of the served answer.
pub(super) struct ServedParts {
    version: u64,
    ids: Vec<ItemId>,
    scores: Vec<f32>,
    took: Duration,
}

impl ServedParts {
    /// Returns the compared parts of an answer with items.
    pub(super) fn of(version: u64, answer: &Answer) -> Option<Self> {
        let Content::Items(ranked) = &answer.content else { return None };
        Some(ServedParts::items(version, ranked, answer.explain.as_ref().map_or(Duration::ZERO, steps)))
    }

    /// Creates the compared parts from items and the time that they took.
    pub(super) fn items(version: u64, Ranked { ids, scores, .. }: &Ranked, took: Duration) -> Self {
        ServedParts { version, ids: ids.clone(), scores: scores.clone(), took }
    }
}

/// Returns the sum of the steps' times: the cost of a version, without waiting for other requests.
fn steps(explain: &Explain) -> Duration {
    Duration::from_micros(explain.steps.iter().map(|step| step.micros).sum())
}

impl Shadows {
    /// Samples a request for a shadow, and returns it if a slot is free.
    pub(super) fn mirrored<S>(
        &self,
        shadow: Option<Shadowed<S>>,
        request: impl FnOnce() -> Request,
    ) -> Option<Box<Mirrored<S>>> {
        let Shadowed { run, version, id } = shadow.filter(|shadow| shadow.run.is_drawn())?;
        if !run.is_in_time() {
            count(run.model(), "rate");
            return None;
        }
        let Ok(_turn) = self.turns.clone().try_acquire_owned() else {
            count(run.model(), "busy");
            return None;
        };
        let mut request = request();
        if let Some(reading) = reading_of(&mut request) {
            reading.columns = Vec::new();
        }
        Some(Box::new(Mirrored { run, version, request, id, _turn }))
    }
}

impl<S> Mirrored<S> {
    /// Runs the request at the shadow, and compares its answer with the served one.
    pub(super) async fn run<A: Future<Output = Result<Answer>>>(
        self,
        ask: impl FnOnce(S, Request) -> A,
        worst: &Worst<ShadowDiff>,
        given: ServedParts,
    ) {
        let Mirrored { run, version, request, id, _turn } = self;
        let model = run.model().to_owned();
        let answer = match ask(version, request).await {
            Err(e) if matches!(e.kind(), Kind::Overloaded | Kind::NotReady) => return count(&model, "no_room"),
            answer => answer,
        };
        let shadow_version = run.version();
        let compared = tasks::blocking(move || match answer {
            Ok(answer) => Ok(compare(&given, &answer)),
            Err(error) => Ok(Compared::failed(&given, &error)),
        });
        let Ok(compared) = compared.await else { return };
        compared.record_metrics(&model);
        let Compared { diff, .. } = compared;
        worst.note(badness(&diff), || ShadowDiff {
            time: sterling_telemetry::now(),
            id,
            model,
            shadow_version,
            ..diff
        });
    }
}

/// Returns the severity of a difference: failures first, then missing items, then displacement.
fn badness(diff: &ShadowDiff) -> u64 {
    let failure = if diff.error.is_some() { 2e9 } else { 0.0 };
    (failure + 1e9 * (1.0 - diff.overlap) + diff.displacement.min(1e6)) as u64
}

/// Returns the requested columns and explanations, for requests whose answers have items.
fn reading_of(request: &mut Request) -> Option<&mut Reading> {
    match request {
        Request::Retrieve(Retrieve { reading, .. }) | Request::Rank(Rank { reading, .. }) => Some(reading),
        _ => None,
    }
}

/// Answers a background request at a version of this server, with an explanation.
pub(super) async fn query_in_background(
    engine: &Engine<Passes>,
    loaded: Arc<Loaded>,
    mut request: Request,
) -> Result<Answer> {
    engine.admits(Flow::default, None)?;
    if let Some(reading) = reading_of(&mut request) {
        reading.explain = true;
    }
    let view = loaded.view();
    let prepared = tasks::blocking(move || pass::prepare(&view, request)).await?;
    engine.submit(prepared, CallOptions::background(TIMEOUT)).await
}

/// Result of a comparison.
struct Compared {
    /// Number of items in the longer answer, and of items in both.
    wanted: usize,
    found: usize,
    took: Option<(Duration, Duration)>,
    diff: ShadowDiff,
}

impl Compared {
    fn failed(given: &ServedParts, error: &Error) -> Self {
        let diff = ShadowDiff {
            version: given.version,
            k: given.ids.len(),
            ms: millis(given.took),
            error: Some(error.to_string()),
            ..ShadowDiff::default()
        };
        Compared { wanted: given.ids.len(), found: 0, took: None, diff }
    }

    fn record_metrics(&self, model: &str) {
        count(model, if self.took.is_some() { "compared" } else { "failed" });
        let Some((served, shadow)) = self.took else { return };
        metrics::counter!("sterling_shadow_wanted_total", "model" => model.to_owned()).increment(self.wanted as u64);
        metrics::counter!("sterling_shadow_found_total", "model" => model.to_owned()).increment(self.found as u64);
        metrics::histogram!("sterling_shadow_displacement", "model" => model.to_owned()).record(self.diff.displacement);
        let score = f64::from(self.diff.score_difference.unwrap_or_default());
        metrics::gauge!("sterling_shadow_score_difference", "model" => model.to_owned()).set(score);
        for (role, took) in [("served", served), ("shadow", shadow)] {
            metrics::histogram!("sterling_shadow_seconds", "model" => model.to_owned(), "role" => role)
                .record(took.as_secs_f64());
        }
    }
}

/// Compares a shadow's answer with the served answer.
fn compare(given: &ServedParts, answer: &Answer) -> Compared {
    let Content::Items(theirs) = &answer.content else {
        return Compared::failed(given, &Error::internal("the shadow's answer has no items, expected some"));
    };
    let places: HashMap<ItemId, usize> = theirs.ids.iter().enumerate().map(|(place, id)| (*id, place)).collect();
    let (mut found, mut moved, mut apart) = (0, 0, None::<f32>);
    let mut lost = Vec::new();
    for (place, id) in given.ids.iter().enumerate() {
        match places.get(id) {
            Some(&there) => {
                found += 1;
                moved += place.abs_diff(there);
                let difference = (given.scores[place] - theirs.scores[there]).abs();
                apart = Some(apart.map_or(difference, |apart| apart.max(difference)));
            }
            None if lost.len() < REPORTED_ITEMS_MAX => lost.push(id.0),
            None => {}
        }
    }
    let ours: std::collections::HashSet<ItemId> = given.ids.iter().copied().collect();
    let gained = theirs.ids.iter().filter(|id| !ours.contains(id)).take(REPORTED_ITEMS_MAX).map(|id| id.0).collect();
    let wanted = given.ids.len().max(theirs.ids.len());
    let ratio = |part: usize, all: usize, of_none: f64| if all == 0 { of_none } else { part as f64 / all as f64 };
    let took = answer.explain.as_ref().map_or(Duration::ZERO, steps);
    let diff = ShadowDiff {
        version: given.version,
        k: wanted,
        overlap: ratio(found, wanted, 1.0),
        displacement: ratio(moved, found, 0.0),
        score_difference: apart,
        lost,
        gained,
        ms: millis(given.took),
        shadow_ms: Some(millis(took)),
        ..ShadowDiff::default()
    };
    Compared { wanted, found, took: Some((given.took, took)), diff }
}

fn count(model: &str, outcome: &'static str) {
    metrics::counter!("sterling_shadows_total", "model" => model.to_owned(), "outcome" => outcome).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(items: &[(i64, f32)]) -> Answer {
        let ids = items.iter().map(|(id, _)| ItemId(*id)).collect();
        let ranked = Ranked { ids, scores: items.iter().map(|(_, score)| *score).collect(), ..Ranked::default() };
        Answer { content: Content::Items(ranked), degraded_rows: 0, explain: None }
    }

    fn compared(ours: &[(i64, f32)], theirs: &[(i64, f32)]) -> ShadowDiff {
        let given = ServedParts::of(7, &answer(ours));
        given.map(|given| compare(&given, &answer(theirs)).diff).unwrap_or_default()
    }

    #[test]
    fn differences_are_counted() {
        let four = [(1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)];
        let same = compared(&four, &four);
        assert_eq!((same.overlap, same.displacement, same.score_difference), (1.0, 0.0, Some(0.0)));
        let turned = compared(&four, &[(4, 0.9), (3, 0.8), (2, 0.7), (1, 0.65)]);
        assert_eq!((turned.overlap, turned.displacement), (1.0, 2.0));
        assert!((turned.score_difference.unwrap_or_default() - 0.3).abs() < 1e-6);
        let other = compared(&four, &[(1, 0.9), (9, 0.8), (8, 0.7)]);
        assert_eq!((other.overlap, other.k, other.lost, other.gained), (0.25, 4, vec![2, 3, 4], vec![9, 8]));
        let (none, both) = (compared(&four, &[]), compared(&[], &[]));
        assert_eq!((none.overlap, none.score_difference, both.overlap), (0.0, None, 1.0));
        let many: Vec<(i64, f32)> = (0..1000).map(|id| (id, 0.5)).collect();
        let others: Vec<(i64, f32)> = (1000..2000).map(|id| (id, 0.5)).collect();
        let apart = compared(&many, &others);
        assert_eq!(
            (apart.overlap, apart.lost.len(), apart.gained.len()),
            (0.0, REPORTED_ITEMS_MAX, REPORTED_ITEMS_MAX)
        );
    }
}
