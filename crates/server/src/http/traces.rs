//! Traces for a collector of OpenTelemetry: a span for each call that is recorded, and one for each step of its pass.
//!
//! They are sent as OTLP over HTTP in its JSON form (opentelemetry-proto 1.x, `ExportTraceServiceRequest`), in pieces, by a thread that
//! answers nobody. What a slow or absent collector does not take is lost and counted: no request waits for it.
//!
//! A call is recorded where its caller records its trace (the flag of `traceparent`), and of the others a share. When a step began is not noted,
//! only how long it took: the spans of steps lie end to end before the answer, and what is left before them is the queue's.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::header::HeaderValue;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::slow::Passed;
use super::trace_context::{TraceContext, new_id};
use sterling_core::draws::Draws;
use sterling_core::error::{Error, Result};

/// Calls that wait to be sent.
const WAITING_MAX: usize = 4096;
/// Calls that are sent together, and how long the first of them waits for others.
const TOGETHER: usize = 256;
const LINGER: Duration = Duration::from_secs(1);
/// How long a collector may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// `SPAN_KIND_SERVER`, `SPAN_KIND_INTERNAL` and `STATUS_CODE_ERROR` of the protocol.
const SERVER: u8 = 2;
const INTERNAL: u8 = 1;
const FAILED: u8 = 2;

/// Export of OpenTelemetry traces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TraceOptions {
    /// Collector of OTLP over HTTP, such as `http://127.0.0.1:4318`; without it, no traces are exported.
    pub collector: Option<String>,
    /// Share of the calls without a `traceparent` that are traced; other calls follow the flag of their
    /// `traceparent`.
    pub share: f64,
}

impl TraceOptions {
    /// Refuses options that cannot work.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        if let Some(url) = self.collector.as_ref().filter(|url| !url.starts_with("http://")) {
            return Err(Error::invalid(format!("traces.collector: got `{url}`, expected http://HOST:PORT")));
        }
        if !(0.0..=1.0).contains(&self.share) {
            return Err(Error::invalid(format!("traces.share: got {}, expected 0 to 1", self.share)));
        }
        Ok(())
    }
}

/// Sends traces, where they are to be sent.
#[derive(Default)]
pub struct Traces(Option<Sending>);

struct Sending {
    calls: Sender<Recorded>,
    share: f64,
    draws: Draws,
}

/// A call that is recorded, while it runs.
pub(super) struct Traced {
    /// 32 hexadecimal digits.
    pub(super) trace: String,
    /// The caller's part of it.
    parent: Option<String>,
    /// The call's own, 16 digits.
    span: String,
}

impl Traced {
    /// The header of the answer.
    pub(super) fn header(&self) -> Option<HeaderValue> {
        HeaderValue::from_str(&format!("00-{}-{}-01", self.trace, self.span)).ok()
    }
}

/// A call that was recorded.
pub(super) struct Recorded {
    pub(super) traced: Traced,
    pub(super) begun: SystemTime,
    pub(super) took: Duration,
    pub(super) call: &'static str,
    pub(super) status: u16,
    pub(super) key: Option<String>,
    pub(super) passed: Option<Passed>,
}

impl Traces {
    /// Starts the thread that sends.
    ///
    /// # Errors
    /// `Io` where the system gives no thread.
    pub fn start(options: &TraceOptions) -> Result<Self> {
        let Some(collector) = &options.collector else { return Ok(Traces::default()) };
        let (calls, recorded) = bounded(WAITING_MAX);
        let url = format!("{}/v1/traces", collector.trim_end_matches('/'));
        let run = move || send_all(&url, &recorded);
        std::thread::Builder::new()
            .name("traces".into())
            .spawn(run)
            .map_err(|e| Error::io("the thread of traces", e))?;
        Ok(Traces(Some(Sending { calls, share: options.share, draws: Draws::default() })))
    }

