//! Reads request bodies within limits of size, time and total memory, and budgets the memory of answers.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::EXPECT;
use hyper::body::{Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::answer::{Rejection, Share};
use super::coding::Coding;
use super::connections::Connection;
use super::content_type::BodyType;
use super::offload::Asides;
use super::options::Options;
use sterling_core::error::{Error, Result};
use sterling_core::limits::BODY_BYTES_MAX;
use sterling_core::quota::{Flow, Quota};

/// Memory per byte of a request's body: the body itself and its parsed values.
const MEMORY_FACTOR: usize = 4;
/// Buffer size for decompression, in bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Unit of the memory budget, in bytes.
const UNIT_BYTES: usize = 1024;

/// Limits of draining an unneeded body, in bytes and time.
const UNWANTED_BYTES_MAX: usize = 1 << 20;
const UNWANTED_TIME_MAX: Duration = Duration::from_secs(1);

/// Drains the rest of a body whose request was answered without it. Without draining, a client that sends everything before it
/// reads would see a connection reset and lose the answer. If draining takes too long, the connection closes after the answer.
#[derive(Debug)]
pub(super) struct Inbound {
    body: Option<Incoming>,
    /// True if the client sent `Expect: 100-continue`: it waits before sending the body, and sends none after an answer.
    waits: bool,
    /// HTTP/1.1 connection to close if the body stays unread; `None` for HTTP/2, where only the stream ends.
    connection: Option<Arc<Connection>>,
}

impl Inbound {
    pub(super) fn of(request: Request<Incoming>, connection: Option<Arc<Connection>>) -> Request {
        let waits = request.headers().contains_key(EXPECT);
        request.map(|body| Body::new(Inbound { body: Some(body), waits, connection }))
    }
}

impl HttpBody for Inbound {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        let Some(mut rest) = self.body.take() else { return };
        if rest.is_end_stream() {
            return;
        }
        let connection = self.connection.take();
        let leave = move || connection.iter().for_each(|connection| connection.leave_unread());
        if self.waits || rest.size_hint().lower() > UNWANTED_BYTES_MAX as u64 {
            return leave();
        }
        let is_bounded = rest.size_hint().upper().is_some();
        let mut bytes = 0;
        // Resolves to whether the complete body was read.
        let mut read = move |cx: &mut Context<'_>| loop {
            match ready!(Pin::new(&mut rest).poll_frame(cx)) {
                Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, Bytes::len),
                None => return Poll::Ready(true),
                Some(Err(_)) => return Poll::Ready(false),
            }
            if bytes > UNWANTED_BYTES_MAX || rest.is_end_stream() {
                return Poll::Ready(rest.is_end_stream());
            }
        };
        // Most bodies arrived with their header and need no task. A body of unknown length is not drained in the background.
        match (read(&mut Context::from_waker(Waker::noop())), Handle::try_current()) {
            (Poll::Ready(true), _) => {}
            (Poll::Pending, Ok(runtime)) if is_bounded => {
                runtime.spawn(async move {
                    if !timeout(UNWANTED_TIME_MAX, std::future::poll_fn(read)).await.is_ok_and(|is_whole| is_whole) {
                        leave();
                    }
                });
            }
            _ => leave(),
        }
    }
}

/// Memory budget of all request bodies and of all answers.
pub(super) struct Bodies {
    budget: Arc<Semaphore>,
    /// Threads that decompress bodies.
    asides: Asides,
    /// Budget for answers, as large as that for bodies. An answer counts from before it is computed until the client has read it.
    answers: Arc<Quota>,
    options: Options,
}

/// Complete body; dropping it releases its memory reservation.
#[derive(Debug)]
pub(super) struct CompleteBody {
    bytes: Bytes,
    _share: Option<OwnedSemaphorePermit>,
}

