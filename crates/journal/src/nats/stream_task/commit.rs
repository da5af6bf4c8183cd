//! Commits of a stream: plans messages from the waiting appends and publishes each until its outcome is known.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::PublishErrorKind;
use tokio::time::sleep;

use super::super::message::{Commit, FRAME_BYTES, LENGTH_BYTES};
use super::super::remote::{number, refusal};
use super::{HEADER_BYTES, StreamWriter};
use crate::{Append, Done};
use sterling_core::error::{Error, Kind, Result};

/// Time for which a commit is retried before its outcome is reported as unknown.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Shortest and longest wait between attempts; each wait doubles the previous one.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// Size of a message in bytes, beyond which further appends wait for the next message.
const COMMIT_BYTES: usize = 256 << 10;
/// Maximum number of appends that are committed before other work is checked.
const TOGETHER_MAX: usize = 1024;

/// An append that waits or is partly written.
struct Waiting {
    append: Append,
    done: Done,
    /// Positions of the written records of the append.
    written: Option<Range<u64>>,
    /// Number of records of the append that are written.
    count: usize,
}

impl Waiting {
    /// Fails the append with the error of its remaining records, which are certainly not written.
    fn reject(self, e: &Error) {
        let (count, all) = (self.count, self.append.records.len());
        let e = match e.kind() {
            _ if count == 0 => e.again().unapplied(),
            // An error of kind `NoSpace` or `Invalid` would state that no record was written.
            Kind::NoSpace | Kind::Invalid => Error::unavailable(format!("{e}; {count} of {all} records are stored")),
            _ => e.again(),
        };
        (self.done)(Err(e));
    }
}

/// Outcome of a commit.
enum Outcome {
    Stored,
    /// Another server's commit was stored before this one.
    Overtaken,
    /// The message is not in the stream and never will be.
    Refused(Error),
    /// The outcome is unknown: the message may or may not be in the stream.
    Unknown(Error),
}

impl StreamWriter {
    /// Commits an append together with all appends that are waiting, and calls their callbacks.
    pub(super) async fn commit(&mut self, first: (Append, Done)) {
        let waiting = |(append, done)| Waiting { append, done, written: None, count: 0 };
        let mut all = VecDeque::from([waiting(first)]);
        while all.len() < TOGETHER_MAX
            && let Ok(more) = self.arrivals.try_recv()
        {
            all.push_back(waiting(more));
        }
        let mut since = Instant::now();
        while !all.is_empty() {
            if let Some(why) = self.stopped() {
                all.drain(..).for_each(|one| one.reject(&why));
                return;
            }
            self.yield_to_older_writers().await;
            let Some((commit, shares)) = self.plan(&mut all).await else { continue };
            let tried = Instant::now();
            match self.publish(&commit).await {
                Outcome::Stored => {
                    self.tries = 0;
                    since = Instant::now();
                    notify_written(&mut all, commit.first, &shares);
                }
                Outcome::Overtaken if since.elapsed() < COMMIT_TIMEOUT => {
                    self.tries += 1;
                    self.needs = tried.elapsed();
                }
                Outcome::Overtaken => {
                    let e =
                        Error::unavailable("journal: other servers appended first at each attempt, try again later");
                    all.drain(..shares.len()).for_each(|one| one.reject(&e));
                    since = Instant::now();
                }
                Outcome::Refused(e) => {
                    self.record_failure(&e);
                    all.drain(..shares.len()).for_each(|one| one.reject(&e));
                }
                Outcome::Unknown(e) => {
                    self.record_failure(&e);
                    all.drain(..shares.len()).for_each(|one| (one.done)(Err(e.again())));
                }
            }
        }
    }

    /// Records a failure of the broker, for operators.
    fn record_failure(&self, e: &Error) {
        if matches!(e.kind(), Kind::NoSpace | Kind::Unavailable) {
            self.shared.change(|state| state.refused = Some((Instant::now(), e.to_string())));
        }
    }

    /// Returns the reason why appends are rejected, if there is one.
    fn stopped(&self) -> Option<Error> {
        let state = self.shared.lock();
        let broken = state.broken.as_ref().map(|why| Error::corrupt(why.clone()));
        let name = &self.remote.name;
        let away = state.away.as_ref().map(|why| Error::unavailable(format!("stream `{name}`: {why}")));
        broken.or(away)
    }

