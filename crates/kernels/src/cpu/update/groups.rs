//! Occurrences of a batch, sorted by row: one stable sort per table and batch.

use std::ops::Range;

/// Bits per digit of the radix sort: its counts fit into the L1 cache.
const DIGIT_BITS: u32 = 11;
/// Number of occurrences below which a comparison sort is faster than a radix sort.
const SHORT: usize = 256;

/// Occurrences of rows in a batch, in the order of the batch.
#[derive(Clone, Debug, Default)]
pub struct Occurrences {
    /// Keys: the row in the high half; in the low half the slot, or the number of the occurrence if there are weights.
    keys: Vec<u64>,
    /// Slot and weight per occurrence, as soon as one occurrence has a weight other than 1.
    weighted: Option<Vec<(u32, f32)>>,
}

impl Occurrences {
    /// Creates an empty list with capacity `count`.
    pub fn with_capacity(count: usize) -> Self {
        Occurrences { keys: Vec::with_capacity(count), weighted: None }
    }

    /// Adds an occurrence of `row` whose gradient is row `slot` of the gradients.
    #[inline]
    pub fn push(&mut self, row: u32, slot: u32) {
        let low = match &mut self.weighted {
            None => slot,
            Some(weighted) => {
                weighted.push((slot, 1.0));
                weighted.len() as u32 - 1
            }
        };
        self.keys.push(u64::from(row) << 32 | u64::from(low));
    }

    /// Adds an occurrence of each row that is not negative, all with the gradient of `slot`.
    #[inline]
    pub fn push_bag(&mut self, rows: &[i64], slot: u32) {
        if self.weighted.is_some() || rows.iter().any(|row| *row < 0) {
            rows.iter().filter(|row| **row >= 0).for_each(|row| self.push(*row as u32, slot));
            return;
        }
        self.keys.extend(rows.iter().map(|row| (*row as u64) << 32 | u64::from(slot)));
    }

    /// Adds an occurrence whose gradient is multiplied by `weight`.
    ///
    /// # Panics
    /// If there are 2^32 occurrences.
    pub fn push_weighted(&mut self, row: u32, slot: u32, weight: f32) {
        let weighted = self.weighted.get_or_insert_with(|| {
            let slots = self.keys.iter().map(|key| (*key as u32, 1.0)).collect();
            (0u64..).zip(&mut self.keys).for_each(|(number, key)| *key = *key >> 32 << 32 | number);
            slots
        });
        let number = u32::try_from(weighted.len()).expect("fewer than 2^32 occurrences");
        weighted.push((slot, weight));
        self.keys.push(u64::from(row) << 32 | u64::from(number));
    }

    /// Sorts the occurrences by row; the occurrences of a row keep their order.
    pub fn sort(mut self) -> RowGroups {
        sort_by_row(&mut self.keys);
        let mut groups = group(&self.keys);
        match self.weighted {
            None => groups.slots.extend(self.keys.iter().map(|key| *key as u32)),
            Some(weighted) => {
                let sorted = || self.keys.iter().map(|key| weighted[*key as u32 as usize]);
                groups.slots.extend(sorted().map(|(slot, _)| slot));
                groups.weights = Some(sorted().map(|(_, weight)| weight).collect());
            }
        }
        groups.slots_end = groups.slots.iter().max().map_or(0, |slot| slot + 1);
        groups
    }
}

/// Returns the distinct rows of sorted keys, and the start of each. Whether a key starts a new row is hard to predict, so the
/// loop advances a count without a branch.
fn group(keys: &[u64]) -> RowGroups {
    let (mut rows, mut starts) = (vec![0u32; keys.len()], vec![0u32; keys.len() + 1]);
    let mut count = 0;
    for (at, key) in keys.iter().enumerate() {
        rows[count] = (key >> 32) as u32;
        starts[count + 1] = at as u32 + 1;
        count += usize::from(keys.get(at + 1).is_none_or(|next| next >> 32 != key >> 32));
    }
    rows.truncate(count);
    starts.truncate(count + 1);
    RowGroups { rows, starts, slots: Vec::with_capacity(keys.len()), weights: None, slots_end: 0 }
}

