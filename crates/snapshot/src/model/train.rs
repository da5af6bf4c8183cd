//! Section `[train]` of `model.toml`: how events update the tables and towers of a package (`sterling train`). Serving and
//! publishing validate it, but do not use it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_embedding::managed::ManagedSpec;
use sterling_embedding::train::{Rule, RuleKind};
use sterling_graph::dense::train::{OptimizerKind, OptimizerSpec};

/// Maximum number of events per batch, and of negatives sampled for a batch.
const BATCH_MAX: usize = 65_536;

/// Training of a model on events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainSpec {
    /// Label of positive events. Events without this label are positive if it is their type.
    pub label: String,
    /// Loss function.
    #[serde(default)]
    pub loss: LossKind,
    /// Weight of each task of the reranker in the loss `tasks`; a task that is not listed has weight 1.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, f32>,
    /// Share of the events without a positive task that the loss `tasks` is trained on; each of them has the weight of
    /// `1 / negatives` events.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub negatives: f32,
    /// Divisor of scores before the softmax.
    #[serde(default = "one")]
    pub temperature: f32,
    /// Events per step.
    #[serde(default = "batch")]
    pub batch: usize,
    /// Negatives per step that are sampled uniformly from the catalogue, in addition to the positives of the batch.
    #[serde(default = "uniform")]
    pub uniform: usize,
    /// True if the softmax is corrected for the sampling probability of each item (log-Q correction).
    #[serde(default = "yes")]
    pub log_q: bool,
    /// Towers whose weights are trained; if empty, only the tables are.
    #[serde(default = "both")]
    pub dense: Vec<TowerSide>,
    /// Optimizer of embedding tables; by default row-wise Adagrad with a learning rate of 0.1.
    #[serde(default = "rule")]
    pub optimizer: Rule,
    /// Optimizer of the towers' weights; by default Adam with a learning rate of 0.001.
    #[serde(default = "dense_rule")]
    pub dense_optimizer: OptimizerSpec,
    /// Settings of single tables that override the defaults above.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TrainTable>,
}

/// Loss function of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Cross-entropy of the item among the positives of the batch and uniformly sampled items.
    #[default]
    Softmax,
    /// Binary cross-entropy of the reranker's logits, one label per task.
    Tasks,
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

/// Settings of one table that override the defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainTable {
    /// Name of one of `[[tables]]`.
    pub name: String,
    /// True if the table's rows are not trained.
    #[serde(default)]
    pub frozen: bool,
    /// Learning rate of the table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f32>,
    /// Policy that assigns rows to ids, for a table with managed ids; without it the assignment does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedSpec>,
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

fn is_one(number: &f32) -> bool {
    *number == 1.0
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
    /// Validates the settings that do not depend on other sections of the file.
    pub(super) fn check(&self) -> Result<()> {
        if self.label.is_empty() {
            return Err(Error::invalid("label: got an empty text, expected the name of a label"));
        }
        positive("temperature", self.temperature)?;
        if !(self.negatives > 0.0 && self.negatives <= 1.0) {
            let what = format!("negatives: got {}, expected a share above 0, at most 1", self.negatives);
            return Err(Error::invalid(what));
        }
        for (task, weight) in &self.tasks {
            positive(&format!("tasks.{task}"), *weight)?;
        }
        self.optimizer.checked()?;
        self.dense_optimizer.check().map_err(|e| e.within("dense_optimizer"))?;
        if !(1..=BATCH_MAX).contains(&self.batch) {
            return Err(Error::invalid(format!("batch: got {}, expected 1 to {BATCH_MAX}", self.batch)));
        }
        if self.uniform > BATCH_MAX {
            return Err(Error::invalid(format!("uniform: got {}, expected at most {BATCH_MAX}", self.uniform)));
        }
        if self.loss == LossKind::Softmax && self.batch + self.uniform < 2 {
            return Err(Error::invalid("batch: got 1 without uniform negatives, expected at least two candidates"));
        }
        if self.dense.len() > 1 && self.dense[1..].contains(&self.dense[0]) {
            return Err(Error::invalid("dense: a tower is listed twice, expected each once"));
        }
        let mut seen = BTreeSet::new();
        for table in &self.tables {
            let place = |e: Error| e.within(format!("tables `{}`", table.name));
            if !seen.insert(&table.name) {
                return Err(place(Error::invalid("given twice, expected each table once")));
            }
            table.rate.map_or(Ok(()), |rate| positive("rate", rate)).map_err(place)?;
            table.managed.map_or(Ok(()), |managed| managed.check()).map_err(|e| place(e.within("managed")))?;
            if table.frozen && table.rate.is_some() {
                return Err(place(Error::invalid("`frozen = true` with `rate`, expected one of them")));
            }
            if table.frozen && table.managed.is_some() {
                return Err(place(Error::invalid(
                    "got `frozen` and `managed`, expected at most one of them: managed ids change the table",
                )));
            }
        }
        Ok(())
    }

    /// Returns whether the weights of a tower are trained.
    pub fn learns(&self, side: TowerSide) -> bool {
        self.dense.contains(&side)
    }

    /// Returns the settings of a table, if it has its own.
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