    /// Returns the maximum bytes of a message without its headers.
    fn most(&self) -> usize {
        let of_stream = self.shared.lock().message_bytes_max.unwrap_or(usize::MAX);
        self.remote.client.max_payload().min(of_stream).saturating_sub(HEADER_BYTES)
    }

    /// Plans the next message from the waiting appends, as many as fit; returns also the number of records per append. Fails
    /// appends that cannot be written.
    async fn plan(&mut self, all: &mut VecDeque<Waiting>) -> Option<(Commit, Vec<usize>)> {
        let most = self.most();
        let ahead =
            |position: u64| move |one: &Waiting| one.append.expected.is_some_and(|expected| expected > position);
        while all.iter().any(ahead(self.shared.lock().position)) {
            // An append that expects a later position knows of messages that this task has not read yet; these are read
            // first. Errors of this read are already recorded.
            if self.read_on().await.is_err() || self.read == 0 {
                break;
            }
        }
        let (first, before) = {
            let state = self.shared.lock();
            (state.position + 1, state.number)
        };
        let (mut records, mut shares, mut bytes) = (Vec::new(), Vec::new(), FRAME_BYTES);
        while let Some(one) = all.get(shares.len()) {
            let next = first + records.len() as u64;
            if let Err(e) = check(one, next, most) {
                if let Some(one) = all.remove(shares.len()) {
                    one.reject(&e);
                }
                continue;
            }
            let rest = &one.append.records[one.count..];
            let whole: usize = rest.iter().map(|record| LENGTH_BYTES + record.len()).sum();
            // An append that fits a message is not divided.
            if !records.is_empty() && bytes + whole > COMMIT_BYTES.min(most) {
                break;
            }
            let mut share = 0;
            for record in rest {
                if bytes + LENGTH_BYTES + record.len() > most {
                    break;
                }
                bytes += LENGTH_BYTES + record.len();
                records.push(record.clone());
                share += 1;
            }
            shares.push(share);
            if share < rest.len() {
                break;
            }
        }
        (!shares.is_empty()).then(|| (self.next(first, before, records), shares))
    }

    /// Creates a commit of records for the next attempt.
    pub(super) fn next(&self, first: u64, before: u128, records: Vec<Vec<u8>>) -> Commit {
        let needs = if self.tries == 0 { 0 } else { u32::try_from(self.needs.as_micros()).unwrap_or(u32::MAX) };
        Commit { first, number: number(), before, tries: self.tries, needs, records }
    }

    /// Publishes a commit until its outcome is known.
    async fn publish(&mut self, commit: &Commit) -> Outcome {
        if commit.records.is_empty() {
            return Outcome::Stored;
        }
        let (after, beginning) = {
            let state = self.shared.lock();
            (state.sequence, state.beginning)
        };
        self.trying = Some(commit.number);
        let (start, mut wait) = (Instant::now(), BACKOFF.0);
        let mut is_certain = true;
        loop {
            let failed = match self.tried(commit, after).await {
                Ok(()) => {
                    metrics::histogram!("sterling_journal_commit_seconds").record(start.elapsed().as_secs_f64());
                    return self.take(Ok(commit.clone())).map_or_else(Outcome::Unknown, |()| Outcome::Stored);
                }
                // If an earlier attempt may have succeeded, the stream's contents show the outcome.
                Err(Failed::Refused(e)) if is_certain && e.kind() == Kind::NoSpace => return Outcome::Refused(e),
                Err(Failed::Refused(e)) if is_certain && e.kind() == Kind::Invalid => {
                    // The limits of the stream may have changed; a smaller commit may fit.
                    let planned = self.most();
                    self.look().await;
                    return if self.most() < planned { Outcome::Overtaken } else { Outcome::Refused(e) };
                }
                Err(Failed::Refused(e)) => e,
                Err(Failed::Unknown(e)) => {
                    is_certain = false;
                    e
                }
            };
            // If stored, this server's message directly follows the last message that it has read.
            let read = self.read_on().await;
            if self.trying.is_none() {
                return Outcome::Stored;
            }
            let is_overtaken = {
                let state = self.shared.lock();
                state.sequence > after || state.beginning != beginning
            };
            if is_overtaken {
                return Outcome::Overtaken;
            }
            if let Err(e) = read
                && e.kind() == Kind::Corrupt
            {
                return if is_certain { Outcome::Refused(e) } else { Outcome::Unknown(e) };
            }
            if is_certain && let Some(why) = self.stopped() {
                return Outcome::Refused(why);
            }
            if start.elapsed() > COMMIT_TIMEOUT {
                let failed = |outcome| Error::unavailable(format!("journal: {failed}; {outcome}"));
                return match is_certain {
                    true => Outcome::Refused(failed("it was not written")),
                    false => Outcome::Unknown(failed("the update may or may not be durable")),
                };
            }
            // Checks whether the stream was deleted or replaced.
            self.look().await;
            sleep(wait).await;
            wait = (wait * 2).min(BACKOFF.1);
        }
    }

