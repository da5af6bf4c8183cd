//! A run: every request at its time, whatever became of those before it.

use std::rc::Rc;
use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::client::Client;
use super::report::{ClassReport, Generator, Latency, Report, Sample};
use super::requests::{Body, Target};
use super::schedule::{Arrivals, order, times};
use crate::error::{Error, Result};

/// The system counts processor time in hundredths of a second, on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;
/// From this rate on, in requests a second, requests are sent and answers are taken together.
const GATHER_RATE: f64 = 4000.0;
/// How long they gather. A generator that wakes for each takes the core from a server on the same machine tens of thousands
/// of times a second; what is measured is longer by this at most, for a request is timed from when it was due.
const GATHER: Duration = Duration::from_micros(500);
/// Time to get ready before the first request is due.
const LEAD: Duration = Duration::from_millis(50);

/// Requests of one kind, that are reported together.
#[derive(Clone, Debug)]
pub struct Class {
    /// What reports call it.
    pub name: String,
    /// Where its requests go, such as `/v1/models/debian:retrieve`.
    pub path: String,
    /// What they say; all in turn, in a random order.
    pub bodies: Vec<Body>,
    /// Of them in a second.
    pub rate: f64,
}

/// What to send, when, and how.
#[derive(Clone, Debug)]
pub struct Load {
    /// The kinds of requests.
    pub classes: Vec<Class>,
    /// How long requests are sent.
    pub seconds: f64,
    /// How they follow one another.
    pub arrivals: Arrivals,
    /// Most connections that ask at a time.
    pub connections: usize,
    /// Further connections that ask nothing.
    pub idle_connections: usize,
    /// Further connections that ask what the first class does, for a thousand results, and read the answer very slowly.
    pub slow_readers: usize,
    /// Of the times and of the order of bodies.
    pub seed: u64,
}

/// A request of the schedule.
struct Planned {
    at: Duration,
    class: usize,
    body: usize,
}

impl Load {
    fn gather(&self) -> Duration {
        let rate: f64 = self.classes.iter().map(|class| class.rate).sum();
        if rate < GATHER_RATE { Duration::ZERO } else { GATHER }
    }

    fn schedule(&self) -> Vec<Planned> {
        let of_class = |(class, what): (usize, &Class)| {
            let seed = self.seed.wrapping_add(class as u64);
            let times = times(self.arrivals, what.rate, self.seconds, seed);
            times.into_iter().zip(order(what.bodies.len(), seed)).map(move |(at, body)| Planned { at, class, body })
        };
        let mut planned: Vec<Planned> = self.classes.iter().enumerate().flat_map(of_class).collect();
        planned.sort_by_key(|p| p.at);
        planned
    }
}

/// Runs what needs a thread of its own: connections that are not shared. It looks at them once in `gather` at most.
fn local<T>(gather: Duration, work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_park(move || std::thread::sleep(gather))
        .build()
        .map_err(|e| Error::io("the generator's thread", e))?;
    Ok(LocalSet::new().block_on(&runtime, work))
}

/// What a server says at a path.
///
/// # Errors
/// `Unavailable` where it does not answer with a JSON document.
pub fn get(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(Method::GET, path))?
}

/// What a server says when it is told to do what a path names, however long that takes.
///
/// # Errors
/// As [`get`].
pub fn post(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(Method::POST, path))?
}

/// Sends the load to the server and reports what became of it.
///
/// # Errors
/// Where the server cannot be reached at all.
pub fn run(target: &Target, load: &Load) -> Result<Report> {
    // A server that is not there is an error and not a report of errors.
    get(target, "/v1/models")?;
    let ticks = processor_ticks();
    let started = Instant::now();
    let (samples, late, closed_by_server) =
        local(load.gather(), send(Client::new(target.clone(), load.connections), load))?;
    let cores = ticks
        .zip(processor_ticks())
        .map(|(before, after)| (after - before) / TICKS_PER_SECOND / started.elapsed().as_secs_f64());
    let late_ms_p99 = Latency::of(late.into_iter()).map_or(0.0, |late| late.p99);
    let report = |(number, class): (usize, &Class)| ClassReport::of(number, &class.name, load.seconds, &samples);
    let classes = load.classes.iter().enumerate().map(report).collect();
    let generator = Generator { cores, late_ms_p99, closed_by_server };
    Ok(Report::new(format!("http://{}", target.authority), load.seconds, classes, generator))
}

/// A request as it is sent, and how long its answer is worth waiting for.
struct Ready {
    request: Vec<u8>,
    timeout: Duration,
}

