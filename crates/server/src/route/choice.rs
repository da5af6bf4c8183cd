//! Selection, hedging and ejection of a shard's replicas: a state machine without its own clock or network.
//!
//! *Selection.* Of two random replicas, the one with the lower load gets the call. The load is the number of its calls in
//! progress plus one, times its recent latency relative to the group's usual latency for this kind of call (Mitzenmacher's
//! power of two choices, Finagle's peak EWMA). A new or returning replica gets few concurrent calls until it has answered some,
//! so that unknown replicas do not attract all calls.
//!
//! *Hedged requests.* A call that takes longer than the 95th percentile of its kind in this shard is also sent to another
//! replica, and the first answer counts (Dean and Barroso, The Tail at Scale). At most 5 % of calls are hedged, and none while a
//! replica has recently rejected work: under overload, hedges would double the load.
//!
//! *Ejection.* A replica that fails several times in a row is ejected for a while, longer each time; the last replica is always
//! used.

use std::collections::BTreeMap;

/// Microseconds since an arbitrary origin.
pub type Micros = u64;

/// Number of kinds of calls; each kind has its own usual latency.
pub const KINDS: usize = 4;

/// Maximum share of hedged calls, and the maximum number of hedges at once.
const HEDGE_SHARE: f64 = 0.05;
const HEDGE_BURST: f64 = 10.0;
/// Number of answers to a kind of calls before the latency distribution of that kind is used.
const SAMPLES_MIN: f64 = 50.0;
/// Number of answers after which a replica's latency counts as known, and its maximum number of concurrent calls until then.
const KNOWN_AFTER: u32 = 20;
const UNKNOWN_CALLS: u32 = 2;
/// Failures in a row before a replica is ejected; duration of the first and of the longest ejection, in microseconds.
const FAILURES_MAX: u32 = 3;
const EJECTED: Micros = 500_000;
const EJECTED_MAX: Micros = 30_000_000;
/// Time without hedges after a rejection, and time for which the rejecting replica is avoided, in microseconds.
const OVERLOADED: Micros = 1_000_000;
const REFUSED: Micros = 100_000;
/// A call that takes this many times the 95th percentile of its kind counts as failed; without known latencies, one that takes
/// this many microseconds.
const LATE: Micros = 4;
const LATE_UNKNOWN: Micros = 300_000;
/// A replica is reported as slow after this many answers in a row that took this many times the usual latency. The report ends
/// with a faster answer or after this many microseconds, since a slow replica gets few calls.
const SLOW_ANSWERS: u32 = 3;
const SLOW: f64 = 8.0;
const SLOW_REPORT_TIME: Micros = 300_000_000;
/// Weight of one answer in a replica's relative latency, and the half-life of that value in microseconds.
const WEIGHT: f64 = 0.1;
const HALF_LIFE: f64 = 5_000_000.0;

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The replica answered, possibly with an error about the request.
    Answered,
    /// The replica rejected the call because of overload.
    Refused,
    /// No answer: the connection failed or broke.
    Failed,
    /// No answer before the deadline, which the caller chose. A late call counts as a failure only if other replicas would have
    /// answered long before.
    Late,
    /// The caller cancelled the call.
    Left,
}

/// Latencies of one kind of calls: a decaying histogram with eight buckets per doubling.
#[derive(Clone, Debug)]
struct Times {
    buckets: Vec<f64>,
    total: f64,
    mean: f64,
}

impl Times {
    const STEPS: f64 = 8.0;
    const BUCKETS: usize = 240;
    /// Number of samples after which all counts are halved.
    const WINDOW: f64 = 2048.0;

    fn new() -> Self {
        Times { buckets: vec![0.0; Times::BUCKETS], total: 0.0, mean: 0.0 }
    }

    fn add(&mut self, took: Micros) {
        let took = took.max(1) as f64;
        let bucket = (took.log2() * Times::STEPS) as usize;
        self.buckets[bucket.min(Times::BUCKETS - 1)] += 1.0;
        self.total += 1.0;
        self.mean += (took - self.mean) / self.total.min(100.0);
        if self.total >= Times::WINDOW {
            self.buckets.iter_mut().for_each(|count| *count /= 2.0);
            self.total /= 2.0;
        }
    }

    /// Returns the 95th percentile, if enough samples exist.
    fn most(&self) -> Option<Micros> {
        if self.total < SAMPLES_MIN {
            return None;
        }
        let mut above = self.total * 0.05;
        for (bucket, count) in self.buckets.iter().enumerate().rev() {
            above -= count;
            if above < 0.0 {
                return Some(((bucket + 1) as f64 / Times::STEPS).exp2() as Micros);
            }
        }
        None
    }
}

