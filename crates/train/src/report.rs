//! Report of a run.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::checkpoint::Position;
use crate::judge::{Figures, RankingMetrics};
use crate::managed::ManagedReport;
use crate::tasks::{TaskFigures, TaskJudged};

/// The outcome of a run, as `sterling train` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Events trained on, in all epochs, including those before the run was resumed.
    pub events: u64,
    /// Events per second of this process, reading and progressive validation included.
    pub events_per_second: f64,
    /// Ranking by the model in its state before each event was trained on.
    pub learned: Ranked,
    /// Ranking by the model at the start of the run.
    pub frozen: Ranked,
    /// Ranking by the number of earlier events per item.
    pub popularity: Ranked,
    /// Predictions of the reranker's tasks by their name, if they are trained.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, TaskReport>,
    /// The same figures per window of events.
    pub windows: Vec<Window>,
    /// Events that were ranked.
    pub judged: u64,
    /// Mean loss of the steps of all epochs, without rejected batches.
    pub loss: f64,
    /// Number of steps.
    pub steps: u64,
    /// Lines and rows read in the first epoch.
    pub read: u64,
    /// Events that are not trained on: those that are no positives or, with the loss of tasks, negatives that were not sampled.
    pub skipped: u64,
    /// Lines and rows rejected as invalid events.
    pub refused: u64,
    /// Batches rejected because their loss or gradient was not finite.
    pub rejected_batches: u64,
    /// Row updates rejected because their result was not finite.
    pub rejected_rows: u64,
    /// Step that the run resumed from; 0 for a new run.
    pub resumed_from: u64,
    /// Tables with managed ids, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub managed: BTreeMap<String, ManagedReport>,
}

/// Predictions of a task, as they were before the model was trained on each event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskReport {
    /// Predictions of the model in its state before each event was trained on.
    pub learned: Predicted,
    /// Predictions of the model at the start of the run.
    pub frozen: Predicted,
}

/// Quality of predictions over events, weighted as the events are; none if it is not defined for their labels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Area under the ROC curve.
    pub auc: Option<f64>,
    /// Mean binary cross-entropy.
    pub log_loss: Option<f64>,
    /// Log-loss divided by that of predicting the mean label.
    pub normalized_entropy: Option<f64>,
    /// Sum of predictions divided by sum of labels.
    pub calibration: Option<f64>,
}

impl Predicted {
    fn of(figures: &TaskFigures) -> Self {
        Predicted {
            auc: figures.auc(),
            log_loss: figures.log_loss(),
            normalized_entropy: figures.normalized_entropy(),
            calibration: figures.calibration(),
        }
    }
}

/// Quality of a ranking over events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// Mean of `1 / log2(rank + 2)` for ranks from 0 to 9, and of 0 for others, over all orders of items of equal score; none if
    /// no event was ranked.
    #[serde(rename = "ndcg@10")]
    pub ndcg: Option<f64>,
    /// Share of ranks below 10, over the same orders.
    #[serde(rename = "hr@10")]
    pub hit_rate: Option<f64>,
}

/// Figures of a window of consecutive events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Window {
    /// Number of events of the window that were ranked.
    pub events: u64,
    /// NDCG@10 of the model that learns.
    pub learned: f64,
    /// NDCG@10 of the frozen twin.
    pub frozen: f64,
    /// NDCG@10 of the ranking by popularity.
    pub popularity: f64,
}

impl Ranked {
    fn of(figures: &Figures) -> Self {
        let known = |number: f64| (figures.events() > 0).then_some(number);
        Ranked { ndcg: known(figures.ndcg()), hit_rate: known(figures.hit_rate()) }
    }
}

impl Window {
    pub(crate) fn between(before: &RankingMetrics, after: &RankingMetrics) -> Self {
        Window {
            events: after.learned.events() - before.learned.events(),
            learned: after.learned.since(&before.learned).ndcg(),
            frozen: after.frozen.since(&before.frozen).ndcg(),
            popularity: after.popularity.since(&before.popularity).ndcg(),
        }
    }
}

impl Report {
    pub(crate) fn of<'t>(
        position: &Position,
        tasks: impl Iterator<Item = &'t str>,
        resumed_from: u64,
        events_per_second: f64,
    ) -> Self {
        let RankingMetrics { learned, frozen, popularity } = position.judged;
        let mut borders = vec![RankingMetrics::default()];
        borders.extend(&position.windows);
        if borders.last().is_none_or(|last| last.learned.events() < learned.events()) {
            borders.push(position.judged);
        }
        Report {
            events: position.trained,
            events_per_second,
            learned: Ranked::of(&learned),
            frozen: Ranked::of(&frozen),
            popularity: Ranked::of(&popularity),
            tasks: tasks
                .zip(&position.tasks)
                .map(|(name, TaskJudged { learned, frozen })| {
                    let of_task = TaskReport { learned: Predicted::of(learned), frozen: Predicted::of(frozen) };
                    (name.to_owned(), of_task)
                })
                .collect(),
            windows: borders.windows(2).map(|pair| Window::between(&pair[0], &pair[1])).collect(),
            judged: learned.events(),
            loss: position.loss / (position.step - position.rejected_batches).max(1) as f64,
            steps: position.step,
            read: position.met.read,
            skipped: position.met.skipped,
            refused: position.met.refused,
            rejected_batches: position.rejected_batches,
            rejected_rows: position.rejected_rows,
            resumed_from,
            managed: BTreeMap::new(),
        }
    }
}
