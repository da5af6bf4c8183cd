//! Pooled lookups in rows of an embedding table: for each bag of ids, the weighted sum of its rows in f32.
//!
//! Rows lie one after the other. The formats are FBGEMM's table-batched ones
//! (<https://github.com/pytorch/FBGEMM>, `split_table_batched_embeddings_ops_inference`), without padding between rows:
//!
//! | format | bytes a row | layout |
//! |---|---|---|
//! | `f32`, `f16`, `bf16` | 4 D, 2 D, 2 D | plain, little-endian |
//! | `int8`, `int4`, `int2` | 4 + D b / 8 | f16 scale, f16 bias, then D codes of b bits, low bits first |
//!
//! A code is worth `scale * code + bias`, computed in f32. A bag's ids come from one run of ids shared by all bags, so that
//! the prefetch of the row [`PREFETCH_ROWS`] ids ahead crosses from a bag to the next.

use std::ops::Range;

use half::{bf16, f16};

use super::{Isa, Kernels};
use crate::device::memory::prefetch_range;
use crate::error::{Error, Result};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

/// How many ids ahead of the one being summed a row is asked for.
pub const PREFETCH_ROWS: usize = 32;

/// Bytes of scale and bias at the start of a rowwise-quantised row.
pub const QUANTISED_HEAD_BYTES: usize = 4;

/// How the numbers of a row are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit codes with the row's scale and bias.
    Int8,
    /// 4-bit codes with the row's scale and bias.
    Int4,
    /// 2-bit codes with the row's scale and bias.
    Int2,
}

impl RowFormat {
    /// All formats, the widest first.
    pub const ALL: [RowFormat; 6] =
        [RowFormat::F32, RowFormat::F16, RowFormat::Bf16, RowFormat::Int8, RowFormat::Int4, RowFormat::Int2];

    /// The name in a model package.
    pub fn name(self) -> &'static str {
        match self {
            RowFormat::F32 => "f32",
            RowFormat::F16 => "f16",
            RowFormat::Bf16 => "bf16",
            RowFormat::Int8 => "int8",
            RowFormat::Int4 => "int4",
            RowFormat::Int2 => "int2",
        }
    }

    /// The format of a name.
    ///
    /// # Errors
    /// `Invalid` for another name.
    pub fn named(name: &str) -> Result<Self> {
        RowFormat::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
            Error::invalid(format!("row format `{name}`, expected one of: f32, f16, bf16, int8, int4, int2"))
        })
    }

    /// Bits of one number.
    pub fn bits(self) -> usize {
        match self {
            RowFormat::F32 => 32,
            RowFormat::F16 | RowFormat::Bf16 => 16,
            RowFormat::Int8 => 8,
            RowFormat::Int4 => 4,
            RowFormat::Int2 => 2,
        }
    }

    /// True for the formats with a scale and a bias in each row.
    pub fn is_quantised(self) -> bool {
        self.bits() <= 8
    }

    /// Bytes before the numbers of a row.
    pub fn head_bytes(self) -> usize {
        if self.is_quantised() { QUANTISED_HEAD_BYTES } else { 0 }
    }

    /// Bytes of a row of `width` numbers.
    ///
    /// # Errors
    /// `Invalid` where the numbers do not fill whole bytes, or there are none.
    pub fn row_bytes(self, width: usize) -> Result<usize> {
        let bits = width.checked_mul(self.bits()).filter(|&b| b > 0 && b.is_multiple_of(8));
        bits.map(|b| self.head_bytes() + b / 8).ok_or_else(|| {
            let per_byte = 8usize.div_ceil(self.bits());
            Error::invalid(format!(
                "rows of {width} numbers in {}, expected a positive multiple of {per_byte}",
                self.name()
            ))
        })
    }

    /// The width of rows of `row_bytes` bytes.
    ///
    /// # Errors
    /// `Invalid` where no width gives such rows.
    pub fn width_of(self, row_bytes: usize) -> Result<usize> {
        let wrong = || Error::invalid(format!("rows of {row_bytes} bytes are no rows in {}", self.name()));
        let width = row_bytes.checked_sub(self.head_bytes()).ok_or_else(wrong)? * 8 / self.bits();
        if width > 0 && self.row_bytes(width)? == row_bytes { Ok(width) } else { Err(wrong()) }
    }
}

