//! Items of a new kind, added by merges: queries near these items are measured separately, because a kind with few items has little
//! weight in the mean over all queries, however low its recall is.

use std::path::Path;

use super::queries::{Queries, perturbed, spread};
use super::share::random;
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_index::ivf;
use sterling_snapshot::STRATA_FILE;
use sterling_storage::files::{Checksum, TensorFile, Tensors};

/// Maximum number of strata; beyond it the two strata with the fewest items are combined.
const STRATA_MAX: usize = 4;
/// Number of queries per stratum.
const QUERIES_MAX: usize = 32;

/// Items of a new kind that one or several merges added.
#[derive(Clone, Debug, Default, PartialEq)]
struct Stratum {
    /// Number of items of the index when the stratum was added.
    items: u32,
    /// Perturbed sample of the stratum's items, `[Q, D]`.
    queries: Vec<Vec<f32>>,
}

/// Queries near items of new kinds, stored with a version for its merges and calibrations.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Strata(Vec<Stratum>);

impl Strata {
    /// Reads the strata of the version in `folder`; empty if no merge added items of a new kind.
    ///
    /// # Errors
    /// `Corrupt` with the file if its arrays are inconsistent; as [`Tensors::read`].
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(STRATA_FILE);
        if !path.exists() {
            return Ok(Strata::default());
        }
        Strata::of(&Tensors::read(&path)?).map_err(|e| e.within(path.display()))
    }

    fn of(tensors: &Tensors) -> Result<Self> {
        let (numbers, shape) = tensors.get::<f32>("queries", 2)?;
        let (items, strata) = tensors.get::<u32>("items", 1)?;
        let counts = tensors.vector::<u32>("counts", strata[0])?;
        let mut rows = numbers.chunks_exact(shape[1].max(1)).map(<[f32]>::to_vec);
        let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if sum != shape[0] as u64 || counts.contains(&0) || strata[0] > STRATA_MAX {
            let (got, most) = (&counts[..], STRATA_MAX);
            return Err(Error::corrupt(format!(
                "strata of {got:?} queries, the file holds {}: expected the same sum, in at most {most} strata",
                shape[0]
            )));
        }
        let stratum = |(&items, &count)| Stratum { items, queries: rows.by_ref().take(count as usize).collect() };
        Ok(Strata(items.iter().zip(&*counts).map(stratum).collect()))
    }

    /// Writes the strata to the folder of a version; `None` if there are no strata.
    ///
    /// # Errors
    /// `Io` with the path.
    pub(super) fn write(&self, folder: &Path) -> Result<Option<Checksum>> {
        let queries: Vec<&[f32]> = self.0.iter().flat_map(|stratum| &stratum.queries).map(Vec::as_slice).collect();
        let Some(width) = queries.first().map(|query| query.len()) else { return Ok(None) };
        let mut file = TensorFile::new();
        file.add_owned("queries", &[queries.len(), width], queries.concat())?;
        file.add_owned("items", &[self.0.len()], self.0.iter().map(|stratum| stratum.items).collect())?;
        file.add_owned("counts", &[self.0.len()], self.0.iter().map(|stratum| stratum.queries.len() as u32).collect())?;
        file.write(&folder.join(STRATA_FILE)).map(Some)
    }

    /// Adds a stratum for the items in these slots of an index.
    pub(super) fn add(&mut self, index: &ivf::Index, slots: &[u32], seed: u64) {
        if slots.is_empty() {
            return;
        }
        let offset = random(seed, slots.len() as u64) as usize % slots.len();
        let drawn = spread(slots.len(), QUERIES_MAX).map(|n| slots[(n + offset) % slots.len()]);
        let query = |slot: u32| {
            let mut row = vec![0.0; index.dimension()];
            index.row(Slot(slot), &mut row);
            perturbed(row, slot, seed)
        };
        let queries = drawn.map(query).collect();
        self.0.push(Stratum { items: u32::try_from(slots.len()).unwrap_or(u32::MAX), queries });
        if self.0.len() > STRATA_MAX {
            self.0.sort_by_key(|stratum| std::cmp::Reverse(stratum.items));
            let [one, other] = [self.0.pop(), self.0.pop()].map(Option::unwrap_or_default);
            let all = [one.queries, other.queries].concat();
            let queries = spread(all.len(), QUERIES_MAX).map(|n| all[n].clone()).collect();
            self.0.push(Stratum { items: one.items.saturating_add(other.items), queries });
        }
    }

    /// Appends the queries of the strata to the queries of a calibration.
    pub(super) fn beside(&self, mut queries: Queries) -> Queries {
        for stratum in &self.0 {
            queries.vectors.extend_from_slice(&stratum.queries);
            queries.made_of.resize(queries.vectors.len(), None);
            queries.strata.push(stratum.queries.len());
        }
        queries
    }
}
