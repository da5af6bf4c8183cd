//! `sterling inspect`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::output::say;
use super::publish::{decisions, print_shards};
use super::store::{StoreArgs, published};
use super::trial::SandboxArgs;
use sterling_api::{CalibrationInfo, ModelInfo};
use sterling_core::error::{Error, Result};
use sterling_graph::tower::{OverArch, Runs};
use sterling_server::describe::model_info;
use sterling_snapshot::model::{MODEL_FILE, Package};
use sterling_snapshot::{GraphRecord, MANIFEST, Manifest, Placement, SHARDS_FILE, Shards, Snapshot, Store};
use sterling_storage::files::Tensors;
use sterling_storage::objects;

/// Arguments of `sterling inspect`.
#[derive(Debug, clap::Args)]
pub(super) struct Inspect {
    /// Store (a folder or a bucket), snapshot (STORE/NAME/VERSION) or model package
    #[arg(default_value = "store")]
    folder: PathBuf,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

impl Inspect {
    pub(super) fn run(self) -> Result<()> {
        let folder = &self.folder;
        if objects::is_url(folder) {
            self.bucket()
        } else if folder.join(MANIFEST).exists() {
            self.snapshot()
        } else if folder.join(SHARDS_FILE).exists() {
            self.cut(&Shards::read(folder)?)
        } else if folder.join(MODEL_FILE).exists() {
            self.package()
        } else if folder.is_dir() {
            self.store(&Store::new(folder))
        } else {
            Err(Error::not_found(format!("{}: expected a store, a snapshot or a model package", folder.display())))
        }
    }

    /// Prints a store in a bucket, or downloads and prints a version in a bucket.
    fn bucket(self) -> Result<()> {
        let text = self.folder.to_string_lossy();
        let Some((Some(root), model, version)) = published(&text) else {
            return self.store(&StoreArgs::of(&self.folder).existing()?);
        };
        let store = StoreArgs::of(Path::new(root)).existing()?;
        if store.sharded_versions(model)?.contains(&version) {
            return print_shards(&store, model, version);
        }
        let held = store.ensure_local(model, version)?;
        Inspect { folder: held.folder().to_owned(), ..self }.snapshot()
    }

    /// Prints a version in shards, given its folder in a store.
    fn cut(&self, shards: &Shards) -> Result<()> {
        let path = self.folder.canonicalize().map_err(|e| Error::io(self.folder.display(), e))?;
        let root = path.ancestors().nth(2).unwrap_or(&path);
        print_shards(&Store::new(root), &shards.name, shards.version)
    }

    fn store(&self, store: &Store) -> Result<()> {
        let (models, cut) = (store.models()?, store.sharded_models()?);
        if models.is_empty() && cut.is_empty() {
            return Err(Error::not_found(format!(
                "{}: holds no {MANIFEST}, no {MODEL_FILE} and no published model",
                self.folder.display()
            )));
        }
        say(format_args!("{:24} {:>7} {:>10} {:>7} {:>5} {:>10}", "model", "version", "items", "lists", "D", "MB"))?;
        for name in &models {
            for version in store.versions(name)? {
                match store.manifest(name, version) {
                    Ok(m) => say(format_args!(
                        "{name:24} {version:>7} {:>10} {:>7} {:>5} {:>10.1}",
                        m.items,
                        m.lists,
                        m.dimension,
                        m.bytes() as f64 / 1e6
                    ))?,
                    Err(e) => say(format_args!("{name:24} {version:>7} {e}"))?,
                }
            }
        }
        for name in &cut {
            for version in store.sharded_versions(name)? {
                print_shards(store, name, version)?;
            }
        }
        let desired = models.iter().chain(&cut).map(|name| (name, store.desired_state(name)));
        for (name, desired_state) in desired.collect::<BTreeMap<_, _>>() {
            let desired_state = desired_state?;
            if desired_state.revision > 0 {
                say(format_args!(
                    "{name}: desired state: {}, revision {}",
                    desired_state.reported(),
                    desired_state.revision
                ))?;
            }
        }
        Ok(())
    }

    /// Validates the graphs in a sandbox unless this program published them, because foreign graphs may crash the process.
    fn try_graphs(&self) -> Result<()> {
        self.sandbox.trials()?.run(&self.folder)
    }

    fn snapshot(&self) -> Result<()> {
        if !Manifest::read(&self.folder)?.is_tried() {
            self.try_graphs()?;
        }
        let snapshot = Snapshot::load(&self.folder, &Placement::whole())?;
        let info = model_info(&snapshot);
        let made = &snapshot.manifest.provenance;
        say(format_args!("{} version {}, digest {}", info.name, info.version, info.digest))?;
        say(format_args!(
            "made by {} from {}{}, seed {}, in {:.1} s",
            made.program,
            made.items_file,
            made.vectors_file.as_ref().map(|file| format!(" with the vectors of {file}")).unwrap_or_default(),
            made.seed,
            made.seconds
        ))?;
        model(&info)?;
        decisions(&snapshot.manifest)?;
        programs(&snapshot.package, snapshot.manifest.graphs.as_ref())?;
        say("\nfiles (every checksum holds)")?;
        for (name, sum) in &snapshot.manifest.files {
            say(format_args!("  {:>12}  {name}", sum.bytes))?;
            if name.ends_with(".safetensors") {
                let tensors = Tensors::open(&self.folder.join(name))?;
                for tensor in tensors.names() {
                    let (kind, shape) = tensors.info(tensor)?;
                    say(format_args!("                  {tensor} {kind:?} {shape:?}"))?;
                }
            }
        }
        Ok(())
    }

