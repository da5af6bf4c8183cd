//! Builds bit planes and posting lists from columns.

use std::ops::RangeInclusive;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::hash::{Hashing, TermHash};
use super::numbers::{self, Buckets};
use crate::columns::{Column, Columns};
use sterling_core::error::{Error, Result};
use sterling_core::units::{Slot, TermId};
use sterling_kernels::priority::breathe;
use sterling_storage::files::TensorFile;

const WIDTH_MAX: u32 = 1 << 20;
const NUMBER_BUCKETS_MAX: u32 = 1024;
/// Per list, one item in `OUTLIERS`, but at least one, may have more terms than the Bloom filters are sized for.
const OUTLIERS: usize = 64;
/// Maximum size of Bloom filters, relative to the size that the item with the most terms needs, outliers excluded.
const OVER_TYPICAL: u32 = 2;
/// Number of terms up to which Bloom filters are always allowed, because they are small.
const TERMS_MIN: u32 = 16;
/// Lists whose planes are built at a time; these planes are in memory twice during the build.
const LISTS_AT_ONCE: usize = 256;

/// Build options of the eligibility index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Number of bits that a term sets in a Bloom filter.
    pub hashes: u32,
    /// Width of a list's Bloom filters in bits, per term of the item with the most terms.
    pub bits_per_term: u32,
    /// Width of every Bloom filter, in place of `bits_per_term`.
    pub fixed_bits: Option<u32>,
    /// Minimum share of items for a term to get an exact plane.
    pub exact_share_min: f64,
    /// Maximum share of items for a term to get a posting list.
    pub posting_share_max: f64,
    /// Number of buckets per compared column; 0 disables buckets, so comparisons are evaluated per item.
    pub number_buckets: u32,
    /// Columns whose equal values are stored together within a list, most significant first. If empty, all categories
    /// are used, those with the fewest values first.
    pub together: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            hashes: 5,
            bits_per_term: 10,
            fixed_bits: None,
            exact_share_min: 0.01,
            posting_share_max: 0.01,
            number_buckets: 32,
            together: Vec::new(),
        }
    }
}

impl Options {
    /// Returns the width of the Bloom filters of a list whose items have these numbers of terms. The width follows the
    /// item with the most terms, unless this item is an outlier that would widen the planes of all items. The filter of
    /// an outlier is almost full, so the outlier passes too often and is verified more often.
    pub fn bloom_bits(&self, terms: &mut [u32]) -> u32 {
        match (terms.iter().copied().max().unwrap_or(0), self.fixed_bits) {
            (0, _) => 0,
            (_, Some(bits)) => bits,
            (fullest, None) => {
                let outliers = (terms.len() / OUTLIERS).max(1);
                let typical = match outliers < terms.len() {
                    true => *terms.select_nth_unstable_by(outliers, |a, b| b.cmp(a)).1,
                    false => fullest,
                };
                let terms = fullest.min(typical.saturating_mul(OVER_TYPICAL).max(TERMS_MIN));
                terms.saturating_mul(self.bits_per_term).min(WIDTH_MAX).next_multiple_of(8)
            }
        }
    }

    /// Validates the options.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        let complete = [
            ("hashes", Some(self.hashes), 32),
            ("bits_per_term", Some(self.bits_per_term), 4096),
            ("fixed_bits", self.fixed_bits, WIDTH_MAX),
        ];
        for (name, value, most) in complete {
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

/// Adds the tensors of the index over `columns`. List `l` has the slots `list_offsets[l]..list_offsets[l + 1]`, and its
/// items are in the first `list_lengths[l]` of these slots.
///
/// # Errors
/// `Invalid` for invalid options.
pub fn encode(
    columns: &Columns,
    list_offsets: &[u32],
    list_lengths: &[u32],
    options: &Options,
    file: &mut TensorFile<'_>,
) -> Result<()> {
    encode_by(Hashing::Spaced, columns, (list_offsets, list_lengths), options, file)
}

/// Like [`encode`], with a choice of the term hashing.
pub(in crate::filter) fn encode_by(
    hashing: Hashing,
    columns: &Columns,
    (list_offsets, list_lengths): (&[u32], &[u32]),
    options: &Options,
    file: &mut TensorFile<'_>,
) -> Result<()> {
    options.check()?;
    let slots = ListSlots { offsets: list_offsets, lengths: list_lengths };
    let counts = term_counts(columns, slots);
    let exact_min = ((slots.items() as f64 * options.exact_share_min).ceil() as u32).max(1);
    let rare_max = ((slots.items() as f64 * options.posting_share_max).floor() as u32).min(exact_min - 1);
    let with_count = |wanted: RangeInclusive<u32>| -> Vec<u32> {
        (0u32..).zip(&counts).filter(|(_, count)| wanted.contains(count)).map(|(term, _)| term).collect()
    };
    // In a shard, a term may have no item; it then gets an empty posting list.
    let (exact, rare) = (with_count(exact_min..=u32::MAX), with_count(0..=rare_max));
    let bits = Bits::new(columns, slots, &exact, (options, hashing));
    let widths: Vec<u32> = (0..slots.lists()).into_par_iter().map(|list| bits.width(list)).collect();
    let (planes, bloom) = bits.all(&widths);
    let (ends, posted) = postings(columns, slots, &rare, &counts)?;
    file.add_owned("planes", &[planes.len()], planes)?;
    file.add_owned("bloom", &[bloom.len()], bloom)?;
    numbers::encode(&bits.numbered, file)?;
    file.add_owned(hashing.tensor(), &[1], vec![options.hashes])?;
    file.add_owned("widths", &[widths.len()], widths)?;
    file.add_owned("term_counts", &[counts.len()], counts)?;
    file.add_owned("exact_terms", &[exact.len()], exact)?;
    file.add_owned("posting_terms", &[rare.len()], rare)?;
    file.add_owned("posting_offsets", &[ends.len()], ends)?;
    file.add_owned("posting_slots", &[posted.len()], posted)
}

/// Slots and lengths of the lists.
#[derive(Clone, Copy)]
struct ListSlots<'a> {
    offsets: &'a [u32],
    lengths: &'a [u32],
}

