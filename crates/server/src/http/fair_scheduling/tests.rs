//! Tests of turns, with a simulated runtime and with tokio's.

#![allow(clippy::unwrap_used)]
use std::future::poll_fn;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicUsize;
use std::task::Poll::{Pending, Ready};
use tokio::sync::oneshot;

use super::*;

/// Returns the scheduling identity of a connection of `caller`.
fn of_caller(caller: u64) -> Arc<LastCaller> {
    let last = LastCaller::at(Ipv4Addr::LOCALHOST.into());
    last.called_by(Flow(caller));
    Arc::new(last)
}

/// Permits that a single caller may have of one thread's.
const OWN_TURNS: usize = TURNS_PER_THREAD / 2;

/// Numbers of the polled connections, in order.
type Polls = Arc<Mutex<Vec<usize>>>;

/// A connection that records its number at each poll and stays pending.
fn noted(
    number: usize,
    polls: &Polls,
    threads: &Arc<Threads>,
    caller: u64,
) -> ScheduledFuture<impl Future<Output = ()>> {
    let polls = polls.clone();
    let noted = poll_fn(move |_| {
        locked(&polls).push(number);
        Poll::<()>::Pending
    });
    ScheduledFuture::new(noted, threads, &of_caller(caller))
}

/// Simulated runtime: records woken tasks, and polls them in that order.
#[derive(Default)]
struct Runtime(Mutex<Vec<usize>>);

struct RecordingWaker(Arc<Runtime>, usize);

impl Wake for RecordingWaker {
    fn wake(self: Arc<Self>) {
        locked(&self.0.0).push(self.1);
    }
}

impl Runtime {
    fn poll<F: Future>(self: &Arc<Self>, tasks: &mut [ScheduledFuture<F>], n: usize) -> Poll<F::Output> {
        let waker = Waker::from(Arc::new(RecordingWaker(self.clone(), n)));
        Pin::new(&mut tasks[n]).poll(&mut Context::from_waker(&waker))
    }

    fn reported(&self) -> Vec<usize> {
        std::mem::take(&mut *locked(&self.0))
    }

    /// Polls woken tasks until no more are woken. Returns the largest number of woken tasks at a time.
    fn run<F: Future>(self: &Arc<Self>, tasks: &mut [ScheduledFuture<F>]) -> usize {
        let mut most = 0;
        let mut reported = self.reported();
        while !reported.is_empty() {
            most = most.max(reported.len());
            let n = reported.remove(0);
            assert!(self.poll(tasks, n).is_pending());
            reported.extend(self.reported());
        }
        most
    }
}

#[test]
fn a_connection_waits_for_few_tasks_of_another_caller_not_for_all() {
    let (polls, runtime, threads) = (Polls::default(), Arc::new(Runtime::default()), Threads::new(1));
    let many = 100;
    let mut tasks: Vec<_> = (0..many).map(|n| noted(n, &polls, &threads, 1)).collect();
    tasks.push(noted(many, &polls, &threads, 2));
    // Without contention all of them are polled once; then all are woken.
    (0..=many).for_each(|n| assert!(runtime.poll(&mut tasks, n).is_pending()));
    assert_eq!(std::mem::take(&mut *locked(&polls)), (0..=many).collect::<Vec<_>>());
    let wakers: Vec<Waker> = tasks.iter().map(|task| task.waker.clone()).collect();
    wakers.iter().for_each(Waker::wake_by_ref);
    assert_eq!(threads.waiting(), many - OWN_TURNS, "the other caller has a permit at once");
    assert_eq!(runtime.run(&mut tasks), OWN_TURNS + 1);
    let polls = std::mem::take(&mut *locked(&polls));
    assert_eq!(polls.iter().position(|&n| n == many), Some(OWN_TURNS));
    let of_one: Vec<usize> = polls.iter().copied().filter(|&n| n < many).collect();
    assert_eq!(of_one, (0..many).collect::<Vec<_>>(), "those of one caller go in their order, each once");
    assert_eq!((threads.waiting(), locked(&threads.queue).taken), (0, [0, 0]));
    assert!(locked(&threads.queue).taken_by.is_empty(), "callers without polls take no memory");
}

