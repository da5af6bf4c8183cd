//! Several hosts that train one model together, each with a share of the rows of every table and of the events of a batch.
//!
//! All hosts read the same events, so that ids do not travel. A batch is split at micro-batches of 64 events, and candidates at 64
//! items. The messages of a step, from each host to each other one:
//!
//! 1. `Step`, `Rows`: the rows that the other host's examples read.
//! 2. `Vectors`: queries and item vectors of the own share.
//! 3. `Losses`, `Scores`: gradients of the own events' scores, for the other host's candidates.
//! 4. `Gradients`: of bags and sequences, to the owners of their rows.
//! 5. `Sums`: micro-batches of dense gradients are added in order, host after host; the last one sends the `Total`.
//!
//! The order of all sums is that of one host, so that any number of hosts ends with the same bits. Host 0 writes checkpoints and
//! the package, as one host would, and reads the rows of the others for them (`shard`). A host that ends early or is silent for
//! longer than the timeout ends the others' run with an error; a restarted run resumes from the checkpoint of host 0.

mod frame;
mod handshake;
mod shard;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use frame::{FAILURE_BYTES_MAX, HEADER_BYTES, Header};
pub(crate) use frame::{Kind, Payload};
use handshake::Description;
pub(crate) use handshake::Identity;
pub(crate) use shard::{Pulled, Request, answer_touched, requested};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;
use sterling_embedding::train::HostShare;
use sterling_graph::dense::train::MICRO_BATCH;

/// Largest number of hosts.
const HOSTS_MAX: usize = 64;
/// Heartbeats per timeout.
const HEARTBEATS: u32 = 5;
/// Interval between two attempts to reach a host that does not run yet.
const RETRY: Duration = Duration::from_millis(50);
/// Time to look whether a connection has ended.
const PEEK: Duration = Duration::from_millis(1);
/// Interval between two looks at the connections to other hosts while a message of one is awaited.
const LOOK: Duration = Duration::from_secs(1);
/// Time for the last messages at the end of a run.
const LAST_MESSAGES: Duration = Duration::from_secs(5);

/// Hosts of a run.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// Address `NAME:PORT` of each host, in the same order on all of them.
    pub addresses: Vec<String>,
    /// Number of this host among them. Host 0 writes checkpoints and the package.
    pub rank: usize,
    /// Key that all hosts have; none if any host may join.
    pub key: Option<String>,
    /// Silence after which another host is lost.
    pub timeout: Duration,
    /// Time until all hosts have to be there.
    pub join_timeout: Duration,
}

impl Hosts {
    /// Default of [`Hosts::timeout`].
    pub const TIMEOUT: Duration = Duration::from_secs(30);
    /// Default of [`Hosts::join_timeout`].
    pub const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

    /// Creates hosts without a key and with default timeouts.
    pub fn new(addresses: Vec<String>, rank: usize) -> Self {
        Hosts { addresses, rank, key: None, timeout: Hosts::TIMEOUT, join_timeout: Hosts::JOIN_TIMEOUT }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let count = self.addresses.len();
        if !(1..=HOSTS_MAX).contains(&count) {
            return Err(Error::invalid(format!("hosts: got {count}, expected 1 to {HOSTS_MAX}")));
        }
        if self.rank >= count {
            return Err(Error::invalid(format!("rank: got {}, expected one below the {count} hosts", self.rank)));
        }
        for (n, address) in self.addresses.iter().enumerate() {
            let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
            if port.is_none_or(|port| port == 0) {
                return Err(Error::invalid(format!("hosts: got `{address}`, expected NAME:PORT")));
            }
            if self.addresses[..n].contains(address) {
                return Err(Error::invalid(format!("hosts: `{address}` comes twice")));
            }
        }
        if self.timeout.is_zero() || self.join_timeout.is_zero() {
            return Err(Error::invalid("timeout of hosts: got 0, expected more"));
        }
        match &self.key {
            Some(key) if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(Error::invalid("key of hosts: expected printable ASCII characters without spaces"))
            }
            _ => Ok(()),
        }
    }

    /// Listens at this host's address, or at its port of all addresses if it has a name.
    fn listen(&self) -> Result<TcpListener> {
        let address = &self.addresses[self.rank];
        let place = |e| Error::io(format!("listening on {address}"), e);
        match address.parse::<SocketAddr>() {
            Ok(address) => TcpListener::bind(address).map_err(place),
            Err(_) => {
                let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0);
                TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port)).map_err(place)
            }
        }
    }
}

