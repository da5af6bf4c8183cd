//! Enumerates the placements of a table that its constraints and the topology allow.
//!
//! A candidate is a tier, a sharding type and, for a cached tier, a cache size. The shards of a candidate are grouped into
//! *units* that are placed independently; a *site* is a possible location of a unit: a device per shard. Table-wise: one unit
//! with a site per device; column-wise: a unit per range of columns; row-wise over all devices: one unit with one site; row-wise
//! over the devices of one host: one unit with a site per host; grid: a unit per range of columns with a site per host. Replicas
//! per host repeat the units of one host, with sites on each host. So the search needs no knowledge of sharding: it selects a
//! candidate per table and a site per unit.

use std::rc::Rc;

use super::cost::{Charge, Machine, Piece, PieceStorage};
use super::plan::DeviceKind;
use super::workload::TableWorkload;
use crate::place::{Sharding, Tier};
use sterling_core::error::{Error, Result};

/// Cache sizes to try, as fractions of the rows.
const CACHE_SHARES: [f64; 8] = [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5];
/// Numbers of column ranges to try.
const COLUMN_CUTS: [usize; 9] = [2, 3, 4, 6, 8, 12, 16, 24, 32];
/// Ranges of columns start at multiples of this number, so that packed formats split at complete bytes.
const COLUMN_STEP: u32 = 4;

/// One possible placement of a table.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub tier: Tier,
    pub sharding: Sharding,
    /// Fraction of the rows in caches, and their hit rate, as in [`PieceStorage::cache`].
    pub cache: (f64, f64),
    /// True if every host, or every device, has a replica of the table.
    pub has_copies: bool,
    pub units: Vec<Unit>,
}

/// Shards that are placed together.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub pieces: Vec<Piece>,
    /// With a replica per host, index of the replica.
    pub copy: usize,
    /// Possible locations, shared by units of the same shape.
    pub sites: Rc<[Site]>,
}

/// A unit before the costs of its sites are estimated: its shards, and per site the devices of the shards.
#[derive(Clone, Debug)]
struct Cut {
    pieces: Vec<Piece>,
    places: Vec<Vec<usize>>,
    copy: usize,
}

/// Possible location of a unit.
#[derive(Clone, Debug)]
pub(super) struct Site {
    /// Storage of each shard of the unit.
    pub keepings: Vec<PieceStorage>,
    /// Total cost of the shards, one entry per device.
    pub charges: Vec<Charge>,
}

/// Returns the candidates of a table, except candidates that do not fit even empty machines.
///
/// # Errors
/// [`sterling_core::error::Kind::Invalid`] if no placement is allowed, or no allowed placement fits the empty machines.
pub(super) fn candidates(machine: &Machine, table: &TableWorkload) -> Result<Vec<Candidate>> {
    let pinned = match &table.constraints.device {
        None => None,
        Some(name) => Some(machine.devices.iter().position(|d| &d.name == name).ok_or_else(|| {
            Error::invalid(format!("table `{}`: pinned to `{name}`, which is not in the topology", table.name))
        })?),
    };
    let mut maker = OptionEnumerator { machine, table, pinned, found: Vec::new(), closest: None };
    for &tier in &table.constraints.tiers {
        maker.tier(tier);
    }
    if !maker.found.is_empty() {
        return Ok(maker.found);
    }
    Err(match maker.closest {
        Some((needed, device, tier, sharding)) => {
            let device = &machine.devices[device];
            let missing = super::report::bytes(needed - device.capacity_bytes);
            Error::invalid(format!(
                "table `{}` fits nowhere: its best placement, {} {}, needs {} on `{}`, which holds {}: {missing} missing",
                table.name,
                tier.name(),
                sharding.name(),
                super::report::bytes(needed),
                device.name,
                super::report::bytes(device.capacity_bytes),
            ))
        }
        None => Error::invalid(format!(
            "table `{}`: the topology has none of the tiers [{}] with sharding [{}]{}",
            table.name,
            table.constraints.tiers.iter().map(|t| t.name()).collect::<Vec<_>>().join(", "),
            table.constraints.sharding.iter().map(|s| s.name()).collect::<Vec<_>>().join(", "),
            table.constraints.device.as_ref().map_or(String::new(), |d| format!(" on `{d}`")),
        )),
    })
}

