//! Calls answered by models of this process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::response::IntoResponse as _;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::task::yield_now;

use super::access::Caller;
use super::answer::{Outcome, Share, Timing, json, problem, reply};
use super::app::App;
use super::audit::{self, ExactRetrieval};
use super::bodies::Bodies;
use super::call::{Call, Parsed};
use super::choice::{CallUser, Choice, Chosen, Version};
use super::cursor;
use super::form::Form;
use super::items;
use super::offload::Asides;
use super::pages::Page;
use super::paths::Target;
use super::position::seen;
use super::retriever::Retriever;
use super::shadow::{Mirrored, ServedParts, query_in_background};
use super::slow::PassWork;
use super::verb::Verb;
use super::watched::{self, Watched};
use super::worst::Worst;
use sterling_api::{
    DesiredState, Entry, HeldShard, ItemResponse, LabelList, ModelInfo, ModelList, PositionResponse, Reply, Retrievals,
    Served, ShadowDiff, Shape, ShardsResponse, TrafficResponse, VersionInfo, VersionList, Widths, traffic_info,
};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{Answer, CallOptions, Request as Ask, Retrieve, VersionSelector};
use sterling_core::units::ItemId;
use sterling_serving::pass::{self, Cost, Prepared};
use sterling_serving::registry::{Loaded, Registry, VersionState};
use sterling_serving::view::View;
use sterling_snapshot::Desired;

/// Number of requests of a list that are submitted to the engine before other connections are polled: each takes
/// 50 to 100 µs.
const SUBMITTED_PER_POLL: usize = 16;

/// Parsed requests of a body, ready to run.
pub(super) enum LocalReady {
    /// One retrieval or ranking.
    One(Box<Single>),
    /// List of retrievals at one version.
    Many(Chosen, Vec<Ready>),
    Embed(Box<Single>),
}

impl Retriever for App {
    const NAME: &'static str = "server";
    type Choice = Choice;
    type Ready = LocalReady;

    fn bodies(&self) -> &Bodies {
        &self.bodies
    }

    fn asides(&self) -> &Asides {
        &self.asides
    }

    fn shadow_diffs(&self) -> &Worst<ShadowDiff> {
        &self.shadows.worst
    }

    async fn choose(self: &Arc<Self>, target: &Target, head: &Parts) -> Result<Choice> {
        match target.selected_version() {
            VersionSelector::Active => Choice::unpinned(self, self.registry.unpinned(&target.model)?, head).await,
            pinned => Choice::pinned(self, self.registry.get(&target.model, pinned)?, &head.uri).await,
        }
    }

    fn has_texts(choice: &Choice) -> bool {
        choice.has_texts()
    }

    fn prepare(&self, choice: Choice, parsed: Parsed) -> Result<LocalReady> {
        match parsed {
            Parsed::Retrieve(Retrievals::One(request, terms, shape)) => {
                let chosen = choice.of(&CallUser::User(&request.user));
                let single = retrieval(self, chosen, *request, (terms, shape))?;
                Ok(LocalReady::One(Box::new(single)))
            }
            Parsed::Retrieve(Retrievals::Many(requests)) => {
                let chosen = choice.of(&CallUser::Several);
                chosen.version.check_coverage(self)?;
                let prepared = prepared_each(&chosen.version.view, requests, self.engine.timeout())?;
                Ok(LocalReady::Many(chosen, prepared))
            }
            Parsed::Rank(request, terms, shape) => {
                let Chosen { version, watched, shadow } = choice.of(&CallUser::User(&request.user));
                let mirrored = self.shadows.mirrored(shadow, || Ask::Rank(request.clone()));
                let single = asked(self, version, watched, (Ask::Rank(request), terms, shape))?;
                Ok(LocalReady::One(Box::new(Single { mirrored, ..single })))
            }
            Parsed::Embed(request, terms) => {
                let Chosen { version, watched, .. } = choice.of(&CallUser::Features(&request.features));
                let single = asked(self, version, watched, (Ask::Embed(request), terms, Shape::default()))?;
                Ok(LocalReady::Embed(Box::new(single)))
            }
        }
    }

