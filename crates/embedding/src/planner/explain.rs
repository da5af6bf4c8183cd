//! Explains the result of a search: the plan as data, the reason for each table's placement, and the missing memory if the tables
//! do not fit.

use super::cost::{Charge, Machine};
use super::enumerate::{Candidate, Unit};
use super::plan::{DeviceKind, DevicePlan, PlacementPlan};
use super::report;
use super::search::{Choice, Load};
use super::workload::{SERVED_COPIES, TableWorkload, Workload};
use crate::place::{AccessCost, HostAccess, ShardPlan, Sharding, TablePlan};
use sterling_core::error::{Error, Result};

/// Estimates whose relative difference is below this count as equal.
const TIE: f64 = 1e-6;
/// Maximum number of devices listed in an error.
const DEVICES_LISTED: usize = 8;

/// Rejects tables whose smallest placements together exceed all memory.
pub(super) fn reject_oversized_tables(machine: &Machine, workload: &Workload, tables: &[Vec<Candidate>]) -> Result<()> {
    let least = |candidates: &Vec<Candidate>| candidates.iter().map(bytes_least).min().unwrap_or(0);
    let needed = tables.iter().map(least).fold(0u64, u64::saturating_add);
    let held = machine.devices.iter().map(|d| d.capacity_bytes).fold(0u64, u64::saturating_add);
    if needed <= held {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the {} tables do not fit: they need at least {}, all devices together hold {}: {} missing",
        workload.tables.len(),
        report::bytes(needed),
        report::bytes(held),
        report::bytes(needed - held)
    )))
}

fn bytes_least(candidate: &Candidate) -> u64 {
    let of_unit = |u: &Unit| {
        let sites = u.sites.iter().map(|s| s.charges.iter().map(|c| c.bytes).fold(0, u64::saturating_add));
        sites.min().unwrap_or(0)
    };
    candidate.units.iter().map(of_unit).fold(0, u64::saturating_add)
}

/// Returns the error of a search that found no placement for a table.
pub(super) fn shortfall(
    machine: &Machine,
    workload: &Workload,
    tables: &[Vec<Candidate>],
    table: usize,
    placed: usize,
    free_bytes: &[u64],
) -> Error {
    let over = |c: &Charge| c.bytes.saturating_sub(free_bytes[c.device]);
    let worst = |charges: &[Charge]| charges.iter().copied().max_by_key(over);
    // Placement that lacks the least memory: per candidate, the unit that lacks most at its best site.
    let of_candidate = |c: &Candidate| {
        let best_site = |u: &Unit| u.sites.iter().filter_map(|s| worst(&s.charges)).min_by_key(over);
        c.units.iter().filter_map(best_site).max_by_key(over).map(|charge| (over(&charge), charge, c.tier, c.sharding))
    };
    let closest = tables[table].iter().filter_map(of_candidate).min_by_key(|(missing, ..)| *missing);
    let needs = closest.map_or(String::new(), |(missing, charge, tier, sharding)| {
        let left = free_bytes[charge.device];
        // Units that fit one by one may not fit together.
        let together = if missing == 0 {
            "its shards do not fit together".into()
        } else {
            format!("{} missing", report::bytes(missing))
        };
        format!(
            ": its closest placement, {} {}, needs {} on `{}`, which has {} left: {together}",
            tier.name(),
            sharding.name(),
            report::bytes(charge.bytes),
            machine.devices[charge.device].name,
            report::bytes(left),
        )
    });
    let mut left: Vec<String> = machine
        .devices
        .iter()
        .zip(free_bytes)
        .map(|(d, free)| format!("{} {}", d.name, report::bytes(*free)))
        .collect();
    let more = left.len().saturating_sub(DEVICES_LISTED);
    left.truncate(DEVICES_LISTED);
    if more > 0 {
        left.push(format!("and {more} more devices"));
    }
    Error::invalid(format!(
        "table `{}` ({}) does not fit in addition to {placed} of {} tables{needs}; left: {}",
        workload.tables[table].name,
        report::bytes(workload.tables[table].bytes()),
        workload.tables.len(),
        left.join(", ")
    ))
}

/// Returns the plan of one choice per table.
pub(super) fn plan_of(
    machine: &Machine,
    workload: &Workload,
    tables: &[Vec<Candidate>],
    choices: &[Choice],
) -> PlacementPlan {
    let mut loads: Vec<Load> = machine.devices.iter().map(Load::new).collect();
    for (candidates, choice) in tables.iter().zip(choices) {
        charges_of(candidates, choice).for_each(|c| loads[c.device].add(c));
    }
    let described = workload.tables.iter().zip(tables).zip(choices);
    let plans: Vec<TablePlan> = described
        .map(|((table, candidates), choice)| table_plan(machine, table, candidates, choice, &mut loads))
        .collect();
    let devices = device_plans(machine, workload, &plans, &loads);
    let slowest = devices.iter().max_by(|a, b| a.micros.total_cmp(&b.micros)).expect("a machine has a host");
    let mut notes = workload.notes.clone();
    notes.extend(workload.tables.iter().filter_map(learning));
    notes.extend(workload.tables.iter().filter_map(managed));
    notes.extend(devices.iter().filter_map(|d| {
        let load = d.load.filter(|l| *l > 1.0)?;
        Some(format!("`{}` cannot keep up: the stated request rate needs {:.0} % of its time", d.device, load * 100.0))
    }));
    PlacementPlan {
        batch: workload.batch,
        micros: slowest.micros,
        slowest: slowest.device.clone(),
        bytes: plans.iter().map(|p| p.bytes).sum(),
        candidates: tables.iter().flatten().map(|c| c.units.iter().map(|u| u.sites.len()).sum::<usize>()).sum(),
        tables: plans,
        devices,
        notes,
    }
}

