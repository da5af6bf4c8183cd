//! From a graph to steps over buffers.
//!
//! 1. What the output does not need is left out.
//! 2. Each value gets a place: constants among the constants, matrices of products packed; the user's values a buffer each;
//!    values of rows a buffer of a block, given on to later values once nothing reads it any more.
//! 3. A product that only a `Relu` reads does it on its way out; neighbours within a value are read where they lie; folds beside equal
//!    keys (`equal.rs`) and work on single numbers (`chains.rs`) become one step each.
//! 4. In [`Precision::Bf16`], wide products of rows take their factors in pairs (`pairs.rs`), and hand pairs on where only such products read
//!    them. A product that is an output stays in f32: it is small, and what it rounds is the answer.

use std::collections::HashMap;
use std::sync::Arc;

use super::chains::{ChainOf, Chains};
use super::equal::{EqualGroup, EqualGroups};
use super::graph::Graph;
use super::ir::{Id, Op, Side, broadcast_strides, positions};
use super::steps::{Factor, FoldBeside, Memory, Operand, Place, Plan, Precision, Step, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, ChainLink, Form, LANES, Lines, PANEL, Unary, pack};

/// Numbers that the buffers of a block may take together, 192 KiB: they stay in the second-level cache beside the weights.
const BLOCK_NUMBERS: usize = 48 << 10;
/// Most rows of a block: four tiles of 14 in f32; in bf16, where products take so little that what a block takes once shows, eight of 16.
const BLOCK_ROWS_MAX: [usize; 2] = [56, 128];
/// Rows of a tile of the widest products.
const TILE_ROWS: [usize; 2] = [14, 16];

/// From a row to the next in a buffer of so many numbers a row: whole lines, but single numbers lie side by side, so that a step
/// takes those of a block in whole registers.
fn room_of_row(count: usize) -> usize {
    if count == 1 { 1 } else { count.next_multiple_of(LANES) }
}

/// The rows of a block whose buffers take so many numbers a row.
fn block_rows(numbers: usize, precision: Precision) -> usize {
    let of = |rows: [usize; 2]| if precision == Precision::F32 { rows[0] } else { rows[1] };
    let (most, tile) = (of(BLOCK_ROWS_MAX), of(TILE_ROWS));
    let rows = (BLOCK_NUMBERS / numbers.max(1)).clamp(1, most);
    if rows > tile { rows / tile * tile } else { rows }
}

/// Makes the steps of a graph.
///
/// # Errors
/// `Unsupported` where the output is the same for all rows.
pub(super) fn plan(graph: &Graph, precision: Precision) -> Result<Plan> {
    if graph.outputs.iter().any(|&output| graph.values[output].side != Side::Pair) {
        return Err(Error::unsupported("an output that is the same for all rows"));
    }
    let needed = graph.needed(&graph.outputs, &[]);
    let mut planner = Planner {
        graph,
        plan: Plan::default(),
        places: vec![None; graph.values.len()],
        alias: graph.values.iter().map(|v| if let Op::Reshape(of) = v.op { Some(of) } else { None }).collect(),
        is_rectified: vec![false; graph.values.len()],
        last: vec![0; graph.values.len()],
        home: Vec::new(),
        packed: HashMap::new(),
        tenants: Vec::new(),
        free: HashMap::new(),
        given: Vec::new(),
        is_narrow: vec![false; graph.values.len()],
        is_paired: vec![false; graph.values.len()],
        pairs: HashMap::new(),
        equal: EqualGroups::default(),
        chains: Chains::default(),
    };
    let readers = planner.readers(&needed);
    planner.rectify(&needed, &readers);
    planner.find_homes();
    let outputs = planner.outputs();
    // An output is alone in its place.
    let is_foldable = |id: Id| needed[id] && planner.alias[id].is_none() && !outputs.contains(&id);
    planner.equal = EqualGroups::of(graph, is_foldable, &readers, |id| planner.root(id));
    let needed = graph.needed_by(&graph.outputs, |id| planner.equal.reads(graph, id));
    if precision == Precision::Bf16 {
        planner.narrow(&needed);
    }
    // The user's values first: a step of rows may read any of them.
    let made = (0..needed.len()).filter(|&id| needed[id] && planner.alias[id].is_none());
    let (rows, others): (Vec<Id>, Vec<Id>) = made.partition(|&id| graph.values[id].side == Side::Pair);
    planner.chains = Chains::of(graph, &rows, &outputs, |id| planner.reads(id));
    let order = [others, planner.chains.order.clone()].concat();
    planner.survey(&order);
    for (at, &id) in order.iter().enumerate() {
        planner.value(id)?;
        planner.give_back(at, id);
    }
    planner.plan.outputs = graph.outputs.iter().map(|&output| planner.place(output)).collect::<Result<_>>()?;
    let numbers = planner.plan.strides.iter().sum::<usize>() + planner.plan.given_stride;
    planner.plan.block_rows = block_rows(numbers, precision);
    Ok(planner.plan)
}