#[derive(Clone, Debug)]
struct Member {
    /// Number of calls in progress.
    calls: u32,
    /// Recent latency relative to the usual latency; 1 is usual.
    slowness: f64,
    /// Time of the last change of `slowness`.
    at: Micros,
    /// Number of much slower answers in a row, and the time and relative latency of the last answer.
    slow: (u32, Micros, f64),
    /// Answers since the replica appeared or returned.
    answers: u32,
    /// Failures in a row.
    failures: u32,
    /// Number of ejections since the replica last counted as known.
    ejections: u32,
    ejected_until: Micros,
    refused_at: Option<Micros>,
}

impl Member {
    fn new(now: Micros) -> Self {
        let (slowness, refused_at) = (1.0, None);
        Member {
            calls: 0,
            slowness,
            at: now,
            slow: (0, now, 1.0),
            answers: 0,
            failures: 0,
            ejections: 0,
            ejected_until: 0,
            refused_at,
        }
    }

    /// Returns the relative latency now: old observations decay towards 1.
    fn slowness(&self, now: Micros) -> f64 {
        let retained = (-(now.saturating_sub(self.at) as f64) / HALF_LIFE).exp2();
        1.0 + (self.slowness - 1.0) * retained
    }

    fn load(&self, now: Micros) -> f64 {
        f64::from(self.calls + 1) * self.slowness(now)
    }

    fn saw(&mut self, slowness: f64, now: Micros) {
        self.slowness = self.slowness(now) + (slowness - self.slowness(now)) * WEIGHT;
        self.at = now;
    }

    /// Records the relative latency of an answer, or a lower bound of that latency.
    fn took(&mut self, times: f64, now: Micros) {
        let answers = if times >= SLOW { self.slow.0.saturating_add(1) } else { 0 };
        self.slow = (answers, now, times);
    }

    /// Returns 0 for a usable replica, 1 for one that is busy or on probation, and 2 for an ejected one.
    fn rank(&self, now: Micros) -> u8 {
        let most = if self.ejections > 0 && self.answers == 0 { 1 } else { UNKNOWN_CALLS };
        match () {
            () if now < self.ejected_until => 2,
            () if self.answers < KNOWN_AFTER && self.calls >= most => 1,
            () if self.refused_at.is_some_and(|at| now < at + REFUSED) => 1,
            () => 0,
        }
    }

    fn failed(&mut self, now: Micros) {
        self.failures += 1;
        // A returning replica that fails at once has not recovered.
        if self.failures >= FAILURES_MAX || self.ejections > 0 && self.answers == 0 {
            let wait = EJECTED.saturating_mul(1 << self.ejections.min(16)).min(EJECTED_MAX);
            self.ejections += 1;
            self.ejected_until = now + wait;
            (self.failures, self.answers) = (0, 0);
        }
    }

    fn answered(&mut self) {
        self.failures = 0;
        self.answers = self.answers.saturating_add(1);
        if self.answers == KNOWN_AFTER {
            self.ejections = 0;
        }
    }
}

/// Replicas of one shard.
#[derive(Clone, Debug)]
pub struct Group<I> {
    members: BTreeMap<I, Member>,
    times: Vec<Times>,
    /// Available hedges.
    budget: f64,
    refused_at: Option<Micros>,
    random: u64,
}

impl<I: Ord + Copy> Group<I> {
    /// Creates an empty group. `seed` may be any number.
    pub fn new(seed: u64) -> Self {
        let times = vec![Times::new(); KINDS];
        Group { members: BTreeMap::new(), times, budget: 1.0, refused_at: None, random: seed | 1 }
    }

    /// Removes replicas that the last poll did not find, except those with calls in progress.
    pub fn keep(&mut self, is_there: impl Fn(&I) -> bool) {
        self.members.retain(|id, member| member.calls > 0 || is_there(id));
    }

    /// Selects one of the given replicas; `None` if there is none.
    pub fn choose(&mut self, among: &[I], now: Micros) -> Option<I> {
        let ranks: Vec<u8> = among.iter().map(|id| self.member(*id, now).rank(now)).collect();
        let best = ranks.iter().copied().min()?;
        let may: Vec<I> = among.iter().zip(ranks).filter(|(_, rank)| *rank == best).map(|(id, _)| *id).collect();
        let first = self.draw(may.len());
        let second = (first + 1 + self.draw(may.len().max(2) - 1)) % may.len();
        let load = |group: &Self, n: usize| group.members.get(&may[n]).map_or(0.0, |member| member.load(now));
        Some(may[if load(self, second) < load(self, first) { second } else { first }])
    }

