//! Distribution of a table's reads over its rows, as the curve that a cache needs: the fraction of reads that go to the
//! hottest rows.
//!
//! The curve has three sources: uniform, Zipf (the r-th hottest row is read in proportion to r^-s; the sum is computed
//! by Euler-Maclaurin, so that a billion rows cost as much as a hundred), and measured. A measured curve ranks the ids
//! by one half of the sample and counts hits in the other half, because a curve tested on the ids from which it was
//! built predicts hits on rows that occur only once.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};

/// Minimum number of a table's ids in a sample for a usable curve.
pub const SAMPLE_IDS_MIN: usize = 200;
/// Number of terms of a Zipf sum that are added individually; an integral approximates the others.
const TERMS_EXACT: u64 = 32;
/// Maximum number of points of a measured curve.
const CORNERS_MAX: usize = 256;

/// How reads spread over the rows of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Access {
    /// Uniform: all rows are read equally often.
    Uniform,
    /// The r-th hottest row is read in proportion to `r^-s`.
    Zipf(f64),
    /// Measured from sampled ids.
    Measured(Curve),
}

impl Access {
    /// Returns the fraction of reads, 0 to 1, that go to the `hottest` most-read rows of `rows`; nondecreasing in `hottest`.
    pub fn share(&self, hottest: u64, rows: u64) -> f64 {
        if hottest >= rows {
            return 1.0;
        }
        let even = hottest as f64 / rows as f64;
        let share = match self {
            Access::Uniform => even,
            Access::Zipf(exponent) => zipf_sum(hottest, *exponent) / zipf_sum(rows, *exponent),
            Access::Measured(curve) => curve.share(hottest, rows),
        };
        share.clamp(0.0, 1.0)
    }

    /// Returns the expected number of distinct rows among `reads` reads of a table. Sums over ranges of rows of which each is a
    /// tenth of the rows before it, with equal read rates within a range.
    pub fn distinct(&self, reads: f64, rows: u64) -> f64 {
        let (mut from, mut share, mut distinct) = (0u64, 0.0, 0.0);
        while from < rows {
            let to = (from + from / 10 + 1).min(rows);
            let next = self.share(to, rows);
            let of_row = ((next - share) / (to - from) as f64).clamp(0.0, 1.0);
            distinct -= (to - from) as f64 * (reads * (-of_row).ln_1p()).exp_m1();
            (from, share) = (to, next);
        }
        distinct.min(reads)
    }

    /// Returns a short description for the report.
    pub fn describe(&self) -> String {
        match self {
            Access::Uniform => "even".into(),
            Access::Zipf(exponent) => format!("zipf {exponent}"),
            Access::Measured(curve) => format!("measured, {} ids", curve.ids),
        }
    }
}

/// Returns the sum of r^-s for r = 1..=n.
fn zipf_sum(n: u64, exponent: f64) -> f64 {
    let exact = n.min(TERMS_EXACT);
    let head: f64 = (1..=exact).map(|r| (r as f64).powf(-exponent)).sum();
    if n == exact {
        return head;
    }
    // From m = TERMS_EXACT on: the integral, half of each end, and the first correction of Euler and Maclaurin.
    let (from, to) = (TERMS_EXACT as f64, n as f64);
    let step = (1.0 - exponent) * (to / from).ln();
    let integral = if step.abs() < 1e-12 {
        (to / from).ln() * from.powf(1.0 - exponent)
    } else {
        from.powf(1.0 - exponent) * step.exp_m1() / (1.0 - exponent)
    };
    let ends = 0.5 * (to.powf(-exponent) - from.powf(-exponent));
    let slope = exponent / 12.0 * (from.powf(-exponent - 1.0) - to.powf(-exponent - 1.0));
    head + integral + ends + slope
}

/// A measured curve: points (hottest rows, fraction of reads) that rise in both coordinates, with linear interpolation
/// between the points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    corners: Vec<(f64, f64)>,
    ids: usize,
}

