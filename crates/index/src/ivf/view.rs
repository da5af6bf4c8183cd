//! Index read from a mapped tensor file, without a copy.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::first_pass::ItemCodes;
use super::own_lists::{OwnLayout, OwnLists, RankedLists};
use super::quantize::{Quantized, read_row};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::units::{ListId, Slot};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, CodeBlocks};
use sterling_kernels::cpu::pool::{RowFormat, Rows};
use sterling_storage::files::{Dtype, Tensors};

/// Valid range of the numbers of a vector, for error messages.
pub(super) const EXPECTED: &str = "finite numbers between -2^56 and 2^56";

/// Returns the position of the first number of a vector that is not finite or too large for products.
pub(super) fn first_invalid(vector: &[f32]) -> Option<usize> {
    vector.iter().position(|x| x.is_nan() || x.abs() > limits::COMPONENT_MAX)
}

/// Rescoring rows, `[S, D]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum WideRows {
    None,
    Bf16(Buffer<bf16>),
    F16(Buffer<f16>),
    F32(Buffer<f32>),
}

impl WideRows {
    /// Returns the number of items to select by code scores so that the best `k0` by row scores are among them: more
    /// than `k0` if there are rows that rescore the items.
    pub fn selected(&self, k0: usize) -> usize {
        match self {
            WideRows::None => k0,
            _ => k0 + k0 / 4 + 64,
        }
    }

    /// Returns the rows, each `[D]`, if there are any.
    pub fn stored(&self, dimension: usize) -> Option<Rows<'_>> {
        let (format, bytes) = match self {
            WideRows::None => return None,
            WideRows::Bf16(rows) => (RowFormat::Bf16, bytemuck::cast_slice(rows)),
            WideRows::F16(rows) => (RowFormat::F16, bytemuck::cast_slice(rows)),
            WideRows::F32(rows) => (RowFormat::F32, bytemuck::cast_slice(rows)),
        };
        Some(Rows::new(format, dimension, bytes).expect("one row per slot, checked by `Index::open`"))
    }
}

/// Item index of a snapshot.
#[derive(Clone, Debug)]
pub struct Index {
    pub(super) kernels: Kernels,
    pub(super) dimension: usize,
    pub(super) codes: Buffer<u8>,
    pub(super) scales: Buffer<f32>,
    pub(super) list_offsets: Vec<u32>,
    pub(super) list_lengths: Buffer<u32>,
    pub(super) centroids: Buffer<f32>,
    pub(super) centroid_codes: Vec<u8>,
    pub(super) centroid_scales: Vec<f32>,
    /// L2 penalties, `[C]`; empty if lists are probed by inner products only.
    pub(super) penalties: Buffer<f32>,
    pub(super) rows: WideRows,
    pub(super) first_pass: Option<ItemCodes>,
    /// Lists of a delta index that it does not share with its snapshot (`own_lists`).
    pub(super) own: Option<OwnLists>,
    items: usize,
}

impl Index {
    /// Opens the tensors of [`super::Built::write`].
    ///
    /// # Errors
    /// `Corrupt` with the tensor that is missing or inconsistent.
    pub fn open(tensors: &Tensors) -> Result<Self> {
        let corrupt = |tensor: &str, what: String| Error::corrupt(format!("tensor `{tensor}`: {what}"));
        let (centroids, shape) = tensors.get::<f32>("centroids", 2)?;
        let (lists, dimension) = (shape[0], shape[1]);
        if lists == 0 || dimension == 0 {
            return Err(corrupt("centroids", format!("shape {shape:?}, expected at least one list and one dimension")));
        }
        let list_lengths = tensors.vector::<u32>("list_lengths", lists)?;
        let mut list_offsets = vec![0u32];
        for (list, &length) in list_lengths.iter().enumerate() {
            let end = length
                .checked_next_multiple_of(BLOCK as u32)
                .and_then(|n| list_offsets[list].checked_add(n))
                .ok_or_else(|| corrupt("list_lengths", "more slots than 32 bits count".into()))?;
            list_offsets.push(end);
        }
        let slots = list_offsets[lists] as usize;
        let (codes, shape) = tensors.get::<u8>("codes", 4)?;
        if shape != [slots / BLOCK, dimension.div_ceil(4), BLOCK, 4] {
            return Err(corrupt(
                "codes",
                format!("shape {shape:?} does not fit {slots} slots of {dimension} dimensions"),
            ));
        }
        let scales = tensors.vector::<f32>("scales", slots)?;
        if first_invalid(&scales).is_some() || first_invalid(&centroids).is_some() {
            return Err(corrupt("scales", format!("scales and centroids: expected {EXPECTED}")));
        }
        let penalties = match tensors.has("penalties") {
            true => tensors.vector::<f32>("penalties", lists)?,
            false => Buffer::default(),
        };
        if penalties.iter().any(|p| !p.is_finite()) {
            return Err(corrupt("penalties", "a penalty is not finite".into()));
        }
        let rows = if !tensors.has("rows") {
            WideRows::None
        } else {
            let (dtype, shape) = tensors.info("rows")?;
            if shape != [slots, dimension] {
                return Err(corrupt("rows", format!("shape {shape:?}, expected [{slots}, {dimension}]")));
            }
            match dtype {
                Dtype::BF16 => WideRows::Bf16(tensors.get("rows", 2)?.0),
                Dtype::F16 => WideRows::F16(tensors.get("rows", 2)?.0),
                Dtype::F32 => WideRows::F32(tensors.get("rows", 2)?.0),
                other => return Err(corrupt("rows", format!("type {other:?}, expected BF16, F16 or F32"))),
            }
        };
        let first_pass = ItemCodes::open(tensors, slots, dimension)?;
        if first_pass.is_some() && matches!(rows, WideRows::None) {
            return Err(corrupt("first_pass_codes", "no `rows` to rescore the selected items".into()));
        }
        let rows_of = centroids.chunks_exact(dimension).map(Some);
        let (centroid_codes, centroid_scales) = super::kmeans::blocked(rows_of, dimension, lists);
        let items = list_lengths.iter().map(|&n| n as usize).sum();
        Ok(Index {
            kernels: Kernels::detect()?,
            dimension,
            codes,
            scales,
            list_offsets,
            list_lengths,
            centroids,
            centroid_codes,
            centroid_scales,
            penalties,
            rows,
            first_pass,
            own: None,
            items,
        })
    }

