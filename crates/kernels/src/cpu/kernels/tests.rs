//! Compares every kernel with a naive implementation of its definition, for all widths and odd counts.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::cpu::Kernels;

/// A small random generator that repeats a run from its seed on every platform.
pub(super) struct Random(pub(super) u64);
impl Random {
    pub(super) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }
    fn float(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 31) as f32 * 2.0 - 1.0
    }
}

struct Case {
    codes: Vec<u8>,
    scales: Vec<f32>,
    queries: [[Vec<i8>; 2]; 4],
    groups: usize,
    items: usize,
}

impl Case {
    fn random(dimension: usize, items: usize, random: &mut Random) -> Self {
        let groups = dimension.div_ceil(4);
        let blocks = items.div_ceil(BLOCK);
        let mut row = |least: i8| {
            (0..groups * 4).map(|d| if d < dimension { (random.next() as i8).max(least) } else { 0 }).collect()
        };
        let queries = std::array::from_fn(|_| [row(-127), row(-127)]);
        Case {
            codes: (0..blocks * groups * 64).map(|_| random.next() as u8).collect(),
            scales: (0..blocks * BLOCK).map(|_| random.float().abs()).collect(),
            queries,
            groups,
            items,
        }
    }
    fn query(&self, n: usize) -> Int8Query<'_> {
        let rows = self.queries[n].each_ref().map(Vec::as_slice);
        Int8Query {
            rows,
            corrections: rows.map(|row| 128 * row.iter().map(|&q| i32::from(q)).sum::<i32>()),
            scale: 0.01,
        }
    }
    fn blocks(&self) -> Blocks<'_> {
        Blocks {
            codes: &self.codes,
            scales: &self.scales,
            groups: self.groups,
            items: self.items,
            first_slot: 1000,
            next: &self.codes[self.codes.len() / 2..],
        }
    }
    /// Computes the sums of item `i`'s products with the two rows of query `n` from the layout's definition.
    fn products(&self, i: usize, n: usize) -> [f32; 2] {
        let x = |d: usize| i32::from(self.codes[(i / BLOCK * self.groups + d / 4) * 64 + i % BLOCK * 4 + d % 4]) - 128;
        let product = |row: &Vec<i8>| (0..self.groups * 4).map(|d| x(d) * i32::from(row[d])).sum::<i32>() as f32;
        self.queries[n].each_ref().map(product)
    }
    fn naive(&self, i: usize, n: usize) -> f32 {
        let [high, low] = self.products(i, n);
        (high * 128.0 + low) * self.scales[i] * 0.01
    }
}

fn scanned(
    kernels: Kernels,
    blocks: &Blocks<'_>,
    query: &Int8Query<'_>,
    threshold: f32,
    room: usize,
) -> Vec<(f32, u32)> {
    let (mut scores, mut slots) = (vec![0.0; room + BLOCK], vec![0; room + BLOCK]);
    let mut found = Vec::new();
    let mut next = 0;
    while next < blocks.items.div_ceil(BLOCK) {
        let mut staging = Staging { scores: &mut scores, slots: &mut slots, len: 0 };
        next = kernels.scan(blocks, query, threshold, next, &mut staging);
        let len = staging.len;
        found.extend(scores[..len].iter().copied().zip(slots[..len].iter().copied()));
    }
    found
}

#[test]
fn every_kernel_scores_every_width_by_the_layout() {
    let random = &mut Random(7);
    for dimension in 1..=513 {
        let items = 1 + random.next() as usize % 80;
        let case = Case::random(dimension, items, random);
        let count = items.div_ceil(BLOCK);
        // Blocks in any order and more than once.
        let picks: Vec<Pick> = (0..count + 2)
            .map(|n| Pick { block: (n * 7 % count) as u32, mask: random.next() as u16 & random.next() as u16 })
            .collect();
        let empty: Vec<Pick> = picks.iter().map(|pick| Pick { mask: 0, ..*pick }).collect();
        for kernels in Kernels::tried() {
            for threshold in [f32::NEG_INFINITY, case.naive(0, 0)] {
                let expected: Vec<(f32, u32)> =
                    (0..items).map(|i| (case.naive(i, 0), 1000 + i as u32)).filter(|(s, _)| *s >= threshold).collect();
                assert_eq!(
                    scanned(kernels, &case.blocks(), &case.query(0), threshold, 16),
                    expected,
                    "{} D={dimension} N={items}",
                    kernels.name()
                );
            }
            for (picks, threshold) in
                [(&picks, f32::NEG_INFINITY), (&picks, case.naive(0, 1)), (&empty, f32::NEG_INFINITY)]
            {
                check_picks(kernels, &case, picks, threshold, dimension);
            }
            check_many(kernels, &case, dimension);
        }
    }
}

