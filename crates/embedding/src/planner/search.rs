//! Selects a candidate per table and a site per unit, so that the slowest device is as fast as possible and
//! no device exceeds its capacity.
//!
//! 1. Greedy, several times: tables in order of bytes or of time, each placed where it adds least to the sum over devices of
//!    load^8 (a smooth approximation of the largest load), plus a memory price that differs per start. A table that does not fit
//!    moves another table elsewhere.
//! 2. Sweeps over the best starts: each table is removed and reinserted where it costs least, until nothing moves.
//! 3. Ruin and recreate on the best solution: a few tables, half of the time from the slowest device, are removed and reinserted
//!    in another order, sometimes with another price, and every other time with some candidates skipped at random (*blinks* in
//!    J. Christiaens and G. Vanden Berghe, 2020), which reaches solutions that pure greedy insertion does not. Results that are
//!    not worse are accepted. With several hosts, the best plan of replicas per host is an input, so that no host is slower than
//!    it would be alone.
//! 4. A last sweep lowers the time of tables that do not use the slowest device.
//!
//! The effort is counted in evaluated per-device costs instead of seconds, and the random numbers have a fixed seed, so plans
//! are reproducible.

use super::cost::{Charge, Device, LATENCIES, Machine};
use super::enumerate::Candidate;

/// Memory prices of the greedy starts: cost of filling a device, in multiples of the slowest device's load.
const PRICES: [f64; 6] = [0.0, 0.01, 0.1, 1.0, 10.0, 1e6];
/// Number of load scales that the greedy starts try until the tables fit; each scale is `SCALE_STEP` times the last.
const SCALES: usize = 4;
const SCALE_STEP: f64 = 8.0;
/// Number of greedy starts that the later steps improve.
const STARTS_KEPT: usize = 3;
/// Maximum number of sweeps over one start.
const SWEEPS_MAX: usize = 20;
/// On average, one candidate in this many is skipped at random when tables are reinserted with blinks.
const BLINKS: usize = 4;
/// Weight of the sum of loads relative to the sum of their eighth powers; decides between moves that change no large load.
const SUM_WEIGHT: f64 = 1e-3;
/// Relative differences of times below this are rounding errors.
const TIE: f64 = 1e-9;

/// Choice for one table: the index of its candidate, and per unit of shards the index of its site (`enumerate`).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub candidate: usize,
    pub sites: Vec<usize>,
}

#[derive(Debug)]
pub(super) enum Outcome {
    /// One choice per table.
    Found(Vec<Choice>),
    /// No start placed all tables: the table that did not fit in the start that placed most tables, and the number of
    /// placed tables.
    Stuck {
        table: usize,
        placed: usize,
        /// Bytes left on each device.
        free_bytes: Vec<u64>,
    },
}

