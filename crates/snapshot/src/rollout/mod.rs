//! How the requests of a model that pin no version are divided among its versions, and when one of these falls behind.
//!
//! All of it but `run` is pure: settings that operators make (`setting`), the place of a key among all keys (`place`), what was seen of two versions
//! in a window (`window`), and whether one is behind the other by more than chance and a margin (`judge`); `run` is a canary or a shadow while it is one.
//! `registry` keeps it beside the versions of a server, `route` beside those of a router's shards, `http` asks it and tells it.
//!
//! **Division.** A key, such as a user's id, has a place between 0 and 1, which is a hash of it, the model and the canary's version. Those
//! below the share are the canary's. So a key stays where it is, at every server; a share that grows keeps all keys that were in it; and
//! the next version has other keys.
//!
//! **Judgement.** Errors, recall and latency are all means of numbers between 0 and 1 (a request failed or not; the share of the exact items
//! that an audited answer lacks; a request took longer than some time or not), of requests that were given to the two versions by
//! chance. For each mean there is a bound that the true one is beyond with a probability of at most e^-20: the Chernoff bound in
//! its exact form, n kl(mean, bound) = 20, which holds for every n and every such number (Hoeffding 1963; as used by Garivier and Cappé
//! 2011). The canary is behind where its bound on the good side is worse than the active version's on the bad side by more than the margin.
//! For latency that is asked of every time of a fine grid from the active version's median on: it sees a version that is slower at
//! any quantile for which there are requests enough, and no quantile need be chosen. There are some 400 bounds at a look and 17,280 looks
//! a day: a canary that is not behind by the margins is taken for one that is on less than 1.5 % of days.
//!
//! That requests of one key resemble each other is no chance of this kind: keys are in 16 groups, and the verdict must hold without the group
//! that speaks most against the canary. No single user decides.

mod judge;
mod place;
mod run;
mod setting;
#[cfg(test)]
mod tests;
mod watch;
mod window;

pub use judge::{Behind, Verdict};
pub use place::{Place, seed};
pub use run::{CanaryRun, ShadowRun, TrafficNow, rolled_back};
pub use setting::{Canary, CanaryMargins, Shadow, Sticky, StopRequest, Stopped, Traffic, TrafficTarget};
pub use watch::{BothSeen, Side, SideSeen, Watch};
