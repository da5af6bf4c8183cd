//! Cost model of a shard of a table on a device: bytes, and microseconds per batch.
//!
//! Each host answers its own requests, Q per step, so that a step answers B = Q x hosts requests; a shard that is not replicated
//! answers all B requests. With L ids per bag, F features and a shard of width w that has the fraction s of the rows:
//!
//! ```text
//! ids   = B F L s                      bags = B F (1 - (1 - s)^L), all B F where s = 1
//! read  = ids (row_ns + row_bytes / bandwidth) + bags 4 w / bandwidth
//! net   = (hosts - 1) / hosts ids (8 + row_bytes) / network bandwidth     nothing when replicated
//! away  = ids / hosts (row_ns + row_bytes / bandwidth + (8 + row_bytes) / network bandwidth)
//!                                      of each other host: rows are sent to it and pooled there; nothing when replicated
//! link  = 4 w bags / link bandwidth                                       host memory of a host with GPUs
//! miss  = ids (1 - hit)                                                   hit from the access curve
//! hbm_cached: read on the GPU + miss row_bytes / link; the host pays miss (row_ns + row_bytes / bandwidth)
//! remote: read on the host + miss max(1 / rows_per_s, row_bytes / bandwidth) of all nodes; the same cost on the cluster
//! ```
//!
//! A table in training is in host memory: its master table of f32 rows with m bytes of optimizer state, and two copies in the
//! served format. Its cost is the cost of a training step with U distinct rows among B F L ids; each replica processes all B F L
//! ids:
//!
//! ```text
//! read   = ids (row_ns + 4 w / bandwidth) + bags 4 w / bandwidth
//! update = 16 ids / bandwidth + bags 8 w / bandwidth + U s (2 row_ns + 2 m / bandwidth)
//! ```
//!
//! Each host reads the cluster on its own, through its own cache, so with several hosts the tier remote is always replicated.
//!
//! The latencies of a call, a round trip, a link and a network are paid once per batch by each device that uses them, not once
//! per table, because a batch requests the rows of all tables together. The time of a device is the sum of its costs; the time
//! of a plan is the time of its slowest device.

use super::plan::DeviceKind;
use super::topology::Topology;
use super::workload::TableWorkload;
use crate::place::Tier;
use crate::tiers::cache::ENTRY_OVERHEAD_BYTES;

/// Overhead per row in a GPU cache, in bytes: the row's id, index entry and age.
const DEVICE_ENTRY_BYTES: u64 = 16;
/// Bytes moved to sort one id.
const SORT_BYTES: f64 = 16.0;
/// Kinds of latency that a device pays once per batch.
pub(super) const LATENCIES: usize = 4;
const NETWORK: u8 = 1;
const LINK: u8 = 2;
const ROUND_TRIP: u8 = 4;
const CALL: u8 = 8;

/// A device with the constants that the cost model needs.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub name: String,
    pub kind: DeviceKind,
    pub capacity_bytes: u64,
    /// Addresses at which other hosts reach the servers of this host.
    pub servers: Vec<String>,
    /// Index of the device's host; for the cluster, the device's own index.
    pub host: usize,
    /// Latencies, indexed by the bit of [`Charge::uses`].
    pub once_us: [f64; LATENCIES],
    row_ns: f64,
    bandwidth: f64,
    /// Bytes per nanosecond between host and GPU: for a GPU, its link; for a host, the sum of the links of its GPUs, or
    /// 0 without GPUs.
    link: f64,
}

/// Cost that a placement causes on one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Charge {
    pub device: usize,
    pub bytes: u64,
    pub micros: f64,
    /// Bits of the latencies that the device pays for this cost.
    pub uses: u8,
}

/// A rectangle (rows x columns) of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Piece {
    pub rows: [u64; 2],
    pub columns: [u32; 2],
}

/// Storage of a shard on the device that serves it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceStorage {
    pub tier: Tier,
    pub device: usize,
    /// Fraction of the shard's rows in its cache, and fraction of the reads that hit the cache.
    pub cache: (f64, f64),
    /// Number of replicas that share the reads; 1 if all hosts use one shard.
    pub replicas: usize,
    /// False for a replica whose rows in host memory are already counted for another replica.
    pub brings_rows: bool,
}

/// The topology as one list of devices: hosts, then GPUs, then the cluster.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub devices: Vec<Device>,
    pub hosts: usize,
    batch: f64,
    network: f64,
    /// Totals of the cluster's nodes: microseconds per row, bytes per nanosecond, stored bytes per byte of rows.
    remote: Option<(f64, f64, f64)>,
}

