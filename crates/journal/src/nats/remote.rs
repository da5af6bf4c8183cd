//! Access to a stream of the broker.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use async_nats::connection::State as Connection;
use async_nats::header::{HeaderMap, NATS_EXPECTED_LAST_SEQUENCE};
use async_nats::jetstream::context::{Context, PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Info, RawMessageErrorKind, Stream};
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{Client, Event, ServerError};
use futures_util::future::join_all;

use super::message::{Commit, Read};
use super::state::State;
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks::Runtime;

/// Timeout of a request to the broker.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// Number of messages that are requested concurrently when a range is read.
pub(super) const AHEAD: u64 = 128;
/// Time for which the last message of the broker is reported as the reason of failures; longer than the longest wait
/// before a reconnect.
const MESSAGE_LIFETIME: Duration = Duration::from_secs(10);

/// Access to a stream.
#[derive(Clone)]
pub(super) struct Remote {
    pub(super) name: String,
    pub(super) subject: String,
    pub(super) client: Client,
    pub(super) context: Context,
    pub(super) stream: Stream,
    pub(super) said: BrokerMessage,
    /// True if the stream was copied from another stream, so that the headers of its messages do not match.
    pub(super) is_copied: bool,
}

/// Last message that the broker sent on its own, not as a response: missing permissions, or a failed connection.
#[derive(Clone, Debug, Default)]
pub(super) struct BrokerMessage(Arc<Mutex<Option<(Instant, String)>>>);

impl BrokerMessage {
    /// Records an event of the connection.
    pub(super) fn receive(&self, event: &Event) {
        let said = match event {
            Event::Connected => None,
            Event::ServerError(ServerError::Other(what)) => Some(what.clone()),
            Event::ServerError(e) => Some(e.to_string()),
            Event::ClientError(e) => Some(e.to_string()),
            _ => return,
        };
        *locked(&self.0) = said.map(|said| (Instant::now(), said));
    }

    /// Returns the error of a failed operation, with the last message of the broker.
    pub(super) fn unavailable(&self, what: &str, e: impl std::fmt::Display) -> Error {
        let said =
            locked(&self.0).as_ref().filter(|(at, _)| at.elapsed() < MESSAGE_LIFETIME).map(|(_, said)| said.clone());
        let said = said.map_or(String::new(), |said| format!("; the broker reported: {said}"));
        Error::unavailable(format!("{what}: {e}{said}"))
    }
}

/// A position that was once durable, as recorded outside of a stream.
#[derive(Clone, Debug, Default)]
pub(super) struct Noted {
    pub(super) position: u64,
    pub(super) file: PathBuf,
}

impl Noted {
    /// Rejects a stream, described by `what`, if `known` is below the recorded position; `known` is the highest position that the
    /// stream or a version reaches.
    pub(super) fn allows(&self, known: u64, what: &str) -> Result<()> {
        if known >= self.position {
            return Ok(());
        }
        let (position, file) = (self.position, self.file.display());
        Err(Error::unavailable(format!(
            "{what}, expected at least position {position}, which was acknowledged: restore the stream, or merge the \
             updates on a server that still shows them and publish or copy that version here; to continue without the updates, remove the position file ({file})"
        )))
    }
}

impl Remote {
    /// Reads the state of the stream to follow it after a position; writes the first message of a new stream.
    ///
    /// # Errors
    /// `Unavailable` if the stream ends before the recorded position; `Corrupt` if the stream's position cannot be determined.
    pub(super) async fn begin(&mut self, after: u64, noted: &Noted) -> Result<State> {
        let mut reported = self.info().await?;
        if reported.state.last_sequence == 0 {
            noted.allows(after, "the stream holds no message")?;
            tracing::warn!(
                stream = self.name,
                position = after,
                "the stream is new and begins after this position: if it should hold updates, stop the server and restore it"
            );
            let first =
                Commit { first: after + 1, number: number(), before: 0, tries: 0, needs: 0, records: Vec::new() };
            match self.publish(&first, 0).await {
                // If two servers begin a stream at the same time, one succeeds.
                Ok(_) => {}
                Err(e) if e.kind() == PublishErrorKind::WrongLastSequence => {}
                Err(e) => return Err(self.unavailable("publishing the first message", e)),
            }
            reported = self.info().await?;
        }
        let (from, to) = (reported.state.first_sequence, reported.state.last_sequence);
        let empty =
            || Error::corrupt("the stream has no more journal messages, so its position is unknown; delete the stream");
        let first = self.first(from, to).await?.ok_or_else(empty)?;
        let last = self.last(first.0, to).await?.ok_or_else(empty)?;
        let mut state = State::of((first.0, &first.1), (last.0, &last.1), to);
        noted.allows(after.max(state.position), &format!("the stream ends at position {}", state.position))?;
        state.update_from_info(&reported);
        Ok(state)
    }

