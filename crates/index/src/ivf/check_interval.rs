//! Frequency of the termination check.

/// Interval between termination checks of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckInterval {
    /// Short intervals: on a CPU a check costs little compared with a list.
    Often,
    /// Intervals that double: on a GPU a check is a kernel launch, and all searches of a batch wait for it.
    Rare,
}
