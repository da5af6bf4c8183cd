//! Calls whose effect is certain, over a bucket whose answers may be lost or damaged.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::health::back_off;
use super::{Objects, Over, Tag};
use sterling_core::error::{Error, Kind, Result};

/// How often a write is tried again, and for how long at most.
const REPEATS: (u32, Duration) = (4, Duration::from_secs(25));
/// How often a read is repeated that does not find what is there.
const MISSES: u32 = 3;
/// How long the first repetition waits, and each at most. The read between two of them waits on its own.
const WAIT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Writes an object under a condition, whatever becomes of single answers: where one is lost or says that the condition does
/// not hold, what stands there is read back. The bytes must be those of no other writer: they carry a nonce or a number that was
/// given to this one.
///
/// # Errors
/// `Conflict` where another object stands there; `Unavailable` where it is not known whether it was written.
pub fn replace(objects: &dyn Objects, key: &str, bytes: &[u8], over: &Over) -> Result<Tag> {
    let began = Instant::now();
    let mut failures = 0;
    loop {
        let error = match objects.put(key, bytes.to_vec(), over) {
            Err(e) if matches!(e.kind(), Kind::Conflict | Kind::Unavailable) => e,
            other => return other,
        };
        match objects.get(key) {
            Ok((there, tag)) if there == bytes => return Ok(tag),
            // Refused for an object that is not there: both cannot be.
            Err(e) if e.kind() == Kind::NotFound && *over == Over::Nothing => {}
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

/// Reads an object that has no checksum until two reads agree: a damaged one must not be taken for what was written.
///
/// # Errors
/// As [`Objects::get`]; `NotReady` where the object changes all the time.
pub fn read_twice(objects: &dyn Objects, key: &str) -> Result<(Vec<u8>, Tag)> {
    let mut before = vec![objects.get(key)?.0];
    for _ in 0..REPEATS.0 {
        // It was there a moment ago.
        let (bytes, tag) = found(|| objects.get(key))?;
        if before.contains(&bytes) {
            return Ok((bytes, tag));
        }
        before.push(bytes);
    }
    Err(Error::not_ready(format!("{key}: it was replaced meanwhile")))
}

/// Repeats a read for a moment where it finds nothing: for an object that is known to be there.
///
/// # Errors
/// As the read.
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
