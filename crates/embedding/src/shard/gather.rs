//! Step 2: gathers the requested rows.
//!
//! If a table is sharded by rows, the rows of a batch are first gathered as complete rows and then pooled in the
//! order of their ids. Partial sums per shard would round differently than the unsharded table, and differently per sharding.

use std::ops::Range;
use std::sync::Arc;

use super::cut::ColumnBytes;
use super::input::{CopyQuestion, Distinct, ShardedInput};
use crate::report::{Lookup, LookupReport, OnDegraded, TableCounts};
use crate::spec::TableSpec;
use crate::table::{Group, Table};
use crate::tiers::{Fetched, Pending, RowState, Source};
use sterling_core::error::{Error, Result};

/// Rows that have been requested from one shard.
struct ShardFetch<'a> {
    table: usize,
    copy: usize,
    shard: usize,
    /// Range within the distinct rows that the replica needs.
    rows: Range<usize>,
    pending: Box<dyn Pending + 'a>,
}

/// Remote rows of a batch that have been requested.
pub(crate) struct Travelling<'a> {
    /// Distinct rows, `[tables, replicas]`; present if rows are requested or gathered.
    distinct: Vec<Vec<Option<Distinct>>>,
    legs: Vec<ShardFetch<'a>>,
}

/// Sends requests for the remote rows, without waiting.
pub(crate) fn ask<'a>(tables: &'a [Arc<Table>], input: &ShardedInput<'_>, terms: &Lookup) -> Travelling<'a> {
    let mut distinct: Vec<Vec<Option<Distinct>>> = Vec::with_capacity(tables.len());
    let mut legs: Vec<ShardFetch<'a>> = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        let mut of_table = Vec::with_capacity(table.copies());
        for (copy, question) in input.questions[number].iter().enumerate() {
            let groups = groups_of(table, copy);
            let mut shards = groups.iter().flat_map(|g| &g.shards);
            let is_gathered = groups.len() > 1 || shards.any(|s| table.shards()[*s].is_fetched());
            let distinct = is_gathered.then(|| question.distinct());
            for (group, rows) in groups.iter().zip(distinct.iter().flat_map(|d| group_ranges(d, groups))) {
                for &shard in group.shards.iter().filter(|_| !rows.is_empty()) {
                    let Source::Fetched(source) = &table.shards()[shard].source else { continue };
                    let requested = distinct.iter().flat_map(|d| &d.rows[rows.clone()]).map(|r| r - group.rows.start);
                    let pending = source.begin(requested.collect(), terms);
                    legs.push(ShardFetch { table: number, copy, shard, rows: rows.clone(), pending });
                }
            }
            of_table.push(distinct);
        }
        distinct.push(of_table);
    }
    for leg in &legs {
        if let Source::Fetched(source) = &tables[leg.table].shards()[leg.shard].source {
            source.send();
        }
    }
    Travelling { distinct, legs }
}

/// Returns the ranges of rows into which a replica is sharded, ascending.
fn groups_of(table: &Table, copy: usize) -> &[Group] {
    let first = table.groups().partition_point(|g| g.copy < copy);
    let of_copy = table.groups()[first..].partition_point(|g| g.copy == copy);
    &table.groups()[first..first + of_copy]
}

/// Returns the range of each group in the distinct rows.
fn group_ranges(distinct: &Distinct, groups: &[Group]) -> Vec<Range<usize>> {
    let at = |row: u64| distinct.rows.partition_point(|r| *r < row);
    groups.iter().map(|g| at(g.rows.start)..at(g.rows.end)).collect()
}

/// Rows of one range of columns, from which one replica pools its bags.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(super) columns: Range<usize>,
    pub(super) rows: PieceRows,
}

#[derive(Debug)]
pub(crate) enum PieceRows {
    /// Rows of a shard in memory; the rows of the request are indices into the shard.
    OfShard(usize),
    /// Gathered rows: their bytes, and per requested row its index among the gathered rows, -1 for a missing row.
    Gathered { bytes: Vec<u8>, places: Vec<i64> },
}

/// Rows to pool from, `[tables, replicas, column ranges]`.
pub(crate) type Pieces = Vec<Vec<Vec<Piece>>>;

