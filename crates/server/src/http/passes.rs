//! The calls that workers answer: a body becomes work, which is prepared, run and told of.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::IntoResponse as _;
use futures_util::future::join_all;

use super::access::Caller;
use super::answer::{Outcome, Share, Timing, json, problem, reply};
use super::app::{App, Host as _};
use super::audit::{self, Again};
use super::bodies::{BodyMemory, Whole};
use super::call_id::CallId;
use super::choice::{Asker, Choice, Chosen, Version};
use super::cursor;
use super::flow::flow_of;
use super::form::Form;
use super::pages::Page;
use super::paths::{Names, PathNames};
use super::sent::Sent;
use super::shadow::{Given, Mirrored, asked_aside};
use super::slow::Passed;
use super::watched::{self, Watched};
use sterling_api::{
    EmbedRequest, EmbedResponse, Entry, Problem, RankRequest, Reply, Retrievals, RetrieveOneOrMany, RetrieveResponse,
    RetrievedOneOrMany, Served, Shape, Widths,
};
use sterling_core::error::{Kind, Result};
use sterling_core::request::{Answer, Origin, Request as Ask, Retrieve};
use sterling_serving::engine::Terms;
use sterling_serving::pass::{self, Cost, Prepared};
use sterling_serving::quota::Flow;
use sterling_serving::registry::{Loaded, Which};
use sterling_serving::view::View;

/// The verbs of the calls that workers answer.
pub(super) const VERBS: [&str; 4] = ["retrieve", "rank", "embed", "pass"];

/// `:retrieve`, `:rank` or `:embed` of the version that answers.
pub async fn of_active(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    // What no body could change need not be read; what the gate could not see ends here.
    app.engine.admits_within(|| flow_of(&request), |_| None)?;
    let choice = Choice::unpinned(&app, app.registry.unpinned(&model)?, &request).await?;
    dispatch(&app, choice, request).await
}

/// The same of the version that the path names.
pub async fn of_version(
    State(app): State<Arc<App>>,
    Names((model, version)): Names<(String, u64)>,
    request: Request,
) -> Outcome {
    of_pinned(&app, app.registry.get(&model, Which::Version(version))?, request).await
}

/// The same of the version that a label points to.
pub async fn of_label(
    State(app): State<Arc<App>>,
    Names((model, label)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    of_pinned(&app, app.registry.get(&model, Which::Label(&label))?, request).await
}

async fn of_pinned(app: &Arc<App>, model: Arc<Loaded>, request: Request) -> Outcome {
    app.engine.admits_within(|| flow_of(&request), |_| None)?;
    let choice = Choice::pinned(app, model, request.uri()).await?;
    dispatch(app, choice, request).await
}

async fn dispatch(app: &Arc<App>, choice: Choice, request: Request) -> Outcome {
    let verb = request.extensions().get::<PathNames>().map_or("", PathNames::call);
    let call = Call::of(&request);
    let (sent, body) = app.bodies.read_sent(request, sent_beside_json(verb)).await?;
    // Parsing costs far more than this, and most of what is read under overload is refused.
    app.admits(&|| call.flow, &body)?;
    match verb {
        "retrieve" => retrieve(app, choice, (sent, body), call).await,
        "rank" => rank(app, choice, body, call).await,
        _ => embed(app, choice, body, call).await,
    }
}

/// Who calls, and how the answer is to be read.
pub(super) struct Call {
    pub(super) caller: Option<Caller>,
    pub(super) flow: Flow,
    origin: Origin,
    form: Form,
}

impl Call {
    /// Of a request that was let in.
    pub(super) fn of(request: &Request) -> Self {
        let caller = request.extensions().get::<Caller>().cloned();
        Call { caller, flow: flow_of(request), origin: CallId::origin(request), form: Form::of(request) }
    }

    /// The same, whose answer is text.
    pub(super) fn in_text(self) -> Self {
        Call { form: Form::Json, ..self }
    }

    fn terms(&self, terms: Terms) -> Terms {
        Terms { flow: self.flow, ..terms }
    }

    /// Sets memory aside for answers of this cost, and for what writing them takes beside.
    fn hold_answer(&self, app: &App, cost: Cost, widths: Widths) -> Result<Share> {
        let written = match self.form {
            Form::Json => widths.as_text(cost.items),
            Form::Arrow(_) => widths.as_arrow(cost.items),
        };
        app.bodies.hold_answer(self.flow, cost.answer_bytes.saturating_add(written))
    }
}

/// The largest values of the columns that a request asks for.
pub(super) fn widths(prepared: &Prepared) -> Result<Widths> {
    let (view, tasks) = (prepared.view(), prepared.view().main().package.spec.tasks.len());
    Widths::of(&view.columns(), prepared.columns(), tasks)
}

/// What the body of a call may be written in beside JSON.
pub(super) fn sent_beside_json(verb: &str) -> &'static [Sent] {
    if verb == "retrieve" { &[Sent::Arrow] } else { &[] }
}

