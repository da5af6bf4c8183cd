//! Narrows values to the part that something reads.
//!
//! A tower that returns the state of the last step needs only that step of its last layer, apart from keys and values. A
//! selection along an axis is passed from readers to operands, through operations that compute along this axis independently. A
//! value whose readers select along different axes is computed completely.

use std::collections::{BTreeSet, HashMap};

use super::graph::Graph;
use super::ir::{Id, Op, positions, strides};
use sterling_core::error::{Error, Result};

/// Part of a value that is read.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Demand {
    Nothing,
    Full,
    /// Some indices of an axis, in order.
    Part(usize, Vec<usize>),
}

impl Demand {
    fn join(self, other: Demand) -> Demand {
        match (self, other) {
            (Demand::Nothing, demand) | (demand, Demand::Nothing) => demand,
            (Demand::Part(axis, own), Demand::Part(other, more)) if axis == other => {
                let both: BTreeSet<usize> = own.into_iter().chain(more).collect();
                Demand::Part(axis, both.into_iter().collect())
            }
            _ => Demand::Full,
        }
    }

    fn shape(&self, full: &[usize]) -> Vec<usize> {
        let mut shape = full.to_vec();
        if let Demand::Part(axis, kept) = self {
            shape[*axis] = kept.len();
        }
        shape
    }

    /// Returns the positions of its numbers in the complete value.
    fn positions(&self, full: &[usize]) -> Vec<u32> {
        let own = strides(full);
        let Demand::Part(axis, kept) = self else { return positions(full, &own) };
        let places = positions(&self.shape(full), &own);
        // Places count the kept indices of the axis, instead of the indices themselves.
        let stride = own[*axis];
        let at = |place: u32| (place as usize / stride) % full[*axis];
        places
            .into_iter()
            .map(|place| place - (at(place) * stride) as u32 + (kept[at(place)] * stride) as u32)
            .collect()
    }

    /// Returns the position of a number of the complete value among its numbers.
    fn place(&self, full: &[usize], n: u32) -> Option<u32> {
        let Demand::Part(axis, kept) = self else { return Some(n) };
        let inner: usize = full[axis + 1..].iter().product();
        let (n, size) = (n as usize, full[*axis]);
        let (outer, at, rest) = (n / inner / size, n / inner % size, n % inner);
        let at = kept.binary_search(&at).ok()?;
        Some(((outer * kept.len() + at) * inner + rest) as u32)
    }
}

/// Returns the graph with narrowed values; `None` if every value is read completely.
///
/// # Errors
/// As the operations of a graph.
pub(super) fn narrowed(graph: &Graph) -> Result<Option<Graph>> {
    let mut demands = vec![Demand::Nothing; graph.values.len()];
    for &output in &graph.outputs {
        demands[output] = Demand::Full;
    }
    for id in (0..graph.values.len()).rev() {
        if demands[id] == Demand::Nothing {
            continue;
        }
        let reads = match reads(graph, id, &demands[id]) {
            Some(reads) => reads,
            None => {
                demands[id] = Demand::Full;
                reads_fully(graph, id)
            }
        };
        for (read, demand) in reads {
            let before = std::mem::replace(&mut demands[read], Demand::Nothing);
            demands[read] = before.join(demand);
        }
    }
    match demands.iter().any(|demand| matches!(demand, Demand::Part(..))) {
        true => {
            Narrower { from: graph, demands, to: Graph::new(graph.inputs.clone()), made: Vec::new() }.run().map(Some)
        }
        false => Ok(None),
    }
}

fn reads_fully(graph: &Graph, id: Id) -> Vec<(Id, Demand)> {
    graph.values[id].op.reads().into_iter().map(|read| (read, Demand::Full)).collect()
}

