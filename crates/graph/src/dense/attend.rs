//! Compiles and runs fused attention: logits and weights of [`TILE_ROWS`] queries at a time lie in tiles that stay in
//! the caches from the first product to the last.

use std::sync::Arc;

use super::attention::{Layout, TILES_MAX, Tiles};
use super::exec::Run;
use super::ir::{Id, Op, broadcast_strides, positions};
use super::plan::Planner;
use super::steps::{AttentionSizes, AttentionWork, Function, Link, Source, Work};
use super::text::lower;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{
    Binary, Fold, LANES, Lines, MapTarget, Operand, PANEL, Part, Product, Unary, Weights,
};

/// Queries per block: the number of rows of the widest tile of a matrix product.
const TILE_ROWS: usize = 14;

impl Planner<'_> {
    /// Compiles a value that is the result of attention; `None` for other values.
    pub(super) fn attend(&mut self, id: Id) -> Result<Option<Work>> {
        let Some((group, Tiles { sizes, links, last, count })) = self.attention.group(id).cloned() else {
            return Ok(None);
        };
        let missing = || Error::internal("a step of fused attention has no tiles");
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
        fuse_softmax(&mut made);
        let offsets = |product: Id, is_left: bool| -> Result<Arc<[u32]>> {
            let Op::MatMul(a, b) = self.graph.values[product].op else { return Err(missing()) };
            let (shape, of) = (self.graph.shape(product), self.graph.shape(if is_left { a } else { b }));
            let axes = shape.len() - 2;
            let size = of[of.len() - 2..].iter().product::<usize>() as u32;
            let entries = positions(&shape[..axes], &broadcast_strides(&of[..of.len() - 2], &shape[..axes]));
            Ok(entries.into_iter().map(|n| n * size).collect())
        };
        let offsets = [offsets(group.chain[0], true)?, offsets(group.chain[0], false)?, offsets(id, false)?];
        self.indexed += offsets.iter().map(|offsets| offsets.len()).sum::<usize>();
        self.tiled = self.tiled.max(count * tile_numbers(&sizes));
        let [a, b, c] = group.factors;
        let factors = [self.place(a)?, self.place(b)?, self.place(c)?];
        Ok(Some(Work::Attention(Box::new(AttentionWork { factors, offsets, sizes, links: made, last, tiles: count }))))
    }
}

