//! Checkpoints: a run that was interrupted resumes from the last one, with bit-identical results.
//!
//! A checkpoint is a folder `checkpoints/STEP` of the run's working folder, renamed into place once all of it is durable.
//! `state.safetensors` (`state`) holds the tensors. `learn.json` holds the checksum of that file, the position in the events, and
//! digests of the package, of `[train]` and of the run's options. The last two checkpoints are retained.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::judge::Judged;
use sterling_core::error::{Error, Kind, Result};
use sterling_storage::files::{self, Checksum, write_atomic};

/// File of the tensors.
pub(crate) const STATE_FILE: &str = "state.safetensors";
const ABOUT_FILE: &str = "learn.json";
/// Number of retained checkpoints.
const KEPT: usize = 2;

/// Counts of the events that a run has read, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Met {
    /// Lines and rows read.
    pub(crate) read: u64,
    /// Events that are not positives of the trained label.
    pub(crate) skipped: u64,
    /// Lines and rows rejected as invalid events.
    pub(crate) refused: u64,
}

/// Identity of a run; a checkpoint whose identity differs in any field belongs to another run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Digest of the package and its items.
    pub(crate) package: String,
    /// Digest of `[train]`.
    pub(crate) train: String,
    /// Digest of the names and sizes of the event files, of the seed, and of the order of events.
    pub(crate) events: String,
}

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    /// Events of this epoch that were trained on or skipped.
    pub(crate) events: u64,
    /// Events trained on, in all epochs.
    pub(crate) trained: u64,
    pub(crate) met: Met,
    /// Number of rejected events in the quarantine file, and the file's bytes.
    pub(crate) quarantined: (u64, u64),
    pub(crate) judged: Judged,
    /// Figures of the progressive validation at the end of each window.
    pub(crate) windows: Vec<Judged>,
    pub(crate) rejected_batches: u64,
    pub(crate) rejected_rows: u64,
    /// Sum of the losses of all steps.
    pub(crate) loss: f64,
}

#[derive(Serialize, Deserialize)]
struct About {
    format: u32,
    origin: Origin,
    position: Position,
    state: Checksum,
}

/// Format of checkpoints that this program writes and reads.
const FORMAT: u32 = 1;

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

    /// Returns the position of the last checkpoint and the folder of its state.
    ///
    /// # Errors
    /// `Conflict` if it belongs to another run; `Corrupt` with the file if it is damaged.
    pub(crate) fn last(&self, origin: &Origin) -> Result<Option<(Position, PathBuf)>> {
        let Some(step) = self.steps()?.pop() else { return Ok(None) };
        let folder = self.folder.join(step.to_string());
        let place = |e: Error| {
            let kind = if e.kind() == Kind::NotFound { Kind::Corrupt } else { e.kind() };
            let advice = "remove it to go on from the one before";
            Error::new(kind, format!("checkpoint {}: {e}; {advice}", folder.display()))
        };
        let text = files::read(&folder.join(ABOUT_FILE)).map_err(place)?;
        let about: About =
            serde_json::from_slice(&text).map_err(|e| place(Error::corrupt(format!("{ABOUT_FILE}: {e}"))))?;
        if about.format != FORMAT {
            let what = format!("{ABOUT_FILE}: format {}, expected {FORMAT}", about.format);
            return Err(place(Error::unsupported(what)));
        }
        let other = [
            ("package or items", &about.origin.package, &origin.package),
            ("[train]", &about.origin.train, &origin.train),
            ("events, seed or order of events", &about.origin.events, &origin.events),
        ];
        if let Some((what, ..)) = other.into_iter().find(|(_, had, has)| had != has) {
            return Err(Error::conflict(format!(
                "checkpoint {}: it is of other {what}, expected those of this run; remove {} to begin again",
                folder.display(),
                self.folder.display()
            )));
        }
        let found = Checksum::of_file(&folder.join(STATE_FILE)).map_err(place)?;
        if found != about.state || about.position.step != step {
            return Err(place(Error::corrupt(format!(
                "{STATE_FILE}: its bytes are not those that {ABOUT_FILE} names"
            ))));
        }
        Ok(Some((about.position, folder)))
    }

    /// Writes a checkpoint; `state` writes the file of tensors. If the write fails, earlier checkpoints stay.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the step.
    pub(crate) fn write(
        &self,
        origin: &Origin,
        position: &Position,
        state: impl FnOnce(&Path) -> Result<Checksum>,
    ) -> Result<()> {
        let folder = self.folder.join(position.step.to_string());
        let io = |e| Error::io(folder.display(), e);
        let write = || {
            fs::create_dir_all(&self.folder).map_err(io)?;
            // Left by a run that was killed.
            self.sweep()?;
            files::write_folder(&folder, |temporary| {
                let state = state(&temporary.join(STATE_FILE))?;
                let about = About { format: FORMAT, origin: origin.clone(), position: position.clone(), state };
                let text = serde_json::to_vec(&about).map_err(|e| Error::internal(format!("{ABOUT_FILE}: {e}")))?;
                write_atomic(&temporary.join(ABOUT_FILE), |file| file.write_all(&text))?;
                if folder.exists() {
                    fs::remove_dir_all(&folder).map_err(io)?;
                }
                Ok(())
            })
        };
        write().map_err(|e| {
            e.within(format!("checkpoint at step {} was not written, earlier ones are as they were", position.step))
        })?;
        let steps = self.steps()?;
        for step in &steps[..steps.len().saturating_sub(KEPT)] {
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

    /// Removes all checkpoints.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn clear(&self) -> Result<()> {
        match fs::remove_dir_all(&self.folder) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(self.folder.display(), e)),
            _ => Ok(()),
        }
    }
}
