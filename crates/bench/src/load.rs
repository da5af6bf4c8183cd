//! A run: sends every request at its scheduled time, independent of earlier ones.

use std::cell::RefCell;
use std::iter::Peekable;
use std::rc::Rc;
use std::time::Duration;

use hyper::body::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::bound::Bound;
use super::client::{Client, get, local};
use super::latency::Latencies;
use super::report::{Generator, Report, Sample, Tally};
use super::requests::{Body, Target};
use super::sample::Reservoir;
use super::schedule::{Arrivals, SendTimes, order, times};
use sterling_core::error::Result;
use sterling_core::tasks;

/// Unit of processor times in /proc: hundredths of a second on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;
/// Rate in requests per second from which requests and answers are processed in groups.
const GATHER_RATE: f64 = 4000.0;
/// Interval over which due requests are grouped. A generator that wakes up per event takes the core from a server on
/// the same machine tens of thousands of times per second. Grouping increases measured latencies by at most this
/// interval, because latencies count from the scheduled time.
const GATHER: Duration = Duration::from_micros(500);
/// Preparation time before the first request is due.
const LEAD: Duration = Duration::from_millis(50);

/// Requests of one kind, which are reported together.
#[derive(Clone, Debug)]
pub struct Class {
    /// Name in reports.
    pub name: String,
    /// Request path, such as `/v1/models/debian:retrieve`.
    pub path: String,
    /// Request bodies; at a rate, all are sent in a random order, repeatedly.
    pub bodies: Vec<Body>,
    /// Times at which the requests are sent.
    pub timing: SendTimes,
    /// Users per call, if single requests were combined to lists; rates count users.
    pub batch: usize,
}

/// A load: requests, times and connections.
#[derive(Clone, Debug)]
pub struct Load {
    /// Kinds of requests.
    pub classes: Vec<Class>,
    /// Duration of the run in seconds; for a recording, the recording determines the duration.
    pub seconds: f64,
    /// Distribution of arrivals, for classes with a rate.
    pub arrivals: Arrivals,
    /// Maximum number of connections with requests.
    pub connections: usize,
    /// Number of additional idle connections.
    pub idle_connections: usize,
    /// Number of additional connections that send requests of the first of the `classes` with a thousand results and
    /// read the answers very slowly.
    pub slow_readers: usize,
    /// Latency bound for the first of the `classes`.
    pub bound: Option<Bound>,
    /// Maximum number of retained answers to the first of the `classes` with status 200.
    pub kept: usize,
    /// Seed of the request times and of the order of bodies.
    pub seed: u64,
}

/// A scheduled request.
struct Planned {
    at: Duration,
    class: usize,
    body: usize,
}

/// Requests of a class in order of time.
type Scheduled = Box<dyn Iterator<Item = Planned> + Send>;

impl Class {
    /// Returns the mean number of calls per second in a run of `seconds`.
    fn calls_per_second(&self, seconds: f64) -> f64 {
        match &self.timing {
            SendTimes::Rate(rate) => *rate,
            SendTimes::Recorded(times) => times.len() as f64 / seconds,
        }
    }
}

impl Load {
    /// Returns a two-second load with the given request classes and otherwise minimal settings.
    #[cfg(test)]
    pub(super) fn of(classes: Vec<Class>) -> Self {
        let arrivals = Arrivals::Constant;
        let (connections, idle_connections, slow_readers) = (1, 0, 0);
        let (seconds, bound, kept, seed) = (2.0, None, 0, 1);
        Load { classes, seconds, arrivals, connections, idle_connections, slow_readers, bound, kept, seed }
    }

    fn gather(&self) -> Duration {
        let rate: f64 = self.classes.iter().map(|class| class.calls_per_second(self.seconds)).sum();
        if rate < GATHER_RATE { Duration::ZERO } else { GATHER }
    }

