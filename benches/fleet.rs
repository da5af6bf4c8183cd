//! Simulates up to 64 shards behind a router: the latency cost of many shards, and what replica selection and hedging save.
//!
//! `cargo bench --bench fleet`. Time is simulated, so the figures depend on the seed alone and not on the machine. The rules of
//! the router are the real ones (`sterling::server::route::choice`). Their environment is modelled: servers with one queue and
//! several workers, log-normal service times, and faults. Service times are those of passes on the benchmark machine: of 4 shards
//! of the Debian model (docs/guide/router.md), and of a search of a million vectors (docs/benchmarks/recall.md), with the spread
//! of the former.
//!
//! A request without a reranker takes one round over all shards. With a reranker, one shard is called for the user, then all for
//! candidates, then all for results, or, if shards rank ahead, for both at once. Each round ends with its slowest shard, so with
//! S shards the median of a round is about the (1 - 1/2S) quantile of one shard.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io::Write;

use sterling::server::route::choice::{Group, Micros, Outcome};

type Done = Result<(), Box<dyn std::error::Error>>;

/// Number of simulated requests, and of warm-up requests that do not count.
const REQUESTS: usize = 40_000;
const WARM_UP: usize = 4_000;
const REPLICAS: usize = 3;
const WORKERS: usize = 8;
/// Utilization of the workers.
const LOAD: f64 = 0.5;
/// Network time from the router to a server, and back, each.
const NETWORK: Micros = 50;
/// Mean time between stalls of a server, and their duration: a page fault, or a core taken by another process.
const STALL_EVERY: f64 = 10e6;
const STALL: Micros = 30_000;

/// A round of calls to shards.
#[derive(Clone, Copy)]
struct Round {
    /// Kind of call in the router's rules.
    kind: usize,
    /// True if the round calls all shards, false if it calls one.
    all: bool,
    /// Median and 99th percentile of the service time in microseconds.
    service: (f64, f64),
}

/// One query over vectors: candidates are results.
const VECTORS: &[Round] = &[Round { kind: 0, all: true, service: (180.0, 420.0) }];
/// The Debian model: user, candidates, results.
const RERANKED: &[Round] = &[
    Round { kind: 2, all: false, service: (60.0, 150.0) },
    Round { kind: 0, all: true, service: (250.0, 640.0) },
    Round { kind: 1, all: true, service: (460.0, 700.0) },
];

/// The Debian model with shards that rank ahead, with half as many candidates more: the maximum that a shard accepts for it,
/// which 12 shards would need for 1,000 candidates.
const AHEAD: &[Round] = &[
    Round { kind: 2, all: false, service: (60.0, 150.0) },
    Round { kind: 0, all: true, service: (250.0 + 1.5 * 460.0, 640.0 + 1.5 * 700.0) },
];

#[derive(Clone, Copy, PartialEq)]
enum Rules {
    Random,
    /// The better one of two random replicas.
    Choice,
    /// The better one of two, and a hedged call if it is late.
    Hedged,
}

#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    None,
    /// Servers stall now and then.
    Stalls,
    /// In every eighth shard, one replica takes five times as long.
    Slow,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives { call: usize },
    Ends { call: usize },
    Returns { call: usize },
    Late { ask: usize },
    Stalls { server: usize },
}

/// A request's query to one shard.
struct Ask {
    request: usize,
    shard: usize,
    round: usize,
    /// Calls made for it, by replica.
    calls: [Option<usize>; REPLICAS],
    is_answered: bool,
}

struct Call {
    ask: usize,
    server: usize,
    start: Micros,
}

#[derive(Default)]
struct Server {
    waiting: VecDeque<usize>,
    working: usize,
    still_until: Micros,
}

struct Request {
    start: Micros,
    round: usize,
    left: usize,
}

/// Pseudo-random numbers of a fixed sequence.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ bits >> 31) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Standard deviations from the median to the 99th percentile.
const TO_P99: f64 = 2.326;

