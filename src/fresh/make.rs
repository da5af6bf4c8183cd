//! What becomes of items that are put: rows of a snapshot, in its lists and formats.

use std::sync::Arc;

use super::update::{Put, Update};
use crate::columns::{ColumnKind, Columns};
use crate::embedding::Lookup;
use crate::error::{Error, Result};
use crate::ivf::Assigner;
use crate::limits::COMPONENT_MAX;
use crate::snapshot::{Snapshot, VectorRows};
use crate::tensor::{Matrix, Tensor};
use crate::tower::{self, FeatureRow, Pooled, Threads, Tower};
use crate::view::{Attribute, Row};

/// Items that the item tower takes at a time.
const TOWER_BATCH: usize = 512;

/// Makes rows for one snapshot.
pub(super) struct Maker {
    main: Arc<Snapshot>,
    pub(super) assigner: Arc<Assigner>,
    threads: Threads,
    graphs: tower::Scratch,
}

/// The vector of an item, and what the item tower makes besides, each output's row.
struct Vectors {
    vector: Vec<f32>,
    more: Vec<Vec<f32>>,
}

impl Maker {
    pub(super) fn new(main: Arc<Snapshot>) -> Self {
        let assigner = Arc::new(Assigner::new(&main.index));
        Maker { main, assigner, threads: Threads::new(1), graphs: tower::Scratch::default() }
    }

    /// The rows of the items that are put, or why there is none; `None` for other updates.
    pub(super) fn rows(&mut self, updates: &[Update]) -> Vec<Option<Result<Row>>> {
        let puts: Vec<&Put> =
            updates.iter().filter_map(|update| if let Update::Put(put) = update { Some(put) } else { None }).collect();
        let vectors = self.vectors(&puts);
        let checked = vectors.into_iter().map(|vectors| vectors.and_then(|vectors| self.checked(vectors)));
        let vectors: Vec<Result<Vectors>> = checked.collect();
        let mut lists = self.lists(&vectors).into_iter();
        let mut rows = puts.iter().zip(vectors).map(|(put, vectors)| {
            let vectors = vectors?;
            self.row(put, &vectors, lists.next().unwrap_or_default())
        });
        updates.iter().map(|update| if let Update::Put(_) = update { rows.next() } else { None }).collect()
    }

    /// The lists of those vectors that there are, all at a time.
    fn lists(&self, vectors: &[Result<Vectors>]) -> Vec<u32> {
        let all: Vec<f32> = vectors.iter().flatten().flat_map(|vectors| &vectors.vector).copied().collect();
        Matrix::new(&all, self.main.index.dimension())
            .map_or_else(|_| Vec::new(), |matrix| self.assigner.assign(matrix))
    }

    /// Vectors that can be searched.
    fn checked(&self, vectors: Vectors) -> Result<Vectors> {
        let vector = &vectors.vector;
        let dimension = self.main.index.dimension();
        if vector.len() != dimension {
            return Err(Error::invalid(format!("a vector of {} numbers, expected {dimension}", vector.len())));
        }
        if let Some(at) = vector.iter().position(|x| x.is_nan() || x.abs() > COMPONENT_MAX) {
            return Err(Error::invalid(format!("number {} of the vector is {:e}", at + 1, vector[at])));
        }
        Ok(vectors)
    }

    fn row(&self, put: &Put, Vectors { vector, more }: &Vectors, list: u32) -> Result<Row> {
        let mut attributes = vec![Attribute::Missing; self.main.columns.list().len()];
        for (column, attribute) in changes(&self.main.columns, &put.attributes)? {
            attributes[column] = attribute;
        }
        let kept = kept(&self.main, put, more)?;
        Ok(Row { id: put.id, list, vector: self.assigner.coded(vector), kept, attributes })
    }

    /// The vectors of items, each its own or that of the item tower.
    fn vectors(&mut self, puts: &[&Put]) -> Vec<Result<Vectors>> {
        let main = self.main.clone();
        let Some(tower) = &main.package.item else {
            let missing = || Error::invalid("no vector, and the model has no item tower");
            let own = |put: &&Put| put.vector.clone().ok_or_else(missing);
            return puts.iter().map(|put| own(put).map(|vector| Vectors { vector, more: Vec::new() })).collect();
        };
        let mut vectors = Vec::with_capacity(puts.len());
        for puts in puts.chunks(TOWER_BATCH) {
            let rows: Vec<Result<FeatureRow>> =
                puts.iter().map(|put| tower.read(put.features(tower.features()))).collect();
            let whole: Vec<&FeatureRow> = rows.iter().flatten().collect();
            let mut made = self.run(tower, &whole).into_iter();
            let missing = || Err(Error::internal("an item without a vector"));
            vectors.extend(rows.into_iter().map(|row| row.and_then(|_| made.next().unwrap_or_else(missing))));
        }
        vectors
    }

    /// Runs rows through the item tower: all together, or, where that fails, each alone.
    fn run(&mut self, tower: &Tower, rows: &[&FeatureRow]) -> Vec<Result<Vectors>> {
        if rows.is_empty() {
            return Vec::new();
        }
        let Maker { threads, graphs, .. } = self;
        let mut run = |rows: &[&FeatureRow]| -> Result<Vec<Result<Vectors>>> {
            let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
            let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
            let made = tower.run(&pairs, threads, graphs)?;
            // The first output is the item's vector.
            let (first, more) = made.split_first().ok_or_else(|| Error::internal("the item tower makes nothing"))?;
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

/// The rows of `[[item.vectors]]`: of columns that the item brings, or of what its tower makes besides its vector.
fn kept(main: &Snapshot, put: &Put, made: &[Vec<f32>]) -> Result<Vec<u8>> {
    let (specs, mut made) = (&main.package.spec.item.vectors, made.iter());
    let mut values: Vec<&[f32]> = Vec::with_capacity(specs.len());
    for spec in specs {
        let row = match &spec.column {
            Some(column) => put.dense.iter().find(|(name, _)| name == column).map(|(_, row)| row),
            None => made.next(),
        };
        values.push(row.ok_or_else(|| Error::invalid(format!("item.vectors `{}`: no row of it", spec.name)))?);
    }
    let rows = VectorRows::of(specs)?;
    let mut kept = Vec::with_capacity(rows.bytes());
    rows.encode(|n| values[n], &mut kept)?;
    Ok(kept)
}

/// What becomes of the attributes that a snapshot has columns for, by the number of the column; other versions may have others.
pub(super) fn changes(columns: &Columns, given: &[(String, Attribute)]) -> Result<Vec<(usize, Attribute)>> {
    let mut changes = Vec::with_capacity(given.len());
    for (number, column) in columns.list().enumerate() {
        let Some((_, to)) = given.iter().find(|(name, _)| name == column.name()) else { continue };
        let attribute = match (column.kind(), to) {
            (_, Attribute::Missing) => Attribute::Missing,
            (ColumnKind::Integers, Attribute::Integers(_)) | (ColumnKind::Texts, Attribute::Texts(_)) => to.clone(),
            (ColumnKind::Floats, Attribute::Number(number)) if number.is_finite() => to.clone(),
            (ColumnKind::Floats, Attribute::Integers(one)) if one.len() == 1 => Attribute::Number(one[0] as f64),
            (kind, _) => {
                let (name, got) = (column.name(), to.kind());
                return Err(Error::invalid(format!("attribute `{name}`: got {got}, expected {}", kind.plural())));
            }
        };
        changes.push((number, attribute));
    }
    Ok(changes)
}
