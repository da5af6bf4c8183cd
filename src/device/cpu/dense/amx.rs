//! Products of pairs of bf16 by tiles of AMX: a step is 16 rows by 16 columns and 16 pairs of the depth.
//!
//! 1. Rows are cut into tiles of nearly equal height, since a step takes as long as its tile has rows.
//! 2. Of each part, as many whole steps as its depth has run over where its numbers lie. What is left of all parts, their ends, is
//!    copied side by side with zeros behind and runs as one part more: every step has one depth.
//! 3. Two tiles of rows and two of columns, a panel, keep their sums in tiles through all steps.
//! 4. Sums leave through memory; while those of one place are on their way, the steps of the next are begun.
//!
//! The order of a number's sums, which [`Tiles::add_pairs`] tells, depends on the shapes of the parts alone: not on the rows beside it,
//! and not on the height of its tile.

use super::operands::{Form, LANES, Lines, PANEL, Product, pair};
use crate::device::cpu::amx::{Instructions, ROW_BYTES, ROWS, Shape, TILES, Tiles};

/// Pairs of the depth of a step.
const STEP: usize = ROW_BYTES / 4;
/// Tiles of rows whose ends are copied together.
const TOGETHER: usize = 4;
/// From a row of sums to the next.
const SUMS_STRIDE: usize = PANEL * 4;

/// The memory of a thread, kept from product to product.
#[derive(Default)]
struct Room {
    /// Ends of rows, `[TOGETHER * ROWS, ends]`.
    rows: Lines,
    /// Ends of the weights of a panel, `[ends, PANEL]`.
    weights: Lines,
    /// Sums of two places, `[2 * ROWS, PANEL]` each.
    sums: [Lines; 2],
}

thread_local! {
    static ROOM: std::cell::RefCell<Room> = std::cell::RefCell::default();
}

impl Room {
    fn make(&mut self, ends: usize) {
        let grow = |lines: &mut Lines, count: usize| {
            if lines.numbers().len() < count {
                *lines = Lines::new(count);
            }
        };
        grow(&mut self.rows, TOGETHER * ROWS * ends);
        grow(&mut self.weights, ends * PANEL);
        self.sums.iter_mut().for_each(|sums| grow(sums, 2 * ROWS * PANEL));
    }
}

/// Tiles of rows that follow each other, each `height` rows high.
#[derive(Clone, Copy)]
struct Run {
    row: usize,
    height: usize,
    tiles: usize,
}

/// One or two tiles of rows, and a panel of columns.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    rows: usize,
    column: usize,
}

/// Rows times weights, as steps read them.
#[derive(Clone, Copy)]
struct Factors<'a> {
    rows: &'a [f32],
    stride: usize,
    weights: &'a [f32],
    row_stride: usize,
}

/// # Safety
/// AMX is there and permitted, the thread uses no tiles, and the CPU has AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
    // SAFETY: this function's conditions.
    let mut tiles = unsafe { Instructions::new() };
    product_by(&mut tiles, product, out, stride);
}

/// [`product`] by any tiles.
#[inline(always)]
pub(super) fn product_by<T: Tiles>(tiles: &mut T, product: &Product<'_>, out: &mut [f32], stride: usize) {
    // Not borrowed within a closure, which would be compiled without the features of its caller.
    let mut room = ROOM.take();
    let ends = product.parts.iter().map(|part| part.depth % STEP).sum::<usize>().next_multiple_of(STEP);
    room.make(ends);
    let count = product.rows.div_ceil(ROWS);
    let height = product.rows.div_ceil(count);
    let tall = product.rows - count * (height - 1);
    let mut row = 0;
    for (height, count) in [(height, tall), (height - 1, count - tall)] {
        if count == 0 {
            continue;
        }
        let [sums, weights] = [height, STEP].map(|rows| Shape { rows, row_bytes: ROW_BYTES });
        let shapes: [Shape; TILES] = [sums, sums, sums, sums, sums, sums, weights, weights];
        tiles.configure(&shapes);
        for first in (0..count).step_by(TOGETHER) {
            let run = Run { row: row + first * height, height, tiles: (count - first).min(TOGETHER) };
            run_product(tiles, product, run, ends, &mut room, (&mut *out, stride));
        }
        row += count * height;
    }
    ROOM.set(room);
}

#[inline(always)]
fn run_product<T: Tiles>(
    tiles: &mut T,
    product: &Product<'_>,
    run: Run,
    ends: usize,
    room: &mut Room,
    (out, stride): (&mut [f32], usize),
) {
    let Room { rows, weights, sums } = room;
    for (m, to) in rows.numbers_mut().chunks_exact_mut(ends.max(1)).enumerate().take(run.height * run.tiles) {
        copy_ends(product, to, |part| &part.rows[(run.row + m) * part.stride..]);
    }
    let mut waiting: Option<Place> = None;
    let [sums, before] = sums;
    let (mut sums, mut before) = (sums, before);
    for column in (0..product.columns).step_by(PANEL) {
        copy_weights(product, column, ends, weights.numbers_mut());
        for tile in (0..run.tiles).step_by(2) {
            let rows_of = (run.tiles - tile).min(2) * run.height;
            let place = Place { row: run.row + tile * run.height, rows: rows_of, column };
            let of_ends = Factors {
                rows: &rows.numbers()[tile * run.height * ends..],
                stride: ends,
                weights: weights.numbers(),
                row_stride: PANEL,
            };
            sum(tiles, product, (place, run.height), (of_ends, ends), sums.numbers_mut());
            if let Some(done) = waiting.replace(place) {
                finish(product, done, before.numbers(), out, stride);
            }
            std::mem::swap(&mut sums, &mut before);
        }
    }
    if let Some(done) = waiting {
        finish(product, done, before.numbers(), out, stride);
    }
}

