//! Returns free heap memory to the system after expensive requests.
//!
//! Each thread has its own heap, which retains freed memory until the thread frees or allocates again. A thread that
//! becomes idle after a burst would retain freed memory forever. So an expensive request announces its end, and each
//! idle thread polls for announcements.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static ANNOUNCED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Announces that an expensive request has freed memory: each thread returns its free memory when it next becomes idle.
pub fn announce() {
    ANNOUNCED.fetch_add(1, Ordering::Relaxed);
}

/// Returns the calling thread's free memory to the system if there was an announcement after the thread's last call.
/// Without an announcement the call costs one load.
pub fn give_back() {
    let announced = ANNOUNCED.load(Ordering::Relaxed);
    if SEEN.replace(announced) != announced {
        // SAFETY: collecting touches only free memory of this thread's heap, and is allowed at any time. If the process has
        // another allocator, the heap is empty.
        unsafe { libmimalloc_sys::mi_collect(true) };
    }
}
