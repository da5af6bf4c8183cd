//! Calibration queries: vectors, requests that go through the user tower, or items with added noise.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use super::measured::Layout;
use super::share::random;
use sterling_api::{Retrievals, retrievals};
use sterling_core::error::{Error, Result};
use sterling_core::items::ID;
use sterling_core::request::{EmbeddedUser, Features, User, Values};
use sterling_core::units::Slot;
use sterling_embedding::Lookup;
use sterling_graph::tower::{self, Pooled, Threads};
use sterling_index::ivf;
use sterling_snapshot::model::Package;
use sterling_storage::files::{Checksum, TensorFile, Tensors};
use sterling_storage::npy;

/// Maximum number of queries. The scans of 256 queries take a fifth to a third of the build time, and a smaller fraction for large
/// catalogues.
const QUERIES_MAX: usize = 256;
/// Length of the noise that turns an item into a query, as a fraction of the item's norm.
const PERTURBED_BY: f32 = 0.1;

/// Tensors of the item ids that requests exclude: the concatenated ids, and the number of ids per query.
const EXCLUDED: &str = "queries_excluded";
const EXCLUDED_COUNTS: &str = "queries_excluded_counts";

/// Source of queries that are perturbed items: vectors of items with added noise.
pub(super) const OF_ITEMS: &str = "perturbed items";

/// Queries for a calibration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Queries {
    /// Description of the queries' source.
    pub source: String,
    /// Query embeddings, `[Q, D]`.
    pub vectors: Vec<Vec<f32>>,
    /// For each query made from an item, the slot of that item, which does not count as a result; otherwise `None`.
    pub(super) made_of: Vec<Option<u32>>,
    /// Ids of the items that each query's request excludes; empty if no query excludes items.
    pub(super) exclude: Vec<Vec<i64>>,
    /// Ascending slots of the excluded items, once [`Queries::resolve`] has looked them up.
    pub(super) excluded: Vec<Vec<u32>>,
    /// Number of queries per stratum: queries of strata follow the ordinary queries and are measured separately.
    pub(super) strata: Vec<usize>,
    /// Number of queries that are out of distribution: the last queries of `vectors`.
    pub(super) ood: usize,
    /// Reach below which a query is out of distribution.
    pub(super) ood_reach: f32,
}

/// Group of queries that is measured together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Group {
    Ordinary,
    /// Index of a stratum.
    Stratum(usize),
    /// Queries that are out of distribution.
    Ood,
}

impl Queries {
    /// Returns whether the queries are perturbed items.
    pub fn are_items(&self) -> bool {
        self.made_of.iter().any(Option::is_some)
    }

    /// Looks up the excluded items among the items of an index, given as slots with their ids.
    pub(super) fn resolve(&mut self, items: impl Iterator<Item = (u32, i64)>) {
        let wanted: HashSet<i64> = self.exclude.iter().flatten().copied().collect();
        let slots: HashMap<i64, u32> =
            items.filter(|(_, id)| wanted.contains(id)).map(|(slot, id)| (id, slot)).collect();
        let of_query = |ids: &Vec<i64>| {
            let mut slots: Vec<u32> = ids.iter().filter_map(|id| slots.get(id).copied()).collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        };
        self.excluded = self.exclude.iter().map(of_query).collect();
    }

