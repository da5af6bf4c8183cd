//! Byte format of a segment: a header, then records. All numbers are little-endian.
//!
//! | header, 32 bytes | |
//! |---|---|
//! | `STRLJRNL` | 8 bytes |
//! | format u32 | [`FORMAT`] |
//! | zero u32 | |
//! | first u64 | position of the segment's first record |
//! | check u64 | XXH3-64 of the 24 bytes before |
//!
//! | record, 32 bytes and the payload | |
//! |---|---|
//! | length u32 | of the payload, 1 to [`PAYLOAD_BYTES_MAX`] |
//! | head check u32 | low half of XXH3-64 of length, position and synced |
//! | position u64 | one more than that of the previous record |
//! | synced u64 | last position known to be durable when this record was written |
//! | check u64 | XXH3-64 of the payload with the position as seed |
//! | payload | |
//!
//! The head has its own checksum, so that a corrupt length is not mistaken for a record that is truncated by the end of the file.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Format version that is written and read.
pub(super) const FORMAT: u32 = 1;
pub(super) const HEADER_BYTES: usize = 32;
/// Bytes of a record before its payload.
pub(super) const HEAD_BYTES: usize = 32;
/// Longest payload of a record, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;

const MAGIC: &[u8; 8] = b"STRLJRNL";

/// Returns the header of a segment.
pub(super) fn header(first: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    bytes[16..24].copy_from_slice(&first.to_le_bytes());
    let check = xxh3_64(&bytes[..24]);
    bytes[24..].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// Returns the position of a segment's first record, or the reason why its header is invalid.
pub(super) fn read_header(bytes: &[u8; HEADER_BYTES]) -> Result<u64, String> {
    if &bytes[..8] != MAGIC {
        return Err("the file does not begin with the header of a journal segment".into());
    }
    let first = number(&bytes[16..24]);
    match u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) {
        _ if number(&bytes[24..]) != xxh3_64(&bytes[..24]) => Err("the segment header is damaged".into()),
        FORMAT => Ok(first),
        other => Err(format!("format {other}, expected {FORMAT}")),
    }
}

/// Appends a record to `out`.
pub(super) fn write_record(position: u64, synced: u64, payload: &[u8], out: &mut Vec<u8>) {
    let length = payload.len() as u32;
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&head_check(length, position, synced).to_le_bytes());
    out.extend_from_slice(&position.to_le_bytes());
    out.extend_from_slice(&synced.to_le_bytes());
    out.extend_from_slice(&payload_check(position, payload).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Fields of a record before its payload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) position: u64,
    pub(super) synced: u64,
    check: u64,
}

impl Head {
    /// Parses the head of a record; `None` if the bytes are no record head.
    pub(super) fn read(bytes: &[u8]) -> Option<Head> {
        let bytes: &[u8; HEAD_BYTES] = bytes.first_chunk()?;
        let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let check = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let (position, synced) = (number(&bytes[8..16]), number(&bytes[16..24]));
        let is_length = (1..=PAYLOAD_BYTES_MAX).contains(&(length as usize));
        let is_whole = is_length && check == head_check(length, position, synced);
        is_whole.then(|| Head { length: length as usize, position, synced, check: number(&bytes[24..]) })
    }

    pub(super) fn is_check_of(&self, payload: &[u8]) -> bool {
        payload.len() == self.length && self.check == payload_check(self.position, payload)
    }
}

fn head_check(length: u32, position: u64, synced: u64) -> u32 {
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes[4..12].copy_from_slice(&position.to_le_bytes());
    bytes[12..].copy_from_slice(&synced.to_le_bytes());
    xxh3_64(&bytes) as u32
}

fn payload_check(position: u64, payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, position)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