    /// Records the start of a call; `first` is false for hedges and retries.
    pub fn begin(&mut self, id: I, first: bool, now: Micros) {
        self.member(id, now).calls += 1;
        if first {
            self.budget = (self.budget + HEDGE_SHARE).min(HEDGE_BURST);
        }
    }

    /// Records the outcome of a call that started `took` microseconds ago.
    pub fn end(&mut self, id: I, kind: usize, (outcome, took): (Outcome, Micros), now: Micros) {
        let mean = self.times[kind].mean;
        let slowness = if mean > 0.0 { (took as f64 / mean).min(1000.0) } else { 1.0 };
        let is_long = took >= self.hedge_after(kind).map_or(LATE_UNKNOWN, |most| most.saturating_mul(LATE));
        let member = self.member(id, now);
        member.calls = member.calls.saturating_sub(1);
        match outcome {
            Outcome::Answered => {
                member.answered();
                member.saw(slowness, now);
                member.took(slowness, now);
                self.times[kind].add(took);
            }
            Outcome::Failed => member.failed(now),
            Outcome::Late if is_long => member.failed(now),
            // A late or cancelled call would have taken longer than `took`.
            Outcome::Late | Outcome::Left => {
                if slowness > member.slowness(now) {
                    member.saw(slowness, now);
                }
                if slowness >= SLOW {
                    member.took(slowness, now);
                }
            }
            Outcome::Refused => {
                member.refused_at = Some(now);
                self.refused_at = Some(now);
            }
        }
    }

    /// Returns the 95th percentile of a kind's latency, if it is known: the delay before hedging.
    pub fn hedge_after(&self, kind: usize) -> Option<Micros> {
        self.times[kind].most()
    }

    /// Returns whether no replica rejected work recently, so that additional calls do no harm.
    pub fn has_room(&self, now: Micros) -> bool {
        self.refused_at.is_none_or(|at| now.saturating_sub(at) > OVERLOADED)
    }

    /// Lists replicas that are far slower than usual, with the relative latency of the last answer.
    pub fn slow(&self, now: Micros) -> Vec<(I, f64)> {
        let is_slow = |(answers, at, _): (u32, Micros, f64)| {
            answers >= SLOW_ANSWERS && now.saturating_sub(at) <= SLOW_REPORT_TIME
        };
        let slow = self.members.iter().filter(|(_, member)| is_slow(member.slow));
        slow.map(|(id, member)| (*id, member.slow.2)).collect()
    }

    /// Takes one hedge from the budget, if one is available and no replica is overloaded.
    pub fn hedge(&mut self, now: Micros) -> bool {
        self.has_room(now) && self.spend()
    }

    /// Takes one hedge from the budget, for the retry of a call that was rejected at once and cost little.
    pub fn spend(&mut self) -> bool {
        let may = self.budget >= 1.0;
        if may {
            self.budget -= 1.0;
        }
        may
    }

    fn member(&mut self, id: I, now: Micros) -> &mut Member {
        self.members.entry(id).or_insert_with(|| Member::new(now))
    }