struct Fleet {
    shards: usize,
    rounds: &'static [Round],
    rules: Rules,
    trouble: Trouble,
    now: Micros,
    events: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    count: u64,
    random: Random,
    groups: Vec<Group<usize>>,
    servers: Vec<Server>,
    requests: Vec<Request>,
    asks: Vec<Ask>,
    calls: Vec<Call>,
    second_calls: usize,
    times: Vec<Micros>,
}

impl Fleet {
    fn new(shards: usize, rounds: &'static [Round], rules: Rules, trouble: Trouble) -> Self {
        let servers = (0..shards * REPLICAS).map(|_| Server::default()).collect();
        Fleet {
            shards,
            rounds,
            rules,
            trouble,
            now: 0,
            events: BinaryHeap::new(),
            count: 0,
            random: Random(shards as u64),
            groups: (0..shards as u64).map(Group::new).collect(),
            servers,
            requests: Vec::new(),
            asks: Vec::new(),
            calls: Vec::new(),
            second_calls: 0,
            times: Vec::new(),
        }
    }

    fn at(&mut self, time: Micros, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    /// Returns the time between requests at which workers have a utilization of [`LOAD`] without faults.
    fn between(&self) -> f64 {
        let mean = |round: &Round| {
            let sigma = (round.service.1 / round.service.0).ln() / TO_P99;
            let shares = if round.all { 1.0 } else { 1.0 / self.shards as f64 };
            round.service.0 * (sigma * sigma / 2.0).exp() * shares
        };
        self.rounds.iter().map(mean).sum::<f64>() / (LOAD * (REPLICAS * WORKERS) as f64)
    }

    fn run(&mut self) {
        let between = self.between();
        if self.trouble == Trouble::Stalls {
            for server in 0..self.servers.len() {
                let time = self.random.exponential(STALL_EVERY) as Micros;
                self.at(time, Event::Stalls { server });
            }
        }
        let mut next = 0.0;
        while self.times.len() < REQUESTS {
            let arrival = next as Micros;
            match self.events.peek() {
                Some(Reverse((time, _, _))) if *time <= arrival => {
                    let Some(Reverse((time, _, event))) = self.events.pop() else { continue };
                    self.now = time;
                    self.happen(event);
                }
                _ => {
                    self.now = arrival;
                    self.requests.push(Request { start: arrival, round: 0, left: 0 });
                    self.ask(self.requests.len() - 1);
                    next += self.random.exponential(between);
                }
            }
        }
    }

    /// Starts a request's next round.
    fn ask(&mut self, request: usize) {
        let round = self.requests[request].round;
        let requested =
            if self.rounds[round].all { 0..self.shards } else { request % self.shards..request % self.shards + 1 };
        self.requests[request].left = requested.len();
        for shard in requested {
            self.asks.push(Ask { request, shard, round, calls: [None; REPLICAS], is_answered: false });
            let ask = self.asks.len() - 1;
            self.call(ask, true);
            let after = self.groups[shard].hedge_after(self.rounds[round].kind);
            if let (Rules::Hedged, Some(after)) = (self.rules, after) {
                self.at(self.now + after, Event::Late { ask });
            }
        }
    }

    fn call(&mut self, ask: usize, is_first: bool) {
        let Ask { shard, calls, .. } = self.asks[ask];
        let untried = (0..REPLICAS).filter(|replica| calls[*replica].is_none());
        let among: Vec<usize> = untried.map(|replica| shard * REPLICAS + replica).collect();
        let server = match self.rules {
            Rules::Random => Some(among[(self.random.unit() * among.len() as f64) as usize]),
            _ => self.groups[shard].choose(&among, self.now),
        };
        let Some(server) = server else { return };
        self.groups[shard].begin(server, is_first, self.now);
        self.calls.push(Call { ask, server, start: self.now });
        self.asks[ask].calls[server % REPLICAS] = Some(self.calls.len() - 1);
        self.at(self.now + NETWORK, Event::Arrives { call: self.calls.len() - 1 });
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrives { call } => {
                let server = self.calls[call].server;
                self.servers[server].waiting.push_back(call);
                self.work(server);
            }
            Event::Ends { call } => {
                let server = self.calls[call].server;
                self.servers[server].working -= 1;
                self.at(self.now + NETWORK, Event::Returns { call });
                self.work(server);
            }
            Event::Returns { call } => self.returned(call),
            Event::Late { ask } if !self.asks[ask].is_answered => {
                if self.groups[self.asks[ask].shard].hedge(self.now) {
                    self.second_calls += 1;
                    self.call(ask, false);
                }
            }
            Event::Late { .. } => {}
            Event::Stalls { server } => {
                self.servers[server].still_until = self.now + STALL;
                let next = self.now + self.random.exponential(STALL_EVERY) as Micros;
                self.at(next, Event::Stalls { server });
            }
        }
    }

