//! Connection setup between the hosts of a run: each host calls the hosts of lower rank, and accepts the hosts of
//! higher rank.

use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::frame::{HEADER_BYTES, Header, Kind};
use super::handshake::{self, Description, Head};
use super::options::Hosts;
use sterling_core::error::{Error, Result};

/// Interval between two attempts to reach a host that does not run yet.
const RETRY: Duration = Duration::from_millis(50);
/// Maximum number of accepted connections whose request has not arrived yet.
const ARRIVING_MAX: usize = 64;
/// Read timeout when checking whether a connection has ended.
const PEEK: Duration = Duration::from_millis(1);

/// Calls a host until it answers.
pub(super) fn call(address: &str, hosts: &Hosts, own: &Description, end: Instant) -> Result<TcpStream> {
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

/// Accepts hosts of higher rank until all of them are connected. Other connections are rejected.
pub(super) fn accept(
    listener: &TcpListener,
    hosts: &Hosts,
    own: &Description,
    streams: &mut [Option<TcpStream>],
    end: Instant,
) -> Result<()> {
    let place = |e| Error::io(format!("listening on {}", hosts.addresses[hosts.rank]), e);
    listener.set_nonblocking(true).map_err(place)?;
    let expected = |rank: usize| (hosts.rank + 1..hosts.addresses.len()).contains(&rank);
    let mut rejected = String::new();
    // Connections whose request has not arrived yet: other connections must not wait for them.
    let mut arriving: Vec<(TcpStream, Head)> = Vec::new();
    loop {
        if streams.iter().skip(hosts.rank + 1).all(Option::is_some) {
            // A host may call again, if it ended while this host waited for others, or if it closed the connection.
            let before = hosts.rank + 1..streams.len();
            let ended: Vec<usize> = before.filter(|rank| streams[*rank].as_ref().is_some_and(has_ended)).collect();
            if ended.is_empty() {
                return Ok(());
            }
            ended.into_iter().for_each(|rank| streams[rank] = None);
        }
        if Instant::now() >= end {
            let missing = (hosts.rank + 1..streams.len()).filter(|rank| streams[*rank].is_none());
            let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
            let (missing, waited) = (missing.join(", "), hosts.join_timeout.as_secs_f32());
            return Err(Error::unavailable(format!("hosts {missing} did not connect within {waited} s{rejected}")));
        }
        while arriving.len() < ARRIVING_MAX {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true).map_err(place)?;
                    arriving.push((stream, Head::new()));
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(place(e)),
            }
        }
        let count = arriving.len();
        let mut silent = Vec::new();
        for (mut stream, mut head) in arriving.drain(..) {
            match handshake::receive(&mut stream, &mut head, hosts.key.as_deref(), own, expected) {
                Ok(None) => silent.push((stream, head)),
                Ok(Some(Description { rank, .. })) => {
                    stream.set_nonblocking(false).map_err(place)?;
                    // A host that connects again was restarted.
                    streams[rank] = Some(stream);
                }
                Err(e) => rejected = format!("; the last rejected connection: {e}"),
            }
        }
        arriving = silent;
        if arriving.len() == ARRIVING_MAX {
            arriving.remove(0);
        }
        if arriving.len() == count {
            std::thread::sleep(RETRY / 10);
        }
    }
}

/// Returns whether the host at the other end has ended, or reports a failure in its next message.
pub(super) fn has_ended(stream: &TcpStream) -> bool {
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
