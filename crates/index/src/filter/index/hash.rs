//! The bit positions of a term in a Bloom filter.

use std::iter::successors;

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Multiples of a step that are kept apart: of the first five positions all, as many as terms have where recipes say nothing.
const MULTIPLES: u64 = 4;
/// How far these are from where they begin, at least: a 32nd of the range.
const APART: u64 = 1 << 59;
/// Steps that are tried; five of six are good.
const TRIES: usize = 32;

/// How an index hashes its terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) enum Hashing {
    /// By two hashes as they are. Near a half or a third of the range the steps come back to where they began: a filter of 32 bits has but
    /// two or three for such a term, and a third of the items may have them. So did the first indexes.
    Plain,
    /// By steps whose first multiples do not come back.
    Spaced,
}

/// The two hashes of a term, from which all its bit positions come (Kirsch and Mitzenmacher's double hashing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) struct TermHash {
    pub(in crate::filter) start: u64,
    pub(in crate::filter) step: u64,
}

impl Hashing {
    /// The tensor with the number of positions, whose name tells of the hashing.
    pub(super) fn tensor(self) -> &'static str {
        match self {
            Hashing::Plain => "hashes",
            Hashing::Spaced => "spaced_hashes",
        }
    }

    /// The hashes of a term's key.
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
    /// Bit position `n` of the term in filters of `width` bits.
    pub(in crate::filter) fn position(self, n: u32, width: u32) -> usize {
        let hash = self.start.wrapping_add(self.step.wrapping_mul(u64::from(n)));
        // Multiply and shift: as even as a remainder and without a division.
        ((u128::from(hash) * u128::from(width)) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_term_is_one_that_many_items_seem_to_have() {
        const TERMS: u32 = 3;
        let hash = |hashing: Hashing, n: u32| hashing.of(format!("tag\0{n}").as_bytes());
        let filter = |hash: TermHash| (0..5).fold(0u32, |bits, n| bits | 1 << hash.position(n, 32));
        // Of the items of three terms each, the share that seems to have one that none has.
        let shares = |hashing: Hashing| -> Vec<f64> {
            let of_item = |item: u32| (0..TERMS).fold(0, |bits, n| bits | filter(hash(hashing, item * TERMS + n)));
            let items: Vec<u32> = (0..2000).map(of_item).collect();
            let share = |term: u32| {
                let asked = filter(hash(hashing, 1_000_000 + term));
                items.iter().filter(|bits| **bits & asked == asked).count() as f64 / items.len() as f64
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
