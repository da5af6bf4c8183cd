//! Backend of the engine that runs forward passes.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::{Backend, Estimate, Job};
use crate::pass::{self, Batch, Cpu, Cuda, Pass, Prepared, Residents};
use sterling_core::error::Result;
use sterling_core::request::Answer;
use sterling_cuda::ChosenDevice;
use sterling_graph::tower::Threads;
use sterling_kernels::priority;

/// Workers that run passes: each has its own buffers, and those on a device share the snapshots in its memory.
#[derive(Debug, Default)]
pub struct Passes {
    residents: Option<Arc<Residents>>,
    device: String,
}

impl Passes {
    /// Creates passes on a chosen device, over versions with or without updates.
    pub fn on(chosen: &ChosenDevice, takes_updates: bool) -> Self {
        let residents = chosen.device.clone().map(Residents::new);
        let residents = residents.map(|known| if takes_updates { known.with_updates() } else { known }).map(Arc::new);
        metrics::gauge!("sterling_device_info", "device" => chosen.to_string()).set(1.0);
        Passes { residents, device: chosen.to_string() }
    }

    /// Snapshots in device memory; `None` on the CPU.
    pub fn residents(&self) -> Option<Arc<Residents>> {
        self.residents.clone()
    }

    /// Returns the device name, with the reason if the CPU replaces a preferred GPU.
    pub fn device(&self) -> &str {
        if self.device.is_empty() { "cpu" } else { &self.device }
    }
}

thread_local! {
    /// Thread pool that this thread belongs to.
    static THREADS: RefCell<Option<Threads>> = const { RefCell::new(None) };
}

type PassJob = Job<Prepared, Answer>;

/// Difference of the nice value of worker threads to that of socket threads. An unread request in its socket ages without being
/// counted; a queued one is counted and rejected in time. If priorities cannot be lowered, rejections are late under overload,
/// and nothing else changes.
const NICENESS: i32 = 10;

impl Backend for Passes {
    type Work = Prepared;
    type Answer = Answer;
    type Worker = Box<dyn Pass>;

    fn host(&self, work: &(dyn Fn() + Sync)) {
        // One thread per worker: the engine's option bounds the graph runtime too.
        let threads = Threads::new(1);
        threads.run(|| {
            priority::lower(NICENESS);
            THREADS.set(Some(threads.clone()));
            work();
            THREADS.set(None);
        });
    }

    fn worker(&self) -> Self::Worker {
        let threads = THREADS.with_borrow(Clone::clone).unwrap_or_else(|| Threads::new(1));
        match &self.residents {
            Some(residents) => Box::new(Cuda::new(residents.clone(), threads)),
            None => Box::new(Cpu::new(threads)),
        }
    }

    fn cost(&self, work: &Prepared) -> Estimate {
        let cost = work.cost();
        Estimate { time: Duration::from_nanos(cost.work_ns as u64), memory_bytes: cost.memory_bytes as u64 }
    }

    fn group(&self, work: &Prepared) -> usize {
        std::sync::Arc::as_ptr(work.view()) as usize
    }

    fn needs_fetch(&self, work: &Prepared) -> bool {
        work.needs_fetch()
    }

    fn runs_anywhere(&self, work: &Prepared) -> bool {
        self.residents.is_none() && !work.view().main().package.runs_graphs()
    }

    fn fetch(&self, jobs: &mut [PassJob]) {
        let deadline = jobs.iter().map(|job| job.ticket.deadline()).max();
        let mut waiting: Vec<&mut Prepared> =
            jobs.iter_mut().filter(|job| job.ticket.is_wanted()).map(|job| &mut job.work).collect();
        pass::fetch(&mut waiting, deadline);
    }

    fn run(&self, worker: &mut Self::Worker, jobs: &mut [PassJob]) {
        worker.run(&Jobs(jobs));
    }

    fn rest(&self, worker: &mut Self::Worker) {
        worker.rest();
    }
}

struct Jobs<'a>(&'a [PassJob]);

impl Batch for Jobs<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn prepared(&self, n: usize) -> &Prepared {
        &self.0[n].work
    }

    fn deadline(&self, n: usize) -> Option<Instant> {
        Some(self.0[n].ticket.deadline())
    }

    fn is_wanted(&self, n: usize) -> bool {
        self.0[n].ticket.is_wanted()
    }

    fn answer(&self, n: usize, answer: Result<Answer>) {
        self.0[n].ticket.answer(answer);
    }
}
