//! Dense graphs as programs: ONNX files lowered to a few kinds of steps that run over blocks of rows.
//!
//! 1. `import` reads an ONNX graph as the checked graph of `graph` and `ir`, whose values know whether they are constant (these are
//!    folded), the user's, or a row's. What is not in the operator table of `models/README.md` is refused by its name;
//!    the caller then leaves the graph to its runtime.
//! 2. `split` takes apart what depends on the item alone, which is worked out once for each item where that pays.
//! 3. `collapse` turns linear chains into single products, with matrices made of the user once a request where that pays.
//! 4. `plan` gives every value a place and makes steps (`steps`), one of comparisons, products and folds (`equal`); `exec` runs them: the user's once, the rows' in blocks that stay in
//!    the caches through all steps.
//!
//! `text` writes a program down: what `sterling inspect` prints, and what its digest is of.
//!
//! `interpret` is the meaning of a graph: it folds constants, and the tests compare programs with it.

mod chains;
mod collapse;
#[cfg(feature = "cuda")]
mod device;
mod equal;
mod exec;
mod graph;
mod import;
mod interpret;
mod ir;
mod pairs;
mod plan;
mod split;
mod steps;
mod text;
pub mod train;

use std::ops::Range;

#[cfg(feature = "cuda")]
pub use device::{DeviceOutputs, DeviceProgram, DeviceRows};
pub use exec::Scratch;
pub use import::{Given, Made, Size};
pub use split::ItemCut;
pub use text::Figures;

use steps::Plan;
pub use steps::Precision;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;

/// A graph that was lowered.
#[derive(Clone, Debug)]
pub struct RowProgram {
    kernels: Kernels,
    /// As little as possible once a request.
    straight: Plan,
    /// As little as possible a row.
    collapsed: Plan,
    given: usize,
    /// Numbers of each output of one row.
    widths: Vec<usize>,
    figures: [Figures; 2],
    /// Its plans in f32, which are the same on every machine.
    text: String,
}

/// A graph that was read and checked, before it becomes a program.
#[derive(Debug)]
pub struct ReadGraph {
    graph: graph::Graph,
}

/// The halves of a network that was cut.
#[derive(Clone, Debug)]
pub struct Halves {
    /// Makes what is kept of an item, output after output; reads nothing of the user.
    pub item: RowProgram,
    /// Which of the network's inputs it reads.
    pub item_inputs: Vec<usize>,
    /// Makes the network's outputs: its rows are what is kept of their item, side by side, and then the inputs that are left.
    pub candidates: RowProgram,
    /// Which of the network's inputs it reads, all of the user's among them.
    pub candidate_inputs: Vec<usize>,
    /// Numbers that are kept of an item.
    pub width: usize,
    /// A name for what makes them, weights and all, 32 hexadecimal digits.
    pub digest: String,
}

/// The inputs of some rows, to be written: those of a row side by side, in their order.
#[derive(Debug)]
pub struct InputRows<'a> {
    /// Which rows.
    pub rows: Range<usize>,
    /// The first row's from 0 on.
    pub numbers: &'a mut [f32],
    /// Numbers from a row to the next.
    pub stride: usize,
    /// Numbers of a row.
    pub width: usize,
}

impl InputRows<'_> {
    /// Has each row written by itself; `write` is told its number.
    pub fn each(self, mut write: impl FnMut(usize, &mut [f32])) {
        for (n, row) in self.rows.zip(self.numbers.chunks_mut(self.stride.max(1))) {
            write(n, &mut row[..self.width]);
        }
    }

    /// Some of these rows, by their places among them.
    pub fn some(&mut self, places: Range<usize>) -> InputRows<'_> {
        let InputRows { rows, numbers, stride, width } = self;
        let numbers = &mut numbers[places.start * *stride..];
        InputRows { rows: rows.start + places.start..rows.start + places.end, numbers, stride: *stride, width: *width }
    }
}

/// A block of rows that a program has run over.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    program: &'a RowProgram,
    plan: &'a Plan,
    scratch: &'a Scratch,
}

/// An output of the rows of a block.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    numbers: &'a [f32],
    stride: usize,
    width: usize,
}

impl<'a> Block<'a> {
    /// How many outputs a row has.
    pub fn outputs(&self) -> usize {
        self.program.widths.len()
    }

    /// Output number `n`, in the order that the program was asked for.
    pub fn output(&self, n: usize) -> Output<'a> {
        let (numbers, stride) = exec::output(self.plan, n, self.scratch);
        Output { numbers, stride, width: self.program.widths[n] }
    }
}

impl<'a> Output<'a> {
    /// The output of row `n` of the block.
    pub fn row(&self, n: usize) -> &'a [f32] {
        &self.numbers[n * self.stride..][..self.width]
    }
}

