//! Comparison of graph outputs with the reference evaluation of the graph's file: tolerances for f32, and differences.

use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use super::oracle::{Arithmetic, Array, Mode, Oracle, Stop, shown};

/// Relative tolerance to the reference, in units of the largest number of the row.
const TOLERANCE: f64 = 2e-5;
/// Relative tolerance between a row computed alone and the same row in a batch.
const AMONG_OTHERS: f64 = 1e-5;
/// Relative tolerance between a row alone and the same row in a batch, if the rounding noise of the computation is
/// unknown.
const AMONG_OTHERS_UNKNOWN: f64 = 1e-4;
/// Tolerances are relative to the largest magnitude of the row, or to this fraction of the largest magnitude in all
/// samples that are no edge cases, if that is more.
const LEAST_ROW: f64 = 1.0 / 16.0;
/// Additional tolerance in multiples of the f32 rounding noise: sums may be in another order, and functions may be off by some
/// units in the last place.
const NOISE: f64 = 32.0;
/// Rounding noise of bf16 products relative to f32, and their relative tolerance.
const BF16: f64 = 32_768.0;
const BF16_TOLERANCE: f64 = 0.02;
/// Modes of the rounded evaluations, in addition to the exact one.
const ROUNDED: [Mode; 3] = [Mode::Nearest, Mode::Random(1), Mode::Random(2)];
/// Scores below this count as 0; such scores are `exp` of large negative logits.
const LEAST_SCORE: f64 = 1e-30;
/// Relative tolerances of large graphs, in f32 and in bf16: their rounding noise is not evaluated, and wrong operators are
/// off by more.
const TOLERANCE_LARGE: f64 = 0.01;
const BF16_TOLERANCE_LARGE: f64 = 0.1;
/// Work of all evaluations of a graph in multiply-adds, about two seconds.
pub(super) const WORK: u64 = 1 << 30;
/// Work of the one evaluation of a larger graph, for one row.
const WORK_ONCE: u64 = 1 << 34;
/// Share of the limit on the CPU time of the process after which such an evaluation ends: the trial runs need the rest.
const CPU_SHARE: f64 = 1.0 / 3.0;

/// Returns the number of rows, at most `most`, that can be compared within the work `limit` if one row costs `work`.
pub(super) fn rows_within(limit: u64, work: u64, most: usize) -> usize {
    let evaluations = 1 + ROUNDED.len() as u64;
    usize::try_from(limit / (evaluations * work.max(1))).unwrap_or(most).clamp(2.min(most), most)
}

/// Returns the work of one evaluation, in multiply-adds.
///
/// # Errors
/// `TooLarge` if all evaluations of the row would exceed `limit`.
pub(super) fn work_of(oracle: &Oracle, inputs: &[(String, Array)], outputs: &[&str], limit: u64) -> Result<u64, Stop> {
    let mut arithmetic = Arithmetic::new(Mode::Exact, limit / (1 + ROUNDED.len() as u64));
    oracle.run(inputs, outputs, &mut arithmetic, &mut |_, _, _| ())?;
    Ok(arithmetic.work())
}

/// Returns the node in which the first NaN appears.
pub(super) fn first_nan(oracle: &Oracle, inputs: &[(String, Array)], outputs: &[&str]) -> Option<String> {
    let mut found = None;
    let mut arithmetic = Arithmetic::new(Mode::Nearest, u64::MAX);
    let mut seen = |node: &_, _: &str, made: &Array| {
        if found.is_none() && made.reals().is_ok_and(|numbers| numbers.iter().any(|x| x.is_nan())) {
            found = Some(shown(node));
        }
    };
    // An error of the evaluation after the first NaN is irrelevant.
    let _ = oracle.run(inputs, outputs, &mut arithmetic, &mut seen);
    found
}

/// Reference values of an output for some rows.
#[derive(Debug)]
pub(super) struct Expected {
    width: usize,
    numbers: Vec<f64>,
    /// Deviation of each number by f32 rounding; infinite if f32 cannot represent it. `None` if it was not evaluated.
    noise: Option<Vec<f64>>,
}

/// A number that differs from its reference value.
#[derive(Debug)]
pub(super) struct Difference {
    pub(super) place: usize,
    pub(super) got: f64,
    pub(super) expected: f64,
    pub(super) tolerance: f64,
}

