//! W3C Trace Context: identifies the trace of a request, so that its log lines can be found from the caller's trace.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::header::HeaderValue;

/// Length of a header of version 00, in bytes.
const BYTES: usize = 55;

/// Trace, and whether its caller records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceContext<'a> {
    /// Trace id, 32 hexadecimal digits.
    pub(super) trace: &'a str,
    /// Span id of the caller, 16 hexadecimal digits.
    pub(super) parent: &'a str,
    flags: &'a str,
}

impl<'a> TraceContext<'a> {
    /// Parses a header; `None` if it violates the standard. Versions after 00 may have further fields.
    pub(super) fn of(header: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(header).ok()?.trim_ascii();
        let (head, rest) = text.split_at_checked(BYTES)?;
        let is_hex = |text: &str| text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let mut parts = head.split('-');
        let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let lengths = (version.len(), trace.len(), parent.len(), flags.len());
        let is_whole = parts.next().is_none() && lengths == (2, 32, 16, 2);
        let ends = rest.is_empty() || version != "00" && rest.starts_with('-');
        let is_zero = |text: &str| text.bytes().all(|b| b == b'0');
        let is_right = is_whole
            && ends
            && [version, trace, parent, flags].into_iter().all(is_hex)
            && version != "ff"
            && !is_zero(trace)
            && !is_zero(parent);
        is_right.then_some(TraceContext { trace, parent, flags })
    }

    /// Returns whether the caller records the trace.
    pub(super) fn is_recorded(&self) -> bool {
        u8::from_str_radix(self.flags, 16).is_ok_and(|flags| flags & 1 == 1)
    }

    /// Returns the header of an answer: the same trace, with this call's own span id of 16 hexadecimal digits.
    pub(super) fn answer(&self, call: &str) -> Option<HeaderValue> {
        HeaderValue::from_str(&format!("00-{}-{call}-{}", self.trace, self.flags)).ok()
    }
}

/// Returns a unique 64-bit id in hexadecimal digits: a hashed counter, with a new hash key per process.
pub(super) fn new_id() -> String {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed));
    format!("{number:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn headers_are_read_as_the_standard_has_them() {
        let own = |text: &str| TraceContext::of(text.as_bytes()).map(|context| context.trace.to_owned());
        for (header, known) in [
            (format!("00-{TRACE}-00f067aa0ba902b7-01"), true),
            (format!(" 00-{TRACE}-00f067aa0ba902b7-00 "), true),
            (format!("cc-{TRACE}-00f067aa0ba902b7-01"), true),
            (format!("cc-{TRACE}-00f067aa0ba902b7-01-what-comes"), true),
            (format!("cc-{TRACE}-00f067aa0ba902b7-01.what"), false),
            (format!("00-{TRACE}-00f067aa0ba902b7-01-what"), false),
            (format!("ff-{TRACE}-00f067aa0ba902b7-01"), false),
            (format!("00-{}-00f067aa0ba902b7-01", TRACE.to_uppercase()), false),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), false),
            (format!("00-{TRACE}-0000000000000000-01"), false),
            (format!("00-{TRACE}-00f067aa0ba902b7-1"), false),
            (format!("00-{TRACE}-00f067aa0ba902b70-1"), false),
            (format!("0-{TRACE}-00f067aa0ba902b7-011"), false),
            (format!("00_{TRACE}-00f067aa0ba902b7-01"), false),
            (format!("00-{TRACE}-00f067aa0ba902b7-0g"), false),
            (format!("00-{TRACE}-00f067aa0ba902b7-0\u{e9}"), false),
            (String::new(), false),
        ] {
            assert_eq!(own(&header).as_deref(), known.then_some(TRACE), "{header}");
        }
        assert!(TraceContext::of(&[0xff; BYTES]).is_none());
    }

    #[test]
    fn the_answer_names_the_trace_and_the_call() {
        let header = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let context = TraceContext::of(header.as_bytes());
        let answer = context.and_then(|context| context.answer("1122334455667788"));
        assert_eq!(answer, HeaderValue::from_str(&format!("00-{TRACE}-1122334455667788-01")).ok());
    }
}
