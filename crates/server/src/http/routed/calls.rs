//! The calls of a router, one function each.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use futures_util::stream::{self, StreamExt as _};
use tokio::time::Instant;

use super::super::access::Caller;
use super::super::answer::{Outcome, Refusal, Share, Timing, json, problem, reply};
use super::super::app::Host as _;
use super::super::call_id::CallId;
use super::super::choice::Asker;
use super::super::cursor;
use super::super::flow::flow_of;
use super::super::form::Form;
use super::super::parameters::min_coverage;
use super::super::passes::{charge, retrievals, sent_beside_json};
use super::super::paths::{Names, PathNames};
use super::super::position::positions;
use super::super::watched::{self, Watched};
use super::super::worst::WINDOW;
use super::app::RouterApp;
use super::choice::{RoutedChosen, choice};
use super::explain::explain;
use super::following::Following;
use super::info::info;
use super::pages::RoutedPage;
use super::sizes::{bytes, held};
use crate::gather::Gathered;
use crate::route::{Beside, Conditions, Errand, Offering, Pin};
use sterling_api::{
    Entry, HeldShard, InferenceReady, ItemResponse, LabelList, MissingShard, ModelList, Problem, Reply, Retrievals,
    Served, ShadowResponse, Shape, ShardsResponse, SlowResponse, UnavailableModel, VersionInfo, VersionList,
    WrittenRows, traffic_info,
};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::logging::printable;
use sterling_core::request::{Answer, Origin, Retrieve};
use sterling_core::units::ItemId;
use sterling_serving::engine::Terms;
use sterling_serving::quota::Flow;
use sterling_snapshot::rollout::Side;

/// Requests of one list that are asked of the shards side by side.
const AT_ONCE: usize = 16;
/// Says how much of the items an answer covers that does not cover all.
const COVERAGE: HeaderName = HeaderName::from_static("sterling-coverage");
/// `:retrieve`, `:rank` or `:embed` of the version that answers.
pub(super) async fn of_active(
    State(app): State<Arc<RouterApp>>,
    Names(model): Names<String>,
    request: Request,
) -> Outcome {
    dispatch(&app, (&model, Pin::Active), request).await
}

/// The same of the version that the path names.
pub(super) async fn of_version(
    State(app): State<Arc<RouterApp>>,
    Names((model, version)): Names<(String, u64)>,
    request: Request,
) -> Outcome {
    dispatch(&app, (&model, Pin::Version(version)), request).await
}

/// The same of the version that a label points to.
pub(super) async fn of_label(
    State(app): State<Arc<RouterApp>>,
    Names((model, label)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    dispatch(&app, (&model, Pin::Label(&label)), request).await
}

/// `/v1/models/{model}`
pub(super) async fn model(State(app): State<Arc<RouterApp>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&info(&app, &model, Pin::Active).await?))
}

/// `/v1/models/{model}/versions/{version}`
pub(super) async fn version(
    State(app): State<Arc<RouterApp>>,
    Names((model, version)): Names<(String, u64)>,
) -> Outcome {
    Ok(json(&info(&app, &model, Pin::Version(version)).await?))
}

