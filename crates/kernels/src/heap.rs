//! Memory that a few dear requests made the heap take, given back to the system once they are done.
//!
//! Each thread has a heap of its own, which keeps what was freed until the thread frees or takes more. A thread that falls
//! idle after a storm would keep it for ever, so the end of a dear request is announced, and each thread looks whether there
//! was one when it has nothing to do.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static ANNOUNCED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Says that memory was freed which few requests need: each thread gives it back when it next has nothing to do.
pub fn announce() {
    ANNOUNCED.fetch_add(1, Ordering::Relaxed);
}

/// Gives the calling thread's free memory back, where some was announced since it last did. Costs a load otherwise.
pub fn give_back() {
    let announced = ANNOUNCED.load(Ordering::Relaxed);
    if SEEN.replace(announced) != announced {
        // SAFETY: collecting touches free memory of this thread's heap alone, and works at any time; where the process has
        // another allocator the heap is empty.
        unsafe { libmimalloc_sys::mi_collect(true) };
    }
}
