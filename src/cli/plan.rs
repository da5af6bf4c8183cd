//! `sterling plan`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::say;
use crate::error::{Error, Result};
use crate::files::Tensors;
use crate::model::{FeatureKind, FeatureSpec, MODEL_FILE, ModelSpec};
use crate::sparse::planner::access::Access;
use crate::sparse::planner::plan::{Constraints, Table};
use crate::sparse::planner::{Topology, Workload, calibrate, plan, report};
use crate::sparse::{self, Vocabulary};

/// Bytes of the table that a calibration reads: larger than any cache of a CPU of these years.
const CALIBRATION_BYTES: usize = 1 << 30;
/// Mean ids of an `ids` feature that nothing is known about.
const POOLING_GUESS: f64 = 20.0;
/// The skew of a table that nothing is known about.
const SKEW_GUESS: f64 = 0.8;

/// Arguments of `sterling plan`.
#[derive(Debug, clap::Args)]
pub(super) struct Plan {
    /// A snapshot (STORE/NAME/VERSION) or model package whose tables are planned
    #[arg(conflicts_with = "workload")]
    model: Option<PathBuf>,
    /// A TOML file of tables, instead of a model
    #[arg(long)]
    workload: Option<PathBuf>,
    /// A TOML file of hosts, GPUs and cluster [default: this machine]
    #[arg(long)]
    topology: Option<PathBuf>,
    /// Recorded requests, one JSON object a line: pooling and skew are measured in them
    #[arg(long)]
    sample: Option<PathBuf>,
    /// Requests that one host answers together
    #[arg(long)]
    batch: Option<u32>,
    /// Requests that all hosts together must answer in a second
    #[arg(long)]
    requests_per_s: Option<f64>,
    /// Measure what rows, bytes and calls cost on this machine, and take that for every host
    #[arg(long)]
    calibrate: bool,
    /// Write the topology that was used
    #[arg(long, value_name = "FILE")]
    write_topology: Option<PathBuf>,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

impl Plan {
    pub(super) fn run(self) -> Result<()> {
        let topology = self.topology()?;
        let Some(workload) = self.workload()? else {
            if self.calibrate || self.write_topology.is_some() {
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
        let mut topology = match &self.topology {
            Some(file) => Topology::parse(&read(file)?).map_err(|e| e.within(file.display()))?,
            None => Topology::detect()?,
        };
        if self.calibrate {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let constants = calibrate::measure(cores, CALIBRATION_BYTES)?;
            topology.hosts.iter_mut().for_each(|host| constants.apply(host));
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

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).map_err(|e| Error::io(file.display(), e))
}

/// The tables that the user's side of a model reads, and the vocabulary of each feature that has one.
fn of_model(folder: &Path) -> Result<(Workload, BTreeMap<String, Vocabulary>)> {
    let file = folder.join(MODEL_FILE);
    let spec = ModelSpec::parse(&read(&file)?).map_err(|e| e.within(file.display()))?;
    let features: &[FeatureSpec] = spec.user.as_ref().map_or(&[], |user| &user.features);
    let (mut tables, mut notes, mut vocabularies) = (Vec::new(), Vec::new(), BTreeMap::new());
    for table in &spec.tables {
        let readers: Vec<&FeatureSpec> =
            features.iter().filter(|f| f.table.as_deref() == Some(table.name.as_str())).collect();
        if readers.is_empty() {
            notes.push(format!("table `{}` is read only when items are published: not planned", table.name));
            continue;
        }
        let tensors = Tensors::open(&folder.join(&table.file))?;
        let opened = sparse::Table::mapped(&tensors, &table.name, table.row_format()?, table.unseen()?)?;
        if let Some(name) = &table.vocabulary {
            let vocabulary = Vocabulary::parse(&read(&folder.join(name))?).map_err(|e| e.within(name))?;
            let named = readers.iter().map(|f| (f.source().to_owned(), vocabulary.clone()));
            vocabularies.extend(named);
        }
        let guessed = |f: &&FeatureSpec| if f.kind == FeatureKind::Category { 1.0 } else { POOLING_GUESS };
        tables.push(Table {
            name: table.name.clone(),
            rows: opened.rows(),
            width: u32::try_from(opened.width()).unwrap_or(u32::MAX),
            format: opened.spec().format,
            pooling: readers.iter().map(guessed).sum::<f64>() / readers.len() as f64,
            features: readers.iter().map(|f| f.source().to_owned()).collect(),
            access: Access::Zipf(SKEW_GUESS),
            constraints: Constraints::default(),
        });
    }
    if tables.is_empty() {
        return Err(
            Error::invalid("no feature of its user tower reads a table: nothing to plan").within(folder.display())
        );
    }
    let guess = format!(
        "`ids` taken as {POOLING_GUESS} a request; tables state no skew: taken as zipf {SKEW_GUESS}; --sample measures both"
    );
    notes.push(guess);
    Ok((Workload { batch: 32, requests_per_s: None, tables, notes }, vocabularies))
}
