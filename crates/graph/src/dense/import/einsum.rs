//! `Einsum` over two operands, as one matrix product.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, refused};
use crate::dense::ir::Id;
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Fold;

/// Operand with one letter per axis.
struct Operand {
    id: Id,
    axes: Vec<char>,
}

impl Importer {
    pub(super) fn einsum(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let equation: String = attributes.text("equation", "").split_whitespace().collect();
        let wrong = || refused(format!("equation `{equation}`, expected two operands and a result of letters"));
        let (operands, result) = equation.split_once("->").ok_or_else(wrong)?;
        let (left, right) = operands.split_once(',').ok_or_else(wrong)?;
        if node.input.len() != 2 {
            return Err(wrong());
        }
        let operand = |n: usize, axes: &str| -> Result<Operand> {
            let (id, axes) = (self.value(node, n)?, axes.chars().collect::<Vec<_>>());
            let is_plain = (0..axes.len()).all(|n| axes[n].is_ascii_alphabetic() && !axes[..n].contains(&axes[n]));
            if !is_plain || self.rank(id) != axes.len() {
                return Err(wrong());
            }
            Ok(Operand { id, axes })
        };
        let (left, right) = (operand(0, left)?, operand(1, right)?);
        let result: Vec<char> = result.chars().collect();
        let is_known = |c: &char| left.axes.contains(c) || right.axes.contains(c);
        if (0..result.len()).any(|n| result[..n].contains(&result[n]) || !is_known(&result[n])) {
            return Err(wrong());
        }
        let (left, right) = (self.without(&left, &right.axes, &result)?, self.without(&right, &left.axes, &result)?);
        // If only one operand has the rows axis, it is the left one.
        let counts = |operand: &Operand| self.rows(operand.id).is_some();
        let (left, right) = if counts(&right) && !counts(&left) { (right, left) } else { (left, right) };
        self.multiplied(&left, &right, &result)
    }

    /// Sums an operand over the axes that neither the other operand nor the result has.
    fn without(&mut self, operand: &Operand, other: &[char], result: &[char]) -> Result<Operand> {
        let (id, axes) = (operand.id, operand.axes.clone());
        let is_kept = |c: &char| other.contains(c) || result.contains(c);
        let gone: Vec<usize> = (0..axes.len()).filter(|&n| !is_kept(&axes[n])).collect();
        if gone.is_empty() {
            return Ok(Operand { id, axes });
        }
        let folded = self.graph.fold(Fold::Sum, id, &gone)?;
        let kept: Vec<usize> = (0..axes.len()).filter(|n| !gone.contains(n)).collect();
        let shape = kept.iter().map(|&n| self.graph.shape(id)[n]).collect();
        let rows = self.rows(folded).and_then(|r| kept.iter().position(|&n| n == r));
        let id = self.graph.reshape(folded, shape, rows)?;
        Ok(Operand { id, axes: kept.iter().map(|&n| axes[n]).collect() })
    }

    fn multiplied(&mut self, left: &Operand, right: &Operand, result: &[char]) -> Result<Id> {
        let both = |c: &&char| right.axes.contains(c);
        let batch: Vec<char> = result.iter().filter(|c| left.axes.contains(c)).filter(both).copied().collect();
        let summed: Vec<char> = left.axes.iter().filter(both).filter(|c| !result.contains(c)).copied().collect();
        let free = |axes: &[char]| -> Vec<char> {
            axes.iter().filter(|c| !batch.contains(c) && !summed.contains(c)).copied().collect()
        };
        let (ahead, behind) = (free(&left.axes), free(&right.axes));
        let a = self.arranged(left, [&batch[..], &ahead, &summed])?;
        let b = self.arranged(right, [&batch[..], &summed, &behind])?;
        let product = self.graph.matmul(a, b)?;
        // Restores one axis per letter.
        let letters = [&batch[..], &ahead, &behind].concat();
        let size = |c: &char| match left.axes.iter().position(|x| x == c) {
            Some(n) => self.graph.shape(left.id)[n].max(self.size(right, *c)),
            None => self.size(right, *c),
        };
        let shape: Vec<usize> = letters.iter().map(size).collect();
        let of = |operand: &Operand| self.rows(operand.id).map(|r| operand.axes[r]);
        let rows = of(left).or(of(right)).and_then(|c| letters.iter().position(|x| *x == c));
        let whole = self.graph.reshape(product, shape, rows)?;
        let order: Vec<usize> = result.iter().filter_map(|c| letters.iter().position(|x| x == c)).collect();
        self.graph.transpose(whole, &order)
    }

    fn size(&self, operand: &Operand, letter: char) -> usize {
        operand.axes.iter().position(|x| *x == letter).map_or(1, |n| self.graph.shape(operand.id)[n])
    }

    /// Reorders the axes of an operand: the first letters remain separate axes, each of the other groups becomes one axis.
    fn arranged(&mut self, operand: &Operand, groups: [&[char]; 3]) -> Result<Id> {
        let at = |c: &char| operand.axes.iter().position(|x| x == c);
        let order: Vec<usize> = groups.iter().flat_map(|group| group.iter()).filter_map(at).collect();
        let turned = self.graph.transpose(operand.id, &order)?;
        let sizes = |group: &[char]| group.iter().map(|c| self.size(operand, *c)).collect::<Vec<_>>();
        let mut shape = sizes(groups[0]);
        shape.extend([sizes(groups[1]).iter().product::<usize>(), sizes(groups[2]).iter().product()]);
        let counted = self.rows(operand.id).map(|r| operand.axes[r]);
        let batch = groups[0].len();
        let rows = counted.map(|c| match groups[0].iter().position(|x| *x == c) {
            Some(n) => n,
            None if groups[1].contains(&c) => batch,
            None => batch + 1,
        });
        self.graph.reshape(turned, shape, rows)
    }
}
