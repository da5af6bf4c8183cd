//! `sterling plan --calibrate` on a GPU. `planner::calibrate_gpu` tests the use of the measured rates on a simulated GPU.

use sterling::cuda::Device;
use sterling::embedding::planner::{Topology, Workload, calibrate_gpu, plan};

use crate::emulation::{cards, device};

#[test]
fn a_gpu_is_measured_and_planned_with() {
    let device = device();
    let constants = calibrate_gpu::measure(&device, 1 << 18).unwrap();
    let mut topology = Topology::detect().unwrap().with_cards(std::slice::from_ref(&device)).unwrap();
    calibrate_gpu::apply(&[constants], &mut topology).unwrap();
    topology.validate().unwrap();
    // Independent of the clock, every rate is positive; only a row may cost nothing besides its bytes.
    let gpu = &topology.gpus[0];
    assert_eq!(gpu.name, device.name());
    assert!(constants.call_us > 0.0 && constants.link_us > 0.0, "{constants:?}");
    let text = "[[tables]]\nname = 't'\nrows = 1000\nwidth = 64\nskew = 1.0\ntiers = ['hbm']\n";
    let planned = plan(&topology, &Workload::parse(text).unwrap()).unwrap();
    assert_eq!(planned.tables[0].shards[0].device, gpu.name);
}

#[test]
fn a_full_or_lost_gpu_is_not_measured() {
    let small = cards(&[300_000]);
    let error = calibrate_gpu::measure(&Device::over(small[0].clone()), 1 << 20).unwrap_err().to_string();
    assert!(error.contains("emulated:0") && error.contains("75000 bytes"), "{error}");
    let lost = cards(&[1 << 30]);
    lost[0].lose_after(3);
    let error = calibrate_gpu::measure(&Device::over(lost[0].clone()), 1 << 18).unwrap_err().to_string();
    assert!(error.contains("the GPU is lost"), "{error}");
}
