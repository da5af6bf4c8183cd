//! Byte format of a message: the records of a commit. All numbers are little-endian.
//!
//! | | |
//! |---|---|
//! | `STRLSTRM` | 8 bytes |
//! | format u32 | [`FORMAT`] |
//! | count u32 | number of records; 0 in the message that begins a stream |
//! | first u64 | position of the first record, or of the next one if there is none |
//! | commit u128 | unique commit number |
//! | before u128 | number of the commit before; 0 in the first message |
//! | tries u32 | number of attempts in which another server's commit was stored first |
//! | needs u32 | microseconds that an attempt takes this writer |
//! | records | length as u32, and bytes, of each |
//! | check u64 | XXH3-64 of all bytes before |

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

/// Format version that is written and read.
const FORMAT: u32 = 1;
const MAGIC: &[u8; 8] = b"STRLSTRM";
const HEAD_BYTES: usize = 64;
const CHECK_BYTES: usize = 8;
/// Bytes of a message besides its records, and of a record besides its payload.
pub(super) const FRAME_BYTES: usize = HEAD_BYTES + CHECK_BYTES;
pub(super) const LENGTH_BYTES: usize = 4;

/// Returns the approximate time for which a writer has tried without success: `tries` attempts of `needs` microseconds.
pub(super) fn tried_for(tries: u32, needs: u32) -> Duration {
    Duration::from_micros(needs.into()) * tries
}

/// Records that are committed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    /// Position of the first record, or of the journal's next record if the commit holds none.
    pub(super) first: u64,
    /// Unique number of the commit.
    pub(super) number: u128,
    /// Unique number of the previous commit. A mismatch reveals that a message which was read has been lost and
    /// replaced.
    pub(super) before: u128,
    /// Number of attempts in which the writer was preceded by another server's commit.
    pub(super) tries: u32,
    /// Microseconds that an attempt to append takes the writer.
    pub(super) needs: u32,
    pub(super) records: Vec<Vec<u8>>,
}

/// Header of a published commit, read before it is known whether the stream accepts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attempt {
    pub(super) number: u128,
    pub(super) first: u64,
    pub(super) tries: u32,
    pub(super) needs: u32,
}

impl Attempt {
    /// Parses the header of a message, if it has one.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let head = bytes.first_chunk::<HEAD_BYTES>().filter(|head| head.starts_with(MAGIC))?;
        Some(Attempt {
            number: u128::from_le_bytes(*head[24..].first_chunk()?),
            first: u64::from_le_bytes(*head[16..].first_chunk()?),
            tries: u32::from_le_bytes(*head[56..].first_chunk()?),
            needs: u32::from_le_bytes(*head[60..].first_chunk()?),
        })
    }
}

/// A message of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// A commit whose headers match its location in the stream.
    Original(Commit),
    /// A commit without matching headers: published again by another program, or part of a copied stream.
    Copy(Commit),
    /// A message that no journal wrote, with a description.
    Stray(String),
}

impl Read {
    /// Parses a message from its payload, its sequence number, and the number of the previous message in its headers.
    ///
    /// # Errors
    /// Reason why a message of a journal cannot be read: it is damaged, or of a later release.
    pub(super) fn of(payload: &[u8], sequence: u64, expected: Option<u64>) -> Result<Self, String> {
        match Commit::decode(payload) {
            Ok(commit) if expected.is_some_and(|expected| expected + 1 == sequence) => Ok(Read::Original(commit)),
            Ok(commit) => Ok(Read::Copy(commit)),
            Err(why) if payload.starts_with(MAGIC) => Err(why),
            Err(why) => Ok(Read::Stray(why)),
        }
    }

    /// Returns the commit of a message, or the reason to skip the message. A copied commit is valid only in a stream
    /// that was copied completely.
    pub(super) fn commit(self, is_copied: bool) -> Result<Commit, String> {
        match self {
            Read::Original(commit) => Ok(commit),
            Read::Copy(commit) if is_copied => Ok(commit),
            Read::Copy(commit) => Err(format!("a copy of the commit at position {}", commit.first)),
            Read::Stray(what) => Err(what),
        }
    }
}

