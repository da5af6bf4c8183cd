//! Warm-up: requests that a version must answer before it serves, with golden answers. The warm-up verifies the
//! version, and avoids slow first answers (a cold start).
//!
//! A package may contain `warmup.jsonl`, one request per line: `{"request": {..}, "ids": [..], "scores": [..]}`. Publishing calls
//! [`fill`], which answers lines that contain only a request and compares the other lines with the version's answers. Serving calls
//! [`check`]: the answer to every line must match. A version without the file answers one retrieval.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use sterling_api::Retrievals;
use sterling_core::error::{Error, Result};
use sterling_core::request::{Answer, Content, Embed, Features, OnDegraded, Ranked, Request, Retrieve, User};
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::Threads;
use sterling_serving::pass::{self, Cpu};
use sterling_serving::registry::Loaded;
use sterling_serving::view::View;
use sterling_snapshot::Snapshot;
use sterling_snapshot::model::WARMUP_FILE;
use sterling_storage::files::{self, Checksum};

/// Maximum number of lines of a warm-up.
const LINES_MAX: usize = 1000;
/// Maximum size of a warm-up file in bytes.
const BYTES_MAX: u64 = 16 << 20;
/// Time limit of a warm-up.
const TIME_MAX: Duration = Duration::from_secs(60);
/// Default tolerance of scores, relative to the largest score of the line.
const TOLERANCE: f32 = 1e-3;

/// Stored request with its golden answer: both of `ids` and `scores`, or neither.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    /// Body of a `:retrieve` call.
    #[serde(borrow)]
    request: &'a RawValue,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ids: Option<Vec<ItemId>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scores: Option<Vec<f32>>,
    /// Tolerance relative to the largest score of the line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tolerance: Option<f32>,
}

/// Checks a loaded version with its stored requests, or by one retrieval if it has none.
///
/// # Errors
/// `Corrupt` with the line, the received and the expected answer; `DeadlineExceeded` or `Unavailable` if the version could not be
/// checked in time; `Invalid` for a line that cannot be read.
pub fn check(loaded: &Loaded) -> Result<()> {
    // Golden answers belong to the snapshot alone, without its delta.
    let view = Arc::new(View::new(loaded.view().main().clone()));
    let main = view.main();
    let Some(expected) = main.manifest.files.get(WARMUP_FILE) else { return answer_one(&view) };
    let text = read(&main.package.folder().join(WARMUP_FILE))?;
    if Checksum::of(text.as_bytes()) != *expected {
        return Err(Error::corrupt(format!("{WARMUP_FILE}: the file has changed since it was verified")));
    }
    let mut replay = Replay::new(&view);
    for_each_line(&text, |_, line| {
        let came = replay.answer(&line)?;
        match (&line.ids, &line.scores) {
            (Some(ids), Some(scores)) => agree(&came, ids, scores, line.tolerance.unwrap_or(TOLERANCE)),
            _ => Err(Error::invalid("no `ids` and `scores`, expected the golden answer")),
        }
    })
}

/// Returns the warm-up of a version that is about to be published, from the warm-up of its package: lines without an answer get the
/// version's answer, other lines must match it. If `faithful` is false, because the recipe rounds the inputs of the answers, all
/// lines get the version's answers.
///
/// # Errors
/// `Invalid` with the line that cannot be read; as [`check`].
pub fn fill(text: &str, snapshot: Snapshot, faithful: bool) -> Result<String> {
    let view = Arc::new(View::new(Arc::new(snapshot)));
    let mut replay = Replay::new(&view);
    let mut filled = String::with_capacity(text.len());
    for_each_line(text, |as_it_was, mut line| {
        let came = replay.answer(&line)?;
        match (&line.ids, &line.scores) {
            (Some(ids), Some(scores)) if faithful => {
                agree(&came, ids, scores, line.tolerance.unwrap_or(TOLERANCE))?;
                filled.push_str(as_it_was);
            }
            (Some(_), Some(_)) | (None, None) => {
                if let Some(place) = came.scores.iter().position(|score| !score.is_finite()) {
                    return Err(Error::invalid(format!("rank {}: the score is not a finite number", place + 1)));
                }
                (line.ids, line.scores) = (Some(came.ids), Some(came.scores));
                filled.push_str(&serde_json::to_string(&line).map_err(|e| Error::internal(e.to_string()))?);
            }
            _ => return Err(Error::invalid("got one of `ids` and `scores`, expected both or none")),
        }
        filled.push('\n');
        Ok(())
    })?;
    Ok(filled)
}