/// Connections to all other hosts of a run.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: usize,
    timeout: Duration,
    /// By rank; none for this host.
    peers: Vec<Option<Peer>>,
}

/// Connection to another host.
#[derive(Debug)]
struct Peer {
    /// Rank and address, for errors.
    name: String,
    receiving: Mutex<Receiving>,
    sending: Mutex<Option<Sender<(Kind, Payload)>>>,
    /// Disconnected as soon as the writing thread ends.
    written: Mutex<Receiver<()>>,
}

#[derive(Debug)]
struct Receiving {
    stream: TcpStream,
    number: u32,
}

impl Mesh {
    /// Connects to all hosts: each one calls those of lower rank.
    ///
    /// # Errors
    /// `Invalid` for invalid hosts; `Conflict` if another host rejects this one; `Unavailable` if hosts are missing in the end.
    pub(crate) fn join(hosts: &Hosts, identity: Identity) -> Result<Mesh> {
        hosts.check()?;
        let own = Description { rank: hosts.rank, identity };
        let end = Instant::now() + hosts.join_timeout;
        let mut streams: Vec<Option<TcpStream>> = hosts.addresses.iter().map(|_| None).collect();
        // Hosts of higher rank call while this one still calls others.
        let listener = (hosts.rank + 1 < hosts.addresses.len()).then(|| hosts.listen()).transpose()?;
        for (address, stream) in hosts.addresses.iter().zip(&mut streams).take(hosts.rank) {
            *stream = Some(call(address, hosts, &own, end)?);
        }
        if let Some(listener) = listener {
            accept(&listener, hosts, &own, &mut streams, end)?;
        }
        let lost = streams.iter().take(hosts.rank).position(|stream| stream.as_ref().is_some_and(has_ended));
        if let Some(rank) = lost {
            return Err(Error::unavailable(format!("host {rank} ({}) ended meanwhile", hosts.addresses[rank])));
        }
        let peer = |(rank, stream): (usize, Option<TcpStream>)| {
            stream.map(|stream| Peer::new(stream, rank, hosts)).transpose()
        };
        let peers = streams.into_iter().enumerate().map(peer).collect::<Result<_>>()?;
        Ok(Mesh { rank: hosts.rank, timeout: hosts.timeout, peers })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Number of hosts, this one included.
    pub(crate) fn count(&self) -> usize {
        self.peers.len()
    }

    /// Returns the share of this host in the rows of tables.
    pub(crate) fn rows(&self) -> HostShare {
        HostShare { host: self.rank as u32, hosts: self.count() as u32 }
    }

    /// Returns the share of a host in `count` events or candidates: complete micro-batches.
    pub(crate) fn share(&self, count: usize, host: usize) -> Range<usize> {
        let micro_batches = count.div_ceil(MICRO_BATCH);
        let at = |host: usize| count.min(micro_batches * host / self.count() * MICRO_BATCH);
        at(host)..at(host + 1)
    }

    /// Returns the share of this host.
    pub(crate) fn own(&self, count: usize) -> Range<usize> {
        self.share(count, self.rank)
    }

    /// Returns the ranks of the other hosts.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.count()).filter(move |host| *host != rank)
    }

    fn peer(&self, host: usize) -> Result<&Peer> {
        let peer = self.peers.get(host).and_then(Option::as_ref);
        peer.ok_or_else(|| Error::internal(format!("a message to host {host} of {}", self.count())))
    }

    /// Sends a message, without waiting for it to leave.
    ///
    /// # Errors
    /// `Unavailable` if the host is lost.
    pub(crate) fn send(&self, host: usize, kind: Kind, payload: impl Into<Payload>) -> Result<()> {
        let peer = self.peer(host)?;
        let sent = locked(&peer.sending).as_ref().is_some_and(|sender| sender.send((kind, payload.into())).is_ok());
        if sent {
            return Ok(());
        }
        // The host may have sent the reason why it ended.
        let reason = self.receive(host, Kind::Failure, 0, 0).err();
        Err(reason.unwrap_or_else(|| Error::unavailable(format!("{} is lost", peer.name))))
    }