impl Expected {
    /// Evaluates the graph's file for outputs, each given with its number of values per row.
    pub(super) fn of(
        oracle: &Oracle,
        inputs: &[(String, Array)],
        outputs: &[(&str, usize)],
        rows: usize,
    ) -> Result<Vec<Expected>, Stop> {
        let names: Vec<&str> = outputs.iter().map(|(name, _)| *name).collect();
        let mut expected =
            Expected::without_noise(oracle, inputs, outputs, (rows, Arithmetic::new(Mode::Exact, u64::MAX)))?;
        for mode in ROUNDED {
            let rounded = oracle.run(inputs, &names, &mut Arithmetic::new(mode, u64::MAX), &mut |_, _, _| ())?;
            for (Expected { numbers, noise, .. }, rounded) in expected.iter_mut().zip(&rounded) {
                let noise = noise.get_or_insert_with(|| vec![0.0; numbers.len()]);
                let rounded = rounded.reals()?.iter().zip(&*numbers);
                noise.iter_mut().zip(rounded).for_each(|(noise, (x, exact))| *noise = noise.max(moved(*x, *exact)));
            }
        }
        Ok(expected)
    }

    /// Evaluates the file of a large graph for one row and once only, without its rounding noise.
    ///
    /// # Errors
    /// `TooLarge` also if the process has used a third of its CPU time.
    pub(super) fn of_large(
        oracle: &Oracle,
        inputs: &[(String, Array)],
        outputs: &[(&str, usize)],
    ) -> Result<Vec<Expected>, Stop> {
        let cpu = getrlimit(Resource::Cpu).current.map(|seconds| Duration::from_secs(seconds).mul_f64(CPU_SHARE));
        Expected::without_noise(oracle, inputs, outputs, (1, Arithmetic::new(Mode::Exact, WORK_ONCE).until(cpu)))
    }

    fn without_noise(
        oracle: &Oracle,
        inputs: &[(String, Array)],
        outputs: &[(&str, usize)],
        (rows, mut exact): (usize, Arithmetic),
    ) -> Result<Vec<Expected>, Stop> {
        let names: Vec<&str> = outputs.iter().map(|(name, _)| *name).collect();
        let exact = oracle.run(inputs, &names, &mut exact, &mut |_, _, _| ())?;
        let one = |(exact, &(name, width)): (&Array, &(&str, usize))| {
            let numbers = exact.reals()?.to_vec();
            if numbers.len() != rows * width {
                return Err(Stop::Invalid(format!(
                    "output `{name}` has shape {:?}, expected a multiple of {rows} rows",
                    exact.shape
                )));
            }
            Ok(Expected { width, numbers, noise: None })
        };
        exact.iter().zip(outputs).map(one).collect()
    }

    /// Returns the reference values of a row.
    pub(super) fn row(&self, n: usize) -> &[f64] {
        &self.numbers[n * self.width..][..self.width]
    }

    /// Returns the tolerance of each number of a row. `largest` is the largest magnitude in samples that are no edge
    /// cases.
    pub(super) fn tolerances(&self, n: usize, largest: f64, is_bf16: bool) -> Vec<f64> {
        let scale = scale(self.row(n).iter().copied(), largest);
        let (share, times) = if is_bf16 { (BF16_TOLERANCE, NOISE * BF16) } else { (TOLERANCE, NOISE) };
        match &self.noise {
            Some(noise) => {
                noise[n * self.width..][..self.width].iter().map(|noise| share * scale + times * noise).collect()
            }
            None => vec![if is_bf16 { BF16_TOLERANCE_LARGE } else { TOLERANCE_LARGE } * scale; self.width],
        }
    }
}

/// Returns the deviation of a rounded number; infinite if f32 can represent only one of the two.
fn moved(x: f64, exact: f64) -> f64 {
    let (near, want) = (x as f32, exact as f32);
    match want.is_finite() && near.is_finite() {
        true => (x - exact).abs(),
        false if is_same(near, want) => 0.0,
        false => f64::INFINITY,
    }
}

/// Returns the scale of a row, to which tolerances are relative.
fn scale(row: impl Iterator<Item = f64>, largest: f64) -> f64 {
    row.filter(|x| x.is_finite()).fold(LEAST_ROW * largest, |most, x| most.max(x.abs()))
}

/// Returns the first number that is outside of its tolerance.
pub(super) fn difference(got: &[f32], expected: &[f64], tolerances: &[f64]) -> Option<Difference> {
    let mut all = got.iter().zip(expected).zip(tolerances).enumerate();
    all.find(|(_, ((got, expected), tolerance))| !is_near(**got, **expected, **tolerance))
        .map(|(place, ((&got, &expected), &tolerance))| Difference { place, got: f64::from(got), expected, tolerance })
}

/// Returns whether two numbers are equal or both NaN.
pub(super) fn is_same(x: f32, y: f32) -> bool {
    x == y || (x.is_nan() && y.is_nan())
}

/// NaN matches only NaN, and numbers beyond f32 match infinity.
fn is_near(got: f32, expected: f64, tolerance: f64) -> bool {
    let single = expected as f32;
    tolerance == f64::INFINITY
        || is_same(got, single)
        || (single.is_finite() && (f64::from(got) - expected).abs() <= tolerance)
}

