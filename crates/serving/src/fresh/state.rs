//! A snapshot with the updates up to a position.
//!
//! Rows that came last stand in a small table, which is built anew for each view. Once it holds enough of them it becomes a segment,
//! and segments of about one size become one beside the updates that go on: there are never more than a handful, each twice as
//! large as all after it or more, and a row is built a few times at most (O'Neil et al., "The Log-Structured Merge-Tree", 1996).
//!
//! An item of the main snapshot of which attributes change need not become such a row: where [`Fresh::in_place`] says so it stays
//! where it is, and an overlay has what has changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::ThreadPool;

use super::early::EarlyEmbeddings;
use super::join::{Joining, Part, joined, joiner, live};
use super::make::{Changes, Fitted, Maker, changes};
use super::update::Update;
use crate::view::{Attribute, Row, Segment, View};
use sterling_core::error::{Error, Result};
use sterling_core::units::{ItemId, Slot};
use sterling_index::columns::{Column, Overlay, Value};
use sterling_index::search::Tombstones;
use sterling_snapshot::{Snapshot, VectorRows};

/// Rows after which the table becomes a segment whatever else goes on.
const TABLE_ROWS: usize = 1024;
/// Rows after which a table that was built for a view stays as a segment, where no join is under way: to build so many anew for the
/// next view would cost more than to join them once more.
const SHOWN_ROWS: usize = 192;
/// The same while nobody looks yet: the fewer segments are made on the way, the sooner a start is done.
const TABLE_ROWS_UNSEEN: usize = 65_536;
/// A segment is at least so many times as large as the one after it.
const RATIO: usize = 2;
/// Items that may have changed where they lie: a filter that only rare values answer asks all of them.
const CHANGED_MAX: usize = 1 << 17;
/// Segments that may come up behind a join that is under way before the next update waits for it.
const BEHIND_MAX: usize = 8;

/// An update that does not fit the snapshot's model: it was checked against another version, or written by another server.
#[derive(Debug)]
pub struct Misfit {
    /// The position of the update.
    pub position: u64,
    /// What does not fit.
    pub error: Error,
    /// True where the update changed nothing, false where the item is without an attribute in place of the value.
    pub is_whole: bool,
}

/// A snapshot with updates, as who applies them sees it.
pub struct Fresh {
    main: Arc<Snapshot>,
    maker: Maker,
    /// What is gone of the main snapshot.
    gone: Tombstones,
    /// What has changed of its columns; nothing of items that are gone.
    overlay: Overlay,
    /// Of each column whether its values may change in place.
    in_place: Vec<bool>,
    /// The oldest and largest first; no item lies in two of them, or in one and in the main snapshot, without a tombstone.
    segments: Vec<Part>,
    /// Those of them that are becoming one.
    joining: Option<Joining>,
    /// Where they do, once any have.
    joiner: Option<ThreadPool>,
    /// Rows that came after the last segment; none of them lies elsewhere without a tombstone.
    table: BTreeMap<i64, Row>,
    /// The table as a segment, until it changes.
    built: Option<Arc<Segment>>,
    position: u64,
    /// What did not fit and was not returned yet.
    misfits: Vec<Misfit>,
}

