//! How often a search judges itself.

/// How often a search asks itself whether it may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Soon again: to ask costs little beside a list.
    Often,
    /// After about as many lists again as were scanned: to ask is a launch, for which all searches of a batch wait.
    Rare,
}
