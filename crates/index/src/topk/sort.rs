//! Radix sort of keys by the bits in which they differ.
//!
//! The upper half of a key is an ordered score, and the scores of one result are close together: they differ in about 23
//! bits. These bits are sorted by counting, 8 or 11 bits at a time from the lowest. Then groups of equal scores, which are
//! rare and short, are sorted by rank.

/// Below this number of keys a comparison sort is as fast.
const RADIX_MIN: usize = 256;
/// From this number of keys on, wider digits save more than their larger counts cost.
const WIDE_MIN: usize = 4096;

/// Sorts `keys` by descending score, then by ascending `rank`. `spare` is overwritten.
pub(super) fn descending(keys: &mut Vec<u64>, spare: &mut Vec<u64>, rank: impl Fn(u64) -> u64) {
    match keys.len() < RADIX_MIN {
        true => keys.sort_unstable_by_key(|key| std::cmp::Reverse(key >> 32)),
        false => by_score(keys, spare),
    }
    let runs = keys.chunk_by_mut(|a, b| a >> 32 == b >> 32).filter(|run| run.len() > 1);
    runs.for_each(|run| run.sort_unstable_by_key(|&key| rank(key)));
}

fn by_score(keys: &mut Vec<u64>, spare: &mut Vec<u64>) {
    let (least, most) = keys.iter().fold((u64::MAX, 0), |(l, m), &k| (l.min(k), m.max(k)));
    let (least, most) = ((least >> 32) as u32, (most >> 32) as u32);
    let width = u32::BITS - (most - least).leading_zeros();
    spare.clear();
    spare.resize(keys.len(), 0);
    let digit = if keys.len() < WIDE_MIN { 8 } else { 11 };
    for shift in (0..width).step_by(digit) {
        if keys.len() < WIDE_MIN {
            pass::<{ 1 << 8 }>(keys, spare, most, shift);
        } else {
            pass::<{ 1 << 11 }>(keys, spare, most, shift);
        }
        std::mem::swap(keys, spare);
    }
}

/// Runs one stable counting sort by a digit of the distance from the largest score, which yields descending order.
fn pass<const RANKS: usize>(from: &[u64], to: &mut [u64], most: u32, shift: u32) {
    let rank = |key: u64| ((most - (key >> 32) as u32) >> shift) as usize % RANKS;
    let mut ends = [0u32; RANKS];
    from.iter().for_each(|&key| ends[rank(key)] += 1);
    let mut end = 0;
    for count in &mut ends {
        end += std::mem::replace(count, end);
    }
    for &key in from {
        let place = &mut ends[rank(key)];
        to[*place as usize] = key;
        *place += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_are_sorted(bits in 1u32..64, seed: u64, count in 0usize..9000) {
            let mut state = seed | 1;
            let mut random = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 20 ^ state << 30) >> (64 - bits) << (64 - bits - bits.min(10).min(64 - bits))
            };
            let mut keys: Vec<u64> = (0..count).map(|_| random()).collect();
            let mut expected = keys.clone();
            expected.sort_unstable_by(|a, b| b.cmp(a));
            descending(&mut keys, &mut Vec::new(), |key| !key);
            prop_assert_eq!(keys, expected);
        }
    }
}
