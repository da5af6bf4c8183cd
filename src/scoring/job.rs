//! What is scored, and where its parts lie.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::counts::Counts;
use super::questions::Task;
use crate::error::{Error, Kind, Result};
use crate::files::{self, Checksum};
use crate::items;

const JOB_FILE: &str = "_job.json";
const SUCCESS_FILE: &str = "_SUCCESS.json";

/// What is asked of every row of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobTerms {
    /// What is made of the rows.
    pub task: Task,
    /// The model's name.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// The digest of the version's bytes.
    pub digest: String,
    /// What requests get that do not say, as JSON.
    pub request: String,
}

/// An input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    /// Its path as it was given.
    pub input: PathBuf,
    /// Its length and hash.
    pub sum: Checksum,
}

/// Everything that the answers of a job follow from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Job {
    asked: JobTerms,
    /// The input files in the order of their paths, each of which makes one output file.
    units: Vec<Unit>,
}

/// The folder that a job writes to.
#[derive(Clone, Debug)]
pub struct JobFolder {
    root: PathBuf,
    job: Job,
    /// True where the inputs were hashed just now.
    is_new: bool,
}

impl JobFolder {
    /// Begins the job in a folder, or goes on with it where it was begun there. Of several that begin at once one writes what the
    /// job is, and all others find it. Inputs are hashed by the one that begins; [`JobFolder::check_all`] and
    /// [`JobFolder::check`] do it again. An input that is a folder is all files in it.
    ///
    /// # Errors
    /// `Conflict` with the first difference where another job was begun there; `Invalid` without inputs, or where one stands
    /// twice; `NotFound` or `Io` with the path.
    pub fn open(root: &Path, asked: JobTerms, given: Vec<PathBuf>) -> Result<Self> {
        let mut inputs = Vec::with_capacity(given.len());
        for input in given {
            match input.is_dir() {
                true => inputs.extend(items::parts(&input)?),
                false => inputs.push(input),
            }
        }
        inputs.sort();
        if let Some(pair) = inputs.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid(format!("input {}: given twice, expected once", pair[0].display())));
        }
        if inputs.is_empty() {
            return Err(Error::invalid("no inputs, expected at least one file"));
        }
        fs::create_dir_all(root).map_err(|e| Error::io(root.display(), e))?;
        let path = root.join(JOB_FILE);
        let begun = read(&path)?;
        let is_new = begun.is_none();
        let job = match begun {
            Some(job) => job,
            None => {
                let unit = |input: &PathBuf| Ok(Unit { sum: Checksum::of_file(input)?, input: input.clone() });
                let units = inputs.iter().map(unit).collect::<Result<_>>()?;
                create(&path, Job { asked: asked.clone(), units })?
            }
        };
        match difference(&job, &asked, &inputs)? {
            None => Ok(JobFolder { root: root.into(), job, is_new }),
            Some(difference) => Err(Error::conflict(format!(
                "{}: another job was begun here: {difference}; go on with the same, or choose another folder",
                root.display()
            ))),
        }
    }

    /// The input files, in the order of their paths.
    pub fn units(&self) -> &[Unit] {
        &self.job.units
    }

    /// Looks whether all inputs hold what they held when the job was begun.
    ///
    /// # Errors
    /// As [`JobFolder::check`], of the first that does not.
    pub fn check_all(&self) -> Result<()> {
        match self.is_new {
            true => Ok(()),
            false => (0..self.job.units.len()).try_for_each(|unit| self.check(unit)),
        }
    }

    /// Looks whether an input holds what it held when the job was begun.
    ///
    /// # Errors
    /// `Conflict` where it does not; `NotFound` or `Io` with its path.
    pub fn check(&self, unit: usize) -> Result<()> {
        let Unit { input, sum } = &self.job.units[unit];
        let now = Checksum::of_file(input)?;
        match now == *sum {
            true => Ok(()),
            false => Err(Error::conflict(format!(
                "{}: another job was begun here: its input {} had {} bytes with the hash {}, now it has {} with {}",
                self.root.display(),
                input.display(),
                sum.bytes,
                sum.xxh3,
                now.bytes,
                now.xxh3
            ))),
        }
    }

    /// The output file of a unit.
    pub fn output(&self, unit: usize) -> PathBuf {
        self.root.join(format!("{}.parquet", self.name(unit)))
    }

    /// The file of the problems of a unit, a JSON line each; it is there before the output is.
    pub fn problems(&self, unit: usize) -> PathBuf {
        self.root.join(format!("{}.problems.jsonl", self.name(unit)))
    }

    fn name(&self, unit: usize) -> String {
        let input = self.job.units[unit].input.to_string_lossy();
        format!("part-{unit:05}-{:016x}", xxh3_64(input.as_bytes()))
    }

    /// What the output of a unit follows from, as its file says it.
    pub(super) fn origin(&self, unit: usize) -> Result<String> {
        serde_json::to_string(&(&self.job.asked, &self.job.units[unit]))
            .map_err(|e| Error::internal(format!("job: {e}")))
    }

    /// True where a unit has its output.
    pub fn is_done(&self, unit: usize) -> bool {
        self.output(unit).exists()
    }

    /// The units that have no output yet.
    pub fn left(&self) -> Vec<usize> {
        (0..self.job.units.len()).filter(|&unit| !self.is_done(unit)).collect()
    }

    /// Counts what all units made, and writes it where none is left. What killed runs left behind is removed.
    ///
    /// # Errors
    /// `Corrupt` with the file that is no output of this job; `Io`.
    pub fn finish(&self) -> Result<Option<Counts>> {
        if !self.left().is_empty() {
            return Ok(None);
        }
        let mut counts = Counts::default();
        for unit in 0..self.job.units.len() {
            counts.add(&Counts::read(&self.output(unit), &self.problems(unit), &self.origin(unit)?)?);
        }
        for entry in fs::read_dir(&self.root).map_err(|e| Error::io(self.root.display(), e))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Whoever still writes one finds the output there; another may have removed it before.
            if name.starts_with(".part-") {
                let _ = fs::remove_file(entry.path());
            }
        }
        let text = serde_json::to_vec_pretty(&counts).map_err(|e| Error::internal(format!("counts: {e}")))?;
        files::write_atomic(&self.root.join(SUCCESS_FILE), |out| out.write_all(&text))?;
        Ok(Some(counts))
    }
}

