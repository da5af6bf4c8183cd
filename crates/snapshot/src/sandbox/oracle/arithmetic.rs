//! How results are rounded, and how much work they took.

use super::stop::Stop;

/// Most numbers of one value that is made.
const NUMBERS_MAX: usize = 1 << 24;

/// How results are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Not at all: f64.
    Exact,
    /// To the nearest f32.
    Nearest,
    /// To an f32 within a unit in the last place, at random by this seed. What f32 holds exactly stays.
    Random(u64),
}

/// Rounds results and counts the work of an evaluation.
#[derive(Debug)]
pub(crate) struct Arithmetic {
    mode: Mode,
    state: u64,
    work: u64,
    limit: u64,
}

impl Arithmetic {
    /// An evaluation that may take so much work: a unit is a multiply-add.
    pub(crate) fn new(mode: Mode, limit: u64) -> Self {
        let state = if let Mode::Random(seed) = mode { seed } else { 0 };
        Arithmetic { mode, state, work: 0, limit }
    }

    /// Work so far.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    pub(super) fn spend(&mut self, work: usize) -> Result<(), Stop> {
        self.work = self.work.saturating_add(work as u64);
        if self.work > self.limit { Err(Stop::TooLarge) } else { Ok(()) }
    }

    /// Takes the room of a value of this shape, each number of which is so much work.
    pub(super) fn room(&mut self, shape: &[usize], each: usize) -> Result<(), Stop> {
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= NUMBERS_MAX);
        self.spend(count.ok_or(Stop::TooLarge)?.saturating_mul(each))
    }

    /// A number between -1 and 1 (splitmix64).
    fn random(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A result of one operation.
    pub(super) fn result(&mut self, x: f64) -> f64 {
        self.sum(x, x.abs())
    }

    /// A sum of terms whose magnitudes add up to `magnitude`, which rounding errors are relative to.
    pub(super) fn sum(&mut self, sum: f64, magnitude: f64) -> f64 {
        let nearest = f64::from(sum as f32);
        match self.mode {
            Mode::Exact => sum,
            Mode::Nearest => nearest,
            Mode::Random(_) if !nearest.is_finite() => nearest,
            // What f32 holds is exact in every order of its terms where it holds their magnitudes together, too.
            Mode::Random(_) if nearest == sum && f64::from(magnitude as f32) == magnitude => nearest,
            Mode::Random(_) => f64::from((sum + self.random() * magnitude * f64::from(f32::EPSILON)) as f32),
        }
    }
}
