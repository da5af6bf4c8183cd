//! One node of the cluster: its connection, created on demand, and its breaker.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, Pipeline, RedisResult, ServerError, Value, cmd,
};

use super::slots::Address;
use crate::tiers::breaker::Breaker;
use sterling_core::error::{Error, Result};

/// Timeout of a node's answer outside of requests.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A node. All requests share one pipelined connection.
#[derive(Debug)]
pub(super) struct ClusterNode {
    pub(super) address: Address,
    pub(super) breaker: Breaker,
    /// Reason of the node's failure, while its circuit breaker is open.
    pub(super) trouble: ArcSwapOption<String>,
    client: Client,
    connect_timeout: Duration,
    connection: ArcSwapOption<MultiplexedConnection>,
    connecting: tokio::sync::Mutex<()>,
}

impl ClusterNode {
    /// Creates a node at the address, with the credentials of `like`, without connecting.
    pub(super) fn new(address: Address, like: &ConnectionInfo, connect_timeout: Duration) -> RedisResult<Self> {
        let info = like.clone().set_addr(ConnectionAddr::Tcp(address.host.clone(), address.port));
        Ok(ClusterNode {
            address,
            breaker: Breaker::default(),
            trouble: ArcSwapOption::empty(),
            client: Client::open(info)?,
            connect_timeout,
            connection: ArcSwapOption::empty(),
            connecting: tokio::sync::Mutex::new(()),
        })
    }

    /// Sends the commands in one write and waits for all replies; errors of single commands are among the returned values. The
    /// caller enforces the timeout.
    pub(super) async fn ask(&self, pipeline: &Pipeline) -> RedisResult<Vec<Value>> {
        let connection = self.connection().await?;
        let mut handle = MultiplexedConnection::clone(&connection);
        let replies = handle.send_packed_commands(pipeline, 0, pipeline.len()).await;
        if replies.is_err() {
            let current = self.connection.load();
            if current.as_ref().is_some_and(|c| Arc::ptr_eq(c, &connection)) {
                self.connection.compare_and_swap(&*current, None);
            }
        }
        replies
    }

    /// Sends commands outside of lookups, with a long timeout.
    ///
    /// # Errors
    /// `Unavailable` with the node if it does not answer.
    pub(super) async fn answer(&self, question: &Pipeline) -> Result<Vec<Value>> {
        match tokio::time::timeout(ADMIN_TIMEOUT, self.ask(question)).await {
            Ok(Ok(replies)) => Ok(replies),
            Ok(Err(e)) => Err(Error::unavailable(format!("node {}: {e}", self.address))),
            Err(_) => Err(Error::unavailable(format!("node {} does not answer", self.address))),
        }
    }

    /// Drops the connection, so that the next request creates a new one.
    pub(super) fn disconnect(&self) {
        self.connection.store(None);
    }

    async fn connection(&self) -> RedisResult<Arc<MultiplexedConnection>> {
        if let Some(connection) = self.connection.load_full() {
            return Ok(connection);
        }
        let _one = self.connecting.lock().await;
        if let Some(connection) = self.connection.load_full() {
            return Ok(connection);
        }
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(self.connect_timeout)).set_response_timeout(None);
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        // Replicas answer reads only after `READONLY`. The command has no effect on a primary, and a provider may reject it.
        connection.send_packed_command(&cmd("READONLY")).await?;
        let connection = Arc::new(connection);
        self.connection.store(Some(connection.clone()));
        Ok(connection)
    }
}

/// Returns an error in the server's own words, such as `NOAUTH Authentication required.`
pub(super) fn words(error: &ServerError) -> String {
    format!("{} {}", error.code(), error.details().unwrap_or_default())
}
