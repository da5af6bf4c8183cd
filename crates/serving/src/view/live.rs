//! Snapshot with its current view.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock, Weak};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::watch;

use super::View;
use sterling_core::error::{Error, Result};
use sterling_snapshot::Snapshot;

/// Loaded snapshot with its current view. Readers take the view; updates replace it.
#[derive(Debug)]
pub struct Live {
    shown: Arc<CurrentView>,
}

/// Hook that prepares views before they become visible.
pub trait BeforeShown: Debug + Send + Sync {
    /// Prepares every view after the first one, before requests see the view. May be slow: only the update thread waits.
    fn before_shown(&self, view: &Arc<View>);
}

/// Current view, which the update thread replaces.
///
/// A reader of a view sees all writes of its creator: the swap is a release and the load an acquire (`arc-swap` makes both
/// sequentially consistent), and data that views share is never written again. Readers never block.
#[derive(Debug)]
pub struct CurrentView {
    now: ArcSwap<View>,
    position: watch::Sender<u64>,
    /// Reason why updates have stopped, so that no later view will be shown.
    stalled: ArcSwapOption<String>,
    /// Message for operators about the applied updates.
    warning: ArcSwapOption<String>,
    ready: OnceLock<Arc<dyn BeforeShown>>,
}

impl Live {
    /// Wraps a snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        Live::of(View::new(main))
    }

    /// Wraps the first view of a snapshot.
    pub fn of(view: View) -> Self {
        let position = watch::Sender::new(view.position());
        let now = ArcSwap::from_pointee(view);
        let (stalled, warning) = (ArcSwapOption::empty(), ArcSwapOption::empty());
        Live { shown: Arc::new(CurrentView { now, position, stalled, warning, ready: OnceLock::new() }) }
    }

    /// Returns the current view.
    pub fn view(&self) -> Arc<View> {
        self.shown.now.load_full()
    }

    /// Waits for a view that contains the updates up to a position.
    ///
    /// # Errors
    /// `Unavailable` if the position will never be visible.
    pub async fn reached(&self, position: u64) -> Result<Arc<View>> {
        let mut shown = self.shown.position.subscribe();
        let stalled = || self.shown.stalled.load_full();
        // Cannot fail: the sender lives as long as `self`.
        let _ = shown.wait_for(|now| *now >= position || stalled().is_some()).await;
        match stalled() {
            Some(why) if self.view().position() < position => {
                Err(Error::unavailable(format!("position {position} will not be reached: {why}")))
            }
            _ => Ok(self.view()),
        }
    }

    /// Sets the hook that prepares later views; only the first call has an effect.
    pub fn set_prepare_hook(&self, by: Arc<dyn BeforeShown>) {
        // If a hook was already set, that hook stays.
        let _ = self.shown.ready.set(by);
    }

    /// Replaces the current view by a later one of the same snapshot.
    pub fn show(&self, view: View) {
        self.shown.show(view);
    }

    /// Returns the reason why updates have stopped, if they have.
    pub fn stalled(&self) -> Option<Arc<String>> {
        self.shown.stalled.load_full()
    }

    /// Returns the message for operators about the applied updates, if any.
    pub fn warning(&self) -> Option<Arc<String>> {
        self.shown.warning.load_full()
    }

    /// Sets the message for operators about the applied updates.
    pub fn warn(&self, warning: Option<String>) {
        self.shown.warn(warning);
    }

    /// Returns a handle for the update thread that does not keep the version in memory.
    pub fn shared(&self) -> Weak<CurrentView> {
        Arc::downgrade(&self.shown)
    }
}

impl CurrentView {
    /// See [`Live::show`].
    pub fn show(&self, view: View) {
        let position = view.position();
        let view = Arc::new(view.after(&self.now.load()));
        if let Some(ready) = self.ready.get() {
            ready.before_shown(&view);
        }
        self.now.store(view);
        self.position.send_replace(position);
    }

    /// See [`Live::warn`].
    pub fn warn(&self, warning: Option<String>) {
        self.warning.store(warning.map(Arc::new));
    }

    /// Records that updates have stopped, so that no later view will be shown.
    pub fn stall(&self, why: &Error) {
        self.stalled.store(Some(Arc::new(why.to_string())));
        self.position.send_modify(|_| ());
    }
}
