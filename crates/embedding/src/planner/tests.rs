//! The complete planner: compared with brute force, on a large problem, and on problems without a solution.

#![allow(clippy::unwrap_used)]

use super::cost::{Charge, Machine, Piece, PieceStorage};
use super::enumerate::{Candidate, candidates};
use super::plan::PlacementPlan;
use super::search::Load;
use super::topology::{Gpu, Host, Network, Remote, Topology};
use super::workload::{Constraints, TableWorkload, Workload};
use super::{BOUNDS, Bounds, access::Access, plan, plan_within, report};
use crate::RowFormat;
use crate::place::{HostAccess, Sharding, Tier};
use crate::train::{RuleKind, stretch_bytes};

/// A fixed sequence of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

fn host(name: &str, dram_gib: f64) -> Host {
    Host {
        name: name.into(),
        dram_gib,
        reserved_gib: 0.0,
        bandwidth_gb_s: 40.0,
        row_ns: 4.0,
        call_us: 2.0,
        servers: Vec::new(),
    }
}

fn gpu(name: &str, host: &str, hbm_gib: f64) -> Gpu {
    Gpu {
        name: name.into(),
        host: host.into(),
        hbm_gib,
        reserved_gib: 0.0,
        bandwidth_gb_s: 1500.0,
        row_ns: 0.1,
        call_us: 6.0,
        link_gb_s: 25.0,
        link_us: 10.0,
    }
}

fn remote(node_gib: f64) -> Remote {
    Remote {
        name: "cluster".into(),
        nodes: 3,
        node_gib,
        overhead: 1.5,
        round_trip_us: 300.0,
        rows_per_s: 400_000.0,
        bandwidth_gb_s: 1.0,
    }
}

fn network() -> Network {
    Network { bandwidth_gb_s: 10.0, latency_us: 30.0 }
}

fn table(name: &str, rows: u64, width: u32) -> TableWorkload {
    TableWorkload {
        name: name.into(),
        rows,
        width,
        format: RowFormat::F32,
        features: vec![name.into()],
        pooling: 10.0,
        access: Access::Zipf(0.9),
        constraints: Constraints::default(),
        train: None,
        managed: false,
    }
}

fn workload(tables: Vec<TableWorkload>) -> Workload {
    Workload { batch: 64, requests_per_s: None, tables, notes: Vec::new() }
}

/// Two to four tables on two to four devices, some with a cluster, with scarce to plentiful memory.
fn small_problem(random: &mut Random) -> (Topology, Workload) {
    let count = 2 + random.below(3);
    let tables: Vec<TableWorkload> = (0..count)
        .map(|t| {
            let mut table = table(&format!("t{t}"), 1_000 << random.below(11), 32 << random.below(3));
            table.format = random.of(&RowFormat::ALL);
            table.pooling = random.of(&[1.0, 5.0, 50.0]);
            table.access = random.of(&[0.0, 0.6, 1.05]).then_zipf();
            table
        })
        .collect();
    let all: u64 = tables.iter().map(TableWorkload::bytes).sum();
    let gib = all as f64 / f64::from(1 << 30);
    let mut memory = || gib * random.of(&[0.3, 0.6, 1.2]);
    let mut topology =
        Topology { hosts: vec![host("h0", memory())], gpus: Vec::new(), remote: None, network: Some(network()) };
    let memories = [memory(), memory(), memory()];
    match random.below(4) {
        0 => topology.hosts.push(host("h1", memories[0])),
        1 => topology.gpus = vec![gpu("g0", "h0", memories[0]), gpu("g1", "h0", memories[1])],
        2 => topology.remote = Some(remote(gib)),
        _ => {
            topology.hosts.push(host("h1", memories[0]));
            topology.gpus = vec![gpu("g0", "h0", memories[1]), gpu("g1", "h1", memories[2])];
        }
    }
    (topology, workload(tables))
}

trait ThenZipf {
    fn then_zipf(self) -> Access;
}

impl ThenZipf for f64 {
    fn then_zipf(self) -> Access {
        if self == 0.0 { Access::Uniform } else { Access::Zipf(self) }
    }
}

/// Branch and bound over every candidate at every site: finds the lowest maximum load.
struct Brute<'a> {
    tables: &'a [Vec<Candidate>],
    /// Lower bound of the time of all tables from this one on.
    rest: Vec<f64>,
    loads: Vec<Load>,
    best: f64,
}

