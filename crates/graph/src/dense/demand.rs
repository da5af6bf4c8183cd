//! Narrows values to the elements that are read.
//!
//! A tower that returns the state of the last step needs only that step of its last layer, apart from keys and values.
//! If a reader selects indices of an axis, its operands need only these indices, as long as the operations compute
//! along the axis independently. A value whose readers select along different axes is computed completely.
//!
//! The step may depend on the row, as the last step of a history: a selection by a one-hot vector is passed on to
//! operands in the same way, and happens where a value is needed completely for other reasons, such as the keys of
//! attention.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::graph::Graph;
use super::ir::{Id, Op, Side, Value, positions, strides};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Fold};

/// Part of a value that is read.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Demand {
    Nothing,
    Full,
    /// Some indices of an axis, in order.
    Part(usize, Arc<[usize]>),
    /// The slice at the index of an axis that a one-hot vector marks; zeros if the vector marks no index.
    Row(usize, Id),
}

impl Demand {
    fn join(self, other: Demand) -> Demand {
        match (self, other) {
            (Demand::Nothing, demand) | (demand, Demand::Nothing) => demand,
            (own @ Demand::Row(..), more) if own == more => own,
            (Demand::Part(axis, own), Demand::Part(other, more)) if axis == other => {
                let both: BTreeSet<usize> = own.iter().chain(more.iter()).copied().collect();
                Demand::Part(axis, both.into_iter().collect())
            }
            _ => Demand::Full,
        }
    }

    fn shape(&self, full: &[usize]) -> Vec<usize> {
        let mut shape = full.to_vec();
        match self {
            Demand::Part(axis, retained) => shape[*axis] = retained.len(),
            Demand::Row(axis, _) => shape[*axis] = 1,
            Demand::Nothing | Demand::Full => {}
        }
        shape
    }

    /// Returns the positions of the demanded elements within the value of shape `full`.
    fn positions(&self, full: &[usize]) -> Vec<u32> {
        let own = strides(full);
        let Demand::Part(axis, retained) = self else { return positions(full, &own) };
        let places = positions(&self.shape(full), &own);
        // So far the positions count retained indices of the axis; replaces each count by the retained index.
        let stride = own[*axis];
        let at = |place: u32| (place as usize / stride) % full[*axis];
        places
            .into_iter()
            .map(|place| place - (at(place) * stride) as u32 + (retained[at(place)] * stride) as u32)
            .collect()
    }

    /// Returns the position, among the demanded elements, of number `n` of the value of shape `full`.
    fn place(&self, full: &[usize], n: u32) -> Option<u32> {
        let Demand::Part(axis, retained) = self else { return Some(n) };
        let inner: usize = full[axis + 1..].iter().product();
        let (n, size) = (n as usize, full[*axis]);
        let (outer, at, rest) = (n / inner / size, n / inner % size, n % inner);
        let at = retained.binary_search(&at).ok()?;
        Some(((outer * retained.len() + at) * inner + rest) as u32)
    }
}

/// Returns the graph with narrowed values; `None` if every value is read completely.
///
/// # Errors
/// Errors of graph construction.
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
            // Values that all rows share are computed once.
            let is_shared = matches!(demand, Demand::Row(..)) && graph.values[read].side != Side::Pair;
            let demand = if is_shared { Demand::Full } else { demand };
            let before = std::mem::replace(&mut demands[read], Demand::Nothing);
            demands[read] = before.join(demand);
        }
    }
    if !demands.iter().any(|demand| matches!(demand, Demand::Part(..) | Demand::Row(..))) {
        return Ok(None);
    }
    let made = vec![None; graph.values.len()];
    let to = Graph::new(graph.inputs.clone());
    Narrower { from: graph, demands, to, made, steps: HashMap::new() }.run().map(Some)
}

fn reads_fully(graph: &Graph, id: Id) -> Vec<(Id, Demand)> {
    graph.values[id].op.reads().into_iter().map(|read| (read, Demand::Full)).collect()
}

