//! A plan as plain data: which part of which table lies where ([`crate::place`]), and what that costs each device.

use serde::{Deserialize, Serialize};

use crate::place::TablePlan;

/// What a device is.
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
    /// What it is called in a report.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Host => "host",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Remote => "remote",
        }
    }
}

/// What a device holds and does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// Its name.
    pub device: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Bytes planned on it.
    pub bytes: u64,
    /// Bytes that it may hold: its memory less what is reserved.
    pub capacity_bytes: u64,
    /// Time a batch.
    pub micros: f64,
    /// Share of the time it is busy at the stated request rate; none without a rate.
    pub load: Option<f64>,
    /// Shards on it.
    pub shards: usize,
    /// Of a GPU the host that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Of a host its servers, whom those of other hosts ask for rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
}

/// A placement of all tables, with what it was estimated to cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementPlan {
    /// Requests in the batch that all times are about, on each host.
    pub batch: u32,
    /// Time a batch of the slowest device.
    pub micros: f64,
    /// The slowest device.
    pub slowest: String,
    /// Bytes of all tables, copies and caches included.
    pub bytes: u64,
    /// Placements weighed.
    pub candidates: usize,
    /// In the order of the input.
    pub tables: Vec<TablePlan>,
    /// Hosts, then GPUs, then the remote cluster.
    pub devices: Vec<DevicePlan>,
    /// What the reader should know: guessed skews, devices that cannot keep up.
    pub notes: Vec<String>,
}
