//! What keys may do, and what calls reach.

use serde::{Deserialize, Serialize};

/// The right that a call takes and a key has; each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// None: probes, the API's description, the page without its data. No key has this role.
    #[serde(skip)]
    Open,
    /// Retrievals and all else that changes nothing.
    Read,
    /// Changes of items too.
    Write,
    /// Everything: versions, labels and merges too.
    Admin,
}

impl Role {
    /// The name, as in a file of keys.
    pub fn name(self) -> &'static str {
        match self {
            Role::Open => "open",
            Role::Read => "read",
            Role::Write => "write",
            Role::Admin => "admin",
        }
    }
}

/// Whose data a call shows or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// That of the model in its path.
    Model,
    /// That of the models which its caller may see.
    Visible,
    /// That of the whole server: a key for some models is not enough.
    Server,
}

/// Which socket a connection came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The one for requests.
    Main,
    /// The one for all calls, where those of administrators have a socket of their own.
    Admin,
}
