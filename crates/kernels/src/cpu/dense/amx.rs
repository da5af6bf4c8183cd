//! Products of bf16 pairs by AMX tiles: a step covers 16 rows, 16 columns and 16 pairs of the depth.
//!
//! 1. Rows are split into tiles of nearly equal height, because the time of a step grows with the rows of its tile.
//! 2. The sums of two tiles of rows by two tiles of columns (a panel) stay in tile registers until all parts of the
//!    product are added. Rows and weights are padded with zeros to the end of a part's last step.
//! 3. Sums leave tile registers only through memory. While the sums of one block of tiles are stored, the steps of the
//!    next block start.
//!
//! The order in which a number's products are summed ([`Tiles::add_pairs`]) depends only on the shapes of the parts, not on
//! neighbouring rows or the height of its tile.

use std::arch::x86_64::*;

use super::avx512bf16::pairs;
#[cfg(any(test, feature = "testing"))]
use super::operands::pair;
use super::operands::{Form, LANES, Lines, PANEL, Part, Product, STEP};
use super::registers::lanes;
use crate::cpu::amx::{Instructions, ROW_BYTES, ROWS, Rows, Shape, TILES, Tiles};

/// Bytes from a row of sums to the next.
const SUMS_STRIDE: usize = PANEL * 4;

thread_local! {
    /// Sums of two tile blocks, `[2, 2 * ROWS, PANEL]`, per thread.
    static SUMS: std::cell::RefCell<Lines> = std::cell::RefCell::default();
}

/// One or two tiles of rows, each `height` rows high, and a panel of columns.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    height: usize,
    is_tall: bool,
    column: usize,
}

impl Place {
    fn rows(self) -> usize {
        self.height * (1 + usize::from(self.is_tall))
    }
}

/// # Safety
/// AMX is present and permitted, the thread uses no tiles, and the CPU has AVX-512 F, BW, VL and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
    // SAFETY: this function's `# Safety` conditions hold.
    let mut tiles = unsafe { Instructions::new() };
    product_by(&mut tiles, product, out, stride, |sums, width, out, stride| {
        match (product.result, product.relu, width == PANEL) {
            (Form::Pairs, true, true) => finish::<true, true, true>(sums, width, out, stride),
            (Form::Pairs, true, false) => finish::<true, true, false>(sums, width, out, stride),
            (Form::Pairs, false, _) => finish::<true, false, false>(sums, width, out, stride),
            (Form::Single, true, true) => finish::<false, true, true>(sums, width, out, stride),
            (Form::Single, true, false) => finish::<false, true, false>(sums, width, out, stride),
            (Form::Single, false, true) => finish::<false, false, true>(sums, width, out, stride),
            (Form::Single, false, false) => finish::<false, false, false>(sums, width, out, stride),
        }
    });
}

/// Writes rows of sums, `columns` numbers each, to rows `stride` apart. Results in pairs are padded with zeros.
///
/// # Panics
/// If `out` is shorter than its rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn finish<const PAIRS: bool, const RELU: bool, const WHOLE: bool>(
    sums: &[[f32; PANEL]],
    width: usize,
    out: &mut [f32],
    stride: usize,
) {
    let width = if WHOLE { PANEL } else { width };
    let room = if PAIRS { LANES } else { width };
    assert!((1..=PANEL).contains(&width) && out.len() >= (sums.len() - 1) * stride + room);
    let (low, high) = (lanes(width), lanes(width.saturating_sub(LANES)));
    for (m, sums) in sums.iter().enumerate() {
        // SAFETY: a row of sums is two registers; the stores lie within the row's room, as asserted.
        unsafe {
            let to = out.as_mut_ptr().add(m * stride);
            let mut first = _mm512_maskz_loadu_ps(low, sums.as_ptr());
            let mut second = _mm512_maskz_loadu_ps(high, sums.as_ptr().add(LANES));
            if RELU {
                // `max` returns its second operand if one is NaN, so NaN sums stay NaN.
                first = _mm512_max_ps(_mm512_setzero_ps(), first);
                second = _mm512_max_ps(_mm512_setzero_ps(), second);
            }
            if PAIRS {
                _mm512_storeu_ps(to, pairs(first, second));
            } else {
                _mm512_mask_storeu_ps(to, low, first);
                _mm512_mask_storeu_ps(to.wrapping_add(LANES), high, second);
            }
        }
    }
}

/// Runs [`product`] on emulated tiles.
#[cfg(any(test, feature = "testing"))]
pub(super) fn product_emulated<T: Tiles>(tiles: &mut T, product: &Product<'_>, out: &mut [f32], stride: usize) {
    product_by(tiles, product, out, stride, |sums, width, out, stride| {
        let relu = |x: f32| if product.relu && x < 0.0 { 0.0 } else { x };
        for (sums, out) in sums.iter().zip(out.chunks_mut(stride)) {
            let at = |n: usize| if n < width { relu(sums[n]) } else { 0.0 };
            match product.result {
                Form::Single => out[..width].iter_mut().enumerate().for_each(|(n, to)| *to = at(n)),
                Form::Pairs => {
                    let to = out[..LANES].iter_mut().enumerate();
                    to.for_each(|(n, to)| *to = pair(at(2 * n), at(2 * n + 1)));
                }
            }
        }
    });
}