    fn package(&self) -> Result<()> {
        self.try_graphs()?;
        let package = Package::open(&self.folder)?;
        let spec = &package.spec;
        say(format_args!("model package {}, D = {}: {}", spec.name, spec.dimension, spec.description))?;
        for table in &spec.tables {
            say(format_args!("  table {} in {}", table.name, table.file))?;
        }
        for name in package.files() {
            say(format_args!("  file {name}"))?;
        }
        say(format_args!("  value {}", spec.value.expression))?;
        programs(&package, None)
    }
}

/// Prints how each graph is executed, step by step, and how it was executed at publication if that differs.
fn programs(package: &Package, published: Option<&BTreeMap<String, GraphRecord>>) -> Result<()> {
    for (file, runs) in package.graphs() {
        let record = GraphRecord::from(runs);
        say(format_args!("\ngraph {file} {record}"))?;
        if let Some(other) = published.and_then(|graphs| graphs.get(file)).filter(|other| **other != record) {
            say(format_args!("when it was published: {file} {other}"))?;
        }
        if let Runs::Program(program) = runs {
            say(program)?;
        }
    }
    if let Some(part) = package.overarch.as_ref().and_then(OverArch::part) {
        say(format_args!("\nitem-side values: {} numbers, {}", part.width(), part.program().digest()))?;
        say(part.program())?;
    }
    Ok(())
}

fn model(info: &ModelInfo) -> Result<()> {
    say(format_args!("{}", info.description))?;
    say(format_args!("items N = {}, dimension D = {}, lists C = {}", info.items, info.dimension, info.lists))?;
    say(format_args!(
        "defaults: recall {}, probes P = {}, candidates K0 = {}",
        info.recall, info.probes, info.candidates
    ))?;
    info.calibration.iter().try_for_each(calibration)?;
    for feature in &info.features {
        let width = feature.width.map(|w| format!(" [{w}]"));
        let width = width.or(feature.length.map(|s| format!(" [{s}, ...]"))).unwrap_or_default();
        say(format_args!("  feature {:20} {}{width}", feature.name, feature.kind))?;
    }
    for table in &info.tables {
        say(format_args!("  table   {:20} {} rows of {} in {}", table.name, table.rows, table.width, table.format))?;
    }
    for query in &info.queries {
        let (merge, weight) = (info.merge.as_deref().unwrap_or_default(), query.weight);
        say(format_args!("  query   {:20} K0 = {}, weight {weight}, {merge}", query.name, query.candidates))?;
    }
    for vector in &info.vectors {
        say(format_args!("  vector  {:20} {} in {}", vector.name, vector.width, vector.format))?;
    }
    for input in &info.inputs {
        say(format_args!("  input   {:20} one per {}, shape {:?}", input.name, input.whose, input.shape))?;
    }
    for column in &info.columns {
        let filter = if column.filter { "filterable" } else { "returned only" };
        let distinct = column.distinct.map_or(String::new(), |count| format!("{count:>7} distinct, "));
        say(format_args!("  column  {:20} {:9} {distinct}{filter}", column.name, column.kind))?;
    }
    say(format_args!("  tasks   {}", info.tasks.join(", ")))?;
    say(format_args!("  value   {}", info.value))?;
    for (name, value) in &info.constants {
        say(format_args!("          {name} = {value}"))?;
    }
    Ok(())
}

/// Prints one line per curve and one column per target: the number of lists, and the lower 95 % confidence bound of the recall with
/// that number. A second line per curve has the numbers of lists and candidates for codes, if codes are faster.
pub(super) fn calibration(info: &CalibrationInfo) -> Result<()> {
    let row = |cells: Vec<String>| cells.iter().map(|cell| format!(" {cell:>12}")).collect::<String>();
    say(format_args!(
        "calibration {}: probed lists per recall (with the lower bound of the recall), measured with {} queries: {}",
        info.digest, info.queries, info.source
    ))?;
    let targets = info.targets.iter().map(f64::to_string).collect();
    say(format_args!("  {:>6} {:>9} {}", "K0", "pass rate", row(targets)))?;
    for curve in &info.curves {
        let points = curve.probes.iter().zip(&curve.low);
        let points = points.map(|(probes, low)| format!("{probes} ({low:.3})")).collect();
        say(format_args!("  {:>6} {:>9} {}", curve.k, curve.pass_rate, row(points)))?;
        if let Some(codes) = curve.codes.as_ref().filter(|codes| codes.selected.iter().any(|n| *n > 0)) {
            let points = codes.probes.iter().zip(&codes.selected);
            let points = points.map(|(probes, n)| if *n > 0 { format!("{probes} of {n}") } else { String::new() });
            say(format_args!("  {:>6} {:>9} {}", "", "by codes", row(points.collect())))?;
        }
    }
    Ok(())
}