/// What is left of the depth of all parts of a row after whole steps, with zeros behind.
#[inline(always)]
fn copy_ends<'a>(product: &Product<'a>, to: &mut [f32], row: impl Fn(&super::operands::Part<'a>) -> &'a [f32]) {
    let mut at = 0;
    for part in product.parts.iter().filter(|part| part.depth % STEP > 0) {
        let whole = part.depth / STEP * STEP;
        let end = &row(part)[whole..part.depth];
        to[at..at + end.len()].copy_from_slice(end);
        at += end.len();
    }
    to[at..].fill(0.0);
}

/// The same of the weights of a panel.
#[inline(always)]
fn copy_weights(product: &Product<'_>, column: usize, ends: usize, to: &mut [f32]) {
    let width = (product.columns - column).next_multiple_of(LANES).min(PANEL);
    let mut rows = to.chunks_exact_mut(PANEL).take(ends);
    for part in product.parts {
        let from = column / PANEL * part.weights.panel_stride;
        for k in part.depth / STEP * STEP..part.depth {
            let from = &part.weights.numbers[from + k * part.weights.row_stride..];
            if let Some(to) = rows.next() {
                to[..width].copy_from_slice(&from[..width]);
            }
        }
    }
    rows.for_each(|to| to.fill(0.0));
}

/// Sums of a place.
#[inline(always)]
fn sum<T: Tiles>(
    tiles: &mut T,
    product: &Product<'_>,
    (place, height): (Place, usize),
    (of_ends, ends): (Factors<'_>, usize),
    to: &mut [f32],
) {
    let is_tall = place.rows > height;
    let is_wide = product.columns - place.column > LANES;
    if product.bias.is_empty() {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
    } else {
        let bias: &[u8] = bytemuck::cast_slice(&product.bias[place.column..]);
        tiles.load::<0>(bias, 0);
        tiles.load::<2>(bias, 0);
        if is_wide {
            tiles.load::<1>(&bias[ROW_BYTES..], 0);
            tiles.load::<3>(&bias[ROW_BYTES..], 0);
        }
    }
    for part in product.parts.iter().filter(|part| part.depth >= STEP) {
        let factors = Factors {
            rows: &part.rows[place.row * part.stride..],
            stride: part.stride,
            weights: &part.weights.numbers[place.column / PANEL * part.weights.panel_stride..],
            row_stride: part.weights.row_stride,
        };
        steps(tiles, factors, part.depth / STEP, (height, is_tall, is_wide));
    }
    steps(tiles, of_ends, ends / STEP, (height, is_tall, is_wide));
    let to: &mut [u8] = bytemuck::cast_slice_mut(to);
    tiles.store::<0>(to, SUMS_STRIDE);
    tiles.store::<1>(&mut to[ROW_BYTES..], SUMS_STRIDE);
    if is_tall {
        let below = &mut to[height * SUMS_STRIDE..];
        tiles.store::<2>(below, SUMS_STRIDE);
        tiles.store::<3>(&mut below[ROW_BYTES..], SUMS_STRIDE);
    }
}

/// Adds the products of so many steps to the sums.
#[inline(always)]
fn steps<T: Tiles>(tiles: &mut T, factors: Factors<'_>, count: usize, (height, is_tall, is_wide): (usize, bool, bool)) {
    let (stride, row_stride) = (factors.stride * 4, factors.row_stride * 4);
    for step in 0..count {
        let rows: &[u8] = bytemuck::cast_slice(&factors.rows[step * STEP..]);
        let weights: &[u8] = bytemuck::cast_slice(&factors.weights[step * STEP * factors.row_stride..]);
        tiles.load::<4>(rows, stride);
        tiles.load::<6>(weights, row_stride);
        tiles.add_pairs::<0, 4, 6>();
        if is_wide {
            tiles.load::<7>(&weights[ROW_BYTES..], row_stride);
            tiles.add_pairs::<1, 4, 7>();
        }
        if is_tall {
            tiles.load::<5>(&rows[height * stride..], stride);
            tiles.add_pairs::<2, 5, 6>();
            if is_wide {
                tiles.add_pairs::<3, 5, 7>();
            }
        }
    }
}

/// Sums of a place to the result.
#[inline(always)]
fn finish(product: &Product<'_>, place: Place, sums: &[f32], out: &mut [f32], stride: usize) {
    let width = (product.columns - place.column).min(PANEL);
    for (m, sums) in sums.as_chunks::<PANEL>().0.iter().enumerate().take(place.rows) {
        let mut sums = *sums;
        if product.relu {
            sums.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x });
        }
        let row = &mut out[(place.row + m) * stride..];
        match product.result {
            Form::Single if width == PANEL => row[place.column..][..PANEL].copy_from_slice(&sums),
            Form::Single => row[place.column..][..width].copy_from_slice(&sums[..width]),
            Form::Pairs => {
                sums[width..].fill(0.0);
                let pairs: [f32; PANEL / 2] = std::array::from_fn(|n| pair(sums[2 * n], sums[2 * n + 1]));
                row[place.column / 2..][..PANEL / 2].copy_from_slice(&pairs);
            }
        }
    }
}
