//! Choice of the first-pass codes for recipes with `auto`: those with the lowest estimated search time.
//!
//! A search of K results scans a typical number of lists, by int8 rows or by codes, and rescores the selected items by rows. The
//! constants are from `docs/benchmarks/quantization.md`. The calibration of the version tests the choice again: it disables codes
//! for each K and recall at which they are slower.

use super::options::{CodeKind, CodeShape, FirstPass};
use sterling_core::error::Result;

/// Estimated costs of the steps of a search.
#[derive(Clone, Copy, Debug)]
pub struct Rates;

impl Rates {
    /// Nanoseconds per byte of int8 rows scanned.
    pub const INT8_BYTE_NS: f64 = 0.045;
    /// Nanoseconds per byte of codes scanned.
    pub const CODES_BYTE_NS: f64 = 0.06;
    /// Codes are chosen only if they take at most this share of the time of int8 rows, because rates differ between machines.
    pub const TIME_SHARE_MAX: f64 = 0.8;

    /// Returns the nanoseconds to read and score a single row of `bytes` bytes.
    pub fn row_ns(bytes: f64) -> f64 {
        24.0 + bytes * 0.06
    }
}

/// Typical search as measured at a recall of 0.98: number of results, probed lists of 4 √N, and candidates to select by
/// 4-bit product codes. The probed lists were measured on 100,000 and 1,000,000 vectors of 64 dimensions and on GloVe
/// word vectors, the candidates on GloVe word vectors.
struct Typical {
    k: f64,
    lists: f64,
    by_pq4: f64,
}

const TYPICAL: [Typical; 2] =
    [Typical { k: 10.0, lists: 100.0, by_pq4: 200.0 }, Typical { k: 100.0, lists: 200.0, by_pq4: 800.0 }];
/// Number of lists per square root of the items that [`TYPICAL`] refers to. The number of probed lists scales with the
/// square root of the ratio (measured on sentence embeddings of 384 and 768 dimensions).
const TYPICAL_PER_ROOT: f64 = 4.0;
/// Ratio of candidates to select by sign codes and by product codes, which are more exact (measured on sentence
/// embeddings of 384 and 768 dimensions).
const SIGNS_SELECT: f64 = 2.0;
/// Minimum dimension for sign codes; with fewer dimensions, signs are too inexact.
const SIGNS_DIMENSION_MIN: usize = 256;

/// Alternatives of the choice, with the estimated mean time of typical searches in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeChoice {
    /// Search time by int8 rows.
    pub int8_us: u32,
    /// Search time by 4-bit product codes.
    pub pq4_us: u32,
    /// Search time by sign codes, if vectors are wide enough.
    pub rabitq_us: Option<u32>,
}

/// Size of an index, on which the choice of codes depends.
#[derive(Clone, Copy, Debug)]
pub struct IndexExtent {
    /// Number of items, N.
    pub items: usize,
    /// Dimension of a vector, D.
    pub dimension: usize,
    /// Bytes of a wide row for rescoring.
    pub row_bytes: usize,
}

impl IndexExtent {
    /// Chooses the codes of the index, or none. The arguments are the numbers of lists without and with codes.
    pub(in crate::ivf) fn choose(&self, by_rows: usize, by_codes: usize) -> Result<(Option<CodeShape>, CodeChoice)> {
        let shape = |codes| FirstPass { codes, subspaces: 0 }.shape_of(self.dimension);
        let (pq4, rabitq) = (shape(CodeKind::Pq4)?, shape(CodeKind::Rabitq)?);
        let int8_bytes = (self.dimension.next_multiple_of(4) + 4) as f64;
        let int8_us = self.mean_us(by_rows, |of, items| {
            items * int8_bytes * Rates::INT8_BYTE_NS + (of.k * 1.25 + 64.0) * self.row_ns()
        });
        let by_codes = |shape: Option<CodeShape>, more: f64| {
            let bytes = shape.map_or(0, |shape| shape.slot_bytes()) as f64;
            self.mean_us(by_codes, |of, items| items * bytes * Rates::CODES_BYTE_NS + of.by_pq4 * more * self.row_ns())
        };
        let pq4_us = by_codes(pq4, 1.0);
        let is_wide = self.dimension >= SIGNS_DIMENSION_MIN;
        let rabitq_us = is_wide.then(|| by_codes(rabitq, SIGNS_SELECT));
        let choice = CodeChoice { int8_us, pq4_us, rabitq_us };
        let best = match rabitq_us.filter(|us| *us < pq4_us) {
            Some(us) => (us, rabitq),
            None => (pq4_us, pq4),
        };
        let pays = f64::from(best.0) <= Rates::TIME_SHARE_MAX * f64::from(int8_us);
        Ok((best.1.filter(|_| pays && self.row_bytes > 0), choice))
    }

    fn row_ns(&self) -> f64 {
        Rates::row_ns(self.row_bytes as f64)
    }

    /// Returns the mean estimated time over [`TYPICAL`] in microseconds: scoring the centroids, and `ns` for the
    /// scanned items.
    fn mean_us(&self, lists: usize, ns: impl Fn(&Typical, f64) -> f64) -> u32 {
        let (items, lists) = (self.items as f64, lists.max(1) as f64);
        let spread = (lists / (TYPICAL_PER_ROOT * items.sqrt())).sqrt();
        let scanned = |typical: &Typical| (typical.lists * spread).min(lists) * items / lists;
        let centroids = lists * (self.dimension.next_multiple_of(4) + 4) as f64 * Rates::INT8_BYTE_NS;
        let of = |typical: &Typical| centroids + ns(typical, scanned(typical));
        (TYPICAL.iter().map(of).sum::<f64>() / TYPICAL.len() as f64 / 1e3).round() as u32
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn chosen(items: usize, dimension: usize) -> CodeKind {
        let lists = |per_root: f64| (per_root * (items as f64).sqrt()) as usize;
        let extent = IndexExtent { items, dimension, row_bytes: 2 * dimension };
        extent.choose(lists(4.0), lists(2.0)).unwrap().0.map_or(CodeKind::None, |shape| shape.kind)
    }

    #[test]
    fn codes_are_chosen_where_lists_are_long() {
        // With short lists, rescoring the selected items takes longer than the scan.
        assert_eq!([1_000, 10_000].map(|items| chosen(items, 64)), [CodeKind::None; 2]);
        assert_eq!([1_000_000, 20_000_000].map(|items| chosen(items, 64)), [CodeKind::Pq4; 2]);
        assert_eq!([1_000_000, 20_000_000].map(|items| chosen(items, 768)), [CodeKind::Rabitq; 2]);
        // Codes stay chosen as the number of items grows.
        for dimension in [16, 50, 64, 100, 128, 256, 384, 768, 2048] {
            let kinds: Vec<bool> = (10..26).map(|n| chosen(1 << n, dimension) != CodeKind::None).collect();
            assert!(kinds.is_sorted(), "{dimension}: {kinds:?}");
        }
    }

    #[test]
    fn codes_need_rows_for_rescoring() {
        let extent = IndexExtent { items: 1 << 20, dimension: 64, row_bytes: 0 };
        assert_eq!(extent.choose(4096, 2048).unwrap().0, None);
    }
}