impl ReadGraph {
    /// Reads an ONNX graph whose inputs come as `given`; it is to have these outputs.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn read(bytes: &[u8], given: &[Given], outputs: &[Made]) -> Result<ReadGraph> {
        let graph = import::import(bytes, given, outputs)?;
        for (&id, output) in graph.outputs.iter().zip(outputs) {
            let value = &graph.values[id];
            let axes = value.shape.iter().enumerate();
            let made: Vec<Size> =
                axes.map(|(n, &d)| if value.rows == Some(n) { Size::Rows } else { Size::Fixed(d as i64) }).collect();
            if made != output.shape {
                return Err(Error::unsupported(format!(
                    "output `{}` of shape {made:?}, expected {:?}",
                    output.name, output.shape
                )));
            }
        }
        Ok(ReadGraph { graph })
    }

    /// The whole as one program; in f32 where the machine has no products of bf16.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn program(&self, precision: Precision) -> Result<RowProgram> {
        RowProgram::of(&self.graph, precision, Kernels::best())
    }

    /// Where it is best cut, so that what depends on the item alone is worked out once an item; none where no cut makes a
    /// candidate cheaper by much. `is_item` says of each input whether it is the item's, `work` how many multiply-adds take as long
    /// as to read it for a candidate.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn best_cut(&self, is_item: &[bool], work: &[usize]) -> Result<Option<ItemCut>> {
        split::best_cut(&self.graph, is_item, work)
    }

    /// The work of reading a row of a candidate that lies somewhere in memory, of so many numbers.
    pub fn work_of_row(numbers: usize) -> usize {
        split::ROW_WORK + split::NUMBER_WORK * numbers
    }

    /// Its halves, the item's in f32.
    ///
    /// # Errors
    /// `Invalid` for a cut of another network; as [`RowProgram::lower`].
    pub fn halves(&self, is_item: &[bool], cut: &ItemCut, precision: Precision) -> Result<Halves> {
        let split::Split { item, candidates, width } = split::split(&self.graph, is_item, cut)?;
        Ok(Halves {
            digest: item.digest(cut),
            item: RowProgram::of(&item.graph, Precision::F32, Kernels::best())?,
            item_inputs: item.inputs,
            candidates: RowProgram::of(&candidates.graph, precision, Kernels::best())?,
            candidate_inputs: candidates.inputs,
            width,
        })
    }
}

impl RowProgram {
    /// Lowers an ONNX graph whose inputs come as `given`; it is to have these outputs.
    ///
    /// # Errors
    /// `Unsupported` with the operator, attribute or shape that programs do not have.
    pub fn lower(bytes: &[u8], given: &[Given], outputs: &[Made]) -> Result<RowProgram> {
        RowProgram::lower_in(Precision::F32, bytes, given, outputs)
    }

    /// [`RowProgram::lower`] in a precision; in f32 where the machine has no products of bf16.
    ///
    /// # Errors
    /// As there.
    pub fn lower_in(precision: Precision, bytes: &[u8], given: &[Given], outputs: &[Made]) -> Result<RowProgram> {
        ReadGraph::read(bytes, given, outputs)?.program(precision)
    }

    fn of(graph: &graph::Graph, precision: Precision, kernels: Kernels) -> Result<RowProgram> {
        let graphs = [collapse::collapse(graph, false)?, collapse::collapse(graph, true)?];
        let [straight, collapsed] = &graphs;
        let (mut straight, mut collapsed) =
            (plan::plan(straight, Precision::F32)?, plan::plan(collapsed, Precision::F32)?);
        let (figures, text) =
            ([&straight, &collapsed].map(Figures::of), text::describe(&straight, &collapsed, precision));
        if precision == Precision::Bf16 && kernels.has_bf16() {
            (straight, collapsed) = (plan::plan(&graphs[0], precision)?, plan::plan(&graphs[1], precision)?);
        }
        let pairs = graph.inputs.iter().filter(|input| input.side == ir::Side::Pair);
        Ok(RowProgram {
            kernels,
            straight,
            collapsed,
            given: pairs.map(|input| input.shape.iter().product::<usize>()).sum(),
            widths: graph.outputs.iter().map(|&output| graph.values[output].count()).collect(),
            figures,
            text,
        })
    }

    /// The plan that costs the least for so many rows.
    fn plan(&self, rows: usize) -> &Plan {
        if work(&self.collapsed, rows) < work(&self.straight, rows) { &self.collapsed } else { &self.straight }
    }

    /// What a run over so many rows costs, in multiply-adds and what takes as long as one.
    pub fn work(&self, rows: usize) -> usize {
        work(self.plan(rows), rows)
    }

    /// Runs over `rows` rows, block after block. `user` are the user's inputs in their order; `fill` writes the inputs of
    /// some rows; `done` gets the first row of each block, the rows that it has, and what they became. A failure
    /// of `done` ends the run.
    ///
    /// # Errors
    /// What `done` returns.
    pub fn run(
        &self,
        rows: usize,
        user: &[&[f32]],
        scratch: &mut Scratch,
        fill: &mut dyn FnMut(InputRows<'_>),
        done: &mut dyn FnMut(usize, usize, Block<'_>) -> Result<()>,
    ) -> Result<()> {
        let plan = self.plan(rows);
        exec::start(plan, self.kernels, user, scratch);
        for first in (0..rows).step_by(plan.block_rows) {
            let count = plan.block_rows.min(rows - first);
            let (numbers, stride) = exec::given(plan, scratch);
            fill(InputRows { rows: first..first + count, numbers, stride, width: self.given });
            exec::block(plan, self.kernels, count, scratch);
            done(first, count, Block { program: self, plan, scratch })?;
        }
        Ok(())
    }
}

fn work(plan: &Plan, rows: usize) -> usize {
    plan.user_work.saturating_add(plan.row_work.saturating_mul(rows))
}

impl RowProgram {
    /// What it takes where as little as possible is done once a request, and where as little as possible is done a row.
    pub fn figures(&self) -> [Figures; 2] {
        self.figures
    }

    /// One name for its text, 16 hexadecimal digits.
    pub fn digest(&self) -> String {
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(self.to_string().as_bytes()))
    }
}

impl std::fmt::Display for RowProgram {
    /// The plans one after the other; a single one where both are the same.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
pub(crate) mod tests;
