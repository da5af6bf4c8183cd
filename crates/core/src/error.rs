//! The one error of the crate: a small kind for programs, a message for people, a source for logs.
//!
//! Modules of features convert into it; it imports none of them. The edge maps [`Kind`] to an HTTP status and the
//! command line maps it to an exit code, each in one table.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The kinds with their names, each once.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// What sort of thing went wrong; the part of an error that a program may act on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// The stable name that programs see, in `snake_case`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)*
                }
            }

            /// The kind of a name.
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
    /// The caller's input is wrong and will stay wrong.
    Invalid = "invalid",
    /// The named thing does not exist.
    NotFound = "not_found",
    /// What was there before is not any more, and will not come back.
    Gone = "gone",
    /// The request contradicts the present state, such as publishing a version that exists.
    Conflict = "conflict",
    /// Stored bytes do not say what they must: a checksum, a shape or a format is wrong.
    Corrupt = "corrupt",
    /// Well-formed, and outside what this build or model can do.
    Unsupported = "unsupported",
    /// More than a stated bound allows, such as a full queue; the same request may succeed later.
    Overloaded = "overloaded",
    /// More work or memory than one request may ask for; it must be split or made smaller.
    TooCostly = "too_costly",
    /// What is to be stored or loaded does not fit where it must lie.
    NoSpace = "insufficient_storage",
    /// The deadline of the request has passed.
    DeadlineExceeded = "deadline_exceeded",
    /// The thing exists and cannot serve yet.
    NotReady = "not_ready",
    /// Another system that this request needs does not answer.
    Unavailable = "unavailable",
    /// Of what a request asks about, too little could answer, such as too few shards of a catalogue.
    Partial = "partial",
    /// The operating system refused a file or socket operation.
    Io = "io",
    /// A defect of this program.
    Internal = "internal",
}

impl Kind {
    /// True where the same request may succeed later without a change.
    pub fn is_retryable(self) -> bool {
        matches!(self, Kind::Overloaded | Kind::DeadlineExceeded | Kind::NotReady | Kind::Unavailable | Kind::Partial)
    }

    /// Returns true for failures that time may mend: a version that failed to load so is tried again although its folder stays the same.
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

/// An error with the thing it is about, what came and what was expected in its message.
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
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of everything that can fail here.
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
    /// An error of the given kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), offset: None, retry_after: None, source: None }
    }

    constructors! {
        invalid => Invalid, not_found => NotFound, gone => Gone, conflict => Conflict, corrupt => Corrupt, unsupported => Unsupported,
        overloaded => Overloaded, deadline => DeadlineExceeded, not_ready => NotReady, unavailable => Unavailable,
        too_costly => TooCostly, no_space => NoSpace, internal => Internal, partial => Partial,
    }

    /// An operating-system error on the named thing.
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

    /// The same error, told of the place it happened in: `place: message`.
    pub fn within(mut self, place: impl fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// The same error with the byte offset in the text that was parsed.
    pub fn at(mut self, offset_bytes: usize) -> Self {
        self.offset = Some(offset_bytes);
        self
    }

    /// The same error with how long to wait before the same request is worth trying again.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// The same error with what caused it, for logs.
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The same error for another who ran into it; what caused it stays with the first.
    pub fn again(&self) -> Error {
        Error { message: self.message.clone(), source: None, ..*self }
    }

    /// What sort of error this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How long to wait before the same request is worth trying again, where that is known.
    pub fn retry_wait(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The byte offset in the parsed text, where the error is about a text.
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

/// A number as a message shows it: with an exponent where it is far from one, and always so that the text is the number. Without, 1e300 has 301 digits.
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
    fn a_number_is_shown_shortly_and_is_the_one_that_came() {
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
    fn a_disk_that_takes_no_more_is_told_from_one_that_fails() {
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
