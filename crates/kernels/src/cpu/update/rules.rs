//! Optimizer rules as plain numbers, and the state of each per row.

/// Optimizers of embedding rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleKind {
    /// `w -= rate g`. Rows have no state.
    Sgd,
    /// `m += g²; w -= rate g / (√m + ε)`. The state of a row is m `[D]`.
    Adagrad,
    /// `m += mean(g²); w -= rate g / (√m + ε)`. The state of a row is the number m.
    #[default]
    RowwiseAdagrad,
    /// `m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; w -= rate m̂ / (√v̂ + ε)`, corrected by the number of updates of the row.
    /// The state of a row is m `[D]`, v `[D]` and the number of updates.
    Adam,
    /// Adam whose second moment is that of `mean(g²)`. The state of a row is m `[D]`, v and the number of updates.
    RowwiseAdam,
}

impl RuleKind {
    /// Every rule, simplest first.
    pub const ALL: [RuleKind; 5] =
        [RuleKind::Sgd, RuleKind::Adagrad, RuleKind::RowwiseAdagrad, RuleKind::Adam, RuleKind::RowwiseAdam];

    /// Returns the number of state values per row of `width` numbers: vectors of that width, then scalars.
    pub fn state_width(self, width: usize) -> usize {
        self.state_vectors() * width + self.state_numbers()
    }

    /// Returns the number of state vectors of the row's width.
    pub fn state_vectors(self) -> usize {
        match self {
            RuleKind::Sgd | RuleKind::RowwiseAdagrad => 0,
            RuleKind::Adagrad | RuleKind::RowwiseAdam => 1,
            RuleKind::Adam => 2,
        }
    }

    /// Returns the number of scalars in the state.
    pub fn state_numbers(self) -> usize {
        match self {
            RuleKind::Sgd | RuleKind::Adagrad => 0,
            RuleKind::RowwiseAdagrad | RuleKind::Adam => 1,
            RuleKind::RowwiseAdam => 2,
        }
    }

    /// Returns the name in TOML and reports.
    pub fn name(self) -> &'static str {
        match self {
            RuleKind::Sgd => "sgd",
            RuleKind::Adagrad => "adagrad",
            RuleKind::RowwiseAdagrad => "rowwise_adagrad",
            RuleKind::Adam => "adam",
            RuleKind::RowwiseAdam => "rowwise_adam",
        }
    }
}

/// Weight decay, applied to the rows that a batch touches.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// No decay.
    #[default]
    None,
    /// Adds `λ w` to the gradient.
    L2(f32),
    /// Multiplies the row by `1 - rate λ`, independently of the gradient.
    Decoupled(f32),
}

/// One optimizer step; all settings are finite, and `epsilon` is above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The optimizer.
    pub kind: RuleKind,
    /// Learning rate of this step.
    pub rate: f32,
    /// Number added to the root of the second moment, ε.
    pub epsilon: f32,
    /// Decay of the first moment, β₁.
    pub beta1: f32,
    /// Decay of the second moment, β₂.
    pub beta2: f32,
    /// Weight decay.
    pub decay: Decay,
    /// Maximum norm of an updated row; longer rows are scaled down to it.
    pub max_norm: Option<f32>,
    /// Maximum norm of a row's gradient; longer gradients are scaled down to it, before decay.
    pub clip: Option<f32>,
}

impl Step {
    /// Returns `1 / (1 - β^updates)` of both moments, in f64 by repeated squaring, which gives the same bits everywhere.
    pub(super) fn bias_corrections(&self, updates: u32) -> [f32; 2] {
        [self.beta1, self.beta2].map(|beta| (1.0 / (1.0 - power(f64::from(beta), updates))) as f32)
    }
}

fn power(mut base: f64, mut exponent: u32) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}
