//! What one request sees: a snapshot at one position of its updates.
//!
//! Everything that a pass reads of items goes through here, so that a pass does not know where an item lies: in the main
//! snapshot, or in one of the segments ([`Segment`]) that hold what came after it. Slots are counted over all of them: those of
//! the main snapshot, then those of each segment. Of what lies in either, tombstones tell what was replaced or deleted since, and
//! an overlay what has changed of the main snapshot's columns.
//!
//! A view never changes: an update makes another one, which shares all that is the same. So a request sees one position from its
//! first step to its answer, and nobody locks anything. Filters are planned here too, and an equal filter of requests that are
//! under way at the same time is planned once. Where a server is told to, the views of a snapshot keep some of the queries that
//! they were asked, to calibrate by.

mod browse;
mod live;
mod segment;

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{self, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use sterling_core::error::Result;
use sterling_core::limits::{FRESH_BYTES, FRESH_ITEMS};
use sterling_core::locks::locked;
use sterling_core::units::{ItemId, Slot, by_score};
use sterling_graph::dense::InputRows;
use sterling_graph::tower::OverArch;
use sterling_index::columns::{Column, Columns, Overlay, Stacked, Value};
use sterling_index::filter::{self, Plan};
use sterling_index::ivf;
use sterling_index::search::{Catalogue, CataloguePart, Tombstones};
use sterling_index::value::Program;
use sterling_snapshot::{Ids, Snapshot, VectorRows};

pub use browse::{COUNTED_VALUES_MAX, Category, ColumnValues};
pub use live::{BeforeShown, Live, Shown};
pub use segment::{Attribute, Row, Segment, item_columns};

/// Plans that are remembered before those that no request holds any more are forgotten.
const PLANS_MIN: usize = 64;

/// A snapshot at one position.
#[derive(Debug)]
pub struct View {
    main: Arc<Snapshot>,
    /// Slots of the main snapshot whose items are gone.
    gone: Tombstones,
    /// What has changed of its columns.
    overlay: Arc<Overlay>,
    pieces: Vec<Piece>,
    position: u64,
    plans: Mutex<Plans>,
    recorded: Arc<Recorded>,
}

/// So many of the query embeddings that a view was asked, each with the same chance (reservoir sampling, Vitter 1985).
#[derive(Debug, Default)]
struct Recorded {
    most: u64,
    asked: AtomicU64,
    chance: RandomState,
    queries: Mutex<Vec<Vec<f32>>>,
}

/// A filter's plan for one view.
#[derive(Debug)]
pub struct Planned {
    /// What finds the eligible items of the main snapshot.
    pub plan: Plan,
    /// The same for each segment.
    pub beside: Vec<Plan>,
    /// The filter in canonical form.
    pub canonical: String,
}

impl Planned {
    /// What it took to make the plans, in nanoseconds of one core.
    pub fn planning_ns(&self) -> f64 {
        std::iter::once(&self.plan).chain(&self.beside).map(Plan::planning_ns).sum()
    }
}

#[derive(Debug, Default)]
struct Plans {
    by_canonical: HashMap<String, Weak<Planned>>,
    /// How many there may be before the forgotten ones are removed.
    room: usize,
}

/// A segment in a view.
#[derive(Clone, Debug)]
struct Piece {
    segment: Arc<Segment>,
    /// Its slots whose items are gone.
    gone: Tombstones,
    /// Its slot 0 in the view.
    first_slot: u32,
}

/// What holds items, the main snapshot or a segment, as all of them are walked over.
struct Part<'a> {
    first_slot: u32,
    columns: &'a Columns,
    /// What has changed of these, where anything may.
    overlay: Option<&'a Overlay>,
    filter: &'a filter::Index,
    index: &'a ivf::Index,
    ids: &'a Ids,
    gone: &'a Tombstones,
}