/// Returns the request of a line of a warm-up.
///
/// # Errors
/// `Invalid` if the line cannot be parsed.
pub fn request(line: &str) -> Result<String> {
    sterling_api::object::<Line<'_>>(line.as_bytes()).map(|line| line.request.get().to_owned())
}

/// Reads the warm-up file at `path`.
///
/// # Errors
/// `Invalid` if the file is too large or not text, `Io`.
pub fn read(path: &Path) -> Result<String> {
    let io = |e| Error::io(path.display(), e);
    let bytes = fs::metadata(path).map_err(io)?.len();
    if bytes > BYTES_MAX {
        return Err(Error::invalid(format!("{WARMUP_FILE}: {bytes} bytes, expected up to {BYTES_MAX}")));
    }
    let text = files::read(path)?;
    String::from_utf8(text).map_err(|_| Error::invalid(format!("{WARMUP_FILE}: not UTF-8")))
}

fn for_each_line(text: &str, mut take: impl FnMut(&str, Line<'_>) -> Result<()>) -> Result<()> {
    for (n, line) in text.lines().enumerate() {
        let taken = match n < LINES_MAX {
            true => sterling_api::object(line.as_bytes()).and_then(|parsed| take(line, parsed)),
            false => Err(Error::invalid(format!("expected up to {LINES_MAX} lines"))),
        };
        taken.map_err(|e| e.within(format!("{WARMUP_FILE} line {}", n + 1)))?;
    }
    Ok(())
}

/// Answers warm-up requests from one view, within a time limit.
struct Replay<'a> {
    view: &'a Arc<View>,
    pass: Cpu,
    deadline: Instant,
}

impl<'a> Replay<'a> {
    fn new(view: &'a Arc<View>) -> Self {
        Replay { view, pass: Cpu::new(Threads::new(1)), deadline: Instant::now() + TIME_MAX }
    }

    fn answer(&mut self, line: &Line<'_>) -> Result<Ranked> {
        let Retrievals::One(request, ..) = sterling_api::retrievals(line.request.get().as_bytes())? else {
            return Err(Error::invalid("field `request`: got a list of requests, expected one"));
        };
        let answer = self.run(Request::Retrieve(*request))?;
        if answer.degraded_rows > 0 {
            return Err(Error::unavailable(format!("{} rows of the cluster were not received", answer.degraded_rows)));
        }
        match answer.content {
            Content::Items(ranked) => Ok(ranked),
            Content::Embedding(_) | Content::Selected(_) => {
                Err(Error::internal("a retrieval was answered with something other than items"))
            }
        }
    }

    fn run(&mut self, request: Request) -> Result<Answer> {
        let prepared = [pass::prepare(self.view, request)?];
        let answer = pass::run(&mut self.pass, &prepared, Some(self.deadline)).pop();
        answer.unwrap_or_else(|| Err(Error::internal("the pass did not answer a request")))
    }
}

/// Runs the vector of an item through every step of a request, so that a version that cannot run is rejected and first requests are
/// not slow. If the reranker reads user features, uses a user without features, whom some models cannot score.
fn answer_one(view: &Arc<View>) -> Result<()> {
    let package = &view.main().package;
    let mut replay = Replay::new(view);
    if !package.needs_features() {
        let index = &view.main().index;
        let mut vector = vec![0.0; view.dimension()];
        if let Some(list) = index.list_lengths().iter().position(|length| *length > 0) {
            index.row(Slot(index.list_offsets()[list]), &mut vector);
        }
        let vector = vector.repeat(package.spec.query_count());
        replay.run(Request::Retrieve(Retrieve::of(User::Vector(vector))))?;
    }
    if package.user.is_some() {
        let request = match package.needs_features() {
            true => Request::Retrieve(Retrieve::of(User::Features(Features::new()))),
            false => {
                Request::Embed(Embed { features: Features::new(), on_degraded: OnDegraded::DefaultRows, whole: false })
            }
        };
        if let Err(error) = replay.run(request) {
            tracing::warn!(%error, "warm-up request of a user without features failed; ignoring it");
        }
    }
    Ok(())
}

