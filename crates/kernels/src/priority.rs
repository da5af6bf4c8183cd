//! Whose turn it is where threads want more cores than there are.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder};

use sterling_core::error::{Error, Result};

/// The lowest niceness that there is.
const LAST: i32 = 19;
/// The niceness of [`Background::Steady`]: what stands behind the passes gets a thirtieth of a core that both want.
const LOW: i32 = 15;
/// The niceness of [`Background::Raised`] where little is owed, and where much is: a tenth and a quarter of a core that another thread
/// wants too.
const RAISED: (i32, i32) = (10, 5);

/// How long a thread of [`Background::Last`] goes on before it leaves its core for a moment, and for how long.
const BREATH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(100));

/// Work that got less than this share of a core, of this long that it wanted one, is starved.
const STARVED: (f64, Duration) = (0.05, Duration::from_secs(3));
/// How often that is looked at: each look reads a file that the system writes.
const LOOK: Duration = Duration::from_millis(100);

thread_local! {
    /// Since when this thread has gone on, where it is one of [`Background::Last`] or [`Background::Raised`].
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    /// What it had of cores when its share was taken last, and when it was looked at last, where its work ends once it is starved.
    static BEFORE: Cell<Option<(Turns, Instant)>> = const { Cell::new(None) };
}

/// The panic that ends work which is starved.
#[derive(Clone, Copy, Debug)]
pub struct Starved;

/// What a thread has had of cores since it began.
#[derive(Clone, Copy, Debug)]
struct Turns {
    ran: Duration,
    /// In which it could have run and did not.
    waited: Duration,
}

impl Turns {
    /// Those of this thread; none where the system does not tell.
    fn now() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let mut numbers = text.split_whitespace().map(|number| number.parse().map(Duration::from_nanos));
        Some(Turns { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
    }

    /// Whether work has starved that went on from here `until` then; none where that is too short to tell.
    fn is_starved(self, until: Turns) -> Option<bool> {
        let [ran, waited] =
            [(self.ran, until.ran), (self.waited, until.waited)].map(|(from, to)| to.saturating_sub(from));
        let (share, wanted) = STARVED;
        (ran + waited >= wanted).then(|| ran.as_secs_f64() < share * (ran + waited).as_secs_f64())
    }
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
    /// It goes on under any load, with more of a core than [`Background::Steady`], and yet more where `much` is owed; it leaves its core
    /// for a moment as [`Background::Last`] does.
    Raised {
        /// Whether much is owed.
        much: bool,
    },
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
            Background::Raised { much } => {
                lower(if much { RAISED.1 } else { RAISED.0 });
                SINCE.set(Some(Instant::now()));
            }
        }
    }

    /// Threads of [`Background::Last`] whose work ends with a panic of [`Starved`], at a call of [`breathe`], where it has had hardly any
    /// time of a core for a while: a thread without rights cannot raise its own priority again.
    ///
    /// # Errors
    /// `Io` where no thread can be had.
    pub fn last_until_starved(name: &'static str, threads: usize) -> Result<ThreadPool> {
        let take = |_| {
            Background::Last.take();
            BEFORE.set(Turns::now().map(|turns| (turns, Instant::now())));
        };
        built(name, ThreadPoolBuilder::new().num_threads(threads).start_handler(take))
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

/// Leaves the core for a tenth of a millisecond, where this is a thread of [`Background::Last`] or [`Background::Raised`] that has not
/// for one: threads that wait behind others are brought to a core only when it becomes idle. Called between the small steps of long work.
pub fn breathe() {
    let is_due = SINCE.get().is_some_and(|since| since.elapsed() >= BREATH.0);
    if !is_due {
        return;
    }
    std::thread::sleep(BREATH.1);
    let awake = Instant::now();
    SINCE.set(Some(awake));
    let Some((before, _)) = BEFORE.get().filter(|(_, looked)| awake - *looked >= LOOK) else { return };
    let Some(now) = Turns::now() else { return };
    match before.is_starved(now) {
        Some(true) => resume_unwind(Box::new(Starved)),
        Some(false) => BEFORE.set(Some((now, awake))),
        None => BEFORE.set(Some((before, awake))),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_starved_where_it_hardly_runs_while_it_wants_to() {
        let turns = |ran, waited| Turns { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) };
        let before = turns(50, 400);
        let after = |ran: u64, waited: u64| before.is_starved(turns(50 + ran, 400 + waited));
        // What it slept, or waited for a disk, is none of it.
        assert_eq!([after(0, 0), after(10, 2_900), after(2_900, 10)], [None; 3]);
        assert_eq!([after(10, 2_990), after(149, 2_900)], [Some(true); 2]);
        assert_eq!([after(160, 2_900), after(3_000, 0), after(100, 0)], [Some(false), Some(false), None]);
    }
}
