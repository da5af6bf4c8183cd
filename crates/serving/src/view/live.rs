//! A snapshot with its view of the moment.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock, Weak};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::watch;

use super::View;
use sterling_core::error::{Error, Result};
use sterling_snapshot::Snapshot;

/// A loaded snapshot, and how it looks now. Who asks takes the view and keeps it: updates put another one in its place.
#[derive(Debug)]
pub struct Live {
    shown: Arc<Shown>,
}

/// What makes views ready before anybody sees them.
pub trait BeforeShown: Debug + Send + Sync {
    /// Is called with every later view, and may take its time: who applies updates waits, and no request.
    fn before_shown(&self, view: &Arc<View>);
}

/// The view of the moment, which who applies updates changes.
///
/// Whoever takes a view sees all that its maker wrote: the swap is a release and the load an acquire (`arc-swap` makes both
/// sequentially consistent), and of what a view shares with others nothing is ever written again. Readers wait for nobody.
#[derive(Debug)]
pub struct Shown {
    now: ArcSwap<View>,
    position: watch::Sender<u64>,
    /// Why no later view will come.
    stalled: ArcSwapOption<String>,
    /// What an operator should know of the updates that were applied.
    warning: ArcSwapOption<String>,
    ready: OnceLock<Arc<dyn BeforeShown>>,
}

impl Live {
    /// A snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        Live::of(View::new(main))
    }

    /// The snapshot of a view that is shown first.
    pub fn of(view: View) -> Self {
        let position = watch::Sender::new(view.position());
        let now = ArcSwap::from_pointee(view);
        let (stalled, warning) = (ArcSwapOption::empty(), ArcSwapOption::empty());
        Live { shown: Arc::new(Shown { now, position, stalled, warning, ready: OnceLock::new() }) }
    }

    /// The view of this moment.
    pub fn view(&self) -> Arc<View> {
        self.shown.now.load_full()
    }

    /// The view of the moment at which updates up to a position are seen.
    ///
    /// # Errors
    /// `Unavailable` where it will never be.
    pub async fn reached(&self, position: u64) -> Result<Arc<View>> {
        let mut shown = self.shown.position.subscribe();
        let stalled = || self.shown.stalled.load_full();
        // The sender lives as long as this does.
        let _ = shown.wait_for(|now| *now >= position || stalled().is_some()).await;
        match stalled() {
            Some(why) if self.view().position() < position => {
                Err(Error::unavailable(format!("position {position} will not be reached: {why}")))
            }
            _ => Ok(self.view()),
        }
    }

    /// Has all later views made ready before they are shown, by the first that is named here.
    pub fn make_ready_by(&self, by: Arc<dyn BeforeShown>) {
        // Whoever was named before goes on.
        let _ = self.shown.ready.set(by);
    }

    /// Puts a later view of the same snapshot in the place of the present one.
    pub fn show(&self, view: View) {
        self.shown.show(view);
    }

    /// Why no later view will come, where something has gone wrong.
    pub fn stalled(&self) -> Option<Arc<String>> {
        self.shown.stalled.load_full()
    }

    /// What an operator should know of the updates that were applied, where there is something.
    pub fn warning(&self) -> Option<Arc<String>> {
        self.shown.warning.load_full()
    }

    /// Says what an operator should know of the updates that were applied.
    pub fn warn(&self, warning: Option<String>) {
        self.shown.warn(warning);
    }

    /// What who applies updates holds, without keeping it in memory.
    pub fn shared(&self) -> Weak<Shown> {
        Arc::downgrade(&self.shown)
    }
}

impl Shown {
    /// As [`Live::show`].
    pub fn show(&self, view: View) {
        let position = view.position();
        let view = Arc::new(view.after(&self.now.load()));
        if let Some(ready) = self.ready.get() {
            ready.before_shown(&view);
        }
        self.now.store(view);
        self.position.send_replace(position);
    }

    /// As [`Live::warn`].
    pub fn warn(&self, warning: Option<String>) {
        self.warning.store(warning.map(Arc::new));
    }

    /// Says that no later view will come.
    pub fn stall(&self, why: &Error) {
        self.stalled.store(Some(Arc::new(why.to_string())));
        self.position.send_modify(|_| ());
    }
}
