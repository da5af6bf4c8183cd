//! Fuses attention: `f(Q Kᵀ) V`, where `f` is a chain of element-wise operations and reductions along the keys, such as scale, mask
//! and softmax, or HSTU's gate.
//!
//! The chain becomes one step over blocks of [`TILE_ROWS`] queries, as in FlashAttention
//! ([2205.14135](https://arxiv.org/abs/2205.14135)) but with complete rows of keys: a block's logits stay in the L1 or L2 cache
//! through all operations, and no `[queries, keys]` matrix is in memory. Each number is computed by the same kernels in the same
//! order as without fusion, so results are equal bit for bit, except for the sign of zeros: keys at both ends that have no weight
//! for all queries of a block, such as padding and the future, are left out of the last product.

use std::sync::Arc;

use super::exec::Run;
use super::graph::Graph;
use super::ir::{Id, Op, broadcast_strides, positions};
use super::plan::Planner;
use super::steps::{Place, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{
    Binary, Fold, LANES, Lines, MapTarget, Operand, PANEL, Part, Product, Unary, Weights,
};

/// Queries per block: the rows of the widest tile of a product.
const TILE_ROWS: usize = 14;
/// Minimum keys: below, the matrices are small.
const KEYS_MIN: usize = 8;
/// Maximum values before the last product that are examined.
const CHAIN_MAX: usize = 48;
/// Maximum tiles that are live at once.
const TILES_MAX: usize = 6;

/// Values that one step computes.
#[derive(Clone, Debug)]
struct Group {
    /// Last product, whose result is the group's.
    made: Id,
    /// Factors of the first product, and the right factor of the last one.
    factors: [Id; 3],
    /// First product and the chain, each value after its operands.
    chain: Vec<Id>,
    /// Other values that the chain reads.
    outside: Vec<Id>,
}

/// Attention of a graph.
#[derive(Clone, Debug, Default)]
pub(super) struct AttentionGroups(Vec<Group>);

impl AttentionGroups {
    /// Finds attention whose intermediate values nothing else reads. `readers` counts the readers of each value; `root` returns
    /// the value that a view shows.
    pub(super) fn of(graph: &Graph, needed: &[bool], readers: &[usize], root: impl Fn(Id) -> Id) -> AttentionGroups {
        let made = (0..graph.values.len()).filter(|&id| needed[id] && root(id) == id);
        let groups = made.filter_map(|id| Group::of(graph, id, readers, &root)).filter(|group| {
            let tiles = Tiles::of(graph, group, &root);
            tiles.is_some_and(|tiles| tiles.count <= TILES_MAX)
        });
        AttentionGroups(groups.collect())
    }

    /// Returns the values that computing a value reads, if it is attention.
    pub(super) fn reads(&self, id: Id) -> Option<Vec<Id>> {
        self.0.iter().find(|group| group.made == id).map(|group| [&group.factors[..], &group.outside].concat())
    }
}

impl Group {
    fn of(graph: &Graph, made: Id, readers: &[usize], root: &impl Fn(Id) -> Id) -> Option<Group> {
        let Op::MatMul(weights, values) = graph.values[made].op else { return None };
        // Ancestors of the weights, down to a product.
        let (mut ahead, mut all, mut scores) = (vec![root(weights)], Vec::new(), None);
        while let Some(id) = ahead.pop() {
            if all.contains(&id) {
                continue;
            }
            if all.len() == CHAIN_MAX {
                return None;
            }
            match &graph.values[id].op {
                Op::Unary(..) | Op::Binary(..) | Op::Fold(..) => {
                    ahead.extend(graph.values[id].op.reads().into_iter().map(root));
                }
                Op::MatMul(..) if scores.is_none() => scores = Some(id),
                Op::MatMul(..) => return None,
                _ => continue,
            }
            all.push(id);
        }
        let scores = scores?;
        let Op::MatMul(left, right) = graph.values[scores].op else { return None };
        // Values on a way from the first product to the last.
        all.sort_unstable();
        let (mut chain, mut outside) = (vec![scores], Vec::new());
        for &id in all.iter().filter(|&&id| id > scores) {
            if graph.values[id].op.reads().into_iter().any(|read| chain.contains(&root(read))) {
                chain.push(id);
            }
        }
        let mut reads = vec![root(weights), root(values)];
        reads.extend(chain[1..].iter().flat_map(|&id| graph.values[id].op.reads()).map(root));
        for &read in &reads[2..] {
            if !chain.contains(&read) && !outside.contains(&read) {
                outside.push(read);
            }
        }
        let is_apart = |id: &Id| reads.iter().filter(|read| *read == id).count() == readers[*id];
        let group = Group { made, factors: [root(left), root(right), root(values)], chain, outside };
        // Weights that all rows share are better multiplied with all rows at once, and constants are packed.
        let is_own = |product: Id, right: Id| {
            graph.constant(right).is_none() && graph.values[right].side == graph.values[product].side
        };
        let is_attention = group.chain.len() > 1
            && group.chain.contains(&reads[0])
            && !group.chain.contains(&reads[1])
            && is_own(scores, group.factors[1])
            && is_own(made, group.factors[2]);
        (is_attention && group.chain.iter().all(is_apart)).then_some(group)
    }
}

/// An operand of a link.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// Tile of the block, or one number per query.
    Tile { tile: usize, inner: usize },
    /// Numbers in memory: those of a batch entry start at `offsets`, those of a query `row` after the last one's.
    Memory { place: Place, offsets: Arc<[u32]>, row: usize, inner: usize },
}