/// Reads the body of a retrieval.
pub(super) fn retrievals(sent: Sent, body: &[u8], mut memory: BodyMemory) -> Result<Retrievals> {
    match sent {
        Sent::Arrow => sterling_api::arrow_retrievals(body, &mut |bytes| memory.hold(bytes)),
        _ => sterling_api::retrievals(body),
    }
}

/// What a body asks for, ready to run.
enum Asked {
    One(Box<Single>),
    Many(Chosen, Vec<Ready>),
}

/// One request, ready to run.
struct Single {
    prepared: Prepared,
    terms: Terms,
    shape: Shape,
    /// What answers it.
    model: Arc<Loaded>,
    /// Where its answer is to be audited.
    again: Option<Box<Again>>,
    /// Where its answer is to be a page.
    page: Option<Page>,
    /// Where it was chosen what answers it.
    watched: Option<Watched>,
    /// Where a shadow is to be asked as well.
    mirrored: Option<Box<Mirrored>>,
}

fn prepare_retrievals(
    app: &App,
    choice: &Choice,
    (sent, body): (Sent, &[u8]),
    caller: Option<&Caller>,
) -> Result<Asked> {
    match retrievals(sent, body, app.bodies.memory())? {
        Retrievals::One(request, terms, shape) => {
            let chosen = choice.of(&Asker::User(&request.user));
            let single = retrieval(app, chosen, *request, (terms, shape));
            single.map(|single| Asked::One(Box::new(single)))
        }
        Retrievals::Many(requests) => {
            charge(caller, requests.len());
            let chosen = choice.of(&Asker::Several);
            chosen.version.check_coverage(app)?;
            let prepared = prepared_each(&chosen.version.view, requests)?;
            Ok(Asked::Many(chosen, prepared))
        }
    }
}

