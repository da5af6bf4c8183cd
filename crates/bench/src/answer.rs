//! Minimal HTTP/1.1 response parser for the load generator: finds the status and the end of a response. A full client
//! needs twice the processor time for a short response, and on one machine the server lacks that time.

use std::io;
use std::ops::Range;

use httparse::{EMPTY_HEADER, Header, Response, Status, parse_chunk_size};

const HEADERS_MAX: usize = 32;
/// Buffer bytes that are retained between responses.
const KEPT_BYTES: usize = 16 << 10;

/// The received bytes of a response.
#[derive(Debug, Default)]
pub(super) struct RawAnswer {
    bytes: Vec<u8>,
    head: Option<AnswerHead>,
    /// Offset in `bytes` of the body or of the body's next chunk.
    next: usize,
    /// Ranges of `bytes` that contain the body.
    parts: Vec<Range<usize>>,
}

/// Parsed header of a response.
#[derive(Clone, Copy, Debug)]
struct AnswerHead {
    status: u16,
    /// Length of the body; `None` for chunked encoding.
    length: Option<usize>,
    keeps_open: bool,
}

impl RawAnswer {
    /// Discards the response, before the next request.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES);
        self.parts.clear();
        (self.head, self.next) = (None, 0);
    }

    /// Returns the buffer to which received bytes are appended.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the status of the response; 0 before the header is complete.
    pub(super) fn status(&self) -> u16 {
        self.head.map_or(0, |head| head.status)
    }

    /// Returns false if the server closes the connection after this response.
    pub(super) fn keeps_open(&self) -> bool {
        self.head.is_none_or(|head| head.keeps_open)
    }

    /// Returns the body of a complete response.
    pub(super) fn body(&self) -> Vec<u8> {
        self.parts.iter().filter_map(|part| self.bytes.get(part.clone())).collect::<Vec<_>>().concat()
    }

    /// Parses the bytes received since the last call; returns whether the response is complete.
    ///
    /// # Errors
    /// A response that is not HTTP/1.1, or whose end is only marked by the end of the connection.
    pub(super) fn is_whole(&mut self) -> io::Result<bool> {
        let head = match self.head {
            Some(head) => head,
            None => {
                let Some((head, end)) = head_of(&self.bytes)? else { return Ok(false) };
                self.next = end;
                *self.head.insert(head)
            }
        };
        let Some(length) = head.length else { return self.has_last_chunk() };
        let end = self.next.saturating_add(length);
        if self.parts.is_empty() {
            self.parts.push(self.next..end);
        }
        Ok(self.bytes.len() >= end)
    }

    fn has_last_chunk(&mut self) -> io::Result<bool> {
        while let Some(rest) = self.bytes.get(self.next..) {
            let parsed = parse_chunk_size(rest).map_err(|_| io::Error::other("a chunk of the response has no size"))?;
            let Status::Complete((line, size)) = parsed else { return Ok(false) };
            let begin = self.next + line;
            let end = usize::try_from(size).map_or(usize::MAX, |size| begin.saturating_add(size));
            let after = end.saturating_add(b"\r\n".len());
            if size == 0 {
                return Ok(self.bytes.len() >= after);
            }
            self.parts.push(begin..end);
            self.next = after;
        }
        Ok(false)
    }
}

/// Parses the header and returns it with its length in bytes; `None` if the header is incomplete.
fn head_of(bytes: &[u8]) -> io::Result<Option<(AnswerHead, usize)>> {
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let mut response = Response::new(&mut headers);
    let parsed = response.parse(bytes).map_err(|e| io::Error::other(format!("not an HTTP/1.1 response: {e}")))?;
    let Status::Complete(end) = parsed else { return Ok(None) };
    let value = |name: &str| {
        let is_named = |header: &&Header<'_>| header.name.eq_ignore_ascii_case(name);
        response.headers.iter().find(is_named).and_then(|header| std::str::from_utf8(header.value).ok()).map(str::trim)
    };
    let is_chunked = value("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"));
    let length = value("content-length").and_then(|length| length.parse().ok());
    if length.is_none() && !is_chunked {
        return Err(io::Error::other("the response lacks `content-length` and chunked encoding"));
    }
    let keeps_open = !value("connection").is_some_and(|option| option.eq_ignore_ascii_case("close"));
    let length = if is_chunked { None } else { length };
    Ok(Some((AnswerHead { status: response.code.unwrap_or_default(), length, keeps_open }, end)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ANSWERS: [(&str, u16, &str, bool); 5] = [
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", 200, "hello", true),
        ("HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 503, "", false),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\nC\r\nlo and\r\nmore\r\n0\r\n\r\n",
            200,
            "hello and\r\nmore",
            true,
        ),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", 200, "", true),
        ("HTTP/1.1 404 \r\nx: y\r\ncontent-length:  2 \r\n\r\nno", 404, "no", true),
    ];

    #[test]
    fn answers_are_complete_with_their_last_byte_in_any_framing() {
        for step in [1, 2, 3, 7, 1000] {
            let mut answer = RawAnswer::default();
            for (text, status, body, keeps_open) in ANSWERS {
                answer.clear();
                for piece in text.as_bytes().chunks(step) {
                    assert!(!answer.is_whole().unwrap(), "{text}");
                    answer.buffer().extend_from_slice(piece);
                }
                assert!(answer.is_whole().unwrap(), "{text}");
                assert_eq!((answer.status(), answer.keeps_open()), (status, keeps_open), "{text}");
                assert_eq!(answer.body(), body.as_bytes(), "{text}");
            }
        }
    }

    #[test]
    fn invalid_responses_are_errors() {
        for text in [
            "hello\r\n\r\n",
            "HTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        ] {
            let mut answer = RawAnswer::default();
            answer.buffer().extend_from_slice(text.as_bytes());
            assert!(answer.is_whole().is_err(), "{text}");
        }
        // The largest possible chunk size must not overflow: the parser waits for more bytes.
        let mut answer = RawAnswer::default();
        answer
            .buffer()
            .extend_from_slice(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nabc");
        assert!(!answer.is_whole().unwrap() && !answer.is_whole().unwrap());
    }
}