async fn dispatch(app: &Arc<RouterApp>, (model, pin): (&str, Pin<'_>), request: Request) -> Outcome {
    let verb = request.extensions().get::<PathNames>().map_or("", PathNames::call);
    // What does not exist need not be read.
    let choice = choice(app, model, pin, &request)?;
    let seen = positions(request.uri(), "min_position", choice.version().shards())?.map(Arc::from);
    let (arrived, at_least) =
        (Instant::now(), min_coverage(request.uri())?.unwrap_or(app.fleet().options().min_coverage));
    let (caller, flow) = (request.extensions().get::<Caller>().cloned(), flow_of(&request));
    let origin = CallId::origin(&request);
    let call = Call { app, model, pin, arrived, at_least, seen: &seen, flow, origin: &origin };
    let form = Form::of(&request);
    let (sent, body) = app.bodies.read_sent(request, sent_beside_json(verb)).await?;
    let memory = app.bodies.memory();
    match verb {
        "retrieve" => match app.asides.prepare(body, move |body| retrievals(sent, body, memory)).await? {
            Retrievals::One(retrieve, terms, shape) => {
                let chosen = choice.of(&Asker::User(&retrieve.user));
                match shape.cursor {
                    Some(_) => call.page(retrieve, chosen.version, (terms, shape), form).await,
                    None => call.one(Errand::Retrieve(retrieve), chosen, (terms, shape), form).await,
                }
            }
            Retrievals::Many(requests) => {
                charge(caller.as_ref(), requests.len());
                call.many(requests, choice.of(&Asker::Several), form).await
            }
        },
        "rank" => {
            let (rank, terms, shape) = app.asides.prepare(body, sterling_api::rank).await?;
            let chosen = choice.of(&Asker::User(&rank.user));
            call.one(Errand::Rank(Box::new(rank)), chosen, (terms, shape), form).await
        }
        _ => {
            let (embed, terms) = app.asides.prepare(body, sterling_api::embed).await?;
            let RoutedChosen { version, watched, .. } = choice.of(&Asker::Features(&embed.features));
            let said = app.fleet().embed(model, (version.clone(), pin), embed, call.terms(terms)).await;
            let watched = ended(watched, said.as_ref().map(|(served, _)| served.is_same(&version)));
            let (served, said) = said?;
            let told = Served { position: said.beside.view.position, ..told(model, &served) };
            let answer = Answer { content: said.content, degraded_rows: said.degraded_rows, explain: None };
            let mut response = json(&sterling_api::embedding(told, answer)?);
            watched::tell(watched.as_ref(), &mut response);
            Ok(response)
        }
    }
}

/// Takes note of how a request ended that was watched: with an answer of the version that was chosen for it, or not. One that went to another version, for
/// its own was gone from a shard, says nothing of either, and is watched no more.
fn ended(watched: Option<Watched>, end: std::result::Result<bool, &Error>) -> Option<Watched> {
    let watched = watched.filter(|_| !matches!(end, Ok(false)))?;
    watched.ended(end.err());
    Some(watched)
}

pub(super) fn told(model: &str, served: &Offering) -> Served {
    Served { version: served.version(), digest: served.digest().into(), ..nothing(model) }
}

/// What is said of a model before anything has answered.
fn nothing(model: &str) -> Served {
    let (model, digest, missing) = (model.into(), String::new(), Vec::new());
    Served { model, version: 0, digest, coverage: 1.0, position: 0, positions: Vec::new(), missing }
}

/// One of a list of retrievals.
type Asked = (Retrieve, Terms, Shape);

/// A call under way.
#[derive(Clone, Copy)]
struct Call<'a> {
    app: &'a Arc<RouterApp>,
    model: &'a str,
    pin: Pin<'a>,
    arrived: Instant,
    at_least: f64,
    /// The positions that are to be seen.
    seen: &'a Option<Arc<[u64]>>,
    flow: Flow,
    /// What shards are asked for.
    origin: &'a Origin,
}

