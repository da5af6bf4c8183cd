//! Thread priorities, for machines on which more threads are runnable than there are cores.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder};

use sterling_core::error::{Error, Result};
use sterling_core::tasks::Task;

/// Maximum niceness: lowest priority.
const LAST: i32 = 19;
/// Niceness of [`Background::Steady`]: such a thread gets a thirtieth of a core that it shares with a pass.
const LOW: i32 = 15;
/// Niceness of [`Background::Raised`] with a small and with a large backlog: such a thread gets a tenth and a quarter
/// of a core that it shares with another thread.
const RAISED: (i32, i32) = (10, 5);

/// Time that a thread of [`Background::Last`] runs before it yields its core, and the duration of that pause.
const YIELD_TIME: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(100));

/// Work is starved if its thread got less than this share of a core during this time of being runnable.
const STARVED: (f64, Duration) = (0.05, Duration::from_secs(3));
/// Interval of starvation checks, each of which reads a file that the system generates.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

thread_local! {
    /// Time of this thread's last pause, if its priority is [`Background::Last`] or [`Background::Raised`].
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    /// CPU time at the last computation of the share, and time of the last check; only for threads whose work ends if
    /// starved.
    static BEFORE: Cell<Option<(ThreadTimes, Instant)>> = const { Cell::new(None) };
}

/// Panic payload that ends starved work.
#[derive(Clone, Copy, Debug)]
pub struct Starved;

/// CPU times of a thread since it began.
#[derive(Clone, Copy, Debug)]
struct ThreadTimes {
    ran: Duration,
    /// Time in which the thread was runnable but not running.
    waited: Duration,
}

impl ThreadTimes {
    /// Returns the times of this thread; `None` if the system does not report them.
    fn now() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let mut numbers = text.split_whitespace().map(|number| number.parse().map(Duration::from_nanos));
        Some(ThreadTimes { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
    }

    /// Returns whether work starved between `self` and `until`; `None` if the interval is too short.
    fn is_starved(self, until: ThreadTimes) -> Option<bool> {
        let [ran, waited] =
            [(self.ran, until.ran), (self.waited, until.waited)].map(|(from, to)| to.saturating_sub(from));
        let (share, wanted) = STARVED;
        (ran + waited >= wanted).then(|| ran.as_secs_f64() < share * (ran + waited).as_secs_f64())
    }
}

/// Scheduling of work that no request waits for, relative to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Background {
    /// Low priority, but progresses under any load.
    Steady,
    /// Runs only on idle cores, and pauses briefly in [`breathe`]. Linux's scheduler treats a core that runs only such
    /// a thread as idle, and wakes other threads on this core. Behind a thread that only has a high niceness, these
    /// threads would wait for a core. If threads that never sleep occupy all cores, a thread of this priority waits for
    /// them.
    Last,
    /// Progresses under any load with a larger share of a core than [`Background::Steady`], and an even larger one if
    /// `much`. This level pauses briefly, like [`Background::Last`].
    Raised {
        /// True if the backlog is large.
        much: bool,
    },
}

impl Background {
    /// Applies this priority to the calling thread and to threads that it starts later, for good. If the
    /// system denies the priority, nothing changes.
    pub fn take(self) {
        match self {
            Background::Steady => lower(LOW),
            Background::Last => {
                idle();
                SINCE.set(Some(Instant::now()));
            }
            Background::Raised { much } => {
                lower(if much { RAISED.1 } else { RAISED.0 });
                SINCE.set(Some(Instant::now()));
            }
        }
    }

    /// Returns a pool of [`Background::Last`] threads. If their work is starved of CPU time, it ends in [`breathe`]
    /// with a panic of [`Starved`], because a thread without privileges cannot raise its own priority again.
    ///
    /// # Errors
    /// `Io` if threads cannot be started.
    pub fn last_until_starved(task: &Task, threads: usize) -> Result<ThreadPool> {
        let take = |_| {
            Background::Last.take();
            BEFORE.set(ThreadTimes::now().map(|turns| (turns, Instant::now())));
        };
        built(task, ThreadPoolBuilder::new().num_threads(threads).start_handler(take))
    }

    /// Returns a pool of threads of this priority.
    ///
    /// # Errors
    /// `Io` if threads cannot be started.
    pub fn pool(self, task: &Task, threads: usize) -> Result<ThreadPool> {
        built(task, ThreadPoolBuilder::new().num_threads(threads).start_handler(move |_| self.take()))
    }
}

/// Returns a pool of one thread of normal priority, so that work on few items stays on one thread: splitting it is not
/// worthwhile, and threads that search for work would disturb requests.
///
/// # Errors
/// `Io` if the thread cannot be started.
pub fn alone(task: &Task) -> Result<ThreadPool> {
    pool(task, 1)
}

/// Returns a pool of threads of normal priority.
///
/// # Errors
/// `Io` if threads cannot be started.
pub fn pool(task: &Task, threads: usize) -> Result<ThreadPool> {
    built(task, ThreadPoolBuilder::new().num_threads(threads))
}

fn built(task: &Task, pool: ThreadPoolBuilder) -> Result<ThreadPool> {
    let name = task.name();
    let pool = pool.thread_name(move |_| name.into()).build();
    pool.map_err(|e| Error::io(format!("threads: {name}"), std::io::Error::other(e)))
}

/// Pauses for 0.1 ms if this thread is of [`Background::Last`] or [`Background::Raised`] and has run for 1 ms: the scheduler
/// moves waiting threads only to idle cores. Called between small steps of long work.
pub fn breathe() {
    let is_due = SINCE.get().is_some_and(|since| since.elapsed() >= YIELD_TIME.0);
    if !is_due {
        return;
    }
    std::thread::sleep(YIELD_TIME.1);
    let awake = Instant::now();
    SINCE.set(Some(awake));
    let Some((before, _)) = BEFORE.get().filter(|(_, looked)| awake - *looked >= CHECK_INTERVAL) else { return };
    let Some(now) = ThreadTimes::now() else { return };
    match before.is_starved(now) {
        Some(true) => resume_unwind(Box::new(Starved)),
        Some(false) => BEFORE.set(Some((now, awake))),
        None => BEFORE.set(Some((before, awake))),
    }
}

/// Lowers the priority of the calling thread, and of threads that it starts later, to a niceness of up to 19. If the system
/// denies the niceness, nothing changes.
pub fn lower(niceness: i32) {
    // Linux has per-thread priorities; other systems would change the priority of the complete process.
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
        // SAFETY: the call affects this thread, and the parameters outlive it.
        let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &none) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_starved_if_it_is_runnable_but_hardly_runs() {
        let turns =
            |ran, waited| ThreadTimes { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) };
        let before = turns(50, 400);
        let after = |ran: u64, waited: u64| before.is_starved(turns(50 + ran, 400 + waited));
        // Time asleep or waiting for a disk does not count.
        assert_eq!([after(0, 0), after(10, 2_900), after(2_900, 10)], [None; 3]);
        assert_eq!([after(10, 2_990), after(149, 2_900)], [Some(true); 2]);
        assert_eq!([after(160, 2_900), after(3_000, 0), after(100, 0)], [Some(false), Some(false), None]);
    }
}
