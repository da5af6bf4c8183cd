//! Background work after a routed answer: repeats the request exactly, to measure recall, and at a shadow.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::audit::{self, AuditPermit, exactly};
use super::super::shadow::{Mirrored, ServedParts, TIMEOUT};
use super::super::watched::Watched;
use super::app::RouterApp;
use super::choice::RoutedChosen;
use super::sizes::bytes;
use crate::route::{Conditions, FleetRequest, ShardedVersion};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::quota::Flow;
use sterling_core::request::{
    Answer, Content, Explain, Priority, Ranked, Request, Retrieve, StepReport, VersionSelector,
};

/// Background work after an answer.
pub(super) struct Following {
    app: Arc<RouterApp>,
    model: String,
    again: Option<ExactRetrieval>,
    mirrored: Option<Box<Mirrored<Arc<ShardedVersion>>>>,
}

/// Retrieval to be repeated exactly.
struct ExactRetrieval {
    retrieve: Retrieve,
    served: Arc<ShardedVersion>,
    watched: Option<Watched>,
    _turn: AuditPermit,
}

impl Following {
    /// Samples the background work for a request and its chosen version.
    pub(super) fn of(app: &Arc<RouterApp>, model: &str, work: &FleetRequest, chosen: &mut RoutedChosen) -> Self {
        let RoutedChosen { version: served, watched, shadow } = chosen;
        let watched = watched.as_ref();
        let again = match work {
            FleetRequest::Retrieve(retrieve) if !retrieve.exact => {
                let turn = app.audit.turn(watched.map_or(1.0, Watched::audited_times));
                turn.map(|turn| ExactRetrieval {
                    retrieve: exactly(retrieve),
                    served: served.clone(),
                    watched: watched.cloned(),
                    _turn: turn,
                })
            }
            _ => None,
        };
        let mirrored = app.shadows.mirrored(shadow.take(), || match work {
            FleetRequest::Retrieve(retrieve) => Request::Retrieve((**retrieve).clone()),
            FleetRequest::Rank(rank) => Request::Rank((**rank).clone()),
        });
        Following { app: app.clone(), model: model.to_owned(), again, mirrored }
    }

    /// Starts the audit and shadow requests that follow an answer of `version`; `took` is the time of that answer.
    pub(super) fn begin(self, version: u64, ranked: &Ranked, took: Duration) {
        let Following { app, model, again, mirrored } = self;
        if let Some(again) = again {
            let (app, model, ids) = (app.clone(), model.clone(), ranked.ids.clone());
            tokio::spawn(async move {
                let ExactRetrieval { retrieve, served, watched, _turn } = again;
                let work = FleetRequest::Retrieve(Box::new(retrieve));
                match query_in_background(&app, &model, served, work).await {
                    Ok(exact) => audit::compare_with_exact(&model, watched.as_ref(), &ids, &exact.ids),
                    Err(error) => audit::failed(&model, &error),
                }
            });
        }
        if let Some(mirrored) = mirrored {
            let given = ServedParts::items(version, ranked, took);
            tokio::spawn(async move {
                let ask = |served, request| repeat_as_shadow(&app, &model, served, request);
                mirrored.run(ask, &app.shadows.worst, given).await;
            });
        }
    }
}

async fn repeat_as_shadow(
    app: &RouterApp,
    model: &str,
    served: Arc<ShardedVersion>,
    request: Request,
) -> Result<Answer> {
    let work = match request {
        Request::Retrieve(retrieve) => FleetRequest::Retrieve(Box::new(retrieve)),
        Request::Rank(rank) => FleetRequest::Rank(Box::new(rank)),
        _ => return Err(Error::internal("only requests for items can be repeated as shadow traffic")),
    };
    let started = Instant::now();
    let ranked = query_in_background(app, model, served, work).await?;
    let rounds = StepReport { name: "rounds", micros: started.elapsed().as_micros() as u64, ..StepReport::default() };
    let explain = Explain { steps: vec![rounds], ..Explain::default() };
    Ok(Answer { content: Content::Items(ranked), degraded_rows: 0, explain: Some(explain) })
}

/// Queries the shards of one version at the priority of batches.
async fn query_in_background(
    app: &RouterApp,
    model: &str,
    served: Arc<ShardedVersion>,
    work: FleetRequest,
) -> Result<Ranked> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let memory = app.bodies.hold_answer(Flow::default(), bytes(&work))?;
    let terms = Conditions {
        priority: Priority::Batch,
        is_background: true,
        memory: Some(memory),
        ..Conditions::until(deadline)
    };
    let pin = VersionSelector::Version(served.version());
    let (_, gathered) = app.fleet().work(model, (served, pin), work, terms).await.map_err(of_shard)?;
    Ok(gathered.ranked())
}

/// Returns the shard's error that caused a `Partial` error: an overloaded shard must not count as an error of the version, and
/// only the cause shows the overload.
fn of_shard(error: Error) -> Error {
    let cause = std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<Error>());
    cause.filter(|_| error.kind() == Kind::Partial).map(Error::again).unwrap_or(error)
}
