//! What updates have made of a snapshot, in the memory of a device, or what of that one of several has.
//!
//! A segment's items take the place of slots that are spare behind those of the snapshot, in the same arrays: from the candidates on no
//! kernel knows that they came later. Its lists, planes and columns of filters are its own. Of what is gone, of the snapshot or of a
//! segment, each view has the bits of its own, made of those of a view before: words that differ are uploaded, and a segment is
//! uploaded once. So what a view takes is what has changed, and a batch sees the view that it was prepared for.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use crate::view::{Segment, View};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::units::Slot;
use sterling_cuda::cut::{ListCut, Share};
use sterling_cuda::ops::scan::LiveItems;
use sterling_cuda::spare::{Lent, Spare};
use sterling_cuda::{Array, Device};
use sterling_index::filter;
use sterling_index::filter::index::{DeviceLiveItems, DevicePlanes};
use sterling_index::ivf::{BesideLists, DeviceIndex};
use sterling_index::search::Tombstones;
use sterling_kernels::cpu::kernels::BLOCK;

/// A segment whose items lie in spare slots.
#[derive(Debug)]
pub(super) struct DeviceSegment {
    pub(super) lists: BesideLists,
    pub(super) planes: DevicePlanes,
    /// The first slot of each word of its planes, as all slots of the device are counted.
    pub(super) word_slots: Array<u32>,
    cut: ListCut,
    slots: Lent,
    _keys: Vec<Lent>,
}

/// What is not gone of a snapshot or a segment.
#[derive(Debug)]
struct PartItems {
    gone: Tombstones,
    items: DeviceLiveItems,
}

/// Puts what a device has of a segment from a slot on.
type PutAt<'a> = dyn Fn((&Segment, &ListCut), u32) -> Result<Vec<Lent>> + 'a;

/// The arrays of a snapshot on a device that have spare slots behind its own.
#[derive(Clone, Copy)]
pub(super) struct SpareArrays<'a> {
    pub(super) index: &'a DeviceIndex,
    pub(super) planes: &'a DevicePlanes,
    /// Puts what is read of a segment's items by their slots, but for its index, in the place of slots from the given one on.
    pub(super) put: &'a PutAt<'a>,
}

/// A part of a view, the snapshot or a segment.
#[derive(Debug)]
struct LivePart {
    /// None where nothing is gone.
    live: Option<Arc<PartItems>>,
}

/// A segment in a view.
#[derive(Debug)]
pub(super) struct DevicePiece {
    pub(super) segment: Arc<DeviceSegment>,
    part: LivePart,
    /// Its slots as the view counts them.
    of_view: Range<u32>,
}

/// A view in the memory of a device.
#[derive(Debug)]
pub(super) struct DeviceView {
    /// What of the snapshot's lists is here.
    cut: Arc<ListCut>,
    main: LivePart,
    pub(super) pieces: Vec<DevicePiece>,
    /// How many of each list of the snapshot are gone; empty where nothing is.
    gone_of_lists: Vec<u32>,
}

/// Segments that are on a device, for as long as somebody has them.
type Segments = Vec<(Weak<Segment>, Arc<DeviceSegment>)>;

/// What is on a device beside a snapshot.
#[derive(Debug)]
pub(super) struct BesideSnapshot {
    cut: Arc<ListCut>,
    share: Share,
    spare: Arc<Spare>,
    views: Mutex<Vec<(Weak<View>, Arc<DeviceView>)>>,
    segments: Mutex<Segments>,
}

impl LivePart {
    /// The device's bits of what is not gone; none where nothing is.
    fn items(&self) -> Option<&DeviceLiveItems> {
        self.live.as_ref().map(|live| &live.items)
    }
}

impl DevicePiece {
    /// Its first slot on the device.
    fn first(&self) -> u32 {
        self.segment.slots.places().start
    }

    /// What is not gone of it; none where nothing is.
    pub(super) fn live(&self) -> Option<&DeviceLiveItems> {
        self.part.items()
    }
}

impl DeviceView {
    /// What is not gone of the snapshot; none where nothing is.
    pub(super) fn live(&self) -> Option<&DeviceLiveItems> {
        self.main.items()
    }

    /// A slot of the view as the device counts it; none where another device has it.
    pub(super) fn to_device(&self, slot: Slot) -> Option<u32> {
        match self.pieces.iter().find(|piece| piece.of_view.contains(&slot.0)) {
            Some(piece) => Some(piece.segment.cut.to_card(slot.0 - piece.of_view.start)? + piece.first()),
            None => self.cut.to_card(slot.0),
        }
    }

    /// A slot of the device as the view counts it.
    pub(super) fn of_device(&self, slot: u32) -> Slot {
        match self.pieces.iter().find(|piece| piece.segment.slots.places().contains(&slot)) {
            Some(piece) => Slot(piece.segment.cut.of_card(slot - piece.first()) + piece.of_view.start),
            None => Slot(self.cut.of_card(slot)),
        }
    }

    /// Items of the snapshot that are gone in so many lists at most.
    pub(super) fn gone_at_most(&self, lists: usize) -> usize {
        self.gone_of_lists.iter().max().map_or(0, |&most| most as usize * lists)
    }

    /// Items beside the snapshot at most that a search of so many lists scans.
    pub(super) fn items_at_most(&self, lists: usize) -> usize {
        self.pieces.iter().map(|piece| piece.segment.lists.items_at_most(lists)).sum()
    }
}

