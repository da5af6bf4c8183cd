//! Steps of a compiled graph, each with its result buffer and its operation per row.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use sterling_kernels::cpu::dense::{Binary, Cell, ChainLink, Fold, Form, Int8Matrix, Lines, Order, PairRows, Unary};

/// Precision of the factors of row products. Sums and all other values are in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Factors in f32.
    #[default]
    F32,
    /// Factors rounded to bf16.
    Bf16,
    /// Factors of products with constant matrices quantized to int8.
    Int8,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
        })
    }
}

/// Kind of memory that holds numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Constant(usize),
    User(usize),
    Rows(usize),
    /// Inputs of the rows.
    Given,
}

/// Elements of a buffer from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferRange {
    pub(super) memory: Memory,
    pub(super) offset: usize,
}

/// Rows and the matrix by which they are multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor {
    pub(super) rows: BufferRange,
    pub(super) depth: usize,
    pub(super) matrix: BufferRange,
    pub(super) row_stride: usize,
    pub(super) panel_stride: usize,
}

/// Rows and the quantized matrix by which they are multiplied.
#[derive(Clone, Debug)]
pub(super) struct Int8Factor {
    pub(super) rows: BufferRange,
    pub(super) matrix: Arc<Int8Matrix>,
}

/// An operand of an element-wise step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) place: BufferRange,
    pub(super) outer: usize,
    pub(super) inner: usize,
}

/// A reduction of the numbers whose keys equal a row's key.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyedFold {
    pub(super) f: Fold,
    pub(super) values: BufferRange,
}

/// A step; its result is written to buffer `out`.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) out: usize,
    pub(super) work: Work,
}

/// Operation of a step on each row.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// Sum of products: `runs` rows per part times a matrix of `columns` columns.
    Product {
        parts: Vec<Factor>,
        bias: Option<BufferRange>,
        runs: usize,
        columns: usize,
        relu: bool,
        /// True if rows may have many zeros, and products by zeros may be skipped.
        skips_zeros: bool,
        factors: Form,
        result: Form,
    },
    /// Sum of int8 products, whose rows are quantized by the step, and a function of the sum.
    Int8Product {
        parts: Vec<Int8Factor>,
        bias: Option<BufferRange>,
        runs: usize,
        columns: usize,
        map: Option<Unary>,
    },
    /// Converts `count` numbers per row to bf16 pairs, from pair `first` on.
    Narrow {
        a: BufferRange,
        count: usize,
        first: usize,
    },
    /// Packs a matrix of the user as bf16 pairs into the panels of its buffer.
    PackNarrow {
        a: BufferRange,
        depth: usize,
        columns: usize,
        rows: PairRows,
    },
    /// Products of matrices that differ per row: `[m, k]` at each offset of `left`, `[k, n]` at each offset of `right`.
    Matrices {
        a: BufferRange,
        b: BufferRange,
        left: Arc<[u32]>,
        right: Arc<[u32]>,
        shape: [usize; 3],
    },
    Map1 {
        f: Unary,
        a: BufferRange,
        count: usize,
    },
    Map2 {
        f: Binary,
        a: Operand,
        b: Operand,
        outer: usize,
        inner: usize,
    },
    Fold {
        f: Fold,
        a: BufferRange,
        runs: usize,
        count: usize,
    },
    /// Reduces the numbers whose key in `keys` equals a row's `key`; reduction `n` computes number `n` of the result
    /// row.
    FoldEqual {
        key: BufferRange,
        keys: BufferRange,
        count: usize,
        folds: Vec<KeyedFold>,
    },
    /// Operates on single numbers: operands fill the first registers of a row, each link computes the next register,
    /// and number `n` of the result row is register `kept[n]`.
    Chain {
        reads: Vec<BufferRange>,
        links: Vec<ChainLink>,
        kept: Vec<usize>,
    },
    /// Concatenates parts `runs` times; each part contributes its count of numbers.
    Concat {
        runs: usize,
        parts: Vec<(BufferRange, usize)>,
    },
    /// Copies groups of `run` contiguous numbers, each from an index of `index`.
    Pick {
        a: BufferRange,
        index: Arc<[u32]>,
        run: usize,
        /// An equivalent order of copies that is faster, if there is one.
        order: Option<Order>,
    },
    /// Adds groups of `run` contiguous numbers to a row of `count` numbers, each at an index of `index`.
    Spread {
        a: BufferRange,
        index: Arc<[u32]>,
        run: usize,
        count: usize,
    },
    /// Softmax of each group of `width` contiguous numbers.
    Softmax {
        a: BufferRange,
        runs: usize,
        width: usize,
    },
    /// Layer normalization of each group of contiguous numbers.
    Normalize(Box<NormalizeWork>),
    /// Attention over blocks of queries.
    Attention(Box<AttentionWork>),
    /// Steps of a recurrent layer.
    Recurrent(Box<RecurrentWork>),
}

