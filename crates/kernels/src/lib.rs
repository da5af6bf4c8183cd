//! Kernels of the CPU, and the memory that they read.
//!
//! [`cpu`] holds the loops of the CPU; [`buffer`] is memory that they read, owned or in a mapped file ([`map`]); [`memory`]
//! prefetches cache lines; [`heap`] returns free memory to the system; [`priority`] schedules background threads; [`threads`]
//! divide a training step.
//!
//! ```
//! use sterling_kernels::cpu::Kernels;
//! use sterling_kernels::cpu::pool::{BagSums, Bags, RowFormat, Rows, pool};
//!
//! let kernels = Kernels::detect()?;
//! assert_eq!(kernels.dot_f32(&[1.0, 2.0], &[3.0, 4.0]), 11.0);
//!
//! // Three rows of two numbers; the first bag sums rows 0 and 2, the second one is empty.
//! let bytes: Vec<u8> = [1.0f32, 2.0, 10.0, 20.0, 100.0, 200.0].iter().flat_map(|x| x.to_le_bytes()).collect();
//! let rows = Rows::new(RowFormat::F32, 2, &bytes)?;
//! let mut sums = [0.0; 4];
//! let bags = Bags { ids: &[0, 2], offsets: &[0, 2, 2], weights: None, mean: false };
//! pool(kernels, &rows, &bags, &mut BagSums { data: &mut sums, stride: 2, column: 0 });
//! assert_eq!(sums, [101.0, 202.0, 0.0, 0.0]);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod buffer;
pub mod cpu;
pub mod heap;
mod limit;
pub mod map;
pub mod memory;
pub mod priority;
pub mod signals;
pub mod threads;
