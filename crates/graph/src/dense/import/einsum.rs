//! `Einsum`, computed as one matrix product per two operands, from left to right.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, refused};
use crate::dense::ir::{Id, positions, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Fold;

/// Operand with one letter per axis.
struct Operand {
    id: Id,
    axes: Vec<char>,
}

/// Letters from `OPEN` on stand for the axes of an ellipsis, counted from the ellipsis's last axis.
const OPEN: char = '\u{e000}';

fn open_letter(from_end: usize) -> char {
    char::from_u32(OPEN as u32 + from_end as u32).unwrap_or(OPEN)
}

/// Returns one letter per axis of an operand of `rank` axes; `None` if `axes` contains something other than letters.
fn letters(axes: &str, rank: usize) -> Option<Vec<char>> {
    let all: Vec<char> = match axes.split_once("...") {
        Some((ahead, behind)) => {
            let open = rank.checked_sub(ahead.len() + behind.len()).filter(|&n| n <= 64)?;
            ahead.chars().chain((0..open).rev().map(open_letter)).chain(behind.chars()).collect()
        }
        None => axes.chars().collect(),
    };
    let is_letter = |c: &char| c.is_ascii_alphabetic() || *c >= OPEN;
    all.iter().all(is_letter).then_some(all)
}

/// Returns the distinct letters in their order.
fn distinct(letters: &[char]) -> Vec<char> {
    let mut made: Vec<char> = Vec::with_capacity(letters.len());
    letters.iter().for_each(|c| {
        if !made.contains(c) {
            made.push(*c)
        }
    });
    made
}

impl Importer {
    pub(super) fn einsum(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let equation: String = attributes.text("equation", "").split_whitespace().collect();
        let invalid = || refused(format!("equation `{equation}`, expected letters, each at most once in the result"));
        let (operands, result) = match equation.split_once("->") {
            Some((operands, result)) => (operands, Some(result)),
            None => (&equation[..], None),
        };
        let names: Vec<&str> = operands.split(',').collect();
        if node.input.len() != names.len() {
            return Err(invalid());
        }
        let (mut all, mut named) = (Vec::with_capacity(names.len()), Vec::new());
        for (n, axes) in names.iter().enumerate() {
            let id = self.value(node, n)?;
            let axes = letters(axes, self.rank(id)).filter(|axes| axes.len() == self.rank(id)).ok_or_else(invalid)?;
            named.extend(axes.iter().filter(|c| **c < OPEN));
            all.push(self.diagonal(id, axes)?);
        }
        // Number of axes of the longest ellipsis.
        let open = all.iter().flat_map(|operand| &operand.axes).filter(|c| **c >= OPEN).copied().max();
        let rank = open.map_or(0, |last| (last as u32 - OPEN as u32) as usize + 1);
        let result: Vec<char> = match result {
            Some(result) => {
                let of_letters = result.replace("...", "").chars().count();
                let all = letters(result, of_letters + rank).ok_or_else(invalid)?;
                Some(all).filter(|all| distinct(all).len() == all.len()).ok_or_else(invalid)?
            }
            None => {
                let mut counts = std::collections::BTreeMap::new();
                named.iter().for_each(|&c| *counts.entry(c).or_insert(0) += 1);
                let once = counts.into_iter().filter(|(_, count)| *count == 1).map(|(c, _)| c);
                (0..rank).rev().map(open_letter).chain(once).collect()
            }
        };
        if !result.iter().all(|c| all.iter().any(|operand| operand.axes.contains(c))) {
            return Err(invalid());
        }
        let mut operands = all.into_iter();
        let mut left = operands.next().ok_or_else(invalid)?;
        let rest: Vec<Operand> = operands.collect();
        if rest.is_empty() {
            let Operand { id, axes } = self.without(&left, &[], &result)?;
            let order: Vec<usize> = result.iter().filter_map(|c| axes.iter().position(|x| x == c)).collect();
            return self.graph.transpose(id, &order);
        }
        // An intermediate result keeps the letters that the result or later operands have.
        for (n, right) in rest.iter().enumerate() {
            let is_last = n + 1 == rest.len();
            let is_needed = |c: &char| result.contains(c) || rest[n + 1..].iter().any(|later| later.axes.contains(c));
            let made: Vec<char> = match is_last {
                true => result.clone(),
                false => {
                    let others = right.axes.iter().filter(|c| !left.axes.contains(c));
                    left.axes.iter().chain(others).filter(|c| is_needed(c)).copied().collect()
                }
            };
            let id = self.product_of(&left, right, &made)?;
            left = Operand { id, axes: made };
        }
        Ok(left.id)
    }

    /// Returns an operand in which each letter occurs once: the axes of a repeated letter become their diagonal.
    fn diagonal(&mut self, id: Id, axes: Vec<char>) -> Result<Operand> {
        let own = distinct(&axes);
        if own.len() == axes.len() {
            return Ok(Operand { id, axes });
        }
        let (shape, counted) = (self.graph.shape(id).to_vec(), self.rows(id).map(|r| axes[r]));
        let along = strides(&shape);
        let (mut to, mut steps) = (Vec::with_capacity(own.len()), Vec::with_capacity(own.len()));
        for letter in &own {
            let places: Vec<usize> = (0..axes.len()).filter(|&n| axes[n] == *letter).collect();
            let size = shape[places[0]];
            if places.iter().any(|&n| shape[n] != size) || (places.len() > 1 && counted == Some(*letter)) {
                return Err(refused(format!("cannot take the diagonal `{letter}` of shape {shape:?}")));
            }
            to.push(size);
            steps.push(places.iter().map(|&n| along[n]).sum::<usize>());
        }
        let rows = counted.and_then(|c| own.iter().position(|x| *x == c));
        let id = self.graph.pick(id, positions(&to, &steps), to, rows)?;
        Ok(Operand { id, axes: own })
    }

    fn product_of(&mut self, left: &Operand, right: &Operand, result: &[char]) -> Result<Id> {
        let (left, right) = (self.without(left, &right.axes, result)?, self.without(right, &left.axes, result)?);
        // If only one operand has the row axis, that operand becomes the left one.
        let counts = |operand: &Operand| self.rows(operand.id).is_some();
        // Otherwise the operand whose own letter comes first in the result becomes the left one, so that no
        // transposition is needed.
        let first = |operand: &Operand, other: &Operand| {
            result.iter().position(|c| operand.axes.contains(c) && !other.axes.contains(c)).unwrap_or(result.len())
        };
        let is_turned = match (counts(&left), counts(&right)) {
            (of_left, of_right) if of_left == of_right => first(&right, &left) < first(&left, &right),
            (_, of_right) => of_right,
        };
        let (left, right) = if is_turned { (right, left) } else { (left, right) };
        self.multiplied(&left, &right, result)
    }

    /// Sums an operand over the axes that neither the other operand nor the result has.
    fn without(&mut self, operand: &Operand, other: &[char], result: &[char]) -> Result<Operand> {
        let (id, axes) = (operand.id, operand.axes.clone());
        let is_kept = |c: &char| other.contains(c) || result.contains(c);
        let removed: Vec<usize> = (0..axes.len()).filter(|&n| !is_kept(&axes[n])).collect();
        if removed.is_empty() {
            return Ok(Operand { id, axes });
        }
        let folded = self.graph.fold(Fold::Sum, id, &removed)?;
        let retained: Vec<usize> = (0..axes.len()).filter(|n| !removed.contains(n)).collect();
        let shape = retained.iter().map(|&n| self.graph.shape(id)[n]).collect();
        let rows = self.rows(folded).and_then(|r| retained.iter().position(|&n| n == r));
        let id = self.graph.reshape(folded, shape, rows)?;
        Ok(Operand { id, axes: retained.iter().map(|&n| axes[n]).collect() })
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
        // Restores one axis per letter of the product.
        let letters = [&batch[..], &ahead, &behind].concat();
        let size = |c: &char| match left.axes.iter().position(|x| x == c) {
            Some(n) => self.graph.shape(left.id)[n].max(self.size(right, *c)),
            None => self.size(right, *c),
        };
        let shape: Vec<usize> = letters.iter().map(size).collect();
        let of = |operand: &Operand| self.rows(operand.id).map(|r| operand.axes[r]);
        let rows = of(left).or(of(right)).and_then(|c| letters.iter().position(|x| *x == c));
        let complete = self.graph.reshape(product, shape, rows)?;
        let order: Vec<usize> = result.iter().filter_map(|c| letters.iter().position(|x| x == c)).collect();
        self.graph.transpose(complete, &order)
    }

    fn size(&self, operand: &Operand, letter: char) -> usize {
        operand.axes.iter().position(|x| *x == letter).map_or(1, |n| self.graph.shape(operand.id)[n])
    }

    /// Reorders the axes of an operand: letters of the first group remain separate axes, each other group becomes one
    /// axis.
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
