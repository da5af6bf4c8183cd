//! Rounding of results, and limit on the work of an evaluation.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::array::Element;
use super::stop::Stop;
use sterling_core::random::{GAMMA, splitmix64};

/// Maximum number of elements of one tensor.
const NUMBERS_MAX: usize = 1 << 24;

/// Rounding of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No rounding, f64.
    Exact,
    /// Rounds results to the nearest f32.
    Nearest,
    /// Rounds results to a random f32 within one unit in the last place, with this seed. Results that f32 represents
    /// exactly are not changed.
    Random(u64),
}

/// Rounds results and counts the work of an evaluation.
#[derive(Debug)]
pub(crate) struct Arithmetic {
    mode: Mode,
    state: u64,
    work: u64,
    limit: u64,
    /// CPU time of the process at which the evaluation ends.
    until: Option<Duration>,
}

impl Arithmetic {
    /// Starts an evaluation with a limit on its work, in multiply-adds.
    pub(crate) fn new(mode: Mode, limit: u64) -> Self {
        let state = if let Mode::Random(seed) = mode { seed } else { 0 };
        Arithmetic { mode, state, work: 0, limit, until: None }
    }

    /// Ends the evaluation once the process has used this CPU time.
    pub(crate) fn until(self, until: Option<Duration>) -> Self {
        Arithmetic { until, ..self }
    }

    /// Returns the work of the evaluation so far, in multiply-adds.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    pub(super) fn spend(&mut self, work: usize) -> Result<(), Stop> {
        self.work = self.work.saturating_add(work as u64);
        let used = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default();
        let is_late = self.until.is_some_and(|until| used() >= until);
        if self.work > self.limit || is_late { Err(Stop::TooLarge) } else { Ok(()) }
    }

    /// Adds the work for a value of this shape, `each` multiply-adds per number, and checks the limits.
    pub(super) fn room(&mut self, shape: &[usize], each: usize) -> Result<(), Stop> {
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= NUMBERS_MAX);
        self.spend(count.ok_or(Stop::TooLarge)?.saturating_mul(each))
    }

    /// Returns a pseudorandom number between -1 and 1.
    fn random(&mut self) -> f64 {
        let number = splitmix64(self.state);
        self.state = self.state.wrapping_add(GAMMA);
        (number >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Rounds the result of one operation.
    pub(super) fn result(&mut self, x: f64) -> f64 {
        self.sum(x, x.abs())
    }

    /// Rounds to a float type that is narrower than f32, in every mode.
    pub(super) fn narrowed(&mut self, x: f64, element: Element) -> f64 {
        let (round, unit): (fn(f64) -> f64, f64) = match element {
            Element::Half => (|x| half::f16::from_f64(x).to_f64(), 1.0 / 2048.0),
            Element::Brain => (|x| half::bf16::from_f64(x).to_f64(), 1.0 / 256.0),
            _ => return x,
        };
        let nearest = round(x);
        match self.mode {
            Mode::Random(_) if nearest.is_finite() && nearest != x => round(x + self.random() * unit * x.abs()),
            _ => nearest,
        }
    }

    /// Rounds a sum; rounding errors are relative to `magnitude`, the sum of its terms' magnitudes.
    pub(super) fn sum(&mut self, sum: f64, magnitude: f64) -> f64 {
        let nearest = f64::from(sum as f32);
        match self.mode {
            Mode::Exact => sum,
            Mode::Nearest => nearest,
            Mode::Random(_) if !nearest.is_finite() => nearest,
            // If f32 also represents the sum of the magnitudes exactly, the sum is exact in every order of its terms.
            Mode::Random(_) if nearest == sum && f64::from(magnitude as f32) == magnitude => nearest,
            Mode::Random(_) => f64::from((sum + self.random() * magnitude * f64::from(f32::EPSILON)) as f32),
        }
    }
}
