//! Read view of one request: a snapshot at one position of its updates.
//!
//! A pass reads all item data through a view, so it does not know whether an item is in the main snapshot or in one of the
//! segments ([`Segment`]) that hold later items. Slots are numbered across snapshot and segments: first the main snapshot's,
//! then those of each segment. Tombstones mark replaced and deleted items in either, and an overlay holds changed column values
//! of the main snapshot.
//!
//! A view is immutable: an update creates another one, which shares the unchanged parts. A request therefore sees one position
//! throughout, without locks. A view also plans filters; concurrent requests with equal filters share a plan. If the server is
//! configured for it, the views of a snapshot record sampled queries for calibration.

mod browse;
mod items;
mod live;
mod segment;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{self, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use sterling_core::error::Result;
use sterling_core::limits::{FRESH_BYTES, FRESH_ITEMS};
use sterling_core::locks::locked;
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::OverArch;
use sterling_index::columns::{Column, Columns, Overlay, Stacked, Value};
use sterling_index::filter::{self, Plan};
use sterling_index::ivf;
use sterling_index::search::{self, Catalogue, Tombstones};
use sterling_index::value::Program;
use sterling_snapshot::{Ids, Snapshot};

pub use browse::{COUNTED_VALUES_MAX, Category, ColumnValues};
pub use live::{BeforeShown, CurrentView, Live};
pub(crate) use segment::stored_value;
pub use segment::{Attribute, Row, Segment, item_columns};

/// Number of remembered plans before unused ones are removed.
const PLANS_MIN: usize = 64;

/// Snapshot with its updates up to one position.
#[derive(Debug)]
pub struct View {
    main: Arc<Snapshot>,
    /// Deleted slots of the main snapshot.
    tombstones: Tombstones,
    /// Changed column values of the main snapshot.
    overlay: Arc<Overlay>,
    deltas: Vec<ViewSegment>,
    position: u64,
    plans: Mutex<Plans>,
    recorded: Arc<Recorded>,
}

/// Uniform sample of the query embeddings of a view (reservoir sampling, Vitter 1985).
#[derive(Debug, Default)]
struct Recorded {
    most: u64,
    requested: AtomicU64,
    chance: RandomState,
    queries: Mutex<Vec<Vec<f32>>>,
}

/// Plan of a filter for one view.
#[derive(Debug)]
pub struct Planned {
    /// Plan for the main snapshot.
    pub plan: Plan,
    /// Plan for each segment.
    pub beside: Vec<Plan>,
    /// Filter in canonical form.
    pub canonical: String,
}

impl Planned {
    /// Returns the CPU time of planning, in nanoseconds.
    pub fn planning_ns(&self) -> f64 {
        std::iter::once(&self.plan).chain(&self.beside).map(Plan::planning_ns).sum()
    }
}

#[derive(Debug, Default)]
struct Plans {
    by_canonical: HashMap<String, Weak<Planned>>,
    /// Number of plans at which unused plans are removed.
    room: usize,
}

/// Segment in a view.
#[derive(Clone, Debug)]
struct ViewSegment {
    segment: Arc<Segment>,
    /// Deleted slots of the segment.
    tombstones: Tombstones,
    /// First slot in the numbering of the view.
    first_slot: u32,
}

/// Main snapshot or segment, for iteration over all items.
struct SegmentItems<'a> {
    first_slot: u32,
    columns: &'a Columns,
    /// Changed column values, if the segment is the main snapshot.
    overlay: Option<&'a Overlay>,
    filter: &'a filter::Index,
    index: &'a ivf::Index,
    ids: &'a Ids,
    tombstones: &'a Tombstones,
}

