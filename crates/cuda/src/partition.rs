//! Partitioning of a snapshot over several GPUs: each GPU gets a contiguous range of every list.
//!
//! Lists are split between words of 64 slots, so that blocks of the scan and words of Bloom planes stay complete. Each
//! GPU has about the same fraction of every list, so all GPUs are equally busy regardless of the probed lists. The
//! remainder of a short list goes to a GPU that differs from list to list.

use std::borrow::Cow;
use std::ops::Range;

use bytemuck::Pod;

use super::memory::{Array, Device};
use sterling_core::error::Result;

/// Number of slots per word.
const WORD: u32 = 64;
/// Fractional part of the golden ratio: the fractional parts of its multiples are evenly distributed and decide which
/// GPU gets the remainder of a list.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Fraction of the slots that one GPU gets, as an interval from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Start of the interval; 0 for the first GPU.
    pub from: f64,
    /// End of the interval; 1 for the last GPU.
    pub to: f64,
}

impl Share {
    /// All slots.
    pub const WHOLE: Share = Share { from: 0.0, to: 1.0 };
    /// No slots.
    pub const NONE: Share = Share { from: 0.0, to: 0.0 };

    /// Returns adjacent intervals of these sizes, which sum to 1.
    pub fn side_by_side(sizes: &[f64]) -> Vec<Share> {
        let ends = sizes.iter().scan(0.0, |end, size| {
            *end += size;
            Some(*end)
        });
        let mut ends: Vec<f64> = ends.collect();
        // Corrects the rounding error of the sum.
        ends.last_mut().into_iter().for_each(|end| *end = 1.0);
        let starts = std::iter::once(0.0).chain(ends.iter().copied());
        starts.zip(&ends).map(|(from, &to)| Share { from, to }).collect()
    }

    /// Returns the words, of a list with `slots` slots, that belong to the interval.
    fn words(&self, list: usize, slots: u32) -> Range<u32> {
        let (words, spread) = (slots.div_ceil(WORD), (list as f64 * GOLDEN).fract());
        let place = |at: f64| match at {
            at if at <= 0.0 => 0,
            at if at >= 1.0 => words,
            at => ((at * f64::from(slots) / f64::from(WORD) + spread) as u32).min(words),
        };
        place(self.from)..place(self.to)
    }
}

/// Contiguous range of slots, on the host and on the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    /// Slots in the numbering of the snapshot.
    slots: Range<u32>,
    /// First slot in the numbering of the GPU.
    first: u32,
}

/// Partition of all lists that one GPU gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListCut {
    runs: Vec<Run>,
    /// Range of words of each list that belong to the partition, counted from the list's first word.
    words: Vec<Range<u32>>,
    offsets: Vec<u32>,
    lengths: Vec<u32>,
    slots_of_all: usize,
}

impl ListCut {
    /// Partitions lists, given the first slot of each list `[C + 1]` and the item counts `[C]`.
    pub fn of(share: Share, offsets: &[u32], lengths: &[u32]) -> Self {
        let slots_of_all = offsets[lengths.len()] as usize;
        let (runs, words, lengths_here) = (Vec::new(), Vec::new(), Vec::new());
        let mut cut = ListCut { runs, words, offsets: vec![0], lengths: lengths_here, slots_of_all };
        for (list, &length) in lengths.iter().enumerate() {
            let (start, end) = (offsets[list], offsets[list + 1]);
            let words = share.words(list, end - start);
            let slots = start + (words.start * WORD).min(end - start)..start + (words.end * WORD).min(end - start);
            let first = cut.offsets[list];
            cut.offsets.push(first + (slots.end - slots.start));
            cut.lengths.push((start + length).min(slots.end).saturating_sub(slots.start));
            cut.words.push(words);
            match cut.runs.last_mut().filter(|run| run.slots.end == slots.start) {
                _ if slots.is_empty() => {}
                Some(run) => run.slots.end = slots.end,
                None => cut.runs.push(Run { slots, first }),
            }
        }
        cut
    }

    /// Returns the first slot of each list on the GPU, and one past the last, `[C + 1]`.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Returns the number of items of each list on the GPU, `[C]`.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Returns whether the partition contains all slots.
    pub fn is_whole(&self) -> bool {
        self.slots() == self.slots_of_all
    }

    /// Returns the number of slots on the GPU.
    pub fn slots(&self) -> usize {
        self.offsets[self.lengths.len()] as usize
    }

    /// Returns the range of words of each list that belong to the partition, counted from the list's first word.
    pub fn words(&self) -> &[Range<u32>] {
        &self.words
    }

    /// Returns the number of items on the GPU.
    pub fn items(&self) -> usize {
        self.lengths.iter().map(|&length| length as usize).sum()
    }

