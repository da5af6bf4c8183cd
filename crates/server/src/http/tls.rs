//! TLS in front of HTTP, if the build has it (feature `tls`) and the configuration names a certificate.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};

#[cfg(feature = "tls")]
mod rustls;
#[cfg(feature = "tls")]
pub use rustls::Tls;
#[cfg(not(feature = "tls"))]
mod none;
#[cfg(not(feature = "tls"))]
pub use none::Tls;

/// TLS of the server and its clients, in builds with the feature `tls` (part of `full`). The files are reloaded
/// on change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsOptions {
    /// PEM file of the server's certificate chain; without it the server speaks plain HTTP.
    #[schema(value_type = Option<String>)]
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// PEM file of authorities, one of which must have signed the certificate of each client; without it clients
    /// need none.
    #[schema(value_type = Option<String>)]
    pub client_ca: Option<PathBuf>,
}

/// Validity of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::http) struct Validity {
    pub(in crate::http) from: u64,
    pub(in crate::http) until: u64,
}

/// Warn if less than this share of a certificate's validity period is left.
const LIFE_LEFT_MIN: f64 = 0.1;

impl Validity {
    /// Returns the remaining share of the validity period; below 0 after expiry.
    pub(in crate::http) fn life_left(self, now: u64) -> f64 {
        (self.until as f64 - now as f64) / (self.until.saturating_sub(self.from).max(1)) as f64
    }

    /// Returns a warning about expiry, if one is due.
    pub(in crate::http) fn warning(self, now: u64) -> Option<String> {
        let hours = self.until.abs_diff(now) / 3600;
        match self.life_left(now) {
            left if left <= 0.0 => {
                Some(format!("the certificate of this server expired {hours} hours ago: clients reject it"))
            }
            left if left < LIFE_LEFT_MIN => Some(format!("the certificate of this server expires in {hours} hours")),
            _ => None,
        }
    }
}

impl TlsOptions {
    /// Returns certificate and key, if TLS is configured.
    ///
    /// # Errors
    /// `Invalid` if only some of the options are set.
    fn pair(&self) -> Result<Option<(&PathBuf, &PathBuf)>> {
        match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) if self.client_ca.is_none() => Ok(None),
            (None, None) => {
                Err(Error::invalid("tls.client_ca: set without `tls.certificate` and `tls.key`, expected all three"))
            }
            (Some(_), None) => Err(Error::invalid("tls.certificate: set without `tls.key`, expected both")),
            (None, Some(_)) => Err(Error::invalid("tls.key: set without `tls.certificate`, expected both")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_reported_in_the_last_tenth_of_their_validity() {
        let (day, validity) = (86_400, Validity { from: 1_000_000_000, until: 1_000_000_000 + 90 * 86_400 });
        let message = |days: u64| validity.warning(validity.from + days * day);
        assert_eq!((message(0), message(80)), (None, None));
        assert_eq!(message(82).as_deref(), Some("the certificate of this server expires in 192 hours"));
        assert_eq!(
            message(91).as_deref(),
            Some("the certificate of this server expired 24 hours ago: clients reject it")
        );
        assert_eq!(validity.life_left(validity.from), 1.0);
        // A certificate with a validity of one hour is replaced every few minutes.
        assert_eq!(Validity { from: 0, until: 3600 }.warning(3000), None);
    }
}
