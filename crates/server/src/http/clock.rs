//! Reports changes of the machine's wall clock. Requests, deadlines and leases use a monotonic clock. Certificates, bucket
//! signatures, and the times of logs, traces and metrics use the wall clock.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use sterling_core::clock::unix_time;
use sterling_core::locks::locked;

/// Monotonic clock; it continues during suspend if the system offers such a clock.
#[cfg(target_os = "linux")]
const STEADY: ClockId = ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
const STEADY: ClockId = ClockId::Monotonic;

/// Minimum jump of the wall clock between two checks, in milliseconds: far above the slewing of time daemons (0.5 ms per second),
/// and above a leap second.
const JUMP_MIN_MS: i64 = 2000;
/// Maximum time between the reads of both clocks, in milliseconds; if the thread was suspended for longer, the check is skipped.
const APART_MAX_MS: i64 = 100;
/// Time for which a jump is reported.
const REPORTED: Duration = Duration::from_secs(3600);

/// Compares the wall clock with a monotonic clock.
#[derive(Default)]
pub(super) struct WallClock(Mutex<Compared>);

#[derive(Default)]
struct Compared {
    /// Lead of the wall clock over the monotonic clock at the last check, in milliseconds.
    ahead_ms: Option<i64>,
    /// Last jump in milliseconds, and the time of its detection.
    jump: Option<(i64, Instant)>,
}

impl WallClock {
    /// Compares the clocks, and counts a jump since the last check.
    pub(super) fn look(&self) {
        let before = steady_ms();
        let wall = unix_time().as_millis() as i64;
        if steady_ms() - before <= APART_MAX_MS {
            self.compare_clocks(wall - before, Instant::now());
        }
    }

    fn compare_clocks(&self, ahead_ms: i64, now: Instant) {
        let mut compared = locked(&self.0);
        let jump = compared.ahead_ms.replace(ahead_ms).map_or(0, |last| ahead_ms - last);
        if jump.abs() < JUMP_MIN_MS {
            return;
        }
        compared.jump = Some((jump, now));
        let direction = direction(jump);
        metrics::counter!("sterling_clock_jumps_total", "direction" => direction).increment(1);
        tracing::warn!(direction, seconds = jump.abs() as f64 / 1000.0, "the clock of this machine was set");
    }

    /// Returns a warning for `/readyz`, for one hour after a jump.
    pub(super) fn warning(&self) -> Option<String> {
        self.warning_at(Instant::now())
    }

    fn warning_at(&self, now: Instant) -> Option<String> {
        let (jump, at) = locked(&self.0).jump.filter(|(_, at)| now.duration_since(*at) < REPORTED)?;
        let (direction, seconds, ago) = (direction(jump), (jump.abs() + 500) / 1000, now.duration_since(at).as_secs());
        Some(format!(
            "the clock of this machine was set {direction} by {seconds} s, {ago} s ago: certificates, signatures for \
             buckets and times of logs depend on it"
        ))
    }
}

fn direction(jump_ms: i64) -> &'static str {
    if jump_ms < 0 { "back" } else { "forward" }
}

fn steady_ms() -> i64 {
    let now = clock_gettime(STEADY);
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_are_reported_for_an_hour_and_slewing_is_not() {
        let (clock, start) = (WallClock::default(), Instant::now());
        let seconds = |seconds| start + Duration::from_secs(seconds);
        // Continuous slewing by far less than the threshold per check.
        (0..1000).for_each(|n| clock.compare_clocks(1_000_000 + n * 43, seconds(n as u64)));
        assert_eq!(clock.warning_at(seconds(1000)), None);
        clock.compare_clocks(1_042_957 - 3_600_400, seconds(1000));
        let message = |seconds_later: u64| clock.warning_at(seconds(1000 + seconds_later)).unwrap_or_default();
        assert!(
            message(7).starts_with("the clock of this machine was set back by 3600 s, 7 s ago: "),
            "{}",
            message(7)
        );
        assert_eq!(message(3600), "");
        clock.compare_clocks(1_042_957, seconds(1100));
        assert!(message(100).contains("set forward by 3600 s, 0 s ago"), "{}", message(100));
    }

    #[test]
    fn a_machine_whose_clock_goes_well_is_not_reported() {
        let clock = WallClock::default();
        (0..100).for_each(|_| clock.look());
        assert_eq!(clock.warning(), None);
    }
}
