//! Snapshots in the memory of devices: planned before anything is copied, shared by all workers, freed with their version.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::beside::{BesideSnapshot, DeviceView, SpareArrays};
use crate::dense::DeviceProgram;
use crate::device::cpu::kernels::BLOCK;
use crate::device::cuda::cut::{ListCut, Share};
use crate::device::cuda::ops::worth::{ValueInput, ValueProgram};
use crate::device::cuda::spare::Lent;
use crate::device::cuda::{Array, Device, Devices};
use crate::embedding::DeviceTables;
use crate::error::{Error, Kind, Result};
use crate::filter::index::DevicePlanes;
use crate::ivf::DeviceIndex;
use crate::locks::locked;
use crate::model::{Merge, UserInput};
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

/// How what the queries of a user found becomes one list, on a device.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) how: Merge,
    /// Those of the queries.
    pub(super) weights: Array<f32>,
}

/// A snapshot in the memory of a device, or what of it one of several devices has.
#[derive(Debug)]
pub(super) struct Resident {
    pub(super) index: DeviceIndex,
    pub(super) planes: DevicePlanes,
    /// The item of each slot.
    pub(super) ids: Array<i64>,
    /// None where the tower runs on the host, or on the first device.
    pub(super) tower: Option<DeviceTower>,
    /// None where a user has one query.
    pub(super) merging: Option<Merging>,
    pub(super) reranker: Option<Reranker>,
    pub(super) value: ValueProgram,
    /// Numbers that the reranker reads of a user.
    pub(super) user_numbers: usize,
    /// What `reranker` and `value` read by its address.
    columns: Vec<Array<f32>>,
    /// What updates have made of it.
    beside: BesideSnapshot,
    _taken: Option<Taken>,
}

/// Bytes of a device's memory, told as a metric for as long as they are taken.
#[derive(Debug)]
struct Taken {
    device: String,
    bytes: f64,
}

impl Taken {
    fn new(device: &Device, bytes: usize) -> Self {
        let (device, bytes) = (device.name(), bytes as f64);
        metrics::gauge!("sterling_device_bytes", "device" => device.clone()).increment(bytes);
        Taken { device, bytes }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        metrics::gauge!("sterling_device_bytes", "device" => self.device.clone()).decrement(self.bytes);
    }
}

/// Slots that are kept free behind those that a device has of a snapshot for the items that come later: an eighth as many, what lists
/// of few items are rounded up by, and tables of a few views.
fn spare_slots(cut: &ListCut) -> usize {
    let slots = cut.slots() / SPARE_SHARE + BLOCK * cut.lengths().len() + SPARE_MIN;
    slots.next_multiple_of(BLOCK)
}

/// See [`spare_slots`].
const SPARE_SHARE: usize = 8;
const SPARE_MIN: usize = 16 << 10;

