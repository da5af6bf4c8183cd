//! Item-side precomputation: computes the part of a graph that depends on the item alone once per item instead of once per
//! candidate.
//!
//! A value is *the item's* if it depends only on inputs of the item and on constants. An [`ItemCut`] names some of
//! these values: one half of the graph computes them from items, and the other half reads them as inputs, besides other
//! inputs of a candidate.
//!
//! Not every cut pays off. Stored values must be read from memory per candidate, and a product that would be fused with
//! the next product (`collapse`) is free. So [`best_cut`] compiles a few cuts and compares their costs: at the values
//! that the other half reads, at the narrowest value of the linear chain before them, and at the start of this chain,
//! after the last nonlinear operation.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::collapse::collapse;
use super::graph::Graph;
use super::ir::{GraphInput, Id, Op, Side, Value};
use super::plan::plan;
use super::steps::Precision;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Ids of the values that are stored per item, ascending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ItemCut(Vec<Id>);

/// Cost of one random access to the stored values of an item, and cost per stored number, in multiply-adds.
pub(super) const ROW_WORK: usize = 1000;
pub(super) const NUMBER_WORK: usize = 10;
/// Number of candidates over which the cost per request is divided.
const CANDIDATES: usize = 1000;
/// A cut must reduce the cost of a candidate by at least 1 / `GAIN`, because the stored values take memory.
const GAIN: usize = 10;
/// Maximum count of numbers stored per item. Without this limit, layers over a sequence could store many times the
/// item's own memory.
const WIDTH_MAX: usize = 1024;
/// Maximum number of item values read by the other half up to which the options of each value are tried one by one.
const EDGES_MAX: usize = 12;

/// An independent part of a graph, with the indices of its inputs among the inputs of the complete graph.
#[derive(Debug)]
pub(super) struct Half {
    pub(super) graph: Graph,
    pub(super) inputs: Vec<usize>,
}

impl Half {
    /// Returns a digest of the half's computation, 32 hexadecimal digits: operations, constants, and which values of the complete
    /// graph are computed from which inputs.
    pub(super) fn digest(&self, cut: &ItemCut) -> String {
        let mut hash = Xxh3::new();
        hash.update(format!("{:?} {:?} {:?} ", cut.0, self.inputs, self.graph.outputs).as_bytes());
        for Value { op, shape, rows, .. } in &self.graph.values {
            match op {
                Op::Constant(numbers) => {
                    hash.update(b"Constant");
                    numbers.iter().for_each(|x| hash.update(&x.to_le_bytes()));
                }
                op => hash.update(format!("{op:?}").as_bytes()),
            }
            hash.update(format!(" {shape:?} {rows:?};").as_bytes());
        }
        format!("{:032x}", hash.digest128())
    }
}

/// Both halves of a graph, and the number of stored numbers per item.
#[derive(Debug)]
pub(super) struct Split {
    pub(super) item: Half,
    pub(super) candidates: Half,
    pub(super) width: usize,
}

/// Kind of inputs that a value depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Dependency {
    Nobodys,
    Items,
    Others,
}

fn dependencies(graph: &Graph, is_item: &[bool]) -> Vec<Dependency> {
    let mut all: Vec<Dependency> = Vec::with_capacity(graph.values.len());
    for value in &graph.values {
        let own = match &value.op {
            Op::Inputs(n) if is_item.get(*n) == Some(&true) => Dependency::Items,
            Op::Inputs(_) => Dependency::Others,
            op => op.reads().iter().map(|&read| all[read]).max().unwrap_or(Dependency::Nobodys),
        };
        all.push(own);
    }
    all
}

/// Splits a graph into its halves.
///
/// # Errors
/// `Invalid` if `cut` belongs to another graph.
pub(super) fn split(graph: &Graph, is_item: &[bool], cut: &ItemCut) -> Result<Split> {
    let dependencies = dependencies(graph, is_item);
    let is_input = |id: Id| matches!(graph.values[id].op, Op::Inputs(_));
    let fits = |&id: &Id| dependencies.get(id) == Some(&Dependency::Items) && !is_input(id);
    if cut.0.is_empty() || !cut.0.is_sorted_by(|a, b| a < b) || !cut.0.iter().all(fits) {
        return Err(Error::invalid(format!("the values {:?} are not a cut of this graph", cut.0)));
    }
    let of_user = |n: usize| graph.inputs[n].side == Side::User;
    Ok(Split {
        item: half(graph, &cut.0, &[], &|_| false)?,
        candidates: half(graph, &graph.outputs, &cut.0, &of_user)?,
        width: cut.0.iter().map(|&id| graph.values[id].count()).sum(),
    })
}

