//! Eligibility index, read from a mapped tensor file.

use std::ops::Range;

use super::hash::{Hashing, TermHash};
use super::numbers::{Numbers, Run};
use sterling_core::error::{Error, Result};
use sterling_core::units::{ListId, Slot, TermId};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::memory::prefetch;
use sterling_storage::files::Tensors;

/// Words of a Bloom plane that are prefetched; the hardware prefetcher loads the rest of a long plane.
const PREFETCH_WORDS: usize = 32;

/// Storage of a term in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) enum TermStorage {
    /// Exact plane with this number.
    Plane(usize),
    /// Posting list with this number, and Bloom planes.
    Posting(usize),
    /// Bloom planes only.
    Bloom,
}

/// Planes and posting lists of a snapshot.
#[derive(Clone, Debug)]
pub struct Index {
    /// Exact planes, each over all lists: planes of terms, then planes of numeric buckets.
    planes: Buffer<u64>,
    /// First word of each list in an exact plane, and the length of a plane.
    firsts: Vec<u32>,
    /// Plane of all items.
    pub(in crate::filter) every: Vec<u64>,
    /// First slot of each word.
    pub(in crate::filter) word_slots: Vec<Slot>,
    /// Bloom planes, list by list, and the start of each list.
    bloom: Buffer<u64>,
    starts: Vec<u64>,
    /// First slot of each list, and the total at the end.
    list_offsets: Vec<u32>,
    list_lengths: Vec<u32>,
    items: usize,
    widths: Buffer<u32>,
    hashing: Hashing,
    hashes: u32,
    counts: Buffer<u32>,
    /// Prefix sums of the item counts of terms.
    counted: Vec<u64>,
    exact: Buffer<u32>,
    pub(in crate::filter) numbers: Numbers,
    posting_terms: Buffer<u32>,
    posting_offsets: Buffer<u32>,
    posting_slots: Buffer<u32>,
}

impl Index {
    /// Opens the tensors of [`super::encode`] for the same lists and the same number of terms.
    ///
    /// # Errors
    /// `Corrupt` with the tensor that is missing, out of range or out of order.
    pub fn open(tensors: &Tensors, list_offsets: &[u32], list_lengths: &[u32], terms: usize) -> Result<Self> {
        let corrupt = |tensor: &str, what: &str| Error::corrupt(format!("tensor `{tensor}`: {what}"));
        let lists = list_lengths.len();
        let widths = tensors.vector::<u32>("widths", lists)?;
        let counts = tensors.vector::<u32>("term_counts", terms)?;
        let is_plain = tensors.has(Hashing::Plain.tensor());
        let hashing = if is_plain { Hashing::Plain } else { Hashing::Spaced };
        let hashes = tensors.vector::<u32>(hashing.tensor(), 1)?[0];
        let (exact, _) = tensors.get::<u32>("exact_terms", 1)?;
        let (posting_terms, rare) = tensors.get::<u32>("posting_terms", 1)?;
        let posting_offsets = tensors.vector::<u32>("posting_offsets", rare[0] + 1)?;
        let (posting_slots, _) = tensors.get::<u32>("posting_slots", 1)?;
        for (name, terms_of) in [("exact_terms", &exact), ("posting_terms", &posting_terms)] {
            if !terms_of.is_sorted_by(|a, b| a < b) || terms_of.last().is_some_and(|&t| t as usize >= terms) {
                return Err(corrupt(name, "terms are out of order or out of range"));
            }
        }
        let slots = list_offsets.last().copied().unwrap_or(0);
        let covered =
            posting_offsets.first() == Some(&0) && posting_offsets.last() == Some(&(posting_slots.len() as u32));
        if !covered || !posting_offsets.is_sorted() || posting_slots.iter().any(|&s| s >= slots) {
            return Err(corrupt("posting_slots", "offsets or slots are out of range"));
        }
        let is_in_order = |ends: &[u32]| posting_slots[ends[0] as usize..ends[1] as usize].is_sorted_by(|a, b| a < b);
        if !posting_offsets.windows(2).all(is_in_order) {
            return Err(corrupt("posting_slots", "slots of a term are out of order"));
        }
        if hashes == 0 || hashes > 32 {
            return Err(corrupt(hashing.tensor(), "expected 1 to 32 hashes per term"));
        }
        let numbers = Numbers::open(tensors)?;
        let (mut firsts, mut starts) = (vec![0u32], Vec::with_capacity(lists));
        let (mut every, mut word_slots) = (Vec::new(), Vec::new());
        let mut end = 0u64;
        for list in 0..lists {
            let words = u64::from(list_offsets[list + 1] - list_offsets[list]).div_ceil(64);
            starts.push(end);
            end = end.saturating_add(words * u64::from(widths[list]));
            let length = list_lengths[list] as usize;
            every.extend((0..words as usize).map(|w| ones(length.saturating_sub(w * 64))));
            word_slots.extend((0..words as u32).map(|w| Slot(list_offsets[list] + w * 64)));
            firsts.push(every.len() as u32);
        }
        let total = every.len().saturating_mul(exact.len().saturating_add(numbers.planes()));
        let planes = tensors.vector::<u64>("planes", total)?;
        let bloom = tensors.vector::<u64>("bloom", usize::try_from(end).unwrap_or(usize::MAX))?;
        let mut counted = vec![0u64];
        counted.extend(counts.iter().scan(0, |sum, &n| {
            *sum += u64::from(n);
            Some(*sum)
        }));
        Ok(Index {
            planes,
            firsts,
            every,
            word_slots,
            bloom,
            starts,
            list_offsets: list_offsets.to_vec(),
            list_lengths: list_lengths.to_vec(),
            items: list_lengths.iter().map(|&n| n as usize).sum(),
            widths,
            hashing,
            hashes,
            counts,
            counted,
            exact,
            numbers,
            posting_terms,
            posting_offsets,
            posting_slots,
        })
    }