    /// What a call is recorded under, where it is.
    pub(super) fn begin(&self, context: Option<&TraceContext<'_>>) -> Option<Traced> {
        let sending = self.0.as_ref()?;
        match context {
            Some(context) => context.is_recorded().then(|| Traced {
                trace: context.trace.to_owned(),
                parent: Some(context.parent.to_owned()),
                span: new_id(),
            }),
            None => {
                let is_drawn = sending.draws.draw(sending.share);
                is_drawn.then(|| Traced { trace: new_id() + &new_id(), parent: None, span: new_id() })
            }
        }
    }

    /// Hands a call over to be sent.
    pub(super) fn end(&self, recorded: Recorded) {
        if let Some(sending) = &self.0
            && sending.calls.try_send(recorded).is_err()
        {
            lost(1);
        }
    }
}

fn lost(count: usize) {
    metrics::counter!("sterling_traces_lost_total").increment(count as u64);
}

/// Sends what is recorded until nobody records any more.
fn send_all(url: &str, recorded: &Receiver<Recorded>) {
    let config = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build();
    let agent: ureq::Agent = config.into();
    let mut is_well = true;
    while let Ok(first) = recorded.recv() {
        let mut spans = Vec::new();
        let (mut count, mut next, end) = (0, Ok(first), Instant::now() + LINGER);
        while let Ok(call) = next {
            call.spans(&mut spans);
            count += 1;
            next = if count < TOGETHER { recorded.recv_deadline(end) } else { Err(RecvTimeoutError::Timeout) };
        }
        let sent = agent.post(url).header("content-type", "application/json").send(message(&spans).to_string());
        if let Err(error) = &sent {
            lost(count);
            if is_well {
                tracing::warn!(%error, "the collector takes no traces");
            }
        }
        is_well = sent.is_ok();
    }
}

/// Spans as the protocol has them.
fn message(spans: &[Value]) -> Value {
    let attributes = [text("service.name", "sterling"), text("service.version", env!("CARGO_PKG_VERSION"))];
    json!({"resourceSpans": [{
        "resource": {"attributes": attributes},
        "scopeSpans": [{"scope": {"name": "sterling"}, "spans": spans}],
    }]})
}

fn text(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// A number; the protocol's JSON has those of 64 bits as texts.
fn number(key: &str, value: u64) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

impl Recorded {
    fn spans(&self, spans: &mut Vec<Value>) {
        let (begun, took) = (nanos(self.begun.duration_since(UNIX_EPOCH).unwrap_or_default()), nanos(self.took));
        let mut attributes = vec![number("http.response.status_code", u64::from(self.status))];
        attributes.extend(self.key.as_ref().map(|key| text("sterling.key", key)));
        if let Some(passed) = &self.passed {
            attributes.push(text("sterling.model", &passed.model));
            attributes.push(number("sterling.version", passed.version));
            attributes.push(number("sterling.requests", passed.requests as u64));
        }
        let Traced { trace, parent, span } = &self.traced;
        let status = if self.status >= 500 { json!({"code": FAILED}) } else { json!({}) };
        spans.push(json!({
            "traceId": trace, "spanId": span, "parentSpanId": parent.as_deref().unwrap_or_default(),
            "name": self.call, "kind": SERVER, "startTimeUnixNano": begun.to_string(),
            "endTimeUnixNano": (begun + took).to_string(), "attributes": attributes, "status": status,
        }));
        let Some(explain) = self.passed.as_ref().and_then(|passed| passed.explain.as_ref()) else { return };
        let own: u64 = explain.steps.iter().map(|step| step.micros * 1000).sum();
        // Steps of a batch are told with the time of all of it, which may be longer than a request was there.
        let mut at = (begun + took).saturating_sub(own).max(begun);
        for step in &explain.steps {
            let end = (at + step.micros * 1000).min(begun + took);
            spans.push(json!({
                "traceId": trace, "spanId": new_id(), "parentSpanId": span, "name": step.name, "kind": INTERNAL,
                "startTimeUnixNano": at.to_string(), "endTimeUnixNano": end.to_string(),
                "attributes": [number("sterling.items", step.items), number("sterling.bytes", step.bytes)],
            }));
            at = end;
        }
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}
