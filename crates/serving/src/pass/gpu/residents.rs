//! Snapshots in the memory of devices: planned before anything is copied, shared by all workers, freed with their version.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::beside::{DeviceView, SpareArrays};
use super::health::Health;
use super::kept::Kept;
use super::resident::{DevicePart, Resident, Taken, spare_slots};
use crate::view::{BeforeShown, Segment, View};
use sterling_core::error::{Error, Kind, Result};
use sterling_cuda::cut::{ListCut, Share};
use sterling_cuda::{Device, Devices};
use sterling_snapshot::Snapshot;

/// Bytes that requests under way may take of a device's memory.
const BUDGET_BYTES: usize = 1 << 30;
/// The share of a device's memory that requests may take beyond their budget, where one alone takes more than its group should.
const LARGE_SHARE: u64 = 8;
/// Bytes that requests may take of any device.
const LANES_MIN: u64 = 64 << 20;

/// A view on each device.
pub(super) struct ResidentView {
    pub(super) snapshot: Arc<[Resident]>,
    pub(super) beside: Vec<Arc<DeviceView>>,
}

/// The snapshots in the memory of one device, or of several of which each has a part of every list.
#[derive(Debug)]
pub struct Residents {
    devices: Devices,
    kept: Kept<Snapshot, Arc<[Resident]>>,
    health: Health,
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

/// How long the last requests of a version that gives way may take before the one that waits is tried without its room.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// Groups of a pass that are under way at a time, one on each of its lanes.
const GROUPS_UNDER_WAY: usize = 2;

impl Residents {
    /// Nothing yet, in the memory of a device or of several.
    pub fn new(devices: impl Into<Devices>) -> Self {
        let residents = Residents {
            devices: devices.into(),
            kept: Kept::default(),
            health: Health::default(),
            budget_bytes: 0,
            takes_updates: false,
            passes: AtomicUsize::new(0),
        };
        residents.with_budget(BUDGET_BYTES)
    }

    /// The same with another bound of what requests under way may take of each device's memory. Groups of requests become
    /// smaller by it, down to one. What one request takes beyond that is bounded by a share of the memory.
    pub fn with_budget(self, budget_bytes: usize) -> Self {
        for device in self.devices.all() {
            let all = device.memory().map_or(0, |(_, all)| all);
            device.lanes().set_most((budget_bytes as u64).saturating_add(all / LARGE_SHARE).max(LANES_MIN));
        }
        Residents { budget_bytes, ..self }
    }

    /// Bytes of any device that one request may take.
    pub(super) fn request_bytes_max(&self) -> u64 {
        self.devices.all().iter().map(|device| device.lanes().most()).min().unwrap_or(0)
    }

    /// Whether requests have more of a device's memory than their budget, so that workers at rest give theirs back.
    pub(super) fn requests_take_more(&self) -> bool {
        self.devices.all().iter().any(|device| device.lanes().taken() > self.budget_bytes as u64)
    }

    /// What devices failed at.
    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// What an operator should look at, a line each: devices that fail, and versions that the CPU answers until they are there.
    pub fn warnings(&self) -> Vec<String> {
        self.health.warning().into_iter().chain(self.waiting()).collect()
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
        let parts = self.parts(snapshot, &self.nothing())?;
        let devices = parts.iter().zip(self.devices.all());
        devices.map(|(part, device)| part.bytes(device, snapshot, 0).map(|bytes| bytes as usize)).collect()
    }

