//! What dense loops read and write.

/// Columns of a panel.
pub const PANEL: usize = 32;
/// Numbers of the widest register, and of a line of memory.
pub const LANES: usize = 16;
/// Most columns that are multiplied along the depth, where that is faster.
pub(super) const FEW_COLUMNS: usize = 5;
/// Most parts of a product.
pub const PARTS_MAX: usize = 16;

/// A line of memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([f32; LANES]);

/// Numbers from the start of a line on, with at least a line of zeros behind them, so that whole registers can be read.
#[derive(Clone, Debug, Default)]
pub struct Lines(Vec<Line>);

impl Lines {
    /// Room for `count` numbers, all 0.
    pub fn new(count: usize) -> Self {
        Lines(vec![bytemuck::Zeroable::zeroed(); count.div_ceil(LANES) + PANEL / LANES])
    }

    /// A copy of `numbers`.
    pub fn of(numbers: &[f32]) -> Self {
        let mut lines = Lines::new(numbers.len());
        lines.numbers_mut()[..numbers.len()].copy_from_slice(numbers);
        lines
    }

    /// All numbers, those behind the last one too.
    pub fn numbers(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }

    /// All numbers, to be written.
    pub fn numbers_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// The matrix of a part, `[depth, columns]`: row `k` of panel `p` starts at `p * panel_stride + k * row_stride`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weights<'a> {
    /// The numbers, with a register's width behind the last one.
    pub numbers: &'a [f32],
    /// From a row to the next.
    pub row_stride: usize,
    /// From a panel to the next.
    pub panel_stride: usize,
}

/// Rows times a matrix.
#[derive(Clone, Copy, Debug, Default)]
pub struct Part<'a> {
    /// The rows, each `[depth]`.
    pub rows: &'a [f32],
    /// From a row to the next.
    pub stride: usize,
    /// Numbers of a row.
    pub depth: usize,
    /// What they are multiplied with.
    pub weights: Weights<'a>,
}

/// A sum of products.
#[derive(Clone, Copy, Debug, Default)]
pub struct Product<'a> {
    /// Rows of each part and of the result.
    pub rows: usize,
    /// Columns of the result.
    pub columns: usize,
    /// What is summed.
    pub parts: &'a [Part<'a>],
    /// `[columns]` and a register's width behind, or empty.
    pub bias: &'a [f32],
    /// Whether what is negative becomes 0.
    pub relu: bool,
    /// In which form the factors come.
    pub factors: Form,
    /// In which form the result goes out; in pairs only where the factors are.
    pub result: Form,
}

/// In which form numbers lie. A pair takes the room of one number: depths, strides and rows of weights count pairs then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// One after the other, in f32.
    #[default]
    Single,
    /// Two that follow each other along the depth, in bf16, the first one in the lower half.
    Pairs,
}

impl Form {
    /// The room that `count` numbers of a row take.
    pub fn room(self, count: usize) -> usize {
        match self {
            Form::Single => count,
            Form::Pairs => count.div_ceil(2),
        }
    }
}

/// Pairs of depth of a step by tiles. Rows and matrices of pairs go on with zeros to the end of a step.
pub const STEP: usize = LANES;

/// What a number becomes.
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
    /// `x (1 + erf(x / √2)) / 2`
    Gelu,
    /// `x sigmoid(x)`
    Silu,
    /// `log(1 + exp(x))`
    Softplus,
    /// Towards 0.
    Trunc,
    /// 1 where it is 0, else 0.
    Not,
    /// 1 where it is NaN, else 0.
    IsNan,
}

/// What two numbers become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
    /// 1 or 0.
    Equal,
    /// 1 or 0.
    Less,
    /// 1 or 0.
    LessOrEqual,
    /// The second number where the first is not 0, else 0.
    Keep,
    /// The second number where the first is 0, else 0.
    Drop,
}

/// What many numbers become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Fold {
    Sum,
    Max,
    Min,
}

impl Fold {
    /// What it begins with.
    #[inline(always)]
    pub(super) fn of_nothing(self) -> f32 {
        match self {
            Fold::Sum => 0.0,
            Fold::Max => f32::NEG_INFINITY,
            Fold::Min => f32::INFINITY,
        }
    }
}

