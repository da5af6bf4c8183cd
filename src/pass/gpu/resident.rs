//! Snapshots in the memory of a device: planned before anything is copied, shared by all workers, freed with their version.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::beside::{BesideSnapshot, DeviceView, SpareArrays};
use crate::dense::DeviceProgram;
use crate::device::cpu::kernels::BLOCK;
use crate::device::cuda::ops::worth::{ValueInput, ValueProgram};
use crate::device::cuda::spare::Lent;
use crate::device::cuda::{Array, Device};
use crate::embedding::DeviceTables;
use crate::error::{Error, Kind, Result};
use crate::filter::index::DevicePlanes;
use crate::ivf::DeviceIndex;
use crate::locks::locked;
use crate::model::UserInput;
use crate::snapshot::{DeviceCandidates, Snapshot};
use crate::tower::{DeviceTower, OverArch, Readable};
use crate::view::{BeforeShown, Segment, View};

/// Bytes that requests under way may take of a device's memory.
const BUDGET_BYTES: usize = 1 << 30;

/// A reranker on a device.
#[derive(Debug)]
pub(super) struct Reranker {
    pub(super) program: DeviceProgram,
    /// What it reads of candidates as rows.
    pub(super) rows: DeviceCandidates,
    /// The addresses of the columns that it reads, 0 for the retrieval score.
    pub(super) columns: Array<u64>,
}

/// A snapshot in the memory of a device.
#[derive(Debug)]
pub(super) struct Resident {
    pub(super) index: DeviceIndex,
    pub(super) planes: DevicePlanes,
    /// The item of each slot.
    pub(super) ids: Array<i64>,
    /// None where the tower runs on the host.
    pub(super) tower: Option<DeviceTower>,
    pub(super) reranker: Option<Reranker>,
    pub(super) value: ValueProgram,
    /// Numbers that the reranker reads of a user.
    pub(super) user_numbers: usize,
    /// What `reranker` and `value` read by its address.
    columns: Vec<Array<f32>>,
    /// What updates have made of it.
    beside: BesideSnapshot,
}

/// Slots that are kept free behind those of a snapshot for the items that come later: an eighth as many, what lists of few items are
/// rounded up by, and tables of a few views.
fn spare_slots(snapshot: &Snapshot) -> usize {
    let slots = snapshot.index.slots() / SPARE_SHARE + BLOCK * snapshot.index.lists() + SPARE_MIN;
    slots.next_multiple_of(BLOCK)
}

/// See [`spare_slots`].
const SPARE_SHARE: usize = 8;
const SPARE_MIN: usize = 16 << 10;

impl Resident {
    /// Copies a snapshot, with so many slots behind its own.
    fn copy(device: &Device, snapshot: &Snapshot, spare: usize) -> Result<Self> {
        let package = &snapshot.package;
        if !package.spec.queries().is_empty() {
            return Err(Error::unsupported("a model of several queries a user"));
        }
        let numbers = &snapshot.numbers;
        let column = |(_, numbers): &(String, Vec<f32>)| device.copy_with_room(numbers, spare);
        let columns = numbers.iter().map(column).collect::<Result<Vec<Array<f32>>>>()?;
        let column = |name: &str| numbers.iter().position(|(known, _)| known == name).map(|n| &columns[n]);
        let mut tables = DeviceTables::default();
        let reranker = match &package.overarch {
            None => None,
            Some(overarch) => {
                let program = overarch
                    .program()
                    .ok_or_else(|| Error::unsupported("the reranker's graph is no program of ours"))?;
                let missing = |name: &str| Error::internal(format!("column `{name}` is not among the numbers"));
                let address = |name: &str| match name {
                    OverArch::SIMILARITY => Ok(0),
                    name => column(name).map(Array::address).ok_or_else(|| missing(name)),
                };
                let columns = overarch.numbers().map(address).collect::<Result<Vec<u64>>>()?;
                Some(Reranker {
                    program: DeviceProgram::copy(device, program)?,
                    rows: DeviceCandidates::copy(device, &snapshot.candidates, &mut tables, spare)?,
                    columns: device.copy(&columns)?,
                })
            }
        };
        let value = value_program(device, snapshot, &column)?;
        let kept: Vec<usize> = package
            .user_inputs
            .iter()
            .filter_map(|input| if let UserInput::Feature(n) = input { Some(*n) } else { None })
            .collect();
        let tower = package.user.as_ref().map(|tower| DeviceTower::copy(device, tower, &kept, &mut tables));
        let tower = match tower {
            Some(Err(e)) if e.kind() == Kind::Unsupported => {
                tracing::info!(reason = %e, "the tower runs on the host");
                None
            }
            tower => tower.transpose()?,
        };
        Ok(Resident {
            index: DeviceIndex::copy(device, &snapshot.index, spare)?,
            planes: DevicePlanes::copy(device, &snapshot.filter, &snapshot.columns)?,
            ids: device.copy_with_room(snapshot.ids.of_slots(), spare)?,
            tower,
            reranker,
            value,
            user_numbers: package.overarch.iter().flat_map(|o| o.user()).map(Readable::count).sum(),
            columns,
            beside: BesideSnapshot::new(snapshot.index.slots(), spare),
        })
    }

