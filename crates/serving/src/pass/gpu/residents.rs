//! Snapshots in device memory: planned before any copy, shared by all workers, and freed with their version.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::delta::{DeviceView, SpareArrays};
use super::health::Health;
use super::residency::RetainedVersions;
use super::resident::{DevicePart, OccupiedBytes, Resident, spare_slots};
use crate::view::{BeforeShown, Segment, View};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks;
use sterling_cuda::partition::{ListCut, Share};
use sterling_cuda::{Device, Devices};
use sterling_snapshot::Snapshot;

/// Bytes of device memory for running requests.
const BUDGET_BYTES: usize = 1 << 30;
/// Divisor of the device memory: a single large request may exceed the budget by this fraction of the memory.
const LARGE_SHARE: u64 = 8;
/// Minimum bytes for requests on any device.
const LANES_MIN: u64 = 64 << 20;

/// View on each device.
pub(super) struct ResidentView {
    pub(super) snapshot: Arc<[Resident]>,
    pub(super) beside: Vec<Arc<DeviceView>>,
}

/// Snapshots in the memory of one device, or of several devices that each have a part of every list.
#[derive(Debug)]
pub struct Residents {
    devices: Devices,
    kept: RetainedVersions<Snapshot, Arc<[Resident]>>,
    health: Health,
    budget_bytes: usize,
    /// True if spare slots are reserved for updated items.
    takes_updates: bool,
    /// Number of passes that share the budget.
    passes: AtomicUsize,
}

impl BeforeShown for Residents {
    /// Uploads a view. If there is no room on the device, the CPU answers the requests for the view.
    fn before_shown(&self, view: &Arc<View>) {
        if let Err(reason) = self.get_view(view) {
            let (model, position) = (&view.main().manifest.name, view.position());
            tracing::debug!(%model, position, %reason, "view not on the device; the CPU answers");
        }
    }
}

/// Longest wait for the last requests of an evicted version, before the upload that needs its memory is tried anyway.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// Concurrent groups of a pass, one per group stream.
const CONCURRENT_GROUPS: usize = 2;

impl Residents {
    /// Creates an empty set on one device or several.
    pub fn new(devices: impl Into<Devices>) -> Self {
        let residents = Residents {
            devices: devices.into(),
            kept: RetainedVersions::default(),
            health: Health::default(),
            budget_bytes: 0,
            takes_updates: false,
            passes: AtomicUsize::new(0),
        };
        residents.with_budget(BUDGET_BYTES)
    }

    /// Sets the memory of running requests on each device. A smaller budget makes groups smaller, down to one request. A single
    /// request may exceed the budget by a fraction of the memory.
    pub fn with_budget(self, budget_bytes: usize) -> Self {
        for device in self.devices.all() {
            let all = device.memory().map_or(0, |(_, all)| all);
            device.lanes().set_most((budget_bytes as u64).saturating_add(all / LARGE_SHARE).max(LANES_MIN));
        }
        Residents { budget_bytes, ..self }
    }

    /// Returns the maximum bytes that one request may take on any device.
    pub(super) fn request_bytes_max(&self) -> u64 {
        self.devices.all().iter().map(|device| device.lanes().most()).min().unwrap_or(0)
    }

    /// Returns whether requests occupy more than their budget, so that idle workers release memory.
    pub(super) fn requests_take_more(&self) -> bool {
        self.devices.all().iter().any(|device| device.lanes().taken() > self.budget_bytes as u64)
    }

    /// Failures of the devices.
    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Returns warnings for operators, one line each: failing devices, and versions that the CPU answers until they are resident.
    pub fn warnings(&self) -> Vec<String> {
        self.health.warning().into_iter().chain(self.waiting()).collect()
    }

    /// Reserves spare slots behind each version for updated items, if memory allows.
    pub fn with_updates(self) -> Self {
        Residents { takes_updates: true, ..self }
    }