impl<'a> SegmentItems<'a> {
    /// Returns occupied slots that are not deleted.
    fn live(&self) -> impl Iterator<Item = Slot> + use<'a> {
        let tombstones = self.tombstones;
        self.index.filled_slots().filter(move |&slot| !tombstones.contains(slot))
    }

    /// Returns slots whose values in a column have not changed.
    fn unchanged(&self, column: usize) -> impl Iterator<Item = Slot> + use<'a> {
        let overlay = self.overlay;
        self.live().filter(move |&slot| overlay.is_none_or(|overlay| overlay.get(column, slot).is_none()))
    }

    /// Returns changed slots with their present values.
    fn changed(&self, column: usize) -> impl Iterator<Item = (Slot, &'a Value)> + use<'a> {
        let tombstones = self.tombstones;
        let changed = self.overlay.into_iter().flat_map(move |overlay| overlay.changed(column));
        changed.filter(move |(slot, _)| !tombstones.contains(*slot))
    }

    fn searched(&self) -> search::Segment<'a> {
        search::Segment {
            index: self.index,
            filter: self.filter,
            ids: Some(self.ids.of_slots()),
            tombstones: Some(self.tombstones).filter(|tombstones| !tombstones.is_empty()),
            first_slot: self.first_slot,
        }
    }

    /// Converts a slot of the segment to the numbering of the view.
    fn to_view_slot(&self, slot: Slot) -> Slot {
        Slot(self.first_slot + slot.0)
    }
}

