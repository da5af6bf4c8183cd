//! Delta of a served snapshot: the updates that are not merged yet (a memtable in other systems).
//!
//! An update ([`Update`]) is a record of a model's journal. Each version in memory tails the journal separately, from the
//! position that its snapshot contains: [`Fresh`] applies updates in order and creates views of the result. The result depends
//! only on the snapshot and the updates up to a position, so a restart, another version or another machine gives the same
//! answers.
//!
//! Updates hold inputs: attributes, features and vectors as they were sent. Each version runs the inputs through its own item
//! tower.

mod backlog;
mod calls;
mod columns;
mod early;
mod embed;
mod join;
mod make;
mod merges;
mod state;
mod tail;
mod update;
mod update_log;
mod validate;

pub use backlog::Backlog;
pub use calls::Call;
pub use columns::unscorable;
pub use merges::{MergeCallback, MergeUnderWay, MergeWanted, Merged, Merges};
pub use state::{Fresh, IncompatibleUpdate};
pub use tail::Updating;
pub use update::{CallAnswer, Put, Update, UpdateRejection};
pub use update_log::{ModelUpdates, UpdateFeeds};
pub use validate::update_of;
