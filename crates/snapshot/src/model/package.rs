//! A model package: a folder with `model.toml` and the files that it names, validated against each other.
//!
//! The folder of a snapshot is a package as well, with the index in addition, so that publishing and serving read packages in the
//! same way.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contract::{self, CandidateInput, UserInput};
use super::decisions::{DecidedPart, Decisions};
use super::spec::{AskedPrecision, ModelSpec, SIMILARITY};
use sterling_core::error::{Error, Kind, Result};
use sterling_embedding::{RowFormat, Table, Tokenizer, Vocabulary, managed};
use sterling_graph::dense::Precision;
use sterling_graph::tower::{
    BYTES_MAX, FeatureRow, FeatureSpec, FeatureTensor, Graph, ItemPart, OverArch, Pooled, Readable, Runs, Tower,
    TowerOutput, inlined,
};
use sterling_index::value::Program;
use sterling_storage::files::{self, Checksum, Tensors};

/// Name of the file that declares a model.
pub const MODEL_FILE: &str = "model.toml";

/// Name of the optional file of golden requests, which a version must answer before it serves.
pub const WARMUP_FILE: &str = "warmup.jsonl";

/// A model package in memory; tables are memory-mapped.
#[derive(Debug)]
pub struct Package {
    folder: PathBuf,
    /// Contents of `model.toml`.
    pub spec: ModelSpec,
    /// Embedding tables, in the order of `model.toml`.
    pub tables: Vec<Arc<Table>>,
    /// User tower, if there is one.
    pub user: Option<Tower>,
    /// Item tower, if there is one.
    pub item: Option<Tower>,
    /// Reranker, if there is one.
    pub overarch: Option<OverArch>,
    /// Source of each input in [`OverArch::user`].
    pub user_inputs: Vec<UserInput>,
}

impl Package {
    /// Returns whether a request runs a graph in the fallback runtime, which has its own threads.
    pub fn runs_graphs(&self) -> bool {
        let user = self.user.as_ref().map(|tower| tower.graph().1);
        let overarch = self.overarch.as_ref().map(|overarch| overarch.graph().1);
        user.into_iter().chain(overarch).any(|runs| matches!(runs, Runs::Runtime(_)))
    }

    /// Opens the package in `folder`. Tables are read into memory, because the files may change while the package is open.
    ///
    /// # Errors
    /// `Invalid` or `NotFound` with the file and the invalid field.
    pub fn open(folder: &Path) -> Result<Self> {
        let tensors = |file: &Path| Tensors::read(file);
        Package::from_folder(folder, tensors, |_, tables| Ok(tables), &Reading::default())
    }

