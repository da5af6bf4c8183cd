//! TLS between a router and its servers, where the build has it (feature `tls`) and the configuration names an authority.

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

/// By whom servers are known, and how the router shows who it is. The files are read at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServersTls {
    /// Authorities as PEM, of one of which every server must have a certificate for the host by which it is named; without it servers
    /// are asked in plain HTTP.
    pub ca: Option<PathBuf>,
    /// The router's certificate and those between it and its authority, as PEM, for servers that ask for one (`tls.client_ca`).
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, as PEM.
    pub key: Option<PathBuf>,
}

impl ServersTls {
    /// Authorities, with certificate and key of the router where it has some; nothing where TLS is not asked for.
    ///
    /// # Errors
    /// `Invalid` where one of them stands without the others.
    fn files(&self) -> Result<Option<Files<'_>>> {
        match (&self.ca, &self.certificate, &self.key) {
            (None, None, None) => Ok(None),
            (Some(ca), None, None) => Ok(Some((ca, None))),
            (Some(ca), Some(certificate), Some(key)) => Ok(Some((ca, Some((certificate, key))))),
            (None, ..) => Err(Error::invalid("tls.certificate: expected `tls.ca` beside it")),
            (_, Some(_), None) => Err(Error::invalid("tls.certificate: expected `tls.key` beside it")),
            (_, None, Some(_)) => Err(Error::invalid("tls.key: expected `tls.certificate` beside it")),
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
        for (wrong, expected) in [
            (of("", "a", "b"), "expected `tls.ca`"),
            (of("a", "b", ""), "expected `tls.key`"),
            (of("a", "", "b"), "expected `tls.certificate`"),
        ] {
            assert!(wrong.as_ref().is_err_and(|e| e.contains(expected)), "{wrong:?}");
        }
        assert!(of("/nowhere/ca.pem", "", "").is_err());
    }
}
