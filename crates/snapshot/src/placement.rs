//! Placement of a snapshot's embedding tables: completely in this host's memory, or as planned.
//!
//! The plan does not belong to the snapshot: the same version can serve from the memory of one host, from several hosts whose
//! servers exchange rows, or with rows on a Redis Cluster that `publish` has filled.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::manifest::Manifest;
use super::workload::workload;
use crate::model::ModelSpec;
use sterling_core::error::{Error, Result};
use sterling_embedding::Table;
use sterling_embedding::place::{CardShare, ShardPlan, Sharding, TablePlan, Tier};
use sterling_embedding::planner::plan::DeviceKind;
use sterling_embedding::planner::topology::Host;
use sterling_embedding::planner::{self, Topology};
use sterling_embedding::tiers;
use sterling_embedding::tiers::remote::{Cluster, ClusterOptions, RemoteOptions, RowSet};
use sterling_embedding::tiers::slices::{Neighbours, PeerHost, PeerSlice, SliceName};

/// Placement of embedding tables at load. Without plan, topology and cluster, they are completely in host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementOptions {
    /// Plan printed by `sterling plan --json`; tables that it does not name are completely in host memory.
    #[schema(value_type = Option<String>)]
    pub plan: Option<PathBuf>,
    /// Topology to plan for at each load, if there is no plan; without it, this machine and the cluster.
    #[schema(value_type = Option<String>)]
    pub topology: Option<PathBuf>,
    /// Name of this server's host in a plan or topology of several hosts: the server holds that host's rows and
    /// requests other rows from their servers.
    pub host: Option<String>,
    /// Nodes of the Redis or Valkey Cluster, such as `redis://10.0.0.1:6379`; one node finds the others.
    pub remote: Vec<String>,
    /// Timeout for rows of the cluster or of another server, in milliseconds; rows that miss it are degraded.
    pub timeout_ms: u64,
}

impl Default for PlacementOptions {
    fn default() -> Self {
        PlacementOptions { plan: None, topology: None, host: None, remote: Vec::new(), timeout_ms: 200 }
    }
}

/// Placement of the tables of snapshots.
#[derive(Debug, Default)]
pub struct Placement {
    by: By,
    /// Name of this host among several.
    host: Option<String>,
    neighbours: Option<Arc<dyn Neighbours>>,
    cluster: Option<Arc<Cluster>>,
    timeout: Duration,
}

#[derive(Debug, Default)]
enum By {
    #[default]
    Whole,
    Plan(planner::PlacementPlan),
    Topology(Topology),
}

/// A version whose tables are placed.
struct Version<'a> {
    spec: &'a ModelSpec,
    manifest: &'a Manifest,
    edition: Arc<str>,
    /// Addresses of the servers of each host.
    hosts: BTreeMap<&'a str, &'a [String]>,
}

impl Placement {
    /// Places every table completely in this host's memory.
    pub fn whole() -> Self {
        Placement::default()
    }

