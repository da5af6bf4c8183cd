//! Whose turn it is where threads want more cores than there are.

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// The lowest niceness that there is.
const LAST: i32 = 19;
/// The niceness of [`Priority::Low`]: what stands behind the passes gets about a quarter of a core that both want.
const LOW: i32 = 15;

/// How work for which nobody waits stands behind requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// It gives way, and goes on under any load.
    Low,
    /// It runs where a core would be idle. To the scheduler of Linux a core with nothing else on it is an idle one, to which it
    /// brings a thread that wakes up; beside a thread that is only nice that one waits for a core.
    Idle,
}

impl Priority {
    /// Gives this thread, and those that it starts, this priority. It cannot be taken back, and where it cannot be had nothing
    /// changes.
    pub fn take(self) {
        match self {
            Priority::Low => lower(LOW),
            Priority::Idle => idle(),
        }
    }

    /// Threads of this priority.
    ///
    /// # Errors
    /// `Io` where no thread can be had.
    pub fn pool(self, name: &'static str, threads: usize) -> Result<ThreadPool> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| name.into());
        let pool = pool.start_handler(move |_| self.take()).build();
        pool.map_err(|e| Error::io(format!("threads: {name}"), std::io::Error::other(e)))
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
