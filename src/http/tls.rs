//! TLS in front of HTTP, where the build has it (feature `tls`) and the configuration names a certificate.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{Error, Result};

#[cfg(feature = "tls")]
mod rustls;
#[cfg(feature = "tls")]
pub use rustls::Tls;
#[cfg(not(feature = "tls"))]
mod none;
#[cfg(not(feature = "tls"))]
pub use none::Tls;

/// The certificate of the server, and whose certificates clients must have. The files are read again when they change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsOptions {
    /// The server's certificate and those between it and its authority, as PEM; without it the server speaks plain HTTP.
    #[schema(value_type = Option<String>)]
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, as PEM.
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// Authorities as PEM, of one of which every client must have a certificate; without it clients need none.
    #[schema(value_type = Option<String>)]
    pub client_ca: Option<PathBuf>,
}

impl TlsOptions {
    /// Certificate and key, where TLS is asked for.
    ///
    /// # Errors
    /// `Invalid` where one of them stands without the other.
    fn pair(&self) -> Result<Option<(&PathBuf, &PathBuf)>> {
        match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) if self.client_ca.is_none() => Ok(None),
            (None, None) => Err(Error::invalid("tls.client_ca: expected `tls.certificate` and `tls.key` beside it")),
            (Some(_), None) => Err(Error::invalid("tls.certificate: expected `tls.key` beside it")),
            (None, Some(_)) => Err(Error::invalid("tls.key: expected `tls.certificate` beside it")),
        }
    }
}
