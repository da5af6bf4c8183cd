//! Compiled graphs on a GPU: runs the steps of the CPU plan over all rows of several requests at once.

use super::RowProgram;
use super::steps::{BufferRange, KeyedFold, Memory, Operand, Plan, Step, Work};
use sterling_core::error::{Error, Result};
use sterling_cuda::ops::steps::{
    self, ChainAt, FactorAt, KeyedFoldAt, MatricesAt, NumbersAt, PickDestination, ProductTo, RowsOf, RunsOfRow,
};
use sterling_cuda::{Array, Device};
use sterling_kernels::cpu::dense::{Binary, ChainLink, Unary};

/// A compiled graph whose constants are in GPU memory.
#[derive(Debug)]
pub struct DeviceProgram {
    program: RowProgram,
    straight: DevicePlan,
    collapsed: DevicePlan,
}

/// Constants of a plan, and the indices that steps read, in the order of the steps: user steps, then row steps.
#[derive(Debug)]
struct DevicePlan {
    constants: Vec<Array<f32>>,
    indices: Vec<Vec<Array<u32>>>,
}

/// Returns the name of a function without a GPU kernel: trigonometric functions, whose exact range reduction needs a
/// stack frame, powers, and rounding to 16 bits.
fn function_of_host(work: &Work) -> Option<String> {
    let one = |f: Unary| {
        use Unary::*;
        let is_of_host = matches!(
            f,
            Sin | Cos | Tan | Asin | Acos | Atan | Sinh | Cosh | Asinh | Acosh | Atanh | RoundF16 | RoundBf16
        );
        is_of_host.then(|| format!("{f:?}").to_lowercase())
    };
    let two = |f: Binary| matches!(f, Binary::Pow | Binary::Rem).then(|| format!("{f:?}").to_lowercase());
    match work {
        Work::Map1 { f, .. } => one(*f),
        Work::Map2 { f, .. } => two(*f),
        Work::Chain { links, .. } => links.iter().find_map(|link| match link {
            ChainLink::One(f, _) => one(*f),
            ChainLink::Two(f, _) => two(*f),
        }),
        _ => None,
    }
}

/// Buffer for row inputs, `[requests, most, stride]`, with room for `most` rows per request.
#[derive(Debug)]
pub struct DeviceRows {
    /// Elements of the buffer.
    pub numbers: Array<f32>,
    /// Distance between rows in elements.
    pub stride: usize,
    /// Number of rows per request on all GPUs together. It selects the plan: all GPUs then use the same plan, and the
    /// result of a row does not depend on its GPU.
    pub of_all: usize,
}

/// Outputs of a run.
#[derive(Debug)]
pub struct DeviceOutputs {
    buffers: Vec<Array<f32>>,
    /// Per output: index of its buffer, and row stride.
    places: Vec<(usize, usize)>,
}

impl DeviceOutputs {
    /// Returns output number `n`, `[requests, most, stride]`, and the stride; outputs have the order requested at
    /// compilation.
    pub fn output(&self, n: usize) -> (&Array<f32>, usize) {
        let (buffer, stride) = self.places[n];
        (&self.buffers[buffer], stride)
    }
}

impl DevicePlan {
    fn copy(device: &Device, plan: &Plan) -> Result<Self> {
        let constants = plan.constants.iter().map(|lines| device.copy(lines.numbers())).collect::<Result<_>>()?;
        let index = |step: &Step| -> Result<Vec<Array<u32>>> {
            match &step.work {
                Work::Pick { index, run, .. } => {
                    let each = |&first: &u32| first..first + *run as u32;
                    Ok(vec![device.copy(&index.iter().flat_map(each).collect::<Vec<_>>())?])
                }
                Work::Matrices { left, right, .. } => Ok(vec![device.copy(left)?, device.copy(right)?]),
                _ => Ok(Vec::new()),
            }
        };
        let indices = plan.user.iter().chain(&plan.rows).map(index).collect::<Result<_>>()?;
        Ok(DevicePlan { constants, indices })
    }

    fn bytes(&self) -> usize {
        self.constants.iter().map(Array::bytes).sum::<usize>()
            + self.indices.iter().flatten().map(Array::bytes).sum::<usize>()
    }
}

impl RowProgram {
    /// Returns the two plans for GPUs, without fused attention, normalization and int8: one with the least work per
    /// request, one with the least work per row.
    fn device_plans(&self) -> [&Plan; 2] {
        match &self.unfused {
            Some(plans) => [&plans[0], &plans[1]],
            None => [&self.straight, &self.collapsed],
        }
    }
}

impl DeviceProgram {
    /// Copies the constants of a compiled graph to a device.
    ///
    /// # Errors
    /// `Unsupported` if an output is not computed by a step; `Overloaded` if GPU memory is exhausted.
    pub fn copy(device: &Device, program: &RowProgram) -> Result<Self> {
        DeviceProgram::check(program)?;
        let [straight, collapsed] = program.device_plans();
        Ok(DeviceProgram {
            program: program.clone(),
            straight: DevicePlan::copy(device, straight)?,
            collapsed: DevicePlan::copy(device, collapsed)?,
        })
    }

