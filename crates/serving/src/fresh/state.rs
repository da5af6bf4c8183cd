//! Snapshot with the updates up to a position.
//!
//! The latest rows are in a small table, whose segment is rebuilt for each view. Once the table is large enough it becomes a
//! permanent segment, and segments of similar size are joined while updates continue. There are at most a handful of segments,
//! each at least twice as large as all later ones together, and a row is rebuilt a few times at most (O'Neil et al., "The
//! Log-Structured Merge-Tree", 1996).
//!
//! An item of the main snapshot with changed attributes need not become a row of the table: with [`Fresh::in_place`] it stays in
//! its slot, and an overlay holds the changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::ThreadPool;

use super::columns::ReadColumns;
use super::early::EarlyEmbeddings;
use super::join::{Joining, Part, joined, joiner, live};
use super::make::{Changes, Fitted, RowEncoder, changes};
use super::update::Update;
use crate::view::{Attribute, Row, Segment, View, stored_value};
use sterling_core::error::{Error, Result};
use sterling_core::units::{ItemId, Slot};
use sterling_index::columns::{Column, Overlay, Value};
use sterling_index::search::Tombstones;
use sterling_snapshot::{Snapshot, VectorRows};

/// Number of rows at which the table always becomes a segment.
const TABLE_ROWS: usize = 1024;
/// Number of rows at which the table of a view becomes a permanent segment, if no join is running: rebuilding it for the next
/// view would cost more than joining it once more.
const SHOWN_ROWS: usize = 192;
/// Number of rows at which the table becomes a segment before the first view: few large segments make the start faster.
const TABLE_ROWS_UNSEEN: usize = 65_536;
/// Minimum ratio of a segment's size to the size of the next segment.
const RATIO: usize = 2;
/// Maximum number of items changed in place: filters that are answered from posting lists check all changed items.
const CHANGED_MAX: usize = 1 << 17;
/// Maximum number of segments added while a join runs; the next update then waits for the end of the join.
const BEHIND_MAX: usize = 8;

/// Update that does not fit the snapshot's model, because it was validated against another version or written by another server.
#[derive(Debug)]
pub struct IncompatibleUpdate {
    /// Position of the update.
    pub position: u64,
    /// Description of the mismatch.
    pub error: Error,
    /// True if the update had no effect, false if only an attribute of the item is missing.
    pub is_whole: bool,
}

/// Snapshot with updates, as the update thread sees it.
pub struct Fresh {
    main: Arc<Snapshot>,
    maker: RowEncoder,
    /// Deleted slots of the main snapshot.
    tombstones: Tombstones,
    /// Changed column values of live items in the main snapshot.
    overlay: Overlay,
    /// True if the values of each column may change in place.
    in_place: Vec<bool>,
    /// Segments, the oldest and largest first. All copies of an item except the latest have tombstones.
    segments: Vec<Part>,
    /// Running join of some segments.
    joining: Option<Joining>,
    /// Thread for joins, started with the first join.
    joiner: Option<ThreadPool>,
    /// Rows added after the last segment; older copies have tombstones.
    table: BTreeMap<i64, Row>,
    /// Segment built from the table; unset when the table changes.
    built: Option<Arc<Segment>>,
    position: u64,
    /// Incompatible updates that were not returned yet.
    misfits: Vec<IncompatibleUpdate>,
}

impl Fresh {
    /// Creates a snapshot that contains the updates up to a position, and none after it.
    pub fn new(main: Arc<Snapshot>, position: u64) -> Self {
        Fresh {
            maker: RowEncoder::new(main.clone()),
            in_place: vec![false; main.columns.list().len()],
            tombstones: View::tombstones_of(&main),
            main,
            overlay: Overlay::default(),
            segments: Vec::new(),
            joining: None,
            joiner: None,
            table: BTreeMap::new(),
            built: None,
            position,
            misfits: Vec::new(),
        }
    }

