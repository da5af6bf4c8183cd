//! Between the typed requests of the edge and an engine that still takes those of [`crate::wire`]: goes when the engine
//! takes them typed.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::wire::Terms;
use crate::engine::{Engine, Loaded};
use crate::error::Result;
use crate::request::{self, Answer, Content, Features, Ranked, Request, StepReport, User, Values};
use crate::snapshot::Snapshot;
use crate::units::{ItemId, Slot};
use crate::wire;

/// Refuses a request whose answer could not be in time, before its body is read.
pub(super) fn admits(_: &Engine, _: Option<Duration>) -> Result<()> {
    Ok(())
}

/// Answers a request of any sort.
pub(super) async fn answer(engine: &Engine, model: Arc<Loaded>, request: Request, terms: Terms) -> Result<Answer> {
    let timeout_ms = terms.timeout.map(|t| t.as_millis() as u64);
    match request {
        Request::Retrieve(request) => {
            let (features, vector) = user(request.user);
            let reading = request.reading;
            let request = wire::RetrieveRequest {
                features,
                vector,
                filter: request.filter,
                exclude: request.exclude.iter().map(|id| id.0).collect(),
                k: request.k,
                candidates: request.candidates,
                probes: request.probes,
                exact: request.exact,
                columns: reading.columns,
                constants: reading.constants,
                timeout_ms,
                explain: reading.explain,
                on_degraded: degraded(reading.on_degraded),
            };
            let found = engine.retrieve(model.clone(), request).await?;
            Ok(ranked(model.model().snapshot(), found))
        }
        Request::Rank(request) => {
            let (features, vector) = user(request.user);
            let reading = request.reading;
            let request = wire::RankRequest {
                features,
                vector,
                items: request.items.iter().map(|id| id.0).collect(),
                columns: reading.columns,
                constants: reading.constants,
                timeout_ms,
                explain: reading.explain,
                on_degraded: degraded(reading.on_degraded),
            };
            let found = engine.rank(model.clone(), request).await?;
            Ok(ranked(model.model().snapshot(), found))
        }
        Request::Embed(request) => {
            let on_degraded = degraded(request.on_degraded);
            let request = wire::EmbedRequest { features: features(request.features), timeout_ms, on_degraded };
            let (embedding, degraded_rows) = engine.embed(model, request).await?;
            Ok(Answer { content: Content::Embedding(embedding), degraded_rows, explain: None })
        }
    }
}

fn degraded(on_degraded: request::OnDegraded) -> wire::OnDegraded {
    match on_degraded {
        request::OnDegraded::Fail => wire::OnDegraded::Fail,
        request::OnDegraded::DefaultRows => wire::OnDegraded::DefaultRows,
    }
}

fn user(user: User) -> (Option<Map<String, Value>>, Option<Vec<f32>>) {
    match user {
        User::Features(given) => (Some(features(given)), None),
        User::Vector(vector) => (None, Some(vector)),
    }
}

fn features(features: Features) -> Map<String, Value> {
    let value = |values| match values {
        Values::Integers(list) => json!(list),
        Values::Numbers(list) => json!(list),
        Values::Texts(list) => json!(list),
        Values::Weighted { ids, weights } => json!({"values": ids, "weights": weights}),
    };
    features.into_iter().map(|(name, values)| (name, value(values))).collect()
}

fn ranked(snapshot: &Snapshot, found: wire::Retrieved) -> Answer {
    let items = &found.items;
    let task = |spec: &crate::model::TaskSpec| items.iter().map(|i| i.tasks[&spec.name]).collect::<Vec<_>>();
    let ranked = Ranked {
        slots: items.iter().map(|i| snapshot.ids.slot(ItemId(i.id)).unwrap_or(Slot(0))).collect(),
        ids: items.iter().map(|i| ItemId(i.id)).collect(),
        scores: items.iter().map(|i| i.score).collect(),
        similarities: items.iter().map(|i| i.similarity).collect(),
        tasks: snapshot.package.spec.tasks.iter().flat_map(task).collect(),
        unknown: found.unknown.into_iter().map(ItemId).collect(),
    };
    let known = |name: &str, all: &[&'static str]| all.iter().copied().find(|n| *n == name).unwrap_or("");
    let steps = ["lookup", "tower", "plan", "probe", "words", "scan", "verify", "rescore", "overarch", "value", "top"];
    let step =
        |s: &wire::Step| StepReport { name: known(&s.name, &steps), micros: s.micros, bytes: s.bytes, items: s.items };
    let explain = found.explain.as_ref().map(|e| request::Explain {
        steps: e.steps.iter().map(step).collect(),
        route: known(&e.route, &["all", "none", "postings", "words", "exact"]),
        filter: e.filter.clone(),
        pass_rate: e.pass_rate,
        probed: e.probed,
        scanned: e.scanned,
        survivors: e.survivors,
        candidates: e.candidates,
        returned: e.returned,
        kernel: snapshot.index.kernel(),
    });
    Answer { content: Content::Items(ranked), degraded_rows: found.degraded_rows, explain }
}