    /// Versions that the CPU answers until there is room for them or the device works again, and why, a line each.
    pub fn waiting(&self) -> Vec<String> {
        let line = |(snapshot, kind, reason): (Arc<Snapshot>, Kind, String)| {
            let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
            let until = if kind == Kind::Overloaded { "there is room on the device" } else { "the device takes it" };
            format!("model `{model}` version {version}: the CPU answers until {until}: {reason}")
        };
        self.kept.waiting().into_iter().map(line).collect()
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

    /// The snapshot on each device; copied there on the first call, for which further ones wait.
    ///
    /// # Errors
    /// `Unsupported` with the reason why it is not there.
    pub(super) fn get(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<[Resident]>> {
        self.kept.get(snapshot, || {
            self.copy(snapshot).inspect_err(|reason| {
                let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
                tracing::warn!(%model, version, %reason, "not on the device, the CPU answers");
            })
        })
    }

    /// As [`Residents::get_view`], for so many requests that are to be answered: a version that waits for room is tried again now and
    /// then, by a thread that they do not wait for.
    ///
    /// # Errors
    /// As [`Residents::get_view`].
    pub(super) fn ask_view(self: &Arc<Self>, view: &Arc<View>, requests: usize) -> Result<ResidentView> {
        if self.kept.ask(view.main(), requests) {
            let (residents, snapshot) = (self.clone(), view.main().clone());
            let again = move || residents.kept.tried(&snapshot, residents.bring_again(&snapshot));
            // Where there is no thread to be had it is tried later.
            let _ = thread::Builder::new().name("device".into()).spawn(again);
        }
        self.get_view(view)
    }

    /// Brings a version that found no room, where there is some now, or versions that are asked for far less give way.
    fn bring_again(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<[Resident]>> {
        let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
        let start = Instant::now();
        let gone = self.make_room(snapshot)?;
        while gone.iter().any(|gone| gone.strong_count() > 0) && start.elapsed() < LAST_REQUESTS {
            thread::sleep(Duration::from_millis(1));
        }
        let seconds = |start: Instant| start.elapsed().as_secs_f64();
        let brought =
            self.copy(snapshot).inspect_err(|reason| tracing::warn!(%model, version, %reason, "not on the device"))?;
        tracing::info!(%model, version, seconds = seconds(start), "on the device, which answers from now on");
        Ok(brought)
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

    /// Has versions give way that are asked for far less than one that waits, as many as it takes; none where all would not do.
    fn make_room(&self, snapshot: &Arc<Snapshot>) -> Result<Vec<Weak<[Resident]>>> {
        // What was given back is free once the driver has come there.
        self.settle()?;
        let (outnumbered, mut freed, mut count) = (self.kept.outnumbered(snapshot), self.nothing(), 0);
        let mut room = self.has_room(snapshot, &freed);
        while let (Err(_), Some((_, residents))) = (&room, outnumbered.get(count)) {
            freed.iter_mut().zip(residents.iter()).for_each(|(freed, resident)| *freed += resident.bytes());
            count += 1;
            room = self.has_room(snapshot, &freed);
        }
        room?;
        let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
        let gives_way = |(of, residents): (Weak<Snapshot>, Arc<[Resident]>)| {
            let reason = format!("it gave way to model {model} version {version}, which is asked for more");
            let before = of.upgrade().map(|of| (of.manifest.name.clone(), of.manifest.version));
            tracing::info!(?before, %reason, "leaves the device, the CPU answers");
            self.kept.give_way(&of, reason);
            Arc::downgrade(&residents)
        };
        Ok(outnumbered.into_iter().take(count).map(gives_way).collect())
    }

    /// # Errors
    /// `Overloaded` where there would be no room for a snapshot had each device so many bytes more.
    fn has_room(&self, snapshot: &Snapshot, freed: &[u64]) -> Result<()> {
        let parts = self.parts(snapshot, freed)?;
        self.devices.all().iter().zip(&parts).zip(freed).try_for_each(|((device, part), freed)| {
            self.check_room(device, snapshot, part.bytes(device, snapshot, 0)?, *freed)
        })
    }

    /// # Errors
    /// `Overloaded` where a device that had `freed` bytes more would have no room for so many and for requests.
    fn check_room(&self, device: &Device, snapshot: &Snapshot, bytes: u64, freed: u64) -> Result<()> {
        // What requests have already is not free.
        let needed = bytes + (self.budget_bytes as u64).saturating_sub(device.lanes().taken());
        let (free, all) = device.memory()?;
        let (name, model) = (device.name(), &snapshot.manifest.name);
        match needed.checked_sub(free + freed) {
            None | Some(0) => Ok(()),
            Some(short) => Err(Error::overloaded(format!(
                "{name}: model {model} takes {needed} bytes with what requests take, {free} of {all} are free, {short} are missing",
            ))),
        }
    }

    fn nothing(&self) -> Vec<u64> {
        vec![0; self.devices.all().len()]
    }

    /// What each device is to have of a snapshot: as much as every other one, as far as their memory allows, were so many bytes more
    /// of it free.
    fn parts(&self, snapshot: &Snapshot, freed: &[u64]) -> Result<Vec<DevicePart>> {
        let devices = self.devices.all();
        let part = |(n, share): (usize, Share)| DevicePart::of(snapshot, share, n == 0);
        if devices.len() == 1 {
            return Ok(vec![part((0, Share::WHOLE))]);
        }
        let (mut sizes, mut said) = (Vec::new(), Vec::new());
        for (n, (device, freed)) in devices.iter().zip(freed).enumerate() {
            let whole = part((n, Share::WHOLE)).bytes(device, snapshot, 0)?;
            let fixed = part((n, Share::NONE)).bytes(device, snapshot, 0)?;
            let (free, all) = device.memory()?;
            let requests = (self.budget_bytes as u64).saturating_sub(device.lanes().taken());
            let (room, items) = ((free + freed).saturating_sub(fixed + requests), whole.saturating_sub(fixed).max(1));
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

    fn copy(&self, snapshot: &Snapshot) -> Result<Arc<[Resident]>> {
        // As in `make_room`.
        self.settle()?;
        let parts = self.parts(snapshot, &self.nothing())?;
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
        self.settle()?;
        Ok(residents.into())
    }

    fn settle(&self) -> Result<()> {
        self.devices.all().iter().try_for_each(Device::settle)
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
            self.check_room(device, snapshot, bytes as u64, 0)?;
            let (name, model) = (device.name(), &snapshot.manifest.name);
            tracing::info!(%model, bytes, items = part.cut.items(), "copied to {name}");
            taken = Some(Taken::new(device, bytes));
            Ok(())
        };
        let spare = if has_room { spare_slots(&part.cut) } else { 0 };
        let mut resident = device.make(|device| Resident::copy(device, snapshot, part, spare), plan)?;
        resident.taken = taken;
        Ok(resident)
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
