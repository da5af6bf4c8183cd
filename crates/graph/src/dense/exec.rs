//! Runs the steps of a plan: user steps once, row steps block after block, so that the result of a step is still in the
//! cache when the next step reads it.

use super::steps::{BufferRange, Factor, Int8Factor, Memory, Operand, Plan, Step, Work};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::{
    self as loops, CHAIN_MAX, Chain, EQUAL_FOLDS_MAX, EqualFold, Fold, Form, Int8Part, Int8Product, Keys, LANES, Lines,
    MapTarget, Norm, PANEL, PARTS_MAX, Part, Product, STEP, Weights,
};

/// Scratch memory of compiled graphs, which the caller keeps between runs, so that only the first runs allocate.
#[derive(Debug, Default)]
pub struct Scratch {
    user: Vec<Lines>,
    rows: Vec<Lines>,
    given: Lines,
    /// Scratch numbers of a step: registers of chains, tiles of attention, states of recurrent layers.
    registers: Lines,
}

fn fit(buffers: &mut Vec<Lines>, counts: impl Iterator<Item = usize>) {
    for (n, count) in counts.enumerate() {
        if buffers.len() == n {
            buffers.push(Lines::default());
        }
        grow(&mut buffers[n], count);
    }
}

fn grow(lines: &mut Lines, count: usize) {
    if lines.numbers().len() < count + PANEL {
        *lines = Lines::new(count);
    }
}

/// Runs the user steps. `inputs` are the user inputs, in their order.
pub(super) fn start(plan: &Plan, kernels: Kernels, inputs: &[&[f32]], scratch: &mut Scratch) {
    fit(&mut scratch.user, plan.user_counts.iter().copied());
    fit(&mut scratch.rows, plan.strides.iter().map(|stride| stride * plan.block_rows));
    grow(&mut scratch.given, plan.given_stride * plan.block_rows);
    for &(input, buffer) in &plan.user_inputs {
        scratch.user[buffer].numbers_mut()[..inputs[input].len()].copy_from_slice(inputs[input]);
    }
    let mut registers = std::mem::take(&mut scratch.registers);
    for step in &plan.user {
        let mut out = std::mem::take(&mut scratch.user[step.out]);
        let run = Run { plan, kernels, scratch, rows: 1 };
        run.step(step, &mut registers, out.numbers_mut(), plan.user_counts[step.out]);
        scratch.user[step.out] = out;
    }
    scratch.registers = registers;
}

/// Returns the buffer for the inputs of a block of rows, which the caller fills, and the row stride.
pub(super) fn given<'a>(plan: &Plan, scratch: &'a mut Scratch) -> (&'a mut [f32], usize) {
    (scratch.given.numbers_mut(), plan.given_stride)
}

/// Runs the row steps over a filled block.
pub(super) fn block(plan: &Plan, kernels: Kernels, rows: usize, scratch: &mut Scratch) {
    let mut registers = std::mem::take(&mut scratch.registers);
    for step in &plan.rows {
        let mut out = std::mem::take(&mut scratch.rows[step.out]);
        let run = Run { plan, kernels, scratch, rows };
        run.step(step, &mut registers, out.numbers_mut(), plan.strides[step.out]);
        scratch.rows[step.out] = out;
    }
    scratch.registers = registers;
}

/// Returns output number `n` of the last block, with the stride of its rows.
pub(super) fn output<'a>(plan: &Plan, n: usize, scratch: &'a Scratch) -> (&'a [f32], usize) {
    let BufferRange { memory, offset } = plan.outputs[n];
    match memory {
        Memory::Rows(buffer) => (&scratch.rows[buffer].numbers()[offset..], plan.strides[buffer]),
        _ => (&scratch.given.numbers()[offset..], plan.given_stride),
    }
}

/// Returns the distance between the numbers of an operand if all rows of a block can be processed as one contiguous
/// array: 1 if the rows have the layout of the result, including the padding between rows; 0 if all rows share one
/// number and the result has one number per row.
fn in_one_run(operand: &loops::Operand<'_>, count: usize, stride: usize) -> Option<usize> {
    match operand.row {
        0 if count == 1 && stride == 1 => Some(0),
        row if row == stride && (operand.inner == 1 || count == 1) => Some(1),
        _ => None,
    }
}