impl Call<'_> {
    fn terms(&self, terms: Terms) -> Conditions {
        let timeout = terms.timeout.unwrap_or(Duration::from_millis(self.app.fleet().options().timeout_ms));
        Conditions {
            deadline: self.arrived + timeout,
            priority: terms.priority,
            min_coverage: self.at_least,
            positions: self.seen.clone(),
            views: None,
            memory: None,
            origin: self.origin.clone(),
        }
    }

    /// One retrieval or ranking.
    async fn one(&self, work: Errand, mut chosen: RoutedChosen, (terms, shape): (Terms, Shape), form: Form) -> Outcome {
        let share = self.app.bodies.hold_answer(self.flow, bytes(&work))?;
        let following = Following::of(self.app, self.model, &work, &mut chosen);
        let RoutedChosen { version, watched, .. } = chosen;
        let begun = Instant::now();
        let answer = self.entry((version.clone(), self.pin), work, (self.terms(terms), &shape, &share), None).await;
        let is_its = |told: &Served| (told.version, &*told.digest) == (version.version(), version.digest());
        let watched = ended(watched, answer.as_ref().map(|(told, _)| is_its(told)));
        let (told, entry) = answer?;
        if let Some(ranked) = entry.ranked().filter(|_| is_its(&told) && told.coverage >= 1.0) {
            following.begin(told.version, ranked, begun.elapsed());
        }
        let timing = Timing::of(entry.steps());
        let mut response = covering(told.coverage, reply(Reply::one(told, entry), timing, share, form)?);
        watched::tell(watched.as_ref(), &mut response);
        Ok(response)
    }

    /// One page of a retrieval.
    async fn page(
        &self,
        mut retrieve: Box<Retrieve>,
        version: Arc<Offering>,
        (terms, shape): (Terms, Shape),
        form: Form,
    ) -> Outcome {
        let text = shape.cursor.as_deref().unwrap_or_default();
        let page = RoutedPage::of((self.app, self.model), version, &mut retrieve, text).await?;
        let work = Errand::Retrieve(retrieve);
        let share = self.app.bodies.hold_answer(self.flow, bytes(&work))?;
        let pinned = (page.version.clone(), Pin::Version(page.version.version()));
        let (told, entry) =
            self.entry(pinned, work, (page.terms(self.terms(terms)), &shape, &share), Some(&page)).await?;
        let timing = Timing::of(entry.steps());
        Ok(reply(Reply::one(told, entry), timing, share, form)?)
    }

    /// Each of a list of retrievals, all of them of one version: where that goes meanwhile, all of them once more, of another.
    async fn many(&self, requests: Vec<Result<Asked>>, chosen: RoutedChosen, form: Form) -> Outcome {
        let held = requests.iter().flatten().map(|(retrieve, ..)| held(retrieve)).fold(0, usize::saturating_add);
        let share = self.app.bodies.hold_answer(self.flow, held)?;
        let RoutedChosen { mut version, mut watched, .. } = chosen;
        let mut results = self.each(&requests, &version, &share).await;
        let is_lost = |r: &Result<(Served, Entry)>| r.as_ref().is_err_and(|e| e.kind().is_retryable());
        if results.iter().any(is_lost)
            && let Some(other) = self.in_place_of(&version, watched.as_ref())?
        {
            (version, watched) = (other, None);
            results = self.each(&requests, &version, &share).await;
        }
        if let Some(watched) = &watched {
            results.iter().for_each(|result| watched.ended(result.as_ref().err()));
        }
        // Where nothing was taken in, the whole call was refused, and load balancers must see it.
        let is_refused = |r: &Result<(Served, Entry)>| {
            r.as_ref().is_err_and(|e| matches!(e.kind(), Kind::Overloaded | Kind::Partial))
        };
        if results.iter().all(is_refused)
            && let Some(Err(error)) = results.pop()
        {
            return Err(error.into());
        }
        let failures = &self.app.entrance().failures;
        results.iter().for_each(|result| failures.ended_in_list("retrieve", result.as_ref().err()));
        // What is said of all is said of the one that covers least.
        let mut of_all = told(self.model, &version);
        let mut entries = Vec::with_capacity(results.len());
        for result in results {
            entries.push(match result {
                Ok((told, entry)) if told.digest == of_all.digest => {
                    let seen = lowest(&of_all.positions, &told.positions);
                    if told.coverage < of_all.coverage || told.position > 0 && of_all.position == 0 {
                        of_all = told;
                    }
                    of_all.positions = seen;
                    entry
                }
                Ok(_) => problem(&Error::not_ready("the version changed while the list was answered")).into(),
                Err(error) => problem(&error).into(),
            });
        }
        let mut response =
            covering(of_all.coverage, reply(Reply::many(of_all, entries), Timing::default(), share, form)?);
        watched::tell(watched.as_ref(), &mut response);
        Ok(response)
    }

    /// What answers in the place of a version by now, where that is another one. A canary that every shard still has is in nobody's place.
    fn in_place_of(&self, version: &Offering, watched: Option<&Watched>) -> Result<Option<Arc<Offering>>> {
        let fleet = self.app.fleet();
        let stays = watched.is_some_and(|watched| watched.side() == Side::Canary)
            && fleet.get(self.model, Pin::Version(version.version())).is_ok_and(|served| served.is_same(version));
        let by_now = fleet.get(self.model, self.pin)?;
        Ok((!stays && !by_now.is_same(version)).then_some(by_now))
    }

    async fn each(
        &self,
        requests: &[Result<Asked>],
        version: &Arc<Offering>,
        share: &Share,
    ) -> Vec<Result<(Served, Entry)>> {
        let pin = Pin::Version(version.version());
        let copies: Vec<Result<Asked>> =
            requests.iter().map(|request| request.as_ref().cloned().map_err(Error::again)).collect();
        let calls = copies.into_iter().map(|request| async move {
            let (retrieve, terms, shape) = request?;
            cursor::alone(shape.cursor.as_ref())?;
            let work = Errand::Retrieve(Box::new(retrieve));
            self.entry((version.clone(), pin), work, (self.terms(terms), &shape, share), None).await
        });
        stream::iter(calls).buffered(AT_ONCE).collect().await
    }

    /// Asks the shards, and makes what they say ready to be written.
    async fn entry(
        &self,
        version: (Arc<Offering>, Pin<'_>),
        work: Errand,
        (terms, shape, share): (Conditions, &Shape, &Share),
        page: Option<&RoutedPage>,
    ) -> Result<(Served, Entry)> {
        let terms = Conditions { memory: Some(share.clone()), ..terms };
        let (served, mut gathered) = self.app.fleet().work(self.model, version, work, terms).await?;
        let cursor = page.map(|page| page.cut(&mut gathered)).transpose()?.flatten();
        let mut positions = vec![0; served.shards()];
        gathered.besides().for_each(|(shard, beside)| positions[shard] = beside.view.position);
        let besides = gathered.parts.iter().filter_map(|part| part.beside.as_ref());
        let position = besides.map(|beside| beside.view.position).min().unwrap_or(0);
        let (_, positions) = summed(positions);
        let missing = gathered
            .missing
            .iter()
            .map(|(shard, error)| MissingShard { shard: *shard as u32, reason: problem(error).detail });
        let coverage = gathered.coverage;
        let told = Served { coverage, position, positions, missing: missing.collect(), ..told(self.model, &served) };
        if coverage < 1.0 {
            metrics::counter!("sterling_route_partial_total", "model" => self.model.to_owned()).increment(1);
        }
        if gathered.again > 0 {
            metrics::counter!("sterling_route_again_total", "model" => self.model.to_owned())
                .increment(gathered.again as u64);
        }
        let explained = explain(&gathered);
        let ranked = gathered.ranked();
        if let Some(x) = ranked.scores.iter().chain(&ranked.similarities).find(|x| !x.is_finite()) {
            return Err(Error::internal(format!("a shard sent an item that is worth {x}")));
        }
        let entry = Entry::gathered(ranked, rest(&mut gathered), explained, gathered.degraded_rows);
        let entry = if shape.is_table { entry.as_table(share)? } else { entry };
        Ok((told, entry.with_cursor(cursor)))
    }
}