fn asked(client: &Client, class: &Class, body: &Body) -> Ready {
    Ready { request: client.request("POST", &class.path, &body.bytes), timeout: body.timeout }
}

/// Every request's end, how late each was sent, and the misbehaving connections that the server closed.
async fn send(client: Rc<Client>, load: &Load) -> (Vec<Sample>, Vec<Duration>, usize) {
    let mut misbehaving = JoinSet::new();
    for _ in 0..load.idle_connections {
        misbehaving.spawn_local(client.clone().idle());
    }
    for number in 0..load.slow_readers {
        let class = &load.classes[0];
        let body = class.bodies[number % class.bodies.len()].for_many_results();
        misbehaving.spawn_local(client.clone().read_slowly(class.path.clone(), body));
    }
    // They connect first: what is measured is a server that has them.
    tokio::time::sleep(LEAD * u32::from(!misbehaving.is_empty()) * 10).await;

    let asked = |class: &Class| class.bodies.iter().map(|body| asked(&client, class, body)).collect();
    let asked: Rc<[Vec<Ready>]> = load.classes.iter().map(asked).collect();
    let start = Instant::now() + LEAD;
    let mut due = pace(start, load.schedule(), load.gather());
    let (mut running, mut samples, mut late) = (JoinSet::new(), Vec::new(), Vec::new());
    while let Some(Planned { at, class, body }) = due.recv().await {
        let due = start + at;
        late.push(due.elapsed());
        let (client, asked) = (client.clone(), asked.clone());
        running.spawn_local(async move {
            let Ready { request, timeout } = &asked[class][body];
            let end = client.post(request, *timeout, due).await;
            let latency = due.elapsed();
            Sample { class, end, latency, in_time: latency <= *timeout }
        });
        while let Some(done) = running.try_join_next() {
            samples.extend(done);
        }
    }
    while let Some(done) = running.join_next().await {
        samples.extend(done);
    }
    (samples, late, client.closed())
}

/// Hands out each request when it is due. A thread that sleeps wakes within tens of microseconds; the runtime's timer
/// knows whole milliseconds only. Those that are due within `gather` of one another are handed out together.
fn pace(start: Instant, planned: Vec<Planned>, gather: Duration) -> mpsc::UnboundedReceiver<Planned> {
    let (send, receive) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for request in planned {
            let wait = (start + request.at).saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                std::thread::sleep(wait.max(gather));
            }
            if send.send(request).is_err() {
                break;
            }
        }
    });
    receive
}

/// Processor time of this process, where the system tells.
fn processor_ticks() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the process, in parentheses, may hold anything; utime and stime are the 12th and 13th after it.
    let mut times = stat.rsplit_once(')')?.1.split_whitespace().skip(11).map(|word| word.parse::<f64>().ok());
    Some(times.next()?? + times.next()??)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn classes_are_merged_in_the_order_of_their_times() {
        let class = |rate| Class {
            name: String::new(),
            path: String::new(),
            bodies: super::super::random_vectors(2, 3, 1, Duration::from_secs(1)),
            rate,
        };
        let load = Load {
            classes: vec![class(100.0), class(7.0)],
            seconds: 2.0,
            arrivals: Arrivals::Constant,
            connections: 1,
            idle_connections: 0,
            slow_readers: 0,
            seed: 1,
        };
        let planned = load.schedule();
        assert!(planned.is_sorted_by_key(|p| p.at));
        let of = |class| planned.iter().filter(move |p| p.class == class);
        assert_eq!((of(0).count(), of(1).count()), (200, 14));
        assert!((0..3).all(|body| of(0).filter(|p| p.body == body).count() >= 66));
    }

    #[test]
    fn requests_are_handed_out_when_they_are_due_and_not_before() {
        let planned = |n: u64| Planned { at: Duration::from_millis(n * 3), class: 0, body: n as usize };
        let start = Instant::now() + Duration::from_millis(5);
        let mut due = pace(start, (0..20).map(planned).collect(), Duration::ZERO);
        for n in 0..20 {
            let request = due.blocking_recv().unwrap();
            assert_eq!(request.body, n);
            assert!(Instant::now() >= start + request.at, "request {n} came early");
        }
        assert!(due.blocking_recv().is_none());
    }

    #[test]
    fn processor_time_grows_with_work() {
        let Some(before) = processor_ticks() else { return };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) && processor_ticks() == Some(before) {}
        assert!(processor_ticks().unwrap() > before);
    }
}
