//! Dates as numbers. A timestamp column holds integers in the unit of its source file, so a filter names the unit:
//! `ms("2024-01-31T12:00:00Z")`.

const SECONDS_PER_DAY: i64 = 86_400;
const NANOSECOND_DIGITS: usize = 9;

/// Unit of a date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DateUnit {
    Days,
    /// Unit of `10^-n` seconds.
    Seconds(usize),
}

impl DateUnit {
    pub(super) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "days" => DateUnit::Days,
            "s" => DateUnit::Seconds(0),
            "ms" => DateUnit::Seconds(3),
            "us" => DateUnit::Seconds(6),
            "ns" => DateUnit::Seconds(NANOSECOND_DIGITS),
            _ => return None,
        })
    }

    /// Returns the units from 1970-01-01T00:00:00Z to an RFC 3339 date or time as an exact decimal number. A time without an
    /// offset is UTC; the unit `days` accepts no time. Returns `None` for other texts.
    pub(super) fn since_1970(self, text: &str) -> Option<String> {
        let (date, time) = (text.get(..10)?, text.get(10..)?);
        let days = days_since_1970(date)?;
        let digits = match self {
            DateUnit::Days => return time.is_empty().then(|| days.to_string()),
            DateUnit::Seconds(digits) => digits,
        };
        let (seconds, nanoseconds) = if time.is_empty() { (0, 0) } else { time_of_day(time)? };
        let total = i128::from(days * SECONDS_PER_DAY + seconds) * 1_000_000_000 + i128::from(nanoseconds);
        let one = 10u128.pow((NANOSECOND_DIGITS - digits) as u32);
        let (sign, total) = (if total < 0 { "-" } else { "" }, total.unsigned_abs());
        let (complete, rest) = (total / one, total % one);
        let width = NANOSECOND_DIGITS - digits;
        Some(match rest {
            0 => format!("{sign}{complete}"),
            _ => format!("{sign}{complete}.{rest:0width$}").trim_end_matches('0').to_owned(),
        })
    }
}

/// Parses a number of exactly `count` digits.
fn digits(text: &str, count: usize) -> Option<i64> {
    let is_number = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// Returns the days since 1970-01-01 in the Gregorian calendar. Years start in March, so that the leap day is their last day.
fn days_since_1970(date: &str) -> Option<i64> {
    let mut parts = date.split('-');
    let mut part = |count| digits(parts.next()?, count);
    let (year, month, day) = (part(4)?, part(2)?, part(2)?);
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        2 => 28 + i64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if parts.next().is_some() || !(1..=longest).contains(&day) {
        return None;
    }
    let (year, month) = if month < 3 { (year - 1, month + 9) } else { (year, month - 3) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    Some(365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468)
}

/// Parses a time. Returns the seconds since midnight UTC, and nanoseconds.
fn time_of_day(text: &str) -> Option<(i64, i64)> {
    let text = text.strip_prefix(['T', 't', ' '])?;
    let (clock, offset) = match text.find(['Z', 'z', '+', '-']) {
        Some(at) => text.split_at(at),
        None => (text, "Z"),
    };
    let minutes = |text: &str| -> Option<i64> {
        let (hours, minutes) = text.split_once(':')?;
        let (hours, minutes) = (digits(hours, 2)?, digits(minutes, 2)?);
        (hours < 24 && minutes < 60).then_some(60 * hours + minutes)
    };
    let offset = match offset.split_at_checked(1)? {
        ("Z" | "z", "") => 0,
        ("+", offset) => minutes(offset)?,
        ("-", offset) => -minutes(offset)?,
        _ => return None,
    };
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let seconds = digits(clock.get(6..)?, 2).filter(|&seconds| seconds < 60 && clock.get(5..6) == Some(":"))?;
    let nanoseconds = match fraction.len() {
        1..=NANOSECOND_DIGITS => {
            digits(fraction, fraction.len())? * 10i64.pow((NANOSECOND_DIGITS - fraction.len()) as u32)
        }
        _ => return None,
    };
    Some(((minutes(clock.get(..5)?)? - offset) * 60 + seconds, nanoseconds))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn dates_are_exact_numbers_of_their_unit() {
        for (unit, text, expected) in [
            ("days", "1970-01-01", Some("0")),
            ("days", "2024-02-29", Some("19782")),
            ("days", "1969-12-31", Some("-1")),
            ("days", "0001-01-01", Some("-719162")),
            ("days", "9999-12-31", Some("2932896")),
            ("s", "2000-03-01", Some("951868800")),
            ("s", "2000-02-29T23:59:59Z", Some("951868799")),
            ("ms", "2024-01-31T12:00:00.25+02:00", Some("1706695200250")),
            ("s", "2024-01-31T12:00:00.25", Some("1706702400.25")),
            ("s", "1969-12-31 23:59:59.5z", Some("-0.5")),
            ("us", "2024-01-31t00:00:00-00:30", Some("1706661000000000")),
            ("ns", "2026-01-20T11:15:25.507217522Z", Some("1768907725507217522")),
            ("ns", "9999-12-31T23:59:59.999999999Z", Some("253402300799999999999")),
            ("days", "2024-01-31T00:00:00Z", None),
            ("s", "2023-02-29", None),
            ("s", "1900-02-29", None),
            ("s", "2024-13-01", None),
            ("s", "2024-00-01", None),
            ("s", "2024-1-01", None),
            ("s", "2024-01-01-", None),
            ("s", "2024-01-01T", None),
            ("s", "2024-01-01T24:00:00", None),
            ("s", "2024-01-01T12:00", None),
            ("s", "2024-01-01T12-00-00", None),
            ("s", "2024-01-01T12:00:60Z", None),
            ("s", "2024-01-01T12:00:00.Z", None),
            ("s", "2024-01-01T12:00:00.1234567890Z", None),
            ("s", "2024-01-01T12:00:00+2:00", None),
            ("s", "2024-01-01T12:00:00Zé", None),
            ("s", "é024-01-01", None),
            ("s", "", None),
        ] {
            assert_eq!(DateUnit::of(unit).unwrap().since_1970(text).as_deref(), expected, "{unit} {text}");
        }
        assert_eq!(DateUnit::of("minutes"), None);
    }
}
