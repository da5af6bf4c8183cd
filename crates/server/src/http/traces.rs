//! Exports traces to an OpenTelemetry collector: one span per recorded call, and one per step of its pass.
//!
//! A background thread sends spans in batches as OTLP over HTTP in its JSON form (opentelemetry-proto 1.x,
//! `ExportTraceServiceRequest`). Spans that a slow or absent collector does not accept are dropped and counted; no request waits.
//!
//! A call is recorded if its caller records the trace (flag of `traceparent`). Calls without a trace are sampled. Only durations
//! of steps are known, not their start times. So the spans of steps are laid end to end before the answer, and the remaining time
//! before the first step is queueing.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::header::HeaderValue;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::slow::PassWork;
use super::trace_context::{TraceContext, new_id};
use sterling_core::error::{Error, Result};
use sterling_core::sampler::Sampler;
use sterling_core::tasks;

/// Maximum number of calls that wait to be sent.
const WAITING_MAX: usize = 4096;
/// Maximum number of calls per export, and the longest wait of the first call.
const TOGETHER: usize = 256;
const LINGER: Duration = Duration::from_secs(1);
/// Timeout of the collector.
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
    /// Rejects invalid options.
    ///
    /// # Errors
    /// `Invalid` with the option, the received and the expected value.
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

/// Exports traces, if a collector is configured.
#[derive(Default)]
pub struct Traces(Option<Sending>);

struct Sending {
    calls: Sender<Recorded>,
    share: f64,
    draws: Sampler,
}

/// Recorded call in progress.
pub(super) struct Traced {
    /// Trace id, 32 hexadecimal digits.
    pub(super) trace: String,
    /// Span id of the caller.
    parent: Option<String>,
    /// Span id of the call, 16 hexadecimal digits.
    span: String,
}

impl Traced {
    /// Returns the header `traceparent` of the answer.
    pub(super) fn header(&self) -> Option<HeaderValue> {
        HeaderValue::from_str(&format!("00-{}-{}-01", self.trace, self.span)).ok()
    }
}

/// Finished recorded call.
pub(super) struct Recorded {
    pub(super) traced: Traced,
    pub(super) begun: SystemTime,
    pub(super) took: Duration,
    pub(super) call: &'static str,
    pub(super) status: u16,
    pub(super) key: Option<String>,
    pub(super) passed: Option<PassWork>,
}

impl Traces {
    /// Starts the export thread.
    ///
    /// # Errors
    /// `Io` if the thread cannot be created.
    pub fn start(options: &TraceOptions) -> Result<Self> {
        let Some(collector) = &options.collector else { return Ok(Traces::default()) };
        let (calls, recorded) = bounded(WAITING_MAX);
        let url = format!("{}/v1/traces", collector.trim_end_matches('/'));
        let run = move || send_all(&url, &recorded);
        tasks::TRACES.start(run)?;
        Ok(Traces(Some(Sending { calls, share: options.share, draws: Sampler::default() })))
    }

    /// Decides whether a call is recorded, and returns its trace and span.
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

    /// Queues a finished call for export.
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

/// Exports recorded calls until all senders are dropped.
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
                tracing::warn!(%error, "the collector did not accept traces; they are lost");
            }
        }
        is_well = sent.is_ok();
    }
}

/// Formats spans as an OTLP message.
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

/// Returns an integer attribute; the protocol's JSON represents 64-bit integers as strings.
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
        // Steps of a batch carry the time of the whole batch, which may exceed the time of the request.
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
