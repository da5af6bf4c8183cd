//! Optimizers of dense parameters, with the formulas of PyTorch (`torch.optim`, single-tensor implementations).

use serde::{Deserialize, Serialize};
use sterling_core::error::{Error, Result};

/// Update rule of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// `w -= rate g`
    Sgd,
    /// `s += g²`, `w -= rate g / (√s + epsilon)` (Duchi, Hazan and Singer, 2011).
    Adagrad,
    /// Adam (Kingma and Ba, 2015) with bias correction; `decay` is added to the gradient.
    Adam,
    /// Adam with decoupled decay (Loshchilov and Hutter, 2019).
    AdamW,
}

/// Settings of a [`DenseOptimizer`]. Defaults other than `rate` are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    /// Update rule.
    pub kind: OptimizerKind,
    /// Learning rate.
    pub rate: f32,
    /// Decay rates of the moments of Adam and AdamW, 0.9 and 0.999.
    #[serde(default = "betas")]
    pub betas: [f32; 2],
    /// Added to the root; `None` means 1e-10 for Adagrad, and 1e-8 for Adam and AdamW.
    #[serde(default)]
    pub epsilon: Option<f32>,
    /// Weight decay.
    #[serde(default)]
    pub decay: f32,
    /// Maximum norm of the gradient of all parameters together; a longer gradient is scaled down to it.
    #[serde(default)]
    pub clip: Option<f32>,
}

fn betas() -> [f32; 2] {
    [0.9, 0.999]
}

impl OptimizerSpec {
    /// Creates settings with PyTorch's defaults for everything else.
    pub fn new(kind: OptimizerKind, rate: f32) -> Self {
        OptimizerSpec { kind, rate, betas: betas(), epsilon: None, decay: 0.0, clip: None }
    }

    /// Rejects invalid settings.
    ///
    /// # Errors
    /// `Invalid` with the field, the received and the expected value.
    pub fn check(&self) -> Result<()> {
        let is_rate = |x: f32| x.is_finite() && x >= 0.0;
        let invalid = |field: &str, x: f32, expected: &str| {
            Err(Error::invalid(format!("field `{field}`: got {x}, expected {expected}")))
        };
        if !is_rate(self.rate) {
            return invalid("rate", self.rate, "a finite number of at least 0");
        }
        if let Some(&beta) = self.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            return invalid("betas", beta, "numbers from 0 to below 1");
        }
        if let Some(epsilon) = self.epsilon.filter(|&x| !is_rate(x)) {
            return invalid("epsilon", epsilon, "a finite number of at least 0");
        }
        if !is_rate(self.decay) {
            return invalid("decay", self.decay, "a finite number of at least 0");
        }
        match self.clip.filter(|&x| !(is_rate(x) && x > 0.0)) {
            Some(clip) => invalid("clip", clip, "a finite number above 0"),
            None => Ok(()),
        }
    }

    fn moments(&self) -> usize {
        match self.kind {
            OptimizerKind::Sgd => 0,
            OptimizerKind::Adagrad => 1,
            OptimizerKind::Adam | OptimizerKind::AdamW => 2,
        }
    }

    fn epsilon(&self) -> f32 {
        self.epsilon.unwrap_or(if self.kind == OptimizerKind::Adagrad { 1e-10 } else { 1e-8 })
    }
}

/// Optimizer of a flat array of parameters.
#[derive(Clone, Debug)]
pub struct DenseOptimizer {
    spec: OptimizerSpec,
    steps: u64,
    /// Adagrad: the sums of squared gradients. Adam and AdamW: the first and the second moments. Each `[parameters]`.
    moments: Vec<Vec<f32>>,
}

impl DenseOptimizer {
    /// Creates an optimizer of `count` parameters before its first step.
    ///
    /// # Errors
    /// As [`OptimizerSpec::check`].
    pub fn new(spec: OptimizerSpec, count: usize) -> Result<Self> {
        spec.check()?;
        Ok(DenseOptimizer { spec, steps: 0, moments: vec![vec![0.0; count]; spec.moments()] })
    }