    /// Opens the package in `folder` for validation: maps its tables, and calls the progress callback with the name of each graph
    /// before it is read.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub fn open_with_progress(folder: &Path, reported: &dyn Fn(&str)) -> Result<Self> {
        let reading = Reading { reported, ..Reading::default() };
        Package::from_folder(folder, Tensors::open, |_, tables| Ok(tables), &reading)
    }

    /// Opens the package in the `folder` of a published version with its serving decisions. `place` receives all tables,
    /// memory-mapped, and returns the placed tables.
    ///
    /// # Errors
    /// As [`Package::open`], and errors of `place`.
    pub fn open_placed(
        folder: &Path,
        decisions: &Decisions,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
    ) -> Result<Self> {
        Package::from_folder(folder, Tensors::open, place, &Reading { decisions, ..Reading::default() })
    }

    /// Returns the same package with other serving decisions.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub fn decided(&self, decisions: &Decisions) -> Result<Self> {
        let (folder, spec, tables) = (self.folder.clone(), self.spec.clone(), self.tables.clone());
        Package::join(folder, spec, tables, &Reading { decisions, ..Reading::default() })
    }

    /// Returns the same package with all graphs in f32, without serving decisions.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub(crate) fn in_f32(&self) -> Result<Self> {
        let spec = ModelSpec { precision: AskedPrecision::F32, ..self.spec.clone() };
        Package::join(self.folder.clone(), spec, self.tables.clone(), &Reading::default())
    }

    /// Finds the best item-side precomputation of the reranker for rows of a format; `None` if precomputation hardly reduces the
    /// cost per candidate.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub fn best_part(&self, format: RowFormat) -> Result<Option<DecidedPart>> {
        let Some(declared) = &self.spec.overarch else { return Ok(None) };
        let (readable, tasks) = (readable(&self.spec, self.user.as_ref(), &self.tables)?, self.spec.tasks.len());
        let graph = || Graph::load(&declared.graph, read_graph(&self.folder, &declared.graph)?);
        let Some(cut) = OverArch::best_cut(&graph()?, &readable, tasks)? else { return Ok(None) };
        let parted = OverArch::with_part(graph()?, &readable, tasks, &cut)?;
        let decided = |part: &ItemPart| DecidedPart {
            cut: cut.clone(),
            width: part.width(),
            format,
            digest: part.digest().to_owned(),
        };
        Ok(parted.part().map(decided))
    }

    /// Returns the reranker without item-side precomputation, if that reranker reads item columns; `None` if the package's own
    /// reranker reads all of its columns.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub(crate) fn unsplit_reranker(&self) -> Result<Option<OverArch>> {
        let reads_columns = |part: &ItemPart| part.reads().columns().next().is_some();
        let Some(split) = self.overarch.as_ref().filter(|o| o.part().is_some_and(reads_columns)) else {
            return Ok(None);
        };
        let (readable, tasks) = (readable(&self.spec, self.user.as_ref(), &self.tables)?, self.spec.tasks.len());
        let file = split.graph().0;
        let graph = Graph::load(file, read_graph(&self.folder, file)?)?.in_precision(split.precision());
        OverArch::new(graph, &readable, tasks).map(Some)
    }

    fn from_folder(
        folder: &Path,
        tensors: impl Fn(&Path) -> Result<Tensors>,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
        reading: &Reading<'_>,
    ) -> Result<Self> {
        let text = read(folder, MODEL_FILE).map_err(|e| e.within(folder.display()))?;
        let text = String::from_utf8(text).map_err(|_| Error::invalid(format!("{MODEL_FILE}: not UTF-8")))?;
        let spec = ModelSpec::parse(&text).map_err(|e| e.within(folder.join(MODEL_FILE).display()))?;
        Package::assemble(folder, spec, tensors, place, reading).map_err(|e| e.within(folder.display()))
    }

    fn assemble(
        folder: &Path,
        spec: ModelSpec,
        tensors: impl Fn(&Path) -> Result<Tensors>,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
        reading: &Reading<'_>,
    ) -> Result<Self> {
        if let Some(name) = file_names(&spec).iter().find(|n| n.contains(['/', '\\']) || n.starts_with('.')) {
            return Err(Error::invalid(format!(
                "{MODEL_FILE}: file `{name}`, expected a plain name inside the package"
            )));
        }
        // Several tables may share a tokenizer file, which is opened once.
        let mut tokenizers: BTreeMap<&str, Arc<Tokenizer>> = BTreeMap::new();
        for file in spec.tables.iter().filter_map(|table| table.tokenizer.as_deref()) {
            if !tokenizers.contains_key(file) {
                let tokenizer = Tokenizer::parse(&read(folder, file)?).map_err(|e| e.within(file))?;
                tokenizers.insert(file, Arc::new(tokenizer));
            }
        }
        let mut files: BTreeMap<&str, Tensors> = BTreeMap::new();
        for file in spec.tables.iter().map(|table| table.file.as_str()) {
            if !files.contains_key(file) {
                files.insert(file, tensors(&folder.join(file))?);
            }
        }
        let tables = spec.tables.iter().map(|table| {
            let tensors = &files[table.file.as_str()];
            let mut opened = Table::mapped(tensors, &table.name, table.row_format()?, table.unseen()?)?;
            if table.managed {
                opened = opened.with_mapped_ids(tensors)?;
            } else if tensors.has(&managed::tensor_name(&table.name)) {
                return Err(Error::invalid(format!(
                    "{}: the file has ids of table `{}`, expected `managed = true` in [[tables]]",
                    table.file, table.name
                )));
            }
            if let Some(file) = &table.vocabulary {
                let text =
                    String::from_utf8(read(folder, file)?).map_err(|_| Error::invalid(format!("{file}: not UTF-8")))?;
                opened = opened.with_vocabulary(Vocabulary::parse(&text).map_err(|e| e.within(file))?)?;
            }
            if let Some(file) = &table.tokenizer {
                opened = opened.with_tokenizer(tokenizers[file.as_str()].clone())?;
            }
            Ok(Arc::new(opened))
        });
        let tables = place(&spec, tables.collect::<Result<_>>()?)?;
        Package::join(folder.into(), spec, tables, reading)
    }

    fn join(folder: PathBuf, spec: ModelSpec, tables: Vec<Arc<Table>>, reading: &Reading<'_>) -> Result<Self> {
        let Graphs { user, item, overarch } = Graphs::load(&folder, &spec, &tables, reading)?;
        let user_inputs = overarch.iter().flat_map(|o| o.user());
        let user_inputs = user_inputs.filter_map(|r| contract::user_input(&r.name, user.as_ref())).collect();
        Ok(Package { folder, user, item, overarch, user_inputs, spec, tables })
    }

    /// Returns the path of the package folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the files of all graphs with their execution: compiled, or by the fallback runtime.
    pub fn graphs(&self) -> impl Iterator<Item = (&str, &Runs)> {
        let towers = self.user.iter().chain(&self.item).map(Tower::graph);
        towers.chain(self.overarch.iter().map(OverArch::graph))
    }

    /// Returns whether the reranker reads user tensors other than the query, which only request features provide.
    pub fn needs_features(&self) -> bool {
        self.user_inputs.iter().any(|input| *input != UserInput::Query)
    }

    /// Returns the source of a per-candidate input of the reranker, by its name.
    pub fn candidate_input(&self, name: &str) -> Option<CandidateInput> {
        contract::candidate_input(name, &self.spec)
    }

    /// Returns the user tensors that the reranker reads, in the reranker's order; the query's entry is empty. Returns no tensors if
    /// the reranker reads only the query. Takes the needed outputs of the user tower out of `made`.
    pub fn user_tensors(&self, row: &FeatureRow, pooled: &Pooled, made: &mut [Vec<f32>]) -> Vec<Vec<f32>> {
        let Some(user) = self.user.as_ref().filter(|_| self.needs_features()) else { return Vec::new() };
        let tensor = |input: &UserInput| match *input {
            UserInput::Query => Vec::new(),
            UserInput::Output(n) => std::mem::take(&mut made[n]),
            UserInput::Feature(n) => {
                let tensor = &user.tensors()[n];
                let mut numbers = vec![0.0; tensor.count()];
                tensor.write(row, pooled, &mut numbers);
                numbers
            }
        };
        self.user_inputs.iter().map(tensor).collect()
    }

    /// Returns the number of values made from a request's features: tensors and outputs of the user tower.
    pub fn user_numbers(&self) -> usize {
        let Some(user) = &self.user else { return 0 };
        let inputs = user.tensors().iter().map(FeatureTensor::count);
        inputs.chain(user.outputs().iter().map(TowerOutput::count)).sum()
    }

    /// Returns the embedding table with this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.iter().find(|t| t.name() == name).map(|t| &**t)
    }

    /// Returns the files that serving needs, including `model.toml` and, if there is one, the file of golden requests.
    pub fn files(&self) -> BTreeSet<String> {
        let mut names = file_names(&self.spec);
        names.insert(MODEL_FILE.into());
        names.extend(self.folder.join(WARMUP_FILE).exists().then(|| WARMUP_FILE.into()));
        names
    }

    /// Returns the contents of one of [`Package::files`] as publishing stores them: graphs with their external data inside.
    ///
    /// # Errors
    /// `Invalid` with the file, or with the constant whose external data is invalid.
    pub fn read_file(&self, name: &str) -> Result<Vec<u8>> {
        if self.is_graph(name) { read_graph(&self.folder, name) } else { read(&self.folder, name) }
    }

    /// Returns the checksum of [`Package::read_file`].
    ///
    /// # Errors
    /// As [`Package::read_file`].
    pub fn checksum(&self, name: &str) -> Result<Checksum> {
        match self.is_graph(name) {
            true => Ok(Checksum::of(&read_graph(&self.folder, name)?)),
            false => Checksum::of_file(&self.folder.join(name)),
        }
    }

    fn is_graph(&self, name: &str) -> bool {
        self.graphs().any(|(file, _)| file == name)
    }

    /// Compiles the value model over the tasks, the given numeric item columns and the retrieval score.
    ///
    /// # Errors
    /// `Invalid` if the expression is invalid, if the reranker reads a column that is not numeric, or if a name is ambiguous.
    pub fn value(&self, numeric_columns: &[&str]) -> Result<Program> {
        let known = self.overarch.iter().map(OverArch::declared).flat_map(|o| o.user.iter().chain(&o.rows));
        if let Some(input) =
            known.filter(|i| numeric_columns.contains(&i.name.as_str())).find(|i| !is_reserved(&i.name))
        {
            return Err(Error::invalid(format!(
                "overarch: input `{}` is a numeric item column and something else, expected one meaning: give the other \
                 another name",
                input.name
            )));
        }
        for column in self.overarch.iter().flat_map(|o| o.declared().columns()) {
            if !numeric_columns.contains(&column) {
                return Err(Error::invalid(format!(
                    "overarch: input `{column}` is not a numeric item column, expected one of: {}",
                    numeric_columns.join(", ")
                )));
            }
        }
        let tasks: Vec<&str> = self.spec.tasks.iter().map(|t| t.name.as_str()).collect();
        let mut names = tasks.clone();
        names.push(SIMILARITY);
        names.extend(numeric_columns.iter().filter(|c| !tasks.contains(c) && **c != SIMILARITY));
        if let Some(constant) = self.spec.value.constants.keys().find(|c| names.contains(&c.as_str())) {
            return Err(Error::invalid(format!(
                "value.constants: `{constant}` is also a task, a column or `{SIMILARITY}`"
            )));
        }
        Program::compile(&self.spec.value.expression, &names, &self.spec.value.constants)
            .map_err(|e| e.within(format!("{MODEL_FILE}: value.expression")))
    }
}