/// The lowest of the positions of shards that have one, and all of them where there are several shards.
pub(super) fn summed(positions: Vec<u64>) -> (u64, Vec<u64>) {
    let lowest = positions.iter().copied().filter(|position| *position > 0).min().unwrap_or(0);
    let is_one = positions.len() == 1 || lowest == 0;
    (lowest, if is_one { Vec::new() } else { positions })
}

/// The lower position of each shard, of two lists of which one may be empty.
fn lowest(some: &[u64], others: &[u64]) -> Vec<u64> {
    match (some, others) {
        ([], all) | (all, []) => all.to_vec(),
        _ => some.iter().zip(others).map(|(a, b)| *a.min(b)).collect(),
    }
}

/// What the items of all shards say besides ids and scores, in their order.
fn rest(gathered: &mut Gathered<Beside>) -> WrittenRows {
    let besides = gathered.parts.iter_mut().map(|part| part.beside.as_mut());
    let parts = besides.map(|beside| beside.map(|beside| take(&mut beside.rest)).unwrap_or_default()).collect();
    WrittenRows::new(parts, take(&mut gathered.order))
}

fn covering(coverage: f64, mut response: Response) -> Response {
    if coverage < 1.0
        && let Ok(value) = HeaderValue::from_str(&coverage.to_string())
    {
        response.headers_mut().insert(COVERAGE, value);
    }
    response
}

/// `/v1/models`
pub(super) async fn models(State(app): State<Arc<RouterApp>>, Extension(caller): Extension<Caller>) -> Outcome {
    let (mut models, mut unavailable) = (Vec::new(), Vec::new());
    for name in app.fleet().models().into_iter().filter(|model| caller.may_see(model)) {
        let told = match app.fleet().answers(&name) {
            Ok(()) => info(&app, &name, Pin::Active).await,
            Err(error) => Err(error),
        };
        match told {
            Ok(info) => models.push(info),
            Err(error) => {
                let Problem { code, detail: reason, .. } = problem(&error);
                unavailable.push(UnavailableModel { name, code, reason });
            }
        }
    }
    Ok(json(&ModelList { models, unavailable }))
}