    /// Puts what is read of a segment's items by their slots in the place of spare ones from `first` on, but for its index. Keys lie
    /// where they are lent a place.
    ///
    /// # Errors
    /// `Overloaded` where there is no place; as [`Array::write_at`].
    pub(super) fn put(&self, segment: &Segment, first: u32) -> Result<Vec<Lent>> {
        let at = first as usize;
        self.ids.write_at(at, segment.ids().of_slots())?;
        for (column, numbers) in self.columns.iter().zip(segment.numbers()) {
            column.write_at(at, numbers)?;
        }
        self.reranker.as_ref().map_or(Ok(Vec::new()), |reranker| reranker.rows.put(segment.candidates(), first))
    }
}

/// The value model; `column` says where a numeric column lies.
fn value_program<'a>(
    device: &Device,
    snapshot: &Snapshot,
    column: &dyn Fn(&str) -> Option<&'a Array<f32>>,
) -> Result<ValueProgram> {
    let tasks = &snapshot.package.spec.tasks;
    let input = |name: &String| match (tasks.iter().position(|task| task.name == *name), column(name)) {
        (Some(task), _) => ValueInput::task(task),
        (None, Some(column)) => ValueInput::column(column),
        (None, None) => ValueInput::similarity(),
    };
    let program = &snapshot.value;
    let inputs: Vec<ValueInput> = program.inputs().iter().map(input).collect();
    Ok(ValueProgram {
        steps: device.copy(&program.lower())?,
        inputs: device.copy(&inputs)?,
        constants: program.constants(&std::collections::BTreeMap::new())?.len(),
        tasks: snapshot.package.overarch.as_ref().map_or(0, |o| o.tasks()),
        depth: program.depth(),
    })
}

/// What became of a version's way to the device; nothing yet while it is under way.
type Outcome = Arc<OnceLock<std::result::Result<Arc<Resident>, String>>>;

/// The snapshots in the memory of one device.
#[derive(Debug)]
pub struct Residents {
    device: Device,
    kept: Mutex<Vec<(Weak<Snapshot>, Outcome)>>,
    budget_bytes: usize,
    /// Whether room is kept for the items that updates bring.
    takes_updates: bool,
    /// Passes that share the budget.
    passes: AtomicUsize,
}

impl BeforeShown for Residents {
    /// Brings a view to the device. Where there is no room, the CPU answers what it is asked.
    fn before_shown(&self, view: &Arc<View>) {
        if let Err(reason) = self.get_view(view) {
            let (model, position) = (&view.main().manifest.name, view.position());
            tracing::debug!(%model, position, %reason, "a view is not on the device, the CPU answers");
        }
    }
}

/// Groups of a pass that are under way at a time, one on each of its lanes.
const GROUPS_UNDER_WAY: usize = 2;

impl Residents {
    /// Nothing yet, in the memory of `device`.
    pub fn new(device: Device) -> Self {
        Residents {
            device,
            kept: Mutex::default(),
            budget_bytes: BUDGET_BYTES,
            takes_updates: false,
            passes: AtomicUsize::new(0),
        }
    }

    /// The same with another bound of what requests under way may take of the device's memory. Groups of requests become
    /// smaller by it, down to one.
    pub fn with_budget(self, budget_bytes: usize) -> Self {
        Residents { budget_bytes, ..self }
    }

    /// The same with room behind each version for the items that updates bring, where the device has as much.
    pub fn with_updates(self) -> Self {
        Residents { takes_updates: true, ..self }
    }