    /// Returns the first commit (a message that a journal wrote) in a range of messages, with the commit's sequence number. If
    /// the first commit is a copy, the complete stream is a copy.
    async fn first(&mut self, from: u64, to: u64) -> Result<Option<(u64, Commit)>> {
        let mut next = from;
        while next <= to {
            let end = (next + AHEAD).min(to + 1);
            for (sequence, read) in (next..end).zip(self.read_all(next..end).await?) {
                self.is_copied = matches!(read, Some(Read::Copy(_)));
                if let Some(Read::Original(commit) | Read::Copy(commit)) = read {
                    return Ok(Some((sequence, commit)));
                }
            }
            next = end;
        }
        Ok(None)
    }

    /// Returns the last commit in a range of messages, with the commit's sequence number.
    async fn last(&self, from: u64, to: u64) -> Result<Option<(u64, Commit)>> {
        let mut end = to + 1;
        let mut ahead = 1;
        while end > from {
            let next = end.saturating_sub(ahead).max(from);
            let read: Vec<_> = (next..end).zip(self.read_all(next..end).await?).collect();
            for (sequence, read) in read.into_iter().rev() {
                if let Some(Ok(commit)) = read.map(|read| read.commit(self.is_copied)) {
                    return Ok(Some((sequence, commit)));
                }
            }
            (end, ahead) = (next, AHEAD);
        }
        Ok(None)
    }

    /// Returns the broker's information about the stream.
    ///
    /// # Errors
    /// `NotFound` if the stream does not exist, `Unavailable` if the broker does not answer.
    pub(super) async fn info(&self) -> Result<Info> {
        self.connected()?;
        self.stream.get_info().await.map_err(|e| match refusal(&e) {
            Some(ErrorCode::STREAM_NOT_FOUND) => Error::not_found("the broker has no such stream"),
            _ => self.unavailable("the state of the stream", e),
        })
    }

    /// Publishes a commit on condition that the stream's last message is `after`; returns the sequence number of the commit.
    pub(super) async fn publish(&self, commit: &Commit, after: u64) -> std::result::Result<u64, PublishError> {
        let message = PublishMessage::build()
            .payload(commit.encode().into())
            .message_id(format!("{:032x}", commit.number))
            .expected_last_sequence(after);
        Ok(self.context.send_publish(self.subject.clone(), message).await?.await?.sequence)
    }

    /// Returns an error if no broker is connected, because the client would only buffer the request.
    pub(super) fn connected(&self) -> Result<()> {
        match self.client.connection_state() {
            Connection::Connected => Ok(()),
            _ => Err(self.unavailable("connection", "no broker is connected")),
        }
    }

    /// Returns the commit of a message, or the reason to skip it; `None` if the stream does not have it.
    pub(super) async fn read(&self, sequence: u64) -> Result<Option<std::result::Result<Commit, String>>> {
        Ok(self.message(sequence).await?.map(|read| read.commit(self.is_copied)))
    }

    /// Returns a message; `None` if the stream does not have it.
    async fn message(&self, sequence: u64) -> Result<Option<Read>> {
        self.connected()?;
        match self.stream.get_raw_message(sequence).await {
            Ok(message) => {
                let invalid = |why| Error::corrupt(format!("message {sequence}: {why}"));
                Read::of(&message.payload, sequence, expected(&message.headers)).map(Some).map_err(invalid)
            }
            Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
            Err(e) => Err(self.unavailable("reading a message", e)),
        }
    }

    /// Returns messages in their order.
    async fn read_all(&self, messages: std::ops::Range<u64>) -> Result<Vec<Option<Read>>> {
        join_all(messages.map(|sequence| self.message(sequence))).await.into_iter().collect()
    }

    pub(super) fn unavailable(&self, what: &str, e: impl std::fmt::Display) -> Error {
        self.said.unavailable(what, e)
    }
}

/// Returns the sequence number after which a message was published.
fn expected(headers: &HeaderMap) -> Option<u64> {
    headers.get(NATS_EXPECTED_LAST_SEQUENCE)?.as_str().parse().ok()
}

/// Returns the error code of a broker that rejected an operation, which then had no effect.
pub(super) fn refusal(e: &(dyn std::error::Error + 'static)) -> Option<ErrorCode> {
    let said = e.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
    said.map(jetstream::Error::error_code)
}

/// Returns a unique commit number.
pub(super) fn number() -> u128 {
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    half() << 64 | half()
}

/// Returns the error text for a commit that does not continue the previous one.
pub(super) fn discontinuity_message(sequence: u64) -> String {
    format!("message {sequence} does not continue the message before it: the broker has lost acknowledged messages")
}

/// Runs a future on the streams' thread and blocks for its result.
pub(super) fn wait<T: Send + 'static>(
    threads: &Runtime,
    what: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    may_block();
    let (tell, reported) = mpsc::sync_channel(1);
    threads.spawn(async move {
        // The caller may have stopped waiting.
        let _ = tell.send(what.await);
    });
    reported.recv().map_err(|_| Error::internal("the task that waits for the stream panicked; this is a defect"))?
}
