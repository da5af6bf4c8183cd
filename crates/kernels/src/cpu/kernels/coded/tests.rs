//! Compares every kernel with the layout's definition, for all counts of lines and items.

#![allow(clippy::unwrap_used)]

use super::super::tests::Random;
use super::super::{BLOCK, Staging};
use super::*;
use crate::cpu::Kernels;

struct Case {
    codes: Vec<u8>,
    tables: Vec<u8>,
    /// Bits of the items to score; empty for all.
    words: Vec<u64>,
    /// One per item of complete blocks, or empty.
    factors: Vec<f32>,
    lines: usize,
    items: usize,
    step: f32,
    base: f32,
    bias: f32,
}

impl Case {
    fn random(lines: usize, items: usize, random: &mut Random) -> Self {
        let mut bytes = |count: usize| -> Vec<u8> { (0..count).map(|_| random.next() as u8).collect() };
        let (codes, tables) = (bytes(items.div_ceil(BLOCK) * lines * LINE), bytes(lines * TABLE));
        let number = |random: &mut Random| random.next() as f32 / (1u32 << 31) as f32;
        let word = |random: &mut Random| {
            u64::from(random.next()) << 33 ^ u64::from(random.next()) << 15 ^ u64::from(random.next())
        };
        let words = match random.next() % 3 {
            0 => Vec::new(),
            // Leaves some blocks without items to score.
            _ => (0..items.div_ceil(64)).map(|_| word(random) & word(random) & word(random)).collect(),
        };
        let factors = match random.next() % 2 {
            0 => Vec::new(),
            _ => (0..items.next_multiple_of(BLOCK)).map(|_| number(random)).collect(),
        };
        let (step, base, bias) = (number(random) / 100.0, -number(random), number(random) * 4.0 - 2.0);
        Case { codes, tables, words, factors, lines, items, step, base, bias }
    }

    fn blocks(&self) -> CodeBlocks<'_> {
        let next = &self.codes[self.codes.len() / 2..];
        let (codes, words, factors) = (&self.codes, &self.words, &self.factors);
        CodeBlocks { codes, factors, lines: self.lines, items: self.items, first_slot: 1000, words, next }
    }

    fn query(&self) -> CodeQuery<'_> {
        CodeQuery { tables: &self.tables, step: self.step, base: self.base, bias: self.bias }
    }

    /// Reads the code of an item in a subspace according to the layout's definition.
    fn code(&self, item: usize, subspace: usize) -> u8 {
        let (line, place) = (subspace / 8, subspace % 8);
        let byte = self.codes[(item / BLOCK * self.lines + line) * LINE + item % BLOCK * 4 + place % 4];
        if place < 4 { byte & 15 } else { byte >> 4 }
    }

    fn is_asked(&self, item: usize) -> bool {
        self.words.is_empty() || self.words[item / 64] >> (item % 64) & 1 == 1
    }

    fn naive(&self, item: usize) -> f32 {
        let scaled_products =
            |subspace: usize| u32::from(self.tables[subspace * 16 + usize::from(self.code(item, subspace))]);
        let scaled_products = (0..self.lines * 8).map(scaled_products).sum::<u32>() as f32 * self.step;
        match self.factors.get(item) {
            Some(factor) => (scaled_products + self.base) * factor + self.bias,
            None => scaled_products + self.bias,
        }
    }

    fn scanned(&self, kernels: Kernels, threshold: f32, room: usize) -> Vec<(u32, u32)> {
        let (mut scores, mut slots) = (vec![0.0; room + BLOCK], vec![0; room + BLOCK]);
        let (mut found, mut next) = (Vec::new(), 0);
        while next < self.items.div_ceil(BLOCK) {
            let mut staging = Staging { scores: &mut scores, slots: &mut slots, len: 0 };
            next = kernels.scan_codes(&self.blocks(), &self.query(), threshold, next, &mut staging);
            let len = staging.len;
            found.extend(scores[..len].iter().map(|s: &f32| s.to_bits()).zip(slots[..len].iter().copied()));
        }
        found
    }
}

#[test]
fn every_kernel_equals_the_layout_bit_for_bit() {
    let random = &mut Random(3);
    for lines in 1..=130 {
        let items = 1 + random.next() as usize % 120;
        let case = Case::random(lines, items, random);
        for threshold in [f32::NEG_INFINITY, case.naive(items / 2), f32::INFINITY] {
            let requested = (0..items).filter(|&i| case.is_asked(i));
            let all = requested.map(|i| (case.naive(i), 1000 + i as u32)).filter(|(score, _)| *score >= threshold);
            let expected: Vec<(u32, u32)> = all.map(|(score, slot)| (score.to_bits(), slot)).collect();
            for kernels in Kernels::all() {
                for room in [0, 5, BLOCK, 300] {
                    let found = case.scanned(kernels, threshold, room);
                    assert_eq!(found, expected, "{} of {lines} lines, {items} items, room {room}", kernels.name());
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_fit() {
    for lines in [1, 32, 33, 129, 512] {
        let mut case = Case::random(lines, 33, &mut Random(4));
        case.tables.fill(255);
        case.words.clear();
        case.factors.clear();
        (case.step, case.bias) = (1.0, 0.0);
        for kernels in Kernels::all() {
            let found = case.scanned(kernels, 0.0, 64);
            assert_eq!(found.len(), 33, "{}", kernels.name());
            let most = (lines * 8 * 255) as f32;
            assert!(found.iter().all(|(score, _)| f32::from_bits(*score) == most), "{} {lines}", kernels.name());
        }
    }
}

#[test]
fn nan_scores_are_dropped() {
    let mut case = Case::random(3, 40, &mut Random(5));
    case.bias = f32::NAN;
    for kernels in Kernels::all() {
        assert!(case.scanned(kernels, f32::NEG_INFINITY, 64).is_empty(), "{}", kernels.name());
    }
}
