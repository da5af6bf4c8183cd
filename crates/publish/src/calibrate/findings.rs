//! Results of calibration queries per shard, in one file each: each shard is searched on the machine that makes it, and the
//! combined results are evaluated once, as if the complete index had been searched.
//!
//! Q queries, R pass rates, C lists; slots are those of the complete index.
//!
//! ```text
//! queries                       f32 [Q, D]
//! made_of                       u32 [Q]         slot of the item that each query was made from, or `NO_ITEM`
//! source                        u8              source of the queries, as text
//! ood_count, ood_reach          u32, f32 [1]    last `ood_count` queries are out of distribution: reach < `ood_reach`
//! passing                       u32 [R, 8, C]   items of the shard per pass rate, random item set and list
//! sampled                       u32 [Q + 1]     offset of each query's sampled items, for the score residuals
//! sampled_places, _scores       u32, f32        slots and scores of the sampled items
//! best_counts                   u32 [Q, R]      number of results by the most precise rows
//! best_places, best_scores      [Q, R, B]       slots and scores of these results, best first
//! int8_counts, _places, _scores                 the same by int8 rows; empty if these are the most precise rows
//! coded_counts, _places, _scores                the same by first-pass codes
//! ```

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::find::{CODED, Finder, FoundIn, Scored, TOGETHER, selected};
use super::measure::{Counting, DRAWS, samples, shares};
use super::measured::{Layout, Measured};
use super::queries::Queries;
use super::share::{PASS_RATES, Passing};
use super::tally::CANDIDATES;
use sterling_core::error::{Error, Result};
use sterling_core::units::NO_ITEM;
use sterling_index::ivf::{self, WideRows};
use sterling_kernels::buffer::Buffer;
use sterling_snapshot::Calibration;
use sterling_storage::files::{Checksum, TensorFile, Tensors};

