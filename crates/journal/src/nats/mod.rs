//! Journal of many machines: a stream of NATS JetStream.
//!
//! The updates of a model are one stream, to which every server appends and which every server reads. A message is a commit: the
//! records that waited together (`message`), published on condition that the stream's last message is the last one this server
//! has seen. If two servers publish at the same time, one succeeds; the other reads the new message, renumbers its records and
//! tries again. Positions are therefore consecutive, an append that fits a message is stored completely or not at all, and an
//! expected position is checked reliably. An append is acknowledged when the stream acknowledges it.
//!
//! **Exactly once.** After a missing acknowledgement it is unknown whether the message is stored. A stored message directly
//! follows the last message that this server has seen, so the server reads the next sequence number. If that number has no
//! message, the same message is published again with the same condition and message id; the stream accepts it once.
//!
//! **Following.** Messages are read by sequence number; the broker keeps no consumer state. A subscription notifies of
//! new messages; the stream is also polled, so that a lost notification costs time but no update. A server reports in
//! each attempt for how long it has tried without success, and servers that have tried for less time let it go first.
//! So a server with a longer network path to the broker can still write.
//!
//! **Foreign messages.** A message that no journal wrote is skipped, and so is a copy of a commit that was read before.
//! Each commit names the previous commit, so that skipped messages cannot hide a lost update. Skipped messages are
//! counted, and operators are warned. Following stops, with the reason, at a damaged commit, a commit of a later
//! release, a gap, or a position out of order; none of these is skipped. The stream is rejoined once a version includes
//! the missed positions.
//!
//! **Lost streams.** The last position is recorded outside of the stream (`mark`). A stream that is missing or ends before that
//! position is not recreated: a start fails, and a running server rejects updates, until the stream is back or begins after
//! everything that was seen.
//!
//! Acknowledged updates are as durable as the stream: `docs/guide/updates.md` lists the required settings of the broker. Records
//! are released by the limits of the stream.

mod credentials;
mod follow;
mod message;
mod monitor;
mod remote;
mod state;
mod stream_task;

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{Context, ContextBuilder, GetStreamErrorKind};
use async_nats::jetstream::stream::{Config, PersistenceMode, RetentionPolicy, StorageType, Stream};
use async_nats::{Client, ConnectOptions};
use tokio::sync::mpsc as commands;

use super::log::share_after;
use super::shared::Shared;
use super::watermark::{MARKS, Mark};
use super::{Append, Done, Follower, Journal, Journals, StreamOptions, Topic};
use credentials::Source;
use follow::StreamFollower;
use remote::{ANSWER, BrokerMessage, Noted, Remote, wait};
use state::State;
use sterling_core::error::{Error, Result};
use sterling_core::tasks::{self, Runtime};
use stream_task::{HEADER_BYTES, RINGS_MAX, StreamWriter};

/// Maximum number of waiting appends; a server limits its requests to far fewer.
const WAITING_MAX: usize = 4096;
/// Ping interval of an idle connection; the connection is replaced after two pings without an answer.
const PING: Duration = Duration::from_secs(2);
/// Smallest accepted limit on the bytes of a stream's messages.
const MESSAGE_BYTES_MIN: i32 = 2 * HEADER_BYTES as i32;
/// Interval at which the last position is recorded outside of the stream.
const NOTE: Duration = Duration::from_millis(500);

/// Addresses of the brokers, and options of streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsOptions {
    /// Servers of the cluster, `nats://` or `tls://` each, separated by commas.
    pub servers: String,
    /// Options of the streams, such as the required number of replicas.
    pub streams: StreamOptions,
    /// Folder below which the positions of streams are recorded; without this folder, the streams alone determine the positions.
    pub notes: Option<PathBuf>,
}

/// A connection to a cluster of NATS servers.
pub struct Nats {
    options: NatsOptions,
    client: Client,
    context: Context,
    said: BrokerMessage,
    threads: Arc<Runtime>,
}

/// A journal in a stream.
struct StreamJournal {
    shared: Arc<Shared<State>>,
    remote: Remote,
    waiting: commands::Sender<(Append, Done)>,
    threads: Arc<Runtime>,
}