/// Returns the operands of a value with the parts that its own part needs; `None` if it can only be computed completely.
fn reads(graph: &Graph, id: Id, demand: &Demand) -> Option<Vec<(Id, Demand)>> {
    let value = &graph.values[id];
    if let Op::Pick(a, index) = &value.op {
        let index: Vec<u32> = demand.positions(&value.shape).into_iter().map(|n| index[n as usize]).collect();
        return Some(vec![(*a, selected(graph, *a, &index))]);
    }
    let Demand::Part(axis, kept) = demand else { return Some(reads_fully(graph, id)) };
    let rank = value.shape.len();
    // The same axis of an operand whose last axes are those of the result.
    let aligned = |read: Id| {
        let shape = graph.shape(read);
        match (axis + shape.len()).checked_sub(rank) {
            Some(own) if shape[own] == value.shape[*axis] => (read, Demand::Part(own, kept.clone())),
            _ => (read, Demand::Full),
        }
    };
    match &value.op {
        Op::Unary(_, a) => Some(vec![aligned(*a)]),
        Op::Fold(_, a) if axis + 1 < rank => Some(vec![aligned(*a)]),
        Op::Binary(_, a, b) => Some(vec![aligned(*a), aligned(*b)]),
        Op::MatMul(a, b) if axis + 2 == rank => Some(vec![aligned(*a), (*b, Demand::Full)]),
        Op::MatMul(a, b) if axis + 2 < rank => Some(vec![aligned(*a), aligned(*b)]),
        Op::Concat(along, parts) if along != axis => Some(parts.iter().map(|&part| aligned(part)).collect()),
        Op::Reshape(a) => {
            let shape = graph.shape(*a);
            let ahead: usize = value.shape[..*axis].iter().product();
            let is_same = |n: &usize| shape[..*n].iter().product::<usize>() == ahead && shape[*n] == value.shape[*axis];
            let own = (0..shape.len()).find(is_same).filter(|own| graph.values[*a].rows != Some(*own))?;
            Some(vec![(*a, Demand::Part(own, kept.clone()))])
        }
        _ => None,
    }
}

/// Returns the part of a value that has numbers at these positions: at most half of an axis, but the last one, whose numbers are
/// computed together, and the axis of rows.
fn selected(graph: &Graph, id: Id, index: &[u32]) -> Demand {
    let value = &graph.values[id];
    let own = strides(&value.shape);
    let axes =
        (0..value.shape.len().saturating_sub(1)).filter(|axis| value.rows != Some(*axis) && value.shape[*axis] > 1);
    let parts = axes.map(|axis| {
        let kept: BTreeSet<usize> = index.iter().map(|&n| n as usize / own[axis] % value.shape[axis]).collect();
        (axis, kept)
    });
    let least = parts
        .filter(|(axis, kept)| 2 * kept.len() <= value.shape[*axis])
        .min_by_key(|(axis, kept)| kept.len() * value.count() / value.shape[*axis]);
    least.map_or(Demand::Full, |(axis, kept)| Demand::Part(axis, kept.into_iter().collect()))
}

struct Narrower<'a> {
    from: &'a Graph,
    demands: Vec<Demand>,
    to: Graph,
    made: Vec<Option<Id>>,
}

impl Narrower<'_> {
    fn run(mut self) -> Result<Graph> {
        for id in 0..self.from.values.len() {
            let made = match self.demands[id] {
                Demand::Nothing => None,
                _ => Some(self.value(id)?),
            };
            self.made.push(made);
        }
        self.to.outputs = self.from.outputs.iter().map(|&output| self.whole(output)).collect::<Result<_>>()?;
        Ok(self.to)
    }

    fn whole(&self, id: Id) -> Result<Id> {
        self.made[id].ok_or_else(|| Error::internal("a value that is read, but not needed"))
    }

    /// Returns the part of an operand that a reader needs, of the part that was made.
    fn part(&mut self, id: Id, needed: &Demand) -> Result<Id> {
        let made = self.whole(id)?;
        if self.demands[id] == *needed {
            return Ok(made);
        }
        let (full, rows) = (self.from.shape(id), self.from.values[id].rows);
        let place = |n: u32| self.demands[id].place(full, n);
        let index = needed.positions(full).into_iter().map(place).collect::<Option<Vec<_>>>();
        let index = index.ok_or_else(|| Error::internal("a part of a value that was not made"))?;
        self.to.pick(made, index, needed.shape(full), rows)
    }

    fn value(&mut self, id: Id) -> Result<Id> {
        let from = self.from;
        let (value, demand) = (&from.values[id], self.demands[id].clone());
        let (shape, rows) = (demand.shape(&value.shape), value.rows);
        if let Op::Pick(a, index) = &value.op {
            let of = self.demands[*a].clone();
            let full = from.shape(*a);
            let from_made = |n: u32| of.place(full, index[n as usize]);
            let index = demand.positions(&value.shape).into_iter().map(from_made).collect::<Option<Vec<_>>>();
            let index = index.ok_or_else(|| Error::internal("a picked number that was not made"))?;
            let made = self.whole(*a)?;
            return self.to.pick(made, index, shape, rows);
        }
        let needed = reads(from, id, &demand).unwrap_or_else(|| reads_fully(from, id));
        let mut parts = HashMap::new();
        for (read, demand) in &needed {
            parts.insert(*read, self.part(*read, demand)?);
        }
        let part = |read: Id| parts.get(&read).copied();
        let op =
            value.op.over(&mut |read| part(read).ok_or_else(|| Error::internal("an operand that was not made")))?;
        self.to.add(op, shape, rows)
    }
}