    /// Returns the bytes that a version takes on each device, computed without allocating them.
    ///
    /// # Errors
    /// `Unsupported` for a model that no device serves; `Overloaded` if the version does not fit.
    pub fn bytes_of(&self, snapshot: &Snapshot) -> Result<Vec<usize>> {
        let parts = self.parts(snapshot, &self.nothing())?;
        let devices = parts.iter().zip(self.devices.all());
        devices.map(|(part, device)| part.bytes(device, snapshot, 0).map(|bytes| bytes as usize)).collect()
    }

    /// Returns one line per version that the CPU answers until the device has room or works again, with the reason.
    pub fn waiting(&self) -> Vec<String> {
        let line = |(snapshot, kind, reason): (Arc<Snapshot>, Kind, String)| {
            let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
            let until = if kind == Kind::Overloaded { "there is room on the device" } else { "the device takes it" };
            format!("model `{model}` version {version}: the CPU answers until {until}: {reason}")
        };
        self.kept.waiting().into_iter().map(line).collect()
    }

    /// Devices of the set.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Adds a pass that shares the budget.
    pub(super) fn join(&self) {
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a pass, see [`Residents::join`].
    pub(super) fn leave(&self) {
        self.passes.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the bytes that a group of requests may take.
    pub(super) fn group_bytes(&self) -> usize {
        self.budget_bytes / (CONCURRENT_GROUPS * self.passes.load(Ordering::Relaxed).max(1))
    }

    /// Uploads a version before its first request, while other versions are served. If the upload fails, the CPU will answer; the
    /// log has the reason.
    pub fn upload_version(&self, snapshot: &Arc<Snapshot>) {
        drop(self.get(snapshot));
    }

    /// Returns the snapshot on each device. The first call uploads it, and other calls wait for the upload.
    ///
    /// # Errors
    /// `Unsupported` with the reason why the snapshot is not resident.
    pub(super) fn get(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<[Resident]>> {
        self.kept.get(snapshot, || {
            self.copy(snapshot).inspect_err(|reason| {
                let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
                tracing::warn!(%model, version, %reason, "version not uploaded to the device; the CPU answers");
            })
        })
    }

    /// Same as [`Residents::get_view`], counting `requests` requests: a version that waits for room is retried occasionally in
    /// the background.
    ///
    /// # Errors
    /// As [`Residents::get_view`].
    pub(super) fn request_view(self: &Arc<Self>, view: &Arc<View>, requests: usize) -> Result<ResidentView> {
        if self.kept.ask(view.main(), requests) {
            let (residents, snapshot) = (self.clone(), view.main().clone());
            let again = move || residents.kept.tried(&snapshot, residents.retry_upload(&snapshot));
            // If no thread can be started, the retry happens later.
            let _ = tasks::DEVICE.start(again);
        }
        self.get_view(view)
    }

    /// Retries the upload of a version that found no room; evicts versions with far fewer requests if necessary.
    fn retry_upload(&self, snapshot: &Arc<Snapshot>) -> Result<Arc<[Resident]>> {
        let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
        let start = Instant::now();
        let removed = self.make_room(snapshot)?;
        while removed.iter().any(|removed| removed.strong_count() > 0) && start.elapsed() < LAST_REQUESTS {
            thread::sleep(Duration::from_millis(1));
        }
        let seconds = |start: Instant| start.elapsed().as_secs_f64();
        let brought = self
            .copy(snapshot)
            .inspect_err(|reason| tracing::warn!(%model, version, %reason, "version not uploaded to the device"))?;
        tracing::info!(%model, version, seconds = seconds(start), "version uploaded to the device, which answers from now on");
        Ok(brought)
    }

    /// Returns a view on each device with its snapshot: see [`DeviceDelta::get`].
    ///
    /// # Errors
    /// As [`Residents::get`] and [`DeviceDelta::get`].
    pub(super) fn get_view(&self, view: &Arc<View>) -> Result<ResidentView> {
        if view.changed_items() > 0 {
            return Err(Error::unsupported("attributes have changed in place, which the GPU copy does not support"));
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

    /// Evicts as many versions with far fewer requests as necessary; none if evicting all of them is not enough.
    fn make_room(&self, snapshot: &Arc<Snapshot>) -> Result<Vec<Weak<[Resident]>>> {
        // The driver frees memory only when the stream reaches the release, so wait for the streams.
        self.settle()?;
        let (outnumbered, mut freed, mut count) = (self.kept.eviction_candidates(snapshot), self.nothing(), 0);
        let mut room = self.has_room(snapshot, &freed);
        while let (Err(_), Some((_, residents))) = (&room, outnumbered.get(count)) {
            freed.iter_mut().zip(residents.iter()).for_each(|(freed, resident)| *freed += resident.bytes());
            count += 1;
            room = self.has_room(snapshot, &freed);
        }
        room?;
        let (model, version) = (&snapshot.manifest.name, snapshot.manifest.version);
        let gives_way = |(of, residents): (Weak<Snapshot>, Arc<[Resident]>)| {
            let reason = format!("evicted for model {model} version {version}, which gets more requests");
            let before = of.upgrade().map(|of| (of.manifest.name.clone(), of.manifest.version));
            tracing::info!(?before, %reason, "version evicted from the device; the CPU answers");
            self.kept.evict(&of, reason);
            Arc::downgrade(&residents)
        };
        Ok(outnumbered.into_iter().take(count).map(gives_way).collect())
    }

    /// # Errors
    /// `Overloaded` if a snapshot would not fit even with `freed` more bytes on each device.
    fn has_room(&self, snapshot: &Snapshot, freed: &[u64]) -> Result<()> {
        let parts = self.parts(snapshot, freed)?;
        self.devices.all().iter().zip(&parts).zip(freed).try_for_each(|((device, part), freed)| {
            self.check_room(device, snapshot, part.bytes(device, snapshot, 0)?, *freed)
        })
    }

    /// # Errors
    /// `Overloaded` if `bytes` and the requests would not fit on a device with `freed` more bytes.
    fn check_room(&self, device: &Device, snapshot: &Snapshot, bytes: u64, freed: u64) -> Result<()> {
        // Memory that requests occupy already does not count as free.
        let needed = bytes + (self.budget_bytes as u64).saturating_sub(device.lanes().taken());
        let (free, all) = device.memory()?;
        let (name, model) = (device.name(), &snapshot.manifest.name);
        match needed.checked_sub(free + freed) {
            None | Some(0) => Ok(()),
            Some(short) => Err(Error::overloaded(format!(
                "{name}: model {model} takes {needed} bytes including those of requests, {free} of {all} are free, \
                 {short} are missing",
            ))),
        }
    }

    fn nothing(&self) -> Vec<u64> {
        vec![0; self.devices.all().len()]
    }

    /// Plans the partitions of a snapshot on the devices: equal shares, as far as memory allows, assuming `freed` more
    /// bytes.
    fn parts(&self, snapshot: &Snapshot, freed: &[u64]) -> Result<Vec<DevicePart>> {
        let devices = self.devices.all();
        let part = |(n, share): (usize, Share)| DevicePart::of(snapshot, share, n == 0);
        if devices.len() == 1 {
            return Ok(vec![part((0, Share::WHOLE))]);
        }
        let (mut sizes, mut reported) = (Vec::new(), Vec::new());
        for (n, (device, freed)) in devices.iter().zip(freed).enumerate() {
            let complete = part((n, Share::WHOLE)).bytes(device, snapshot, 0)?;
            let fixed = part((n, Share::NONE)).bytes(device, snapshot, 0)?;
            let (free, all) = device.memory()?;
            let requests = (self.budget_bytes as u64).saturating_sub(device.lanes().taken());
            let (room, items) =
                ((free + freed).saturating_sub(fixed + requests), complete.saturating_sub(fixed).max(1));
            sizes.push(room as f64 / items as f64);
            reported.push(format!("{} has room for {room} of {items} ({free} of {all} are free)", device.name()));
        }
        let shares = even_shares(&sizes).ok_or_else(|| {
            let (model, devices) = (&snapshot.manifest.name, devices.len());
            let short = 100.0 * (1.0 - sizes.iter().map(|size| size * ROUNDING).sum::<f64>());
            Error::overloaded(format!(
                "model {model} does not fit on {devices} devices, {short:.0} % of its item bytes have no space: {}",
                reported.join(", ")
            ))
        })?;
        Ok(Share::side_by_side(&shares).into_iter().enumerate().map(part).collect())
    }

    fn copy(&self, snapshot: &Snapshot) -> Result<Arc<[Resident]>> {
        // The driver frees memory only when the stream reaches the release, so wait for the streams, as in `make_room`.
        self.settle()?;
        let parts = self.parts(snapshot, &self.nothing())?;
        let on_devices = |has_room: bool| -> Result<Vec<Resident>> {
            let devices = self.devices.all().iter().zip(&parts);
            devices.map(|(device, part)| self.copy_part(device, snapshot, (part, has_room))).collect()
        };
        let mut residents = match self.takes_updates.then(|| on_devices(true)) {
            Some(Err(e)) if e.kind() == Kind::Overloaded => {
                let model = &snapshot.manifest.name;
                tracing::warn!(%model, reason = %e, "the device has no free memory for updated items");
                on_devices(false)?
            }
            Some(made) => made?,
            None => on_devices(false)?,
        };
        // All devices must encode queries in the same way.
        let norm_max = residents.iter().map(|resident| resident.index.norm_max()).fold(0.0, f32::max);
        residents.iter_mut().for_each(|resident| resident.index.set_norm_max(norm_max));
        // Worker streams read the snapshot, so the upload must be complete.
        self.settle()?;
        Ok(residents.into())
    }

    fn settle(&self) -> Result<()> {
        self.devices.all().iter().try_for_each(Device::settle)
    }

    /// Copies a device's part, with or without spare slots.
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
            tracing::info!(%model, bytes, items = part.cut.items(), "snapshot copied to {name}");
            taken = Some(OccupiedBytes::new(device, bytes));
            Ok(())
        };
        let spare = if has_room { spare_slots(&part.cut) } else { 0 };
        let mut resident = device.make(|device| Resident::copy(device, snapshot, part, spare), plan)?;
        resident.taken = taken;
        Ok(resident)
    }
}

/// Used fraction of a device's free memory: lists are split at word boundaries, so a device may get slightly more than
/// its share.
const ROUNDING: f64 = 0.98;

/// Returns shares that sum to 1, as even as the relative room of each device allows; `None` if there is too little
/// room.
fn even_shares(rooms: &[f64]) -> Option<Vec<f64>> {
    let (mut shares, mut left) = (vec![0.0; rooms.len()], 1.0);
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    order.sort_by(|&a, &b| rooms[a].total_cmp(&rooms[b]));
    // Starts with the device that has least room; the others share the rest.
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
        fn shares_are_as_even_as_memory_allows(rooms in proptest::collection::vec(0.0f64..1.5, 1..8)) {
            let shares = even_shares(&rooms);
            prop_assert_eq!(shares.is_some(), rooms.iter().sum::<f64>() * ROUNDING > 1.0 - 1e-9);
            let Some(shares) = shares else { return Ok(()) };
            prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{shares:?}");
            let most = shares.iter().copied().fold(0.0, f64::max);
            for (share, room) in shares.iter().zip(&rooms) {
                // A device with less than another is full.
                prop_assert!(*share <= room + 1e-9 && (most - share < 1e-9 || (share - room * ROUNDING).abs() < 1e-9));
            }
        }
    }

    #[test]
    fn equal_devices_get_equal_shares() {
        assert_eq!(even_shares(&[3.0, 3.0]).unwrap(), [0.5, 0.5]);
        assert_eq!(even_shares(&[0.4, 0.4]), None);
    }
}
