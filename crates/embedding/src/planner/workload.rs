//! Workload of the tables: the tables, the batch size, the request rate, and a sample of requests for measuring skew.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::access::{Access, Curve, SAMPLE_IDS_MIN};
use super::topology::parse_toml;
use crate::managed::map_bytes;
use crate::place::{Sharding, Tier};
use crate::train::{RuleKind, stretch_bytes};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_kernels::cpu::pool::RowFormat;

/// Maximum number of tables per plan.
pub const TABLES_MAX: usize = 10_000;
/// Maximum number of rows per table.
pub const ROWS_MAX: u64 = 1 << 50;
/// Maximum number of requests per batch.
pub const BATCH_MAX: u32 = 1 << 20;
/// Default Zipf exponent: recommender ids are skewed, and a plan for uniform access would reserve memory that is not needed.
pub const SKEW_DEFAULT: f64 = 0.8;
/// Default number of requests that one host answers together.
pub const BATCH_DEFAULT: u32 = 32;

/// A table and its workload.
#[derive(Clone, Debug)]
pub struct TableWorkload {
    /// Name of the table.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Numbers per row, D.
    pub width: u32,
    /// Storage format of the table's rows.
    pub format: RowFormat,
    /// Features that read this table.
    pub features: Vec<String>,
    /// Mean number of ids per feature and request.
    pub pooling: f64,
    /// Distribution of the reads over the rows.
    pub access: Access,
    /// Constraints on the table's placement.
    pub constraints: Constraints,
    /// Optimizer of a table in training; none if the table is only read.
    pub train: Option<RuleKind>,
    /// True if the table's ids are managed: every host that looks up ids has the id map.
    pub managed: bool,
}

/// Number of copies of a trained table in the served format: one is read, the other is updated.
pub const SERVED_COPIES: u64 = 2;

impl TableWorkload {
    /// Returns the mean number of ids that one request reads in this table.
    pub fn ids(&self) -> f64 {
        self.pooling * self.features.len() as f64
    }

    /// Returns the bytes of the first `columns` numbers of a row, including scale and bias, which each column shard of a
    /// quantized row stores.
    pub fn row_bytes(&self, columns: u32) -> u64 {
        self.format.head_bytes() as u64 + (u64::from(columns) * self.format.bits() as u64).div_ceil(8)
    }

    /// Returns the bytes of the first `columns` numbers of a row and its optimizer state in the f32 master table; 0 if the table
    /// is not trained.
    pub fn master_bytes(&self, columns: u32) -> u64 {
        self.train.map_or(0, |kind| stretch_bytes(columns as usize, kind) as u64)
    }

    /// Returns the bytes in memory of a row of `columns` numbers: its served size or, for a table in training, twice its served
    /// size plus the master row and its state.
    pub fn resident_bytes(&self, columns: u32) -> u64 {
        match self.train {
            None => self.row_bytes(columns),
            Some(_) => SERVED_COPIES * self.row_bytes(columns) + self.master_bytes(columns),
        }
    }

    /// Marks the table as trained by an optimizer, in the memory of hosts.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`] if the table's constraints exclude the tier `host`.
    pub fn learn(&mut self, kind: RuleKind) -> Result<()> {
        if !self.constraints.tiers.contains(&Tier::Host) {
            return Err(Error::invalid(format!(
                "table `{}`: `train` needs the tier host, which is not allowed",
                self.name
            )));
        }
        self.constraints.tiers = vec![Tier::Host];
        self.train = Some(kind);
        Ok(())
    }

    /// Returns the bytes of the map of managed ids on each host; 0 if ids are row numbers.
    pub fn map_bytes(&self) -> u64 {
        if self.managed { map_bytes(self.rows) } else { 0 }
    }

    /// Returns the bytes of all rows, without sharding.
    pub fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes(self.width))
    }
}

