//! A folder that holds a model: `model.toml` and the files it names, checked against each other.
//!
//! A snapshot's folder is such a package too, with the index beside it, so that publishing and serving read it alike.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::spec::{ModelSpec, SIMILARITY};
use crate::embedding::{Table, Vocabulary};
use crate::error::{Error, Kind, Result};
use crate::files::Tensors;
use crate::tower::{FeatureSpec, Graph, OverArch, Runs, Tower};
use crate::value::Program;

/// The name of the file that declares a model.
pub const MODEL_FILE: &str = "model.toml";

/// The name of the file of requests that a version must answer before it may serve, where a package has one.
pub const WARMUP_FILE: &str = "warmup.jsonl";

/// A model package in memory; tables are mapped.
#[derive(Debug)]
pub struct Package {
    folder: PathBuf,
    /// What `model.toml` says.
    pub spec: ModelSpec,
    /// The embedding tables, in the order of `model.toml`.
    pub tables: Vec<Arc<Table>>,
    /// The user tower, where there is one.
    pub user: Option<Tower>,
    /// The item tower, where there is one.
    pub item: Option<Tower>,
    /// The reranker, where there is one.
    pub overarch: Option<OverArch>,
}

impl Package {
    /// Opens the package in `folder`, the files of which somebody may be changing: its tables are read into memory.
    ///
    /// # Errors
    /// `Invalid` or `NotFound` with the file and the field that are wrong.
    pub fn open(folder: &Path) -> Result<Self> {
        Package::from_folder(folder, Tensors::read, |_, tables| Ok(tables), &|_| ())
    }

    /// Opens the package in `folder` to try it: its tables are mapped, and `told` hears of each graph before it is read.
    ///
    /// # Errors
    /// As [`Package::open`].
    pub fn open_told(folder: &Path, told: &dyn Fn(&str)) -> Result<Self> {
        Package::from_folder(folder, Tensors::open, |_, tables| Ok(tables), told)
    }

    /// Opens the package in the `folder` of a published version; `place` says where its tables lie, given them whole and
    /// mapped.
    ///
    /// # Errors
    /// As [`Package::open`], and what `place` returns.
    pub fn open_placed(
        folder: &Path,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
    ) -> Result<Self> {
        Package::from_folder(folder, Tensors::open, place, &|_| ())
    }

    fn from_folder(
        folder: &Path,
        tensors: impl Fn(&Path) -> Result<Tensors>,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
        told: &dyn Fn(&str),
    ) -> Result<Self> {
        let text = read(folder, MODEL_FILE).map_err(|e| e.within(folder.display()))?;
        let text = String::from_utf8(text).map_err(|_| Error::invalid(format!("{MODEL_FILE}: not UTF-8")))?;
        let spec = ModelSpec::parse(&text).map_err(|e| e.within(folder.join(MODEL_FILE).display()))?;
        Package::assemble(folder, spec, tensors, place, told).map_err(|e| e.within(folder.display()))
    }

    fn assemble(
        folder: &Path,
        spec: ModelSpec,
        tensors: impl Fn(&Path) -> Result<Tensors>,
        place: impl FnOnce(&ModelSpec, Vec<Arc<Table>>) -> Result<Vec<Arc<Table>>>,
        told: &dyn Fn(&str),
    ) -> Result<Self> {
        if let Some(name) = file_names(&spec).iter().find(|n| n.contains(['/', '\\']) || n.starts_with('.')) {
            return Err(Error::invalid(format!(
                "{MODEL_FILE}: file `{name}`, expected a plain name inside the package"
            )));
        }
        // Several tables may lie in one file, which is opened once.
        let mut files: BTreeMap<&str, Tensors> = BTreeMap::new();
        for file in spec.tables.iter().map(|table| table.file.as_str()) {
            if !files.contains_key(file) {
                files.insert(file, tensors(&folder.join(file))?);
            }
        }
        let tables = spec.tables.iter().map(|table| {
            let tensors = &files[table.file.as_str()];
            let mut opened = Table::mapped(tensors, &table.name, table.row_format()?, table.unseen()?)?;
            if let Some(file) = &table.vocabulary {
                let text =
                    String::from_utf8(read(folder, file)?).map_err(|_| Error::invalid(format!("{file}: not UTF-8")))?;
                opened = opened.with_vocabulary(Vocabulary::parse(&text).map_err(|e| e.within(file))?)?;
            }
            Ok(Arc::new(opened))
        });
        let tables = place(&spec, tables.collect::<Result<_>>()?)?;
        let graph = |file: &str| {
            told(file);
            Graph::load(file, read(folder, file)?)
        };
        let tower = |side, file: &str, features: &[FeatureSpec], output| {
            let used: Vec<Arc<Table>> = tables
                .iter()
                .filter(|t| features.iter().any(|f| f.table.as_deref() == Some(t.name())))
                .cloned()
                .collect();
            Tower::new(side, features, &used, graph(file)?, output, spec.dimension)
        };
        let user = spec.user.as_ref().map(|u| tower("user", &u.tower, &u.features, "query")).transpose()?;
        let item = spec.item.tower.as_ref().map(|file| tower("item", file, &spec.item.features, "item")).transpose()?;
        let overarch = spec
            .overarch
            .as_ref()
            .map(|o| OverArch::new(graph(&o.graph)?, spec.dimension, spec.tasks.len()))
            .transpose()?;
        Ok(Package { folder: folder.into(), user, item, overarch, spec, tables })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files of all graphs, each with what runs it.
    pub fn graphs(&self) -> impl Iterator<Item = (&str, &Runs)> {
        let towers = self.user.iter().chain(&self.item).map(Tower::graph);
        towers.chain(self.overarch.iter().map(OverArch::graph))
    }

    /// The embedding table of this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.iter().find(|t| t.name() == name).map(|t| &**t)
    }

    /// The files that serving needs, `model.toml` among them, and the warm-up where there is one.
    pub fn files(&self) -> BTreeSet<String> {
        let mut names = file_names(&self.spec);
        names.insert(MODEL_FILE.into());
        names.extend(self.folder.join(WARMUP_FILE).exists().then(|| WARMUP_FILE.into()));
        names
    }

    /// Compiles the value model over the tasks, the given numeric item columns and the retrieval score.
    ///
    /// # Errors
    /// `Invalid` where the expression is wrong, the OverArch reads a column that is not numeric, or a name is taken twice.
    pub fn value(&self, numeric_columns: &[&str]) -> Result<Program> {
        for column in self.overarch.iter().flat_map(|o| o.columns()) {
            if !numeric_columns.contains(&column.as_str()) {
                return Err(Error::invalid(format!(
                    "overarch: input `{column}` is no numeric item column, expected one of: {}",
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

fn file_names(spec: &ModelSpec) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for table in &spec.tables {
        names.insert(table.file.clone());
        names.extend(table.vocabulary.clone());
    }
    names.extend(spec.user.as_ref().map(|u| u.tower.clone()));
    names.extend(spec.item.tower.clone());
    names.extend(spec.overarch.as_ref().map(|o| o.graph.clone()));
    names
}

fn read(folder: &Path, file: &str) -> Result<Vec<u8>> {
    let path = folder.join(file);
    fs::read(&path).map_err(|e| match Error::io(path.display(), e) {
        e if e.kind() == Kind::NotFound => Error::invalid(format!("file `{file}` is missing")).caused_by(e),
        e => e,
    })
}
