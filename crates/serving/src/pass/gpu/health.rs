//! Whether devices answer: a device that fails is left alone for a while, which becomes longer, and reported until it works again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Kind};
use sterling_core::locks::locked;

/// The first pause after a failure, which doubles up to the last.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The failures of the devices that share the items of versions.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Whether `failure` is there, so that a device that works costs no lock.
    is_failing: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

#[derive(Debug)]
struct Failure {
    since: Instant,
    reason: String,
    pause: Duration,
    /// When one batch tries the device again; none where every batch may.
    again: Option<Instant>,
}

impl Health {
    /// Takes note of an error of a batch. True for the first one since the devices last worked. A device that is lost
    /// (`Unavailable`) is left alone for a while; a launch that failed may be of its request alone.
    pub(super) fn failed(&self, error: &Error) -> bool {
        let mut failure = locked(&self.failure);
        let now = Instant::now();
        let is_first = failure.is_none();
        let known = failure.get_or_insert_with(|| Failure {
            since: now,
            reason: String::new(),
            pause: PAUSE_MIN / 2,
            again: None,
        });
        known.reason = error.to_string();
        // Of batches that were under way together one makes the pause longer.
        if error.kind() == Kind::Unavailable && known.again.is_none_or(|again| again <= now + known.pause) {
            known.pause = (2 * known.pause).min(PAUSE_MAX);
            known.again = Some(now + known.pause);
        }
        self.is_failing.store(true, Ordering::Relaxed);
        metrics::gauge!("sterling_device_failing").set(1.0);
        is_first
    }

    /// Takes note of a batch that the devices answered. True where they had failed before.
    pub(super) fn worked(&self) -> bool {
        if !self.is_failing.load(Ordering::Relaxed) {
            return false;
        }
        let mut failure = locked(&self.failure);
        self.is_failing.store(false, Ordering::Relaxed);
        metrics::gauge!("sterling_device_failing").set(0.0);
        failure.take().is_some()
    }

    /// Why a batch is not to try the devices. Of those that come after a pause the first one tries.
    pub(super) fn pause(&self) -> Option<String> {
        if !self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let mut failure = locked(&self.failure);
        let Failure { reason, pause, again: Some(again), .. } = failure.as_mut()? else { return None };
        let now = Instant::now();
        if *again <= now {
            *again = now + *pause;
            return None;
        }
        Some(reason.clone())
    }

    /// What an operator should know while devices fail.
    pub(super) fn warning(&self) -> Option<String> {
        let failure = locked(&self.failure);
        let Failure { since, reason, .. } = failure.as_ref()?;
        let seconds = since.elapsed().as_secs();
        Some(format!(
            "the device has failed for {seconds} s, the CPU answers: {reason}; it is tried again, and a device that stays lost takes a restart of the server"
        ))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_lost_device_is_left_alone_and_tried_by_one_batch_at_a_time() {
        let (health, lost) = (Health::default(), Error::unavailable("the card is lost"));
        assert!(health.pause().is_none() && health.warning().is_none() && !health.worked());
        assert!(health.failed(&lost) && !health.failed(&lost));
        assert!(health.pause().unwrap().contains("is lost") && health.warning().unwrap().contains("is lost"));
        let start = Instant::now();
        while health.pause().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is never tried again");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(start.elapsed() >= PAUSE_MIN / 2, "several failures at once are one");
        assert!(health.pause().is_some(), "one batch tries, and others do not wait for it");
        assert!(health.worked() && !health.worked() && health.pause().is_none() && health.warning().is_none());
    }

    #[test]
    fn a_launch_that_fails_is_told_and_stops_nobody() {
        let health = Health::default();
        assert!(health.failed(&Error::internal("a kernel failed")));
        assert!(health.pause().is_none() && health.warning().unwrap().contains("a kernel failed"));
    }
}
