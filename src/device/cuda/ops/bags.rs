//! Pooled embedding bags.

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, need};
use crate::device::cpu::pool::RowFormat;
use crate::device::cuda::memory::{Array, Device};
use crate::error::Result;

/// Rows of one width and format.
#[derive(Debug)]
pub struct TableRows {
    /// `[rows, row_bytes]`
    pub bytes: Array<u8>,
    /// How their numbers are stored.
    pub format: RowFormat,
    /// Numbers of a row.
    pub width: usize,
}

/// Bags of ids: rows of the table, or negative ones, which add nothing.
#[derive(Debug)]
pub struct IdBags<'a> {
    /// Row numbers of all bags; each negative or below the number of rows.
    pub ids: &'a Array<i64>,
    /// `[bags + 1]`, rising from 0.
    pub offsets: &'a Array<u32>,
    /// One an id; none means 1.
    pub weights: Option<&'a Array<f32>>,
    /// Divides each sum by the length of its bag.
    pub is_mean: bool,
}

/// Where the sums go: bag `b` to `data[b * stride + column ..]`.
#[derive(Debug)]
pub struct SumsTo<'a> {
    /// `[bags, stride]`
    pub data: &'a Array<f32>,
    /// From one bag to the next.
    pub stride: usize,
    /// The first column.
    pub column: usize,
}

/// Pools bags of rows.
///
/// # Errors
/// `Internal` for arrays that are too short or where the launch fails; `Invalid` for a width that its format does not have.
pub fn pool(device: &Device, rows: &TableRows, bags: &IdBags<'_>, to: &SumsTo<'_>) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PoolArgs {
        rows: u64,
        ids: u64,
        offsets: u64,
        weights: u64,
        sums: u64,
        bags: u32,
        width: u32,
        row_bytes: u32,
        stride: u32,
        column: u32,
        is_mean: u32,
    }
    let count = bags.offsets.len().saturating_sub(1);
    need("sums", to.data, count * to.stride)?;
    if let Some(weights) = bags.weights {
        need("weights", weights, bags.ids.len())?;
    }
    let arguments = PoolArgs {
        rows: rows.bytes.address(),
        ids: bags.ids.address(),
        offsets: bags.offsets.address(),
        weights: address_of(bags.weights),
        sums: to.data.address(),
        bags: count as u32,
        width: rows.width as u32,
        row_bytes: rows.format.row_bytes(rows.width)? as u32,
        stride: to.stride as u32,
        column: to.column as u32,
        is_mean: u32::from(bags.is_mean),
    };
    let kernel = match rows.format {
        RowFormat::F32 => "pool_f32",
        RowFormat::F16 => "pool_f16",
        RowFormat::Bf16 => "pool_bf16",
        RowFormat::Int8 => "pool_int8",
        RowFormat::Int4 => "pool_int4",
        RowFormat::Int2 => "pool_int2",
    };
    launch(device, &Shape { kernel, grid: [count.div_ceil(8), 1, 1], threads: 256, shared_bytes: 0 }, &arguments)
}
