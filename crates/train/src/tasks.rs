//! Loss of the reranker's tasks, and figures of their predictions.
//!
//! The loss is the sum over tasks of the binary cross-entropy of logits and labels, each times the task's weight, as a weighted
//! mean over events. Negatives that are sampled weigh the inverse of their rate, so that predictions stay calibrated.
//!
//! Figures follow He et al. 2014, *Practical Lessons from Predicting Clicks on Ads at Facebook* (ADKDD): log-loss, normalized
//! entropy (the log-loss divided by the log-loss of the mean label), calibration (sum of predictions divided by sum of labels),
//! and the area under the ROC curve.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Histogram bins per unit of a logit, and the largest logit that has a separate bin.
const BINS_PER_UNIT: f64 = 64.0;
const LOGIT_MAX: f64 = 8.0;
const BINS: usize = (2.0 * LOGIT_MAX * BINS_PER_UNIT) as usize;

/// Labels of a batch: B events, T tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Labels<'a> {
    /// Labels, 0 or 1, `[B, T]`.
    pub(crate) labels: &'a [f32],
    /// Weights of the events, `[B]`.
    pub(crate) weights: &'a [f32],
    /// Weights of the tasks, `[T]`.
    pub(crate) tasks: &'a [f32],
}

impl Labels<'_> {
    /// Returns the loss of logits `[B, T]`, and writes its gradient to `out`.
    #[cfg(test)]
    pub(crate) fn loss(&self, logits: &[f32], out: &mut Vec<f32>) -> f64 {
        crate::loss::summed(&self.terms(0..self.weights.len(), logits, out))
    }

    /// Returns the loss terms of `events` with `logits` `[events, T]`, and writes the gradient of these logits to `out`.
    pub(crate) fn terms(&self, events: Range<usize>, logits: &[f32], out: &mut Vec<f32>) -> Vec<f64> {
        let total: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let tasks = self.tasks.len();
        let mut terms = Vec::with_capacity(logits.len());
        out.clear();
        let labels = &self.labels[events.start * tasks..events.end * tasks];
        for ((logits, labels), weight) in logits.chunks(tasks).zip(labels.chunks(tasks)).zip(&self.weights[events]) {
            for ((logit, label), task) in logits.iter().zip(labels).zip(self.tasks) {
                let (logit, label) = (f64::from(*logit), f64::from(*label));
                let weight = f64::from(*weight) / total * f64::from(*task);
                terms.push(weight * cross_entropy(logit, label));
                out.push((weight * (sigmoid(logit) - label)) as f32);
            }
        }
        terms
    }
}

fn sigmoid(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}

/// Binary cross-entropy of a logit, without overflow: `log(1 + e^z) - y z`.
fn cross_entropy(logit: f64, label: f64) -> f64 {
    logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p()
}

/// Weighted figures of one task's predictions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskFigures {
    weight: f64,
    predicted: f64,
    labels: f64,
    log_loss: f64,
    /// Weights of negatives and of positives by logit, `[BINS]`; empty before the first event.
    negatives: Vec<f64>,
    positives: Vec<f64>,
}

impl TaskFigures {
    /// Adds the prediction of an event.
    pub(crate) fn add(&mut self, logit: f32, label: f32, weight: f32) {
        let (logit, label, weight) = (f64::from(logit), f64::from(label), f64::from(weight));
        self.weight += weight;
        self.predicted += weight * sigmoid(logit);
        self.labels += weight * label;
        self.log_loss += weight * cross_entropy(logit, label);
        for bins in [&mut self.negatives, &mut self.positives] {
            bins.resize(BINS, 0.0);
        }
        let bin = (((logit + LOGIT_MAX) * BINS_PER_UNIT) as usize).min(BINS - 1);
        self.positives[bin] += weight * label;
        self.negatives[bin] += weight * (1.0 - label);
    }

    /// Returns the mean log-loss; none before the first event.
    pub(crate) fn log_loss(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.log_loss / self.weight)
    }

    /// Returns the log-loss divided by the log-loss of predicting the mean label; none if all labels are equal.
    pub(crate) fn normalized_entropy(&self) -> Option<f64> {
        let mean = self.labels / self.weight;
        let entropy = -(mean * mean.ln() + (1.0 - mean) * (1.0 - mean).ln());
        self.log_loss().map(|loss| loss / entropy).filter(|x| x.is_finite())
    }

    /// Returns the sum of predictions divided by the sum of labels; none without a positive.
    pub(crate) fn calibration(&self) -> Option<f64> {
        (self.labels > 0.0).then(|| self.predicted / self.labels)
    }

    /// Returns the area under the ROC curve; logits in one bin of 1/64, or beyond 8, count as equal. None if all labels
    /// are equal.
    pub(crate) fn auc(&self) -> Option<f64> {
        let (mut below, mut pairs) = (0.0, 0.0);
        for (negatives, positives) in self.negatives.iter().zip(&self.positives) {
            pairs += positives * (below + negatives / 2.0);
            below += negatives;
        }
        let all = below * self.positives.iter().sum::<f64>();
        (all > 0.0).then(|| pairs / all)
    }
}