/// Searches a shard for queries, and writes the results to a file. At each pass rate, a query finds as many candidates as the
/// largest number (K0) that any calibration measures.
pub(super) fn write(
    path: &Path,
    measured: &Measured<'_>,
    queries: &Queries,
    seed: u64,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Checksum> {
    let (index, rates, total) = (measured.index, PASS_RATES.len(), queries.vectors.len());
    let shares = shares(measured, seed);
    let samples = samples(measured, &queries.vectors, seed);
    let most = CANDIDATES.into_iter().max().unwrap_or(0);
    let best = (most + 1).min(index.items());
    let int8 = if matches!(index.rows(), WideRows::None) { 0 } else { selected(most).min(index.items()) };
    let coded = if index.has_first_pass() { CODED.min(index.items()) } else { 0 };
    let mut file = TensorFile::new();
    let width = index.dimension();
    file.add_owned("queries", &[total, width], queries.vectors.concat())?;
    let made_of = queries.made_of.iter().map(|place| place.unwrap_or(NO_ITEM)).collect();
    file.add_owned("made_of", &[total], made_of)?;
    file.add_owned("ood_count", &[1], vec![queries.ood as u32])?;
    file.add_owned("ood_reach", &[1], vec![queries.ood_reach])?;
    file.add_owned("source", &[queries.source.len()], queries.source.clone().into_bytes())?;
    let passing = shares.iter().flatten().flat_map(|share| share.passing.of_lists.iter().copied()).collect();
    file.add_owned("passing", &[rates, DRAWS as usize, index.lists()], passing)?;
    let mut ends = vec![0u32];
    ends.extend(samples.iter().scan(0, |end, sample| {
        *end += sample.len() as u32;
        Some(*end)
    }));
    let (places, scores): (Vec<u32>, Vec<f32>) = samples.into_iter().flatten().unzip();
    file.add_owned("sampled", &[ends.len()], ends)?;
    file.add_owned("sampled_places", &[places.len()], places)?;
    file.add_owned("sampled_scores", &[scores.len()], scores)?;
    for (name, each) in [("best", best), ("int8", int8), ("coded", coded)] {
        file.reserve::<u32>(format!("{name}_counts"), &[total, rates])?;
        file.reserve::<u32>(format!("{name}_places"), &[total, rates, each])?;
        file.reserve::<f32>(format!("{name}_scores"), &[total, rates, each])?;
    }
    let (done, k) = (AtomicUsize::new(0), vec![most; rates]);
    progress(0, total);
    file.write_filled(path, |places| {
        let requested: Vec<usize> = (0..total).collect();
        for requested in requested.chunks(rayon::current_num_threads() * TOGETHER) {
            let find = |together: &[usize]| {
                let mut found = vec![vec![FoundIn::default(); rates]; together.len()];
                Finder::default().find(measured, &queries.vectors, &shares, &k, together, &mut found);
                progress(done.fetch_add(together.len(), Ordering::Relaxed) + together.len(), total);
                found
            };
            let found: Vec<_> = requested.par_chunks(TOGETHER).flat_map_iter(find).collect();
            for (&n, found) in requested.iter().zip(&found) {
                for (rate, found) in found.iter().enumerate() {
                    let at = n * rates + rate;
                    let orders =
                        [("best", &found.best, best), ("int8", &found.int8, int8), ("coded", &found.coded, coded)];
                    for (name, found, each) in orders {
                        places.put(&format!("{name}_counts"), at, &[found.len() as u32])?;
                        let in_whole: Vec<u32> = found.iter().map(|scored| scored.place).collect();
                        places.put(&format!("{name}_places"), at * each, &in_whole)?;
                        let scores: Vec<f32> = found.iter().map(|scored| scored.score).collect();
                        places.put(&format!("{name}_scores"), at * each, &scores)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// Best results by one kind of score, per query and pass rate.
struct Best {
    counts: Buffer<u32>,
    places: Buffer<u32>,
    scores: Buffer<f32>,
    each: usize,
}

impl Best {
    fn open(tensors: &Tensors, name: &str, queries: usize) -> Result<Self> {
        let of = |what: &str| format!("{name}_{what}");
        let (counts, counted) = tensors.get::<u32>(&of("counts"), 2)?;
        let (places, shape) = tensors.get::<u32>(&of("places"), 3)?;
        let (scores, other) = tensors.get::<f32>(&of("scores"), 3)?;
        let each = shape[2];
        let fits = counted == [queries, PASS_RATES.len()] && shape == [queries, PASS_RATES.len(), each];
        let is_bounded = counts.iter().all(|&count| count as usize <= each);
        match fits && other == shape && is_bounded {
            true => Ok(Best { counts, places, scores, each }),
            false => Err(Error::corrupt(format!(
                "tensor `{}`: got shape {shape:?}, expected one entry for each of {queries} queries and each pass rate",
                of("places")
            ))),
        }
    }

    fn add(&self, at: usize, to: &mut Vec<Scored>) {
        let found = at * self.each..at * self.each + self.counts[at] as usize;
        to.extend(found.map(|n| Scored { score: self.scores[n], place: self.places[n] }));
    }
}

/// Results from one shard.
struct Findings {
    queries: Queries,
    /// Numbers of passing items per pass rate and random item set, `[R][8]`.
    passing: Vec<Vec<Passing>>,
    sampled: Buffer<u32>,
    sampled_places: Buffer<u32>,
    sampled_scores: Buffer<f32>,
    best: Best,
    int8: Best,
    coded: Best,
}

impl Findings {
    fn open(path: &Path) -> Result<Self> {
        Findings::of(&Tensors::open(path)?).map_err(|e| e.within(path.display()))
    }

    fn of(tensors: &Tensors) -> Result<Self> {
        let corrupt =
            |what: &str| Error::corrupt(format!("{what}: expected the results of {} pass rates", PASS_RATES.len()));
        let (vectors, shape) = tensors.get::<f32>("queries", 2)?;
        let total = shape[0];
        let made_of = tensors.vector::<u32>("made_of", total)?;
        let (source, _) = tensors.get::<u8>("source", 1)?;
        let ood = tensors.vector::<u32>("ood_count", 1)?[0] as usize;
        if ood > total {
            return Err(Error::corrupt(format!("tensor `ood_count`: {ood}, expected at most {total}")));
        }
        let queries = Queries {
            ood,
            ood_reach: tensors.vector::<f32>("ood_reach", 1)?[0],
            source: String::from_utf8_lossy(&source).into_owned(),
            vectors: vectors.chunks_exact(shape[1].max(1)).map(<[f32]>::to_vec).collect(),
            made_of: made_of.iter().map(|&place| (place != NO_ITEM).then_some(place)).collect(),
            strata: Vec::new(),
            ..Queries::default()
        };
        let (passing, shape) = tensors.get::<u32>("passing", 3)?;
        let lists = shape[2];
        if shape[..2] != [PASS_RATES.len(), DRAWS as usize] || lists == 0 {
            return Err(corrupt("tensor `passing`"));
        }
        let draws: Vec<Passing> = passing.chunks_exact(lists).map(|lists| Passing::of(lists.to_vec())).collect();
        let passing = draws.chunks(DRAWS as usize).map(<[Passing]>::to_vec).collect();
        let sampled = tensors.vector::<u32>("sampled", total + 1)?;
        let (sampled_places, samples) = tensors.get::<u32>("sampled_places", 1)?;
        let sampled_scores = tensors.vector::<f32>("sampled_scores", samples[0])?;
        if !sampled.is_sorted() || sampled.last().is_none_or(|&last| last as usize != samples[0]) {
            return Err(corrupt("tensor `sampled`"));
        }
        let best = Best::open(tensors, "best", total)?;
        let int8 = Best::open(tensors, "int8", total)?;
        let coded = Best::open(tensors, "coded", total)?;
        Ok(Findings { queries, passing, sampled, sampled_places, sampled_scores, best, int8, coded })
    }

    fn sample(&self, n: usize) -> impl Iterator<Item = (u32, f32)> {
        let range = self.sampled[n] as usize..self.sampled[n + 1] as usize;
        self.sampled_places[range.clone()].iter().copied().zip(self.sampled_scores[range].iter().copied())
    }
}

/// Computes the calibration of a version from the results of all shards, where `index` is one of the shards; returns the
/// calibration with its queries.
///
/// # Errors
/// `Corrupt` with a file that does not contain results, or contains results of other queries.
pub(super) fn counted(
    index: &ivf::Index,
    files: &[impl AsRef<Path>],
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<(Calibration, Queries)> {
    let found = files.iter().map(|file| Findings::open(file.as_ref())).collect::<Result<Vec<_>>>()?;
    let Some(first) = found.first() else { return Err(Error::internal("no shards were searched")) };
    for (file, other) in files.iter().zip(&found) {
        let is_alike = other.queries == first.queries && other.passing[0][0].of_lists.len() == index.lists();
        if !is_alike {
            let (file, first) = (file.as_ref().display(), files[0].as_ref().display());
            return Err(Error::corrupt(format!("{file}: was made with other queries or lists than {first}")));
        }
    }
    let passing: Vec<Vec<Passing>> = (0..PASS_RATES.len())
        .map(|rate| (0..DRAWS as usize).map(|draw| sum(found.iter().map(|f| &f.passing[rate][draw]))).collect())
        .collect();
    let lengths = &passing[0][0].of_lists;
    let offsets = ivf::list_offsets(lengths);
    let layout = Layout { offsets: &offsets, lengths };
    let queries = &first.queries;
    let sample = |n: usize| {
        let mut sample: Vec<(u32, f32)> = found.iter().flat_map(|found| found.sample(n)).collect();
        sample.sort_unstable_by_key(|(place, _)| *place);
        sample
    };
    let samples: Vec<_> = (0..queries.vectors.len()).map(sample).collect();
    let ordinary = &queries.vectors[..queries.ordinary()];
    let counting = Counting::of(index, layout, passing.clone(), ordinary, &samples);
    let finder = || {
        |requested: &[usize], of_queries: &mut [Vec<FoundIn>]| {
            for (&n, shares) in requested.iter().zip(of_queries) {
                for (rate, (share, &k)) in shares.iter_mut().zip(&counting.k).enumerate() {
                    share.clear();
                    for found in &found {
                        found.best.add(n * PASS_RATES.len() + rate, &mut share.best);
                        found.int8.add(n * PASS_RATES.len() + rate, &mut share.int8);
                        found.coded.add(n * PASS_RATES.len() + rate, &mut share.coded);
                    }
                    share.retain_best(k);
                }
            }
        }
    };
    let calibration = counting.calibration(queries, finder, progress);
    drop(counting);
    found
        .into_iter()
        .next()
        .map(|first| (calibration, first.queries.without_ood()))
        .ok_or_else(|| Error::internal("no shards"))
}

fn sum<'a>(of_shards: impl Iterator<Item = &'a Passing>) -> Passing {
    let mut all = Vec::new();
    for shard in of_shards {
        all.resize(shard.of_lists.len(), 0);
        all.iter_mut().zip(&shard.of_lists).for_each(|(sum, n)| *sum += n);
    }
    Passing::of(all)
}