/// Returns the operands of a value, in the order of [`Op::reads`], with the demanded part of each; `None` if the value can only be
/// computed completely.
fn reads(graph: &Graph, id: Id, demand: &Demand) -> Option<Vec<(Id, Demand)>> {
    let value = &graph.values[id];
    if let (Demand::Full, Some((values, hot))) = (demand, selection(graph, id)) {
        return Some(vec![(values, Demand::Row(graph.shape(values).len() - 2, hot)), (hot, Demand::Full)]);
    }
    if let (Op::Pick(a, index), Demand::Row(axis, hot)) = (&value.op, demand) {
        let demand = match kept_axis(graph, *a, &value.shape, *axis, index)? {
            Some(own) => Demand::Row(own, *hot),
            None => Demand::Full,
        };
        return Some(vec![(*a, demand)]);
    }
    if let Op::Pick(a, index) = &value.op {
        let index: Vec<u32> = demand.positions(&value.shape).into_iter().map(|n| index[n as usize]).collect();
        return Some(vec![(*a, selected(graph, *a, &index))]);
    }
    let axis = match demand {
        Demand::Part(axis, _) | Demand::Row(axis, _) => axis,
        Demand::Nothing | Demand::Full => return Some(reads_fully(graph, id)),
    };
    let along = |own: usize| match demand {
        Demand::Row(_, hot) => Demand::Row(own, *hot),
        Demand::Part(_, retained) => Demand::Part(own, retained.clone()),
        Demand::Nothing | Demand::Full => Demand::Full,
    };
    let is_row = matches!(demand, Demand::Row(..));
    let rank = value.shape.len();
    // Demands the same axis of an operand, if the last axes of operand and result correspond.
    let aligned = |read: Id| {
        let shape = graph.shape(read);
        match (axis + shape.len()).checked_sub(rank) {
            Some(own) if shape[own] == value.shape[*axis] => (read, along(own)),
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
        Op::Concat(_, parts) => {
            let Demand::Part(_, retained) = demand else { return None };
            let mut first = 0;
            let own = |&part: &Id| {
                let size = graph.shape(part)[*axis];
                let own: Vec<usize> =
                    retained.iter().filter_map(|n| n.checked_sub(first)).filter(|n| *n < size).collect();
                first += size;
                let demand = match own.len() {
                    0 => Demand::Nothing,
                    count if count == size => Demand::Full,
                    _ => Demand::Part(*axis, own.into()),
                };
                (part, demand)
            };
            Some(parts.iter().map(own).collect())
        }
        Op::Reshape(a) => {
            let shape = graph.shape(*a);
            let ahead: usize = value.shape[..*axis].iter().product();
            let is_same = |n: &usize| shape[..*n].iter().product::<usize>() == ahead && shape[*n] == value.shape[*axis];
            // A single step may be selected even from the axis that counts the steps of all rows.
            let is_of_steps = |own: usize| graph.values[*a].rows != Some(own) || (is_row && shape[own] > 1);
            let own = (0..shape.len()).find(is_same).filter(|own| is_of_steps(*own))?;
            Some(vec![(*a, along(own))])
        }
        _ => None,
    }
}

/// Recognizes the selection of one step of a sequence by a one-hot vector: the importer builds this form for a gather
/// whose index differs per row. Returns the sequence and the one-hot vector.
fn selection(graph: &Graph, id: Id) -> Option<(Id, Id)> {
    let Op::MatMul(ones, kept) = graph.values[id].op else { return None };
    let Op::Binary(Binary::Keep, hot, values) = graph.values[kept].op else { return None };
    let Op::Binary(Binary::Equal, a, b) = graph.values[root(graph, hot)].op else { return None };
    let [outer @ .., steps, _] = graph.shape(values) else { return None };
    let is_sum = graph.constant(ones).is_some_and(|ones| ones.len() == *steps && ones.iter().all(|x| *x == 1.0));
    let is_row = graph.values[values].rows.is_some_and(|rows| rows < outer.len());
    let is_single = outer.iter().all(|size| *size == 1)
        && graph.values[hot].count() == *steps
        && graph.shape(hot).last() == Some(&1)
        && graph.shape(kept) == graph.shape(values);
    // If all numbers of a constant differ, at most one of them equals a given number.
    let is_one_of = |all: Id, one: Id| graph.values[one].count() == 1 && graph.constant(all).is_some_and(are_different);
    let is_hot = is_one_of(a, b) || is_one_of(b, a);
    (is_sum && is_row && is_single && is_hot && *steps > 1).then_some((values, hot))
}

fn are_different(numbers: &[f32]) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.windows(2).all(|two| two[0] != two[1])
}

