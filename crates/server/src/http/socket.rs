//! Socket of a connection: reports traffic, passes one request at a time to hyper, rejects requests for the gate, and closes so
//! that the last answer arrives.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use axum::body::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::app::Host;
use super::connections::Connection;
use super::frames::Frames;
use super::framing::Framing;
use super::gate::{self, PlainRequest};

/// Maximum number of bytes that are drained after the last answer.
const LINGER_BYTES_MAX: usize = 64 << 20;
/// Buffer size for draining, in bytes.
const LINGER_BYTES: usize = 16 << 10;

/// Socket that reports traffic to its connection, and sends rejections of the gate.
pub(super) struct Socket<S> {
    stream: S,
    connection: Arc<Connection>,
    host: Arc<dyn Host>,
    /// True if each request so far arrived complete and alone, so that the next byte on an idle connection starts a request.
    is_framed: bool,
    spoken: ProtocolState,
    /// Remaining bytes to drain after the write direction was shut down.
    linger: Option<usize>,
}

/// Parser state of the connection's protocol.
enum ProtocolState {
    Http1 {
        framing: Framing,
        /// Bytes after the current request.
        ahead: Bytes,
    },
    Http2(Box<Frames>),
}

impl<S> Socket<S> {
    pub(super) fn new(stream: S, connection: Arc<Connection>, host: Arc<dyn Host>) -> Self {
        let spoken = match connection.is_http2() {
            true => ProtocolState::Http2(Box::new(Frames::new(Instant::now()))),
            false => ProtocolState::Http1 { framing: Framing::new(), ahead: Bytes::new() },
        };
        Socket { stream, connection, host, is_framed: true, spoken, linger: None }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Socket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &mut this.spoken {
            ProtocolState::Http2(frames) => {
                let before = buffer.filled().len();
                let polled = Pin::new(&mut this.stream).poll_read(cx, buffer);
                let came = buffer.filled().get(before..).unwrap_or_default();
                if !came.is_empty() && !frames.came(came, Instant::now()) {
                    this.connection.go("frames");
                    return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
                }
                this.connection.is_in_header(frames.is_in_header());
                polled
            }
            ProtocolState::Http1 { framing, ahead } if !ahead.is_empty() => {
                let some = ahead.slice(..ahead.len().min(buffer.remaining()));
                if !some.is_empty() {
                    let count = pass(framing, &this.connection, &some, ahead.len());
                    buffer.put_slice(&some[..count]);
                    *ahead = ahead.slice(count..);
                }
                Poll::Ready(Ok(()))
            }
            ProtocolState::Http1 { .. } => this.poll_requests(cx, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Socket<S> {
    /// Reads HTTP/1.1 bytes up to the end of the current request.
    fn poll_requests(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let before = buffer.filled().len();
            let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
            let came = &buffer.filled()[before..];
            if came.is_empty() {
                return polled;
            }
            let begins = self.is_framed && self.connection.is_idle_connection();
            let Some(complete) = begins.then(|| PlainRequest::of(came)).flatten() else {
                self.is_framed = false;
                let count = self.split(before, buffer);
                buffer.set_filled(before + count);
                return polled;
            };
            self.connection.received();
            let Some(refusal) = gate::refusal(&*self.host, &self.connection, &complete) else {
                return polled;
            };
            match Pin::new(&mut self.stream).poll_write(cx, &refusal) {
                Poll::Ready(Ok(sent)) if sent == refusal.len() => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                // The client sends requests repeatedly without reading answers.
                _ => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            }
            self.connection.answered();
            self.connection.caller.record_rejection();
            buffer.set_filled(before);
        }
    }

    /// Buffers bytes after the current request. Returns the number of bytes that belong to the current request.
    fn split(&mut self, before: usize, buffer: &ReadBuf<'_>) -> usize {
        let came = &buffer.filled()[before..];
        let ProtocolState::Http1 { framing, ahead } = &mut self.spoken else { return came.len() };
        let count = pass(framing, &self.connection, came, came.len());
        *ahead = Bytes::copy_from_slice(&came[count..]);
        count
    }
}

/// Returns the number of `bytes` that the HTTP parser may read now, and updates the connection; `all` bytes are available.
fn pass(framing: &mut Framing, connection: &Connection, bytes: &[u8], all: usize) -> usize {
    let passed = framing.pass(bytes, connection.progress());
    if passed.is_header {
        connection.received();
    }
    if passed.ends_header {
        connection.header_passed();
    }
    connection.ahead(passed.count < all, passed.is_early);
    passed.count
}

impl<S: AsyncWrite + Unpin> Socket<S> {
    fn reported(&mut self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.connection.sent(polled.is_ready());
        if let (ProtocolState::Http2(frames), Poll::Ready(Ok(bytes))) = (&mut self.spoken, &polled) {
            frames.sent(*bytes);
        }
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.reported(polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, parts);
        this.reported(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Called when all available bytes are written.
        let this = self.get_mut();
        this.connection.flushed();
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    /// Closes the connection in stages (RFC 9112, 9.6): closing while the client still sends would reset it and lose the last
    /// answer.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let left = match &mut this.linger {
            Some(left) => left,
            None => {
                ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
                let bytes = if this.connection.must_linger() { LINGER_BYTES_MAX } else { 0 };
                this.linger.insert(bytes)
            }
        };
        while *left > 0 {
            let mut scrap = [MaybeUninit::uninit(); LINGER_BYTES];
            let mut scrap = ReadBuf::uninit(&mut scrap);
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut scrap));
            let count = scrap.filled().len();
            *left = if read.is_err() || count == 0 { 0 } else { left.saturating_sub(count) };
        }
        Poll::Ready(Ok(()))
    }
}