    async fn run(self: &Arc<Self>, ready: LocalReady, call: Call) -> Outcome {
        match ready {
            LocalReady::One(single) => one(self, *single, call).await,
            LocalReady::Many(chosen, prepared) => many(self, chosen, prepared, call).await,
            LocalReady::Embed(single) => embed(self, *single, call).await,
        }
    }

    async fn models(self: &Arc<Self>, caller: Caller) -> ModelList {
        let models = self.registry.list();
        let visible = models.iter().filter(|model| caller.may_see(model.name()));
        ModelList { models: visible.map(|model| self.described(model)).collect(), unavailable: Vec::new() }
    }

    async fn info(self: &Arc<Self>, model: &str, selected_version: VersionSelector<'_>) -> Result<ModelInfo> {
        Ok(self.described(&*self.registry.get(model, selected_version)?))
    }

    async fn versions(self: &Arc<Self>, model: String) -> Result<VersionList> {
        let registry = self.registry.clone();
        self.store_reads.read(move || version_list(&registry, model)).await
    }

    fn labels(&self, model: String) -> Result<LabelList> {
        Ok(LabelList { labels: self.registry.labels(&model)?, model })
    }

    fn shards(&self, model: &str) -> Result<ShardsResponse> {
        let loaded = self.registry.get(model, VersionSelector::Active)?;
        let view = loaded.view();
        let shard = view.main().manifest.shard.map_or(0, |part| part.shard);
        let held = HeldShard { shard, items: view.items(), servers: 1 };
        Ok(ShardsResponse { served: self.served(&loaded, &view), shards: vec![held] })
    }

    fn traffic(&self, model: String) -> Result<TrafficResponse> {
        let now = self.registry.traffic(&model)?;
        Ok(traffic_info(model, now))
    }

    async fn item(self: &Arc<Self>, model: &str, id: ItemId, head: &Parts) -> Result<ItemResponse> {
        let loaded = self.registry.get(model, VersionSelector::Active)?;
        let view = seen(self, &loaded, &head.uri).await?;
        let slot = view.slot(id).ok_or_else(|| {
            Error::not_found(format!("model `{model}` holds no item {} at position {}", id.0, view.position()))
        })?;
        let attributes = sterling_api::attributes(&view.columns(), slot);
        Ok(ItemResponse { served: self.served(&loaded, &view), id: id.0, attributes })
    }

    async fn position(self: &Arc<Self>, model: &str, head: &Parts) -> Result<PositionResponse> {
        let loaded = self.registry.get(model, VersionSelector::Active)?;
        let durable = self.feed(&loaded)?.last();
        let view = seen(self, &loaded, &head.uri).await?;
        let (items, fresh_items) = (view.items(), view.fresh_items());
        Ok(PositionResponse { served: self.served(&loaded, &view), durable, items, fresh_items, shards: Vec::new() })
    }

    async fn upsert(self: &Arc<Self>, model: String, request: Request) -> Outcome {
        items::upsert_locally(self, model, request).await
    }

    async fn delete(self: &Arc<Self>, model: String, request: Request) -> Outcome {
        items::delete_locally(self, model, request).await
    }

    fn ready(&self) -> Result<()> {
        if self.entrance.draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the server is shutting down"));
        }
        self.registry.ready()?;
        if self.engine.available_workers() == 0 {
            let count = self.engine.workers();
            return Err(Error::not_ready(format!(
                "all {count} workers have ended or hang in abandoned requests: restart the server"
            )));
        }
        match self.registry.list().iter().find_map(|model| Some((model.name().to_owned(), model.content().stalled()?)))
        {
            Some((name, why)) => Err(Error::not_ready(format!("model `{name}` applies no more updates: {why}"))),
            None => Ok(()),
        }
    }

    fn report(&self) -> Vec<String> {
        let device = format!("device: {}", self.engine.backend().device());
        // Any caller with the role `read` may see these warnings, so folder names are removed; the log has them.
        let reported = |warning: &String| format!("warning: {}", sterling_api::without_folders(warning));
        std::iter::once(device).chain(self.warnings().iter().map(reported)).collect()
    }
}

impl Call {
    fn terms(&self, terms: CallOptions) -> CallOptions {
        CallOptions { flow: self.flow, ..terms }
    }