    /// Returns the slots of the items that the request of the `n`-th query excludes.
    pub(super) fn excluded(&self, n: usize) -> &[u32] {
        self.excluded.get(n).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of queries that are in no stratum and in distribution.
    pub(super) fn ordinary(&self) -> usize {
        self.vectors.len() - self.strata.iter().sum::<usize>() - self.ood
    }

    /// Returns the group of the `n`-th query.
    pub(super) fn group(&self, n: usize) -> Group {
        let Some(mut left) = n.checked_sub(self.ordinary()) else { return Group::Ordinary };
        let stratum = self.strata.iter().position(|&count| {
            let is_here = left < count;
            left = left.saturating_sub(count);
            is_here
        });
        stratum.map_or(Group::Ood, Group::Stratum)
    }

    /// Reads `most` queries of a file, evenly spread: from a `.npy` matrix, from bodies of `:retrieve`, one per line, or from the
    /// output of [`Queries::write`].
    ///
    /// # Errors
    /// `Invalid` with the file and the line that is no query for this index; `Io`.
    pub(super) fn read(path: &Path, package: &Package, (index, most): (&ivf::Index, usize)) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Queries::of_rows(path, index, most),
            Some("safetensors") => Queries::kept(path, index),
            _ => {
                let mut exclude = Vec::new();
                let vectors = requests(path, package, most, &mut exclude);
                let queries = Queries::checked(path, "line", vectors, index)?;
                if exclude.iter().all(Vec::is_empty) {
                    exclude.clear();
                }
                Ok(Queries { exclude, ..queries })
            }
        }
    }

    /// Writes queries that are not items of the index; returns `None` for queries made from items, which can be recreated.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, path: &Path) -> Result<Option<Checksum>> {
        if self.are_items() {
            return Ok(None);
        }
        let mut file = TensorFile::new();
        let width = self.vectors.first().map_or(0, Vec::len);
        file.add_owned("queries", &[self.vectors.len(), width], self.vectors.concat())?;
        file.add_owned("queries_source", &[self.source.len()], self.source.clone().into_bytes())?;
        if !self.exclude.is_empty() {
            let ids = self.exclude.concat();
            let counts: Vec<u32> = self.exclude.iter().map(|ids| ids.len() as u32).collect();
            file.add_owned(EXCLUDED, &[ids.len()], ids)?;
            file.add_owned(EXCLUDED_COUNTS, &[counts.len()], counts)?;
        }
        file.write(path).map(Some)
    }

    /// Reads the output of [`Queries::write`].
    fn kept(path: &Path, index: &ivf::Index) -> Result<Self> {
        let tensors = Tensors::read(path)?;
        let (numbers, shape) = tensors.get::<f32>("queries", 2)?;
        let (source, _) = tensors.get::<u8>("queries_source", 1)?;
        let vectors = (1..).zip(numbers.chunks_exact(shape[1].max(1)).map(<[f32]>::to_vec)).collect();
        let source = String::from_utf8_lossy(&source).into_owned();
        let exclude = if tensors.has(EXCLUDED) { excluded(&tensors, path)? } else { Vec::new() };
        Ok(Queries { source, exclude, ..Queries::checked(path, "query", Ok(vectors), index)? })
    }

    /// Reads evenly spread queries of a `.npy` matrix, `[Q, D]`.
    ///
    /// # Errors
    /// `Invalid` with the file and the row that is no query for this index; `Io`.
    pub fn of_matrix(path: &Path, index: &ivf::Index) -> Result<Self> {
        Queries::of_rows(path, index, most(index.items()))
    }

    fn of_rows(path: &Path, index: &ivf::Index, most: usize) -> Result<Self> {
        let read = npy::read_f32(path).map(|(values, rows, width)| {
            let row = |row: usize| (row + 1, values[row * width..(row + 1) * width].to_vec());
            spread(rows, most).map(row).collect()
        });
        Queries::checked(path, "row", read, index)
    }

    /// Checks numbered queries; the number of a query is that of its row or line (`unit`) in the file, from 1.
    fn checked(path: &Path, unit: &str, numbered: Result<Vec<(usize, Vec<f32>)>>, index: &ivf::Index) -> Result<Self> {
        let numbered = numbered.map_err(|e| e.within(path.display()))?;
        if numbered.is_empty() {
            return Err(Error::invalid(format!("{}: got no queries, expected at least one", path.display())));
        }
        for (number, vector) in &numbered {
            let place = |e: Error| e.within(format!("{}: {unit} {number}", path.display()));
            index.check_query(vector).map_err(place)?;
        }
        let vectors: Vec<Vec<f32>> = numbered.into_iter().map(|(_, vector)| vector).collect();
        let source = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Queries { source, made_of: vec![None; vectors.len()], vectors, ..Queries::default() })
    }

    /// Makes queries from items of an index by adding noise.
    pub fn of_items(index: &ivf::Index, seed: u64) -> Self {
        let layout = Layout::of(index);
        let drawn = drawn(layout, seed);
        let row = |&place: &u32| {
            let mut row = vec![0.0; index.dimension()];
            index.row(Slot(place), &mut row);
            row
        };
        Queries::perturbed(drawn.iter().map(row).collect(), drawn, seed)
    }

    /// Makes queries from the rows of the items in the slots `places`.
    pub(super) fn perturbed(rows: Vec<Vec<f32>>, places: Vec<u32>, seed: u64) -> Self {
        let vectors = rows.into_iter().zip(&places).map(|(row, place)| perturbed(row, *place, seed)).collect();
        let made_of = places.into_iter().map(Some).collect();
        Queries { source: OF_ITEMS.into(), vectors, made_of, ..Queries::default() }
    }
}

