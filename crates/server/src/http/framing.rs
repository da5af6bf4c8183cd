//! Finds the ends of requests in the bytes of an HTTP/1.1 connection.
//!
//! hyper reads ahead: half a header that arrives with the previous request would stay in hyper's buffer, and the time limit of
//! headers (`header_ms`) would not start. So hyper receives the bytes of one request at a time. This parser only tracks
//! boundaries; hyper interprets the bytes. If parser and hyper disagree, bytes are merely passed on in different chunks.

/// Body length of a request whose header the service has not received yet.
pub(super) const NOT_BEGUN: u64 = u64::MAX;
/// Body length that is not known in advance, as for a chunked body.
pub(super) const UNKNOWN: u64 = u64::MAX - 1;

/// Parser state of a connection's bytes.
#[derive(Debug)]
pub(super) struct Framing {
    part: Part,
    lines: Lines,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// In a header, or in empty lines before a header.
    Header,
    /// After a complete header, which was passed on to hyper.
    AcceptedPrefix,
    /// In a body, with this number of remaining bytes.
    Body(u64),
    /// In a body of unknown length.
    Coded,
}

/// State of the service that determines the meaning of the next bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Body length of the request whose header was passed on last, in bytes, or [`NOT_BEGUN`] or [`UNKNOWN`].
    pub(super) body: u64,
    /// True if a request is being read, processed or answered.
    pub(super) is_busy: bool,
}

/// Prefix of received bytes that may be passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AcceptedPrefix {
    /// Length of the prefix in bytes, at least 1.
    pub(super) count: usize,
    /// True if the bytes belong to a header or precede one.
    pub(super) is_header: bool,
    /// True if the bytes end a header, so that its request starts.
    pub(super) ends_header: bool,
    /// True if the bytes belong to the next request while a request is in progress.
    pub(super) is_early: bool,
}

impl Framing {
    pub(super) fn new() -> Self {
        Framing { part: Part::Header, lines: Lines::default() }
    }

    /// Returns the prefix of `bytes` (at least one) that ends with the current header or body at the latest.
    pub(super) fn pass(&mut self, bytes: &[u8], progress: Progress) -> AcceptedPrefix {
        self.part = match (self.part, progress.body) {
            (Part::AcceptedPrefix, NOT_BEGUN | 0) | (Part::Body(0), _) => Part::Header,
            (Part::AcceptedPrefix, UNKNOWN) => Part::Coded,
            (Part::AcceptedPrefix, length) => Part::Body(length),
            (Part::Coded, _) if !progress.is_busy => Part::Header,
            (part, _) => part,
        };
        match &mut self.part {
            Part::Body(left) => {
                let count = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
                *left -= count as u64;
                AcceptedPrefix { count, is_header: false, ends_header: false, is_early: false }
            }
            Part::Coded => {
                // A chunked body ends with an empty line. `bytes` may contain the end of the body and the start of the next
                // request.
                let mut rest = bytes;
                while let Some(end) = self.lines.end(rest) {
                    rest = rest.get(end..).unwrap_or_default();
                }
                AcceptedPrefix {
                    count: bytes.len(),
                    is_header: false,
                    ends_header: false,
                    is_early: self.lines.has_begun,
                }
            }
            Part::Header | Part::AcceptedPrefix => {
                let end = self.lines.end(bytes);
                if end.is_some() {
                    self.part = Part::AcceptedPrefix;
                }
                AcceptedPrefix {
                    count: end.unwrap_or(bytes.len()),
                    is_header: true,
                    ends_header: end.is_some(),
                    is_early: progress.is_busy,
                }
            }
        }
    }
}

/// Finds the empty line that ends a header; empty lines before it are skipped.
#[derive(Debug, Default)]
struct Lines {
    has_begun: bool,
    is_filled: bool,
}

impl Lines {
    /// Returns the index after the end of the header in these bytes, which continue the previous ones.
    fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, byte) in bytes.iter().enumerate() {
            match byte {
                b'\n' if self.has_begun && !self.is_filled => {
                    *self = Lines::default();
                    return Some(at + 1);
                }
                b'\n' => self.is_filled = false,
                b'\r' => {}
                _ => (self.has_begun, self.is_filled) = (true, true),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Progress = Progress { body: NOT_BEGUN, is_busy: false };

    #[test]
    fn no_read_crosses_the_end_of_a_request() {
        let requests: [(&str, &[u8]); 5] = [
            ("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b""),
            ("POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n\r\n", b"{\r\n\r\n}\n"),
            ("\r\nGET / HTTP/1.1\nhost: x\n\n", b""),
            ("POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"\n\n"),
            ("GET /half HTTP/1.1\r\nhost:", b""),
        ];
        let all: Vec<u8> = requests.iter().flat_map(|(head, body)| [head.as_bytes(), body].concat()).collect();
        for step in 1..=all.len() {
            let (mut framing, mut at, mut taken) = (Framing::new(), 0, Vec::new());
            // Bytes behind the last header, as a service would read them.
            let (mut piece, mut progress) = (Vec::new(), PART);
            while at < all.len() {
                let some = &all[at..(at + step).min(all.len())];
                let passed = framing.pass(some, progress);
                assert!((1..=some.len()).contains(&passed.count), "{step} {at}");
                piece.extend_from_slice(&some[..passed.count]);
                at += passed.count;
                let (head, body) = requests[taken.len()];
                if passed.ends_header {
                    assert_eq!(piece, head.as_bytes(), "{step}");
                    progress = Progress { body: body.len() as u64, is_busy: true };
                }
                if piece.len() == head.len() + body.len() {
                    taken.push(std::mem::take(&mut piece));
                    progress.is_busy = false;
                }
            }
            assert_eq!(taken.len(), 5, "{step}");
        }
    }

    #[test]
    fn bytes_after_an_encoded_body_are_early() {
        let head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
        let busy = Progress { body: UNKNOWN, is_busy: true };
        for (pieces, is_early) in [
            (vec!["2\r\n{}\r\n0\r\n\r\n"], false),
            (vec!["2\r\n{}\r\n0\r\n\r", "\n"], false),
            (vec!["2\r\n\n\n\r\n0\r\n\r\n"], false),
            (vec!["2\r\n{}\r\n0\r\n\r\nGET / HT"], true),
            (vec!["2\r\n{}\r\n0\r\n\r\n", "GET / HTTP/1.1\r\nhost: x\r\n"], true),
        ] {
            let mut framing = Framing::new();
            assert!(framing.pass(head, PART).ends_header);
            let passed = pieces.iter().map(|piece| framing.pass(piece.as_bytes(), busy)).last();
            assert_eq!(passed.map(|passed| passed.is_early), Some(is_early), "{pieces:?}");
            let rest = framing.pass(b"\r\n\r\n", PART);
            assert_eq!(rest.ends_header, is_early, "{pieces:?}: the header goes on");
        }
    }

    #[test]
    fn headers_with_bare_line_feeds_end_like_others() {
        let mut framing = Framing::new();
        assert!(framing.pass(b"x\n\n", PART).ends_header);
        assert_eq!(
            framing.pass(b"y\r\n", PART),
            AcceptedPrefix { count: 3, is_header: true, ends_header: false, is_early: false }
        );
    }
}
