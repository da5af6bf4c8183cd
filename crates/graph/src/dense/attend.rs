//! Compiles and runs fused attention: a head's logits and weights, of [`TILE_ROWS`] queries at a time, lie in tiles that stay in
//! the caches from the first product to the last.

use std::sync::Arc;

use super::attention::{Layout, TILES_MAX, Tiles};
use super::exec::Run;
use super::ir::{Id, Op, broadcast_strides, positions};
use super::plan::Planner;
use super::steps::{AttentionSizes, AttentionWork, Function, Link, Source, Work};
use super::text::lower;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{LANES, Lines, MapTarget, Operand, PANEL, Part, Product, Weights};

/// Queries per block: the rows of the widest tile of a product.
const TILE_ROWS: usize = 14;

impl Planner<'_> {
    /// Compiles a value that is attention.
    pub(super) fn attend(&mut self, id: Id) -> Result<Option<Work>> {
        let Some((group, Tiles { sizes, links, last, count })) = self.attention.group(id).cloned() else {
            return Ok(None);
        };
        let missing = || Error::internal("attention that has no tiles");
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
    // Few columns are summed along the keys, several keys at once, if there are many.
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
        let AttentionSizes { batch, queries, keys, .. } = of.sizes;
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
        let AttentionSizes { queries, depth, keys, columns, .. } = of.sizes;
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
        let AttentionSizes { batch, queries, depth, keys, columns } = self.sizes;
        let [q, k, v] = self.factors;
        write!(f, "attention {batch} of {q}[{queries}, {depth}] x {k}[{depth}, {keys}]")?;
        for Link { tile, width, function } in &self.links {
            write!(f, ", t{tile}[{width}] = ")?;
            match function {
                Function::One(g, a) => write!(f, "{} t{a}", lower(g))?,
                Function::Fold(g, a) => write!(f, "fold by {} t{a}", lower(g))?,
                Function::Two(g, [a, b]) => write!(f, "{} {a} {b}", lower(g))?,
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
