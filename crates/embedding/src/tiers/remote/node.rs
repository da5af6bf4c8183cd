//! One node of the cluster: its connection, made when first needed, and its breaker.

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

/// How long a node may take to answer where no request waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// A node. All requests share one connection, on which they are pipelined.
#[derive(Debug)]
pub(super) struct ClusterNode {
    pub(super) address: Address,
    pub(super) breaker: Breaker,
    /// Why it does not answer, while its breaker is open.
    pub(super) trouble: ArcSwapOption<String>,
    client: Client,
    connect_timeout: Duration,
    connection: ArcSwapOption<MultiplexedConnection>,
    connecting: tokio::sync::Mutex<()>,
}

impl ClusterNode {
    /// A node at the address, with the user and password of `like`; nothing is sent yet.
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

    /// Sends the commands in one write and waits for all replies; a command's own error is among the values. The caller
    /// bounds the time.
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

    /// Asks on behalf of nobody who waits for rows.
    ///
    /// # Errors
    /// `Unavailable` with the node where it does not answer.
    pub(super) async fn answer(&self, question: &Pipeline) -> Result<Vec<Value>> {
        match tokio::time::timeout(PATIENCE, self.ask(question)).await {
            Ok(Ok(replies)) => Ok(replies),
            Ok(Err(e)) => Err(Error::unavailable(format!("node {}: {e}", self.address))),
            Err(_) => Err(Error::unavailable(format!("node {} does not answer", self.address))),
        }
    }

    /// Drops the connection, so that the next request makes a new one.
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
        // A replica answers reads only after this; to a primary it means nothing, and a provider may refuse it.
        connection.send_packed_command(&cmd("READONLY")).await?;
        let connection = Arc::new(connection);
        self.connection.store(Some(connection.clone()));
        Ok(connection)
    }
}

/// An error in the server's own words, such as `NOAUTH Authentication required.`
pub(super) fn words(error: &ServerError) -> String {
    format!("{} {}", error.code(), error.details().unwrap_or_default())
}