    /// Sends a message to all other hosts.
    ///
    /// # Errors
    /// As [`Mesh::send`].
    pub(crate) fn send_all(&self, kind: Kind, payload: impl Into<Payload>) -> Result<()> {
        let payload = payload.into();
        self.others().try_for_each(|host| self.send(host, kind, payload.clone()))
    }

    /// Receives numbers whose count both sides know.
    ///
    /// # Errors
    /// `Unavailable` if the host is lost or failed, or sent another message: the run may be started again.
    pub(crate) fn numbers(&self, host: usize, kind: Kind, count: usize) -> Result<Vec<f32>> {
        let length = count * size_of::<f32>();
        let header = self.receive(host, kind, length, length)?;
        let mut numbers = vec![0f32; count];
        self.payload(host, &header, bytemuck::cast_slice_mut(&mut numbers))?;
        Ok(numbers)
    }

    /// Receives between `least` and `most` bytes.
    ///
    /// # Errors
    /// As [`Mesh::numbers`].
    pub(crate) fn bytes(&self, host: usize, kind: Kind, least: usize, most: usize) -> Result<Vec<u8>> {
        let header = self.receive(host, kind, least, most)?;
        let mut bytes = vec![0; header.length as usize];
        self.payload(host, &header, &mut bytes)?;
        Ok(bytes)
    }

    /// Receives a list of integers of the same length from all other hosts; `own` is this host's. Returns them by rank.
    ///
    /// # Errors
    /// As [`Mesh::numbers`].
    pub(crate) fn gather(&self, kind: Kind, own: Vec<u64>, count: impl Fn(usize) -> usize) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.send_all(kind, bytes)?;
        let received = |host: usize| {
            if host == self.rank {
                return Ok(own.clone());
            }
            let length = count(host) * size_of::<u64>();
            let bytes = self.bytes(host, kind, length, length)?;
            Ok(bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
        };
        (0..self.count()).map(received).collect()
    }