/// Returns all rows of a result as one long row.
fn whole_block(target: MapTarget<'_>) -> MapTarget<'_> {
    MapTarget { inner: (target.rows - 1) * target.stride + target.inner, rows: 1, ..target }
}

/// Returns how the products of `runs` runs of each of `rows` rows are computed: the number of products, the rows of each,
/// and whether a product covers the runs of a row rather than a run of all rows.
fn products(rows: usize, runs: usize, is_flat: bool) -> (usize, usize, bool) {
    match (rows == 1 || is_flat, runs > rows) {
        (true, _) => (1, rows * runs, true),
        (false, true) => (rows, runs, true),
        (false, false) => (runs, rows, false),
    }
}

pub(super) struct Run<'a> {
    plan: &'a Plan,
    pub(super) kernels: Kernels,
    scratch: &'a Scratch,
    pub(super) rows: usize,
}

impl<'a> Run<'a> {
    /// Returns the numbers of a buffer from the offset of `place` on, and the row stride.
    pub(super) fn at(&self, place: BufferRange) -> (&'a [f32], usize) {
        let (lines, stride) = match place.memory {
            Memory::Constant(n) => (&self.plan.constants[n], 0),
            Memory::User(n) => (&self.scratch.user[n], 0),
            Memory::Rows(n) => (&self.scratch.rows[n], self.plan.strides[n]),
            Memory::Given => (&self.scratch.given, self.plan.given_stride),
        };
        (&lines.numbers()[place.offset..], stride)
    }

