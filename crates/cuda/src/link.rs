//! Measures the bandwidth between the host and a GPU.

use super::driver::{Streams, Work};
use super::memory::Device;
use sterling_core::error::{Error, Result};

/// Pinned host memory, GPU memory, and a stream between them.
struct Link<'a> {
    streams: &'a dyn Streams,
    from: u64,
    to: u64,
    stream: Option<u64>,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        // SAFETY: the handles came from the driver's own calls, and the stream that used the memory has been waited
        // for; 0 marks a failed allocation.
        unsafe {
            self.stream.into_iter().for_each(|stream| self.streams.close(stream));
            (self.to != 0).then(|| self.streams.free(self.to));
            (self.from != 0).then(|| self.streams.unpin(self.from));
        }
    }
}

/// Returns the time in seconds of the fastest of `rounds` uploads of `bytes` bytes from pinned memory, from submission to
/// completion.
///
/// # Errors
/// `Internal` for a worker stream, because only the device has a link; as [`super::Driver::alloc`] and
/// [`super::Driver::upload`].
pub fn fastest_upload(device: &Device, bytes: usize, rounds: usize, clock: &dyn Fn() -> f64) -> Result<f64> {
    let streams = device
        .streams()
        .ok_or_else(|| Error::internal("got a worker stream, expected the device, which has the link"))?;
    let mut link = Link { streams: &**streams, from: 0, to: 0, stream: None };
    link.from = streams.pin(bytes)?;
    link.to = streams.alloc(bytes)?;
    let stream = streams.stream()?;
    link.stream = Some(stream);
    // Other streams may use the memory once the driver's default stream has reached the allocation.
    streams.settle()?;
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let start = clock();
        // SAFETY: `to` and `from` were just allocated with this size, and stay valid until the stream has been waited
        // for; the copied bytes are not read.
        unsafe {
            streams.submit(stream, &[Work::Upload { to: link.to, from: link.from, bytes }])?;
            streams.wait(stream)?;
        }
        least = least.min(clock() - start);
    }
    Ok(least)
}