impl<'a> Part<'a> {
    /// Its slots that hold an item which is not gone.
    fn live(&self) -> impl Iterator<Item = Slot> + use<'a> {
        let gone = self.gone;
        self.index.filled_slots().filter(move |&slot| !gone.contains(slot))
    }

    /// Those whose values in the column of a number have not changed.
    fn unchanged(&self, column: usize) -> impl Iterator<Item = Slot> + use<'a> {
        let overlay = self.overlay;
        self.live().filter(move |&slot| overlay.is_none_or(|overlay| overlay.get(column, slot).is_none()))
    }

    /// The others, with what they have now.
    fn changed(&self, column: usize) -> impl Iterator<Item = (Slot, &'a Value)> + use<'a> {
        let gone = self.gone;
        let changed = self.overlay.into_iter().flat_map(move |overlay| overlay.changed(column));
        changed.filter(move |(slot, _)| !gone.contains(*slot))
    }

    fn searched(&self) -> CataloguePart<'a> {
        CataloguePart {
            index: self.index,
            filter: self.filter,
            ids: Some(self.ids.of_slots()),
            gone: Some(self.gone).filter(|gone| !gone.is_empty()),
            first_slot: self.first_slot,
        }
    }

    /// A slot of its own as the view counts them.
    fn in_view(&self, slot: Slot) -> Slot {
        Slot(self.first_slot + slot.0)
    }
}

