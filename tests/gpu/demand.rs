//! Reported bytes and operations of launches.

use sterling::cuda::Demand;
use sterling::cuda::ops::steps::RowsOf;
use sterling::kernels::cpu::dense::Form;

use crate::composed::{Catalogue, DIMENSION, Layers, QueryParameters};
use crate::emulation::{Random, emulated};

/// The operations that launches report match those of the kernels, as the emulation counts them, if lists and candidates are as
/// many as the host assumes.
#[test]
fn launches_compute_their_definition() {
    let driver = emulated();
    let device = sterling::cuda::Device::over(driver.clone());
    let of = Catalogue::in_lists(&device, 64 * 64, 64).unwrap();
    let layers = Layers::new(&device, Form::Pairs).unwrap();
    let vectors = Random::new(2).numbers(20 * DIMENSION);
    for (probes, filters, batch) in [(16, 0, 3), (64, 0, 20)] {
        let requested = QueryParameters { probes, k0: 128, k: 50, filters, layers: Some(&layers) };
        let [said_before, did_before] = driver.demand();
        of.pass(&device, &vectors[..batch * DIMENSION], &requested).unwrap();
        let [reported, did] = driver.demand();
        type Kind = fn(&Demand) -> u64;
        // The reported single-precision operations leave out the histogram of scores.
        let kinds: [(Kind, &str, f64); 4] = [
            (|t| t.dp4a, "dp4a", 1.0),
            (|t| t.tensor_int8, "bytes by tensor cores", 1.0),
            (|t| t.tensor_bf16, "bf16 by tensor cores", 1.0),
            (|t| t.single, "single precision", 2.0),
        ];
        for (kind, what, more) in kinds {
            let (reported, did) = (kind(&reported) - kind(&said_before), kind(&did) - kind(&did_before));
            let is_near = did as f64 <= more * reported as f64 && reported as f64 <= 1.3 * did as f64;
            assert!(is_near, "{what}, {probes} probes: {reported} estimated, {did} counted");
            assert!(did > 0 || (probes < 64 && what == "bytes by tensor cores"), "{what} is not among them");
        }
    }
    let (single, count) = (Layers::new(&device, Form::Single).unwrap(), 130);
    let input = device.zeros(2 * count * 256).unwrap();
    let counts = device.copy(&[count as u32; 2]).unwrap();
    let [said_before, did_before] = driver.demand();
    single.run(&device, RowsOf { counts: &counts, most: count }, &input).unwrap();
    let [reported, did] = driver.demand();
    assert!(did.tensor_tf32 > did_before.tensor_tf32);
    assert_eq!(reported.tensor_tf32 - said_before.tensor_tf32, did.tensor_tf32 - did_before.tensor_tf32);
}