impl Resident {
    /// Copies what a device has of a snapshot, with so many slots behind it. The first of several has the user tower.
    fn copy(device: &Device, snapshot: &Snapshot, part: &DevicePart, spare: usize) -> Result<Self> {
        let (package, cut) = (&snapshot.package, &*part.cut);
        let numbers = &snapshot.numbers;
        let column = |(_, numbers): &(String, Vec<f32>)| cut.copy(device, numbers, 1, spare);
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
                    rows: DeviceCandidates::copy(device, &snapshot.candidates, &mut tables, (cut, spare))?,
                    columns: device.copy(&columns)?,
                })
            }
        };
        let value = value_program(device, snapshot, &column)?;
        let weights: Vec<f32> = package.spec.queries().iter().map(|query| query.weight).collect();
        let how = package.spec.user.as_ref().and_then(|user| user.merge).unwrap_or_default();
        let merging =
            (!weights.is_empty()).then(|| Ok(Merging { how, weights: device.copy(&weights)? })).transpose()?;
        let kept: Vec<usize> = package
            .user_inputs
            .iter()
            .filter_map(|input| if let UserInput::Feature(n) = input { Some(*n) } else { None })
            .collect();
        let tower = package.user.as_ref().filter(|_| part.is_first);
        let tower = tower.map(|tower| DeviceTower::copy(device, tower, &kept, &mut tables));
        let tower = match tower {
            Some(Err(e)) if e.kind() == Kind::Unsupported => {
                tracing::info!(reason = %e, "the tower runs on the host");
                None
            }
            tower => tower.transpose()?,
        };
        Ok(Resident {
            index: DeviceIndex::copy(device, &snapshot.index, cut, spare)?,
            planes: DevicePlanes::copy(device, &snapshot.filter, &snapshot.columns, cut)?,
            ids: cut.copy(device, snapshot.ids.of_slots(), 1, spare)?,
            tower,
            merging,
            reranker,
            value,
            user_numbers: package.overarch.iter().flat_map(|o| o.user()).map(Readable::count).sum(),
            columns,
            beside: BesideSnapshot::new((part.share, part.cut.clone()), spare),
            _taken: None,
        })
    }

    /// Queries of a user.
    pub(super) fn queries(&self) -> usize {
        self.merging.as_ref().map_or(1, |merging| merging.weights.len())
    }

    /// Puts what is read of a segment's items that are the device's, by their slots, in the place of spare ones from `first` on, but for
    /// its index. Keys lie where they are lent a place.
    ///
    /// # Errors
    /// `Overloaded` where there is no place; as [`Array::write_at`].
    pub(super) fn put(&self, (segment, cut): (&Segment, &ListCut), first: u32) -> Result<Vec<Lent>> {
        let at = first as usize;
        cut.write(&self.ids, segment.ids().of_slots(), 1, at)?;
        for (column, numbers) in self.columns.iter().zip(segment.numbers()) {
            cut.write(column, numbers, 1, at)?;
        }
        self.reranker.as_ref().map_or(Ok(Vec::new()), |reranker| reranker.rows.put((segment.candidates(), cut), first))
    }
}

/// What of a snapshot is to lie on a device.
#[derive(Debug)]
struct DevicePart {
    share: Share,
    cut: Arc<ListCut>,
    is_first: bool,
}

impl DevicePart {
    fn of(snapshot: &Snapshot, share: Share, is_first: bool) -> Self {
        DevicePart { share, cut: Arc::new(snapshot.index.cut(share)), is_first }
    }

