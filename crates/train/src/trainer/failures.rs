//! Errors that end a run because of its events.

use super::Trainer;
use crate::checkpoint::{EventCounts, Position};
use sterling_core::error::Error;
use sterling_snapshot::model::LossKind;

impl Trainer {
    /// Returns the error of a run that trained no event.
    pub(super) fn nothing_trained(&self) -> Error {
        let Position { rejected_batches, met: EventCounts { read, skipped, refused }, .. } = self.position;
        let work = self.options.work.display();
        if rejected_batches > 0 {
            return Error::invalid(format!(
                "all {rejected_batches} batches were rejected, nothing was learned: {work}/quarantine.jsonl says why"
            ));
        }
        let mut why = vec![format!("no event was trained: {read} read")];
        if skipped > 0 {
            let labels: Vec<&str> = self.labels.iter().map(String::as_str).collect();
            let labels = if labels.is_empty() { "none".to_owned() } else { labels.join(", ") };
            why.push(match self.train.loss {
                LossKind::Softmax => {
                    let label = &self.train.label;
                    format!("{skipped} skipped because none is a positive of label `{label}` ([train]); labels seen: {labels}")
                }
                LossKind::Tasks => {
                    format!("{skipped} skipped as negatives that were not sampled ([train] negatives); labels seen: {labels}")
                }
            });
        }
        if refused > 0 {
            why.push(format!("{refused} rejected: {work}/quarantine.jsonl says why"));
        }
        Error::invalid(why.join(", "))
    }

    /// Returns the error of a resumed run whose events differ from the events of its checkpoint.
    pub(super) fn other_events(&self, what: String) -> Error {
        let (step, work) = (self.resumed_from, self.options.work.display());
        Error::conflict(format!(
            "checkpoint {work}/checkpoints/{step}: {what}, expected the events of that run; remove {work}/checkpoints to start from the beginning"
        ))
    }

    /// Returns the error of a run whose rejected events exceed the limit.
    pub(super) fn too_many_rejected(&mut self) -> Error {
        // The quarantine names the reasons, so it is made durable before the run ends.
        let synced = self.quarantine.sync().err().map_or(String::new(), |e| format!("; {e}"));
        let EventCounts { read, refused, .. } = self.position.met;
        let most = self.options.max_refused.most(read);
        let work = self.options.work.display();
        Error::invalid(format!(
            "{refused} of {read} events were rejected, expected at most {most}: {work}/quarantine.jsonl has the \
             reasons{synced}"
        ))
    }
}
