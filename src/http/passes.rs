//! The calls that workers answer: a body becomes work, which is prepared, run and told of.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::IntoResponse as _;
use futures_util::future::join_all;

use super::access::Caller;
use super::answer::{Outcome, Share, Timing, json, problem, reply};
use super::app::App;
use super::audit::{self, Again, Turn};
use super::bodies::Whole;
use super::form::Form;
use super::pages::Page;
use super::paths::{Names, PathNames};
use super::position::seen;
use super::slow::Passed;
use super::wire::{
    self, EmbedRequest, EmbedResponse, Entry, Problem, RankRequest, Reply, Retrievals, RetrieveOneOrMany,
    RetrieveResponse, RetrievedOneOrMany, Served, Shape,
};
use crate::engine::Terms;
use crate::error::{Error, Kind, Result};
use crate::pass::{self, Cost, Prepared};
use crate::registry::{Loaded, Which};
use crate::request::{Answer, Request as Ask, Retrieve};
use crate::view::View;

/// The verbs of the calls that workers answer.
pub(super) const VERBS: [&str; 4] = ["retrieve", "rank", "embed", "pass"];

/// `:retrieve`, `:rank` or `:embed` of the version that answers.
pub async fn of_active(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    dispatch(&app, app.registry.get(&model, Which::Active)?, request).await
}

/// The same of the version that the path names.
pub async fn of_version(
    State(app): State<Arc<App>>,
    Names((model, version)): Names<(String, u64)>,
    request: Request,
) -> Outcome {
    dispatch(&app, app.registry.get(&model, Which::Version(version))?, request).await
}

