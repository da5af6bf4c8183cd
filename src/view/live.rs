//! A snapshot with its view of the moment.

use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::watch;

use super::View;
use crate::error::{Error, Result};
use crate::snapshot::Snapshot;

/// A loaded snapshot, and how it looks now. Who asks takes the view and keeps it: updates put another one in its place.
#[derive(Debug)]
pub struct Live {
    shown: Arc<Shown>,
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
}

impl Live {
    /// A snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        Live::of(View::new(main))
    }

    /// The snapshot of a view that is shown first.
    pub fn of(view: View) -> Self {
        let position = watch::Sender::new(view.position());
        Live { shown: Arc::new(Shown { now: ArcSwap::from_pointee(view), position, stalled: ArcSwapOption::empty() }) }
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

    /// Puts a later view of the same snapshot in the place of the present one.
    pub fn show(&self, view: View) {
        self.shown.show(view);
    }

    /// Why no later view will come, where something has gone wrong.
    pub fn stalled(&self) -> Option<Arc<String>> {
        self.shown.stalled.load_full()
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
        self.now.store(Arc::new(view.after(&self.now.load())));
        self.position.send_replace(position);
    }

    /// Says that no later view will come.
    pub fn stall(&self, why: &Error) {
        self.stalled.store(Some(Arc::new(why.to_string())));
        self.position.send_modify(|_| ());
    }
}
