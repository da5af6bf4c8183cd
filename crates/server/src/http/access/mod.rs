//! Access control: keys with roles, which every call checks; rates; the audit log of changes.
//!
//! Without a file of keys, a server answers every client that can reach its socket. With a file of keys, each call
//! needs a key (`Authorization: Bearer KEY`) whose role is at least the call's and whose models include the call's.
//! Keys are random and stored as SHA-256. A received key is compared with all entries in constant time, and every
//! invalid key gets the same answer.

mod guard;
mod keys;
mod options;
mod rate;
mod record;
mod role;
mod site;
#[cfg(test)]
mod tests;

pub use guard::{AccessControl, Caller};
pub(super) use guard::{Needs, secret_in, secret_of};
pub use keys::{NewKey, check_keys, new_key};
pub use options::AccessOptions;
pub(super) use record::LoggedCall;
pub(super) use role::DataScope;
pub use role::{EntryPoint, Role};
pub(super) use site::check_site;
