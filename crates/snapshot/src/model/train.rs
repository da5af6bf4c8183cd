//! `[train]` of `model.toml`: how events change the tables and towers of a package (`sterling train`). Serving and publishing check it
//! and do nothing else with it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_embedding::train::{Rule, RuleKind};
use sterling_graph::dense::train::{OptimizerKind, OptimizerSpec};

/// Most events of a batch, and most negatives that are drawn for it.
const BATCH_MAX: usize = 65_536;

/// How a model learns from events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainSpec {
    /// The label, or else the type, of events that are positives.
    pub label: String,
    /// What is minimized.
    #[serde(default)]
    pub loss: LossKind,
    /// What scores are divided by before the softmax.
    #[serde(default = "one")]
    pub temperature: f32,
    /// Events per step.
    #[serde(default = "batch")]
    pub batch: usize,
    /// Negatives per step that are drawn uniformly from the catalogue, beside the positives of the batch.
    #[serde(default = "uniform")]
    pub uniform: usize,
    /// Whether the softmax is corrected for how often each item is among the candidates (log Q).
    #[serde(default = "yes")]
    pub log_q: bool,
    /// Towers whose weights learn; with none the tables learn alone.
    #[serde(default = "both")]
    pub dense: Vec<TowerSide>,
    /// The update rule of embedding tables; row-wise Adagrad at a rate of 0.1 without one.
    #[serde(default = "rule")]
    pub optimizer: Rule,
    /// The update rule of the towers' weights; Adam at a rate of 0.001 without one.
    #[serde(default = "dense_rule")]
    pub dense_optimizer: OptimizerSpec,
    /// Exceptions by table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TrainTable>,
}

/// What training minimizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Cross-entropy of the item among the positives of the batch and uniformly drawn items.
    #[default]
    Softmax,
}

/// One of the two towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TowerSide {
    /// `user.tower`
    User,
    /// `item.tower`
    Item,
}

/// How one table differs from the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainTable {
    /// One of `[[tables]]`.
    pub name: String,
    /// Whether its rows stay as they are.
    #[serde(default)]
    pub frozen: bool,
    /// Its learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f32>,
}

fn rule() -> Rule {
    Rule::new(RuleKind::RowwiseAdagrad, 0.1)
}

fn dense_rule() -> OptimizerSpec {
    OptimizerSpec::new(OptimizerKind::Adam, 0.001)
}

fn one() -> f32 {
    1.0
}

fn batch() -> usize {
    512
}

fn uniform() -> usize {
    256
}

fn yes() -> bool {
    true
}

fn both() -> Vec<TowerSide> {
    vec![TowerSide::User, TowerSide::Item]
}

impl TrainSpec {
    /// Checks what does not depend on the rest of the file.
    pub(super) fn check(&self) -> Result<()> {
        if self.label.is_empty() {
            return Err(Error::invalid("label: got an empty text, expected the name of a label"));
        }
        positive("temperature", self.temperature)?;
        self.optimizer.checked()?;
        self.dense_optimizer.check().map_err(|e| e.within("dense_optimizer"))?;
        if !(1..=BATCH_MAX).contains(&self.batch) {
            return Err(Error::invalid(format!("batch: got {}, expected 1 to {BATCH_MAX}", self.batch)));
        }
        if self.uniform > BATCH_MAX {
            return Err(Error::invalid(format!("uniform: got {}, expected at most {BATCH_MAX}", self.uniform)));
        }
        if self.batch + self.uniform < 2 {
            return Err(Error::invalid("batch: got 1 without uniform negatives, expected at least two candidates"));
        }
        if self.dense.len() > 1 && self.dense[1..].contains(&self.dense[0]) {
            return Err(Error::invalid("dense: a tower is named twice, expected each once"));
        }
        let mut seen = BTreeSet::new();
        for table in &self.tables {
            let place = |e: Error| e.within(format!("tables `{}`", table.name));
            if !seen.insert(&table.name) {
                return Err(place(Error::invalid("given twice, expected each table once")));
            }
            table.rate.map_or(Ok(()), |rate| positive("rate", rate)).map_err(place)?;
        }
        Ok(())
    }

    /// Whether the weights of a tower learn.
    pub fn learns(&self, side: TowerSide) -> bool {
        self.dense.contains(&side)
    }

    /// What differs for a table, where something does.
    pub fn table(&self, name: &str) -> Option<&TrainTable> {
        self.tables.iter().find(|table| table.name == name)
    }
}

fn positive(field: &str, number: f32) -> Result<()> {
    if number > 0.0 && number.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(format!("{field}: got {number}, expected a finite number above 0")))
}
