//! What a version is, as its shards say it.

use std::time::Duration;

use tokio::time::Instant;

use super::super::wire::ModelInfo;
use super::app::RouterApp;
use crate::error::{Error, Result};
use crate::route::{Conditions, Pin};

/// What a version is, of all shards together.
///
/// # Errors
/// As [`Fleet::told`](crate::route::Fleet::told); `Unavailable` where a shard says what this router does not read.
pub(super) async fn info(app: &RouterApp, model: &str, pin: Pin<'_>) -> Result<ModelInfo> {
    let deadline = Instant::now() + Duration::from_millis(app.fleet().options().timeout_ms);
    let terms = Conditions {
        deadline,
        priority: Default::default(),
        min_coverage: 1.0,
        positions: None,
        views: None,
        memory: None,
    };
    let (served, told) = app.fleet().told(model, pin, terms).await?;
    let mut infos = Vec::with_capacity(told.len());
    for text in &told {
        let info: ModelInfo = serde_json::from_str(text)
            .map_err(|e| Error::unavailable(format!("a shard says what this router does not understand: {e}")))?;
        infos.push(info);
    }
    let (bytes, memory_bytes) = infos.iter().fold((0, 0), |(b, m), info| (b + info.bytes, m + info.memory_bytes));
    let first = infos.into_iter().next().ok_or_else(|| Error::internal("a version without shards"))?;
    let (items, digest) = (served.items(), served.digest().to_owned());
    Ok(ModelInfo { items, digest, bytes, memory_bytes, shard: None, ..first })
}