/// Rows of one width and format, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    format: RowFormat,
    width: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Rows<'a> {
    /// A view of `bytes` as rows.
    ///
    /// # Errors
    /// `Invalid` where the bytes are not a whole number of rows.
    pub fn new(format: RowFormat, width: usize, bytes: &'a [u8]) -> Result<Self> {
        let row_bytes = format.row_bytes(width)?;
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(Error::invalid(format!(
                "{} bytes do not make rows of {width} numbers in {} ({row_bytes} bytes each)",
                bytes.len(),
                format.name()
            )));
        }
        Ok(Rows { format, width, row_bytes, bytes })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// True where there is no row.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Numbers of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How they are stored.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// All rows as they are stored, one after the other.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Row `r` as it is stored.
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.bytes[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Row `r` in f32, into `out` `[D]`.
    ///
    /// # Panics
    /// Where `r` is no row or `out` has another length.
    pub fn decode(&self, r: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.width);
        decode_row(self.format, self.row(r), out);
    }
}

/// Bags of ids: bag `b` holds `ids[offsets[b] - offsets[0]..offsets[b + 1] - offsets[0]]`, so that a part of longer runs can
/// be given as it is. A negative id adds nothing.
#[derive(Clone, Copy, Debug)]
pub struct Bags<'a> {
    /// Row numbers of all bags.
    pub ids: &'a [i64],
    /// `[bags + 1]`, rising; the first one is where `ids` start.
    pub offsets: &'a [usize],
    /// One weight an id; none means 1.
    pub weights: Option<&'a [f32]>,
    /// Divide each sum by the length of its bag (negative ids count), as TorchRec's mean does.
    pub mean: bool,
}

/// Where the sums of the bags go: bag `b` to `data[b * stride + column ..]`.
#[derive(Debug)]
pub struct Pooled<'a> {
    /// `[bags, stride]`, of which the columns from `column` on are written.
    pub data: &'a mut [f32],
    /// Numbers from one bag's sum to the next bag's.
    pub stride: usize,
    /// The first column written.
    pub column: usize,
}

/// Writes the sum (or mean) of each bag's rows; an empty bag gives zeros.
///
/// # Panics
/// Where an id is not below the number of rows, the offsets do not rise inside the ids, the weights are not one an id, or
/// the output is too short. The caller has checked the request; these are the conditions that memory safety needs.
pub fn pool(kernels: Kernels, rows: &Rows<'_>, bags: &Bags<'_>, out: &mut Pooled<'_>) {
    let count = bags.offsets.len().saturating_sub(1);
    assert!(bags.ids.iter().copied().max().unwrap_or(-1) < rows.len() as i64, "an id beyond the rows");
    assert!(bags.offsets.is_sorted() && (count == 0 || bags.range(count - 1).end <= bags.ids.len()));
    assert!(bags.weights.is_none_or(|w| w.len() == bags.ids.len()));
    assert!(out.column + rows.width <= out.stride && out.data.len() >= count * out.stride);
    match rows.format {
        RowFormat::F32 => pool_as::<{ formats::F32 }>(kernels.isa, rows, bags, out),
        RowFormat::F16 => pool_as::<{ formats::F16 }>(kernels.isa, rows, bags, out),
        RowFormat::Bf16 => pool_as::<{ formats::BF16 }>(kernels.isa, rows, bags, out),
        RowFormat::Int8 => pool_as::<{ formats::INT8 }>(kernels.isa, rows, bags, out),
        RowFormat::Int4 => pool_as::<{ formats::INT4 }>(kernels.isa, rows, bags, out),
        RowFormat::Int2 => pool_as::<{ formats::INT2 }>(kernels.isa, rows, bags, out),
    }
}

/// The formats as numbers that a kernel can be compiled for.
mod formats {
    pub const F32: usize = 0;
    pub const F16: usize = 1;
    pub const BF16: usize = 2;
    pub const INT8: usize = 3;
    pub const INT4: usize = 4;
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    pub const INT2: usize = 5;
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    pub const BITS: [usize; 6] = [32, 16, 16, 8, 4, 2];
    pub const HEAD: usize = super::QUANTISED_HEAD_BYTES;
}

fn pool_as<const F: usize>(isa: Isa, rows: &Rows<'_>, bags: &Bags<'_>, out: &mut Pooled<'_>) {
    match isa {
        Isa::Portable => portable(rows, bags, out),
        // SAFETY: `Kernels` is made only after the features were found, and `pool` checked ids, offsets, weights and output.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::pool::<F>(rows, bags, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512::pool::<F>(rows, bags, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dotprod => unsafe { neon::pool::<F>(rows, bags, out) },
    }
}

