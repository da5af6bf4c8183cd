//! Time that the requests of a body may name for themselves, bounded from its text before it is parsed.
//!
//! Under overload most requests are refused, and parsing those takes time from the others. A request may name its own time (`timeout_ms`), so
//! only a bound that holds whatever the text means allows a refusal before parsing.

use std::time::Duration;

/// The name of every field that holds such a time begins with this.
const NAME: &str = "timeout";

/// Returns an upper bound of the time that any request of `body` has, if the text gives one. `usual` is the time of a request that names none.
pub(super) fn patience(body: &[u8], usual: Duration) -> Option<Duration> {
    // Compressed and binary bodies are not UTF-8, and `\u` may spell the name in another way.
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
    fn the_bound_holds_whatever_the_text_means() {
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
