//! Substitute in builds without TLS.

use std::io;

use tokio::net::TcpStream;

use super::ServersTls;
use sterling_core::error::{Error, Result};

/// Uninhabited type.
pub(in crate::route) enum Connector {}

impl Connector {
    /// Returns `None` if no TLS is configured.
    ///
    /// # Errors
    /// `Unsupported` if TLS is configured; `Invalid` if the options are inconsistent.
    pub(in crate::route) fn open(options: &ServersTls) -> Result<Option<Self>> {
        match options.files()? {
            None => Ok(None),
            Some(_) => {
                Err(Error::unsupported("tls: this program was built without TLS, build it with `--features tls`"))
            }
        }
    }

    pub(in crate::route) async fn secure(&self, _: &str, _: TcpStream) -> io::Result<TcpStream> {
        match *self {}
    }
}
