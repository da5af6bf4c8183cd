//! Reasons for which a graph is not evaluated.

/// Why there is nothing to compare with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// An operator, attribute or type that is not evaluated here.
    Unknown(String),
    /// The graph takes more work than there is time for.
    TooLarge,
    /// The graph means nothing for these inputs.
    Invalid(String),
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stop::Unknown(what) => write!(f, "{what} is not known to the comparison"),
            Stop::TooLarge => write!(f, "it is too large to be evaluated twice"),
            Stop::Invalid(what) => write!(f, "{what}"),
        }
    }
}
