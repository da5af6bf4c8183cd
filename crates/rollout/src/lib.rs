//! Division of a model's unpinned requests among its versions, and detection of a canary that is worse than the active version.
//!
//! All modules but `run` use neither clocks nor locks: the operators' settings (`setting`), the hash position
//! of a key (`key_hash`), measurements of two versions in a window (`window`), and the statistical test (`judge`).
//! `run` is the state of an active canary or shadow. A server's `registry` holds this state for its versions, a
//! router's `route` for its shards. The module `http` reads and updates the state.
//!
//! **Division.** The hash of a key (such as a user id), the model and the canary's version is a number between 0 and 1.
//! Keys whose number is below the share belong to the canary. A key therefore gets the same version at every server. If
//! the share grows, the canary keeps all keys that it had. The next canary gets other keys.
//!
//! **Test.** Errors, recall and latency are all means of numbers between 0 and 1: whether a request failed, the share
//! of exact items that an audited answer lacks, whether a request took longer than some time. Requests are assigned to
//! the two versions at random. For each mean there is a bound that the true mean exceeds with a probability of at most
//! e^-20. It is the Chernoff bound in its exact form, n kl(mean, bound) = 20, which holds for every n and every such
//! number (Hoeffding 1963; as used by Garivier and Cappé 2011). The canary is worse if its bound on the good side is
//! worse than the active version's bound on the bad side by more than the margin. Latency is tested at every step of a
//! fine grid from the active version's median on. The test thus detects a version that is slower at any quantile with
//! enough requests, and no quantile has to be chosen. There are some 400 bounds per test and 17,280 tests per day: a
//! canary within the margins is rolled back by mistake on less than 1.5 % of days.
//!
//! Requests of one key resemble each other, so they are not independent samples. Keys are therefore divided into 16
//! groups, and the result must also hold without the group that is worst for the canary. So no single user decides the
//! result.
//!
//! ```
//! use sterling_rollout::{KeyHash, seed};
//!
//! let key = KeyHash::of(b"user-7", seed("shop", 8));
//! assert!(key.is_within(1.0) && !key.is_within(0.0));
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod judge;
mod key_hash;
mod run;
mod setting;
#[cfg(test)]
mod tests;
mod watch;
mod window;

pub use judge::{Verdict, WorseMetric};
pub use key_hash::{KeyHash, seed};
pub use run::{CanaryRun, ShadowRun, TrafficNow, rolled_back};
pub use setting::{Canary, CanaryMargins, Shadow, Sticky, StopRequest, Stopped, Traffic, TrafficTarget};
pub use watch::{BothSeen, Side, SideSeen};
