//! Fuses attention: `f(Q Kᵀ) V`, where `f` is a chain of element-wise operations and reductions along the keys, such as scale, mask
//! and softmax, or HSTU's gate.
//!
//! The chain becomes one step over blocks of queries (`attend`), as in FlashAttention
//! ([2205.14135](https://arxiv.org/abs/2205.14135)) but with complete rows of keys: a block's logits stay in the L1 or
//! L2 cache through all operations, and no `[queries, keys]` matrix is in memory. The same kernels compute each number
//! in the same order as without fusion, so results are equal bit for bit, with one exception: the last product leaves
//! out keys at both ends that have no weight for any query of a block, such as padding and the future. Zeros may
//! therefore have another sign, and NaN or infinities of the omitted keys do not reach the result.

use std::sync::Arc;

use super::graph::Graph;
use super::ir::{Id, Op, broadcast_strides, positions};
use super::steps::AttentionSizes;

/// Minimum number of entries of a `[queries, keys]` matrix for fusion. Smaller matrices of all rows stay in the caches,
/// where one operation over all rows costs less than one operation per block of queries.
const MATRIX_MIN: usize = 1024;
/// Maximum number of values before the last product that are examined.
const CHAIN_MAX: usize = 48;
/// Maximum number of tiles that are live at once.
pub(super) const TILES_MAX: usize = 6;

/// Fused attention: the values that one step computes.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Last product: the result of the fused step.
    pub(super) made: Id,
    /// Factors of the first product, and the right factor of the last product.
    pub(super) factors: [Id; 3],
    /// Product of queries and keys, and the operations from this product to the weights, in topological order.
    pub(super) chain: Vec<Id>,
    /// Values that the chain reads but does not compute.
    outside: Vec<Id>,
}

/// All groups of values of a graph that are computed as attention.
#[derive(Clone, Debug, Default)]
pub(super) struct AttentionGroups(Vec<(Group, Tiles)>);

impl AttentionGroups {
    /// Finds attention whose intermediate values are read by nothing else. `readers` counts the readers of each value;
    /// `root` returns the value of which a value is a view.
    pub(super) fn of(graph: &Graph, needed: &[bool], readers: &[usize], root: impl Fn(Id) -> Id) -> AttentionGroups {
        let made = (0..graph.values.len()).filter(|&id| needed[id] && root(id) == id);
        let groups = made.filter_map(|id| {
            let group = Group::of(graph, id, readers, &root)?;
            let tiles = Tiles::of(graph, &group, &root).filter(|tiles| tiles.count <= TILES_MAX)?;
            Some((group, tiles))
        });
        AttentionGroups(groups.collect())
    }

    /// Returns the group that computes a value, and the layout of the group's tiles.
    pub(super) fn group(&self, id: Id) -> Option<&(Group, Tiles)> {
        self.0.iter().find(|(group, _)| group.made == id)
    }

    /// Returns the values that are read to compute a value; `None` if the value is not the result of attention.
    pub(super) fn reads(&self, id: Id) -> Option<Vec<Id>> {
        self.group(id).map(|(group, _)| [&group.factors[..], &group.outside].concat())
    }
}

impl Group {
    fn of(graph: &Graph, made: Id, readers: &[usize], root: &impl Fn(Id) -> Id) -> Option<Group> {
        let Op::MatMul(weights, values) = graph.values[made].op else { return None };
        let [.., queries, keys] = *graph.shape(weights) else { return None };
        let is_matrix_of_weights = |id: Id| {
            graph.shape(id).ends_with(&[queries, keys]) && graph.values[id].count() == graph.values[weights].count()
        };
        // Ancestors of the weights, back to a matrix product.
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
                // A product of another size is an operand from outside, such as a mask that is looked up.
                Op::MatMul(..) if !is_matrix_of_weights(id) => continue,
                Op::MatMul(..) if scores.is_none() => scores = Some(id),
                Op::MatMul(..) => return None,
                _ => continue,
            }
            all.push(id);
        }
        let scores = scores?;
        let Op::MatMul(left, right) = graph.values[scores].op else { return None };
        // Values on a path from the first product to the last product.
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
        // If all rows share a factor, one product over all rows at once is faster; constant factors are packed for
        // that.
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

/// Layout of a group whose operands can be read per block of queries; operands are indexed like values.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    pub(super) sizes: AttentionSizes,
    /// Per operation of the chain: result tile, width, and operands (a tile of the chain, or another value in memory).
    pub(super) links: Vec<(usize, usize, Vec<Layout>)>,
    /// Tile that holds the weights, the left factor of the last product.
    pub(super) last: usize,
    pub(super) count: usize,
}

/// Layout of an operand that a block of queries reads.
#[derive(Clone, Debug)]
pub(super) enum Layout {
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
            && queries * keys >= MATRIX_MIN
            && graph.shape(weights).ends_with(&[queries, keys])
            && graph.values[weights].count() == scores.count()
            && of_made == batch
            && is_inside(group.chain[0])
            && is_inside(group.made);
        if !fits {
            return None;
        }
        let sizes = AttentionSizes { batch, queries, depth, keys, columns };
        // Index in the chain of the last reader of each value.
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

/// Returns how a block of queries reads an operand of a value of `shape`; `tile` is the tile of the operand if the
/// chain computes that operand.
fn layout(
    graph: &Graph,
    id: Id,
    shape: &[usize],
    width: usize,
    sizes: &AttentionSizes,
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
        // The operand's numbers are in the order of the queries: a row of keys per query, or one number per query.
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