impl Nats {
    /// Connects to the cluster; a lost connection is reestablished without a time limit.
    ///
    /// # Errors
    /// `Unavailable` if no server or a monitor does not answer; `Unsupported` if a monitor reports that its broker acknowledges
    /// messages before syncing them.
    pub fn connect(options: NatsOptions) -> Result<Self> {
        options.streams.check()?;
        options.streams.monitors.iter().try_for_each(|monitor| monitor::check(monitor))?;
        if options.streams.monitors.is_empty() {
            tracing::warn!(
                "`streams.monitors` is not set: cannot check that the brokers sync messages before they acknowledge them (by default they sync every two minutes)"
            );
        }
        let threads = Arc::new(tasks::STREAM.runtime(|builder| builder.worker_threads(1).enable_all())?);
        let servers: Vec<String> = options.servers.split(',').map(|server| server.trim().to_owned()).collect();
        let how = match Source::of(&servers, options.streams.credentials.as_ref())? {
            Source::Nowhere => ConnectOptions::new(),
            source => ConnectOptions::with_auth_callback(move |nonce| std::future::ready(source.answer(&nonce))),
        };
        // This server does not need notifications of its own messages.
        let how = how.name("sterling").no_echo().connection_timeout(ANSWER).ping_interval(PING);
        let said = BrokerMessage::default();
        let heard = said.clone();
        let how = how.subscription_capacity(RINGS_MAX).event_callback(move |event| {
            heard.receive(&event);
            async {}
        });
        let tells = said.clone();
        let connected = async move { how.connect(servers).await.map_err(|e| tells.unavailable("connection", e)) };
        let client = wait(&threads, connected).map_err(|e| e.within(named(&options.servers)))?;
        let context = {
            let _inside = threads.enter();
            ContextBuilder::new().timeout(ANSWER).build(client.clone())
        };
        Ok(Nats { options, client, context, said, threads })
    }

    /// Opens the file that records the last position of a stream.
    fn mark(&self, stream: &str) -> Result<Option<Mark>> {
        let path = self.options.notes.as_ref().map(|notes| notes.join(MARKS).join(stream));
        path.map(|path| Mark::open(&path)).transpose()
    }
}

/// Returns the stream with this configuration; creates a missing stream if `may_make` permits.
async fn found(
    context: &Context,
    said: &BrokerMessage,
    config: Config,
    may_make: impl FnOnce() -> Result<()>,
) -> Result<Stream> {
    match context.get_stream(&config.name).await {
        Ok(stream) => return Ok(stream),
        Err(e) => match e.kind() {
            GetStreamErrorKind::JetStream(e) if e.error_code() == ErrorCode::STREAM_NOT_FOUND => may_make()?,
            _ => return Err(said.unavailable("opening", e)),
        },
    }
    context.create_stream(config).await.map_err(|e| said.unavailable("creating the stream", e))
}

/// Records the position of a stream until it is no longer followed.
async fn note(shared: Weak<Shared<State>>, mut mark: Mark) {
    loop {
        tokio::time::sleep(NOTE).await;
        let Some(position) = shared.upgrade().map(|shared| shared.lock().position) else { return };
        // A write to network storage may block, and must not delay other streams.
        let written = tasks::blocking(move || {
            let written = if position > mark.position() { mark.set(position) } else { Ok(()) };
            Ok((mark, written))
        });
        let Ok((back, written)) = written.await else { return };
        mark = back;
        let unnoted =
            written.err().map(|e| format!("the last position cannot be written to {}: {e}", mark.path().display()));
        shared.upgrade().iter().for_each(|shared| shared.change(|state| state.unnoted = unnoted.clone()));
    }
}

impl Journals for Nats {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        // Stream names and subject tokens must not contain dots; model names have no tilde.
        let token = topic.to_string().replace('.', "~");
        let StreamOptions { prefix, replicas, .. } = self.options.streams.clone();
        let (name, subject) = (format!("{prefix}-{token}"), format!("{prefix}.{token}"));
        let (client, context, said) = (self.client.clone(), self.context.clone(), self.said.clone());
        let mark = self.mark(&name)?;
        let noted = mark.as_ref().map(|mark| Noted { position: mark.position(), file: mark.path().to_owned() });
        let noted = noted.unwrap_or_default();
        let open = async move {
            let config = Config {
                name: name.clone(),
                subjects: vec![subject.clone()],
                retention: RetentionPolicy::Limits,
                storage: StorageType::File,
                num_replicas: replicas,
                deny_delete: true,
                ..Config::default()
            };
            let place = |e: Error| e.within(format!("stream `{name}`"));
            let may_make = || noted.allows(after, "the broker has no such stream");
            let stream = found(&context, &said, config, may_make).await.map_err(place)?;
            check(&stream.cached_info().config, &subject, replicas).map_err(place)?;
            let mut remote = Remote { name: name.clone(), subject, client, context, stream, said, is_copied: false };
            let state = remote.begin(after, &noted).await.map_err(place)?;
            Ok((remote, state))
        };
        let (remote, state) = wait(&self.threads, open)?;
        let Config { num_replicas: copies, max_age, max_bytes, max_messages, .. } = remote.stream.cached_info().config;
        let (first, last) = (state.first, state.position);
        tracing::info!(
            stream = remote.name,
            first,
            last,
            copies,
            ?max_age,
            max_bytes,
            max_messages,
            "following a stream"
        );
        let shared = Arc::new(Shared::new(state));
        let (waiting, arrivals) = commands::channel(WAITING_MAX);
        self.threads.spawn(StreamWriter::new(remote.clone(), shared.clone(), arrivals).run());
        mark.into_iter().for_each(|mark| drop(self.threads.spawn(note(Arc::downgrade(&shared), mark))));
        Ok(Box::new(StreamJournal { shared, remote, waiting, threads: self.threads.clone() }))
    }

    fn are_shared(&self) -> bool {
        true
    }

    fn folder(&self, _topic: &Topic) -> Option<PathBuf> {
        None
    }
}

