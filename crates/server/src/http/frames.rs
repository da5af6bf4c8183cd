//! Parses frame headers of an HTTP/2 connection to detect clients that cost work without sending requests.
//!
//! h2 tracks the connection's state, but limits neither the time of a header block (HEADERS without END_HEADERS, RFC 9113 6.10)
//! nor the number of frames that request nothing (10.5): PING, SETTINGS, PRIORITY, WINDOW_UPDATE, RST_STREAM, empty DATA.

use std::time::Instant;

/// Length of the HTTP/2 connection preface, in bytes.
const PREFACE_BYTES: usize = 24;
/// Length of a frame header, in bytes.
const HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Number of frames without requests that a connection may send at once, and per second.
const IDLE_FRAMES: f64 = 1000.0;
/// Additional frames per request, such as window updates for its answer.
const FRAMES_PER_REQUEST: f64 = 8.0;
/// Additional frames per KiB of answers: clients that update two windows per frame of an answer send fewer.
const FRAMES_PER_KIB: f64 = 1.0;
/// DATA frames with fewer bytes count as requesting nothing, unless they end a body.
const DATA_BYTES_MIN: usize = 64;

/// Parser state of a connection's frames.
#[derive(Debug)]
pub(super) struct Frames {
    preface_left: usize,
    head: [u8; HEAD_BYTES],
    /// Received bytes of the next frame header.
    filled: usize,
    payload_left: usize,
    /// True if the current frame belongs to a header block, and whether the block continues after it.
    is_of_block: bool,
    is_block_open: bool,
    /// Remaining allowance of frames without requests.
    allowed: f64,
    since: Instant,
}

impl Frames {
    pub(super) fn new(now: Instant) -> Self {
        Frames {
            preface_left: PREFACE_BYTES,
            head: [0; HEAD_BYTES],
            filled: 0,
            payload_left: 0,
            is_of_block: false,
            is_block_open: false,
            allowed: IDLE_FRAMES,
            since: now,
        }
    }

    /// Parses received bytes. Returns `false` if the allowance of frames without requests is exceeded.
    pub(super) fn came(&mut self, mut bytes: &[u8], now: Instant) -> bool {
        self.allow(now.saturating_duration_since(self.since).as_secs_f64() * IDLE_FRAMES);
        self.since = now;
        while !bytes.is_empty() {
            let left = if self.preface_left > 0 { &mut self.preface_left } else { &mut self.payload_left };
            if *left > 0 {
                let count = bytes.len().min(*left);
                *left -= count;
                bytes = bytes.get(count..).unwrap_or_default();
                continue;
            }
            let count = bytes.len().min(HEAD_BYTES - self.filled);
            let (some, rest) = bytes.split_at(count);
            self.head[self.filled..self.filled + count].copy_from_slice(some);
            (self.filled, bytes) = (self.filled + count, rest);
            if self.filled == HEAD_BYTES {
                self.begin();
            }
        }
        self.allowed >= 0.0
    }

    /// Starts a frame whose header is complete.
    fn begin(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.head;
        self.filled = 0;
        self.payload_left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.is_of_block = matches!(kind, HEADERS | CONTINUATION);
        if self.is_of_block {
            self.is_block_open = flags & END_HEADERS == 0;
        }
        match kind {
            HEADERS => self.allow(FRAMES_PER_REQUEST),
            DATA if flags & END_STREAM != 0 || self.payload_left >= DATA_BYTES_MIN => {}
            _ => self.allowed -= 1.0,
        }
    }

    /// Raises the allowance after bytes of answers were sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.allow(bytes as f64 / 1024.0 * FRAMES_PER_KIB);
    }

    fn allow(&mut self, more: f64) {
        self.allowed = (self.allowed + more).min(IDLE_FRAMES);
    }

    /// Returns whether a header, or the connection preface, is partly received.
    pub(super) fn is_in_header(&self) -> bool {
        self.preface_left > 0 || self.filled > 0 || self.is_block_open || self.is_of_block && self.payload_left > 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = (payload as u32).to_be_bytes();
        let head = [length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        [&head[..], &vec![b'x'; payload]].concat()
    }

    #[test]
    fn a_header_is_open_from_its_first_byte_to_its_last() {
        let all = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(4, 0, 6),
            frame(HEADERS, 0, 40),
            frame(CONTINUATION, 0, 0),
            frame(CONTINUATION, END_HEADERS, 3),
            frame(DATA, END_STREAM, 100),
        ];
        // No header is open before and after each part: payloads of SETTINGS and DATA are not headers.
        let ends = [24, 24 + 15, 24 + 15 + 49 + 9 + 12, 24 + 15 + 49 + 9 + 12 + 109];
        let bytes = all.concat();
        assert_eq!(bytes.len(), ends[3]);
        for step in [1, 2, 7, 1000] {
            let now = Instant::now();
            let (mut frames, mut at) = (Frames::new(now), 0);
            assert!(frames.is_in_header(), "nothing came yet");
            for some in bytes.chunks(step) {
                assert!(frames.came(some, now));
                at += some.len();
                let is_closed = at == ends[0]
                    || (ends[0] + 9..=ends[1]).contains(&at)
                    || at == ends[2]
                    || (ends[2] + 9..=ends[3]).contains(&at);
                assert_eq!(frames.is_in_header(), !is_closed, "{step} {at}");
            }
        }
    }

    #[test]
    fn frames_that_ask_for_nothing_are_bounded_and_those_of_clients_are_not() {
        let (start, ping) = (Instant::now(), frame(6, 0, 8));
        let started = || {
            let mut frames = Frames::new(start);
            assert!(frames.came(&[b'P'; PREFACE_BYTES], start));
            frames
        };
        let count = |frames: &mut Frames, some: &[u8], most: usize, now: Instant| {
            (0..most).take_while(|_| frames.came(some, now)).count()
        };
        let mut frames = started();
        assert_eq!(count(&mut frames, &ping, 5000, start), 1000);
        assert!(!frames.came(&ping, start));
        let later = start + Duration::from_secs(60);
        assert_eq!(count(&mut frames, &ping, 5000, later), 1000, "no more than at once, however long nothing came");
        for (some, is_bounded) in [
            (frame(2, 0, 5), true),
            (frame(DATA, 0, 1), true),
            (frame(0xbe, 0, 0), true),
            (frame(DATA, 0, 1000), false),
            // A request whose client updates both windows a few times.
            ([frame(HEADERS, 5, 30), frame(8, 0, 4).repeat(6)].concat(), false),
        ] {
            assert_eq!(count(&mut started(), &some, 5000, start) < 5000, is_bounded, "{some:?}");
        }
        // Two window updates per 16 KiB of an answer.
        let mut frames = started();
        for _ in 0..5000 {
            frames.sent(16 << 10);
            assert!(frames.came(&frame(8, 0, 4).repeat(2), start));
        }
    }
}
