//! Step 2: each shard pools the rows it was asked for.

use std::sync::Arc;
use std::time::Instant;

use super::input::{Distinct, ShardQuestion, ShardedInput};
use crate::device::cpu::Kernels;
use crate::device::cpu::pool::{self, BagSums, Bags, Rows};
use crate::embedding::report::{Lookup, LookupReport, OnDegraded, TableCounts};
use crate::embedding::table::{Group, Table};
use crate::embedding::tiers::{Fetched, Pending, RowState, Source};
use crate::error::{Error, Result};

/// The sums of each shard: `[tables, shards, bags x columns of the shard]`.
#[derive(Debug)]
pub(in crate::embedding) struct Partials {
    values: Vec<Vec<Vec<f32>>>,
}

impl Partials {
    /// What shard number `shard` of table number `table` answers, `[bags, columns of the shard]`.
    pub(super) fn of(&self, table: usize, shard: usize) -> &[f32] {
        &self.values[table][shard]
    }
}

/// Rows asked of one shard, on their way.
struct Leg<'a> {
    table: usize,
    group: usize,
    shard: usize,
    pending: Box<dyn Pending + 'a>,
}

/// The rows of a batch that are fetched, on their way.
pub(in crate::embedding) struct Travelling<'a> {
    /// `[tables, groups of the table]`, where rows are asked for.
    distinct: Vec<Vec<Option<Distinct>>>,
    legs: Vec<Leg<'a>>,
}

/// Asks for the rows that are fetched, and waits for nothing.
pub(in crate::embedding) fn ask<'a>(
    tables: &'a [Arc<Table>],
    input: &ShardedInput<'_>,
    terms: &Lookup,
) -> Travelling<'a> {
    let mut distinct: Vec<Vec<Option<Distinct>>> = Vec::with_capacity(tables.len());
    let mut legs: Vec<Leg<'a>> = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        let mut of_table = vec![None; table.groups().len()];
        for (group, question, shard) in asked(table, &input.questions[number]) {
            if let Source::Fetched(source) = &table.shards()[shard].source
                && !question.rows().is_empty()
            {
                let rows = of_table[group].get_or_insert_with(|| question.distinct()).rows.clone();
                legs.push(Leg { table: number, group, shard, pending: source.begin(rows, terms.deadline) });
            }
        }
        distinct.push(of_table);
    }
    Travelling { distinct, legs }
}

/// The sums of all shards: those in memory first, then those whose rows are waited for. Counts what became of rows.
///
/// # Errors
/// `Unavailable` or `DeadlineExceeded` where rows could not be fetched and the terms refuse that; `Corrupt` where a source
/// answers with other rows than it was asked for.
pub(in crate::embedding) fn compute(
    tables: &[Arc<Table>],
    input: &ShardedInput<'_>,
    travelling: Travelling<'_>,
    terms: &Lookup,
    kernels: Kernels,
    report: &mut LookupReport,
) -> Result<Partials> {
    let mut values: Vec<Vec<Vec<f32>>> = tables.iter().map(|t| vec![Vec::new(); t.shards().len()]).collect();
    for (number, table) in tables.iter().enumerate() {
        for (_, question, shard) in asked(table, &input.questions[number]) {
            let part = &table.shards()[shard];
            let mut sums = vec![0f32; (question.offsets().len() - 1) * part.columns.len()];
            if let Source::Host(bytes) = &part.source {
                let rows = Rows::new(table.spec().format, part.columns.len(), bytes)?;
                pool_rows(kernels, &rows, question, question.rows(), &mut sums);
            }
            values[number][shard] = sums;
        }
    }
    // The worst that became of each row of each group, over the columns that other shards hold.
    let mut states: Vec<Vec<Vec<RowState>>> = tables.iter().map(|t| vec![Vec::new(); t.groups().len()]).collect();
    let Travelling { distinct, legs } = travelling;
    for Leg { table: number, group, shard, pending } in legs {
        let table = &tables[number];
        let part = &table.shards()[shard];
        let asked = distinct[number][group].as_ref().expect("what travels was asked for");
        let place = |e: Error| e.within(format!("table `{}`, shard on `{}`", table.name(), part.device));
        let row_bytes = table.spec().format.row_bytes(part.columns.len())?;
        let fetched = pending.wait().and_then(|f| checked(f, asked.rows.len(), row_bytes)).map_err(place)?;
        if terms.on_degraded == OnDegraded::Fail {
            refuse_degraded(&fetched, terms).map_err(place)?;
        }
        let hit = |place: &i64| if fetched.states[*place as usize] == RowState::Hit { *place } else { -1 };
        let places: Vec<i64> = asked.places.iter().map(hit).collect();
        let rows = Rows::new(table.spec().format, part.columns.len(), &fetched.bytes)?;
        pool_rows(kernels, &rows, &input.questions[number][group], &places, &mut values[number][shard]);
        merge(&mut states[number][group], fetched.states);
    }
    for (number, groups) in states.iter().enumerate() {
        for (group, states) in groups.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            let asked = distinct[number][group].as_ref().expect("what has states was asked for");
            count_states(states, asked, input, (number, group), &mut report[number]);
        }
    }
    Ok(Partials { values })
}

