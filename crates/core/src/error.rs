//! The error type of all crates: a [`Kind`] for programs, a message for people, a source for logs.
//!
//! Feature modules convert their errors into [`Error`], which depends on none of these modules. The HTTP layer maps
//! [`Kind`] to a status and the command line maps it to an exit code, each in one table.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Returns the message of a panic.
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("row {}", 7)).unwrap_err();
/// assert_eq!(sterling_core::error::panic_message(&*panic), "row 7");
/// ```
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message")
}

/// Declares the kinds and their names in one list.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Category of an error: the part that a program may act on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// Returns the stable name in `snake_case` that API clients see.
            pub fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)*
                }
            }

            /// Returns the kind with this name.
            pub fn named(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Kind::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// The input is invalid and will stay invalid.
    Invalid = "invalid",
    /// The named object does not exist.
    NotFound = "not_found",
    /// The object existed and was permanently deleted.
    Gone = "gone",
    /// The request contradicts the current state, for example it publishes a version that exists.
    Conflict = "conflict",
    /// Stored bytes are damaged: invalid checksum, shape or format.
    Corrupt = "corrupt",
    /// The request is well-formed, but this build or model does not support it.
    Unsupported = "unsupported",
    /// A limit is reached, for example a full queue; the same request may succeed later.
    Overloaded = "overloaded",
    /// The request needs more work or memory than one request may use; it must be split or made smaller.
    TooCostly = "too_costly",
    /// Disk or memory has no room for the data.
    NoSpace = "insufficient_storage",
    /// The deadline of the request has passed.
    DeadlineExceeded = "deadline_exceeded",
    /// The object exists but cannot serve yet.
    NotReady = "not_ready",
    /// Another system that this request needs does not answer.
    Unavailable = "unavailable",
    /// Too little of the queried data could be reached, for example too few shards of a catalogue.
    Partial = "partial",
    /// The operating system reported an error for a file or socket operation.
    Io = "io",
    /// Defect of this program.
    Internal = "internal",
}

impl Kind {
    /// Returns true if the same request may succeed later without a change.
    pub fn is_retryable(self) -> bool {
        matches!(self, Kind::Overloaded | Kind::DeadlineExceeded | Kind::NotReady | Kind::Unavailable | Kind::Partial)
    }

    /// Returns true if the failure may resolve over time: a version is then loaded again even if its folder stays the same.
    pub fn is_transient(self) -> bool {
        match self {
            Kind::Unavailable
            | Kind::Io
            | Kind::NotReady
            | Kind::DeadlineExceeded
            | Kind::Overloaded
            | Kind::NoSpace
            | Kind::Partial => true,
            Kind::Invalid | Kind::NotFound | Kind::Gone | Kind::Conflict | Kind::Corrupt | Kind::Unsupported => false,
            Kind::TooCostly | Kind::Internal => false,
        }
    }
}

/// Error whose message names the object, the received value and the expected value.
///
/// ```
/// use sterling_core::error::{Error, Kind};
/// let e = Error::invalid("field `k`: got 0, expected 1 to 100000").within("request 3");
/// assert_eq!(e.kind(), Kind::Invalid);
/// assert_eq!(e.to_string(), "request 3: field `k`: got 0, expected 1 to 100000");
/// ```
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    offset: Option<usize>,
    retry_after: Option<Duration>,
    is_unapplied: bool,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Result with [`Error`] as its default error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! constructors {
    ($($name:ident => $kind:ident),* $(,)?) => {
        $(
            #[doc = concat!("An error of kind [`Kind::", stringify!($kind), "`].")]
            pub fn $name(message: impl Into<String>) -> Self {
                Error::new(Kind::$kind, message)
            }
        )*
    };
}

