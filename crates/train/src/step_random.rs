//! Counter-based random numbers: a hash of (seed, step, number), so that a resumed run samples what an uninterrupted run would.

use sterling_core::random::splitmix64;

/// Random numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRandom {
    step: u64,
}

impl StepRandom {
    pub(crate) fn new(seed: u64, step: u64) -> Self {
        StepRandom { step: splitmix64(splitmix64(seed) ^ step) }
    }

    /// Returns random number `number` of the step, uniform in `0..below`.
    pub(crate) fn below(self, number: u64, below: u64) -> u64 {
        // Upper half of the product (Lemire 2019), without the rejection step: the bias is at most 2^-32.
        ((u128::from(splitmix64(self.step ^ number)) * u128::from(below)) >> 64) as u64
    }
}

/// Shuffles in place by the random numbers of one step (Fisher and Yates).
pub(crate) fn shuffle<T>(values: &mut [T], draws: StepRandom) {
    for n in (1..values.len()).rev() {
        values.swap(n, draws.below(n as u64, n as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_the_same_every_time() {
        let mut counts = [0u32; 10];
        for step in 0..1000 {
            let draws = StepRandom::new(7, step);
            (0..100).for_each(|n| counts[draws.below(n, 10) as usize] += 1);
        }
        // Five standard deviations of 95.
        assert!(counts.iter().all(|count| (9525..=10475).contains(count)), "{counts:?}");
        assert_eq!(StepRandom::new(7, 3).below(5, 1 << 40), StepRandom::new(7, 3).below(5, 1 << 40));
        assert_ne!(StepRandom::new(7, 3).below(5, 1 << 40), StepRandom::new(8, 3).below(5, 1 << 40));
        assert_ne!(StepRandom::new(7, 3).below(5, 1 << 40), StepRandom::new(7, 4).below(5, 1 << 40));
    }

    #[test]
    fn a_shuffle_is_a_permutation() {
        let mut values: Vec<u32> = (0..1000).collect();
        shuffle(&mut values, StepRandom::new(1, 2));
        assert_ne!(values[..20], (0..20).collect::<Vec<u32>>()[..]);
        values.sort_unstable();
        assert_eq!(values, (0..1000).collect::<Vec<u32>>());
    }
}
