//! Checkpoints: a run that was interrupted resumes from its last checkpoint, with bit-identical results.
//!
//! A checkpoint is a folder `checkpoints/STEP` of the run's working folder, renamed into place once all of it is durable.
//! `state.safetensors` (`state`) holds the tensors: the rows that changed since the base, which is the last checkpoint with all
//! rows, or the package if there is no such checkpoint. `learn.json` holds the checksum of `state.safetensors`, the base, the
//! position in the events with a hash of the events so far, digests of the package, of `[train]` and of the run's options, and
//! in its last field its own checksum. The last two checkpoints and their bases are retained.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::judge::RankingMetrics;
use crate::tasks::TaskJudged;
use sterling_core::error::{Error, Kind, Result};
use sterling_storage::files::{self, Checksum, write_atomic};

/// File of the tensors.
pub(crate) const STATE_FILE: &str = "state.safetensors";
const ABOUT_FILE: &str = "learn.json";
/// Number of retained checkpoints.
const RETAINED_CHECKPOINTS: usize = 2;

/// Counts of the events that a run has read, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventCounts {
    /// Lines and rows read.
    pub(crate) read: u64,
    /// Events that are not trained on.
    pub(crate) skipped: u64,
    /// Lines and rows rejected as invalid events.
    pub(crate) refused: u64,
}

/// Identity of a run; a checkpoint whose identity differs in any field belongs to another run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Digest of the package and its items.
    pub(crate) package: String,
    /// Digest of the settings `[train]` of the package.
    pub(crate) train: String,
    /// Digest of the names and sizes of the event files, of the seed, and of the order of events.
    pub(crate) events: String,
}

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    /// Events of this epoch that were taken for training.
    pub(crate) events: u64,
    /// Hash of the trained events, batch by batch ([`crate::events::hash`]).
    pub(crate) hash: u64,
    /// Events trained on, in all epochs.
    pub(crate) trained: u64,
    pub(crate) met: EventCounts,
    /// Number of rejected events in the quarantine file, and the file's bytes.
    pub(crate) quarantined: (u64, u64),
    pub(crate) judged: RankingMetrics,
    /// Figures of the progressive validation at the end of each window.
    pub(crate) windows: Vec<RankingMetrics>,
    /// Figures of the reranker's tasks.
    pub(crate) tasks: Vec<TaskJudged>,
    pub(crate) rejected_batches: u64,
    pub(crate) rejected_rows: u64,
    /// Sum of the losses of all steps.
    pub(crate) loss: f64,
}

/// A checkpoint with all rows, which later checkpoints build on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    pub(crate) step: u64,
    state: Checksum,
}

#[derive(Serialize, Deserialize)]
struct About {
    format: u32,
    origin: Origin,
    position: Position,
    state: Checksum,
    /// Earlier checkpoint with the rows that this checkpoint lacks; none if the package has these rows, or none are lacking.
    base: Option<Base>,
    /// True if the checkpoint has all rows.
    is_full: bool,
}

/// A checkpoint to resume from.
#[derive(Debug)]
pub(crate) struct Last {
    pub(crate) position: Position,
    /// State files, to be restored one after the other.
    pub(crate) states: Vec<PathBuf>,
    /// Base of the next checkpoint.
    pub(crate) base: Option<Base>,
}

/// Format of checkpoints that this program writes and reads.
const FORMAT: u32 = 3;

