//! The header `Date`, formatted once per second. hyper's own header keeps its old value after the clock has been set back.

use std::cell::RefCell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderValue;

/// Last second that the header can represent, at the end of the year 9999.
const LAST: u64 = 253_402_300_799;

/// Returns the current time as a header value.
pub(super) fn date() -> HeaderValue {
    date_at(SystemTime::now())
}

fn date_at(now: SystemTime) -> HeaderValue {
    thread_local! {
        static MADE: RefCell<Option<(u64, HeaderValue)>> = const { RefCell::new(None) };
    }
    let second = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().min(LAST);
    MADE.with_borrow_mut(|made| match made {
        Some((at, value)) if *at == second => value.clone(),
        made => {
            let text = httpdate::HttpDate::from(UNIX_EPOCH + Duration::from_secs(second)).to_string();
            let value = HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""));
            made.insert((second, value)).1.clone()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_follows_the_clock_also_back() {
        let at = |second| date_at(UNIX_EPOCH + Duration::from_millis(second * 1000 + 900));
        assert_eq!(at(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(at(784_111_778), "Sun, 06 Nov 1994 08:49:38 GMT");
        assert_eq!(at(784_108_177), "Sun, 06 Nov 1994 07:49:37 GMT");
        assert_eq!(date_at(UNIX_EPOCH - Duration::from_secs(5)), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(at(LAST + 5), "Fri, 31 Dec 9999 23:59:59 GMT");
    }
}
