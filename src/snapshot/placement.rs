//! Where the tables of loaded snapshots lie: whole in this host's memory, or along a plan.
//!
//! The plan is no part of a snapshot: the same version serves from the memory of one host, or with rows of its tables on a
//! cluster that `publish` has brought them to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::manifest::Manifest;
use super::workload::workload;
use crate::embedding::Table;
use crate::embedding::place::{TablePlan, Tier};
use crate::embedding::tiers::remote::{Cluster, ClusterOptions, RemoteOptions, TableVersion};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::planner::topology::Host;
use crate::planner::{self, Topology};

/// How tables are placed at load. Without a plan, a topology or a cluster they lie whole in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementOptions {
    /// A plan as `sterling plan --json` prints it; tables that it does not name lie whole in memory.
    #[schema(value_type = Option<String>)]
    pub plan: Option<PathBuf>,
    /// The machines to plan for at each load, where there is no plan; this machine and the cluster where there is none either.
    #[schema(value_type = Option<String>)]
    pub topology: Option<PathBuf>,
    /// Nodes of the cluster, such as `redis://10.0.0.1:6379`; any of them finds the others.
    pub remote: Vec<String>,
    /// Milliseconds after which a row of the cluster is degraded, where the request has longer.
    pub timeout_ms: u64,
}

impl Default for PlacementOptions {
    fn default() -> Self {
        PlacementOptions { plan: None, topology: None, remote: Vec::new(), timeout_ms: 200 }
    }
}

/// Places the tables of snapshots.
#[derive(Debug, Default)]
pub struct Placement {
    by: By,
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

impl Placement {
    /// Every table whole, in this host's memory.
    pub fn whole() -> Self {
        Placement::default()
    }

    /// Reads the files that the options name and connects to the cluster.
    ///
    /// # Errors
    /// `NotFound` or `Invalid` with the file and what is wrong in it; `Unavailable` where the cluster does not answer.
    pub fn open(options: &PlacementOptions) -> Result<Self> {
        let cluster = match options.remote.as_slice() {
            [] => None,
            seeds => Some(Cluster::connect(ClusterOptions::new(seeds.iter().cloned()))?),
        };
        let by = match (&options.plan, &options.topology) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid("tables: a plan and a topology are given, expected one of them"));
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
        Ok(Placement { by, cluster, timeout: Duration::from_millis(options.timeout_ms) })
    }

    /// Bytes of this host's memory that the tables of a model take at most, by the bytes of their files.
    pub(super) fn memory_bytes(&self, spec: &ModelSpec, file_bytes: impl Fn(&str) -> u64) -> u64 {
        let files: BTreeSet<&str> = spec.tables.iter().map(|t| t.file.as_str()).collect();
        let whole: u64 = files.iter().map(|file| file_bytes(file)).sum();
        match &self.by {
            By::Whole => whole,
            By::Topology(topology) => whole.min(topology.hosts.iter().map(Host::capacity_bytes).sum()),
            By::Plan(plan) => {
                let is_planned = |table: &str| plan.tables.iter().any(|p| p.table == table);
                let planned: BTreeSet<&str> =
                    spec.tables.iter().filter(|t| is_planned(&t.name)).map(|t| t.file.as_str()).collect();
                let shards = plan.tables.iter().flat_map(|p| &p.shards);
                let parts = shards.map(|s| if s.tier == Tier::Remote { s.cache_bytes } else { s.bytes });
                parts.sum::<u64>() + files.difference(&planned).map(|file| file_bytes(file)).sum::<u64>()
            }
        }
    }