/// Describes the memory of a table in training.
fn learning(table: &TableWorkload) -> Option<String> {
    let kind = table.train?;
    let masters = table.rows.saturating_mul(4 * u64::from(table.width));
    let with_state = table.rows.saturating_mul(table.master_bytes(table.width));
    let served = table.bytes().saturating_mul(SERVED_COPIES);
    Some(format!(
        "table `{}` is trained by {}: f32 rows {}, optimizer state {}, {SERVED_COPIES} served copies as {} {}",
        table.name,
        kind.name(),
        report::bytes(masters),
        report::bytes(with_state.saturating_sub(masters)),
        table.format.name(),
        report::bytes(served)
    ))
}

/// Describes the memory of managed ids, which is subtracted from the capacity of hosts.
fn managed(table: &TableWorkload) -> Option<String> {
    let bytes = report::bytes(table.map_bytes());
    table.managed.then(|| format!("table `{}` has managed ids: a map of {bytes} on every host", table.name))
}

fn device_plans(machine: &Machine, workload: &Workload, plans: &[TablePlan], loads: &[Load]) -> Vec<DevicePlan> {
    let steps_per_s = workload.requests_per_s.map(|r| r / (f64::from(workload.batch) * machine.hosts as f64));
    let described = machine.devices.iter().zip(loads).map(|(device, load)| {
        let on_it = |s: &&ShardPlan| s.device == device.name || s.backing.as_ref() == Some(&device.name);
        let micros = load.total().max(0.0);
        DevicePlan {
            device: device.name.clone(),
            kind: device.kind,
            bytes: load.bytes,
            capacity_bytes: load.capacity_bytes,
            micros,
            load: steps_per_s.map(|s| s * micros / 1e6),
            shards: plans.iter().flat_map(|p| &p.shards).filter(on_it).count(),
            host: (device.kind == DeviceKind::Gpu).then(|| machine.devices[device.host].name.clone()),
            servers: device.servers.clone(),
        }
    });
    described.collect()
}

fn charges_of<'a>(candidates: &'a [Candidate], choice: &'a Choice) -> impl Iterator<Item = &'a Charge> {
    let units = candidates[choice.candidate].units.iter().zip(&choice.sites);
    units.flat_map(|(unit, site)| &unit.sites[*site].charges)
}

fn table_plan(
    machine: &Machine,
    table: &TableWorkload,
    candidates: &[Candidate],
    choice: &Choice,
    loads: &mut [Load],
) -> TablePlan {
    let chosen = &candidates[choice.candidate];
    let mut shards = Vec::new();
    for (unit, site) in chosen.units.iter().zip(&choice.sites) {
        for (number, (piece, keeping)) in unit.pieces.iter().zip(&unit.sites[*site].keepings).enumerate() {
            let charges = machine.charges(table, piece, keeping);
            shards.push(ShardPlan {
                rows: piece.rows,
                columns: piece.columns,
                copy: if chosen.sharding == Sharding::DataParallel { number } else { unit.copy },
                tier: keeping.tier,
                device: machine.devices[keeping.device].name.clone(),
                backing: machine.backing(keeping.tier, keeping.device).map(|b| machine.devices[b].name.clone()),
                cache_bytes: machine.cache_bytes(table, piece, keeping),
                bytes: charges.iter().map(|c| c.bytes).fold(0, u64::saturating_add),
                micros: charges[0].micros,
            });
        }
    }
    TablePlan {
        table: table.name.clone(),
        format: table.format,
        sharding: chosen.sharding,
        bytes: shards.iter().map(|s| s.bytes).fold(0, u64::saturating_add),
        micros: longest(charges_of(candidates, choice)),
        hit_share: chosen.cache.1,
        why: why(machine, candidates, choice, loads),
        ways: if machine.hosts > 1 { ways(machine, candidates) } else { Vec::new() },
        shards,
    }
}

