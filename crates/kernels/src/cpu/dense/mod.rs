//! Kernels of compiled dense graphs: matrix products, and element-wise work on blocks of rows.
//!
//! **Products.** `out = parts + bias`, where a part is rows of numbers times a matrix, whose columns lie in panels of
//! [`PANEL`] (packed once, [`pack`]; a single panel is only as wide as needed) or row after row. A tile of up to 14 rows and
//! 32 columns stays in registers through all parts. Every number is one chain of multiply-adds in the order of the parts and
//! their depth, in every tile: a row's result does not depend on the other rows. If the matrix is a single column with
//! contiguous weights, such as a user's vector, a number is the sum of 16 such chains along the depth: a single chain would use
//! one lane of 16.
//!
//! **Pairs.** Factors may come in bf16 ([`Form::Pairs`]): a register then holds two rows of 16 columns, and a step of
//! `vdpbf16ps` does two multiply-adds per lane, with the sums in f32; a step of AMX's `tdpbf16ps`, over panels in the
//! same layout, does 8,192 multiply-adds (`amx.rs`). The result may be written as pairs too, the input form of the next
//! product. Beyond the depth of a part, both factors are padded with zeros to a multiple of [`STEP`].
//!
//! **Zeros** of the rows may be skipped (`sparse`, in AVX-512), which changes no result but
//! for the sign of zero sums.
//!
//! **Int8** ([`Int8Product`]): products with constant matrices whose factors are quantized, with exact sums (`int8`).
//!
//! **Outer products** ([`Outer`]) are summed over rows: the gradient of a matrix.
//!
//! **Recurrent layers** ([`CellStep`]) fuse the gates of a time step.
//!
//! **Softmax and layer normalization** ([`Norm`]) are fused, but computed as their separate steps would be. **Rearrangements**
//! ([`Order`]) transpose matrices and copy ranges of numbers.
//!
//! **Element-wise work** is plain Rust, compiled once for each instruction set.

