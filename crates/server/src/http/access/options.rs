//! The configuration of access.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::address::read_any_address;

/// Who may do what, and where that is written down (`docs/SECURITY.md`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AccessOptions {
    /// The file of keys that `sterling key` wrote, read again when it changes; without it everybody who reaches the server may do everything.
    #[schema(value_type = Option<String>)]
    pub keys: Option<PathBuf>,
    /// An address of their own for calls that take the role `admin`: the main one then has none of them.
    #[serde(deserialize_with = "read_any_address")]
    #[schema(value_type = Option<String>)]
    pub admin_listen: Option<SocketAddr>,
    /// The file that calls which change something are appended to, a JSON line each; without it they go to the log alone.
    #[schema(value_type = Option<String>)]
    pub audit_log: Option<PathBuf>,
}