/// The columns that one run over the ids sums.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    columns: usize,
}

impl Part {
    /// The bytes of these columns in a row.
    fn span(self, format: RowFormat) -> Range<usize> {
        let at = |column: usize| format.head_bytes() + column * format.bits() / 8;
        let start = if self.first == 0 { 0 } else { at(self.first) };
        start..at(self.first + self.columns)
    }
}

impl Bags<'_> {
    /// The ids of bag `b`.
    #[inline]
    fn range(&self, bag: usize) -> Range<usize> {
        self.offsets[bag] - self.offsets[0]..self.offsets[bag + 1] - self.offsets[0]
    }

    /// The weight of the id at `at`.
    ///
    /// # Safety
    /// `at` is below the number of ids, and weights are one an id.
    #[inline]
    unsafe fn weight_unchecked(&self, at: usize) -> f32 {
        match self.weights {
            // SAFETY: the caller's condition.
            Some(weights) => unsafe { *weights.get_unchecked(at) },
            None => 1.0,
        }
    }
}

/// Asks the memory for the bytes `span` of the row of the id at `at`, where there is one.
#[inline]
fn prefetch_row(rows: &Rows<'_>, ids: &[i64], at: usize, span: &Range<usize>) {
    let Some(&id) = ids.get(at) else { return };
    let row = rows.bytes.as_ptr().wrapping_add((id as usize).wrapping_mul(rows.row_bytes));
    prefetch_range(row.wrapping_add(span.start), span.len());
}

/// Asks for the rows that come before the look-ahead of the first id reaches anything.
fn prefetch_first(rows: &Rows<'_>, bags: &Bags<'_>, span: &Range<usize>) {
    (0..PREFETCH_ROWS).for_each(|at| prefetch_row(rows, bags.ids, at, span));
}

/// What a bag's sum is multiplied by.
fn bag_factor(bags: &Bags<'_>, bag: usize) -> f32 {
    let len = bags.range(bag).len();
    if bags.mean && len > 0 { 1.0 / len as f32 } else { 1.0 }
}

fn portable(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut Pooled<'_>) {
    let mut row = vec![0f32; rows.width];
    for bag in 0..bags.offsets.len().saturating_sub(1) {
        let sum = &mut out.data[bag * out.stride + out.column..][..rows.width];
        sum.fill(0.0);
        for at in bags.range(bag) {
            let Ok(id) = usize::try_from(bags.ids[at]) else { continue };
            rows.decode(id, &mut row);
            let weight = bags.weights.map_or(1.0, |w| w[at]);
            sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * x);
        }
        let factor = bag_factor(bags, bag);
        if factor != 1.0 {
            sum.iter_mut().for_each(|s| *s *= factor);
        }
    }
}

