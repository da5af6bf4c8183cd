//! Fuses a bias and a `Relu` into the preceding product.

use super::ir::Op;
use super::plan::Planner;
use sterling_kernels::cpu::dense::{Binary, Unary};

impl Planner<'_> {
    /// Adds constant vectors as biases in products with constant matrices, if nothing else reads the product.
    pub(super) fn add_biases(&mut self, needed: &[bool], readers: &mut [usize]) {
        for id in (0..needed.len()).filter(|&id| needed[id]) {
            let Op::Binary(Binary::Add, a, b) = self.graph.values[id].op else { continue };
            for (made, bias) in [(a, b), (b, a)] {
                let product = self.root(made);
                let Op::MatMul(_, matrix) = self.graph.values[product].op else { continue };
                let (columns, graph) = (self.graph.shape(matrix).last(), self.graph);
                let [.., depth, _] = graph.shape(matrix) else { continue };
                let is_packed = *depth > 0
                    && graph.constant(matrix).is_some_and(|numbers| Some(numbers.len()) == columns.map(|n| n * depth));
                let is_bias = graph.constant(bias).is_some_and(|numbers| Some(&numbers.len()) == columns)
                    && graph.shape(bias).last() == columns
                    && graph.shape(made).last() == columns
                    && graph.values[id].count() == graph.values[product].count();
                if is_packed && is_bias && readers[product] == 1 && !self.bias.contains_key(&product) {
                    self.alias[id] = Some(made);
                    self.bias.insert(product, bias);
                    readers[product] = readers[id];
                    break;
                }
            }
        }
    }

    /// Fuses a `Relu` into the product that it reads, if nothing else reads the product.
    pub(super) fn rectify(&mut self, needed: &[bool], readers: &[usize]) {
        for id in (0..needed.len()).filter(|&id| needed[id]) {
            let Op::Unary(Unary::Relu, a) = self.graph.values[id].op else { continue };
            let root = self.root(a);
            let is_product = matches!(self.graph.values[root].op, Op::Linear { .. }) || self.bias.contains_key(&root);
            if is_product && readers[root] == 1 {
                self.is_rectified[root] = true;
                self.alias[id] = Some(a);
            }
        }
    }
}
