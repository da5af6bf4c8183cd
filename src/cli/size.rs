//! Parser of memory sizes in arguments.

/// Parses a size such as `6GiB`, `800 MB` or `1000000` to bytes.
pub(super) fn size(text: &str) -> std::result::Result<u64, String> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1u64 << 40)];
    let decimal = [("kB", 1_000), ("KB", 1_000), ("MB", 1_000_000), ("GB", 1_000_000_000), ("TB", 1_000_000_000_000)];
    let (number, unit) = units
        .into_iter()
        .chain(decimal)
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))
        .unwrap_or((text, 1));
    let bytes = number.trim().parse::<f64>().ok().map(|number| number * unit as f64);
    let bytes = bytes.filter(|bytes| (1.0..u64::MAX as f64).contains(bytes));
    bytes.map(|bytes| bytes as u64).ok_or_else(|| format!("got `{text}`, expected a size such as 6GiB or 800MB"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_are_read_in_decimal_and_binary_units() {
        for (text, bytes) in [
            ("6GiB", 6 << 30),
            ("1.5 MiB", 3 << 19),
            ("800MB", 800_000_000),
            ("12", 12),
            ("2TiB", 2 << 40),
            ("1kB", 1000),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "0", "six", "1e99GiB", "NaN", "inf", "6 GiBs", "6Gi"] {
            assert!(size(text).unwrap_err().contains("expected a size such as 6GiB"), "{text}");
        }
    }
}