/// Makes a query from an item's row by adding noise; `place` is the slot of the item.
pub(super) fn perturbed(mut row: Vec<f32>, place: u32, seed: u64) -> Vec<f32> {
    let noise: Vec<f32> = (0..row.len() as u64).map(|n| bell(random(seed ^ u64::from(place) << 24, n))).collect();
    let scale = PERTURBED_BY * length(&row) / length(&noise).max(f32::MIN_POSITIVE);
    let scale = if scale.is_finite() { scale } else { 0.0 };
    row.iter_mut().zip(&noise).for_each(|(x, noise)| *x += noise * scale);
    row
}

/// Samples the slots of the items from which queries are made.
pub(super) fn drawn(layout: Layout<'_>, seed: u64) -> Vec<u32> {
    let filled = layout.filled();
    (0..most(filled.len()) as u64).map(|n| filled.nth((random(seed, n) as usize % filled.len()) as u32)).collect()
}

/// Returns the maximum number of queries for an index with `items` items.
pub(super) fn most(items: usize) -> usize {
    QUERIES_MAX.min(items)
}

pub(super) fn length(x: &[f32]) -> f32 {
    x.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// Returns an approximately normal number, from the four 16-bit quarters of a random number.
pub(super) fn bell(random: u64) -> f32 {
    (0..4).map(|n| (random >> (n * 16) & 0xffff) as f32 / 65_536.0).sum::<f32>() - 2.0
}

/// Returns `most` evenly spread numbers below `count`.
pub(crate) fn spread(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |n| n * count / taken)
}

/// Reads the excluded ids per query of a file that [`Queries::write`] wrote.
fn excluded(tensors: &Tensors, path: &Path) -> Result<Vec<Vec<i64>>> {
    let (ids, _) = tensors.get::<i64>(EXCLUDED, 1)?;
    let (counts, _) = tensors.get::<u32>(EXCLUDED_COUNTS, 1)?;
    let mut rest = &ids[..];
    let of_query = |count: &u32| {
        let (own, further) = rest.split_at_checked(*count as usize)?;
        rest = further;
        Some(own.to_vec())
    };
    let exclude: Option<Vec<Vec<i64>>> = counts.iter().map(of_query).collect();
    exclude.ok_or_else(|| {
        let why = format!("{}: `{EXCLUDED}` has {} ids, fewer than the queries exclude", path.display(), ids.len());
        Error::corrupt(why)
    })
}

/// Reads `:retrieve` bodies, one per line, and returns the query embeddings with their line numbers. Adds the ids that each query
/// excludes to `exclude`.
fn requests(
    path: &Path,
    package: &Package,
    most: usize,
    exclude: &mut Vec<Vec<i64>>,
) -> Result<Vec<(usize, Vec<f32>)>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("reading", e))?;
    let lines: Vec<&str> = text.lines().collect();
    spread(lines.len(), most)
        .map(|n| {
            let (queries, ids) = queries(lines[n], package).map_err(|e| e.within(format!("line {}", n + 1)))?;
            exclude.extend(queries.iter().map(|_| ids.clone()));
            Ok(queries.into_iter().map(|query| (n + 1, query)).collect::<Vec<_>>())
        })
        .collect::<Result<Vec<_>>>()
        .map(|queries| queries.concat())
}

/// Returns the lines of a file of requests that [`Queries::read`] may use, as text.
///
/// # Errors
/// `Io` with the path.
pub(super) fn sampled_lines(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
    let lines: Vec<&str> = text.lines().collect();
    Ok(spread(lines.len(), QUERIES_MAX).map(|n| format!("{}\n", lines[n])).collect())
}

