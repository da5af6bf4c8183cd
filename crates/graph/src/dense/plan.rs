//! Compilation of a graph to steps over buffers.
//!
//! 1. Values that no output needs are dropped.
//! 2. Each value gets a buffer range: constants in the constant memory, where matrices of products are packed; each
//!    user value has its own buffer; a row value has a buffer for a block of rows, which is reused after its last reader.
//! 3. A constant vector that is added to a product with a constant matrix becomes the bias of the product; a `Relu`
//!    that is the only reader of a product is fused into it. Slices of a value are read in place. Reductions over equal
//!    keys (`equal.rs`), attention (`attention.rs`), softmax and layer normalization (`normalize.rs`) and chains on single
//!    numbers (`chains.rs`) become one step each.
//! 4. In [`Precision::Int8`], wide products with constant matrices are quantized (`quantized.rs`).
//! 5. In [`Precision::Bf16`], wide row products take their factors as bf16 pairs (`pairs.rs`), and results stay pairs
//!    if only such products read them. A product that is an output of the graph stays in f32: it is small, and its
//!    rounding error would be the error of the answer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::attention::AttentionGroups;
use super::chains::{ChainOf, Chains};
use super::equal::{EqualGroup, EqualGroups};
use super::graph::{COMPUTED_MAX, Graph, NUMBERS_MAX};
use super::ir::{Id, Op, Side, broadcast_strides, positions};
use super::normalize::NormalGroups;
use super::steps::{BufferRange, Factor, KeyedFold, Memory, Operand, Plan, Precision, Step, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{
    Binary, ChainLink, Form, Int8Matrix, LANES, Lines, Order, PANEL, Unary, pack, packed_stride,
};

/// Maximum count of numbers in the row buffers of a block: 768 KiB, which stay in an L2 cache of 1 MiB. Fewer rows would
/// read the weights more often.
const BLOCK_NUMBERS: usize = 192 << 10;
/// Minimum number of columns of a product from which skipping zeros of its rows pays off.
const SKIPPING_COLUMNS_MIN: usize = 96;
/// Maximum depth of such a product.
const SKIPPING_DEPTH_MAX: usize = 2048;
/// Rows of a block.
struct BlockRows {
    most: usize,
    /// Rows per tile of the widest products.
    tile: usize,
}

impl BlockRows {
    /// Four tiles in f32; eight or nine in other precisions, whose products are so fast that the overhead per block
    /// matters.
    fn of(precision: Precision) -> BlockRows {
        match precision {
            Precision::F32 => BlockRows { most: 56, tile: 14 },
            Precision::Bf16 => BlockRows { most: 128, tile: 16 },
            Precision::Int8 => BlockRows { most: 126, tile: 14 },
        }
    }
}

/// Maximum count of numbers in the row buffers of a block, and maximum rows per block, of a plan with a recurrent
/// layer: each step reads all weights, so that a block should have many rows.
const RECURRENT_NUMBERS: usize = 2 << 20;
const RECURRENT_ROWS_MAX: usize = 56;

/// Returns the row stride of a buffer of `count` numbers per row: a multiple of the cache line. Single numbers are
/// contiguous, so that a step processes the numbers of several rows in full registers.
fn room_of_row(count: usize) -> usize {
    if count == 1 { 1 } else { count.next_multiple_of(LANES) }
}

/// Returns the number of rows per block if the row buffers take `numbers` numbers per row.
fn block_rows(numbers: usize, precision: Precision) -> usize {
    let BlockRows { most, tile } = BlockRows::of(precision);
    let rows = (BLOCK_NUMBERS / numbers.max(1)).clamp(1, most);
    if rows > tile { rows / tile * tile } else { rows }
}

/// Returns the number of rows per block of a plan with a recurrent layer, if the row buffers take `numbers` numbers per
/// row.
fn recurrent_rows(numbers: usize) -> usize {
    (RECURRENT_NUMBERS / numbers.max(1)).clamp(1, RECURRENT_ROWS_MAX)
}

/// Compiles a graph to steps; if `fuses` is set, attention, softmax and layer normalization become single steps.
///
/// # Errors
/// `Unsupported` if an output is the same for all rows, or buffers or indices are too large. The buffers of a plan that
/// does not fuse are on a GPU, which rejects buffers for which it has no memory.
pub(super) fn plan(graph: &Graph, precision: Precision, fuses: bool) -> Result<Plan> {
    if graph.outputs.iter().any(|&output| graph.values[output].side != Side::Pair) {
        return Err(Error::unsupported("an output is the same for all rows, expected one value per row"));
    }
    let needed = graph.needed(&graph.outputs, &[]);
    let mut planner = Planner {
        graph,
        plan: Plan::default(),
        places: vec![None; graph.values.len()],
        alias: graph.values.iter().map(|v| if let Op::Reshape(of) = v.op { Some(of) } else { None }).collect(),
        is_rectified: vec![false; graph.values.len()],
        quantized: Quantized::default(),
        last: vec![0; graph.values.len()],
        home: Vec::new(),
        buffered: 0,
        tiled: 0,
        indexed: 0,
        packed: HashMap::new(),
        tenants: Vec::new(),
        free: HashMap::new(),
        given: Vec::new(),
        is_narrow: vec![false; graph.values.len()],
        is_paired: vec![false; graph.values.len()],
        pairs: HashMap::new(),
        equal: EqualGroups::default(),
        attention: AttentionGroups::default(),
        normal: NormalGroups::default(),
        bias: HashMap::new(),
        chains: Chains::default(),
        has_zeros: has_zeros(graph),
    };
    let mut readers = planner.readers(&needed);
    planner.add_biases(&needed, &mut readers);
    planner.rectify(&needed, &readers);
    if precision == Precision::Int8 {
        planner.quantize(&needed, &mut readers);
    }
    planner.find_homes();
    let outputs = planner.outputs();
    // An output needs a separate buffer.
    let is_foldable = |id: Id| needed[id] && planner.alias[id].is_none() && !outputs.contains(&id);
    planner.equal = EqualGroups::of(graph, is_foldable, &readers, |id| planner.root(id));
    if fuses {
        planner.attention = AttentionGroups::of(graph, &needed, &readers, |id| planner.root(id));
        planner.normal = NormalGroups::of(graph, &needed, &readers, |id| planner.root(id));
    }
    let needed = graph.needed_by(&graph.outputs, |id| planner.operands(id));
    if precision == Precision::Bf16 {
        planner.narrow(&needed);
    }
    // User values first: a row step may read any of them.
    let made = (0..needed.len()).filter(|&id| needed[id] && planner.alias[id].is_none());
    let (rows, others): (Vec<Id>, Vec<Id>) = made.partition(|&id| graph.values[id].side == Side::Pair);
    planner.chains = Chains::of(graph, &rows, &outputs, |id| planner.reads(id));
    let order = [others, planner.chains.order.clone()].concat();
    planner.survey(&order);
    for (at, &id) in order.iter().enumerate() {
        planner.value(id)?;
        planner.check_numbers(if fuses { NUMBERS_MAX } else { COMPUTED_MAX })?;
        planner.give_back(at, id);
    }
    planner.plan.outputs = graph.outputs.iter().map(|&output| planner.place(output)).collect::<Result<_>>()?;
    let numbers = planner.plan.strides.iter().sum::<usize>() + planner.plan.given_stride;
    planner.plan.block_rows = block_rows(numbers, precision);
    if planner.plan.rows.iter().any(|step| matches!(step.work, Work::Recurrent(_))) {
        planner.plan.block_rows = planner.plan.block_rows.max(recurrent_rows(numbers));
    }
    Ok(planner.plan)
}

/// Returns for each value whether half of it consists of results of a `Relu`, or of products by them, so that many numbers
/// may be zeros.
fn has_zeros(graph: &Graph) -> Vec<bool> {
    let mut all: Vec<bool> = Vec::with_capacity(graph.values.len());
    for value in &graph.values {
        let any = |of: &[Id]| of.iter().any(|&id| all[id]);
        let own = match &value.op {
            Op::Unary(Unary::Relu, _) => true,
            Op::Reshape(a) | Op::Pick(a, _) => all[*a],
            Op::Concat(_, parts) => {
                let count = |id: &Id| graph.values[*id].count();
                2 * parts.iter().filter(|id| all[**id]).map(count).sum::<usize>() >= value.count()
            }
            Op::Binary(Binary::Mul, a, b) => any(&[*a, *b]),
            Op::MatMul(a, b) if graph.shape(*a).last() == Some(&1) => any(&[*a, *b]),
            _ => false,
        };
        all.push(own);
    }
    all
}

/// Returns true if the indices are consecutive integers.
fn follows(index: &[u32]) -> bool {
    !index.is_empty() && index.windows(2).all(|two| two[0] + 1 == two[1])
}

/// Returns the first index of each group and the group length, if the indices consist of groups of equal length with
/// consecutive indices.
fn runs(index: &Arc<[u32]>) -> (Arc<[u32]>, usize) {
    let ends = index.windows(2).position(|two| two[0] + 1 != two[1]).map_or(index.len(), |n| n + 1);
    match ends > 1 && index.len().is_multiple_of(ends) && index.chunks(ends).all(follows) {
        true => (index.iter().step_by(ends).copied().collect(), ends),
        false => (index.clone(), 1),
    }
}

/// Maximum length of groups of numbers that are copied in registers rather than by `memcpy`.
const RUN_MAX: usize = 32;

/// Returns an order in which single numbers, or short groups that start at these indices, are copied faster; `None` if
/// there is none.
fn order(index: &[u32], run: usize) -> Option<Order> {
    match run {
        1 => Order::of(index),
        2..=RUN_MAX => Some(Order::Runs(index.iter().map(|&first| (first, run as u32)).collect())),
        _ => None,
    }
}

/// Products that are computed in int8.
#[derive(Debug, Default)]
pub(super) struct Quantized {
    pub(super) products: HashSet<Id>,
    /// Activation functions that are applied to the results of products.
    pub(super) maps: HashMap<Id, Unary>,
    /// Quantized matrices, by the values that were stacked.
    pub(super) matrices: HashMap<Vec<Id>, Arc<Int8Matrix>>,
}

impl Quantized {
    pub(super) fn is_product(&self, id: Id) -> bool {
        self.products.contains(&id)
    }
}

pub(super) struct Planner<'a> {
    pub(super) graph: &'a Graph,
    pub(super) plan: Plan,
    pub(super) places: Vec<Option<BufferRange>>,
    /// Per value, the value whose buffer range it shares: the operand of a reshape, or the product that computes a
    /// `Relu`.
    pub(super) alias: Vec<Option<Id>>,
    pub(super) is_rectified: Vec<bool>,
    /// Products that are computed in int8.
    pub(super) quantized: Quantized,
    /// Per value, the value that contains its elements: the value itself, the value that it aliases, or the value of
    /// which it is a slice.
    pub(super) home: Vec<Id>,
    /// Per home, the position of its last reader in the order of values.
    pub(super) last: Vec<usize>,
    pub(super) packed: HashMap<Vec<Id>, usize>,
    /// Count of numbers in all buffers for one row.
    pub(super) buffered: usize,
    /// Count of numbers in the tiles of attention, which all steps share.
    pub(super) tiled: usize,
    /// Count of indices that the steps hold in addition to those of the graph.
    pub(super) indexed: usize,
    /// Number of values in each row buffer that are still to be read.
    pub(super) tenants: Vec<usize>,
    /// Row buffers that can be reused, by row stride.
    pub(super) free: HashMap<usize, Vec<usize>>,
    /// Offset of each row input within the inputs of a row.
    pub(super) given: Vec<usize>,
    /// Products whose factors are bf16 pairs.
    pub(super) is_narrow: Vec<bool>,
    /// Products whose results are bf16 pairs.
    pub(super) is_paired: Vec<bool>,
    /// Factors that were converted to pairs, by the values that were concatenated (rows) or stacked (matrices).
    pub(super) pairs: HashMap<Vec<Id>, BufferRange>,
    /// Reductions over equal keys.
    pub(super) equal: EqualGroups,
    /// Fused attention.
    pub(super) attention: AttentionGroups,
    /// Fused softmax and layer normalization.
    pub(super) normal: NormalGroups,
    /// Vectors added to products of many rows with a matrix, by the product.
    pub(super) bias: HashMap<Id, Id>,
    /// Chains of operations on single numbers.
    pub(super) chains: Chains,
    /// Values of which many numbers may be zeros.
    has_zeros: Vec<bool>,
}