/// Extracts the subgraph that computes `outputs`. The values `given` become inputs, after the user inputs and before
/// the other inputs. Inputs without readers remain if `keeps` returns true.
fn half(graph: &Graph, outputs: &[Id], given: &[Id], keeps: &dyn Fn(usize) -> bool) -> Result<Half> {
    let needed = graph.needed(outputs, given);
    let is_read = |n: usize| {
        let mut values = graph.values.iter().zip(&needed);
        values.any(|(value, needed)| *needed && matches!(value.op, Op::Inputs(input) if input == n))
    };
    let retained = |n: &usize| keeps(*n) || is_read(*n);
    let (of_user, of_rows): (Vec<usize>, Vec<usize>) =
        (0..graph.inputs.len()).filter(retained).partition(|&n| graph.inputs[n].side == Side::User);
    let as_input = |&id: &Id| {
        let value = &graph.values[id];
        GraphInput { side: Side::Pair, shape: value.shape.clone(), rows: value.rows }
    };
    let own = |of: &[usize]| of.iter().map(|&n| graph.inputs[n].clone()).collect::<Vec<_>>();
    let inputs = [own(&of_user), given.iter().map(as_input).collect(), own(&of_rows)].concat();
    let place = |n: usize| {
        let user = of_user.iter().position(|&other| other == n);
        user.or_else(|| Some(of_user.len() + given.len() + of_rows.iter().position(|&other| other == n)?))
    };
    let missing = || Error::internal("a half of a split graph reads a value of the other half");
    let mut to = Graph::new(inputs);
    let mut made: Vec<Option<Id>> = vec![None; graph.values.len()];
    for id in (0..graph.values.len()).filter(|&id| needed[id]) {
        let value = &graph.values[id];
        made[id] = Some(match (given.iter().position(|&other| other == id), &value.op) {
            (Some(at), _) => to.input(of_user.len() + at)?,
            (None, Op::Inputs(n)) => to.input(place(*n).ok_or_else(missing)?)?,
            (None, op) => {
                let op = op.over(&mut |read| made[read].ok_or_else(missing))?;
                to.add(op, value.shape.clone(), value.rows)?
            }
        });
    }
    to.outputs = outputs.iter().map(|&id| made[id].ok_or_else(missing)).collect::<Result<_>>()?;
    Ok(Half { graph: to, inputs: [of_user, of_rows].concat() })
}

/// Returns the cut with the lowest cost per candidate; `None` if no cut reduces the cost enough. `work` is the cost per
/// candidate of reading each input.
pub(super) fn best_cut(graph: &Graph, is_item: &[bool], work: &[usize]) -> Result<Option<ItemCut>> {
    let seeker = Seeker { graph, dependencies: dependencies(graph, is_item), is_item, work };
    let edges: Vec<Vec<Vec<Id>>> = seeker.edges().into_iter().map(|edge| seeker.options(edge)).collect();
    if edges.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    let complete = seeker.cost(&[])?;
    let mut best = (complete, vec![None; edges.len()]);
    let weigh = |choice: Vec<Option<usize>>, best: &mut (usize, Vec<Option<usize>>)| -> Result<()> {
        let cost = seeker.cost(&taken(&edges, &choice))?;
        if cost < best.0 {
            *best = (cost, choice);
        }
        Ok(())
    };
    // Tries all edges with their first option, and with their last option, then each edge alone.
    weigh(edges.iter().map(|options| (!options.is_empty()).then_some(0)).collect(), &mut best)?;
    weigh(edges.iter().map(|options| options.len().checked_sub(1)).collect(), &mut best)?;
    let tried = if edges.len() <= EDGES_MAX { edges.len() } else { 0 };
    for edge in 0..tried {
        for option in 0..edges[edge].len() {
            let mut choice = vec![None; edges.len()];
            choice[edge] = Some(option);
            weigh(choice, &mut best)?;
        }
    }
    for edge in 0..tried {
        for option in (0..edges[edge].len()).map(Some).chain([None]) {
            let mut choice = best.1.clone();
            if choice[edge] != option {
                choice[edge] = option;
                weigh(choice, &mut best)?;
            }
        }
    }
    let (cost, choice) = best;
    let cut = seeker.read(&taken(&edges, &choice));
    Ok((!cut.is_empty() && cost + complete / GAIN <= complete).then_some(ItemCut(cut)))
}

/// Returns the values of the chosen options.
fn taken(edges: &[Vec<Vec<Id>>], choice: &[Option<usize>]) -> Vec<Id> {
    let chosen = edges.iter().zip(choice).filter_map(|(options, choice)| choice.map(|n| &options[n]));
    let mut all: Vec<Id> = chosen.flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

struct Seeker<'a> {
    graph: &'a Graph,
    dependencies: Vec<Dependency>,
    is_item: &'a [bool],
    work: &'a [usize],
}