/// The bits of what is there, as scans take them.
pub(super) fn live_items<'a>(live: Option<&'a DeviceLiveItems>, planes: &'a DevicePlanes) -> Option<LiveItems<'a>> {
    live.map(|live| LiveItems { words: live.words(), firsts: &planes.index().firsts })
}

impl BesideSnapshot {
    /// Nothing yet, over so many spare slots behind those of a share of the snapshot's lists.
    pub(super) fn new((share, cut): (Share, Arc<ListCut>), spare: usize) -> Self {
        // A block behind the snapshot's slots: what says where the values of its last slot end is not a segment's.
        let end = cut.slots().saturating_add(spare) as u32;
        let spare = Spare::new((cut.slots() + BLOCK) as u32..end.max((cut.slots() + BLOCK) as u32));
        BesideSnapshot { cut, share, spare, views: Mutex::default(), segments: Mutex::default() }
    }

    /// A view on the device. The first call uploads what it has that none before had; others that ask for it wait for that, and those
    /// that ask for another one do not.
    ///
    /// # Errors
    /// `Overloaded` where there is no room for it.
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
        // Lanes read it on streams of their own.
        device.settle()?;
        locked(&self.views).push((Arc::downgrade(view), made.clone()));
        Ok(made)
    }

    /// A view that is there; those that nobody holds go, but for the last, of which the next one is made.
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

/// Brings to the device what a view has that is not there.
fn make(
    device: &Device,
    (arrays, of): (SpareArrays<'_>, &BesideSnapshot),
    view: &View,
    (before, segments): (Option<&DeviceView>, &mut Segments),
) -> Result<DeviceView> {
    let main = view.main();
    let main_part = live_part(device, (arrays.planes, &main.filter, &of.cut), view.gone(), before.map(|b| &b.main))?;
    let mut pieces = Vec::new();
    for (first, segment, gone) in view.segments() {
        let known = segments.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(segment)));
        let on_device = match known {
            Some((_, known)) => known.clone(),
            None => {
                let made = Arc::new(upload(device, (arrays, of), segment)?);
                segments.push((Arc::downgrade(segment), made.clone()));
                made
            }
        };
        let mut earlier = before.iter().flat_map(|before| &before.pieces);
        let earlier = earlier.find(|piece| Arc::ptr_eq(&piece.segment, &on_device)).map(|piece| &piece.part);
        let part = live_part(device, (&on_device.planes, segment.filter(), &on_device.cut), gone, earlier)?;
        let of_view = first..first + segment.index().slots() as u32;
        pieces.push(DevicePiece { segment: on_device, part, of_view });
    }
    let gone_of_lists = gone_of_lists(view, before);
    Ok(DeviceView { cut: of.cut.clone(), main: main_part, pieces, gone_of_lists })
}

/// How many of each list of a view's snapshot are gone, counted on from an earlier view.
fn gone_of_lists(view: &View, before: Option<&DeviceView>) -> Vec<u32> {
    if view.gone().is_empty() {
        return Vec::new();
    }
    let (index, none) = (&view.main().index, Tombstones::default());
    let mut counts = before.map_or(&[][..], |before| &before.gone_of_lists).to_vec();
    counts.resize(index.lists(), 0);
    let earlier = before.and_then(|before| before.main.live.as_ref()).map_or(&none, |live| &live.gone);
    for slot in view.gone().differing(earlier) {
        let count = &mut counts[index.list_of(slot).index()];
        *count = if view.gone().contains(slot) { *count + 1 } else { count.saturating_sub(1) };
    }
    counts
}

/// What is not gone of a part, made of what an earlier view has of it.
fn live_part(
    device: &Device,
    (planes, index, cut): (&DevicePlanes, &filter::Index, &ListCut),
    gone: &Tombstones,
    earlier: Option<&LivePart>,
) -> Result<LivePart> {
    if gone.is_empty() {
        return Ok(LivePart { live: None });
    }
    let earlier = earlier.and_then(|part| part.live.as_ref());
    let none = Tombstones::default();
    let changed = gone.differing(earlier.map_or(&none, |live| &live.gone));
    if let Some(same) = earlier.filter(|_| changed.is_empty()) {
        return Ok(LivePart { live: Some(same.clone()) });
    }
    let before = earlier.map(|live| &live.items);
    let items = DeviceLiveItems::after(device, (planes, index, cut), before, &changed, |slot| gone.contains(slot))?;
    Ok(LivePart { live: Some(Arc::new(PartItems { gone: gone.clone(), items })) })
}

/// Puts a segment in spare slots, or what of it the device has.
fn upload(
    device: &Device,
    (arrays, of): (SpareArrays<'_>, &BesideSnapshot),
    segment: &Segment,
) -> Result<DeviceSegment> {
    let (index, spare) = (segment.index(), &of.spare);
    let cut = index.cut(of.share);
    // Behind its slots, so that what says where the values of the last one end is its own.
    let room = (cut.slots() + BLOCK) as u32;
    let full = || {
        let (free, slots) = (spare.left(), cut.slots());
        Error::overloaded(format!("no room on the device for {slots} slots beside the snapshot, {free} are free"))
    };
    let slots = spare.lend(room).ok_or_else(full)?;
    let first = slots.places().start;
    let lists = arrays.index.put(device, (index, &cut), first)?;
    let keys = (arrays.put)((segment, &cut), first)?;
    let planes = DevicePlanes::copy(device, segment.filter(), segment.columns(), &cut)?;
    let word_slots: Vec<u32> = cut.word_slots().map(|slot| slot + first).collect();
    Ok(DeviceSegment { lists, planes, word_slots: device.copy(&word_slots)?, cut, slots, _keys: keys })
}