    /// Bytes that it takes, which need not be there.
    fn bytes(&self, device: &Device, snapshot: &Snapshot, spare: usize) -> Result<u64> {
        device.bytes_of(|device| Resident::copy(device, snapshot, self, spare)).map(|bytes| bytes as u64)
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

/// A view on each device.
pub(super) struct ResidentView {
    pub(super) snapshot: Arc<[Resident]>,
    pub(super) beside: Vec<Arc<DeviceView>>,
}

/// What became of a version's way to the devices; nothing yet while it is under way.
type Outcome = Arc<OnceLock<std::result::Result<Arc<[Resident]>, String>>>;

/// The snapshots in the memory of one device, or of several of which each has a part of every list.
#[derive(Debug)]
pub struct Residents {
    devices: Devices,
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
    /// Nothing yet, in the memory of a device or of several.
    pub fn new(devices: impl Into<Devices>) -> Self {
        Residents {
            devices: devices.into(),
            kept: Mutex::default(),
            budget_bytes: BUDGET_BYTES,
            takes_updates: false,
            passes: AtomicUsize::new(0),
        }
    }

    /// The same with another bound of what requests under way may take of each device's memory. Groups of requests become
    /// smaller by it, down to one.
    pub fn with_budget(self, budget_bytes: usize) -> Self {
        Residents { budget_bytes, ..self }
    }

    /// The same with room behind each version for the items that updates bring, where the device has as much.
    pub fn with_updates(self) -> Self {
        Residents { takes_updates: true, ..self }
    }

    /// Bytes that a version takes of each device's memory, which need not be there.
    ///
    /// # Errors
    /// `Unsupported` for a model that no device serves; `Overloaded` where it does not fit.
    pub fn bytes_of(&self, snapshot: &Snapshot) -> Result<Vec<usize>> {
        let parts = self.parts(snapshot)?;
        let devices = parts.iter().zip(self.devices.all());
        devices.map(|(part, device)| part.bytes(device, snapshot, 0).map(|bytes| bytes as usize)).collect()
    }

    /// The devices.
    pub fn devices(&self) -> &Devices {
        &self.devices
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

    /// The snapshot on each device; copied there on the first call, for which further ones wait. One that does not fit is not
    /// tried again.
    ///
    /// # Errors
    /// `Unsupported` or `Overloaded` with the reason why it is not there.
    pub(super) fn get(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<[Resident]>> {
        let outcome = self.outcome(snapshot);
        let found = outcome.get_or_init(|| {
            let found = self.copy(snapshot).map(Arc::from).map_err(|e| e.to_string());
            if let Err(reason) = &found {
                let name = &snapshot.manifest.name;
                tracing::warn!(model = %name, reason, "not on the device, the CPU answers");
            }
            found
        });
        found.clone().map_err(Error::unsupported)
    }

    /// A view on each device, and its snapshot: see [`BesideSnapshot::get`].
    ///
    /// # Errors
    /// As [`Residents::get`] and [`BesideSnapshot::get`].
    pub(super) fn get_view(&self, view: &Arc<View>) -> Result<ResidentView> {
        if view.changed_items() > 0 {
            return Err(Error::unsupported("attributes have changed in place, which devices do not follow"));
        }
        let snapshot = self.get(view.main())?;
        let on_device = |(device, resident): (&Device, &Resident)| {
            let put = |segment: (&Segment, &ListCut), first: u32| resident.put(segment, first);
            let arrays = SpareArrays { index: &resident.index, planes: &resident.planes, put: &put };
            resident.beside.get(device, arrays, view)
        };
        let beside = self.devices.all().iter().zip(snapshot.iter()).map(on_device).collect::<Result<_>>()?;
        Ok(ResidentView { snapshot, beside })
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

    /// What each device is to have of a snapshot: as much as every other one, as far as their memory allows.
    fn parts(&self, snapshot: &Snapshot) -> Result<Vec<DevicePart>> {
        let devices = self.devices.all();
        let part = |(n, share): (usize, Share)| DevicePart::of(snapshot, share, n == 0);
        if devices.len() == 1 {
            return Ok(vec![part((0, Share::WHOLE))]);
        }
        let (mut sizes, mut said) = (Vec::new(), Vec::new());
        for (n, device) in devices.iter().enumerate() {
            let whole = part((n, Share::WHOLE)).bytes(device, snapshot, 0)?;
            let fixed = part((n, Share::NONE)).bytes(device, snapshot, 0)?;
            let (free, all) = device.memory()?;
            let (room, items) =
                (free.saturating_sub(fixed + self.budget_bytes as u64), whole.saturating_sub(fixed).max(1));
            sizes.push(room as f64 / items as f64);
            said.push(format!("{} has room for {room} of {items} ({free} of {all} are free)", device.name()));
        }
        let shares = even_shares(&sizes).ok_or_else(|| {
            let (model, devices) = (&snapshot.manifest.name, devices.len());
            let short = 100.0 * (1.0 - sizes.iter().map(|size| size * ROUNDING).sum::<f64>());
            Error::overloaded(format!(
                "model {model} does not fit {devices} devices, {short:.0} % of its bytes by item are missing: {}",
                said.join(", ")
            ))
        })?;
        Ok(Share::side_by_side(&shares).into_iter().enumerate().map(part).collect())
    }

    fn copy(&self, snapshot: &Arc<Snapshot>) -> Result<Vec<Resident>> {
        let parts = self.parts(snapshot)?;
        let on_devices = |has_room: bool| -> Result<Vec<Resident>> {
            let devices = self.devices.all().iter().zip(&parts);
            devices.map(|(device, part)| self.copy_part(device, snapshot, (part, has_room))).collect()
        };
        let mut residents = match self.takes_updates.then(|| on_devices(true)) {
            Some(Err(e)) if e.kind() == Kind::Overloaded => {
                let model = &snapshot.manifest.name;
                tracing::warn!(%model, reason = %e, "no room on the device for items that updates bring");
                on_devices(false)?
            }
            Some(made) => made?,
            None => on_devices(false)?,
        };
        // Codes of queries are the same on all of them.
        let norm_max = residents.iter().map(|resident| resident.index.norm_max()).fold(0.0, f32::max);
        residents.iter_mut().for_each(|resident| resident.index.set_norm_max(norm_max));
        // Lanes read it on streams of their own.
        self.devices.all().iter().try_for_each(Device::settle)?;
        Ok(residents)
    }

    /// Copies what a device is to have, with room for what updates bring or without.
    fn copy_part(
        &self,
        device: &Device,
        snapshot: &Snapshot,
        (part, has_room): (&DevicePart, bool),
    ) -> Result<Resident> {
        let mut taken = None;
        let plan = |bytes: usize| {
            let needed = (bytes + self.budget_bytes) as u64;
            let (free, all) = device.memory()?;
            let (name, model) = (device.name(), &snapshot.manifest.name);
            match needed.checked_sub(free) {
                None | Some(0) => {
                    tracing::info!(%model, bytes, items = part.cut.items(), "copied to {name}");
                    taken = Some(Taken::new(device, bytes));
                    metrics::gauge!("sterling_device_bytes", "device" => name, "model" => model.clone())
                        .set(bytes as f64);
                    Ok(())
                }
                Some(short) => Err(Error::overloaded(format!(
                    "{name}: model {model} takes {needed} bytes with what requests take, {free} of {all} are free, {short} are missing",
                ))),
            }
        };
        let spare = if has_room { spare_slots(&part.cut) } else { 0 };
        let resident = device.make(|device| Resident::copy(device, snapshot, part, spare), plan)?;
        Ok(Resident { _taken: taken, ..resident })
    }
}

/// What of a device's room is planned with: lists are cut between words, which leaves one a little more than its share.
const ROUNDING: f64 = 0.98;

/// Shares that add up to 1, as even as devices allow that have room for such parts of all; none where they have too little.
fn even_shares(rooms: &[f64]) -> Option<Vec<f64>> {
    let (mut shares, mut left) = (vec![0.0; rooms.len()], 1.0);
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    order.sort_by(|&a, &b| rooms[a].total_cmp(&rooms[b]));
    // Whoever has least room first: what it does not take the others share.
    for (n, &device) in order.iter().enumerate() {
        shares[device] = f64::min(left / (rooms.len() - n) as f64, rooms[device] * ROUNDING);
        left -= shares[device];
    }
    (left < 1e-9).then_some(shares)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shares_are_as_even_as_rooms_allow(rooms in proptest::collection::vec(0.0f64..1.5, 1..8)) {
            let shares = even_shares(&rooms);
            prop_assert_eq!(shares.is_some(), rooms.iter().sum::<f64>() * ROUNDING > 1.0 - 1e-9);
            let Some(shares) = shares else { return Ok(()) };
            prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{shares:?}");
            let most = shares.iter().copied().fold(0.0, f64::max);
            for (share, room) in shares.iter().zip(&rooms) {
                // Whoever has less than another is full.
                prop_assert!(*share <= room + 1e-9 && (most - share < 1e-9 || (share - room * ROUNDING).abs() < 1e-9));
            }
        }
    }

    #[test]
    fn devices_alike_share_alike() {
        assert_eq!(even_shares(&[3.0, 3.0]).unwrap(), [0.5, 0.5]);
        assert_eq!(even_shares(&[0.4, 0.4]), None);
    }
}
