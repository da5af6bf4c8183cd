//! Compiled dense graphs: ONNX files lowered to a few kinds of steps that run over blocks of rows.
//!
//! 1. `import` reads an ONNX graph into the checked graph of `graph` and `ir`. Values of the graph are constant (and folded),
//!    user values, or row values. An operator that is missing in the table of `docs/guide/own-model.md` is rejected by name; the
//!    caller then runs the graph in its ONNX runtime.
//! 2. `separate` separates the user's numbers of concatenated values from those of rows. `split` separates the part that
//!    depends on the item alone, which is computed once per item if that pays off.
//! 3. `demand` drops the steps of a sequence that are not read. `collapse` turns linear chains into single products,
//!    with matrices computed from the user's values once per request if that pays off.
//! 4. `plan` assigns memory to every value (`buffers`) and generates steps (`lower`, `products`, `steps`), among them
//!    fused steps for comparisons, products and reductions (`equal`), for attention (`attention`), and for softmax or
//!    layer normalization (`normalize`), and int8 products (`quantized`). `exec` runs the steps: user steps once, row
//!    steps in blocks that stay in the caches through all steps.
//!
//! `text` prints a compiled graph, for `sterling inspect` and for the digest of the graph.
//!
//! `interpret` is the reference evaluation of a graph: the compiler folds constants with it, and tests compare compiled
//! graphs with it.

mod attend;
mod attention;
mod buffers;
mod chains;
mod collapse;
mod demand;
#[cfg(feature = "cuda")]
mod device;
mod epilogue;
mod equal;
mod exec;
mod graph;
mod import;
mod interpret;
mod ir;
mod lower;
mod normalize;
mod pairs;
mod plan;
mod products;
mod quantized;
mod recurrent;
mod separate;
mod split;
mod steps;
mod text;
pub mod train;

use std::ops::Range;

#[cfg(feature = "cuda")]
pub use device::{DeviceOutputs, DeviceProgram, DeviceRows};
pub use exec::Scratch;
pub(crate) use import::ElementTypes;
pub use import::{DeclaredInput, DeclaredOutput, Size};
pub use split::ItemCut;
pub use text::Figures;

use steps::Plan;
pub use steps::Precision;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;

/// Number of rows for which the only plan of a graph in int8 is chosen.
const INT8_ROWS: usize = 1000;

/// A compiled graph.
#[derive(Clone, Debug)]
pub struct RowProgram {
    kernels: Kernels,
    /// Plan with the least work per request.
    straight: Plan,
    /// Plan with the least work per row.
    collapsed: Plan,
    /// The same plans without fused attention, normalization and int8, which GPUs do not run; `None` if no step is
    /// such.
    #[cfg(feature = "cuda")]
    unfused: Option<Box<[Plan; 2]>>,
    given: usize,
    /// Numbers per row of each output.
    widths: Vec<usize>,
    figures: [Figures; 2],
    /// Description of the plan for few rows and of the plan for many rows. A program in bf16 is described in f32, so that
    /// the text does not depend on the processor.
    text: String,
}

/// A graph that was read and checked, before compilation.
#[derive(Debug)]
pub struct ReadGraph {
    graph: graph::Graph,
}

/// The two compiled halves of a split network.
#[derive(Clone, Debug)]
pub struct Halves {
    /// Computes the stored numbers of an item, output after output; reads no user input.
    pub item: RowProgram,
    /// Indices of the network inputs that `item` reads.
    pub item_inputs: Vec<usize>,
    /// Computes the network's outputs. Input rows are the stored numbers of the item, then the remaining inputs.
    pub candidates: RowProgram,
    /// Indices of the network inputs that `candidates` reads, among them all user inputs.
    pub candidate_inputs: Vec<usize>,
    /// Numbers stored per item.
    pub width: usize,
    /// Digest of the item side, weights included, as 32 hexadecimal digits.
    pub digest: String,
}

/// Buffer for the inputs of some rows; the inputs of a row are contiguous, in the order of the inputs.
#[derive(Debug)]
pub struct InputRows<'a> {
    /// Row numbers.
    pub rows: Range<usize>,
    /// Numbers of the buffer, from the first row on.
    pub numbers: &'a mut [f32],
    /// Distance between rows in numbers.
    pub stride: usize,
    /// Numbers per row.
    pub width: usize,
}