impl Brute<'_> {
    fn solve(machine: &Machine, tables: &[Vec<Candidate>], best: f64) -> f64 {
        let sum = |charges: &[Charge]| charges.iter().map(|c| c.micros).sum::<f64>();
        let of_unit =
            |sites: &[super::enumerate::Site]| sites.iter().map(|s| sum(&s.charges)).fold(f64::INFINITY, f64::min);
        let of_candidate = |c: &Candidate| c.units.iter().map(|u| of_unit(&u.sites)).sum::<f64>();
        let least: Vec<f64> = tables.iter().map(|t| t.iter().map(of_candidate).fold(f64::INFINITY, f64::min)).collect();
        let rest = (0..=tables.len()).map(|from| least[from..].iter().sum()).collect();
        let loads = machine.devices.iter().map(Load::new).collect();
        let mut brute = Brute { tables, rest, loads, best };
        brute.table(0);
        brute.best
    }

    fn table(&mut self, number: usize) {
        let tables = self.tables;
        let Some(candidates) = tables.get(number) else {
            self.best = self.loads.iter().map(Load::total).fold(0.0, f64::max);
            return;
        };
        for candidate in candidates {
            self.unit(number, candidate, 0);
        }
    }

    fn unit(&mut self, number: usize, candidate: &Candidate, unit: usize) {
        let Some(here) = candidate.units.get(unit) else { return self.table(number + 1) };
        for site in here.sites.iter() {
            let fits = |c: &Charge| c.bytes <= self.loads[c.device].capacity_bytes - self.loads[c.device].bytes;
            if !site.charges.iter().all(fits) {
                continue;
            }
            site.charges.iter().for_each(|c| self.loads[c.device].add(c));
            let totals = || self.loads.iter().map(Load::total);
            let even = (totals().sum::<f64>() + self.rest[number + 1]) / self.loads.len() as f64;
            if totals().fold(even, f64::max) < self.best * (1.0 - 1e-9) {
                self.unit(number, candidate, unit + 1);
            }
            site.charges.iter().for_each(|c| self.loads[c.device].remove(c));
        }
    }
}

/// Checks invariants of every plan: its rectangles cover each table once (or once per copy), sums add up, no device is overfull.
fn check(plan: &PlacementPlan, topology: &Topology, workload: &Workload) {
    for (table, planned) in workload.tables.iter().zip(&plan.tables) {
        assert_eq!(table.name, planned.table);
        assert!(table.constraints.sharding.contains(&planned.sharding));
        let copies = planned.shards.iter().map(|s| s.copy + 1).max().unwrap() as u128;
        assert_eq!(copies > 1, planned.has_copies());
        let cells =
            |rows: [u64; 2], columns: [u32; 2]| u128::from(rows[1] - rows[0]) * u128::from(columns[1] - columns[0]);
        let covered: u128 = planned.shards.iter().map(|s| cells(s.rows, s.columns)).sum();
        assert_eq!(covered, copies * cells([0, table.rows], [0, table.width]), "{planned:?}");
        for (at, a) in planned.shards.iter().enumerate() {
            assert!(table.constraints.tiers.contains(&a.tier) && topology.names().any(|n| n == a.device));
            for b in &planned.shards[at + 1..] {
                let apart = a.rows[1] <= b.rows[0]
                    || b.rows[1] <= a.rows[0]
                    || a.columns[1] <= b.columns[0]
                    || b.columns[1] <= a.columns[0];
                assert!(apart || a.copy != b.copy, "{a:?} and {b:?} overlap");
            }
        }
    }
    for device in &plan.devices {
        assert!(device.bytes <= device.capacity_bytes, "{device:?}");
        assert!(device.micros <= plan.micros);
    }
    assert_eq!(plan.devices.iter().map(|d| d.bytes).sum::<u64>(), plan.bytes);
}

#[test]
fn choices_are_within_a_tenth_of_brute_force() {
    let mut random = Random(0x5eed);
    let (mut solved, mut exact, mut worst) = (0, 0, 1.0f64);
    while solved < 50 {
        let (topology, workload) = small_problem(&mut random);
        let machine = Machine::new(&topology, workload.batch);
        let Ok(tables) =
            workload.tables.iter().map(|t| candidates(&machine, t)).collect::<sterling_core::error::Result<Vec<_>>>()
        else {
            continue;
        };
        match plan(&topology, &workload) {
            Ok(found) => {
                check(&found, &topology, &workload);
                let best = Brute::solve(&machine, &tables, found.micros);
                let ratio = found.micros / best;
                assert!(
                    ratio <= 1.1,
                    "problem {solved}: {} us, brute force {best} us\n{}",
                    found.micros,
                    report::text(&found)
                );
                worst = worst.max(ratio);
                exact += usize::from(ratio <= 1.0 + 1e-6);
                solved += 1;
            }
            Err(e) => {
                let best = Brute::solve(&machine, &tables, f64::INFINITY);
                assert!(best.is_infinite(), "brute force found {best} us where the planner computed: {e}");
            }
        }
    }
    assert!(exact >= 40 && worst <= 1.1, "{exact} of {solved} are the best, the worst is {worst} times it");
}

