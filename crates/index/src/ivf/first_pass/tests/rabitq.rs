//! Tests of sign codes: definition of the format, and recall.

use super::*;

#[test]
fn scores_of_signs_follow_the_format() {
    for (dimension, lists) in [(70, 4), (256, 5), (384, 3)] {
        let values = vectors(300, dimension, 31);
        let rows = Matrix::new(&values, dimension).unwrap();
        let (built, index) = coded_by(RABITQ, &values, dimension, lists);
        let file = tensors(&built, rows);
        let (codes, shape) = file.get::<u8>("first_pass_codes", 4).unwrap();
        let factors = file.vector::<f32>("first_pass_factors", index.slots()).unwrap();
        let (centroids, _) = file.get::<f32>("centroids", 2).unwrap();
        let width = dimension.next_multiple_of(64);
        assert_eq!(shape[1], width / 32);
        let is_set = |slot: usize, number: usize| {
            let (subspace, bit) = (number / 4, number % 4);
            let byte = codes[((slot / 16 * shape[1] + subspace / 8) * 16 + slot % 16) * 4 + subspace % 4];
            (if subspace % 8 < 4 { byte & 15 } else { byte >> 4 }) >> bit & 1 == 1
        };
        let (signs, _) = file.get::<u64>("first_pass_signs", 2).unwrap();
        let rotation = super::super::rotation::Rotation::of_signs(dimension, &signs);
        for query in vectors(3, dimension, 32).chunks_exact(dimension) {
            let mut rotated = Vec::new();
            rotation.rotate(query.iter().copied(), &mut rotated);
            let (found, counters) = searched(&index, query, lists, 300, true);
            assert_eq!((found.len(), counters.items), (300, 300));
            let blocks = built.list_lengths.iter().map(|n| u64::from(n.div_ceil(16))).sum::<u64>();
            assert_eq!(counters.bytes, blocks * (width / 32 * 64 + 64) as u64);
            let widest = rotated.chunks_exact(4).map(|four| four.iter().map(|x| x.abs()).sum::<f32>());
            let step = 2.0 * widest.fold(0f32, f32::max) / 255.0;
            for (score, slot) in found {
                let list = index.list_of(slot).index();
                let centroid = &centroids[list * dimension..][..dimension];
                let of_list = query.iter().zip(centroid).map(|(x, y)| x * y).sum::<f32>();
                let sign = |n: usize| if is_set(slot.index(), n) { 1.0 } else { -1.0 };
                let of_signs = rotated.iter().enumerate().map(|(n, x)| sign(n) * x).sum::<f32>();
                let factor = factors[slot.index()];
                let off = (score - (of_list + factor * of_signs)).abs();
                assert!(off <= factor * step * (width / 4) as f32 / 2.0 + 1e-4, "{dimension}: {score} is off by {off}");
            }
        }
    }
}

#[test]
fn a_multiple_of_k_sign_candidates_holds_nearly_all_of_the_best() {
    let (_, index) = coded_by(RABITQ, &vectors(3000, 256, 33), 256, 20);
    let recall = recall_of(&index, &vectors(30, 256, 34), 600);
    assert!(recall >= 0.95, "{recall}");
}

/// Tensors of an index with one list and the given parts of sign codes.
fn file(
    codes: Option<[usize; 4]>,
    signs: Option<[usize; 2]>,
    factors: Option<Vec<f32>>,
    values: bool,
) -> TensorFile<'static> {
    let mut file = TensorFile::new();
    file.add_owned("centroids", &[1, 2], vec![10f32, 20.0]).unwrap();
    file.add_owned("list_lengths", &[1], vec![3u32]).unwrap();
    file.add_owned("codes", &[1, 1, 16, 4], vec![128u8; 64]).unwrap();
    file.add_owned("scales", &[16], vec![0f32; 16]).unwrap();
    file.add_owned("rows", &[16, 2], vec![0f32; 32]).unwrap();
    if let Some(shape) = codes {
        let mut codes = vec![0u8; shape.iter().product()];
        // The first component of the first and the third item is not negative.
        (codes[0], codes[8]) = (1, 1);
        file.add_owned("first_pass_codes", &shape, codes).unwrap();
    }
    if let Some(shape) = signs {
        file.add_owned("first_pass_signs", &shape, vec![0u64; shape.iter().product()]).unwrap();
    }
    if let Some(factors) = factors {
        file.add_owned("first_pass_factors", &[factors.len()], factors).unwrap();
    }
    if values {
        file.add_owned("first_pass_values", &[2, 16], vec![0f32; 32]).unwrap();
    }
    file
}

const CODES: Option<[usize; 4]> = Some([1, 2, 16, 4]);
const SIGNS: Option<[usize; 2]> = Some([4, 1]);

fn of_three() -> Vec<f32> {
    let mut factors = vec![0.0; 16];
    factors[..3].copy_from_slice(&[2.0, 3.0, 0.0]);
    factors
}

/// Hand-written file with a list of three items: files of this format must stay readable.
#[test]
fn the_golden_file_of_sign_codes_is_read_exactly() {
    let index = Index::open(&file(CODES, SIGNS, Some(of_three()), false).in_memory("index").unwrap()).unwrap();
    // Without sign flips, four Hadamard transforms of 64 numbers are the identity.
    let (found, _) = searched(&index, &[17.0, 0.0], 1, 3, true);
    let expected = [(170.0 + 2.0 * 17.0, Slot(0)), (170.0, Slot(2)), (170.0 - 3.0 * 17.0, Slot(1))];
    assert_eq!(found.len(), 3);
    for ((score, slot), (expected, of)) in found.into_iter().zip(expected) {
        assert!(slot == of && (score - expected).abs() < 1e-3, "{score} of {slot:?}, expected {expected}");
    }
}

#[test]
fn signs_of_other_sizes_are_rejected() {
    let open = |file: TensorFile<'static>| Index::open(&file.in_memory("index").unwrap());
    let with = |place: usize, invalid: f32| {
        let mut factors = of_three();
        factors[place] = invalid;
        Some(factors)
    };
    let good = Some(of_three());
    assert!(open(file(CODES, SIGNS, good.clone(), false)).unwrap().has_first_pass());
    for (codes, signs, factors, values, expected) in [
        (None, SIGNS, good.clone(), false, "first_pass_codes"),
        (CODES, None, good.clone(), false, "first_pass_signs"),
        (CODES, SIGNS, None, false, "first_pass_factors"),
        (CODES, SIGNS, good.clone(), true, "values beside signs"),
        (Some([1, 1, 16, 4]), SIGNS, good.clone(), false, "does not fit 16 slots of 2 dimensions"),
        (Some([2, 2, 16, 4]), SIGNS, good.clone(), false, "does not fit 16 slots"),
        (CODES, Some([4, 2]), good.clone(), false, "shape [4, 2], expected [4, 1]"),
        (CODES, Some([1, 4]), good, false, "expected [4, 1]"),
        (CODES, SIGNS, Some(vec![1.0; 15]), false, "first_pass_factors"),
        (CODES, SIGNS, with(1, f32::NAN), false, "expected numbers between 0"),
        (CODES, SIGNS, with(0, -1.0), false, "expected numbers between 0"),
        (CODES, SIGNS, with(15, f32::INFINITY), false, "expected numbers between 0"),
        (CODES, SIGNS, with(2, 1e30), false, "expected numbers between 0"),
    ] {
        let error = open(file(codes, signs, factors, values)).unwrap_err();
        assert!(error.kind() == Kind::Corrupt && error.to_string().contains(expected), "{expected}: {error}");
    }
}