/// Checks that the items of picked blocks are scored like in a scan, in the order of the picks.
fn check_picks(kernels: Kernels, case: &Case, picks: &[Pick], threshold: f32, dimension: usize) {
    let item = |pick: &Pick, i: usize| (pick.mask >> i & 1 == 1).then_some(pick.block as usize * BLOCK + i);
    let expected: Vec<(f32, u32)> = picks
        .iter()
        .flat_map(|pick| (0..BLOCK).filter_map(|i| item(pick, i)))
        .filter(|&i| i < case.items && case.naive(i, 1) >= threshold)
        .map(|i| (case.naive(i, 1), 1000 + i as u32))
        .collect();
    let (mut scores, mut slots) = (vec![0.0; 2 * BLOCK], vec![0; 2 * BLOCK]);
    let (mut found, mut next) = (Vec::new(), 0);
    while next < picks.len() {
        let mut staging = Staging { scores: &mut scores, slots: &mut slots, len: 0 };
        next = kernels.scan_picks(&case.blocks(), picks, &case.query(1), threshold, next, &mut staging);
        let len = staging.len;
        found.extend(scores[..len].iter().copied().zip(slots[..len].iter().copied()));
    }
    assert_eq!(found, expected, "{} D={dimension} N={}", kernels.name(), case.items);
}

/// Checks that several queries together find what each finds alone, and that the nearest item of a query is its best score.
fn check_many(kernels: Kernels, case: &Case, dimension: usize) {
    let room = case.items.next_multiple_of(BLOCK) + BLOCK;
    for lanes in 1..=13 {
        let blocks = case.blocks();
        let mut rooms = vec![(vec![0f32; room], vec![0u32; room]); lanes];
        let thresholds: Vec<f32> = (0..lanes).map(|n| case.naive(n % case.items, n % 4)).collect();
        let mut all: Vec<Lane<'_>> = rooms
            .iter_mut()
            .enumerate()
            .map(|(n, (scores, slots))| Lane {
                query: case.query(n % 4),
                threshold: thresholds[n],
                staging: Staging { scores, slots, len: 0 },
            })
            .collect();
        kernels.scan_many(&blocks, &mut all);
        let found: Vec<Vec<(f32, u32)>> = all
            .iter()
            .map(|l| (0..l.staging.len).map(|i| (l.staging.scores[i], l.staging.slots[i])).collect())
            .collect();
        for (n, found) in found.iter().enumerate() {
            let alone = scanned(kernels, &blocks, &case.query(n % 4), thresholds[n], room);
            assert_eq!(*found, alone, "{} D={dimension} query {n} of {lanes}", kernels.name());
        }
    }
    let penalties: Vec<f32> = (0..case.items.next_multiple_of(BLOCK)).map(|i| (i % 5) as f32).collect();
    let nearest = kernels.nearest4(&case.blocks(), &penalties, &std::array::from_fn(|n| case.query(n)));
    for (n, nearest) in nearest.into_iter().enumerate() {
        let score = |i: usize| case.products(i, n)[0] * case.scales[i] * (0.01 * 128.0) - penalties[i];
        let best = (1..case.items).fold(0, |best, i| if score(i) > score(best) { i } else { best });
        assert_eq!(nearest as usize, best, "{} D={dimension} query {n}", kernels.name());
    }
}

#[test]
fn the_largest_products_fit_and_the_first_of_equal_items_is_the_nearest() {
    for (code, query) in [(0, i8::MIN), (0, i8::MAX), (u8::MAX, i8::MIN), (u8::MAX, i8::MAX)] {
        for dimension in [4, 8, 100, 512] {
            let mut case = Case::random(dimension, 177, &mut Random(12));
            case.codes.fill(code);
            case.scales.fill(1.0);
            case.queries.iter_mut().flatten().for_each(|row| row.fill(query));
            let expected = case.naive(0, 0);
            for kernels in Kernels::tried() {
                let found = scanned(kernels, &case.blocks(), &case.query(0), expected, 192);
                let all: Vec<(f32, u32)> = (0..177).map(|i| (expected, 1000 + i)).collect();
                assert_eq!(found, all, "{} D={dimension} {code} by {query}", kernels.name());
                check_many(kernels, &case, dimension);
            }
        }
    }
}

