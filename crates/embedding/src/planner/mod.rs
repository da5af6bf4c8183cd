//! Decides the placement of each table's rows: tier, sharding and devices.
//!
//! As in TorchRec's planner, the inputs are a [`topology`] (capacities, bandwidths, latencies) and a [`workload`] (tables,
//! pooling, skew, constraints). The output is a [`PlacementPlan`] with the estimated cost of each table and device, and reasons.
//! `enumerate` lists the placements that a table's constraints allow, `cost` estimates each placement (bytes, microseconds), and
//! `search` selects one per table so that the slowest device is as fast as possible and no device overflows. [`calibrate`] and
//! [`calibrate_gpu`] measure the constants of a topology. `docs/reference/planner.md` has the grammar of the two TOML files and
//! the formulas.

pub mod access;
pub mod calibrate;
#[cfg(feature = "cuda")]
pub mod calibrate_gpu;
mod cost;
mod enumerate;
mod explain;
pub mod plan;
pub mod report;
mod search;
#[cfg(feature = "redis")]
mod survey;
#[cfg(test)]
mod tests;
pub mod topology;
pub mod workload;

pub use plan::PlacementPlan;
pub use topology::Topology;
pub use workload::Workload;

use cost::Machine;
use enumerate::Candidate;
use search::{Choice, Outcome};
use sterling_core::error::{Error, Result};

/// Limits of the search effort.
#[derive(Clone, Copy)]
struct Bounds {
    /// Number of per-device costs to evaluate before a search stops improving.
    work: u64,
    /// Maximum number of per-device costs of all candidates together.
    charges: usize,
}

/// About two seconds of one core per search (several hosts take two searches), and 2 GB of memory.
const BOUNDS: Bounds = Bounds { work: 60_000_000, charges: 10_000_000 };

/// Returns the best found placement of all tables: the one with the least time of the slowest device.
///
/// The same input gives the same plan on any machine.
///
/// # Errors
/// [`sterling_core::error::Kind::Invalid`] if the tables cannot fit (the error names the device and the missing bytes), or if the
/// topology has no placement that a table's constraints allow.
pub fn plan(topology: &Topology, workload: &Workload) -> Result<PlacementPlan> {
    plan_within(topology, workload, BOUNDS)
}

fn plan_within(topology: &Topology, workload: &Workload, bounds: Bounds) -> Result<PlacementPlan> {
    topology.validate()?;
    workload.validate()?;
    let mut machine = Machine::new(topology, workload.batch);
    // Ids are resolved to rows before shards are read, so every host has the maps.
    machine.reserve(workload.tables.iter().map(|table| table.map_bytes()).fold(0, u64::saturating_add));
    let mut tables: Vec<Vec<Candidate>> = Vec::with_capacity(workload.tables.len());
    let mut charges = 0;
    for table in &workload.tables {
        let found = enumerate::candidates(&machine, table)?;
        charges +=
            found.iter().flat_map(|c| &c.units).flat_map(|u| u.sites.iter()).map(|s| s.charges.len()).sum::<usize>();
        if charges > bounds.charges {
            return Err(Error::unsupported(format!(
                "{} tables on {} devices have too many placements to search; allow fewer tiers or sharding types",
                workload.tables.len(),
                machine.devices.len()
            )));
        }
        tables.push(found);
    }
    explain::reject_oversized_tables(&machine, workload, &tables)?;
    let copies = if machine.hosts > 1 { copies_of_hosts(&machine, workload, &tables, bounds.work) } else { None };
    match search::search(&machine, &tables, bounds.work, copies) {
        Outcome::Found(choices) => Ok(explain::plan_of(&machine, workload, &tables, &choices)),
        Outcome::Stuck { table, placed, free_bytes } => {
            Err(explain::shortfall(&machine, workload, &tables, table, placed, &free_bytes))
        }
    }
}

/// Returns the best plan in which each host has replicas of all tables, as if it were the only host. Identical hosts get the same
/// placements.
fn copies_of_hosts(
    machine: &Machine,
    workload: &Workload,
    tables: &[Vec<Candidate>],
    work: u64,
) -> Option<Vec<Choice>> {
    let numbers = |candidates: &Vec<Candidate>| -> Vec<usize> {
        (0..candidates.len()).filter(|&number| candidates[number].has_copies).collect()
    };
    let numbers: Vec<Vec<usize>> = tables.iter().map(numbers).collect();
    if numbers.iter().any(Vec::is_empty) {
        return None;
    }
    let picked = numbers.iter().zip(tables);
    let copies: Vec<Vec<Candidate>> =
        picked.map(|(numbers, table)| numbers.iter().map(|&number| table[number].clone()).collect()).collect();
    explain::reject_oversized_tables(machine, workload, &copies).ok()?;
    let Outcome::Found(choices) = search::search(machine, &copies, work, None) else { return None };
    let complete = choices.into_iter().zip(&numbers);
    Some(complete.map(|(choice, numbers)| Choice { candidate: numbers[choice.candidate], ..choice }).collect())
}