    /// Returns a random number below `count` (xorshift).
    fn draw(&mut self, count: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * count as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Micros = 1_000_000;

    /// Creates a group whose replicas are known and answer within 1 ms.
    fn known(ids: &[u32]) -> Group<u32> {
        let mut group = Group::new(7);
        for _ in 0..100 {
            for &id in ids {
                group.begin(id, true, 0);
                group.end(id, 0, (Outcome::Answered, 1000), 0);
            }
        }
        group
    }

    fn shares(group: &mut Group<u32>, among: &[u32], now: Micros) -> Vec<usize> {
        let mut counts = vec![0; among.len()];
        for _ in 0..1000 {
            let chosen = group.choose(among, now).unwrap();
            counts[among.iter().position(|id| *id == chosen).unwrap()] += 1;
        }
        counts
    }

    #[derive(Clone, Debug)]
    enum Step {
        Ask { kind: usize, among: u8 },
        End { which: usize, outcome: Outcome },
        Hedge { which: usize },
        Wait(Micros),
        Keep(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let outcome = prop_oneof![
            6 => Just(Outcome::Answered),
            1 => Just(Outcome::Refused),
            3 => Just(Outcome::Failed),
            2 => Just(Outcome::Late),
            1 => Just(Outcome::Left),
        ];
        prop_oneof![
            4 => (0..KINDS, 0u8..32).prop_map(|(kind, among)| Step::Ask { kind, among }),
            4 => (any::<usize>(), outcome).prop_map(|(which, outcome)| Step::End { which, outcome }),
            2 => any::<usize>().prop_map(|which| Step::Hedge { which }),
            2 => (0..2 * SECOND).prop_map(Step::Wait),
            1 => (0u8..32).prop_map(Step::Keep),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn a_server_is_always_chosen_by_the_rules(steps in prop::collection::vec(step(), 0..300)) {
            let mut group = Group::new(3);
            // Calls in flight: replica, kind, start.
            let mut open: Vec<(u32, usize, Micros)> = Vec::new();
            let (mut now, mut calls, mut hedges, mut refused) = (0, 0u32, 0u32, None);
            for step in steps {
                match step {
                    Step::Ask { kind, among } => {
                        let among: Vec<u32> = (0..5).filter(|n| among & (1 << n) != 0).collect();
                        let Some(id) = group.choose(&among, now) else {
                            prop_assert!(among.is_empty(), "no server is chosen though one is available");
                            continue;
                        };
                        prop_assert!(among.contains(&id));
                        // Ejected or busy replicas are selected only if all are.
                        let rank = |id: &u32| group.members[id].rank(now);
                        prop_assert_eq!(rank(&id), among.iter().map(rank).min().unwrap());
                        group.begin(id, true, now);
                        open.push((id, kind, now));
                        calls += 1;
                    }
                    Step::End { which, outcome } if !open.is_empty() => {
                        let (id, kind, since) = open.swap_remove(which % open.len());
                        group.end(id, kind, (outcome, now - since), now);
                        if outcome == Outcome::Refused {
                            refused = Some(now);
                        }
                    }
                    Step::Hedge { which } if !open.is_empty() => {
                        let (id, kind, _) = open[which % open.len()];
                        if group.hedge(now) {
                            prop_assert!(refused.is_none_or(|at| now - at > OVERLOADED), "under overload nothing is hedged");
                            let others: Vec<u32> = (0..5).filter(|other| *other != id).collect();
                            let other = group.choose(&others, now).unwrap();
                            group.begin(other, false, now);
                            open.push((other, kind, now));
                            hedges += 1;
                        }
                    }
                    Step::Wait(time) => now += time,
                    Step::Keep(those) => group.keep(|id| those & (1 << id) != 0),
                    _ => {}
                }
                prop_assert!(f64::from(hedges) <= f64::from(calls) * HEDGE_SHARE + 1.0);
                let counted: u32 = group.members.values().map(|member| member.calls).sum();
                prop_assert_eq!(counted as usize, open.len());
                for member in group.members.values() {
                    prop_assert!(member.ejected_until <= now + EJECTED_MAX && member.load(now).is_finite());
                    prop_assert!(member.failures < FAILURES_MAX);
                }
            }
        }
    }

    #[test]
    fn calls_go_where_the_load_is_low() {
        let mut group = known(&[1, 2, 3]);
        let even = shares(&mut group, &[1, 2, 3], 0);
        assert!(even.iter().all(|count| (230..440).contains(count)), "{even:?}");
        // A busier or slower replica is selected only if the other one of the pair is worse.
        (0..5).for_each(|_| group.begin(1, true, 0));
        assert_eq!(shares(&mut group, &[1, 2, 3], 0)[0], 0);
        let mut group = known(&[1, 2, 3]);
        (0..50).for_each(|_| {
            group.begin(2, true, 0);
            group.end(2, 0, (Outcome::Answered, 5000), 0);
        });
        assert_eq!(shares(&mut group, &[1, 2, 3], 0)[1], 0);
        // Old observations decay, since a slow replica may have recovered.
        assert!(group.members[&2].slowness(0) > 1.5 && group.members[&2].slowness(60 * SECOND) < 1.01);
        assert_eq!(group.choose(&[2], 0), Some(2), "one that is slow is better than none");
        assert_eq!(group.choose(&[], 0), None);
    }

    #[test]
    fn a_much_slower_replica_is_reported_for_a_while() {
        let mut group = known(&[1, 2]);
        assert_eq!(group.slow(0), []);
        let answer = |group: &mut Group<u32>, took| {
            group.begin(2, true, SECOND);
            group.end(2, 0, (Outcome::Answered, took), SECOND);
        };
        answer(&mut group, 40_000);
        answer(&mut group, 40_000);
        assert_eq!(group.slow(SECOND), [], "two late answers are chance");
        answer(&mut group, 40_000);
        let slow = group.slow(2 * SECOND);
        assert!(slow.len() == 1 && slow[0].0 == 2 && slow[0].1 >= SLOW, "{slow:?}");
        assert_eq!(group.slow(SECOND + SLOW_REPORT_TIME).len(), 1);
        assert_eq!(group.slow(2 * SECOND + SLOW_REPORT_TIME), []);
        answer(&mut group, 1000);
        assert_eq!(group.slow(SECOND), []);
    }

    #[test]
    fn failing_servers_back_off_and_are_probed_by_one_call() {
        let mut group = known(&[1, 2]);
        let fail = |group: &mut Group<u32>, now| {
            group.begin(1, true, now);
            group.end(1, 0, (Outcome::Failed, 10), now);
        };
        (0..FAILURES_MAX - 1).for_each(|_| fail(&mut group, 0));
        // An answer between failures resets their count.
        group.begin(1, true, 0);
        group.end(1, 0, (Outcome::Answered, 1000), 0);
        (0..FAILURES_MAX - 1).for_each(|_| fail(&mut group, 0));
        assert!(shares(&mut group, &[1, 2], 0)[0] > 0);
        fail(&mut group, 0);
        assert_eq!(shares(&mut group, &[1, 2], EJECTED - 1)[0], 0);
        assert_eq!(group.choose(&[1], 0), Some(1), "the last one is always queried");
        // After its ejection, a replica gets one call as a probe.
        let now = EJECTED;
        assert!(shares(&mut group, &[1, 2], now)[0] > 0);
        group.begin(1, true, now);
        assert_eq!(shares(&mut group, &[1, 2], now)[0], 0);
        group.end(1, 0, (Outcome::Failed, 10), now);
        assert_eq!(shares(&mut group, &[1, 2], now + 2 * EJECTED - 1)[0], 0);
        // Answers restore the replica's state completely.
        let now = now + 2 * EJECTED;
        for _ in 0..KNOWN_AFTER {
            group.begin(1, true, now);
            group.end(1, 0, (Outcome::Answered, 1000), now);
        }
        assert_eq!((group.members[&1].ejections, group.members[&1].rank(now)), (0, 0));
    }

    #[test]
    fn short_deadlines_do_not_exclude_servers() {
        let mut group = known(&[1, 2]);
        let late = |group: &mut Group<u32>, took| {
            for _ in 0..FAILURES_MAX {
                group.begin(1, true, 0);
                group.end(1, 0, (Outcome::Late, took), 0);
            }
            group.members[&1].ejections
        };
        assert_eq!((late(&mut group, 900), late(&mut group, 3000), late(&mut group, 100_000)), (0, 0, 1));
        // A rejecting replica is avoided for a while, but does not count as failed.
        let mut group = known(&[1, 2]);
        group.begin(1, true, 0);
        group.end(1, 0, (Outcome::Refused, 10), 0);
        assert_eq!(shares(&mut group, &[1, 2], REFUSED - 1)[0], 0);
        assert!(shares(&mut group, &[1, 2], REFUSED)[0] > 300);
    }

    #[test]
    fn a_new_replica_gets_few_calls_until_it_has_answered_some() {
        let mut group = known(&[1, 2]);
        for _ in 0..UNKNOWN_CALLS {
            group.begin(3, true, 0);
        }
        assert_eq!(shares(&mut group, &[1, 2, 3], 0)[2], 0);
        for _ in 0..KNOWN_AFTER {
            group.end(3, 0, (Outcome::Answered, 1000), 0);
            group.begin(3, true, 0);
        }
        assert_eq!(group.members[&3].rank(0), 0);
        // If all are new, all get calls.
        let mut fresh = Group::new(1);
        let mut seen = BTreeSet::new();
        for _ in 0..30 {
            let id = fresh.choose(&[1, 2, 3], 0).unwrap();
            fresh.begin(id, true, 0);
            seen.insert(id);
        }
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn slow_calls_are_hedged_up_to_a_twentieth() {
        let mut group: Group<u32> = Group::new(1);
        assert_eq!(group.hedge_after(0), None, "nothing is known yet");
        for n in 0..1000 {
            group.begin(1, true, 0);
            group.end(1, 0, (Outcome::Answered, if n % 50 == 0 { 80_000 } else { 900 + n % 200 }), 0);
            group.begin(1, true, 0);
            group.end(1, 1, (Outcome::Answered, 20_000), 0);
        }
        let (after, other) = (group.hedge_after(0).unwrap(), group.hedge_after(1).unwrap());
        assert!((1000..1300).contains(&after) && (20_000..22_000).contains(&other), "{after} {other}");
        assert_eq!(group.hedge_after(2), None);
        let mut hedges = 0;
        while group.hedge(0) {
            hedges += 1;
        }
        assert_eq!(hedges, HEDGE_BURST as u32);
        for _ in 0..400 {
            group.begin(1, true, 0);
            hedges += u32::from(group.hedge(0));
        }
        assert!((29..=30).contains(&hedges), "{hedges}");
        // After a rejection no call is hedged for a while, regardless of the budget.
        (0..100).for_each(|_| group.begin(1, true, 0));
        group.end(1, 0, (Outcome::Refused, 10), SECOND);
        assert!(!group.hedge(SECOND) && !group.hedge(2 * SECOND) && group.hedge(2 * SECOND + 1));
    }

    /// Simulates replicas with one worker each at a load of 60 %, in steps of 100 µs, and returns the latencies.
    fn simulate(slow: Micros, choose: impl Fn(&mut Group<usize>, Micros, u64) -> usize) -> Micros {
        let (mut group, mut free, mut took) = (Group::new(11), [0u64; 3], Vec::new());
        let mut open: Vec<(Micros, usize, Micros)> = Vec::new();
        let mut random = 5u64;
        for n in 0..30_000u64 {
            // A call takes 1 ms, or more at the slow replica; arrivals are random.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let now = n * 555 + (random >> 33) % 400;
            open.sort_unstable();
            while let Some(&(end, id, since)) = open.first().filter(|(end, ..)| *end <= now) {
                open.remove(0);
                group.end(id, 0, (Outcome::Answered, end - since), end);
            }
            let id = choose(&mut group, now, random);
            let end = free[id].max(now) + if id == 0 { 1000 * slow } else { 1000 };
            free[id] = end;
            group.begin(id, true, now);
            open.push((end, id, now));
            took.push(end - now);
        }
        took.sort_unstable();
        took[took.len() * 99 / 100]
    }

    #[test]
    fn a_slow_replica_costs_little() {
        let by_choice = |group: &mut Group<usize>, now, _| group.choose(&[0, 1, 2], now).unwrap();
        let at_random = |_: &mut Group<usize>, _, random: u64| (random >> 40) as usize % 3;
        let (even, uneven) = (simulate(1, by_choice), simulate(3, by_choice));
        assert!(even < 6000 && uneven < 12_000, "{even} {uneven}");
        assert!(simulate(3, at_random) > 100_000, "a third of the calls is more than it can do");
    }

    #[test]
    fn calls_that_stall_are_answered_by_another() {
        // A call takes 1 ms and every fiftieth takes 100 ms, at any replica.
        let run = |hedges: bool| {
            let (mut group, mut random, mut took, mut second) = (Group::new(13), 9u64, Vec::new(), 0u32);
            let mut call = || {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let noise = (random >> 40) % 200;
                if (random >> 33) % 50 == 0 { 100_000 } else { 900 + noise }
            };
            for n in 0..20_000u64 {
                let now = n * 2000;
                let id = group.choose(&[1, 2], now).unwrap();
                group.begin(id, true, now);
                let (first, after) = (call(), group.hedge_after(0).unwrap_or(Micros::MAX));
                if hedges && first > after && group.hedge(now + after) {
                    second += 1;
                    let other = group.choose(&[3 - id], now + after).unwrap();
                    group.begin(other, false, now + after);
                    let answered = first.min(after + call());
                    let by_first = answered == first;
                    let outcome = |answered| if answered { Outcome::Answered } else { Outcome::Left };
                    group.end(id, 0, (outcome(by_first), answered), now + answered);
                    group.end(other, 0, (outcome(!by_first), answered - after), now + answered);
                    took.push(answered);
                } else {
                    group.end(id, 0, (Outcome::Answered, first), now + first);
                    took.push(first);
                }
            }
            took.sort_unstable();
            (took[took.len() * 99 / 100], second)
        };
        let ((alone, _), (hedged, second)) = (run(false), run(true));
        assert!(alone >= 100_000 && hedged < 5000, "{alone} {hedged}");
        assert!((200..=1000).contains(&second), "a twentieth of the calls at most: {second}");
    }
}