/// Constraints on the placement of one table.
#[derive(Clone, Debug)]
pub struct Constraints {
    /// Allowed tiers.
    pub tiers: Vec<Tier>,
    /// Allowed sharding types.
    pub sharding: Vec<Sharding>,
    /// Minimum width of a column shard.
    pub width_min: u32,
    /// Host or GPU that must serve the table.
    pub device: Option<String>,
    /// Fixed fraction of the rows' bytes for a cache, if any.
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

/// Maps a feature's name and one of its values to an id.
pub type IdOf<'a> = &'a dyn Fn(&str, &Value) -> Option<i64>;

/// The tables and their load.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Requests that one host answers together.
    pub batch: u32,
    /// Requests per second of all hosts together, if known.
    pub requests_per_s: Option<f64>,
    /// Tables, at least one.
    pub tables: Vec<TableWorkload>,
    /// Assumptions made for missing values.
    pub notes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadToml {
    #[serde(default = "batch_default")]
    batch: u32,
    requests_per_s: Option<f64>,
    tables: Vec<TableToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableToml {
    name: String,
    rows: u64,
    width: u32,
    #[serde(default = "format_default")]
    format: RowFormat,
    features: Option<Vec<String>>,
    pooling: Option<f64>,
    skew: Option<Skew>,
    tiers: Option<Vec<Tier>>,
    sharding: Option<Vec<Sharding>>,
    width_min: Option<u32>,
    device: Option<String>,
    cache_share: Option<f64>,
    train: Option<RuleKind>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Skew {
    Exponent(f64),
    Word(String),
}

fn batch_default() -> u32 {
    BATCH_DEFAULT
}

fn format_default() -> RowFormat {
    RowFormat::F32
}

impl Workload {
    /// Reads the tables; the grammar is in `docs/reference/planner.md`.
    ///
    /// ```
    /// use sterling_embedding::planner::workload::Workload;
    /// let workload = Workload::parse("batch = 8\n[[tables]]\nname = 'packages'\nrows = 70000\nwidth = 64\n").unwrap();
    /// assert_eq!(workload.tables[0].bytes(), 70000 * 64 * 4);
    /// ```
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`], naming the line, or the table and the field.
    pub fn parse(text: &str) -> Result<Workload> {
        let toml: WorkloadToml = parse_toml(text)?;
        let guessed = toml.tables.iter().filter(|t| t.skew.is_none()).count();
        let checked = |table: TableToml| {
            let name = table.name.clone();
            table.check().map_err(|e| e.within(format!("table `{name}`")))
        };
        let tables: Vec<TableWorkload> = toml.tables.into_iter().map(checked).collect::<Result<_>>()?;
        let notes = match guessed {
            0 => Vec::new(),
            n => vec![format!("{n} of {} tables state no skew: assumed as zipf {SKEW_DEFAULT}", tables.len())],
        };
        let workload = Workload { batch: toml.batch, requests_per_s: toml.requests_per_s, tables, notes };
        workload.validate()?;
        Ok(workload)
    }

    /// Checks every number and every name.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`] with the table, the field, the received and the expected value.
    pub fn validate(&self) -> Result<()> {
        if self.batch == 0 || self.batch > BATCH_MAX {
            return Err(Error::invalid(format!("`batch` is {}, expected 1 to {BATCH_MAX}", self.batch)));
        }
        if let Some(rate) = self.requests_per_s.filter(|r| !(*r > 0.0 && *r <= 1e12)) {
            return Err(Error::invalid(format!("`requests_per_s` is {rate}, expected above 0")));
        }
        if self.tables.is_empty() || self.tables.len() > TABLES_MAX {
            return Err(Error::invalid(format!("{} tables, expected 1 to {TABLES_MAX}", self.tables.len())));
        }
        let mut names = BTreeSet::new();
        for table in &self.tables {
            if !names.insert(table.name.as_str()) {
                return Err(Error::invalid(format!("two tables are named `{}`", table.name)));
            }
            check_table(table).map_err(|e| e.within(format!("table `{}`", table.name)))?;
        }
        Ok(())
    }

    /// Measures pooling and skew from recorded requests, one JSON object per line: the body of a `retrieve` request, or
    /// `{"requests": [...]}` with several bodies. Features that read none of the tables, and fields other than `features`, are
    /// ignored. A table with too few sampled ids keeps its stated values, and a note says so.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`] with the line of an invalid request.
    pub fn measure(&mut self, sample: &str) -> Result<()> {
        self.measure_as(sample, &|_, value| value.as_i64())
    }

    /// Measures like [`Workload::measure`]; `id_of` maps a value of a feature to an id, as a vocabulary does.
    ///
    /// # Errors
    /// As [`Workload::measure`]; a request with an unmapped value is invalid.
    pub fn measure_as(&mut self, sample: &str, id_of: IdOf<'_>) -> Result<()> {
        let wanted: BTreeSet<&str> = self.tables.iter().flat_map(|t| t.features.iter().map(String::as_str)).collect();
        let mut bags: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        let mut requests = 0usize;
        for (number, line) in sample.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let place = || format!("line {}", number + 1);
            let value: Value =
                serde_json::from_str(line).map_err(|e| Error::invalid(format!("not JSON: {e}")).within(place()))?;
            let of_line = match value.get("requests") {
                Some(Value::Array(list)) => list.iter().collect(),
                Some(_) => return Err(Error::invalid("`requests` is not a list").within(place())),
                None => vec![&value],
            };
            for request in of_line {
                requests += 1;
                collect(request, &wanted, id_of, &mut bags).map_err(|e| e.within(place()))?;
            }
        }
        if requests == 0 {
            return Err(Error::invalid("the sample holds no request"));
        }
        self.notes.retain(|n| !n.contains("state no skew"));
        let mut few = Vec::new();
        for table in &mut self.tables {
            let ids: Vec<i64> = table.features.iter().filter_map(|f| bags.get(f)).flatten().copied().collect();
            if ids.len() < SAMPLE_IDS_MIN {
                few.push(table.name.clone());
                continue;
            }
            table.pooling = ids.len() as f64 / (requests * table.features.len()) as f64;
            table.access = Access::Measured(Curve::measure(&ids)?);
        }
        if let Some(first) = few.first() {
            self.notes.push(format!(
                "{} of {} tables, such as `{first}`, have under {SAMPLE_IDS_MIN} sampled ids: pooling and skew stay as stated",
                few.len(),
                self.tables.len()
            ));
        }
        Ok(())
    }
}

/// Adds the ids of one request to the bags of its features.
fn collect(
    request: &Value,
    wanted: &BTreeSet<&str>,
    id_of: IdOf<'_>,
    bags: &mut BTreeMap<String, Vec<i64>>,
) -> Result<()> {
    let features = match request.get("features") {
        Some(Value::Object(features)) => features,
        _ => {
            return Err(Error::invalid(
                "expected an object with `features`, such as {\"features\": {\"ids\": [1, 2]}}",
            ));
        }
    };
    for (name, value) in features.iter().filter(|(name, _)| wanted.contains(name.as_str())) {
        let values = value.get("values").unwrap_or(value);
        let one = [values.clone()];
        let list = values.as_array().map_or(&one[..], Vec::as_slice);
        let bag = bags.entry(name.clone()).or_default();
        for id in list {
            let id = id_of(name, id).ok_or_else(|| Error::invalid(format!("feature `{name}`: `{id}` is not an id")))?;
            bag.push(id);
        }
    }
    Ok(())
}

impl TableToml {
    fn check(self) -> Result<TableWorkload> {
        let access = match self.skew {
            None => Access::Zipf(SKEW_DEFAULT),
            Some(Skew::Exponent(s)) => Access::Zipf(s),
            Some(Skew::Word(word)) if word == "uniform" => Access::Uniform,
            Some(Skew::Word(word)) => {
                return Err(Error::invalid(format!("`skew` is `{word}`, expected a Zipf exponent or `uniform`")));
            }
        };
        let features = self.features.unwrap_or_else(|| vec![self.name.clone()]);
        let base = Constraints::default();
        let constraints = Constraints {
            tiers: allowed("tiers", self.tiers, base.tiers)?,
            sharding: allowed("sharding", self.sharding, base.sharding)?,
            width_min: self.width_min.unwrap_or(base.width_min),
            device: self.device,
            cache_share: self.cache_share,
        };
        let Self { name, rows, width, format, .. } = self;
        let mut table = TableWorkload {
            name,
            rows,
            width,
            format,
            features,
            pooling: self.pooling.unwrap_or(1.0),
            access,
            constraints,
            train: None,
            managed: false,
        };
        self.train.map_or(Ok(()), |kind| table.learn(kind))?;
        Ok(table)
    }
}

/// Checks every number of a table.
fn check_table(table: &TableWorkload) -> Result<()> {
    let invalid = |what: String| Err(Error::invalid(what));
    let TableWorkload { name, rows, width, pooling, constraints, .. } = table;
    let (width_max, ids_max) = (limits::DIMENSION_MAX as u32, limits::FEATURE_IDS_MAX as f64);
    if name.trim().is_empty() {
        return invalid("the name is empty".into());
    }
    if *rows == 0 || *rows > ROWS_MAX {
        return invalid(format!("`rows` is {rows}, expected 1 to {ROWS_MAX}"));
    }
    if *width == 0 || *width > width_max {
        return invalid(format!("`width` is {width}, expected 1 to {width_max}"));
    }
    table.format.row_bytes(*width as usize)?;
    if !(*pooling > 0.0 && *pooling <= ids_max) {
        return invalid(format!("`pooling` is {pooling}, expected above 0 and at most {ids_max}"));
    }
    if let Access::Zipf(s) = table.access
        && !(0.0..=10.0).contains(&s)
    {
        return invalid(format!("`skew` is {s}, expected 0 to 10"));
    }
    if table.features.is_empty() {
        return invalid("`features` is empty, expected at least one".into());
    }
    if constraints.width_min == 0 {
        return invalid("`width_min` is 0, expected at least 1".into());
    }
    match constraints.cache_share.filter(|s| !(0.0..=1.0).contains(s)) {
        Some(share) => invalid(format!("`cache_share` is {share}, expected 0 to 1")),
        None => Ok(()),
    }
}

fn allowed<T: Ord + Copy>(field: &str, given: Option<Vec<T>>, all: Vec<T>) -> Result<Vec<T>> {
    let Some(mut given) = given else { return Ok(all) };
    if given.is_empty() {
        return Err(Error::invalid(format!("`{field}` is empty, expected at least one, or leave it out to allow all")));
    }
    given.sort_unstable();
    given.dedup();
    Ok(given)
}
