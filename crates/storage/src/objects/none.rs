//! What a build without object stores says of them.

use std::sync::Arc;

use super::Objects;
use sterling_core::error::{Error, Result};

/// Refuses.
///
/// # Errors
/// `Unsupported`.
pub fn open(url: &str) -> Result<Arc<dyn Objects>> {
    Err(Error::unsupported(format!(
        "store {url}: this build knows folders alone, the feature `object-store` adds buckets"
    )))
}
