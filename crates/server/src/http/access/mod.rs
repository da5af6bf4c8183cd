//! Who may do what: keys with roles, asked for by every call of the table; rates; the audit log of what was changed.
//!
//! A server without a file of keys answers everybody, as far as its socket reaches. With one, each call takes a key
//! (`Authorization: Bearer KEY`) whose role is at least that of the call and whose models hold the call's. Keys are random and kept as
//! their SHA-256; what comes is held against all of them in constant time, and whatever is wrong with it gets one answer.

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
pub(super) use record::Asked;
pub(super) use role::Reach;
pub use role::{Door, Role};
pub(super) use site::check_site;
