//! Reasons why the reference evaluation of a graph stops.

/// Reason why there is no reference result for a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Unsupported operator, attribute or type.
    Unknown(String),
    /// The graph needs more work than the limit.
    TooLarge,
    /// The graph is undefined for these inputs.
    Invalid(String),
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stop::Unknown(what) => write!(f, "{what} is not supported by the independent evaluation"),
            Stop::TooLarge => write!(f, "an evaluation of the graph would take too long"),
            Stop::Invalid(what) => write!(f, "{what}"),
        }
    }
}