/// 500 tables of 1.2 TB in total over 16 devices.
fn large_problem() -> (Topology, Workload) {
    let mut random = Random(0xb16);
    let mut tables: Vec<TableWorkload> = (0..500)
        .map(|t| {
            let size = 10 + random.below(19);
            let mut table = table(&format!("t{t}"), 1_000 + random.below(1 << size), 128);
            table.pooling = random.of(&[1.0, 4.0, 20.0, 80.0]);
            table.access = Access::Zipf(random.of(&[0.6, 0.9, 1.05]));
            table
        })
        .collect();
    let bytes: u64 = tables.iter().map(TableWorkload::bytes).sum();
    for table in &mut tables {
        table.rows = (table.rows as f64 * 1.2e12 / bytes as f64) as u64 + 1;
    }
    let hosts = (0..2).map(|h| host(&format!("h{h}"), 400.0)).collect();
    let gpus = (0..14).map(|g| gpu(&format!("g{g}"), &format!("h{}", g / 7), 40.0)).collect();
    (Topology { hosts, gpus, remote: None, network: Some(network()) }, workload(tables))
}

#[test]
fn a_large_problem_is_planned_and_fits() {
    let (topology, workload) = large_problem();
    let bounds = Bounds { work: 5_000_000, ..BOUNDS };
    let found = plan_within(&topology, &workload, bounds).unwrap();
    check(&found, &topology, &workload);
    let gpus = found.devices.iter().filter(|d| d.bytes > 0).count();
    assert_eq!(gpus, 16, "every device is used");
    let even = found.devices.iter().map(|d| d.micros).sum::<f64>() / 16.0;
    assert!(found.micros >= even);
    assert_eq!(plan_within(&topology, &workload, bounds).unwrap(), found, "the same problem has the same plan");
}

#[test]
fn tables_that_fit_nowhere_are_rejected_with_the_shortfall() {
    let one = Topology { hosts: vec![host("h0", 1.0)], gpus: Vec::new(), remote: None, network: None };
    let error = |topology: &Topology, tables| plan(topology, &workload(tables)).unwrap_err().to_string();
    // One table larger than any memory.
    let e = error(&one, vec![table("huge", 10 << 20, 64)]);
    assert!(e.contains("table `huge` fits nowhere") && e.contains("`h0`, which holds 1.0 GiB: 1.5 GiB missing"), "{e}");
    // Tables that fit alone but not together.
    let e = error(&one, (0..3).map(|t| table(&format!("t{t}"), 2 << 20, 64)).collect());
    assert!(e.contains("need at least 1.5 GiB") && e.contains("512.0 MiB missing"), "{e}");
    // Enough memory in total, but no table may be partitioned.
    let two = Topology {
        hosts: vec![host("h0", 1.0), host("h1", 1.0)],
        gpus: Vec::new(),
        remote: None,
        network: Some(network()),
    };
    let complete = |t: u64| {
        let mut table = table(&format!("t{t}"), 5 << 19, 64);
        table.constraints.sharding = vec![Sharding::TableWise];
        table
    };
    let e = error(&two, (0..3).map(complete).collect());
    assert!(
        e.contains("does not fit in addition to 2 of 3 tables") && e.contains("left: h0 384.0 MiB, h1 384.0 MiB"),
        "{e}"
    );
    assert!(e.contains("needs 640.0 MiB on `h") && e.contains("256.0 MiB missing"), "{e}");
    // No allowed tier exists.
    let mut table = table("t", 10, 64);
    table.constraints.tiers = vec![Tier::Hbm];
    assert!(error(&one, vec![table.clone()]).contains("has none of the tiers [hbm]"));
    table.constraints.device = Some("nowhere".into());
    assert!(error(&one, vec![table]).contains("pinned to `nowhere`"));
}

