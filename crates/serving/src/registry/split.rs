//! Versions in memory that take part in the traffic of a model beside the active one.

use std::sync::Arc;

use super::loaded::Loaded;
use crate::view::Live;
use sterling_snapshot::rollout::{Canary, CanaryRun, Shadow, ShadowRun};

/// A canary in memory, with what is seen of it.
pub struct CanaryVersion<T = Live> {
    /// The version.
    pub loaded: Arc<Loaded<T>>,
    /// What is seen of it.
    pub run: Arc<CanaryRun>,
}

impl<T> CanaryVersion<T> {
    pub(super) fn new(setting: &Canary, loaded: Arc<Loaded<T>>, active: &Loaded<T>) -> Self {
        let run = CanaryRun::new(setting, (loaded.name(), loaded.version()), (active.version(), active.digest()));
        CanaryVersion { loaded, run: Arc::new(run) }
    }

    /// True where nothing has changed that it depends on.
    pub(super) fn is_of(&self, setting: &Canary, loaded: &Arc<Loaded<T>>, active: &Loaded<T>) -> bool {
        Arc::ptr_eq(&self.loaded, loaded) && self.run.is_of(setting, (active.version(), active.digest()))
    }
}

/// A shadow in memory.
pub struct ShadowVersion<T = Live> {
    /// The version.
    pub loaded: Arc<Loaded<T>>,
    /// Which requests it is asked.
    pub run: Arc<ShadowRun>,
}

impl<T> ShadowVersion<T> {
    pub(super) fn new(setting: &Shadow, loaded: Arc<Loaded<T>>) -> Self {
        let run = ShadowRun::new(setting, (loaded.name(), loaded.version()));
        ShadowVersion { loaded, run: Arc::new(run) }
    }

    /// True where nothing has changed that it depends on.
    pub(super) fn is_of(&self, setting: &Shadow, loaded: &Arc<Loaded<T>>) -> bool {
        *self.run.setting() == *setting && Arc::ptr_eq(&self.loaded, loaded)
    }
}