#[derive(Clone, Debug)]
enum Function {
    One(Unary, usize),
    Two(Binary, [Source; 2]),
    Fold(Fold, usize),
}

/// An operation of a chain, whose results fill `tile` with `width` numbers per query.
#[derive(Clone, Debug)]
struct Link {
    tile: usize,
    width: usize,
    function: Function,
}

/// Sizes of a group: batch entries, queries, depth of the first product, keys, columns of the last product.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    queries: usize,
    depth: usize,
    keys: usize,
    columns: usize,
}

/// A group whose operands lie as blocks of queries need them; places of operands are those of values.
struct Tiles {
    sizes: Sizes,
    /// Per link: tile, width, and operands: a chain's value, or another one with its layout.
    links: Vec<(usize, usize, Vec<Layout>)>,
    last: usize,
    count: usize,
}

enum Layout {
    Tile { tile: usize, inner: usize },
    Memory { id: Id, offsets: Arc<[u32]>, row: usize, inner: usize },
}

impl Tiles {
    fn of(graph: &Graph, group: &Group, root: &impl Fn(Id) -> Id) -> Option<Tiles> {
        let scores = &graph.values[group.chain[0]];
        let (&[.., queries, keys], &[.., columns]) = (&scores.shape[..], &graph.values[group.made].shape[..]) else {
            return None;
        };
        let Op::MatMul(left, _) = scores.op else { return None };
        let Op::MatMul(weights, _) = graph.values[group.made].op else { return None };
        let depth = *graph.shape(left).last()?;
        let batch = scores.count() / (queries * keys).max(1);
        let is_inside = |id: Id| graph.values[id].rows.is_none_or(|rows| rows + 2 < graph.shape(id).len());
        let of_made: usize = graph.values[group.made].shape.iter().rev().skip(2).product();
        let fits = queries > 1
            && keys >= KEYS_MIN
            && graph.shape(weights).ends_with(&[queries, keys])
            && graph.values[weights].count() == scores.count()
            && of_made == batch
            && is_inside(group.chain[0])
            && is_inside(group.made);
        if !fits {
            return None;
        }
        let sizes = Sizes { batch, queries, depth, keys, columns };
        // Position in the chain of the last reader of each value.
        let last_read = |id: Id| {
            let reads = |&other: &Id| graph.values[other].op.reads().into_iter().any(|read| root(read) == id);
            group.chain.iter().rposition(|other| *other > id && reads(other)).unwrap_or(group.chain.len())
        };
        let mut tiles = vec![0];
        let (mut free, mut count, mut links) = (Vec::new(), 1, Vec::new());
        for (n, &id) in group.chain.iter().enumerate().skip(1) {
            let value = &graph.values[id];
            let width = match value.count() / (batch * queries) {
                width if width * batch * queries != value.count() => return None,
                width if width == keys && value.shape.ends_with(&[keys]) => keys,
                1 if value.shape.ends_with(&[1]) || matches!(value.op, Op::Fold(..)) => 1,
                _ => return None,
            };
            let place = |read: Id| group.chain[..n].iter().position(|other| *other == root(read)).map(|at| tiles[at]);
            let layouts = match &value.op {
                Op::Unary(_, a) if graph.values[*a].count() == value.count() => {
                    vec![Layout::Tile { tile: place(*a)?, inner: 1 }]
                }
                Op::Fold(_, a) if graph.shape(*a).ends_with(&[keys]) && graph.values[*a].count() == scores.count() => {
                    vec![Layout::Tile { tile: place(*a)?, inner: 1 }]
                }
                Op::Binary(_, a, b) => [*a, *b]
                    .into_iter()
                    .map(|read| layout(graph, read, &value.shape, width, &sizes, place(read), root))
                    .collect::<Option<Vec<_>>>()?,
                _ => return None,
            };
            let tile = free.pop().unwrap_or(count);
            count = count.max(tile + 1);
            tiles.push(tile);
            links.push((tile, width, layouts));
            free.extend((0..n).filter(|&at| last_read(group.chain[at]) == n).map(|at| tiles[at]));
        }
        let last = group.chain.iter().position(|&id| id == root(weights)).map(|at| tiles[at])?;
        Some(Tiles { sizes, links, last, count })
    }
}