/// Computes the product on any tiles. `finish` receives rows of sums of a panel, the number of valid sums per row, and the output
/// with its stride.
#[inline(always)]
fn product_by<T: Tiles>(
    tiles: &mut T,
    product: &Product<'_>,
    out: &mut [f32],
    stride: usize,
    finish: impl Fn(&[[f32; PANEL]], usize, &mut [f32], usize),
) {
    // The buffer is taken, not borrowed in a closure: a closure would be compiled without the target features of its caller.
    let mut lines = SUMS.take();
    if lines.numbers().is_empty() {
        lines = Lines::new(2 * 2 * ROWS * PANEL);
    }
    let (mut sums, mut before) = lines.numbers_mut()[..2 * 2 * ROWS * PANEL].split_at_mut(2 * ROWS * PANEL);
    let count = product.rows.div_ceil(ROWS);
    let height = product.rows.div_ceil(count);
    let tall = product.rows - count * (height - 1);
    let mut row = 0;
    for (height, count) in [(height, tall), (height - 1, count - tall)] {
        if count == 0 {
            continue;
        }
        let [factors, weights] = [height, STEP].map(|rows| Shape { rows, row_bytes: ROW_BYTES });
        let shapes: [Shape; TILES] = [factors, factors, factors, factors, factors, factors, weights, weights];
        tiles.configure(&shapes);
        let mut waiting: Option<Place> = None;
        for column in (0..product.columns).step_by(PANEL) {
            for tile in (0..count).step_by(2) {
                let place = Place { row: row + tile * height, height, is_tall: tile + 1 < count, column };
                sum(tiles, product, place, sums);
                if let Some(done) = waiting.replace(place) {
                    finish_place(product, done, before, (&mut *out, stride), &finish);
                }
                std::mem::swap(&mut sums, &mut before);
            }
        }
        if let Some(done) = waiting {
            finish_place(product, done, before, (&mut *out, stride), &finish);
        }
        row += count * height;
    }
    SUMS.set(lines);
}

/// Computes the sums of a tile block.
#[inline(always)]
fn sum<T: Tiles>(tiles: &mut T, product: &Product<'_>, place: Place, to: &mut [f32]) {
    let Place { height, is_tall, column, .. } = place;
    let is_wide = product.columns - column > LANES;
    if product.bias.is_empty() {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
    } else {
        let bias: &[u8] = bytemuck::cast_slice(&product.bias[column..]);
        tiles.load::<0>(bias, 0);
        tiles.load::<2>(bias, 0);
        if is_wide {
            tiles.load::<1>(&bias[ROW_BYTES..], 0);
            tiles.load::<3>(&bias[ROW_BYTES..], 0);
        }
    }
    for part in product.parts.iter().filter(|part| part.depth > 0) {
        steps(tiles, part, place, is_wide);
    }
    let to: &mut [u8] = bytemuck::cast_slice_mut(to);
    tiles.store::<0>(to, SUMS_STRIDE);
    if is_wide {
        tiles.store::<1>(&mut to[ROW_BYTES..], SUMS_STRIDE);
    }
    if is_tall {
        let below = &mut to[height * SUMS_STRIDE..];
        tiles.store::<2>(below, SUMS_STRIDE);
        if is_wide {
            tiles.store::<3>(&mut below[ROW_BYTES..], SUMS_STRIDE);
        }
    }
}

/// Adds the products of a part to the sums.
#[inline(always)]
fn steps<T: Tiles>(tiles: &mut T, part: &Part<'_>, place: Place, is_wide: bool) {
    let rows: &[u8] = bytemuck::cast_slice(&part.rows[place.row * part.stride..]);
    let panel = &part.weights.numbers[place.column / PANEL * part.weights.panel_stride..];
    let left = Rows { bytes: rows, stride: part.stride * 4 };
    let right = Rows { bytes: bytemuck::cast_slice(panel), stride: part.weights.row_stride * 4 };
    let count = part.depth.div_ceil(STEP);
    match (place.is_tall, is_wide) {
        (true, true) => tiles.add_steps::<true, true>(left, right, count),
        (true, false) => tiles.add_steps::<true, false>(left, right, count),
        (false, true) => tiles.add_steps::<false, true>(left, right, count),
        (false, false) => tiles.add_steps::<false, false>(left, right, count),
    }
}

/// Writes the sums of a tile block to the result.
#[inline(always)]
fn finish_place(
    product: &Product<'_>,
    place: Place,
    sums: &[f32],
    (out, stride): (&mut [f32], usize),
    finish: &impl Fn(&[[f32; PANEL]], usize, &mut [f32], usize),
) {
    let first = place.row * stride + product.result.room(place.column);
    let width = (product.columns - place.column).min(PANEL);
    finish(&sums.as_chunks().0[..place.rows()], width, &mut out[first..], stride);
}
