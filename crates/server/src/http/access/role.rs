//! Roles of keys, and the data and sockets of calls.

use serde::{Deserialize, Serialize};

/// Permission that a call requires and a key grants; each role includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Requirement of calls that need no key: probes, the API description, the console page without data. Keys cannot
    /// grant this role.
    #[serde(skip)]
    Open,
    /// Retrievals and all other calls without changes.
    Read,
    /// Changes of items.
    Write,
    /// All calls, such as changes of versions and labels, and merges.
    Admin,
}

impl Role {
    /// Returns the name, as in a file of keys.
    pub fn name(self) -> &'static str {
        match self {
            Role::Open => "open",
            Role::Read => "read",
            Role::Write => "write",
            Role::Admin => "admin",
        }
    }
}

/// Data that a call shows or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataScope {
    /// The model in the path.
    Model,
    /// The models that the caller may see.
    Visible,
    /// The whole server: a key for some models does not suffice.
    Server,
}

/// Socket that accepted a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPoint {
    /// Socket for requests.
    Main,
    /// Socket for all calls, if administrators have a separate one.
    Admin,
}
