//! Canary and shadow versions in memory.

use std::sync::Arc;

use super::loaded::Loaded;
use crate::view::Live;
use sterling_rollout::{Canary, CanaryRun, Shadow, ShadowRun};

/// Canary in memory, with its statistics.
pub struct CanaryVersion<T = Live> {
    /// Version of the canary.
    pub loaded: Arc<Loaded<T>>,
    /// Statistics of the canary.
    pub run: Arc<CanaryRun>,
}

impl<T> CanaryVersion<T> {
    pub(super) fn new(setting: &Canary, loaded: Arc<Loaded<T>>, active: &Loaded<T>) -> Self {
        let run = CanaryRun::new(setting, (loaded.name(), loaded.version()), (active.version(), active.digest()));
        CanaryVersion { loaded, run: Arc::new(run) }
    }

    /// Returns whether the setting and both versions are unchanged.
    pub(super) fn is_of(&self, setting: &Canary, loaded: &Arc<Loaded<T>>, active: &Loaded<T>) -> bool {
        Arc::ptr_eq(&self.loaded, loaded) && self.run.is_of(setting, (active.version(), active.digest()))
    }
}

/// Shadow in memory.
pub struct ShadowVersion<T = Live> {
    /// Version of the shadow.
    pub loaded: Arc<Loaded<T>>,
    /// Sampling of the requests that are repeated at the shadow version.
    pub run: Arc<ShadowRun>,
}

impl<T> ShadowVersion<T> {
    pub(super) fn new(setting: &Shadow, loaded: Arc<Loaded<T>>) -> Self {
        let run = ShadowRun::new(setting, (loaded.name(), loaded.version()));
        ShadowVersion { loaded, run: Arc::new(run) }
    }

    /// Returns whether the setting and the version are unchanged.
    pub(super) fn is_of(&self, setting: &Shadow, loaded: &Arc<Loaded<T>>) -> bool {
        *self.run.setting() == *setting && Arc::ptr_eq(&self.loaded, loaded)
    }
}
