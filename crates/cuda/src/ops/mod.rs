//! Operations of a pass. Each operation checks the lengths of its arrays and launches one or several kernels.
//!
//! A kernel trusts the content of its arrays. Slots, lists, places and offsets that kernels compute are in range by
//! construction; the code that uploads such numbers from the host checks them against the snapshot that they index.
//!
//! An *ordered key* is a score encoded as a 32-bit integer that sorts in the same order.
//!
//! | file | kernels |
//! |---|---|
//! | `scan` | query quantization, list scores, list scans with dp4a and tensor cores |
//! | `top` | the best K, sorted or not |
//! | `merge` | candidates of several queries of a request |
//! | `bags` | embedding bags |
//! | `words` | filter programs |
//! | `termination` | termination checks of filtered searches |
//! | `rows` | full-width rows: products, the exact scan, reranker inputs |
//! | `steps` | compiled dense graphs |
//! | `value_model` | the value model, and the columns of the best |
//! | `learn` | embedding tables in training: lookups and updates |

pub mod bags;
pub mod learn;
pub mod merge;
pub mod rows;
pub mod scan;
pub mod steps;
pub mod termination;
pub mod top;
pub mod value_model;
pub mod words;

use bytemuck::Pod;

use super::driver::{Demand, Launch};
use super::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Maximum number of blocks along the second and third axis of a grid.
pub const ROWS_MAX: usize = 65_535;

/// Parameters of a launch, without the kernel's arguments.
struct Shape {
    kernel: &'static str,
    grid: [usize; 3],
    threads: u32,
    shared_bytes: usize,
    demand: Demand,
}

/// Launches a kernel, unless its grid is empty.
fn launch<A: Pod>(device: &Device, shape: &Shape, arguments: &A) -> Result<()> {
    if shape.grid.contains(&0) {
        return Ok(());
    }
    let grid = shape.grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    if shape.grid[1] > ROWS_MAX || shape.grid[2] > ROWS_MAX {
        return Err(Error::internal(format!(
            "kernel `{}`: a grid of {:?} blocks, expected at most {ROWS_MAX} along y and z",
            shape.kernel, shape.grid
        )));
    }
    let shared_max = device.driver().shared_bytes_max();
    if shape.shared_bytes > shared_max {
        let Shape { kernel, shared_bytes, .. } = *shape;
        return Err(Error::unsupported(format!(
            "kernel `{kernel}`: {shared_bytes} bytes of shared memory per block, expected at most {shared_max} on this device"
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
    // SAFETY: only files of this module create arguments: the structure matches the kernel, and its addresses belong to
    // arrays that are borrowed until the launch is queued (memory is freed in launch order). The callers' checks ensure
    // that the arrays contain everything that the kernel reads and writes, given indices in range as the module
    // documentation states.
    unsafe { device.driver().launch(&launch) }
}

/// Rejects an array that is shorter than an operation needs.
fn need<T: Pod>(what: &str, array: &Array<T>, len: usize) -> Result<()> {
    if array.len() < len {
        return Err(Error::internal(format!("{what}: an array of {} elements, expected at least {len}", array.len())));
    }
    Ok(())
}

/// Returns the number of blocks for `count` units of work, `each` per block, in a grid with `rows` rows. The number is
/// limited to what keeps the device busy; each block loops over further units.
fn parts(device: &Device, count: usize, each: usize, rows: usize) -> usize {
    count.div_ceil(each.max(1)).clamp(1, (device.driver().blocks() / rows.max(1)).max(1))
}

/// Multiplies counts; the product saturates.
fn times(counts: &[usize]) -> u64 {
    counts.iter().fold(1, |product, &count| product.saturating_mul(count as u64))
}

/// Returns the address of an optional array; 0 for `None`.
fn address_of<T: Pod>(array: Option<&Array<T>>) -> u64 {
    array.map_or(0, Array::address)
}
