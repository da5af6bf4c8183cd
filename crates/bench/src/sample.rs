//! Uniform sample of the timed answers (Vitter's algorithm R) within a memory limit.

use hyper::body::Bytes;

use super::schedule::Random;

/// Maximum bytes of sampled answers; long answers reduce their number.
const BYTES_MAX: usize = 256 << 20;

/// A timed request and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedAnswer {
    pub(super) request: Bytes,
    pub(super) answer: Vec<u8>,
}

/// Reservoir of sampled answers.
pub(super) struct Reservoir {
    kept: Vec<TimedAnswer>,
    most: usize,
    seen: usize,
    bytes: usize,
    bytes_max: usize,
    random: Random,
}

impl Reservoir {
    pub(super) fn new(most: usize, seed: u64) -> Self {
        Reservoir { kept: Vec::new(), most, seen: 0, bytes: 0, bytes_max: BYTES_MAX, random: Random::new(seed) }
    }

    /// Offers an answer to the sample; `read` returns the answer's body and is called only if the answer is sampled.
    pub(super) fn offer(&mut self, request: &Bytes, read: impl FnOnce() -> Vec<u8>) {
        self.seen += 1;
        let place = if self.kept.len() < self.most { self.kept.len() } else { self.random.below(self.seen) };
        if place >= self.most {
            return;
        }
        let found = TimedAnswer { request: request.clone(), answer: read() };
        self.bytes += found.answer.len();
        if place < self.kept.len() {
            self.bytes -= std::mem::replace(&mut self.kept[place], found).answer.len();
        } else {
            self.kept.push(found);
        }
        // A random subset of a uniform sample is uniform.
        while self.bytes > self.bytes_max && self.kept.len() > 1 {
            let leaves = self.random.below(self.kept.len());
            self.bytes -= self.kept.swap_remove(leaves).answer.len();
            self.most = self.kept.len();
        }
    }

    pub(super) fn into_kept(self) -> Vec<TimedAnswer> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(most: usize, bytes_max: usize, count: usize, seed: u64) -> Vec<usize> {
        let mut reservoir = Reservoir { bytes_max, ..Reservoir::new(most, seed) };
        for n in 0..count {
            reservoir.offer(&Bytes::new(), || n.to_le_bytes().to_vec());
        }
        let number = |found: &TimedAnswer| found.answer.iter().rev().fold(0, |all, &byte| all << 8 | usize::from(byte));
        reservoir.into_kept().iter().map(number).collect()
    }

    #[test]
    fn answers_are_sampled_uniformly() {
        for bytes_max in [BYTES_MAX, 40] {
            let mut times = [0u32; 20];
            for seed in 0..4000 {
                drawn(10, bytes_max, 20, seed * 7).into_iter().for_each(|n| times[n] += 1);
            }
            let expected = if bytes_max == 40 { 1000.0 } else { 2000.0 };
            for (n, found) in times.iter().enumerate() {
                assert!((f64::from(*found) - expected).abs() < 150.0, "answer {n} was kept {found} times");
            }
        }
    }

    #[test]
    fn samples_hold_all_of_few_answers_and_none_at_size_0() {
        assert_eq!(drawn(10, BYTES_MAX, 3, 1), [0, 1, 2]);
        assert_eq!(drawn(0, BYTES_MAX, 3, 1), [0usize; 0]);
        assert_eq!(drawn(10, 1, 30, 1).len(), 1, "one answer is kept however long it is");
    }
}