/// Compiled layer normalization.
#[derive(Clone, Debug)]
pub(super) struct NormalizeWork {
    pub(super) a: BufferRange,
    pub(super) runs: usize,
    pub(super) width: usize,
    /// Divisor of each subtracted mean.
    pub(super) centre: Vec<f32>,
    /// Divisor of the mean square.
    pub(super) count: f32,
    pub(super) epsilon: f32,
    pub(super) scale: Option<BufferRange>,
    pub(super) bias: Option<BufferRange>,
    pub(super) relu: bool,
}

impl NormalizeWork {
    /// Returns the number of operations per number.
    pub(super) fn passes(&self) -> usize {
        2 * self.centre.len() + 3 + usize::from(self.scale.is_some()) + usize::from(self.bias.is_some())
    }
}

/// An operand of an operator in fused attention.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A tile of the block, or one number per query (`inner` is 0).
    Tile { tile: usize, inner: usize },
    /// Numbers in memory: a batch entry starts at its offset, and consecutive queries are `row` apart.
    Memory { place: BufferRange, offsets: Arc<[u32]>, row: usize, inner: usize },
}

/// Operator of fused attention, over tiles.
#[derive(Clone, Debug)]
pub(super) enum Function {
    One(Unary, usize),
    Two(Binary, [Source; 2]),
    Fold(Fold, usize),
    /// Softmax of a tile, which becomes the result tile.
    Softmax(usize),
    /// The same, with zeros instead of NaN.
    SoftmaxOrZeros(usize),
}

/// An operator of fused attention, whose results fill `tile` with `width` numbers per query.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) tile: usize,
    pub(super) width: usize,
    pub(super) function: Function,
}

/// Sizes of attention: batch entries, queries, depth of the first product, keys, columns of the last product.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSizes {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) depth: usize,
    pub(super) keys: usize,
    pub(super) columns: usize,
}

/// Compiled attention.
#[derive(Clone, Debug)]
pub(super) struct AttentionWork {
    /// Buffer ranges of the queries, the keys (stored in columns) and the values.
    pub(super) factors: [BufferRange; 3],
    /// Offsets of the three factors per batch entry.
    pub(super) offsets: [Arc<[u32]>; 3],
    pub(super) sizes: AttentionSizes,
    pub(super) links: Vec<Link>,
    /// Tile that holds the weights, and the number of tiles.
    pub(super) last: usize,
    pub(super) tiles: usize,
}

impl AttentionWork {
    /// Returns the number of elements of the result.
    pub(super) fn numbers(&self) -> usize {
        self.sizes.batch * self.sizes.queries * self.sizes.columns
    }

    /// Returns the multiply-adds of both products, and the operations between them.
    pub(super) fn work(&self) -> [usize; 2] {
        let AttentionSizes { batch, queries, depth, keys, columns } = self.sizes;
        [
            batch * queries * keys * (depth + columns),
            batch * queries * self.links.iter().map(|l| l.width).sum::<usize>(),
        ]
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<BufferRange> {
        let of_link = |link: &Link| match &link.function {
            Function::Two(_, operands) => operands.to_vec(),
            _ => Vec::new(),
        };
        let place = |source: Source| if let Source::Memory { place, .. } = source { Some(place) } else { None };
        self.factors.into_iter().chain(self.links.iter().flat_map(of_link).filter_map(place)).collect()
    }
}

/// A compiled recurrent layer; matrices are packed constants.
#[derive(Clone, Debug)]
pub(super) struct RecurrentWork {
    pub(super) cell: Cell,
    pub(super) is_reverse: bool,
    /// Sequences, steps, numbers of an input, numbers of the state.
    pub(super) shape: [usize; 4],
    pub(super) x: BufferRange,
    pub(super) weights: BufferRange,
    pub(super) recurrence: BufferRange,
    pub(super) candidate: Option<BufferRange>,
    pub(super) biases: [BufferRange; 2],
    pub(super) initial: [Option<BufferRange>; 2],
    pub(super) lengths: Option<BufferRange>,
}

impl RecurrentWork {
    pub(super) fn cost(&self) -> usize {
        let [runs, steps, depth, hidden] = self.shape;
        runs * steps * self.cell.gates() * hidden * (depth + hidden)
    }