#[test]
fn the_kth_value_and_the_values_above_it_match_a_sort() {
    let random = &mut Random(10);
    for round in 0..400 {
        let len = 1 + random.next() as usize % if round % 2 == 0 { 100 } else { 5000 };
        let distinct = [2, 50, 1 << 20][round % 3];
        let values: Vec<f32> = (0..len).map(|_| (random.next() % distinct) as f32 - 20.0).collect();
        let mut sorted = values.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let k = 1 + random.next() as usize % len;
        for kernels in Kernels::tried() {
            let kth = kernels.kth(&mut values.clone(), k);
            assert_eq!(kth, sorted[k - 1], "{} {k} of {len}", kernels.name());
            let (mut scores, mut slots) = (values.clone(), (0..len as u32).collect::<Vec<_>>());
            let kept = kernels.retain(&mut scores, &mut slots, kth);
            let expected: Vec<u32> = (0..len as u32).filter(|&s| values[s as usize] >= kth).collect();
            assert_eq!(slots[..kept], expected, "{}", kernels.name());
            assert!((0..kept).all(|n| scores[n] == values[slots[n] as usize]));
        }
    }
}

#[test]
fn selection_equals_a_scan_without_scoring() {
    let random = &mut Random(8);
    let scores: Vec<f32> = (0..160).map(|n| if n % 7 == 0 { f32::NAN } else { random.float() }).collect();
    for kernels in Kernels::tried() {
        let (mut kept, mut slots) = (vec![0.0; 200], vec![0; 200]);
        let mut staging = Staging { scores: &mut kept, slots: &mut slots, len: 0 };
        assert_eq!(kernels.keep(&scores, 5, 0.25, 0, &mut staging), 10);
        let len = staging.len;
        let expected: Vec<u32> = (0..160u32).filter(|&n| scores[n as usize] >= 0.25).map(|n| n + 5).collect();
        assert_eq!(slots[..len], expected, "{}", kernels.name());
    }
}

#[test]
fn inner_products_agree_with_double_precision() {
    let random = &mut Random(9);
    for len in 0..=513 {
        let a: Vec<f32> = (0..len).map(|_| random.float()).collect();
        let b: Vec<f32> = (0..len).map(|_| random.float()).collect();
        let bf: Vec<half::bf16> = b.iter().map(|&x| half::bf16::from_f32(x)).collect();
        let hf: Vec<half::f16> = b.iter().map(|&x| half::f16::from_f32(x)).collect();
        let exact = |b: &dyn Fn(usize) -> f32| (0..len).map(|i| f64::from(a[i]) * f64::from(b(i))).sum::<f64>() as f32;
        for kernels in Kernels::tried() {
            let close = |got: f32, want: f32| {
                assert!((got - want).abs() < 1e-4, "{} length {len}: {got} {want}", kernels.name())
            };
            close(kernels.dot_f32(&a, &b), exact(&|i| b[i]));
            close(kernels.dot_bf16(&a, &bf), exact(&|i| bf[i].to_f32()));
            close(kernels.dot_f16(&a, &hf), exact(&|i| hf[i].to_f32()));
        }
    }
}

#[test]
fn products_of_many_rows_are_those_of_each() {
    let random = &mut Random(11);
    for width in [1, 7, 16, 37, 64, 128, 130] {
        let query: Vec<f32> = (0..width).map(|_| random.float()).collect();
        let rows: Vec<f32> = (0..50 * width).map(|_| random.float()).collect();
        let bf: Vec<half::bf16> = rows.iter().map(|&x| half::bf16::from_f32(x)).collect();
        let hf: Vec<half::f16> = rows.iter().map(|&x| half::f16::from_f32(x)).collect();
        for count in [0, 1, 8, 9, 40] {
            let slots: Vec<u32> = (0..count).map(|_| random.next() % 50).collect();
            let range = |slot: u32| slot as usize * width..(slot as usize + 1) * width;
            for kernels in Kernels::tried() {
                let mut out = vec![0.0; count];
                let each = |dot: &dyn Fn(u32) -> f32| slots.iter().map(|&s| dot(s)).collect::<Vec<f32>>();
                kernels.dots_f32(&query, &rows, &slots, &mut out);
                assert_eq!(out, each(&|s| kernels.dot_f32(&query, &rows[range(s)])), "{}", kernels.name());
                kernels.dots_bf16(&query, &bf, &slots, &mut out);
                assert_eq!(out, each(&|s| kernels.dot_bf16(&query, &bf[range(s)])), "{}", kernels.name());
                kernels.dots_f16(&query, &hf, &slots, &mut out);
                assert_eq!(out, each(&|s| kernels.dot_f16(&query, &hf[range(s)])), "{}", kernels.name());
            }
        }
    }
}

#[test]
fn unknown_kernels_are_rejected_by_name() {
    let error = Kernels::named("sse9").unwrap_err().to_string();
    assert!(error.contains("`sse9`") && error.contains("portable"), "{error}");
    for kernels in Kernels::all() {
        assert_eq!(Kernels::named(kernels.name()).unwrap(), kernels);
    }
}
