//! Reads and writes with a definite outcome, on top of a bucket whose answers may be lost or damaged.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::health::back_off;
use super::{Objects, Tag, WriteCondition};
use sterling_core::error::{Error, Kind, Result};

/// Maximum number of retries of a write, and the maximum time for them.
const REPEATS: (u32, Duration) = (4, Duration::from_secs(25));
/// Maximum number of retries of a read that does not find an existing object.
const MISSES: u32 = 3;
/// Backoff between retries: first delay and maximum. Reading an object back between two writes has a separate backoff.
const WAIT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Writes an object conditionally, with a definite outcome. If an answer is lost or reports a failed condition, the stored object
/// is read back and compared. No other writer may write the same bytes, so the bytes must contain a nonce or a number assigned to
/// this writer.
///
/// # Errors
/// `Conflict` if another object is stored; `Unavailable` if it is unknown whether the write happened.
pub fn replace(objects: &dyn Objects, key: &str, bytes: &[u8], over: &WriteCondition) -> Result<Tag> {
    let began = Instant::now();
    let mut failures = 0;
    loop {
        let error = match objects.put(key, bytes.to_vec(), over) {
            Err(e) if matches!(e.kind(), Kind::Conflict | Kind::Unavailable) => e,
            other => return other,
        };
        match objects.get(key) {
            Ok((there, tag)) if there == bytes => return Ok(tag),
            // The write reported an existing object, but the read found none: one of the answers is wrong, so retry.
            Err(e) if e.kind() == Kind::NotFound && *over == WriteCondition::Nothing => {}
            Err(e) if e.kind() == Kind::Unavailable && error.kind() == Kind::Conflict => return Err(e),
            _ if error.kind() == Kind::Conflict => return Err(error),
            _ => {}
        }
        failures += 1;
        if failures > REPEATS.0 || began.elapsed() > REPEATS.1 {
            return Err(error);
        }
        sleep(back_off(WAIT, failures));
    }
}

/// Reads an object without a checksum until two reads agree, so that damaged data is not accepted.
///
/// # Errors
/// As [`Objects::get`]; `NotReady` if the object keeps changing.
pub fn read_twice(objects: &dyn Objects, key: &str) -> Result<(Vec<u8>, Tag)> {
    let mut before = vec![objects.get(key)?.0];
    for _ in 0..REPEATS.0 {
        // The object was read before, so `NotFound` is transient.
        let (bytes, tag) = found(|| objects.get(key))?;
        if before.contains(&bytes) {
            return Ok((bytes, tag));
        }
        before.push(bytes);
    }
    Err(Error::not_ready(format!("{key}: no two reads agreed, expected an object that does not change")))
}

/// Retries a read that does not find an object which is known to exist.
///
/// # Errors
/// Errors of the read.
pub fn found<T>(mut read: impl FnMut() -> Result<T>) -> Result<T> {
    let mut failures = 0;
    loop {
        match read() {
            Err(e) if e.kind() == Kind::NotFound && failures < MISSES => {
                failures += 1;
                sleep(back_off(WAIT, failures));
            }
            other => return other,
        }
    }
}
