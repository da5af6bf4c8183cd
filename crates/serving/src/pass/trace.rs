//! Time per step, for explained requests and for the metrics.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use metrics::{Histogram, histogram};

use sterling_core::request::StepReport;

/// Name, time, items and bytes of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) took: Duration,
    pub(super) items: u64,
    pub(super) bytes: u64,
}

thread_local! {
    /// Handles of the step metrics: looking one up by its label takes longer than some steps.
    static SECONDS: RefCell<Vec<(&'static str, Histogram)>> = const { RefCell::new(Vec::new()) };
}

impl Step {
    /// Adds the time of the step to the metrics.
    pub(super) fn record(&self) {
        SECONDS.with_borrow_mut(|known| {
            let place = known.iter().position(|(name, _)| *name == self.name).unwrap_or_else(|| {
                known.push((self.name, histogram!("sterling_step_seconds", "step" => self.name)));
                known.len() - 1
            });
            known[place].1.record(self.took.as_secs_f64());
        });
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    steps: Vec<Step>,
}

impl Trace {
    /// Times `f` as a step; `size` returns the items and bytes that it handled.
    pub(super) fn step<T>(
        &mut self,
        name: &'static str,
        f: impl FnOnce() -> T,
        size: impl FnOnce(&T) -> (u64, u64),
    ) -> T {
        let start = Instant::now();
        let made = f();
        let took = start.elapsed();
        let (items, bytes) = size(&made);
        self.add([Step { name, took, items, bytes }]);
        made
    }

    /// Adds steps that were timed elsewhere.
    pub(super) fn add(&mut self, steps: impl IntoIterator<Item = Step>) {
        for step in steps {
            step.record();
            self.note(step);
        }
    }

    /// Adds a step that the metrics already contain; merges steps of the same name.
    pub(super) fn note(&mut self, step: Step) {
        match self.steps.iter_mut().find(|s| s.name == step.name) {
            Some(known) => {
                known.took += step.took;
                known.items += step.items;
                known.bytes += step.bytes;
            }
            None => self.steps.push(step),
        }
    }

    /// Returns these steps followed by those of `other`; the metrics already contain all of them.
    pub(super) fn and(&self, other: &Trace) -> Trace {
        Trace { steps: self.steps.iter().chain(&other.steps).copied().collect() }
    }

    pub(super) fn reports(&self) -> Vec<StepReport> {
        let report =
            |s: &Step| StepReport { name: s.name, micros: s.took.as_micros() as u64, bytes: s.bytes, items: s.items };
        self.steps.iter().map(report).collect()
    }
}
