//! Calls of servers on other hosts: table rows that this server holds for them. Rows are copied from memory without a worker of
//! the engine, so that servers waiting for each other's rows cannot deadlock on workers.

use std::sync::Arc;

use axum::extract::{Request, State};

use super::answer::Outcome;
use super::app::App;
use super::flow::flow_of;
use super::parts::{packed, speaks};
use super::paths::Names;
use crate::route::rows::{answer_rows, read_rows_call, rows_bytes};
use sterling_api::Problem;
use sterling_core::error::Error;
use sterling_embedding::tiers::slices::Neighbours as _;

/// Number of simultaneous copies of the rows: the copied rows, and the encoded body.
const ROWS_COPIES: usize = 2;
/// Size above which rows are copied on a blocking thread, in bytes.
const LONG_ANSWER_BYTES: usize = 256 << 10;

/// Rows of tables, for the servers of other hosts of this release.
#[utoipa::path(post, path = "/v1/models/{model}:rows", tag = "routers",
    params(("model" = String, Path, description = "The model's name")),
    request_body(content = Vec<u8>, content_type = "application/vnd.sterling.pass-9"),
    responses((status = 200, body = Vec<u8>, content_type = "application/vnd.sterling.pass-9"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn rows(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    speaks(request.headers())?;
    let none = || Error::not_found("this server holds no rows for other hosts: its tables are on one host");
    let peers = app.peers.clone().ok_or_else(none)?;
    let flow = flow_of(request.extensions());
    let body = app.bodies.read_any(request).await?;
    let call = read_rows_call(&body)?;
    let bytes = rows_bytes(&model, &call, peers.slices());
    let share = app.bodies.hold_answer(flow, ROWS_COPIES * bytes)?;
    let reply = match bytes <= LONG_ANSWER_BYTES {
        true => answer_rows(&model, &call, peers.slices())?,
        false => app.asides.run(move || answer_rows(&model, &call, peers.slices())).await?,
    };
    packed(&reply, share)
}