impl Curve {
    /// Returns the curve of sampled ids, given in the order of their occurrence. Every second id ranks rows; the other ids
    /// count hits.
    ///
    /// # Errors
    /// `Invalid` if there are fewer than [`SAMPLE_IDS_MIN`] ids.
    pub fn measure(ids: &[i64]) -> Result<Curve> {
        if ids.len() < SAMPLE_IDS_MIN {
            return Err(Error::invalid(format!("a sample of {} ids, expected at least {SAMPLE_IDS_MIN}", ids.len())));
        }
        let mut counts: HashMap<i64, (u64, u64)> = HashMap::new();
        for (at, id) in ids.iter().enumerate() {
            let (ranked, counted) = counts.entry(*id).or_default();
            *if at % 2 == 0 { ranked } else { counted } += 1;
        }
        let total = (ids.len() / 2) as f64;
        let mut hot: Vec<(u64, i64, u64)> =
            counts.iter().filter(|(_, (ranked, _))| *ranked > 0).map(|(id, (r, c))| (*r, *id, *c)).collect();
        hot.sort_unstable_by_key(|(ranked, id, _)| (std::cmp::Reverse(*ranked), *id));
        let mut corners = vec![(0.0, 0.0)];
        let (mut hits, mut next) = (0u64, 1.0f64);
        let growth = (hot.len() as f64).powf(1.0 / CORNERS_MAX as f64).max(1.0);
        for (row, (_, _, counted)) in hot.iter().enumerate() {
            hits += counted;
            let rows = (row + 1) as f64;
            if rows >= next || row + 1 == hot.len() {
                corners.push((rows, hits as f64 / total));
                next = (rows * growth).max(rows + 1.0);
            }
        }
        Ok(Curve { corners, ids: ids.len() })
    }

    /// Returns the number of ids in the sample.
    pub fn ids(&self) -> usize {
        self.ids
    }

    fn share(&self, hottest: u64, rows: u64) -> f64 {
        let (hottest, rows) = (hottest as f64, rows as f64);
        let after = self.corners.partition_point(|(at, _)| *at <= hottest);
        let (from_rows, from_share) = self.corners[after - 1];
        // Beyond the sampled ids, reads are assumed to be uniform over the remaining rows.
        let (to_rows, to_share) = self.corners.get(after).copied().unwrap_or((rows, 1.0));
        if to_rows <= from_rows {
            return from_share;
        }
        from_share + (to_share - from_share) * (hottest - from_rows) / (to_rows - from_rows)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_zipf_sum_agrees_with_adding_up() {
        for exponent in [0.0, 0.3, 0.8, 0.999_999_999, 1.0, 1.05, 1.5, 3.0] {
            for n in [1, 2, 31, 32, 33, 100, 5_000, 100_000] {
                let naive: f64 = (1..=n).map(|r| (r as f64).powf(-exponent)).sum();
                let got = zipf_sum(n, exponent);
                assert!((got - naive).abs() <= 1e-7 * naive, "s {exponent} n {n}: {got} for {naive}");
            }
        }
    }

    #[test]
    fn shares_rise_from_0_to_1() {
        let ids: Vec<i64> = (0..5_000i64).map(|i| (i * i * 7919) % 1_000 / (1 + i % 7)).collect();
        let curve = Curve::measure(&ids).unwrap();
        for access in
            [Access::Uniform, Access::Zipf(0.7), Access::Zipf(1.0), Access::Zipf(1.2), Access::Measured(curve)]
        {
            for rows in [1, 10, 1_000, 2_000_000_000] {
                let mut last = 0.0;
                assert_eq!(access.share(0, rows), 0.0, "{access:?}");
                for part in 0..=50 {
                    let share = access.share(rows / 50 * part, rows);
                    assert!((last..=1.0).contains(&share), "{access:?} rows {rows} part {part}: {share} after {last}");
                    last = share;
                }
                assert_eq!(access.share(rows, rows), 1.0);
            }
        }
    }

    #[test]
    fn estimates_of_distinct_rows_match_a_sample() {
        assert!((Access::Uniform.distinct(1_000.0, 1_000) - 1_000.0 * (1.0 - (-1.0f64).exp())).abs() < 1.0);
        assert!((Access::Uniform.distinct(10.0, 1 << 40) - 10.0).abs() < 1e-3);
        // 10,240 reads of a million rows with exponent 1.05, as they were counted in a benchmark: 0.4477 of the reads.
        let distinct = Access::Zipf(1.05).distinct(10_240.0, 1_000_000) / 10_240.0;
        assert!((distinct - 0.4477).abs() < 0.01, "{distinct}");
        assert!(Access::Zipf(1.0).distinct(1e12, 5) <= 5.0 && Access::Zipf(2.0).distinct(0.0, 5) == 0.0);
    }

    #[test]
    fn hit_rate_curves_are_confirmed_by_the_other_half_of_the_sample() {
        // Each id once: no cache of seen rows can help, and the curve must not say that it does.
        let distinct: Vec<i64> = (0..1_000).collect();
        let curve = Curve::measure(&distinct).unwrap();
        assert!(curve.share(500, 1_000_000) < 0.01);
        // Ten ids make half of the reads, over and over.
        let skewed: Vec<i64> = (0..20_000i64).map(|i| if i / 2 % 2 == 0 { i / 4 % 10 } else { 100 + i }).collect();
        let share = Curve::measure(&skewed).unwrap().share(10, 1_000_000);
        assert!((share - 0.5).abs() < 0.01, "{share}");
        assert!(Curve::measure(&distinct[..10]).unwrap_err().to_string().contains("10 ids"));
    }
}