    fn schedule_of_class(&self, class: usize) -> Scheduled {
        let Class { bodies, timing, .. } = &self.classes[class];
        let seed = self.seed.wrapping_add(class as u64);
        match timing {
            SendTimes::Rate(rate) => {
                let times = times(self.arrivals, *rate, self.seconds, seed);
                let bodies = order(bodies.len(), seed);
                Box::new(times.zip(bodies).map(move |(at, body)| Planned { at, class, body }))
            }
            SendTimes::Recorded(times) => {
                let times = times.clone();
                Box::new((0..times.len()).map(move |body| Planned { at: times[body], class, body }))
            }
        }
    }

    /// Returns all requests in order of time, computed lazily: a long run needs no more memory than a short one.
    fn schedule(&self) -> impl Iterator<Item = Planned> + Send + use<> {
        let mut classes: Vec<Peekable<Scheduled>> =
            (0..self.classes.len()).map(|class| self.schedule_of_class(class).peekable()).collect();
        std::iter::from_fn(move || {
            let next = classes.iter_mut().enumerate();
            let (_, class) = next.filter_map(|(class, planned)| Some((planned.peek()?.at, class))).min()?;
            classes[class].next()
        })
    }
}

/// Sends the load to the server and reports the outcomes.
///
/// # Errors
/// A server that cannot be reached.
pub fn run(target: &Target, load: &Load) -> Result<Report> {
    // An unreachable server is an error, not a report of errors.
    get(target, "/v1/models")?;
    let ticks = processor_ticks();
    let started = Instant::now();
    let sent = local(load.gather(), send(Client::new(target.clone(), load.connections), load))??;
    let cores = ticks
        .zip(processor_ticks())
        .map(|(before, after)| (after - before) / TICKS_PER_SECOND / started.elapsed().as_secs_f64());
    let late_ms_p99 = sent.late.percentiles().map_or(0.0, |late| late.p99);
    let generator = Generator { cores, late_ms_p99, closed_by_server: sent.closed_by_server };
    let classes = sent.tallies.into_iter().map(|tally| tally.report(load.seconds)).collect();
    Ok(Report::new(target.url(), load.seconds, classes, generator, load.bound).keeping(sent.kept.into_kept()))
}

/// A serialized request, the request's body, and its timeout.
struct Ready {
    request: Vec<u8>,
    body: Bytes,
    timeout: Duration,
}

fn ready(client: &Client, class: &Class) -> Vec<Ready> {
    let ready = |body: &Body| Ready {
        request: client.request("POST", &class.path, &body.bytes),
        body: body.bytes.clone(),
        timeout: body.timeout,
    };
    class.bodies.iter().map(ready).collect()
}

/// Outcomes of all requests.
struct Outcomes {
    tallies: Vec<Tally>,
    /// Delays with which requests were sent.
    late: Latencies,
    /// Idle connections and slow readers that the server closed.
    closed_by_server: usize,
    kept: Reservoir,
}