/// Waits for the remote rows, gathers the rows of tables that are sharded by rows, and counts rows by outcome.
///
/// # Errors
/// `Unavailable` or `DeadlineExceeded` if remote rows are missing and the options forbid degraded rows; `Corrupt` if a source
/// returns other rows than requested.
pub(crate) fn gather(
    tables: &[Arc<Table>],
    input: &ShardedInput<'_>,
    travelling: Travelling<'_>,
    terms: &Lookup,
    report: &mut LookupReport,
) -> Result<Pieces> {
    let Travelling { distinct, legs } = travelling;
    let mut came: Vec<ReceivedRows> = Vec::with_capacity(legs.len());
    for ShardFetch { table: number, copy, shard, rows, pending } in legs {
        let (table, part) = (&tables[number], &tables[number].shards()[shard]);
        let place = |e: Error| e.within(format!("table `{}`, shard on `{}`", table.name(), part.device));
        let row_bytes = table.spec().format.row_bytes(part.columns.len())?;
        let fetched = pending.wait().and_then(|f| checked(f, rows.len(), row_bytes)).map_err(place)?;
        if terms.on_degraded == OnDegraded::Fail {
            reject_degraded(&fetched, terms).map_err(place)?;
        }
        came.push(ReceivedRows { at: (number, copy), shard, rows, fetched });
    }
    // Received rows are in the order of the requests: by table, then by replica.
    let mut came = came.into_iter().peekable();
    let mut pieces: Pieces = Vec::with_capacity(tables.len());
    for (number, table) in tables.iter().enumerate() {
        let mut of_table = Vec::with_capacity(table.copies());
        for (copy, question) in input.questions[number].iter().enumerate() {
            let distinct = distinct[number][copy].as_ref();
            let here: Vec<ReceivedRows> = std::iter::from_fn(|| came.next_if(|c| c.at == (number, copy))).collect();
            let states = distinct.map(|distinct| worst(distinct.rows.len(), &here));
            if let Some((distinct, states)) = distinct.zip(states.as_ref()) {
                count_states(states, distinct, question, (input, number), &mut report[number]);
            }
            let requested = distinct.zip(states.as_deref());
            of_table.push(match (groups_of(table, copy), requested) {
                ([group], _) => side_by_side(table, group, requested, here)?,
                (groups, Some(requested)) => vec![complete_rows(table, groups, requested, &here)?],
                (_, None) => {
                    return Err(Error::internal(format!(
                        "table `{}`: remote rows were not requested before they are read",
                        table.name()
                    )));
                }
            });
        }
        pieces.push(of_table);
    }
    Ok(pieces)
}

/// Rows that arrived from one shard.
struct ReceivedRows {
    /// Indexes of the table and of its replica.
    at: (usize, usize),
    shard: usize,
    rows: Range<usize>,
    fetched: Fetched,
}

/// Returns one block of columns per shard of a replica that is not sharded by rows. A row that one shard lacks is missing in
/// all blocks.
fn side_by_side(
    table: &Table,
    group: &Group,
    requested: Option<(&Distinct, &[RowState])>,
    mut came: Vec<ReceivedRows>,
) -> Result<Vec<Piece>> {
    let is_whole = requested.is_none_or(|(_, states)| states.iter().all(|state| *state == RowState::Hit));
    let piece = |&shard: &usize| {
        let part = &table.shards()[shard];
        let rows = match (&part.source, requested) {
            (_, None) => PieceRows::OfShard(shard),
            (Source::Host(_), _) if is_whole => PieceRows::OfShard(shard),
            (Source::Host(held), Some((distinct, states))) => {
                let row_bytes = table.spec().format.row_bytes(part.columns.len())?;
                let row = |row: &u64| &held[(row - group.rows.start) as usize * row_bytes..][..row_bytes];
                let bytes = distinct.rows.iter().flat_map(row).copied().collect();
                PieceRows::Gathered { bytes, places: hits(distinct, states) }
            }
            (Source::Fetched(_), Some((distinct, states))) => {
                let of_shard = came.iter().position(|c| c.shard == shard);
                let Fetched { bytes, .. } = of_shard.map(|at| came.swap_remove(at).fetched).unwrap_or_default();
                PieceRows::Gathered { bytes, places: hits(distinct, states) }
            }
        };
        Ok(Piece { columns: part.columns.clone(), rows })
    };
    group.shards.iter().map(piece).collect()
}

/// Returns the complete rows of a replica that is sharded by rows, from all tiers.
fn complete_rows(
    table: &Table,
    groups: &[Group],
    (distinct, states): (&Distinct, &[RowState]),
    came: &[ReceivedRows],
) -> Result<Piece> {
    let spec = table.spec();
    let row_bytes = spec.row_bytes()?;
    let mut bytes = vec![0; distinct.rows.len() * row_bytes];
    for (group, rows) in groups.iter().zip(group_ranges(distinct, groups)) {
        let to = &mut bytes[rows.start * row_bytes..rows.end * row_bytes];
        for &shard in &group.shards {
            let part = &table.shards()[shard];
            let put = RowParts::of(spec, &part.columns)?;
            match &part.source {
                Source::Host(held) => {
                    let local = distinct.rows[rows.clone()].iter().map(|row| (row - group.rows.start) as usize);
                    put.rows(local.map(|row| &held[row * put.part_bytes..][..put.part_bytes]), to);
                }
                Source::Fetched(_) => {
                    let fetched = came.iter().find(|c| c.shard == shard).map_or(&[][..], |c| &c.fetched.bytes);
                    put.rows(fetched.chunks_exact(put.part_bytes), to);
                }
            }
        }
    }
    Ok(Piece { columns: 0..spec.width, rows: PieceRows::Gathered { bytes, places: hits(distinct, states) } })
}