impl Error {
    /// Creates an error of the given kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), offset: None, retry_after: None, is_unapplied: false, source: None }
    }

    constructors! {
        invalid => Invalid, not_found => NotFound, gone => Gone, conflict => Conflict, corrupt => Corrupt, unsupported => Unsupported,
        overloaded => Overloaded, deadline => DeadlineExceeded, not_ready => NotReady, unavailable => Unavailable,
        too_costly => TooCostly, no_space => NoSpace, internal => Internal, partial => Partial,
    }

    /// Converts an operating-system error about the object `what`.
    pub fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match source.kind() {
            ErrorKind::NotFound => Kind::NotFound,
            ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::FileTooLarge
            | ErrorKind::ReadOnlyFilesystem => Kind::NoSpace,
            _ => Kind::Io,
        };
        Error::new(kind, format!("{what}: {source}")).caused_by(source)
    }

    /// Prepends the object or location of the error: `place: message`.
    pub fn within(mut self, place: impl fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Adds the byte offset in the parsed text.
    pub fn at(mut self, offset_bytes: usize) -> Self {
        self.offset = Some(offset_bytes);
        self
    }

    /// Adds the retry delay: the time to wait before the same request is sent again.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// States that the failed call has changed nothing; the kind of an error alone does not say so.
    pub fn unapplied(mut self) -> Self {
        self.is_unapplied = true;
        self
    }

    /// Adds the cause, for logs.
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Copies the error for another caller, without its source, because sources cannot be cloned.
    pub fn again(&self) -> Error {
        Error { message: self.message.clone(), source: None, ..*self }
    }

    /// Returns the category of the error.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the retry delay: the time to wait before the same request is sent again, if it is known.
    pub fn retry_wait(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Returns true if the failed call is known to have changed nothing.
    pub fn is_unapplied(&self) -> bool {
        self.is_unapplied
    }

    /// Returns the byte offset in the parsed text, if the error is about a text.
    pub fn offset(&self) -> Option<usize> {
        self.offset
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|s| s as _)
    }
}

/// Displays a number in at most 24 characters that parse back to it: with an exponent if it is far from 1 (1e300 has 301 digits).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShortNumber(pub f64);

impl fmt::Display for ShortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShortNumber(number) = self;
        let size = number.abs();
        match size == 0.0 || !size.is_finite() || (1e-5..1e16).contains(&size) {
            true => write!(f, "{number}"),
            false => write!(f, "{number:e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_numbers_are_shortened_and_others_are_printed_exactly() {
        for number in [1e300, -2.5e-310, 0.1 + 0.2, 1e15 + 0.5, f64::MAX, f64::MIN_POSITIVE, 1e16, -1e-5, 0.0, 7.0] {
            let shown = ShortNumber(number).to_string();
            assert!(shown.len() <= 24, "{shown}");
            assert_eq!(shown.parse(), Ok(number));
        }
        for (number, expected) in [(1e300, "1e300"), (2.0, "2"), (0.25, "0.25"), (1e9, "1000000000"), (f64::NAN, "NaN")]
        {
            assert_eq!(ShortNumber(number).to_string(), expected);
        }
    }

    #[test]
    fn a_missing_file_is_not_found_and_keeps_its_source() {
        let e = Error::io("items.parquet", std::io::Error::from(std::io::ErrorKind::NotFound));
        assert_eq!(e.kind(), Kind::NotFound);
        assert!(StdError::source(&e).is_some());
        assert!(e.to_string().starts_with("items.parquet: "));
    }

    #[test]
    fn a_full_disk_is_distinguished_from_a_failing_one() {
        use std::io::ErrorKind;
        for (kind, expected) in [
            (ErrorKind::StorageFull, Kind::NoSpace),
            (ErrorKind::QuotaExceeded, Kind::NoSpace),
            (ErrorKind::FileTooLarge, Kind::NoSpace),
            (ErrorKind::ReadOnlyFilesystem, Kind::NoSpace),
            (ErrorKind::PermissionDenied, Kind::Io),
            (ErrorKind::Other, Kind::Io),
        ] {
            assert_eq!(Error::io("the store", kind.into()).kind(), expected, "{kind}");
        }
    }

    #[test]
    fn retryable_kinds_are_those_that_time_can_mend() {
        assert!(Kind::Overloaded.is_retryable() && Kind::Unavailable.is_retryable());
        assert!(!Kind::Invalid.is_retryable() && !Kind::Corrupt.is_retryable());
    }
}