/// The same of the version that a label points to.
pub async fn of_label(
    State(app): State<Arc<App>>,
    Names((model, label)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    dispatch(&app, app.registry.get(&model, Which::Label(&label))?, request).await
}

async fn dispatch(app: &Arc<App>, model: Arc<Loaded>, request: Request) -> Outcome {
    let verb = request.extensions().get::<PathNames>().map_or("", PathNames::call);
    let (caller, form) = (request.extensions().get::<Caller>().cloned(), Form::of(&request));
    // What cannot be in time need not be read; what the gate could not tell ends here.
    app.engine.admits(None)?;
    let view = seen(app, &model, request.uri()).await?;
    let body = app.bodies.read(request).await?;
    match verb {
        "retrieve" => retrieve(app, &model, view, body, (caller, form)).await,
        "rank" => rank(app, &model, view, body, form).await,
        _ => embed(app, &model, view, body).await,
    }
}

/// What a body asks for, ready to run.
enum Asked {
    One(Box<Single>),
    Many(Vec<Ready>),
}

/// One request, ready to run.
struct Single {
    prepared: Prepared,
    terms: Terms,
    shape: Shape,
    /// Where its answer is to be audited.
    again: Option<Box<Again>>,
    /// Where its answer is to be a page.
    page: Option<Page>,
}

/// What a call sees: the edge, a version, and a view of it.
struct Seen {
    app: Arc<App>,
    model: Arc<Loaded>,
    view: Arc<View>,
}

fn prepare_retrievals(seen: &Seen, turn: Option<Turn>, body: &[u8]) -> Result<Asked> {
    let view = &seen.view;
    let requests = match wire::retrievals(body)? {
        Retrievals::One(request, terms, shape) => return single(seen, turn, *request, (terms, shape)),
        Retrievals::Many(requests) => requests,
    };
    prepared_each(view, requests).map(Asked::Many)
}

/// A request that was made ready, or what is wrong with it.
pub(super) type Ready = Result<(Prepared, Terms, Shape)>;

/// Each of a list of retrievals made ready.
///
/// # Errors
/// `TooCostly` for what all of them cost together.
pub(super) fn prepared_each(
    view: &Arc<View>,
    requests: impl IntoIterator<Item = Result<(Retrieve, Terms, Shape)>>,
) -> Result<Vec<Ready>> {
    let mut cost = Cost::default();
    let mut asked = Vec::new();
    for request in requests {
        let prepared = request.and_then(|(request, terms, shape)| {
            if shape.cursor.is_some() {
                return Err(Error::invalid("field `cursor` in a list of requests: pages are asked for one by one"));
            }
            Ok((pass::prepare(view, Ask::Retrieve(request))?, terms, shape))
        });
        if let Ok((prepared, ..)) = &prepared {
            // What is too much already need not be added up to its end.
            cost = cost.plus(prepared.cost());
            cost.check("the requests of the body")?;
        }
        asked.push(prepared);
    }
    Ok(asked)
}

/// One retrieval made ready, over the view that its cursor names where it has one.
fn single(seen: &Seen, turn: Option<Turn>, mut request: Retrieve, (terms, shape): (Terms, Shape)) -> Result<Asked> {
    let of = |cursor: &String| {
        let app = &seen.app;
        Page::of((&app.registry, &app.pages), (&seen.model, &seen.view), &mut request, cursor)
    };
    let page = shape.cursor.as_ref().map(of).transpose()?;
    let view = page.as_ref().map_or(&seen.view, |page| &page.view);
    let again = Again::of(turn.filter(|_| page.is_none()), view, &request).map(Box::new);
    let prepared = pass::prepare(view, Ask::Retrieve(request))?;
    Ok(Asked::One(Box::new(Single { prepared, terms, shape, again, page })))
}

/// Retrieve items for one request, or for each of a list of requests.
#[utoipa::path(post, path = "/v1/models/{model}:retrieve", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body(content = inline(RetrieveOneOrMany)),
    responses((status = 200, content((inline(RetrievedOneOrMany) = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn retrieve(
    app: &Arc<App>,
    model: &Arc<Loaded>,
    view: Arc<View>,
    body: Whole,
    (caller, form): (Option<Caller>, Form),
) -> Outcome {
    let (told, turn) = (app.served(model, &view), app.audit.turn());
    let seen = Seen { app: app.clone(), model: model.clone(), view };
    match app.asides.prepare(body, move |body| prepare_retrievals(&seen, turn, body)).await? {
        Asked::One(single) => one(app, model, *single, form).await,
        Asked::Many(prepared) => {
            let (results, share, passed) = side_by_side(app, &told, prepared, caller).await?;
            let entries = results.into_iter().map(|r| r.unwrap_or_else(|e| problem(&e).into())).collect();
            let answer = reply(Reply::many(told, entries), Timing::default(), share, form)?;
            Ok((Extension(passed), answer).into_response())
        }
    }
}

/// Answers each of a list of retrievals, with the share of memory that the answers take.
///
/// # Errors
/// `Overloaded` where none of them was taken in.
pub(super) async fn side_by_side(
    app: &Arc<App>,
    told: &Served,
    prepared: Vec<Ready>,
    caller: Option<Caller>,
) -> Result<(Vec<Result<Entry>>, Share, Passed)> {
    if let Some(caller) = caller {
        caller.charge(prepared.len().saturating_sub(1));
    }
    let costs = prepared.iter().flatten().map(|(prepared, ..)| prepared.cost());
    let share = app.bodies.hold_answer(costs.fold(Cost::default(), Cost::plus).answer_bytes)?;
    let calls = prepared.into_iter().map(|prepared| async {
        let (prepared, terms, shape) = prepared?;
        let (answer, view, columns) = answered(app, prepared, terms, None).await?;
        items(answer, &view, &columns, &shape)
    });
    let (count, begun) = (calls.len(), Instant::now());
    let mut results = join_all(calls).await;
    // Where nothing was taken in, the whole call was refused, and load balancers must see it.
    let is_refused = |r: &Result<Entry>| r.as_ref().is_err_and(|e| e.kind() == Kind::Overloaded);
    if results.iter().all(is_refused)
        && let Some(Err(error)) = results.pop()
    {
        return Err(error);
    }
    let passed = Passed { requests: count, engine: begun.elapsed(), ..Passed::of(told) };
    Ok((results, share, passed))
}

/// Runs what was prepared, and has its answer audited where it is to be. Returns it with the view that answered and the columns to tell.
async fn answered(
    app: &Arc<App>,
    prepared: Prepared,
    terms: Terms,
    again: Option<Box<Again>>,
) -> Result<(Answer, Arc<View>, Vec<String>)> {
    let columns = prepared.columns().to_vec();
    let view = prepared.view().clone();
    let answer = app.engine.submit(prepared, terms).await?;
    if let Some(again) = again {
        let (app, served) = (app.clone(), audit::ids(&answer));
        tokio::spawn(async move { again.run(&app.engine, &served).await });
    }
    Ok((answer, view, columns))
}

/// Makes the items of an answer ready to be written.
fn items(answer: Answer, view: &View, columns: &[String], shape: &Shape) -> Result<Entry> {
    let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.as_str());
    let entry = Entry::items(answer, tasks, view.columns(), columns)?;
    if shape.is_table { entry.as_table() } else { Ok(entry) }
}

async fn one(app: &Arc<App>, model: &Loaded, single: Single, form: Form) -> Outcome {
    let Single { prepared, terms, shape, again, page } = single;
    let model = page.as_ref().map_or(model, |page| &page.model);
    let share = app.bodies.hold_answer(prepared.cost().answer_bytes)?;
    let told = app.served(model, prepared.view());
    let begun = Instant::now();
    let (prepared, is_asked) = prepared.explained();
    let (mut answer, view, columns) = answered(app, prepared, terms, again).await?;
    let explain = if is_asked { answer.explain.clone() } else { answer.explain.take() };
    let passed = Passed { engine: begun.elapsed(), explain: explain.map(Box::new), ..Passed::of(&told) };
    let cursor = page.as_ref().map(|page| page.cut(&mut answer)).transpose()?.flatten();
    if let Some(page) = page.filter(|_| cursor.is_some()) {
        app.pages.keep(&app.registry, &page);
    }
    let entry = items(answer, &view, &columns, &shape)?.with_cursor(cursor);
    let timing = Timing::of(entry.steps());
    Ok((Extension(passed), reply(Reply::one(told, entry), timing, share, form)?).into_response())
}

/// Score the items that the request names.
#[utoipa::path(post, path = "/v1/models/{model}:rank", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body = RankRequest,
    responses((status = 200, content((RetrieveResponse = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn rank(app: &Arc<App>, model: &Loaded, view: Arc<View>, body: Whole, form: Form) -> Outcome {
    let ranking = move |body: &[u8]| {
        let (request, terms, shape) = wire::rank(body)?;
        let prepared = pass::prepare(&view, Ask::Rank(request))?;
        Ok(Single { prepared, terms, shape, again: None, page: None })
    };
    let single = app.asides.prepare(body, ranking).await?;
    one(app, model, single, form).await
}

/// The query embedding of a user's features.
#[utoipa::path(post, path = "/v1/models/{model}:embed", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body = EmbedRequest,
    responses((status = 200, body = EmbedResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn embed(app: &App, model: &Loaded, view: Arc<View>, body: Whole) -> Outcome {
    let embedding = move |body: &[u8]| {
        let (request, terms) = wire::embed(body)?;
        Ok((pass::prepare(&view, Ask::Embed(request))?, terms))
    };
    let (prepared, terms) = app.asides.prepare(body, embedding).await?;
    let told = app.served(model, prepared.view());
    let begun = Instant::now();
    let answer = app.engine.submit(prepared, terms).await?;
    let passed = Passed { engine: begun.elapsed(), ..Passed::of(&told) };
    Ok((Extension(passed), json(&wire::embedding(told, answer)?)).into_response())
}
