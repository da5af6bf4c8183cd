//! JSON types of a model's rollout.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_rollout::{BothSeen, Canary, Shadow, SideSeen, Traffic, TrafficNow};

/// Desired versions for the unpinned requests of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrafficRequest {
    /// Canary: a version that answers a share of the unpinned requests; omit for none.
    #[serde(default)]
    pub canary: Option<Canary>,
    /// Shadow: a version to which a share of the unpinned requests is repeated; omit for none.
    #[serde(default)]
    pub shadow: Option<Shadow>,
    /// Expected revision of the desired state; at any other revision the call fails with a conflict and changes nothing.
    #[serde(default)]
    pub revision: Option<u64>,
}

impl From<TrafficRequest> for Traffic {
    fn from(TrafficRequest { canary, shadow, .. }: TrafficRequest) -> Self {
        Traffic { canary, shadow }
    }
}

/// Versions that answer the unpinned requests of a model, or receive copies of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrafficResponse {
    /// Name of the model.
    pub model: String,
    /// Number of changes to the desired state in the store.
    pub revision: u64,
    /// Version that answers all unpinned requests that the canary does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<u64>,
    /// Desired canary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryInfo>,
    /// Desired shadow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowInfo>,
}

/// A canary, and its measurements on this server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CanaryInfo {
    /// Desired setting.
    pub setting: Canary,
    /// Version that is the canary on this server; absent if it is not in memory, or is the active version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<u64>,
    /// Current share of keys that the canary answers on this server.
    pub share: f64,
    /// Measurements of the active version in the window, since the last change of the setting or of a version.
    pub seen_active: SeenInfo,
    /// Measurements of the canary.
    pub seen_canary: SeenInfo,
}

/// Measurements of a version on this server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SeenInfo {
    /// Completed requests, without rejected ones.
    pub requests: u64,
    /// Failed requests.
    pub errors: u64,
    /// Median latency in milliseconds, to about a tenth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ms: Option<f64>,
    /// 99th percentile of latency in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ms: Option<f64>,
    /// Answers compared with exact search.
    pub audits: u64,
    /// Mean recall of the compared answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<f64>,
}

/// A shadow version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowInfo {
    /// Desired setting.
    pub setting: Shadow,
    /// Version that is the shadow on this server; absent if it is not in memory, or is the active version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<u64>,
}

/// Difference between the answer of a shadow and the served one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowDiff {
    /// Time of the comparison, in UTC.
    pub time: String,
    /// Request id, as in the answer and in the log.
    pub id: String,
    /// Name of the model.
    pub model: String,
    /// Version that answered.
    pub version: u64,
    /// Shadow version.
    pub shadow_version: u64,
    /// Items of the longer answer.
    pub k: usize,
    /// Share of the items that both answers have.
    pub overlap: f64,
    /// Mean difference between the ranks of common items in both answers.
    pub displacement: f64,
    /// Largest difference between the scores of common items in both answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_difference: Option<f32>,
    /// Items that the shadow lacks, the first ten.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<i64>,
    /// Items that only the shadow has, the first ten.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gained: Vec<i64>,
    /// Milliseconds of the steps of the version that answered.
    pub ms: f64,
    /// Milliseconds of the steps of the shadow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_ms: Option<f64>,
    /// Reason why the shadow did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Shadow answers of the last minutes that differed most from the answers sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowResponse {
    /// Length of a window; answers of the current and of the previous window are listed.
    pub window_seconds: u64,
    /// Differences, the largest first.
    pub diffs: Vec<ShadowDiff>,
}

impl From<SideSeen> for SeenInfo {
    fn from(seen: SideSeen) -> Self {
        let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        SeenInfo {
            requests: seen.requests,
            errors: seen.errors,
            p50_ms: seen.times.map(|(half, _)| millis(half)),
            p99_ms: seen.times.map(|(_, most)| millis(most)),
            audits: seen.audits,
            recall: seen.recall,
        }
    }
}

/// Describes the rollout of a model on this server.
pub fn traffic_info(model: String, now: TrafficNow) -> TrafficResponse {
    let canary = now.setting.canary.map(|setting| {
        let run = now.canary.as_ref();
        let BothSeen { active, canary } = run.map(|run| run.observed()).unwrap_or_default();
        CanaryInfo {
            setting,
            serving: run.map(|run| run.version()),
            share: run.map_or(0.0, |run| run.share()),
            seen_active: active.into(),
            seen_canary: canary.into(),
        }
    });
    let shadow = now.setting.shadow.map(|setting| {
        let serving = now.shadow.as_ref().map(|run| run.version());
        ShadowInfo { setting, serving }
    });
    TrafficResponse { model, revision: now.revision, active: now.active, canary, shadow }
}
