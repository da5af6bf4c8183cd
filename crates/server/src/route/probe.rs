//! Requests the state of a server or router, for `sterling doctor`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::time::Instant;

use super::client::Client;
use super::tls::{Connector, ServersTls};
use sterling_core::error::Result;

/// HTTP client for servers: plain, or with TLS if an authority is configured.
pub struct Probe(Option<Arc<Connector>>);

impl Probe {
    /// Creates a client with these authorities; without any it uses plain HTTP.
    ///
    /// # Errors
    /// Fails if the configured certificates are invalid.
    pub fn open(options: &ServersTls) -> Result<Self> {
        Ok(Probe(Connector::open(options)?.map(Arc::new)))
    }

    /// Returns whether the client uses TLS.
    pub fn is_secure(&self) -> bool {
        self.0.is_some()
    }

    /// Requests a path of a server and returns status and body. With TLS, the server's certificate must be valid for the host.
    ///
    /// # Errors
    /// `Unavailable` if the connection fails or breaks; `DeadlineExceeded`.
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