/// Searches until about `work` per-device costs have been evaluated. The result is at least as good as `known`, if present.
pub(super) fn search(machine: &Machine, tables: &[Vec<Candidate>], work: u64, known: Option<Vec<Choice>>) -> Outcome {
    let mut search = PlanSearch::new(machine, tables, work);
    let mut starts: Vec<(Score, Vec<Option<Choice>>)> = Vec::new();
    let mut stuck: Option<(usize, usize, Vec<u64>)> = None;
    // If no start fits, time counts less relative to memory: the slowest device may be far slower than the average.
    for _ in 0..SCALES {
        for order in search.orders() {
            for price in PRICES {
                search.clear();
                match search.greedy(&order, price) {
                    Ok(()) => {
                        let score = search.score();
                        if !starts.iter().any(|(s, _)| s.same(&score)) {
                            starts.push((score, search.choices.clone()));
                        }
                    }
                    Err(table) => {
                        let placed = search.choices.iter().flatten().count();
                        if stuck.as_ref().is_none_or(|(_, most, _)| placed > *most) {
                            stuck = Some((table, placed, search.free_bytes()));
                        }
                    }
                }
            }
        }
        if !starts.is_empty() {
            break;
        }
        search.scale *= SCALE_STEP;
    }
    starts.sort_by(|(a, _), (b, _)| a.max.total_cmp(&b.max).then(a.sum.total_cmp(&b.sum)));
    starts.truncate(STARTS_KEPT);
    for (score, choices) in &mut starts {
        search.restore(choices);
        search.scale = score.max.max(f64::MIN_POSITIVE);
        for _ in 0..SWEEPS_MAX {
            if !search.sweep(Goal::Balance) {
                break;
            }
        }
        (*score, *choices) = (search.score(), search.choices.clone());
    }
    if let Some(known) = known {
        let choices: Vec<Option<Choice>> = known.into_iter().map(Some).collect();
        search.restore(&choices);
        starts.push((search.score(), choices));
    }
    let best = starts.into_iter().min_by(|(a, _), (b, _)| a.max.total_cmp(&b.max).then(a.sum.total_cmp(&b.sum)));
    let Some((_, choices)) = best else {
        let (table, placed, free_bytes) = stuck.expect("a start without a plan is stuck at a table");
        return Outcome::Stuck { table, placed, free_bytes };
    };
    search.restore(&choices);
    search.ruin_and_recreate();
    while search.sweep(Goal::Sum) {}
    Outcome::Found(search.choices.into_iter().map(|c| c.expect("every table has a place")).collect())
}

/// Objective of a move.
#[derive(Clone, Copy, PartialEq)]
enum Goal {
    /// Minimizes the eighth powers of the loads.
    Balance,
    /// Minimizes the sum of the loads without raising the largest load.
    Sum,
}

#[derive(Clone, Copy, Debug)]
struct Score {
    max: f64,
    sum: f64,
}

impl Score {
    fn same(&self, other: &Score) -> bool {
        (self.max - other.max).abs() <= TIE * self.max && (self.sum - other.sum).abs() <= TIE * self.sum
    }

    /// Returns true if the largest load is lower, or equal with a lower sum.
    fn below(&self, other: &Score) -> bool {
        let tie = TIE * other.max;
        self.max < other.max - tie || (self.max <= other.max + tie && self.sum < other.sum * (1.0 - TIE))
    }
}

#[derive(Clone)]
pub(super) struct Load {
    pub capacity_bytes: u64,
    once_us: [f64; LATENCIES],
    pub bytes: u64,
    micros: f64,
    users: [u32; LATENCIES],
}

impl Load {
    pub(crate) fn new(device: &Device) -> Load {
        let (capacity_bytes, once_us) = (device.capacity_bytes, device.once_us);
        Load { capacity_bytes, once_us, bytes: 0, micros: 0.0, users: [0; LATENCIES] }
    }

    /// Returns microseconds per batch.
    pub(crate) fn total(&self) -> f64 {
        let once = (0..LATENCIES).filter(|l| self.users[*l] > 0).map(|l| self.once_us[l]);
        self.micros + once.sum::<f64>()
    }

    /// Returns the total after adding a cost.
    pub(crate) fn with(&self, charge: &Charge) -> f64 {
        let new = (0..LATENCIES).filter(|l| self.users[*l] == 0 && charge.uses >> l & 1 == 1).map(|l| self.once_us[l]);
        self.total() + charge.micros + new.sum::<f64>()
    }

    pub(crate) fn add(&mut self, charge: &Charge) {
        self.bytes += charge.bytes;
        self.micros += charge.micros;
        (0..LATENCIES).filter(|l| charge.uses >> l & 1 == 1).for_each(|l| self.users[l] += 1);
    }

    pub(crate) fn remove(&mut self, charge: &Charge) {
        self.bytes -= charge.bytes;
        self.micros -= charge.micros;
        (0..LATENCIES).filter(|l| charge.uses >> l & 1 == 1).for_each(|l| self.users[l] -= 1);
    }
}