    /// Receives numbers from all other hosts; `own` are this host's. Returns them by rank.
    ///
    /// # Errors
    /// As [`Mesh::numbers`].
    pub(crate) fn gather_numbers(
        &self,
        kind: Kind,
        own: Vec<f32>,
        count: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<f32>>> {
        self.send_all(kind, own.clone())?;
        let mut own = Some(own);
        let received = |host: usize| match host == self.rank {
            true => Ok(own.take().unwrap_or_default()),
            false => self.numbers(host, kind, count(host)),
        };
        (0..self.count()).map(received).collect()
    }

    /// Returns the sums of all hosts, added in their order: each host adds its own to those of the hosts before it, and the last
    /// one has the total. Host 0 has sent its own (`Sums`) already.
    ///
    /// # Errors
    /// As [`Mesh::numbers`].
    pub(crate) fn total(&self, count: usize, add: impl FnOnce(&mut [f32])) -> Result<Vec<f32>> {
        let last = self.count() - 1;
        if self.rank > 0 {
            let mut sums = self.numbers(self.rank - 1, Kind::Sums, count)?;
            add(&mut sums);
            if self.rank == last {
                self.send_all(Kind::Total, sums.clone())?;
                return Ok(sums);
            }
            self.send(self.rank + 1, Kind::Sums, sums)?;
        }
        self.numbers(last, Kind::Total, count)
    }

    /// Receives the header of the next message that is no heartbeat.
    fn receive(&self, host: usize, kind: Kind, least: usize, most: usize) -> Result<Header> {
        let peer = self.peer(host)?;
        let mut receiving = locked(&peer.receiving);
        let header = loop {
            let mut bytes = [0; HEADER_BYTES];
            self.read(&mut receiving.stream, &mut bytes).map_err(|e| e.within(&peer.name))?;
            let header = Header::decode(&bytes).map_err(|e| e.within(&peer.name))?;
            if header.kind != Kind::Heartbeat || header.length != 0 {
                break header;
            }
        };
        let expected = receiving.number;
        receiving.number = receiving.number.wrapping_add(1);
        if header.kind == Kind::Failure && header.length <= FAILURE_BYTES_MAX as u64 {
            let mut text = vec![0; header.length as usize];
            let read = self.read(&mut receiving.stream, &mut text);
            let text = String::from_utf8_lossy(&text).into_owned();
            return Err(read.err().unwrap_or_else(|| Error::unavailable(text)).within(format!("{} failed", peer.name)));
        }
        if (header.kind, header.number) != (kind, expected) || !(least as u64..=most as u64).contains(&header.length) {
            return Err(Error::unavailable(format!(
                "{}: message {:?} number {} of {} bytes, expected {kind:?} number {expected} of {least} to {most} bytes",
                peer.name, header.kind, header.number, header.length
            )));
        }
        Ok(header)
    }

    /// Receives the payload of a message.
    fn payload(&self, host: usize, header: &Header, to: &mut [u8]) -> Result<()> {
        let peer = self.peer(host)?;
        let read = self.read(&mut locked(&peer.receiving).stream, to);
        read.and_then(|()| header.check(to)).map_err(|e| e.within(&peer.name))
    }

    /// Fills a buffer; a host is lost if nothing at all comes for the timeout. Ends if another host has ended, for which this one
    /// may wait.
    fn read(&self, stream: &mut TcpStream, mut to: &mut [u8]) -> Result<()> {
        use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        let mut heard = Instant::now();
        while !to.is_empty() {
            match stream.read(to) {
                Ok(0) => return Err(Error::unavailable("lost: the connection has ended")),
                Ok(count) => {
                    to = &mut std::mem::take(&mut to)[count..];
                    heard = Instant::now();
                }
                Err(e) if e.kind() == Interrupted => {}
                Err(e) if matches!(e.kind(), TimedOut | WouldBlock) => {
                    if heard.elapsed() >= self.timeout {
                        return Err(Error::unavailable(format!("lost: silent for {} s", self.timeout.as_secs_f32())));
                    }
                    if let Some(other) = self.lost() {
                        return Err(Error::unavailable(format!("no message, and {other} has ended")));
                    }
                }
                Err(e) => return Err(Error::unavailable(format!("lost: {e}"))),
            }
        }
        Ok(())
    }

    /// Returns the name of a host that has ended, among those that no thread reads from.
    fn lost(&self) -> Option<&str> {
        let mut peers = self.peers.iter().flatten();
        let ended = |peer: &&Peer| peer.receiving.try_lock().is_ok_and(|receiving| has_ended(&receiving.stream));
        peers.find(ended).map(|peer| peer.name.as_str())
    }

    /// Reports to the other hosts that this one ends with an error.
    pub(crate) fn fail(&self, error: &Error) {
        let mut text = error.to_string();
        text.truncate(text.floor_char_boundary(FAILURE_BYTES_MAX));
        for peer in self.peers.iter().flatten() {
            let sending = locked(&peer.sending);
            // A host that is lost needs no reason.
            sending.as_ref().map(|sender| sender.send((Kind::Failure, text.clone().into_bytes().into())));
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            // The writing thread sends the queued messages, and ends.
            locked(&peer.sending).take();
        }
        let end = Instant::now() + LAST_MESSAGES;
        for peer in self.peers.iter().flatten() {
            let _ = locked(&peer.written).recv_timeout(end.saturating_duration_since(Instant::now()));
            let _ = locked(&peer.receiving).stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Peer {
    fn new(stream: TcpStream, rank: usize, hosts: &Hosts) -> Result<Self> {
        let name = format!("host {rank} ({})", hosts.addresses[rank]);
        let place = |e| Error::io(&name, e);
        stream.set_nodelay(true).map_err(place)?;
        stream.set_read_timeout(Some(hosts.timeout.min(LOOK))).map_err(place)?;
        let to = stream.try_clone().map_err(place)?;
        let (sender, queue) = channel();
        let (done, written) = channel();
        let heartbeat = hosts.timeout / HEARTBEATS;
        tasks::LEARN_SEND.start_one(rank, move || write(to, &queue, heartbeat, done))?;
        let receiving = Mutex::new(Receiving { stream, number: 0 });
        Ok(Peer { name, receiving, sending: Mutex::new(Some(sender)), written: Mutex::new(written) })
    }
}

/// Writes messages until the queue is closed or the connection ends, and heartbeats in between. `done` is dropped at the end.
fn write(mut stream: TcpStream, queue: &Receiver<(Kind, Payload)>, heartbeat: Duration, done: Sender<()>) {
    let mut number = 0u32;
    loop {
        let (kind, payload) = match queue.recv_timeout(heartbeat) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => (Kind::Heartbeat, Vec::<u8>::new().into()),
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let payload = payload.bytes();
        let header = Header::of(kind, number, payload);
        if kind != Kind::Heartbeat {
            number = number.wrapping_add(1);
        }
        if stream.write_all(&header.encoded()).and_then(|()| stream.write_all(payload)).is_err() {
            break;
        }
    }
    drop(done);
}

/// Calls a host until it answers.
fn call(address: &str, hosts: &Hosts, own: &Description, end: Instant) -> Result<TcpStream> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let reached = address.to_socket_addrs().and_then(|mut all| {
            let first = all.next().ok_or(std::io::ErrorKind::NotFound)?;
            TcpStream::connect_timeout(&first, left.min(Duration::from_secs(5)).max(RETRY))
        });
        let why = match reached {
            Ok(mut stream) => match handshake::present(&mut stream, address, hosts.key.as_deref(), own) {
                Err(e) if e.kind() == sterling_core::error::Kind::Unavailable => e.to_string(),
                presented => return presented.map(|()| stream),
            },
            Err(e) => e.to_string(),
        };
        if left.is_zero() {
            let waited = hosts.join_timeout.as_secs_f32();
            return Err(Error::unavailable(format!("{address} was not reached in {waited} s: {why}")));
        }
        std::thread::sleep(RETRY);
    }
}

/// Accepts hosts of higher rank until all are there. Other connections are rejected.
fn accept(
    listener: &TcpListener,
    hosts: &Hosts,
    own: &Description,
    streams: &mut [Option<TcpStream>],
    end: Instant,
) -> Result<()> {
    let place = |e| Error::io(format!("listening on {}", hosts.addresses[hosts.rank]), e);
    listener.set_nonblocking(true).map_err(place)?;
    let (mut rejected, mut newest) = (String::new(), None);
    loop {
        if streams.iter().skip(hosts.rank + 1).all(Option::is_some) {
            // A host that ended while this one waited for others is started again, and calls again.
            let before = (hosts.rank + 1..streams.len()).filter(|rank| Some(*rank) != newest);
            let ended: Vec<usize> = before.filter(|rank| streams[*rank].as_ref().is_some_and(has_ended)).collect();
            if ended.is_empty() {
                return Ok(());
            }
            ended.into_iter().for_each(|rank| streams[rank] = None);
        }
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                if Instant::now() >= end {
                    let missing = (hosts.rank + 1..streams.len()).filter(|rank| streams[*rank].is_none());
                    let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
                    let waited = hosts.join_timeout.as_secs_f32();
                    let missing = missing.join(", ");
                    return Err(Error::unavailable(format!("hosts {missing} did not come in {waited} s{rejected}")));
                }
                std::thread::sleep(RETRY / 10);
                continue;
            }
            Err(e) => return Err(place(e)),
        };
        stream.set_nonblocking(false).map_err(place)?;
        let expected = |rank: usize| (hosts.rank + 1..hosts.addresses.len()).contains(&rank);
        match handshake::receive(&mut stream, hosts.key.as_deref(), own, expected) {
            // A host that comes again was restarted.
            Ok(Description { rank, .. }) => (streams[rank], newest) = (Some(stream), Some(rank)),
            Err(e) => rejected = format!("; the last rejected connection: {e}"),
        }
    }
}

/// Returns whether the host at the other end has ended, or has failed as its next message says.
fn has_ended(stream: &TcpStream) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    let timeout = stream.read_timeout();
    let mut bytes = [0; HEADER_BYTES];
    let peeked = stream.set_read_timeout(Some(PEEK)).and_then(|()| stream.peek(&mut bytes));
    let restored = timeout.and_then(|timeout| stream.set_read_timeout(timeout));
    restored.is_err()
        || match peeked {
            Ok(HEADER_BYTES) => Header::decode(&bytes).is_ok_and(|header| header.kind == Kind::Failure),
            Ok(count) => count == 0,
            Err(e) => !matches!(e.kind(), Interrupted | TimedOut | WouldBlock),
        }
}
