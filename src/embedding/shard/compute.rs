//! Step 2: each shard pools the rows it was asked for.

use std::sync::Arc;
use std::time::Instant;

use super::input::{Distinct, Input, Question};
use super::{Group, ShardedTable};
use crate::device::cpu::Kernels;
use crate::device::cpu::pool::{self, Bags, Pooled, Rows};
use crate::embedding::lookup::{Lookup, LookupReport, OnDegraded, TableCounts};
use crate::embedding::table::Source;
use crate::embedding::tiers::{Fetched, Pending, RowState};
use crate::error::{Error, Result};

/// The sums of each shard: `[tables, shards, bags x columns of the shard]`.
#[derive(Clone, Debug)]
pub struct Partials {
    pub(super) values: Vec<Vec<Vec<f32>>>,
}

impl Partials {
    /// What shard number `shard` of table number `table` answers, `[bags, columns of the shard]`.
    pub fn of(&self, table: usize, shard: usize) -> &[f32] {
        &self.values[table][shard]
    }
}

/// Rows asked of one shard, on their way.
struct Travelling<'a> {
    table: usize,
    shard: usize,
    pending: Box<dyn Pending + 'a>,
}

pub(super) fn compute(
    tables: &[Arc<ShardedTable>],
    input: &Input,
    terms: &Lookup,
    kernels: Kernels,
) -> Result<(Partials, LookupReport)> {
    let mut values: Vec<Vec<Vec<f32>>> = tables.iter().map(|t| vec![Vec::new(); t.shards.len()]).collect();
    let mut report = input.report.clone();
    let mut distinct: Vec<Vec<Option<Distinct>>> = Vec::with_capacity(tables.len());
    let mut travelling: Vec<Travelling<'_>> = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        distinct.push(vec![None; table.groups.len()]);
        for (group, question, shard) in asked(table, &input.questions[number]) {
            if let Source::Fetched(source) = table.shards[shard].table.source()
                && !question.rows().is_empty()
            {
                let rows = &distinct[number][group].get_or_insert_with(|| question.distinct()).rows;
                let pending = source.begin(rows.clone(), terms.deadline);
                travelling.push(Travelling { table: number, shard, pending });
            }
        }
    }
    for (number, table) in tables.iter().enumerate() {
        for (_, question, shard) in asked(table, &input.questions[number]) {
            let width = table.shards[shard].columns.len();
            let mut sums = vec![0f32; (question.offsets().len() - 1) * width];
            if let Some(rows) = table.shards[shard].table.host_rows() {
                pool_rows(kernels, &rows, question, question.rows(), &mut sums);
            }
            values[number][shard] = sums;
        }
    }
    // The worst that became of each row of each group, over the columns that other shards hold.
    let mut states: Vec<Vec<Vec<RowState>>> = tables.iter().map(|t| vec![Vec::new(); t.groups.len()]).collect();
    for Travelling { table: number, shard, pending } in travelling {
        let table = &tables[number];
        let group = table.groups.iter().position(|g| g.shards.contains(&shard)).expect("every shard is in a group");
        let asked = distinct[number][group].as_ref().expect("what travels was asked for");
        let place = || format!("table `{}`, shard on `{}`", table.spec.name, table.shards[shard].device);
        let fetched = pending.wait().and_then(|f| checked(table, shard, asked, f)).map_err(|e| e.within(place()))?;
        if terms.on_degraded == OnDegraded::Fail {
            refuse_degraded(&fetched, terms).map_err(|e| e.within(place()))?;
        }
        let hit = |place: &i64| if fetched.states[*place as usize] == RowState::Hit { *place } else { -1 };
        let places: Vec<i64> = asked.places.iter().map(hit).collect();
        let rows = Rows::new(table.spec.format, table.shards[shard].columns.len(), &fetched.bytes)?;
        pool_rows(kernels, &rows, &input.questions[number][group], &places, &mut values[number][shard]);
        merge(&mut states[number][group], fetched.states);
    }
    for (number, groups) in states.iter().enumerate() {
        for (group, states) in groups.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            let asked = distinct[number][group].as_ref().expect("what has states was asked for");
            count_states(states, asked, &input.questions[number][group], input.examples(), &mut report[number]);
        }
    }
    Ok((Partials { values }, report))
}

/// Counts the ids of a question by what became of their rows.
fn count_states(states: &[RowState], asked: &Distinct, question: &Question, examples: usize, counts: &mut TableCounts) {
    let example_of: Vec<usize> = question.bags().iter().flat_map(Clone::clone).collect();
    for (bag, ids) in question.offsets().windows(2).enumerate() {
        for place in &asked.places[ids[0]..ids[1]] {
            match states[*place as usize] {
                RowState::Hit => {}
                RowState::Unknown => counts.unknown += 1,
                RowState::Degraded => {
                    counts.degraded += 1;
                    counts.degraded_of.resize(examples, 0);
                    counts.degraded_of[example_of[bag]] += 1;
                }
            }
        }
    }
}

/// Each shard with its group's number and question.
fn asked<'a>(table: &'a ShardedTable, questions: &'a [Question]) -> impl Iterator<Item = (usize, &'a Question, usize)> {
    let groups = table.groups.iter().zip(questions).enumerate();
    groups.flat_map(|(number, (group, question)): (usize, (&Group, &Question))| {
        group.shards.iter().map(move |shard| (number, question, *shard))
    })
}

fn pool_rows(kernels: Kernels, rows: &Rows<'_>, question: &Question, ids: &[i64], sums: &mut [f32]) {
    let bags = Bags { ids, offsets: question.offsets(), weights: question.weights(), mean: false };
    pool::pool(kernels, rows, &bags, &mut Pooled { data: sums, stride: rows.width(), column: 0 });
}

fn checked(table: &ShardedTable, shard: usize, asked: &Distinct, fetched: Fetched) -> Result<Fetched> {
    let (rows, row_bytes) = (asked.rows.len(), table.shards[shard].table.spec().row_bytes()?);
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
