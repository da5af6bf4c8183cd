//! Semaphore that limits concurrent loads.

use crossbeam_channel::{Receiver, Sender, bounded};

use sterling_core::blocking::may_block;

/// Permits to load.
pub(super) struct Permits {
    give: Sender<()>,
    take: Receiver<()>,
}

pub(super) struct Permit<'a>(&'a Sender<()>);

impl Permits {
    pub(super) fn new(count: usize) -> Self {
        let (give, take) = bounded(count.max(1));
        while give.try_send(()).is_ok() {}
        Permits { give, take }
    }

    /// Waits for a permit.
    pub(super) fn take(&self) -> Permit<'_> {
        may_block();
        // Cannot fail: both ends of the channel live as long as `self`.
        let _ = self.take.recv();
        Permit(&self.give)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}