impl Commit {
    /// Returns the position of the last record, or of the record before the commit if the commit holds none.
    pub(super) fn last(&self) -> u64 {
        self.first + self.records.len() as u64 - 1
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes =
            Vec::with_capacity(FRAME_BYTES + self.records.iter().map(|r| LENGTH_BYTES + r.len()).sum::<usize>());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        bytes.extend_from_slice(&(self.records.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.first.to_le_bytes());
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&self.before.to_le_bytes());
        bytes.extend_from_slice(&self.tries.to_le_bytes());
        bytes.extend_from_slice(&self.needs.to_le_bytes());
        for record in &self.records {
            bytes.extend_from_slice(&(record.len() as u32).to_le_bytes());
            bytes.extend_from_slice(record);
        }
        bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Decodes the output of [`Commit::encode`]; the error is the reason why the bytes are invalid.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let complete = bytes.split_last_chunk::<CHECK_BYTES>();
        let (Some((body, check)), true) = (complete, bytes.starts_with(MAGIC)) else {
            return Err("not a journal message".into());
        };
        if u64::from_le_bytes(*check) != xxh3_64(body) {
            return Err("damaged".into());
        }
        let (head, mut rest) = body.split_first_chunk::<HEAD_BYTES>().ok_or("truncated")?;
        let number = |from: usize| u32::from_le_bytes([head[from], head[from + 1], head[from + 2], head[from + 3]]);
        if number(8) != FORMAT {
            return Err(format!("format {}, expected {FORMAT}", number(8)));
        }
        let first = head[16..24].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let commit = |from: usize| head[from..].first_chunk().map_or(0, |bytes| u128::from_le_bytes(*bytes));
        let mut records = Vec::new();
        for _ in 0..number(12) {
            let (length, more) = rest.split_first_chunk::<LENGTH_BYTES>().ok_or("truncated")?;
            let (record, more) = more.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or("truncated")?;
            records.push(record.to_vec());
            rest = more;
        }
        if !rest.is_empty() {
            return Err("bytes follow the last record of the message".into());
        }
        match first > 0 && first.checked_add(records.len() as u64).is_some() {
            true => Ok(Commit {
                first,
                number: commit(24),
                before: commit(40),
                tries: number(56),
                needs: number(60),
                records,
            }),
            false => Err(format!("the first position is {first}, which is invalid")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn commits_round_trip_and_other_bytes_are_rejected(head in (1..u64::MAX / 2, any::<u128>(), any::<u128>()), cry: (u32, u32), records: Vec<Vec<u8>>, at: usize, bit in 0u8..8) {
            let ((first, number, before), (tries, needs)) = (head, cry);
            let commit = Commit { first, number, before, tries, needs, records };
            let bytes = commit.encode();
            prop_assert_eq!(bytes.len(), FRAME_BYTES + commit.records.iter().map(|r| r.len() + LENGTH_BYTES).sum::<usize>());
            prop_assert_eq!(Attempt::read(&bytes), Some(Attempt { number, first, tries, needs }));
            prop_assert_eq!(Commit::decode(&bytes).unwrap(), commit);
            let mut flipped = bytes.clone();
            flipped[at % bytes.len()] ^= 1 << bit;
            prop_assert!(Commit::decode(&flipped).is_err());
            prop_assert!(Commit::decode(&bytes[..at % bytes.len()]).is_err());
        }
    }

    #[test]
    fn messages_of_others_are_strays_and_damaged_commits_are_errors() {
        let commit = Commit { first: 5, number: 1, before: 0, tries: 0, needs: 0, records: vec![vec![1]] };
        let bytes = commit.encode();
        let read = |expected| Read::of(&bytes, 7, expected).unwrap();
        assert_eq!(read(Some(6)), Read::Original(commit.clone()));
        for copied in [None, Some(5), Some(7)] {
            assert_eq!(read(copied), Read::Copy(commit.clone()));
            assert_eq!(read(copied).commit(true), Ok(commit.clone()));
            assert!(read(copied).commit(false).unwrap_err().contains("copy"));
        }
        for stray in [&b""[..], b"hello", b"STRLSTR", &[0; 100]] {
            assert!(matches!(Read::of(stray, 7, Some(6)), Ok(Read::Stray(_))), "{stray:?}");
        }
        let mut damaged = bytes.clone();
        damaged[20] ^= 1;
        let mut later = bytes[..bytes.len() - CHECK_BYTES].to_vec();
        later[8] = 2;
        later.extend_from_slice(&xxh3_64(&later).to_le_bytes());
        for (bytes, why) in [(damaged, "damaged"), (later, "format 2"), (bytes[..30].to_vec(), "damaged")] {
            let reported = Read::of(&bytes, 7, Some(6)).unwrap_err();
            assert!(reported.contains(why), "{reported}");
        }
    }

    #[test]
    fn impossible_positions_are_rejected() {
        for (first, records) in [(0, 0), (0, 1), (u64::MAX, 1), (u64::MAX - 1, 2)] {
            let commit = Commit { first, number: 1, before: 0, tries: 0, needs: 0, records: vec![vec![1]; records] };
            let error = Commit::decode(&commit.encode()).unwrap_err();
            assert!(error.contains(&first.to_string()), "{error}");
        }
    }
}
