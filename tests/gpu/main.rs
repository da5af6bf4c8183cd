//! GPU kernels and their launches on an emulated GPU, compared with the CPU and with simple reference implementations.
//!
//! `g++` builds a shared library of the kernels once per run, and once more with sanitizers, under which the same tests run
//! again. Each launch runs its threads in a different order; `STERLING_EMULATION_SEED` selects the orders.

#![allow(clippy::unwrap_used)]

mod bags;
mod batches;
mod calibrate;
mod composed;
mod demand;
mod emulation;
mod faults;
mod hot;
mod lanes;
mod launches;
mod learn;
mod merge;
mod models;
#[path = "../it/onnx.rs"]
mod onnx;
mod parts;
mod queries;
mod rows;
mod scan;
mod shared;
mod steps;
mod swaps;
mod termination;
mod top;
mod updates;
mod value_model;
mod whole_pass;
mod words;