    /// Reads the files that the options name and connects to the cluster.
    ///
    /// # Errors
    /// `NotFound` or `Invalid` with the file and the error in the file; `Unavailable` if the cluster does not answer.
    pub fn open(options: &PlacementOptions) -> Result<Self> {
        let cluster = match options.remote.as_slice() {
            [] => None,
            seeds => Some(Cluster::connect(ClusterOptions::new(seeds.iter().cloned()))?),
        };
        let by = match (&options.plan, &options.topology) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid("tables: got a plan and a topology, expected one of them"));
            }
            (Some(file), None) => {
                let plan = serde_json::from_str(&read(file)?);
                By::Plan(plan.map_err(|e| Error::invalid(format!("{}: not a plan: {e}", file.display())))?)
            }
            (None, Some(file)) => By::Topology(Topology::parse(&read(file)?).map_err(|e| e.within(file.display()))?),
            (None, None) => match &cluster {
                None => By::Whole,
                Some(cluster) => {
                    By::Topology(Topology { remote: Some(cluster.survey()?.into()), ..Topology::detect()? })
                }
            },
        };
        let (host, timeout) = (options.host.clone(), Duration::from_millis(options.timeout_ms));
        let placement = Placement { by, host, neighbours: None, cluster, timeout };
        if let Some(host) = &placement.host {
            let hosts = placement.hosts();
            if !hosts.contains_key(&**host) {
                return Err(Error::invalid(format!(
                    "tables: this server is host `{host}`, expected one of the plan's: {:?}",
                    hosts.keys()
                )));
            }
        }
        Ok(placement)
    }

    /// Adds the servers of other hosts, which exchange rows.
    pub fn beside(self, neighbours: Arc<dyn Neighbours>) -> Self {
        Placement { neighbours: Some(neighbours), ..self }
    }

    /// Returns the cluster that stores table rows, if one is configured.
    pub fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.as_ref()
    }

    /// Returns every host of the plan or topology with its known servers.
    fn hosts(&self) -> BTreeMap<&str, &[String]> {
        match &self.by {
            By::Whole => BTreeMap::new(),
            By::Topology(topology) => topology.hosts.iter().map(|h| (&*h.name, &*h.servers)).collect(),
            By::Plan(plan) => {
                let shards = plan.tables.iter().flat_map(|p| &p.shards).filter(|s| !s.tier.on_gpu());
                let devices = plan.devices.iter().filter(|d| d.kind == DeviceKind::Host);
                let named = devices.map(|d| (&*d.device, &*d.servers));
                shards.map(|s| (&*s.device, &[][..])).chain(named).collect()
            }
        }
    }

    /// Returns whether a shard or its cache is in the memory of this host or of its GPUs.
    fn is_on_this_host(&self, shard: &ShardPlan) -> bool {
        self.host.as_ref().is_none_or(|host| self.host_of(shard) == Some(host))
    }

    /// Returns the host that serves a shard, or whose GPU holds it, if known.
    fn host_of<'a>(&'a self, shard: &'a ShardPlan) -> Option<&'a str> {
        let device = &shard.device;
        match &self.by {
            _ if !shard.tier.on_gpu() => Some(device),
            By::Whole => None,
            By::Topology(topology) => topology.gpus.iter().find(|gpu| gpu.name == *device).map(|gpu| &*gpu.host),
            By::Plan(plan) => plan.devices.iter().find(|d| d.device == *device).and_then(|d| d.host.as_deref()),
        }
    }

    /// Returns the maximum bytes of host memory for the tables of a model, given the sizes of the table files.
    pub(super) fn memory_bytes(&self, spec: &ModelSpec, file_bytes: impl Fn(&str) -> u64) -> u64 {
        let files: BTreeSet<&str> = spec.tables.iter().map(|t| t.file.as_str()).collect();
        let whole: u64 = files.iter().map(|file| file_bytes(file)).sum();
        match &self.by {
            By::Whole => whole,
            By::Topology(topology) => {
                let here = topology.hosts.iter().filter(|h| self.host.as_ref().is_none_or(|host| *host == h.name));
                whole.min(here.map(Host::capacity_bytes).sum())
            }
            By::Plan(plan) => {
                let is_planned = |table: &str| plan.tables.iter().any(|p| p.table == table);
                let planned: BTreeSet<&str> =
                    spec.tables.iter().filter(|t| is_planned(&t.name)).map(|t| t.file.as_str()).collect();
                let shards = plan.tables.iter().flat_map(|p| &p.shards).filter(|s| self.is_on_this_host(s));
                let parts = shards.map(|s| if s.tier == Tier::Remote { s.cache_bytes } else { s.bytes });
                parts.sum::<u64>() + files.difference(&planned).map(|file| file_bytes(file)).sum::<u64>()
            }
        }
    }

    /// Checks that the cluster has the rows that the plan places on the cluster, by looking up a sample of the rows.
    ///
    /// # Errors
    /// `Invalid` without a cluster; `NotReady` if rows are missing; `Unavailable` if none of the sampled rows is readable or the
    /// cluster does not answer.
    pub(super) fn check_cluster(&self, spec: &ModelSpec, manifest: &Manifest) -> Result<()> {
        let By::Plan(plan) = &self.by else { return Ok(()) };
        let is_remote = |plan: &&TablePlan| plan.shards.iter().any(|s| s.tier == Tier::Remote);
        let is_ours = |plan: &&TablePlan| spec.tables.iter().any(|t| t.name == plan.table);
        for TablePlan { table, .. } in plan.tables.iter().filter(is_remote).filter(is_ours) {
            let Some(cluster) = &self.cluster else {
                return Err(Error::invalid(format!("table `{table}` is planned on a cluster, got none")));
            };
            let sample = tiers::remote::sample(cluster, &rows_on_cluster(spec, manifest, table)?)?;
            if let Some(trouble) = sample.trouble() {
                let is_lost = sample.unreadable_rows() == sample.rows;
                tracing::warn!(model = spec.name, table, "{trouble}");
                if is_lost {
                    return Err(Error::unavailable(format!("table `{table}`: {trouble}")));
                }
            }
        }
        Ok(())
    }

    /// Places the tables of a version as planned. After this call, the servers of other hosts hold their planned rows.
    pub(super) fn place(
        &self,
        spec: &ModelSpec,
        manifest: &Manifest,
        tables: Vec<Arc<Table>>,
    ) -> Result<Vec<Arc<Table>>> {
        let plans: Vec<TablePlan> = match &self.by {
            By::Whole => Vec::new(),
            By::Plan(plan) => plan.tables.clone(),
            By::Topology(topology) => {
                let workload = workload(spec, &tables);
                match workload.tables.is_empty() {
                    true => Vec::new(),
                    false => planner::plan(topology, &workload)?.tables,
                }
            }
        };
        let plans: Vec<TablePlan> =
            plans.into_iter().map(|plan| self.reduce_to_this_host(plan)).collect::<Result<_>>()?;
        let shards = || plans.iter().flat_map(|p| &p.shards);
        let hosts: BTreeSet<&str> = shards().filter_map(|s| self.host_of(s)).collect();
        if hosts.len() > 1 && self.host.is_none() {
            return Err(Error::unsupported(format!(
                "the plan has the hosts {hosts:?}, expected one host, or the name of this server's host (`tables.host`, `serve --host`)"
            )));
        }
        let cards: BTreeSet<&str> = shards().filter(|s| s.tier.on_gpu()).map(|s| s.device.as_str()).collect();
        if cards.len() > 1 {
            return Err(Error::unsupported(format!(
                "the plan has the GPUs {cards:?}, expected one: a server uses one GPU for tables"
            )));
        }
        for plan in plans.iter().filter(|p| tables.iter().all(|t| t.name() != p.table)) {
            tracing::warn!(
                model = spec.name,
                table = plan.table,
                "the plan places a table that the model does not have"
            );
        }
        let version = Version { spec, manifest, edition: manifest.digest().into(), hosts: self.hosts() };
        let mut away = Vec::new();
        let mut place = |table: Arc<Table>| match plans.iter().find(|p| p.table == table.name()) {
            Some(_) if spec.serves_candidates(table.name()) => Err(Error::invalid(format!(
                "table `{}` is planned, but candidates are looked up in it, expected it completely in memory: leave it out of the plan",
                table.name()
            ))),
            None => table.in_memory().map(Arc::new),
            Some(plan) => self.place_table(&version, &table, plan, &mut away).map(Arc::new),
        };
        let placed: Vec<Arc<Table>> = tables.into_iter().map(&mut place).collect::<Result<_>>()?;
        match &self.neighbours {
            Some(neighbours) if !away.is_empty() => neighbours.wait_for(&away).map(|()| placed),
            _ => Ok(placed),
        }
    }

    fn place_table(
        &self,
        version: &Version<'_>,
        table: &Table,
        plan: &TablePlan,
        away: &mut Vec<PeerSlice>,
    ) -> Result<Table> {
        if plan.shards.iter().any(|s| s.tier.on_gpu()) {
            return on_card(table, plan);
        }
        let on_cluster = || plan.shards.iter().filter(|s| s.tier == Tier::Remote);
        let remote = match (on_cluster().next(), &self.cluster) {
            (Some(_), Some(cluster)) => {
                let named = rows_on_cluster(version.spec, version.manifest, table.name())?;
                let cache_bytes = on_cluster().filter(|s| self.is_on_this_host(s)).map(|s| s.cache_bytes).sum::<u64>();
                let cache_bytes = usize::try_from(cache_bytes).unwrap_or(usize::MAX);
                let options = RemoteOptions { cache_bytes, timeout: self.timeout };
                Some(Table::on_cluster(cluster, &named, table.spec().clone(), &options)?)
            }
            _ => None,
        };
        let Some(neighbours) = &self.neighbours else {
            return match plan.shards.iter().find(|s| s.tier == Tier::Host && !self.is_on_this_host(s)) {
                Some(part) => Err(Error::unsupported(format!(
                    "table `{}` has rows on host `{}`: only a server requests rows of other hosts",
                    plan.table, part.device
                ))),
                None => table.planned(plan, remote.as_ref()).map(of_host),
            };
        };
        let slice = |part: &ShardPlan| self.slice(version, table, part);
        let elsewhere: Vec<Option<PeerSlice>> = plan
            .shards
            .iter()
            .map(|part| (part.tier == Tier::Host && !self.is_on_this_host(part)).then(|| slice(part)).transpose())
            .collect::<Result<_>>()?;
        let opened = |part: usize| elsewhere[part].as_ref().map(|slice| neighbours.open(slice));
        let placed = table.planned_with(plan, remote.as_ref(), opened)?;
        let mut held = Vec::new();
        for (part, shard) in plan.shards.iter().zip(placed.shards()).filter(|_| self.host.is_some()) {
            if let tiers::Source::Host(bytes) = &shard.source {
                held.push(neighbours.slices().hold(name(version, table, part)?, bytes.clone())?);
            }
        }
        away.extend(elsewhere.into_iter().flatten());
        Ok(of_host(placed.holding(held)))
    }

    /// Reduces a table's plan to the shards that concern this host; of several replicas of the table, keeps the replica of this
    /// host.
    fn reduce_to_this_host(&self, mut plan: TablePlan) -> Result<TablePlan> {
        if let Some(host) = self.host.as_ref().filter(|_| plan.has_copies()) {
            plan.shards.retain(|s| self.is_on_this_host(s));
            if plan.shards.is_empty() {
                let table = &plan.table;
                return Err(Error::invalid(format!(
                    "table `{table}`: no replica of the table is planned on host `{host}`"
                )));
            }
            if plan.sharding != Sharding::DataParallel {
                plan.shards.iter_mut().for_each(|s| s.copy = 0);
            }
        }
        Ok(plan)
    }

    /// Returns the slice of a table that the servers of another host hold.
    fn slice(&self, version: &Version<'_>, table: &Table, part: &ShardPlan) -> Result<PeerSlice> {
        let servers = version.hosts.get(&*part.device).copied().unwrap_or_default();
        if servers.is_empty() {
            return Err(Error::invalid(format!(
                "table `{}` has rows on host `{}`, of which no server is named: expected `servers` of that host in the topology",
                table.name(),
                part.device
            )));
        }
        let width = part.columns[1].saturating_sub(part.columns[0]) as usize;
        Ok(PeerSlice {
            host: PeerHost { name: part.device.clone(), servers: servers.to_vec() },
            name: name(version, table, part)?,
            row_bytes: table
                .spec()
                .format
                .row_bytes(width)
                .map_err(|e| e.within(format!("table `{}`", table.name())))?,
            edition: version.edition.clone(),
            timeout: self.timeout,
        })
    }
}

