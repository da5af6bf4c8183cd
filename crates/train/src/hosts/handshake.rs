//! Handshake between hosts: an HTTP/1.1 request that upgrades its connection to messages (`frame`).
//!
//! ```text
//! GET /v1/train HTTP/1.1                     HTTP/1.1 101 Switching Protocols
//! Host: trainer-0:7400                       Connection: Upgrade
//! Connection: Upgrade                        Upgrade: sterling-train
//! Upgrade: sterling-train
//! Authorization: Bearer KEY
//! Sterling-Host: {"rank": 1, "run": …}
//! ```
//!
//! A host that belongs to another run, or has no valid key, is answered with 409 or 401 and the difference, and its connection is
//! closed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use sterling_core::error::{Error, Kind, Result};

/// Maximum length of the head of a request or answer.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Time for one handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two checks of the deadline while an answer is awaited.
const READ_WAIT: Duration = Duration::from_millis(100);
const PROTOCOL: &str = "sterling-train";
/// Header with the description of a host.
const DESCRIPTION: &str = "Sterling-Host";

/// Names and values that all hosts of a run have in common.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity(pub(crate) Vec<(String, String)>);

impl Identity {
    /// Returns the first difference of another host's identity, with its values.
    pub(super) fn difference(&self, other: &Identity) -> Option<String> {
        let value = |of: &Identity, name: &str| of.0.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
        let names = self.0.iter().chain(&other.0).map(|(name, _)| name);
        let differs = |name: &&String| value(self, name) != value(other, name);
        let reported = |value: Option<String>| value.unwrap_or_else(|| "missing".into());
        let first = names.clone().find(differs)?;
        Some(format!("{first} is {}, expected {}", reported(value(other, first)), reported(value(self, first))))
    }
}

/// Description of a host, sent in the handshake.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Description {
    pub(super) rank: usize,
    pub(super) identity: Identity,
}

