//! Helpers for the log: one line per event, and few lines per outage.

use std::borrow::Cow;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::locks::locked;

/// Replaces control characters by their escapes (`\n`, `\u{1b}`). Text of a client or another server then stays on one line and
/// cannot send escape sequences to a terminal.
///
/// ```
/// assert_eq!(sterling_core::logging::printable("late\nwarning: \u{1b}[2J"), "late\\nwarning: \\u{1b}[2J");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if character.is_control() {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// Rate limiter for a log line, so that an outage in which every request fails does not fill the log.
#[derive(Debug, Default)]
pub struct RateLimitedLog {
    /// Time of the last logged line, and the number of lines suppressed after it.
    state: Mutex<(Option<Instant>, u64)>,
}

impl RateLimitedLog {
    /// Creates a limiter that lets the first line through.
    pub const fn new() -> Self {
        RateLimitedLog { state: Mutex::new((None, 0)) }
    }

    /// Returns the number of suppressed lines if a line may be logged now (one per `every`), else `None`.
    pub fn pass(&self, every: Duration) -> Option<u64> {
        let (last, held_back) = &mut *locked(&self.state);
        if last.is_some_and(|at| at.elapsed() < every) {
            *held_back += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_come_too_often_are_counted_in_the_next_one() {
        let line = RateLimitedLog::new();
        let hour = Duration::from_secs(3600);
        assert_eq!(line.pass(hour), Some(0));
        assert_eq!([line.pass(hour), line.pass(hour)], [None, None]);
        assert_eq!(line.pass(Duration::ZERO), Some(2));
        assert_eq!((line.pass(hour), line.pass(Duration::ZERO)), (None, Some(1)));
    }
}
