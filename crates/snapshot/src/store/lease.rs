//! Lease of a publication to a bucket: an object that the publication rewrites periodically, so that other publishers do not
//! mistake it for a killed one.
//!
//! A bucket cannot detect that a process has died. A publication whose lease is older than ten minutes counts as a leftover. A
//! publication that cannot renew its lease in time aborts before other publishers treat it as a leftover.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;
use sterling_storage::objects::{Objects, WriteCondition};

/// Name of the lease object, within the version.
pub(super) const LEASE: &str = ".publishing";
/// Time for which a lease is valid.
pub(super) const LEASE_MS: i64 = 10 * 60 * 1000;
/// Interval at which a lease is renewed.
const EVERY: Duration = Duration::from_secs(60);
/// Time without a renewal after which a publication aborts.
const ABORT_AFTER: Duration = Duration::from_secs(5 * 60);

/// Lease of an active publication; its object is removed on drop.
pub(super) struct Lease {
    key: String,
    objects: Arc<dyn Objects>,
    written: Arc<Mutex<Instant>>,
    /// True if the object must stay, so that a later publication removes the leftovers.
    stays: bool,
    stop: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Lease {
    /// Writes the lease and starts its renewal.
    pub(super) fn take(objects: &Arc<dyn Objects>, key: String) -> Result<Self> {
        let started = Instant::now();
        objects.put(&key, Vec::new(), &WriteCondition::Anything)?;
        let written = Arc::new(Mutex::new(started));
        let (stop, stopped) = channel();
        let renew = {
            let (objects, key, written) = (objects.clone(), key.clone(), written.clone());
            move || {
                while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                    let started = Instant::now();
                    match objects.put(&key, Vec::new(), &WriteCondition::Anything) {
                        Ok(_) => *locked(&written) = started,
                        Err(error) => tracing::warn!(%error, "could not renew the lease of the publication"),
                    }
                }
            }
        };
        let thread = tasks::LEASE.start(renew)?;
        Ok(Lease { key, objects: objects.clone(), written, stays: false, stop: Some((stop, thread)) })
    }

    /// Stops the renewal and keeps the lease object, by which a later publication finds the leftovers.
    pub(super) fn leave(mut self) {
        self.stays = true;
    }

    /// Returns an error if the lease may have expired, so that other publishers may have removed the uploaded objects.
    pub(super) fn check(&self) -> Result<()> {
        let ago = locked(&self.written).elapsed();
        match ago < ABORT_AFTER {
            true => Ok(()),
            false => Err(Error::unavailable(format!(
                "{}: the lease could not be renewed for {} s: another process may have removed the uploaded files",
                self.key,
                ago.as_secs()
            ))),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.stop.take() {
            drop(stop);
            let _ = thread.join();
        }
        if !self.stays {
            // If the lease object cannot be removed now, the next publication removes it.
            let _ = self.objects.remove(&self.key);
        }
    }
}