/// Compares an answer with the golden answer: the same number of items, scores within `tolerance` of the largest score, and the
/// same items, except for swaps among scores within the tolerance of each other or of the list's last score.
fn agree(came: &Ranked, ids: &[ItemId], scores: &[f32], tolerance: f32) -> Result<()> {
    if ids.len() != scores.len() {
        return Err(Error::invalid(format!(
            "got {} `ids` and {} `scores`, expected equal numbers",
            ids.len(),
            scores.len()
        )));
    }
    if !(0.0..=1.0).contains(&tolerance) {
        return Err(Error::invalid(format!("field `tolerance`: got {tolerance}, expected 0 to 1")));
    }
    if came.ids.len() != ids.len() {
        return Err(Error::corrupt(format!("got {} items, expected {}", came.ids.len(), ids.len())));
    }
    let allowed = tolerance * scores.iter().fold(0.0, |most: f32, score| most.max(score.abs()));
    let is_near = |a: f32, b: f32| (a - b).abs() <= allowed;
    for (n, (id, score)) in came.ids.iter().zip(&came.scores).enumerate() {
        let is_at_the_end = || scores.last().is_some_and(|last| is_near(*last, *score));
        let is_tied = || ids.iter().position(|other| other == id).is_some_and(|at| is_near(scores[at], *score));
        if !is_near(scores[n], *score) || (ids[n] != *id && !is_tied() && !is_at_the_end()) {
            return Err(Error::corrupt(format!(
                "rank {}: got item {id} with score {score}, expected item {} with score {} within {allowed}",
                n + 1,
                ids[n],
                scores[n]
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    fn ranked(items: &[(i64, f32)]) -> Ranked {
        let (ids, scores) = items.iter().map(|(id, score)| (ItemId(*id), *score)).unzip();
        Ranked { ids, scores, ..Ranked::default() }
    }

    #[test]
    fn golden_answers_agree_up_to_rounding_and_near_ties() {
        let golden = [(1, 4.0), (2, 2.0), (3, 1.999), (4, 1.0)];
        for (came, agrees) in [
            (&golden[..], true),
            (&[(1, 4.003), (2, 1.997), (3, 1.996), (4, 1.003)], true),
            (&[(1, 4.0), (3, 2.0), (2, 2.0), (4, 1.0)], true),
            // An item that is just beyond the end of the list.
            (&[(1, 4.0), (2, 2.0), (3, 1.999), (9, 1.0)], true),
            (&[(1, 4.005), (2, 2.0), (3, 1.999), (4, 1.0)], false),
            (&[(2, 4.0), (1, 2.0), (3, 1.999), (4, 1.0)], false),
            (&[(1, 4.0), (9, 2.0), (3, 1.999), (4, 1.0)], false),
            (&[(1, f32::NAN), (2, 2.0), (3, 1.999), (4, 1.0)], false),
            (&golden[..3], false),
            (&[], false),
        ] {
            let golden = ranked(&golden);
            let result = agree(&ranked(came), &golden.ids, &golden.scores, TOLERANCE);
            assert_eq!(result.as_ref().err().map(Error::kind), (!agrees).then_some(Kind::Corrupt), "{came:?}");
        }
        let nothing = ranked(&[]);
        agree(&nothing, &[], &[], TOLERANCE).unwrap();
        assert_eq!(agree(&nothing, &[ItemId(1)], &[], TOLERANCE).unwrap_err().kind(), Kind::Invalid);
    }
}