/// Counts a list of requests against the rate of its caller's key, which has paid for one of them, whatever becomes of the list.
pub(super) fn charge(caller: Option<&Caller>, requests: usize) {
    if let Some(caller) = caller {
        caller.charge(requests.saturating_sub(1));
    }
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
            cursor::alone(shape.cursor.as_ref())?;
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
fn retrieval(app: &App, chosen: Chosen, mut request: Retrieve, (terms, shape): (Terms, Shape)) -> Result<Single> {
    let Chosen { version, watched, shadow } = chosen;
    let of =
        |cursor: &String| Page::of((&app.registry, &app.pages), (&version.model, &version.view), &mut request, cursor);
    let page = shape.cursor.as_ref().map(of).transpose()?;
    let Some(page) = page else {
        let turn = app.audit.turn(watched.as_ref().map_or(1.0, Watched::audited_times));
        let again = Again::of(turn, &version.view, &request, watched.as_ref()).map(Box::new);
        let mirrored = app.shadows.mirrored(shadow, || Ask::Retrieve(request.clone()));
        let single = asked(app, version, watched, (Ask::Retrieve(request), terms, shape))?;
        return Ok(Single { again, mirrored, ..single });
    };
    let pinned = Version { model: page.model.clone(), view: page.view.clone(), ..version };
    let single = asked(app, pinned, None, (Ask::Retrieve(request), terms, shape))?;
    Ok(Single { page: Some(page), ..single })
}

/// A request made ready over what answers it.
fn asked(
    app: &App,
    version: Version,
    watched: Option<Watched>,
    (ask, terms, shape): (Ask, Terms, Shape),
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

/// Retrieve items for one request, or for each of a list of requests.
#[utoipa::path(post, path = "/v1/models/{model}:retrieve", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are seen; through a router one a shard, with commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "The share of the items that an answer must cover, else it is 503. Left out, a router has a bound of its own, a server none.")),
    request_body(content((inline(RetrieveOneOrMany) = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))),
    responses((status = 200, content((inline(RetrievedOneOrMany) = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn retrieve(app: &Arc<App>, choice: Choice, (sent, body): (Sent, Whole), call: Call) -> Outcome {
    let shared = app.clone();
    let prepare = {
        let caller = call.caller.clone();
        move |body: &[u8]| prepare_retrievals(&shared, &choice, (sent, body), caller.as_ref())
    };
    match app.asides.prepare(body, prepare).await? {
        Asked::One(single) => one(app, *single, call).await,
        Asked::Many(Chosen { version, watched, .. }, prepared) => {
            let told = app.served(&version.model, &version.view);
            let (results, share, passed) = side_by_side(app, &told, prepared, (&call, watched.as_ref())).await?;
            results.iter().for_each(|r| app.entrance.failures.ended_in_list("retrieve", r.as_ref().err()));
            let entries = results.into_iter().map(|r| r.unwrap_or_else(|e| problem(&e).into())).collect();
            let answer = reply(Reply::many(told, entries), Timing::default(), share, call.form)?;
            let mut response = (Extension(passed), answer).into_response();
            watched::tell(watched.as_ref(), &mut response);
            Ok(response)
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
    (call, watched): (&Call, Option<&Watched>),
) -> Result<(Vec<Result<Entry>>, Share, Passed)> {
    let (mut cost, mut widest) = (Cost::default(), Widths::default());
    for (prepared, ..) in prepared.iter().flatten() {
        (cost, widest) = (cost.plus(prepared.cost()), widest.or(widths(prepared)?));
    }
    let share = call.hold_answer(app, cost, widest)?;
    let calls = prepared.into_iter().map(|prepared| async {
        let entry = entry(app, prepared, call, &share).await;
        if let Some(watched) = watched {
            watched.ended(entry.as_ref().err());
        }
        entry
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

/// Answers one of a list of retrievals.
async fn entry(app: &App, prepared: Ready, call: &Call, share: &Share) -> Result<Entry> {
    let (prepared, terms, shape) = prepared?;
    let (columns, view) = (prepared.columns().to_vec(), prepared.view().clone());
    let prepared = prepared.asked_for(call.origin.clone());
    items(app.engine.submit(prepared, call.terms(terms)).await?, (&view, &columns), &shape, share)
}

/// Has an answer held against those that it is to be held against, once it was given.
fn compare(
    app: &Arc<App>,
    version: u64,
    answer: &Answer,
    (again, mirrored): (Option<Box<Again>>, Option<Box<Mirrored>>),
) {
    if let Some(again) = again {
        let (app, served) = (app.clone(), audit::ids(answer));
        tokio::spawn(async move { again.run(&app.engine, &served).await });
    }
    if let Some((mirrored, given)) = mirrored.zip(Given::of(version, answer)) {
        let app = app.clone();
        tokio::spawn(async move {
            let ask = |loaded, request| asked_aside(&app.engine, loaded, request);
            mirrored.run(ask, &app.shadows.worst, given).await
        });
    }
}

/// Makes the items of an answer ready to be written.
fn items(answer: Answer, (view, columns): (&View, &[String]), shape: &Shape, share: &Share) -> Result<Entry> {
    let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.as_str());
    let entry = Entry::items(answer, tasks, view.columns(), columns)?;
    if shape.is_table { entry.as_table(share) } else { Ok(entry) }
}

async fn one(app: &Arc<App>, single: Single, call: Call) -> Outcome {
    let Single { prepared, terms, shape, model, again, page, watched, mirrored } = single;
    let share = call.hold_answer(app, prepared.cost(), widths(&prepared)?)?;
    let told = app.served(&model, prepared.view());
    let (columns, view) = (prepared.columns().to_vec(), prepared.view().clone());
    let begun = Instant::now();
    let (prepared, is_asked) = prepared.asked_for(call.origin.clone()).explained();
    let answer = app.engine.answer(prepared, call.terms(terms)).await;
    if let Some(watched) = &watched {
        watched.ended(answer.as_ref().err());
    }
    let mut answer = answer?;
    compare(app, model.version(), &answer, (again, mirrored));
    let explain = if is_asked { answer.explain.clone() } else { answer.explain.take() };
    let passed = Passed { engine: begun.elapsed(), explain: explain.map(Box::new), ..Passed::of(&told) };
    let cursor = page.as_ref().map(|page| page.cut(&mut answer)).transpose()?.flatten();
    if let Some(page) = page.filter(|_| cursor.is_some()) {
        app.pages.keep(&app.registry, &page);
    }
    let entry = items(answer, (&view, &columns), &shape, &share)?.with_cursor(cursor);
    let timing = Timing::of(entry.steps());
    let mut response = (Extension(passed), reply(Reply::one(told, entry), timing, share, call.form)?).into_response();
    watched::tell(watched.as_ref(), &mut response);
    Ok(response)
}

/// Score the items that the request names.
#[utoipa::path(post, path = "/v1/models/{model}:rank", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are seen; through a router one a shard, with commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "The share of the items that an answer must cover, else it is 503. Left out, a router has a bound of its own, a server none.")),
    request_body = RankRequest,
    responses((status = 200, content((RetrieveResponse = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn rank(app: &Arc<App>, choice: Choice, body: Whole, call: Call) -> Outcome {
    let shared = app.clone();
    let ranking = move |body: &[u8]| {
        let (request, terms, shape) = sterling_api::rank(body)?;
        let Chosen { version, watched, shadow } = choice.of(&Asker::User(&request.user));
        let mirrored = shared.shadows.mirrored(shadow, || Ask::Rank(request.clone()));
        let single = asked(&shared, version, watched, (Ask::Rank(request), terms, shape))?;
        Ok(Single { mirrored, ..single })
    };
    let single = app.asides.prepare(body, ranking).await?;
    one(app, single, call).await
}

/// The query embedding of a user's features.
#[utoipa::path(post, path = "/v1/models/{model}:embed", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are seen; through a router one a shard, with commas.")),
    request_body = EmbedRequest,
    responses((status = 200, body = EmbedResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn embed(app: &Arc<App>, choice: Choice, body: Whole, call: Call) -> Outcome {
    let shared = app.clone();
    let embedding = move |body: &[u8]| {
        let (request, terms) = sterling_api::embed(body)?;
        let Chosen { version, watched, .. } = choice.of(&Asker::Features(&request.features));
        asked(&shared, version, watched, (Ask::Embed(request), terms, Shape::default()))
    };
    let Single { prepared, terms, model, watched, .. } = app.asides.prepare(body, embedding).await?;
    let told = app.served(&model, prepared.view());
    let begun = Instant::now();
    let answer = app.engine.answer(prepared.asked_for(call.origin.clone()), call.terms(terms)).await;
    if let Some(watched) = &watched {
        watched.ended(answer.as_ref().err());
    }
    let passed = Passed { engine: begun.elapsed(), ..Passed::of(&told) };
    let mut response = (Extension(passed), json(&sterling_api::embedding(told, answer?)?)).into_response();
    watched::tell(watched.as_ref(), &mut response);
    Ok(response)
}
