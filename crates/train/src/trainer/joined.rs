//! A run of several hosts: what they have in common, and the checkpoint that they resume from.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{TrainOptions, Trainer};
use crate::checkpoint::{Checkpoints, Last, Origin, Position};
use crate::hosts::{Hosts, Identity, Kind, Mesh, Pulled, Request, answer_touched, requested};
use crate::model::Model;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;

/// Version of the messages between hosts.
const PROTOCOL: u32 = 2;
/// Maximum length of the description of a checkpoint.
const START_BYTES_MAX: usize = 256 << 20;
/// Bytes of a state file per message.
const STATE_BYTES: u64 = 1 << 20;

/// Checkpoint that all hosts resume from.
#[derive(Serialize, Deserialize)]
struct Start {
    position: Position,
    /// Length of each state file.
    states: Vec<u64>,
}

/// Returns what all hosts of a run must have in common. Threads and paths of outputs may differ.
pub(super) fn identity(options: &TrainOptions, hosts: &Hosts, origin: &Origin) -> Result<Identity> {
    let values = [
        ("protocol", PROTOCOL.to_string()),
        ("release", env!("CARGO_PKG_VERSION").into()),
        ("list of hosts", hosts.addresses.join(",")),
        ("package or items", origin.package.clone()),
        ("[train]", origin.train.clone()),
        ("events, seed or order of events", origin.events.clone()),
        ("number of epochs", options.epochs.to_string()),
        ("number of steps between checkpoints", options.checkpoint_steps.to_string()),
        ("limit of rejected events", format!("{:?}", options.max_refused)),
        ("list of ids to forget", super::digest(&options.forget)?),
        // Other vector instructions round products differently.
        ("instruction set", Kernels::best().name().to_owned()),
    ];
    Ok(Identity(values.map(|(name, value)| (name.to_owned(), value)).into()))
}

/// Reports an error to the other hosts.
pub(super) fn report_failure<T>(hosts: Option<&Mesh>, result: Result<T>) -> Result<T> {
    if let (Some(mesh), Err(e)) = (hosts, &result) {
        mesh.fail(e);
    }
    result
}

/// Returns the last checkpoint of host 0. Other hosts receive the files of the checkpoint.
pub(super) fn last(mesh: &Mesh, checkpoints: &Checkpoints, origin: &Origin, work: &Path) -> Result<Option<Last>> {
    match mesh.rank() {
        0 => sent(mesh, checkpoints.last(origin)?),
        _ => received(mesh, work),
    }
}

/// Sends a checkpoint to all other hosts.
fn sent(mesh: &Mesh, last: Option<Last>) -> Result<Option<Last>> {
    let mut files = Vec::new();
    for path in last.iter().flat_map(|last| &last.states) {
        let place = |e| Error::io(path.display(), e);
        let file = File::open(path).map_err(place)?;
        let length = file.metadata().map_err(place)?.len();
        files.push((path, file, length));
    }
    let lengths = files.iter().map(|(.., length)| *length).collect();
    let start = last.as_ref().map(|Last { position, .. }| Start { position: position.clone(), states: lengths });
    let text = serde_json::to_vec(&start).map_err(|e| Error::internal(format!("checkpoint: {e}")))?;
    mesh.send_all(Kind::Start, text)?;
    for host in mesh.others() {
        for (path, file, length) in &files {
            for first in (0..*length).step_by(STATE_BYTES as usize) {
                // Sends one block at a time, so that few blocks are in memory.
                mesh.bytes(host, Kind::Request, 0, 0)?;
                let mut block = vec![0; STATE_BYTES.min(length - first) as usize];
                file.read_exact_at(&mut block, first).map_err(|e| Error::io(path.display(), e))?;
                mesh.send(host, Kind::State, block)?;
            }
        }
    }
    Ok(last)
}

/// Receives a checkpoint of host 0 into the working folder.
fn received(mesh: &Mesh, work: &Path) -> Result<Option<Last>> {
    let text = mesh.bytes(0, Kind::Start, 0, START_BYTES_MAX)?;
    let start: Option<Start> =
        serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("host 0 sent an invalid checkpoint: {e}")))?;
    let Some(Start { position, states: lengths }) = start else { return Ok(None) };
    let mut states = Vec::new();
    for (number, length) in lengths.into_iter().enumerate() {
        let path = work.join(format!("state-{number}.safetensors"));
        let place = |e| Error::io(path.display(), e);
        let file = File::create(&path).map_err(place)?;
        for first in (0..length).step_by(STATE_BYTES as usize) {
            let count = STATE_BYTES.min(length - first) as usize;
            mesh.send(0, Kind::Request, Vec::<u8>::new())?;
            let block = mesh.bytes(0, Kind::State, count, count)?;
            file.write_all_at(&block, first).map_err(place)?;
        }
        states.push(path);
    }
    Ok(Some(Last { position, states, base: None }))
}

/// Answers the requests of host 0 until host 0 ends them. Returns whether the checkpoint has all rows.
///
/// # Errors
/// `Unavailable` for an invalid request, and if host 0 is lost or failed.
pub(super) fn serve(mesh: &Mesh, model: &Model) -> Result<bool> {
    let table = |number: usize| {
        let table = model.learning_tables().nth(number);
        table.ok_or_else(|| Error::unavailable(format!("host 0 requested table {number}, which does not learn")))
    };
    loop {
        match requested(mesh)? {
            Request::Rows(number, rows) => {
                let rows = table(number)?.0.own_rows(&rows);
                let rows = rows.map_err(|e| Error::unavailable(format!("request of host 0: {e}")))?;
                mesh.send(0, Kind::Answer, rows)?;
            }
            Request::Touched(number) => answer_touched(mesh, &table(number)?.1.rows())?,
            Request::End(is_full) => return Ok(is_full),
        }
    }
}

/// Adds the rows that other hosts changed to the changed rows of this host.
///
/// # Errors
/// If a host is lost.
pub(super) fn add_touched(others: &Pulled, model: &mut Model) -> Result<()> {
    for (number, (table, touched)) in model.learning_tables_mut().enumerate() {
        for host in others.mesh.others() {
            let rows = others.touched(host, number, table.spec().rows)?;
            rows.into_iter().for_each(|row| touched.insert(row));
        }
    }
    Ok(())
}

impl Trainer {
    /// Returns access to the rows of other hosts, if this is host 0 of several hosts.
    pub(super) fn others(&self) -> Option<Pulled> {
        let mesh = self.model.hosts().filter(|mesh| mesh.rank() == 0)?;
        let tables = self.model.learning_tables().map(|(table, _)| table.spec().name.clone()).collect();
        Some(Pulled { mesh: mesh.clone(), tables })
    }

    /// Adds the rejected rows of all hosts to the position.
    pub(super) fn add_rejected_rows(&mut self) -> Result<()> {
        let Some(mesh) = self.model.hosts() else { return Ok(()) };
        let counts = mesh.gather(Kind::Counts, vec![self.rejected_rows], |_| 1)?;
        self.position.rejected_rows += counts.iter().flatten().sum::<u64>();
        self.rejected_rows = 0;
        Ok(())
    }

    /// Removes the working folder of a host that writes no package.
    pub(super) fn remove_own(&self) -> Result<()> {
        let work = &self.options.work;
        fs::remove_dir_all(work).map_err(|e| Error::io(work.display(), e))?;
        // The parent is the working folder of host 0; it is empty, and removed, if host 0 runs on another machine.
        let _ = work.parent().map(fs::remove_dir);
        Ok(())
    }
}
