//! Canaries and shadows of a router: what a request goes to that pins no version, and what becomes of a canary that is behind.
//!
//! Such a one answers nobody at this router at once. Then one of its servers is told, which has the store take its share away, so that every server
//! and every router hears of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::client::Outgoing;
use super::fleet::Fleet;
use super::offering::Offering;
use super::split::Split;
use sterling_core::error::{Error, Result};
use sterling_core::request::Which;
use sterling_snapshot::rollout::{Canary, CanaryRun, ShadowRun, StopRequest, TrafficNow};

/// How often canaries are judged.
const JUDGED_EVERY: Duration = Duration::from_secs(5);
/// How long a server may take to have its store know of one that is behind.
const STOP_MAX: Duration = Duration::from_secs(2);

/// What unpinned requests of a model go to.
pub struct UnpinnedOffering {
    /// What answers where nothing else does.
    pub active: Arc<Offering>,
    /// What answers some of them.
    pub canary: Option<(Arc<CanaryRun>, Arc<Offering>)>,
    /// What is asked some of them as well.
    pub shadow: Option<(Arc<ShadowRun>, Arc<Offering>)>,
}

impl Fleet {
    /// What a request goes to that pins no version.
    ///
    /// # Errors
    /// As [`Fleet::get`] of the version that answers.
    pub fn unpinned(&self, name: &str) -> Result<UnpinnedOffering> {
        let active = self.get(name, Which::Active)?;
        self.of_model(name, |model| {
            let Split { canary, shadow, .. } = &model.split;
            Ok(UnpinnedOffering { active, canary: canary.clone(), shadow: shadow.clone() })
        })
    }

    /// What is wished of a model's traffic, and what of it is so.
    ///
    /// # Errors
    /// `NotFound` for an unknown model; why nothing is divided, where the servers do not agree on what is wished.
    pub fn traffic(&self, name: &str) -> Result<TrafficNow> {
        self.of_model(name, |model| match &model.split.undivided {
            Some(reason) => Err(Error::unsupported(reason.clone())),
            None => Ok(model.split.now(model.active().map(|served| served.version()))),
        })
    }

    /// Judges canaries for ever, and has the store know of those that are behind.
    pub async fn judge(&self) -> Infallible {
        loop {
            sleep(JUDGED_EVERY).await;
            let models = self.models.load_full();
            let canaries = models.iter().filter_map(|(name, model)| Some((name, model.split.canary.as_ref()?)));
            let stops = canaries.map(|(name, (run, served))| async move {
                run.judge(Duration::ZERO);
                let Some(verdict) = run.verdict() else { return };
                if let Err(error) = stop(name, served, run.setting(), &verdict.reason).await {
                    tracing::warn!(model = name, %error, "the canary is stopped here, and not in the store yet; that is tried again");
                }
            });
            join_all(stops).await;
        }
    }
}

/// Has a server take the share of a canary away in its store, the first of those that have it which can.
async fn stop(model: &str, served: &Offering, canary: &Canary, reason: &str) -> Result<()> {
    let body = serde_json::to_vec(&StopRequest { canary: canary.clone(), reason: reason.into() });
    let body = body.map_err(|e| Error::internal(format!("a canary that cannot be written: {e}")))?;
    let path = format!("/v1/models/{model}/traffic:stop");
    let call = Outgoing::plain(path, (Some(Bytes::from(body)), "application/json"), None);
    let mut last = Error::unavailable("no server has it any more");
    for server in served.homes.iter().flat_map(|home| home.servers().to_vec()) {
        match server.call(&call, Instant::now() + STOP_MAX).await {
            Ok(_) => return Ok(()),
            Err(error) => last = error.within(format_args!("server {}", server.address())),
        }
    }
    Err(last)
}