impl Journal for StreamJournal {
    fn append(&self, append: Append, done: Done) {
        use commands::error::TrySendError::{Closed, Full};
        match self.waiting.try_send((append, done)) {
            Ok(()) => {}
            Err(Full((_, done))) => {
                done(Err(Error::overloaded("journal: too many updates wait to be written, try again later")));
            }
            Err(Closed((_, done))) => {
                done(Err(Error::internal("the task that maintains the stream panicked; this is a defect")))
            }
        }
    }

    fn last(&self) -> u64 {
        self.shared.last()
    }

    fn first(&self) -> u64 {
        self.shared.lock().first
    }

    fn follow(&self, after: u64) -> Result<Box<dyn Follower>> {
        let follower = StreamFollower::new(self.shared.clone(), self.remote.clone(), self.threads.clone(), after)?;
        Ok(Box::new(follower))
    }

    fn release(&self, _position: u64) -> Result<()> {
        // Other servers may need the records: the limits of the stream decide how long records are retained.
        Ok(())
    }

    fn has_others(&self) -> bool {
        true
    }

    fn trouble(&self) -> Option<String> {
        let state = self.shared.lock();
        let lost = state.lost.as_ref();
        let silent = lost.map(|(since, why)| {
            format!("stream `{}` has not answered for {} s: {why}", self.remote.name, since.elapsed().as_secs())
        });
        let away = state.away.as_ref().map(|why| {
            format!(
                "stream `{}`: {why}; updates are rejected until the stream is back; save the applied updates in a \
                 version by `items:merge` before a restart",
                self.remote.name
            )
        });
        let refused = state.refused.as_ref().map(|(at, why)| {
            format!("stream `{}` rejected an update {} s ago: {why}", self.remote.name, at.elapsed().as_secs())
        });
        state.broken.clone().or(away).or(silent).or(refused)
    }

    fn warning(&self) -> Option<String> {
        let state = self.shared.lock();
        let warnings: Vec<String> = [state.skipped.warning(), state.unnoted.clone()].into_iter().flatten().collect();
        (!warnings.is_empty()).then(|| format!("stream `{}`: {}", self.remote.name, warnings.join("; ")))
    }

    fn bytes_after(&self, position: u64) -> u64 {
        let state = self.shared.lock();
        share_after(position, (state.first, state.position), state.bytes)
    }
}

/// Checks that a stream retains acknowledged messages in order, with enough replicas.
fn check(config: &Config, subject: &str, replicas: usize) -> Result<()> {
    let invalid = match config {
        Config { num_replicas: copies, .. } if *copies < replicas => {
            return Err(Error::unsupported(format!(
                "the stream stores {copies} copies of a message, expected at least {replicas} (`streams.replicas`)"
            )));
        }
        Config { persist_mode: Some(PersistenceMode::Async), .. } => {
            "the stream acknowledges messages before they are written, expected the default of `persist_mode`"
        }
        Config { sealed: true, .. } => "the stream is sealed and accepts no messages",
        Config { storage: StorageType::Memory, .. } => "the stream is stored in memory, expected files",
        Config { retention, .. } if *retention != RetentionPolicy::Limits => {
            "the stream deletes messages that were read, expected retention by limits"
        }
        Config { no_ack: true, .. } => "the stream does not acknowledge messages",
        Config { max_message_size: bytes @ 1..MESSAGE_BYTES_MIN, .. } => {
            return Err(Error::unsupported(format!(
                "the stream accepts messages of at most {bytes} bytes (`max_msg_size`), expected at least {MESSAGE_BYTES_MIN}"
            )));
        }
        Config { subjects, .. } if subjects.iter().all(|of| of != subject) => "the stream has other subjects",
        Config { mirror: Some(_), .. } | Config { sources: Some(_), .. } => "the stream has other streams as sources",
        _ => return Ok(()),
    };
    Err(Error::unsupported(invalid))
}

/// Returns the addresses without the secrets that they may contain.
fn named(servers: &str) -> String {
    let without = |server: &str| match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (_, Some((_, host))) => host.to_owned(),
        _ => server.to_owned(),
    };
    servers.split(',').map(|server| without(server.trim())).collect::<Vec<_>>().join(", ")
}
