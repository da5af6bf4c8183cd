//! Task that maintains a stream: it commits appends (`commit`) and reads commits of other servers.

mod commit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Message, Subscriber};
use futures_util::future::join_all;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc::Receiver;
use tokio::time::{sleep, timeout_at};

use super::message::{Attempt, Commit, tried_for};
use super::remote::{AHEAD, Noted, Remote, discontinuity_message};
use super::state::State;
use crate::shared::Shared;
use crate::{Append, Done};
use sterling_core::error::{Error, Kind, Result};

/// Polling interval of the stream's state if no notification arrives.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest and longest wait for the message that a notification announces; each wait doubles the previous one.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LAST_WAIT: Duration = Duration::from_millis(64);
/// Notifications that are buffered before the stream is read.
pub(super) const RINGS_MAX: usize = 1024;
/// Maximum time for which this server yields to other servers.
const WAY: Duration = Duration::from_secs(2);
/// Maximum time of continuous reading; without a limit, reading would not end while other servers write as fast.
const READ: Duration = Duration::from_secs(1);
/// Bytes of a message that are reserved for headers.
pub(super) const HEADER_BYTES: usize = 1 << 10;

pub(super) struct StreamWriter {
    remote: Remote,
    shared: Arc<Shared<State>>,
    arrivals: Receiver<(Append, Done)>,
    /// Notifications of attempts by other servers, successful or not.
    attempts: Option<Subscriber>,
    /// Append that another server has announced but whose message is not in the stream yet, and the wait until the next
    /// check.
    attempted: Option<(Attempt, Duration)>,
    /// Unique number of the commit being published, until this task reads the commit from the stream.
    trying: Option<u128>,
    /// Number of attempts since the last commit in which another server was first, and the time per attempt.
    tries: u32,
    needs: Duration,
    /// Number of messages in the last read.
    read: u64,
    /// Time of the last poll of the stream.
    looked: Instant,
    /// True if the last poll showed messages that could not be read.
    is_missing: bool,
    /// Time for which a server with precedence has tried to append, and the end of its precedence.
    gives_way: Option<(Duration, Instant)>,
}

impl StreamWriter {
    pub(super) fn new(remote: Remote, shared: Arc<Shared<State>>, arrivals: Receiver<(Append, Done)>) -> Self {
        StreamWriter {
            remote,
            shared,
            arrivals,
            attempts: None,
            attempted: None,
            trying: None,
            tries: 0,
            needs: Duration::ZERO,
            read: 0,
            looked: Instant::now(),
            is_missing: false,
            gives_way: None,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            if self.attempts.is_none() {
                self.attempts = self.remote.client.subscribe(self.remote.subject.clone()).await.ok();
            }
            // Continuous appends must not keep a restored stream from being detected.
            if self.looked.elapsed() >= POLL_INTERVAL {
                self.join().await;
                self.look().await;
                self.looked = Instant::now();
            }
            let pause = self.attempted.as_ref().map_or(POLL_INTERVAL, |(_, wait)| *wait);
            tokio::select! {
                arrived = self.arrivals.recv() => match arrived {
                    Some(first) => self.commit(first).await,
                    None => return,
                },
                received = next_attempt(&mut self.attempts) => {
                    self.note(received);
                    self.handle_notifications().await;
                }
                () = sleep(pause) => if let Some((attempt, waited)) = self.attempted.take() {
                    self.seek(attempt, waited * 2).await;
                }
            }
        }
    }

    /// Handles a notification of another server's attempt.
    fn note(&mut self, received: Option<Message>) {
        let Some(message) = received else {
            self.attempts = None;
            return;
        };
        // A payload that is not a commit is reported when it is read from the stream.
        let unknown = Attempt { first: u64::MAX, ..Attempt::default() };
        let attempt = Attempt::read(&message.payload).unwrap_or(unknown);
        let tried = tried_for(attempt.tries, attempt.needs);
        if tried > self.needs * self.tries {
            let needs = Duration::from_micros(attempt.needs.into()).min(WAY) * 2u32.pow(attempt.tries.min(8));
            self.gives_way = Some((tried, Instant::now() + needs.min(WAY)));
        }
        if attempt.first > self.shared.lock().position {
            self.attempted = Some((attempt, FIRST_WAIT));
        }
    }

    /// Handles all pending notifications and reads up to the messages that they announce.
    async fn handle_notifications(&mut self) {
        for _ in 0..RINGS_MAX {
            match next_attempt(&mut self.attempts).now_or_never() {
                Some(received) => self.note(received),
                None => break,
            }
        }
        if let Some((attempt, wait)) = self.attempted.take() {
            self.seek(attempt, wait).await;
        }
    }