struct OptionEnumerator<'a> {
    machine: &'a Machine,
    table: &'a TableWorkload,
    pinned: Option<usize>,
    found: Vec<Candidate>,
    /// Placement that lacks the least memory: bytes needed, device, tier and sharding.
    closest: Option<(u64, usize, Tier, Sharding)>,
}

impl OptionEnumerator<'_> {
    /// Returns the devices that can serve a tier.
    fn devices(&self, tier: Tier) -> Vec<usize> {
        let kind = if tier.on_gpu() { DeviceKind::Gpu } else { DeviceKind::Host };
        let all = (0..self.machine.devices.len()).filter(|d| self.machine.devices[*d].kind == kind);
        all.filter(|d| self.pinned.is_none_or(|p| p == *d)).collect()
    }

    /// Groups the devices of a tier by host.
    fn by_host(&self, devices: &[usize]) -> Vec<Vec<usize>> {
        let of_host = |h| devices.iter().copied().filter(|d| self.machine.devices[*d].host == h).collect();
        (0..self.machine.hosts).map(of_host).filter(|d: &Vec<usize>| !d.is_empty()).collect()
    }

    fn tier(&mut self, tier: Tier) {
        let devices = self.devices(tier);
        if devices.is_empty() || (tier == Tier::Remote && self.machine.cluster().is_none()) {
            return;
        }
        let shares: Vec<f64> = match (tier.is_cached(), self.table.constraints.cache_share) {
            (false, _) => vec![1.0],
            (true, Some(share)) => vec![share],
            (true, None) => CACHE_SHARES.to_vec(),
        };
        for share in shares {
            let hottest = (self.table.rows as f64 * share).ceil() as u64;
            let hit = if tier.is_cached() { self.table.access.share(hottest, self.table.rows) } else { 1.0 };
            // With several hosts, each host reads the cluster for itself.
            let is_allowed = |sharding: &Sharding| {
                tier != Tier::Remote || self.machine.hosts == 1 || *sharding == Sharding::DataParallel
            };
            let allowed = self.table.constraints.sharding.iter().copied().filter(is_allowed);
            for sharding in allowed.collect::<Vec<_>>() {
                self.sharding(tier, sharding, (share, hit), &devices);
            }
        }
    }

    fn sharding(&mut self, tier: Tier, sharding: Sharding, cache: (f64, f64), devices: &[usize]) {
        let hosts = self.by_host(devices);
        for cuts in self.cuts(tier, sharding, devices) {
            self.push(tier, sharding, cache, &cuts, 1);
        }
        // A replica per host, sharded within the host. If hosts have one device each, a replica per host is a replica
        // per device.
        let is_allowed = tier != Tier::Remote
            && sharding != Sharding::DataParallel
            && self.table.constraints.sharding.contains(&Sharding::DataParallel);
        if !is_allowed || hosts.len() < 2 || hosts.len() < self.machine.hosts || hosts.iter().all(|h| h.len() == 1) {
            return;
        }
        let mut of_hosts: Vec<_> = hosts.iter().map(|devices| self.cuts(tier, sharding, devices).into_iter()).collect();
        loop {
            let next: Option<Vec<Vec<Cut>>> = of_hosts.iter_mut().map(Iterator::next).collect();
            let Some(next) = next else { break };
            let numbered = |(copy, cuts): (usize, Vec<Cut>)| cuts.into_iter().map(move |cut| Cut { copy, ..cut });
            let cuts: Vec<Cut> = next.into_iter().enumerate().flat_map(numbered).collect();
            self.push(tier, sharding, cache, &cuts, hosts.len());
        }
    }

    /// Returns the ways to shard a table over some devices.
    fn cuts(&self, tier: Tier, sharding: Sharding, devices: &[usize]) -> Vec<Vec<Cut>> {
        let (rows, width) = (self.table.rows, self.table.width);
        let complete = Piece { rows: [0, rows], columns: [0, width] };
        // On one device, a sharded table costs more than an unsharded table. Sharded candidates are enumerated only if
        // table-wise placement is not allowed.
        let cut_here = |n: usize| n > 1 || !self.table.constraints.sharding.contains(&Sharding::TableWise);
        let singles: Vec<Vec<usize>> = devices.iter().map(|d| vec![*d]).collect();
        let hosts = self.by_host(devices);
        let cut = |pieces: Vec<Piece>, places: Vec<Vec<usize>>| Cut { pieces, places, copy: 0 };
        match sharding {
            Sharding::TableWise => vec![vec![cut(vec![complete], singles)]],
            Sharding::DataParallel => {
                let everywhere = !tier.on_gpu() || hosts.len() == self.machine.hosts;
                match cut_here(devices.len()) && everywhere {
                    true => vec![vec![cut(vec![complete; devices.len()], vec![devices.to_vec()])]],
                    false => Vec::new(),
                }
            }
            Sharding::RowWise if cut_here(devices.len()) => {
                let pieces = rows_of(complete, devices.len().max(2));
                let site = (0..pieces.len()).map(|p| devices[p % devices.len()]).collect();
                vec![vec![cut(pieces, vec![site])]]
            }
            Sharding::RowWise => Vec::new(),
            Sharding::ColumnWise => {
                let all = self.column_cuts(devices.len(), cut_here(devices.len())).into_iter();
                all.map(|parts| parts.into_iter().map(|p| cut(vec![p], singles.clone())).collect()).collect()
            }
            Sharding::TableRowWise => {
                let sites = host_sites(&hosts, cut_here(1)).into_iter();
                sites.map(|(n, sites)| vec![cut(rows_of(complete, n), sites)]).collect()
            }
            Sharding::Grid => {
                let Some((n, sites)) = host_sites(&hosts, cut_here(1)) else { return Vec::new() };
                let all = self.column_cuts(hosts.len().max(2), true).into_iter();
                all.map(|parts| parts.into_iter().map(|p| cut(rows_of(p, n), sites.clone())).collect()).collect()
            }
        }
    }

    /// Returns splits of the columns into up to `most` ranges; no range is narrower than `width_min`.
    fn column_cuts(&self, most: usize, wanted: bool) -> Vec<Vec<Piece>> {
        let (rows, width) = (self.table.rows, self.table.width);
        let cut = |n: usize| -> Option<Vec<Piece>> {
            let edge = |i: usize| match i {
                i if i == n => width,
                i => (u64::from(width) * i as u64 / n as u64) as u32 / COLUMN_STEP * COLUMN_STEP,
            };
            let parts: Vec<Piece> =
                (0..n).map(|i| Piece { rows: [0, rows], columns: [edge(i), edge(i + 1)] }).collect();
            let narrowest = parts.iter().map(|p| p.columns[1] - p.columns[0]).min()?;
            (narrowest >= self.table.constraints.width_min.max(1)).then_some(parts)
        };
        let most = most.max(2);
        COLUMN_CUTS.iter().filter(|n| wanted && **n <= most).filter_map(|n| cut(*n)).collect()
    }

    /// Adds a candidate of `copies` replicas, each sharded within a host, unless one of its units fits nowhere.
    fn push(&mut self, tier: Tier, sharding: Sharding, cache: (f64, f64), cuts: &[Cut], copies: usize) {
        let mut made: Vec<Unit> = Vec::with_capacity(cuts.len());
        for cut in cuts {
            let width = |p: &Piece| p.columns[1] - p.columns[0];
            let is_alike = |u: &&Unit| u.copy == cut.copy && width(&u.pieces[0]) == width(&cut.pieces[0]);
            let alike = made.iter().find(is_alike).map(|u| Rc::clone(&u.sites));
            let sites = alike.unwrap_or_else(|| {
                let site = |devices: &Vec<usize>| self.site(tier, sharding, cache, &cut.pieces, devices, copies);
                let all: Vec<Site> = cut.places.iter().map(site).collect();
                all.into_iter().filter(|s| self.holds(s, tier, sharding)).collect()
            });
            if sites.is_empty() {
                return;
            }
            made.push(Unit { pieces: cut.pieces.clone(), copy: cut.copy, sites });
        }
        let has_copies = copies > 1 || sharding == Sharding::DataParallel;
        self.found.push(Candidate { tier, sharding, cache, has_copies, units: made });
    }

    fn site(
        &self,
        tier: Tier,
        sharding: Sharding,
        cache: (f64, f64),
        pieces: &[Piece],
        devices: &[usize],
        copies: usize,
    ) -> Site {
        let is_copied = sharding == Sharding::DataParallel;
        let replicas = if is_copied { devices.len() } else { copies };
        let mut backed: Vec<usize> = Vec::new();
        let mut site = Site { keepings: Vec::new(), charges: Vec::new() };
        for (piece, &device) in pieces.iter().zip(devices) {
            let brings_rows = match self.machine.backing(tier, device) {
                Some(backing) if is_copied && backed.contains(&backing) => false,
                Some(backing) => {
                    backed.push(backing);
                    true
                }
                None => true,
            };
            let keeping = PieceStorage { tier, device, cache, replicas, brings_rows };
            for charge in self.machine.charges(self.table, piece, &keeping) {
                match site.charges.iter_mut().find(|c| c.device == charge.device) {
                    Some(same) => {
                        same.bytes = same.bytes.saturating_add(charge.bytes);
                        same.micros += charge.micros;
                        same.uses |= charge.uses;
                    }
                    None => site.charges.push(charge),
                }
            }
            site.keepings.push(keeping);
        }
        site
    }

    /// Returns whether empty machines can hold the site; records the placement that lacks the least memory.
    fn holds(&mut self, site: &Site, tier: Tier, sharding: Sharding) -> bool {
        let over = |c: &Charge| c.bytes.saturating_sub(self.machine.devices[c.device].capacity_bytes);
        let Some(worst) = site.charges.iter().max_by_key(|c| over(c)).filter(|c| over(c) > 0) else { return true };
        let missing =
            |(needed, device, ..): &(u64, usize, Tier, Sharding)| needed - self.machine.devices[*device].capacity_bytes;
        if self.closest.as_ref().is_none_or(|c| over(worst) < missing(c)) {
            self.closest = Some((worst.bytes, worst.device, tier, sharding));
        }
        false
    }
}

/// Splits a shard into `n` ranges of rows of nearly equal size, or fewer if the shard has fewer rows.
fn rows_of(piece: Piece, n: usize) -> Vec<Piece> {
    let rows = piece.rows[1] - piece.rows[0];
    let n = (n as u64).min(rows).max(1);
    let edge = |i: u64| piece.rows[0] + (u128::from(rows) * u128::from(i) / u128::from(n)) as u64;
    (0..n).map(|i| Piece { rows: [edge(i), edge(i + 1)], columns: piece.columns }).collect()
}

/// Returns the sites of row ranges over the devices of one host; only hosts with the maximum number of devices are
/// used. If hosts have one device each and `alone` is set, two row ranges share the device.
fn host_sites(hosts: &[Vec<usize>], alone: bool) -> Option<(usize, Vec<Vec<usize>>)> {
    let most = hosts.iter().map(Vec::len).max()?;
    if most > 1 {
        return Some((most, hosts.iter().filter(|h| h.len() == most).cloned().collect()));
    }
    alone.then(|| (2, hosts.iter().map(|h| vec![h[0]; 2]).collect()))
}