impl<'a> ListSlots<'a> {
    fn lists(self) -> usize {
        self.lengths.len()
    }

    fn items(self) -> u64 {
        self.lengths.iter().map(|&n| u64::from(n)).sum()
    }

    /// Returns the slots of a list that hold items.
    fn of(self, list: usize) -> impl Iterator<Item = Slot> + Clone + 'a {
        (self.offsets[list]..self.offsets[list] + self.lengths[list]).map(Slot)
    }

    fn all(self) -> impl Iterator<Item = Slot> + Clone + 'a {
        (0..self.lists()).flat_map(move |list| self.of(list))
    }

    /// Returns the number of words per plane of a list.
    fn words(self, list: usize) -> usize {
        ((self.offsets[list + 1] - self.offsets[list]) as usize).div_ceil(64)
    }
}

fn term_counts(columns: &Columns, slots: ListSlots<'_>) -> Vec<u32> {
    let mut counts = vec![0u32; columns.terms()];
    for term in slots.all().flat_map(|slot| columns.slot_terms(slot)) {
        counts[term.index()] += 1;
    }
    counts
}

/// Builds the posting lists of the `rare` terms: the start of each list, with the total at the end, and the slots, ascending per
/// term.
fn postings(columns: &Columns, slots: ListSlots<'_>, rare: &[u32], counts: &[u32]) -> Result<(Vec<u32>, Vec<u32>)> {
    let starts = posting_starts(rare.iter().map(|&term| counts[term as usize]))?;
    let mut next = starts.clone();
    let mut posted = vec![0u32; starts[rare.len()] as usize];
    for slot in slots.all() {
        for term in columns.slot_terms(slot) {
            if let Ok(at) = rare.binary_search(&term.0) {
                posted[next[at] as usize] = slot.0;
                next[at] += 1;
            }
        }
    }
    Ok((starts, posted))
}

/// Returns the start of each posting list, and the total length at the end.
fn posting_starts(lengths: impl Iterator<Item = u32> + Clone) -> Result<Vec<u32>> {
    let all = lengths.clone().map(u64::from).sum::<u64>();
    if all > u64::from(u32::MAX) {
        return Err(Error::invalid(format!(
            "the posting lists of the filter have {all} slots, expected at most {}: lower `filter.posting_share_max`",
            u32::MAX
        )));
    }
    let mut end = 0;
    let ends = lengths.map(|length| {
        end += length;
        end
    });
    Ok(std::iter::once(0).chain(ends).collect())
}

/// Inputs for building the bit planes of an index.
struct Bits<'a> {
    columns: &'a Columns,
    slots: ListSlots<'a>,
    options: &'a Options,
    exact: &'a [u32],
    /// Buckets of the numeric columns in which some value has no exact plane.
    numbered: Vec<Buckets>,
    /// Hash of each term.
    hashes: Vec<TermHash>,
}

/// Bits of one list: exact planes, then Bloom planes.
struct ListBits {
    planes: Vec<u64>,
    bloom: Vec<u64>,
}

