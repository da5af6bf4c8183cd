//! What a run came to.

use serde::Serialize;

use crate::checkpoint::Position;
use crate::judge::{Figures, Judged};

/// The outcome of a run, as `sterling train` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Events that were trained on, in all epochs, also before the run was resumed.
    pub events: u64,
    /// Events per second of this process, reading and judging included.
    pub events_per_second: f64,
    /// The model as it was when each event came.
    pub learned: Ranked,
    /// The model as it was at the beginning.
    pub frozen: Ranked,
    /// How often items had been chosen before each event.
    pub popularity: Ranked,
    /// The same by windows of events.
    pub windows: Vec<Window>,
    /// Events that were ranked.
    pub judged: u64,
    /// Mean loss of the steps.
    pub loss: f64,
    /// Number of steps.
    pub steps: u64,
    /// Lines and rows that were read.
    pub read: u64,
    /// Events that are no positives of the label.
    pub skipped: u64,
    /// Lines and rows that are no events.
    pub refused: u64,
    /// Batches whose loss or gradient was not finite.
    pub rejected_batches: u64,
    /// Updates of rows that would not have been finite.
    pub rejected_rows: u64,
    /// The step that the run was resumed from; 0 where it began.
    pub resumed_from: u64,
}

/// How well a ranking finds the items of events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// Mean of `1 / log2(rank + 2)` of ranks from 0 below 10, and of 0; none where nothing was ranked.
    #[serde(rename = "ndcg@10")]
    pub ndcg: Option<f64>,
    /// Share of ranks below 10.
    #[serde(rename = "hr@10")]
    pub hit_rate: Option<f64>,
}

/// The figures of consecutive events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Window {
    /// Events that were ranked in it.
    pub events: u64,
    /// NDCG@10 of the model that learns.
    pub learned: f64,
    /// NDCG@10 of the frozen twin.
    pub frozen: f64,
    /// NDCG@10 of popularity.
    pub popularity: f64,
}

impl Ranked {
    fn of(figures: &Figures) -> Self {
        let known = |number: f64| (figures.events() > 0).then_some(number);
        Ranked { ndcg: known(figures.ndcg()), hit_rate: known(figures.hit_rate()) }
    }
}

impl Window {
    pub(crate) fn between(before: &Judged, after: &Judged) -> Self {
        Window {
            events: after.learned.events() - before.learned.events(),
            learned: after.learned.since(&before.learned).ndcg(),
            frozen: after.frozen.since(&before.frozen).ndcg(),
            popularity: after.popularity.since(&before.popularity).ndcg(),
        }
    }
}

impl Report {
    pub(crate) fn of(position: &Position, resumed_from: u64, events_per_second: f64) -> Self {
        let Judged { learned, frozen, popularity } = position.judged;
        let mut borders = vec![Judged::default()];
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
            windows: borders.windows(2).map(|pair| Window::between(&pair[0], &pair[1])).collect(),
            judged: learned.events(),
            loss: position.loss / position.step.max(1) as f64,
            steps: position.step,
            read: position.met.read,
            skipped: position.met.skipped,
            refused: position.met.refused,
            rejected_batches: position.rejected_batches,
            rejected_rows: position.rejected_rows,
            resumed_from,
        }
    }
}
