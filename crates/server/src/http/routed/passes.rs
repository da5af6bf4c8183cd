//! Retrievals, rankings and embeddings of a router: queries the shards, and merges their answers.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use futures_util::stream::{self, StreamExt as _};
use tokio::time::Instant;

use super::super::answer::{Outcome, Share, Timing, json, problem, reply};
use super::super::app::Host as _;
use super::super::call::{Call, Parsed};
use super::super::choice::CallUser;
use super::super::cursor;
use super::super::form::Form;
use super::super::verb::Verb;
use super::super::watched::{self, Watched};
use super::app::RouterApp;
use super::choice::{RoutedCall, RoutedChosen, Versions};
use super::explain::explain;
use super::following::Following;
use super::pages::RoutedPage;
use super::sizes::{bytes, held};
use crate::gather::Gathered;
use crate::route::{Conditions, Extra, FleetRequest, ShardedVersion};
use sterling_api::{ColumnReader, Entry, MissingShard, Reply, Retrievals, Served, Shape, WrittenRows};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::quota::Flow;
use sterling_core::request::{Answer, CallOptions, Embed, Origin, Retrieve, VersionSelector};
use sterling_rollout::Side;

/// Maximum number of concurrent requests of one list.
const AT_ONCE: usize = 16;
/// Header with the covered share of the items, if it is below 1.
const COVERAGE: HeaderName = HeaderName::from_static("sterling-coverage");
/// Records the outcome of an observed request. If another version answered because the chosen one was missing at a shard, the
/// request says nothing about either version, and its observation ends.
fn ended(watched: Option<Watched>, end: std::result::Result<bool, &Error>) -> Option<Watched> {
    let watched = watched.filter(|_| !matches!(end, Ok(false)))?;
    watched.ended(end.err());
    Some(watched)
}

pub(super) fn reported(model: &str, served: &ShardedVersion) -> Served {
    Served { version: served.version(), digest: served.digest().into(), ..nothing(model) }
}

/// Returns the description of a model before any answer.
fn nothing(model: &str) -> Served {
    let (model, digest, missing) = (model.into(), String::new(), Vec::new());
    Served { model, version: 0, digest, coverage: 1.0, position: 0, positions: Vec::new(), missing }
}

/// Entry of a list of retrievals.
type ListEntry = (Retrieve, CallOptions, Shape);

/// Parsed requests of a body, ready to run.
pub(in crate::http) struct RoutedReady {
    call: RoutedCall,
    work: Work,
}

enum Work {
    One(FleetRequest, RoutedChosen, CallOptions, Shape),
    Page(Box<Retrieve>, RoutedChosen, CallOptions, Shape),
    Many(Vec<Result<ListEntry>>, RoutedChosen),
    Embed(Embed, RoutedChosen, CallOptions),
}

impl RoutedReady {
    /// Chooses the version of each request.
    pub(super) fn new(versions: Versions, parsed: Parsed) -> Self {
        let Versions { choice, call } = versions;
        let work = match parsed {
            Parsed::Retrieve(Retrievals::One(retrieve, terms, shape)) => {
                let chosen = choice.of(&CallUser::User(&retrieve.user));
                match shape.cursor {
                    Some(_) => Work::Page(retrieve, chosen, terms, shape),
                    None => Work::One(FleetRequest::Retrieve(retrieve), chosen, terms, shape),
                }
            }
            Parsed::Retrieve(Retrievals::Many(requests)) => Work::Many(requests, choice.of(&CallUser::Several)),
            Parsed::Rank(rank, terms, shape) => {
                let chosen = choice.of(&CallUser::User(&rank.user));
                Work::One(FleetRequest::Rank(Box::new(rank)), chosen, terms, shape)
            }
            Parsed::Embed(embed, terms) => {
                let chosen = choice.of(&CallUser::Features(&embed.features));
                Work::Embed(embed, chosen, terms)
            }
        };
        RoutedReady { call, work }
    }

    /// Queries the shards, and answers the call.
    pub(super) async fn run(self, app: &Arc<RouterApp>, by: Call) -> Outcome {
        let RoutedReady { call, work } = self;
        let Call { flow, origin, form, .. } = by;
        let (model, pin) = (&*call.target.model, call.target.selected_version());
        let is_arrow = form != Form::Json;
        let call = CallInProgress { app, model, pin, call: &call, flow, origin: &origin, is_arrow };
        match work {
            Work::One(errand, chosen, terms, shape) => call.one(errand, chosen, (terms, shape), form).await,
            Work::Page(retrieve, chosen, terms, shape) => {
                call.page(retrieve, chosen.version, (terms, shape), form).await
            }
            Work::Many(requests, chosen) => call.many(requests, chosen, form).await,
            Work::Embed(embed, chosen, terms) => call.embed(embed, chosen, terms).await,
        }
    }
}

