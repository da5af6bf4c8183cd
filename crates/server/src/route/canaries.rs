//! Canaries and shadows of a router: routes unpinned requests, and rolls back a canary that is worse.
//!
//! A canary that is worse stops answering at this router at once. The router then has one of its servers set the canary's share
//! to zero in the store, so that all servers and routers follow.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::client::Outgoing;
use super::fleet::Fleet;
use super::offering::ShardedVersion;
use super::split::Split;
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;
use sterling_rollout::{Canary, CanaryRun, ShadowRun, StopRequest, TrafficNow};

/// Interval between two evaluations of canaries.
const EVALUATION_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout of a server that stops a canary in its store.
const STOP_MAX: Duration = Duration::from_secs(2);

/// Versions that unpinned requests of a model go to.
pub struct UnpinnedShardedVersion {
    /// Version that answers by default.
    pub active: Arc<ShardedVersion>,
    /// Version that answers a share of the requests.
    pub canary: Option<(Arc<CanaryRun>, Arc<ShardedVersion>)>,
    /// Shadow version: a share of the requests is repeated at it.
    pub shadow: Option<(Arc<ShadowRun>, Arc<ShardedVersion>)>,
}

impl Fleet {
    /// Returns the versions that unpinned requests go to.
    ///
    /// # Errors
    /// As [`Fleet::get`] of the active version.
    pub fn unpinned(&self, name: &str) -> Result<UnpinnedShardedVersion> {
        let active = self.get(name, VersionSelector::Active)?;
        self.of_model(name, |model| {
            let Split { canary, shadow, .. } = &model.split;
            Ok(UnpinnedShardedVersion { active, canary: canary.clone(), shadow: shadow.clone() })
        })
    }

    /// Returns the desired and the current traffic of a model.
    ///
    /// # Errors
    /// `NotFound` for an unknown model; `Unsupported` if the servers disagree about the desired traffic.
    pub fn traffic(&self, name: &str) -> Result<TrafficNow> {
        self.of_model(name, |model| match &model.split.undivided {
            Some(reason) => Err(Error::unsupported(reason.clone())),
            None => Ok(model.split.now(model.active().map(|served| served.version()))),
        })
    }

    /// Evaluates canaries forever, and stops those that are worse in the store.
    pub async fn judge(&self) -> Infallible {
        loop {
            sleep(EVALUATION_INTERVAL).await;
            let models = self.models.load_full();
            let canaries = models.iter().filter_map(|(name, model)| Some((name, model.split.canary.as_ref()?)));
            let stops = canaries.map(|(name, (run, served))| async move {
                run.judge(Duration::ZERO);
                let Some(verdict) = run.verdict() else { return };
                if let Err(error) = stop(name, served, run.setting(), &verdict.reason).await {
                    tracing::warn!(model = name, %error, "canary stopped at this router but not yet in the store; retrying");
                }
            });
            join_all(stops).await;
        }
    }
}

/// Calls servers of a canary, one after the other, until one server has set the canary's share to zero in the store.
async fn stop(model: &str, served: &ShardedVersion, canary: &Canary, reason: &str) -> Result<()> {
    let body = serde_json::to_vec(&StopRequest { canary: canary.clone(), reason: reason.into() });
    let body = body.map_err(|e| Error::internal(format!("cannot encode a canary: {e}")))?;
    let path = format!("/v1/models/{model}/traffic:stop");
    let call = Outgoing::plain(path, (Some(Bytes::from(body)), "application/json"), None);
    let mut last = Error::unavailable("no server has the canary's version any more");
    for server in served.homes.iter().flat_map(|home| home.servers().to_vec()) {
        match server.call(&call, Instant::now() + STOP_MAX).await {
            Ok(_) => return Ok(()),
            Err(error) => last = error.within(format_args!("server {}", server.address())),
        }
    }
    Err(last)
}