/// The checkpoints of a working folder.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Returns the checkpoints of a working folder.
    pub(crate) fn new(folder: &Path) -> Self {
        Checkpoints { folder: folder.join("checkpoints") }
    }

    /// Returns the steps that have a checkpoint, ascending.
    fn steps(&self) -> Result<Vec<u64>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| Error::io(self.folder.display(), e))?,
        };
        let mut steps = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(self.folder.display(), e))?;
            steps.extend(entry.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the last checkpoint.
    ///
    /// # Errors
    /// `Conflict` if the checkpoint belongs to another run; `Corrupt` with the file if the checkpoint or its base is damaged.
    pub(crate) fn last(&self, origin: &Origin) -> Result<Option<Last>> {
        let Some(step) = self.steps()?.pop() else { return Ok(None) };
        let folder = self.folder.join(step.to_string());
        let place = |e: Error| {
            let kind = if e.kind() == Kind::NotFound { Kind::Corrupt } else { e.kind() };
            let advice = "remove this checkpoint to resume from the one before";
            Error::new(kind, format!("checkpoint {}: {e}; {advice}", folder.display()))
        };
        let about = about(&folder).map_err(place)?;
        let other = [
            ("package or items", &about.origin.package, &origin.package),
            ("[train]", &about.origin.train, &origin.train),
            ("events, seed or order of events", &about.origin.events, &origin.events),
        ];
        if let Some((what, ..)) = other.into_iter().find(|(_, had, has)| had != has) {
            return Err(Error::conflict(format!(
                "checkpoint {}: it was made with other {what}, expected those of this run; remove {} to start from the beginning",
                folder.display(),
                self.folder.display()
            )));
        }
        if about.position.step != step {
            let what = format!("{ABOUT_FILE}: step {}, expected {step}", about.position.step);
            return Err(place(Error::corrupt(what)));
        }
        let mut states = Vec::new();
        if let Some(base) = &about.base {
            let file = self.folder.join(base.step.to_string()).join(STATE_FILE);
            let checked = check(&file, &base.state);
            states.push(
                checked.map_err(|e| place(e.within(format!("base checkpoint {} of this checkpoint", base.step))))?,
            );
        }
        states.push(check(&folder.join(STATE_FILE), &about.state).map_err(place)?);
        let base = if about.is_full { Some(Base { step, state: about.state }) } else { about.base };
        Ok(Some(Last { position: about.position, states, base }))
    }

    /// Writes a checkpoint, and returns the base of the next one; `state` writes the file of tensors, with the rows that changed
    /// since `base`, or with all rows if `is_full`. If the write fails, earlier checkpoints stay.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the step.
    pub(crate) fn write(
        &self,
        origin: &Origin,
        position: &Position,
        base: Option<Base>,
        is_full: bool,
        state: impl FnOnce(&Path) -> Result<Checksum>,
    ) -> Result<Option<Base>> {
        let folder = self.folder.join(position.step.to_string());
        let io = |e| Error::io(folder.display(), e);
        let write = || {
            fs::create_dir_all(&self.folder).map_err(io)?;
            // Removes leftovers of a run that was killed.
            self.sweep()?;
            files::write_folder(&folder, |temporary| {
                let state = state(&temporary.join(STATE_FILE))?;
                let base = base.filter(|_| !is_full);
                let (origin, position) = (origin.clone(), position.clone());
                let about = About { format: FORMAT, origin, position, state, base, is_full };
                let text = serde_json::to_vec(&about).map_err(|e| Error::internal(format!("{ABOUT_FILE}: {e}")))?;
                write_atomic(&temporary.join(ABOUT_FILE), |file| file.write_all(&with_checksum(&text)))?;
                if folder.exists() {
                    // The old checkpoint is removed below, once the new one is in its place.
                    fs::rename(&folder, files::temporary(&folder)).map_err(io)?;
                }
                Ok(about)
            })
        };
        let About { state, base, .. } = write().map_err(|e| {
            e.within(format!("checkpoint at step {} was not written, earlier checkpoints are unchanged", position.step))
        })?;
        self.sweep()?;
        self.remove_old()?;
        Ok(if is_full { Some(Base { step: position.step, state }) } else { base })
    }

    /// Removes the checkpoints before a step.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn remove_before(&self, step: u64) -> Result<()> {
        for step in self.steps()?.into_iter().filter(|other| *other < step) {
            let old = self.folder.join(step.to_string());
            fs::remove_dir_all(&old).map_err(|e| Error::io(old.display(), e))?;
        }
        Ok(())
    }

    /// Removes all checkpoints but the last [`RETAINED_CHECKPOINTS`] and their bases.
    fn remove_old(&self) -> Result<()> {
        let steps = self.steps()?;
        let (old, retained) = steps.split_at(steps.len().saturating_sub(RETAINED_CHECKPOINTS));
        let mut bases = Vec::new();
        for step in retained {
            // A damaged checkpoint needs no base.
            let about = about(&self.folder.join(step.to_string())).ok();
            bases.extend(about.and_then(|about| about.base).map(|base| base.step));
        }
        for step in old.iter().filter(|step| !bases.contains(step)) {
            let old = self.folder.join(step.to_string());
            fs::remove_dir_all(&old).map_err(|e| Error::io(old.display(), e))?;
        }
        Ok(())
    }

    /// Removes the temporary folders of unfinished writes.
    fn sweep(&self) -> Result<()> {
        let io = |e| Error::io(self.folder.display(), e);
        for entry in fs::read_dir(&self.folder).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            if name.to_string_lossy().starts_with('.') && entry.path().is_dir() {
                fs::remove_dir_all(entry.path()).map_err(io)?;
            }
        }
        Ok(())
    }

    /// Removes all checkpoints. If the process is killed meanwhile, no incomplete checkpoint remains.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn clear(&self) -> Result<()> {
        let removed = self.folder.with_file_name(".checkpoints");
        let missing_is_fine = |done: std::io::Result<()>| match done {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(self.folder.display(), e)),
            _ => Ok(()),
        };
        // A process that was killed after the rename below left this folder.
        missing_is_fine(fs::remove_dir_all(&removed))?;
        missing_is_fine(fs::rename(&self.folder, &removed))?;
        missing_is_fine(fs::remove_dir_all(&removed))
    }
}

/// Last field of the description of a checkpoint: the description's checksum.
const SUM: &[u8] = b",\"xxh3\":\"";

/// Appends to a JSON object a field with the XXH3-128 of the object's bytes.
fn with_checksum(object: &[u8]) -> Vec<u8> {
    let fields = object.strip_suffix(b"}").unwrap_or(object);
    [fields, SUM, Checksum::of(object).xxh3.as_bytes(), b"\"}"].concat()
}

/// Reads the description of a checkpoint.
fn about(folder: &Path) -> Result<About> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let text = files::read(&folder.join(ABOUT_FILE))?;
    let broken = |e: serde_json::Error| Error::corrupt(format!("{ABOUT_FILE}: {e}"));
    let Format { format } = serde_json::from_slice(&text).map_err(broken)?;
    match format {
        FORMAT => {
            let about: About = serde_json::from_slice(&text).map_err(broken)?;
            let end = text.windows(SUM.len()).rposition(|at| at == SUM).unwrap_or(text.len());
            match with_checksum(&[&text[..end], b"}"].concat()) == text {
                true => Ok(about),
                false => Err(Error::corrupt(format!("{ABOUT_FILE}: its content does not match its checksum"))),
            }
        }
        _ => Err(Error::unsupported(format!("{ABOUT_FILE}: format {format}, expected {FORMAT}"))),
    }
}

/// Returns the path of a state file after comparing its bytes with their checksum.
fn check(file: &Path, expected: &Checksum) -> Result<PathBuf> {
    match Checksum::of_file(file)? == *expected {
        true => Ok(file.to_owned()),
        false => Err(Error::corrupt(format!("{STATE_FILE}: its content does not match the checksum in {ABOUT_FILE}"))),
    }
}
