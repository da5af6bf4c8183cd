//! The configuration of access.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Who may do what, and where that is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessOptions {
    /// The file of keys, read again when it changes; without it everybody who reaches the server may do everything.
    pub keys: Option<PathBuf>,
    /// An address of their own for calls that take the role `admin`: the main one then has none of them.
    pub admin_listen: Option<SocketAddr>,
    /// The file that calls which change something are appended to, a JSON line each; without it they go to the log alone.
    pub audit_log: Option<PathBuf>,
}
