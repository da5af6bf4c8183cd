//! A plan as plain data: placement of the shards of all tables ([`crate::place`]), and the cost per device.

use serde::{Deserialize, Serialize};

use crate::place::TablePlan;

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// DRAM of a host.
    Host,
    /// HBM of a GPU.
    Gpu,
    /// DRAM of the remote cluster, all nodes together.
    Remote,
}

impl DeviceKind {
    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Host => "host",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Remote => "remote",
        }
    }
}

/// Planned contents and load of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// Name of the device.
    pub device: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Bytes planned on the device.
    pub bytes: u64,
    /// Capacity in bytes: its memory minus the reserve.
    pub capacity_bytes: u64,
    /// Time per batch, in microseconds.
    pub micros: f64,
    /// Share of the time it is busy at the stated request rate; `None` without a rate.
    pub load: Option<f64>,
    /// Number of shards on the device.
    pub shards: usize,
    /// Host of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Servers of a host, which other hosts' servers request rows from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
}

/// Placement of all tables, with estimated costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementPlan {
    /// Number of requests per batch and host, to which all times refer.
    pub batch: u32,
    /// Time per batch of the slowest device, in microseconds.
    pub micros: f64,
    /// Name of the slowest device.
    pub slowest: String,
    /// Bytes of all tables, including copies and caches.
    pub bytes: u64,
    /// Number of candidate placements.
    pub candidates: usize,
    /// Tables in the order of the input.
    pub tables: Vec<TablePlan>,
    /// Hosts, then GPUs, then the remote cluster.
    pub devices: Vec<DevicePlan>,
    /// Notes for the reader: guessed skews, overloaded devices.
    pub notes: Vec<String>,
}
