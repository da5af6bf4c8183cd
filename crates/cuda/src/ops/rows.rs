//! Operations on the most precise stored rows: the rescoring rows, or int8 rows if there are no rescoring rows.

use bytemuck::{Pod, Zeroable};

use super::scan::{CandidatesArgs, Collection};
use super::{Shape, address_of, launch, need, parts, times};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Number format of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum RowKind {
    Codes,
    Bf16,
    F16,
    F32,
}

/// Most precise stored rows of the items: the rescoring rows, or int8 rows if there are no rescoring rows.
#[derive(Clone, Copy, Debug)]
pub struct ItemRows<'a> {
    /// Rows `[slots, D]`, or blocks of int8 codes.
    pub bytes: &'a Array<u8>,
    /// Scales of int8 codes, `[slots]`.
    pub scales: &'a Array<f32>,
    /// Number format.
    pub kind: RowKind,
    /// Numbers per row, D.
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

    /// Returns the number of bytes per row.
    fn row_bytes(&self) -> usize {
        match self.kind {
            RowKind::Codes => self.dimension.div_ceil(4) * 4,
            RowKind::Bf16 | RowKind::F16 => self.dimension * 2,
            RowKind::F32 => self.dimension * 4,
        }
    }

    fn check(&self) -> Result<()> {
        need("rows", self.bytes, self.scales.len() * self.row_bytes())
    }

    /// Computes the ordered keys of the products of candidates `slots[r, ..counts[r]]` with the query of request `r`,
    /// from queries `[requests, D]`. With weights, computes weighted sums of products, from queries `[requests,
    /// weights, D]`. `keys` has the shape `[requests, stride]`.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short or if the launch fails.
    pub fn products(
        &self,
        device: &Device,
        (queries, weights): (&Array<f32>, Option<&Array<f32>>),
        of: &SlotRows<'_>,
        keys: &Array<u32>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct ProductArgs {
            rows: WideRowsArgs,
            queries: u64,
            weights: u64,
            slots: u64,
            counts: u64,
            keys: u64,
            stride: u32,
            each: u32,
        }
        let (count, each) = (of.counts.len(), weights.map_or(1, Array::len));
        self.check()?;
        need("queries", queries, count * each * self.dimension)?;
        need("slots", of.slots, count * of.stride)?;
        need("products", keys, count * of.stride)?;
        let arguments = ProductArgs {
            rows: self.arguments(),
            queries: queries.address(),
            weights: address_of(weights),
            slots: of.slots.address(),
            counts: of.counts.address(),
            keys: keys.address(),
            stride: of.stride as u32,
            each: each as u32,
        };
        let grid = [parts(device, of.stride, 32, count), count, 1];
        let demand = Demand {
            again: times(&[count, of.stride, self.row_bytes() + 8, each.saturating_sub(1)]),
            single: times(&[count, of.stride, self.dimension, each]),
            ..Demand::of_bytes(count * (of.stride * (self.row_bytes() + 8) + 4 * self.dimension * each))
        };
        let shape = Shape { kernel: "row_products", grid, threads: 256, shared_bytes: 4 * self.dimension, demand };
        launch(device, &shape, &arguments)
    }

    /// Scores every eligible item of each query. `words` has the address of each query's filter bitmap over all words;
    /// `word_slots` has the first slot of each word.
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
        need("filter bitmaps of queries", words, count)?;
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
        let all = word_slots.len() * 64 * self.row_bytes();
        let demand = Demand {
            again: times(&[count.saturating_sub(1), all]),
            single: times(&[count, word_slots.len(), 64, self.dimension]),
            ..Demand::of_bytes(all + count * word_slots.len() * 12)
        };
        let shape = Shape { kernel: "scan_exact", grid, threads: 256, shared_bytes: 4 * self.dimension, demand };
        launch(device, &shape, &arguments)
    }

    /// Returns the largest norm of the first `slots` items, by their rows and by their codes.
    ///
    /// # Errors
    /// As [`ItemRows::products`].
    pub fn largest_norm(&self, device: &Device, codes: &Array<u8>, slots: usize) -> Result<f32> {
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
        let slots = slots.min(self.scales.len());
        let arguments = NormArgs {
            rows: self.arguments(),
            codes: codes.arguments(),
            most: most.address(),
            slots: slots as u32,
            unused: 0,
        };
        let demand = Demand::of_bytes(slots * (self.row_bytes() + codes.row_bytes() + 4));
        let grid = [parts(device, slots, 8, 1), 1, 1];
        let shape = Shape { kernel: "largest_norm", grid, threads: 256, shared_bytes: 0, demand };
        if slots > 0 {
            launch(device, &shape, &arguments)?;
        }
        Ok(f32::from_bits(most.to_vec()?[0]))
    }

    /// Writes the reranker inputs of each candidate, `[queries, stride, out_stride]`: its row from element `row_at` on,
    /// if the reranker reads the row, and its columns.
    ///
    /// # Errors
    /// As [`ItemRows::products`].
    pub fn gather(
        &self,
        device: &Device,
        of: &SlotRows<'_>,
        row_at: Option<usize>,
        columns: &CandidateColumns<'_>,
        (out, out_stride): (&Array<f32>, usize),
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct GatherArgs {
            rows: WideRowsArgs,
            slots: u64,
            counts: u64,
            similarity: u64,
            columns: u64,
            out: u64,
            row_at: u32,
            column_at: u32,
            stride: u32,
            out_stride: u32,
            column_count: u32,
            unused: u32,
        }
        let (count, column_count) = (of.counts.len(), columns.addresses.len());
        let ends = [columns.at + column_count, row_at.map_or(0, |at| at + self.dimension)];
        self.check()?;
        need("slots", of.slots, count * of.stride)?;
        need("retrieval scores", columns.similarity, count * of.stride)?;
        need("gathered rows", out, count * of.stride * out_stride)?;
        if ends.iter().any(|&end| end > out_stride) {
            return Err(Error::internal(format!(
                "gathered rows have {out_stride} numbers, expected at least {ends:?}"
            )));
        }
        let arguments = GatherArgs {
            rows: self.arguments(),
            slots: of.slots.address(),
            counts: of.counts.address(),
            similarity: columns.similarity.address(),
            columns: columns.addresses.address(),
            out: out.address(),
            row_at: row_at.map_or(NOWHERE, |at| at as u32),
            column_at: columns.at as u32,
            stride: of.stride as u32,
            out_stride: out_stride as u32,
            column_count: column_count as u32,
            unused: 0,
        };
        let grid = [parts(device, of.stride, 8, count), count, 1];
        let of_row = row_at.map_or(0, |_| self.row_bytes() + 4 * self.dimension);
        let demand = Demand::of_bytes(count * of.stride * (8 + of_row + 8 * column_count));
        launch(device, &Shape { kernel: "gather_rows", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
    }
}

/// Marks that the reranker does not read the rows of candidates.
const NOWHERE: u32 = u32::MAX;

/// Columns of candidates that follow the row in the reranker inputs.
#[derive(Clone, Copy, Debug)]
pub struct CandidateColumns<'a> {
    /// Addresses of columns with one number per slot; 0 for the retrieval score.
    pub addresses: &'a Array<u64>,
    /// Ordered keys of the retrieval scores, `[queries, stride]`.
    pub similarity: &'a Array<u32>,
    /// Index of the first column in the output row.
    pub at: usize,
}

/// Slots of several queries: `slots[q, ..counts[q]]`.
#[derive(Clone, Copy, Debug)]
pub struct SlotRows<'a> {
    /// Slots, `[queries, stride]`.
    pub slots: &'a Array<u32>,
    /// Number of slots per query, `[queries]`.
    pub counts: &'a Array<u32>,
    /// Maximum number of slots per query.
    pub stride: usize,
}
