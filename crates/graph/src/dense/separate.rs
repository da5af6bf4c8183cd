//! Separates numbers of row values that depend on the user from numbers that depend on candidates.
//!
//! Rerankers expand the user's fields to all candidates, concatenate them with those of the item, and multiply the result. A
//! row value is tracked here as *segments*: numbers of the user, of the row alone, and of both. Rearrangements and element-wise
//! operations are applied to each segment alone. A product or a sum over several segments becomes the sum of one result per segment,
//! and matrix rows of one segment are multiplied separately. The user's segments are then computed once for all
//! candidates, and those of the row alone may be computed once per item (`split`). Other operations read the
//! *complete* value, in which all segments are joined.
//! This changes the order of sums, which costs a rounding or two.
//!
//! This file tracks and joins segments; `separate/reductions.rs` computes products and sums over them.

mod reductions;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::graph::{Graph, NUMBERS_MAX};
use super::ir::{Id, Op, Side, Value, broadcast_strides, positions};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::Binary;

/// Inputs that a segment depends on. Segments of the same origin are joined when values are concatenated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    User,
    Row,
    Both,
}

/// Segment: numbers of a value that have the same origin.
#[derive(Clone, Debug)]
struct Segment {
    /// Flat value of the new graph: `[count]` if only the user's inputs determine it, else `[1, count]`.
    value: Id,
    /// Position of each number in the value that all segments make up.
    at: Arc<[u32]>,
}

/// Maximum number of operations through which the numbers of a segment are traced back.
const TAKEN_MAX: usize = 32;

/// Returns the graph with separated values; `None`, so that value ids stay unchanged, if no product or sum of the
/// user's numbers can be computed separately.
///
/// # Errors
/// Errors of graph construction.
pub(super) fn separated(graph: &Graph) -> Result<Option<Graph>> {
    let has = |side: Side| graph.inputs.iter().any(|input| input.side == side);
    if !has(Side::User) || !has(Side::Pair) {
        return Ok(None);
    }
    let mut readers = vec![0; graph.values.len()];
    let needed = graph.needed(&graph.outputs, &[]);
    let live = (0..needed.len()).filter(|&id| needed[id]);
    live.flat_map(|id| graph.values[id].op.reads())
        .chain(graph.outputs.iter().copied())
        .for_each(|id| readers[id] += 1);
    let mut separator = Separator {
        from: graph,
        to: Graph::new(graph.inputs.clone()),
        made: vec![None; graph.values.len()],
        segments: vec![None; graph.values.len()],
        is_apart: vec![false; graph.values.len()],
        readers,
        origins: Vec::new(),
        is_any_apart: false,
        stored: 0,
    };
    for id in (0..needed.len()).filter(|&id| needed[id]) {
        separator.visit(id)?;
    }
    if !separator.is_any_apart {
        return Ok(None);
    }
    separator.to.outputs = graph.outputs.iter().map(|&output| separator.make(output)).collect::<Result<_>>()?;
    Ok(Some(separator.to))
}

struct Separator<'a> {
    from: &'a Graph,
    to: Graph,
    /// Per old value, the equal value of the new graph with its segments joined, in the old shape, if it was created.
    made: Vec<Option<Id>>,
    segments: Vec<Option<Vec<Segment>>>,
    /// Old values that are only computed as segments, because they are products of segments.
    is_apart: Vec<bool>,
    readers: Vec<usize>,
    /// Origins of the first values of the new graph.
    origins: Vec<Origin>,
    /// True if some product or sum over the user's numbers is computed once for all candidates.
    is_any_apart: bool,
    /// Count of positions in all segments.
    stored: usize,
}

fn missing() -> Error {
    Error::internal("a segment has a number that its value does not have")
}