    /// Bytes that a version takes of a device's memory, which need not be there.
    ///
    /// # Errors
    /// `Unsupported` for a model that no device serves.
    pub fn bytes_of(&self, snapshot: &Snapshot) -> Result<usize> {
        let mut taken = 0;
        let refused = self.device.make(
            |device| Resident::copy(device, snapshot, 0),
            |bytes| {
                taken = bytes;
                Err(Error::overloaded("only measured"))
            },
        );
        match refused {
            Err(e) if taken == 0 => Err(e),
            _ => Ok(taken),
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// One more pass shares what requests may take, or one less.
    pub(super) fn join(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// See [`Residents::join`].
    pub(super) fn leave(&self) {
        self.passes.fetch_sub(1, Ordering::Relaxed);
    }

    /// What a group of requests may take.
    pub(super) fn group_bytes(&self) -> usize {
        self.budget_bytes / (GROUPS_UNDER_WAY * self.passes.load(Ordering::Relaxed).max(1))
    }

    /// Brings a version to the device before it is asked for anything, while others are served. Where it cannot be there, the
    /// CPU will answer it; the log says why.
    pub fn bring(&self, snapshot: &Arc<Snapshot>) {
        drop(self.get(snapshot));
    }

    /// The snapshot on the device; copied there on the first call, for which further ones wait. One that does not fit is not
    /// tried again.
    ///
    /// # Errors
    /// `Unsupported` or `Overloaded` with the reason why it is not there.
    pub(super) fn get(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<Resident>> {
        let outcome = self.outcome(snapshot);
        let found = outcome.get_or_init(|| {
            let found = self.copy(snapshot).map(Arc::new).map_err(|e| e.to_string());
            if let Err(reason) = &found {
                let name = &snapshot.manifest.name;
                tracing::warn!(model = %name, reason, "not on the device, the CPU answers");
            }
            found
        });
        found.clone().map_err(Error::unsupported)
    }

    /// A view on the device, and its snapshot: see [`BesideSnapshot::get`].
    ///
    /// # Errors
    /// As [`Residents::get`] and [`BesideSnapshot::get`].
    pub(super) fn get_view(&self, view: &Arc<View>) -> Result<(Arc<Resident>, Arc<DeviceView>)> {
        let resident = self.get(view.main())?;
        let put = |segment: &Segment, first: u32| resident.put(segment, first);
        let arrays = SpareArrays { index: &resident.index, planes: &resident.planes, put: &put };
        let on_device = resident.beside.get(&self.device, arrays, view)?;
        Ok((resident, on_device))
    }

    /// Where the outcome of a version stands; that of versions which are gone goes, with their memory.
    fn outcome(&self, snapshot: &Arc<Snapshot>) -> Outcome {
        // Whoever panicked left a whole list behind.
        let mut kept = locked(&self.kept);
        kept.retain(|(of, _)| of.strong_count() > 0);
        let known = kept.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(snapshot)));
        known.map(|(_, outcome)| outcome.clone()).unwrap_or_else(|| {
            let outcome = Outcome::default();
            kept.push((Arc::downgrade(snapshot), outcome.clone()));
            outcome
        })
    }

    fn copy(&self, snapshot: &Arc<Snapshot>) -> Result<Resident> {
        let plan = |bytes: usize| {
            let needed = (bytes + self.budget_bytes) as u64;
            let (free, all) = self.device.memory()?;
            let (name, model) = (self.device.name(), &snapshot.manifest.name);
            match needed.checked_sub(free) {
                None | Some(0) => {
                    tracing::info!(%model, bytes, "copied to {name}");
                    Ok(())
                }
                Some(short) => Err(Error::overloaded(format!(
                    "{name}: model {model} takes {needed} bytes with what requests take, {free} of {all} are free, {short} are missing",
                ))),
            }
        };
        let make = |spare: usize| self.device.make(|device| Resident::copy(device, snapshot, spare), plan);
        let resident = match self.takes_updates.then(|| make(spare_slots(snapshot))) {
            Some(Err(e)) if e.kind() == Kind::Overloaded => {
                let model = &snapshot.manifest.name;
                tracing::warn!(%model, reason = %e, "no room on the device for items that updates bring");
                make(0)?
            }
            Some(made) => made?,
            None => make(0)?,
        };
        // Lanes read it on streams of their own.
        self.device.settle()?;
        Ok(resident)
    }
}