#[test]
fn callers_with_long_polls_leave_a_permit_to_the_next_caller() {
    let (polls, runtime, threads) = (Polls::default(), Arc::new(Runtime::default()), Threads::new(2));
    // Each caller has more ready connections than there are permits; none of their polls ends.
    let most = threads.most;
    let mut tasks: Vec<_> = (0..4 * most).map(|n| noted(n, &polls, &threads, (n / most) as u64)).collect();
    (0..tasks.len()).for_each(|n| assert!(runtime.poll(&mut tasks, n).is_pending()));
    tasks[..3 * most].iter().for_each(|task| task.waker.wake_by_ref());
    let taken = runtime.reported();
    assert_eq!(taken.len(), 7, "of 8: 4, half of the rest, and half of that");
    tasks[3 * most].waker.wake_by_ref();
    assert_eq!(runtime.reported(), [3 * most]);
    assert_eq!(threads.waiting(), 3 * most - taken.len());
    // A permit that is released goes to a caller with fewer permits than are free then.
    assert!(runtime.poll(&mut tasks, 3 * most).is_pending());
    assert_eq!(runtime.reported(), [0; 0]);
    assert!(runtime.poll(&mut tasks, 0).is_pending());
    assert_eq!(runtime.reported(), [2 * most + 1]);
}

#[test]
fn permits_of_ended_tasks_go_to_others() {
    let (polls, runtime, threads) = (Polls::default(), Arc::new(Runtime::default()), Threads::new(1));
    let mut tasks: Vec<_> = (0..6 * OWN_TURNS).map(|n| noted(n, &polls, &threads, 1)).collect();
    (0..tasks.len()).for_each(|n| assert!(runtime.poll(&mut tasks, n).is_pending()));
    tasks.iter().for_each(|task| task.waker.wake_by_ref());
    locked(&polls).clear();
    // Drops all tasks with a permit and some of the waiting ones.
    runtime.reported();
    tasks.drain(..5 * OWN_TURNS);
    let left = runtime.reported().into_iter().filter(|&n| n >= 5 * OWN_TURNS);
    assert_eq!(left.collect::<Vec<_>>(), (5 * OWN_TURNS..6 * OWN_TURNS).collect::<Vec<_>>());
    assert_eq!(threads.waiting(), 0);
    drop(tasks);
    assert_eq!(locked(&threads.queue).taken, [0, 0]);
}

#[test]
fn a_task_that_is_woken_during_its_poll_is_polled_after_others() {
    let (runtime, threads) = (Arc::new(Runtime::default()), Threads::new(1));
    let mut left = 2;
    let again = poll_fn(move |cx| {
        cx.waker().wake_by_ref();
        left -= 1;
        if left == 0 { Ready(7) } else { Pending }
    });
    let mut tasks = [ScheduledFuture::new(again, &threads, &of_caller(1))];
    assert_eq!(runtime.poll(&mut tasks, 0), Pending);
    assert_eq!(runtime.reported(), [0]);
    assert_eq!(runtime.poll(&mut tasks, 0), Ready(7));
    tasks[0].waker.wake_by_ref();
    assert_eq!(
        (runtime.reported().len(), locked(&threads.queue).taken),
        (0, [0, 0]),
        "an ended task gets no notification"
    );
}

#[test]
fn endless_polls_do_not_starve_other_callers() {
    let (polls, runtime, threads) = (Polls::default(), Arc::new(Runtime::default()), Threads::new(1));
    let mut tasks: Vec<_> = (0..2 * OWN_TURNS).map(|n| noted(n, &polls, &threads, 1)).collect();
    (0..tasks.len()).for_each(|n| assert!(runtime.poll(&mut tasks, n).is_pending()));
    tasks.iter().for_each(|task| task.waker.wake_by_ref());
    let stuck = runtime.reported();
    assert_eq!(stuck.len(), OWN_TURNS);
    threads.sweep();
    assert_eq!(runtime.reported(), [0; 0]);
    threads.sweep();
    assert_eq!(runtime.reported(), (OWN_TURNS..2 * OWN_TURNS).collect::<Vec<_>>());
    // Turns that end after all do not free turns that were no longer counted.
    stuck.iter().for_each(|&n| assert!(runtime.poll(&mut tasks, n).is_pending()));
    assert_eq!(locked(&threads.queue).taken.iter().sum::<usize>(), OWN_TURNS);
}

