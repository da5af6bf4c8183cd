//! Stored rows of embedding tables, and their number formats.

use half::{bf16, f16};

use sterling_core::error::{Error, Result};

/// Bytes of scale and bias at the start of a rowwise-quantised row.
pub const QUANTISED_HEAD_BYTES: usize = 4;

/// Storage format of the numbers of a row.
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

    /// Returns the name of the format in model packages, such as `int8`.
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

    /// Returns the format with the given name.
    ///
    /// # Errors
    /// `Invalid` for an unknown format name.
    pub fn named(name: &str) -> Result<Self> {
        RowFormat::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
            Error::invalid(format!("row format `{name}`, expected one of: f32, f16, bf16, int8, int4, int2"))
        })
    }

    /// Returns the bits of one number.
    pub fn bits(self) -> usize {
        match self {
            RowFormat::F32 => 32,
            RowFormat::F16 | RowFormat::Bf16 => 16,
            RowFormat::Int8 => 8,
            RowFormat::Int4 => 4,
            RowFormat::Int2 => 2,
        }
    }

    /// Returns true for the formats with a scale and a bias in each row.
    pub fn is_quantised(self) -> bool {
        self.bits() <= 8
    }

    /// Returns the number of bytes before the numbers of a row.
    pub fn head_bytes(self) -> usize {
        if self.is_quantised() { QUANTISED_HEAD_BYTES } else { 0 }
    }

    /// Returns the size of a row of `width` numbers in bytes.
    ///
    /// # Errors
    /// `Invalid` if the numbers do not fill complete bytes, or if `width` is 0.
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

    /// Returns the width of rows of `row_bytes` bytes.
    ///
    /// # Errors
    /// `Invalid` if no width results in such rows.
    pub fn width_of(self, row_bytes: usize) -> Result<usize> {
        let wrong = || Error::invalid(format!("{row_bytes} bytes are not a row size of format {}", self.name()));
        let width = row_bytes.checked_sub(self.head_bytes()).ok_or_else(wrong)? * 8 / self.bits();
        if width > 0 && self.row_bytes(width)? == row_bytes { Ok(width) } else { Err(wrong()) }
    }
}

/// Rows of one width and format, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub(super) format: RowFormat,
    pub(super) width: usize,
    pub(super) row_bytes: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Rows<'a> {
    /// Views `bytes` as rows.
    ///
    /// # Errors
    /// `Invalid` if the bytes are not a multiple of the row size.
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

    /// Views f32 rows that are `stride` numbers apart; other numbers, such as optimizer state, follow each row.
    ///
    /// # Errors
    /// `Invalid` if the count of numbers is not a multiple of `stride`, or `stride` is below `width`.
    pub fn strided(width: usize, stride: usize, numbers: &'a [f32]) -> Result<Self> {
        if width == 0 || stride < width || !numbers.len().is_multiple_of(stride) {
            return Err(Error::invalid(format!(
                "{} numbers do not make rows of {width} at a stride of {stride}",
                numbers.len()
            )));
        }
        Ok(Rows { format: RowFormat::F32, width, row_bytes: stride * 4, bytes: bytemuck::cast_slice(numbers) })
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Returns true if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the width of a row, in numbers.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the storage format.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Returns the stored bytes of all rows.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the stored bytes of row `r`.
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.bytes[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Decodes row `r` to f32 in `out` `[D]`.
    ///
    /// # Panics
    /// If row `r` does not exist or `out` has another length.
    pub fn decode(&self, r: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.width);
        decode_row(self.format, self.row(r), out);
    }
}

/// Formats as constants for const generics: a kernel is compiled for each.
pub(super) mod formats {
    pub(crate) const F32: usize = 0;
    pub(crate) const F16: usize = 1;
    pub(crate) const BF16: usize = 2;
    pub(crate) const INT8: usize = 3;
    pub(crate) const INT4: usize = 4;
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    pub(crate) const INT2: usize = 5;
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    pub(crate) const BITS: [usize; 6] = [32, 16, 16, 8, 4, 2];
    pub(crate) const HEAD: usize = super::QUANTISED_HEAD_BYTES;
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
