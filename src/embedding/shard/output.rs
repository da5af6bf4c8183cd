//! Step 3: from the sums of the shards to the embeddings of the bags.

use super::compute::Partials;
use super::input::ShardedInput;
use crate::device::cpu::pool::BagSums;
use crate::embedding::table::Table;

/// Writes the embeddings of feature number `number`.
pub(in crate::embedding) fn assemble(
    table: &Table,
    number: usize,
    input: &ShardedInput<'_>,
    partials: &Partials,
    out: &mut BagSums<'_>,
) {
    let feature = &input.features[number];
    let nth = input.places[number];
    for (group, question) in table.groups().iter().zip(&input.questions[feature.table]) {
        let before: usize = question.bags()[..nth].iter().map(ExactSizeIterator::len).sum();
        for &shard in &group.shards {
            let columns = &table.shards()[shard].columns;
            let sums = partials.of(feature.table, shard)[before * columns.len()..].chunks_exact(columns.len());
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
    if !feature.mean {
        return;
    }
    for (bag, length) in feature.lengths().enumerate().filter(|(_, length)| *length > 1) {
        let factor = 1.0 / length as f32;
        let to = &mut out.data[bag * out.stride + out.column..][..table.width()];
        to.iter_mut().for_each(|x| *x *= factor);
    }
}