    /// Makes one attempt to publish a commit.
    pub(super) async fn tried(&self, commit: &Commit, after: u64) -> std::result::Result<(), Failed> {
        // Without a connection the client would only buffer the message.
        self.remote.connected().map_err(Failed::Refused)?;
        let e = match self.remote.publish(commit, after).await {
            Ok(sequence) if sequence == after + 1 => return Ok(()),
            Ok(sequence) => {
                let what = format!("got message {sequence}, expected the message after {after}");
                return Err(Failed::Unknown(Error::unavailable(what)));
            }
            Err(e) => e,
        };
        let too_long = ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM;
        Err(match (e.kind(), refusal(&e)) {
            (_, Some(code)) if FULL.contains(&code) => {
                Failed::Refused(Error::no_space(format!("journal: no space for the update: {e}")))
            }
            (PublishErrorKind::MaxPayloadExceeded, _) => Failed::Refused(Error::invalid(format!("journal: {e}"))),
            (_, Some(code)) if code == too_long => {
                Failed::Refused(Error::invalid(format!("journal: the update exceeds `max_msg_size`: {e}")))
            }
            (PublishErrorKind::StreamNotFound | PublishErrorKind::WrongLastSequence, _) | (_, Some(_)) => {
                Failed::Refused(self.remote.unavailable("publishing an update", e))
            }
            _ => Failed::Unknown(self.remote.unavailable("publishing an update", e)),
        })
    }
}

/// Reason why a commit was not acknowledged.
pub(super) enum Failed {
    /// The broker has rejected the message.
    Refused(Error),
    /// The outcome is unknown: the broker may or may not have stored the message.
    Unknown(Error),
}

/// Error codes of a broker that has no space left.
const FULL: [ErrorCode; 5] = [
    ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED,
    ErrorCode::STORAGE_RESOURCES_EXCEEDED,
    ErrorCode::ACCOUNT_RESOURCES_EXCEEDED,
    ErrorCode::INSUFFICIENT_RESOURCES,
    ErrorCode::STREAM_STORE_FAILED,
];

/// Calls the callbacks of appends whose records are all written.
fn notify_written(all: &mut VecDeque<Waiting>, first: u64, shares: &[usize]) {
    let mut next = first;
    let mut whole = 0;
    for (one, share) in all.iter_mut().zip(shares) {
        let end = next + *share as u64;
        one.written = Some(one.written.as_ref().map_or(next, |written| written.start)..end);
        one.count += share;
        next = end;
        whole += usize::from(one.count == one.append.records.len());
    }
    for one in all.drain(..whole) {
        let written = one.written.unwrap_or(next..next);
        (one.done)(Ok(written));
    }
}

/// Checks whether an append can be written at a position.
fn check(one: &Waiting, next: u64, most: usize) -> Result<()> {
    if let Some(expected) = one.append.expected.filter(|expected| one.written.is_none() && *expected != next - 1) {
        return Err(Error::conflict(format!(
            "the stream is at position {}, expected {expected}: other updates were appended meanwhile",
            next - 1
        )));
    }
    let most = most.saturating_sub(FRAME_BYTES + LENGTH_BYTES);
    match one.append.records.iter().map(Vec::len).find(|bytes| !(1..=most).contains(bytes)) {
        Some(bytes) => Err(Error::invalid(format!("journal: a record of {bytes} bytes, expected 1 to {most}"))),
        None => Ok(()),
    }
}