/// Returns how an operand of a value of `shape` lies for blocks of queries; `tile` is its tile if the chain computes it.
fn layout(
    graph: &Graph,
    id: Id,
    shape: &[usize],
    width: usize,
    sizes: &Sizes,
    tile: Option<usize>,
    root: &impl Fn(Id) -> Id,
) -> Option<Layout> {
    let along = broadcast_strides(graph.shape(id), shape);
    let (&last, ahead) = along.split_last()?;
    let starts = positions(&shape[..shape.len() - 1], ahead);
    let inner = if width == 1 { 0 } else { last };
    if starts.len() != sizes.batch * sizes.queries || shape.last() != Some(&width) {
        return None;
    }
    if let Some(tile) = tile {
        // All its numbers, in order: a row of keys, or one number, per query.
        let each = graph.values[id].count() / starts.len();
        let is_in_order = starts.iter().enumerate().all(|(n, &start)| start as usize == n * each);
        let is_own = (each == width && (width == 1 || last == 1)) || (each == 1 && last == 0);
        return (is_in_order && is_own).then_some(Layout::Tile { tile, inner: usize::from(each > 1) });
    }
    let row = match starts[..] {
        [first, second, ..] => second.checked_sub(first)? as usize,
        _ => return None,
    };
    let is_even = |entry: &[u32]| entry.iter().enumerate().all(|(n, &at)| at as usize == entry[0] as usize + n * row);
    let offsets = starts.chunks_exact(sizes.queries).map(|entry| entry[0]).collect();
    starts.chunks_exact(sizes.queries).all(is_even).then_some(Layout::Memory { id: root(id), offsets, row, inner })
}

/// Compiled attention.
#[derive(Clone, Debug)]
pub(super) struct AttentionWork {
    /// Places of the queries, the keys in columns, and the values.
    factors: [Place; 3],
    /// Offsets of the factors of each batch entry.
    offsets: [Arc<[u32]>; 3],
    sizes: Sizes,
    links: Vec<Link>,
    /// Tile of the weights, and number of tiles.
    last: usize,
    tiles: usize,
}

impl AttentionWork {
    /// Returns the numbers of a result.
    pub(super) fn numbers(&self) -> usize {
        self.sizes.batch * self.sizes.queries * self.sizes.columns
    }

