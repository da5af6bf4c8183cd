//! What is said of a model's traffic.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_snapshot::rollout::{BothSeen, Canary, Shadow, SideSeen, Traffic, TrafficNow};

/// Where the requests of a model are to go that pin no version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrafficRequest {
    /// A version that answers a share of them; none where it is left out.
    #[serde(default)]
    pub canary: Option<Canary>,
    /// A version that is asked a share of them as well; none where it is left out.
    #[serde(default)]
    pub shadow: Option<Shadow>,
    /// Change it only where what is wished of the model is of this revision: else it is a conflict, and nothing is done.
    #[serde(default)]
    pub revision: Option<u64>,
}

impl From<TrafficRequest> for Traffic {
    fn from(TrafficRequest { canary, shadow, .. }: TrafficRequest) -> Self {
        Traffic { canary, shadow }
    }
}

/// Where the requests of a model go that pin no version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrafficResponse {
    /// The model.
    pub model: String,
    /// How often what is wished of it in the store was changed.
    pub revision: u64,
    /// The version that answers all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<u64>,
    /// The canary that is wished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryInfo>,
    /// The shadow that is wished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowInfo>,
}

/// A canary, and what this server has seen of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CanaryInfo {
    /// What is wished.
    pub setting: Canary,
    /// The version that takes part here; none where it is not in memory, or is the one that answers anyway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<u64>,
    /// The share of keys that it answers here at this moment.
    pub share: f64,
    /// What was seen of the active version in the window, since the setting or a version changed last.
    pub seen_active: SeenInfo,
    /// What was seen of the canary.
    pub seen_canary: SeenInfo,
}

/// What a server has seen of a version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SeenInfo {
    /// Requests that ended, but for refusals.
    pub requests: u64,
    /// Those that failed.
    pub errors: u64,
    /// Milliseconds that half of the answers took at most, to about a tenth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ms: Option<f64>,
    /// Milliseconds that 99 of 100 took at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ms: Option<f64>,
    /// Answers that were held against exact ones.
    pub audits: u64,
    /// The mean recall of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<f64>,
}

/// A shadow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowInfo {
    /// What is wished.
    pub setting: Shadow,
    /// The version that takes part here; none where it is not in memory, or is the one that answers anyway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<u64>,
}

/// How the answer of a shadow differed from the one that was served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowDiff {
    /// When it was compared, in UTC.
    pub time: String,
    /// The request's id, as its answer had it and the log has it.
    pub id: String,
    /// The model.
    pub model: String,
    /// The version that answered.
    pub version: u64,
    /// The shadow.
    pub shadow_version: u64,
    /// Items of the longer answer.
    pub k: usize,
    /// The share of them that both have.
    pub overlap: f64,
    /// By how many places these have moved, in the mean.
    pub displacement: f64,
    /// By how much the score of one of these has changed at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_difference: Option<f32>,
    /// Items that the shadow lacks, the first ten.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<i64>,
    /// Items that it alone has, the first ten.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gained: Vec<i64>,
    /// Milliseconds that the steps took of the version that answered.
    pub ms: f64,
    /// The same of the shadow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_ms: Option<f64>,
    /// Why the shadow did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The answers of shadows that differed most in the last minutes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShadowResponse {
    /// Answers of this window and of the one before are told.
    pub window_seconds: u64,
    /// Those that differed most first.
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

/// What is so of a model's traffic.
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
