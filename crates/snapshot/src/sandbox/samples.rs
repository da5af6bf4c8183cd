//! Sample rows for the validation: ordinary rows, a user or item without features, and edge cases.

use crate::model::{CandidateInput, Package};
use sterling_core::request::{Features, Values};
use sterling_graph::tower::{FeatureKind, FeatureSpec, OverArch};

/// Number of different samples; row `n` of a batch is sample `n % SAMPLES`.
pub(super) const SAMPLES: usize = 11;
/// Sample without features.
pub(super) const BLANK: usize = 1;
/// Samples with full sequences, with a single value, and with ids that are in no table.
const FULL: usize = 4;
const SINGLE: usize = 5;
const UNKNOWN_IDS: usize = 10;
/// Edge-case samples: a graph that is correct for ordinary numbers may fail for edge values, and its result may be undefined.
const EDGES: [usize; 3] = [2, 6, 8];
/// Edge values: integers, halves, signs, and magnitudes of hours and timestamps.
const EDGE_NUMBERS: [[f32; 7]; 3] = [
    [0.0, 1.0, -1.0, 0.5, 2.5, -0.75, 3.0],
    [490_000.0, 489_999.0, 100.0, 1_000.0, 64.5, 12.5, 7.0],
    [0.0, 0.0, 1e-3, 0.0, -2.0, 1e-6, -100.0],
];

/// Returns whether a graph must give a finite result for a sample, that is, whether the sample is no edge case.
pub(super) fn is_defined(sample: usize) -> bool {
    !EDGES.contains(&sample)
}

fn edge(sample: usize, place: usize) -> Option<f32> {
    let edge = EDGES.iter().position(|edge| *edge == sample)?;
    Some(EDGE_NUMBERS[edge][place % EDGE_NUMBERS[edge].len()])
}

/// Returns the `n`-th number of a fixed sequence between -1 and 1.
pub(super) fn fraction(n: usize) -> f32 {
    ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0
}

/// Returns the features of a sample: known ids, unknown categories, texts, numbers between 0 and 1.
pub(super) fn features(package: &Package, specs: &[FeatureSpec], sample: usize) -> Features {
    let mut features = Features::new();
    if sample == BLANK {
        return features;
    }
    // Ids are written last: a field that is both an id and a category feature then holds ids, which suit both features.
    let mut specs: Vec<(usize, &FeatureSpec)> = specs.iter().enumerate().collect();
    specs.sort_by_key(|(_, spec)| spec.kind == FeatureKind::Ids);
    for (place, spec) in specs {
        let seed = sample * 31 + place * 7;
        let values = match spec.kind {
            FeatureKind::Ids => {
                let table = spec.table.as_deref().and_then(|name| package.table(name));
                let (rows, ids) = (table.map_or(0, |table| table.rows()), table.and_then(|table| table.ids()));
                let beyond = if sample == UNKNOWN_IDS { rows } else { 0 };
                let id = |k: usize| {
                    let row = ((seed + 13 * k) as u64).checked_rem(rows)?;
                    let managed = ids.filter(|_| beyond == 0).map(|ids| ids.by_row()[row as usize]);
                    Some(managed.unwrap_or((row + beyond) as i64))
                };
                let count = match sample {
                    FULL => spec.length.unwrap_or(3),
                    SINGLE => 1,
                    _ => 3,
                };
                Values::Integers((0..spec.max_ids.min(count)).filter_map(id).collect())
            }
            FeatureKind::Category => Values::Texts(vec!["?".into()]),
            FeatureKind::Text => Values::Texts(vec![text(sample, seed, spec.length.unwrap_or(1))]),
            FeatureKind::Dense => {
                let number = |k: usize| edge(sample, place + k).unwrap_or(0.5 + fraction(seed + k) / 2.0);
                Values::Numbers((0..spec.width.unwrap_or(0)).map(number).collect())
            }
        };
        features.insert(spec.source().into(), values);
    }
    features
}

/// Returns the text of a sample: some words, more than `length` tokens, one letter, or characters that vocabularies lack.
fn text(sample: usize, seed: usize, length: usize) -> String {
    const WORDS: [&str; 8] = ["red", "shoes", "for", "running", "a", "Ünited", "42", "search"];
    let words = match sample {
        FULL => length,
        SINGLE => return "a".into(),
        UNKNOWN_IDS => return "\u{1f980} \u{10ffff}\t\u{0}".into(),
        _ => 3 + sample,
    };
    (0..words).map(|n| WORDS[(seed + n) % WORDS.len()]).collect::<Vec<_>>().join(" ")
}

/// Writes the rows of a candidate that the reranker reads, concatenated, with the mask of each sequence after it.
pub(super) fn candidate(package: &Package, overarch: &OverArch, sample: usize, mut row: &mut [f32]) {
    let mut place = sample * 17;
    for input in overarch.rows() {
        let (here, rest) = row.split_at_mut(input.count());
        row = rest;
        let places = input.shape.first().copied().unwrap_or(1).max(1);
        let values = match sample {
            BLANK => 0,
            FULL => places,
            _ => 1 + sample % places,
        };
        let width = here.len() / places;
        for (k, x) in here.iter_mut().enumerate() {
            *x = match package.candidate_input(&input.name) {
                Some(CandidateInput::Mask(_)) => f32::from(u8::from(k < values)),
                Some(CandidateInput::Feature(_)) if sample == BLANK => 0.0,
                Some(CandidateInput::Feature(_)) if input.shape.len() > 1 && k >= values * width => 0.0,
                _ => fraction(place + k),
            };
        }
        place += here.len();
    }
}

/// Returns the numeric columns of candidates, by sample, input after input. In edge cases columns are 0, as for items without a
/// value: such results are compared, but may be undefined, because models take logarithms of columns.
pub(super) fn numbers(overarch: &OverArch, which: &[usize]) -> Vec<Vec<f32>> {
    let column = |(place, name): (usize, &str)| {
        let number = |&sample: &usize| match sample {
            sample if name == OverArch::SIMILARITY => fraction(sample * 7 + 3),
            sample => edge(sample, place).unwrap_or(0.5 + fraction(sample * 5 + place) / 4.0),
        };
        which.iter().map(number).collect()
    };
    overarch.numbers().enumerate().map(column).collect()
}
