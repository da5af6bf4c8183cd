//! Sums over micro-batches in a fixed order, in which any process can compute a part.
//!
//! The order is a binary tree: neighbours are added in pairs, then neighbouring pairs, and so on. A host with
//! consecutive micro-batches of a batch adds up complete subtrees and sends few sums. Adding the sums of all hosts
//! gives the same bits as one host.

use std::ops::Range;

/// Sums of vectors, added in the order of a binary tree. Vectors must be pushed in the order of their numbers.
#[derive(Clone, Debug, Default)]
pub struct TreeSum {
    width: usize,
    /// Range of vector numbers in each sum; each sum is a complete subtree.
    nodes: Vec<Range<usize>>,
    /// The sums, `[nodes, width]`.
    numbers: Vec<f32>,
}

impl TreeSum {
    /// Creates a sum of vectors of `width` numbers.
    pub fn new(width: usize) -> Self {
        TreeSum { width, ..TreeSum::default() }
    }

    /// Removes all vectors; the memory is reused for vectors of `width` numbers.
    pub fn reset(&mut self, width: usize) {
        self.width = width;
        self.nodes.clear();
        self.numbers.clear();
    }

    /// Adds the next vector, or the sum of the next complete subtree. `write` adds the vector to zeros.
    pub fn push(&mut self, of: Range<usize>, write: impl FnOnce(&mut [f32])) {
        let first = self.numbers.len();
        self.numbers.resize(first + self.width, 0.0);
        write(&mut self.numbers[first..]);
        self.nodes.push(of);
        while let [.., left, right] = self.nodes.as_slice()
            && left.len() == right.len()
            && left.start.is_multiple_of(2 * left.len())
        {
            let both = left.start..right.end;
            self.join(both);
        }
    }

    /// Adds the vectors of `next`, whose numbers follow.
    pub(super) fn append(&mut self, next: &TreeSum) {
        self.push_sums(&next.nodes, &next.numbers);
    }

    /// Adds the sums of the next complete subtrees, `[subtrees, width]`.
    pub fn push_sums(&mut self, subtrees: &[Range<usize>], sums: &[f32]) {
        let width = self.width;
        for (n, of) in subtrees.iter().enumerate() {
            self.push(of.clone(), |to| to.copy_from_slice(&sums[n * width..][..width]));
        }
    }

    /// Replaces the last two sums by their sum.
    fn join(&mut self, both: Range<usize>) {
        let count = self.nodes.len() - 2;
        let (left, right) = self.numbers[count * self.width..].split_at_mut(self.width);
        left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
        self.numbers.truncate((count + 1) * self.width);
        self.nodes.truncate(count);
        self.nodes.push(both);
    }

    /// Returns the sums of complete subtrees, `[nodes, width]`, in the order of [`TreeSum::subtrees`].
    pub fn sums(&self) -> &[f32] {
        &self.numbers
    }

    /// Returns the sum of all vectors: the remaining subtrees are added from the last one on. Returns no numbers if
    /// there was no vector.
    pub fn total(&mut self) -> &[f32] {
        while let [.., left, right] = self.nodes.as_slice() {
            let both = left.start..right.end;
            self.join(both);
        }
        &self.numbers
    }

    /// Returns the subtrees that remain after the vectors of a range were added.
    pub fn subtrees(of: Range<usize>) -> Vec<Range<usize>> {
        let mut sums = TreeSum::new(0);
        of.for_each(|n| sums.push(n..n + 1, |_| ()));
        sums.nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(n: usize) -> [f32; 3] {
        [1.0 / (n as f32 + 3.0), (n * 7919 % 101) as f32 * 1e3, -1e-3 * n as f32]
    }

    /// Sum of a tree whose left half is the largest power of two below the count.
    fn naive(of: Range<usize>) -> [f32; 3] {
        if of.len() == 1 {
            return vector(of.start);
        }
        let middle = of.start + of.len().next_power_of_two() / 2;
        let (left, right) = (naive(of.start..middle), naive(middle..of.end));
        [left[0] + right[0], left[1] + right[1], left[2] + right[2]]
    }

    #[test]
    fn parts_of_a_sum_add_up_to_the_bits_of_the_tree() {
        let push = |sum: &mut TreeSum, n: usize| sum.push(n..n + 1, |to| to.copy_from_slice(&vector(n)));
        for count in 1..70 {
            let expected = naive(0..count);
            for parts in 1..=7 {
                let (mut all, mut appended) = (TreeSum::new(3), TreeSum::new(3));
                for part in 0..parts {
                    let own = count * part / parts..count * (part + 1) / parts;
                    let mut sum = TreeSum::new(3);
                    own.clone().for_each(|n| push(&mut sum, n));
                    let nodes = TreeSum::subtrees(own.clone());
                    assert_eq!(sum.sums().len(), 3 * nodes.len());
                    assert!(nodes.len() <= 2 * (own.len() + 1).ilog2() as usize + 1, "{own:?}: {nodes:?}");
                    for (node, numbers) in nodes.into_iter().zip(sum.sums().chunks_exact(3)) {
                        all.push(node, |to| to.copy_from_slice(numbers));
                    }
                    appended.append(&sum);
                }
                assert_eq!(all.total(), expected, "{count} in {parts} parts");
                assert_eq!(appended.total(), expected, "{count} in {parts} parts");
            }
        }
        assert!(TreeSum::new(3).total().is_empty());
    }
}