    /// Rejects a compiled graph that cannot run on a GPU.
    ///
    /// # Errors
    /// `Unsupported` for a recurrent layer or a function without a kernel, or if an output is not computed by a step.
    pub fn check(program: &RowProgram) -> Result<()> {
        let is_made = |place: &BufferRange| matches!(place, BufferRange { memory: Memory::Rows(_), offset: 0 });
        let plans = program.device_plans();
        for step in plans.iter().flat_map(|plan| plan.user.iter().chain(&plan.rows)) {
            if matches!(step.work, Work::Recurrent(_)) {
                return Err(Error::unsupported("the graph has a recurrent layer, which GPUs do not run"));
            }
            if let Some(function) = function_of_host(&step.work) {
                return Err(Error::unsupported(format!(
                    "the graph has the function {function}, which GPUs do not run"
                )));
            }
        }
        match plans.iter().all(|plan| plan.outputs.iter().all(is_made)) {
            true => Ok(()),
            false => Err(Error::unsupported("an output of the graph is one of its inputs, which GPUs do not run")),
        }
    }

    /// Returns the device memory of the program, in bytes.
    pub fn bytes(&self) -> usize {
        self.straight.bytes() + self.collapsed.bytes()
    }

    /// Returns the bytes of a run over `rows` rows per request.
    pub fn run_bytes(&self, rows: usize) -> usize {
        let numbers = |plan: &Plan| {
            let of_row = plan.strides.iter().sum::<usize>() + plan.given_stride;
            rows.saturating_mul(of_row).saturating_add(plan.user_counts.iter().sum())
        };
        let [straight, collapsed] = self.program.device_plans();
        4usize.saturating_mul(numbers(straight).max(numbers(collapsed)))
    }

    /// Allocates the buffer for inputs of `most` rows per request.
    ///
    /// # Errors
    /// `Overloaded` if GPU memory is exhausted.
    pub fn given(&self, device: &Device, requests: usize, most: usize) -> Result<DeviceRows> {
        // Both plans have the same layout of row inputs.
        let stride = self.program.device_plans()[0].given_stride;
        Ok(DeviceRows { numbers: device.room(requests * most * stride)?, stride, of_all: most })
    }

    /// Runs the program over the rows of several requests; `user` has the user inputs in their order, each `[requests,
    /// n]`.
    ///
    /// # Errors
    /// `Internal` if a launch fails; `Overloaded` if GPU memory is exhausted.
    pub fn run(
        &self,
        device: &Device,
        rows: RowsOf<'_>,
        user: &[&Array<f32>],
        given: DeviceRows,
    ) -> Result<DeviceOutputs> {
        let program = &self.program;
        let cost = |plan: &Plan| plan.user_work.saturating_add(plan.row_work.saturating_mul(given.of_all));
        let [straight, collapsed] = program.device_plans();
        let (plan, copied) = match cost(collapsed) < cost(straight) {
            true => (collapsed, &self.collapsed),
            false => (straight, &self.straight),
        };
        let requests = rows.counts.len();
        let room = |count: usize| device.room::<f32>(count);
        let users = plan.user_counts.iter().map(|count| room(requests * count)).collect::<Result<_>>()?;
        let buffers = plan.strides.iter().map(|stride| room(requests * rows.most * stride)).collect::<Result<_>>()?;
        let ones = device.copy(&vec![1u32; requests])?;
        let run = Run { device, plan, copied, users, buffers, given, most: rows.most };
        let alone = RowsOf { counts: &ones, most: 1 };
        for &(input, buffer) in &plan.user_inputs {
            let count = plan.user_counts[buffer];
            let from = NumbersAt::of(user[input], 0, count, 0);
            let placing = PickDestination { runs: 1, count, stride: 0, first: 0 };
            steps::pick(device, alone, from, None, placing, run.out(Memory::User(buffer)))?;
        }
        let mut indices = copied.indices.iter();
        for (step, memory) in plan.user.iter().map(|s| (s, Memory::User(s.out))) {
            run.step(step, alone, run.out(memory), indices.next().map_or(&[], Vec::as_slice))?;
        }
        for (step, memory) in plan.rows.iter().map(|s| (s, Memory::Rows(s.out))) {
            run.step(step, rows, run.out(memory), indices.next().map_or(&[], Vec::as_slice))?;
        }
        run.outputs()
    }
}

struct Run<'a> {
    device: &'a Device,
    plan: &'a Plan,
    copied: &'a DevicePlan,
    users: Vec<Array<f32>>,
    buffers: Vec<Array<f32>>,
    given: DeviceRows,
    most: usize,
}