/// Options for reading the graphs of a package.
struct Reading<'a> {
    decisions: &'a Decisions,
    /// Called with the name of each graph before it is read.
    reported: &'a dyn Fn(&str),
}

impl Default for Reading<'_> {
    fn default() -> Self {
        const UNDECIDED: &Decisions = &Decisions { precision: None, item_part: None };
        Reading { decisions: UNDECIDED, reported: &|_| () }
    }
}

impl Reading<'_> {
    fn graph(&self, folder: &Path, spec: &ModelSpec, file: &str) -> Result<Graph> {
        (self.reported)(file);
        let decided = self.decisions.precision.as_ref().map_or(Precision::F32, |decided| decided.chosen);
        Ok(Graph::load(file, read_graph(folder, file)?)?.in_precision(spec.precision_of(file, decided)))
    }
}

/// Dense graphs of a package, bound to their inputs.
struct Graphs {
    user: Option<Tower>,
    item: Option<Tower>,
    overarch: Option<OverArch>,
}

impl Graphs {
    fn load(folder: &Path, spec: &ModelSpec, tables: &[Arc<Table>], reading: &Reading<'_>) -> Result<Self> {
        let graph = |file: &str| reading.graph(folder, spec, file);
        let tower = |side, graph: Graph, features: &[FeatureSpec], outputs: &[TowerOutput]| {
            let is_used = |t: &&Arc<Table>| features.iter().any(|f| f.table.as_deref() == Some(t.name()));
            let used: Vec<Arc<Table>> = tables.iter().filter(is_used).cloned().collect();
            let tower = Tower::new(side, features, &used, graph, outputs)?;
            contract::check_tensors(&tower).map_err(|e| e.within(format!("{side}.features")))?;
            Ok::<_, Error>(tower)
        };
        let reranker = spec.overarch.as_ref().map(|o| graph(&o.graph)).transpose()?;
        let user = match &spec.user {
            Some(declared) => {
                let graph = graph(&declared.tower)?;
                let outputs = contract::user_outputs(spec, &graph, reranker.as_ref())?;
                Some(tower("user", graph, &declared.features, &outputs)?)
            }
            None => None,
        };
        let item = match &spec.item.tower {
            Some(file) => Some(tower("item", graph(file)?, &spec.item.features, &contract::item_outputs(spec))?),
            None => None,
        };
        let overarch = match reranker {
            Some(graph) => {
                let (readable, tasks) = (readable(spec, user.as_ref(), tables)?, spec.tasks.len());
                let parted = match &reading.decisions.item_part {
                    Some(decided) => parted(reading.graph(folder, spec, graph.name())?, &readable, tasks, decided),
                    None => None,
                };
                Some(parted.map_or_else(|| OverArch::new(graph, &readable, tasks), Ok)?)
            }
            None => None,
        };
        let graphs = Graphs { user, item, overarch };
        graphs.check_features()?;
        Ok(graphs)
    }