/// Identical hosts, a cluster, and one table, all of random size.
fn several_hosts(random: &mut Random) -> (Topology, TableWorkload) {
    let mut table = table("t", 1_000 + random.below(1 << 20), 4 << random.below(6));
    table.format = random.of(&RowFormat::ALL);
    table.pooling = random.of(&[1.0, 7.0, 80.0]);
    table.access = random.of(&[0.0, 0.8, 1.1]).then_zipf();
    table.features = (0..1 + random.below(3)).map(|n| format!("f{n}")).collect();
    table.constraints.cache_share = Some(random.of(&[0.0, 0.01, 0.1]));
    let gib = table.bytes() as f64 / f64::from(1 << 30);
    let (count, dram_gib) = (2 + random.below(3), gib * random.of(&[0.1, 0.6, 1.5]));
    let network = Network { bandwidth_gb_s: random.of(&[0.01, 1.0, 10.0]), latency_us: random.of(&[20.0, 500.0]) };
    let cluster = Remote {
        round_trip_us: random.of(&[60.0, 2000.0]),
        rows_per_s: random.of(&[1e5, 1e7]),
        ..remote(gib * random.of(&[0.1, 2.0]))
    };
    let hosts = (0..count).map(|n| host(&format!("h{n}"), dram_gib)).collect();
    (Topology { hosts, gpus: Vec::new(), remote: Some(cluster), network: Some(network) }, table)
}

/// Returns the microseconds of the slowest device by the formulas of `docs/reference/planner.md`, written out for one
/// access type; none if the placement does not fit.
fn by_hand(topology: &Topology, table: &TableWorkload, batch: u32, way: HostAccess) -> Option<f64> {
    let (hosts, host) = (topology.hosts.len() as f64, &topology.hosts[0]);
    let (network, cluster) = (topology.network.as_ref().unwrap(), topology.remote.as_ref().unwrap());
    let (row_bytes, rows) = (table.row_bytes(table.width) as f64, table.rows as f64);
    let ids = f64::from(batch) * table.ids();
    let row_us = (host.row_ns + row_bytes / host.bandwidth_gb_s) / 1e3;
    let bags = f64::from(batch) * table.features.len() as f64;
    let sums_us = |bags: f64| bags * 4.0 * f64::from(table.width) / host.bandwidth_gb_s / 1e3;
    let fits = |bytes: f64| bytes <= host.capacity_bytes() as f64;
    match way {
        HostAccess::Copies => fits(rows * row_bytes).then(|| host.call_us + ids * row_us + sums_us(bags)),
        HostAccess::BetweenServers => {
            // The host with the most rows.
            let share = (0..topology.hosts.len() as u64)
                .map(|n| table.rows * (n + 1) / hosts as u64 - table.rows * n / hosts as u64)
                .max()? as f64
                / rows;
            let here = bags * hosts * (1.0 - (1.0 - share).powf(table.pooling));
            let travel_us = (8.0 + row_bytes) / network.bandwidth_gb_s / 1e3;
            let requested = ids * hosts * share;
            let answering =
                host.call_us + requested * row_us + sums_us(here) + requested * (hosts - 1.0) / hosts * travel_us;
            // Rows from the other hosts, which hold the rest of the table.
            let coming = ids * (1.0 - share) * (row_us + travel_us);
            fits((share * rows).round() * row_bytes).then_some(answering + coming + network.latency_us)
        }
        HostAccess::Cluster => {
            let cached = (rows * table.constraints.cache_share?).ceil();
            let misses = ids * (1.0 - table.access.share(cached as u64, table.rows));
            let nodes = f64::from(cluster.nodes);
            let of_nodes = |bandwidth: f64| (1e6 / (nodes * cluster.rows_per_s)).max(row_bytes / bandwidth / 1e3);
            let waits = misses * of_nodes((nodes * cluster.bandwidth_gb_s).min(network.bandwidth_gb_s));
            let here = host.call_us + ids * row_us + sums_us(bags) + waits + cluster.round_trip_us;
            let there = misses * hosts * of_nodes(nodes * cluster.bandwidth_gb_s);
            let stored = rows * row_bytes * cluster.overhead;
            (fits(cached * (row_bytes + 64.0)) && stored <= cluster.capacity_bytes() as f64).then(|| here.max(there))
        }
    }
}

