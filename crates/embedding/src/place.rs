//! Placement of the shards of a table, as plain data: a planner or an operator writes it, and [`super::shard`] shards tables by
//! it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

/// Memory tier of a shard's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// All rows in GPU memory.
    Hbm,
    /// All rows in the memory of the GPU's host, hot rows also in GPU memory.
    HbmCached,
    /// All rows in the memory of a host.
    Host,
    /// All rows on the remote cluster, hot rows also in host memory.
    Remote,
}

impl Tier {
    /// Every tier, fastest first.
    pub const ALL: [Tier; 4] = [Tier::Hbm, Tier::HbmCached, Tier::Host, Tier::Remote];

    /// Returns the name in TOML and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Hbm => "hbm",
            Tier::HbmCached => "hbm_cached",
            Tier::Host => "host",
            Tier::Remote => "remote",
        }
    }

    /// Returns true if shards of this tier are served by GPUs.
    pub fn on_gpu(self) -> bool {
        matches!(self, Tier::Hbm | Tier::HbmCached)
    }

    /// Returns true if the tier has a cache of hot rows.
    pub fn is_cached(self) -> bool {
        matches!(self, Tier::HbmCached | Tier::Remote)
    }
}

impl FromStr for Tier {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        named("tier", text, &Tier::ALL, Tier::name)
    }
}

/// Sharding of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// A complete copy on every device of the tier.
    DataParallel,
    /// The complete table on one device.
    TableWise,
    /// Ranges of columns, each on one device.
    ColumnWise,
    /// Ranges of rows over all devices of the tier.
    RowWise,
    /// Ranges of rows over the devices of one host.
    TableRowWise,
    /// Ranges of columns, each sharded by rows over the devices of one host.
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

    /// Returns the name in TOML and in reports.
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

impl FromStr for Sharding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        named("sharding", text, &Sharding::ALL, Sharding::name)
    }
}

/// Returns the value in `all` whose name is `text`.
fn named<T: Copy>(what: &str, text: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
    let names = || all.iter().map(|one| name(*one)).collect::<Vec<_>>().join(", ");
    let found = all.iter().copied().find(|one| name(*one) == text);
    found.ok_or_else(|| Error::invalid(format!("{what} `{text}`, expected one of {}", names())))
}

/// One shard of a table on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardPlan {
    /// First row, and the row after the last.
    pub rows: [u64; 2],
    /// First column, and the column after the last.
    pub columns: [u32; 2],
    /// Index of the table's copy that the shard belongs to.
    #[serde(default, skip_serializing_if = "is_first")]
    pub copy: usize,
    /// Tier of the rows.
    pub tier: Tier,
    /// Host or GPU that serves this shard.
    pub device: String,
    /// Host or remote cluster that holds all rows, if `device` holds only the hot ones.
    pub backing: Option<String>,
    /// Cache size for hot rows on `device`; 0 if the tier has no cache.
    pub cache_bytes: u64,
    /// Bytes of this shard on all devices, including its cache.
    pub bytes: u64,
    /// Time per batch on `device`, in microseconds.
    pub micros: f64,
}

fn is_first(copy: &usize) -> bool {
    *copy == 0
}

/// GPU cache of a table of which the GPU's memory does not hold all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardShare {
    /// Cache size for hot rows, in bytes; 0 if the GPU reads all rows from its host.
    pub bytes: u64,
    /// Fraction of the reads that the cache should answer according to the plan.
    pub hit_share: f64,
}

/// How several hosts access the rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostAccess {
    /// Each host has all rows.
    Copies,
    /// Each host has a shard and requests other rows from the other hosts.
    BetweenServers,
    /// Each host reads the cluster, except for rows that it caches.
    Cluster,
}

impl HostAccess {
    /// Returns how hosts access rows of a placement.
    pub fn of(tier: Tier, has_copies: bool) -> Self {
        match (tier, has_copies) {
            (Tier::Remote, _) => HostAccess::Cluster,
            (_, true) => HostAccess::Copies,
            (_, false) => HostAccess::BetweenServers,
        }
    }

    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            HostAccess::Copies => "copies",
            HostAccess::BetweenServers => "between servers",
            HostAccess::Cluster => "cluster",
        }
    }
}

/// Cost of the best placement of one access type, estimated on idle machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AccessCost {
    /// Type of access.
    pub way: HostAccess,
    /// Tier of the fastest placement of this type.
    pub tier: Tier,
    /// Sharding of the fastest placement of this type.
    pub sharding: Sharding,
    /// Time per batch of the placement's slowest device, in microseconds.
    pub micros: f64,
    /// Bytes on all devices.
    pub bytes: u64,
}

/// Placement of one table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TablePlan {
    /// Name of the table.
    pub table: String,
    /// Storage format of the table's rows.
    pub format: RowFormat,
    /// Sharding type.
    pub sharding: Sharding,
    /// Shards of the table.
    pub shards: Vec<ShardPlan>,
    /// Bytes of all shards, including copies and caches.
    pub bytes: u64,
    /// Time per batch that this table takes on the slowest of its devices, in microseconds.
    pub micros: f64,
    /// Share of the reads that its caches answer; 1 without a cache.
    pub hit_share: f64,
    /// Reason for this placement instead of a faster one.
    pub why: String,
    /// With several hosts, cost of each access type that fits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ways: Vec<AccessCost>,
}

impl TablePlan {
    /// Returns true if every host, or every device, has a replica of the table.
    pub fn has_copies(&self) -> bool {
        self.sharding == Sharding::DataParallel || self.shards.iter().any(|shard| shard.copy > 0)
    }
}