/// Columns of rows in a shard, to be copied into complete rows.
struct RowParts {
    row_bytes: usize,
    part_bytes: usize,
    /// `None` if the shard has complete rows.
    columns: Option<ColumnBytes>,
}

impl RowParts {
    fn of(spec: &TableSpec, columns: &Range<usize>) -> Result<Self> {
        let row_bytes = spec.row_bytes()?;
        Ok(match columns.len() == spec.width {
            true => RowParts { row_bytes, part_bytes: row_bytes, columns: None },
            false => {
                let columns = ColumnBytes::of(spec, columns)?;
                RowParts { row_bytes, part_bytes: columns.part_bytes(), columns: Some(columns) }
            }
        })
    }

    fn rows<'b>(&self, parts: impl Iterator<Item = &'b [u8]>, to: &mut [u8]) {
        for (row, part) in to.chunks_exact_mut(self.row_bytes).zip(parts) {
            match &self.columns {
                None => row.copy_from_slice(part),
                Some(columns) => columns.put(part, row),
            }
        }
    }
}

/// Returns the index of each requested row among the distinct rows, -1 for a missing row.
fn hits(distinct: &Distinct, states: &[RowState]) -> Vec<i64> {
    let is_hit = |place: i64| usize::try_from(place).is_ok_and(|place| states.get(place) == Some(&RowState::Hit));
    distinct.places.iter().map(|&place| if is_hit(place) { place } else { -1 }).collect()
}

/// Returns the worst outcome of each row over all column ranges; rows in memory are present.
fn worst(rows: usize, came: &[ReceivedRows]) -> Vec<RowState> {
    let mut states = vec![RowState::Hit; rows];
    for part in came {
        for (state, new) in states[part.rows.clone()].iter_mut().zip(&part.fetched.states) {
            *state = match (*state, *new) {
                (RowState::Degraded, _) | (_, RowState::Degraded) => RowState::Degraded,
                (RowState::Unknown, _) | (_, RowState::Unknown) => RowState::Unknown,
                _ => RowState::Hit,
            };
        }
    }
    states
}

/// Counts the ids of a request by the outcome of their rows.
fn count_states(
    states: &[RowState],
    distinct: &Distinct,
    question: &CopyQuestion,
    (input, table): (&ShardedInput<'_>, usize),
    counts: &mut TableCounts,
) {
    if states.iter().all(|state| *state == RowState::Hit) {
        return;
    }
    for (reading, reader) in question.readings.iter().zip(input.readers(table)) {
        let first = reader.range(&reading.bags).start;
        for bag in reading.bags.clone() {
            let ids = reader.range(&(bag..bag + 1));
            let of_bag = reading.rows.start + ids.start - first..reading.rows.start + ids.end - first;
            for place in distinct.places[of_bag].iter().filter_map(|place| usize::try_from(*place).ok()) {
                match states[place] {
                    RowState::Hit => {}
                    RowState::Unknown => counts.unknown += 1,
                    RowState::Degraded => {
                        counts.degraded += 1;
                        counts.degraded_of.resize(input.examples, 0);
                        counts.degraded_of[reader.example(bag)] += 1;
                    }
                }
            }
        }
    }
}

fn checked(fetched: Fetched, rows: usize, row_bytes: usize) -> Result<Fetched> {
    if fetched.states.len() != rows || fetched.bytes.len() != rows * row_bytes {
        return Err(Error::corrupt(format!(
            "the source returned {} states and {} bytes, expected {rows} rows of {row_bytes} bytes",
            fetched.states.len(),
            fetched.bytes.len()
        )));
    }
    Ok(fetched)
}

fn reject_degraded(fetched: &Fetched, terms: &Lookup) -> Result<()> {
    let degraded = fetched.states.iter().filter(|s| **s == RowState::Degraded).count();
    if degraded == 0 {
        return Ok(());
    }
    Err(terms.unavailable(format_args!("{degraded} of {} rows", fetched.states.len())))
}