/// True for places side by side.
fn follows(index: &[u32]) -> bool {
    !index.is_empty() && index.windows(2).all(|two| two[0] + 1 == two[1])
}

/// The first places of runs of so many numbers, where places lie side by side in runs of equal length.
fn runs(index: &Arc<[u32]>) -> (Arc<[u32]>, usize) {
    let ends = index.windows(2).position(|two| two[0] + 1 != two[1]).map_or(index.len(), |n| n + 1);
    match ends > 1 && index.len().is_multiple_of(ends) && index.chunks(ends).all(follows) {
        true => (index.iter().step_by(ends).copied().collect(), ends),
        false => (index.clone(), 1),
    }
}

pub(super) struct Planner<'a> {
    pub(super) graph: &'a Graph,
    pub(super) plan: Plan,
    pub(super) places: Vec<Option<Place>>,
    /// The value whose place one takes: of a reshape, and of a `Relu` that its product does.
    pub(super) alias: Vec<Option<Id>>,
    pub(super) is_rectified: Vec<bool>,
    /// The value within whose numbers each lies: itself, or what it is the place of or a run of neighbours in.
    pub(super) home: Vec<Id>,
    /// Where in the order of values is the last one that reads a home.
    pub(super) last: Vec<usize>,
    pub(super) packed: HashMap<Vec<Id>, usize>,
    /// How many values that are still read lie in each buffer of rows.
    pub(super) tenants: Vec<usize>,
    /// Buffers of rows that nothing reads any more, by their stride.
    pub(super) free: HashMap<usize, Vec<usize>>,
    /// Where each input lies among the inputs of its rows.
    pub(super) given: Vec<usize>,
    /// Products that take their factors in pairs.
    pub(super) is_narrow: Vec<bool>,
    /// Products whose results are pairs.
    pub(super) is_paired: Vec<bool>,
    /// What was made as pairs: rows side by side and matrices below each other, by the values that they are.
    pub(super) pairs: HashMap<Vec<Id>, Place>,
    /// Folds of what lies beside keys that are equal.
    pub(super) equal: EqualGroups,
    /// What is made of single numbers.
    pub(super) chains: Chains,
}

