//! Compilation of a graph to steps over buffers.
//!
//! 1. Values that no output needs are dropped.
//! 2. Each value gets a buffer range (`buffers.rs`): constants in the constant memory, where matrices of products are
//!    packed (`products.rs`); each user value has its own buffer; a row value has a buffer for a block of rows, which is
//!    reused after its last reader.
//! 3. Values are lowered to steps (`lower.rs`). A constant vector that is added to a product with a constant matrix
//!    becomes the bias of the product; a `Relu` that is the only reader of a product is fused into it. Slices of a value
//!    are read in place. Reductions over equal keys (`equal.rs`), attention (`attention.rs`), softmax and layer
//!    normalization (`normalize.rs`) and chains on single numbers (`chains.rs`) become one step each.
//! 4. In [`Precision::Int8`], wide products with constant matrices are quantized (`quantized.rs`).
//! 5. In [`Precision::Bf16`], wide row products take their factors as bf16 pairs (`pairs.rs`), and results stay pairs
//!    if only such products read them. A product that is an output of the graph stays in f32: it is small, and its
//!    rounding error would be the error of the answer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::attention::AttentionGroups;
use super::chains::Chains;
use super::equal::EqualGroups;
use super::graph::{COMPUTED_MAX, Graph, NUMBERS_MAX};
use super::ir::{Id, Op, Side};
use super::normalize::NormalGroups;
use super::steps::{BufferRange, Plan, Precision, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Int8Matrix, LANES, Unary};

/// Maximum count of numbers in the row buffers of a block: 768 KiB, which stay in an L2 cache of 1 MiB. Fewer rows would
/// read the weights more often.
const BLOCK_NUMBERS: usize = 192 << 10;

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
pub(super) fn follows(index: &[u32]) -> bool {
    !index.is_empty() && index.windows(2).all(|two| two[0] + 1 == two[1])
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
    pub(super) has_zeros: Vec<bool>,
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
    pub(super) fn reads(&self, id: Id) -> Vec<Id> {
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
}
