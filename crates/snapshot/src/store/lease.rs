//! What keeps a publication to a bucket from being taken for one that was killed: an object that it writes again and again.
//!
//! Nobody tells a bucket that a process has died. A publication without such an object of the last minutes is a leftover, and one
//! that could not write it in time gives up by itself, before it would be taken for one.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_storage::objects::{Objects, Over};

/// The object's name, beside those of the version.
pub(super) const LEASE: &str = ".publishing";
/// How long it stands for a publication that is under way.
pub(super) const LEASE_MS: i64 = 10 * 60 * 1000;
/// How often it is written.
const EVERY: Duration = Duration::from_secs(60);
/// After how long without it a publication gives up.
const GIVE_UP: Duration = Duration::from_secs(5 * 60);

/// The lease of a publication under way. The object goes with it.
pub(super) struct Lease {
    key: String,
    objects: Arc<dyn Objects>,
    written: Arc<Mutex<Instant>>,
    /// True where the object stays, for a later publication to clean after this one.
    stays: bool,
    stop: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Lease {
    /// Writes the object, and goes on doing so.
    pub(super) fn take(objects: &Arc<dyn Objects>, key: String) -> Result<Self> {
        let begun = Instant::now();
        objects.put(&key, Vec::new(), &Over::Anything)?;
        let written = Arc::new(Mutex::new(begun));
        let (stop, stopped) = channel();
        let renew = {
            let (objects, key, written) = (objects.clone(), key.clone(), written.clone());
            move || {
                while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                    let begun = Instant::now();
                    match objects.put(&key, Vec::new(), &Over::Anything) {
                        Ok(_) => *locked(&written) = begun,
                        Err(error) => tracing::warn!(%error, "the publication could not say that it is under way"),
                    }
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("lease".into()).spawn(renew).map_err(|e| Error::io("a thread", e))?;
        Ok(Lease { key, objects: objects.clone(), written, stays: false, stop: Some((stop, thread)) })
    }

    /// Ends and leaves the object: a later publication finds by it what this one could not remove.
    pub(super) fn leave(mut self) {
        self.stays = true;
    }

    /// Refuses to go on where others may take the publication for a leftover.
    pub(super) fn check(&self) -> Result<()> {
        let ago = locked(&self.written).elapsed();
        match ago < GIVE_UP {
            true => Ok(()),
            false => Err(Error::unavailable(format!(
                "{}: could not be written for {} s: somebody may have removed what was uploaded",
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
            // The next publication removes it where this cannot.
            let _ = self.objects.remove(&self.key);
        }
    }
}
