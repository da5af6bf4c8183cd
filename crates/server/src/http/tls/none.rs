//! A build without TLS.

use std::io;

use tokio::net::TcpStream;

use super::{TlsOptions, Validity};
use sterling_core::error::{Error, Result};

/// Never there.
pub enum Tls {}

impl Tls {
    /// Nothing, where nothing is asked for.
    ///
    /// # Errors
    /// `Unsupported` where TLS is asked for; `Invalid` where the options do not fit together.
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