    /// Reads up to a published attempt. If the notification arrives before the stream has the message, the stream is checked again
    /// after `wait`.
    async fn seek(&mut self, attempt: Attempt, wait: Duration) {
        let read = self.read_on().await;
        let may_come = {
            let state = self.shared.lock();
            !state.has(attempt.number) && attempt.first > state.position
        };
        self.attempted = (read.is_ok() && may_come && wait <= LAST_WAIT).then_some((attempt, wait));
    }

    /// Waits for servers that have tried for longer without success. After [`WAY`] this server tries regardless,
    /// because the other servers yield to it only once its own attempts have failed.
    async fn yield_to_older_writers(&mut self) {
        let last = Instant::now() + WAY;
        loop {
            self.handle_notifications().await;
            let until = self.gives_way.map(|(_, until)| until.min(last));
            let Some(until) = until.filter(|until| Instant::now() < *until) else { return };
            match timeout_at(until.into(), next_attempt(&mut self.attempts)).await {
                Ok(received) => self.note(received),
                Err(_) => return,
            }
        }
    }

    /// Rejoins an unreadable stream once a version includes all missed updates, as a restart with that version would do.
    async fn join(&mut self) {
        let held = {
            let state = self.shared.lock();
            (state.broken.is_some() && state.held > state.position).then_some(state.held)
        };
        let Some(held) = held else { return };
        match self.remote.begin(held, &Noted::default()).await {
            Ok(now) if (now.first..=now.position + 1).contains(&(held + 1)) => {
                tracing::info!(
                    stream = self.remote.name,
                    position = held,
                    "a version includes the missed updates; following the stream again"
                );
                (self.attempted, self.is_missing) = (None, false);
                self.shared.change(|state| state.join(now, held));
            }
            // If the missed contents are unknown or the broker does not answer, the problem is already reported, or the
            // next poll reports it.
            Ok(_) | Err(_) => {}
        }
    }

    /// Polls the state of the stream and reads new messages.
    async fn look(&mut self) {
        let info = match self.remote.info().await {
            Ok(info) => info,
            Err(e) if e.kind() == Kind::NotFound => return self.away(e.to_string()),
            Err(e) => return self.lost(&e),
        };
        self.shared.change(|state| {
            state.lost = None;
            state.update_from_info(&info);
        });
        let reported = info.state;
        let (sequence, first, is_away) = {
            let state = self.shared.lock();
            (state.sequence, state.first_sequence, state.away.is_some())
        };
        if reported.last_sequence < sequence {
            return self.handle_shrunk_stream(reported.first_sequence, reported.last_sequence).await;
        }
        if is_away && !self.is_back().await {
            return;
        }
        if reported.first_sequence > sequence + 1 {
            let (from, to) = (reported.first_sequence, reported.last_sequence);
            return self
                .broken(format!("the stream has messages {from} to {to}, but the last one read was {sequence}"));
        }
        if reported.messages == 0 {
            self.shared
                .change(|state| (state.first_sequence, state.first) = (reported.first_sequence, state.position + 1));
            // No message is left from which a later reader could derive the position.
            return self.name_position(sequence).await;
        }
        if reported.first_sequence > first
            && let Ok(Some(Ok(commit))) = self.remote.read(reported.first_sequence).await
        {
            self.shared.change(|state| (state.first_sequence, state.first) = (reported.first_sequence, commit.first));
        }
        if reported.last_sequence > sequence {
            let read = self.read_on().await;
            let is_missing = read.is_ok() && self.shared.lock().sequence == sequence;
            // A message counts as missing only if two reads in succession lack it, because another broker of the cluster may answer
            // the second read.
            if is_missing && self.is_missing {
                let last = reported.last_sequence;
                return self
                    .broken(format!("the stream has messages up to {last}, but message {} is missing", sequence + 1));
            }
            self.is_missing = is_missing;
        }
    }

    /// Handles a stream with fewer messages than this server has read. If the stream was recreated after the last seen commit,
    /// continues with it; otherwise waits for the original stream.
    async fn handle_shrunk_stream(&mut self, first: u64, last: u64) {
        if last > 0
            && let Ok(Some(Ok(commit))) = self.remote.read(first).await
            && commit.before == 0
            && commit.first > self.shared.lock().position
        {
            let (stream, position) = (&self.remote.name, commit.first - 1);
            tracing::warn!(stream, position, "the stream was recreated after this position; following the new stream");
            return self.shared.change(|state| state.restart(first, &commit));
        }
        let (sequence, position) = {
            let state = self.shared.lock();
            (state.sequence, state.position)
        };
        self.away(format!(
            "the stream has messages {first} to {last}, the last one read was {sequence}, up to position {position}: the stream was \
             deleted, emptied or restored from an earlier state"
        ));
    }

