//! Several hosts that train one model together, each with a part of the rows of every table and of the events of a batch.
//!
//! All hosts read the same events, so that ids are not sent. A batch is split at micro-batches of 64 events, and candidates at 64
//! items. The messages of a step, from each host to each other host:
//!
//! 1. `Step`, `Rows`: the rows that the other host's examples read.
//! 2. `Vectors`: item vectors of the sender's items. The user tower runs while these messages are in transit.
//! 3. `Losses`, `Candidates`: loss terms, and gradients of the receiver's candidates, summed over the sender's events. The user
//!    tower's backward pass runs while these messages are in transit.
//! 4. `Sums`: dense gradients, summed over the sender's micro-batches.
//! 5. `Gradients`: gradients of bags and sequences, to the owners of their rows. The next batch is prepared meanwhile.
//!
//! Sums over events are added in the order of a binary tree over micro-batches (`TreeSum`), also on one host: a host sends the
//! sums of its subtrees. All sums have the order of one host, so that any number of hosts gets the same bits. Host 0
//! writes checkpoints and the package, as one host would, and reads the rows of the other hosts for both (`shard`). A host that
//! ends early or is silent for longer than the timeout ends the run of the other hosts with an error; a restarted run resumes from
//! the checkpoint of host 0.

mod frame;
mod handshake;
mod join;
mod options;
mod shard;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use frame::{FAILURE_BYTES_MAX, HEADER_BYTES, Header};
pub(crate) use frame::{Kind, Payload};
use handshake::Description;
pub(crate) use handshake::Identity;
use join::{accept, call, has_ended};
pub use options::Hosts;
pub(crate) use shard::{Pulled, Request, answer_touched, requested};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;
use sterling_embedding::train::HostShare;
use sterling_graph::dense::train::MICRO_BATCH;

/// Heartbeats per timeout.
const HEARTBEATS: u32 = 5;
/// Interval between two checks of the connections to all hosts while a message from one host is awaited.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes of a message that are read at once to skip it.
const SKIPPED_BYTES: usize = 1 << 16;
/// Time for the last messages at the end of a run.
const LAST_MESSAGES: Duration = Duration::from_secs(5);