/// Call in progress.
#[derive(Clone, Copy)]
struct CallInProgress<'a> {
    app: &'a Arc<RouterApp>,
    model: &'a str,
    pin: VersionSelector<'a>,
    call: &'a RoutedCall,
    flow: Flow,
    /// Id and trace for the calls to shards.
    origin: &'a Origin,
    /// True if the answer is in Arrow, which writes items column by column.
    is_arrow: bool,
}

impl CallInProgress<'_> {
    async fn embed(&self, embed: Embed, chosen: RoutedChosen, terms: CallOptions) -> Outcome {
        let RoutedChosen { version, watched, .. } = chosen;
        let said = self.app.fleet().embed(self.model, (version.clone(), self.pin), embed, self.terms(terms)).await;
        let watched = ended(watched, said.as_ref().map(|(served, _)| served.is_same(&version)));
        let (served, said) = said?;
        let reported = Served { position: said.beside.view.position, ..reported(self.model, &served) };
        let answer = Answer { content: said.content, degraded_rows: said.degraded_rows, explain: None };
        let mut response = json(&sterling_api::embedding(reported, answer)?);
        watched::set_role_header(watched.as_ref(), &mut response);
        Ok(response)
    }

    fn terms(&self, terms: CallOptions) -> Conditions {
        let timeout = terms.timeout.unwrap_or(Duration::from_millis(self.app.fleet().options().timeout_ms));
        Conditions {
            deadline: self.call.arrived + timeout,
            priority: terms.priority,
            is_background: terms.is_background,
            min_coverage: self.call.at_least,
            positions: self.call.seen.clone(),
            views: None,
            memory: None,
            origin: self.origin.clone(),
            flow: self.flow,
        }
    }

    /// Answers one retrieval or ranking.
    async fn one(
        &self,
        work: FleetRequest,
        mut chosen: RoutedChosen,
        (terms, shape): (CallOptions, Shape),
        form: Form,
    ) -> Outcome {
        let share = self.app.bodies.hold_answer(self.flow, bytes(&work))?;
        let following = Following::of(self.app, self.model, &work, &mut chosen);
        let RoutedChosen { version, watched, .. } = chosen;
        let started = Instant::now();
        let answer = self.entry((version.clone(), self.pin), work, (self.terms(terms), &shape, &share), None).await;
        let is_its = |reported: &Served| (reported.version, &*reported.digest) == (version.version(), version.digest());
        let watched = ended(watched, answer.as_ref().map(|(reported, _)| is_its(reported)));
        let (reported, entry) = answer?;
        if let Some(ranked) = entry.ranked().filter(|_| is_its(&reported) && reported.coverage >= 1.0) {
            following.begin(reported.version, ranked, started.elapsed());
        }
        let timing = Timing::of(entry.steps());
        let mut response = covering(reported.coverage, reply(Reply::one(reported, entry), timing, share, form)?);
        watched::set_role_header(watched.as_ref(), &mut response);
        Ok(response)
    }

    /// Answers one page of a retrieval.
    async fn page(
        &self,
        mut retrieve: Box<Retrieve>,
        version: Arc<ShardedVersion>,
        (terms, shape): (CallOptions, Shape),
        form: Form,
    ) -> Outcome {
        let text = shape.cursor.as_deref().unwrap_or_default();
        let page = RoutedPage::of((self.app, self.model), version, &mut retrieve, text).await?;
        let work = FleetRequest::Retrieve(retrieve);
        let share = self.app.bodies.hold_answer(self.flow, bytes(&work))?;
        let pinned = (page.version.clone(), VersionSelector::Version(page.version.version()));
        let (reported, entry) =
            self.entry(pinned, work, (page.terms(self.terms(terms)), &shape, &share), Some(&page)).await?;
        let timing = Timing::of(entry.steps());
        Ok(reply(Reply::one(reported, entry), timing, share, form)?)
    }

    /// Answers a list of retrievals at one version. If the version disappears meanwhile, all retrievals are repeated once at
    /// another version.
    async fn many(&self, requests: Vec<Result<ListEntry>>, chosen: RoutedChosen, form: Form) -> Outcome {
        let held = requests.iter().flatten().map(|(retrieve, ..)| held(retrieve)).fold(0, usize::saturating_add);
        let share = self.app.bodies.hold_answer(self.flow, held)?;
        let RoutedChosen { mut version, mut watched, .. } = chosen;
        let mut results = self.each(&requests, &version, &share).await;
        let is_lost = |r: &Result<(Served, Entry)>| r.as_ref().is_err_and(|e| e.kind().is_retryable());
        if results.iter().any(is_lost)
            && let Some(other) = self.replacement_of(&version, watched.as_ref())?
        {
            (version, watched) = (other, None);
            results = self.each(&requests, &version, &share).await;
        }
        if let Some(watched) = &watched {
            results.iter().for_each(|result| watched.ended(result.as_ref().err()));
        }
        // If no request was admitted, the whole call is rejected, so that load balancers see the status.
        let is_refused = |r: &Result<(Served, Entry)>| {
            r.as_ref().is_err_and(|e| matches!(e.kind(), Kind::Overloaded | Kind::Partial))
        };
        if results.iter().all(is_refused)
            && let Some(Err(error)) = results.pop()
        {
            return Err(error.into());
        }
        let failures = &self.app.entrance().failures;
        results.iter().for_each(|result| failures.ended_in_list(Verb::Retrieve, result.as_ref().err()));
        // The summary describes the answer with the lowest coverage.
        let mut of_all = reported(self.model, &version);
        let mut entries = Vec::with_capacity(results.len());
        for result in results {
            entries.push(match result {
                Ok((reported, entry)) if reported.digest == of_all.digest => {
                    let seen = lowest(&of_all.positions, &reported.positions);
                    if reported.coverage < of_all.coverage || reported.position > 0 && of_all.position == 0 {
                        of_all = reported;
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
        watched::set_role_header(watched.as_ref(), &mut response);
        Ok(response)
    }

    /// Returns the version that has replaced `version`, if there is one. A canary that every shard still has is not replaced.
    fn replacement_of(
        &self,
        version: &ShardedVersion,
        watched: Option<&Watched>,
    ) -> Result<Option<Arc<ShardedVersion>>> {
        let fleet = self.app.fleet();
        let stays = watched.is_some_and(|watched| watched.side() == Side::Canary)
            && fleet
                .get(self.model, VersionSelector::Version(version.version()))
                .is_ok_and(|served| served.is_same(version));
        let by_now = fleet.get(self.model, self.pin)?;
        Ok((!stays && !by_now.is_same(version)).then_some(by_now))
    }

    async fn each(
        &self,
        requests: &[Result<ListEntry>],
        version: &Arc<ShardedVersion>,
        share: &Share,
    ) -> Vec<Result<(Served, Entry)>> {
        let pin = VersionSelector::Version(version.version());
        let copies: Vec<Result<ListEntry>> =
            requests.iter().map(|request| request.as_ref().cloned().map_err(Error::again)).collect();
        let calls = copies.into_iter().map(|request| async move {
            let (retrieve, terms, shape) = request?;
            cursor::alone(shape.cursor.as_ref())?;
            let work = FleetRequest::Retrieve(Box::new(retrieve));
            self.entry((version.clone(), pin), work, (self.terms(terms), &shape, share), None).await
        });
        stream::iter(calls).buffered(AT_ONCE).collect().await
    }

    /// Queries the shards, and prepares their merged answer for serialization.
    async fn entry(
        &self,
        version: (Arc<ShardedVersion>, VersionSelector<'_>),
        work: FleetRequest,
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
        let reported =
            Served { coverage, position, positions, missing: missing.collect(), ..reported(self.model, &served) };
        if coverage < 1.0 {
            metrics::counter!("sterling_route_partial_total", "model" => self.model.to_owned()).increment(1);
        }
        if gathered.again > 0 {
            let shards = gathered.again as u64;
            metrics::counter!("sterling_route_requeries_total", "model" => self.model.to_owned()).increment(shards);
            // Name of the metric in the previous release.
            metrics::counter!("sterling_route_again_total", "model" => self.model.to_owned()).increment(shards);
        }
        let explained = explain(&gathered);
        let ranked = gathered.ranked();
        if let Some(x) = ranked.scores.iter().chain(&ranked.similarities).find(|x| !x.is_finite()) {
            return Err(Error::internal(format!("a shard sent an item with the score {x}, expected finite numbers")));
        }
        let entry = Entry::gathered(ranked, rest(&mut gathered), explained, gathered.degraded_rows);
        let entry = if shape.is_table || self.is_arrow {
            let mut reader = ColumnReader::new(entry);
            self.app.writers.work(self.flow, share, move |share| reader.step(share)).await?
        } else {
            entry
        };
        let entry = if shape.is_table { entry.as_table(share)? } else { entry };
        Ok((reported, entry.with_cursor(cursor)))
    }
}

/// Returns the lowest known position of the shards; with several shards also all positions.
pub(super) fn summed(positions: Vec<u64>) -> (u64, Vec<u64>) {
    let lowest = positions.iter().copied().filter(|position| *position > 0).min().unwrap_or(0);
    let is_one = positions.len() == 1 || lowest == 0;
    (lowest, if is_one { Vec::new() } else { positions })
}

/// Returns the lower position per shard of two lists, either of which may be empty.
fn lowest(some: &[u64], others: &[u64]) -> Vec<u64> {
    match (some, others) {
        ([], all) | (all, []) => all.to_vec(),
        _ => some.iter().zip(others).map(|(a, b)| *a.min(b)).collect(),
    }
}

/// Returns the tasks and columns of the items of all shards, in merged order.
fn rest(gathered: &mut Gathered<Extra>) -> WrittenRows {
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
