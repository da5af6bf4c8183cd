//! Fair queueing compared with a list that is searched from its beginning each time.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

impl<J> Fair<J> {
    /// Asserts that counts, sums and service order match the queued requests.
    pub(in crate::engine) fn check(&self) {
        let lanes = || self.callers.values().flat_map(|caller| KINDS.into_iter().zip(&caller.lanes));
        for kind in KINDS {
            let count: usize = lanes().filter(|(of, _)| *of == kind).map(|(_, lane)| lane.entries.len()).sum();
            assert_eq!(self.len_of(kind), count);
        }
        for (_, lane) in lanes() {
            assert_eq!(
                lane.cost_estimate,
                lane.entries.values().map(|entry| entry.ask.cost_estimate).sum::<Duration>()
            );
        }
        let places = self.callers.iter().filter_map(|(flow, caller)| caller.place(*flow));
        assert_eq!(self.order, places.collect::<BTreeSet<_>>());
        assert!(self.callers.len() <= CALLERS_MAX + self.order.len());
    }
}

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

fn entry(id: u64, flow: u64, cost_estimate: Duration, now: Instant) -> Entry<()> {
    let ask = QueuedRequest { flow: Flow(flow), ..QueuedRequest::plain(cost_estimate, now, Duration::from_secs(3600)) };
    Entry { job: (), ask, id, latest_start: ask.deadline, ready: now }
}

/// Takes the next request of any kind and charges for it.
fn next(fair: &mut Fair<()>, now: Instant) -> Option<Entry<()>> {
    let (kind, _) = fair.next(&KINDS, |_| true)?;
    let entry = fair.take(kind, |_| true, now).unwrap();
    fair.charge(entry.ask.flow, entry.ask.cost_estimate);
    Some(entry)
}

/// The same queue as a plain list.
#[derive(Default)]
struct Naive {
    clock: Duration,
    due: BTreeMap<u64, Duration>,
    /// Caller, number and cost estimate.
    waiting: Vec<(u64, u64, Duration)>,
}

impl Naive {
    fn insert(&mut self, flow: u64, id: u64, cost_estimate: Duration) {
        let due = self.due.get(&flow).copied().unwrap_or_default();
        if self.waiting.iter().all(|(of, ..)| *of != flow) {
            self.due.insert(flow, due.max(self.clock));
        }
        self.waiting.push((flow, id, cost_estimate));
    }

    fn next(&mut self) -> Option<u64> {
        let firsts = self.waiting.iter().map(|(flow, ..)| {
            let id = self.waiting.iter().filter(|(of, ..)| of == flow).map(|(_, id, _)| *id).min().unwrap();
            (self.due[flow], id)
        });
        let (due, id) = firsts.min()?;
        let at = self.waiting.iter().position(|(_, of, _)| *of == id).unwrap();
        let (flow, _, cost_estimate) = self.waiting.remove(at);
        let callers: BTreeSet<u64> = self.waiting.iter().map(|(flow, ..)| *flow).collect();
        *self.due.get_mut(&flow).unwrap() += cost_estimate;
        self.clock = due.max(self.clock + cost_estimate / callers.len().max(1) as u32);
        Some(id)
    }
}

proptest! {
    #[test]
    fn the_next_request_is_that_of_a_plain_list(
        steps in prop::collection::vec((0u64..5, 1u64..5000, 0u8..10), 1..200),
    ) {
        let now = Instant::now();
        let (mut fair, mut naive) = (Fair::default(), Naive::default());
        for (id, (flow, cost_estimate, what)) in (0..).zip(steps) {
            match what {
                0..6 => {
                    fair.insert(Kind::Direct, entry(id, flow, us(cost_estimate), now));
                    naive.insert(flow, id, us(cost_estimate));
                }
                6 => {
                    let gone = cost_estimate % (id + 1);
                    let at = naive.waiting.iter().position(|(_, of, _)| *of == gone);
                    let removed = at.map(|at| naive.waiting.remove(at));
                    let of = removed.map_or(flow, |(flow, ..)| flow);
                    prop_assert_eq!(fair.remove(Flow(of), gone).map(|entry| entry.id), removed.map(|(_, id, _)| id));
                }
                _ => prop_assert_eq!(next(&mut fair, now).map(|entry| entry.id), naive.next()),
            }
            fair.check();
            prop_assert_eq!(fair.len(), naive.waiting.len());
        }
    }

    #[test]
    fn busy_callers_have_equal_shares(
        prices in prop::collection::vec(1u64..20_000, 2..6), rounds in 50usize..300,
    ) {
        let now = Instant::now();
        let mut fair = Fair::default();
        let mut id = 0;
        let mut ask = |fair: &mut Fair<()>, flow: usize, count: usize| {
            for _ in 0..count {
                fair.insert(Kind::Direct, entry(id, flow as u64, us(prices[flow]), now));
                id += 1;
            }
        };
        // The first caller has a hundred times as many queued requests as the others.
        (0..prices.len()).for_each(|flow| ask(&mut fair, flow, if flow == 0 { 200 } else { 2 }));
        let mut had = vec![0u64; prices.len()];
        for _ in 0..rounds {
            let flow = next(&mut fair, now).unwrap().ask.flow.0 as usize;
            had[flow] += prices[flow];
            ask(&mut fair, flow, 1);
        }
        let (most, least) = (had.iter().max().unwrap(), had.iter().min().unwrap());
        let most_expensive = prices.iter().max().unwrap();
        prop_assert!(most - least <= 2 * most_expensive, "{had:?} for {prices:?}");
    }

    #[test]
    fn queued_work_ahead_of_a_request_is_known_at_arrival(
        callers in prop::collection::vec((1u64..20_000, 0usize..40), 1..6), taken in 0usize..30, own in 0usize..3,
    ) {
        let now = Instant::now();
        let mut fair = Fair::default();
        let mut id = 0;
        for (flow, &(cost_estimate, count)) in callers.iter().enumerate() {
            for _ in 0..count {
                fair.insert(Kind::Direct, entry(id, flow as u64, us(cost_estimate), now));
                id += 1;
            }
        }
        for _ in 0..taken {
            next(&mut fair, now);
        }
        let flow = 99;
        for _ in 0..own {
            fair.insert(Kind::Direct, entry(id, flow, us(100), now));
            id += 1;
        }
        let of = if own > 0 { Some(Flow(flow)) } else { None };
        let ahead = fair.ahead(of, now).cheap;
        fair.insert(Kind::Direct, entry(id, flow, us(100), now));
        let mut before = Duration::ZERO;
        loop {
            let entry = next(&mut fair, now).unwrap();
            if entry.id == id {
                break;
            }
            before += entry.ask.cost_estimate;
        }
        prop_assert!(before <= ahead, "{before:?} came before it, {ahead:?} were predicted");
        let most_expensive = callers.iter().map(|(cost_estimate, _)| us(*cost_estimate)).sum::<Duration>() * (1 + own as u32);
        prop_assert!(ahead <= before + most_expensive * 2, "{ahead:?} were predicted before it, {before:?} came");
    }
}

