//! Embedding bags: pools the rows that ids refer to.

use bytemuck::{Pod, Zeroable};

use super::rows::SlotRows;
use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device, HostBytes};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

/// Rows of one width and format.
#[derive(Debug)]
pub struct TableRows {
    /// Bytes of the rows, `[rows, row_bytes]`.
    pub bytes: Array<u8>,
    /// Number format of the rows.
    pub format: RowFormat,
    /// Numbers per row.
    pub width: usize,
}

impl TableRows {
    /// Returns the number of rows.
    ///
    /// # Errors
    /// `Invalid` for a width that the format does not support.
    pub fn rows(&self) -> Result<usize> {
        Ok(self.bytes.len() / self.format.row_bytes(self.width)?.max(1))
    }
}

/// Bags of ids, which are row numbers of the table; negative ids add nothing.
#[derive(Debug)]
pub struct IdBags<'a> {
    /// Row numbers of all bags; each negative or below the number of rows.
    pub ids: &'a Array<i64>,
    /// Row offsets `[bags + 1]`, rising from 0.
    pub offsets: &'a Array<u32>,
    /// One weight per id; `None` means 1.
    pub weights: Option<&'a Array<f32>>,
    /// True if each sum is divided by the length of its bag.
    pub is_mean: bool,
}

/// Destination of the sums: the sum of bag `b` starts at `data[b * stride + column]`.
#[derive(Debug)]
pub struct SumsTo<'a> {
    /// Output array, `[bags, stride]`.
    pub data: &'a Array<f32>,
    /// Distance between bags, in numbers.
    pub stride: usize,
    /// First column of the sums in an output row.
    pub column: usize,
}

/// Pools bags of rows.
///
/// # Errors
/// `Internal` for arrays that are too short or if the launch fails; `Invalid` for a width that the row format does not
/// support.
pub fn pool(device: &Device, rows: &TableRows, bags: &IdBags<'_>, to: &SumsTo<'_>) -> Result<()> {
    pool_staged(device, (rows, None), bags, to)
}