impl Separator<'_> {
    fn visit(&mut self, id: Id) -> Result<()> {
        let value = &self.from.values[id];
        if value.side == Side::Pair {
            self.segments[id] = match &value.op {
                Op::Pick(a, index) if self.from.values[*a].side != Side::Pair => {
                    Some(self.expanded(*a, index.to_vec())?)
                }
                Op::Pick(a, index) => self.picked(*a, index)?,
                Op::Reshape(a) => self.segments[*a].clone(),
                Op::Concat(axis, parts) => self.concatenated(id, *axis, parts)?,
                Op::Unary(f, a) => self.mapped(*a, |graph, x| graph.unary(*f, x))?,
                Op::Binary(f, a, b) => self.binary(id, *f, *a, *b)?,
                Op::Fold(f, a) => self.folded(id, *f, *a)?,
                Op::MatMul(a, b) => self.product(id, *a, *b)?,
                _ => None,
            };
            // Positions that no other value shares are new.
            let new = self.segments[id].iter().flatten().filter(|segment| Arc::strong_count(&segment.at) == 1);
            self.stored += new.map(|segment| segment.at.len()).sum::<usize>();
            if self.stored > NUMBERS_MAX {
                return Err(Error::unsupported(format!("more than {NUMBERS_MAX} positions of separated numbers")));
            }
            let is_made_apart = |read: &Id| self.is_apart[*read] && self.made[*read].is_none();
            self.is_apart[id] = self.segments[id].is_some()
                && match &value.op {
                    Op::MatMul(_, b) => self.from.values[*b].side != Side::Pair,
                    Op::Fold(..) => true,
                    op @ (Op::Unary(..) | Op::Binary(..) | Op::Reshape(_)) => op.reads().iter().any(is_made_apart),
                    _ => false,
                };
        }
        Ok(())
    }

    /// Returns the value of the new graph that equals an old value, with all segments joined. Operands are created
    /// first, without recursion, because graphs may be deep.
    fn make(&mut self, id: Id) -> Result<Id> {
        let mut stack = vec![id];
        while let Some(&next) = stack.last() {
            let missing: Vec<Id> = match self.made[next].is_some() || self.is_joined(next) {
                true => Vec::new(),
                false => {
                    self.from.values[next].op.reads().into_iter().filter(|&read| self.made[read].is_none()).collect()
                }
            };
            if !missing.is_empty() {
                stack.extend(missing.into_iter().rev());
                continue;
            }
            if self.made[next].is_none() {
                self.made[next] = Some(self.made_of_operands(next)?);
            }
            stack.pop();
        }
        self.made[id].ok_or_else(missing)
    }

    fn is_joined(&self, id: Id) -> bool {
        self.is_apart[id] && self.segments[id].is_some()
    }

    fn made_of_operands(&mut self, id: Id) -> Result<Id> {
        let Value { op, shape, rows, .. } = self.from.values[id].clone();
        match self.segments[id].clone() {
            Some(segments) if self.is_apart[id] => {
                let joined = self.joined(&segments)?;
                self.to.reshape(joined, shape, rows)
            }
            _ => {
                let op = op.over(&mut |read| self.made[read].ok_or_else(missing))?;
                self.add(op, shape, rows)
            }
        }
    }

    /// Adds an operation; a selection of a selection becomes one selection.
    fn add(&mut self, op: Op, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        match op {
            Op::Pick(a, index) => self.to.pick(a, index.to_vec(), shape, rows),
            Op::Reshape(a) => self.to.reshape(a, shape, rows),
            op => self.to.add(op, shape, rows),
        }
    }

    fn origin(&mut self, id: Id) -> Origin {
        while self.origins.len() <= id {
            let value = &self.to.values[self.origins.len()];
            let of_reads: Vec<Origin> = value
                .op
                .reads()
                .iter()
                .filter(|&&read| self.to.values[read].side != Side::Constant)
                .map(|&read| self.origins[read])
                .collect();
            let own = match value.side {
                Side::Pair if of_reads.iter().all(|origin| *origin == Origin::Row) => Origin::Row,
                Side::Pair => Origin::Both,
                _ => Origin::User,
            };
            self.origins.push(own);
        }
        self.origins[id]
    }

    /// Returns numbers of a flat value.
    fn pick(&mut self, value: Id, index: Vec<u32>) -> Result<Id> {
        match self.to.values[value].side {
            Side::Pair => {
                let shape = vec![1, index.len()];
                self.to.pick(value, index, shape, Some(0))
            }
            _ => {
                let shape = vec![index.len()];
                self.to.pick(value, index, shape, None)
            }
        }
    }

    fn flat(&mut self, value: Id) -> Result<Id> {
        let count = self.to.values[value].count();
        match self.to.values[value].side {
            Side::Pair => self.to.reshape(value, vec![1, count], Some(0)),
            _ => self.to.reshape(value, vec![count], None),
        }
    }

    /// Returns a flat value as `[runs, width]`.
    fn table(&mut self, value: Id, runs: usize) -> Result<Id> {
        let width = self.to.values[value].count() / runs.max(1);
        match self.to.values[value].side {
            Side::Pair => self.to.reshape(value, vec![1, runs, width], Some(0)),
            _ => self.to.reshape(value, vec![runs, width], None),
        }
    }

    fn expanded(&mut self, a: Id, index: Vec<u32>) -> Result<Vec<Segment>> {
        let (made, count) = (self.make(a)?, index.len());
        let value = self.to.pick(made, index, vec![count], None)?;
        Ok(vec![Segment { value, at: (0..count as u32).collect() }])
    }

    /// Joins all segments of a value to one flat value.
    fn joined(&mut self, segments: &[Segment]) -> Result<Id> {
        let mut parts = Vec::new();
        for segment in segments {
            parts.push(match self.to.values[segment.value].side {
                Side::Pair => segment.value,
                _ => {
                    let count = segment.at.len();
                    self.to.pick(segment.value, (0..count as u32).collect(), vec![1, count], Some(0))?
                }
            });
        }
        let all = if let [one] = parts[..] { one } else { self.to.concat(1, &parts)? };
        let mut index = vec![0; segments.iter().map(|segment| segment.at.len()).sum()];
        for (n, &at) in segments.iter().flat_map(|segment| segment.at.iter()).enumerate() {
            *index.get_mut(at as usize).ok_or_else(missing)? = n as u32;
        }
        self.pick(all, index)
    }

    /// Returns the segments of the numbers at `index` of a value.
    fn picked(&mut self, a: Id, index: &[u32]) -> Result<Option<Vec<Segment>>> {
        let Some(segments) = self.segments[a].clone() else { return Ok(None) };
        // The readers of number `n` are those from `ends[n - 1]` to `ends[n]`.
        let mut ends = vec![0; self.from.values[a].count()];
        index.iter().for_each(|&at| ends[at as usize] += 1);
        let mut all = 0;
        for end in &mut ends {
            (*end, all) = (all, all + *end);
        }
        let mut readers = vec![0; index.len()];
        for (n, &at) in index.iter().enumerate() {
            readers[ends[at as usize]] = n as u32;
            ends[at as usize] += 1;
        }
        let readers_of = |place: usize| &readers[place.checked_sub(1).map_or(0, |before| ends[before])..ends[place]];
        let mut made = Vec::new();
        for segment in segments {
            // Numbers stay in the order of the segment, so that a permutation costs nothing.
            let (mut own, mut at) = (Vec::new(), Vec::new());
            for (n, place) in segment.at.iter().enumerate() {
                for &reader in readers_of(*place as usize) {
                    own.push(n as u32);
                    at.push(reader);
                }
            }
            if !own.is_empty() {
                made.push(Segment { value: self.pick(segment.value, own)?, at: at.into() });
            }
        }
        Ok(Some(made))
    }

    fn concatenated(&mut self, id: Id, axis: usize, parts: &[Id]) -> Result<Option<Vec<Segment>>> {
        if parts.iter().all(|&part| self.segments[part].is_none()) {
            return Ok(None);
        }
        let inner = |id: Id| self.from.shape(id)[axis..].iter().product::<usize>();
        let (width, mut first) = (inner(id), 0);
        let mut of_origins: BTreeMap<Origin, Vec<Segment>> = BTreeMap::new();
        for &part in parts {
            let own = self.from.shape(part)[axis..].iter().product::<usize>();
            let segments = match self.segments[part].clone() {
                Some(segments) => segments,
                None => {
                    let made = self.make(part)?;
                    let (value, count) = (self.flat(made)?, self.from.values[part].count() as u32);
                    vec![Segment { value, at: (0..count).collect() }]
                }
            };
            for Segment { value, at } in segments {
                let place = |&n: &u32| ((n as usize / own) * width + first + n as usize % own) as u32;
                let at = at.iter().map(place).collect();
                of_origins.entry(self.origin(value)).or_default().push(Segment { value, at });
            }
            first += own;
        }
        let mut joined = Vec::new();
        for segments in of_origins.into_values() {
            let values: Vec<Id> = segments.iter().map(|segment| segment.value).collect();
            let value = match (&values[..], self.to.values[values[0]].side) {
                ([one], _) => *one,
                (all, Side::Pair) => self.to.concat(1, all)?,
                (all, _) => self.to.concat(0, all)?,
            };
            joined
                .push(Segment { value, at: segments.iter().flat_map(|segment| segment.at.iter().copied()).collect() });
        }
        Ok(Some(joined))
    }

    fn mapped(&mut self, a: Id, f: impl Fn(&mut Graph, Id) -> Result<Id>) -> Result<Option<Vec<Segment>>> {
        let Some(segments) = self.segments[a].clone() else { return Ok(None) };
        if segments.iter().all(|segment| self.origin(segment.value) == Origin::Both) {
            return Ok(None);
        }
        let map = |Segment { value, at }| Ok(Segment { value: f(&mut self.to, value)?, at });
        segments.into_iter().map(map).collect::<Result<_>>().map(Some)
    }

    fn binary(&mut self, id: Id, f: Binary, a: Id, b: Id) -> Result<Option<Vec<Segment>>> {
        let count = self.from.values[id].count();
        let leads = |id: Id| self.segments[id].is_some() && self.from.values[id].count() == count;
        let Some(lead) = [a, b].into_iter().find(|&id| leads(id)) else { return Ok(None) };
        let segments = self.segments[lead].clone().unwrap_or_default();
        let mut made = Vec::new();
        for Segment { at, .. } in segments {
            let (x, y) = (self.taken(a, id, &at, TAKEN_MAX)?, self.taken(b, id, &at, TAKEN_MAX)?);
            let (Some(x), Some(y)) = (x, y) else { return Ok(None) };
            made.push(Segment { value: self.to.binary(f, x, y)?, at });
        }
        Ok(Some(made))
    }

    /// Returns numbers of an operand of `of` as a flat value. Returns `None` if these numbers are not one segment and
    /// would have to be copied, or are not found within `most` operations.
    fn taken(&mut self, id: Id, of: Id, at: &Arc<[u32]>, most: usize) -> Result<Option<Id>> {
        let (value, shape) = (&self.from.values[id], &self.from.values[of].shape);
        if value.side != Side::Pair {
            let places = positions(shape, &broadcast_strides(&value.shape, shape));
            let index: Vec<u32> = at.iter().map(|&n| places[n as usize]).collect();
            let made = self.make(id)?;
            return self.to.pick(made, index, vec![at.len()], None).map(Some);
        }
        if value.count() != shape.iter().product::<usize>() {
            return Ok(None);
        }
        if let Some(segments) = &self.segments[id] {
            return Ok(segments.iter().find(|segment| segment.at == *at).map(|segment| segment.value));
        }
        if self.readers[id] != 1 || self.made[id].is_some() || most == 0 {
            return Ok(None);
        }
        match value.op {
            Op::Reshape(a) if self.from.values[a].side != Side::Pair => {
                let made = self.make(a)?;
                self.to.pick(made, at.to_vec(), vec![at.len()], None).map(Some)
            }
            Op::Reshape(a) => self.taken(a, of, at, most - 1),
            Op::Binary(f, a, b) => {
                let (x, y) = (self.taken(a, id, at, most - 1)?, self.taken(b, id, at, most - 1)?);
                let (Some(x), Some(y)) = (x, y) else { return Ok(None) };
                self.to.binary(f, x, y).map(Some)
            }
            // Only the selected columns of a product are computed.
            Op::MatMul(a, b) if value.is_vector() && self.segments[a].is_none() => {
                let (columns, depth) = (value.count(), self.from.values[a].count());
                let is_matrix = self.from.constant(b).is_some_and(|numbers| numbers.len() == depth * columns);
                if !is_matrix || !self.from.values[a].is_vector() {
                    return Ok(None);
                }
                let index = (0..depth).flat_map(|k| at.iter().map(move |n| (k * columns) as u32 + n)).collect();
                let (left, right) = (self.make(a)?, self.make(b)?);
                let left = self.flat(left)?;
                let matrix = self.to.pick(right, index, vec![depth, at.len()], None)?;
                self.to.matmul(left, matrix).map(Some)
            }
            _ => Ok(None),
        }
    }
}