impl InputRows<'_> {
    /// Calls `write` per row, with the row's number.
    pub fn each(self, mut write: impl FnMut(usize, &mut [f32])) {
        for (n, row) in self.rows.zip(self.numbers.chunks_mut(self.stride.max(1))) {
            write(n, &mut row[..self.width]);
        }
    }

    /// Returns a range of these rows; `places` are indices into `rows`.
    pub fn some(&mut self, places: Range<usize>) -> InputRows<'_> {
        let InputRows { rows, numbers, stride, width } = self;
        let numbers = &mut numbers[places.start * *stride..];
        InputRows { rows: rows.start + places.start..rows.start + places.end, numbers, stride: *stride, width: *width }
    }
}

/// Results for a block of rows.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    program: &'a RowProgram,
    plan: &'a Plan,
    scratch: &'a Scratch,
}

/// An output for the rows of a block.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    numbers: &'a [f32],
    stride: usize,
    width: usize,
}

impl<'a> Block<'a> {
    /// Returns the number of outputs per row.
    pub fn outputs(&self) -> usize {
        self.program.widths.len()
    }

    /// Returns output number `n`, in the order that was requested at compilation.
    pub fn output(&self, n: usize) -> Output<'a> {
        let (numbers, stride) = exec::output(self.plan, n, self.scratch);
        Output { numbers, stride, width: self.program.widths[n] }
    }
}

impl<'a> Output<'a> {
    /// Returns the output of row `n` of the block.
    pub fn row(&self, n: usize) -> &'a [f32] {
        &self.numbers[n * self.stride..][..self.width]
    }
}

