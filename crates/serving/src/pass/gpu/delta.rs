//! Device-resident delta of a snapshot: segments added by updates, and the live bitmaps that hide deleted items. With several
//! GPUs, each GPU has its partition of the delta.
//!
//! A segment's items occupy spare slots behind those of the snapshot, in the same arrays: from the candidates on, no kernel
//! distinguishes segments from the snapshot. A segment has its own lists, Bloom planes and filter columns. Each view has its
//! own live bitmaps of the snapshot and of each segment, derived from those of an earlier view by uploading the changed words;
//! a segment is uploaded once. A new view therefore costs only its changes, and a batch sees the view that it was prepared for.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use crate::view::{Segment, View};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::units::Slot;
use sterling_cuda::ops::scan::LiveItems;
use sterling_cuda::partition::{ListCut, Share};
use sterling_cuda::spare::{SlotLease, Spare};
use sterling_cuda::{Array, Device};
use sterling_index::filter;
use sterling_index::filter::index::{DeviceLiveItems, DevicePlanes};
use sterling_index::ivf::{DeviceIndex, SegmentItems};
use sterling_index::search::Tombstones;
use sterling_kernels::cpu::kernels::BLOCK;

/// Segment whose items are in spare slots.
#[derive(Debug)]
pub(super) struct DeviceSegment {
    pub(super) lists: SegmentItems,
    pub(super) planes: DevicePlanes,
    /// First slot of each word of the segment's planes, in the numbering of the device.
    pub(super) word_slots: Array<u32>,
    cut: ListCut,
    slots: SlotLease,
    _keys: Vec<SlotLease>,
}

/// Live items of a snapshot or a segment.
#[derive(Debug)]
struct PartItems {
    tombstones: Tombstones,
    items: DeviceLiveItems,
}

/// Function that writes a device's partition of a segment to slots, starting at the given slot.
type PutAt<'a> = dyn Fn((&Segment, &ListCut), u32) -> Result<Vec<SlotLease>> + 'a;

/// Device arrays of a snapshot that end with spare slots.
#[derive(Clone, Copy)]
pub(super) struct SpareArrays<'a> {
    pub(super) index: &'a DeviceIndex,
    pub(super) planes: &'a DevicePlanes,
    /// Writes the segment's per-slot data, except its index, to spare slots from the given slot on.
    pub(super) put: &'a PutAt<'a>,
}

/// Part of a view: the snapshot or a segment.
#[derive(Debug)]
struct LivePart {
    /// Live items; `None` if no item is deleted.
    live: Option<Arc<PartItems>>,
}

/// Segment in a view.
#[derive(Debug)]
pub(super) struct DeviceViewSegment {
    pub(super) segment: Arc<DeviceSegment>,
    part: LivePart,
    /// Slots of the segment in the numbering of the view.
    of_view: Range<u32>,
}

/// View in device memory.
#[derive(Debug)]
pub(super) struct DeviceView {
    /// This device's part of the snapshot's lists.
    cut: Arc<ListCut>,
    main: LivePart,
    pub(super) deltas: Vec<DeviceViewSegment>,
    /// Number of deleted items per list of the snapshot; empty if no item is deleted.
    deleted_per_list: Vec<u32>,
}

/// Segments on a device, as long as any view uses them.
type Segments = Vec<(Weak<Segment>, Arc<DeviceSegment>)>;

/// Delta of a snapshot on a device.
#[derive(Debug)]
pub(super) struct DeviceDelta {
    cut: Arc<ListCut>,
    share: Share,
    spare: Arc<Spare>,
    views: Mutex<Vec<(Weak<View>, Arc<DeviceView>)>>,
    segments: Mutex<Segments>,
}

impl LivePart {
    /// Returns the live bitmap; `None` if no item is deleted.
    fn items(&self) -> Option<&DeviceLiveItems> {
        self.live.as_ref().map(|live| &live.items)
    }
}

impl DeviceViewSegment {
    /// Returns the segment's first slot on the device.
    fn first(&self) -> u32 {
        self.segment.slots.places().start
    }

    /// Returns the live bitmap of the segment; `None` if no item is deleted.
    pub(super) fn live(&self) -> Option<&DeviceLiveItems> {
        self.part.items()
    }
}

