//! Whose turn it is where threads want more cores than there are.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// The lowest niceness that there is.
const LAST: i32 = 19;
/// The niceness of [`Background::Steady`]: what stands behind the passes gets about a quarter of a core that both want.
const LOW: i32 = 15;

/// How long a thread of [`Background::Last`] goes on before it leaves its core for a moment, and for how long.
const BREATH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(100));

thread_local! {
    /// Since when this thread has gone on, where it is one of [`Background::Last`].
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// How work for which nobody waits stands behind requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Background {
    /// It gives way, and goes on under any load.
    Steady,
    /// It runs where a core would be idle, and leaves it for a moment where it calls [`breathe`]. To the scheduler of Linux a core
    /// with nothing else on it is an idle one, to which it brings a thread that wakes up; beside a thread that is only nice that
    /// one waits for a core. Where threads that never sleep want all cores, it waits for them.
    Last,
}

impl Background {
    /// Gives this thread, and those that it starts, this priority. It cannot be taken back, and where it cannot be had nothing
    /// changes.
    pub fn take(self) {
        match self {
            Background::Steady => lower(LOW),
            Background::Last => {
                idle();
                SINCE.set(Some(Instant::now()));
            }
        }
    }

    /// Threads of this priority.
    ///
    /// # Errors
    /// `Io` where no thread can be had.
    pub fn pool(self, name: &'static str, threads: usize) -> Result<ThreadPool> {
        built(name, ThreadPoolBuilder::new().num_threads(threads).start_handler(move |_| self.take()))
    }
}

/// One thread of the usual priority, which divides nothing among others: what is made of a few items is not worth it, and threads
/// that look for work are in the way of requests.
///
/// # Errors
/// `Io` where no thread can be had.
pub fn alone(name: &'static str) -> Result<ThreadPool> {
    built(name, ThreadPoolBuilder::new().num_threads(1))
}

fn built(name: &'static str, pool: ThreadPoolBuilder) -> Result<ThreadPool> {
    let pool = pool.thread_name(move |_| name.into()).build();
    pool.map_err(|e| Error::io(format!("threads: {name}"), std::io::Error::other(e)))
}

/// Leaves the core for a tenth of a millisecond, where this is a thread of [`Background::Last`] that has not for one: threads that
/// wait behind others are brought to a core only when it becomes idle. Called between the small steps of long work.
pub fn breathe() {
    SINCE.with(|since| {
        if since.get().is_some_and(|since| since.elapsed() >= BREATH.0) {
            std::thread::sleep(BREATH.1);
            since.set(Some(Instant::now()));
        }
    });
}

/// Lowers the priority of this thread, and of those that it starts, to a niceness of up to 19. Where that cannot be, nothing changes.
pub fn lower(niceness: i32) {
    // Linux knows priorities of threads; elsewhere this would be the whole process's.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, niceness);
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}

fn idle() {
    lower(LAST);
    #[cfg(target_os = "linux")]
    {
        let none = libc::sched_param { sched_priority: 0 };
        // SAFETY: the thread is this one, and the parameters live through the call.
        let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &none) };
    }
}