/// As [`pool`]; ids beyond the table's rows refer to rows of `staged`, which were uploaded with the ids.
///
/// # Errors
/// As [`pool`].
pub fn pool_staged(
    device: &Device,
    (rows, staged): (&TableRows, Option<&Array<u8>>),
    bags: &IdBags<'_>,
    to: &SumsTo<'_>,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PoolArgs {
        rows: u64,
        ids: u64,
        offsets: u64,
        weights: u64,
        sums: u64,
        staged: u64,
        resident: u64,
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
        staged: address_of(staged),
        resident: rows.rows()? as u64,
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
    let row_bytes = arguments.row_bytes as usize;
    let demand = Demand::of_bytes(bags.ids.len() * (8 + row_bytes) + count * (4 + 4 * rows.width));
    let grid = [count.div_ceil(8), 1, 1];
    launch(device, &Shape { kernel, grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Copies rows of `width` numbers from `staged` to another array: row `taken[n]` to row `places[n]`. The target rows
/// are distinct.
///
/// # Errors
/// As [`pool`].
pub fn scatter_rows<T: Pod>(
    device: &Device,
    staged: &Array<T>,
    (taken, places): (&Array<u32>, &Array<u32>),
    (to, width): (&Array<T>, usize),
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PlaceArgs {
        staged: u64,
        taken: u64,
        places: u64,
        rows: u64,
        count: u32,
        row_bytes: u32,
    }
    let (count, row_bytes) = (taken.len(), width * size_of::<T>());
    need("places", places, count)?;
    let arguments = PlaceArgs {
        staged: staged.address(),
        taken: taken.address(),
        places: places.address(),
        rows: to.address(),
        count: count as u32,
        row_bytes: row_bytes as u32,
    };
    let (grid, demand) = ([count.div_ceil(8), 1, 1], Demand::of_bytes(count * (2 * row_bytes + 8)));
    launch(device, &Shape { kernel: "place_rows", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Gathers the requested rows of a table in host memory into a new array on the device.
///
/// # Errors
/// `Internal` for rows that do not exist, or if the launch fails; `Overloaded` if device memory is exhausted.
pub fn fetch_rows(device: &Device, table: &HostBytes, wanted: &[i64], row_bytes: usize) -> Result<Array<u8>> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct FetchArgs {
        host: u64,
        wanted: u64,
        rows: u64,
        count: u32,
        row_bytes: u32,
    }
    let (count, rows) = (wanted.len(), table.len() / row_bytes.max(1));
    let is_there = |row: i64| usize::try_from(row).is_ok_and(|row| row < rows);
    if let Some(row) = wanted.iter().find(|row| !is_there(**row)) {
        return Err(Error::internal(format!("row {row} is outside of a table of {rows} rows")));
    }
    let (wanted, fetched) = (device.copy(wanted)?, device.room(count * row_bytes)?);
    let arguments = FetchArgs {
        host: table.address(),
        wanted: wanted.address(),
        rows: fetched.address(),
        count: count as u32,
        row_bytes: row_bytes as u32,
    };
    let bytes = count * row_bytes;
    let demand = Demand { host: bytes as u64, ..Demand::of_bytes(bytes + 8 * count) };
    let grid = [count.div_ceil(8), 1, 1];
    launch(device, &Shape { kernel: "fetch_rows", grid, threads: 256, shared_bytes: 0, demand }, &arguments)?;
    Ok(fetched)
}

/// Rows of a table that each slot refers to.
#[derive(Debug, Default)]
pub struct SlotKeys {
    /// Row numbers, or [`SlotKeys::NONE`]. `None` if slot `n` refers to row `n`.
    pub keys: Option<Array<u32>>,
    /// Start of each slot's keys, `[slots + 1]`. `None` if each slot has one key.
    pub offsets: Option<Array<u32>>,
    /// True if each sum is divided by the number of keys.
    pub is_mean: bool,
}

impl SlotKeys {
    /// Key that refers to no row.
    pub const NONE: u32 = u32::MAX;
}

/// Pools the rows that the candidates' slots refer to, into `out[q, n, column ..]`.
///
/// # Errors
/// As [`pool`].
pub fn pool_slots(
    device: &Device,
    rows: &TableRows,
    of: &SlotKeys,
    candidates: &SlotRows<'_>,
    out: &SumsTo<'_>,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct SlotBagsArgs {
        rows: u64,
        keys: u64,
        offsets: u64,
        slots: u64,
        counts: u64,
        out: u64,
        width: u32,
        row_bytes: u32,
        format: u32,
        stride: u32,
        out_stride: u32,
        column: u32,
        is_mean: u32,
        unused: u32,
    }
    let (count, stride) = (candidates.counts.len(), candidates.stride);
    need("slots", candidates.slots, count * stride)?;
    need("rows of candidates", out.data, count * stride * out.stride)?;
    if out.column + rows.width > out.stride {
        let (end, stride) = (out.column + rows.width, out.stride);
        return Err(Error::internal(format!("candidate rows have {stride} numbers, expected at least {end}")));
    }
    let arguments = SlotBagsArgs {
        rows: rows.bytes.address(),
        keys: address_of(of.keys.as_ref()),
        offsets: address_of(of.offsets.as_ref()),
        slots: candidates.slots.address(),
        counts: candidates.counts.address(),
        out: out.data.address(),
        width: rows.width as u32,
        row_bytes: rows.format.row_bytes(rows.width)? as u32,
        format: kernel_number(rows.format),
        stride: stride as u32,
        out_stride: out.stride as u32,
        column: out.column as u32,
        is_mean: u32::from(of.is_mean),
        unused: 0,
    };
    let grid = [parts(device, stride, 8, count), count, 1];
    let keys = of
        .keys
        .as_ref()
        .map_or(1, |keys| keys.len().div_ceil(of.offsets.as_ref().map_or(keys.len(), Array::len).max(1)));
    let each = 8 + keys * (4 + arguments.row_bytes as usize) + 4 * rows.width;
    let demand = Demand::of_bytes(count * stride * each);
    launch(device, &Shape { kernel: "pool_slots", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Returns the constant for a row format in `kernels/pool.cu`.
fn kernel_number(format: RowFormat) -> u32 {
    match format {
        RowFormat::F32 => 0,
        RowFormat::F16 => 1,
        RowFormat::Bf16 => 2,
        RowFormat::Int8 => 3,
        RowFormat::Int4 => 4,
        RowFormat::Int2 => 5,
    }
}
