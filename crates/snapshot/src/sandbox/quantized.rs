//! Error of int8: compares the graphs of a package in int8 with the same graphs in f32 on the rows of the validation.
//!
//! The error of a tower is the norm of the difference of an output row relative to the norm of the row in f32; that of
//! the scores, which are between 0 and 1, their difference: the reranker is in f32, but reads a user's tensors from a
//! tower in int8. Publishing reports the largest error and the mean, and rejects a package whose largest error exceeds
//! [`ERROR_MAX`] or [`SCORE_ERROR_MAX`]. Edge cases, whose numbers differ by many orders of magnitude, are not
//! measured.

use super::compare::is_same;
use super::rows::{Bench, LOGITS, ROWS, USERS, ValidationProgress, batch_dependence_error, invalid, towers};
use super::samples::{self, SAMPLES};
use crate::model::Package;
use sterling_core::error::{Error, Result};
use sterling_core::tensor::Tensor;
use sterling_graph::tower::{FeatureRow, Tower};

/// Maximum error of an output row of a tower, relative to the row's norm.
const ERROR_MAX: f64 = 0.1;
/// Maximum error of a score of the reranker.
const SCORE_ERROR_MAX: f64 = 0.05;
/// The norm of a row counts as at least this fraction of the largest norm of the rows.
const LEAST_ROW: f64 = 1.0 / 16.0;

/// Measured errors, each of an output of a row.
#[derive(Default)]
struct Errors {
    count: usize,
    sum: f64,
    largest: f64,
    /// Output and row of the largest error.
    place: String,
}

impl Errors {
    fn add(&mut self, error: f64, place: impl FnOnce() -> String) {
        self.count += 1;
        self.sum += error;
        // NaN is the largest error.
        if error > self.largest || error.is_nan() {
            (self.largest, self.place) = (error, place());
        }
    }

    /// Reports the errors of a graph, and rejects errors above `most`.
    fn judge(&self, file: &str, what: &str, most: f64, reported: &dyn Fn(ValidationProgress)) -> Result<()> {
        let percent = |x: f64| format!("{:.2} %", 100.0 * x);
        let (mean, largest) = (percent(self.sum / self.count.max(1) as f64), percent(self.largest));
        let measured = format!("{what} in int8 differ from f32 by {mean} on average and at most {largest}");
        if self.largest <= most {
            reported(ValidationProgress::Measured(format!("{file}: {measured}")));
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{file}: {measured} ({}), expected at most {}: use `precision = \"bf16\"` or f32",
            self.place,
            percent(most)
        )))
    }
}

/// Compares the graphs of `package`, in int8, with those of `exact`.
///
/// # Errors
/// `Invalid` with a graph whose error is too large, or whose rows depend on their batch.
pub(super) fn compare(package: &Package, exact: &Package, reported: &dyn Fn(ValidationProgress)) -> Result<()> {
    let mut both = Both { quantized: Bench::new(package, reported), exact: Bench::new(exact, reported) };
    for ((side, tower), (_, in_f32)) in towers(package).zip(towers(exact)) {
        // The fallback runtime computes in f32.
        if tower.graph().1.program().is_none() {
            continue;
        }
        let file = tower.graph().0;
        let errors = both.tower(side, tower, in_f32).map_err(|e| invalid(e.within(file)))?;
        errors.judge(file, "outputs", ERROR_MAX, reported)?;
    }
    let Some(overarch) = package.overarch.as_ref().filter(|_| package.user.is_some()) else { return Ok(()) };
    let file = overarch.graph().0;
    let errors = both.scores(package, exact).map_err(|e| invalid(e.within(file)))?;
    errors.judge(file, "scores", SCORE_ERROR_MAX, reported)
}

/// Runs graphs in both precisions.
struct Both<'a> {
    quantized: Bench<'a>,
    exact: Bench<'a>,
}