    /// Reserves memory for answers of this cost and for their serialized form.
    fn hold_answer(&self, app: &App, cost: Cost, widths: Widths) -> Result<Share> {
        let written = match self.form {
            Form::Json => widths.as_text(cost.items),
            Form::Arrow(_) => widths.as_arrow(cost.items),
        };
        app.bodies.hold_answer(self.flow, cost.answer_bytes.saturating_add(written))
    }
}

/// Returns the largest value sizes of the columns that a request reads.
pub(super) fn widths(prepared: &Prepared) -> Result<Widths> {
    let (view, tasks) = (prepared.view(), prepared.view().main().package.spec.tasks.len());
    Widths::of(&view.columns(), prepared.columns(), tasks)
}

/// Request that is ready to run.
pub(super) struct Single {
    prepared: Prepared,
    terms: CallOptions,
    shape: Shape,
    /// Version that answers.
    model: Arc<Loaded>,
    /// Audit of the request's answer.
    again: Option<Box<ExactRetrieval>>,
    /// Page to answer with.
    page: Option<Page>,
    /// Observation of the version choice, while a canary is active.
    watched: Option<Watched>,
    /// Shadow request.
    mirrored: Option<Box<Mirrored>>,
}

/// Prepared request, or its validation error.
pub(super) type Ready = Result<(Prepared, CallOptions, Shape)>;

/// Prepares each of a list of retrievals.
///
/// Requests whose timeout, `timeout` if they name none, passes before they are prepared fail with `DeadlineExceeded`.
///
/// # Errors
/// `TooCostly` if the total cost of the requests is too high.
pub(super) fn prepared_each(
    view: &Arc<View>,
    requests: impl IntoIterator<Item = Result<(Retrieve, CallOptions, Shape)>>,
    timeout: Duration,
) -> Result<Vec<Ready>> {
    let start = Instant::now();
    let mut cost = Cost::default();
    let mut asked = Vec::new();
    for request in requests {
        let prepared = request.and_then(|(request, terms, shape)| {
            cursor::alone(shape.cursor.as_ref())?;
            if start.elapsed() > terms.timeout.unwrap_or(timeout) {
                let what = "the time of the request passed while other requests of the list were prepared";
                return Err(Error::new(Kind::DeadlineExceeded, what));
            }
            Ok((pass::prepare(view, Ask::Retrieve(request))?, terms, shape))
        });
        if let Ok((prepared, ..)) = &prepared {
            // Stop at the first request that exceeds the limit.
            cost = cost.plus(prepared.cost());
            cost.check("the requests of the body")?;
        }
        asked.push(prepared);
    }
    Ok(asked)
}

/// Prepares a retrieval, at the view that its cursor names if it has one.
fn retrieval(app: &App, chosen: Chosen, mut request: Retrieve, (terms, shape): (CallOptions, Shape)) -> Result<Single> {
    let Chosen { version, watched, shadow } = chosen;
    let of =
        |cursor: &String| Page::of((&app.registry, &app.pages), (&version.model, &version.view), &mut request, cursor);
    let page = shape.cursor.as_ref().map(of).transpose()?;
    let Some(page) = page else {
        let turn = app.audit.turn(watched.as_ref().map_or(1.0, Watched::audited_times));
        let again = ExactRetrieval::of(turn, &version.view, &request, watched.as_ref()).map(Box::new);
        let mirrored = app.shadows.mirrored(shadow, || Ask::Retrieve(request.clone()));
        let single = asked(app, version, watched, (Ask::Retrieve(request), terms, shape))?;
        return Ok(Single { again, mirrored, ..single });
    };
    let pinned = Version { model: page.model.clone(), view: page.view.clone(), ..version };
    let single = asked(app, pinned, None, (Ask::Retrieve(request), terms, shape))?;
    Ok(Single { page: Some(page), ..single })
}

/// Prepares a request at a chosen version.
fn asked(
    app: &App,
    version: Version,
    watched: Option<Watched>,
    (ask, terms, shape): (Ask, CallOptions, Shape),
) -> Result<Single> {
    version.check_coverage(app)?;
    let Version { model, view, .. } = version;
    let prepared = pass::prepare(&view, ask).inspect_err(|error| {
        if let Some(watched) = &watched {
            watched.ended(Some(error));
        }
    })?;
    Ok(Single { prepared, terms, shape, model, again: None, page: None, watched, mirrored: None })
}

