//! Allocator of spare slots at the end of arrays, for items that are added later.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use sterling_core::locks::locked;

/// Free slots behind the slots that a version occupies. Slot numbers continue after the last occupied slot.
#[derive(Debug)]
pub struct Spare {
    /// Free ranges of slots: ascending, non-empty, not adjacent.
    free: Mutex<Vec<Range<u32>>>,
}

/// Contiguous slots that are allocated until this value is dropped.
#[derive(Debug)]
pub struct SlotLease {
    of: Arc<Spare>,
    range: Range<u32>,
}

impl Spare {
    /// Creates an allocator for the slots in `range`, which are all free.
    pub fn new(range: Range<u32>) -> Arc<Self> {
        Arc::new(Spare { free: Mutex::new(Vec::from_iter((!range.is_empty()).then_some(range))) })
    }

    /// Allocates the first `count` contiguous free slots; `None` if no free range is large enough.
    pub fn lease(self: &Arc<Self>, count: u32) -> Option<SlotLease> {
        let mut free = self.free();
        let at = free.iter().position(|range| range.end - range.start >= count)?;
        let start = free[at].start;
        free[at].start += count;
        if free[at].is_empty() {
            free.remove(at);
        }
        drop(free);
        Some(SlotLease { of: self.clone(), range: start..start + count })
    }

    /// Returns the number of free slots.
    pub fn left(&self) -> usize {
        self.free().iter().map(ExactSizeIterator::len).sum()
    }

    fn free(&self) -> MutexGuard<'_, Vec<Range<u32>>> {
        // Code under the lock cannot panic and leave the ranges inconsistent.
        locked(&self.free)
    }
}

impl SlotLease {
    /// Returns the range of allocated slots.
    pub fn places(&self) -> Range<u32> {
        self.range.clone()
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        if self.range.is_empty() {
            return;
        }
        let mut free = self.of.free();
        let mut given = self.range.clone();
        let at = free.partition_point(|range| range.start < given.start);
        if free.get(at).is_some_and(|next| next.start == given.end) {
            given.end = free.remove(at).end;
        }
        match at.checked_sub(1).filter(|&before| free[before].end == given.start) {
            Some(before) => free[before].end = given.end,
            None => free.insert(at, given),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn borrowed_memory_is_disjoint_and_returned_completely(requested in proptest::collection::vec((0u32..40, 0usize..6), 1..80)) {
            let spare = Spare::new(100..300);
            let mut lent: Vec<SlotLease> = Vec::new();
            for (count, drops) in requested {
                let free = spare.left();
                match spare.lease(count) {
                    Some(more) => {
                        let (start, end) = (more.places().start, more.places().end);
                        prop_assert!(start >= 100 && end <= 300 && end - start == count);
                        let mut others = lent.iter().map(SlotLease::places).filter(|places| !places.is_empty());
                        prop_assert!(others.all(|places| places.end <= start || places.start >= end));
                        prop_assert_eq!(spare.left(), free - count as usize);
                        lent.push(more);
                    }
                    None => prop_assert!(free < count as usize || !lent.is_empty(), "there is room in a row"),
                }
                if lent.len() > drops {
                    lent.swap_remove(drops);
                }
            }
            lent.clear();
            prop_assert_eq!(spare.lease(200).map(|all| all.places()), Some(100..300));
        }
    }

    #[test]
    fn no_memory_is_borrowed_from_an_empty_pool() {
        let spare = Spare::new(7..7);
        assert!(spare.lease(1).is_none() && spare.left() == 0);
    }
}