    /// Returns the number of lists, C.
    pub fn lists(&self) -> usize {
        self.list_lengths.len()
    }

    /// Returns the number of items, N.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Returns the number of words per plane of a list.
    pub fn words(&self, list: ListId) -> usize {
        (self.firsts[list.index() + 1] - self.firsts[list.index()]) as usize
    }

    /// Returns the maximum number of words per plane of any list.
    pub fn words_max(&self) -> usize {
        (0..self.lists()).map(|l| self.words(ListId(l as u32))).max().unwrap_or(0)
    }

    /// Returns the size of planes and posting lists in bytes.
    pub fn bytes(&self) -> usize {
        self.planes.bytes() + self.bloom.bytes() + self.posting_slots.bytes()
    }

    pub(in crate::filter) fn list_end(&self) -> u32 {
        self.list_offsets.last().copied().unwrap_or(0)
    }

    /// Returns the first slot of a list.
    pub fn first_slot(&self, list: ListId) -> u32 {
        self.list_offsets[list.index()]
    }

    /// Returns the number of items of a list; these items occupy the first slots of the list.
    pub fn length(&self, list: ListId) -> usize {
        self.list_lengths[list.index()] as usize
    }

    /// Returns the first slot of each word of a plane.
    pub fn word_slots(&self) -> impl ExactSizeIterator<Item = Slot> + '_ {
        self.word_slots.iter().copied()
    }

    /// Clears the bits of `excluded` slots (ascending) in the bitmap of a list.
    pub fn exclude(&self, list: ListId, excluded: &[Slot], words: &mut [u64]) {
        self.within(excluded, |slot| slot.0, list.index()..list.index() + 1)
            .for_each(|(word, bit)| words[word] &= !bit);
    }

    /// Returns the items of `slots` (ascending) in consecutive lists, each as a bit of a word; words count from the
    /// first list.
    fn within<'a, T>(
        &'a self,
        slots: &'a [T],
        number: impl Fn(&T) -> u32 + Copy + 'a,
        lists: Range<usize>,
    ) -> impl Iterator<Item = (usize, u64)> + 'a {
        let (first, end) = (self.list_offsets[lists.start], self.list_offsets[lists.end]);
        let (from, first_word) = (slots.partition_point(|slot| number(slot) < first), self.firsts[lists.start]);
        let mut list = lists.start;
        slots[from..].iter().map(number).take_while(move |&slot| slot < end).map(move |slot| {
            while self.list_offsets[list + 1] <= slot {
                list += 1;
            }
            let item = slot - self.list_offsets[list];
            ((self.firsts[list] + item / 64 - first_word) as usize, 1 << (item % 64))
        })
    }

    /// Returns the words of consecutive lists in an exact plane.
    pub(in crate::filter) fn span(&self, lists: Range<usize>) -> Range<usize> {
        self.firsts[lists.start] as usize..self.firsts[lists.end] as usize
    }

    /// Returns the longest range of lists from `first` on with at most `words` words, but at least `first` itself.
    pub(in crate::filter) fn lists_within(&self, first: usize, words: usize) -> Range<usize> {
        let end = self.firsts[first].saturating_add(words as u32);
        first..self.firsts.partition_point(|&f| f <= end).saturating_sub(1).max(first + 1)
    }

    pub(in crate::filter) fn plane(&self, plane: usize, span: Range<usize>) -> &[u64] {
        let start = plane * self.every.len();
        &self.planes[start + span.start..start + span.end]
    }

    /// Computes the bitmap of the items in any of the bucket ranges.
    pub(in crate::filter) fn runs(&self, runs: &[Run], span: Range<usize>, out: &mut [u64]) {
        let plane = |n: usize| self.plane(self.exact.len() + n, span.clone());
        out.fill(0);
        for run in runs {
            match run.before {
                Some(before) => {
                    let pairs = plane(run.plane).iter().zip(plane(before));
                    out.iter_mut().zip(pairs).for_each(|(o, (p, b))| *o |= p & !b);
                }
                None => out.iter_mut().zip(plane(run.plane)).for_each(|(o, p)| *o |= p),
            }
        }
    }

    /// Returns the number of items with a term in the range; an item with two of these terms counts twice.
    pub(in crate::filter) fn counted(&self, terms: Range<u32>) -> u64 {
        self.counted[terms.end as usize] - self.counted[terms.start as usize]
    }

    pub(in crate::filter) fn count(&self, term: TermId) -> u32 {
        self.counts[term.index()]
    }

    /// Returns how the index stores a term.
    pub(in crate::filter) fn held(&self, term: TermId) -> TermStorage {
        match (self.exact_plane(term), self.posting(term)) {
            (Some(plane), _) => TermStorage::Plane(plane),
            (None, Some(posting)) => TermStorage::Posting(posting),
            (None, None) => TermStorage::Bloom,
        }
    }

    pub(in crate::filter) fn exact_plane(&self, term: TermId) -> Option<usize> {
        self.exact.binary_search(&term.0).ok()
    }

    /// Returns the index of a term's posting list.
    pub(in crate::filter) fn posting(&self, term: TermId) -> Option<usize> {
        self.posting_terms.binary_search(&term.0).ok()
    }

    /// Returns the slots of a posting list, ascending.
    pub(in crate::filter) fn posting_slots(&self, posting: usize) -> &[u32] {
        &self.posting_slots[self.posting_offsets[posting] as usize..self.posting_offsets[posting + 1] as usize]
    }

    /// Returns the items of a posting list in consecutive lists, as words and bits.
    pub(in crate::filter) fn posted(
        &self,
        posting: usize,
        lists: Range<usize>,
    ) -> impl Iterator<Item = (usize, u64)> + '_ {
        let every = &self.every[self.firsts[lists.start] as usize..];
        let posted = self.within(self.posting_slots(posting), |slot| *slot, lists);
        posted.map(|(word, bit)| (word, bit & every[word]))
    }

    pub(in crate::filter) fn hash(&self, key: &[u8]) -> TermHash {
        self.hashing.of(key)
    }

    /// Prefetches the planes that [`Index::bloom`] will read.
    pub(in crate::filter) fn prefetch_bloom(&self, list: ListId, hash: TermHash) {
        let (width, words) = (self.widths[list.index()], self.words(list));
        let start = self.starts[list.index()] as usize;
        for n in 0..self.hashes.min(width) {
            let plane = &self.bloom[start + hash.position(n, width) * words..][..words];
            prefetch(&plane[..words.min(PREFETCH_WORDS)]);
        }
    }

    /// ANDs the planes of a term's Bloom positions into `out`: bits of items that may have the term.
    pub(in crate::filter) fn bloom(&self, list: ListId, hash: TermHash, out: &mut [u64]) {
        let width = self.widths[list.index()];
        if width == 0 {
            out.fill(0);
            return;
        }
        let start = self.starts[list.index()] as usize;
        for n in 0..self.hashes {
            let plane = &self.bloom[start + hash.position(n, width) * out.len()..][..out.len()];
            out.iter_mut().zip(plane).for_each(|(o, p)| *o &= p);
        }
    }
}

/// Accessors for the copy to a GPU.
#[cfg(feature = "cuda")]
impl Index {
    /// Returns the first word of each list in an exact plane, and the length of a plane.
    pub(super) fn list_firsts(&self) -> &[u32] {
        &self.firsts
    }

    /// Returns the Bloom planes, their start and width per list, and the number of hashes.
    pub(super) fn bloom_planes(&self) -> (&[u64], &[u64], &[u32], u32) {
        (&self.bloom, &self.starts, &self.widths, self.hashes)
    }

    /// Returns the exact planes, and how many of them belong to terms.
    pub(super) fn all_planes(&self) -> (&[u64], usize) {
        (&self.planes, self.exact.len())
    }

    /// Returns the word of a plane that holds the bit of a slot.
    pub(super) fn word_of(&self, slot: Slot) -> u32 {
        let list = self.list_offsets.partition_point(|&offset| offset <= slot.0).saturating_sub(1);
        self.firsts[list] + (slot.0 - self.list_offsets[list]) / 64
    }
}

/// Returns a word whose first `count` bits are set.
fn ones(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}
