//! Validates events against a model: known items, known features, finite values in range.

use std::collections::{BTreeSet, HashSet, VecDeque};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::raw::{RawEvent, RejectionReason};
use crate::catalogue::Catalogue;
use crate::requests::RequestSample;
use sterling_core::limits::EXCLUDE_MAX;
use sterling_graph::tower::{FeatureRow, Tower};

/// Number of remembered event ids: an id that repeats within this many events is rejected.
const IDS_REMEMBERED: usize = 1_000_000;
/// Maximum number of labels that the message of a run without positives names.
const LABELS_NAMED: usize = 10;
/// Largest weight of an event.
const WEIGHT_MAX: f64 = 1e6;
/// Maximum time of an event: the year 2100. Times in milliseconds are above it; managed ids expire by the latest time.
const TIME_MAX: f64 = 4_102_444_800.0;

/// An event that can be trained on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    /// Features, as the user tower reads them.
    pub(crate) user: FeatureRow,
    /// Index of the item in the catalogue.
    pub(crate) item: u32,
    /// Seconds since 1970; 0 if the event has no time.
    pub(crate) time: u64,
    /// Factor of the event's loss.
    pub(crate) weight: f32,
    /// Indices of items that could not have been the answer, ascending; they are not used as negatives.
    pub(crate) exclude: Vec<u32>,
    /// True if the event is a positive of the trained label.
    pub(crate) is_positive: bool,
    /// Label of each trained task, 0 or 1; empty if the loss does not train them.
    pub(crate) labels: Vec<f32>,
}

impl Event {
    /// Returns whether a trained task has a positive label.
    pub(crate) fn has_positive_task(&self) -> bool {
        self.labels.iter().any(|label| *label > 0.0)
    }
}

/// Returns the hash of all events up to the end of a batch: the XXH3-64 of the fields of its events, with the hash
/// `before` as seed.
pub(crate) fn hash(before: u64, events: &[Event]) -> u64 {
    // One call for all bytes takes a fraction of the time of one call per field.
    let mut bytes = Vec::new();
    for Event { user, item, time, weight, exclude, is_positive, labels } in events {
        user.hash_into(&mut |field| bytes.extend_from_slice(field));
        bytes.extend_from_slice(&item.to_le_bytes());
        bytes.extend_from_slice(&time.to_le_bytes());
        bytes.extend_from_slice(&weight.to_le_bytes());
        bytes.extend_from_slice(&(exclude.len() as u64).to_le_bytes());
        exclude.iter().for_each(|item| bytes.extend_from_slice(&item.to_le_bytes()));
        bytes.push(u8::from(*is_positive));
        bytes.extend(labels.iter().map(|label| u8::from(*label > 0.0)));
    }
    xxh3_64_with_seed(&bytes, before)
}

/// Validates events against a model, in their order.
pub(crate) struct Checker<'a> {
    tower: &'a Tower,
    catalogue: &'a Catalogue,
    label: &'a str,
    tasks: &'a [&'a str],
    seen: SeenIds,
    /// Some of the positive labels of events, for error messages.
    labels: BTreeSet<String>,
    requests: RequestSample,
}

impl<'a> Checker<'a> {
    /// Creates a checker; an event has one label per name of `tasks`. `requests` is an empty sample, to which the
    /// requests of valid events are added.
    pub(crate) fn new(
        tower: &'a Tower,
        catalogue: &'a Catalogue,
        label: &'a str,
        tasks: &'a [&'a str],
        requests: RequestSample,
    ) -> Self {
        Checker { tower, catalogue, label, tasks, seen: SeenIds::default(), labels: BTreeSet::new(), requests }
    }

    /// Returns up to 10 labels that are positive in an event, and the sample of the events' requests.
    pub(crate) fn finish(self) -> (BTreeSet<String>, RequestSample) {
        (self.labels, self.requests)
    }

    /// Returns the event in the trainer's form.
    ///
    /// # Errors
    /// The invalid field, with the received and the expected value.
    pub(super) fn check(&mut self, raw: RawEvent) -> Result<Event, RejectionReason> {
        let weight = raw.weight.unwrap_or(1.0);
        // A weight of 0, NaN or infinity as an f32 would cancel this event, or all others of the batch.
        if !(weight <= WEIGHT_MAX && weight as f32 > 0.0) {
            let expected = format!("got {weight}, expected a number above 0, at most {WEIGHT_MAX:e}");
            return Err(RejectionReason::of("weight", expected));
        }
        finite("value", raw.value)?;
        finite("time", raw.time)?;
        if let Some(time) = raw.time.filter(|time| !(0.0..=TIME_MAX).contains(time)) {
            return Err(RejectionReason::of(
                "time",
                format!("got {time}, expected seconds since 1970, at most {TIME_MAX}"),
            ));
        }
        for (name, value) in &raw.labels {
            finite(&format!("labels.{name}"), Some(*value))?;
        }
        let Some(item) = self.catalogue.place(raw.item) else {
            return Err(RejectionReason::of("item", format!("got {}, expected the id of one of the items", raw.item)));
        };
        if raw.exclude.len() > EXCLUDE_MAX {
            let expected = format!("got {} ids, expected at most {EXCLUDE_MAX}", raw.exclude.len());
            return Err(RejectionReason::of("context.exclude", expected));
        }
        // Ids that are no longer in the catalogue cannot be sampled as negatives, so they are dropped.
        let mut exclude: Vec<u32> = raw.exclude.iter().filter_map(|&id| self.catalogue.place(id)).collect();
        exclude.sort_unstable();
        exclude.dedup();
        if exclude.binary_search(&item).is_ok() {
            return Err(RejectionReason::of("item", format!("got {}, which `context.exclude` lists", raw.item)));
        }
        let request = self.requests.draw(&raw.user, &raw.exclude);
        let request = request.map_err(|e| RejectionReason::of("user", e.to_string()))?;
        let user = self.tower.read(raw.user).map_err(|e| RejectionReason::of("user", e.to_string()))?;
        if let Some(id) = raw.id
            && !self.seen.insert(xxh3_64(id.as_bytes()))
        {
            return Err(RejectionReason::of("id", format!("got `{id}` again, expected each event once")));
        }
        self.requests.add(request);
        let is_positive = |label: &str| {
            let labelled = raw.labels.get(label).map(|&value| value > 0.0);
            labelled.unwrap_or(raw.kind.as_deref() == Some(label))
        };
        let positives = raw.labels.iter().filter(|(_, value)| **value > 0.0).map(|(label, _)| label).chain(&raw.kind);
        for label in positives {
            if self.labels.len() < LABELS_NAMED && !self.labels.contains(label) {
                self.labels.insert(label.clone());
            }
        }
        let labels = self.tasks.iter().map(|task| f32::from(u8::from(is_positive(task)))).collect();
        let time = raw.time.unwrap_or(0.0) as u64;
        Ok(Event { user, item, time, weight: weight as f32, exclude, is_positive: is_positive(self.label), labels })
    }
}

fn finite(field: &str, number: Option<f64>) -> Result<(), RejectionReason> {
    match number.filter(|number| !number.is_finite()) {
        Some(number) => Err(RejectionReason::of(field, format!("got {number}, expected a finite number"))),
        None => Ok(()),
    }
}

/// Hashes of the last event ids.
#[derive(Default)]
struct SeenIds {
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

impl SeenIds {
    /// Remembers an id; returns false if it is already known.
    fn insert(&mut self, id: u64) -> bool {
        if !self.known.insert(id) {
            return false;
        }
        self.order.push_back(id);
        if self.order.len() > IDS_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}