    /// Starts queued calls on idle workers. Cancelled calls are dropped, as in a server whose client has disconnected.
    fn work(&mut self, server: usize) {
        while self.servers[server].working < WORKERS {
            let Some(call) = self.servers[server].waiting.pop_front() else { return };
            let ask = &self.asks[self.calls[call].ask];
            if ask.is_answered {
                continue;
            }
            let (median, p99) = self.rounds[ask.round].service;
            let is_slow =
                self.trouble == Trouble::Slow && ask.shard.is_multiple_of(8) && server.is_multiple_of(REPLICAS);
            let sigma = (p99 / median).ln() / TO_P99;
            let took = median * (sigma * self.random.normal()).exp() * if is_slow { 5.0 } else { 1.0 };
            let begins = self.now.max(self.servers[server].still_until);
            self.servers[server].working += 1;
            self.at(begins + took as Micros + 1, Event::Ends { call });
        }
    }

    fn returned(&mut self, call: usize) {
        let Call { ask, server, start } = self.calls[call];
        let Ask { request, shard, round, is_answered, calls, .. } = self.asks[ask];
        if is_answered {
            return;
        }
        let kind = self.rounds[round].kind;
        self.groups[shard].end(server, kind, (Outcome::Answered, self.now - start), self.now);
        // Cancels the other calls for this shard.
        for other in calls.into_iter().flatten().filter(|other| *other != call) {
            let Call { server, start, .. } = self.calls[other];
            self.groups[shard].end(server, kind, (Outcome::Left, self.now - start), self.now);
        }
        self.asks[ask].is_answered = true;
        let requested = &mut self.requests[request];
        requested.left -= 1;
        if requested.left > 0 {
            return;
        }
        requested.round += 1;
        if requested.round < self.rounds.len() {
            self.ask(request);
        } else {
            let took = self.now - requested.start;
            self.times.push(took);
        }
    }
}

fn main() -> Done {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{REPLICAS} replicas a shard, {WORKERS} workers each, {:.0} % busy, {REQUESTS} requests",
        LOAD * 100.0
    )?;
    let all: &[usize] = &[1, 4, 12, 16, 64];
    for (name, rounds, counts) in [
        ("1M x 128 a shard, one round", VECTORS, all),
        ("with a reranker, three rounds", RERANKED, all),
        ("with a reranker that ranks ahead, two rounds", AHEAD, &[4, 12]),
    ] {
        writeln!(out, "\n{name}\n| trouble | shards | rules | p50 us | p99 us | p99.9 us | second calls |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
        for (trouble, what) in [(Trouble::None, "none"), (Trouble::Stalls, "stalls"), (Trouble::Slow, "slow replicas")]
        {
            for &shards in counts {
                for (rules, by) in
                    [(Rules::Random, "random"), (Rules::Choice, "choice"), (Rules::Hedged, "choice, hedged")]
                {
                    let mut fleet = Fleet::new(shards, rounds, rules, trouble);
                    fleet.run();
                    let mut times = fleet.times.split_off(WARM_UP);
                    times.sort_unstable();
                    let at = |quantile: f64| times[(times.len() as f64 * quantile) as usize];
                    let second = 100.0 * fleet.second_calls as f64 / fleet.asks.len() as f64;
                    let (p50, p99, p999) = (at(0.5), at(0.99), at(0.999));
                    writeln!(out, "| {what} | {shards} | {by} | {p50} | {p99} | {p999} | {second:.1} % |")?;
                }
            }
        }
    }
    Ok(())
}
