//! Rows in full width.

use bytemuck::{Pod, Zeroable};

use super::scan::{CandidatesArgs, Collection};
use super::{Shape, address_of, launch, need, parts};
use crate::device::cuda::memory::{Array, Device};
use crate::error::Result;

/// How the numbers of a row are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum RowKind {
    Codes,
    Bf16,
    F16,
    F32,
}

/// The widest rows that are kept of the items.
#[derive(Clone, Copy, Debug)]
pub struct ItemRows<'a> {
    /// `[slots, D]`, or blocks of codes.
    pub bytes: &'a Array<u8>,
    /// The scales of codes, `[slots]`.
    pub scales: &'a Array<f32>,
    /// How their numbers are stored.
    pub kind: RowKind,
    /// Numbers of a row, D.
    pub dimension: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WideRowsArgs {
    rows: u64,
    scales: u64,
    kind: u32,
    dimension: u32,
}

impl ItemRows<'_> {
    fn arguments(&self) -> WideRowsArgs {
        WideRowsArgs {
            rows: self.bytes.address(),
            scales: self.scales.address(),
            kind: self.kind as u32,
            dimension: self.dimension as u32,
        }
    }

    fn check(&self) -> Result<()> {
        let bytes = match self.kind {
            RowKind::Codes => self.dimension.div_ceil(4) * 4,
            RowKind::Bf16 | RowKind::F16 => self.dimension * 2,
            RowKind::F32 => self.dimension * 4,
        };
        need("rows", self.bytes, self.scales.len() * bytes)
    }

    /// The ordered products of candidates `slots[q, ..counts[q]]` with their queries `[queries, D]`, `[queries, stride]`.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short or where the launch fails.
    pub fn products(&self, device: &Device, queries: &Array<f32>, of: &SlotRows<'_>, keys: &Array<u32>) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct ProductArgs {
            rows: WideRowsArgs,
            queries: u64,
            slots: u64,
            counts: u64,
            keys: u64,
            stride: u32,
            unused: u32,
        }
        let count = of.counts.len();
        self.check()?;
        need("queries", queries, count * self.dimension)?;
        need("slots", of.slots, count * of.stride)?;
        need("products", keys, count * of.stride)?;
        let arguments = ProductArgs {
            rows: self.arguments(),
            queries: queries.address(),
            slots: of.slots.address(),
            counts: of.counts.address(),
            keys: keys.address(),
            stride: of.stride as u32,
            unused: 0,
        };
        let grid = [parts(device, of.stride, 32, count), count, 1];
        let shape = Shape { kernel: "row_products", grid, threads: 256, shared_bytes: 4 * self.dimension };
        launch(device, &shape, &arguments)
    }

    /// Scores every eligible item: those of the words of each query, all words one after the other. `word_slots` has the first
    /// slot of each word.
    ///
    /// # Errors
    /// As [`ItemRows::products`].
    pub fn scan(
        &self,
        device: &Device,
        to: &Collection,
        queries: &Array<f32>,
        words: &Array<u64>,
        word_slots: &Array<u32>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct ExactArgs {
            rows: WideRowsArgs,
            to: CandidatesArgs,
            queries: u64,
            words: u64,
            word_slots: u64,
            words_count: u32,
            unused: u32,
        }
        let count = to.queries();
        self.check()?;
        need("queries", queries, count * self.dimension)?;
        need("words of queries", words, count)?;
        let arguments = ExactArgs {
            rows: self.arguments(),
            to: to.arguments(),
            queries: queries.address(),
            words: words.address(),
            word_slots: word_slots.address(),
            words_count: word_slots.len() as u32,
            unused: 0,
        };
        let grid = [parts(device, word_slots.len(), 8, count), count, 1];
        let shape = Shape { kernel: "scan_exact", grid, threads: 256, shared_bytes: 4 * self.dimension };
        launch(device, &shape, &arguments)
    }

    /// The largest norm of any item, of its codes too.
    ///
    /// # Errors
    /// As [`ItemRows::products`].
    pub fn largest_norm(&self, device: &Device, codes: &Array<u8>) -> Result<f32> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct NormArgs {
            rows: WideRowsArgs,
            codes: WideRowsArgs,
            most: u64,
            slots: u32,
            unused: u32,
        }
        let codes = ItemRows { bytes: codes, kind: RowKind::Codes, ..*self };
        self.check()?;
        codes.check()?;
        let most = device.zeros::<u32>(1)?;
        let slots = self.scales.len();
        let arguments = NormArgs {
            rows: self.arguments(),
            codes: codes.arguments(),
            most: most.address(),
            slots: slots as u32,
            unused: 0,
        };
        let shape =
            Shape { kernel: "largest_norm", grid: [parts(device, slots, 8, 1), 1, 1], threads: 256, shared_bytes: 0 };
        if slots > 0 {
            launch(device, &shape, &arguments)?;
        }
        Ok(f32::from_bits(most.to_vec()?[0]))
    }

    /// Writes what a reranker reads of each candidate: its row and then its columns, `[queries, stride, out_stride]`. `columns`
    /// are addresses of columns of one number a slot.
    ///
    /// # Errors
    /// As [`ItemRows::products`].
    pub fn gather(
        &self,
        device: &Device,
        of: &SlotRows<'_>,
        columns: Option<&Array<u64>>,
        out: (&Array<f32>, usize),
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct GatherArgs {
            rows: WideRowsArgs,
            slots: u64,
            counts: u64,
            columns: u64,
            out: u64,
            stride: u32,
            out_stride: u32,
            column_count: u32,
            unused: u32,
        }
        let (out, out_stride) = out;
        let count = of.counts.len();
        self.check()?;
        need("slots", of.slots, count * of.stride)?;
        need("gathered rows", out, count * of.stride * out_stride)?;
        let arguments = GatherArgs {
            rows: self.arguments(),
            slots: of.slots.address(),
            counts: of.counts.address(),
            columns: address_of(columns),
            out: out.address(),
            stride: of.stride as u32,
            out_stride: out_stride as u32,
            column_count: columns.map_or(0, Array::len) as u32,
            unused: 0,
        };
        let grid = [parts(device, of.stride, 8, count), count, 1];
        launch(device, &Shape { kernel: "gather_rows", grid, threads: 256, shared_bytes: 0 }, &arguments)
    }
}

/// Slots of several queries: `slots[q, ..counts[q]]`.
#[derive(Clone, Copy, Debug)]
pub struct SlotRows<'a> {
    /// `[queries, stride]`
    pub slots: &'a Array<u32>,
    /// `[queries]`
    pub counts: &'a Array<u32>,
    /// Slots of a query at most.
    pub stride: usize,
}