fn root(graph: &Graph, mut id: Id) -> Id {
    while let Op::Reshape(of) = graph.values[id].op {
        id = of;
    }
    id
}

/// Finds the axis of `a` that `axis` of its rearrangement `index` runs along, index by index. `Some(None)`: the
/// rearrangement is the same for all indices of `axis`. `None`: neither is the case.
fn kept_axis(graph: &Graph, a: Id, shape: &[usize], axis: usize, index: &[u32]) -> Option<Option<usize>> {
    let stride = strides(shape)[axis];
    let at = |n: usize| n / stride % shape[axis];
    let first = |n: usize| index[n - at(n) * stride] as usize;
    if (0..index.len()).all(|n| index[n] as usize == first(n)) {
        return Some(None);
    }
    let from = &graph.values[a];
    let own = strides(&from.shape);
    let is_it = |&axis_of_a: &usize| {
        let stride = own[axis_of_a];
        let is_first = |n: usize| (first(n) / stride).is_multiple_of(from.shape[axis_of_a]);
        from.shape[axis_of_a] == shape[axis]
            && from.rows != Some(axis_of_a)
            && (0..index.len()).all(|n| is_first(n) && index[n] as usize == first(n) + at(n) * stride)
    };
    (0..from.shape.len()).find(is_it).map(Some)
}

/// Returns the part of a value that contains the elements `index`: at most half of an axis, else the full value. The
/// last axis, whose numbers are computed together, and the axis of rows are not narrowed.
fn selected(graph: &Graph, id: Id, index: &[u32]) -> Demand {
    let value = &graph.values[id];
    let own = strides(&value.shape);
    let axes =
        (0..value.shape.len().saturating_sub(1)).filter(|axis| value.rows != Some(*axis) && value.shape[*axis] > 1);
    let parts = axes.map(|axis| {
        let retained: BTreeSet<usize> = index.iter().map(|&n| n as usize / own[axis] % value.shape[axis]).collect();
        (axis, retained)
    });
    let least = parts
        .filter(|(axis, retained)| 2 * retained.len() <= value.shape[*axis])
        .min_by_key(|(axis, retained)| retained.len() * value.count() / value.shape[*axis]);
    least.map_or(Demand::Full, |(axis, retained)| Demand::Part(axis, retained.into_iter().collect()))
}

struct Narrower<'a> {
    from: &'a Graph,
    demands: Vec<Demand>,
    to: Graph,
    made: Vec<Option<Id>>,
    /// Steps that were selected, by value, axis and one-hot vector.
    steps: HashMap<(Id, usize, Id), Id>,
}

