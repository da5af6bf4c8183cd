//! The kernels of a GPU and the launches around them, on a host that emulates one: against the loops of the CPU and plain readings.
//!
//! `g++` makes a shared library of the kernels, once a run, and once more with sanitizers, under which the same tests run again.
//! Each launch orders the turns of its threads in another way; `STERLING_EMULATION_SEED` chooses them.

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
mod looks;
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
mod top;
mod updates;
mod whole_pass;
mod words;
mod worth;