/// Where the operand of an element-wise step lies: number `[r, o, i]` is at `r * row + o * outer + i * inner`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The numbers.
    pub numbers: &'a [f32],
    /// From a row to the next; 0 where all rows share it.
    pub row: usize,
    /// From a run to the next; 0 where all runs share it.
    pub outer: usize,
    /// 1, or 0 where a run is one number.
    pub inner: usize,
}

/// The result of an element-wise step, `[rows, outer, inner]`: a row's runs lie side by side.
#[derive(Debug)]
pub struct MapTarget<'a> {
    /// The numbers.
    pub numbers: &'a mut [f32],
    /// From a row to the next.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Runs of a row.
    pub outer: usize,
    /// Numbers of a run.
    pub inner: usize,
}

/// Most folds of one [`EqualFold`] step.
pub const EQUAL_FOLDS_MAX: usize = 4;

/// A key of each row, and keys that all rows share.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a> {
    /// The rows' keys.
    pub of_rows: &'a [f32],
    /// From a row's key to the next.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// What they are compared with.
    pub shared: &'a [f32],
}

/// A fold of numbers, each times 1 where the key beside it is the row's and times 0 elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct EqualFold<'a> {
    /// What they become.
    pub f: Fold,
    /// A number beside each shared key.
    pub values: &'a [f32],
}

/// Most numbers that a [`Chain`] reads, and most that it makes.
pub const CHAIN_MAX: usize = 24;

/// What a chain makes of the registers of a row that are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainLink {
    /// Of one register.
    One(Unary, usize),
    /// Of two.
    Two(Binary, [usize; 2]),
}

/// Element-wise work on single numbers, one after the other: what is read fills the first registers of a row, each link the next one.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Where the numbers are, and from a row to the next; 0 where all rows share it.
    pub reads: &'a [(&'a [f32], usize)],
    /// The links.
    pub links: &'a [ChainLink],
    /// The registers that are kept: number `n` of a row's result is register `kept[n]`.
    pub kept: &'a [usize],
}

/// Packs a matrix `[depth, columns]`, row after row, into panels.
pub fn pack(matrix: &[f32], depth: usize, columns: usize) -> Lines {
    let mut packed = Lines::new(depth * columns.next_multiple_of(PANEL));
    for (k, row) in matrix.chunks_exact(columns.max(1)).enumerate().take(depth) {
        for (p, run) in row.chunks(PANEL).enumerate() {
            packed.numbers_mut()[(p * depth + k) * PANEL..][..run.len()].copy_from_slice(run);
        }
    }
    packed
}

/// The nearest bf16, of two the even one; NaN stays NaN.
#[inline(always)]
pub(super) fn narrowed(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }
}

/// Two numbers as a pair.
#[inline(always)]
pub(super) fn pair(first: f32, second: f32) -> f32 {
    f32::from_bits(narrowed(first) | (narrowed(second) << 16))
}

/// Where the rows of a matrix go within panels that others share, in pairs: so many of each panel, from one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairRows {
    /// Rows of pairs of a panel, whole steps.
    pub all: usize,
    /// The first one.
    pub first: usize,
}

/// Packs a matrix `[depth, columns]` in pairs of rows, as [`pack`] does rows; zeros behind, to the end of a step.
pub fn pack_pairs(matrix: &[f32], depth: usize, columns: usize) -> Lines {
    let all = Form::Pairs.room(depth).next_multiple_of(STEP);
    let mut packed = Lines::new(all * columns.next_multiple_of(PANEL));
    pair_rows(matrix, depth, columns, PairRows { all, first: 0 }, packed.numbers_mut());
    packed
}

/// [`pack_pairs`] into room that is there.
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

/// Where the last register that a product reads of a row of weights ends.
pub(super) fn reach(weights: &Weights<'_>, depth: usize, columns: usize) -> usize {
    let (panel, within) = ((columns - 1) / PANEL, (columns - 1) % PANEL);
    let full = if panel > 0 { (panel - 1) * weights.panel_stride + PANEL } else { 0 };
    let last = panel * weights.panel_stride + (within + 1).next_multiple_of(LANES);
    (depth - 1) * weights.row_stride + full.max(last)
}
