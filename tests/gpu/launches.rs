//! Launches at which a GPU would hang, or ignore a mistake, are errors in the emulation.

use sterling::cuda::emulated::Emulated;
use sterling::cuda::ops::top::{self, Scored, Ties};
use sterling::error::Kind;

use crate::emulation::device;

#[test]
fn short_arrays_are_rejected_before_a_launch() {
    let device = device();
    let (keys, wanted) = (device.copy(&[1u32, 2, 3]).unwrap(), device.copy(&[1u32, 1]).unwrap());
    let scored = Scored { keys: &keys, slots: None, counts: None, stride: 2 };
    let error = top::select(&device, &scored, &Ties::default(), &wanted, 1).unwrap_err();
    assert!(
        error.kind() == Kind::Internal && error.to_string().contains("an array of 3 elements, expected at least 4"),
        "{error}"
    );
    let array = device.room::<u32>(2).unwrap();
    assert!(array.write(&[1, 2, 3]).is_err() && array.read(3).is_err());
    assert!(device.room::<u64>(usize::MAX).is_err());
}

#[test]
fn invalid_libraries_are_rejected() {
    let error = Emulated::open(std::path::Path::new("/nowhere/kernels.so"), 1).unwrap_err();
    assert!(error.kind() == Kind::Unavailable && error.to_string().contains("/nowhere/kernels.so"), "{error}");
}

#[test]
fn empty_work_launches_no_kernel() {
    let device = device();
    let (keys, wanted) = (device.room::<u32>(0).unwrap(), device.room::<u32>(0).unwrap());
    let scored = Scored { keys: &keys, slots: None, counts: None, stride: 0 };
    let best = top::select(&device, &scored, &Ties::default(), &wanted, 0).unwrap();
    assert!(best.keys.is_empty() && best.counts.is_empty());
}
