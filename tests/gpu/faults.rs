//! Misuses each check of the emulation once: it must detect operations that are undefined or rejected on a GPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use sterling::cuda::emulated::{Emulated, Limits};
use sterling::cuda::{Demand, Device, Driver, Launch, Streams, Work};

use crate::emulation::{emulated, seeded};

/// A GPU whose faults are reported, with some memory, pinned memory of the same size, and a stream.
struct Misused {
    card: Arc<Emulated>,
    memory: u64,
    pinned: u64,
    stream: u64,
}

const BYTES: usize = 4096;

/// Calls a driver in violation of its contract.
macro_rules! misuse {
    ($call:expr) => {{
        // SAFETY: the emulation checks what a GPU would trust, and its memory stays valid for a while after it is freed.
        unsafe { $call }
    }};
}

impl Misused {
    fn new() -> Self {
        let card = Arc::new(seeded(1).late());
        card.keep_faults();
        let (memory, pinned) = (card.alloc(BYTES).unwrap(), card.pin(BYTES).unwrap());
        card.settle().unwrap();
        let stream = card.stream().unwrap();
        Misused { card, memory, pinned, stream }
    }

    fn submit(&self, work: Work) {
        misuse!(self.card.submit(self.stream, &[work]).unwrap());
    }

    fn upload(&self) -> Work {
        Work::Upload { to: self.memory, from: self.pinned, bytes: BYTES }
    }

    fn is_told(&self, what: &str) {
        let faults = self.card.faults();
        assert!(faults.len() == 1 && faults[0].contains(what), "{faults:?}, expected {what}");
    }
}

/// Returns a launch of 32 threads over one address.
fn launch(kernel: &'static str, arguments: &[u8]) -> Work {
    Work::of(&Launch { kernel, grid: [1, 1, 1], threads: 32, shared_bytes: 0, arguments, demand: Demand::default() })
}

#[test]
fn memory_is_not_freed_while_queued_work_names_it() {
    let of = Misused::new();
    of.submit(of.upload());
    misuse!(of.card.free(of.memory));
    of.is_told("is freed while `an upload` that has not run yet uses it");
    let of = Misused::new();
    of.submit(Work::Clear { address: of.memory + 100, bytes: 1 });
    misuse!(of.card.free(of.memory));
    of.is_told("is freed while `a clearing`");
    let of = Misused::new();
    of.submit(launch("select_top", &(of.memory + BYTES as u64 - 1).to_le_bytes()));
    misuse!(of.card.free(of.memory));
    of.is_told("is freed while `select_top`");
    // Out of bounds, and after the work has run.
    let of = Misused::new();
    of.submit(launch("select_top", &(of.memory + BYTES as u64).to_le_bytes()));
    misuse!(of.card.free(of.memory));
    assert!(of.card.faults().is_empty());
    let of = Misused::new();
    of.submit(of.upload());
    misuse!(of.card.wait(of.stream).unwrap());
    misuse!(of.card.free(of.memory));
    assert!(of.card.faults().is_empty());
}

#[test]
fn memory_is_not_unpinned_while_queued_work_or_a_result_names_it() {
    let of = Misused::new();
    of.submit(of.upload());
    misuse!(of.card.unpin(of.pinned));
    of.is_told("is unpinned while `an upload`");
    let of = Misused::new();
    of.card.expects(of.pinned + 8, 16);
    misuse!(of.card.unpin(of.pinned));
    of.is_told("is unpinned while it has an unfetched result");
    let of = Misused::new();
    of.card.expects(of.pinned + 8, 16);
    of.card.fetched(of.pinned + 8);
    misuse!(of.card.unpin(of.pinned));
    assert!(of.card.faults().is_empty());
}

#[test]
fn memory_of_the_host_is_not_unregistered_while_queued_work_names_it() {
    let (of, bytes) = (Misused::new(), vec![1u8; BYTES]);
    let address = misuse!(of.card.register(&bytes).unwrap());
    of.submit(launch("fetch_rows", &(address + 8).to_le_bytes()));
    misuse!(of.card.unregister(&bytes));
    of.is_told("is unregistered while `fetch_rows`");
}

#[test]
fn a_result_never_overwrites_another() {
    let of = Misused::new();
    of.card.expects(of.pinned, 16);
    of.card.expects(of.pinned + 16, 16);
    assert!(of.card.faults().is_empty());
    of.card.expects(of.pinned + 31, 4);
    of.is_told("already has an unfetched result");
}