/// Sends the description of this host on a new connection, and waits for the answer.
///
/// # Errors
/// `Conflict` with the difference that the other host names, or with its rejection; `Unavailable` if there is no answer.
pub(super) fn present(stream: &mut TcpStream, address: &str, key: Option<&str>, own: &Description) -> Result<()> {
    let description = serde_json::to_string(own).map_err(|e| Error::internal(format!("handshake: {e}")))?;
    let key = key.map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
    let request = format!(
        "GET /v1/train HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n{key}{DESCRIPTION}: \
         {description}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).map_err(|e| Error::unavailable(format!("{address}: {e}")))?;
    let mut head = Head::new();
    stream.set_read_timeout(Some(READ_WAIT)).map_err(|e| Error::unavailable(format!("{address}: {e}")))?;
    while !head.read(stream).map_err(|e| e.within(address))? {}
    let mut headers = [httparse::EMPTY_HEADER; 16];
    let mut answer = httparse::Response::new(&mut headers);
    let parsed =
        answer.parse(&head.bytes).map_err(|e| Error::unavailable(format!("{address}: not an HTTP answer: {e}")));
    parsed?;
    if answer.code == Some(101) {
        return Ok(());
    }
    let why = answer.headers.iter().find(|header| header.name.eq_ignore_ascii_case("Sterling-Problem"));
    let why = why.map_or("".into(), |header| String::from_utf8_lossy(header.value).into_owned());
    let code = answer.code.unwrap_or(0);
    Err(Error::conflict(format!("{address} rejected this host with status {code}: {why}")))
}

/// Receives the request of a host on a non-blocking connection, and answers it; `None` if the request has not arrived yet.
///
/// # Errors
/// `Conflict` with the difference; `Invalid` for another request or a wrong key. In both cases the other host has been answered;
/// `Unavailable` if the connection ends or is too slow.
pub(super) fn receive(
    stream: &mut TcpStream,
    head: &mut Head,
    key: Option<&str>,
    own: &Description,
    is_expected: impl Fn(usize) -> bool,
) -> Result<Option<Description>> {
    let read = head.read(stream);
    if matches!(read, Ok(false)) {
        return Ok(None);
    }
    let mut answer = |status: &str, problem: &str| {
        let problem: String = problem.chars().filter(|c| !c.is_control()).take(1000).collect();
        let text = format!(
            "HTTP/1.1 {status}\r\nSterling-Problem: {problem}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        // The rejected host may have ended, so a failed write is ignored.
        let _ = stream.write_all(text.as_bytes());
    };
    if let Err(e) = read {
        if e.kind() == Kind::Invalid {
            answer("431 Request Header Fields Too Large", &e.to_string());
        }
        return Err(e);
    }
    let (bearer, description) = match request(&head.bytes) {
        Ok(request) => request,
        Err(e) => {
            answer("400 Bad Request", &e.to_string());
            return Err(e);
        }
    };
    let is_known = key.is_none_or(|key| bearer.as_deref().unwrap_or("").as_bytes().ct_eq(key.as_bytes()).into());
    if !is_known {
        answer("401 Unauthorized", "the key is missing or differs from the key of this host");
        return Err(Error::invalid("a host did not send the expected key"));
    }
    let rank = description.rank;
    let problem = match own.identity.difference(&description.identity) {
        None if is_expected(rank) => None,
        None => Some(format!("host {rank} is not expected by host {}", own.rank)),
        Some(difference) => Some(format!("host {rank}: {difference} as on host {}", own.rank)),
    };
    if let Some(problem) = problem {
        answer("409 Conflict", &problem);
        return Err(Error::conflict(problem));
    }
    let text = format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n");
    stream.write_all(text.as_bytes()).map_err(|e| Error::unavailable(format!("host {rank}: {e}")))?;
    Ok(Some(description))
}

/// Parses a request; returns its key and the description of the host.
fn request(head: &[u8]) -> Result<(Option<String>, Description)> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(head).map_err(|e| Error::invalid(format!("not an HTTP request: {e}")))?;
    let header = |name: &str| {
        let found = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        found.map(|header| String::from_utf8_lossy(header.value).into_owned())
    };
    let is_upgrade = header("Upgrade").is_some_and(|protocol| protocol == PROTOCOL);
    if (request.method, request.path) != (Some("GET"), Some("/v1/train")) || !is_upgrade {
        return Err(Error::invalid(format!("expected GET /v1/train with `Upgrade: {PROTOCOL}`")));
    }
    let key = header("Authorization").and_then(|value| value.strip_prefix("Bearer ").map(str::to_owned));
    let description = header(DESCRIPTION).unwrap_or_default();
    let description = serde_json::from_str(&description).map_err(|e| Error::invalid(format!("{DESCRIPTION}: {e}")))?;
    Ok((key, description))
}

/// Head of a request or answer while it arrives.
pub(super) struct Head {
    bytes: Vec<u8>,
    end: Instant,
}

impl Head {
    pub(super) fn new() -> Self {
        Head { bytes: Vec::new(), end: Instant::now() + HANDSHAKE_TIMEOUT }
    }

    /// Reads the bytes that have arrived, one by one: bytes after the head belong to messages. Returns true at the end of the head.
    ///
    /// # Errors
    /// `Unavailable` if the connection ends or the head takes too long; `Invalid` if the head has too many bytes.
    fn read(&mut self, stream: &mut TcpStream) -> Result<bool> {
        use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        while !self.bytes.ends_with(b"\r\n\r\n") {
            let is_late = Instant::now() >= self.end;
            if is_late || self.bytes.len() == HEAD_BYTES_MAX {
                let got = self.bytes.len();
                let what =
                    format!("got {got} bytes of a handshake, expected its end within {HEAD_BYTES_MAX} bytes and 5 s");
                return Err(Error::new(if is_late { Kind::Unavailable } else { Kind::Invalid }, what));
            }
            let mut byte = [0];
            match stream.read(&mut byte) {
                Ok(0) => return Err(Error::unavailable("the connection ended in the handshake")),
                Ok(_) => self.bytes.push(byte[0]),
                Err(e) if matches!(e.kind(), TimedOut | WouldBlock) => return Ok(false),
                Err(e) if e.kind() == Interrupted => {}
                Err(e) => return Err(Error::unavailable(format!("handshake: {e}"))),
            }
        }
        Ok(true)
    }
}
