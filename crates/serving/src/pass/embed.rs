//! Steps 1 and 2: computes query embeddings from features, and the other user tensors that the reranker reads.

use super::batch::Batch;
use super::fetch::lookup_each;
use super::trace::Trace;
use super::work::{Prepared, Query, Task, not_finite};
use crate::view::View;
use sterling_core::error::{Error, Result};
use sterling_core::limits::COMPONENT_MAX;
use sterling_core::request::{Answer, Content, EmbeddedUser, OnDegraded};
use sterling_core::tensor::Tensor;
use sterling_embedding::Lookup;
use sterling_graph::tower::{self, FeatureRow, Pooled, Threads, Tower};
use sterling_snapshot::model::UserInput;

/// Error for an invalid query embedding of the user tower.
pub(super) const NOT_FINITE: &str = "the user tower returned a query that is not finite or too large";

/// Request with its query embeddings, on its way through the pass.
pub(super) struct EmbeddedRequest<'a> {
    /// Index in the batch.
    pub(super) place: usize,
    pub(super) prepared: &'a Prepared,
    /// Query embedding `[D]`, or `[Tq, D]` for a model with several queries.
    pub(super) vector: Vec<f32>,
    /// Numbers of each user tensor that the reranker reads; empty for the query itself.
    pub(super) user: Vec<Vec<f32>>,
    pub(super) degraded_rows: u64,
    pub(super) trace: Trace,
}

impl EmbeddedRequest<'_> {
    pub(super) fn embedding(&self) -> Answer {
        let tensors = match self.prepared.task {
            Task::Embed { whole: true } => self.user.clone(),
            _ => Vec::new(),
        };
        let largest = self.prepared.largest();
        let content = Content::Embedding(EmbeddedUser { query: self.vector.clone(), tensors, largest });
        Answer { content, degraded_rows: self.degraded_rows, explain: None }
    }

    /// Returns the user tensors that the reranker reads, in its order.
    pub(super) fn user_tensors<'a>(&'a self, inputs: &[UserInput]) -> Vec<&'a [f32]> {
        if self.user.is_empty() {
            return inputs.iter().map(|_| &self.vector[..]).collect();
        }
        let tensor = |(input, own): (&UserInput, &'a Vec<f32>)| match input {
            UserInput::Query => &self.vector[..],
            UserInput::Output(_) | UserInput::Feature(_) => &own[..],
        };
        inputs.iter().zip(&self.user).map(tensor).collect()
    }
}

/// Outputs of the user tower for one row.
type TowerOutputs = Vec<Vec<f32>>;

/// Computes the query embeddings of requests; requests without a valid embedding are answered with the error.
pub(super) fn embed<'a>(
    batch: &'a dyn Batch,
    view: &View,
    wanted: &[usize],
    threads: &Threads,
    graphs: &mut tower::Scratch,
) -> Vec<EmbeddedRequest<'a>> {
    let mut embedded = Vec::with_capacity(wanted.len());
    let mut towered: Vec<(usize, &FeatureRow)> = Vec::new();
    for &place in wanted {
        let prepared = batch.prepared(place);
        match &prepared.query {
            Query::Features { row, .. } => towered.push((place, row)),
            Query::Vector(vector) => {
                let (vector, trace) = (vector.clone(), prepared.trace.clone());
                embedded.push(EmbeddedRequest { place, prepared, vector, user: Vec::new(), degraded_rows: 0, trace });
            }
            Query::Embedded(made) => {
                let (vector, user, trace) = (made.query.clone(), made.tensors.clone(), prepared.trace.clone());
                embedded.push(EmbeddedRequest { place, prepared, vector, user, degraded_rows: 0, trace });
            }
        }
    }
    let package = &view.main().package;
    let Some(tower) = package.user.as_ref().filter(|_| !towered.is_empty()) else { return embedded };
    let mut trace = Trace::default();
    let ids = towered.iter().map(|(_, row)| row.ids() as u64).sum();
    let bytes = towered.iter().map(|(_, row)| tower.row_bytes(row)).sum();
    let pooled = trace.step("lookup", || lookup(batch, tower, &towered), |_| (ids, bytes));
    let mut ready: Vec<(usize, &FeatureRow, Pooled)> = Vec::new();
    for (&(place, row), pooled) in towered.iter().zip(pooled) {
        match pooled {
            Ok(pooled) => ready.push((place, row, pooled)),
            Err(e) => batch.answer(place, Err(e)),
        }
    }
    let rows: Vec<(&FeatureRow, &Pooled)> = ready.iter().map(|(_, row, pooled)| (*row, pooled)).collect();
    let count = rows.len() as u64;
    let made = trace.step("tower", || run_each(tower, &rows, threads, graphs), |_| (count, 0));
    for ((place, row, pooled), made) in ready.iter().zip(made) {
        let prepared = batch.prepared(*place);
        match made {
            Ok(mut made) => {
                let user = package.user_tensors(row, pooled, &mut made);
                let (vector, trace) = (made.swap_remove(0), trace.and(&prepared.trace));
                let degraded_rows = pooled.degraded_rows;
                embedded.push(EmbeddedRequest { place: *place, prepared, vector, user, degraded_rows, trace });
            }
            Err(e) => batch.answer(*place, Err(e)),
        }
    }
    embedded
}