impl Machine {
    pub(crate) fn new(topology: &Topology, batch: u32) -> Machine {
        let mut devices = Vec::new();
        let latency = topology.network.as_ref().map_or(0.0, |n| n.latency_us);
        for (at, host) in topology.hosts.iter().enumerate() {
            let gpus = topology.gpus.iter().filter(|g| g.host == host.name);
            let link_us = gpus.clone().map(|g| g.link_us).fold(0.0, f64::max);
            devices.push(Device {
                name: host.name.clone(),
                kind: DeviceKind::Host,
                capacity_bytes: host.capacity_bytes(),
                servers: host.servers.clone(),
                host: at,
                once_us: [latency, link_us, topology.remote.as_ref().map_or(0.0, |r| r.round_trip_us), host.call_us],
                row_ns: host.row_ns,
                bandwidth: host.bandwidth_gb_s,
                link: gpus.map(|g| g.link_gb_s).sum(),
            });
        }
        for gpu in &topology.gpus {
            let host = topology.hosts.iter().position(|h| h.name == gpu.host);
            devices.push(Device {
                name: gpu.name.clone(),
                kind: DeviceKind::Gpu,
                capacity_bytes: gpu.capacity_bytes(),
                servers: Vec::new(),
                host: host.expect("a valid topology names the host of each GPU"),
                once_us: [latency, gpu.link_us, 0.0, gpu.call_us],
                row_ns: gpu.row_ns,
                bandwidth: gpu.bandwidth_gb_s,
                link: gpu.link_gb_s,
            });
        }
        if let Some(remote) = &topology.remote {
            let at = devices.len();
            devices.push(Device {
                name: remote.name.clone(),
                kind: DeviceKind::Remote,
                capacity_bytes: remote.capacity_bytes(),
                servers: Vec::new(),
                host: at,
                once_us: [0.0; LATENCIES],
                row_ns: 0.0,
                bandwidth: f64::INFINITY,
                link: 0.0,
            });
        }
        let of_nodes = |r: &super::topology::Remote| {
            let nodes = f64::from(r.nodes);
            (1e6 / (nodes * r.rows_per_s), nodes * r.bandwidth_gb_s, r.overhead)
        };
        Machine {
            devices,
            hosts: topology.hosts.len(),
            batch: f64::from(batch),
            network: topology.network.as_ref().map_or(f64::INFINITY, |n| n.bandwidth_gb_s),
            remote: topology.remote.as_ref().map(of_nodes),
        }
    }

    /// Returns the device index of the cluster.
    pub(crate) fn cluster(&self) -> Option<usize> {
        self.remote.map(|_| self.devices.len() - 1)
    }

    /// Returns the index of the memory that holds all rows of a shard that `device` keeps in `tier`.
    pub(crate) fn backing(&self, tier: Tier, device: usize) -> Option<usize> {
        match tier {
            Tier::Hbm | Tier::Host => None,
            Tier::HbmCached => Some(self.devices[device].host),
            Tier::Remote => self.cluster(),
        }
    }

    /// Returns the bytes of the cache of a shard.
    pub(crate) fn cache_bytes(&self, table: &TableWorkload, piece: &Piece, keeping: &PieceStorage) -> u64 {
        if !keeping.tier.is_cached() {
            return 0;
        }
        let cached = ((piece.rows[1] - piece.rows[0]) as f64 * keeping.cache.0).ceil() as u64;
        let overhead = match keeping.tier {
            Tier::Remote => ENTRY_OVERHEAD_BYTES as u64,
            _ => DEVICE_ENTRY_BYTES,
        };
        cached.saturating_mul(row_bytes(table, piece) + overhead)
    }

    /// Reserves bytes on every host, for data that every host holds.
    pub(crate) fn reserve(&mut self, bytes: u64) {
        let hosts = self.devices.iter_mut().filter(|device| device.kind == DeviceKind::Host);
        hosts.for_each(|host| host.capacity_bytes = host.capacity_bytes.saturating_sub(bytes));
    }