#[test]
fn freed_memory_is_not_used() {
    type Use = fn(&Misused) -> bool;
    let uses: [(&str, Use); 5] = [
        ("an upload", |of| misuse!(of.card.upload(of.memory, &[1; 4])).is_err()),
        ("a download", |of| misuse!(of.card.download(of.memory, &mut [1; 4])).is_err()),
        ("a copy", |of| misuse!(of.card.copy(of.pinned, of.memory, 4)).is_err()),
        ("a clearing", |of| misuse!(of.card.clear(of.memory, 4)).is_err()),
        ("an argument of `select_top`", |of| {
            let arguments = of.memory.to_le_bytes();
            let (kernel, grid, demand) = ("select_top", [1, 1, 1], Demand::default());
            let launch = Launch { kernel, grid, threads: 32, shared_bytes: 0, arguments: &arguments, demand };
            misuse!(of.card.launch(&launch)).is_err()
        }),
    ];
    for (what, used) in uses {
        let of = Misused::new();
        misuse!(of.card.free(of.memory));
        assert!(used(&of), "{what}");
        let faults = of.card.faults();
        assert!(faults.len() == 1 && faults[0].contains(what) && faults[0].contains("freed"), "{what}: {faults:?}");
    }
    let of = Misused::new();
    of.submit(of.upload());
    misuse!(of.card.unpin(of.pinned));
    assert!(misuse!(of.card.wait(of.stream)).is_err(), "queued work ran over unpinned memory");
    let of = Misused::new();
    misuse!(of.card.free(of.memory));
    misuse!(of.card.free(of.memory));
    of.is_told("memory is freed that was never allocated, or was freed before");
    // Accesses must not exceed their allocation, even if another allocation follows.
    let of = Misused::new();
    assert!(misuse!(of.card.upload(of.memory + 1, &[0; BYTES])).is_err());
}

#[test]
fn reused_memory_is_overwritten_exclusively() {
    let of = Misused::new();
    misuse!(of.card.upload(of.memory, &[7; BYTES]).unwrap());
    of.card.recycles(of.memory, BYTES);
    let mut found = vec![0; BYTES];
    misuse!(of.card.download(of.memory, &mut found).unwrap());
    assert!(found.iter().all(|&byte| byte == 0xDD), "the earlier contents are still there");
    of.submit(Work::Clear { address: of.memory + 100, bytes: 1 });
    of.card.recycles(of.memory, BYTES);
    of.is_told("is reused while `a clearing` that has not run yet uses it");
    let of = Misused::new();
    of.card.expects(of.pinned + 8, 16);
    of.card.recycles(of.pinned, BYTES);
    of.is_told("is reused while it has an unfetched result");
}

#[test]
fn freed_memory_is_overwritten_and_not_used_again_at_once() {
    if std::env::var_os("STERLING_EMULATION_LIBRARY").is_some() {
        // A sanitizer reports every byte that is read.
        return;
    }
    let of = Misused::new();
    misuse!(of.card.upload(of.memory, &[7; BYTES]).unwrap());
    misuse!(of.card.free(of.memory));
    let read = |n: usize| misuse!((of.memory as *const u8).add(n).read_volatile());
    assert!((0..BYTES).all(|n| read(n) == 0xDD), "freed contents are still there");
    let again: Vec<u64> = (0..1000).map(|_| of.card.alloc(BYTES).unwrap()).collect();
    assert!(!again.contains(&of.memory), "freed memory is given out again");
    again.into_iter().for_each(|address| misuse!(of.card.free(address)));
    assert!(of.card.faults().is_empty());
}

#[test]
fn streams_use_memory_only_after_its_allocation_completes() {
    let of = Misused::new();
    let new = of.card.alloc(BYTES).unwrap();
    of.submit(Work::Clear { address: new, bytes: 8 });
    of.is_told("`a clearing` uses memory whose allocation the driver's stream has not reached");
    let of = Misused::new();
    let new = of.card.alloc(BYTES).unwrap();
    of.card.settle().unwrap();
    of.submit(Work::Clear { address: new, bytes: 8 });
    assert!(of.card.faults().is_empty());
}

#[test]
fn a_stream_is_not_closed_before_its_end() {
    let of = Misused::new();
    of.submit(of.upload());
    misuse!(of.card.close(of.stream));
    of.is_told("a stream is closed that still has 1 operations to run");
}

#[test]
fn faults_panic_unless_they_are_kept() {
    let card = emulated();
    let memory = card.alloc(8).unwrap();
    let frees = |memory: u64| catch_unwind(AssertUnwindSafe(|| misuse!(card.free(memory)))).is_err();
    assert!(!frees(memory) && frees(memory));
    card.keep_faults();
}

