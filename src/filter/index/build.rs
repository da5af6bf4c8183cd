//! Planes and posting lists from columns.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::hash::TermHash;
use super::numbers::{self, Buckets};
use crate::columns::Columns;
use crate::error::{Error, Result};
use crate::files::TensorFile;
use crate::units::{Slot, TermId};

const WIDTH_MAX: u32 = 1 << 20;
const NUMBER_BUCKETS_MAX: u32 = 1024;

/// How the eligibility index is built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Bits that a term sets in a Bloom filter.
    pub hashes: u32,
    /// Width of a list's Bloom filters as a multiple of the terms of its fullest item.
    pub bits_per_term: u32,
    /// Width of every Bloom filter, in place of `bits_per_term`.
    pub fixed_bits: Option<u32>,
    /// Terms that at least this share of the items has get an exact plane.
    pub exact_share_min: f64,
    /// Terms that at most this share of the items has get a posting list.
    pub posting_share_max: f64,
    /// Buckets of each column that is compared; 0 for none, every comparison is then made item by item.
    pub number_buckets: u32,
    /// Columns whose equal values lie together within a list, the first one first; none means all categories, those with
    /// the fewest values first.
    pub together: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            hashes: 5,
            bits_per_term: 10,
            fixed_bits: None,
            exact_share_min: 0.01,
            posting_share_max: 0.002,
            number_buckets: 32,
            together: Vec::new(),
        }
    }
}

impl Options {
    /// Refuses options that no index can have.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        let whole = [
            ("hashes", Some(self.hashes), 32),
            ("bits_per_term", Some(self.bits_per_term), 4096),
            ("fixed_bits", self.fixed_bits, WIDTH_MAX),
        ];
        for (name, value, most) in whole {
            if value.is_some_and(|v| v == 0 || v > most) {
                return Err(Error::invalid(format!("filter.{name}: got {}, expected 1 to {most}", value.unwrap_or(0))));
            }
        }
        if self.number_buckets > NUMBER_BUCKETS_MAX {
            let got = self.number_buckets;
            return Err(Error::invalid(format!(
                "filter.number_buckets: got {got}, expected 0 to {NUMBER_BUCKETS_MAX}"
            )));
        }
        for (name, share) in [("exact_share_min", self.exact_share_min), ("posting_share_max", self.posting_share_max)]
        {
            if !(0.0..=1.0).contains(&share) {
                return Err(Error::invalid(format!("filter.{name}: got {share}, expected 0 to 1")));
            }
        }
        Ok(())
    }
}

/// The planes of one list.
struct ListPlanes {
    width: u32,
    bloom: Vec<u64>,
    planes: Vec<u64>,
    words: usize,
}

