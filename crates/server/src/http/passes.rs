//! Calls that workers answer: parse the body, prepare, run and answer.

use std::sync::Arc;

use axum::extract::{Request, State};

use super::answer::Outcome;
use super::bodies::BodyMemory;
use super::call::{Call, Parsed, charge};
use super::content_type::BodyType;
use super::paths::Target;
use super::retriever::Retriever;
use sterling_api::{
    EmbedRequest, EmbedResponse, Problem, RankRequest, Retrievals, RetrieveOneOrMany, RetrieveResponse,
    RetrievedOneOrMany,
};
use sterling_core::error::Result;

/// Retrieve items for one request, or for each of a list of requests.
#[utoipa::path(post, path = "/v1/models/{model}:retrieve", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible; \
                                                             a router takes one position per shard, separated by \
                                                             commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "Share of the items that an answer must cover; with less, the status is 503. The default of \
                           a router is its `route.min_coverage`, a server has none.")),
    request_body(content((inline(RetrieveOneOrMany) = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))),
    responses((status = 200, content((inline(RetrievedOneOrMany) = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn retrieve<R: Retriever>(State(app): State<Arc<R>>, target: Target, request: Request) -> Outcome {
    answer(app, target, request, &[BodyType::Arrow], Parsed::retrieve).await
}

/// Score the items that the request names.
#[utoipa::path(post, path = "/v1/models/{model}:rank", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible; \
                                                             a router takes one position per shard, separated by \
                                                             commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "Share of the items that an answer must cover; with less, the status is 503. The default of \
                           a router is its `route.min_coverage`, a server has none.")),
    request_body = RankRequest,
    responses((status = 200, content((RetrieveResponse = "application/json"), (Vec<u8> = "application/vnd.apache.arrow.stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn rank<R: Retriever>(State(app): State<Arc<R>>, target: Target, request: Request) -> Outcome {
    answer(app, target, request, &[], Parsed::rank).await
}

/// The query embedding of a user's features.
#[utoipa::path(post, path = "/v1/models/{model}:embed", tag = "pass", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible; \
                                                             a router takes one position per shard, separated by \
                                                             commas.")),
    request_body = EmbedRequest,
    responses((status = 200, body = EmbedResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn embed<R: Retriever>(State(app): State<Arc<R>>, target: Target, request: Request) -> Outcome {
    answer(app, target, request, &[], Parsed::embed).await
}

/// Answers a call whose body is JSON or one of `others`, parsed by `parse`.
async fn answer<R: Retriever>(
    app: Arc<R>,
    target: Target,
    request: Request,
    others: &[BodyType],
    parse: fn(BodyType, &[u8], BodyMemory) -> Result<Parsed>,
) -> Outcome {
    let (head, body) = request.into_parts();
    let call = Call::of(&head);
    // First admission check, before the body is read: under overload it rejects calls that passed the gate.
    app.admits(&|| call.flow, None)?;
    let choice = app.choose(&target, &head).await?;
    let (sent, body) = app.bodies().read_sent(Request::from_parts(head, body), others).await?;
    // Second check: parsing costs far more than the check, and most bodies that are read under overload are rejected.
    app.admits(&|| call.flow, Some(&body))?;
    let (shared, memory) = (app.clone(), app.bodies().memory());
    let has_texts = R::has_texts(&choice);
    let prepare = move |body: &[u8]| {
        let parsed = parse(sent, body, memory)?;
        if let Parsed::Retrieve(Retrievals::Many(requests)) = &parsed {
            charge(call.caller.as_ref(), requests.len());
        }
        Ok((shared.prepare(choice, parsed)?, call))
    };
    let (ready, call) = app.asides().prepare(body, has_texts, prepare).await?;
    app.run(ready, call).await
}