impl DeviceView {
    /// Returns the live bitmap of the snapshot; `None` if no item is deleted.
    pub(super) fn live(&self) -> Option<&DeviceLiveItems> {
        self.main.items()
    }

    /// Converts a slot of the view to the numbering of the device; `None` if another device has it.
    pub(super) fn to_device(&self, slot: Slot) -> Option<u32> {
        match self.deltas.iter().find(|delta| delta.of_view.contains(&slot.0)) {
            Some(delta) => Some(delta.segment.cut.to_card(slot.0 - delta.of_view.start)? + delta.first()),
            None => self.cut.to_card(slot.0),
        }
    }

    /// Converts a slot of the device to the numbering of the view.
    pub(super) fn of_device(&self, slot: u32) -> Slot {
        match self.deltas.iter().find(|delta| delta.segment.slots.places().contains(&slot)) {
            Some(delta) => Slot(delta.segment.cut.of_card(slot - delta.first()) + delta.of_view.start),
            None => Slot(self.cut.of_card(slot)),
        }
    }

    /// Returns the maximum number of deleted snapshot items in `lists` lists.
    pub(super) fn deleted_at_most(&self, lists: usize) -> usize {
        self.deleted_per_list.iter().max().map_or(0, |&most| most as usize * lists)
    }

    /// Returns the maximum number of segment items that a search of `lists` lists scans.
    pub(super) fn items_at_most(&self, lists: usize) -> usize {
        self.deltas.iter().map(|delta| delta.segment.lists.items_at_most(lists)).sum()
    }
}

/// Converts a live bitmap to the form that scans take.
pub(super) fn live_items<'a>(live: Option<&'a DeviceLiveItems>, planes: &'a DevicePlanes) -> Option<LiveItems<'a>> {
    live.map(|live| LiveItems { words: live.words(), firsts: &planes.index().firsts })
}

impl DeviceDelta {
    /// Creates an empty delta with `spare` slots, which follow the slots of this GPU's share of the snapshot.
    pub(super) fn new((share, cut): (Share, Arc<ListCut>), spare: usize) -> Self {
        // Leaves one block free after the snapshot's slots: a segment must not overwrite the end offset of the values
        // of the last slot.
        let end = cut.slots().saturating_add(spare) as u32;
        let spare = Spare::new((cut.slots() + BLOCK) as u32..end.max((cut.slots() + BLOCK) as u32));
        DeviceDelta { cut, share, spare, views: Mutex::default(), segments: Mutex::default() }
    }

    /// Returns a view on the device. The first call uploads the view's changes; concurrent calls for the same view wait for that
    /// upload, calls for other views do not.
    ///
    /// # Errors
    /// `Overloaded` if there is no room for the view.
    pub(super) fn get(&self, device: &Device, arrays: SpareArrays<'_>, view: &Arc<View>) -> Result<Arc<DeviceView>> {
        if let Some(known) = self.known(view) {
            return Ok(known);
        }
        let mut segments = locked(&self.segments);
        if let Some(known) = self.known(view) {
            return Ok(known);
        }
        let before = self.last();
        segments.retain(|(of, _)| of.strong_count() > 0);
        let made = Arc::new(make(device, (arrays, self), view, (before.as_deref(), &mut segments))?);
        // Worker streams read the delta, so the upload must be complete.
        device.settle()?;
        locked(&self.views).push((Arc::downgrade(view), made.clone()));
        Ok(made)
    }

    /// Returns an uploaded view; drops views that are no longer used, except the last view, from which the next view is derived.
    fn known(&self, view: &Arc<View>) -> Option<Arc<DeviceView>> {
        let mut views = locked(&self.views);
        let last = views.len().saturating_sub(1);
        let mut n = 0;
        views.retain(|(of, _)| {
            n += 1;
            of.strong_count() > 0 || n > last
        });
        views.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(view))).map(|(_, made)| made.clone())
    }

    fn last(&self) -> Option<Arc<DeviceView>> {
        locked(&self.views).last().map(|(_, made)| made.clone())
    }
}

