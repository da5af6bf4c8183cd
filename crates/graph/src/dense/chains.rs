//! Fuses element-wise steps on scalars of a row into chains. A chain is one step, because starting a step on one scalar
//! takes longer than computing the scalar.
//!
//! Row values are reordered so that fusable steps are adjacent. A value's *wave* counts the alternations of single
//! numbers and wider values among the value's ancestors: wider values of a wave read single numbers of earlier waves,
//! and single numbers read wider values of their own wave.

use super::graph::Graph;
use super::ir::{Id, Op, Side};
use sterling_kernels::cpu::dense::CHAIN_MAX;

/// Single numbers that are computed in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ChainOf {
    /// Inputs of the chain.
    pub(super) reads: Vec<Id>,
    /// Values that the chain computes, in the order of computation.
    pub(super) links: Vec<Id>,
    /// Values of the chain that other steps read, in the order in which other steps first read them.
    pub(super) kept: Vec<Id>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Chains {
    /// Row values, each one after its inputs.
    pub(super) order: Vec<Id>,
    chains: Vec<ChainOf>,
    /// Index of the chain that computes each value.
    number: Vec<Option<usize>>,
}

impl Chains {
    /// Finds chains among the row values `made`, which are ascending. `reads` returns the inputs of a value; outputs are not part
    /// of chains.
    pub(super) fn of(graph: &Graph, made: &[Id], outputs: &[Id], reads: impl Fn(Id) -> Vec<Id>) -> Chains {
        let count = |id: Id| graph.values[id].count();
        let is_link = |id: Id| {
            let is_map = matches!(graph.values[id].op, Op::Unary(..) | Op::Binary(..));
            is_map && count(id) == 1 && !outputs.contains(&id) && reads(id).into_iter().all(|read| count(read) == 1)
        };
        let mut waves = vec![(0, false); graph.values.len()];
        for &id in made {
            let is_link = is_link(id);
            let of_rows = reads(id).into_iter().filter(|&read| graph.values[read].side == Side::Pair);
            let wave = of_rows.map(|read| waves[read].0 + usize::from(waves[read].1 && !is_link)).max();
            waves[id] = (wave.unwrap_or(0), is_link);
        }
        let mut order = made.to_vec();
        order.sort_by_key(|&id| (waves[id], id));
        let mut chains: Vec<ChainOf> = Vec::new();
        for links in order.chunk_by(|&a, &b| waves[a] == waves[b]).filter(|run| waves[run[0]].1) {
            let mut chain = ChainOf::default();
            for &id in links {
                let mut longer = chain.clone();
                longer.add(id, reads(id));
                if longer.links.len() > CHAIN_MAX || longer.reads.len() > CHAIN_MAX {
                    chains.push(chain);
                    longer = ChainOf::default();
                    longer.add(id, reads(id));
                }
                chain = longer;
            }
            chains.push(chain);
        }
        chains.retain(|chain| chain.links.len() > 1);
        let mut number = vec![None; graph.values.len()];
        for (n, chain) in chains.iter().enumerate() {
            chain.links.iter().for_each(|&id| number[id] = Some(n));
        }
        for &id in &order {
            for read in reads(id) {
                if let Some(n) = number[read].filter(|_| number[read] != number[id])
                    && !chains[n].kept.contains(&read)
                {
                    chains[n].kept.push(read);
                }
            }
        }
        Chains { order, chains, number }
    }

    /// Returns the chain that computes a value.
    pub(super) fn chain(&self, id: Id) -> Option<&ChainOf> {
        self.number.get(id).copied().flatten().map(|n| &self.chains[n])
    }
}

impl ChainOf {
    fn add(&mut self, id: Id, reads: Vec<Id>) {
        for read in reads {
            if !self.links.contains(&read) && !self.reads.contains(&read) {
                self.reads.push(read);
            }
        }
        self.links.push(id);
    }
}
