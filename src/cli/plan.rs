//! `sterling plan`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::Value;

use super::output::say;
use super::publish::connect;
use super::store::local_path;
use sterling_core::error::{Error, Result};
use sterling_cuda::{Choice, Devices};
use sterling_embedding::Vocabulary;
use sterling_embedding::place::{Sharding, Tier};
use sterling_embedding::planner::{Topology, Workload, calibrate, calibrate_gpu, plan, report};
use sterling_embedding::train::RuleKind;
use sterling_snapshot::model::Package;
use sterling_snapshot::workload;

/// Size in bytes of the table that a calibration reads: larger than any current CPU cache.
const CALIBRATION_BYTES: usize = 1 << 30;

/// Arguments of `sterling plan`.
#[derive(Debug, clap::Args)]
pub(super) struct Plan {
    /// Snapshot (STORE/NAME/VERSION) or model package whose tables are planned
    #[arg(conflicts_with = "workload")]
    model: Option<PathBuf>,
    /// TOML file of tables, instead of a model
    #[arg(long)]
    workload: Option<PathBuf>,
    /// TOML file of hosts, GPUs and cluster [default: this machine]
    #[arg(long)]
    topology: Option<PathBuf>,
    /// Node of a Redis or Valkey Cluster for rows, queried for its memory; repeatable
    #[arg(long, value_name = "URL")]
    remote: Vec<String>,
    /// Recorded requests, one JSON object per line, for pooling factor and access skew
    #[arg(long)]
    sample: Option<PathBuf>,
    /// Allow only this tier (hbm, hbm_cached, host, remote); repeatable
    #[arg(long, value_name = "TIER")]
    tier: Vec<Tier>,
    /// Allow only this sharding type (table_wise, data_parallel, column_wise, row_wise, table_row_wise, grid);
    /// repeatable
    #[arg(long, value_name = "TYPE")]
    sharding: Vec<Sharding>,
    /// Requests per batch of a host
    #[arg(long)]
    batch: Option<u32>,
    /// Requests per second of all hosts together
    #[arg(long)]
    requests_per_s: Option<f64>,
    /// Plan a learner: all tables learn by this optimizer (sgd, adagrad, rowwise_adagrad, adam,
    /// rowwise_adam) in host memory
    #[arg(long, value_name = "OPTIMIZER", num_args = 0..=1, default_missing_value = "rowwise_adagrad", value_parser = rule())]
    train: Option<RuleKind>,
    /// GPUs of this machine for tables: cuda:N, cuda:0,cuda:1, cuda:all, or auto for a GPU if one works
    #[arg(long, default_value = "cpu")]
    device: Choice,
    /// Measure the cost of rows, bytes and calls on this machine and its GPUs (--device), and use it for every host and
    /// GPU
    #[arg(long)]
    calibrate: bool,
    /// Write the topology to this file
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    write_topology: Option<PathBuf>,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

impl Plan {
    pub(super) fn run(self) -> Result<()> {
        let topology = self.topology()?;
        let Some(workload) = self.workload()? else {
            let has_asked = self.calibrate || self.write_topology.is_some() || self.device != Choice::Cpu;
            if has_asked || !self.remote.is_empty() {
                return say(topology.to_toml()?.trim_end());
            }
            return Err(Error::invalid("nothing to plan: expected a model's folder, or --workload FILE"));
        };
        let plan = plan(&topology, &workload)?;
        if self.json {
            let text = serde_json::to_string_pretty(&plan);
            return say(text.map_err(|e| Error::internal(format!("plan to JSON: {e}")))?);
        }
        say(report::text(&plan).trim_end())
    }

    fn topology(&self) -> Result<Topology> {
        let chosen = self.device.clone().open()?;
        let cards = chosen.device.as_ref().map_or(&[][..], Devices::all);
        let mut topology = match &self.topology {
            Some(_) if !cards.is_empty() && !self.calibrate => {
                return Err(Error::invalid(
                    "--device with --topology, which lists the GPUs: only valid with --calibrate",
                ));
            }
            Some(file) => Topology::parse(&read(file)?).map_err(|e| e.within(file.display()))?,
            None => Topology::detect()?.with_cards(cards)?,
        };
        if self.calibrate {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let constants = calibrate::measure(cores, CALIBRATION_BYTES)?;
            topology.hosts.iter_mut().for_each(|host| constants.apply(host));
            let measured = cards.iter().map(|card| calibrate_gpu::measure(card, CALIBRATION_BYTES));
            calibrate_gpu::apply(&measured.collect::<Result<Vec<_>>>()?, &mut topology)?;
        }
        if !self.remote.is_empty() {
            topology.remote = Some(connect(self.remote.clone())?.survey()?.into());
        }
        if let Some(file) = &self.write_topology {
            fs::write(file, topology.to_toml()?).map_err(|e| Error::io(file.display(), e))?;
        }
        Ok(topology)
    }

    fn workload(&self) -> Result<Option<Workload>> {
        let (mut workload, vocabularies) = match (&self.model, &self.workload) {
            (Some(folder), _) => of_model(folder)?,
            (None, Some(file)) => {
                (Workload::parse(&read(file)?).map_err(|e| e.within(file.display()))?, BTreeMap::new())
            }
            (None, None) => return Ok(None),
        };
        workload.batch = self.batch.unwrap_or(workload.batch);
        for table in &mut workload.tables {
            if !self.tier.is_empty() {
                table.constraints.tiers.clone_from(&self.tier);
            }
            if !self.sharding.is_empty() {
                table.constraints.sharding.clone_from(&self.sharding);
            }
            self.train.map_or(Ok(()), |kind| table.learn(kind))?;
        }
        workload.requests_per_s = self.requests_per_s.or(workload.requests_per_s);
        if let Some(file) = &self.sample {
            let id_of = |feature: &str, value: &Value| match (vocabularies.get(feature), value) {
                (Some(vocabulary), Value::String(text)) => Some(vocabulary.id(text)),
                (Some(vocabulary), Value::Number(number)) => Some(vocabulary.id(&number.to_string())),
                _ => value.as_i64(),
            };
            workload.measure_as(&read(file)?, &id_of).map_err(|e| e.within(file.display()))?;
        }
        Ok(Some(workload))
    }
}

fn rule() -> impl TypedValueParser<Value = RuleKind> {
    let kind = |name: String| RuleKind::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or_default();
    PossibleValuesParser::new(RuleKind::ALL.map(RuleKind::name)).map(kind)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).map_err(|e| Error::io(file.display(), e))
}

/// Returns the tables that the user side of a model reads, and the vocabulary of each feature whose table has one.
fn of_model(folder: &Path) -> Result<(Workload, BTreeMap<String, Vocabulary>)> {
    let package = Package::open(folder)?;
    let workload = workload(&package.spec, &package.tables);
    if workload.tables.is_empty() {
        return Err(Error::invalid("no feature of the user tower reads a table, expected at least one table to plan")
            .within(folder.display()));
    }
    let mut vocabularies = BTreeMap::new();
    for table in &package.tables {
        let readers = package.spec.readers(table.name());
        vocabularies.extend(readers.filter_map(|f| Some((f.source().to_owned(), table.vocabulary()?.clone()))));
    }
    Ok((workload, vocabularies))
}