/// Answers a list of retrievals, and returns the memory reservation of the answers.
///
/// # Errors
/// `Overloaded` if none of the requests was admitted.
pub(super) async fn side_by_side(
    app: &Arc<App>,
    reported: &Served,
    prepared: Vec<Ready>,
    (call, watched): (&Call, Option<&Watched>),
) -> Result<(Vec<Result<Entry>>, Share, PassWork)> {
    let (mut cost, mut widest) = (Cost::default(), Widths::default());
    for (prepared, ..) in prepared.iter().flatten() {
        (cost, widest) = (cost.plus(prepared.cost()), widest.or(widths(prepared)?));
    }
    let share = call.hold_answer(app, cost, widest)?;
    let (count, started) = (prepared.len(), Instant::now());
    let mut calls = FuturesUnordered::new();
    let mut results = Vec::new();
    results.resize_with(count, || None);
    for (n, prepared) in prepared.into_iter().enumerate() {
        if n > 0 && n.is_multiple_of(SUBMITTED_PER_POLL) {
            // Each call sets its timer at its first poll; a thousand first polls at once would delay other connections.
            while let Some(Some((n, result))) = calls.next().now_or_never() {
                results[n] = Some(result);
            }
            yield_now().await;
        }
        let entry = entry(app, prepared, (call, started), &share);
        calls.push(async move {
            let entry = entry.await;
            if let Some(watched) = watched {
                watched.ended(entry.as_ref().err());
            }
            (n, entry)
        });
    }
    while let Some((n, result)) = calls.next().await {
        results[n] = Some(result);
    }
    drop(calls);
    let mut results: Vec<Result<Entry>> = results.into_iter().flatten().collect();
    // If no request was admitted, the whole call is rejected, so that load balancers see the status.
    let is_refused = |r: &Result<Entry>| r.as_ref().is_err_and(|e| e.kind() == Kind::Overloaded);
    if results.iter().all(is_refused)
        && let Some(Err(error)) = results.pop()
    {
        return Err(error);
    }
    let passed = PassWork { requests: count, engine: started.elapsed(), ..PassWork::of(reported) };
    Ok((results, share, passed))
}

/// Submits one of a list of retrievals, and answers it. Its time began with the list.
fn entry(
    app: &App,
    prepared: Ready,
    (call, started): (&Call, Instant),
    share: &Share,
) -> impl Future<Output = Result<Entry>> + Send {
    let submitted = prepared.map(|(prepared, terms, shape)| {
        let (columns, view) = (prepared.columns().to_vec(), prepared.view().clone());
        let prepared = prepared.asked_for(call.origin.clone());
        let timeout = terms.timeout.unwrap_or(app.engine.timeout()).saturating_sub(started.elapsed());
        let terms = call.terms(CallOptions { timeout: Some(timeout), ..terms });
        (app.engine.submit(prepared, terms), columns, view, shape)
    });
    async move {
        let (answer, columns, view, shape) = submitted?;
        items(answer.await?, (&view, &columns), &shape, share)
    }
}

/// Starts the audit and the shadow comparison of an answer, in the background.
fn compare(
    app: &Arc<App>,
    version: u64,
    answer: &Answer,
    (again, mirrored): (Option<Box<ExactRetrieval>>, Option<Box<Mirrored>>),
) {
    if let Some(again) = again {
        let (app, served) = (app.clone(), audit::ids(answer));
        tokio::spawn(async move { again.run(&app.engine, &served).await });
    }
    if let Some((mirrored, given)) = mirrored.zip(ServedParts::of(version, answer)) {
        let app = app.clone();
        tokio::spawn(async move {
            let ask = |loaded, request| query_in_background(&app.engine, loaded, request);
            mirrored.run(ask, &app.shadows.worst, given).await
        });
    }
}

