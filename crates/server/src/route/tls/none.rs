//! A build without TLS.

use std::io;

use tokio::net::TcpStream;

use super::ServersTls;
use sterling_core::error::{Error, Result};

/// Never there.
pub(in crate::route) enum Connector {}

impl Connector {
    /// Nothing, where nothing is asked for.
    ///
    /// # Errors
    /// `Unsupported` where TLS is asked for; `Invalid` where the options do not go together.
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