/// Returns the name of a slice of a table.
fn name(version: &Version<'_>, table: &Table, part: &ShardPlan) -> Result<SliceName> {
    let content = checksum(version.spec, version.manifest, table.name())?.to_owned();
    let model = version.manifest.name.clone();
    Ok(SliceName { model, table: table.name().into(), content, rows: part.rows, columns: part.columns })
}

/// Places a table, or its most requested rows, on a GPU. All rows also stay in this host's memory, because the CPU answers if the
/// GPU is unavailable.
fn on_card(table: &Table, plan: &TablePlan) -> Result<Table> {
    let [part] = &plan.shards[..] else {
        return Err(Error::unsupported(format!(
            "table `{}` is planned in {} shards, expected tiers host and remote, or the complete table on one GPU",
            plan.table,
            plan.shards.len()
        )));
    };
    let table = table.in_memory()?;
    Ok(match part.tier {
        Tier::HbmCached => table.with_gpu_cache(CardShare { bytes: part.cache_bytes, hit_share: plan.hit_share }),
        _ => table,
    })
}

/// Marks a table in host memory as not copied to a GPU, so that the GPU reads its rows from the host.
fn of_host(table: Table) -> Table {
    match table.host_bytes() {
        Some(_) => table.with_gpu_cache(CardShare { bytes: 0, hit_share: 0.0 }),
        None => table,
    }
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|e| Error::io(file.display(), e))
}