impl Narrower<'_> {
    fn run(mut self) -> Result<Graph> {
        for id in 0..self.from.values.len() {
            if self.demands[id] != Demand::Nothing {
                self.whole(id)?;
            }
        }
        self.to.outputs = self.from.outputs.clone().into_iter().map(|id| self.whole(id)).collect::<Result<_>>()?;
        Ok(self.to)
    }

    /// Returns the demanded part of a value. One-hot vectors may come after values that they select from.
    fn whole(&mut self, id: Id) -> Result<Id> {
        if let Some(made) = self.made[id] {
            return Ok(made);
        }
        if self.demands[id] == Demand::Nothing {
            return Err(Error::internal("a value is read that the demand analysis left out"));
        }
        let made = self.value(id)?;
        self.made[id] = Some(made);
        Ok(made)
    }

    /// Selects the slice of a value at the index along `axis` that the one-hot vector `hot` marks.
    fn selected(&mut self, id: Id, axis: usize, hot: Id) -> Result<Id> {
        let (made, hot) = (self.whole(id)?, self.whole(hot)?);
        let Value { shape, rows, side, .. } = &self.from.values[id];
        let (steps, is_pair) = (shape[axis], *side == Side::Pair);
        let sizes = vec![1, shape[..axis].iter().product(), steps, shape[axis + 1..].iter().product()];
        let values = self.to.reshape(made, sizes, is_pair.then_some(0))?;
        let hot = self.to.reshape(hot, vec![1, 1, steps, 1], Some(0))?;
        let kept = self.to.binary(Binary::Keep, hot, values)?;
        let ones = self.to.number(vec![1, steps], vec![1.0; steps])?;
        let made = self.to.matmul(ones, kept)?;
        let mut shape = shape.clone();
        shape[axis] = 1;
        // The step of a shared value differs from row to row, and has the axes of the value.
        self.to.reshape(made, shape, rows.or(Some(axis)))
    }

    /// Returns the part of an operand that a reader needs, selected from the computed part.
    fn part(&mut self, id: Id, needed: &Demand) -> Result<Id> {
        let made = self.whole(id)?;
        if self.demands[id] == *needed {
            return Ok(made);
        }
        if let Demand::Row(axis, hot) = *needed {
            let key = (id, axis, hot);
            if let Some(&step) = self.steps.get(&key) {
                return Ok(step);
            }
            let step = self.selected(id, axis, hot)?;
            self.steps.insert(key, step);
            return Ok(step);
        }
        let (full, rows) = (self.from.shape(id), self.from.values[id].rows);
        let place = |n: u32| self.demands[id].place(full, n);
        let index = needed.positions(full).into_iter().map(place).collect::<Option<Vec<_>>>();
        let index = index.ok_or_else(|| Error::internal("a read element of a value was not computed"))?;
        self.to.pick(made, index, needed.shape(full), rows)
    }

    fn value(&mut self, id: Id) -> Result<Id> {
        let from = self.from;
        let (value, demand) = (&from.values[id], self.demands[id].clone());
        let (shape, rows) = (demand.shape(&value.shape), value.rows);
        if let (Demand::Full, Some((values, hot))) = (&demand, selection(from, id)) {
            let step = self.part(values, &Demand::Row(from.shape(values).len() - 2, hot))?;
            let step = self.to.reshape(step, shape.clone(), rows)?;
            if self.demands[values] == Demand::Full {
                return Ok(step);
            }
            // The result must be zeros if no step is selected, because layers turn zeros into other numbers.
            let (hot, steps) = (self.whole(hot)?, from.values[hot].count());
            let hot = self.to.reshape(hot, vec![1, steps], Some(0))?;
            let is_any = self.to.fold(Fold::Sum, hot, &[1])?;
            let is_any = self.to.reshape(is_any, vec![1; shape.len()], rows)?;
            return self.to.binary(Binary::Keep, is_any, step);
        }
        if let (Op::Pick(a, index), Demand::Row(axis, _)) = (&value.op, &demand) {
            let needed = reads(from, id, &demand).unwrap_or_default();
            let [(_, needed)] = &needed[..] else { return Err(Error::internal("a rearrangement has one operand")) };
            let part = self.part(*a, needed)?;
            let full = from.shape(*a);
            let own = match needed {
                Demand::Row(own, _) => Demand::Part(*own, [0].into()),
                _ => Demand::Full,
            };
            let first = Demand::Part(*axis, [0].into()).positions(&value.shape).into_iter();
            let index = first.map(|n| own.place(full, index[n as usize])).collect::<Option<Vec<_>>>();
            let index = index.ok_or_else(|| Error::internal("a selected element of a value was not computed"))?;
            return self.to.pick(part, index, shape, rows);
        }
        if let Op::Pick(a, index) = &value.op {
            let of = self.demands[*a].clone();
            let full = from.shape(*a);
            let from_made = |n: u32| of.place(full, index[n as usize]);
            let index = demand.positions(&value.shape).into_iter().map(from_made).collect::<Option<Vec<_>>>();
            let index = index.ok_or_else(|| Error::internal("a selected element of a value was not computed"))?;
            let made = self.whole(*a)?;
            return self.to.pick(made, index, shape, rows);
        }
        let needed = reads(from, id, &demand).unwrap_or_else(|| reads_fully(from, id));
        if let (Op::Concat(along, _), Demand::Part(axis, _)) = (&value.op, &demand)
            && along == axis
        {
            let read = needed.iter().filter(|(_, demand)| *demand != Demand::Nothing);
            let parts = read.map(|(read, demand)| self.part(*read, demand)).collect::<Result<Vec<_>>>()?;
            return if let [one] = parts[..] { Ok(one) } else { self.to.concat(*axis, &parts) };
        }
        // Demands are matched by operand position: the operands of `x @ x` are different parts of one value.
        let parts = needed.iter().map(|(read, demand)| self.part(*read, demand)).collect::<Result<Vec<_>>>()?;
        let mut parts = parts.into_iter();
        let op = value.op.over(&mut |_| parts.next().ok_or_else(|| Error::internal("an operand was not computed")))?;
        self.to.add(op, shape, rows)
    }
}