/// Work of one stream runs in order, and that of two streams in any order: dependencies between them need a wait.
#[test]
fn streams_run_in_any_order_and_each_in_its_own() {
    const SEEDS: u64 = 400;
    let (mut found, mut early, mut in_waits) = (Vec::new(), 0, Vec::new());
    for seed in 0..SEEDS {
        let card = seeded(seed);
        let (memory, pinned) = (card.alloc(8).unwrap(), card.pin(64).unwrap());
        card.settle().unwrap();
        misuse!((pinned as *mut u8).write_bytes(1, 8));
        let streams = [(); 2].map(|()| card.stream().unwrap());
        let clear = Work::Clear { address: memory, bytes: 8 };
        let write = Work::Upload { to: memory, from: pinned, bytes: 8 };
        let read = |at: u64| Work::Download { from: memory, to: pinned + at, bytes: 8 };
        misuse!(card.submit(streams[0], &[clear, read(16), write, read(24)]).unwrap());
        misuse!(card.submit(streams[1], &[read(32)]).unwrap());
        let byte = |at: u64| misuse!(((pinned + at) as *const u8).read_volatile());
        let is_early = byte(16) == 0;
        early += u64::from(is_early);
        for stream in streams.into_iter().rev() {
            misuse!(card.wait(stream).unwrap());
        }
        assert_eq!([byte(16), byte(24)], [0, 1], "a stream is not in its own order");
        found.push(byte(32));
        in_waits.extend((!is_early).then(|| byte(32)));
        streams.into_iter().for_each(|stream| misuse!(card.close(stream)));
        misuse!(card.free(memory));
        misuse!(card.unpin(pinned));
    }
    for seen in [0xCD, 0, 1] {
        assert!(found.contains(&seen), "the other stream never saw {seen:#x}: {found:x?}");
    }
    assert!(early > 0 && early < SEEDS, "{early} streams ran before anybody waited");
    // A stream without a waiting caller runs while another one is waited for.
    assert!(in_waits.contains(&1), "a wait ran only its own stream: {in_waits:x?}");
}

#[test]
fn launches_are_held_against_the_limits_of_devices() {
    assert_eq!(Limits::ALL.map(|limits| limits.shared_bytes >> 10), [227, 163, 99]);
    for limits in Limits::ALL {
        let card = seeded(1).with_limits(limits);
        assert_eq!(card.shared_bytes_max(), limits.shared_bytes);
        let arguments = vec![0; 5000];
        let plain = Launch {
            kernel: "nothing",
            grid: [1, 1, 1],
            threads: 32,
            shared_bytes: limits.shared_bytes,
            arguments: &arguments[..8],
            demand: Demand::default(),
        };
        let refused = |launch: Launch<'_>| misuse!(card.launch(&launch)).unwrap_err().to_string();
        assert!(refused(plain).contains("there is none of this name"), "within the limits");
        let wrong = [
            (Launch { shared_bytes: limits.shared_bytes + 1, ..plain }, "bytes of shared memory per block"),
            (Launch { threads: 1056, ..plain }, "blocks of 1056 threads"),
            (Launch { threads: 40, ..plain }, "blocks of 40 threads"),
            (Launch { threads: 0, ..plain }, "blocks of 0 threads"),
            (Launch { grid: [1, 65_536, 1], ..plain }, "a grid of"),
            (Launch { grid: [1, 1, 65_536], ..plain }, "a grid of"),
            (Launch { grid: [1 << 31, 1, 1], ..plain }, "a grid of"),
            (Launch { grid: [1, 0, 1], ..plain }, "a grid of"),
            (Launch { arguments: &arguments, ..plain }, "5000 bytes of arguments"),
        ];
        for (launch, what) in wrong {
            let why = refused(launch);
            assert!(why.contains(what), "{}: {why}, expected {what}", limits.name);
        }
        assert_eq!(card.launches(), 1);
    }
}

/// A lost device answers nothing; once it is back, it answers again.
#[test]
fn a_device_that_is_found_again_answers() {
    let card = emulated();
    card.lose_after(0);
    let device = Device::over(card.clone());
    let lane = device.lane().unwrap();
    lane.begin().unwrap();
    let arrays = [(); 2].map(|()| lane.zeros::<u32>(4).unwrap());
    // The results come in one launch: after a failure, nothing is used as a result.
    let results = arrays.each_ref().map(|array| array.later(4).unwrap());
    for result in results {
        assert!(result.get().unwrap_err().to_string().contains("the GPU is lost"));
    }
    assert!(device.memory().is_err());
    card.find_again();
    assert_eq!(device.zeros::<u32>(4).unwrap().to_vec().unwrap(), [0; 4]);
}