    /// Lets attributes of the main snapshot's items change in place. Only the CPU answers requests for changed views, because a GPU
    /// has its own copies of Bloom planes and columns.
    #[must_use]
    pub fn in_place(self) -> Self {
        let Snapshot { columns, package, .. } = &*self.main;
        let part =
            package.overarch.iter().filter_map(|overarch| overarch.part()).flat_map(|part| part.reads().number_names());
        let features =
            package.spec.overarch.iter().flat_map(|overarch| &overarch.features).map(|feature| feature.source());
        // Stored tensors and looked-up embeddings depend on these columns.
        let bound: Vec<&str> = part.chain(features).collect();
        let in_place = columns.list().map(|column| !bound.contains(&column.name())).collect();
        Fresh { in_place, ..self }
    }

    /// Uses embeddings that were computed before the updates were durable.
    #[must_use]
    pub(super) fn taking(self, early: Arc<EarlyEmbeddings>) -> Self {
        Fresh { maker: self.maker.taking(early), ..self }
    }

    /// Returns the position of the last applied update.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Same as [`Fresh::apply`], for updates before [`Fresh::caught_up`], during which no view is needed.
    ///
    /// # Errors
    /// As [`Fresh::apply`].
    pub fn catch_up(&mut self, updates: &[Update]) -> Result<Vec<IncompatibleUpdate>> {
        self.apply_up_to(TABLE_ROWS_UNSEEN, updates, Fresh::seal)
    }

    /// Moves the updates of [`Fresh::catch_up`] into segments that can be searched.
    ///
    /// # Errors
    /// `Overloaded` if memory is exhausted.
    pub fn caught_up(&mut self) -> Result<()> {
        self.take_joined(true)?;
        if self.table.len() >= TABLE_ROWS {
            self.seal()?;
        }
        self.join()
    }

    /// Applies the next updates, which follow [`Fresh::position`]. Returns the updates that do not fit this snapshot's model.
    /// An item without a valid embedding has no effect; an attribute of another type than its column is missing, and the rest
    /// of the item is applied.
    ///
    /// # Errors
    /// If memory is exhausted or the item tower's tables do not respond. After an error the updates up to [`Fresh::position`] are
    /// applied, and later updates may be retried.
    pub fn apply(&mut self, updates: &[Update]) -> Result<Vec<IncompatibleUpdate>> {
        self.apply_up_to(TABLE_ROWS, updates, |fresh| {
            fresh.seal()?;
            fresh.start_background_join()
        })
    }

    /// Applies updates; calls `full` whenever the table has reached `rows` rows. Incompatible updates are returned
    /// once: if this call fails, by a later call.
    fn apply_up_to(
        &mut self,
        rows: usize,
        updates: &[Update],
        full: fn(&mut Self) -> Result<()>,
    ) -> Result<Vec<IncompatibleUpdate>> {
        let made = self.maker.rows(updates);
        for (update, row) in updates.iter().zip(made) {
            let position = self.position + 1;
            let without = match (update, row) {
                (_, Some(Ok(Fitted { row, misfits }))) => {
                    self.put(row);
                    misfits
                }
                // A transient error of the embedding source must not skip the update: the caller retries it.
                (_, Some(Err(e))) if e.kind().is_transient() => return Err(e),
                (_, Some(Err(error))) => {
                    self.misfits.push(IncompatibleUpdate { position, error, is_whole: true });
                    Vec::new()
                }
                (Update::Set { id, attributes }, None) => match self.unscorable(*id, attributes) {
                    Some(error) => {
                        self.misfits.push(IncompatibleUpdate { position, error, is_whole: true });
                        Vec::new()
                    }
                    None => self.set(*id, attributes)?,
                },
                (Update::Delete { id }, None) => {
                    self.delete(*id);
                    Vec::new()
                }
                (Update::Put(_) | Update::Call { .. } | Update::AnsweredCall { .. }, None) => Vec::new(),
            };
            self.misfits.extend(without.into_iter().map(|error| IncompatibleUpdate {
                position,
                error,
                is_whole: false,
            }));
            self.position = position;
            if self.table.len() >= rows {
                full(self)?;
            }
        }
        Ok(std::mem::take(&mut self.misfits))
    }

