//! Residency of versions in device memory: which are resident, which wait for room, and which are evicted.
//!
//! The first request for a version uploads it, and other requests wait for the upload. If there is no room or a device fails,
//! later requests trigger retries with growing delays. A resident version that meanwhile gets far fewer requests is
//! evicted, and then waits for room itself.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;

/// Initial delay of a retry; it doubles up to the maximum.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Ratio of requests at which a version is evicted in favour of another, so that two similar versions do not evict each other
/// repeatedly.
const EVICTION_RATIO: u64 = 4;

/// Result of uploading a version.
#[derive(Debug)]
enum Outcome<T> {
    There(T),
    /// The upload failed for lack of room or by a device error, and will be retried.
    Waits(Kind, String),
    /// The version was evicted, and waits for room once it is requested again.
    GaveWay(String),
    Refused(String),
}

#[derive(Debug)]
struct Version<S, T> {
    of: Weak<S>,
    /// Outcome of the upload; unset during the first upload.
    outcome: Arc<OnceLock<Outcome<T>>>,
    /// Requests for the version since the last retry of any version.
    asks: u64,
    tries: u32,
    /// Time of the next retry.
    again: Instant,
}

/// Versions `S`, each with its device data `T`.
#[derive(Debug)]
pub(super) struct RetainedVersions<S, T> {
    versions: Mutex<Vec<Version<S, T>>>,
}

impl<S, T> Default for RetainedVersions<S, T> {
    fn default() -> Self {
        RetainedVersions { versions: Mutex::default() }
    }
}

impl<T> Outcome<T> {
    fn of(brought: Result<T>) -> Self {
        match brought {
            Ok(there) => Outcome::There(there),
            Err(e) if e.kind() == Kind::Unsupported => Outcome::Refused(e.to_string()),
            Err(e) => Outcome::Waits(e.kind(), e.to_string()),
        }
    }
}

impl<S, T> Version<S, T> {
    fn is(&self, of: &Weak<S>) -> bool {
        self.of.ptr_eq(of)
    }

    /// Returns why the version waits, if it does.
    fn waits(&self) -> Option<(Kind, &str)> {
        if let Outcome::Waits(kind, reason) = self.outcome.get()? { Some((*kind, reason)) } else { None }
    }

    fn is_evicted(&self) -> bool {
        matches!(self.outcome.get(), Some(Outcome::GaveWay(_)))
    }
}

