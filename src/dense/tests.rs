//! Programs against the meaning of their graphs.