#[test]
fn several_hosts_take_the_cheapest_way_that_fits() {
    let mut random = Random(0x1057);
    let mut taken = std::collections::BTreeMap::new();
    for problem in 0..400 {
        let (topology, mut table) = several_hosts(&mut random);
        table.constraints.sharding = vec![Sharding::DataParallel, Sharding::RowWise];
        let ways = [HostAccess::Copies, HostAccess::BetweenServers, HostAccess::Cluster];
        let costs = ways.map(|way| by_hand(&topology, &table, 64, way));
        let best = costs.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        let found = plan(&topology, &workload(vec![table.clone()]));
        let Ok(found) = found else {
            assert!(best.is_infinite(), "{problem}: {}, by hand {costs:?}", found.unwrap_err());
            continue;
        };
        check(&found, &topology, &workload(vec![table.clone()]));
        assert!((found.micros / best - 1.0).abs() < 1e-6, "{problem}: {} us, by hand {costs:?}", found.micros);
        let planned = &found.tables[0];
        let way = HostAccess::of(planned.shards[0].tier, planned.has_copies());
        for (cost, way) in costs.iter().zip(ways) {
            let reported = planned.ways.iter().find(|reported| reported.way == way).map(|reported| reported.micros);
            assert_eq!(reported.is_some(), cost.is_some(), "{problem}: {way:?} {reported:?} {cost:?}");
            let is_alike = reported.zip(*cost).is_none_or(|(reported, cost)| (reported / cost - 1.0).abs() < 1e-6);
            assert!(is_alike, "{problem}: {way:?} {reported:?}, by hand {cost:?}");
        }
        let place = ways.iter().position(|known| *known == way).unwrap();
        assert!(costs[place].unwrap() <= best * (1.0 + 1e-6), "{problem}: {way:?} of {costs:?}");
        assert!(report::text(&found).contains("Access types"));
        *taken.entry(way).or_insert(0) += 1;
        // A forced placement is used, or rejected with its name.
        for (tier, cost) in
            [(Tier::Host, costs[0].into_iter().chain(costs[1]).reduce(f64::min)), (Tier::Remote, costs[2])]
        {
            let mut forced = table.clone();
            forced.constraints.tiers = vec![tier];
            match (plan(&topology, &workload(vec![forced])), cost) {
                (Ok(found), Some(cost)) => assert!((found.micros / cost - 1.0).abs() < 1e-6, "{problem}: {tier:?}"),
                (Err(e), None) => assert!(e.to_string().contains("table `t`"), "{e}"),
                (found, cost) => panic!("{problem}: {tier:?} {cost:?} {:?}", found.map(|f| f.micros)),
            }
        }
    }
    assert!(taken.len() == 3 && taken.values().all(|count| *count >= 10), "every way is taken somewhere: {taken:?}");
}

#[test]
fn hosts_that_are_alike_are_never_planned_slower_than_one() {
    let mut random = Random(0xa11ce);
    let (mut solved, mut copied) = (0, 0);
    for problem in 0..60 {
        let count = 1 + random.below(5);
        let mut tables: Vec<TableWorkload> = (0..count)
            .map(|t| {
                let mut table = table(&format!("t{t}"), 1_000 << random.below(14), 32 << random.below(3));
                table.pooling = random.of(&[1.0, 10.0, 80.0]);
                table.access = random.of(&[0.0, 0.8, 1.1]).then_zipf();
                table
            })
            .collect();
        if random.below(4) == 0 {
            tables[0].constraints.sharding = vec![Sharding::DataParallel, random.of(&Sharding::ALL)];
        }
        let bytes: u64 = tables.iter().map(TableWorkload::bytes).sum();
        let gib = bytes as f64 / f64::from(1 << 30);
        let (dram_gib, hbm_gib) = (gib * random.of(&[0.5, 1.2, 3.0]), gib * random.of(&[0.1, 0.4, 1.2]));
        let (gpus, network) = (random.below(5), Network { bandwidth_gb_s: random.of(&[1.0, 100.0]), latency_us: 5.0 });
        let alike = |hosts: u64| Topology {
            hosts: (0..hosts).map(|h| host(&format!("h{h}"), dram_gib)).collect(),
            gpus: (0..hosts)
                .flat_map(|h| (0..gpus).map(move |g| gpu(&format!("h{h}g{g}"), &format!("h{h}"), hbm_gib)))
                .collect(),
            remote: None,
            network: Some(network.clone()),
        };
        let workload = workload(tables);
        let Ok(one) = plan(&alike(1), &workload) else { continue };
        solved += 1;
        for hosts in [2, 3] {
            let several = plan(&alike(hosts), &workload).unwrap();
            check(&several, &alike(hosts), &workload);
            assert!(
                several.micros <= one.micros * (1.0 + 1e-6),
                "problem {problem}: {} us on one host, {} us on each of {hosts}\n{}",
                one.micros,
                several.micros,
                report::text(&several)
            );
            copied += several.tables.iter().filter(|t| t.has_copies() && t.sharding != Sharding::DataParallel).count();
        }
    }
    assert!(solved > 30 && copied > 30, "{solved} problems, {copied} tables that are cut within each host");
}