/// Counts the ids of a question by what became of their rows.
fn count_states(
    states: &[RowState],
    asked: &Distinct,
    input: &ShardedInput<'_>,
    (table, group): (usize, usize),
    counts: &mut TableCounts,
) {
    let question = &input.questions[table][group];
    let bags = question.bags().iter().zip(input.readers(table));
    let example_of: Vec<usize> = bags.flat_map(|(bags, reader)| bags.clone().map(|bag| reader.example(bag))).collect();
    for (bag, ids) in question.offsets().windows(2).enumerate() {
        for place in &asked.places[ids[0]..ids[1]] {
            match states[*place as usize] {
                RowState::Hit => {}
                RowState::Unknown => counts.unknown += 1,
                RowState::Degraded => {
                    counts.degraded += 1;
                    counts.degraded_of.resize(input.examples, 0);
                    counts.degraded_of[example_of[bag]] += 1;
                }
            }
        }
    }
}

/// Each shard with its group's number and question.
fn asked<'a>(
    table: &'a Table,
    questions: &'a [ShardQuestion],
) -> impl Iterator<Item = (usize, &'a ShardQuestion, usize)> {
    let groups = table.groups().iter().zip(questions).enumerate();
    groups.flat_map(|(number, (group, question)): (usize, (&Group, &ShardQuestion))| {
        group.shards.iter().map(move |shard| (number, question, *shard))
    })
}

fn pool_rows(kernels: Kernels, rows: &Rows<'_>, question: &ShardQuestion, ids: &[i64], sums: &mut [f32]) {
    let bags = Bags { ids, offsets: question.offsets(), weights: question.weights(), mean: false };
    pool::pool(kernels, rows, &bags, &mut BagSums { data: sums, stride: rows.width(), column: 0 });
}

fn checked(fetched: Fetched, rows: usize, row_bytes: usize) -> Result<Fetched> {
    if fetched.states.len() != rows || fetched.bytes.len() != rows * row_bytes {
        return Err(Error::corrupt(format!(
            "{} states and {} bytes came for {rows} rows of {row_bytes} bytes",
            fetched.states.len(),
            fetched.bytes.len()
        )));
    }
    Ok(fetched)
}

fn refuse_degraded(fetched: &Fetched, terms: &Lookup) -> Result<()> {
    let degraded = fetched.states.iter().filter(|s| **s == RowState::Degraded).count();
    if degraded == 0 {
        return Ok(());
    }
    let what = format!("{degraded} of {} rows did not come in time", fetched.states.len());
    match terms.deadline {
        Some(deadline) if Instant::now() >= deadline => Err(Error::deadline(what)),
        _ => Err(Error::unavailable(what)),
    }
}

fn merge(states: &mut Vec<RowState>, more: Vec<RowState>) {
    if states.is_empty() {
        *states = more;
        return;
    }
    for (state, new) in states.iter_mut().zip(more) {
        *state = match (*state, new) {
            (RowState::Degraded, _) | (_, RowState::Degraded) => RowState::Degraded,
            (RowState::Unknown, _) | (_, RowState::Unknown) => RowState::Unknown,
            _ => RowState::Hit,
        };
    }
}