/// Figures of one task, by the learning model and by the model at the start of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskJudged {
    pub(crate) learned: TaskFigures,
    pub(crate) frozen: TaskFigures,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::step_random::StepRandom;

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let (tasks, weights) = ([1.0, 0.25], [1.0, 3.0, 0.5]);
        let labels = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
        let logits = [0.3f32, -1.5, 7.0, -40.0, 90.0, 0.0];
        let batch = Labels { labels: &labels, weights: &weights, tasks: &tasks };
        let mut gradient = Vec::new();
        let loss = batch.loss(&logits, &mut gradient);
        // The formula without regard to overflow, where it does not.
        let naive = |z: f64, y: f64| -(y * sigmoid(z).ln() + (1.0 - y) * (1.0 - sigmoid(z)).ln());
        let expected: f64 = (0..4)
            .filter(|n| *n != 3)
            .map(|n| {
                f64::from(weights[n / 2]) / 4.5 * f64::from(tasks[n % 2]) * naive(logits[n].into(), labels[n].into())
            })
            .sum();
        let rest = 3.0 / 4.5 * 0.25 * 40.0 + 0.5 / 4.5 * 0.25 * 2f64.ln();
        assert!((loss - expected - rest).abs() < 1e-9, "{loss}");
        for n in 0..logits.len() {
            let moved = |by: f32| {
                let mut logits = logits;
                logits[n] += by;
                batch.loss(&logits, &mut Vec::new())
            };
            let slope = (moved(1.0 / 256.0) - moved(-1.0 / 256.0)) * 128.0;
            assert!((f64::from(gradient[n]) - slope).abs() < 1e-5, "{n}: {} {slope}", gradient[n]);
        }
    }

    #[test]
    fn figures_match_their_definitions() {
        let mut figures = TaskFigures::default();
        assert_eq!((figures.auc(), figures.log_loss(), figures.calibration()), (None, None, None));
        let draws = StepRandom::new(1, 2);
        let events: Vec<(f32, f32, f32)> = (0..500u64)
            .map(|n| {
                // Distinct bins for distinct logits.
                let logit = draws.below(n, 400) as f32 / 32.0 - 6.0;
                let label = f32::from(u8::from(draws.below(n + 1000, 400) as f32 / 32.0 - 6.0 < logit));
                (logit, label, 1.0 + draws.below(n + 2000, 3) as f32)
            })
            .collect();
        events.iter().for_each(|(logit, label, weight)| figures.add(*logit, *label, *weight));
        let (mut pairs, mut all) = (0.0, 0.0);
        for (logit, _, weight) in events.iter().filter(|e| e.1 == 1.0) {
            for (other, _, of_other) in events.iter().filter(|e| e.1 == 0.0) {
                let wins = if logit > other { 1.0 } else { f64::from(u8::from(logit == other)) / 2.0 };
                pairs += f64::from(weight * of_other) * wins;
                all += f64::from(weight * of_other);
            }
        }
        assert!((figures.auc().unwrap() - pairs / all).abs() < 1e-9);
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            events.iter().map(|(z, y, w)| f64::from(*w) * of(f64::from(*z), f64::from(*y))).sum()
        };
        let (weight, labels) = (sum(&|_, _| 1.0), sum(&|_, y| y));
        assert!((figures.calibration().unwrap() - sum(&|z, _| sigmoid(z)) / labels).abs() < 1e-9);
        let loss = sum(&cross_entropy) / weight;
        assert!((figures.log_loss().unwrap() - loss).abs() < 1e-9);
        let mean = labels / weight;
        let entropy = -mean * mean.ln() - (1.0 - mean) * (1.0 - mean).ln();
        assert!((figures.normalized_entropy().unwrap() - loss / entropy).abs() < 1e-9);
        // Predicting the mean label is the unit of normalized entropy.
        let mut constant = TaskFigures::default();
        (0..4).for_each(|n| constant.add((1f32 / 3.0).ln(), f32::from(u8::from(n == 0)), 1.0));
        assert!((constant.normalized_entropy().unwrap() - 1.0).abs() < 1e-6);
        assert!((constant.calibration().unwrap() - 1.0).abs() < 1e-6 && constant.auc() == Some(0.5));
        let mut extreme = TaskFigures::default();
        [f32::INFINITY, f32::NAN, -1e30].iter().for_each(|logit| extreme.add(*logit, 1.0, 1.0));
        assert_eq!(extreme.auc(), None);
    }
}