    /// Rejects features that no graph reads.
    fn check_features(&self) -> Result<()> {
        let by_overarch = |tower: &Tower, feature: &str| {
            let read = self.overarch.iter().flat_map(|o| &o.declared().user);
            let tensors = read.filter_map(|r| tower.tensors().iter().find(|t| t.name == r.name));
            tensors.into_iter().any(|t| t.feature == feature)
        };
        for (side, tower) in [("user", &self.user), ("item", &self.item)] {
            for (tower, feature) in tower.iter().flat_map(|t| t.features().iter().map(move |f| (t, &f.name))) {
                if !tower.reads(feature) && (side == "item" || !by_overarch(tower, feature)) {
                    tower.input(feature).map_err(|e| e.within(format!("{side}.features `{feature}`")))?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the reranker split at the stored item-side precomputation, if this release computes the values exactly as the release
/// that stored them.
fn parted(graph: Graph, readable: &[Readable], tasks: usize, decided: &DecidedPart) -> Option<OverArch> {
    let name = graph.name().to_owned();
    let split = OverArch::with_part(graph, readable, tasks, &decided.cut);
    let is_it = |overarch: &OverArch| {
        overarch.part().is_some_and(|part| part.width() == decided.width && part.is(&decided.digest))
    };
    let why = match split {
        Ok(overarch) if is_it(&overarch) => return Some(overarch),
        Ok(_) => "this release computes the item-side values by another program".to_owned(),
        Err(e) => e.to_string(),
    };
    tracing::warn!(graph = name, why, "the stored item-side precomputation is not used; publish the model again");
    None
}

/// Returns all tensors that the reranker of a package may read.
fn readable(spec: &ModelSpec, user: Option<&Tower>, tables: &[Arc<Table>]) -> Result<Vec<Readable>> {
    contract::readable(spec, user, &|table| contract::width_of(tables.iter().map(|t| &**t), table))
}

fn is_reserved(name: &str) -> bool {
    [contract::QUERY, contract::ITEM].contains(&name)
}

fn file_names(spec: &ModelSpec) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for table in &spec.tables {
        names.insert(table.file.clone());
        names.extend(table.vocabulary.clone());
        names.extend(table.tokenizer.clone());
    }
    names.extend(spec.user.as_ref().map(|u| u.tower.clone()));
    names.extend(spec.item.tower.clone());
    names.extend(spec.overarch.as_ref().map(|o| o.graph.clone()));
    names
}

/// Reads a graph with its external data inside.
pub(crate) fn read_graph(folder: &Path, file: &str) -> Result<Vec<u8>> {
    let mut bytes = 0u64;
    let mut beside = |name: &str| {
        let path = folder.join(name);
        // A missing file is reported when the file is read.
        if let (Ok(real), Ok(within)) = (path.canonicalize(), folder.canonicalize())
            && !real.starts_with(&within)
        {
            return Err(Error::invalid(format!(
                "file `{name}` of external data is a link to {}, expected a file in {}",
                real.display(),
                within.display()
            )));
        }
        bytes = bytes.saturating_add(std::fs::metadata(&path).map_or(0, |about| about.len()));
        if bytes > BYTES_MAX as u64 {
            return Err(Error::invalid(format!(
                "file `{name}`: {bytes} bytes, expected at most {BYTES_MAX} in all files"
            )));
        }
        read(folder, name)
    };
    inlined(read(folder, file)?, &mut beside).map_err(|e| e.within(file))
}

fn read(folder: &Path, file: &str) -> Result<Vec<u8>> {
    let path = folder.join(file);
    files::read(&path).map_err(|e| match e {
        e if e.kind() == Kind::NotFound => Error::invalid(format!("file `{file}` is missing")).caused_by(e),
        e => e,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rten_onnx::onnx::{DataLocation, DataType, GraphProto, ModelProto, StringStringEntryProto, TensorProto};

    use super::*;

    #[test]
    fn graphs_are_read_with_their_external_data() {
        let folder = tempfile::tempdir().unwrap();
        let entry =
            |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
        let weights = TensorProto {
            name: Some("w".into()),
            dims: vec![2],
            data_type: Some(DataType::FLOAT),
            external_data: vec![entry("location", "user.onnx.data"), entry("offset", "4")],
            data_location: Some(DataLocation::EXTERNAL),
            ..TensorProto::default()
        };
        let graph = GraphProto { initializer: vec![weights], ..GraphProto::default() };
        let model = ModelProto { graph: Some(graph), ..ModelProto::default() };
        std::fs::write(folder.path().join("user.onnx"), model.write_buf().unwrap()).unwrap();
        let error = read_graph(folder.path(), "user.onnx").unwrap_err().to_string();
        assert_eq!(error, "user.onnx: constant `w`: file `user.onnx.data` is missing");
        let numbers: Vec<u8> = [0.5f32, 1.5, 2.5].into_iter().flat_map(f32::to_le_bytes).collect();
        std::fs::write(folder.path().join("user.onnx.data"), &numbers).unwrap();
        let bytes = read_graph(folder.path(), "user.onnx").unwrap();
        let read = ModelProto::parse_buf(&bytes).unwrap().graph.unwrap();
        assert_eq!(read.initializer[0].raw_data.as_ref().unwrap().borrow()[..], numbers[4..]);
        // A link within the package is followed, one that leaves it is not.
        let (data, other) = (folder.path().join("user.onnx.data"), tempfile::tempdir().unwrap());
        std::fs::rename(&data, folder.path().join("weights")).unwrap();
        std::os::unix::fs::symlink("weights", &data).unwrap();
        assert_eq!(read_graph(folder.path(), "user.onnx").unwrap(), bytes);
        std::fs::rename(folder.path().join("weights"), other.path().join("weights")).unwrap();
        std::fs::remove_file(&data).unwrap();
        std::os::unix::fs::symlink(other.path().join("weights"), &data).unwrap();
        let error = read_graph(folder.path(), "user.onnx").unwrap_err().to_string();
        assert!(error.contains("file `user.onnx.data` of external data is a link to"), "{error}");
    }
}
