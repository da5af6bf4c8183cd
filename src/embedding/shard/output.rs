//! Step 3: from the sums of the shards to the embeddings of the bags.

use super::ShardedTable;
use super::compute::Partials;
use super::input::Input;

/// Where the embeddings of a feature go: bag `b` to `data[b * stride + column ..]`.
pub(super) struct Target<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub column: usize,
}

/// Writes the embeddings of feature number `feature`.
pub(super) fn assemble(
    table: &ShardedTable,
    input: &Input,
    partials: &Partials,
    feature: usize,
    mean: bool,
    out: &mut Target<'_>,
) {
    let (number, nth) = input.places[feature];
    for (group, question) in table.groups.iter().zip(&input.questions[number]) {
        let before: usize = question.bags()[..nth].iter().map(ExactSizeIterator::len).sum();
        for &shard in &group.shards {
            let columns = &table.shards[shard].columns;
            let sums = partials.of(number, shard)[before * columns.len()..].chunks_exact(columns.len());
            for (bag, sum) in question.bags()[nth].clone().zip(sums) {
                let to = &mut out.data[bag * out.stride + out.column..][columns.clone()];
                // The first rows are copied, so that a table cut by columns alone keeps the very bits of its sums.
                match group.rows.start {
                    0 => to.copy_from_slice(sum),
                    _ => to.iter_mut().zip(sum).for_each(|(to, x)| *to += x),
                }
            }
        }
    }
    if !mean {
        return;
    }
    for (bag, length) in input.lengths[feature].iter().enumerate().filter(|(_, length)| **length > 1) {
        let factor = 1.0 / *length as f32;
        let to = &mut out.data[bag * out.stride + out.column..][..table.spec.width];
        to.iter_mut().for_each(|x| *x *= factor);
    }
}