impl Seeker<'_> {
    /// Returns the item's values that values of the other half read, or that are outputs.
    fn edges(&self) -> Vec<Id> {
        let needed = self.graph.needed(&self.graph.outputs, &[]);
        let mut is_edge = vec![false; self.dependencies.len()];
        self.graph.outputs.iter().for_each(|&id| is_edge[id] = true);
        for id in (0..self.dependencies.len()).filter(|&id| needed[id] && self.dependencies[id] == Dependency::Others) {
            self.graph.values[id].op.reads().into_iter().for_each(|read| is_edge[read] = true);
        }
        let is_made = |id: Id| !matches!(self.graph.values[id].op, Op::Inputs(_));
        (0..is_edge.len())
            .filter(|&id| is_edge[id] && self.dependencies[id] == Dependency::Items && is_made(id))
            .collect()
    }

    /// Returns the options for cutting at a value: the value itself, the narrowest value of the linear chain that ends
    /// in it, and the bases of that chain. Returns no options if the value is linear in the inputs and wider than
    /// the inputs.
    fn options(&self, edge: Id) -> Vec<Vec<Id>> {
        let count = |id: Id| self.graph.values[id].count();
        let mut narrowest = edge;
        let mut at = edge;
        while let Some([next]) = self.linear_in(at).as_deref().and_then(|reads| <&[Id; 1]>::try_from(reads).ok()) {
            at = *next;
            if count(at) < count(narrowest) && !matches!(self.graph.values[at].op, Op::Inputs(_)) {
                narrowest = at;
            }
        }
        let (bases, inputs) = self.bases(edge);
        let read: usize = inputs.iter().map(|&id| count(id)).sum();
        if bases.is_empty() && count(narrowest) > read {
            return Vec::new();
        }
        let mut options = vec![vec![edge], vec![narrowest], bases];
        options.retain(|option| !option.is_empty());
        options.dedup();
        options
    }

    /// Returns where the chain of linear values that ends at `edge` starts: nonlinear values, and inputs.
    fn bases(&self, edge: Id) -> (Vec<Id>, Vec<Id>) {
        let (mut bases, mut inputs, mut seen, mut ahead) = (Vec::new(), Vec::new(), vec![false; edge + 1], vec![edge]);
        while let Some(id) = ahead.pop() {
            if std::mem::replace(&mut seen[id], true) {
                continue;
            }
            match (self.linear_in(id), &self.graph.values[id].op) {
                (Some(reads), _) => ahead.extend(reads),
                (None, Op::Inputs(_)) => inputs.push(id),
                (None, _) => bases.push(id),
            }
        }
        bases.sort_unstable();
        (bases, inputs)
    }

    /// Returns the item's values in which `id` is linear; `None` if `id` is nonlinear or an input.
    fn linear_in(&self, id: Id) -> Option<Vec<Id>> {
        let is_items = |id: &Id| self.dependencies[*id] == Dependency::Items;
        let op = &self.graph.values[id].op;
        let reads: Vec<Id> = op.reads().into_iter().filter(is_items).collect();
        let is_linear = match op {
            Op::Reshape(_) | Op::Pick(..) | Op::Concat(..) | Op::Fold(Fold::Sum, _) | Op::Unary(Unary::Neg, _) => true,
            Op::Binary(Binary::Add | Binary::Sub, ..) => true,
            Op::Binary(Binary::Mul, ..) | Op::MatMul(..) => reads.len() == 1,
            Op::Binary(Binary::Div, _, by) => !is_items(by),
            _ => false,
        };
        (is_linear && !reads.is_empty()).then_some(reads)
    }

    /// Returns the values of `cut` that the other half reads.
    fn read(&self, cut: &[Id]) -> Vec<Id> {
        let needed = self.graph.needed(&self.graph.outputs, cut);
        cut.iter().copied().filter(|&id| needed[id]).collect()
    }

    /// Returns the cost per candidate with a cut, in multiply-adds; `usize::MAX` if too many numbers would be stored.
    fn cost(&self, cut: &[Id]) -> Result<usize> {
        let cut = ItemCut(self.read(cut));
        let halves = match cut.0.is_empty() {
            true => None,
            false => Some(split(self.graph, self.is_item, &cut)?),
        };
        let reading = match &halves {
            None => self.work.iter().sum(),
            Some(halves) if halves.width > WIDTH_MAX => return Ok(usize::MAX),
            Some(halves) => {
                let read: usize = halves.candidates.inputs.iter().map(|&n| self.work[n]).sum();
                ROW_WORK + NUMBER_WORK * halves.width + read
            }
        };
        let graph = halves.as_ref().map_or(self.graph, |halves| &halves.candidates.graph);
        let plans = [false, true].map(|is_eager| plan(&collapse(graph, is_eager)?, Precision::F32, false));
        let work = plans.into_iter().map(|plan| plan.map(|plan| plan.row_work + plan.user_work / CANDIDATES));
        let work = work.collect::<Result<Vec<usize>>>()?.into_iter().min().unwrap_or(0);
        Ok(work + reading)
    }
}