impl<'a> Bits<'a> {
    fn new(
        columns: &'a Columns,
        slots: ListSlots<'a>,
        exact: &'a [u32],
        (options, hashing): (&'a Options, Hashing),
    ) -> Self {
        let has_planes = |column: &Column| {
            // A column whose values all have exact planes needs no buckets: comparisons use those planes.
            let mut terms = column.first_term().map(|first| first.0..first.0 + column.dictionary_len() as u32);
            terms.as_mut().is_some_and(|terms| terms.all(|t| exact.binary_search(&t).is_ok()))
        };
        let numbered = columns
            .list()
            .enumerate()
            .filter(|(_, column)| !has_planes(column))
            .filter_map(|(n, column)| Buckets::of(n, column, slots.all(), options.number_buckets))
            .collect();
        let hashes = (0..columns.terms() as u32)
            .into_par_iter()
            .map(|term| hashing.of(&columns.term_key(TermId(term)).unwrap_or_default()))
            .collect();
        Bits { columns, slots, options, exact, numbered, hashes }
    }

    fn exact_plane(&self, term: TermId) -> Option<usize> {
        self.exact.binary_search(&term.0).ok()
    }

    fn planes(&self) -> usize {
        self.exact.len() + self.numbered.iter().map(Buckets::len).sum::<usize>()
    }

    /// Returns the width of a list's Bloom filters.
    fn width(&self, list: usize) -> u32 {
        let hashed = |slot| self.columns.slot_terms(slot).filter(|&t| self.exact_plane(t).is_none()).count() as u32;
        self.options.bloom_bits(&mut self.slots.of(list).map(hashed).collect::<Vec<u32>>())
    }

    /// Builds the exact planes, each over all lists, and the Bloom planes, list by list.
    fn all(&self, widths: &[u32]) -> (Vec<u64>, Vec<u64>) {
        let words: Vec<usize> = (0..widths.len()).map(|list| self.slots.words(list)).collect();
        let plane_words: usize = words.iter().sum();
        let mut planes = vec![0u64; self.planes() * plane_words];
        let mut bloom =
            Vec::with_capacity(words.iter().zip(widths).map(|(words, &width)| words * width as usize).sum());
        let mut first = 0;
        for lists in (0..widths.len()).collect::<Vec<_>>().chunks(LISTS_AT_ONCE) {
            let built: Vec<ListBits> = lists.par_iter().map(|&list| self.of_list(list, widths[list])).collect();
            for (&list, bits) in lists.iter().zip(&built) {
                let count = words[list];
                for plane in 0..self.planes() {
                    let at = plane * plane_words + first;
                    planes[at..at + count].copy_from_slice(&bits.planes[plane * count..][..count]);
                }
                bloom.extend_from_slice(&bits.bloom);
                first += count;
            }
        }
        (planes, bloom)
    }

    fn of_list(&self, list: usize, width: u32) -> ListBits {
        breathe();
        let words = self.slots.words(list);
        let mut bloom = vec![0u64; width as usize * words];
        let mut planes = vec![0u64; self.planes() * words];
        for (item, slot) in self.slots.of(list).enumerate() {
            let set = |planes: &mut [u64], plane: usize| planes[plane * words + item / 64] |= 1 << (item % 64);
            for term in self.columns.slot_terms(slot) {
                match self.exact_plane(term) {
                    Some(plane) => set(&mut planes, plane),
                    None => {
                        let hash = self.hashes[term.index()];
                        (0..self.options.hashes).for_each(|n| set(&mut bloom, hash.position(n, width)));
                    }
                }
            }
            let mut first = self.exact.len();
            for buckets in &self.numbered {
                if let Some(place) = self.columns.at(buckets.column).place(slot) {
                    (buckets.bucket(place)..buckets.len()).for_each(|b| set(&mut planes, first + b));
                }
                first += buckets.len();
            }
        }
        ListBits { planes, bloom }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_outlier_does_not_widen_the_filters_of_all() {
        let bits = |terms: &[u32]| Options::default().bloom_bits(&mut terms.to_vec());
        // A tenth of the items have twice as many terms: too many for outliers, so the fullest item determines the width.
        let mut terms: Vec<u32> = (0..200).map(|n| if n % 10 == 0 { 60 } else { 30 }).collect();
        assert_eq!([bits(&terms), bits(&[7, 3]), bits(&[0, 0, 5]), bits(&[1000]), bits(&[])], [600, 72, 56, 10_000, 0]);
        terms[77] = 1000;
        assert_eq!(bits(&terms), 1200);
        terms[78..80].fill(1000);
        assert_eq!(bits(&terms), 1200, "three of two hundred are outliers");
        terms[80] = 1000;
        assert_eq!(bits(&terms), 10_000, "four of two hundred are not");
        assert_eq!(bits(&[1000, 0, 0]), 160);
        let fixed = Options { fixed_bits: Some(64), ..Options::default() };
        assert_eq!([fixed.bloom_bits(&mut [1000, 1, 1]), fixed.bloom_bits(&mut [0])], [64, 0]);
    }

    #[test]
    fn posting_lists_beyond_32_bits_are_rejected() {
        assert_eq!(posting_starts([2, 0, 3].into_iter()).unwrap(), [0, 2, 2, 5]);
        assert_eq!(posting_starts([u32::MAX - 1, 1].into_iter()).unwrap().last(), Some(&u32::MAX));
        let error = posting_starts([u32::MAX, 1].into_iter()).unwrap_err().to_string();
        assert!(error.contains("have 4294967296 slots, expected at most 4294967295"), "{error}");
    }
}
