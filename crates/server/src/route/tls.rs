//! TLS between a router and its servers, if the build has it (feature `tls`) and the configuration names an authority.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};

#[cfg(feature = "tls")]
mod rustls;
#[cfg(feature = "tls")]
pub(super) use rustls::Connector;
#[cfg(not(feature = "tls"))]
mod none;
#[cfg(not(feature = "tls"))]
pub(super) use none::Connector;

/// Certificates for TLS between a router and its servers. The files are read once, at startup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServersTls {
    /// PEM file of authorities, one of which must have signed the certificate of each server for its configured host name.
    /// Without it, the router uses plain HTTP.
    pub ca: Option<PathBuf>,
    /// PEM file of the router's certificate chain, for servers that require client certificates (`tls.client_ca`).
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    pub key: Option<PathBuf>,
}

impl ServersTls {
    /// Returns the authorities, and the router's certificate and key if configured; `None` without TLS.
    ///
    /// # Errors
    /// `Invalid` if one of the files is missing.
    fn files(&self) -> Result<Option<Files<'_>>> {
        match (&self.ca, &self.certificate, &self.key) {
            (None, None, None) => Ok(None),
            (Some(ca), None, None) => Ok(Some((ca, None))),
            (Some(ca), Some(certificate), Some(key)) => Ok(Some((ca, Some((certificate, key))))),
            (None, ..) => Err(Error::invalid("tls.certificate: set without `tls.ca`, expected both")),
            (_, Some(_), None) => Err(Error::invalid("tls.certificate: set without `tls.key`, expected both")),
            (_, None, Some(_)) => Err(Error::invalid("tls.key: set without `tls.certificate`, expected both")),
        }
    }
}

type Files<'a> = (&'a PathBuf, Option<(&'a PathBuf, &'a PathBuf)>);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn files_that_do_not_go_together_are_named() {
        let of = |ca: &str, certificate: &str, key: &str| {
            let path = |text: &str| Some(PathBuf::from(text)).filter(|path| !path.as_os_str().is_empty());
            let options = ServersTls { ca: path(ca), certificate: path(certificate), key: path(key) };
            Connector::open(&options).map(|found| found.is_some()).map_err(|e| e.to_string())
        };
        assert_eq!(of("", "", ""), Ok(false));
        for (invalid, expected) in [
            (of("", "a", "b"), "set without `tls.ca`"),
            (of("a", "b", ""), "set without `tls.key`"),
            (of("a", "", "b"), "set without `tls.certificate`"),
        ] {
            assert!(invalid.as_ref().is_err_and(|e| e.contains(expected)), "{invalid:?}");
        }
        assert!(of("/nowhere/ca.pem", "", "").is_err());
    }
}