#[test]
fn one_time_callers_neither_accumulate_nor_delay_others() {
    let now = Instant::now();
    let mut fair = Fair::default();
    let mut steady = 0;
    for id in 0..100_000u64 {
        // Two requests arrive per request taken, one of them always of the same caller, until a thousand wait.
        if fair.len() < 1000 {
            fair.insert(Kind::Direct, entry(2 * id, 1000 + id, us(100), now));
            fair.insert(Kind::Direct, entry(2 * id + 1, 1, us(100), now));
        }
        steady += u32::from(next(&mut fair, now).unwrap().ask.flow == Flow(1));
    }
    fair.check();
    assert!(steady > 1000, "{steady}");
    assert!(fair.callers.len() <= CALLERS_MAX + 1000, "{}", fair.callers.len());
}

#[test]
fn blocked_callers_neither_stop_the_clock_nor_accumulate() {
    let (now, ms) = (Instant::now(), |ms: u64| us(1000 * ms));
    let mut fair = Fair::default();
    // A request that no worker may take waits while another caller is served for ten seconds.
    fair.insert(Kind::Dear, entry(0, 9, ms(900), now));
    let taken = |fair: &mut Fair<()>| {
        let taken = fair.take(Kind::Direct, |ask| ask.flow != Flow(9), now).unwrap();
        fair.charge(taken.ask.flow, taken.ask.cost_estimate);
        taken.ask.flow.0
    };
    let mut id = 1;
    let mut ask = |fair: &mut Fair<()>, flow: u64| {
        id += 1;
        fair.insert(Kind::Direct, entry(id, flow, ms(2), now));
    };
    for _ in 0..5000 {
        ask(&mut fair, 1);
        assert_eq!(taken(&mut fair), 1);
    }
    // Then it shares with a caller that was idle, and with callers that come once.
    let mut served = BTreeMap::<u64, usize>::new();
    for n in 0..3000 {
        [1, 2, 1000 + n].into_iter().for_each(|flow| ask(&mut fair, flow));
        *served.entry(taken(&mut fair).min(1000)).or_default() += 1;
    }
    assert!(served.len() == 3 && served[&1].abs_diff(served[&2]) <= 2 && served[&1] > 10, "{served:?}");
    // The blocked one precedes others by the bound, not by all that was served meanwhile.
    let ahead = fair.ahead(Some(Flow(77)), now).expensive;
    assert_eq!(ahead, ms(900));
    assert_eq!(fair.next(&[Kind::Dear], |_| true).unwrap().1.ask.flow, Flow(9));
    let dear = fair.take(Kind::Dear, |_| true, now).unwrap();
    fair.charge(dear.ask.flow, dear.ask.cost_estimate);
    assert!(
        fair.callers[&Flow(9)].due + CREDIT_MAX >= fair.clock + ms(450),
        "{:?}, {:?}",
        fair.callers[&Flow(9)].due,
        fair.clock
    );
}

#[test]
fn a_caller_with_a_backlog_is_served_newest_first_and_others_are_not_delayed() {
    let now = Instant::now();
    let mut fair = Fair::default();
    for id in 0..3 {
        fair.insert(Kind::Direct, entry(id, 1, us(100), now));
    }
    let later = now + Duration::from_secs(3000);
    for id in 3..6 {
        fair.insert(Kind::Direct, entry(id, 2, us(100), later));
    }
    let order: Vec<u64> = std::iter::from_fn(|| next(&mut fair, later)).map(|entry| entry.id).collect();
    assert_eq!(order, [2, 3, 1, 4, 0, 5]);
}
