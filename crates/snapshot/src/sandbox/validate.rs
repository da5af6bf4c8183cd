//! Validation of the graphs of a package.

use std::path::Path;

use super::quantized;
use super::rows::{Bench, ValidationProgress};
use crate::model::{AskedPrecision, Package};
use sterling_core::error::Result;

/// Runs the graphs of the package in `folder`; reports progress to the callback.
pub(super) fn run(folder: &Path, reported: &dyn Fn(ValidationProgress)) -> Result<()> {
    let package =
        Package::open_with_progress(folder, &|file| reported(ValidationProgress::Next(format!("{file}: read"))))?;
    if package.spec.precision != AskedPrecision::Int8 {
        return Bench::new(&package, reported).graphs();
    }
    // The error of int8 would hide a graph that is compiled incorrectly.
    let exact = package.in_f32()?;
    Bench::new(&exact, reported).graphs()?;
    quantized::compare(&package, &exact, reported)
}