/// Prepares the items of an answer for serialization.
fn items(answer: Answer, (view, columns): (&View, &[String]), shape: &Shape, share: &Share) -> Result<Entry> {
    let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.as_str());
    let entry = Entry::items(answer, tasks, view.columns(), columns)?;
    if shape.is_table { entry.as_table(share) } else { Ok(entry) }
}

async fn one(app: &Arc<App>, single: Single, call: Call) -> Outcome {
    let Single { prepared, terms, shape, model, again, page, watched, mirrored } = single;
    let share = call.hold_answer(app, prepared.cost(), widths(&prepared)?)?;
    let reported = app.served(&model, prepared.view());
    let (columns, view) = (prepared.columns().to_vec(), prepared.view().clone());
    let started = Instant::now();
    let (prepared, is_asked) = prepared.asked_for(call.origin.clone()).explained();
    let answer = app.engine.answer(prepared, call.terms(terms)).await;
    if let Some(watched) = &watched {
        watched.ended(answer.as_ref().err());
    }
    let mut answer = answer?;
    compare(app, model.version(), &answer, (again, mirrored));
    let explain = if is_asked { answer.explain.clone() } else { answer.explain.take() };
    let passed = PassWork { engine: started.elapsed(), explain: explain.map(Box::new), ..PassWork::of(&reported) };
    let cursor = page.as_ref().map(|page| page.cut(&mut answer)).transpose()?.flatten();
    if let Some(page) = page.filter(|_| cursor.is_some()) {
        app.pages.keep(&app.registry, &page);
    }
    let entry = items(answer, (&view, &columns), &shape, &share)?.with_cursor(cursor);
    let timing = Timing::of(entry.steps());
    let mut response =
        (Extension(passed), reply(Reply::one(reported, entry), timing, share, call.form)?).into_response();
    watched::set_role_header(watched.as_ref(), &mut response);
    Ok(response)
}

async fn many(app: &Arc<App>, Chosen { version, watched, .. }: Chosen, prepared: Vec<Ready>, call: Call) -> Outcome {
    let reported = app.served(&version.model, &version.view);
    let (results, share, passed) = side_by_side(app, &reported, prepared, (&call, watched.as_ref())).await?;
    results.iter().for_each(|r| app.entrance.failures.ended_in_list(Verb::Retrieve, r.as_ref().err()));
    let entries = results.into_iter().map(|r| r.unwrap_or_else(|e| problem(&e).into())).collect();
    let answer = reply(Reply::many(reported, entries), Timing::default(), share, call.form)?;
    let mut response = (Extension(passed), answer).into_response();
    watched::set_role_header(watched.as_ref(), &mut response);
    Ok(response)
}

async fn embed(app: &Arc<App>, single: Single, call: Call) -> Outcome {
    let Single { prepared, terms, model, watched, .. } = single;
    let reported = app.served(&model, prepared.view());
    let started = Instant::now();
    let answer = app.engine.answer(prepared.asked_for(call.origin.clone()), call.terms(terms)).await;
    if let Some(watched) = &watched {
        watched.ended(answer.as_ref().err());
    }
    let passed = PassWork { engine: started.elapsed(), ..PassWork::of(&reported) };
    let mut response = (Extension(passed), json(&sterling_api::embedding(reported, answer?)?)).into_response();
    watched::set_role_header(watched.as_ref(), &mut response);
    Ok(response)
}

/// Lists the versions of a model; reads the store.
pub(super) fn version_list(registry: &Registry, model: String) -> Result<VersionList> {
    let reported = |v: VersionState| VersionInfo {
        version: v.version,
        published: v.published,
        active: v.active,
        loaded: v.loaded,
        labels: v.labels,
        digest: v.digest,
        attempts: v.refused.as_ref().map(|refused| refused.attempts),
        retry_in_ms: v.refused.as_ref().and_then(|refused| Some(refused.retry_in?.as_millis() as u64)),
        refused: v.refused.map(|refused| sterling_api::without_places(&refused.reason)),
    };
    let versions = registry.versions(&model)?.into_iter().map(reported).collect();
    let desired = registry.desired(&model).map(|(desired_state, stands)| {
        let Desired { revision, version, labels, .. } = desired_state;
        DesiredState { revision, version, stands, labels }
    });
    Ok(VersionList { model, versions, desired })
}