/// Adds the tensors of the index over `columns`, whose list `l` has the slots `list_offsets[l]..list_offsets[l + 1]` and
/// its items in the first `list_lengths[l]` of them.
///
/// # Errors
/// `Invalid` for options that cannot be.
pub fn encode(
    columns: &Columns,
    list_offsets: &[u32],
    list_lengths: &[u32],
    options: &Options,
    file: &mut TensorFile<'_>,
) -> Result<()> {
    options.check()?;
    let items: u64 = list_lengths.iter().map(|&n| u64::from(n)).sum();
    let slots = move |list: usize| (list_offsets[list]..list_offsets[list] + list_lengths[list]).map(Slot);
    let lists = list_lengths.len();
    let mut counts = vec![0u32; columns.terms()];
    for term in (0..lists).flat_map(slots).flat_map(|slot| columns.slot_terms(slot)) {
        counts[term.index()] += 1;
    }
    let at_least = ((items as f64 * options.exact_share_min).ceil() as u32).max(1);
    let at_most = (items as f64 * options.posting_share_max).floor() as u32;
    let exact: Vec<u32> = (0..counts.len() as u32).filter(|&t| counts[t as usize] >= at_least).collect();
    let rare: Vec<u32> =
        (0..counts.len() as u32).filter(|&t| (1..=at_most.min(at_least - 1)).contains(&counts[t as usize])).collect();
    let hashes: Vec<TermHash> = (0..columns.terms() as u32)
        .into_par_iter()
        .map(|term| TermHash::of(&columns.term_key(TermId(term)).unwrap_or_default()))
        .collect();

    let numbered: Vec<Buckets> = columns
        .list()
        .enumerate()
        .filter(|(_, column)| {
            // A column whose values all have planes is compared through these.
            let terms = column.first_term().map(|first| first.0..first.0 + column.dictionary_len() as u32);
            !terms.is_some_and(|mut terms| terms.all(|t| exact.binary_search(&t).is_ok()))
        })
        .filter_map(|(n, column)| Buckets::of(n, column, (0..lists).flat_map(slots), options.number_buckets))
        .collect();

    let build_list = |list: usize| -> ListPlanes {
        let words = ((list_offsets[list + 1] - list_offsets[list]) as usize).div_ceil(64);
        let is_exact = |term: &TermId| exact.binary_search(&term.0);
        let fullest =
            slots(list).map(|s| columns.slot_terms(s).filter(|t| is_exact(t).is_err()).count()).max().unwrap_or(0);
        let width = match options.fixed_bits {
            _ if fullest == 0 => 0,
            Some(bits) => bits,
            None => (fullest as u32).saturating_mul(options.bits_per_term).min(WIDTH_MAX).next_multiple_of(8),
        };
        let mut bloom = vec![0u64; width as usize * words];
        let mut planes = vec![0u64; (exact.len() + numbered.iter().map(Buckets::len).sum::<usize>()) * words];
        for (item, slot) in slots(list).enumerate() {
            let set = |planes: &mut [u64], plane: usize| planes[plane * words + item / 64] |= 1 << (item % 64);
            for term in columns.slot_terms(slot) {
                match is_exact(&term) {
                    Ok(plane) => set(&mut planes, plane),
                    Err(_) => {
                        (0..options.hashes).for_each(|n| set(&mut bloom, hashes[term.index()].position(n, width)));
                    }
                }
            }
            let mut first = exact.len();
            for buckets in &numbered {
                if let Some(place) = columns.at(buckets.column).place(slot) {
                    (buckets.bucket(place)..buckets.len()).for_each(|b| set(&mut planes, first + b));
                }
                first += buckets.len();
            }
        }
        ListPlanes { width, bloom, planes, words }
    };
    let built: Vec<ListPlanes> = (0..lists).into_par_iter().map(build_list).collect();
    let widths: Vec<u32> = built.iter().map(|list| list.width).collect();
    let bloom: Vec<u64> = built.iter().flat_map(|list| list.bloom.iter().copied()).collect();
    let plane_count = exact.len() + numbered.iter().map(Buckets::len).sum::<usize>();
    let planes: Vec<u64> = (0..plane_count)
        .flat_map(|plane| {
            built.iter().flat_map(move |list| list.planes[plane * list.words..][..list.words].iter().copied())
        })
        .collect();
    drop(built);

    let mut postings: Vec<Vec<u32>> = vec![Vec::new(); rare.len()];
    for slot in (0..lists).flat_map(slots) {
        for term in columns.slot_terms(slot) {
            if let Ok(at) = rare.binary_search(&term.0) {
                postings[at].push(slot.0);
            }
        }
    }
    let mut ends = vec![0u32];
    ends.extend(postings.iter().scan(0, |end, p| {
        *end += p.len() as u32;
        Some(*end)
    }));
    file.add_owned("planes", &[planes.len()], planes)?;
    file.add_owned("bloom", &[bloom.len()], bloom)?;
    numbers::encode(&numbered, file)?;
    file.add_owned("hashes", &[1], vec![options.hashes])?;
    file.add_owned("widths", &[lists], widths)?;
    file.add_owned("term_counts", &[counts.len()], counts)?;
    file.add_owned("exact_terms", &[exact.len()], exact)?;
    file.add_owned("posting_terms", &[rare.len()], rare)?;
    file.add_owned("posting_offsets", &[ends.len()], ends)?;
    file.add_owned("posting_slots", &[postings.iter().map(Vec::len).sum()], postings.concat())
}