/// Replaces the five separate operations of each softmax by one, and two that replace its NaN by zeros.
fn fuse_softmax(links: &mut Vec<Link>) {
    let is_softmax = |five: &[Link]| {
        let [most, less, each, sum, shares] = five else { return false };
        let (Function::Fold(Fold::Max, x), Function::One(Unary::Exp, exponent)) = (&most.function, &each.function)
        else {
            return false;
        };
        let reads = |link: &Link, f: Binary, tile: usize, by: usize| match &link.function {
            Function::Two(g, [Source::Tile { tile: a, inner: 1 }, Source::Tile { tile: b, inner: 0 }]) => {
                *g == f && (*a, *b) == (tile, by)
            }
            _ => false,
        };
        reads(less, Binary::Sub, *x, most.tile)
            && *exponent == less.tile
            && matches!(sum.function, Function::Fold(Fold::Sum, a) if a == each.tile)
            && reads(shares, Binary::Div, each.tile, sum.tile)
    };
    let reads = |link: &Link, tile: usize| match &link.function {
        Function::One(_, a) | Function::Fold(_, a) | Function::Softmax(a) | Function::SoftmaxOrZeros(a) => *a == tile,
        Function::Two(_, operands) => {
            operands.iter().any(|source| matches!(source, Source::Tile { tile: a, .. } if *a == tile))
        }
    };
    // Operations are fused only if no later one reads their input or an intermediate value: the fused one leaves no
    // such values.
    let can_fuse = |fused: &[Link], x: usize, later: &[Link]| {
        let made = fused.last().map_or(x, |link| link.tile);
        let is_read_later = |lost: usize| {
            let end = later.iter().position(|link| link.tile == lost).map_or(later.len(), |written| written + 1);
            later[..end].iter().any(|link| reads(link, lost))
        };
        !fused.iter().map(|link| link.tile).chain([x]).any(|lost| lost != made && is_read_later(lost))
    };
    let mut n = 0;
    while n + 5 <= links.len() {
        let (five, later) = links[n..].split_at(5);
        if let Function::Fold(_, x) = five[0].function
            && is_softmax(five)
            && can_fuse(five, x, later)
        {
            let Link { tile, width, .. } = five[4];
            links.splice(n..n + 5, [Link { tile, width, function: Function::Softmax(x) }]);
        }
        n += 1;
    }
    // If one number of a softmax is NaN, all are.
    let is_without_nan = |[softmax, is_nan, shares]: [&Link; 3]| {
        let is_operand =
            |source: &Source, tile: usize| matches!(source, Source::Tile { tile: a, inner: 1 } if *a == tile);
        matches!(is_nan.function, Function::One(Unary::IsNan, a) if a == softmax.tile)
            && matches!(&shares.function, Function::Two(Binary::Drop, [a, b])
                if is_operand(a, is_nan.tile) && is_operand(b, softmax.tile))
    };
    n = 0;
    while n + 3 <= links.len() {
        let (three, later) = links[n..].split_at(3);
        if let Function::Softmax(x) = three[0].function
            && is_without_nan([&three[0], &three[1], &three[2]])
            && can_fuse(three, x, later)
        {
            let Link { tile, width, .. } = three[2];
            links.splice(n..n + 3, [Link { tile, width, function: Function::SoftmaxOrZeros(x) }]);
        }
        n += 1;
    }
}

/// Returns the count of numbers in a tile.
fn tile_numbers(sizes: &AttentionSizes) -> usize {
    TILE_ROWS.min(sizes.queries) * sizes.keys
}

