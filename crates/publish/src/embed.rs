//! Vectors of items: from an item column, or from the item tower over the items' features.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use super::plan::{Progress, Stage};
use sterling_core::error::{Error, Result};
use sterling_core::items::{EMBEDDING, ID};
use sterling_core::tensor::{Matrix, Tensor};
use sterling_embedding::Lookup;
use sterling_graph::tower::{self, FeatureRow, FeatureSpec, Pooled, Threads, Tower};
use sterling_snapshot::VectorRows;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::{MODEL_FILE, Package, VectorSpec};
use sterling_storage::rows::{RowStore, RowWriter, Spill};

/// Number of items whose tensors are encoded together.
const CHUNK_ITEMS: usize = 4096;

/// Stored vectors and tensors of all items, row after row.
pub(super) struct Embedded {
    /// Embeddings, `[N, D]`.
    pub(super) vectors: RowStore<'static>,
    /// Rows of `[[item.vectors]]`, in storage format ([`VectorRows`]).
    pub(super) kept: Vec<u8>,
}

/// Returns the vectors of all items, and the tensors that the package stores for them. `vectors` is the file of the
/// vectors, if they are not in the item file. `spill` applies to outputs of the item tower.
pub(super) fn embed(
    package: Option<&Package>,
    items: &mut Items,
    vectors: Option<&Path>,
    spill: &Spill,
    progress: &Progress<'_>,
) -> Result<Embedded> {
    check_read(package, items)?;
    let specs = package.map_or(&[][..], |p| &p.spec.item.vectors);
    specs.iter().try_for_each(|spec| column(spec, items).map(drop))?;
    let tower = package.and_then(|p| p.item.as_ref());
    let mut made = match tower {
        Some(tower) => run(tower, items, spill, progress)?.into_iter(),
        None => check_given(package, items, vectors).map(|()| Vec::new().into_iter())?,
    };
    let of_tower = tower.and_then(|_| made.next());
    let kept = kept(specs, items, made)?;
    let vectors = match of_tower.or_else(|| items.dense.remove(EMBEDDING)) {
        Some(vectors) => vectors,
        None => return Err(Error::internal("the item tower has no outputs")),
    };
    Ok(Embedded { vectors, kept })
}

/// Encodes the stored tensors, from columns or, in order, from the outputs of the item tower after the first.
fn kept(specs: &[VectorSpec], items: &Items, mut made: impl Iterator<Item = RowStore<'static>>) -> Result<Vec<u8>> {
    let rows = VectorRows::of(specs)?;
    let mut of_tower: Vec<Option<RowStore<'static>>> = Vec::with_capacity(specs.len());
    for spec in specs {
        of_tower.push(if spec.column.is_none() { made.next() } else { None });
    }
    let mut sources = Vec::with_capacity(specs.len());
    for (spec, made) in specs.iter().zip(&of_tower) {
        let source = column(spec, items)?.or(made.as_ref());
        sources.push(source.ok_or_else(|| {
            Error::internal(format!("item.vectors `{}`: the item tower has no output for this tensor", spec.name))
        })?);
    }
    let mut stored = Vec::with_capacity(items.len() * rows.bytes());
    let mut scratch = vec![Vec::new(); sources.len()];
    for first in (0..if specs.is_empty() { 0 } else { items.len() }).step_by(CHUNK_ITEMS) {
        let chunk = first..(first + CHUNK_ITEMS).min(items.len());
        let mut read = Vec::with_capacity(sources.len());
        for (source, scratch) in sources.iter().zip(&mut scratch) {
            read.push(source.read(chunk.clone(), scratch)?);
        }
        for item in chunk {
            let values = |n: usize| read[n].row(item - first);
            rows.encode(values, &mut stored).map_err(|e| e.within(format!("item {}", item + 1)))?;
        }
    }
    Ok(stored)
}

/// Returns the item column of one of `[[item.vectors]]`; `None` if the item tower produces the tensor.
fn column<'i>(spec: &VectorSpec, items: &'i Items) -> Result<Option<&'i RowStore<'static>>> {
    let Some(column) = &spec.column else { return Ok(None) };
    let place = |e: Error| e.within(format!("item.vectors `{}`", spec.name));
    let dense = items.dense.get(column).ok_or_else(|| {
        let known: Vec<&str> = items.dense.keys().map(String::as_str).collect();
        place(Error::invalid(format!(
            "items: no column `{column}` of vectors; the vector columns are: {}",
            known.join(", ")
        )))
    })?;
    match dense.cols() == spec.width {
        true => Ok(Some(dense)),
        false => Err(place(Error::invalid(format!(
            "column `{column}`: vectors of {} numbers, expected {}",
            dense.cols(),
            spec.width
        )))),
    }
}

/// Rejects vectors that no part of the model reads, unless all item columns are stored.
fn check_read(package: Option<&Package>, items: &Items) -> Result<()> {
    let read = |name: &str| match package.map(|package| &package.spec.item) {
        None => false,
        Some(item) => {
            !item.columns.is_empty()
                || item.vectors.iter().any(|v| v.column.as_deref() == Some(name))
                || item.features.iter().any(|f| f.source() == name)
        }
    };
    match items.dense.iter().find(|(name, _)| *name != EMBEDDING && !read(name)) {
        None => Ok(()),
        Some((name, dense)) => Err(Error::invalid(format!(
            "column `{name}`: got vectors of {} numbers, which no item tower reads, expected texts, integers or single \
             numbers; leave it out, or name the columns to keep in {MODEL_FILE}",
            dense.cols()
        ))),
    }
}

