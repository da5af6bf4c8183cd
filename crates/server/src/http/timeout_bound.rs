//! Upper bound of the timeouts that requests of a body may set, computed from its text before it is parsed.
//!
//! Under overload most requests are rejected, and parsing rejected requests takes time from accepted ones. A request may set
//! its own timeout (`timeout_ms`). A request is only rejected before parsing if the bound holds for every interpretation of the
//! text.

use std::time::Duration;

/// Prefix of the names of all timeout fields.
const NAME: &str = "timeout";

/// Returns an upper bound of the timeouts of all requests in `body`, if the text gives one. `usual` is the default timeout.
pub(super) fn patience(body: &[u8], usual: Duration) -> Option<Duration> {
    // Compressed and binary bodies are not UTF-8, and `\u` escapes may spell the name differently.
    let text = std::str::from_utf8(body).ok().filter(|text| !text.contains("\\u"))?;
    text.match_indices(NAME).try_fold(usual, |longest, (at, name)| {
        let value = text.get(at + name.len()..)?.strip_prefix("_ms\"")?.trim_start().strip_prefix(':')?.trim_start();
        let digits = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
        Some(longest.max(Duration::from_millis(value.get(..digits)?.parse().ok()?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_holds_for_any_text() {
        let bound = |body: &str| patience(body.as_bytes(), Duration::from_secs(1)).map(|time| time.as_millis());
        for (body, expected) in [
            ("", Some(1000)),
            (r#"{"vector": [1], "k": 3}"#, Some(1000)),
            (r#"{"timeout_ms": 60000}"#, Some(60_000)),
            ("{\"timeout_ms\"\n:\t60000}", Some(60_000)),
            (r#"{"timeout_ms": 5}"#, Some(1000)),
            (r#"{"requests": [{"timeout_ms": 5}, {"timeout_ms":2000}, {}]}"#, Some(2000)),
            (r#"{"filter": "title:timeout_ms", "timeout_ms": 9000}"#, None),
            (r#"{"timeout_ms": null}"#, None),
            (r#"{"timeout_ms": -1}"#, None),
            (r#"{"timeout_ms": 99999999999999999999}"#, None),
            (r#"{"timeout_ms""#, None),
            (r#"{"time\u006fut_ms": 60000}"#, None),
            (r#"{"parameters": {"timeout": 60000000}}"#, None),
        ] {
            assert_eq!(bound(body), expected, "{body}");
        }
        assert_eq!(patience(b"timeout_ms\xff", Duration::from_secs(1)), None);
        assert_eq!(patience(&[0x1f, 0x8b, 8], Duration::from_secs(1)), None, "gzip");
    }
}
