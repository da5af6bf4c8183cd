//! What answers the calls of the API.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::request::Parts;

use super::access::Caller;
use super::answer::Outcome;
use super::app::Host;
use super::asides::Asides;
use super::bodies::Bodies;
use super::call::{Call, Parsed};
use super::paths::Target;
use super::worst::Worst;
use sterling_api::{
    ItemResponse, LabelList, ModelInfo, ModelList, PositionResponse, ShadowDiff, ShardsResponse, TrafficResponse,
    VersionList,
};
use sterling_core::error::Result;
use sterling_core::request::Which;
use sterling_core::units::ItemId;

/// Answers the calls of the API: with the models in this process ([`App`](super::App)), or with shards behind a router
/// ([`RouterApp`](super::RouterApp)). The handlers are written once, over this trait.
///
/// A retrieval takes three steps: [`choose`](Retriever::choose) before its body is read, [`prepare`](Retriever::prepare) once the body is parsed,
/// [`run`](Retriever::run).
pub(super) trait Retriever: Host + Sized {
    /// What this process is called in messages.
    const NAME: &'static str;
    /// The versions that may answer a call.
    type Choice: Send + 'static;
    /// A parsed body, checked and ready to run.
    type Ready: Send + 'static;

    /// Reads bodies, and holds memory for answers.
    fn bodies(&self) -> &Bodies;

    /// Runs what takes long for a thread that drives connections.
    fn asides(&self) -> &Asides;

    /// The answers of shadows that differed most.
    fn shadow_diffs(&self) -> &Worst<ShadowDiff>;

    /// Chooses the versions that may answer a call: what does not exist need not be read.
    fn choose(self: &Arc<Self>, target: &Target, head: &Parts) -> impl Future<Output = Result<Self::Choice>> + Send;

    /// Makes the requests of a body ready to run. Computes, and does not wait.
    fn prepare(&self, choice: Self::Choice, parsed: Parsed) -> Result<Self::Ready>;

    /// Runs the requests, and answers the call.
    fn run(self: &Arc<Self>, ready: Self::Ready, call: Call) -> impl Future<Output = Outcome> + Send;

    /// The models that this caller may see.
    fn models(self: &Arc<Self>, caller: Caller) -> impl Future<Output = ModelList> + Send;

    /// A version of a model.
    fn info(self: &Arc<Self>, model: &str, which: Which<'_>) -> impl Future<Output = Result<ModelInfo>> + Send;

    /// All versions of a model.
    fn versions(self: &Arc<Self>, model: String) -> impl Future<Output = Result<VersionList>> + Send;

    /// The labels of a model.
    fn labels(&self, model: String) -> Result<LabelList>;

    /// The shards of the active version.
    fn shards(&self, model: &str) -> Result<ShardsResponse>;

    /// The canary and the shadow of a model.
    fn traffic(&self, model: String) -> Result<TrafficResponse>;

    /// One item.
    fn item(
        self: &Arc<Self>,
        model: &str,
        id: ItemId,
        head: &Parts,
    ) -> impl Future<Output = Result<ItemResponse>> + Send;

    /// How far updates are seen.
    fn position(self: &Arc<Self>, model: &str, head: &Parts) -> impl Future<Output = Result<PositionResponse>> + Send;

    /// Puts items, or changes their attributes.
    fn upsert(self: &Arc<Self>, model: String, request: Request) -> impl Future<Output = Outcome> + Send;

    /// Deletes items.
    fn delete(self: &Arc<Self>, model: String, request: Request) -> impl Future<Output = Outcome> + Send;

    /// Whether calls can be answered.
    fn ready(&self) -> Result<()>;

    /// What `/readyz` tells those who may see all: one line of text each.
    fn report(&self) -> Vec<String>;
}
