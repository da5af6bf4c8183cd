//! Operands of dense loops.

/// Number of columns of a panel.
pub const PANEL: usize = 32;
/// Number of f32 in the widest register, and in a cache line.
pub const LANES: usize = 16;
/// Maximum number of columns for which products vectorize along the depth.
pub(super) const FEW_COLUMNS: usize = 5;
/// Maximum number of parts of a product.
pub const PARTS_MAX: usize = 16;

/// A cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([f32; LANES]);

/// Numbers aligned to cache lines, with at least one line of zeros after them, so that complete registers can be read.
#[derive(Clone, Debug, Default)]
pub struct Lines(Vec<Line>);

impl Lines {
    /// Allocates `count` zeros.
    pub fn new(count: usize) -> Self {
        Lines(vec![bytemuck::Zeroable::zeroed(); count.div_ceil(LANES) + PANEL / LANES])
    }

    /// Copies `numbers`.
    pub fn of(numbers: &[f32]) -> Self {
        let mut lines = Lines::new(numbers.len());
        lines.numbers_mut()[..numbers.len()].copy_from_slice(numbers);
        lines
    }

    /// Returns all numbers, including the padding.
    pub fn numbers(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }

    /// Returns all numbers for writing.
    pub fn numbers_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Matrix of a part, `[depth, columns]`: row `k` of panel `p` starts at `p * panel_stride + k * row_stride`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weights<'a> {
    /// Numbers, with a register's width of padding.
    pub numbers: &'a [f32],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between panels.
    pub panel_stride: usize,
}

/// One product of rows and a matrix.
#[derive(Clone, Copy, Debug, Default)]
pub struct Part<'a> {
    /// Rows, each `[depth]`.
    pub rows: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
    /// Numbers per row.
    pub depth: usize,
    /// Right factor.
    pub weights: Weights<'a>,
}

/// A sum of matrix products, with optional bias and ReLU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Product<'a> {
    /// Number of rows of each part and of the result.
    pub rows: usize,
    /// Number of columns of the result.
    pub columns: usize,
    /// Products to sum.
    pub parts: &'a [Part<'a>],
    /// Bias, `[columns]` and a register's width of padding, or empty.
    pub bias: &'a [f32],
    /// True if negative results become 0.
    pub relu: bool,
    /// Form of the factors.
    pub factors: Form,
    /// Form of the result; pairs only if the factors are pairs.
    pub result: Form,
    /// True if the rows may have many zeros, which may be skipped because all weights are finite.
    pub skips_zeros: bool,
    /// True if the last columns are computed first. If the same matrix is read repeatedly, the columns that were read
    /// last are still in the L1 cache.
    pub backwards: bool,
}

/// Storage form of numbers. A pair takes the space of one f32: depths, strides and rows of weights then count pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Contiguous f32.
    #[default]
    Single,
    /// Two bf16 that are neighbours along the depth, the first one in the lower half.
    Pairs,
}

impl Form {
    /// Returns the space that `count` numbers of a row take, in f32.
    pub fn room(self, count: usize) -> usize {
        match self {
            Form::Single => count,
            Form::Pairs => count.div_ceil(2),
        }
    }
}

/// Number of pairs of depth per tile step. Rows and matrices of pairs are padded with zeros to a multiple of this number.
pub const STEP: usize = LANES;

/// Element-wise function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Unary {
    Relu,
    Sigmoid,
    Tanh,
    Exp,
    Log,
    Sqrt,
    Abs,
    Neg,
    Reciprocal,
    Erf,
    /// GELU: `x (1 + erf(x / √2)) / 2`.
    Gelu,
    /// SiLU: `x sigmoid(x)`.
    Silu,
    /// Softplus: `log(1 + exp(x))`.
    Softplus,
    /// Rounds towards 0.
    Trunc,
    /// 1 if the number is 0, else 0.
    Not,
    /// 1 if the number is NaN, else 0.
    IsNan,
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Asinh,
    Acosh,
    Atanh,
    /// Rounds to the nearest f16, ties to even.
    RoundF16,
    /// Rounds to the nearest bf16, ties to even.
    RoundBf16,
}

/// Element-wise function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
    /// 1 if both numbers are equal, else 0.
    Equal,
    /// 1 if the first number is less than the second, else 0.
    Less,
    /// 1 if the first number is at most the second, else 0.
    LessOrEqual,
    /// The second number if the first is not 0, else 0.
    Keep,
    /// The second number if the first is 0, else 0.
    Drop,
    /// The first number to the power of the second.
    Pow,
    /// Remainder of a division, with the sign of the first number.
    Rem,
}

/// Reduction of many numbers to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Fold {
    Sum,
    Max,
    Min,
}

impl Fold {
    /// Returns the initial value, which is the result for no numbers.
    #[inline(always)]
    pub(super) fn identity_element(self) -> f32 {
        match self {
            Fold::Sum => 0.0,
            Fold::Max => f32::NEG_INFINITY,
            Fold::Min => f32::INFINITY,
        }
    }
}

/// Operand of an element-wise step: number `[r, o, i]` is at `r * row + o * outer + i * inner`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Numbers of the operand.
    pub numbers: &'a [f32],
    /// Distance between rows; 0 if all rows read the same numbers.
    pub row: usize,
    /// Distance between contiguous groups of numbers; 0 if all groups read the same numbers.
    pub outer: usize,
    /// Distance between the numbers of a group: 1, or 0 if the group repeats one number.
    pub inner: usize,
}