/// Returns the distinct columns that the item tower reads.
pub(super) fn sources(package: Option<&Package>) -> BTreeSet<&str> {
    let features = package.and_then(|package| package.item.as_ref()).map_or(&[][..], Tower::features);
    features.iter().map(FeatureSpec::source).filter(|source| *source != ID).collect()
}

/// Rejects items without a column that the item tower reads; `has` returns whether the items have a column.
pub(super) fn check_sources(package: Option<&Package>, has: impl Fn(&str) -> bool) -> Result<()> {
    match sources(package).into_iter().find(|source| !has(source)) {
        None => Ok(()),
        Some(source) => Err(Error::invalid(format!("items: no column `{source}`, which the item tower reads"))),
    }
}

/// Rejects items that have no vectors, or vectors of another width than the model's.
fn check_given(package: Option<&Package>, items: &Items, vectors: Option<&Path>) -> Result<()> {
    let dense = items.dense.get(EMBEDDING).ok_or_else(|| {
        Error::invalid(format!("items: no column `{EMBEDDING}` and no vector file, expected one vector per item"))
    })?;
    if let Some(want) = package.map(|p| p.spec.dimension).filter(|want| *want != dense.cols()) {
        let file = vectors.map_or("items".into(), |file| file.display().to_string());
        return Err(Error::invalid(format!(
            "{file}: vectors of {} numbers, expected {want} by {MODEL_FILE}",
            dense.cols()
        )));
    }
    Ok(())
}

/// State of a thread that runs the item tower.
struct Worker {
    threads: Threads,
    scratch: tower::Scratch,
    /// Buffer for the values of each dense column.
    numbers: Vec<Vec<f32>>,
}

/// Runs the item tower over all items, on all cores; returns one matrix per output. A batch has the same items on any number of
/// cores.
fn run(tower: &Tower, items: &Items, spill: &Spill, progress: &Progress<'_>) -> Result<Vec<RowStore<'static>>> {
    let sources = tower.features().iter().filter_map(|s| Some((s.source(), items.dense.get(s.source())?)));
    let dense: Vec<(&str, &RowStore<'_>)> = sources.collect();
    let run = tower.run_rows();
    let cores = rayon::current_num_threads().min(items.len().div_ceil(run)).max(1);
    let worker = || Worker {
        threads: Threads::new(1),
        scratch: tower::Scratch::default(),
        numbers: vec![Vec::new(); dense.len()],
    };
    let mut workers: Vec<Worker> = (0..cores).map(|_| worker()).collect();
    let mut all: Vec<RowWriter> =
        tower.outputs().iter().map(|output| RowWriter::new(output.count(), spill.clone())).collect();
    for batch in items.runs(run * cores) {
        let starts: Vec<usize> = batch.clone().step_by(run).collect();
        let embed = |(worker, &first): (&mut Worker, &usize)| {
            let rows = first..(first + run).min(batch.end);
            let place = |e: Error| e.within(format!("items {} to {}", rows.start + 1, rows.end));
            embed_run(tower, items, &dense, rows.clone(), worker, &place)
        };
        let made = workers.par_iter_mut().zip(&starts).map(embed).collect::<Result<Vec<Vec<Tensor>>>>()?;
        for made in &made {
            all.iter_mut().zip(made).try_for_each(|(all, made)| all.push(made.data()))?;
        }
        progress(Stage::Embedding, batch.end, items.len());
    }
    all.into_iter().map(RowWriter::finish).collect()
}

/// Runs the item tower over one batch of items.
fn embed_run(
    tower: &Tower,
    items: &Items,
    dense: &[(&str, &RowStore<'_>)],
    range: Range<usize>,
    worker: &mut Worker,
    place: &dyn Fn(Error) -> Error,
) -> Result<Vec<Tensor>> {
    let numbers = dense.iter().zip(&mut worker.numbers);
    let numbers = numbers.map(|((name, rows), scratch)| Ok((*name, rows.read(range.clone(), scratch)?)));
    let numbers = numbers.collect::<Result<BTreeMap<&str, Matrix<'_>>>>()?;
    let read = |row| {
        let number = |name: &str| numbers.get(name).map(|rows| rows.row(row - range.start).to_vec());
        let given = items.features(tower.features(), row, &number);
        tower.read(given).map_err(|e| e.within(format!("item {}", row + 1)))
    };
    let rows = range.clone().map(read).collect::<Result<Vec<FeatureRow>>>()?;
    let rows: Vec<&FeatureRow> = rows.iter().collect();
    let (pooled, _) = tower.lookup(&rows, &Lookup::default()).map_err(place)?;
    let rows: Vec<(&FeatureRow, &Pooled)> = rows.into_iter().zip(&pooled).collect();
    tower.run(&rows, &worker.threads, &mut worker.scratch).map_err(place)
}
