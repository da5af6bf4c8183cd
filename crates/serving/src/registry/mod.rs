//! Registry of loaded models and versions, and of the active one per model.
//!
//! Loading, labelling and activating are separate. A version in memory answers requests that pin it by its number or by a label;
//! the active version answers unpinned requests. Activation swaps one pointer and never waits for a load.
//!
//! 1. `Registry::look` polls the store for published versions. A version is identified by its name, its number *and* its bytes:
//!    the state of its files (a [`Stamp`](sterling_snapshot::Stamp)) shows when to look closer, and the digest of its manifest
//!    identifies the bytes.
//! 2. New versions are loaded, a few at a time, with one lock per model. The folder's name must match the manifest, memory must
//!    be available, and the warm-up must succeed. The newest is then activated, unless an operator has decided otherwise since it
//!    was published.
//! 3. A version that cannot be loaded is rejected with the reason, and the active version keeps serving. Transient failures are
//!    retried with growing delays; any rejected version is retried immediately when its folder changes; otherwise nothing is
//!    retried.
//!
//! A share of the unpinned requests may go to another version (canary), and some may be repeated at another version (shadow): see
//! `split`. Canary and shadow are part of the desired state. A canary that is worse is stopped immediately on this server, and
//! then in the store (`traffic`).
//!
//! The active version, the previous one, labelled ones and manually loaded ones stay in memory. All others are dropped when their
//! last request ends.

mod entry;
mod load;
mod loaded;
mod loader;
mod memory;
mod permits;
#[expect(
    clippy::module_inception,
    reason = "the folder is named after its main module; the other modules are its parts"
)]
mod registry;
mod split;
#[cfg(test)]
mod tests;
mod traffic;

pub use loaded::{Loaded, VersionRejection, VersionState};
pub use loader::{Declared, Loader, Snapshots};
pub use registry::{Options, Registry, Warm};
pub use split::{CanaryVersion, ShadowVersion};
pub use traffic::Unpinned;