/// Returns the checksum of the file that holds a table of a version.
fn checksum<'a>(spec: &ModelSpec, manifest: &'a Manifest, table: &str) -> Result<&'a str> {
    let file = spec.tables.iter().find(|t| t.name == table).map(|t| &t.file);
    let found = file.and_then(|file| manifest.files.get(file));
    let missing = || Error::not_found(format!("table `{table}`: the manifest has no checksum of its file"));
    found.map(|sum| sum.xxh3.as_str()).ok_or_else(missing)
}

/// Returns the name of a table's rows on a cluster. The name contains the checksum of the table's file, so that versions with the
/// same file share rows, and rows left behind by another publication are never mistaken for the rows of this version.
///
/// # Errors
/// `NotFound` if the version does not have the table or its file; as [`RowSet::new`].
pub fn rows_on_cluster(spec: &ModelSpec, manifest: &Manifest, table: &str) -> Result<RowSet> {
    let checksum = checksum(spec, manifest, table)?;
    let content = content_of(checksum)
        .ok_or_else(|| Error::not_found(format!("table `{table}`: `{checksum}` is not a checksum")))?;
    RowSet::new(&manifest.name, table, content)
}

/// Returns the key that identifies the rows of a file with this checksum on a cluster.
pub fn content_of(checksum: &str) -> Option<u64> {
    checksum.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok())
}

/// Describes a table's placement: its sharding type and the devices of its shards.
pub fn placed(table: &Table) -> String {
    let Some(sharding) = table.sharding() else { return "whole, in memory".into() };
    let parts: Vec<&str> = table.shards().iter().map(|s| s.device.as_str()).collect();
    format!("{} on {}", sharding.name(), parts.join(", "))
}