impl Fresh {
    /// A snapshot that contains the updates up to a position, and none after it yet.
    pub fn new(main: Arc<Snapshot>, position: u64) -> Self {
        Fresh {
            maker: Maker::new(main.clone()),
            in_place: vec![false; main.columns.list().len()],
            gone: View::gone_of(&main),
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

    /// The same, changing attributes of the main snapshot's items where they lie. Views are then answered by the
    /// CPU alone: a card has planes and columns of its own.
    #[must_use]
    pub fn in_place(self) -> Self {
        let Snapshot { columns, package, .. } = &*self.main;
        let part =
            package.overarch.iter().filter_map(|overarch| overarch.part()).flat_map(|part| part.reads().number_names());
        let features =
            package.spec.overarch.iter().flat_map(|overarch| &overarch.features).map(|feature| feature.source());
        // What is kept of items, or looked up for them, follows from these.
        let bound: Vec<&str> = part.chain(features).collect();
        let in_place = columns.list().map(|column| !bound.contains(&column.name())).collect();
        Fresh { in_place, ..self }
    }

    /// The same, which takes embeddings that were made before the updates were durable.
    #[must_use]
    pub(super) fn taking(self, early: Arc<EarlyEmbeddings>) -> Self {
        Fresh { maker: self.maker.taking(early), ..self }
    }

    /// The position of the last update.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// As [`Fresh::apply`], of updates with which no view is asked for before [`Fresh::caught_up`].
    ///
    /// # Errors
    /// As [`Fresh::apply`].
    pub fn catch_up(&mut self, updates: &[Update]) -> Result<Vec<Misfit>> {
        self.apply_up_to(TABLE_ROWS_UNSEEN, updates, Fresh::seal)
    }

    /// Brings what updates have made that nobody has seen into the segments that it is searched in.
    ///
    /// # Errors
    /// `Overloaded` where memory cannot be had.
    pub fn caught_up(&mut self) -> Result<()> {
        self.take_joined(true)?;
        if self.table.len() >= TABLE_ROWS {
            self.seal()?;
        }
        self.join()
    }

    /// Applies the updates that follow, the first at the position after the last one. Returns what does not fit this snapshot's
    /// model. An item without a vector that can be searched changes nothing; an attribute of another type than its column is
    /// missing, and the rest of the item is as the update says.
    ///
    /// # Errors
    /// Where memory cannot be had, or the item tower's tables do not answer; the updates up to [`Fresh::position`] are applied then, and those after it may be tried again.
    pub fn apply(&mut self, updates: &[Update]) -> Result<Vec<Misfit>> {
        self.apply_up_to(TABLE_ROWS, updates, |fresh| {
            fresh.seal()?;
            fresh.join_aside()
        })
    }

    /// Applies updates; `full` makes room in a table of so many rows. What does not fit is returned once, by a later call where
    /// this one fails.
    fn apply_up_to(
        &mut self,
        rows: usize,
        updates: &[Update],
        full: fn(&mut Self) -> Result<()>,
    ) -> Result<Vec<Misfit>> {
        let made = self.maker.rows(updates);
        for (update, row) in updates.iter().zip(made) {
            let position = self.position + 1;
            let without = match (update, row) {
                (_, Some(Ok(Fitted { row, misfits }))) => {
                    self.put(row);
                    misfits
                }
                // What makes vectors does not answer now: the update must not be passed over for that.
                (_, Some(Err(e))) if e.kind().is_transient() => return Err(e),
                (_, Some(Err(error))) => {
                    self.misfits.push(Misfit { position, error, is_whole: true });
                    Vec::new()
                }
                (Update::Set { id, attributes }, None) => self.set(*id, attributes)?,
                (Update::Delete { id }, None) => {
                    self.delete(*id);
                    Vec::new()
                }
                (Update::Put(_) | Update::Call { .. } | Update::AnsweredCall { .. }, None) => Vec::new(),
            };
            self.misfits.extend(without.into_iter().map(|error| Misfit { position, error, is_whole: false }));
            self.position = position;
            if self.table.len() >= rows {
                full(self)?;
            }
        }
        Ok(std::mem::take(&mut self.misfits))
    }

    /// What is seen at this position.
    ///
    /// # Errors
    /// `Overloaded` where memory cannot be had.
    pub fn view(&mut self) -> Result<View> {
        if self.table.len() >= SHOWN_ROWS && self.joining.is_none() {
            self.seal()?;
            self.join_aside()?;
        }
        let mut segments = self.segments.clone();
        segments.extend(self.table_segment()?.map(|segment| (segment, Tombstones::default())));
        let view = View::at(self.position, self.main.clone(), self.gone.clone(), segments);
        Ok(view.with_changes(self.overlay.clone()))
    }

    /// Takes in what was joined beside the updates; true where a view would hold it in fewer segments than before.
    ///
    /// # Errors
    /// `Overloaded` where memory cannot be had.
    pub fn tidy(&mut self) -> Result<bool> {
        self.take_joined(false)
    }

    /// Changes attributes of an item, where it is there. Returns what does not fit its columns.
    fn set(&mut self, id: i64, given: &[(String, Attribute)]) -> Result<Vec<Error>> {
        let Changes { fitting, misfits } = changes(&self.main.columns, given);
        if let Some(row) = self.table.get_mut(&id) {
            fitting.into_iter().for_each(|(column, attribute)| row.attributes[column] = attribute);
            self.built = None;
            return Ok(misfits);
        }
        if let Some(slot) = self.main.ids.slot(ItemId(id)).filter(|&slot| !self.gone.contains(slot))
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

    /// Whether columns of an item of the main snapshot may change where it lies.
    fn may_change(&self, slot: Slot, mut columns: impl Iterator<Item = usize>) -> bool {
        columns.all(|column| self.in_place[column]) && (self.overlay.len() < CHANGED_MAX || self.overlay.contains(slot))
    }

    /// An item that lies outside of the table, as it is now.
    fn row(&self, id: i64) -> Result<Option<Row>> {
        let rows = VectorRows::of(&self.main.package.spec.item.vectors)?;
        for (segment, gone) in &self.segments {
            if let Some(slot) = segment.ids().slot(ItemId(id)).filter(|&slot| !gone.contains(slot)) {
                return Ok(Some(segment.item(&self.maker.assigner, &rows, slot)));
            }
        }
        let main = &self.main;
        let Some(slot) = main.ids.slot(ItemId(id)).filter(|&slot| !self.gone.contains(slot)) else { return Ok(None) };
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

    /// Puts an item in the place of an earlier one.
    fn put(&mut self, row: Row) {
        self.delete(row.id);
        self.table.insert(row.id, row);
        self.built = None;
    }

    /// Removes an item wherever it lies.
    fn delete(&mut self, id: i64) {
        if self.table.remove(&id).is_some() {
            self.built = None;
            return;
        }
        for (segment, gone) in &mut self.segments {
            if segment.ids().slot(ItemId(id)).is_some_and(|slot| gone.insert(slot)) {
                return;
            }
        }
        if let Some(slot) = self.main.ids.slot(ItemId(id)) {
            self.gone.insert(slot);
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

    /// Makes a segment of the table.
    fn seal(&mut self) -> Result<()> {
        if let Some(segment) = self.table_segment()? {
            self.segments.push((segment, Tombstones::default()));
            self.table.clear();
            self.built = None;
        }
        Ok(())
    }

    /// Makes one of all segments that are not much larger than those after them.
    fn join(&mut self) -> Result<()> {
        if let Some(first) = self.first_to_join() {
            let one = joined(&self.main, &self.maker.assigner, &self.segments[first..])?;
            self.segments.truncate(first);
            self.segments.push((Arc::new(one), Tombstones::default()));
        }
        Ok(())
    }

    /// The same while updates go on; one join at a time.
    fn join_aside(&mut self) -> Result<()> {
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

    /// Takes in the segment that others became, once it is there or when it is `awaited`; true where there was one.
    fn take_joined(&mut self, awaited: bool) -> Result<bool> {
        let Some(joining) = self.joining.take_if(|joining| awaited || joining.is_done()) else { return Ok(false) };
        let places = joining.places();
        let one = joining.end(&self.segments[places.clone()])?;
        self.segments.splice(places, [one]);
        Ok(true)
    }

    /// The first of the segments that are to become one, where any are: those of which nothing is left go.
    fn first_to_join(&mut self) -> Option<usize> {
        self.segments.retain(|part| live(part) > 0);
        let mut first = self.segments.len();
        let mut rows = 0;
        while let Some(next) = first.checked_sub(1).map(|n| &self.segments[n]) {
            // The newest is always taken; a larger one where it is no more than so many times what follows it.
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
