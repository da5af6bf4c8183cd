//! Embeds upserted items and computes their stored tensors, in the same way as publishing does.

use std::sync::Arc;

use super::update::Put;
use sterling_core::error::{Error, Result};
use sterling_core::limits::COMPONENT_MAX;
use sterling_core::tensor::Tensor;
use sterling_embedding::Lookup;
use sterling_graph::tower::{self, FeatureRow, Pooled, Threads, Tower};
use sterling_snapshot::{Snapshot, VectorRows};

/// Maximum number of items per batch of the item tower.
const TOWER_BATCH: usize = 512;

/// Stored data of an item in addition to its attributes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Embedded {
    /// Embedding that is searched.
    pub(super) vector: Vec<f32>,
    /// Rows of `[[item.vectors]]`, in storage format.
    pub(super) kept: Vec<u8>,
}

/// Embedding of an item, and one row per further output of the item tower.
struct Vectors {
    vector: Vec<f32>,
    more: Vec<Vec<f32>>,
}

/// Embeds items for one snapshot.
pub(super) struct Embedder {
    main: Arc<Snapshot>,
    threads: Threads,
    graphs: tower::Scratch,
}

impl Embedder {
    pub(super) fn new(main: Arc<Snapshot>) -> Self {
        Embedder { main, threads: Threads::new(1), graphs: tower::Scratch::default() }
    }

    /// Embeds items. Each item may fail separately, because the item is invalid or because embedding tables do not respond.
    pub(super) fn embed(&mut self, puts: &[&Put]) -> Vec<Result<Embedded>> {
        let vectors = self.vectors(puts);
        puts.iter().zip(vectors).map(|(put, vectors)| self.embedded(put, vectors?)).collect()
    }

    /// Validates an embedding and computes the stored tensors.
    fn embedded(&self, put: &Put, Vectors { vector, more }: Vectors) -> Result<Embedded> {
        let dimension = self.main.index.dimension();
        if vector.len() != dimension {
            return Err(Error::invalid(format!("got a vector of {} numbers, expected {dimension}", vector.len())));
        }
        if let Some(at) = vector.iter().position(|x| x.is_nan() || x.abs() > COMPONENT_MAX) {
            let made = if put.vector.is_some() { "" } else { " that the item tower makes" };
            let (number, value) = (at + 1, vector[at]);
            return Err(Error::invalid(format!(
                "number {number} of the vector{made} is {value:e}, which cannot be searched"
            )));
        }
        let kept = kept(&self.main, put, &more)?;
        Ok(Embedded { vector, kept })
    }

    /// Returns the embedding of each item: the one in its update, or the output of the item tower.
    fn vectors(&mut self, puts: &[&Put]) -> Vec<Result<Vectors>> {
        let main = self.main.clone();
        let Some(tower) = &main.package.item else {
            let missing = || Error::invalid("got no vector, expected one: the model has no item tower");
            let own = |put: &&Put| put.vector.clone().ok_or_else(missing);
            return puts.iter().map(|put| own(put).map(|vector| Vectors { vector, more: Vec::new() })).collect();
        };
        let mut vectors = Vec::with_capacity(puts.len());
        for puts in puts.chunks(TOWER_BATCH) {
            let rows: Vec<Result<FeatureRow>> =
                puts.iter().map(|put| tower.read(put.features(tower.features()))).collect();
            let complete: Vec<&FeatureRow> = rows.iter().flatten().collect();
            let mut made = self.run(tower, &complete).into_iter();
            let missing = || Err(Error::internal("the item tower returned too few vectors, expected one per item"));
            vectors.extend(rows.into_iter().map(|row| row.and_then(|_| made.next().unwrap_or_else(missing))));
        }
        vectors
    }

    /// Runs items through the item tower in one batch, or one by one if the batch fails.
    fn run(&mut self, tower: &Tower, rows: &[&FeatureRow]) -> Vec<Result<Vectors>> {
        if rows.is_empty() {
            return Vec::new();
        }
        let Embedder { threads, graphs, .. } = self;
        let mut run = |rows: &[&FeatureRow]| -> Result<Vec<Result<Vectors>>> {
            let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
            let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
            let made = tower.run(&pairs, threads, graphs)?;
            // The first output is the embedding.
            let (first, more) = made
                .split_first()
                .ok_or_else(|| Error::internal("the item tower has no output, expected an embedding"))?;
            let row = |tensor: &Tensor, n: usize| {
                let width = tensor.data().len() / rows.len();
                tensor.data()[n * width..(n + 1) * width].to_vec()
            };
            let vectors =
                |n| Vectors { vector: row(first, n), more: more.iter().map(|tensor| row(tensor, n)).collect() };
            Ok((0..rows.len()).map(|n| Ok(vectors(n))).collect())
        };
        match run(rows) {
            Ok(vectors) => vectors,
            Err(e) if rows.len() == 1 => vec![Err(e)],
            Err(_) => rows.iter().map(|row| run(&[*row]).and_then(|mut made| made.swap_remove(0))).collect(),
        }
    }
}

/// Returns the rows of `[[item.vectors]]`: from columns of the item, or from further outputs of the item tower.
fn kept(main: &Snapshot, put: &Put, made: &[Vec<f32>]) -> Result<Vec<u8>> {
    let (specs, mut made) = (&main.package.spec.item.vectors, made.iter());
    let mut values: Vec<&[f32]> = Vec::with_capacity(specs.len());
    for spec in specs {
        let row = match &spec.column {
            Some(column) => put.dense.iter().find(|(name, _)| name == column).map(|(_, row)| row),
            None => made.next(),
        };
        values.push(row.ok_or_else(|| {
            Error::invalid(format!("item.vectors `{}`: the item has no row, expected one", spec.name))
        })?);
    }
    let rows = VectorRows::of(specs)?;
    let mut kept = Vec::with_capacity(rows.bytes());
    rows.encode(|n| values[n], &mut kept)?;
    Ok(kept)
}