    /// Returns a view at [`Fresh::position`].
    ///
    /// # Errors
    /// `Overloaded` if memory is exhausted.
    pub fn view(&mut self) -> Result<View> {
        if self.table.len() >= SHOWN_ROWS && self.joining.is_none() {
            self.seal()?;
            self.start_background_join()?;
        }
        let mut segments = self.segments.clone();
        segments.extend(self.table_segment()?.map(|segment| (segment, Tombstones::default())));
        let view = View::at(self.position, self.main.clone(), self.tombstones.clone(), segments);
        Ok(view.with_changes(self.overlay.clone()))
    }

    /// Installs a finished join; returns true if a view would have fewer segments than before.
    ///
    /// # Errors
    /// `Overloaded` if memory is exhausted.
    pub fn tidy(&mut self) -> Result<bool> {
        self.take_joined(false)
    }

    /// Changes attributes of an item, if it exists. Returns the errors of values that do not fit their columns.
    fn set(&mut self, id: i64, given: &[(String, Attribute)]) -> Result<Vec<Error>> {
        let Changes { fitting, misfits } = changes(&self.main.columns, given);
        if let Some(row) = self.table.get_mut(&id) {
            fitting.into_iter().for_each(|(column, attribute)| row.attributes[column] = attribute);
            self.built = None;
            return Ok(misfits);
        }
        if let Some(slot) = self.main.ids.slot(ItemId(id)).filter(|&slot| !self.tombstones.contains(slot))
            && self.may_change(slot, fitting.iter().map(|(column, _)| *column))
        {
            fitting.iter().for_each(|(column, to)| self.overlay.set(*column, slot, Value::from(to)));
            return Ok(misfits);
        }
        let Some(mut row) = self.row(id)? else { return Ok(Vec::new()) };
        fitting.into_iter().for_each(|(column, attribute)| row.attributes[column] = attribute);
        self.put(row);
        Ok(misfits)
    }

    /// Returns why the reranker could not score an item with changed attributes.
    fn unscorable(&self, id: i64, given: &[(String, Attribute)]) -> Option<Error> {
        let columns = ReadColumns::of(&self.main).filter(|columns| given.iter().any(|(name, _)| columns.has(name)))?;
        let present = self.values_of(id)?;
        let Changes { fitting, .. } = changes(&self.main.columns, given);
        let value = |column: usize| match fitting.iter().find(|(changed, _)| *changed == column) {
            Some((_, attribute)) => attribute.into(),
            None => present(column),
        };
        let mut unscorable = columns.check(vec![columns.numbers(value)]);
        unscorable.pop().map(|(_, why)| why.into_error())
    }

