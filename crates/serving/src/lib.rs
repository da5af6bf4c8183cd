//! What answers requests in memory: read [`view`]s over a snapshot and its delta, the delta ([`fresh`]), the [`registry`] of loaded
//! models, the forward [`pass`] and the scheduler ([`engine`]) that admits requests by deadline and [`quota`].

pub mod engine;
pub mod fresh;
pub mod pass;
pub mod quota;
pub mod registry;
pub mod view;