    /// Rejects a query with the wrong dimension or whose scores might not be finite.
    ///
    /// # Errors
    /// `Invalid` with the reason, but without the location of the query.
    pub fn check_query(&self, vector: &[f32]) -> Result<()> {
        if vector.len() != self.dimension {
            return Err(Error::invalid(format!("got {} numbers, expected {}", vector.len(), self.dimension)));
        }
        match first_invalid(vector) {
            Some(at) => Err(Error::invalid(format!("number {}: got {:e}, expected {EXPECTED}", at + 1, vector[at]))),
            None => Ok(()),
        }
    }

    /// Declares the last lists of a delta index as its own, not shared with the snapshot.
    pub fn with_own_lists(mut self, OwnLayout { first, raises }: OwnLayout) -> Self {
        let items = self.list_lengths[first..].iter().map(|&length| length as usize).sum();
        let centroids = &self.centroids[first * self.dimension..];
        let ranked = raises.map(|raises| RankedLists::new(centroids, self.dimension, raises));
        self.own = Some(OwnLists { first, items, ranked });
        self
    }

    /// Returns the number of lists that a delta index shares with its snapshot; for other indexes, of all lists.
    pub fn shared_lists(&self) -> usize {
        self.own.as_ref().map_or(self.lists(), |own| own.first)
    }

