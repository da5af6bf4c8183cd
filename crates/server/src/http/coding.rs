//! Content codings: compresses answers, and decompresses request bodies.
//!
//! Decompression is limited while it runs: by the size of the body, by the memory of all bodies together, and by the window size
//! that the client chose.

use std::io::Read;
use std::sync::Arc;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use flate2::read::MultiGzDecoder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_http::compression::{CompressionLayer, CompressionLevel, Predicate};

use super::answer::{CODINGS, Rejection};
use sterling_core::error::Error;

/// Minimum size of compressed answers, in bytes: compressing shorter ones takes longer than sending them.
const ANSWER_BYTES_MIN: u64 = 32 << 10;
/// Maximum number of concurrently compressed answers, each with about 1 MiB of memory; others are sent uncompressed.
const ENCODERS_MAX: usize = 64;
/// Largest window of a zstd body, 2^23 bytes as in RFC 9659.
const WINDOW_LOG_MAX: u32 = 23;

/// Content coding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Gzip,
    Zstd,
}

impl Coding {
    /// Reads the coding from the header; `None` if the body is not compressed.
    ///
    /// # Errors
    /// 415 for an unsupported coding.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, Rejection> {
        let mut values = headers.get_all(CONTENT_ENCODING).iter();
        let Some(value) = values.next() else { return Ok(None) };
        let name = value.to_str().unwrap_or_default().trim().to_ascii_lowercase();
        match (name.as_str(), values.next()) {
            ("gzip" | "x-gzip", None) => Ok(Some(Coding::Gzip)),
            ("zstd", None) => Ok(Some(Coding::Zstd)),
            ("identity" | "", None) => Ok(None),
            _ => Err(Rejection::coding(format!("content encoding {value:?}: expected one of {CODINGS}"))),
        }
    }

    /// Returns a reader of the decompressed `bytes`.
    ///
    /// # Errors
    /// `Internal` if the library cannot create a reader.
    pub(super) fn reader<'a>(self, bytes: &'a [u8]) -> sterling_core::error::Result<Box<dyn Read + 'a>> {
        match self {
            Coding::Gzip => Ok(Box::new(MultiGzDecoder::new(bytes))),
            Coding::Zstd => {
                let internal = |e| Error::internal(format!("cannot create a zstd decoder: {e}"));
                let mut reader = zstd::stream::read::Decoder::with_buffer(bytes).map_err(internal)?;
                reader.window_log_max(WINDOW_LOG_MAX).map_err(internal)?;
                Ok(Box::new(reader))
            }
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Zstd => "zstd",
        }
    }
}

/// Limits the number of concurrently compressed answers.
#[derive(Clone)]
pub(super) struct Encoders(Arc<Semaphore>);

impl Default for Encoders {
    fn default() -> Self {
        Encoders(Arc::new(Semaphore::new(ENCODERS_MAX)))
    }
}

/// Marks an answer that is to be compressed.
#[derive(Clone)]
struct CompressionMark;

/// Marks large answers for compression if the client accepts it and a slot is free.
pub(super) async fn choose(State(Encoders(turns)): State<Encoders>, request: Request, next: Next) -> Response {
    let accepts = request.headers().get_all(ACCEPT_ENCODING).iter().any(names_one);
    let mut response = next.run(request).await;
    let size = response.body().size_hint();
    if !accepts || size.exact().is_some_and(|bytes| bytes < ANSWER_BYTES_MIN) || !is_text(response.headers()) {
        return response;
    }
    let Ok(turn) = turns.try_acquire_owned() else { return response };
    response.extensions_mut().insert(CompressionMark);
    response.map(|body| Body::new(CompressedBody { body, _turn: turn }))
}

/// Returns whether a value of `Accept-Encoding` names a supported coding; the compression layer evaluates the weights.
fn names_one(value: &HeaderValue) -> bool {
    let names = |text: String| ["gzip", "zstd", "*"].into_iter().any(|name| text.contains(name));
    value.to_str().is_ok_and(|text| names(text.to_ascii_lowercase()))
}

fn is_text(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    ["application/json", "application/x-ndjson", "application/vnd.apache.arrow", "text/"]
        .into_iter()
        .any(|known| kind.starts_with(known))
}

/// Layer that compresses marked answers with gzip or zstd at their fastest level.
pub(super) fn layer() -> CompressionLayer<IsMarked> {
    CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(IsMarked)
}

/// Predicate: whether an answer is marked for compression.
#[derive(Clone, Copy)]
pub(super) struct IsMarked;

impl Predicate for IsMarked {
    fn should_compress<B: HttpBody>(&self, response: &axum::http::Response<B>) -> bool {
        response.extensions().get::<CompressionMark>().is_some()
    }
}

/// Body of an answer; dropping it frees the compression slot.
struct CompressedBody {
    body: Body,
    _turn: OwnedSemaphorePermit,
}

impl HttpBody for CompressedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write as _;

    use super::*;

    #[test]
    fn one_coding_is_read_and_no_other() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            Coding::of(&headers).map_err(|refusal| refusal.status().as_u16())
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["identity"]), Ok(None));
        assert_eq!(of(&["GZIP"]), Ok(Some(Coding::Gzip)));
        assert_eq!(of(&[" zstd "]), Ok(Some(Coding::Zstd)));
        for invalid in [&["br"][..], &["gzip, gzip"], &["gzip", "gzip"], &["deflate"], &["zstd, identity"]] {
            assert_eq!(of(invalid), Err(415), "{invalid:?}");
        }
    }

    #[test]
    fn names_of_codings_have_no_case() {
        for (accepted, expected) in [("GZIP", true), ("br, Zstd;q=0.5", true), ("*", true), ("br, identity", false)] {
            assert_eq!(names_one(&HeaderValue::from_static(accepted)), expected, "{accepted}");
        }
    }

    #[test]
    fn encoded_bodies_are_read_with_a_bounded_window() {
        let text = b"{\"vector\": [1, 2]}".repeat(1000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        let zstd = |window: u32| {
            let mut coder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
            coder.long_distance_matching(true).unwrap();
            coder.window_log(window).unwrap();
            coder.write_all(&text).unwrap();
            coder.finish().unwrap()
        };
        let read = |coding: Coding, bytes: &[u8]| {
            let mut out = Vec::new();
            coding.reader(bytes).unwrap().read_to_end(&mut out).map(|_| out)
        };
        let gzip = gzip.finish().unwrap();
        assert_eq!(read(Coding::Gzip, &gzip).unwrap(), text);
        assert_eq!(read(Coding::Zstd, &zstd(WINDOW_LOG_MAX)).unwrap(), text);
        assert!(read(Coding::Zstd, &zstd(WINDOW_LOG_MAX + 1)).is_err(), "a larger window is memory for nothing");
        for cut in [0, 1, 9, gzip.len() - 1] {
            assert!(read(Coding::Gzip, &gzip[..cut]).is_err(), "{cut}");
        }
    }
}