/// Returns the query embeddings of the body's user, one or several, and the ids of the items that its requests exclude: the ids
/// that the body excludes, otherwise the item ids in its features, because a user's history is what callers exclude.
fn queries(line: &str, package: &Package) -> Result<(Vec<Vec<f32>>, Vec<i64>)> {
    let Retrievals::One(request, ..) = retrievals(line.as_bytes())? else {
        return Err(Error::invalid("got a list of requests, expected one request per line"));
    };
    let mut exclude: Vec<i64> = request.exclude.iter().map(|id| id.0).collect();
    let features = match request.user {
        User::Vector(vector) | User::Embedded(EmbeddedUser { query: vector, .. }) => {
            return Ok((each(vector, package)?, exclude));
        }
        User::Features(features) => features,
    };
    if exclude.is_empty() {
        exclude = items_of(&features, package);
    }
    let Some(tower) = &package.user else {
        return Err(Error::invalid("field `features`: this model has no user tower, expected `vector`"));
    };
    let row = tower.read(features)?;
    let (pooled, _) = tower.lookup(&[&row], &Lookup::default())?;
    let rows: Vec<(_, &Pooled)> =
        vec![(&row, pooled.first().ok_or_else(|| Error::internal("the embedding lookup returned no row"))?)];
    let made = tower.run(&rows, &Threads::new(1), &mut tower::Scratch::default())?;
    let queries = made[0].data().chunks(package.spec.dimension.max(1)).map(<[f32]>::to_vec).collect();
    Ok((queries, exclude))
}

/// Returns the item ids in the features of a user: values that are looked up in a table in which the item tower looks up ids.
fn items_of(features: &Features, package: &Package) -> Vec<i64> {
    let of_item =
        package.spec.item.features.iter().filter(|spec| spec.source() == ID).filter_map(|spec| spec.table.as_ref());
    let tables: Vec<&String> = of_item.collect();
    let of_user = package.spec.user.iter().flat_map(|user| &user.features);
    let of_items = of_user.filter(|spec| spec.table.as_ref().is_some_and(|table| tables.contains(&table)));
    let ids = of_items.filter_map(|spec| match features.get(spec.source()) {
        Some(Values::Integers(ids)) => Some(ids.as_slice()),
        _ => None,
    });
    ids.flatten().copied().collect()
}

/// Splits the output of a user tower into the queries of one user.
fn each(vector: Vec<f32>, package: &Package) -> Result<Vec<Vec<f32>>> {
    let (queries, width) = (package.spec.queries().len(), package.spec.dimension);
    match queries {
        0 => Ok(vec![vector]),
        _ if vector.len() == queries * width => Ok(vector.chunks_exact(width).map(<[f32]>::to_vec).collect()),
        _ => {
            let (got, expected) = (vector.len(), queries * width);
            Err(Error::invalid(format!(
                "field `vector`: got {got} numbers, expected {expected}: {queries} queries of {width}"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::tensor::Matrix;
    use sterling_index::ivf::{Options, Rescore, RowSurvey};
    use sterling_storage::rows::RowStore;

    #[test]
    fn excluded_items_are_stored_and_resolved() {
        let numbers: Vec<f32> = (0..64 * 4).map(|n| bell(random(3, n))).collect();
        let store = RowStore::from(Matrix::new(&numbers, 4).unwrap());
        let options = Options { lists: 4, iterations: 2, rescore: Rescore::F32, ..Options::default() };
        let built = ivf::build(&store, &RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
        let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queries.safetensors");
        for exclude in [Vec::new(), vec![vec![7, 5, 7], Vec::new(), vec![9, 1000]]] {
            let vectors = numbers.chunks_exact(4).take(3).map(<[f32]>::to_vec).collect();
            let source = "requests.jsonl".to_owned();
            let queries = Queries { source, vectors, made_of: vec![None; 3], exclude, ..Queries::default() };
            queries.write(&path).unwrap().unwrap();
            let mut read = Queries::kept(&path, &index).unwrap();
            assert_eq!(read, queries);
            read.resolve((0..20).map(|slot| (slot, i64::from(slot) + 5)));
            let expected: [&[u32]; 4] = if read.exclude.is_empty() { [&[]; 4] } else { [&[0, 2], &[], &[4], &[]] };
            assert_eq!([0, 1, 2, 3].map(|n| read.excluded(n)), expected);
        }
    }
}
