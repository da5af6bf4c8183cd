//! Configuration of access.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::address::read_any_address;

/// Access keys and audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AccessOptions {
    /// File of access keys, written by `sterling key` and reloaded on change. Without a file, every client may make
    /// every call.
    #[schema(value_type = Option<String>)]
    pub keys: Option<PathBuf>,
    /// Separate address for calls of the role `admin`; the main address then does not answer them.
    #[serde(deserialize_with = "read_any_address")]
    #[schema(value_type = Option<String>)]
    pub admin_listen: Option<SocketAddr>,
    /// File that records calls that change something, one JSON line each. Without a file, these calls only appear in
    /// the log.
    #[schema(value_type = Option<String>)]
    pub audit_log: Option<PathBuf>,
}