/// Sorts by the high half with a stable least-significant-digit radix sort.
fn sort_by_row(keys: &mut Vec<u64>) {
    if keys.len() < SHORT {
        keys.sort_by_key(|key| key >> 32);
        return;
    }
    let bits = 64 - keys.iter().fold(0, |all, key| all | key >> 32).leading_zeros();
    let passes = bits.div_ceil(DIGIT_BITS);
    let mut other = vec![0u64; keys.len()];
    for pass in 0..passes {
        // Digits of equal length: 20 bits are two of 10, not one of 11 and one of 9.
        let digit_bits = bits.div_ceil(passes);
        let shift = 32 + pass * digit_bits;
        let digit = |key: u64| (key >> shift) as usize & ((1 << digit_bits) - 1) & ((1 << DIGIT_BITS) - 1);
        let mut ends = [0u32; 1 << DIGIT_BITS];
        keys.iter().for_each(|key| ends[digit(*key)] += 1);
        let mut start = 0;
        for end in &mut ends[..1 << digit_bits] {
            start += std::mem::replace(end, start);
        }
        for key in keys.iter() {
            let place = &mut ends[digit(*key)];
            other[*place as usize] = *key;
            *place += 1;
        }
        std::mem::swap(keys, &mut other);
    }
}

/// Occurrences of a batch in one table, grouped by row.
#[derive(Clone, Debug)]
pub struct RowGroups {
    /// Distinct rows, ascending.
    rows: Vec<u32>,
    /// Start of each row's occurrences, `[rows + 1]`.
    starts: Vec<u32>,
    /// Gradient slot per occurrence.
    slots: Vec<u32>,
    /// Weight per occurrence; `None` means 1 for all.
    weights: Option<Vec<f32>>,
    /// Largest slot plus 1.
    slots_end: u32,
}

impl RowGroups {
    /// Returns the distinct rows of the batch, ascending.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Returns the number of occurrences.
    pub fn occurrences(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of gradient rows that the slots require.
    pub fn slots_end(&self) -> usize {
        self.slots_end as usize
    }

    /// Returns the same occurrences with rows numbered from 0: row `n` is the `n`-th distinct row.
    pub fn renumbered(&self) -> RowGroups {
        RowGroups { rows: (0..self.rows.len() as u32).collect(), ..self.clone() }
    }

    /// Returns all rows of the batch.
    pub fn whole(&self) -> GroupsPart<'_> {
        GroupsPart { groups: self, range: 0..self.rows.len() }
    }

    /// Returns the rows of a range of row numbers.
    pub fn between(&self, rows: Range<u32>) -> GroupsPart<'_> {
        let at = |row: u32| self.rows.partition_point(|r| *r < row);
        GroupsPart { groups: self, range: at(rows.start)..at(rows.end) }
    }
}

/// Consecutive rows of a batch's groups.
#[derive(Clone, Debug)]
pub struct GroupsPart<'a> {
    groups: &'a RowGroups,
    range: Range<usize>,
}

impl<'a> GroupsPart<'a> {
    /// Splits the rows into `parts` ranges with about equally many occurrences.
    pub fn split(&self, parts: usize) -> Vec<GroupsPart<'a>> {
        let starts = &self.groups.starts[self.range.start..=self.range.end];
        let (first, last) = (starts[0] as usize, starts[starts.len() - 1] as usize);
        let at = |part: usize| {
            let occurrence = first + (last - first) * part / parts;
            if part == parts {
                self.range.end
            } else {
                self.range.start + starts.partition_point(|s| (*s as usize) < occurrence)
            }
        };
        let part = |n: usize| GroupsPart { groups: self.groups, range: at(n)..at(n + 1).max(at(n)) };
        (0..parts).map(part).filter(|part| !part.is_empty()).collect()
    }

    /// Returns true if there is no row.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the rows, ascending.
    pub fn rows(&self) -> &'a [u32] {
        &self.groups.rows[self.range.clone()]
    }

    pub(super) fn starts(&self) -> &'a [u32] {
        &self.groups.starts[self.range.start..=self.range.end]
    }

    pub(super) fn slots(&self) -> &'a [u32] {
        &self.groups.slots
    }

    pub(super) fn weights(&self) -> Option<&'a [f32]> {
        self.groups.weights.as_deref()
    }

    pub(super) fn slots_end(&self) -> usize {
        self.groups.slots_end()
    }
}
