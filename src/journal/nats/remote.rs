//! A stream of the broker, as it is read and written.

use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as Connection;
use async_nats::jetstream::context::{Context, PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{RawMessageErrorKind, Stream};
use tokio::runtime::{Handle, Runtime};

use super::message::Commit;
use super::state::State;
use crate::error::{Error, Result};

/// How long the broker has to answer.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// Messages that are asked for at a time where many are to be read.
pub(super) const AHEAD: u64 = 128;

/// The thread that streams are kept on.
pub(super) struct Threads {
    runtime: Option<Runtime>,
    pub(super) handle: Handle,
}

impl Threads {
    /// Of a runtime.
    pub(super) fn of(runtime: Runtime) -> Self {
        let handle = runtime.handle().clone();
        Threads { runtime: Some(runtime), handle }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Whoever lets go of it last may be a thread that must not wait.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// A stream, as it is read and written.
#[derive(Clone)]
pub(super) struct Remote {
    pub(super) name: String,
    pub(super) subject: String,
    pub(super) client: Client,
    pub(super) context: Context,
    pub(super) stream: Stream,
}

impl Remote {
    /// How far the stream is; a new one gets its first message.
    pub(super) async fn begin(&self, after: u64) -> Result<State> {
        let mut told = self.stream.get_info().await.map_err(|e| unavailable("its state", e))?.state;
        if told.last_sequence == 0 {
            let first =
                Commit { first: after + 1, number: number(), before: 0, tries: 0, needs: 0, records: Vec::new() };
            match self.publish(&first, 0).await {
                // Of two servers that begin it one does.
                Ok(_) => {}
                Err(e) if e.kind() == PublishErrorKind::WrongLastSequence => {}
                Err(e) => return Err(unavailable("its first message", e)),
            }
            told = self.stream.get_info().await.map_err(|e| unavailable("its state", e))?.state;
        }
        let (first, last) = (self.read(told.first_sequence).await?, self.read(told.last_sequence).await?);
        let (Some(first), Some(last)) = (first, last) else {
            return Err(Error::corrupt("it holds no message any more, so that nobody knows its position; delete it"));
        };
        Ok(State::of((told.first_sequence, &first), (told.last_sequence, &last)))
    }

    /// Publishes a commit that is to follow a message of the stream.
    pub(super) async fn publish(&self, commit: &Commit, after: u64) -> std::result::Result<u64, PublishError> {
        let message = PublishMessage::build()
            .payload(commit.encode().into())
            .message_id(format!("{:032x}", commit.number))
            .expected_last_sequence(after);
        Ok(self.context.send_publish(self.subject.clone(), message).await?.await?.sequence)
    }

    /// Refuses what would only wait in memory for a connection.
    pub(super) fn connected(&self) -> Result<()> {
        match self.client.connection_state() {
            Connection::Connected => Ok(()),
            _ => Err(Error::unavailable("no connection to a broker")),
        }
    }

    /// The commit of a message; none where the stream does not hold it.
    pub(super) async fn read(&self, sequence: u64) -> Result<Option<Commit>> {
        self.connected()?;
        match self.stream.get_raw_message(sequence).await {
            Ok(message) => {
                let wrong = |why| Error::corrupt(format!("message {sequence}: {why}"));
                Commit::decode(&message.payload).map(Some).map_err(wrong)
            }
            Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
            Err(e) => Err(unavailable("a message", e)),
        }
    }
}

/// What no other commit has.
pub(super) fn number() -> u128 {
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    half() << 64 | half()
}

/// Why a message that comes after another one is not the one that was written after it.
pub(super) fn does_not_follow(sequence: u64) -> String {
    format!(
        "message {sequence} was not written after the one before it: the broker has lost messages that it acknowledged"
    )
}

pub(super) fn unavailable(what: &str, e: impl std::fmt::Display) -> Error {
    Error::unavailable(format!("{what}: {e}"))
}

/// What comes of something on the streams' thread, for another one.
pub(super) fn wait<T: Send + 'static>(
    threads: &Threads,
    what: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (tell, told) = mpsc::sync_channel(1);
    threads.handle.spawn(async move {
        // Nobody may wait any more.
        let _ = tell.send(what.await);
    });
    told.recv().map_err(|_| Error::internal("what waits for the stream broke; this is a defect"))?
}