    /// Returns the cost of a shard on each device that it uses. The first cost belongs to the device that serves the shard.
    pub(crate) fn charges(&self, table: &TableWorkload, piece: &Piece, keeping: &PieceStorage) -> Vec<Charge> {
        let device = &self.devices[keeping.device];
        let columns = piece.columns[1] - piece.columns[0];
        let width = f64::from(columns);
        let row_bytes = if table.train.is_some() { 4 * u64::from(columns) } else { row_bytes(table, piece) };
        let rows = piece.rows[1] - piece.rows[0];
        let stored = rows.saturating_mul(table.resident_bytes(columns));

        let share = rows as f64 / table.rows as f64;
        let steps = self.batch * self.hosts as f64 / keeping.replicas as f64;
        let ids = steps * table.ids() * share;
        let answered = if share >= 1.0 { 1.0 } else { 1.0 - (1.0 - share).powf(table.pooling) };
        let bags = steps * table.features.len() as f64 * answered;
        let out_bytes = bags * width * 4.0;

        let read_ns = device.row_ns + row_bytes as f64 / device.bandwidth;
        let mut micros = (ids * read_ns + out_bytes / device.bandwidth) / 1e3;
        if table.train.is_some() {
            micros += self.update_micros(table, piece, device, out_bytes);
        }
        let mut uses = CALL;
        let is_shared = self.hosts > 1 && keeping.replicas == 1;
        let travel_ns = (8.0 + row_bytes as f64) / self.network;
        let of_host = ids / self.hosts as f64;
        if is_shared {
            micros += (self.hosts - 1) as f64 * of_host * travel_ns / 1e3;
            uses |= NETWORK;
        }
        if device.kind == DeviceKind::Host && device.link > 0.0 {
            // A GPU can read rows from the host only for a complete table; for a partition, the host pools the rows and
            // sends the result.
            let is_whole = rows == table.rows && columns == table.width;
            let bytes = if is_whole { ids * row_bytes as f64 } else { out_bytes };
            micros += bytes / device.link / 1e3;
            uses |= LINK;
        }
        let misses = ids * (1.0 - keeping.cache.1);
        let bytes = if keeping.tier.is_cached() { self.cache_bytes(table, piece, keeping) } else { stored };
        let brought = if keeping.brings_rows { stored } else { 0 };
        let mut charges = vec![Charge { device: keeping.device, bytes, micros, uses }];
        match (keeping.tier, self.remote) {
            (Tier::HbmCached, _) => {
                let host = &self.devices[device.host];
                charges[0].micros += misses * row_bytes as f64 / device.link / 1e3;
                charges[0].uses |= LINK;
                let micros = misses * (host.row_ns + row_bytes as f64 / host.bandwidth) / 1e3;
                charges.push(Charge { device: device.host, bytes: brought, micros, uses: 0 });
            }
            (Tier::Remote, Some((row_us, bandwidth, overhead))) => {
                let wait = |bandwidth: f64| misses * row_us.max(row_bytes as f64 / bandwidth / 1e3);
                charges[0].micros += wait(bandwidth.min(self.network));
                charges[0].uses |= ROUND_TRIP;
                let bytes = (brought as f64 * overhead).ceil() as u64;
                charges.push(Charge { device: self.devices.len() - 1, bytes, micros: wait(bandwidth), uses: 0 });
            }
            _ => {}
        }
        if is_shared {
            for host in (0..self.hosts).filter(|host| *host != device.host) {
                let Device { row_ns, bandwidth, .. } = self.devices[host];
                let micros = of_host * (row_ns + row_bytes as f64 / bandwidth + travel_ns) / 1e3;
                charges.push(Charge { device: host, bytes: 0, micros, uses: NETWORK });
            }
        }
        charges
    }

    /// Returns the time to sort the ids of all hosts, to copy the gradients of bags, and to update the distinct rows of a shard.
    fn update_micros(&self, table: &TableWorkload, piece: &Piece, device: &Device, out_bytes: f64) -> f64 {
        let share = (piece.rows[1] - piece.rows[0]) as f64 / table.rows as f64;
        let ids = self.batch * self.hosts as f64 * table.ids();
        let distinct = table.access.distinct(ids, table.rows) * share;
        let master_bytes = table.master_bytes(piece.columns[1] - piece.columns[0]) as f64;
        let moved = SORT_BYTES * ids * share + 2.0 * out_bytes + 2.0 * distinct * master_bytes;
        (2.0 * distinct * device.row_ns + moved / device.bandwidth) / 1e3
    }
}

fn row_bytes(table: &TableWorkload, piece: &Piece) -> u64 {
    table.row_bytes(piece.columns[1] - piece.columns[0])
}