impl<S: Send + Sync + 'static, T: Clone + Send + Sync + 'static> RetainedVersions<S, T> {
    fn versions(&self) -> MutexGuard<'_, Vec<Version<S, T>>> {
        // The list is consistent after a panic.
        locked(&self.versions)
    }

    /// Returns the device data of a version, which `bring` uploads on the first call. Other calls wait for the upload.
    ///
    /// # Errors
    /// `Unsupported` with the reason why the version is not resident.
    pub(super) fn get(&self, of: &Arc<S>, bring: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.outcome(of).get_or_init(|| Outcome::of(bring())) {
            Outcome::There(there) => Ok(there.clone()),
            Outcome::Waits(_, reason) | Outcome::GaveWay(reason) | Outcome::Refused(reason) => {
                Err(Error::unsupported(reason.clone()))
            }
        }
    }

    /// Returns the entry of a version; removes entries of dropped versions with their memory.
    fn outcome(&self, of: &Arc<S>) -> Arc<OnceLock<Outcome<T>>> {
        let (mut versions, this) = (self.versions(), Arc::downgrade(of));
        let removed: Vec<Version<S, T>> = versions.extract_if(.., |version| version.of.strong_count() == 0).collect();
        if let Some(known) = versions.iter().find(|version| version.is(&this)) {
            let outcome = known.outcome.clone();
            drop(versions);
            if !removed.is_empty() {
                // Releasing pinned host memory is slow, and a caller waits for an answer.
                let _ = tasks::DEVICE.start(move || drop(removed));
            }
            return outcome;
        }
        let outcome = Arc::<OnceLock<Outcome<T>>>::default();
        let again = Instant::now() + RETRY_MIN;
        versions.push(Version { of: this, outcome: outcome.clone(), asks: 0, tries: 0, again });
        drop(versions);
        drop(removed);
        outcome
    }

    /// Counts requests for a version. Returns true if the version waits and the caller must retry the upload now.
    pub(super) fn ask(&self, of: &Arc<S>, requests: usize) -> bool {
        let (now, this) = (Instant::now(), Arc::downgrade(of));
        let mut versions = self.versions();
        let Some(version) = versions.iter_mut().find(|version| version.is(&this)) else { return false };
        version.asks += requests as u64;
        let is_due = version.again <= now && (version.waits().is_some() || version.is_evicted());
        if is_due {
            // Prevents concurrent retries; if this retry is lost, another follows later.
            version.again = now + RETRY_MAX;
        }
        let waiting = versions.iter().filter(|version| version.waits().is_some()).count();
        metrics::gauge!("sterling_device_waiting").set(waiting as f64);
        is_due
    }

    /// Returns resident versions with far fewer requests than a waiting one, the least requested first. Resets the
    /// request counts.
    pub(super) fn eviction_candidates(&self, by: &Arc<S>) -> Vec<(Weak<S>, T)> {
        let (mut versions, by) = (self.versions(), Arc::downgrade(by));
        let asks = versions.iter().find(|version| version.is(&by)).map_or(0, |version| version.asks);
        let there = |version: &Version<S, T>| match version.outcome.get()? {
            Outcome::There(there) if EVICTION_RATIO * (version.asks + 1) <= asks => {
                Some((version.asks, version.of.clone(), there.clone()))
            }
            _ => None,
        };
        let mut found: Vec<(u64, Weak<S>, T)> = versions.iter().filter_map(there).collect();
        versions.iter_mut().for_each(|version| version.asks = 0);
        drop(versions);
        found.sort_by_key(|(asks, ..)| *asks);
        found.into_iter().map(|(_, of, there)| (of, there)).collect()
    }

    /// Evicts a version; its memory is released when the last user is done.
    pub(super) fn evict(&self, of: &Weak<S>, reason: String) {
        self.settle(of, Outcome::GaveWay(reason), |_| 0);
    }

    /// Records the result of a retry.
    pub(super) fn tried(&self, of: &Arc<S>, brought: Result<T>) {
        self.settle(&Arc::downgrade(of), Outcome::of(brought), |tries| tries + 1);
    }

    fn settle(&self, of: &Weak<S>, outcome: Outcome<T>, tries: fn(u32) -> u32) {
        let mut versions = self.versions();
        let Some(version) = versions.iter_mut().find(|version| version.is(of)) else { return };
        version.tries = tries(version.tries);
        version.again = Instant::now() + RETRY_MIN.saturating_mul(1 << version.tries.min(16)).min(RETRY_MAX);
        let before = std::mem::replace(&mut version.outcome, Arc::new(OnceLock::from(outcome)));
        drop(versions);
        drop(before);
    }

    /// Returns versions that will be retried, with the reason why they are not resident.
    pub(super) fn waiting(&self) -> Vec<(Arc<S>, Kind, String)> {
        let waits = |version: &Version<S, T>| {
            let (kind, reason) = version.waits()?;
            Some((version.of.upgrade()?, kind, reason.to_owned()))
        };
        self.versions().iter().filter_map(waits).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    type Versions = RetainedVersions<String, Arc<u32>>;

    fn named(name: &str) -> Arc<String> {
        Arc::new(name.to_owned())
    }

    fn no_room() -> Result<Arc<u32>> {
        Err(Error::overloaded("no room"))
    }

    /// Sends requests until a retry is due; returns their number.
    fn requested(retained: &Versions, of: &Arc<String>) -> u64 {
        let asks = |_: &u64| {
            std::thread::sleep(RETRY_MIN / 20);
            retained.ask(of, 1)
        };
        (1..1000).find(asks).unwrap()
    }

    #[test]
    fn a_waiting_version_evicts_one_with_far_fewer_requests() {
        let (retained, a, b) = (Versions::default(), named("a"), named("b"));
        let there = Arc::downgrade(&retained.get(&a, || Ok(Arc::new(1))).unwrap());
        assert!(retained.get(&b, no_room).unwrap_err().to_string().contains("no room"));
        assert!(retained.get(&b, || Ok(Arc::new(2))).is_err(), "it is uploaded once");
        assert!(!retained.ask(&b, 1), "it was tried just now");
        assert_eq!(retained.waiting(), [(b.clone(), Kind::Overloaded, "no room".into())]);

        // About as often as the other one.
        std::thread::sleep(RETRY_MIN);
        assert!(retained.ask(&b, 1) && !retained.ask(&b, 1) && !retained.ask(&a, 1), "one tries");
        assert!(retained.eviction_candidates(&b).is_empty());
        retained.tried(&b, no_room());

        assert!(requested(&retained, &b) >= EVICTION_RATIO);
        let outnumbered = retained.eviction_candidates(&b);
        assert!(outnumbered.len() == 1 && outnumbered[0].0.ptr_eq(&Arc::downgrade(&a)));
        assert!(retained.eviction_candidates(&b).is_empty(), "counts are reset");
        retained.evict(&outnumbered[0].0, "it was evicted".into());
        assert_eq!(there.strong_count(), 1, "users of the version keep it");
        drop(outnumbered);
        assert_eq!(there.strong_count(), 0);
        retained.tried(&b, Ok(Arc::new(2)));
        assert_eq!(*retained.get(&b, no_room).unwrap(), 2);
        assert!(retained.get(&a, no_room).unwrap_err().to_string().contains("it was evicted"));
        assert!(retained.waiting().is_empty(), "no request for it");
        assert!(requested(&retained, &a) > 1);
        retained.tried(&a, no_room());
        assert_eq!(retained.waiting(), [(a.clone(), Kind::Overloaded, "no room".into())]);
        // A failing device may recover.
        retained.tried(&a, Err(Error::unavailable("lost")));
        assert_eq!(retained.waiting(), [(a.clone(), Kind::Unavailable, "lost".into())]);
        retained.tried(&a, Ok(Arc::new(3)));
        assert_eq!(*retained.get(&a, no_room).unwrap(), 3);
    }

    #[test]
    fn rejected_versions_are_not_retried_and_dropped_ones_are_forgotten() {
        let (retained, a, b) = (Versions::default(), named("a"), named("b"));
        assert!(retained.get(&a, || Err(Error::unsupported("never"))).is_err());
        let there = Arc::downgrade(&retained.get(&b, || Ok(Arc::new(2))).unwrap());
        std::thread::sleep(RETRY_MIN);
        assert!(!retained.ask(&a, 1) && retained.waiting().is_empty());
        drop(b);
        assert!(retained.get(&a, no_room).unwrap_err().to_string().contains("never"));
        let start = Instant::now();
        while there.strong_count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "its memory stays");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Results of an unknown version are ignored.
        retained.tried(&named("c"), Ok(Arc::new(3)));
        assert!(!retained.ask(&named("c"), 1));
    }
}