/// Uploads the parts of a view that the device lacks.
fn make(
    device: &Device,
    (arrays, of): (SpareArrays<'_>, &DeviceDelta),
    view: &View,
    (before, segments): (Option<&DeviceView>, &mut Segments),
) -> Result<DeviceView> {
    let main = view.main();
    let main_part =
        live_part(device, (arrays.planes, &main.filter, &of.cut), view.tombstones(), before.map(|b| &b.main))?;
    let mut deltas = Vec::new();
    for (first, segment, tombstones) in view.segments() {
        let known = segments.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(segment)));
        let on_device = match known {
            Some((_, known)) => known.clone(),
            None => {
                let made = Arc::new(upload(device, (arrays, of), segment)?);
                segments.push((Arc::downgrade(segment), made.clone()));
                made
            }
        };
        let mut earlier = before.iter().flat_map(|before| &before.deltas);
        let earlier = earlier.find(|segment| Arc::ptr_eq(&segment.segment, &on_device)).map(|segment| &segment.part);
        let part = live_part(device, (&on_device.planes, segment.filter(), &on_device.cut), tombstones, earlier)?;
        let of_view = first..first + segment.index().slots() as u32;
        deltas.push(DeviceViewSegment { segment: on_device, part, of_view });
    }
    let deleted_per_list = deleted_per_list(view, before);
    Ok(DeviceView { cut: of.cut.clone(), main: main_part, deltas, deleted_per_list })
}

/// Counts the deleted items per list of a view's snapshot, starting from an earlier view.
fn deleted_per_list(view: &View, before: Option<&DeviceView>) -> Vec<u32> {
    if view.tombstones().is_empty() {
        return Vec::new();
    }
    let (index, none) = (&view.main().index, Tombstones::default());
    let mut counts = before.map_or(&[][..], |before| &before.deleted_per_list).to_vec();
    counts.resize(index.lists(), 0);
    let earlier = before.and_then(|before| before.main.live.as_ref()).map_or(&none, |live| &live.tombstones);
    for slot in view.tombstones().differing(earlier) {
        let count = &mut counts[index.list_of(slot).index()];
        *count = if view.tombstones().contains(slot) { *count + 1 } else { count.saturating_sub(1) };
    }
    counts
}

/// Updates the live bitmap of the snapshot or a segment from the bitmap of an earlier view.
fn live_part(
    device: &Device,
    (planes, index, cut): (&DevicePlanes, &filter::Index, &ListCut),
    tombstones: &Tombstones,
    earlier: Option<&LivePart>,
) -> Result<LivePart> {
    if tombstones.is_empty() {
        return Ok(LivePart { live: None });
    }
    let earlier = earlier.and_then(|part| part.live.as_ref());
    let none = Tombstones::default();
    let changed = tombstones.differing(earlier.map_or(&none, |live| &live.tombstones));
    if let Some(same) = earlier.filter(|_| changed.is_empty()) {
        return Ok(LivePart { live: Some(same.clone()) });
    }
    let before = earlier.map(|live| &live.items);
    let items =
        DeviceLiveItems::after(device, (planes, index, cut), before, &changed, |slot| tombstones.contains(slot))?;
    Ok(LivePart { live: Some(Arc::new(PartItems { tombstones: tombstones.clone(), items })) })
}

/// Writes a segment, or this device's part of it, to spare slots.
fn upload(device: &Device, (arrays, of): (SpareArrays<'_>, &DeviceDelta), segment: &Segment) -> Result<DeviceSegment> {
    let (index, spare) = (segment.index(), &of.spare);
    let cut = index.cut(of.share);
    // Reserves one block after the segment: no other segment may overwrite the end offset of the values of its last
    // slot.
    let room = (cut.slots() + BLOCK) as u32;
    let full = || {
        let (free, slots) = (spare.left(), cut.slots());
        Error::overloaded(format!("the device has no memory for {slots} slots of the delta, {free} are free"))
    };
    let slots = spare.lease(room).ok_or_else(full)?;
    let first = slots.places().start;
    let lists = arrays.index.put(device, (index, &cut), first)?;
    let keys = (arrays.put)((segment, &cut), first)?;
    let planes = DevicePlanes::copy(device, segment.filter(), segment.columns(), &cut)?;
    let word_slots: Vec<u32> = cut.word_slots().map(|slot| slot + first).collect();
    Ok(DeviceSegment { lists, planes, word_slots: device.copy(&word_slots)?, cut, slots, _keys: keys })
}
