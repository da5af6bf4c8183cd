//! A plan as plain data: which part of which table lies where. The loader reads it; nothing here knows of a model.

use serde::{Deserialize, Serialize};

use super::access::Access;
use crate::device::pool::RowFormat;

/// Where the rows of a shard lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// All rows in the memory of a GPU.
    Hbm,
    /// All rows in the memory of the GPU's host, hot rows also in the GPU's.
    HbmCached,
    /// All rows in the memory of a host.
    Host,
    /// All rows on the remote cluster, hot rows also in the memory of a host.
    Remote,
}

impl Tier {
    /// Every tier, fastest first.
    pub const ALL: [Tier; 4] = [Tier::Hbm, Tier::HbmCached, Tier::Host, Tier::Remote];

    /// The name in TOML and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Hbm => "hbm",
            Tier::HbmCached => "hbm_cached",
            Tier::Host => "host",
            Tier::Remote => "remote",
        }
    }

    /// True where shards of this tier stand on GPUs.
    pub fn on_gpu(self) -> bool {
        matches!(self, Tier::Hbm | Tier::HbmCached)
    }

    /// True where a cache stands before the rows.
    pub fn is_cached(self) -> bool {
        matches!(self, Tier::HbmCached | Tier::Remote)
    }
}

/// How a table is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// A whole copy on every device of the tier.
    DataParallel,
    /// One whole table on one device.
    TableWise,
    /// Ranges of columns, each on one device.
    ColumnWise,
    /// Ranges of rows over all devices of the tier.
    RowWise,
    /// Ranges of rows over the devices of one host.
    TableRowWise,
    /// Ranges of columns, each cut in rows over the devices of one host.
    Grid,
}

impl Sharding {
    /// Every type, simplest first.
    pub const ALL: [Sharding; 6] = [
        Sharding::TableWise,
        Sharding::DataParallel,
        Sharding::ColumnWise,
        Sharding::RowWise,
        Sharding::TableRowWise,
        Sharding::Grid,
    ];

    /// The name in TOML and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Sharding::DataParallel => "data_parallel",
            Sharding::TableWise => "table_wise",
            Sharding::ColumnWise => "column_wise",
            Sharding::RowWise => "row_wise",
            Sharding::TableRowWise => "table_row_wise",
            Sharding::Grid => "grid",
        }
    }
}

/// One part of a table on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// First row, and the row after the last.
    pub rows: [u64; 2],
    /// First column, and the column after the last.
    pub columns: [u32; 2],
    /// Where the rows lie.
    pub tier: Tier,
    /// The host or GPU that answers for this shard.
    pub device: String,
    /// The memory that holds all rows where `device` holds only the hot ones: a host or the remote cluster.
    pub backing: Option<String>,
    /// Bytes of the hot rows kept on `device`; 0 where the tier has no cache.
    pub cache_bytes: u64,
    /// Bytes of this shard on all devices, its cache included.
    pub bytes: u64,
    /// Time on `device` a batch.
    pub micros: f64,
}

/// Where one table lies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TablePlan {
    /// Its name.
    pub table: String,
    /// The format its rows are stored in.
    pub format: RowFormat,
    /// How it is cut.
    pub sharding: Sharding,
    /// Its parts.
    pub shards: Vec<Shard>,
    /// Bytes of all parts, copies and caches included.
    pub bytes: u64,
    /// Time a batch of the slowest device, as far as this table causes it.
    pub micros: f64,
    /// Share of the reads that its caches answer; 1 where there is no cache.
    pub hit_share: f64,
    /// Why this place and not a faster one.
    pub why: String,
}

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
}

/// A placement of all tables, with what it was estimated to cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
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

/// One table as the planner sees it.
#[derive(Clone, Debug)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Numbers a row, D.
    pub width: u32,
    /// The format that its rows are to be stored in.
    pub format: RowFormat,
    /// Features that read it.
    pub features: Vec<String>,
    /// Mean ids of one feature of one request.
    pub pooling: f64,
    /// How the reads spread over the rows.
    pub access: Access,
    /// What is allowed.
    pub constraints: Constraints,
}

impl Table {
    /// Mean ids that one request reads here.
    pub fn ids(&self) -> f64 {
        self.pooling * self.features.len() as f64
    }

    /// Bytes of the first `columns` numbers of a row, with the scale and bias that a part of a quantised row has of its own.
    pub fn row_bytes(&self, columns: u32) -> u64 {
        self.format.head_bytes() as u64 + (u64::from(columns) * self.format.bits() as u64).div_ceil(8)
    }

    /// Bytes of all rows, uncut.
    pub fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes(self.width))
    }
}

/// What is allowed for one table.
#[derive(Clone, Debug)]
pub struct Constraints {
    /// Tiers.
    pub tiers: Vec<Tier>,
    /// Sharding types.
    pub sharding: Vec<Sharding>,
    /// Fewest columns of a part when columns are cut.
    pub width_min: u32,
    /// The one host or GPU that must answer for the table.
    pub device: Option<String>,
    /// The share of the rows' bytes that a cache gets, where fixed.
    pub cache_share: Option<f64>,
}

impl Default for Constraints {
    fn default() -> Self {
        Constraints {
            tiers: Tier::ALL.to_vec(),
            sharding: Sharding::ALL.to_vec(),
            width_min: 32,
            device: None,
            cache_share: None,
        }
    }
}
