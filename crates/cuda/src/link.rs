//! What the way from the host to a card carries.

use super::driver::{Streams, Work};
use super::memory::Device;
use sterling_core::error::{Error, Result};

/// Pinned memory of the host, memory of the card, and a stream between them.
struct Link<'a> {
    streams: &'a dyn Streams,
    from: u64,
    to: u64,
    stream: Option<u64>,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        // SAFETY: all came from the driver's own calls, and what used them has been waited for; 0 is what could not be had.
        unsafe {
            self.stream.into_iter().for_each(|stream| self.streams.close(stream));
            (self.to != 0).then(|| self.streams.free(self.to));
            (self.from != 0).then(|| self.streams.unpin(self.from));
        }
    }
}

/// Seconds that the fastest of some copies of so many bytes from pinned memory of the host takes, from asking for it to its end, by a
/// clock of seconds.
///
/// # Errors
/// `Internal` for a lane, which has no link of its own; as [`super::Driver::alloc`] and [`super::Driver::upload`].
pub fn fastest_upload(device: &Device, bytes: usize, rounds: usize, clock: &dyn Fn() -> f64) -> Result<f64> {
    let streams = device.streams().ok_or_else(|| Error::internal("a lane has no link of its own"))?;
    let mut link = Link { streams: &**streams, from: 0, to: 0, stream: None };
    link.from = streams.pin(bytes)?;
    link.to = streams.alloc(bytes)?;
    let stream = streams.stream()?;
    link.stream = Some(stream);
    // Other streams may use the memory once the driver itself has come here.
    streams.settle()?;
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let start = clock();
        // SAFETY: both were allocated just now, as long, and stay until the stream has been waited for; nobody reads what is copied.
        unsafe {
            streams.submit(stream, &[Work::Upload { to: link.to, from: link.from, bytes }])?;
            streams.wait(stream)?;
        }
        least = least.min(clock() - start);
    }
    Ok(least)
}