    fn operand(&self, operand: &Operand) -> loops::Operand<'a> {
        let (numbers, row) = self.at(operand.place);
        loops::Operand { numbers, row, outer: operand.outer, inner: operand.inner }
    }

    fn step(&self, step: &Step, registers: &mut Lines, out: &mut [f32], stride: usize) {
        let rows = self.rows;
        match &step.work {
            Work::Product { parts, bias, runs, columns, relu, skips_zeros, factors, result } => {
                let bias = bias.map_or(&[][..], |bias| self.at(bias).0);
                let (columns, relu, factors, result) = (*columns, *relu, *factors, *result);
                let skips_zeros = *skips_zeros;
                let shape = Product { rows, columns, bias, relu, skips_zeros, factors, result, ..Product::default() };
                self.product(parts, &shape, *runs, out, stride);
            }
            Work::Int8Product { parts, bias, runs, columns, map } => {
                let bias = bias.map_or(&[][..], |bias| self.at(bias).0);
                let shape = Int8Product { rows, parts: &[], bias, map: *map };
                self.int8_product(parts, &shape, [*runs, *columns], out, stride);
            }
            Work::Narrow { a, count, first } => {
                let (numbers, row) = self.at(*a);
                let input = loops::Operand { numbers, row, outer: 0, inner: 1 };
                let inner = (first + Form::Pairs.room(*count)).next_multiple_of(STEP) - first;
                let mut target = MapTarget { numbers: &mut out[*first..], stride, rows, outer: 1, inner };
                self.kernels.narrow(&input, *count, &mut target);
            }
            Work::PackNarrow { a, depth, columns, rows } => {
                self.kernels.pack_narrow(self.at(*a).0, *depth, *columns, *rows, out);
            }
            Work::Matrices { a, b, left, right, shape } => {
                let is_shared = !matches!(b.memory, Memory::Rows(_) | Memory::Given);
                if shape[0] == 1 && is_shared {
                    return self.rows_by_matrices(*a, *b, (left, right, *shape), out, stride);
                }
                for row in 0..rows {
                    self.matrices(*a, *b, (left, right, *shape), row, &mut out[row * stride..]);
                }
            }
            Work::Map1 { f, a, count } => {
                let mut input = self.operand(&Operand { place: *a, outer: 0, inner: 1 });
                let mut target = MapTarget { numbers: out, stride, rows, outer: 1, inner: *count };
                if let Some(inner) = in_one_run(&input, *count, stride) {
                    (input, target) = (loops::Operand { inner, ..input }, whole_block(target));
                }
                self.kernels.map1(*f, &input, &mut target);
            }
            Work::Map2 { f, a, b, outer, inner } => {
                let (mut a, mut b) = (self.operand(a), self.operand(b));
                let mut target = MapTarget { numbers: out, stride, rows, outer: *outer, inner: *inner };
                let in_one_run = |o: &loops::Operand<'_>| in_one_run(o, outer * inner, stride);
                if *outer == 1
                    && let (Some(of_a), Some(of_b)) = (in_one_run(&a), in_one_run(&b))
                {
                    (a.inner, b.inner) = (of_a, of_b);
                    target = whole_block(target);
                }
                self.kernels.map2(*f, &a, &b, &mut target);
            }
            Work::Fold { f, a, runs, count } => {
                let (numbers, row) = self.at(*a);
                let input = loops::Operand { numbers, row, outer: *count, inner: 1 };
                let mut target = MapTarget { numbers: out, stride, rows, outer: *runs, inner: 1 };
                self.kernels.fold(*f, &input, *count, &mut target);
            }
            Work::FoldEqual { key, keys, count, folds } => {
                let (of_rows, apart) = self.at(*key);
                let keys = Keys { of_rows, stride: apart, rows, shared: &self.at(*keys).0[..*count] };
                let mut all = [EqualFold { f: Fold::Sum, values: &[] }; EQUAL_FOLDS_MAX];
                for (to, fold) in all.iter_mut().zip(folds) {
                    *to = EqualFold { f: fold.f, values: &self.at(fold.values).0[..*count] };
                }
                self.kernels.fold_equal(&keys, &all[..folds.len()], out, stride);
            }
            Work::Chain { reads, links, kept } => {
                let mut all = [(&[][..], 0); CHAIN_MAX];
                all.iter_mut().zip(reads).for_each(|(to, &read)| *to = self.at(read));
                let chain = Chain { reads: &all[..reads.len()], links, kept };
                self.kernels.chain(&chain, rows, registers, out, stride);
            }
            Work::Concat { runs, parts } => {
                let width: usize = parts.iter().map(|(_, count)| count).sum();
                let mut first = 0;
                for &(place, count) in parts {
                    let (numbers, row_stride) = self.at(place);
                    for (row, run) in (0..rows).flat_map(|row| (0..*runs).map(move |run| (row, run))) {
                        let from = &numbers[row * row_stride + run * count..][..count];
                        out[row * stride + run * width + first..][..count].copy_from_slice(from);
                    }
                    first += count;
                }
            }
            Work::Softmax { a, runs, width } => {
                let (numbers, row_stride) = self.at(*a);
                let count = runs * width;
                // Processes all rows at once if there is no padding between rows.
                if row_stride == count && stride == count {
                    let to = &mut out[..rows * count];
                    to.copy_from_slice(&numbers[..rows * count]);
                    return self.kernels.softmax(to, *width);
                }
                for row in 0..rows {
                    let to = &mut out[row * stride..][..count];
                    to.copy_from_slice(&numbers[row * row_stride..][..count]);
                    self.kernels.softmax(to, *width);
                }
            }
            Work::Normalize(work) => {
                let (numbers, row) = self.at(work.a);
                let input = loops::Operand { numbers, row, outer: work.width, inner: 1 };
                let mut target = MapTarget { numbers: out, stride, rows, outer: work.runs, inner: work.width };
                let constant = |place: Option<BufferRange>| place.map_or(&[][..], |place| self.at(place).0);
                let norm = Norm {
                    width: work.width,
                    centre: &work.centre,
                    count: work.count,
                    epsilon: work.epsilon,
                    scale: constant(work.scale),
                    bias: constant(work.bias),
                    relu: work.relu,
                };
                self.kernels.norm(&norm, &input, &mut target);
            }
            Work::Attention(work) => self.attention(work, registers, out, stride),
            Work::Recurrent(work) => self.recurrent(work, registers, out, stride),
            Work::Spread { a, index, run, count } => self.spread(*a, (index, *run), *count, out, stride),
            Work::Pick { a, index, run, order } => {
                let (numbers, row_stride) = self.at(*a);
                if let Some(order) = order {
                    let input = loops::Operand { numbers, row: row_stride, outer: 0, inner: 1 };
                    let mut target = MapTarget { numbers: out, stride, rows, outer: 1, inner: index.len() * run };
                    return self.kernels.rearrange(order, &input, &mut target);
                }
                for row in 0..rows {
                    let (from, to) = (&numbers[row * row_stride..], &mut out[row * stride..][..index.len() * run]);
                    match *run {
                        1 => to.iter_mut().zip(index.iter()).for_each(|(to, &n)| *to = from[n as usize]),
                        run => {
                            let runs = to.chunks_exact_mut(run).zip(index.iter());
                            runs.for_each(|(to, &n)| to.copy_from_slice(&from[n as usize..][..run]));
                        }
                    }
                }
            }
        }
    }

    fn spread(&self, a: BufferRange, (index, run): (&[u32], usize), count: usize, out: &mut [f32], stride: usize) {
        let (numbers, row_stride) = self.at(a);
        for row in 0..self.rows {
            let (from, to) = (&numbers[row * row_stride..], &mut out[row * stride..][..count]);
            to.fill(0.0);
            for (from, &n) in from.chunks_exact(run).zip(index) {
                to[n as usize..][..run].iter_mut().zip(from).for_each(|(to, x)| *to += x);
            }
        }
    }

    /// Computes `runs` products for each row. All are one product if they are contiguous; otherwise either the products
    /// of a row or the rows of a product are computed together, whichever are more.
    fn product(&self, factors: &[Factor], shape: &Product<'_>, runs: usize, out: &mut [f32], stride: usize) {
        let lies_flat = |factor: &Factor| self.at(factor.rows).1 == runs * factor.depth;
        let is_flat = runs > 1 && stride == runs * shape.columns && factors.iter().all(lies_flat);
        let (times, together, by_row) = products(shape.rows, runs, is_flat);
        let mut parts = [Part::default(); PARTS_MAX];
        for n in 0..times {
            for (part, factor) in parts.iter_mut().zip(factors) {
                let (numbers, row_stride) = self.at(factor.rows);
                let (weights, _) = self.at(factor.matrix);
                let Factor { depth, row_stride: of_matrix, panel_stride, .. } = *factor;
                let weights = Weights { numbers: weights, row_stride: of_matrix, panel_stride };
                let (first, step) = if by_row { (n * row_stride, depth) } else { (n * depth, row_stride) };
                *part = Part { rows: &numbers[first..], stride: step, depth, weights };
            }
            let (first, step) = if by_row { (n * stride, shape.columns) } else { (n * shape.columns, stride) };
            // The output of a single row may be written in complete panels.
            let step = if together == 1 { stride } else { step };
            let product = Product { rows: together, parts: &parts[..factors.len()], ..*shape };
            self.kernels.product(&product, &mut out[first..], step);
        }
    }

    /// Computes `runs` int8 products for each row, together as [`Run::product`] does.
    fn int8_product(
        &self,
        factors: &[Int8Factor],
        shape: &Int8Product<'_>,
        [runs, columns]: [usize; 2],
        out: &mut [f32],
        stride: usize,
    ) {
        let lies_flat = |factor: &Int8Factor| self.at(factor.rows).1 == runs * factor.matrix.depth();
        let is_flat = runs > 1 && stride == runs * columns && factors.iter().all(lies_flat);
        let (times, together, by_row) = products(shape.rows, runs, is_flat);
        for n in 0..times {
            let part = |place: usize| {
                // The last factor repeats behind the parts.
                let Int8Factor { rows, matrix } = &factors[place.min(factors.len() - 1)];
                let ((numbers, row_stride), depth) = (self.at(*rows), matrix.depth());
                let (first, stride) = if by_row { (n * row_stride, depth) } else { (n * depth, row_stride) };
                Int8Part { rows: &numbers[first..], stride, matrix }
            };
            let parts: [Int8Part<'_>; PARTS_MAX] = std::array::from_fn(part);
            let (first, step) = if by_row { (n * stride, columns) } else { (n * columns, stride) };
            let product = Int8Product { rows: together, parts: &parts[..factors.len()], ..*shape };
            self.kernels.product_int8(&product, &mut out[first..], step);
        }
    }

    fn matrices(
        &self,
        a: BufferRange,
        b: BufferRange,
        shape: (&[u32], &[u32], [usize; 3]),
        row: usize,
        out: &mut [f32],
    ) {
        let (left, right, [m, k, n]) = shape;
        let ((a, of_a), (b, of_b)) = (self.at(a), self.at(b));
        for (batch, (&at_a, &at_b)) in left.iter().zip(right).enumerate() {
            let weights = Weights { numbers: &b[row * of_b + at_b as usize..], row_stride: n, panel_stride: PANEL };
            let part = Part { rows: &a[row * of_a + at_a as usize..], stride: k, depth: k, weights };
            let product = Product { rows: m, columns: n, parts: &[part], ..Product::default() };
            self.kernels.product(&product, &mut out[batch * m * n..], n);
        }
    }

    /// Multiplies a `[1, k]` matrix of each row by matrices that all rows share.
    fn rows_by_matrices(
        &self,
        a: BufferRange,
        b: BufferRange,
        shape: (&[u32], &[u32], [usize; 3]),
        out: &mut [f32],
        stride: usize,
    ) {
        let (left, right, [_, k, n]) = shape;
        let ((a, of_a), (b, _)) = (self.at(a), self.at(b));
        for (batch, (&at_a, &at_b)) in left.iter().zip(right).enumerate() {
            let weights = Weights { numbers: &b[at_b as usize..], row_stride: n, panel_stride: PANEL };
            let part = Part { rows: &a[at_a as usize..], stride: of_a, depth: k, weights };
            let product = Product { rows: self.rows, columns: n, parts: &[part], ..Product::default() };
            self.kernels.product(&product, &mut out[batch * n..], stride);
        }
    }
}

const _: () = assert!(PANEL.is_multiple_of(LANES));