/// Returns the range of keys that have a nonzero weight for a query of the block; all weights outside of this range are
/// zero.
fn weighted(weights: &[f32], queries: usize, keys: usize, columns: usize) -> (usize, usize) {
    // A product with few columns sums several keys at once, which needs a number of keys that is a multiple of the
    // register width.
    if columns < LANES {
        return (0, keys);
    }
    // ORs the bits of all weights, which the compiler vectorizes. The shift ignores the sign, so that -0 counts as 0.
    let is_none = |from: usize, to: usize| {
        let bits = |query| weights[query * keys + from..query * keys + to].iter().fold(0, |bits, x| bits | x.to_bits());
        (0..queries).all(|query| bits(query) << 1 == 0)
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
        let AttentionSizes { batch, queries, .. } = of.sizes;
        let room = tile_numbers(&of.sizes);
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
            if let Function::Softmax(a) | Function::SoftmaxOrZeros(a) = link.function {
                self.kernels.softmax(&mut tiles[a][..count * keys], keys);
                if matches!(link.function, Function::SoftmaxOrZeros(_)) {
                    let runs = tiles[a][..count * keys].chunks_exact_mut(keys);
                    runs.filter(|run| run[0].is_nan()).for_each(|run| run.fill(0.0));
                }
                tiles.swap(a, link.tile);
                continue;
            }
            let made = std::mem::take(&mut tiles[link.tile]);
            let mut target = MapTarget { numbers: made, stride: link.width, rows: count, outer: 1, inner: link.width };
            // If all operands have the layout of the tile, its rows are processed as one contiguous array.
            let mut flatten = |operands: &[&Operand<'_>]| {
                let lies_flat = |o: &&Operand<'_>| if o.inner == 0 { o.row == 0 } else { o.row == link.width };
                if operands.iter().all(lies_flat) {
                    (target.rows, target.inner) = (1, count * link.width);
                }
            };
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
                Function::One(f, a) => {
                    let a = tile(*a, link.width);
                    flatten(&[&a]);
                    self.kernels.map1(*f, &a, &mut target);
                }
                Function::Two(f, [a, b]) => {
                    let (a, b) = (operand(a), operand(b));
                    flatten(&[&a, &b]);
                    self.kernels.map2(*f, &a, &b, &mut target);
                }
                Function::Fold(f, a) => self.kernels.fold(*f, &tile(*a, keys), keys, &mut target),
                Function::Softmax(_) | Function::SoftmaxOrZeros(_) => {}
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

/// Consecutive queries of one batch entry of a row.
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
                Function::Softmax(a) => write!(f, "softmax t{a}")?,
                Function::SoftmaxOrZeros(a) => write!(f, "softmax or zeros t{a}")?,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the links of a softmax of tile 0 to tile 0, over tiles 1 and 2, and the number of them after the fusion with `later`.
    fn fused(later: Vec<Link>) -> usize {
        let link = |tile, width, function| Link { tile, width, function };
        let two = |f, a, b| Function::Two(f, [Source::Tile { tile: a, inner: 1 }, Source::Tile { tile: b, inner: 0 }]);
        let mut links = vec![
            link(1, 1, Function::Fold(Fold::Max, 0)),
            link(0, 64, two(Binary::Sub, 0, 1)),
            link(0, 64, Function::One(Unary::Exp, 0)),
            link(2, 1, Function::Fold(Fold::Sum, 0)),
            link(0, 64, two(Binary::Div, 0, 2)),
        ];
        links.extend(later);
        fuse_softmax(&mut links);
        links.len()
    }

    #[test]
    fn a_softmax_with_zeros_for_nan_is_one_operation_if_nothing_reads_its_nan() {
        let dropped = |tile, is_nan| {
            let operands = [Source::Tile { tile: is_nan, inner: 1 }, Source::Tile { tile: 0, inner: 1 }];
            Link { tile, width: 64, function: Function::Two(Binary::Drop, operands) }
        };
        let is_nan = |tile| Link { tile, width: 64, function: Function::One(Unary::IsNan, 0) };
        let negated = |tile| Link { tile, width: 64, function: Function::One(Unary::Neg, tile) };
        assert_eq!(fused(vec![is_nan(3), dropped(0, 3)]), 1);
        assert_eq!(fused(vec![is_nan(3), dropped(4, 3), negated(4)]), 2);
        // The softmax or its NaN are read, or other numbers are replaced by zeros.
        assert_eq!(fused(vec![is_nan(3), dropped(4, 3), negated(0)]), 4);
        assert_eq!(fused(vec![is_nan(3), dropped(4, 3), negated(3)]), 4);
        assert_eq!(fused(vec![is_nan(3), dropped(4, 1)]), 7);
    }

    #[test]
    fn a_softmax_is_fused_only_if_nothing_later_reads_its_maxima_or_sums() {
        let scaled = |by: usize| {
            let operands = [Source::Tile { tile: 0, inner: 1 }, Source::Tile { tile: by, inner: 0 }];
            Link { tile: 0, width: 64, function: Function::Two(Binary::Mul, operands) }
        };
        let written = |tile| Link { tile, width: 1, function: Function::Fold(Fold::Max, 0) };
        assert_eq!(fused(Vec::new()), 1);
        assert_eq!(fused(vec![scaled(3)]), 2);
        // The maxima or the sums are read, as by `p * (m > -1e9)` or `p * sum`.
        assert_eq!(fused(vec![scaled(1)]), 6);
        assert_eq!(fused(vec![scaled(2)]), 6);
        let negated = Link { tile: 1, width: 1, function: Function::One(Unary::Neg, 1) };
        assert_eq!(fused(vec![negated]), 6);
        // Others are written to the same tile first.
        assert_eq!(fused(vec![written(1), scaled(1)]), 3);
        assert_eq!(fused(vec![written(2), scaled(1)]), 7);
    }
}