/// Decodes one stored row into f32.
fn decode_row(format: RowFormat, row: &[u8], out: &mut [f32]) {
    let pair = |at: usize| [row[at], row[at + 1]];
    match format {
        RowFormat::F32 => row.as_chunks::<4>().0.iter().zip(out).for_each(|(b, x)| *x = f32::from_le_bytes(*b)),
        RowFormat::F16 => {
            row.as_chunks::<2>().0.iter().zip(out).for_each(|(b, x)| *x = f16::from_le_bytes(*b).to_f32());
        }
        RowFormat::Bf16 => {
            row.as_chunks::<2>().0.iter().zip(out).for_each(|(b, x)| *x = bf16::from_le_bytes(*b).to_f32());
        }
        RowFormat::Int8 | RowFormat::Int4 | RowFormat::Int2 => {
            let (scale, bias) = (f16::from_le_bytes(pair(0)).to_f32(), f16::from_le_bytes(pair(2)).to_f32());
            let bits = format.bits();
            let per_byte = 8 / bits;
            let mask = (1u16 << bits) - 1;
            for (j, x) in out.iter_mut().enumerate() {
                let byte = u16::from(row[QUANTISED_HEAD_BYTES + j / per_byte]);
                let code = (byte >> (j % per_byte * bits)) & mask;
                *x = scale * f32::from(code) + bias;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn row_bytes_and_width_are_inverse() {
        for format in RowFormat::ALL {
            for width in (4..300).step_by(4) {
                let bytes = format.row_bytes(width).expect("multiples of four fill bytes");
                assert_eq!(format.width_of(bytes).expect("such a row"), width);
            }
            assert!(format.row_bytes(0).is_err() && format.row_bytes(usize::MAX).is_err());
            assert!(format.width_of(0).is_err() && format.width_of(format.head_bytes()).is_err());
            assert_eq!(RowFormat::named(format.name()).expect("its own name"), format);
        }
        assert!(RowFormat::Int4.row_bytes(3).is_err() && RowFormat::Int2.row_bytes(6).is_err());
        assert!(RowFormat::F32.width_of(6).is_err() && RowFormat::named("int3").is_err());
        assert!(Rows::new(RowFormat::F32, 2, &[0; 12]).is_err());
    }

    proptest! {
        /// Every kernel sums what decoding row by row sums, for every format, width and shape of bags.
        #[test]
        fn kernels_agree_with_the_naive_sum(
            format in prop::sample::select(RowFormat::ALL.to_vec()),
            quarters in 1usize..90,
            bags in prop::collection::vec(prop::collection::vec((-1i64..50, -2f32..2.0), 0..40), 0..6),
            weighted: bool,
            mean: bool,
            seed: u64,
        ) {
            let width = quarters * 4;
            let row_bytes = format.row_bytes(width).expect("a multiple of four");
            let mut state = seed | 1;
            let mut next = || { state ^= state << 13; state ^= state >> 7; state ^= state << 17; state };
            let mut bytes: Vec<u8> = (0..50 * row_bytes).map(|_| next() as u8).collect();
            for row in bytes.chunks_exact_mut(row_bytes) {
                // Random bytes are random codes; plain numbers and heads are drawn small and finite.
                let mut small = || (next() % 4096) as f32 / 1024.0 - 2.0;
                match format {
                    RowFormat::F32 => row.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = small().to_le_bytes()),
                    RowFormat::Bf16 => row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = bf16::from_f32(small()).to_le_bytes()),
                    RowFormat::F16 => row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(small()).to_le_bytes()),
                    _ => row[..4].as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(small() / 64.0).to_le_bytes()),
                }
            }
            let rows = Rows::new(format, width, &bytes).expect("whole rows");
            let ids: Vec<i64> = bags.iter().flatten().map(|(id, _)| *id).collect();
            let weights: Vec<f32> = bags.iter().flatten().map(|(_, w)| *w).collect();
            let mut offsets = vec![0];
            bags.iter().for_each(|b| offsets.push(offsets[offsets.len() - 1] + b.len()));
            let asked = Bags { ids: &ids, offsets: &offsets, weights: weighted.then_some(&weights[..]), mean };
            let (stride, column) = (width + 5, 3);
            for kernels in Kernels::all() {
                let mut data = vec![7f32; bags.len() * stride];
                pool(kernels, &rows, &asked, &mut Pooled { data: &mut data, stride, column });
                for (b, bag) in bags.iter().enumerate() {
                    let mut sum = vec![0f64; width];
                    let mut size = 1e-3;
                    for (id, weight) in bag.iter().filter(|(id, _)| *id >= 0) {
                        let mut row = vec![0f32; width];
                        rows.decode(*id as usize, &mut row);
                        let weight = if weighted { f64::from(*weight) } else { 1.0 };
                        size += row.iter().fold(0f64, |m, x| m.max(f64::from(x.abs()))) * weight.abs();
                        sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * f64::from(*x));
                    }
                    if mean && !bag.is_empty() {
                        sum.iter_mut().for_each(|s| *s /= bag.len() as f64);
                    }
                    let got = &data[b * stride..][..stride];
                    prop_assert!(got[..column].iter().chain(&got[column + width..]).all(|x| *x == 7.0));
                    for (x, s) in got[column..column + width].iter().zip(&sum) {
                        prop_assert!((f64::from(*x) - s).abs() < 1e-5 * size, "{} {:?}: {x} for {s}", kernels.name(), format);
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "beyond the rows")]
    fn an_id_beyond_the_rows_stops_the_call() {
        let rows = Rows::new(RowFormat::F32, 1, &[0; 8]).expect("two rows");
        let bags = Bags { ids: &[2], offsets: &[0, 1], weights: None, mean: false };
        let kernels = Kernels::all()[0];
        pool(kernels, &rows, &bags, &mut Pooled { data: &mut [0.0], stride: 1, column: 0 });
    }
}