    /// Returns a function from column number to the item's present value; `None` if the item does not exist.
    fn values_of(&self, id: i64) -> Option<Box<dyn Fn(usize) -> Value + '_>> {
        if let Some(row) = self.table.get(&id) {
            return Some(Box::new(|column| (&row.attributes[column]).into()));
        }
        for (segment, tombstones) in &self.segments {
            if let Some(slot) = segment.ids().slot(ItemId(id)).filter(|&slot| !tombstones.contains(slot)) {
                return Some(Box::new(move |column| stored_value(segment.columns(), column, slot)));
            }
        }
        let main = &self.main;
        let slot = main.ids.slot(ItemId(id)).filter(|&slot| !self.tombstones.contains(slot))?;
        let changed = move |column| self.overlay.get(column, slot).cloned();
        Some(Box::new(move |column| changed(column).unwrap_or_else(|| stored_value(&main.columns, column, slot))))
    }

    /// Returns whether columns of an item of the main snapshot may change in place.
    fn may_change(&self, slot: Slot, mut columns: impl Iterator<Item = usize>) -> bool {
        columns.all(|column| self.in_place[column]) && (self.overlay.len() < CHANGED_MAX || self.overlay.contains(slot))
    }

    /// Returns the current state of an item that is not in the table of recent updates.
    fn row(&self, id: i64) -> Result<Option<Row>> {
        let rows = VectorRows::of(&self.main.package.spec.item.vectors)?;
        for (segment, tombstones) in &self.segments {
            if let Some(slot) = segment.ids().slot(ItemId(id)).filter(|&slot| !tombstones.contains(slot)) {
                return Ok(Some(segment.item(&self.maker.assigner, &rows, slot)));
            }
        }
        let main = &self.main;
        let Some(slot) = main.ids.slot(ItemId(id)).filter(|&slot| !self.tombstones.contains(slot)) else {
            return Ok(None);
        };
        let vector = self.maker.assigner.taken(&main.index, slot);
        let mut kept = Vec::with_capacity(rows.bytes());
        rows.read(&main.vectors, slot, &mut kept);
        let now = |(number, column): (usize, &Column)| match self.overlay.get(number, slot) {
            Some(value) => value.cell().into(),
            None => column.cell(slot).into(),
        };
        let attributes = main.columns.list().enumerate().map(now).collect();
        let (list, is_stray) = (main.index.list_of(slot).0, false);
        Ok(Some(Row { id, list, is_stray, vector, kept, attributes }))
    }

    /// Inserts or replaces an item.
    fn put(&mut self, row: Row) {
        self.delete(row.id);
        self.table.insert(row.id, row);
        self.built = None;
    }

    /// Deletes an item wherever it is stored.
    fn delete(&mut self, id: i64) {
        if self.table.remove(&id).is_some() {
            self.built = None;
            return;
        }
        for (segment, tombstones) in &mut self.segments {
            if segment.ids().slot(ItemId(id)).is_some_and(|slot| tombstones.insert(slot)) {
                return;
            }
        }
        if let Some(slot) = self.main.ids.slot(ItemId(id)) {
            self.tombstones.insert(slot);
            self.overlay.remove(slot);
        }
    }

    fn table_segment(&mut self) -> Result<Option<Arc<Segment>>> {
        if self.built.is_none() && !self.table.is_empty() {
            let rows: Vec<&Row> = self.table.values().collect();
            self.built = Some(Arc::new(Segment::build(&self.main, &self.maker.assigner, &rows)?));
        }
        Ok(self.built.clone())
    }

    /// Converts the table to a segment.
    fn seal(&mut self) -> Result<()> {
        if let Some(segment) = self.table_segment()? {
            self.segments.push((segment, Tombstones::default()));
            self.table.clear();
            self.built = None;
        }
        Ok(())
    }

    /// Joins all segments that are not much larger than all later segments together.
    fn join(&mut self) -> Result<()> {
        if let Some(first) = self.first_to_join() {
            let one = joined(&self.main, &self.maker.assigner, &self.segments[first..])?;
            self.segments.truncate(first);
            self.segments.push((Arc::new(one), Tombstones::default()));
        }
        Ok(())
    }

    /// Starts the join of [`Fresh::join`] in the background; one join runs at a time.
    fn start_background_join(&mut self) -> Result<()> {
        let behind = self.joining.as_ref().map_or(0, |joining| self.segments.len() - joining.places().end);
        self.take_joined(behind > BEHIND_MAX)?;
        if self.joining.is_none()
            && let Some(first) = self.first_to_join()
        {
            let parts = (first, self.segments[first..].to_vec());
            let joiner = match &mut self.joiner {
                Some(joiner) => joiner,
                none => none.insert(joiner()?),
            };
            self.joining = Some(Joining::begin(joiner, &self.main, &self.maker.assigner, parts));
        }
        Ok(())
    }

    /// Installs the result of the running join if it is finished, or waits for it if `awaited`; returns whether it was installed.
    fn take_joined(&mut self, awaited: bool) -> Result<bool> {
        let Some(joining) = self.joining.take_if(|joining| awaited || joining.is_done()) else { return Ok(false) };
        let places = joining.places();
        let one = joining.end(&self.segments[places.clone()])?;
        self.segments.splice(places, [one]);
        Ok(true)
    }

    /// Drops empty segments, and returns the index of the first segment to join, if there is one.
    fn first_to_join(&mut self) -> Option<usize> {
        self.segments.retain(|part| live(part) > 0);
        let mut first = self.segments.len();
        let mut rows = 0;
        while let Some(next) = first.checked_sub(1).map(|n| &self.segments[n]) {
            // Always joins the newest segment; joins an older one if it is sparse, or smaller than `RATIO` times all later ones.
            let is_sparse = next.1.len() > live(next);
            if rows > 0 && live(next) >= RATIO * rows && !is_sparse {
                break;
            }
            rows += live(next);
            first -= 1;
        }
        (self.segments.len() - first > 1).then_some(first)
    }
}