/// Returns the tolerances between a row in a batch and the same row alone. `largest` is the largest magnitude in
/// samples that are no edge cases.
pub(super) fn batch_tolerances(alone: &[f32], largest: f64, expected: Option<Vec<f64>>) -> Vec<f64> {
    let scale = scale(alone.iter().map(|&x| f64::from(x)), largest);
    match expected {
        // The part of a tolerance that is not relative to the scale is rounding noise.
        Some(tolerances) => {
            tolerances.iter().map(|x| AMONG_OTHERS * scale + (x - TOLERANCE * scale).max(0.0)).collect()
        }
        None => vec![AMONG_OTHERS_UNKNOWN * scale; alone.len()],
    }
}

/// Returns the range in which each score may be if its logit is within the tolerance.
pub(super) fn score_bounds(logits: &[f64], tolerances: &[f64]) -> Vec<[f64; 2]> {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let bounds = |(logit, tolerance): (&f64, &f64)| match tolerance.is_finite() {
        true => [sigmoid(logit - tolerance) * (1.0 - TOLERANCE), sigmoid(logit + tolerance) * (1.0 + TOLERANCE)],
        false => [f64::NEG_INFINITY, f64::INFINITY],
    };
    logits.iter().zip(tolerances).map(bounds).collect()
}

/// Returns the first score outside its range.
pub(super) fn outside(scores: &[f32], bounds: &[[f64; 2]]) -> Option<Difference> {
    let is_within = |score: f32, [low, high]: [f64; 2]| match low.is_nan() {
        true => score.is_nan(),
        false => low == f64::NEG_INFINITY || (low - LEAST_SCORE..=high + LEAST_SCORE).contains(&f64::from(score)),
    };
    let mut all = scores.iter().zip(bounds).enumerate();
    all.find(|(_, (score, bounds))| !is_within(**score, **bounds)).map(|(place, (&score, &[low, high]))| Difference {
        place,
        got: f64::from(score),
        expected: (low + high) / 2.0,
        tolerance: if low.is_nan() { 0.0 } else { (high - low) / 2.0 },
    })
}

/// Returns the tolerances between the score of a candidate in a batch and alone.
pub(super) fn batch_score_tolerances(scores: &[f32], bounds: Option<&[[f64; 2]]>) -> Vec<f64> {
    let unknown = |&score: &f32| AMONG_OTHERS_UNKNOWN * f64::from(score.min(1.0 - score).max(0.0)) + LEAST_SCORE;
    match bounds {
        Some(bounds) => bounds.iter().map(|[low, high]| if low.is_nan() { 0.0 } else { high - low }).collect(),
        None => scores.iter().map(|score| unknown(score) + TOLERANCE * f64::from(*score)).collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::sandbox::graphs::dense_layer;

    #[test]
    fn large_graphs_are_evaluated_once_within_the_time() {
        let oracle = Oracle::read(&dense_layer(3, 2, 1.0)).unwrap();
        let inputs = [("x".to_owned(), Array::real(vec![1, 3], vec![0.1, 1000.3, -1000.1]))];
        let outputs = [("query", 2)];
        let large = Expected::of_large(&oracle, &inputs, &outputs).unwrap();
        let all = Expected::of(&oracle, &inputs, &outputs, 1).unwrap();
        assert_eq!(large[0].row(0), all[0].row(0));
        let scale = scale(large[0].row(0).iter().copied(), 0.0);
        assert_eq!(large[0].tolerances(0, 0.0, false), [TOLERANCE_LARGE * scale; 2]);
        assert!(all[0].tolerances(0, 0.0, false)[0] < TOLERANCE_LARGE * scale);
        let mut late = Arithmetic::new(Mode::Exact, u64::MAX).until(Some(Duration::ZERO));
        assert!(matches!(oracle.run(&inputs, &["query"], &mut late, &mut |_, _, _| ()), Err(Stop::TooLarge)));
        assert!(matches!(work_of(&oracle, &inputs, &["query"], 4), Err(Stop::TooLarge)));
        assert_eq!(work_of(&oracle, &inputs, &["query"], WORK).unwrap(), 8);
    }

    #[test]
    fn a_number_is_near_itself_and_nan_is_near_nan_alone() {
        assert!(is_near(1.0, 1.000_01, 2e-5) && !is_near(1.0, 1.000_03, 2e-5));
        assert!(is_near(f32::NAN, f64::NAN, 0.0));
        assert!(!is_near(f32::NAN, 1.0, 1.0) && !is_near(1.0, f64::NAN, 1.0));
        assert!(is_near(f32::INFINITY, 1e39, 0.0) && !is_near(f32::NEG_INFINITY, 1e39, 0.0));
        assert!(is_near(f32::NAN, 1.0, f64::INFINITY));
    }
}