/// A connection whose requests are all rejected.
fn send_rejected_requests(
    threads: &Arc<Threads>,
    caller: u64,
    polls: &Polls,
) -> ScheduledFuture<impl Future<Output = ()> + use<>> {
    let (connection, polls) = (of_caller(caller), polls.clone());
    let away = connection.clone();
    let noted = poll_fn(move |cx| {
        let started = Instant::now();
        while started.elapsed() < Duration::from_micros(100) {}
        locked(&polls).push(caller as usize);
        away.record_rejection();
        cx.waker().wake_by_ref();
        Poll::<()>::Pending
    });
    ScheduledFuture::new(noted, threads, &connection)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_callers_pause_while_others_send_requests() {
    let (threads, polls) = (Threads::new(2), Polls::default());
    let paced = threads.clone();
    tokio::spawn(async move { paced.pace().await });
    for _ in 0..50 {
        tokio::spawn(send_rejected_requests(&threads, 1, &polls));
    }
    while locked(&polls).len() < 100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(locked(&threads.queue).resting.is_empty(), "no other caller has requests");
    // Another caller sends a request every 10 ms.
    let other = threads.clone();
    let asks = async move {
        loop {
            tokio::spawn(ScheduledFuture::new(async {}, &other, &of_caller(2))).await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let asking = tokio::spawn(asks);
    while locked(&threads.queue).resting.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    locked(&polls).clear();
    let started = Instant::now();
    while locked(&polls).len() < 100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Excludes tasks that had a turn before the rest began.
    let beside = locked(&polls).len() - threads.most;
    let most = started.elapsed().as_secs_f64() / 100e-6 / f64::from(PAUSE_FACTOR);
    assert!(beside as f64 <= 1.2 * most, "{beside} polls, at most {most} expected");
    assert!(threads.waiting() > 0);
    asking.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_releases_the_permit() {
    let threads = Threads::new(1);
    for _ in 0..3 * TURNS_PER_THREAD {
        let broken = ScheduledFuture::new(async { panic!("for the test") }, &threads, &of_caller(1));
        assert!(tokio::spawn(broken).await.unwrap_err().is_panic());
    }
    let done = tokio::spawn(ScheduledFuture::new(async { 7 }, &threads, &of_caller(1)));
    assert_eq!(tokio::time::timeout(Duration::from_secs(60), done).await.unwrap().unwrap(), 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_is_lost_between_threads() {
    const TASKS: usize = 64;
    const ROUNDS: usize = 500;
    let (ask, requested) = std::sync::mpsc::channel::<oneshot::Sender<usize>>();
    let answers = std::thread::spawn(move || requested.into_iter().enumerate().for_each(|(n, to)| to.send(n).unwrap()));
    let (threads, ended, all) = (Threads::new(1), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    for n in 0..TASKS {
        let (ask, ended, all) = (ask.clone(), ended.clone(), all.clone());
        let rounds = async move {
            for _ in 0..ROUNDS {
                let (to, answered) = oneshot::channel();
                ask.send(to).unwrap();
                answered.await.unwrap();
            }
            if ended.fetch_add(1, Ordering::Relaxed) + 1 == TASKS {
                all.notify_one();
            }
        };
        tokio::spawn(ScheduledFuture::new(rounds, &threads, &of_caller(n as u64 % 3)));
    }
    tokio::time::timeout(Duration::from_secs(60), all.notified()).await.unwrap();
    drop(ask);
    answers.join().unwrap();
    assert_eq!((threads.waiting(), locked(&threads.queue).taken.iter().sum::<usize>() <= 1), (0, true));
}