/// Rates a plan of TorchRec by the cost model: returns the microseconds of the slowest device, and whether the plan
/// fits.
fn rated(topology: &Topology, workload: &Workload, plan: &serde_json::Value) -> (f64, bool) {
    let machine = Machine::new(topology, workload.batch);
    let gpu = |rank: usize| machine.devices.iter().position(|d| d.name == topology.gpus[rank].name).unwrap();
    let mut loads: Vec<Load> = machine.devices.iter().map(Load::new).collect();
    for table in &workload.tables {
        let planned = &plan["tables"][&table.name];
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let pair = |value: &serde_json::Value| [number(&value[0]), number(&value[1])];
        let is_copied = planned["sharding"] == "data_parallel";
        assert_eq!(planned["kernel"], if is_copied { "dense" } else { "fused" }, "{}", table.name);
        let parts: Vec<(Piece, usize)> = if is_copied {
            let complete = Piece { rows: [0, table.rows], columns: [0, table.width] };
            (0..topology.gpus.len()).map(|rank| (complete, gpu(rank))).collect()
        } else {
            let shards = planned["shards"].as_array().unwrap().iter();
            let part = |shard: &serde_json::Value| {
                let columns = pair(&shard["columns"]).map(|column| column as u32);
                (Piece { rows: pair(&shard["rows"]), columns }, gpu(number(&shard["rank"]) as usize))
            };
            shards.map(part).collect()
        };
        let replicas = if is_copied { parts.len() } else { 1 };
        for (piece, device) in &parts {
            let keeping =
                PieceStorage { tier: Tier::Hbm, device: *device, cache: (1.0, 1.0), replicas, brings_rows: true };
            machine.charges(table, piece, &keeping).iter().for_each(|c| loads[c.device].add(c));
        }
    }
    let fits = loads.iter().all(|load| load.bytes <= load.capacity_bytes);
    (loads.iter().map(Load::total).fold(0.0, f64::max), fits)
}

/// `scripts/torchrec_plans.py` wrote the golden file.
#[test]
fn dlrm_dcnv2_is_planned_at_least_as_well_as_by_torchrec() {
    let golden = include_str!("../../../../tests/golden/planner/dlrm_dcnv2.json");
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let tables = golden["tables"].as_array().unwrap().iter().map(|of| TableWorkload {
        pooling: of["ids"].as_f64().unwrap(),
        access: Access::Zipf(0.8),
        ..table(of["name"].as_str().unwrap(), of["rows"].as_u64().unwrap(), golden["width"].as_u64().unwrap() as u32)
    });
    let workload = Workload { batch: golden["batch"].as_u64().unwrap() as u32, ..workload(tables.collect()) };
    let mut alone = f64::INFINITY;
    for of in golden["plans"].as_array().unwrap() {
        let (hosts, gpus) = (of["hosts"].as_u64().unwrap(), of["gpus"].as_u64().unwrap());
        let host =
            |h: u64| Host { reserved_gib: 32.0, bandwidth_gb_s: 150.0, row_ns: 1.0, ..host(&format!("h{h}"), 512.0) };
        let gpu = |h: u64, g: u64| Gpu {
            reserved_gib: 8.0,
            bandwidth_gb_s: 2000.0,
            ..gpu(&format!("h{h}g{g}"), &format!("h{h}"), 80.0)
        };
        let topology = Topology {
            hosts: (0..hosts).map(host).collect(),
            gpus: (0..hosts).flat_map(|h| (0..gpus).map(move |g| gpu(h, g))).collect(),
            remote: None,
            network: Some(Network { bandwidth_gb_s: 50.0, latency_us: 20.0 }),
        };
        let found = plan(&topology, &workload).unwrap();
        check(&found, &topology, &workload);
        let (theirs, fits) = rated(&topology, &workload, of);
        assert!(fits, "TorchRec's plan for {hosts} hosts");
        let both = format!("{hosts} hosts: {} us, TorchRec's plan {theirs} us\n{}", found.micros, report::text(&found));
        assert!(found.micros <= theirs, "{both}");
        assert!(found.micros <= alone * (1.0 + 1e-6), "{both}");
        alone = alone.min(found.micros);
    }
}

#[test]
fn several_hosts_do_not_read_a_cluster_for_each_other() {
    let (hosts, remote) = (vec![host("h0", 1.0), host("h1", 1.0)], Some(remote(10.0)));
    let topology = Topology { hosts, gpus: Vec::new(), remote, network: Some(network()) };
    let mut table = table("t", 10 << 20, 64);
    table.constraints.tiers = vec![Tier::Remote];
    let found = plan(&topology, &workload(vec![table.clone()])).unwrap();
    let planned = &found.tables[0];
    assert_eq!((planned.sharding, planned.shards.len()), (Sharding::DataParallel, 2));
    table.constraints.sharding = vec![Sharding::RowWise, Sharding::TableWise];
    let error = plan(&topology, &workload(vec![table])).unwrap_err().to_string();
    assert!(error.contains("has none of the tiers [remote] with sharding [row_wise, table_wise]"), "{error}");
}

