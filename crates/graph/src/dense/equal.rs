//! Finds reductions of values whose keys equal a row's key: `Fold(Mul(Equal(key, keys), values))`. Rerankers use it to look up a
//! candidate in lists of a user's neighbours. Comparison, product and reduction become one step without intermediate results.

use super::graph::Graph;
use super::ir::{Id, Op, Side};
use sterling_kernels::cpu::dense::{Binary, EQUAL_FOLDS_MAX, Fold};

/// Reductions with the same comparison, which are computed together.
#[derive(Clone, Debug)]
pub(super) struct EqualGroup {
    pub(super) key: Id,
    pub(super) keys: Id,
    /// Per reduction: the function, the reduced values and the graph value of the result.
    pub(super) folds: Vec<(Fold, Id, Id)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct EqualGroups(Vec<EqualGroup>);

impl EqualGroups {
    /// Groups the reductions that satisfy `is_foldable` by comparison, if only these reductions read the reduced products.
    pub(super) fn of(
        graph: &Graph,
        is_foldable: impl Fn(Id) -> bool,
        readers: &[usize],
        root: impl Fn(Id) -> Id,
    ) -> EqualGroups {
        let mut groups = EqualGroups::default();
        let folds: Vec<(Id, Fold, Id)> = (0..graph.values.len())
            .filter(|&id| is_foldable(id) && graph.values[id].count() == 1)
            .filter_map(|id| if let Op::Fold(f, a) = graph.values[id].op { Some((id, f, root(a))) } else { None })
            .collect();
        for &(id, f, product) in &folds {
            let of_product = folds.iter().filter(|(.., other)| *other == product).count();
            if let Some((key, keys, values)) = parts(graph, product, &root)
                && of_product == readers[product]
            {
                groups.add([key, keys], (f, values, id));
            }
        }
        groups
    }

    fn add(&mut self, [key, keys]: [Id; 2], fold: (Fold, Id, Id)) {
        let is_alike =
            |group: &&mut EqualGroup| (group.key, group.keys) == (key, keys) && group.folds.len() < EQUAL_FOLDS_MAX;
        match self.0.iter_mut().find(is_alike) {
            Some(group) => group.folds.push(fold),
            None => self.0.push(EqualGroup { key, keys, folds: vec![fold] }),
        }
    }

    /// Returns the group that computes a value.
    pub(super) fn group(&self, id: Id) -> Option<&EqualGroup> {
        self.0.iter().find(|group| group.folds.iter().any(|(.., made)| *made == id))
    }

    /// Returns the values that are read to compute a value.
    pub(super) fn reads(&self, graph: &Graph, id: Id) -> Vec<Id> {
        match self.group(id) {
            Some(EqualGroup { key, keys, folds }) => {
                folds.iter().map(|(_, values, _)| *values).chain([*key, *keys]).collect()
            }
            None => graph.values[id].op.reads(),
        }
    }
}

/// Returns the key, the keys and the values of a product `Mul(Equal(key, keys), values)`; `None` for another product.
fn parts(graph: &Graph, product: Id, root: &impl Fn(Id) -> Id) -> Option<(Id, Id, Id)> {
    let count = graph.values[product].count();
    let is_shared = |id: Id| graph.values[id].side != Side::Pair && graph.values[id].count() == count;
    let is_key = |id: Id| graph.values[id].side == Side::Pair && graph.values[id].count() == 1;
    let Op::Binary(Binary::Mul, a, b) = graph.values[product].op else { return None };
    let sides = [(root(a), root(b)), (root(b), root(a))];
    let (equal, values) = sides.into_iter().find(|&(equal, values)| {
        matches!(graph.values[equal].op, Op::Binary(Binary::Equal, ..)) && is_shared(values)
    })?;
    let Op::Binary(_, a, b) = graph.values[equal].op else { return None };
    let sides = [(root(a), root(b)), (root(b), root(a))];
    let (key, keys) = sides.into_iter().find(|&(key, keys)| is_key(key) && is_shared(keys))?;
    (count > 1).then_some((key, keys, values))
}