struct PlanSearch<'a> {
    tables: &'a [Vec<Candidate>],
    loads: Vec<Load>,
    choices: Vec<Option<Choice>>,
    /// Load in microseconds that counts as 1.
    scale: f64,
    work_left: u64,
    random: u64,
}

impl<'a> PlanSearch<'a> {
    fn new(machine: &Machine, tables: &'a [Vec<Candidate>], work: u64) -> Self {
        let loads: Vec<Load> = machine.devices.iter().map(Load::new).collect();
        let fastest = |t: &Vec<Candidate>| t.iter().map(micros_of).fold(f64::INFINITY, f64::min);
        let even = tables.iter().map(fastest).sum::<f64>() / loads.len() as f64;
        let choices = vec![None; tables.len()];
        PlanSearch { tables, loads, choices, scale: even.max(1e-6), work_left: work, random: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Returns the order of the tables by bytes, and by time, the largest first.
    fn orders(&self) -> [Vec<usize>; 2] {
        let least = |of: fn(&Candidate) -> f64| {
            let keys: Vec<f64> = self.tables.iter().map(|t| t.iter().map(of).fold(f64::INFINITY, f64::min)).collect();
            let mut order: Vec<usize> = (0..keys.len()).collect();
            order.sort_by(|a, b| keys[*b].total_cmp(&keys[*a]));
            order
        };
        [least(bytes_of), least(micros_of)]
    }

    fn clear(&mut self) {
        for load in &mut self.loads {
            (load.bytes, load.micros, load.users) = (0, 0.0, [0; LATENCIES]);
        }
        self.choices.fill(None);
    }

    /// Resets the loads to the loads of `choices`, which also removes accumulated rounding errors.
    fn restore(&mut self, choices: &[Option<Choice>]) {
        self.clear();
        for (table, choice) in choices.iter().enumerate() {
            if let Some(choice) = choice {
                self.place(table, choice.clone());
            }
        }
    }

    fn score(&self) -> Score {
        let totals = self.loads.iter().map(Load::total);
        totals.fold(Score { max: 0.0, sum: 0.0 }, |s, t| Score { max: s.max.max(t), sum: s.sum + t })
    }

    fn free_bytes(&self) -> Vec<u64> {
        self.loads.iter().map(|l| l.capacity_bytes - l.bytes).collect()
    }

    fn place(&mut self, table: usize, choice: Choice) {
        for (unit, site) in self.tables[table][choice.candidate].units.iter().zip(&choice.sites) {
            unit.sites[*site].charges.iter().for_each(|c| self.loads[c.device].add(c));
        }
        self.choices[table] = Some(choice);
    }

    fn take(&mut self, table: usize) -> Option<Choice> {
        let choice = self.choices[table].take()?;
        for (unit, site) in self.tables[table][choice.candidate].units.iter().zip(&choice.sites) {
            unit.sites[*site].charges.iter().for_each(|c| self.loads[c.device].remove(c));
        }
        Some(choice)
    }

    /// Returns what the costs add to the objective, or `None` if a device lacks memory for them.
    fn added(&self, charges: &[Charge], goal: Goal, price: f64, max: f64) -> Option<f64> {
        let mut added = 0.0;
        for charge in charges {
            let load = &self.loads[charge.device];
            if charge.bytes > load.capacity_bytes - load.bytes {
                return None;
            }
            let (before, after) = (load.total(), load.with(charge));
            if goal == Goal::Sum {
                if after > max {
                    return None;
                }
                added += after - before;
                continue;
            }
            let (before, after) = (before / self.scale, after / self.scale);
            added += after.powi(8) - before.powi(8) + SUM_WEIGHT * (after - before);
            added += price * charge.bytes as f64 / load.capacity_bytes.max(1) as f64;
        }
        Some(added)
    }

    /// Returns the choice for an unplaced table that adds least to the objective, or `None` if none fits. Places nothing.
    fn cheapest(&mut self, table: usize, goal: Goal, price: f64, max: f64) -> Option<(f64, Choice)> {
        let all = |_: &mut Self| false;
        self.cheapest_except(table, goal, price, max, all)
    }

    /// As [`Self::cheapest`], without candidates for which `skipped` returns true.
    fn cheapest_except(
        &mut self,
        table: usize,
        goal: Goal,
        price: f64,
        max: f64,
        skipped: impl Fn(&mut Self) -> bool,
    ) -> Option<(f64, Choice)> {
        let mut best: Option<(f64, Choice)> = None;
        let tables = self.tables;
        for (number, candidate) in tables[table].iter().enumerate() {
            if skipped(self) {
                continue;
            }
            let mut sites: Vec<usize> = Vec::with_capacity(candidate.units.len());
            let mut total = 0.0;
            let limit = best.as_ref().map_or(f64::INFINITY, |(cost, _)| *cost);
            for unit in &candidate.units {
                let mut least: Option<(f64, usize)> = None;
                for (at, site) in unit.sites.iter().enumerate() {
                    self.work_left = self.work_left.saturating_sub(site.charges.len() as u64);
                    if let Some(cost) = self.added(&site.charges, goal, price, max)
                        && least.is_none_or(|(l, _)| cost < l)
                    {
                        least = Some((cost, at));
                    }
                }
                let Some((cost, at)) = least.filter(|(cost, _)| total + cost < limit) else { break };
                total += cost;
                sites.push(at);
                unit.sites[at].charges.iter().for_each(|c| self.loads[c.device].add(c));
            }
            for (unit, at) in candidate.units.iter().zip(&sites) {
                unit.sites[*at].charges.iter().for_each(|c| self.loads[c.device].remove(c));
            }
            if sites.len() == candidate.units.len() {
                best = Some((total, Choice { candidate: number, sites }));
            }
        }
        best
    }

    /// Places every table, or returns the first table that did not fit.
    fn greedy(&mut self, order: &[usize], price: f64) -> Result<(), usize> {
        for &table in order {
            match self.cheapest(table, Goal::Balance, price, f64::INFINITY) {
                Some((_, choice)) => self.place(table, choice),
                None if self.make_room(table) => {}
                None => return Err(table),
            }
        }
        Ok(())
    }

    /// Moves one placed table elsewhere so that `table` fits, and places it.
    fn make_room(&mut self, table: usize) -> bool {
        for other in 0..self.tables.len() {
            if self.work_left == 0 {
                return false;
            }
            let Some(before) = self.take(other) else { continue };
            // The highest memory price: the moved table must take as little memory as possible.
            let last = PRICES[PRICES.len() - 1];
            if let Some((_, choice)) = self.cheapest(table, Goal::Balance, last, f64::INFINITY) {
                self.place(table, choice);
                if let Some((_, choice)) = self.cheapest(other, Goal::Balance, last, f64::INFINITY) {
                    self.place(other, choice);
                    return true;
                }
                self.take(table);
            }
            self.place(other, before);
        }
        false
    }

    /// Removes each table in turn and reinserts it where it costs least. Returns true if a table moved.
    fn sweep(&mut self, goal: Goal) -> bool {
        let mut moved = false;
        for table in 0..self.tables.len() {
            if self.work_left == 0 {
                return false;
            }
            let before = self.score();
            let Some(old) = self.take(table) else { continue };
            let max = before.max * (1.0 + TIE);
            match self.cheapest(table, goal, 0.0, max) {
                Some((_, choice)) if choice != old => {
                    self.place(table, choice);
                    let after = self.score();
                    let better = match goal {
                        Goal::Balance => after.below(&before) || self.smoother(table, &old),
                        Goal::Sum => after.below(&before),
                    };
                    if better {
                        moved = true;
                    } else {
                        self.take(table);
                        self.place(table, old);
                    }
                }
                _ => self.place(table, old),
            }
        }
        moved
    }

    /// Returns true if the table's placement gives a smaller sum of eighth powers of loads than `old` would.
    fn smoother(&mut self, table: usize, old: &Choice) -> bool {
        let new = self.take(table).expect("the table is placed");
        let cost = |search: &mut Self, choice: &Choice| {
            let eighth = |s: &Self| s.loads.iter().map(|l| (l.total() / s.scale).powi(8)).sum::<f64>();
            search.place(table, choice.clone());
            let cost = eighth(search);
            search.take(table);
            cost
        };
        let (before, after) = (cost(self, old), cost(self, &new));
        self.place(table, new);
        after < before * (1.0 - TIE)
    }

    /// Removes a few tables and reinserts them in another order, until the budget is spent.
    fn ruin_and_recreate(&mut self) {
        let tables = self.tables.len();
        let patience = 300 + 10 * tables;
        let (mut idle, mut rounds) = (0, 0u32);
        let mut current = self.score();
        while self.work_left > 0 && idle < patience {
            rounds += 1;
            if rounds.is_multiple_of(512) {
                let choices = std::mem::take(&mut self.choices);
                self.choices = vec![None; tables];
                self.restore(&choices);
                current = self.score();
            }
            self.scale = current.max.max(f64::MIN_POSITIVE);
            let out = self.victims();
            let old: Vec<Choice> = out.iter().filter_map(|t| self.take(*t)).collect();
            let price = match self.random(4) {
                0 => PRICES[self.random(PRICES.len())],
                _ => 0.0,
            };
            let blinks = self.random(2) == 0;
            let skipped = |search: &mut Self| blinks && search.random(BLINKS) == 0;
            let mut put = 0;
            for table in &out {
                let found = self.cheapest_except(*table, Goal::Balance, price, f64::INFINITY, skipped);
                let Some((_, choice)) = found else { break };
                self.place(*table, choice);
                put += 1;
            }
            let score = self.score();
            let worse = put < out.len() || current.below(&score);
            idle = if !worse && score.below(&current) { 0 } else { idle + 1 };
            if worse {
                out[..put].iter().for_each(|t| drop(self.take(*t)));
                out.iter().zip(old).for_each(|(t, choice)| self.place(*t, choice));
            } else {
                current = score;
            }
        }
    }

    /// Returns one to six tables; every other time, one of them uses the slowest device.
    fn victims(&mut self) -> Vec<usize> {
        let tables = self.tables.len();
        let count = (1 + self.random(6)).min(tables);
        let mut out: Vec<usize> = Vec::with_capacity(count);
        if self.random(2) == 0 {
            let total = |d: &usize| self.loads[*d].total();
            let slowest = (0..self.loads.len()).max_by(|a, b| total(a).total_cmp(&total(b))).unwrap_or(0);
            let from = self.random(tables);
            let found = (0..tables).map(|t| (from + t) % tables).find(|t| self.touches(*t, slowest));
            out.extend(found);
        }
        while out.len() < count {
            let table = self.random(tables);
            if !out.contains(&table) {
                out.push(table);
            }
        }
        // A random position for the last table, so that a table of the slowest device is not always reinserted first.
        let last = out.len() - 1;
        let with = self.random(out.len());
        out.swap(last, with);
        out
    }

    fn touches(&self, table: usize, device: usize) -> bool {
        let Some(choice) = &self.choices[table] else { return false };
        let units = self.tables[table][choice.candidate].units.iter().zip(&choice.sites);
        units.into_iter().any(|(unit, site)| unit.sites[*site].charges.iter().any(|c| c.device == device))
    }

    /// Returns a random number in `0..bound`, by xorshift.
    fn random(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % bound as u64) as usize
    }
}

/// Returns the total time at the first site of each unit.
fn micros_of(candidate: &Candidate) -> f64 {
    candidate.units.iter().flat_map(|u| &u.sites[0].charges).map(|c| c.micros).sum()
}

/// Returns the total bytes at the first site of each unit.
fn bytes_of(candidate: &Candidate) -> f64 {
    candidate.units.iter().flat_map(|u| &u.sites[0].charges).map(|c| c.bytes as f64).sum()
}