#[test]
fn a_problem_with_too_many_placements_for_memory_is_rejected() {
    let (topology, workload) = large_problem();
    let bounds = Bounds { charges: 10_000, ..BOUNDS };
    let error = plan_within(&topology, &workload, bounds).unwrap_err().to_string();
    assert!(error.contains("500 tables on 16 devices have too many placements to search"), "{error}");
}

#[test]
fn tables_are_placed_on_the_expected_tiers() {
    let topology = Topology {
        hosts: vec![host("h0", 4.0)],
        gpus: vec![gpu("g0", "h0", 1.0)],
        remote: Some(remote(100.0)),
        network: None,
    };
    let mut hot = table("hot", 1 << 20, 64);
    hot.pooling = 100.0;
    let mut cold = table("cold", 100 << 20, 64);
    cold.pooling = 1.0;
    let found = plan(&topology, &workload(vec![hot, cold])).unwrap();
    assert_eq!(found.tables[0].shards[0].tier, Tier::Hbm, "{}", report::text(&found));
    assert_eq!(found.tables[1].shards[0].tier, Tier::Remote, "larger than all hosts");
    assert!(found.tables[1].hit_share > 0.0 && found.tables[1].shards[0].backing.as_deref() == Some("cluster"));
    let text = report::text(&found);
    for part in ["Planner statistics", "hot", "hbm", "table_wise", "Critical path", "cluster"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn planned_remote_caches_are_accepted_by_servers() {
    let topology =
        Topology { hosts: vec![host("h0", 4.0)], gpus: Vec::new(), remote: Some(remote(1.0)), network: None };
    for (rows, width) in [(1, 4), (3, 4), (10, 8), (1000, 64)] {
        let mut tiny = table("tiny", rows, width);
        tiny.constraints.tiers = vec![Tier::Remote];
        let found = plan(&topology, &workload(vec![tiny])).unwrap();
        let shard = &found.tables[0].shards[0];
        let cache = crate::tiers::cache::RowCache::new(width as usize * 4, shard.cache_bytes as usize);
        assert!(shard.tier == Tier::Remote && cache.is_ok(), "{rows} rows of {width}: {:?}", shard.cache_bytes);
    }
}

#[test]
fn invalid_workloads_are_rejected_by_name() {
    let parse = |text: &str| Workload::parse(text).map(|_| ()).unwrap_err().to_string();
    let table = |more: &str| format!("[[tables]]\nname = 't'\nrows = 10\nwidth = 8\n{more}\n");
    for (more, part) in [
        ("skew = 11.0", "`skew` is 11"),
        ("skew = 'zipf'", "`skew` is `zipf`"),
        ("pooling = 0.0", "`pooling` is 0"),
        ("pooling = nan", "`pooling` is NaN"),
        ("tiers = []", "`tiers` is empty"),
        ("tiers = ['disk']", "line 5"),
        ("cache_share = 1.5", "`cache_share` is 1.5"),
        ("width_min = 0", "`width_min` is 0"),
        ("features = []", "`features` is empty"),
        ("rows = 10", "line 5"),
        ("widht = 10", "line 5"),
    ] {
        let e = parse(&table(more));
        assert!(e.contains(part), "{more}: {e}");
    }
    assert!(parse("[[tables]]\nname = 't'\nrows = 0\nwidth = 8").contains("table `t`: `rows` is 0"));
    assert!(parse("[[tables]]\nname = 't'\nrows = 9\nwidth = 3\nformat = 'int4'").contains("multiple of 2"));
    assert!(parse(&format!("{}{}", table(""), table(""))).contains("two tables are named `t`"));
    assert!(parse(&format!("batch = 0\n{}", table(""))).contains("`batch` is 0"));
}

#[test]
fn invalid_topologies_are_rejected_by_name() {
    let base = "[[hosts]]\nname = 'h'\ndram_gib = 64\nbandwidth_gb_s = 20\nrow_ns = 15\ncall_us = 1\n";
    let parse = |text: &str| Topology::parse(text).map(|_| ()).unwrap_err().to_string();
    assert!(parse("hosts = []").contains("0 hosts"));
    assert!(parse(&base.replace("= 64", "= 0")).contains("host `h`: `dram_gib` is 0"));
    assert!(parse(&base.replace("= 20", "= inf")).contains("`bandwidth_gb_s` is inf"));
    assert!(parse(&base.replace("= 15", "= -1")).contains("`row_ns` is -1"));
    assert!(parse(&format!("{base}reserved_gib = 64\n")).contains("`reserved_gib` is 64"));
    assert!(parse(&format!("{base}{base}")).contains("without [network]"));
    assert!(parse(&format!("{base}{base}[network]\nbandwidth_gb_s = 1\nlatency_us = 1\n")).contains("two devices"));
    assert!(parse(&format!("{base}colour = 'red'\n")).contains("line 7"));
    assert!(parse(&format!("{base}servers = ['h']\n")).contains("host `h`: `servers` has `h`, expected HOST:PORT"));
    assert!(parse(&format!("{base}servers = ['h:0']\n")).contains("`servers` has `h:0`"));
    let detected = Topology::detect().unwrap();
    assert_eq!(Topology::parse(&detected.to_toml().unwrap()).unwrap(), detected);
}

#[test]
fn a_sample_of_requests_gives_pooling_and_skew() {
    let text =
        "[[tables]]\nname = 'a'\nrows = 1000\nwidth = 8\n[[tables]]\nname = 'b'\nrows = 1000\nwidth = 8\nskew = 0.5\n";
    let mut workload = Workload::parse(text).unwrap();
    let line = |i: i64| format!("{{\"features\": {{\"a\": [{}, 7, 7, {}], \"x\": \"y\"}}}}\n", i % 50, i % 3);
    let sample: String = (0..200).map(line).collect();
    workload.measure(&sample).unwrap();
    assert_eq!(workload.tables[0].pooling, 4.0);
    assert!(matches!(workload.tables[0].access, Access::Measured(_)));
    assert!(workload.tables[0].access.share(5, 1000) > 0.6);
    assert_eq!(workload.tables[1].access, Access::Zipf(0.5));
    assert!(workload.notes.iter().any(|n| n.contains("such as `b`")), "{:?}", workload.notes);
    for (invalid, part) in
        [("[1]", "line 1"), ("{\"features\": {\"a\": [1.5]}}", "`1.5` is not an id"), ("", "no request")]
    {
        let e = workload.measure(invalid).unwrap_err().to_string();
        assert!(e.contains(part), "{invalid}: {e}");
    }
}

#[test]
fn maps_of_managed_ids_take_memory_of_every_host() {
    let hosts = vec![host("a", 4.0), host("b", 4.0)];
    let topology = Topology { hosts, gpus: Vec::new(), remote: None, network: Some(network()) };
    let of = |managed: bool, rows: u64| {
        plan(&topology, &workload(vec![TableWorkload { managed, ..table("t", rows, 64) }, table("u", 1000, 64)]))
    };
    let (plain, managed) = (of(false, 1_000_000).unwrap(), of(true, 1_000_000).unwrap());
    for (with, without) in managed.devices.iter().zip(&plain.devices) {
        assert_eq!(without.capacity_bytes - with.capacity_bytes, 19_200_000);
    }
    assert!(managed.notes.iter().any(|n| n.contains("`t` has managed ids: a map of ")), "{:?}", managed.notes);
    assert!(plain.notes.iter().all(|n| !n.contains("managed ids")), "{:?}", plain.notes);
    // The rows alone would fit into both hosts.
    let rows = (78 << 30) / 10 / 256;
    assert!(of(false, rows).is_ok() && of(true, rows).is_err());
}

#[test]
fn tables_that_learn_count_masters_state_and_two_served_copies() {
    let topology = Topology { hosts: vec![host("h", 64.0)], gpus: Vec::new(), remote: None, network: None };
    let of = |train: Option<RuleKind>, format: RowFormat| {
        let mut one = TableWorkload { format, ..table("t", 1_000_000, 64) };
        train.map_or(Ok(()), |kind| one.learn(kind)).unwrap();
        plan(&topology, &workload(vec![one])).unwrap()
    };
    for format in [RowFormat::F16, RowFormat::Int8] {
        let read = of(None, format);
        for kind in RuleKind::ALL {
            let learned = of(Some(kind), format);
            let master = 1_000_000 * stretch_bytes(64, kind) as u64;
            assert_eq!(learned.bytes, 2 * read.bytes + master, "{kind:?}");
            assert!(learned.micros > read.micros, "{kind:?}");
            assert!(
                learned.notes.iter().any(|n| n.contains(&format!("`t` is trained by {}", kind.name()))),
                "{:?}",
                learned.notes
            );
            assert!(learned.tables[0].shards.iter().all(|shard| shard.tier == Tier::Host));
        }
    }
    let toml = "[[tables]]\nname = 't'\nrows = 10\nwidth = 8\ntrain = 'adam'\n";
    assert_eq!(Workload::parse(toml).unwrap().tables[0].train, Some(RuleKind::Adam));
    assert!(Workload::parse(&format!("{toml}tiers = ['hbm']\n")).unwrap_err().to_string().contains("`train`"));
    assert!(Workload::parse(&toml.replace("adam", "lamb")).is_err());
}