impl View {
    /// The view of a snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        let gone = View::gone_of(&main);
        View::at(main.manifest.position, main, gone, Vec::new())
    }

    /// What is gone of a snapshot before any update: of one that was emptied, the item that is left in its files.
    pub fn gone_of(main: &Snapshot) -> Tombstones {
        let mut gone = Tombstones::default();
        if main.manifest.is_emptied() {
            for slot in main.index.filled_slots() {
                gone.insert(slot);
            }
        }
        gone
    }

    /// The view of a snapshot at a position of its updates: less what is `gone` of it, and with what `segments` hold, each less
    /// what is gone of it.
    pub fn at(position: u64, main: Arc<Snapshot>, gone: Tombstones, segments: Vec<(Arc<Segment>, Tombstones)>) -> Self {
        let mut next = main.index.slots() as u32;
        let piece = |(segment, gone): (Arc<Segment>, Tombstones)| {
            let first_slot = next;
            next += segment.index().slots() as u32;
            Piece { segment, gone, first_slot }
        };
        let pieces = segments.into_iter().map(piece).collect();
        let overlay = Arc::default();
        View { main, gone, overlay, pieces, position, plans: Mutex::default(), recorded: Arc::default() }
    }

    /// The same view, in which attributes of the main snapshot's items have changed.
    #[must_use]
    pub fn with_changes(self, overlay: Overlay) -> Self {
        View { overlay: Arc::new(overlay), ..self }
    }

    /// The same view, keeping up to so many of the query embeddings that it and those after it will be asked.
    #[must_use]
    pub fn recording(self, most: usize) -> Self {
        View { recorded: Arc::new(Recorded { most: most as u64, ..Recorded::default() }), ..self }
    }

    /// The same view, which goes on with what an earlier one of the snapshot has recorded.
    #[must_use]
    fn after(self, earlier: &View) -> Self {
        View { recorded: earlier.recorded.clone(), ..self }
    }

    /// Takes note of the query embeddings `[Tq, D]` of a user, where the view records some.
    pub fn record(&self, user: &[f32]) {
        let Recorded { most, asked, chance, queries } = &*self.recorded;
        if *most == 0 {
            return;
        }
        for query in user.chunks_exact(self.dimension()) {
            let asked = asked.fetch_add(1, atomic::Ordering::Relaxed);
            let place = if asked < *most { asked } else { chance.hash_one(asked) % (asked + 1) };
            if place < *most {
                let mut queries = locked(queries);
                match queries.get_mut(place as usize) {
                    Some(kept) => kept.copy_from_slice(query),
                    None => queries.push(query.to_vec()),
                }
            }
        }
    }

    /// The query embeddings that were recorded, or `None` where the view records none.
    pub fn recorded(&self) -> Option<Vec<Vec<f32>>> {
        (self.recorded.most > 0).then(|| locked(&self.recorded.queries).clone())
    }

    /// The main snapshot.
    pub fn main(&self) -> &Arc<Snapshot> {
        &self.main
    }

    /// The position of the updates that are seen.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Number of items, N.
    pub fn items(&self) -> usize {
        self.main.index.items() - self.gone.len() + self.fresh_items()
    }

    /// Number of items of all shards, as far as it is known here: updates of others are not.
    pub fn items_of_all(&self) -> usize {
        match self.main.manifest.shard {
            Some(part) => part.items.max(self.items()),
            None => self.items(),
        }
    }

    /// Number of items that do not lie in the main snapshot.
    pub fn fresh_items(&self) -> usize {
        self.pieces.iter().map(|piece| piece.segment.index().items() - piece.gone.len()).sum()
    }

    /// Number of items of the main snapshot that have changed where they lie.
    pub fn changed_items(&self) -> usize {
        self.overlay.len()
    }

    /// Bytes in memory of what changes in place and of segments, where the caller does not know one: `is_known` says so of each.
    pub fn bytes_beside(&self, mut is_known: impl FnMut(&Arc<Segment>) -> bool) -> u64 {
        let segments = self.pieces.iter().map(|piece| &piece.segment).filter(|segment| !is_known(segment));
        (self.overlay.bytes() + segments.map(|segment| segment.bytes()).sum::<usize>()) as u64
    }

    /// How full the room is that updates have beside the main snapshot: a share of the items or of the bytes that may lie there,
    /// whichever is more. From 1 on no more must come.
    pub fn fullness(&self) -> f64 {
        let items = FRESH_ITEMS.max(self.main.index.items());
        let bytes = FRESH_BYTES.max(self.main.manifest.bytes());
        (self.fresh_items() as f64 / items as f64).max(self.bytes_beside(|_| false) as f64 / bytes as f64)
    }

    /// What updates have made of the main snapshot, as a share of its items: items that lie beside it, slots whose items are gone,
    /// and items that have changed where they lie. A search pays for all of them.
    pub fn drift(&self) -> f64 {
        let gone = self.pieces.iter().map(|piece| piece.gone.len()).sum::<usize>() + self.gone.len();
        (self.fresh_items() + gone + self.changed_items()) as f64 / self.main.index.items().max(1) as f64
    }

    /// Share of the model's items that a search of this view looks at: all of them, where nothing of the model is left out.
    pub fn coverage(&self) -> f64 {
        match self.main.manifest.items_of_all() {
            0 => 1.0,
            items => self.main.manifest.published_items() as f64 / items as f64,
        }
    }

    /// The main snapshot and what lies beside it, as they are searched.
    pub fn parts(&self) -> Vec<CataloguePart<'_>> {
        self.all_parts().map(|part| part.searched()).collect()
    }

    /// All items as they are searched, given [`View::parts`].
    pub fn catalogue<'a>(&self, parts: &'a [CataloguePart<'a>]) -> Catalogue<'a> {
        Catalogue { parts, probes_max: self.main.recipe.serving.probes_max_of(self.main.index.lists()) }
    }

    /// The piece that holds a slot, and the slot in it; `None` for one of the main snapshot.
    fn piece(&self, slot: Slot) -> Option<(&Piece, Slot)> {
        let at = self.pieces.partition_point(|piece| piece.first_slot <= slot.0).checked_sub(1)?;
        Some((&self.pieces[at], Slot(slot.0 - self.pieces[at].first_slot)))
    }

    /// Width of queries and items, D.
    pub fn dimension(&self) -> usize {
        self.main.index.dimension()
    }

    /// Where an item lies, or `None` where the view does not hold it.
    pub fn slot(&self, id: ItemId) -> Option<Slot> {
        let of_main = || self.main.ids.slot(id).filter(|&slot| !self.gone.contains(slot));
        let of_piece = |piece: &Piece| {
            let slot = piece.segment.ids().slot(id).filter(|&slot| !piece.gone.contains(slot))?;
            Some(Slot(piece.first_slot + slot.0))
        };
        self.pieces.iter().find_map(of_piece).or_else(of_main)
    }

    /// The item in a slot that holds one.
    pub fn id(&self, slot: Slot) -> ItemId {
        match self.piece(slot) {
            Some((piece, slot)) => piece.segment.ids().item(slot),
            None => self.main.ids.item(slot),
        }
    }

    /// The order of items with their scores: the best first, equal ones by id.
    pub fn best_first(&self, (score, slot): &(f32, Slot), (other, other_slot): &(f32, Slot)) -> Ordering {
        by_score(*score, *other).then_with(|| self.id(*slot).cmp(&self.id(*other_slot)))
    }

    /// The main snapshot, then the segments.
    fn all_parts(&self) -> impl Iterator<Item = Part<'_>> {
        let Snapshot { columns, filter, index, ids, .. } = &*self.main;
        let main = Part { first_slot: 0, columns, overlay: Some(&self.overlay), filter, index, ids, gone: &self.gone };
        let beside = self.pieces.iter().map(|piece| Part {
            first_slot: piece.first_slot,
            columns: piece.segment.columns(),
            overlay: None,
            filter: piece.segment.filter(),
            index: piece.segment.index(),
            ids: piece.segment.ids(),
            gone: &piece.gone,
        });
        std::iter::once(main).chain(beside)
    }

    /// The slots of the main snapshot whose items are gone.
    pub fn gone(&self) -> &Tombstones {
        &self.gone
    }

    /// What lies beside the main snapshot, in ascending order of its slots: the first slot of each segment in the view, and those
    /// of its own slots whose items are gone.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (u32, &Arc<Segment>, &Tombstones)> {
        self.pieces.iter().map(|piece| (piece.first_slot, &piece.segment, &piece.gone))
    }

    /// Whether the item of a slot that holds one is not gone.
    pub fn is_live(&self, slot: Slot) -> bool {
        match self.piece(slot) {
            Some((piece, own)) => !piece.gone.contains(own),
            None => !self.gone.contains(slot),
        }
    }

    /// The slots that hold items, those of the main snapshot first.
    pub fn filled_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.all_parts().flat_map(|part| part.live().map(move |slot| part.in_view(slot)))
    }

    /// The list of the main snapshot that a slot belongs to.
    pub fn list_of(&self, slot: Slot) -> u32 {
        match self.piece(slot) {
            Some((piece, slot)) => piece.segment.list_of(slot),
            None => self.main.index.list_of(slot).0,
        }
    }

    /// Whether the item of a slot is unlike those that the lists of the main snapshot were made for.
    pub fn is_stray(&self, slot: Slot) -> bool {
        self.piece(slot).is_some_and(|(piece, slot)| piece.segment.is_stray(slot))
    }

    /// About how many items are: those of each segment, whichever of its items are gone.
    pub fn strays(&self) -> usize {
        let of_piece = |Piece { segment, gone, .. }: &Piece| segment.strays().min(segment.index().items() - gone.len());
        self.pieces.iter().map(of_piece).sum()
    }

    /// Strays as a share of the items of the main snapshot.
    pub fn stray_share(&self) -> f64 {
        self.strays() as f64 / self.main.index.items().max(1) as f64
    }

    /// The row of a slot in f32, `[D]`, as exact as it is kept.
    pub fn row(&self, slot: Slot, out: &mut [f32]) {
        match self.piece(slot) {
            Some((piece, slot)) => piece.segment.index().row(slot, out),
            None => self.main.index.row(slot, out),
        }
    }

    /// Appends the rows of `[[item.vectors]]` of the item in a slot, as they are stored.
    pub fn read_vectors(&self, rows: &VectorRows<'_>, slot: Slot, out: &mut Vec<u8>) {
        match self.piece(slot) {
            Some((piece, slot)) => rows.read(piece.segment.vectors(), slot, out),
            None => rows.read(&self.main.vectors, slot, out),
        }
    }

    /// The products of a vector with the rows of ascending slots.
    ///
    /// # Panics
    /// Where `out` is not as long as `slots`.
    pub fn products(&self, vector: &[f32], slots: &[Slot], out: &mut [f32]) {
        let mut from = 0;
        for part in slots.chunk_by(|a, b| self.first_of(*a) == self.first_of(*b)) {
            let out = &mut out[from..from + part.len()];
            let first = self.first_of(part[0]);
            let index = self.piece(part[0]).map_or(&self.main.index, |(piece, _)| piece.segment.index());
            let own: Vec<u32> = part.iter().map(|slot| slot.0 - first).collect();
            index.products(vector, &own, out);
            from += part.len();
        }
    }

    /// The first slot of what holds a slot.
    fn first_of(&self, slot: Slot) -> u32 {
        self.piece(slot).map_or(0, |(piece, _)| piece.first_slot)
    }

    /// Writes what the reranker reads of the items in some slots as rows.
    ///
    /// # Panics
    /// Where there is no room for these.
    pub fn write_candidates(&self, slots: &[Slot], mut given: InputRows<'_>) {
        let mut first = 0;
        for run in slots.chunk_by(|a, b| self.piece(*a).is_none() && self.piece(*b).is_none()) {
            let given = given.some(first..first + run.len());
            match self.piece(run[0]) {
                Some((piece, slot)) => piece.segment.candidates().write(piece.segment.index(), &[slot], given),
                None => self.main.candidates.write(&self.main.index, run, given),
            }
            first += run.len();
        }
    }

    /// True where nothing has changed since the main snapshot was published.
    pub fn is_bare(&self) -> bool {
        self.gone.is_empty() && self.overlay.is_empty() && self.pieces.is_empty()
    }

    /// The names of the columns that the reranker and the value model read.
    pub fn numbers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.main.numbers.iter().map(|(name, _)| name.as_str())
    }

    /// The values of one of [`View::numbers`] at many slots, appended to `out`.
    pub fn read_numbers(&self, column: usize, slots: impl Iterator<Item = Slot>, out: &mut Vec<f32>) {
        let (name, of_main) = &self.main.numbers[column];
        let number = (!self.overlay.is_empty()).then(|| self.main.columns.number(name).ok()).flatten();
        let changed = number.filter(|&number| self.overlay.has_column(number));
        if self.pieces.is_empty() && changed.is_none() {
            return out.extend(slots.map(|slot| of_main[slot.index()]));
        }
        out.extend(slots.map(|slot| match self.piece(slot) {
            Some((piece, slot)) => piece.segment.numbers()[column][slot.index()],
            None => match changed.and_then(|number| self.overlay.get(number, slot)) {
                Some(value) => value.number(),
                None => of_main[slot.index()],
            },
        }));
    }

    /// The item columns of all slots.
    pub fn columns(&self) -> Stacked {
        let others = self.pieces.iter().map(|piece| (piece.first_slot, piece.segment.columns().clone()));
        Stacked::new(self.main.columns.clone(), self.overlay.clone(), others.collect())
    }

    /// An item column by its name.
    ///
    /// # Errors
    /// `Invalid` naming the columns that there are.
    pub fn column(&self, name: &str) -> Result<&Column> {
        self.main.columns.column(name)
    }

    /// The reranker, where the model has one.
    pub fn overarch(&self) -> Option<&OverArch> {
        self.main.package.overarch.as_ref()
    }

    /// The value model.
    pub fn value(&self) -> &Program {
        &self.main.value
    }

    /// So many items of the main snapshot that pass a filter are searched one by one: of a shard the share of them that is of the whole, so
    /// that all shards search as the whole does.
    fn slots_max(&self) -> usize {
        let index = &self.main.index;
        let of_whole = self.main.manifest.shard.map_or(1.0, |part| index.items() as f64 / part.items.max(1) as f64);
        (index.slots_max() as f64 * of_whole.min(1.0)) as usize
    }

    /// The plan of a filter; requests that are under way with an equal one share it.
    ///
    /// # Errors
    /// What is wrong with the filter, with the byte offset.
    pub fn plan(&self, filter: &str) -> Result<Arc<Planned>> {
        let parsed = filter::parse(filter)?.canonical();
        let canonical = parsed.to_string();
        if let Some(planned) = self.plans().by_canonical.get(&canonical).and_then(Weak::upgrade) {
            return Ok(planned);
        }
        let plan = Plan::new(&parsed, &self.main.columns, &self.main.filter, self.slots_max())?;
        let plan = plan.with_changes(&parsed, &self.main.filter, &self.overlay)?;
        let of_piece = |piece: &Piece| {
            let segment = &piece.segment;
            Plan::new(&parsed, segment.columns(), segment.filter(), segment.index().slots_max())
        };
        let beside = self.pieces.iter().map(of_piece).collect::<Result<_>>()?;
        let planned = Arc::new(Planned { plan, beside, canonical: canonical.clone() });
        let mut plans = self.plans();
        if plans.by_canonical.len() >= plans.room.max(PLANS_MIN) {
            plans.by_canonical.retain(|_, planned| planned.strong_count() > 0);
            plans.room = plans.by_canonical.len() * 2;
        }
        plans.by_canonical.insert(canonical, Arc::downgrade(&planned));
        Ok(planned)
    }

    /// The items that pass a filter, those of the main snapshot first.
    ///
    /// # Errors
    /// As [`View::plan`].
    pub fn matching(&self, filter: &str) -> Result<Vec<ItemId>> {
        let planned = self.plan(filter)?;
        let plans = std::iter::once(&planned.plan).chain(&planned.beside);
        let of_part = |(part, plan): (Part<'_>, &Plan)| {
            let passing = part.live().filter(|&slot| plan.passes(slot));
            passing.map(|slot| part.ids.item(slot)).collect::<Vec<_>>()
        };
        Ok(self.all_parts().zip(plans).flat_map(of_part).collect())
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        locked(&self.plans)
    }
}
