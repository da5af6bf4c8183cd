//! What each step took: for the request that asks, and for the metrics.

use std::time::{Duration, Instant};

use crate::snapshot::Snapshot;
use crate::wire::{self, Explain};

/// Name, time, items and bytes.
pub(super) type Step = (&'static str, Duration, u64, u64);

/// Adds the time of a step to the metrics.
pub(super) fn record((name, took, ..): &Step) {
    metrics::histogram!("sterling_step_seconds", "step" => *name).record(took.as_secs_f64());
}

#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    steps: Vec<Step>,
}

impl Trace {
    /// Times `f` as a step.
    pub(super) fn step<T>(&mut self, name: &'static str, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let made = f();
        self.add_all([(name, start.elapsed(), 0, 0)]);
        made
    }

    /// Adds what the last step handled.
    pub(super) fn count(&mut self, items: u64, bytes: u64) {
        if let Some((_, _, n, b)) = self.steps.last_mut() {
            *n += items;
            *b += bytes;
        }
    }

    /// Adds steps that were timed elsewhere.
    pub(super) fn add_all(&mut self, steps: impl IntoIterator<Item = Step>) {
        for step in steps {
            record(&step);
            self.note(step);
        }
    }

    /// Adds a step that the metrics know already; one of the same name grows.
    pub(super) fn note(&mut self, (name, took, items, bytes): Step) {
        match self.steps.iter_mut().find(|(n, ..)| *n == name) {
            Some((_, time, n, b)) => {
                *time += took;
                *n += items;
                *b += bytes;
            }
            None => self.steps.push((name, took, items, bytes)),
        }
    }

    pub(super) fn explain(&self, snapshot: &Snapshot) -> Explain {
        let step = |&(name, took, items, bytes): &Step| wire::Step {
            name: name.into(),
            micros: took.as_micros() as u64,
            bytes,
            items,
        };
        Explain {
            steps: self.steps.iter().map(step).collect(),
            kernel: snapshot.index.kernel().into(),
            ..Explain::default()
        }
    }
}
