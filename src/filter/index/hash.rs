//! The bit positions of a term in a Bloom filter.

use xxhash_rust::xxh3::xxh3_128;

/// The two hashes of a term, from which all its bit positions come (Kirsch and Mitzenmacher's double hashing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) struct TermHash {
    pub(in crate::filter) start: u64,
    pub(in crate::filter) step: u64,
}

impl TermHash {
    pub(in crate::filter) fn of(key: &[u8]) -> Self {
        let hash = xxh3_128(key);
        TermHash { start: hash as u64, step: (hash >> 64) as u64 | 1 }
    }

    /// Bit position `n` of the term in filters of `width` bits.
    pub(in crate::filter) fn position(self, n: u32, width: u32) -> usize {
        let hash = self.start.wrapping_add(self.step.wrapping_mul(u64::from(n)));
        // Multiply and shift: as even as a remainder and without a division.
        ((u128::from(hash) * u128::from(width)) >> 64) as usize
    }
}
