//! Stub of the object store for builds without the feature `object-store`.

use std::sync::Arc;

use super::Objects;
use sterling_core::error::{Error, Result};

/// Always fails in this build.
///
/// # Errors
/// `Unsupported`.
pub fn open(url: &str) -> Result<Arc<dyn Objects>> {
    Err(Error::unsupported(format!(
        "store {url}: this build supports folders only, the feature `object-store` adds buckets"
    )))
}
