//! Calls that shards answer together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::Request;
use axum::http::request::Parts;
use tokio::time::Instant;

use super::super::access::Caller;
use super::super::answer::{Outcome, problem};
use super::super::app::Host as _;
use super::super::bodies::Bodies;
use super::super::call::{Call, Parsed};
use super::super::call_id::CallId;
use super::super::flow::flow_of;
use super::super::offload::Asides;
use super::super::paths::Target;
use super::super::position::positions;
use super::super::retriever::Retriever;
use super::super::worst::Worst;
use super::app::RouterApp;
use super::choice::Versions;
use super::info::info;
use super::items;
use super::passes::{RoutedReady, reported};
use crate::route::Conditions;
use sterling_api::{
    HeldShard, ItemResponse, LabelList, ModelInfo, ModelList, PositionResponse, Problem, Served, ShadowDiff,
    ShardsResponse, TrafficResponse, UnavailableModel, VersionInfo, VersionList, traffic_info,
};
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;
use sterling_core::units::ItemId;

impl Retriever for RouterApp {
    const NAME: &'static str = "router";
    type Choice = Versions;
    type Ready = RoutedReady;

    fn bodies(&self) -> &Bodies {
        &self.bodies
    }

    fn asides(&self) -> &Asides {
        &self.asides
    }

    fn shadow_diffs(&self) -> &Worst<ShadowDiff> {
        &self.shadows.worst
    }

    async fn choose(self: &Arc<Self>, target: &Target, head: &Parts) -> Result<Versions> {
        Versions::of(self, target, head)
    }

    fn has_texts(_: &Versions) -> bool {
        false
    }

    fn prepare(&self, versions: Versions, parsed: Parsed) -> Result<RoutedReady> {
        Ok(RoutedReady::new(versions, parsed))
    }

    async fn run(self: &Arc<Self>, ready: RoutedReady, call: Call) -> Outcome {
        ready.run(self, call).await
    }

    async fn models(self: &Arc<Self>, caller: Caller) -> ModelList {
        let (mut models, mut unavailable) = (Vec::new(), Vec::new());
        for name in self.fleet().models().into_iter().filter(|model| caller.may_see(model)) {
            let reported = match self.fleet().answers(&name) {
                Ok(()) => info(self, &name, VersionSelector::Active).await,
                Err(error) => Err(error),
            };
            match reported {
                Ok(info) => models.push(info),
                Err(error) => {
                    let Problem { code, detail: reason, .. } = problem(&error);
                    unavailable.push(UnavailableModel { name, code, reason });
                }
            }
        }
        ModelList { models, unavailable }
    }

    async fn info(self: &Arc<Self>, model: &str, selected_version: VersionSelector<'_>) -> Result<ModelInfo> {
        info(self, model, selected_version).await
    }

    async fn versions(self: &Arc<Self>, model: String) -> Result<VersionList> {
        let listed = self.fleet().versions(&model)?;
        let versions = listed.into_iter().map(|listed| VersionInfo {
            version: listed.version,
            published: true,
            active: listed.is_active,
            loaded: listed.is_whole,
            labels: listed.labels,
            digest: Some(listed.digest),
            refused: (!listed.is_whole).then(|| "not every shard has enough servers with this version".into()),
            attempts: None,
            retry_in_ms: None,
        });
        Ok(VersionList { versions: versions.collect(), model, desired: None })
    }

    fn labels(&self, model: String) -> Result<LabelList> {
        let listed = self.fleet().versions(&model)?;
        let names = listed.iter().flat_map(|listed| &listed.labels);
        let version = |label: &String| Some(self.fleet().get(&model, VersionSelector::Label(label)).ok()?.version());
        let labels: BTreeMap<String, u64> = names.filter_map(|label| Some((label.clone(), version(label)?))).collect();
        Ok(LabelList { model, labels })
    }

    fn shards(&self, model: &str) -> Result<ShardsResponse> {
        let served = self.fleet().get(model, VersionSelector::Active)?;
        let held = (0..).zip(served.held()).map(|(shard, (items, servers))| HeldShard { shard, items, servers });
        let shards: Vec<HeldShard> = held.collect();
        let there: usize = shards.iter().filter(|held| held.servers > 0).map(|held| held.items).sum();
        let coverage = there as f64 / served.items().max(1) as f64;
        Ok(ShardsResponse { served: Served { coverage, ..reported(model, &served) }, shards })
    }

    fn traffic(&self, model: String) -> Result<TrafficResponse> {
        let now = self.fleet().traffic(&model)?;
        Ok(traffic_info(model, now))
    }

    async fn item(self: &Arc<Self>, model: &str, id: ItemId, head: &Parts) -> Result<ItemResponse> {
        let deadline = Instant::now() + Duration::from_millis(self.fleet().options().timeout_ms);
        let shards = self.fleet().get(model, VersionSelector::Active)?.shards();
        let positions = positions(&head.uri, "min_position", shards)?.map(Arc::from);
        let origin = CallId::origin(&head.extensions);
        let flow = flow_of(&head.extensions);
        let terms = Conditions { positions, origin, flow, ..Conditions::until(deadline) };
        let (served, attributes, position) = self.fleet().item(model, id, terms).await?;
        let attributes = serde_json::from_str(&attributes)
            .map_err(|e| Error::unavailable(format!("the answer of a shard cannot be decoded by this router: {e}")))?;
        Ok(ItemResponse { served: Served { position, ..reported(model, &served) }, id: id.0, attributes })
    }

    async fn position(self: &Arc<Self>, model: &str, head: &Parts) -> Result<PositionResponse> {
        items::position(self, model, head).await
    }

    async fn upsert(self: &Arc<Self>, model: String, request: Request) -> Outcome {
        items::upsert(self, model, request).await
    }

    async fn delete(self: &Arc<Self>, model: String, request: Request) -> Outcome {
        items::delete(self, model, request).await
    }

    fn ready(&self) -> Result<()> {
        if self.entrance().draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the router is shutting down"));
        }
        self.fleet().ready()
    }

    fn report(&self) -> Vec<String> {
        let warnings = self.fleet().troubles().into_iter().chain(self.entrance().warnings());
        warnings.map(|warning| format!("warning: {warning}")).collect()
    }
}
