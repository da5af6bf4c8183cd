//! Health of the devices: a failing device is not used for a growing pause, and is reported until it works again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Kind};
use sterling_core::locks::locked;

/// Initial pause after a failure; it doubles up to the maximum.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Failures of the devices that share the items of versions.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// True if `failure` is set. Checked without a lock, so that requests to a working device take none.
    is_failing: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

#[derive(Debug)]
struct Failure {
    since: Instant,
    reason: String,
    pause: Duration,
    /// Time at which one batch tries the device again; `None` if every batch may.
    again: Option<Instant>,
}

impl Health {
    /// Records an error of a batch. Returns true for the first error since the devices last worked. A lost device (`Unavailable`)
    /// is paused; a failed launch may concern its request alone.
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
        // Of several batches that were running, only one extends the pause.
        if error.kind() == Kind::Unavailable && known.again.is_none_or(|again| again <= now + known.pause) {
            known.pause = (2 * known.pause).min(PAUSE_MAX);
            known.again = Some(now + known.pause);
        }
        self.is_failing.store(true, Ordering::Relaxed);
        metrics::gauge!("sterling_device_failing").set(1.0);
        is_first
    }

    /// Records a batch that the devices answered. Returns true if the devices had failed before.
    pub(super) fn record_success(&self) -> bool {
        if !self.is_failing.load(Ordering::Relaxed) {
            return false;
        }
        let mut failure = locked(&self.failure);
        self.is_failing.store(false, Ordering::Relaxed);
        metrics::gauge!("sterling_device_failing").set(0.0);
        failure.take().is_some()
    }

    /// Returns why a batch must not use the devices. The first batch after a pause tries again.
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

    /// Returns a message for operators while devices fail.
    pub(super) fn warning(&self) -> Option<String> {
        let failure = locked(&self.failure);
        let Failure { since, reason, .. } = failure.as_ref()?;
        let seconds = since.elapsed().as_secs();
        Some(format!(
            "the device has failed for {seconds} s, the CPU answers: {reason}; the device is tried again; restart the server if it stays lost"
        ))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_lost_device_is_left_alone_and_tried_by_one_batch_at_a_time() {
        let (health, lost) = (Health::default(), Error::unavailable("the GPU is lost"));
        assert!(health.pause().is_none() && health.warning().is_none() && !health.record_success());
        assert!(health.failed(&lost) && !health.failed(&lost));
        assert!(health.pause().unwrap().contains("is lost") && health.warning().unwrap().contains("is lost"));
        let start = Instant::now();
        while health.pause().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is never tried again");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(start.elapsed() >= PAUSE_MIN / 2, "several failures at once are one");
        assert!(health.pause().is_some(), "one batch tries, and others do not wait for it");
        assert!(
            health.record_success()
                && !health.record_success()
                && health.pause().is_none()
                && health.warning().is_none()
        );
    }

    #[test]
    fn a_failed_launch_is_reported_and_requests_continue() {
        let health = Health::default();
        assert!(health.failed(&Error::internal("a kernel failed")));
        assert!(health.pause().is_none() && health.warning().unwrap().contains("a kernel failed"));
    }
}
