//! Training settings of a table: optimizer, learning rate, weight decay and limits.

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::update::Step;
pub use sterling_kernels::cpu::update::{Decay, RuleKind};

/// Optimizer settings of a table, as those of TorchRec's fused optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// The optimizer.
    pub kind: RuleKind,
    /// Learning rate.
    pub rate: f32,
    /// Added to the root of the second moment, ε.
    pub epsilon: f32,
    /// Decay of the first moment of Adam, β₁.
    pub beta1: f32,
    /// Decay of the second moment of Adam, β₂.
    pub beta2: f32,
    /// Weight decay, applied to the rows that a batch touches.
    pub decay: Decay,
    /// Maximum norm of an updated row.
    pub max_norm: Option<f32>,
    /// Maximum norm of the gradient of a row.
    pub clip: Option<f32>,
    /// Schedule of the learning rate.
    pub schedule: Schedule,
}

impl Default for Rule {
    fn default() -> Self {
        Rule {
            kind: RuleKind::default(),
            rate: 0.01,
            epsilon: 1e-8,
            beta1: 0.9,
            beta2: 0.999,
            decay: Decay::None,
            max_norm: None,
            clip: None,
            schedule: Schedule::default(),
        }
    }
}

impl Rule {
    /// Creates a rule with default values for all other settings.
    pub fn new(kind: RuleKind, rate: f32) -> Self {
        Rule { kind, rate, ..Rule::default() }
    }

    /// Returns the rule after checking its settings.
    ///
    /// # Errors
    /// `Invalid` with the field for a value outside its range.
    pub fn checked(self) -> Result<Self> {
        let check = |field: &str, value: f32, is_right: bool, expected: &str| match is_right {
            true => Ok(()),
            false => Err(Error::invalid(format!("optimizer, field `{field}`: got {value}, expected {expected}"))),
        };
        let positive = "a finite number above 0";
        let is_positive = |x: f32| x > 0.0 && x.is_finite();
        check("rate", self.rate, self.rate >= 0.0 && self.rate.is_finite(), "a finite number of at least 0")?;
        check("epsilon", self.epsilon, is_positive(self.epsilon), positive)?;
        for (field, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            check(field, beta, (0.0..1.0).contains(&beta), "a number of at least 0 and below 1")?;
        }
        if let Decay::L2(lambda) | Decay::Decoupled(lambda) = self.decay {
            check("decay", lambda, lambda >= 0.0 && lambda.is_finite(), "a finite number of at least 0")?;
        }
        for (field, bound) in [("max_norm", self.max_norm), ("clip", self.clip)] {
            bound.map_or(Ok(()), |bound| check(field, bound, is_positive(bound), positive))?;
        }
        let floor = self.schedule.floor;
        check("schedule.floor", floor, (0.0..=1.0).contains(&floor), "a number between 0 and 1")?;
        Ok(self)
    }

    /// Returns the settings of a step, counted from 0.
    pub(super) fn at(&self, step: u64) -> Step {
        Step {
            kind: self.kind,
            rate: self.rate * self.schedule.factor(step),
            epsilon: self.epsilon,
            beta1: self.beta1,
            beta2: self.beta2,
            decay: self.decay,
            max_norm: self.max_norm,
            clip: self.clip,
        }
    }
}

/// Schedule of the learning rate: it rises linearly, then falls linearly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Steps over which the rate rises to its full value; 0 starts at the full rate.
    pub warm_up: u64,
    /// Steps of the fall after that, down to `floor` times the full rate; 0 keeps the full rate.
    pub decay: u64,
    /// Final rate as a share of the full rate.
    pub floor: f32,
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule { warm_up: 0, decay: 0, floor: 0.0 }
    }
}

impl Schedule {
    /// Returns the factor of the rate at a step, counted from 0.
    pub fn factor(&self, step: u64) -> f32 {
        if step < self.warm_up {
            return ((step + 1) as f64 / self.warm_up as f64) as f32;
        }
        let fallen = match self.decay {
            0 => 0.0,
            decay => ((step - self.warm_up) as f64 / decay as f64).min(1.0),
        };
        (1.0 - fallen * (1.0 - f64::from(self.floor))) as f32
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn values_out_of_bounds_are_named() {
        let rule = Rule::default();
        assert_eq!(rule.checked().unwrap(), rule);
        let invalid = [
            (Rule { rate: -1.0, ..rule }, "rate"),
            (Rule { rate: f32::INFINITY, ..rule }, "rate"),
            (Rule { epsilon: 0.0, ..rule }, "epsilon"),
            (Rule { beta1: 1.0, ..rule }, "beta1"),
            (Rule { beta2: f32::NAN, ..rule }, "beta2"),
            (Rule { decay: Decay::L2(-0.1), ..rule }, "decay"),
            (Rule { decay: Decay::Decoupled(f32::NAN), ..rule }, "decay"),
            (Rule { max_norm: Some(0.0), ..rule }, "max_norm"),
            (Rule { clip: Some(f32::NAN), ..rule }, "clip"),
            (Rule { schedule: Schedule { floor: 2.0, ..Schedule::default() }, ..rule }, "schedule.floor"),
        ];
        for (rule, field) in invalid {
            assert!(rule.checked().unwrap_err().to_string().contains(&format!("`{field}`")), "{field}");
        }
    }

    #[test]
    fn rates_rise_and_fall_over_the_steps() {
        let schedule = Schedule { warm_up: 4, decay: 10, floor: 0.5 };
        let factors = [0, 3, 4, 9, 14, 1000].map(|step| schedule.factor(step));
        assert_eq!(factors, [0.25, 1.0, 1.0, 0.75, 0.5, 0.5]);
        assert_eq!(Schedule::default().factor(7), 1.0);
    }
}