impl Hosts {
    /// Listens at this host's address, or, if the address is a host name, at its port on all interfaces.
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
    /// Connections by rank; none for this host.
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
    /// Connects to all hosts: each host calls the hosts of lower rank.
    ///
    /// # Errors
    /// `Invalid` for invalid hosts; `Conflict` if another host rejects this host; `Unavailable` if hosts are missing at the
    /// join timeout.
    pub(crate) fn join(hosts: &Hosts, identity: Identity) -> Result<Mesh> {
        hosts.check()?;
        let own = Description { rank: hosts.rank, identity };
        let end = Instant::now() + hosts.join_timeout;
        let mut streams: Vec<Option<TcpStream>> = hosts.addresses.iter().map(|_| None).collect();
        // Listens first: hosts of higher rank call while this host still calls others.
        let listener = (hosts.rank + 1 < hosts.addresses.len()).then(|| hosts.listen()).transpose()?;
        for (address, stream) in hosts.addresses.iter().zip(&mut streams).take(hosts.rank) {
            *stream = Some(call(address, hosts, &own, end)?);
        }
        if let Some(listener) = listener {
            accept(&listener, hosts, &own, &mut streams, end)?;
        }
        let lost = streams.iter().take(hosts.rank).position(|stream| stream.as_ref().is_some_and(has_ended));
        if let Some(rank) = lost {
            return Err(Error::unavailable(format!(
                "host {rank} ({}) ended while this host waited for other hosts",
                hosts.addresses[rank]
            )));
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

    /// Returns the number of hosts, including this host.
    pub(crate) fn count(&self) -> usize {
        self.peers.len()
    }

    /// Returns the part of the rows of tables that this host holds.
    pub(crate) fn rows(&self) -> HostShare {
        HostShare { host: self.rank as u32, hosts: self.count() as u32 }
    }

    /// Returns which of `count` events or candidates belong to a host: complete micro-batches.
    pub(crate) fn share(&self, count: usize, host: usize) -> Range<usize> {
        let micro_batches = self.micro_batches(count, host);
        count.min(micro_batches.start * MICRO_BATCH)..count.min(micro_batches.end * MICRO_BATCH)
    }

    /// Returns the micro-batches of a host among the micro-batches of `count` events or candidates.
    pub(crate) fn micro_batches(&self, count: usize, host: usize) -> Range<usize> {
        let all = count.div_ceil(MICRO_BATCH);
        all * host / self.count()..all * (host + 1) / self.count()
    }

    /// Returns which of `count` events or candidates belong to this host.
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
        peer.ok_or_else(|| Error::internal(format!("no connection to host {host} of {} hosts", self.count())))
    }

    /// Queues a message to a host.
    ///
    /// # Errors
    /// `Unavailable` if the host is lost.
    pub(crate) fn send(&self, host: usize, kind: Kind, payload: impl Into<Payload>) -> Result<()> {
        let peer = self.peer(host)?;
        let sent = locked(&peer.sending).as_ref().is_some_and(|sender| sender.send((kind, payload.into())).is_ok());
        if sent {
            return Ok(());
        }
        Err(self.reason(peer))
    }

    /// Returns the reason why a host ended. Skips the messages that the host sent before the reason.
    fn reason(&self, peer: &Peer) -> Error {
        let mut receiving = locked(&peer.receiving);
        let mut skipped = vec![0; SKIPPED_BYTES];
        let end = Instant::now() + LAST_MESSAGES;
        while Instant::now() < end {
            let mut bytes = [0; HEADER_BYTES];
            let read = self.read(&mut receiving.stream, &mut bytes);
            let header = match read.and_then(|()| Header::decode(&bytes)) {
                Ok(header) => header,
                Err(e) => return e.within(&peer.name),
            };
            if let Some(failure) = self.failure(peer, &header, &mut receiving.stream) {
                return failure;
            }
            let mut left = header.length;
            while left > 0 && Instant::now() < end {
                let count = left.min(SKIPPED_BYTES as u64);
                if let Err(e) = self.read(&mut receiving.stream, &mut skipped[..count as usize]) {
                    return e.within(&peer.name);
                }
                left -= count;
            }
        }
        Error::unavailable(format!("{} is lost", peer.name))
    }

    /// Reads the reason why a host failed, if the message is a [`Kind::Failure`].
    fn failure(&self, peer: &Peer, header: &Header, stream: &mut TcpStream) -> Option<Error> {
        if header.kind != Kind::Failure || header.length > FAILURE_BYTES_MAX as u64 {
            return None;
        }
        let mut text = vec![0; header.length as usize];
        let read = self.read(stream, &mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        Some(read.err().unwrap_or_else(|| Error::unavailable(text)).within(format!("{} failed", peer.name)))
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
    /// `Unavailable` if the host is lost or failed, or sent another message; the run can then be restarted.
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

    /// Exchanges a list of integers, `own`, with all other hosts. Returns the lists by rank.
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

    /// Exchanges numbers, `own`, with all other hosts. Returns the numbers by rank.
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
        self.receive_numbers(kind, own, count)
    }

    /// Receives numbers from all other hosts; `own` are this host's numbers, which were sent before. Returns the numbers of all
    /// hosts, by rank.
    ///
    /// # Errors
    /// As [`Mesh::numbers`].
    pub(crate) fn receive_numbers(
        &self,
        kind: Kind,
        own: Vec<f32>,
        count: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<f32>>> {
        let mut own = Some(own);
        let received = |host: usize| match host == self.rank {
            true => Ok(own.take().unwrap_or_default()),
            false => self.numbers(host, kind, count(host)),
        };
        (0..self.count()).map(received).collect()
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
        if let Some(failure) = self.failure(peer, &header, &mut receiving.stream) {
            return Err(failure);
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

    /// Fills a buffer. Fails if the sender is silent for the timeout, or if another host has ended, for which the sender may be
    /// waiting.
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
                        return Err(Error::unavailable(format!("no message arrived, and {other} has ended")));
                    }
                }
                Err(e) => return Err(Error::unavailable(format!("lost: {e}"))),
            }
        }
        Ok(())
    }

    /// Returns the name of a host that has ended, among the hosts from which no thread is reading.
    fn lost(&self) -> Option<&str> {
        let mut peers = self.peers.iter().flatten();
        let ended = |peer: &&Peer| peer.receiving.try_lock().is_ok_and(|receiving| has_ended(&receiving.stream));
        peers.find(ended).map(|peer| peer.name.as_str())
    }

    /// Reports to the other hosts that this host ends with an error.
    pub(crate) fn fail(&self, error: &Error) {
        let mut text = error.to_string();
        text.truncate(text.floor_char_boundary(FAILURE_BYTES_MAX));
        for peer in self.peers.iter().flatten() {
            let sending = locked(&peer.sending);
            // The send fails if the host is lost, which then needs no reason.
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

/// Writes messages, and heartbeats between them, until the queue is closed or the connection ends. Drops `done` at the end.
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