/// Returns the cost of the fastest placement per type of access, on an idle machine.
fn ways(machine: &Machine, candidates: &[Candidate]) -> Vec<AccessCost> {
    let mut ways: Vec<AccessCost> = Vec::new();
    for candidate in candidates {
        let (loads, _) = alone(machine, candidate);
        let micros = loads.iter().map(Load::total).fold(0.0, f64::max);
        let bytes = loads.iter().map(|load| load.bytes).fold(0, u64::saturating_add);
        let (way, tier, sharding) =
            (HostAccess::of(candidate.tier, candidate.has_copies), candidate.tier, candidate.sharding);
        let cost = AccessCost { way, tier, sharding, micros, bytes };
        match ways.iter_mut().find(|known| known.way == way) {
            Some(known) if known.micros <= micros => {}
            Some(known) => *known = cost,
            None => ways.push(cost),
        }
    }
    ways.sort_by_key(|cost| cost.way);
    ways
}

/// Returns the device loads and the sites of a candidate on an otherwise empty machine, regardless of memory.
fn alone(machine: &Machine, candidate: &Candidate) -> (Vec<Load>, Vec<usize>) {
    let mut loads: Vec<Load> = machine.devices.iter().map(Load::new).collect();
    loads.iter_mut().for_each(|l| l.capacity_bytes = u64::MAX);
    let sites = spread(candidate, &mut loads).unwrap_or_else(|_| vec![0; candidate.units.len()]);
    (loads, sites)
}

/// Returns the time of the device with the highest total of these costs.
fn longest<'a>(charges: impl Iterator<Item = &'a Charge>) -> f64 {
    let mut by_device: Vec<(usize, f64)> = Vec::new();
    for charge in charges {
        match by_device.iter_mut().find(|(d, _)| *d == charge.device) {
            Some((_, micros)) => *micros += charge.micros,
            None => by_device.push((charge.device, charge.micros)),
        }
    }
    by_device.into_iter().map(|(_, micros)| micros).fold(0.0, f64::max)
}

/// Explains why the chosen candidate was preferred to the candidate that is fastest on idle machines. Restores `loads`.
fn why(machine: &Machine, candidates: &[Candidate], choice: &Choice, loads: &mut [Load]) -> String {
    let n = candidates.len();
    if n == 1 {
        return "the only placement allowed".into();
    }
    let chosen = longest(charges_of(candidates, choice));
    let longest_alone = |c: &Candidate| {
        let (_, sites) = alone(machine, c);
        longest(c.units.iter().zip(sites).flat_map(|(u, s)| &u.sites[s].charges))
    };
    let timed = candidates.iter().map(|c| (longest_alone(c), c));
    let Some((micros, fastest)) = timed.min_by(|a, b| a.0.total_cmp(&b.0)) else { return String::new() };
    if chosen <= micros * (1.0 + TIE) {
        return format!("fastest of {n} placements");
    }
    let name = format!("{} {}", fastest.tier.name(), fastest.sharding.name());
    charges_of(candidates, choice).for_each(|c| loads[c.device].remove(c));
    let before = loads.to_vec();
    let placed = spread(fastest, loads);
    let slowest = loads.iter().map(Load::total).fold(0.0, f64::max);
    loads.clone_from_slice(&before);
    charges_of(candidates, choice).for_each(|c| loads[c.device].add(c));
    match placed {
        Err(full) => {
            let free = report::bytes(before[full.device].capacity_bytes - before[full.device].bytes);
            let device = &machine.devices[full.device].name;
            format!(
                "{name} takes {} but lacks memory: {} needed on `{device}`, {free} left",
                report::micros(micros),
                report::bytes(full.bytes)
            )
        }
        Ok(_) => {
            let now = loads.iter().map(Load::total).fold(0.0, f64::max);
            if slowest > now * (1.0 + TIE) {
                format!("{name} takes {} but slows the batch to {}", report::micros(micros), report::micros(slowest))
            } else {
                format!("{name} takes {} on an idle machine; here it saves nothing", report::micros(micros))
            }
        }
    }
}

/// Places each unit of a candidate at the site whose busiest device is least busy. Returns the sites, or a cost that does not fit.
fn spread(candidate: &Candidate, loads: &mut [Load]) -> std::result::Result<Vec<usize>, Charge> {
    let mut sites = Vec::with_capacity(candidate.units.len());
    for unit in &candidate.units {
        let over = |c: &&Charge| c.bytes > loads[c.device].capacity_bytes - loads[c.device].bytes;
        let fits = |site: &usize| !unit.sites[*site].charges.iter().any(|c| over(&c));
        let busiest =
            |site: &usize| unit.sites[*site].charges.iter().map(|c| loads[c.device].with(c)).fold(0.0, f64::max);
        let best = (0..unit.sites.len()).filter(fits).min_by(|a, b| busiest(a).total_cmp(&busiest(b)));
        let Some(best) = best else {
            let full = unit.sites.iter().flat_map(|s| &s.charges).filter(over);
            let least = full.min_by_key(|c| c.bytes - (loads[c.device].capacity_bytes - loads[c.device].bytes));
            return Err(*least.expect("no site fits, so a charge does not"));
        };
        unit.sites[best].charges.iter().for_each(|c| loads[c.device].add(c));
        sites.push(best);
    }
    Ok(sites)
}