    /// Checks whether a missing stream is back with the last commit that was read; if so, follows the stream again.
    async fn is_back(&mut self) -> bool {
        let (last, number) = {
            let state = self.shared.lock();
            (state.last_commit, state.number)
        };
        let is_back = match self.remote.read(last).await {
            Ok(read) => read.is_some_and(|read| read.is_ok_and(|commit| commit.number == number)),
            Err(e) if e.kind() == Kind::Corrupt => false,
            Err(e) => {
                self.lost(&e);
                return false;
            }
        };
        if is_back {
            tracing::info!(stream = self.remote.name, "the stream answers again; following it");
            self.shared.change(|state| state.away = None);
        } else {
            self.away(format!(
                "message {last} of the stream is not the one that was read before: the stream was recreated, or lost updates"
            ));
        }
        is_back
    }

    /// Writes a commit without records, so that a stream emptied by its limits or a purge still records the position.
    async fn name_position(&mut self, after: u64) {
        let (first, before) = {
            let state = self.shared.lock();
            (state.position + 1, state.number)
        };
        let commit = self.next(first, before, Vec::new());
        // Another server may have written a message first; the next read returns that message.
        if self.tried(&commit, after).await.is_ok() {
            drop(self.take(Ok(commit)));
        }
    }

    /// Reads all new messages, or as many as the time limit allows.
    async fn read_on(&mut self) -> Result<()> {
        // Number of messages to request: about as many as the last read returned.
        let mut ahead = (self.read + 1).next_power_of_two().min(AHEAD);
        self.read = 0;
        let last = Instant::now() + READ;
        while self.read == 0 || Instant::now() < last {
            let next = self.shared.lock().sequence + 1;
            for read in join_all((next..next + ahead).map(|sequence| self.remote.read(sequence))).await {
                let read = match read {
                    Ok(Some(read)) => read,
                    Ok(None) => return Ok(()),
                    Err(e) => {
                        self.failed(&e);
                        return Err(e);
                    }
                };
                self.take(read)?;
                self.read += 1;
            }
            ahead = (ahead * 2).min(AHEAD);
        }
        Ok(())
    }

    /// Records why a message cannot be read.
    fn failed(&self, e: &Error) {
        match e.kind() {
            Kind::Corrupt => self.broken(e.to_string()),
            _ => self.lost(e),
        }
    }

    /// Accepts the next message; the positions of an original commit must be consecutive.
    fn take(&mut self, read: std::result::Result<Commit, String>) -> Result<()> {
        let (sequence, position, number) = {
            let state = self.shared.lock();
            (state.sequence + 1, state.position, state.number)
        };
        let commit = match read {
            Ok(commit) => commit,
            Err(what) => {
                self.skip(what);
                return Ok(());
            }
        };
        let invalid = if commit.first != position + 1 {
            Some(format!("message {sequence} begins at position {}, expected {}", commit.first, position + 1))
        } else {
            (commit.before != number).then(|| discontinuity_message(sequence))
        };
        if let Some(why) = invalid {
            self.broken(why.clone());
            return Err(Error::corrupt(why));
        }
        // The server that had precedence has written its commit, so its precedence ends.
        self.gives_way.take_if(|(tried, _)| tried_for(commit.tries, commit.needs) >= *tried);
        self.trying.take_if(|trying| *trying == commit.number);
        self.shared.change(|state| {
            state.lost = None;
            state.take(Arc::new(commit));
        });
        Ok(())
    }

    /// Skips the next message, described by `what`: the chain of commit numbers proves that no commit is missing.
    fn skip(&self, what: String) {
        let stream = self.remote.name.clone();
        let (message, is_told) = {
            let state = self.shared.lock();
            (state.sequence + 1, state.skipped.is_recent())
        };
        // Logs at most one line per second.
        if !is_told {
            tracing::warn!(stream, message, what, "skipped a message in the stream that no journal wrote");
        }
        metrics::counter!("sterling_stream_skipped_total", "stream" => stream).increment(1);
        self.shared.change(|state| state.skip(what));
    }

    fn away(&self, why: String) {
        self.shared.change(|state| {
            if state.away.is_none() {
                tracing::error!(stream = self.remote.name, why, "updates are rejected until the stream is back");
            }
            (state.lost, state.away) = (None, Some(why));
        });
    }

    fn lost(&self, e: &Error) {
        let why = e.to_string();
        self.shared.change(|state| match &mut state.lost {
            Some((_, last)) => *last = why,
            none => {
                tracing::warn!(stream = self.remote.name, error = %why, "the stream does not answer; requests are answered without newer updates");
                *none = Some((Instant::now(), why));
            }
        });
    }

    fn broken(&self, why: String) {
        let why = format!("stream `{}`: {why}", self.remote.name);
        self.shared.change(|state| {
            if state.broken.is_none() {
                tracing::error!("{why}; stopped following the stream");
                state.broken = Some(why);
            }
        });
    }
}

/// Waits for a notification of another server's attempt; forever if the subscription has ended.
async fn next_attempt(attempts: &mut Option<Subscriber>) -> Option<Message> {
    match attempts {
        Some(attempts) => attempts.next().await,
        None => std::future::pending().await,
    }
}