impl Planner<'_> {
    /// Returns the value whose buffer range a value shares, after following all aliases.
    pub(super) fn root(&self, mut id: Id) -> Id {
        while let Some(of) = self.alias[id] {
            id = of;
        }
        id
    }

    /// Returns the number of readers of each value; the caller of the graph reads the outputs.
    fn readers(&self, needed: &[bool]) -> Vec<usize> {
        let mut readers = vec![0; needed.len()];
        let live = (0..needed.len()).filter(|&id| needed[id] && self.alias[id].is_none());
        live.flat_map(|id| self.reads(id)).chain(self.outputs()).for_each(|read| readers[read] += 1);
        readers
    }

    /// Returns the values that are outputs.
    pub(super) fn outputs(&self) -> Vec<Id> {
        self.graph.outputs.iter().map(|&output| self.root(output)).collect()
    }

    /// Returns the values that are read to compute a value, whether it is fused or not.
    pub(super) fn operands(&self, id: Id) -> Vec<Id> {
        let fused = self.attention.reads(id).or_else(|| self.normal.reads(id));
        fused.unwrap_or_else(|| self.equal.reads(self.graph, id))
    }

    /// Returns the values that are read to compute a value, views resolved.
    fn reads(&self, id: Id) -> Vec<Id> {
        self.operands(id).into_iter().map(|read| self.root(read)).collect()
    }

    /// Finds values that are slices of other values. Outputs are copied, because GPUs need each output in its own
    /// buffer.
    fn find_homes(&mut self) {
        let outputs = self.outputs();
        for (id, value) in self.graph.values.iter().enumerate() {
            let is_of_rows = |id: Id| self.graph.values[self.root(id)].side == Side::Pair;
            let within = match (self.alias[id], &value.op) {
                (Some(of), _) => Some(of),
                (None, Op::Pick(a, index)) if value.side == Side::Pair && is_of_rows(*a) && follows(index) => {
                    (!outputs.contains(&id)).then_some(*a)
                }
                _ => None,
            };
            self.home.push(within.map_or(id, |of| self.home[of]));
        }
    }

    fn survey(&mut self, order: &[Id]) {
        for (at, &id) in order.iter().enumerate() {
            for read in self.reads(id) {
                self.last[self.home[read]] = at;
            }
        }
        for output in self.outputs() {
            self.last[self.home[output]] = usize::MAX;
        }
        let mut offset = 0;
        for input in &self.graph.inputs {
            self.given.push(offset);
            if input.side == Side::Pair {
                offset += input.shape.iter().product::<usize>();
            }
        }
        self.plan.given_stride = offset.next_multiple_of(LANES);
        self.buffered += self.plan.given_stride;
    }

    /// Frees the buffers whose last reader is value `id`, at position `at` of the order.
    fn give_back(&mut self, at: usize, id: Id) {
        for home in self.reads(id).into_iter().map(|read| self.home[read]) {
            if self.last[home] != at {
                continue;
            }
            // A buffer of several values is freed after the last of them was read.
            self.last[home] = usize::MAX;
            let Some(BufferRange { memory: Memory::Rows(buffer), .. }) = self.places[home] else { continue };
            self.tenants[buffer] -= 1;
            if self.tenants[buffer] == 0 {
                self.free.entry(self.plan.strides[buffer]).or_default().push(buffer);
            }
        }
    }

    /// Returns the buffer range of a value. A constant gets a range when a step first reads it; constant matrices of
    /// products are packed instead and have no range.
    pub(super) fn place(&mut self, id: Id) -> Result<BufferRange> {
        let id = self.root(id);
        if let (None, Some(numbers)) = (self.places[id], self.graph.constant(id)) {
            let memory = Memory::Constant(self.constant(Lines::of(numbers)));
            self.places[id] = Some(BufferRange { memory, offset: 0 });
        }
        self.places[id].ok_or_else(|| Error::internal("a value is read before it is computed"))
    }

    pub(super) fn constant(&mut self, lines: Lines) -> usize {
        self.plan.constants.push(lines);
        self.plan.constants.len() - 1
    }

    fn check_numbers(&self, buffered_max: usize) -> Result<()> {
        let (buffered, indexed) = (self.buffered + self.tiled, self.indexed);
        if buffered > buffered_max || indexed > NUMBERS_MAX {
            return Err(Error::unsupported(format!(
                "{buffered} numbers in the buffers of a request with one row and {indexed} indices, expected at most \
                 {buffered_max} and {NUMBERS_MAX}"
            )));
        }
        Ok(())
    }

    /// Allocates a buffer for the numbers of a value.
    pub(super) fn buffer(&mut self, side: Side, count: usize) -> BufferRange {
        self.shared_buffer(side, count, 1)
    }

    /// Allocates a buffer of `count` numbers that `tenants` values share.
    fn shared_buffer(&mut self, side: Side, count: usize, tenants: usize) -> BufferRange {
        let memory = match side {
            Side::Pair => {
                let stride = room_of_row(count);
                let buffer = self.free.get_mut(&stride).and_then(Vec::pop).unwrap_or(self.plan.strides.len());
                if buffer == self.plan.strides.len() {
                    self.buffered += stride;
                    self.plan.strides.push(stride);
                    self.tenants.push(0);
                }
                self.tenants[buffer] = tenants;
                Memory::Rows(buffer)
            }
            _ => {
                self.buffered += count;
                self.plan.user_counts.push(count);
                Memory::User(self.plan.user_counts.len() - 1)
            }
        };
        BufferRange { memory, offset: 0 }
    }

    pub(super) fn step(&mut self, place: BufferRange, work: Work) {
        let cost = match &work {
            Work::Product { parts, runs, columns, skips_zeros, .. } => {
                let cost = parts.iter().map(|p| p.depth * columns).sum::<usize>() * runs;
                // If half of the numbers are zeros.
                if *skips_zeros { cost * 5 / 8 } else { cost }
            }
            // A step of the depth covers four codes, after the rows were quantized.
            Work::Int8Product { parts, runs, columns, .. } => {
                parts.iter().map(|part| part.matrix.depth() * (columns / 4 + 1)).sum::<usize>() * runs
            }
            Work::Narrow { count, .. } => *count,
            Work::PackNarrow { depth, columns, .. } => depth * columns,
            Work::Matrices { left, shape: [m, k, n], .. } => left.len() * m * k * n,
            // Memory-bound steps cost about four multiply-adds per number.
            Work::Map1 { count, .. } => 4 * count,
            Work::Map2 { outer, inner, .. } => 4 * outer * inner,
            Work::Fold { runs, count, .. } => 4 * runs * count,
            Work::FoldEqual { count, .. } => *count,
            Work::Chain { reads, links, kept } => reads.len() + links.len() + kept.len(),
            Work::Concat { runs, parts } => 4 * runs * parts.iter().map(|(_, n)| n).sum::<usize>(),
            Work::Pick { index, run, .. } => 16 * index.len() + run,
            Work::Spread { index, run, count, .. } => 16 * index.len() * run + count,
            Work::Softmax { runs, width, .. } => 8 * runs * width,
            Work::Normalize(work) => 8 * work.runs * work.width,
            Work::Attention(work) => work.work()[0] + 4 * work.work()[1],
            Work::Recurrent(work) => work.cost(),
        };
        match place.memory {
            Memory::Rows(out) => {
                self.plan.row_work += cost;
                self.plan.rows.push(Step { out, work });
            }
            Memory::User(out) => {
                self.plan.user_work += cost;
                self.plan.user.push(Step { out, work });
            }
            Memory::Constant(_) | Memory::Given => {}
        }
    }

    fn value(&mut self, id: Id) -> Result<()> {
        if self.places[id].is_some() {
            return Ok(());
        }
        let value = &self.graph.values[id];
        let (side, count) = (value.side, value.count());
        if let Some(group) = self.equal.group(id).cloned() {
            return self.fold_equal(&group);
        }
        if let Some(chain) = self.chains.chain(id).cloned() {
            // The first operator of a chain compiles the whole chain; values inside the chain may have no buffer range.
            return if chain.links[0] == id { self.chain(&chain) } else { Ok(()) };
        }
        let place = match &value.op {
            Op::Constant(_) => return Ok(()),
            Op::Inputs(first) if side == Side::Pair => {
                BufferRange { memory: Memory::Given, offset: self.given[*first] }
            }
            Op::Inputs(first) => {
                let place = self.buffer(side, count);
                if let Memory::User(buffer) = place.memory {
                    let before = self.graph.inputs[..*first].iter().filter(|i| i.side == Side::User).count();
                    self.plan.user_inputs.push((before, buffer));
                }
                place
            }
            Op::Pick(a, index) if self.home[id] != id => {
                let place = self.place(*a)?;
                BufferRange { offset: place.offset + index[0] as usize, ..place }
            }
            Op::Concat(axis, parts) if let Some(place) = self.adjacent_inputs(id, *axis, parts)? => place,
            _ => {
                let work = self.work(id)?;
                // The result as pairs is stored in complete panels.
                let room = if self.is_paired[id] { count.next_multiple_of(PANEL) / 2 } else { count };
                let place = self.buffer(side, room);
                self.step(place, work);
                place
            }
        };
        self.places[id] = Some(place);
        Ok(())
    }

    /// Returns the place of a concatenation of adjacent row inputs, which is read in place unless it is an output.
    fn adjacent_inputs(&mut self, id: Id, axis: usize, parts: &[Id]) -> Result<Option<BufferRange>> {
        let is_one_run = self.graph.shape(id)[..axis].iter().all(|&size| size == 1);
        let (true, Some(&first)) = (is_one_run && !self.outputs().contains(&id), parts.first()) else {
            return Ok(None);
        };
        let first = self.place(first)?;
        let mut end = first;
        for &part in parts {
            if first.memory != Memory::Given || self.place(part)? != end {
                return Ok(None);
            }
            end.offset += self.graph.values[part].count();
        }
        Ok(Some(first))
    }

    fn work(&mut self, id: Id) -> Result<Work> {
        if let Some(attention) = self.attend(id)? {
            return Ok(attention);
        }
        if let Some(group) = self.normal.group(id).cloned() {
            return group.compile(self.graph, |id| self.place(id));
        }
        let value = &self.graph.values[id];
        Ok(match &value.op {
            Op::Unary(f, a) => Work::Map1 { f: *f, a: self.place(*a)?, count: value.count() },
            Op::Binary(f, a, b) => self.binary(id, *f, *a, *b)?,
            Op::Fold(f, a) => {
                let count = self.graph.shape(*a).last().copied().unwrap_or(1);
                Work::Fold { f: *f, a: self.place(*a)?, runs: value.count(), count }
            }
            Op::Concat(axis, parts) => {
                let inner = |id: Id| self.graph.shape(id)[*axis..].iter().product();
                let parts = parts.iter().map(|&part| Ok((self.place(part)?, inner(part)))).collect::<Result<_>>()?;
                Work::Concat { runs: value.shape[..*axis].iter().product(), parts }
            }
            Op::Pick(a, index) => {
                let (index, run) = runs(index);
                Work::Pick { a: self.place(*a)?, order: order(&index, run), index, run }
            }
            Op::Spread(a, index) => {
                let (index, run) = runs(index);
                Work::Spread { a: self.place(*a)?, index, run, count: value.count() }
            }
            Op::Linear { parts, bias } if self.quantized.is_product(id) => {
                let bias = bias.map(|bias| self.place(bias)).transpose()?;
                self.int8_product(id, parts, bias, [1, value.count()])?
            }
            Op::Linear { parts, bias } => {
                let columns = value.count();
                let form = |is_pairs: bool| if is_pairs { Form::Pairs } else { Form::Single };
                let (factors, result) = (form(self.is_narrow[id]), form(self.is_paired[id]));
                let skips_zeros = factors == Form::Single && self.skips_zeros(parts, columns);
                let parts = match factors {
                    Form::Single => self.factors(parts)?,
                    Form::Pairs => self.narrow_factors(parts)?,
                };
                let bias = bias.map(|bias| self.place(bias)).transpose()?;
                let relu = self.is_rectified[id];
                Work::Product { parts, bias, runs: 1, columns, relu, skips_zeros, factors, result }
            }
            Op::MatMul(a, b) => self.matmul(id, *a, *b)?,
            Op::Recurrent(layer) => self.recurrent(layer)?,
            Op::Inputs(_) | Op::Constant(_) | Op::Reshape(_) => {
                return Err(Error::internal("an input, a constant or a reshape is planned as a step"));
            }
        })
    }

    /// Allocates one buffer for the results of one step, a number per value.
    fn side_by_side(&mut self, made: &[Id]) -> BufferRange {
        let place = self.shared_buffer(Side::Pair, made.len(), made.len());
        for (n, &id) in made.iter().enumerate() {
            self.places[id] = Some(BufferRange { offset: n, ..place });
        }
        place
    }

    /// Compiles reductions with the same keys to one step.
    fn fold_equal(&mut self, group: &EqualGroup) -> Result<()> {
        let out = self.side_by_side(&group.folds.iter().map(|(.., id)| *id).collect::<Vec<_>>());
        let beside = |&(f, values, _): &(_, Id, Id)| Ok(KeyedFold { f, values: self.place(values)? });
        let folds = group.folds.iter().map(beside).collect::<Result<_>>()?;
        let (key, keys, count) =
            (self.place(group.key)?, self.place(group.keys)?, self.graph.values[group.keys].count());
        self.step(out, Work::FoldEqual { key, keys, count, folds });
        Ok(())
    }

    fn chain(&mut self, chain: &ChainOf) -> Result<()> {
        let missing = || Error::internal("a single element is read before it is computed");
        let registers = [&chain.reads[..], &chain.links].concat();
        let register = |id: Id| registers.iter().position(|&other| other == self.root(id)).ok_or_else(missing);
        let link = |&id: &Id| match self.graph.values[id].op {
            Op::Unary(f, a) => Ok(ChainLink::One(f, register(a)?)),
            Op::Binary(f, a, b) => Ok(ChainLink::Two(f, [register(a)?, register(b)?])),
            _ => Err(Error::internal("a chain of single elements reads a wider value")),
        };
        let links = chain.links.iter().map(link).collect::<Result<_>>()?;
        let kept = chain.kept.iter().map(|&id| register(id)).collect::<Result<_>>()?;
        let reads = chain.reads.iter().map(|&id| self.place(id)).collect::<Result<_>>()?;
        let out = self.side_by_side(&chain.kept);
        self.step(out, Work::Chain { reads, links, kept });
        Ok(())
    }

    /// Returns whether a product may skip zeros of its rows: half of their numbers may be zeros, and all weights are finite,
    /// because a zero times another weight is NaN.
    fn skips_zeros(&self, parts: &[(Id, Id)], columns: usize) -> bool {
        let is_finite = |id: Id| self.graph.constant(id).is_some_and(|numbers| numbers.iter().all(|x| x.is_finite()));
        let depth = |(x, _): &(Id, Id)| self.graph.shape(*x).last().copied().unwrap_or_default();
        let (total, with_zeros) =
            (parts.iter().map(depth), parts.iter().filter(|(x, _)| self.has_zeros[*x]).map(depth));
        let total: usize = total.sum();
        columns >= SKIPPING_COLUMNS_MIN
            && total <= SKIPPING_DEPTH_MAX
            && 2 * with_zeros.sum::<usize>() >= total
            && parts.iter().all(|(_, matrix)| is_finite(*matrix))
    }

    /// Returns the factors of a product.
    fn factors(&mut self, parts: &[(Id, Id)]) -> Result<Vec<Factor>> {
        let joined = self.joined(parts)?;
        joined.into_iter().map(|(rows, depth, matrices)| self.factor(rows, depth, matrices)).collect()
    }

    /// Merges parts with contiguous rows and constant matrices: returns the rows, their depth, and the matrices to
    /// stack.
    pub(super) fn joined(&mut self, parts: &[(Id, Id)]) -> Result<Vec<(BufferRange, usize, Vec<Id>)>> {
        let mut joined: Vec<(BufferRange, usize, Vec<Id>)> = Vec::new();
        for &(x, matrix) in parts {
            let (place, depth) = (self.place(x)?, self.graph.shape(matrix)[0]);
            let is_constant = |id: &Id| self.graph.constant(*id).is_some();
            match joined.last_mut() {
                Some((first, all, matrices))
                    if place == BufferRange { offset: first.offset + *all, ..*first }
                        && matrices.iter().chain([&matrix]).all(is_constant) =>
                {
                    *all += depth;
                    matrices.push(matrix);
                }
                _ => joined.push((place, depth, vec![matrix])),
            }
        }
        Ok(joined)
    }

    /// Returns the factor of rows of `depth` numbers and stacked matrices; a matrix that is not constant must be the
    /// only one.
    pub(super) fn factor(&mut self, rows: BufferRange, depth: usize, matrices: Vec<Id>) -> Result<Factor> {
        let columns = self.graph.shape(matrices[0]).last().copied().unwrap_or(1);
        let constants: Option<Vec<&[f32]>> = matrices.iter().map(|&matrix| self.graph.constant(matrix)).collect();
        let Some(constants) = constants else {
            let matrix = self.place(matrices[0])?;
            return Ok(Factor { rows, depth, matrix, row_stride: columns, panel_stride: PANEL });
        };
        let packed = match self.packed.get(&matrices) {
            Some(&packed) => packed,
            None => {
                let packed = self.constant(pack(&constants.concat(), depth, columns));
                self.packed.insert(matrices, packed);
                packed
            }
        };
        let matrix = BufferRange { memory: Memory::Constant(packed), offset: 0 };
        let row_stride = packed_stride(columns);
        Ok(Factor { rows, depth, matrix, row_stride, panel_stride: depth * row_stride })
    }

    fn matmul(&mut self, id: Id, a: Id, b: Id) -> Result<Work> {
        let (value, left, right) = (&self.graph.values[id], self.graph.shape(a), self.graph.shape(b));
        let axes = value.shape.len() - 2;
        let (m, n, k) = (value.shape[axes], value.shape[axes + 1], left[left.len() - 1]);
        let is_shared = self.graph.values[b].side != Side::Pair && right.iter().product::<usize>() == k * n;
        if is_shared && k > 0 && n > 0 {
            let runs = left.iter().product::<usize>() / k;
            if self.quantized.is_product(id) {
                let bias = self.bias.get(&id).copied().map(|bias| self.place(bias)).transpose()?;
                return self.int8_product(id, &[(a, b)], bias, [runs, n]);
            }
            let (factors, result) = (if self.is_narrow[id] { Form::Pairs } else { Form::Single }, Form::Single);
            let part = match factors {
                Form::Single => {
                    let rows = self.place(a)?;
                    self.factor(rows, k, vec![b])?
                }
                Form::Pairs => self.narrow_rows(a, b, [runs, k, n])?,
            };
            let bias = self.bias.get(&id).copied().map(|bias| self.place(bias)).transpose()?;
            let relu = self.is_rectified[id];
            let skips_zeros = factors == Form::Single && self.skips_zeros(&[(a, b)], n);
            return Ok(Work::Product { parts: vec![part], bias, runs, columns: n, relu, skips_zeros, factors, result });
        }
        let places = |shape: &[usize], size: usize| -> Arc<[u32]> {
            let strides = broadcast_strides(&shape[..shape.len() - 2], &value.shape[..axes]);
            positions(&value.shape[..axes], &strides).into_iter().map(|n| n * size as u32).collect()
        };
        let (left, right) = (places(left, m * k), places(right, k * n));
        self.indexed += left.len() + right.len();
        Ok(Work::Matrices { a: self.place(a)?, b: self.place(b)?, left, right, shape: [m, k, n] })
    }

    /// Compiles an element-wise step with two loops; an operand with another broadcast pattern is expanded first.
    fn binary(&mut self, id: Id, f: Binary, a: Id, b: Id) -> Result<Work> {
        let shape = &self.graph.values[id].shape;
        let strides = [a, b].map(|operand| broadcast_strides(self.graph.shape(operand), shape));
        // Drops axes of size 1, and merges adjacent axes that are contiguous in both operands.
        let mut axes: Vec<(usize, [usize; 2])> = Vec::new();
        for (n, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let here = [strides[0][n], strides[1][n]];
            match axes.last_mut() {
                Some((before, at)) if (0..2).all(|o| at[o] == here[o] * size) => {
                    *before *= size;
                    *at = here;
                }
                _ => axes.push((size, here)),
            }
        }
        let (outer, inner) = match axes[..] {
            [] => ((1, [0, 0]), (1, [0, 0])),
            [inner] => ((1, [0, 0]), inner),
            [outer, inner] => (outer, inner),
            _ => {
                let count = shape.iter().product();
                let [a, b] = [(a, 0), (b, 1)].map(|(operand, n)| self.spread(operand, shape, &strides[n]));
                return Ok(Work::Map2 { f, a: a?, b: b?, outer: 1, inner: count });
            }
        };
        let mut operand = |id: Id, n: usize| -> Result<Operand> {
            Ok(Operand { place: self.place(id)?, outer: outer.1[n], inner: inner.1[n] })
        };
        Ok(Work::Map2 { f, a: operand(a, 0)?, b: operand(b, 1)?, outer: outer.0, inner: inner.0 })
    }

    fn spread(&mut self, id: Id, shape: &[usize], strides: &[usize]) -> Result<Operand> {
        let a = self.place(id)?;
        let index: Arc<[u32]> = positions(shape, strides).into();
        self.indexed += index.len();
        let place = self.buffer(self.graph.values[id].side.max(Side::User), index.len());
        self.step(place, Work::Pick { a, order: order(&index, 1), index, run: 1 });
        Ok(Operand { place, outer: 0, inner: 1 })
    }
}