impl Both<'_> {
    /// Runs a tower on samples alone and in batches.
    fn tower(&mut self, side: &str, tower: &Tower, in_f32: &Tower) -> Result<Errors> {
        let file = tower.graph().0;
        self.quantized.report_progress(format!("{file}: compared with itself in f32"));
        let read = |n: usize| tower.read(samples::features(self.quantized.package, tower.features(), n));
        let samples: Vec<FeatureRow> = (0..SAMPLES).map(read).collect::<Result<_>>()?;
        let outputs = |made: Vec<Tensor>| made.into_iter().map(Tensor::into_data).collect::<Vec<_>>();
        let (mut alone, mut expected) = (Vec::new(), Vec::new());
        for sample in &samples {
            alone.push(outputs(self.quantized.run(tower, &[sample])?));
            expected.push(outputs(self.exact.run(in_f32, &[sample])?));
        }
        let mut errors = Errors::default();
        for (o, output) in tower.outputs().iter().enumerate() {
            let defined: Vec<usize> = (0..SAMPLES).filter(|sample| samples::is_defined(*sample)).collect();
            let largest = defined.iter().fold(0f64, |most, &n| most.max(norm(expected[n][o].iter().copied())));
            for n in defined {
                let differences = alone[n][o].iter().zip(&expected[n][o]).map(|(x, exact)| x - exact);
                let scale = norm(expected[n][o].iter().copied()).max(LEAST_ROW * largest);
                // An output without numbers other than 0 has no scale.
                let error = norm(differences) / if scale > 0.0 { scale } else { 1.0 };
                errors.add(error, || format!("output `{}` of {side} of sample {n}", output.name));
            }
        }
        for count in ROWS.into_iter().chain([tower.run_rows() + 1]) {
            let rows: Vec<&FeatureRow> = samples.iter().cycle().take(count).collect();
            for (o, tensor) in self.quantized.run(tower, &rows)?.iter().enumerate() {
                let width = tower.outputs()[o].count().max(1);
                for (n, row) in tensor.data().chunks_exact(width).enumerate() {
                    if !row.iter().zip(&alone[n % SAMPLES][o]).all(|(x, y)| is_same(*x, *y)) {
                        return Err(batch_dependence_error(&tower.outputs()[o].name, "row", count));
                    }
                }
            }
        }
        Ok(errors)
    }

    /// Scores candidates of several users; user tensors come from the towers in the same precision.
    fn scores(&mut self, package: &Package, exact: &Package) -> Result<Errors> {
        let mut errors = Errors::default();
        let (Some(overarch), Some(in_f32)) = (&package.overarch, &exact.overarch) else { return Ok(errors) };
        self.quantized.report_progress(format!("{}: compared with itself in f32", overarch.graph().0));
        let width = package.spec.dimension * package.spec.query_count();
        let query: Vec<f32> = (0..width).map(samples::fraction).collect();
        let which: Vec<usize> = (0..SAMPLES).filter(|sample| samples::is_defined(*sample)).collect();
        for sample in USERS {
            let (user, known) = (self.quantized.user(&query, sample)?, self.exact.user(&query, sample)?);
            let made = self.quantized.score(overarch, &user, &which)?;
            let expected = self.exact.score(in_f32, &known, &which)?;
            for (n, (x, exact)) in made.iter().zip(&expected).enumerate().filter(|(_, (_, exact))| !exact.is_nan()) {
                let place = || format!("output `{LOGITS}` of sample {}", which[n % which.len()]);
                errors.add(f64::from((x - exact).abs()), place);
            }
            if !package.needs_features() {
                break;
            }
        }
        Ok(errors)
    }
}

/// Returns the Euclidean norm of the numbers.
fn norm(numbers: impl Iterator<Item = f32>) -> f64 {
    numbers.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::cell::RefCell;

    #[test]
    fn errors_are_reported_up_to_the_maximum_and_rejected_beyond() {
        let reported = RefCell::new(Vec::new());
        let keep = |progress: ValidationProgress| {
            if let ValidationProgress::Measured(what) = progress {
                reported.borrow_mut().push(what);
            }
        };
        let mut errors = Errors::default();
        errors.add(0.01, || "the first".into());
        errors.add(0.03, || "the second".into());
        errors.add(0.02, || "the third".into());
        errors.judge("user.onnx", "outputs", 0.03, &keep).unwrap();
        let expected = "user.onnx: outputs in int8 differ from f32 by 2.00 % on average and at most 3.00 %";
        assert_eq!(*reported.borrow(), [expected]);
        let error = errors.judge("user.onnx", "outputs", 0.02, &keep).unwrap_err().to_string();
        assert!(error.contains(&format!("{expected} (the second), expected at most 2.00 %")), "{error}");
        errors.add(f64::NAN, || "the fourth".into());
        errors.add(0.5, || "the fifth".into());
        let error = errors.judge("user.onnx", "outputs", 1.0, &keep).unwrap_err().to_string();
        assert!(error.contains("(the fourth)"), "{error}");
        assert_eq!(reported.borrow().len(), 1);
    }
}
