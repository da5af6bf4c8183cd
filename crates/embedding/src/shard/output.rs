//! Step 3: pools rows to the embeddings of the bags, with the kernels for unsharded tables.

use super::gather::{PieceRows, Pieces};
use super::input::{FeatureBags, ShardedInput};
use crate::table::Table;
use crate::tiers::Source;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::pool::{self, BagSums, Bags, Rows};

/// Writes the embeddings of the feature with index `number`.
///
/// # Errors
/// `Internal` if a block of rows does not match its table.
pub(crate) fn pool_feature(
    table: &Table,
    number: usize,
    input: &ShardedInput<'_>,
    (pieces, kernels): (&Pieces, Kernels),
    out: &mut BagSums<'_>,
) -> Result<()> {
    let feature: &FeatureBags<'_> = &input.features[number];
    for (question, pieces) in input.questions[feature.table].iter().zip(&pieces[feature.table]) {
        let reading = &question.readings[input.places[number]];
        for piece in pieces {
            let (rows, ids) = match &piece.rows {
                PieceRows::OfShard(shard) => (in_memory(table, *shard)?, &question.rows),
                PieceRows::Gathered { bytes, places } => (&bytes[..], places),
            };
            let rows = Rows::new(table.spec().format, piece.columns.len(), rows)?;
            let bags = Bags {
                ids: &ids[reading.rows.clone()],
                offsets: &feature.offsets[reading.bags.start..=reading.bags.end],
                weights: feature.weights.map(|weights| &weights[feature.range(&reading.bags)]),
                mean: feature.mean,
            };
            let (stride, column) = (out.stride, out.column + piece.columns.start);
            let data = &mut out.data[reading.bags.start * stride..];
            pool::pool(kernels, &rows, &bags, &mut BagSums { data, stride, column });
        }
    }
    Ok(())
}

fn in_memory(table: &Table, shard: usize) -> Result<&[u8]> {
    match &table.shards()[shard].source {
        Source::Host(bytes) => Ok(bytes),
        Source::Fetched(_) => {
            Err(Error::internal(format!("table `{}`: rows of a remote shard were not received", table.name())))
        }
    }
}
