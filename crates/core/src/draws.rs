//! Draws by chance: is this one of the share that is looked at?

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Draws that many threads make, each by itself, in another order in each process.
#[derive(Debug, Default)]
pub struct Draws {
    made: AtomicU64,
    chance: RandomState,
}

impl Draws {
    /// True for this share of the draws; for none at 0, and for all from 1 on.
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
    fn a_share_is_drawn() {
        let draws = Draws::default();
        let drawn = |share: f64| (0..10_000).filter(|_| draws.draw(share)).count();
        assert_eq!((drawn(0.0), drawn(-1.0), drawn(1.0), drawn(3.0)), (0, 0, 10_000, 10_000));
        // Six deviations of 43.
        assert!((2240..=2760).contains(&drawn(0.25)));
    }
}
