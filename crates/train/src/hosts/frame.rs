//! Messages between hosts: a header of 24 bytes, then the payload.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | [`Kind`] |
//! | 1..4 | zeros |
//! | 4..8 | number of the message on its connection, without heartbeats |
//! | 8..16 | length of the payload |
//! | 16..24 | XXH3-64 of the payload |
//!
//! Integers and floats are little-endian. A receiver knows the kind and the length of the next message, or a bound of the
//! length, before it allocates memory for it.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use sterling_core::error::{Error, Result};

/// Length of a header.
pub(super) const HEADER_BYTES: usize = 24;
/// Maximum length of the description of a failure.
pub(super) const FAILURE_BYTES_MAX: usize = 4096;

/// Declares the kinds of messages: name, number, purpose.
macro_rules! kinds {
    ($($kind:ident = $number:literal, $doc:literal;)*) => {
        /// Kind of a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Kind {
            $(#[doc = $doc] $kind = $number,)*
        }

        impl Kind {
            fn numbered(number: u8) -> Option<Kind> {
                match number {
                    $($number => Some(Kind::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    Heartbeat = 0, "The host is alive.";
    Failure = 1, "The host ends with this error.";
    Start = 2, "Checkpoint to resume from.";
    State = 3, "Bytes of a state file.";
    Step = 4, "Number of a step, and hash of the events up to the end of the step.";
    Rows = 5, "Rows that the examples of the receiver read.";
    Vectors = 6, "Vectors of items.";
    Ranks = 7, "Ranks of events, or predictions.";
    Losses = 8, "Terms of the loss.";
    Candidates = 9, "Sums of the gradients of the receiver's candidates over the sender's events.";
    Gradients = 10, "Gradients of bags and sequences, for the receiver's rows.";
    Sums = 11, "Sums of dense gradients over the sender's micro-batches.";
    Counts = 13, "Counts for the report.";
    Request = 14, "Request for rows of the receiver.";
    Answer = 15, "Requested rows.";
}

/// Payload of a message; several messages may share one.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// Bytes, sent as they are.
    Bytes(Arc<[u8]>),
    /// Floats, sent in little-endian order.
    Numbers(Arc<Vec<f32>>),
}

impl Payload {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Payload::Bytes(bytes) => bytes,
            Payload::Numbers(numbers) => bytemuck::cast_slice(numbers),
        }
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Payload::Bytes(bytes.into())
    }
}

impl From<Arc<Vec<f32>>> for Payload {
    fn from(numbers: Arc<Vec<f32>>) -> Self {
        Payload::Numbers(numbers)
    }
}

impl From<Vec<f32>> for Payload {
    fn from(numbers: Vec<f32>) -> Self {
        Payload::Numbers(Arc::new(numbers))
    }
}

/// Header of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) number: u32,
    pub(super) length: u64,
    pub(super) sum: u64,
}

impl Header {
    pub(super) fn of(kind: Kind, number: u32, payload: &[u8]) -> Self {
        Header { kind, number, length: payload.len() as u64, sum: xxh3_64(payload) }
    }

    pub(super) fn encoded(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..].copy_from_slice(&self.sum.to_le_bytes());
        bytes
    }

    /// # Errors
    /// `Unavailable` if the bytes are no header.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let number = |from: usize| {
            let bytes = bytes[from..].iter().take(8).enumerate();
            bytes.fold(0u64, |all, (n, byte)| all | u64::from(*byte) << (8 * n))
        };
        let kind = Kind::numbered(bytes[0]).filter(|_| bytes[1..4] == [0; 3]);
        let kind = kind.ok_or_else(|| {
            Error::unavailable(format!(
                "got a message header that begins with {:?}, which is not of this protocol",
                &bytes[..4]
            ))
        })?;
        Ok(Header { kind, number: number(4) as u32, length: number(8), sum: number(16) })
    }

    /// Compares the payload with its checksum.
    ///
    /// # Errors
    /// `Unavailable` if the payload was changed on its way.
    pub(super) fn check(&self, payload: &[u8]) -> Result<()> {
        match xxh3_64(payload) == self.sum {
            true => Ok(()),
            false => {
                Err(Error::unavailable(format!("message {:?}: the payload does not match its checksum", self.kind)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_come_back_and_others_are_rejected() {
        for (number, kind) in [(0, Kind::Heartbeat), (7, Kind::Rows), (u32::MAX, Kind::Answer)] {
            let header = Header::of(kind, number, &[1, 2, 3]);
            assert_eq!(Header::decode(&header.encoded()).unwrap(), header);
            assert!(header.check(&[1, 2, 3]).is_ok() && header.check(&[1, 2, 4]).is_err());
        }
        for at in 0..4 {
            let mut bytes = Header::of(Kind::Rows, 1, &[]).encoded();
            bytes[at] = 200;
            assert!(Header::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
