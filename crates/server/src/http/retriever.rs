//! Interface between the API's calls and their implementation.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::request::Parts;

use super::access::Caller;
use super::answer::Outcome;
use super::app::Host;
use super::bodies::Bodies;
use super::call::{Call, Parsed};
use super::offload::Asides;
use super::paths::Target;
use super::worst::Worst;
use sterling_api::{
    ItemResponse, LabelList, ModelInfo, ModelList, PositionResponse, ShadowDiff, ShardsResponse, TrafficResponse,
    VersionList,
};
use sterling_core::error::Result;
use sterling_core::request::VersionSelector;
use sterling_core::units::ItemId;

/// Answers the calls of the API, either with models of this process ([`App`](super::App)) or with shards behind a router
/// ([`RouterApp`](super::RouterApp)). The handlers are generic over this trait.
///
/// A retrieval takes three steps: [`choose`](Retriever::choose) before its body is read, [`prepare`](Retriever::prepare) after it
/// is parsed, and [`run`](Retriever::run).
pub(super) trait Retriever: Host + Sized {
    /// Name of this kind of process in messages.
    const NAME: &'static str;
    /// Versions that may answer a call.
    type Choice: Send + 'static;
    /// Parsed and validated body, ready to run.
    type Ready: Send + 'static;

    /// Returns the memory budgets of bodies and answers.
    fn bodies(&self) -> &Bodies;

    /// Runs slow work outside of the threads that drive connections.
    fn asides(&self) -> &Asides;

    /// Shadow answers that differed most.
    fn shadow_diffs(&self) -> &Worst<ShadowDiff>;

    /// Chooses the versions that may answer a call, before the body is read: a missing version makes reading unnecessary.
    fn choose(self: &Arc<Self>, target: &Target, head: &Parts) -> impl Future<Output = Result<Self::Choice>> + Send;

    /// Returns whether requests have texts that this process tokenizes.
    fn has_texts(choice: &Self::Choice) -> bool;

    /// Prepares the requests of a body. This function computes only: it does not block on other threads or on I/O.
    fn prepare(&self, choice: Self::Choice, parsed: Parsed) -> Result<Self::Ready>;

    /// Runs the requests, and answers the call.
    fn run(self: &Arc<Self>, ready: Self::Ready, call: Call) -> impl Future<Output = Outcome> + Send;

    /// Lists the models that this caller may see.
    fn models(self: &Arc<Self>, caller: Caller) -> impl Future<Output = ModelList> + Send;

    /// Describes a version of a model.
    fn info(
        self: &Arc<Self>,
        model: &str,
        which: VersionSelector<'_>,
    ) -> impl Future<Output = Result<ModelInfo>> + Send;

    /// Lists all versions of a model.
    fn versions(self: &Arc<Self>, model: String) -> impl Future<Output = Result<VersionList>> + Send;

    /// Lists the labels of a model.
    fn labels(&self, model: String) -> Result<LabelList>;

    /// Describes the shards of the active version.
    fn shards(&self, model: &str) -> Result<ShardsResponse>;

    /// Describes the canary and the shadow of a model.
    fn traffic(&self, model: String) -> Result<TrafficResponse>;

    /// Returns one item.
    fn item(
        self: &Arc<Self>,
        model: &str,
        id: ItemId,
        head: &Parts,
    ) -> impl Future<Output = Result<ItemResponse>> + Send;

    /// Returns the positions of durable and visible updates.
    fn position(self: &Arc<Self>, model: &str, head: &Parts) -> impl Future<Output = Result<PositionResponse>> + Send;

    /// Upserts items.
    fn upsert(self: &Arc<Self>, model: String, request: Request) -> impl Future<Output = Outcome> + Send;

    /// Deletes items.
    fn delete(self: &Arc<Self>, model: String, request: Request) -> impl Future<Output = Outcome> + Send;

    /// Fails if the process is not ready for calls.
    fn ready(&self) -> Result<()>;

    /// Lines that `/readyz` reports to callers who may see all models.
    fn report(&self) -> Vec<String>;
}
