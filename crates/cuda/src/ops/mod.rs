//! The operations of a pass, each a launch of one kernel or a few over arrays whose lengths are checked first.
//!
//! A kernel trusts what stands in its arrays: slots, lists, places and offsets that kernels made are in range by the way they are
//! made, and those that come from the host are checked by whoever uploads them, against the snapshot that they index.
//!
//! | file | kernels |
//! |---|---|
//! | `scan` | queries to codes, lists scored, lists scanned by dp4a and by tensor cores |
//! | `top` | the best K, sorted or not |
//! | `merge` | what several queries of a request found |
//! | `bags` | pooled embedding bags |
//! | `words` | filter programs |
//! | `looks` | when filtered searches end |
//! | `rows` | full-width rows: products, the exact scan, what a reranker reads |
//! | `steps` | dense programs |
//! | `worth` | the value model, and the columns of the best |

pub mod bags;
pub mod looks;
pub mod merge;
pub mod rows;
pub mod scan;
pub mod steps;
pub mod top;
pub mod words;
pub mod worth;

use bytemuck::Pod;

use super::driver::{Demand, Launch};
use super::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Blocks along the second and third axis of a grid at most.
pub const ROWS_MAX: usize = 65_535;

/// A launch but for its arguments.
struct Shape {
    kernel: &'static str,
    grid: [usize; 3],
    threads: u32,
    shared_bytes: usize,
    demand: Demand,
}

/// Launches a kernel over its arguments, unless there is nothing to do.
fn launch<A: Pod>(device: &Device, shape: &Shape, arguments: &A) -> Result<()> {
    if shape.grid.contains(&0) {
        return Ok(());
    }
    let grid = shape.grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    if shape.grid[1] > ROWS_MAX || shape.grid[2] > ROWS_MAX {
        return Err(Error::internal(format!("kernel `{}`: a grid of {:?}", shape.kernel, shape.grid)));
    }
    let shared_max = device.driver().shared_bytes_max();
    if shape.shared_bytes > shared_max {
        let Shape { kernel, shared_bytes, .. } = *shape;
        return Err(Error::unsupported(format!(
            "kernel `{kernel}`: {shared_bytes} bytes of shared memory per block, the device has {shared_max}"
        )));
    }
    let launch = Launch {
        kernel: shape.kernel,
        grid,
        threads: shape.threads,
        shared_bytes: shape.shared_bytes,
        arguments: bytemuck::bytes_of(arguments),
        demand: shape.demand,
    };
    // SAFETY: arguments are made in the files beside this one alone: the structure is the kernel's, its addresses are those of arrays
    // that are borrowed until the launch is queued (memory is given back in the order of launches) and that hold, by the checks
    // before, what the kernel reads and writes, given indices in range as the module says.
    unsafe { device.driver().launch(&launch) }
}

/// Refuses an array that is shorter than an operation needs.
fn need<T: Pod>(what: &str, array: &Array<T>, len: usize) -> Result<()> {
    if array.len() < len {
        return Err(Error::internal(format!("{what}: an array of {}, expected at least {len}", array.len())));
    }
    Ok(())
}

/// Blocks that share out `count` things, `each` at a time, over so many rows of a grid: no more than keep the device busy, and what
/// there is more to do is done in turns.
fn parts(device: &Device, count: usize, each: usize, rows: usize) -> usize {
    count.div_ceil(each.max(1)).clamp(1, (device.driver().blocks() / rows.max(1)).max(1))
}

/// A product of counts.
fn times(counts: &[usize]) -> u64 {
    counts.iter().fold(1, |product, &count| product.saturating_mul(count as u64))
}

/// The address of an array that may be missing.
fn address_of<T: Pod>(array: Option<&Array<T>>) -> u64 {
    array.map_or(0, Array::address)
}