    /// Returns the number of elements of the result.
    pub(super) fn numbers(&self) -> usize {
        let [runs, steps, _, hidden] = self.shape;
        runs * (steps + self.kept()) * hidden
    }

    /// Returns the number of final states that follow the steps of a sequence in the result.
    pub(super) fn kept(&self) -> usize {
        if self.cell == Cell::Lstm { 2 } else { 1 }
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<BufferRange> {
        let optional = [self.candidate, self.initial[0], self.initial[1], self.lengths].into_iter().flatten();
        [self.x, self.weights, self.recurrence, self.biases[0], self.biases[1]].into_iter().chain(optional).collect()
    }
}

#[cfg(test)]
impl Work {
    /// Returns the buffer ranges of the step's operands.
    pub(super) fn places(&self) -> Vec<BufferRange> {
        match self {
            Work::Product { parts, bias, .. } => {
                parts.iter().flat_map(|part| [part.rows, part.matrix]).chain(*bias).collect()
            }
            Work::Int8Product { parts, bias, .. } => parts.iter().map(|part| part.rows).chain(*bias).collect(),
            Work::Matrices { a, b, .. } => vec![*a, *b],
            Work::Map2 { a, b, .. } => vec![a.place, b.place],
            Work::Chain { reads, .. } => reads.clone(),
            Work::Attention(work) => work.places(),
            Work::Recurrent(work) => work.places(),
            Work::Concat { parts, .. } => parts.iter().map(|(place, _)| *place).collect(),
            Work::FoldEqual { key, keys, folds, .. } => {
                folds.iter().map(|fold| fold.values).chain([*key, *keys]).collect()
            }
            Work::Normalize(work) => [work.a].into_iter().chain(work.scale).chain(work.bias).collect(),
            Work::Narrow { a, .. }
            | Work::Softmax { a, .. }
            | Work::PackNarrow { a, .. }
            | Work::Map1 { a, .. }
            | Work::Fold { a, .. }
            | Work::Pick { a, .. }
            | Work::Spread { a, .. } => vec![*a],
        }
    }
}

/// A graph compiled to steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) constants: Vec<Lines>,
    pub(super) user: Vec<Step>,
    pub(super) rows: Vec<Step>,
    /// Count of numbers of each user buffer.
    pub(super) user_counts: Vec<usize>,
    /// Row stride of each row buffer.
    pub(super) strides: Vec<usize>,
    /// Row stride of the row inputs.
    pub(super) given_stride: usize,
    /// User inputs that are read: index of the input, and the user buffer that it is copied to.
    pub(super) user_inputs: Vec<(usize, usize)>,
    /// Buffer range of each output.
    pub(super) outputs: Vec<BufferRange>,
    /// Multiply-adds per request (`user_work`) and per row (`row_work`).
    pub(super) user_work: usize,
    pub(super) row_work: usize,
    /// Rows per block.
    pub(super) block_rows: usize,
}

impl Plan {
    /// Returns whether the plan has a fused step, which a GPU runs as several steps.
    #[cfg(feature = "cuda")]
    pub(super) fn is_fused(&self) -> bool {
        let is_fused =
            |step: &Step| matches!(step.work, Work::Attention(_) | Work::Softmax { .. } | Work::Normalize(_));
        self.user.iter().chain(&self.rows).any(is_fused)
    }

    /// Returns whether the plan has a step of fused attention.
    #[cfg(test)]
    pub(super) fn has_attention(&self) -> bool {
        self.user.iter().chain(&self.rows).any(|step| matches!(step.work, Work::Attention(_)))
    }
}