    /// Replaces the kernels, for comparisons.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Returns the name of the kernels in use.
    pub fn kernel(&self) -> &'static str {
        self.kernels.name()
    }

    /// Returns the dimension of a vector, D.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Returns the number of lists, C.
    pub fn lists(&self) -> usize {
        self.list_lengths.len()
    }

    /// Returns the number of items, N.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Returns the number of slots, S.
    pub fn slots(&self) -> usize {
        self.scales.len()
    }

    /// Returns the first slot of each list, and the total at the end, `[C + 1]`.
    pub fn list_offsets(&self) -> &[u32] {
        &self.list_offsets
    }

    /// Returns the number of items of each list, `[C]`.
    pub fn list_lengths(&self) -> &[u32] {
        &self.list_lengths
    }

    /// Returns the list of a slot.
    pub fn list_of(&self, slot: Slot) -> ListId {
        ListId(self.list_offsets.partition_point(|&first| first <= slot.0).saturating_sub(1) as u32)
    }

    /// Returns the slots that hold items, list by list.
    pub fn filled_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let lists = self.list_offsets.iter().zip(&*self.list_lengths);
        lists.flat_map(|(&first, &length)| (first..first + length).map(Slot))
    }

    /// Returns the codes of all slots, `[blocks, G, 16, 4]`.
    pub fn codes(&self) -> &Buffer<u8> {
        &self.codes
    }

    /// Returns the scale of each slot, `[S]`.
    pub fn scales(&self) -> &Buffer<f32> {
        &self.scales
    }

    /// Returns the centroids as blocks with one list per slot: codes and scales.
    pub fn centroid_blocks(&self) -> (&[u8], &[f32]) {
        (&self.centroid_codes, &self.centroid_scales)
    }

    /// Returns the L2 penalty of each list's score, `[C]`; empty if scores have no penalties.
    pub fn penalties(&self) -> &Buffer<f32> {
        &self.penalties
    }

    /// Returns the rescoring rows.
    pub fn rows(&self) -> &WideRows {
        &self.rows
    }

    /// Returns the size of all served data in bytes: codes, scales, rescoring rows, int8 centroids and first-pass codes.
    pub fn bytes(&self) -> usize {
        let rows = match &self.rows {
            WideRows::None => 0,
            WideRows::Bf16(r) => r.bytes(),
            WideRows::F16(r) => r.bytes(),
            WideRows::F32(r) => r.bytes(),
        };
        self.codes.bytes()
            + self.scales.bytes()
            + rows
            + self.centroid_codes.len()
            + 4 * self.centroid_scales.len()
            + self.penalties.bytes()
            + self.first_pass.as_ref().map_or(0, ItemCodes::bytes)
    }

    fn blocks(&self, list: ListId) -> Blocks<'_> {
        let (from, to) = (self.list_offsets[list.index()] as usize, self.list_offsets[list.index() + 1] as usize);
        let groups = self.dimension.div_ceil(4);
        let bytes = groups * 64;
        Blocks {
            codes: &self.codes[from / BLOCK * bytes..to / BLOCK * bytes],
            scales: &self.scales[from..to],
            groups,
            items: self.list_lengths[list.index()] as usize,
            first_slot: from as u32,
            next: &[],
        }
    }

    /// Returns the blocks of all lists as one range; callers must not pick the padding slots between lists.
    pub(super) fn all_blocks(&self) -> Blocks<'_> {
        Blocks {
            codes: &self.codes,
            scales: &self.scales,
            groups: self.dimension.div_ceil(4),
            items: self.slots(),
            first_slot: 0,
            next: &[],
        }
    }

    /// Returns the blocks of a list, with the blocks of `next` to prefetch.
    pub(super) fn blocks_before(&self, list: ListId, next: Option<ListId>) -> Blocks<'_> {
        Blocks { next: next.map_or(&[], |next| self.blocks(next).codes), ..self.blocks(list) }
    }

    /// Returns true if the index has first-pass codes.
    pub fn has_first_pass(&self) -> bool {
        self.first_pass.is_some()
    }

    /// Returns the first-pass codes of a list, with the codes of `next` to prefetch.
    pub(super) fn codes_before<'a>(&self, codes: &'a ItemCodes, list: ListId, next: Option<ListId>) -> CodeBlocks<'a> {
        let first = |list: ListId| self.list_offsets[list.index()];
        codes.blocks(first(list), self.list_lengths[list.index()] as usize, next.map(first))
    }

    /// Returns the product of a vector with the centroid of a list, in f32.
    pub(super) fn centroid_product(&self, vector: &[f32], list: ListId) -> f32 {
        self.kernels.dot_f32(vector, self.centroid(list))
    }

    /// Returns the centroid of a list in f32, `[D]`.
    pub fn centroid(&self, list: ListId) -> &[f32] {
        &self.centroids[list.index() * self.dimension..(list.index() + 1) * self.dimension]
    }

    /// Returns the inner product of a vector with the row of a slot, in f32 from the most precise row: rescoring and exact search
    /// rank by this number.
    pub fn product(&self, vector: &[f32], slot: Slot) -> f32 {
        let range = slot.index() * self.dimension..(slot.index() + 1) * self.dimension;
        match &self.rows {
            WideRows::Bf16(rows) => self.kernels.dot_bf16(vector, &rows[range]),
            WideRows::F16(rows) => self.kernels.dot_f16(vector, &rows[range]),
            WideRows::F32(rows) => self.kernels.dot_f32(vector, &rows[range]),
            WideRows::None => {
                let codes = read_row(&self.codes, self.dimension, slot.index());
                vector.iter().zip(codes).map(|(x, code)| x * code).sum::<f32>() * self.scales[slot.index()]
            }
        }
    }

    /// Computes [`Index::product`] for many slots.
    ///
    /// # Panics
    /// If `out` is not as long as `slots`.
    pub fn products(&self, vector: &[f32], slots: &[u32], out: &mut [f32]) {
        match &self.rows {
            WideRows::Bf16(rows) => self.kernels.dots_bf16(vector, rows, slots, out),
            WideRows::F16(rows) => self.kernels.dots_f16(vector, rows, slots, out),
            WideRows::F32(rows) => self.kernels.dots_f32(vector, rows, slots, out),
            WideRows::None => {
                assert_eq!(slots.len(), out.len());
                out.iter_mut().zip(slots).for_each(|(out, &slot)| *out = self.product(vector, Slot(slot)));
            }
        }
    }

    /// Decodes the row of a slot to f32, `[D]`, from the most precise row.
    pub fn row(&self, slot: Slot, out: &mut [f32]) {
        let range = slot.index() * self.dimension..(slot.index() + 1) * self.dimension;
        match &self.rows {
            WideRows::Bf16(rows) => out.iter_mut().zip(&rows[range]).for_each(|(o, x)| *o = x.to_f32()),
            // A conversion per number would test for the processor feature each time.
            WideRows::F16(rows) => rows[range].convert_to_f32_slice(out),
            WideRows::F32(rows) => out.copy_from_slice(&rows[range]),
            WideRows::None => {
                let codes = read_row(&self.codes, self.dimension, slot.index());
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code * self.scales[slot.index()]);
            }
        }
    }

    pub(super) fn quantize(&self, vector: &[f32], to: &mut Quantized) {
        debug_assert_eq!(vector.len(), self.dimension);
        to.set(vector);
    }
}