/// Returns the pooled embeddings of all rows; embeddings that were not fetched before are looked up now, in one call.
fn lookup(batch: &dyn Batch, tower: &Tower, towered: &[(usize, &FeatureRow)]) -> Vec<Result<Pooled>> {
    let fetched = |&(place, _): &(usize, &FeatureRow)| match &batch.prepared(place).query {
        Query::Features { fetched: Some(Ok(pooled)), .. } => Some(Ok(pooled.clone())),
        Query::Features { fetched: Some(Err(e)), .. } => Some(Err(e.again())),
        _ => None,
    };
    let mut pooled: Vec<Option<Result<Pooled>>> = towered.iter().map(fetched).collect();
    let missing: Vec<usize> = (0..towered.len()).filter(|n| pooled[*n].is_none()).collect();
    let alike = |n: &usize| (towered[*n].1, batch.prepared(towered[*n].0).reading.on_degraded);
    let rows: Vec<(&FeatureRow, OnDegraded)> = missing.iter().map(alike).collect();
    let deadline = missing.iter().map(|&n| batch.deadline(towered[n].0)).max().flatten();
    let terms = Lookup { deadline, ..Lookup::default() };
    for (n, found) in missing.into_iter().zip(lookup_each(tower, &rows, terms)) {
        pooled[n] = Some(found);
    }
    let missing = || Err(Error::internal("the embedding lookup returned too few rows, expected one per request"));
    pooled.into_iter().map(|pooled| pooled.unwrap_or_else(missing)).collect()
}

/// Runs the tower; the first output of each row is the query. Runs all rows in one batch, or each separately if the batch fails.
fn run_each(
    tower: &Tower,
    rows: &[(&FeatureRow, &Pooled)],
    threads: &Threads,
    graphs: &mut tower::Scratch,
) -> Vec<Result<TowerOutputs>> {
    let mut run = |rows: &[(&FeatureRow, &Pooled)]| -> Result<Vec<Result<TowerOutputs>>> {
        let made = tower.run(rows, threads, graphs)?;
        let of_row = |n: usize| {
            let output = |tensor: &Tensor| {
                let count = tensor.data().len() / rows.len();
                tensor.data()[n * count..(n + 1) * count].to_vec()
            };
            let made: TowerOutputs = made.iter().map(output).collect();
            match made[0].iter().all(|x| x.abs() <= COMPONENT_MAX) {
                true => Ok(made),
                false => Err(not_finite(NOT_FINITE, rows[n].0.largest(tower.features()))),
            }
        };
        Ok((0..rows.len()).map(of_row).collect())
    };
    match run(rows) {
        Ok(made) => made,
        Err(e) if rows.len() <= 1 => rows.iter().map(|_| Err(e.again())).collect(),
        Err(_) => rows.iter().map(|row| run(&[*row]).and_then(|mut made| made.swap_remove(0))).collect(),
    }
}