fn read(path: &Path) -> Result<Option<Job>> {
    match fs::read(path).map_err(|e| Error::io(path.display(), e)) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| Error::corrupt(format!("{}: not a job: {e}", path.display()))),
        Err(e) if e.kind() == Kind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes the file of a job, whole, unless another did so first; the job that is there then.
fn create(path: &Path, job: Job) -> Result<Job> {
    let text = serde_json::to_vec_pretty(&job).map_err(|e| Error::internal(format!("job: {e}")))?;
    let whole = files::temporary(path);
    let written = File::create(&whole).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
    written.map_err(|e| Error::io(whole.display(), e))?;
    let linked = fs::hard_link(&whole, path);
    let placed = match &linked {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            // A file system without links: of two who begin different jobs at the same instant the outputs tell at the end.
            fs::rename(&whole, path)
        }
        _ => fs::remove_file(&whole),
    };
    placed.map_err(|e| Error::io(path.display(), e))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))?;
    match linked {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(read(path)?.unwrap_or(job)),
        _ => Ok(job),
    }
}

/// What differs first between the job that was begun and what is asked for.
fn difference(begun: &Job, asked: &JobTerms, inputs: &[PathBuf]) -> Result<Option<String>> {
    let told = |what: &str, begun: &dyn std::fmt::Debug, asked: &dyn std::fmt::Debug| {
        Ok(Some(format!("its {what} is {begun:?}, asked for is {asked:?}")))
    };
    let JobTerms { task, model, version, digest, request } = &begun.asked;
    if *task != asked.task {
        return told("task", task, &asked.task);
    }
    if *model != asked.model {
        return told("model", model, &asked.model);
    }
    if (version, digest) != (&asked.version, &asked.digest) {
        return told("version", &(version, digest), &(asked.version, &asked.digest));
    }
    if *request != asked.request {
        return told("request", request, &asked.request);
    }
    if begun.units.len() != inputs.len() {
        return told("number of inputs", &begun.units.len(), &inputs.len());
    }
    for (unit, input) in begun.units.iter().zip(inputs) {
        if unit.input != *input {
            return told("input", &unit.input, input);
        }
        let bytes = fs::metadata(input).map_err(|e| Error::io(input.display(), e))?.len();
        if unit.sum.bytes != bytes {
            return told(&format!("input {}, in bytes,", input.display()), &unit.sum.bytes, &bytes);
        }
    }
    Ok(None)
}
