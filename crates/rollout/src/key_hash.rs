//! Hash position of a key among all keys.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of key groups.
pub(super) const GROUPS: usize = 16;

/// Returns the hash seed of a canary, equal at every server, so that different canaries get different keys.
pub fn seed(model: &str, version: u64) -> u64 {
    xxh3_64_with_seed(model.as_bytes(), version)
}

/// Hash of a key: the upper bits are a number between 0 and 1, the lower bits the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash(u64);

impl KeyHash {
    /// Hashes a key with the seed of a canary.
    pub fn of(key: &[u8], seed: u64) -> Self {
        KeyHash(xxh3_64_with_seed(key, seed))
    }

    /// Returns true for this fraction of all keys. A key within a fraction is also within every larger fraction.
    pub fn is_within(self, share: f64) -> bool {
        // The significand of an f64 has 53 bits.
        ((self.0 >> 11) as f64 / (1_u64 << 53) as f64) < share
    }

    /// Returns the key's group. The group is independent of [`KeyHash::is_within`], which uses other bits of the hash.
    pub(super) fn group(self) -> usize {
        self.0 as usize % GROUPS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_that_share_of_the_keys_and_growing_keeps_them() {
        let seed = seed("shop", 8);
        let places: Vec<KeyHash> = (0..100_000_u64).map(|key| KeyHash::of(&key.to_le_bytes(), seed)).collect();
        let within = |share: f64| places.iter().filter(|place| place.is_within(share)).count();
        assert_eq!((within(0.0), within(1.0)), (0, places.len()));
        for share in [0.001, 0.01, 0.05, 0.3, 0.5, 0.99_f64] {
            let (mean, deviation) = (share * 1e5, (1e5 * share * (1.0 - share)).sqrt());
            assert!((within(share) as f64 - mean).abs() < 5.0 * deviation, "{share}: {}", within(share));
        }
        for (smaller, larger) in [(0.01, 0.02), (0.02, 0.5), (0.5, 1.0)] {
            assert!(places.iter().all(|place| !place.is_within(smaller) || place.is_within(larger)));
        }
        let mut groups = [0; GROUPS];
        places.iter().filter(|place| place.is_within(0.5)).for_each(|place| groups[place.group()] += 1);
        assert!(groups.iter().all(|&count| (2800..3450).contains(&count)), "{groups:?}");
    }

    #[test]
    fn another_version_or_model_has_other_keys_and_the_same_ones_are_everywhere() {
        let both = |a: u64, b: u64| {
            let is_within = |key: u64, seed| KeyHash::of(&key.to_le_bytes(), seed).is_within(0.1);
            (0..100_000_u64).filter(|&key| is_within(key, a) && is_within(key, b)).count()
        };
        assert!((850..1150).contains(&both(seed("shop", 8), seed("shop", 9))));
        assert!((850..1150).contains(&both(seed("shop", 8), seed("shoq", 8))));
        // Servers of all releases must divide keys in the same way; the expected values come from another
        // implementation of XXH3.
        assert_eq!(KeyHash::of(b"user-1", seed("shop", 8)), KeyHash(0x81a1_ff2e_9cc2_33fc));
    }
}