impl std::ops::Deref for CompleteBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Bodies {
    pub(super) fn new(options: &Options, asides: Asides) -> Self {
        let units = (options.bodies_mb << 20) / UNIT_BYTES;
        let budget = Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS)));
        let answers = Quota::new("answer", (options.bodies_mb as u64) << 20);
        Bodies { budget, asides, answers, options: options.clone() }
    }

    /// Reserves memory for an answer before it is computed; the reservation can grow meanwhile.
    ///
    /// # Errors
    /// `TooCostly` above the budget of all answers; `Overloaded` if unread answers leave too little.
    pub(super) fn hold_answer(&self, flow: Flow, bytes: usize) -> Result<Share> {
        self.answers.hold(flow, bytes as u64).map(Arc::new)
    }

    /// Reads the complete body of a JSON request.
    pub(super) async fn read(&self, request: Request) -> Result<CompleteBody, Rejection> {
        Ok(self.read_sent(request, &[]).await?.1)
    }

    /// Reads the complete body of a request in JSON or a type of `others`, and returns the type.
    pub(super) async fn read_sent(
        &self,
        request: Request,
        others: &[BodyType],
    ) -> Result<(BodyType, CompleteBody), Rejection> {
        let sent = BodyType::of(request.headers(), others)?;
        Ok((sent, self.read_any(request).await?))
    }

    /// Reads the complete body of a request whose content type is already checked.
    pub(super) async fn read_any(&self, request: Request) -> Result<CompleteBody, Rejection> {
        let coding = Coding::of(request.headers())?;
        let body = request.into_body();
        let announced = body.size_hint().lower();
        if announced > BODY_BYTES_MAX as u64 {
            return Err(too_large());
        }
        if units(announced as usize) > self.budget.available_permits() {
            return Err(self.crowded().into());
        }
        let read = match timeout(self.options.body(), self.collect(body)).await {
            Ok(read) => read?,
            Err(_) => return Err(late(format!("body: not complete after {} ms", self.options.body_ms))),
        };
        let Some(coding) = coding else { return Ok(read) };
        let memory = self.memory();
        self.asides.run(move || Ok(decoded(&read, coding, memory))).await?
    }

    /// Creates a reservation for the decoded form of a binary body.
    pub(super) fn memory(&self) -> BodyMemory {
        BodyMemory { budget: self.budget.clone(), share: None, most_mb: self.options.bodies_mb }
    }

    /// Collects a body and charges each received chunk to the budget: announced bytes that never arrive cost nothing.
    async fn collect(&self, mut body: Body) -> Result<CompleteBody, Rejection> {
        let mut memory = self.memory();
        let mut first = Bytes::new();
        let mut all: Vec<u8> = Vec::new();
        loop {
            let next = std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx));
            let frame = match timeout(self.options.stall(), next).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(e))) => return Err(Error::invalid(format!("body: {e}")).into()),
                Ok(None) => break,
                Err(_) => return Err(late(format!("body: no byte arrived for {} ms", self.options.stall_ms))),
            };
            let Ok(data) = frame.into_data() else { continue };
            let before = all.len() + first.len();
            if before + data.len() > BODY_BYTES_MAX {
                return Err(too_large());
            }
            memory.grow(before + data.len())?;
            if before == 0 {
                first = data;
            } else {
                all.extend_from_slice(&std::mem::take(&mut first));
                all.extend_from_slice(&data);
            }
        }
        let bytes = if all.is_empty() { first } else { all.into() };
        Ok(CompleteBody { bytes, _share: memory.share })
    }

    fn crowded(&self) -> Error {
        crowded(self.options.bodies_mb)
    }
}

/// Memory reservation of one body.
pub(super) struct BodyMemory {
    budget: Arc<Semaphore>,
    share: Option<OwnedSemaphorePermit>,
    most_mb: usize,
}

impl BodyMemory {
    /// Grows the reservation to cover a body of this size.
    fn grow(&mut self, bytes: usize) -> Result<()> {
        self.take(units(bytes) - self.held())
    }

    /// Reserves more memory, in total at most that of the largest allowed body.
    ///
    /// # Errors
    /// `TooCostly` above that maximum; `Overloaded` if other bodies leave too little.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<()> {
        let missing = bytes.div_ceil(UNIT_BYTES);
        if missing.saturating_add(self.held()) > units(BODY_BYTES_MAX) {
            let most = MEMORY_FACTOR * BODY_BYTES_MAX;
            return Err(Error::too_costly(format!(
                "body: its decoded values take more than {most} bytes, split it into several requests"
            )));
        }
        self.take(missing)
    }

    fn held(&self) -> usize {
        self.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    fn take(&mut self, missing: usize) -> Result<()> {
        if missing == 0 {
            return Ok(());
        }
        let more = self.budget.clone().try_acquire_many_owned(missing as u32).map_err(|_| crowded(self.most_mb))?;
        match &mut self.share {
            Some(share) => share.merge(more),
            None => self.share = Some(more),
        }
        Ok(())
    }
}

/// Decompresses a body. The decompressed size is limited like the size of uncompressed bodies.
fn decoded(body: &[u8], coding: Coding, mut memory: BodyMemory) -> Result<CompleteBody, Rejection> {
    let mut reader = coding.reader(body)?;
    let (mut bytes, mut piece) = (Vec::new(), vec![0; PIECE_BYTES]);
    loop {
        let count = reader.read(&mut piece).map_err(|e| {
            Error::invalid(format!(
                "body: not valid {}, expected the coding of the header `content-encoding`: {e}",
                coding.name()
            ))
        })?;
        if count == 0 {
            return Ok(CompleteBody { bytes: bytes.into(), _share: memory.share });
        }
        if bytes.len() + count > BODY_BYTES_MAX {
            return Err(too_large());
        }
        memory.grow(bytes.len() + count)?;
        bytes.extend_from_slice(&piece[..count]);
    }
}

fn crowded(most_mb: usize) -> Error {
    Error::overloaded(format!("body: other requests use the {most_mb} MiB for bodies, try again later"))
}

fn units(bytes: usize) -> usize {
    (bytes * MEMORY_FACTOR).div_ceil(UNIT_BYTES)
}

fn too_large() -> Rejection {
    let detail =
        format!("body: larger than {BODY_BYTES_MAX} bytes, as it is or decompressed, split it into several requests");
    Rejection::http(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
}

fn late(detail: String) -> Rejection {
    Rejection::http(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail)
}