    /// Returns the multiply-adds of the products, and the operations of the chain.
    pub(super) fn work(&self) -> [usize; 2] {
        let Sizes { batch, queries, depth, keys, columns } = self.sizes;
        [
            batch * queries * keys * (depth + columns),
            batch * queries * self.links.iter().map(|l| l.width).sum::<usize>(),
        ]
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<Place> {
        let of_link = |link: &Link| match &link.function {
            Function::Two(_, operands) => operands.to_vec(),
            _ => Vec::new(),
        };
        let place = |source: Source| if let Source::Memory { place, .. } = source { Some(place) } else { None };
        self.factors.into_iter().chain(self.links.iter().flat_map(of_link).filter_map(place)).collect()
    }
}

impl Planner<'_> {
    /// Compiles a value that is attention.
    pub(super) fn attend(&mut self, id: Id) -> Result<Option<Work>> {
        let Some(group) = self.attention.0.iter().find(|group| group.made == id).cloned() else { return Ok(None) };
        let missing = || Error::internal("attention that has no tiles");
        let alias = self.alias.clone();
        let root = |mut id: Id| {
            while let Some(of) = alias[id] {
                id = of;
            }
            id
        };
        let Tiles { sizes, links, last, count } = Tiles::of(self.graph, &group, &root).ok_or_else(missing)?;
        let mut made = Vec::new();
        for (&of, (tile, width, layouts)) in group.chain[1..].iter().zip(links) {
            let mut sources = Vec::new();
            for layout in layouts {
                sources.push(match layout {
                    Layout::Tile { tile, inner } => Source::Tile { tile, inner },
                    Layout::Memory { id, offsets, row, inner } => {
                        Source::Memory { place: self.place(id)?, offsets, row, inner }
                    }
                });
            }
            let function = match (&self.graph.values[of].op, &sources[..]) {
                (Op::Unary(f, _), &[Source::Tile { tile, .. }]) => Function::One(*f, tile),
                (Op::Fold(f, _), &[Source::Tile { tile, .. }]) => Function::Fold(*f, tile),
                (Op::Binary(f, ..), [a, b]) => Function::Two(*f, [a.clone(), b.clone()]),
                _ => return Err(missing()),
            };
            made.push(Link { tile, width, function });
        }
        let offsets = |product: Id, is_left: bool| -> Result<Arc<[u32]>> {
            let Op::MatMul(a, b) = self.graph.values[product].op else { return Err(missing()) };
            let (shape, of) = (self.graph.shape(product), self.graph.shape(if is_left { a } else { b }));
            let axes = shape.len() - 2;
            let size = of[of.len() - 2..].iter().product::<usize>() as u32;
            let entries = positions(&shape[..axes], &broadcast_strides(&of[..of.len() - 2], &shape[..axes]));
            Ok(entries.into_iter().map(|n| n * size).collect())
        };
        let offsets = [offsets(group.chain[0], true)?, offsets(group.chain[0], false)?, offsets(id, false)?];
        let [a, b, c] = group.factors;
        let factors = [self.place(a)?, self.place(b)?, self.place(c)?];
        Ok(Some(Work::Attention(Box::new(AttentionWork { factors, offsets, sizes, links: made, last, tiles: count }))))
    }
}

/// Returns the keys from the first to the last one that has weight for any query of a block.
fn weighted(weights: &[f32], queries: usize, keys: usize, columns: usize) -> (usize, usize) {
    // Few columns are summed in lanes along the keys, if there are many.
    if columns < LANES {
        return (0, keys);
    }
    let is_none = |from: usize, to: usize| {
        (0..queries).all(|query| weights[query * keys + from..query * keys + to].iter().all(|x| *x == 0.0))
    };
    let (mut first, mut last) = (0, keys);
    while first + LANES <= last && is_none(first, first + LANES) {
        first += LANES;
    }
    while last > first && is_none(last.saturating_sub(LANES).max(first), last) {
        last = last.saturating_sub(LANES).max(first);
    }
    (first, last)
}