    /// Restores an optimizer from [`DenseOptimizer::steps`] and [`DenseOptimizer::moments`].
    ///
    /// # Errors
    /// `Invalid` if the state belongs to another rule or has another number of parameters.
    pub fn restore(spec: OptimizerSpec, count: usize, steps: u64, moments: Vec<Vec<f32>>) -> Result<Self> {
        spec.check()?;
        let lengths: Vec<usize> = moments.iter().map(Vec::len).collect();
        if lengths != vec![count; spec.moments()] {
            let (kind, expected) = (spec.kind, vec![count; spec.moments()]);
            return Err(Error::invalid(format!(
                "optimizer state has {lengths:?} numbers, expected {expected:?} for {kind:?}"
            )));
        }
        Ok(DenseOptimizer { spec, steps, moments })
    }

    /// Returns the settings.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// Sets the learning rate of later steps.
    pub fn set_rate(&mut self, rate: f32) {
        self.spec.rate = rate;
    }

    /// Returns the number of steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the state, each array `[parameters]`: no array for SGD, the sums of squares for Adagrad, the first and
    /// the second moments for Adam and AdamW.
    pub fn moments(&self) -> &[Vec<f32>] {
        &self.moments
    }

    /// Updates the parameters by their gradients; returns the norm of the gradients before clipping.
    ///
    /// # Errors
    /// `Invalid` if lengths differ or a gradient is not finite; parameters and state are then unchanged.
    pub fn step(&mut self, parameters: &mut [f32], gradients: &[f32]) -> Result<f64> {
        let (count, got) = (parameters.len(), gradients.len());
        if got != count || self.moments.iter().any(|moment| moment.len() != count) {
            return Err(Error::invalid(format!(
                "got {got} gradients and {count} parameters, expected as many as the optimizer has"
            )));
        }
        let norm = norm(gradients);
        if !norm.is_finite() {
            return Err(Error::invalid(format!("the gradients have norm {norm}, expected a finite number")));
        }
        // Same formula as `torch.nn.utils.clip_grad_norm_`.
        let scale = self.spec.clip.map_or(1.0, |clip| (f64::from(clip) / (norm + 1e-6)).min(1.0)) as f32;
        self.steps += 1;
        let OptimizerSpec { kind, rate, betas: [first, second], decay, .. } = self.spec;
        let epsilon = self.spec.epsilon();
        let all = parameters.iter_mut().zip(gradients);
        match (kind, &mut self.moments[..]) {
            (OptimizerKind::Adagrad, [sums]) => {
                for ((w, g), sum) in all.zip(sums) {
                    let g = g * scale + decay * *w;
                    *sum += g * g;
                    *w -= rate * g / (sum.sqrt() + epsilon);
                }
            }
            (OptimizerKind::Adam | OptimizerKind::AdamW, [means, squares]) => {
                let corrected = |beta: f32| 1.0 - f64::from(beta).powf(self.steps as f64);
                let step = (f64::from(rate) / corrected(first)) as f32;
                let root = corrected(second).sqrt() as f32;
                let is_decoupled = kind == OptimizerKind::AdamW;
                let (retained, added) = if is_decoupled { (1.0 - rate * decay, 0.0) } else { (1.0, decay) };
                for (((w, g), mean), square) in all.zip(means).zip(squares) {
                    let before = *w * retained;
                    let g = g * scale + added * *w;
                    *mean += (1.0 - first) * (g - *mean);
                    *square = second * *square + (1.0 - second) * g * g;
                    *w = before - step * *mean / (square.sqrt() / root + epsilon);
                }
            }
            _ => all.for_each(|(w, g)| *w -= rate * (g * scale + decay * *w)),
        }
        Ok(norm)
    }
}

/// Returns the Euclidean norm, summed in f64 in a fixed number of partial sums, so that the result is the same on every
/// machine.
fn norm(numbers: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0f64; LANES];
    let (complete, rest) = numbers.as_chunks::<LANES>();
    for chunk in complete {
        sums.iter_mut().zip(chunk).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
    }
    sums.iter_mut().zip(rest).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
    sums.iter().sum::<f64>().sqrt()
}