impl ReadGraph {
    /// Reads an ONNX graph whose inputs are `given` and whose outputs are `outputs`.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn read(bytes: &[u8], given: &[DeclaredInput], outputs: &[DeclaredOutput]) -> Result<ReadGraph> {
        let ReadGraph { graph } = ReadGraph::imported(bytes, given, outputs)?;
        // If the separated graph would exceed a limit, the graph is used without separation.
        let separated = separate::separated(&graph).ok().flatten();
        Ok(ReadGraph { graph: separated.unwrap_or(graph) })
    }

    /// Reads a graph value by value as its file defines it: training recognizes values that cancel out by this form.
    fn imported(bytes: &[u8], given: &[DeclaredInput], outputs: &[DeclaredOutput]) -> Result<ReadGraph> {
        let graph = import::import(bytes, given, outputs)?;
        for (&id, output) in graph.outputs.iter().zip(outputs) {
            let value = &graph.values[id];
            let axes = value.shape.iter().enumerate();
            let made: Vec<Size> =
                axes.map(|(n, &d)| if value.rows == Some(n) { Size::Rows } else { Size::Fixed(d as i64) }).collect();
            if made != output.shape {
                return Err(Error::unsupported(format!(
                    "output `{}` has shape {made:?}, expected {:?}",
                    output.name, output.shape
                )));
            }
        }
        Ok(ReadGraph { graph })
    }

    /// Compiles the complete graph; in f32 if the CPU has no bf16 dot products.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn program(&self, precision: Precision) -> Result<RowProgram> {
        RowProgram::of(&self.graph, precision, Kernels::best())
    }

    /// Returns the best split into an item side, computed once per item, and a candidate side; `None` if no split makes
    /// candidates much cheaper. `is_item` is true for each input that belongs to the item; `work` is the cost of
    /// reading each input per candidate, in multiply-adds.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn best_cut(&self, is_item: &[bool], work: &[usize]) -> Result<Option<ItemCut>> {
        split::best_cut(&self.graph, is_item, work)
    }

    /// Returns the cost of reading a candidate's row of `numbers` numbers from a random location in memory, in
    /// multiply-adds.
    pub fn work_of_row(numbers: usize) -> usize {
        split::ROW_WORK + split::NUMBER_WORK * numbers
    }

    /// Compiles the two halves of a split, the item side in f32.
    ///
    /// # Errors
    /// `Invalid` if `cut` is a split of another network; as [`RowProgram::lower`].
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
    /// Compiles an ONNX graph whose inputs are `given` and whose outputs are `outputs`.
    ///
    /// # Errors
    /// `Unsupported` with an operator, attribute or shape that compiled graphs do not have.
    pub fn lower(bytes: &[u8], given: &[DeclaredInput], outputs: &[DeclaredOutput]) -> Result<RowProgram> {
        RowProgram::lower_in(Precision::F32, bytes, given, outputs)
    }

    /// As [`RowProgram::lower`], in the given precision; in f32 if the CPU has no bf16 dot products.
    ///
    /// # Errors
    /// As [`RowProgram::lower`].
    pub fn lower_in(
        precision: Precision,
        bytes: &[u8],
        given: &[DeclaredInput],
        outputs: &[DeclaredOutput],
    ) -> Result<RowProgram> {
        ReadGraph::read(bytes, given, outputs)?.program(precision)
    }

    fn of(graph: &graph::Graph, precision: Precision, kernels: Kernels) -> Result<RowProgram> {
        let narrowed = demand::narrowed(graph)?;
        let graph = narrowed.as_ref().unwrap_or(graph);
        let graphs = [collapse::collapse(graph, false)?, collapse::collapse(graph, true)?];
        let [straight, collapsed] = &graphs;
        // Every processor has int8 products, so that the text describes them; that of bf16 is the text in f32.
        let described = if precision == Precision::Int8 { Precision::Int8 } else { Precision::F32 };
        let (mut straight, mut collapsed) =
            (plan::plan(straight, described, true)?, plan::plan(collapsed, described, true)?);
        if precision == Precision::Int8 {
            // The plans differ by the error of int8, and the result of a row must not depend on the number of rows.
            let is_collapsed = work(&collapsed, INT8_ROWS) < work(&straight, INT8_ROWS);
            if is_collapsed { straight = collapsed.clone() } else { collapsed = straight.clone() }
        }
        let (figures, text) =
            ([&straight, &collapsed].map(Figures::of), text::describe(&straight, &collapsed, precision));
        if precision == Precision::Bf16 && kernels.has_bf16() {
            (straight, collapsed) =
                (plan::plan(&graphs[0], precision, true)?, plan::plan(&graphs[1], precision, true)?);
        }
        #[cfg(feature = "cuda")]
        let unfused = match precision == Precision::Int8 || straight.is_fused() || collapsed.is_fused() {
            true => {
                let has_bf16 = precision == Precision::Bf16 && kernels.has_bf16();
                let precision = if has_bf16 { precision } else { Precision::F32 };
                let [straight, collapsed] = &graphs;
                Some(Box::new([plan::plan(straight, precision, false)?, plan::plan(collapsed, precision, false)?]))
            }
            false => None,
        };
        let pairs = graph.inputs.iter().filter(|input| input.side == ir::Side::Pair);
        Ok(RowProgram {
            kernels,
            straight,
            collapsed,
            #[cfg(feature = "cuda")]
            unfused,
            given: pairs.map(|input| input.shape.iter().product::<usize>()).sum(),
            widths: graph.outputs.iter().map(|&output| graph.values[output].count()).collect(),
            figures,
            text,
        })
    }

    /// Returns the plan with the lowest cost for `rows` rows.
    fn plan(&self, rows: usize) -> &Plan {
        if work(&self.collapsed, rows) < work(&self.straight, rows) { &self.collapsed } else { &self.straight }
    }

    /// Returns the cost of a run over `rows` rows, in multiply-adds or their equivalents.
    pub fn work(&self, rows: usize) -> usize {
        work(self.plan(rows), rows)
    }

    /// Runs over `rows` rows, block after block. `user` has the user inputs in their order; `fill` writes the inputs of
    /// some rows; `done` receives the first row of each block, the number of rows, and their outputs. An error of
    /// `done` ends the run.
    ///
    /// # Errors
    /// Errors of `done`.
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
    /// Returns the figures of the plan with the least work per request, and of the plan with the least work per row.
    pub fn figures(&self) -> [Figures; 2] {
        self.figures
    }

    /// Returns the digest of the text of the plans, 16 hexadecimal digits.
    pub fn digest(&self) -> String {
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(self.to_string().as_bytes()))
    }
}

impl std::fmt::Display for RowProgram {
    /// Prints the plans for few and for many rows; one plan if they are equal.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
pub(crate) mod tests;
