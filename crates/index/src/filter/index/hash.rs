//! Bit positions of a term in a Bloom filter.

use std::iter::successors;

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Number of multiples of a double-hashing step that must not be near 0 modulo 2^64: enough for five distinct
/// positions, the default.
const MULTIPLES: u64 = 4;
/// Minimum distance from 0, modulo 2^64, of the first `MULTIPLES` multiples of a double-hashing step: a 32nd of 2^64.
const APART: u64 = 1 << 59;
/// Maximum number of candidate steps; five of six are accepted.
const TRIES: usize = 32;

/// Hashing scheme of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) enum Hashing {
    /// Plain double hashing, as in indexes of early releases. With a step near a half or a third of 2^64, the positions
    /// soon repeat: in a filter of 32 bits the term has only two or three positions, and a third of the items may match
    /// it by chance.
    Plain,
    /// Double hashing with steps whose first multiples are far from 0 modulo 2^64, so that positions do not repeat
    /// soon.
    Spaced,
}

/// The two hashes of a term, from which all its bit positions follow (double hashing by Kirsch and Mitzenmacher).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) struct TermHash {
    pub(in crate::filter) start: u64,
    pub(in crate::filter) step: u64,
}

impl Hashing {
    /// Returns the name of the tensor with the number of hashes; it identifies the scheme.
    pub(super) fn tensor(self) -> &'static str {
        match self {
            Hashing::Plain => "hashes",
            Hashing::Spaced => "spaced_hashes",
        }
    }

    pub(in crate::filter) fn of(self, key: &[u8]) -> TermHash {
        let hash = xxh3_128(key);
        let (start, step) = (hash as u64, (hash >> 64) as u64 | 1);
        let step = match self {
            Hashing::Plain => step,
            Hashing::Spaced => {
                let mut steps = successors(Some(step), |step| Some(xxh3_64(&step.to_le_bytes())));
                steps.by_ref().take(TRIES).find(|step| is_spaced(*step)).unwrap_or(step)
            }
        };
        TermHash { start, step }
    }
}

fn is_spaced(step: u64) -> bool {
    let far = |multiple: u64| multiple.min(multiple.wrapping_neg()) >= APART;
    (1..=MULTIPLES).all(|n| far(step.wrapping_mul(n)))
}

impl TermHash {
    /// Returns bit position `n` of the term in filters of `width` bits.
    pub(in crate::filter) fn position(self, n: u32, width: u32) -> usize {
        let hash = self.start.wrapping_add(self.step.wrapping_mul(u64::from(n)));
        // Multiplies and shifts: the result is as uniform as a remainder, without a division.
        ((u128::from(hash) * u128::from(width)) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_term_has_a_high_false_positive_rate() {
        const TERMS: u32 = 3;
        let hash = |hashing: Hashing, n: u32| hashing.of(format!("tag\0{n}").as_bytes());
        let filter = |hash: TermHash| (0..5).fold(0u32, |bits, n| bits | 1 << hash.position(n, 32));
        // Share of false positives: items with three terms each that seem to have another term.
        let shares = |hashing: Hashing| -> Vec<f64> {
            let of_item = |item: u32| (0..TERMS).fold(0, |bits, n| bits | filter(hash(hashing, item * TERMS + n)));
            let items: Vec<u32> = (0..2000).map(of_item).collect();
            let share = |term: u32| {
                let requested = filter(hash(hashing, 1_000_000 + term));
                items.iter().filter(|bits| **bits & requested == requested).count() as f64 / items.len() as f64
            };
            (0..500).map(share).collect()
        };
        let worst = |shares: &[f64]| shares.iter().fold(0f64, |worst, share| worst.max(*share));
        let mean = |shares: &[f64]| shares.iter().sum::<f64>() / shares.len() as f64;
        let (plain, spaced) = (shares(Hashing::Plain), shares(Hashing::Spaced));
        assert!(worst(&plain) > 0.15 && worst(&spaced) < 0.05, "{} {}", worst(&plain), worst(&spaced));
        assert!(mean(&spaced) < 0.012 && mean(&spaced) < mean(&plain), "{} {}", mean(&spaced), mean(&plain));
    }
}
