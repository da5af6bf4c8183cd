//! Description of a version, combined from its shards.

use std::time::Duration;

use tokio::time::Instant;

use super::app::RouterApp;
use crate::route::Conditions;
use sterling_api::{MissingShard, ModelInfo, Problem};
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;

/// Describes a version by combining the reports of its shards, of those that answer.
///
/// # Errors
/// As [`Fleet::reported`](crate::route::Fleet::reported); the error of a shard if none answers.
pub(super) async fn info(app: &RouterApp, model: &str, pin: VersionSelector<'_>) -> Result<ModelInfo> {
    let deadline = Instant::now() + Duration::from_millis(app.fleet().options().timeout_ms);
    let terms = Conditions { min_coverage: 0.0, ..Conditions::until(deadline) };
    let (served, reported) = app.fleet().reported(model, pin, terms).await?;
    let (mut infos, mut missing, mut last) = (Vec::with_capacity(reported.len()), Vec::new(), None);
    for (shard, text) in (0..).zip(reported) {
        let unread = |e| Error::unavailable(format!("the answer of a shard cannot be decoded by this router: {e}"));
        match text.and_then(|text| serde_json::from_str::<ModelInfo>(&text).map_err(unread)) {
            Ok(info) => infos.push(info),
            Err(error) => {
                missing.push(MissingShard { shard, reason: Problem::from(&error).detail });
                last = Some(error);
            }
        }
    }
    let (bytes, memory_bytes) = infos.iter().fold((0, 0), |(b, m), info| (b + info.bytes, m + info.memory_bytes));
    let Some(first) = infos.into_iter().next() else {
        return Err(last.unwrap_or_else(|| Error::internal("the version has no shards")));
    };
    let (items, digest) = (served.items(), served.digest().to_owned());
    Ok(ModelInfo { items, digest, bytes, memory_bytes, missing, shard: None, ..first })
}