impl Run<'_> {
    fn at(&self, place: BufferRange) -> NumbersAt {
        let offset = place.offset;
        match place.memory {
            Memory::Constant(n) => NumbersAt::of(&self.copied.constants[n], offset, 0, 0),
            Memory::User(n) => NumbersAt::of(&self.users[n], offset, self.plan.user_counts[n], 0),
            Memory::Rows(n) => {
                let stride = self.plan.strides[n];
                NumbersAt::of(&self.buffers[n], offset, self.most * stride, stride)
            }
            Memory::Given => {
                NumbersAt::of(&self.given.numbers, offset, self.most * self.given.stride, self.given.stride)
            }
        }
    }

    fn out(&self, memory: Memory) -> NumbersAt {
        self.at(BufferRange { memory, offset: 0 })
    }

    fn operand(&self, operand: &Operand) -> NumbersAt {
        self.at(operand.place).runs(operand.outer, operand.inner)
    }

    fn step(&self, step: &Step, rows: RowsOf<'_>, out: NumbersAt, indices: &[Array<u32>]) -> Result<()> {
        let (device, missing) = (self.device, || Error::internal("the indices of a step are not on the device"));
        match &step.work {
            Work::Product { parts, bias, runs, columns, relu, factors, result, .. } => {
                let factor = |f: &super::steps::Factor| {
                    FactorAt::new(self.at(f.rows), self.at(f.matrix), f.depth, (f.row_stride, f.panel_stride))
                };
                let parts: Vec<FactorAt> = parts.iter().map(factor).collect();
                let bias = bias.map_or_else(NumbersAt::default, |bias| self.at(bias));
                let (runs, columns, relu) = (*runs, *columns, *relu);
                let to = ProductTo { bias, out, runs, columns, relu, factors: *factors, result: *result };
                steps::product(device, rows, &parts, &to)
            }
            Work::Matrices { a, b, shape, .. } => {
                let [left, right] = indices else { return Err(missing()) };
                let of = MatricesAt { left: (self.at(*a), left), right: (self.at(*b), right), shape: *shape };
                steps::matrices(device, rows, &of, out)
            }
            Work::Map1 { f, a, count } => {
                let runs = RunsOfRow { outer: 1, inner: *count };
                steps::map1(device, rows, *f, runs, self.at(*a), out)
            }
            Work::Map2 { f, a, b, outer, inner } => {
                let runs = RunsOfRow { outer: *outer, inner: *inner };
                steps::map2(device, rows, *f, runs, [self.operand(a), self.operand(b)], out)
            }
            Work::Fold { f, a, runs, count } => {
                let runs = RunsOfRow { outer: *runs, inner: *count };
                steps::fold(device, rows, *f, runs, self.at(*a), out)
            }
            Work::FoldEqual { key, keys, count, folds } => {
                let fold = |fold: &KeyedFold| KeyedFoldAt::new(fold.f, self.at(fold.values));
                let folds: Vec<KeyedFoldAt> = folds.iter().map(fold).collect();
                steps::fold_equal(device, rows, (self.at(*key), self.at(*keys)), *count, (&folds, out))
            }
            Work::Chain { reads, links, kept } => {
                let reads: Vec<NumbersAt> = reads.iter().map(|&read| self.at(read)).collect();
                steps::chain(device, rows, &ChainAt { reads: &reads, links, kept }, out)
            }
            Work::Concat { runs, parts } => {
                let stride = parts.iter().map(|(_, count)| count).sum();
                let mut first = 0;
                for &(place, count) in parts {
                    let placing = PickDestination { runs: *runs, count, stride, first };
                    steps::pick(device, rows, self.at(place), None, placing, out)?;
                    first += count;
                }
                Ok(())
            }
            Work::Pick { a, index, run, .. } => {
                let [copied] = indices else { return Err(missing()) };
                let placing = PickDestination { runs: 1, count: index.len() * run, stride: 0, first: 0 };
                steps::pick(device, rows, self.at(*a), Some(copied), placing, out)
            }
            Work::Spread { .. } => Err(Error::unsupported("gradients are computed on the CPU only")),
            Work::Attention(_) | Work::Softmax { .. } | Work::Normalize(_) => {
                Err(Error::unsupported("fused attention and normalization run on the CPU only"))
            }
            Work::Recurrent(_) => Err(Error::unsupported("recurrent layers run on the CPU only")),
            Work::Int8Product { .. } => Err(Error::unsupported("int8 products run on the CPU only")),
            Work::Narrow { a, count, first } => steps::narrow(device, rows, self.at(*a), *count, out.behind(*first)),
            Work::PackNarrow { a, depth, columns, rows: at } => {
                steps::pack_narrow(device, rows, self.at(*a), (*depth, *columns, *at), out)
            }
        }
    }

    /// Returns the outputs of the run.
    fn outputs(self) -> Result<DeviceOutputs> {
        let place = |place: &BufferRange| match *place {
            BufferRange { memory: Memory::Rows(n), offset: 0 } => Ok((n, self.plan.strides[n])),
            _ => Err(Error::internal("no step computes an output of the graph")),
        };
        let places = self.plan.outputs.iter().map(place).collect::<Result<_>>()?;
        Ok(DeviceOutputs { buffers: self.buffers, places })
    }
}