impl View {
    /// Creates the view of a snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        let tombstones = View::tombstones_of(&main);
        View::at(main.manifest.position, main, tombstones, Vec::new())
    }

    /// Returns the deleted slots of a snapshot before any update: an emptied snapshot keeps one item in its files.
    pub fn tombstones_of(main: &Snapshot) -> Tombstones {
        let mut tombstones = Tombstones::default();
        if main.manifest.is_emptied() {
            for slot in main.index.filled_slots() {
                tombstones.insert(slot);
            }
        }
        tombstones
    }

    /// Creates the view of a snapshot at a position of its updates, with the snapshot's deleted slots `tombstones`, and segments
    /// with their deleted slots.
    pub fn at(
        position: u64,
        main: Arc<Snapshot>,
        tombstones: Tombstones,
        segments: Vec<(Arc<Segment>, Tombstones)>,
    ) -> Self {
        let mut next = main.index.slots() as u32;
        let delta = |(segment, tombstones): (Arc<Segment>, Tombstones)| {
            let first_slot = next;
            next += segment.index().slots() as u32;
            ViewSegment { segment, tombstones, first_slot }
        };
        let deltas = segments.into_iter().map(delta).collect();
        let overlay = Arc::default();
        View { main, tombstones, overlay, deltas, position, plans: Mutex::default(), recorded: Arc::default() }
    }

    /// Adds changed attributes of the main snapshot's items to the view.
    #[must_use]
    pub fn with_changes(self, overlay: Overlay) -> Self {
        View { overlay: Arc::new(overlay), ..self }
    }

    /// Makes the view and its successors record at most `most` query embeddings.
    #[must_use]
    pub fn recording(self, most: usize) -> Self {
        View { recorded: Arc::new(Recorded { most: most as u64, ..Recorded::default() }), ..self }
    }

    /// Continues the recording of an earlier view of the snapshot.
    #[must_use]
    fn after(self, earlier: &View) -> Self {
        View { recorded: earlier.recorded.clone(), ..self }
    }

    /// Records the query embeddings `[Tq, D]` of a user, if recording is enabled.
    pub fn record(&self, user: &[f32]) {
        let Recorded { most, requested, chance, queries } = &*self.recorded;
        if *most == 0 {
            return;
        }
        for query in user.chunks_exact(self.dimension()) {
            let requested = requested.fetch_add(1, atomic::Ordering::Relaxed);
            let place = if requested < *most { requested } else { chance.hash_one(requested) % (requested + 1) };
            if place < *most {
                let mut queries = locked(queries);
                match queries.get_mut(place as usize) {
                    Some(retained) => retained.copy_from_slice(query),
                    None => queries.push(query.to_vec()),
                }
            }
        }
    }

    /// Returns the recorded query embeddings, or `None` if recording is disabled.
    pub fn recorded(&self) -> Option<Vec<Vec<f32>>> {
        (self.recorded.most > 0).then(|| locked(&self.recorded.queries).clone())
    }

    /// Returns the main snapshot.
    pub fn main(&self) -> &Arc<Snapshot> {
        &self.main
    }

    /// Returns the position of the last visible update.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the number of items, N.
    pub fn items(&self) -> usize {
        self.main.index.items() - self.tombstones.len() + self.fresh_items()
    }

    /// Returns the number of items of all shards. Updates of other shards are not known here and not counted.
    pub fn items_of_all(&self) -> usize {
        match self.main.manifest.shard {
            Some(part) => part.items.max(self.items()),
            None => self.items(),
        }
    }

    /// Returns the number of items in segments.
    pub fn fresh_items(&self) -> usize {
        self.deltas.iter().map(|delta| delta.segment.index().items() - delta.tombstones.len()).sum()
    }

    /// Returns the number of items of the main snapshot that have changed in place.
    pub fn changed_items(&self) -> usize {
        self.overlay.len()
    }

    /// Returns the bytes in memory of the overlay and of those segments for which `is_known` returns false.
    pub fn extra_bytes(&self, mut is_known: impl FnMut(&Arc<Segment>) -> bool) -> u64 {
        let segments = self.deltas.iter().map(|delta| &delta.segment).filter(|segment| !is_known(segment));
        (self.overlay.bytes() + segments.map(|segment| segment.bytes()).sum::<usize>()) as u64
    }

    /// Returns the fill level of the delta: the larger of its shares of the permitted items and bytes. From 1 on, no
    /// more updates may be accepted.
    pub fn fullness(&self) -> f64 {
        let items = FRESH_ITEMS.max(self.main.index.items());
        let bytes = FRESH_BYTES.max(self.main.manifest.bytes());
        (self.fresh_items() as f64 / items as f64).max(self.extra_bytes(|_| false) as f64 / bytes as f64)
    }

    /// Returns the size of the delta as a share of the main snapshot's items: added items, deleted slots, and items
    /// changed in place, since all of these slow searches.
    pub fn drift(&self) -> f64 {
        let tombstones = self.deltas.iter().map(|delta| delta.tombstones.len()).sum::<usize>() + self.tombstones.len();
        (self.fresh_items() + tombstones + self.changed_items()) as f64 / self.main.index.items().max(1) as f64
    }

    /// Returns the share of the model's items that a search of this view covers; 1 if no shard is missing.
    pub fn coverage(&self) -> f64 {
        match self.main.manifest.items_of_all() {
            0 => 1.0,
            items => self.main.manifest.published_items() as f64 / items as f64,
        }
    }

    /// Returns the main snapshot and the segments, as search operates on them.
    pub fn searched(&self) -> Vec<search::Segment<'_>> {
        self.all_segments().map(|segment| segment.searched()).collect()
    }

    /// Returns the searchable catalogue over the result of [`View::searched`].
    pub fn catalogue<'a>(&self, segments: &'a [search::Segment<'a>]) -> Catalogue<'a> {
        Catalogue { segments, probes_max: self.main.recipe.serving.probes_max_of(self.main.index.lists()) }
    }

    /// Returns the segment that holds a slot, and the slot in it; `None` for the main snapshot.
    fn delta_segment(&self, slot: Slot) -> Option<(&ViewSegment, Slot)> {
        let at = self.deltas.partition_point(|delta| delta.first_slot <= slot.0).checked_sub(1)?;
        Some((&self.deltas[at], Slot(slot.0 - self.deltas[at].first_slot)))
    }

    /// Returns the width of queries and items, D.
    pub fn dimension(&self) -> usize {
        self.main.index.dimension()
    }

    /// Returns the main snapshot, then the segments.
    fn all_segments(&self) -> impl Iterator<Item = SegmentItems<'_>> {
        let Snapshot { columns, filter, index, ids, .. } = &*self.main;
        let main = SegmentItems {
            first_slot: 0,
            columns,
            overlay: Some(&self.overlay),
            filter,
            index,
            ids,
            tombstones: &self.tombstones,
        };
        let beside = self.deltas.iter().map(|delta| SegmentItems {
            first_slot: delta.first_slot,
            columns: delta.segment.columns(),
            overlay: None,
            filter: delta.segment.filter(),
            index: delta.segment.index(),
            ids: delta.segment.ids(),
            tombstones: &delta.tombstones,
        });
        std::iter::once(main).chain(beside)
    }

    /// Returns the deleted slots of the main snapshot.
    pub fn tombstones(&self) -> &Tombstones {
        &self.tombstones
    }

    /// Returns the segments in ascending order of their slots: the first slot in the view, the segment, and its deleted slots.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (u32, &Arc<Segment>, &Tombstones)> {
        self.deltas.iter().map(|delta| (delta.first_slot, &delta.segment, &delta.tombstones))
    }

    /// Returns the slots of live items, the main snapshot's first.
    pub fn filled_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.all_segments().flat_map(|segment| segment.live().map(move |slot| segment.to_view_slot(slot)))
    }

    /// Returns the approximate number of strays, items unlike those that the lists were trained for, some of them deleted.
    pub fn strays(&self) -> usize {
        let of_segment = |ViewSegment { segment, tombstones, .. }: &ViewSegment| {
            segment.strays().min(segment.index().items() - tombstones.len())
        };
        self.deltas.iter().map(of_segment).sum()
    }

    /// Returns the number of strays ([`View::strays`]) relative to the number of items of the main snapshot.
    pub fn stray_share(&self) -> f64 {
        self.strays() as f64 / self.main.index.items().max(1) as f64
    }

    /// Returns whether nothing has changed since the main snapshot was published.
    pub fn is_bare(&self) -> bool {
        self.tombstones.is_empty() && self.overlay.is_empty() && self.deltas.is_empty()
    }

    /// Returns the item columns of all slots.
    pub fn columns(&self) -> Stacked {
        let others = self.deltas.iter().map(|delta| (delta.first_slot, delta.segment.columns().clone()));
        Stacked::new(self.main.columns.clone(), self.overlay.clone(), others.collect())
    }

    /// Returns an item column by name.
    ///
    /// # Errors
    /// `Invalid` naming the existing columns.
    pub fn column(&self, name: &str) -> Result<&Column> {
        self.main.columns.column(name)
    }

    /// Returns the reranker of the model, if it has one.
    pub fn overarch(&self) -> Option<&OverArch> {
        self.main.package.overarch.as_ref()
    }

    /// Returns the value model.
    pub fn value(&self) -> &Program {
        &self.main.value
    }

    /// Returns the maximum number of matching items of the main snapshot that are scored one by one. A shard takes its
    /// share of the total, so that all shards search in the same way as an unsharded index.
    fn slots_max(&self) -> usize {
        let index = &self.main.index;
        let of_whole = self.main.manifest.shard.map_or(1.0, |part| index.items() as f64 / part.items.max(1) as f64);
        (index.slots_max() as f64 * of_whole.min(1.0)) as usize
    }

    /// Returns the plan of a filter; concurrent requests with an equal filter share the plan.
    ///
    /// # Errors
    /// The syntax or type error of the filter, with its byte offset.
    pub fn plan(&self, filter: &str) -> Result<Arc<Planned>> {
        let parsed = filter::parse(filter)?.canonical();
        let canonical = parsed.to_string();
        if let Some(planned) = self.plans().by_canonical.get(&canonical).and_then(Weak::upgrade) {
            return Ok(planned);
        }
        let plan = Plan::new(&parsed, &self.main.columns, &self.main.filter, self.slots_max())?;
        let plan = plan.with_changes(&parsed, &self.main.filter, &self.overlay)?;
        let of_segment = |delta: &ViewSegment| {
            let segment = &delta.segment;
            Plan::new(&parsed, segment.columns(), segment.filter(), segment.index().slots_max())
        };
        let beside = self.deltas.iter().map(of_segment).collect::<Result<_>>()?;
        let planned = Arc::new(Planned { plan, beside, canonical: canonical.clone() });
        let mut plans = self.plans();
        if plans.by_canonical.len() >= plans.room.max(PLANS_MIN) {
            plans.by_canonical.retain(|_, planned| planned.strong_count() > 0);
            plans.room = plans.by_canonical.len() * 2;
        }
        plans.by_canonical.insert(canonical, Arc::downgrade(&planned));
        Ok(planned)
    }

    /// Returns the items that match a filter, the main snapshot's first.
    ///
    /// # Errors
    /// As [`View::plan`].
    pub fn matching(&self, filter: &str) -> Result<Vec<ItemId>> {
        let planned = self.plan(filter)?;
        let plans = std::iter::once(&planned.plan).chain(&planned.beside);
        let of_segment = |(segment, plan): (SegmentItems<'_>, &Plan)| {
            let passing = segment.live().filter(|&slot| plan.passes(slot));
            passing.map(|slot| segment.ids.item(slot)).collect::<Vec<_>>()
        };
        Ok(self.all_segments().zip(plans).flat_map(of_segment).collect())
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        locked(&self.plans)
    }
}
