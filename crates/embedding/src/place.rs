//! Where the parts of a table lie, as plain data: a planner or an operator writes it, [`super::shard`] cuts tables along it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

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

impl FromStr for Tier {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        named("tier", text, &Tier::ALL, Tier::name)
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

impl FromStr for Sharding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        named("sharding", text, &Sharding::ALL, Sharding::name)
    }
}

/// The one of that name.
fn named<T: Copy>(what: &str, text: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
    let names = || all.iter().map(|one| name(*one)).collect::<Vec<_>>().join(", ");
    let found = all.iter().copied().find(|one| name(*one) == text);
    found.ok_or_else(|| Error::invalid(format!("{what} `{text}`, expected one of {}", names())))
}

/// One part of a table on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardPlan {
    /// First row, and the row after the last.
    pub rows: [u64; 2],
    /// First column, and the column after the last.
    pub columns: [u32; 2],
    /// The copy of the table that it belongs to, where there are several.
    #[serde(default, skip_serializing_if = "is_first")]
    pub copy: usize,
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

fn is_first(copy: &usize) -> bool {
    *copy == 0
}

/// What a card's memory has of a table of which not all rows lie there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardShare {
    /// Bytes for the rows that are asked for often; 0 where the card reads all of them from its host.
    pub bytes: u64,
    /// Share of the reads that these are to answer, by the plan.
    pub hit_share: f64,
}

/// How several hosts get at the rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Each has all of them.
    Copies,
    /// Each has a part of them, and asks the others for theirs.
    BetweenServers,
    /// Each asks the cluster, but for those that it caches.
    Cluster,
}

impl Way {
    /// The way of a placement.
    pub fn of(tier: Tier, has_copies: bool) -> Self {
        match (tier, has_copies) {
            (Tier::Remote, _) => Way::Cluster,
            (_, true) => Way::Copies,
            (_, false) => Way::BetweenServers,
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Way::Copies => "copies",
            Way::BetweenServers => "between servers",
            Way::Cluster => "cluster",
        }
    }
}

/// The best that one way has, weighed on machines that have nothing else to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WayCost {
    /// The way.
    pub way: Way,
    /// How its fastest placement lies ...
    pub tier: Tier,
    /// ... and is cut.
    pub sharding: Sharding,
    /// Time a batch of its slowest device.
    pub micros: f64,
    /// Bytes on all devices.
    pub bytes: u64,
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
    pub shards: Vec<ShardPlan>,
    /// Bytes of all parts, copies and caches included.
    pub bytes: u64,
    /// Time a batch of the slowest device, as far as this table causes it.
    pub micros: f64,
    /// Share of the reads that its caches answer; 1 where there is no cache.
    pub hit_share: f64,
    /// Why this place and not a faster one.
    pub why: String,
    /// Where there are several hosts, what each way that would fit costs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ways: Vec<WayCost>,
}

impl TablePlan {
    /// True where every host, or every device, has a copy of its own.
    pub fn has_copies(&self) -> bool {
        self.sharding == Sharding::DataParallel || self.shards.iter().any(|shard| shard.copy > 0)
    }
}
