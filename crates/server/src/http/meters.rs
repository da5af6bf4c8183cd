//! Cached handles of call metrics: looking up a metric by name and labels costs as much as the rest of a rejection.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::http::StatusCode;
use metrics::{Counter, Histogram, counter, histogram};

use super::verb::Verb;

/// Known statuses with their labels; others count as the last entry.
const STATUSES: [(u16, &str); 19] = [
    (200, "200"),
    (400, "400"),
    (401, "401"),
    (403, "403"),
    (404, "404"),
    (405, "405"),
    (408, "408"),
    (409, "409"),
    (410, "410"),
    (413, "413"),
    (415, "415"),
    (422, "422"),
    (429, "429"),
    (500, "500"),
    (501, "501"),
    (503, "503"),
    (504, "504"),
    (507, "507"),
    (0, "other"),
];

/// Metrics of one call, created on first use, so that unused calls have no series.
#[derive(Default)]
struct CallMeters {
    seconds: OnceLock<Histogram>,
    answers: [OnceLock<Counter>; STATUSES.len()],
}

/// Metrics of all calls about one model, or of all calls that concern no model.
struct CallsMeters {
    model: Option<String>,
    calls: [CallMeters; Verb::NAMES.len()],
}

impl CallsMeters {
    fn of(model: Option<String>) -> Self {
        CallsMeters { model, calls: std::array::from_fn(|_| CallMeters::default()) }
    }

    fn answered(&self, verb: Verb, status: StatusCode, took: Duration) {
        let (meters, call) = (&self.calls[verb as usize], verb.name());
        let status = STATUSES.iter().position(|(code, _)| *code == status.as_u16()).unwrap_or(STATUSES.len() - 1);
        let count = || match self.model.clone() {
            Some(model) => {
                counter!("sterling_requests_total", "call" => call, "status" => STATUSES[status].1, "model" => model)
            }
            None => counter!("sterling_requests_total", "call" => call, "status" => STATUSES[status].1),
        };
        meters.answers[status].get_or_init(count).increment(1);
        let seconds = || match self.model.clone() {
            Some(model) => histogram!("sterling_request_seconds", "call" => call, "model" => model),
            None => histogram!("sterling_request_seconds", "call" => call),
        };
        meters.seconds.get_or_init(seconds).record(took.as_secs_f64());
    }
}

/// Metrics of all calls.
pub(super) struct AnswerMeters {
    of_none: CallsMeters,
    of_models: ArcSwap<BTreeMap<String, Arc<CallsMeters>>>,
}

impl Default for AnswerMeters {
    fn default() -> Self {
        AnswerMeters { of_none: CallsMeters::of(None), of_models: ArcSwap::default() }
    }
}

impl AnswerMeters {
    /// Counts an answer to a call about a model. Models that this process never had get no label, because clients may name any
    /// model.
    pub(super) fn answered(&self, verb: Verb, model: Option<&str>, status: StatusCode, took: Duration) {
        let known = model.and_then(|model| {
            let known = self.of_models.load().get(model).cloned();
            known.or_else(|| sterling_telemetry::has_begun(model).then(|| self.begin(model)))
        });
        known.as_deref().unwrap_or(&self.of_none).answered(verb, status, took);
    }

    fn begin(&self, model: &str) -> Arc<CallsMeters> {
        let made = Arc::new(CallsMeters::of(Some(model.to_owned())));
        self.of_models.rcu(|models| {
            let mut models = BTreeMap::clone(models);
            models.entry(model.to_owned()).or_insert_with(|| made.clone());
            models
        });
        // Another thread may have inserted the model's metrics first.
        self.of_models.load().get(model).cloned().unwrap_or(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_models_that_were_had_have_series() {
        let meters = AnswerMeters::default();
        let answered = |model: &str| meters.answered(Verb::Retrieve, Some(model), StatusCode::OK, Duration::ZERO);
        (0..100).for_each(|n| answered(&format!("never-had-{n}")));
        assert!(meters.of_models.load().is_empty());
        sterling_telemetry::begin_model("meters-test");
        (0..2).for_each(|_| answered("meters-test"));
        assert_eq!(meters.of_models.load().keys().collect::<Vec<_>>(), ["meters-test"]);
    }
}