impl Planner<'_> {
    /// The value whose place one takes in the end.
    pub(super) fn root(&self, mut id: Id) -> Id {
        while let Some(of) = self.alias[id] {
            id = of;
        }
        id
    }

    /// How many values and outputs read each value.
    fn readers(&self, needed: &[bool]) -> Vec<usize> {
        let mut readers = vec![0; needed.len()];
        let live = (0..needed.len()).filter(|&id| needed[id] && self.alias[id].is_none());
        live.flat_map(|id| self.reads(id)).chain(self.outputs()).for_each(|read| readers[read] += 1);
        readers
    }

    /// Finds products that only a `Relu` reads.
    fn rectify(&mut self, needed: &[bool], readers: &[usize]) {
        for id in (0..needed.len()).filter(|&id| needed[id]) {
            let Op::Unary(Unary::Relu, a) = self.graph.values[id].op else { continue };
            let root = self.root(a);
            if matches!(self.graph.values[root].op, Op::Linear { .. }) && readers[root] == 1 {
                self.is_rectified[root] = true;
                self.alias[id] = Some(a);
            }
        }
    }

    /// The values that are outputs.
    pub(super) fn outputs(&self) -> Vec<Id> {
        self.graph.outputs.iter().map(|&output| self.root(output)).collect()
    }

    /// What making a value reads.
    fn reads(&self, id: Id) -> Vec<Id> {
        self.equal.reads(self.graph, id).into_iter().map(|read| self.root(read)).collect()
    }

    /// Finds which values lie within others. Outputs, which devices want in places of their own, are made.
    fn find_homes(&mut self) {
        let outputs = self.outputs();
        for (id, value) in self.graph.values.iter().enumerate() {
            let is_of_rows = |id: Id| self.graph.values[self.root(id)].side == Side::Pair;
            let within = match (self.alias[id], &value.op) {
                (Some(of), _) => Some(of),
                (None, Op::Pick(a, index)) if value.side == Side::Pair && is_of_rows(*a) && follows(index) => {
                    (!outputs.contains(&id)).then_some(*a)
                }
                _ => None,
            };
            self.home.push(within.map_or(id, |of| self.home[of]));
        }
    }

    fn survey(&mut self, order: &[Id]) {
        for (at, &id) in order.iter().enumerate() {
            for read in self.reads(id) {
                self.last[self.home[read]] = at;
            }
        }
        for output in self.outputs() {
            self.last[self.home[output]] = usize::MAX;
        }
        let mut offset = 0;
        for input in &self.graph.inputs {
            self.given.push(offset);
            if input.side == Side::Pair {
                offset += input.shape.iter().product::<usize>();
            }
        }
        self.plan.given_stride = offset.next_multiple_of(LANES);
    }

    /// Gives on the buffers that nothing reads behind a value, which is at this place of the order.
    fn give_back(&mut self, at: usize, id: Id) {
        for home in self.reads(id).into_iter().map(|read| self.home[read]) {
            if self.last[home] != at {
                continue;
            }
            // A buffer of several values is free once all of them are read.
            self.last[home] = usize::MAX;
            let Some(Place { memory: Memory::Rows(buffer), .. }) = self.places[home] else { continue };
            self.tenants[buffer] -= 1;
            if self.tenants[buffer] == 0 {
                self.free.entry(self.plan.strides[buffer]).or_default().push(buffer);
            }
        }
    }

    /// Where a value lies. Constants come to lie somewhere once they are read as they are: matrices are packed instead.
    pub(super) fn place(&mut self, id: Id) -> Result<Place> {
        let id = self.root(id);
        if let (None, Some(numbers)) = (self.places[id], self.graph.constant(id)) {
            let memory = Memory::Constant(self.constant(Lines::of(numbers)));
            self.places[id] = Some(Place { memory, offset: 0 });
        }
        self.places[id].ok_or_else(|| Error::internal("a value that is read before it is made"))
    }

    pub(super) fn constant(&mut self, lines: Lines) -> usize {
        self.plan.constants.push(lines);
        self.plan.constants.len() - 1
    }

    /// A buffer for the numbers of a value.
    pub(super) fn buffer(&mut self, side: Side, count: usize) -> Place {
        self.shared_buffer(side, count, 1)
    }

    /// A buffer for so many numbers of several values.
    fn shared_buffer(&mut self, side: Side, count: usize, tenants: usize) -> Place {
        let memory = match side {
            Side::Pair => {
                let stride = room_of_row(count);
                let buffer = self.free.get_mut(&stride).and_then(Vec::pop).unwrap_or(self.plan.strides.len());
                if buffer == self.plan.strides.len() {
                    self.plan.strides.push(stride);
                    self.tenants.push(0);
                }
                self.tenants[buffer] = tenants;
                Memory::Rows(buffer)
            }
            _ => {
                self.plan.user_counts.push(count);
                Memory::User(self.plan.user_counts.len() - 1)
            }
        };
        Place { memory, offset: 0 }
    }

    pub(super) fn step(&mut self, place: Place, work: Work) {
        let cost = match &work {
            Work::Product { parts, runs, columns, .. } => parts.iter().map(|p| p.depth * columns).sum::<usize>() * runs,
            Work::Narrow { count, .. } => *count,
            Work::PackNarrow { depth, columns, .. } => depth * columns,
            Work::Matrices { left, shape: [m, k, n], .. } => left.len() * m * k * n,
            // Steps that wait for memory rather than for arithmetic cost about four multiply-adds a number.
            Work::Map1 { count, .. } => 4 * count,
            Work::Map2 { outer, inner, .. } => 4 * outer * inner,
            Work::Fold { runs, count, .. } => 4 * runs * count,
            Work::FoldEqual { count, .. } => *count,
            Work::Chain { reads, links, kept } => reads.len() + links.len() + kept.len(),
            Work::Concat { runs, parts } => 4 * runs * parts.iter().map(|(_, n)| n).sum::<usize>(),
            Work::Pick { index, run, .. } => 16 * index.len() + run,
            Work::Spread { index, run, count, .. } => 16 * index.len() * run + count,
        };
        match place.memory {
            Memory::Rows(out) => {
                self.plan.row_work += cost;
                self.plan.rows.push(Step { out, work });
            }
            Memory::User(out) => {
                self.plan.user_work += cost;
                self.plan.user.push(Step { out, work });
            }
            Memory::Constant(_) | Memory::Given => {}
        }
    }

    fn value(&mut self, id: Id) -> Result<()> {
        if self.places[id].is_some() {
            return Ok(());
        }
        let value = &self.graph.values[id];
        let (side, count) = (value.side, value.count());
        if let Some(group) = self.equal.group(id).cloned() {
            return self.fold_equal(&group);
        }
        if let Some(chain) = self.chains.chain(id).cloned() {
            // The others were made with the first one, and not all of them have a place.
            return if chain.links[0] == id { self.chain(&chain) } else { Ok(()) };
        }
        let place = match &value.op {
            Op::Constant(_) => return Ok(()),
            Op::Inputs(first) if side == Side::Pair => Place { memory: Memory::Given, offset: self.given[*first] },
            Op::Inputs(first) => {
                let place = self.buffer(side, count);
                if let Memory::User(buffer) = place.memory {
                    let before = self.graph.inputs[..*first].iter().filter(|i| i.side == Side::User).count();
                    self.plan.user_inputs.push((before, buffer));
                }
                place
            }
            Op::Pick(a, index) if self.home[id] != id => {
                let place = self.place(*a)?;
                Place { offset: place.offset + index[0] as usize, ..place }
            }
            _ => {
                let work = self.work(id)?;
                // Pairs come in whole panels.
                let room = if self.is_paired[id] { count.next_multiple_of(PANEL) / 2 } else { count };
                let place = self.buffer(side, room);
                self.step(place, work);
                place
            }
        };
        self.places[id] = Some(place);
        Ok(())
    }

    fn work(&mut self, id: Id) -> Result<Work> {
        let value = &self.graph.values[id];
        Ok(match &value.op {
            Op::Unary(f, a) => Work::Map1 { f: *f, a: self.place(*a)?, count: value.count() },
            Op::Binary(f, a, b) => self.binary(id, *f, *a, *b)?,
            Op::Fold(f, a) => {
                let count = self.graph.shape(*a).last().copied().unwrap_or(1);
                Work::Fold { f: *f, a: self.place(*a)?, runs: value.count(), count }
            }
            Op::Concat(axis, parts) => {
                let inner = |id: Id| self.graph.shape(id)[*axis..].iter().product();
                let parts = parts.iter().map(|&part| Ok((self.place(part)?, inner(part)))).collect::<Result<_>>()?;
                Work::Concat { runs: value.shape[..*axis].iter().product(), parts }
            }
            Op::Pick(a, index) => {
                let (index, run) = runs(index);
                Work::Pick { a: self.place(*a)?, index, run }
            }
            Op::Spread(a, index) => {
                let (index, run) = runs(index);
                Work::Spread { a: self.place(*a)?, index, run, count: value.count() }
            }
            Op::Linear { parts, bias } => {
                let columns = value.count();
                let form = |is_pairs: bool| if is_pairs { Form::Pairs } else { Form::Single };
                let (factors, result) = (form(self.is_narrow[id]), form(self.is_paired[id]));
                let parts = match factors {
                    Form::Single => self.factors(parts)?,
                    Form::Pairs => self.narrow_factors(parts)?,
                };
                let bias = bias.map(|bias| self.place(bias)).transpose()?;
                Work::Product { parts, bias, runs: 1, columns, relu: self.is_rectified[id], factors, result }
            }
            Op::MatMul(a, b) => self.matmul(id, *a, *b)?,
            Op::Inputs(_) | Op::Constant(_) | Op::Reshape(_) => {
                return Err(Error::internal("a value without work"));
            }
        })
    }

    /// Room for what one step makes, side by side.
    fn side_by_side(&mut self, made: &[Id]) -> Place {
        let place = self.shared_buffer(Side::Pair, made.len(), made.len());
        for (n, &id) in made.iter().enumerate() {
            self.places[id] = Some(Place { offset: n, ..place });
        }
        place
    }

    /// One step for all of a group.
    fn fold_equal(&mut self, group: &EqualGroup) -> Result<()> {
        let out = self.side_by_side(&group.folds.iter().map(|(.., id)| *id).collect::<Vec<_>>());
        let beside = |&(f, values, _): &(_, Id, Id)| Ok(FoldBeside { f, values: self.place(values)? });
        let folds = group.folds.iter().map(beside).collect::<Result<_>>()?;
        let (key, keys, count) =
            (self.place(group.key)?, self.place(group.keys)?, self.graph.values[group.keys].count());
        self.step(out, Work::FoldEqual { key, keys, count, folds });
        Ok(())
    }

    fn chain(&mut self, chain: &ChainOf) -> Result<()> {
        let missing = || Error::internal("a single number that is read before it is made");
        let registers = [&chain.reads[..], &chain.links].concat();
        let register = |id: Id| registers.iter().position(|&other| other == self.root(id)).ok_or_else(missing);
        let link = |&id: &Id| match self.graph.values[id].op {
            Op::Unary(f, a) => Ok(ChainLink::One(f, register(a)?)),
            Op::Binary(f, a, b) => Ok(ChainLink::Two(f, [register(a)?, register(b)?])),
            _ => Err(Error::internal("a wide value in a chain of single numbers")),
        };
        let links = chain.links.iter().map(link).collect::<Result<_>>()?;
        let kept = chain.kept.iter().map(|&id| register(id)).collect::<Result<_>>()?;
        let reads = chain.reads.iter().map(|&id| self.place(id)).collect::<Result<_>>()?;
        let out = self.side_by_side(&chain.kept);
        self.step(out, Work::Chain { reads, links, kept });
        Ok(())
    }

    /// Factors of the parts of a product. Neighbours in memory with constant matrices are one.
    fn factors(&mut self, parts: &[(Id, Id)]) -> Result<Vec<Factor>> {
        let mut joined: Vec<(Place, usize, Vec<Id>)> = Vec::new();
        for &(x, matrix) in parts {
            let (place, depth) = (self.place(x)?, self.graph.shape(matrix)[0]);
            let is_constant = |id: &Id| self.graph.constant(*id).is_some();
            match joined.last_mut() {
                Some((first, all, matrices))
                    if place == Place { offset: first.offset + *all, ..*first }
                        && matrices.iter().chain([&matrix]).all(is_constant) =>
                {
                    *all += depth;
                    matrices.push(matrix);
                }
                _ => joined.push((place, depth, vec![matrix])),
            }
        }
        joined.into_iter().map(|(rows, depth, matrices)| self.factor(rows, depth, matrices)).collect()
    }

    /// Rows of `depth` numbers and the matrices below each other that they are multiplied with; one that is not constant is alone.
    fn factor(&mut self, rows: Place, depth: usize, matrices: Vec<Id>) -> Result<Factor> {
        let columns = self.graph.shape(matrices[0]).last().copied().unwrap_or(1);
        let constants: Option<Vec<&[f32]>> = matrices.iter().map(|&matrix| self.graph.constant(matrix)).collect();
        let Some(constants) = constants else {
            let matrix = self.place(matrices[0])?;
            return Ok(Factor { rows, depth, matrix, row_stride: columns, panel_stride: PANEL });
        };
        let packed = match self.packed.get(&matrices) {
            Some(&packed) => packed,
            None => {
                let packed = self.constant(pack(&constants.concat(), depth, columns));
                self.packed.insert(matrices, packed);
                packed
            }
        };
        let matrix = Place { memory: Memory::Constant(packed), offset: 0 };
        Ok(Factor { rows, depth, matrix, row_stride: PANEL, panel_stride: depth * PANEL })
    }

    fn matmul(&mut self, id: Id, a: Id, b: Id) -> Result<Work> {
        let (value, left, right) = (&self.graph.values[id], self.graph.shape(a), self.graph.shape(b));
        let axes = value.shape.len() - 2;
        let (m, n, k) = (value.shape[axes], value.shape[axes + 1], left[left.len() - 1]);
        let is_shared = self.graph.values[b].side != Side::Pair && right.iter().product::<usize>() == k * n;
        if is_shared && k > 0 && n > 0 {
            let runs = left.iter().product::<usize>() / k;
            let (factors, result) = (if self.is_narrow[id] { Form::Pairs } else { Form::Single }, Form::Single);
            let part = match factors {
                Form::Single => {
                    let rows = self.place(a)?;
                    self.factor(rows, k, vec![b])?
                }
                Form::Pairs => self.narrow_rows(a, b, [runs, k, n])?,
            };
            return Ok(Work::Product { parts: vec![part], bias: None, runs, columns: n, relu: false, factors, result });
        }
        let places = |shape: &[usize], size: usize| -> Arc<[u32]> {
            let strides = broadcast_strides(&shape[..shape.len() - 2], &value.shape[..axes]);
            positions(&value.shape[..axes], &strides).into_iter().map(|n| n * size as u32).collect()
        };
        let (left, right) = (places(left, m * k), places(right, k * n));
        Ok(Work::Matrices { a: self.place(a)?, b: self.place(b)?, left, right, shape: [m, k, n] })
    }

    /// An element-wise step of runs; an operand that is repeated in another way is spread first.
    fn binary(&mut self, id: Id, f: Binary, a: Id, b: Id) -> Result<Work> {
        let shape = &self.graph.values[id].shape;
        let strides = [a, b].map(|operand| broadcast_strides(self.graph.shape(operand), shape));
        // Axes of size 1 go, neighbours that run on in both operands become one.
        let mut axes: Vec<(usize, [usize; 2])> = Vec::new();
        for (n, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let here = [strides[0][n], strides[1][n]];
            match axes.last_mut() {
                Some((before, at)) if (0..2).all(|o| at[o] == here[o] * size) => {
                    *before *= size;
                    *at = here;
                }
                _ => axes.push((size, here)),
            }
        }
        let (outer, inner) = match axes[..] {
            [] => ((1, [0, 0]), (1, [0, 0])),
            [inner] => ((1, [0, 0]), inner),
            [outer, inner] => (outer, inner),
            _ => {
                let count = shape.iter().product();
                let [a, b] = [(a, 0), (b, 1)].map(|(operand, n)| self.spread(operand, shape, &strides[n]));
                return Ok(Work::Map2 { f, a: a?, b: b?, outer: 1, inner: count });
            }
        };
        let mut operand = |id: Id, n: usize| -> Result<Operand> {
            Ok(Operand { place: self.place(id)?, outer: outer.1[n], inner: inner.1[n] })
        };
        Ok(Work::Map2 { f, a: operand(a, 0)?, b: operand(b, 1)?, outer: outer.0, inner: inner.0 })
    }

    fn spread(&mut self, id: Id, shape: &[usize], strides: &[usize]) -> Result<Operand> {
        let a = self.place(id)?;
        let index: Arc<[u32]> = positions(shape, strides).into();
        let place = self.buffer(self.graph.values[id].side.max(Side::User), index.len());
        self.step(place, Work::Pick { a, index, run: 1 });
        Ok(Operand { place, outer: 0, inner: 1 })
    }
}
