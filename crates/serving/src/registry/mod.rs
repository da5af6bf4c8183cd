//! Which versions of which models are in memory, and which one answers.
//!
//! Loading, labelling and activating are three things. A version in memory answers those who pin it by its number or by a
//! label; unpinned requests go to the active one. To activate is to swap one pointer, and waits for nobody's load.
//!
//! 1. `Registry::look` sees what is published. A version is its name, its number *and* its bytes: what its files look like
//!    from outside (a [`Stamp`](sterling_snapshot::Stamp)) tells when to look closer, the digest of its manifest tells what it is.
//! 2. What is new is loaded, a few at a time, each model behind a gate of its own: its folder must be called what its
//!    manifest says, its memory must be there, the warm-up must hold. The newest then answers, unless an operator has
//!    decided otherwise since it was published.
//! 3. What cannot be loaded is refused with the reason, and the version before goes on. A passing failure is tried again,
//!    later and later; any refused version at once when its folder changes; nothing else is.
//!
//! Of unpinned requests a share may go to another version, a canary, and some may be asked of another one as well, a shadow (`split`). What the store
//! wishes of that is followed like all else; a canary that falls behind is stopped here, at once, and then in the store (`traffic`).
//!
//! The active version, the one before it, labelled ones and those loaded by hand stay in memory. All others are dropped, and
//! drain by themselves: a request holds its version while it runs.

mod entry;
mod load;
mod loaded;
mod loader;
mod memory;
mod permits;
#[expect(clippy::module_inception, reason = "the registry is what the folder is about; beside it stand its parts")]
mod registry;
mod split;
#[cfg(test)]
mod tests;
mod traffic;

pub use loaded::{Loaded, Refused, VersionState};
pub use loader::{Declared, Loader, Snapshots};
pub use registry::{Options, Registry, Warm};
pub use split::{CanaryVersion, ShadowVersion};
pub use sterling_core::request::Which;
pub use traffic::Unpinned;
