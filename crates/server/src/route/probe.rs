//! Asking a server or a router what it says of itself, as `sterling doctor` does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::time::Instant;

use super::client::Client;
use super::tls::{Connector, ServersTls};
use sterling_core::error::Result;

/// Asks servers in plain HTTP, or by TLS where there is an authority to know them by.
pub struct Probe(Option<Arc<Connector>>);

impl Probe {
    /// With these authorities; in plain HTTP without any.
    ///
    /// # Errors
    /// What is wrong with the certificates that the options name.
    pub fn open(options: &ServersTls) -> Result<Self> {
        Ok(Probe(Connector::open(options)?.map(Arc::new)))
    }

    /// Whether it asks by TLS.
    pub fn is_secure(&self) -> bool {
        self.0.is_some()
    }

    /// The status and the body that a path answers at a server, which must have a certificate for the host where TLS is asked for.
    ///
    /// # Errors
    /// `Unavailable` where there is no connection or it breaks; `DeadlineExceeded`.
    pub async fn get(
        &self,
        (address, host): (SocketAddr, &str),
        key: Option<&str>,
        path: &str,
        wait: Duration,
    ) -> Result<(u16, Bytes)> {
        let client = Client::new(address, host, key.unwrap_or_default(), self.0.clone());
        client.look(path, Instant::now() + wait).await
    }
}