async fn send(client: Rc<Client>, load: &Load) -> Result<Outcomes> {
    let mut misbehaving = JoinSet::new();
    for _ in 0..load.idle_connections {
        misbehaving.spawn_local(client.clone().idle());
    }
    for number in 0..load.slow_readers {
        let class = &load.classes[0];
        let body = class.bodies[number % class.bodies.len()].for_many_results();
        misbehaving.spawn_local(client.clone().read_slowly(class.path.clone(), body));
    }
    // Idle connections and slow readers connect before the run, so that they are open while the server is measured.
    tokio::time::sleep(LEAD * u32::from(!misbehaving.is_empty()) * 10).await;

    let all: Rc<[Vec<Ready>]> = load.classes.iter().map(|class| ready(&client, class)).collect();
    let kept = Rc::new(RefCell::new(Reservoir::new(load.kept, load.seed)));
    let mut tallies: Vec<Tally> =
        load.classes.iter().map(|class| Tally::new(&class.name, class.batch, load.bound)).collect();
    let mut late = Latencies::default();
    let start = Instant::now() + LEAD;
    let mut due = pace(start, load.schedule(), load.gather())?;
    let mut running: JoinSet<Sample> = JoinSet::new();
    while let Some(Planned { at, class, body }) = due.recv().await {
        let due = start + at;
        late.record(due.elapsed());
        let (client, all, kept) = (client.clone(), all.clone(), kept.clone());
        running.spawn_local(async move {
            let Ready { request, body, timeout } = &all[class][body];
            let end = client.post(request, *timeout, due, |answer| {
                if class == 0 && answer.status() == 200 {
                    kept.borrow_mut().offer(body, || answer.body());
                }
            });
            let end = end.await;
            let latency = due.elapsed();
            Sample { class, end, latency, in_time: latency <= *timeout }
        });
        while let Some(done) = running.try_join_next() {
            done.iter().for_each(|sample| tallies[sample.class].record(sample));
        }
    }
    while let Some(done) = running.join_next().await {
        done.iter().for_each(|sample| tallies[sample.class].record(sample));
    }
    let kept = kept.replace(Reservoir::new(0, 0));
    Ok(Outcomes { tallies, late, closed_by_server: client.closed(), kept })
}

/// Delivers each request when it is due. A sleeping thread wakes up within tens of microseconds, while the runtime's
/// timer has a resolution of one millisecond. Requests that are due within `gather` of each other are delivered
/// together.
fn pace(
    start: Instant,
    planned: impl Iterator<Item = Planned> + Send + 'static,
    gather: Duration,
) -> Result<mpsc::UnboundedReceiver<Planned>> {
    let (send, receive) = mpsc::unbounded_channel();
    tasks::PACE.start(move || {
        for request in planned {
            let wait = (start + request.at).saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                std::thread::sleep(wait.max(gather));
            }
            if send.send(request).is_err() {
                break;
            }
        }
    })?;
    Ok(receive)
}

/// Returns the processor time of this process, if the system reports it.
fn processor_ticks() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The process name in parentheses may contain anything; utime and stime are the 12th and 13th fields after it.
    let mut times = stat.rsplit_once(')')?.1.split_whitespace().skip(11).map(|word| word.parse::<f64>().ok());
    Some(times.next()?? + times.next()??)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn class(timing: SendTimes) -> Class {
        let bodies = super::super::random_vectors(2, 3, 1, Duration::from_secs(1));
        Class { name: String::new(), path: String::new(), bodies, timing, batch: 1 }
    }

    #[test]
    fn classes_are_merged_in_the_order_of_their_times() {
        let load = Load::of(vec![class(SendTimes::Rate(100.0)), class(SendTimes::Rate(7.0))]);
        let planned: Vec<Planned> = load.schedule().collect();
        assert!(planned.is_sorted_by_key(|p| p.at));
        let of = |class| planned.iter().filter(move |p| p.class == class);
        assert_eq!((of(0).count(), of(1).count()), (200, 14));
        assert!((0..3).all(|body| of(0).filter(|p| p.body == body).count() >= 66));
    }

    #[test]
    fn a_recording_is_sent_at_its_recorded_times() {
        let times = [0, 5, 5, 3000].map(Duration::from_millis);
        let load = Load::of(vec![class(SendTimes::Recorded(times.into()))]);
        let planned: Vec<(Duration, usize)> = load.schedule().map(|p| (p.at, p.body)).collect();
        assert_eq!(planned, times.into_iter().zip(0..).collect::<Vec<_>>());
        assert_eq!((load.classes[0].timing.seconds(), load.gather()), (Some(3.0), Duration::ZERO));
    }

    #[test]
    fn requests_are_handed_out_when_they_are_due_and_not_before() {
        let planned = move |n: u64| Planned { at: Duration::from_millis(n * 3), class: 0, body: n as usize };
        let start = Instant::now() + Duration::from_millis(5);
        let mut due = pace(start, (0..20).map(planned), Duration::ZERO).unwrap();
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