    /// Returns the first word of each list on the GPU, and one past the last, `[C + 1]`.
    pub fn word_firsts(&self) -> Vec<u32> {
        let ends = self.words.iter().scan(0, |end, words| {
            *end += words.len() as u32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Returns the first slot of each word of [`ListCut::word_firsts`], in the numbering of the GPU.
    pub fn word_slots(&self) -> impl Iterator<Item = u32> + '_ {
        let of_list = |(&first, words): (&u32, &Range<u32>)| (0..words.len() as u32).map(move |n| first + WORD * n);
        self.offsets.iter().zip(&self.words).flat_map(of_list)
    }

    /// Returns the slot ranges of the partition, in the order of the GPU.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        self.runs.iter().map(|run| run.slots.start as usize..run.slots.end as usize)
    }

    /// Converts a slot of the snapshot to the numbering of the GPU; `None` if another GPU has the slot.
    pub fn to_card(&self, slot: u32) -> Option<u32> {
        let run = &self.runs[self.runs.partition_point(|run| run.slots.start <= slot).checked_sub(1)?];
        run.slots.contains(&slot).then(|| slot - run.slots.start + run.first)
    }

    /// Converts a slot of the GPU to the numbering of the snapshot.
    pub fn of_card(&self, slot: u32) -> u32 {
        let at = self.runs.partition_point(|run| run.first <= slot).saturating_sub(1);
        self.runs.get(at).map_or(slot, |run| slot - run.first + run.slots.start)
    }

    /// Selects the partition's slots from an array with `width` numbers per slot.
    pub fn gather<T: Pod>(&self, numbers: &[T], width: usize) -> Vec<T> {
        self.runs().flat_map(|run| &numbers[run.start * width..run.end * width]).copied().collect()
    }

    /// Selects the partition's rows from a ragged array with row `offsets` `[S + 1]`; returns offsets and numbers.
    pub fn gather_ragged<'a>(&self, offsets: &'a [u32], numbers: &'a [u32]) -> (Cow<'a, [u32]>, Cow<'a, [u32]>) {
        if self.is_whole() {
            return (offsets.into(), numbers.into());
        }
        let (mut starts, mut gathered) = (vec![0u32], Vec::new());
        for run in self.runs() {
            let (first, end) = (offsets[run.start], offsets[run.end]);
            let before = gathered.len() as u32;
            starts.extend(offsets[run.start + 1..=run.end].iter().map(|offset| offset - first + before));
            gathered.extend_from_slice(&numbers[first as usize..end as usize]);
        }
        (starts.into(), gathered.into())
    }

    /// Uploads the partition's slots of an array with `width` numbers per slot, with room for `spare` more slots.
    ///
    /// # Errors
    /// As [`Device::copy`].
    pub fn copy<T: Pod>(&self, device: &Device, numbers: &[T], width: usize, spare: usize) -> Result<Array<T>> {
        let array = device.room((self.slots() + spare) * width)?;
        self.write(&array, numbers, width, 0)?;
        Ok(array)
    }

    /// Writes the partition's slots of an array to a device array, from slot `first` on.
    ///
    /// # Errors
    /// As [`Array::write_at`].
    pub fn write<T: Pod>(&self, to: &Array<T>, numbers: &[T], width: usize, first: usize) -> Result<()> {
        self.runs.iter().try_for_each(|run| {
            let (start, end) = (run.slots.start as usize * width, run.slots.end as usize * width);
            to.write_at((first + run.first as usize) * width, &numbers[start..end])
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_slot_is_on_one_gpu(
            lengths in proptest::collection::vec(prop_oneof![0u32..20, 0u32..700], 1..30),
            sizes in proptest::collection::vec(0.0f64..3.0, 1..6),
        ) {
            let offsets: Vec<u32> = std::iter::once(0).chain(lengths.iter().scan(0, |end, n| {
                *end += n.next_multiple_of(16);
                Some(*end)
            })).collect();
            let total: f64 = sizes.iter().sum::<f64>().max(0.1);
            let shares = Share::side_by_side(&sizes.iter().map(|size| size / total).collect::<Vec<_>>());
            let cuts: Vec<ListCut> = shares.iter().map(|&share| ListCut::of(share, &offsets, &lengths)).collect();
            let slots = offsets[lengths.len()];
            for slot in 0..slots {
                let places: Vec<(usize, u32)> =
                    cuts.iter().enumerate().filter_map(|(n, cut)| Some((n, cut.to_card(slot)?))).collect();
                let [(card, place)] = places[..] else { return Err(TestCaseError::fail(format!("{slot}: {places:?}"))) };
                prop_assert_eq!(cuts[card].of_card(place), slot);
                let list = offsets.partition_point(|&first| first <= slot) - 1;
                let at = cuts[card].offsets().partition_point(|&first| first <= place) - 1;
                prop_assert_eq!(at, list);
                let is_item = slot - offsets[list] < lengths[list];
                prop_assert_eq!(place - cuts[card].offsets()[at] < cuts[card].lengths()[at], is_item);
                // Words of the partition are words of the snapshot.
                let word = (place - cuts[card].offsets()[at]) / WORD + cuts[card].words()[at].start;
                prop_assert_eq!(word, (slot - offsets[list]) / WORD);
            }
            let numbers: Vec<u32> = (0..slots).collect();
            prop_assert_eq!(cuts.iter().map(ListCut::slots).sum::<usize>(), slots as usize);
            for cut in &cuts {
                let gathered = cut.gather(&numbers, 1);
                prop_assert!(gathered.iter().enumerate().all(|(place, &slot)| cut.of_card(place as u32) == slot));
                prop_assert!(cut.offsets().iter().all(|offset| offset % 16 == 0));
            }
            prop_assert_eq!(ListCut::of(Share::WHOLE, &offsets, &lengths).gather(&numbers, 1), numbers);
        }
    }

    #[test]
    fn remainders_of_short_lists_are_spread() {
        let lengths = vec![64u32; 900];
        let offsets: Vec<u32> = (0..=900).map(|n| n * 64).collect();
        for share in Share::side_by_side(&[1.0 / 3.0; 3]) {
            let slots = ListCut::of(share, &offsets, &lengths).slots();
            assert!((270 * 64..=330 * 64).contains(&slots), "{share:?}: {slots}");
        }
    }
}