/// Result of an element-wise step, `[rows, outer, inner]`: the groups of a row are contiguous.
#[derive(Debug)]
pub struct MapTarget<'a> {
    /// Numbers of the result.
    pub numbers: &'a mut [f32],
    /// Distance between rows.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of groups per row.
    pub outer: usize,
    /// Numbers per group.
    pub inner: usize,
}

/// Maximum number of reductions of one [`EqualFold`] step.
pub const EQUAL_FOLDS_MAX: usize = 4;

/// One key per row, and keys that all rows share.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a> {
    /// Keys of the rows.
    pub of_rows: &'a [f32],
    /// Distance between the keys of two rows.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Keys to compare for equality with the key of each row; the same for all rows.
    pub shared: &'a [f32],
}

/// Reduction of values, each multiplied by 1 if its shared key equals the row's key and by 0 otherwise.
#[derive(Clone, Copy, Debug)]
pub struct EqualFold<'a> {
    /// Reduction function.
    pub f: Fold,
    /// One value per shared key.
    pub values: &'a [f32],
}

/// Maximum number of inputs, and of steps, of a [`Chain`].
pub const CHAIN_MAX: usize = 24;

/// A step of a chain: reads filled registers of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainLink {
    /// Function of one register.
    One(Unary, usize),
    /// Function of two registers.
    Two(Binary, [usize; 2]),
}

/// Element-wise steps in sequence. The inputs fill the first registers of a row; each step fills the next register.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Input numbers and the distance between rows; 0 if all rows read the same number.
    pub reads: &'a [(&'a [f32], usize)],
    /// Steps of the chain.
    pub links: &'a [ChainLink],
    /// Output registers: number `n` of a row's result is register `kept[n]`.
    pub kept: &'a [usize],
}

/// Returns the distance between the rows of a matrix of `columns` columns that [`pack`] has packed: few columns take narrow
/// rows, whose memory is read completely.
pub fn packed_stride(columns: usize) -> usize {
    if columns <= LANES { columns.max(1).next_multiple_of(LANES / 2) } else { PANEL }
}

/// Packs a row-major matrix `[depth, columns]` into panels, whose rows are [`packed_stride`] apart.
pub fn pack(matrix: &[f32], depth: usize, columns: usize) -> Lines {
    let stride = packed_stride(columns);
    let mut packed = Lines::new(depth * columns.next_multiple_of(stride));
    for (k, row) in matrix.chunks_exact(columns.max(1)).enumerate().take(depth) {
        for (p, run) in row.chunks(PANEL).enumerate() {
            packed.numbers_mut()[(p * depth + k) * stride..][..run.len()].copy_from_slice(run);
        }
    }
    packed
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn narrowed(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }
}

/// Converts two numbers to a pair.
#[inline(always)]
pub(super) fn pair(first: f32, second: f32) -> f32 {
    f32::from_bits(narrowed(first) | (narrowed(second) << 16))
}

/// Location of a matrix's rows within panels of pairs that hold several matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairRows {
    /// Rows of pairs per panel, a multiple of a step.
    pub all: usize,
    /// First row of pairs of this matrix.
    pub first: usize,
}

/// Packs a matrix `[depth, columns]` in pairs of rows, as [`pack`] does for rows, padded with zeros to the end of a step.
pub fn pack_pairs(matrix: &[f32], depth: usize, columns: usize) -> Lines {
    let all = Form::Pairs.room(depth).next_multiple_of(STEP);
    let mut packed = Lines::new(all * columns.next_multiple_of(PANEL));
    pair_rows(matrix, depth, columns, PairRows { all, first: 0 }, packed.numbers_mut());
    packed
}

/// Packs like [`pack_pairs`], into existing memory.
#[inline(always)]
pub fn pair_rows(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    for p in 0..columns.div_ceil(PANEL) {
        let width = (columns - p * PANEL).min(PANEL);
        let panel = &mut out[(p * rows.all + rows.first) * PANEL..(p + 1) * rows.all * PANEL];
        let (panel, behind) = panel.split_at_mut(Form::Pairs.room(depth) * PANEL);
        let both = matrix[..depth * columns].chunks(2 * columns.max(1));
        for (both, to) in both.zip(panel.chunks_exact_mut(PANEL)) {
            let (first, second) = both.split_at(columns);
            let from = &first[p * PANEL..][..width];
            match second.get(p * PANEL..p * PANEL + width) {
                Some(second) => to.iter_mut().zip(from).zip(second).for_each(|((to, &x), &y)| *to = pair(x, y)),
                None => to.iter_mut().zip(from).for_each(|(to, &x)| *to = pair(x, 0.0)),
            }
            to[width..].fill(0.0);
        }
        let rest = (rows.first + Form::Pairs.room(depth)).next_multiple_of(STEP) - rows.first - Form::Pairs.room(depth);
        behind[..rest * PANEL].fill(0.0);
    }
}

/// Returns the end of the last register of weights that a product reads.
pub(super) fn reach(weights: &Weights<'_>, depth: usize, columns: usize) -> usize {
    let (panel, within) = ((columns - 1) / PANEL, (columns - 1) % PANEL);
    let full = if panel > 0 { (panel - 1) * weights.panel_stride + PANEL } else { 0 };
    let last = panel * weights.panel_stride + (within + 1).next_multiple_of(LANES);
    (depth - 1) * weights.row_stride + full.max(last)
}