impl Run<'_> {
    pub(super) fn attention(&self, of: &AttentionWork, registers: &mut Lines, out: &mut [f32], stride: usize) {
        let Sizes { batch, queries, keys, .. } = of.sizes;
        let room = TILE_ROWS * keys;
        if registers.numbers().len() < of.tiles * room + PANEL {
            *registers = Lines::new(of.tiles * room);
        }
        let mut tiles: [&mut [f32]; TILES_MAX] = Default::default();
        for (tile, numbers) in tiles.iter_mut().zip(registers.numbers_mut().chunks_mut(room)).take(of.tiles) {
            *tile = numbers;
        }
        for row in 0..self.rows {
            let out = &mut out[row * stride..];
            for entry in 0..batch {
                for first in (0..queries).step_by(TILE_ROWS) {
                    let at = Block { row, entry, first, count: TILE_ROWS.min(queries - first) };
                    self.attend(of, at, &mut tiles, out);
                }
            }
        }
    }

    fn attend(&self, of: &AttentionWork, at: Block, tiles: &mut [&mut [f32]; TILES_MAX], out: &mut [f32]) {
        let Sizes { queries, depth, keys, columns, .. } = of.sizes;
        let Block { row, entry, first, count } = at;
        let factor = |n: usize, more: usize| {
            let (numbers, apart) = self.at(of.factors[n]);
            &numbers[row * apart + of.offsets[n][entry] as usize + more..]
        };
        let weights = Weights { numbers: factor(1, 0), row_stride: keys, panel_stride: PANEL };
        let part = Part { rows: factor(0, first * depth), stride: depth, depth, weights };
        let product = Product { rows: count, columns: keys, parts: &[part], ..Product::default() };
        self.kernels.product(&product, tiles[0], keys);
        for link in &of.links {
            let made = std::mem::take(&mut tiles[link.tile]);
            let mut target = MapTarget { numbers: made, stride: link.width, rows: count, outer: 1, inner: link.width };
            let tile = |n: usize, width: usize| Operand { numbers: &*tiles[n], row: width, outer: 0, inner: 1 };
            let operand = |source: &'_ Source| match source {
                Source::Tile { tile, inner } => {
                    let row = if *inner == 0 { 1 } else { link.width };
                    Operand { numbers: &*tiles[*tile], row, outer: 0, inner: *inner }
                }
                Source::Memory { place, offsets, row: of_query, inner } => {
                    let (numbers, apart) = self.at(*place);
                    let from = row * apart + offsets[entry] as usize + first * of_query;
                    Operand { numbers: &numbers[from..], row: *of_query, outer: 0, inner: *inner }
                }
            };
            match &link.function {
                Function::One(f, a) => self.kernels.map1(*f, &tile(*a, link.width), &mut target),
                Function::Two(f, [a, b]) => self.kernels.map2(*f, &operand(a), &operand(b), &mut target),
                Function::Fold(f, a) => self.kernels.fold(*f, &tile(*a, keys), keys, &mut target),
            }
            tiles[link.tile] = target.numbers;
        }
        let shares = &tiles[of.last];
        let (from, to) = weighted(shares, count, keys, columns);
        let weights = Weights { numbers: factor(2, from * columns), row_stride: columns, panel_stride: PANEL };
        let part = Part { rows: &shares[from..], stride: keys, depth: to - from, weights };
        let product = Product { rows: count, columns, parts: &[part], ..Product::default() };
        self.kernels.product(&product, &mut out[(entry * queries + first) * columns..], columns);
    }
}

/// Queries of a batch entry of a row.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    entry: usize,
    first: usize,
    count: usize,
}

impl std::fmt::Display for AttentionWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Sizes { batch, queries, depth, keys, columns } = self.sizes;
        let [q, k, v] = self.factors;
        write!(f, "attention {batch} of {q}[{queries}, {depth}] x {k}[{depth}, {keys}]")?;
        for Link { tile, width, function } in &self.links {
            write!(f, ", t{tile}[{width}] = ")?;
            match function {
                Function::One(g, a) => write!(f, "{} t{a}", super::text::lower(g))?,
                Function::Fold(g, a) => write!(f, "fold by {} t{a}", super::text::lower(g))?,
                Function::Two(g, [a, b]) => write!(f, "{} {a} {b}", super::text::lower(g))?,
            }
        }
        write!(f, ", t{} x {v}[{keys}, {columns}]", self.last)
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Tile { tile, inner } => write!(f, "t{tile}({inner})"),
            Source::Memory { place, row, inner, .. } => write!(f, "{place}({row},{inner})"),
        }
    }
}