    /// The tables of a version, each where it is planned.
    pub(super) fn place(
        &self,
        spec: &ModelSpec,
        manifest: &Manifest,
        tables: Vec<Arc<Table>>,
    ) -> Result<Vec<Arc<Table>>> {
        let planned;
        let plans: &[TablePlan] = match &self.by {
            By::Whole => &[],
            By::Plan(plan) => &plan.tables,
            By::Topology(topology) => {
                let workload = workload(spec, &tables);
                planned = match workload.tables.is_empty() {
                    true => Vec::new(),
                    false => planner::plan(topology, &workload)?.tables,
                };
                &planned
            }
        };
        let shards = plans.iter().flat_map(|p| &p.shards).filter(|s| !s.tier.on_gpu());
        let hosts: BTreeSet<&str> = shards.map(|s| s.device.as_str()).collect();
        if hosts.len() > 1 {
            return Err(Error::unsupported(format!(
                "a plan over the hosts {hosts:?}, expected one: a server reads its own memory and the cluster"
            )));
        }
        for plan in plans.iter().filter(|p| tables.iter().all(|t| t.name() != p.table)) {
            tracing::warn!(
                model = spec.name,
                table = plan.table,
                "the plan places a table that the model does not have"
            );
        }
        let place = |table: Arc<Table>| match plans.iter().find(|p| p.table == table.name()) {
            // What no request reads may stay a map of its file.
            None if spec.readers(table.name()).next().is_none() && !spec.serves_candidates(table.name()) => Ok(table),
            Some(_) if spec.serves_candidates(table.name()) => Err(Error::invalid(format!(
                "table `{}` is planned, but candidates are looked up in it, expected it whole in memory: leave it out of the plan",
                table.name()
            ))),
            None => table.in_memory().map(Arc::new),
            Some(plan) => self.place_table(spec, manifest, &table, plan).map(Arc::new),
        };
        tables.into_iter().map(place).collect()
    }

    fn place_table(&self, spec: &ModelSpec, manifest: &Manifest, table: &Table, plan: &TablePlan) -> Result<Table> {
        if let Some(part) = plan.shards.iter().find(|s| s.tier.on_gpu()) {
            return Err(Error::unsupported(format!(
                "table `{}` is planned in the memory of `{}` (tier {}), expected tiers host and remote: this build has no GPU",
                plan.table,
                part.device,
                part.tier.name()
            )));
        }
        let on_cluster = || plan.shards.iter().filter(|s| s.tier == Tier::Remote);
        let remote = match (on_cluster().next(), &self.cluster) {
            (Some(_), Some(cluster)) => {
                let named = rows_on_cluster(spec, manifest, table.name())?;
                let cache_bytes = on_cluster().map(|s| s.cache_bytes).sum::<u64>();
                let cache_bytes = usize::try_from(cache_bytes).unwrap_or(usize::MAX);
                let options = RemoteOptions { cache_bytes, timeout: self.timeout };
                Some(Table::on_cluster(cluster, &named, table.spec().clone(), &options)?)
            }
            _ => None,
        };
        table.planned(plan, remote.as_ref())
    }
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|e| Error::io(file.display(), e))
}

/// The name under which a cluster has the rows of a table of a version. The checksum of the file that holds them is part of it, so
/// that rows which a publication left behind are never taken for those of a later one with the same number. A version that was
/// merged has the rows of the one that was published.
///
/// # Errors
/// `NotFound` for a table or a file that the version does not have; as [`TableVersion::new`].
pub fn rows_on_cluster(spec: &ModelSpec, manifest: &Manifest, table: &str) -> Result<TableVersion> {
    let file = spec.tables.iter().find(|t| t.name == table).map(|t| &t.file);
    let checksum = file.and_then(|file| manifest.files.get(file));
    let rows = checksum.and_then(|sum| u64::from_str_radix(sum.xxh3.get(..16)?, 16).ok());
    let rows =
        rows.ok_or_else(|| Error::not_found(format!("table `{table}`: the manifest has no checksum of its file")))?;
    TableVersion::new(&manifest.name, table, manifest.origin(), rows)
}

/// How a table lies, in a few words: its sharding type and the devices of its parts.
pub fn placed(table: &Table) -> String {
    let Some(sharding) = table.sharding() else { return "whole, in memory".into() };
    let parts: Vec<&str> = table.shards().iter().map(|s| s.device.as_str()).collect();
    format!("{} on {}", sharding.name(), parts.join(", "))
}