/// Calls the form of a function for the instruction set. It stands before the modules because `int8` has forms, too.
macro_rules! dispatch {
    ($self:ident, $function:ident ( $($argument:expr),* )) => {
        match $self.isa {
            // SAFETY: `Kernels` exists only if its features were detected; the wrapper checked the slices.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function($($argument),*) },
            // SAFETY: `Kernels` exists only if its features were detected; the wrapper checked the slices.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function($($argument),*) },
            _ => portable::$function($($argument),*),
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod chain;
mod int8;
#[cfg(target_arch = "x86_64")]
mod layer_norm;
mod maps;
mod normalize;
mod operands;
mod outer;
mod portable;
mod rearrange;
mod recurrent;
#[cfg(target_arch = "x86_64")]
mod registers;
#[cfg(target_arch = "x86_64")]
mod softmax;
#[cfg(target_arch = "x86_64")]
mod sparse;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use operands::{
    Binary, CHAIN_MAX, Chain, ChainLink, EQUAL_FOLDS_MAX, EqualFold, Fold, Form, Keys, LANES, Lines, MapTarget,
    Operand, PANEL, PARTS_MAX, PairRows, Part, Product, STEP, Unary, Weights, pack, pack_pairs, packed_stride,
    pair_rows,
};

pub use int8::{INT8_DEPTH_MAX, Int8Matrix, Int8Part, Int8Product};
pub use normalize::Norm;
pub use outer::Outer;
pub use rearrange::Order;
pub use recurrent::{Cell, CellStep};

#[cfg(all(any(test, feature = "testing"), target_arch = "x86_64"))]
use super::amx::Emulated;
#[cfg(target_arch = "x86_64")]
use super::amx::Source;
use super::isa::{Isa, Kernels};
#[cfg(target_arch = "x86_64")]
use operands::FEW_COLUMNS;
use operands::reach;

/// Rows whose distance is a multiple of this number are in the same sets of an 8-way L1 cache: the rows of one tile
/// evict each other.
#[cfg(target_arch = "x86_64")]
const APART: usize = 512;
/// Minimum number of rows of a product for which the rows are first copied to another distance.
#[cfg(target_arch = "x86_64")]
const APART_ROWS_MIN: usize = 8;
/// Rows of the widest tile.
#[cfg(target_arch = "x86_64")]
const TILE_ROWS: usize = 14;

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// Rows of a tile, copied to a distance at which they share no cache sets, per thread.
    static APART_ROWS: std::cell::RefCell<Lines> = std::cell::RefCell::default();
}

impl Kernels {
    /// Writes a sum of products to `out`, whose rows are `stride` apart; numbers between the columns and the stride are unchanged.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn product(self, product: &Product<'_>, out: &mut [f32], stride: usize) {
        let Product { rows, columns, parts, bias, .. } = *product;
        if rows == 0 || columns == 0 {
            return;
        }
        // Pairs are written in complete registers, one per panel.
        let (room, read) = match product.result {
            Form::Single => (columns, columns),
            Form::Pairs => (columns.next_multiple_of(PANEL) / 2, columns.next_multiple_of(PANEL)),
        };
        assert!(stride >= room && out.len() >= (rows - 1) * stride + room, "an output shorter than the product");
        assert!(
            product.factors == Form::Pairs || product.result == Form::Single,
            "results in pairs need factors in pairs"
        );
        assert!(bias.is_empty() || bias.len() >= columns.next_multiple_of(LANES), "a bias shorter than the columns");
        for part in parts.iter().filter(|part| part.depth > 0) {
            let depth = match product.factors {
                Form::Single => part.depth,
                Form::Pairs => part.depth.next_multiple_of(STEP),
            };
            assert!(part.rows.len() >= (rows - 1) * part.stride + depth, "rows of a part too short");
            assert!(part.weights.numbers.len() >= reach(&part.weights, depth, read), "weights too short");
        }
        #[cfg(target_arch = "x86_64")]
        if product.factors == Form::Pairs
            && let Some(source) = self.tiles
        {
            return match source {
                // SAFETY: the CPU features were detected; tiles are released before a product ends.
                Source::Instructions => unsafe { amx::product(product, out, stride) },
                #[cfg(any(test, feature = "testing"))]
                Source::Emulated { wrong } => amx::product_emulated(&mut Emulated::new(wrong), product, out, stride),
            };
        }
        #[cfg(target_arch = "x86_64")]
        if product.skips_zeros
            && product.factors == Form::Single
            && self.isa == Isa::Avx512
            // SAFETY: the features were found; the slices are checked above.
            && unsafe { sparse::product(product, out, stride) }
        {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if let &[part] = parts
            && product.factors == Form::Single
            && self.isa == Isa::Avx512
            && rows >= APART_ROWS_MIN
            && columns > PANEL
            && part.stride.is_multiple_of(APART)
        {
            return self.product_apart(product, &part, out, stride);
        }
        // For a few columns of a shallow product, transposing the columns costs more than it saves.
        #[cfg(target_arch = "x86_64")]
        let is_few = columns <= FEW_COLUMNS && parts.iter().map(|part| part.depth).sum::<usize>() >= 2 * LANES;
        let is_column = columns == 1 && parts.iter().all(|part| part.weights.row_stride == 1);
        match product.factors {
            Form::Single if is_column => dispatch!(self, column(product, out, stride)),
            // SAFETY: the features were found; the slices are checked above.
            #[cfg(target_arch = "x86_64")]
            Form::Single if self.isa == Isa::Avx512 && is_few => unsafe {
                avx512::few(product, out, stride);
            },
            // SAFETY: the features were found; the slices are checked above.
            #[cfg(target_arch = "x86_64")]
            Form::Single if self.isa == Isa::Avx512 && columns <= avx512::HALF => unsafe {
                avx512::half(product, out, stride);
            },
            Form::Single => dispatch!(self, product(product, out, stride)),
            // SAFETY: the feature was found; the slices are checked above.
            #[cfg(target_arch = "x86_64")]
            Form::Pairs if self.has_bf16 => unsafe { avx512bf16::product(product, out, stride) },
            Form::Pairs => portable::product_of_pairs(product, out, stride),
        }
    }

    /// Computes a product whose rows share sets of the L1 cache, from copies of the rows that do not share sets.
    #[cfg(target_arch = "x86_64")]
    fn product_apart(self, product: &Product<'_>, part: &Part<'_>, out: &mut [f32], stride: usize) {
        let apart = part.depth + LANES;
        APART_ROWS.with_borrow_mut(|lines| {
            if lines.numbers().len() < TILE_ROWS * apart {
                *lines = Lines::new(TILE_ROWS * apart);
            }
            let tiles = product.rows.div_ceil(TILE_ROWS);
            let mut row = 0;
            for tile in 0..tiles {
                // Tiles of nearly equal height, as in `tiles.rs`.
                let rows = (product.rows - row).div_ceil(tiles - tile);
                for (n, to) in lines.numbers_mut().chunks_exact_mut(apart).enumerate().take(rows) {
                    to[..part.depth].copy_from_slice(&part.rows[(row + n) * part.stride..][..part.depth]);
                }
                let part = Part { rows: lines.numbers(), stride: apart, ..*part };
                // SAFETY: the features were found; the caller checked the slices.
                unsafe {
                    avx512::product(&Product { rows, parts: &[part], ..*product }, &mut out[row * stride..], stride)
                };
                row += rows;
            }
        });
    }

    /// Converts the first `count` numbers of each row of `input` to bf16 pairs, and fills the rest of the output row with zeros.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn narrow(self, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
        #[cfg(target_arch = "x86_64")]
        if self.has_bf16 && self.isa == Isa::Avx512 {
            // SAFETY: the features were found.
            return unsafe { avx512bf16::narrow(input, count, target) };
        }
        dispatch!(self, narrow(input, count, target))
    }

    /// Packs a matrix `[depth, columns]` in pairs of rows, as [`pack_pairs`] does, into rows of the panels of `out`.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn pack_narrow(self, matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.has_bf16 && self.isa == Isa::Avx512 {
            // SAFETY: the features were found.
            return unsafe { avx512bf16::pack_narrow(matrix, depth, columns, rows, out) };
        }
        dispatch!(self, pack_narrow(matrix, depth, columns, rows, out))
    }

    /// Applies `f` to every number of `input`.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn map1(self, f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
        dispatch!(self, map1(f, input, target))
    }

    /// Applies `f` to each pair of numbers of `a` and `b`.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn map2(self, f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
        dispatch!(self, map2(f, a, b, target))
    }

    /// Reduces each contiguous group of `count` numbers of `input` to one number; a group of the target has one number.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn fold(self, f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
        dispatch!(self, fold(f, input, count, target))
    }

    /// Replaces each contiguous group of `width` numbers by its softmax.
    ///
    /// # Panics
    /// If the numbers are not complete groups.
    pub fn softmax(self, numbers: &mut [f32], width: usize) {
        assert!(numbers.len().is_multiple_of(width.max(1)), "a softmax of an incomplete group");
        dispatch!(self, softmax(numbers, width))
    }

    /// Normalizes each contiguous group of `norm.width` numbers of `input`.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn norm(self, norm: &Norm<'_>, input: &Operand<'_>, target: &mut MapTarget<'_>) {
        dispatch!(self, norm(norm, input, target))
    }

    /// Reduces the values whose shared key equals a row's key: reduction `n` makes number `n` of a row of `out`. The results
    /// equal those of multiplying the values by the comparison (1 or 0) before the reduction, except for the sign of zeros.
    ///
    /// # Panics
    /// If a slice is shorter than the rows, or the count of numbers differs from that of the shared keys.
    pub fn fold_equal(self, keys: &Keys<'_>, folds: &[EqualFold<'_>], out: &mut [f32], stride: usize) {
        for fold in folds {
            assert_eq!(fold.values.len(), keys.shared.len(), "one value per shared key");
        }
        dispatch!(self, fold_equal(keys, folds, out, stride))
    }

    /// Scales the state `h` of each row by its reset gate, `[rows, hidden]`: the factor of the last product of
    /// [`Cell::GruResetFirst`].
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn reset(self, step: &CellStep<'_>, h: &[f32], to: &mut [f32]) {
        dispatch!(self, reset(step, h, to))
    }

    /// Computes the next state `h` and, of an LSTM, the next cell state `c` (`[rows, hidden]` each) of the rows that `is_active`.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say.
    pub fn advance(self, step: &CellStep<'_>, is_active: &dyn Fn(usize) -> bool, h: &mut [f32], c: &mut [f32]) {
        dispatch!(self, advance(step, is_active, h, c))
    }
}

#[cfg(test)]
mod tests;