/// `/v1/models/{model}/versions`
pub(super) async fn versions(State(app): State<Arc<RouterApp>>, Names(model): Names<String>) -> Outcome {
    let listed = app.fleet().versions(&model)?;
    let versions = listed.into_iter().map(|listed| VersionInfo {
        version: listed.version,
        published: true,
        active: listed.is_active,
        loaded: listed.is_whole,
        labels: listed.labels,
        digest: Some(listed.digest),
        refused: (!listed.is_whole).then(|| "not every shard has enough servers with it".into()),
        attempts: None,
        retry_in_ms: None,
    });
    Ok(json(&VersionList { versions: versions.collect(), model, desired: None }))
}

/// `/v1/models/{model}/labels`
pub(super) async fn labels(State(app): State<Arc<RouterApp>>, Names(model): Names<String>) -> Outcome {
    let listed = app.fleet().versions(&model)?;
    let names = listed.iter().flat_map(|listed| &listed.labels);
    let pointed =
        names.filter_map(|label| Some((label.clone(), app.fleet().get(&model, Pin::Label(label)).ok()?.version())));
    let labels: BTreeMap<String, u64> = pointed.collect();
    Ok(json(&LabelList { model, labels }))
}

/// `/v1/models/{model}/shards`
pub(super) async fn shards(State(app): State<Arc<RouterApp>>, Names(model): Names<String>) -> Outcome {
    let served = app.fleet().get(&model, Pin::Active)?;
    let held = (0..).zip(served.held()).map(|(shard, (items, servers))| HeldShard { shard, items, servers });
    let shards: Vec<HeldShard> = held.collect();
    let there: usize = shards.iter().filter(|held| held.servers > 0).map(|held| held.items).sum();
    let coverage = there as f64 / served.items().max(1) as f64;
    Ok(json(&ShardsResponse { served: Served { coverage, ..told(&model, &served) }, shards }))
}

/// `/v1/models/{model}/items/{id}`
pub(super) async fn item(
    State(app): State<Arc<RouterApp>>,
    Names((model, id)): Names<(String, i64)>,
    request: Request,
) -> Outcome {
    let deadline = Instant::now() + Duration::from_millis(app.fleet().options().timeout_ms);
    let shards = app.fleet().get(&model, Pin::Active)?.shards();
    let positions = positions(request.uri(), "min_position", shards)?.map(Arc::from);
    let terms = Conditions { positions, origin: CallId::origin(&request), ..Conditions::until(deadline) };
    let (served, attributes, position) = app.fleet().item(&model, ItemId(id), terms).await?;
    let attributes = serde_json::from_str(&attributes)
        .map_err(|e| Error::unavailable(format!("a shard says what this router does not understand: {e}")))?;
    Ok(json(&ItemResponse { served: Served { position, ..told(&model, &served) }, id, attributes }))
}

/// `/v1/debug/slow`
pub(super) async fn slow(State(app): State<Arc<RouterApp>>) -> Response {
    json(&SlowResponse { window_seconds: WINDOW.as_secs(), calls: app.entrance().slow.list() })
}

/// `/v1/models/{model}/traffic`
pub(super) async fn traffic(State(app): State<Arc<RouterApp>>, Names(model): Names<String>) -> Outcome {
    let now = app.fleet().traffic(&model)?;
    Ok(json(&traffic_info(model, now)))
}

/// `/v1/debug/shadow`
pub(super) async fn shadow(State(app): State<Arc<RouterApp>>) -> Response {
    json(&ShadowResponse { window_seconds: WINDOW.as_secs(), diffs: app.shadows.worst.list() })
}

/// `/v2/health/ready`
pub(super) async fn inference_ready(State(app): State<Arc<RouterApp>>) -> Outcome {
    app.ready()?;
    Ok(json(&InferenceReady::server()))
}

/// `/readyz`
pub(super) async fn ready(
    State(app): State<Arc<RouterApp>>,
    Extension(caller): Extension<Caller>,
) -> Result<String, Refusal> {
    let ready = app.ready();
    if !caller.may_see_all() {
        return ready.map(|()| "ok\n".to_owned()).map_err(|_| Error::not_ready("the router is not ready").into());
    }
    ready?;
    let warnings = app.fleet().troubles().into_iter().chain(app.entrance().warnings());
    let warnings: String = warnings.map(|warning| format!("warning: {}\n", printable(&warning))).collect();
    Ok(format!("ok\n{warnings}"))
}
