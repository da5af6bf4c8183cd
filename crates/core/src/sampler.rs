//! Bernoulli sampling: decides per event whether it is sampled.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Sampler that threads share without locks. The random sequence differs between processes.
#[derive(Debug, Default)]
pub struct Sampler {
    made: AtomicU64,
    chance: RandomState,
}

impl Sampler {
    /// Returns true with probability `share`: never if `share` is at most 0, always if it is at least 1.
    pub fn draw(&self, share: f64) -> bool {
        if share <= 0.0 {
            return false;
        }
        let random = self.chance.hash_one(self.made.fetch_add(1, Ordering::Relaxed));
        random as f64 <= share * u64::MAX as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_requested_share() {
        let draws = Sampler::default();
        let drawn = |share: f64| (0..10_000).filter(|_| draws.draw(share)).count();
        assert_eq!((drawn(0.0), drawn(-1.0), drawn(1.0), drawn(3.0)), (0, 0, 10_000, 10_000));
        // 2,500 are expected; the bounds are six standard deviations of 43 away.
        assert!((2240..=2760).contains(&drawn(0.25)));
    }
}
