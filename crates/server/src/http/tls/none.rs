//! Substitute in builds without TLS.

use std::io;

use tokio::net::TcpStream;

use super::{TlsOptions, Validity};
use sterling_core::error::{Error, Result};

/// Uninhabited type.
pub enum Tls {}

impl Tls {
    /// Returns `None` if no TLS is configured.
    ///
    /// # Errors
    /// `Unsupported` if TLS is configured; `Invalid` if the options are inconsistent.
    pub fn open(options: &TlsOptions) -> Result<Option<Self>> {
        match options.pair()? {
            None => Ok(None),
            Some(_) => {
                Err(Error::unsupported("tls: this program was built without TLS, build it with `--features tls`"))
            }
        }
    }

    pub(in crate::http) async fn accept(&self, _: TcpStream) -> io::Result<(TcpStream, bool)> {
        match *self {}
    }

    pub(in crate::http) fn validity(&self) -> Option<Validity> {
        match *self {}
    }

    pub(in crate::http) fn reload(&self) {
        match *self {}
    }
}
