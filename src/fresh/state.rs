//! A snapshot with the updates up to a position.
//!
//! Rows that came last stand in a small table, which is built anew for each view. Once it is full it becomes a segment, and
//! segments of about one size become one: there are never more than a handful, each some times as large as the next, and a
//! row is built a few times at most (O'Neil et al., "The Log-Structured Merge-Tree", 1996).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::make::{Maker, changes};
use super::update::Update;
use crate::error::{Error, Result};
use crate::registry::is_passing;
use crate::search::Tombstones;
use crate::snapshot::{Snapshot, VectorRows};
use crate::units::{ItemId, Slot};
use crate::view::{Attribute, Row, Segment, View};

/// Rows after which the table becomes a segment: it takes about a millisecond to build so many.
const TABLE_ROWS: usize = 1024;
/// The same while nobody looks yet: the fewer segments are made on the way, the sooner a start is done.
const TABLE_ROWS_UNSEEN: usize = 65_536;
/// A segment is at least so many times as large as the one after it.
const RATIO: usize = 4;

/// A snapshot with updates, as who applies them sees it.
pub struct Fresh {
    main: Arc<Snapshot>,
    maker: Maker,
    /// What is gone of the main snapshot.
    gone: Tombstones,
    /// The oldest and largest first; no item lies in two of them, or in one and in the main snapshot, without a tombstone.
    segments: Vec<(Arc<Segment>, Tombstones)>,
    /// Rows that came after the last segment; none of them lies elsewhere without a tombstone.
    table: BTreeMap<i64, Row>,
    /// The table as a segment, until it changes.
    built: Option<Arc<Segment>>,
    position: u64,
}

impl Fresh {
    /// A snapshot that contains the updates up to a position, and none after it yet.
    pub fn new(main: Arc<Snapshot>, position: u64) -> Self {
        Fresh {
            maker: Maker::new(main.clone()),
            main,
            gone: Tombstones::default(),
            segments: Vec::new(),
            table: BTreeMap::new(),
            built: None,
            position,
        }
    }

    /// The position of the last update.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// As [`Fresh::apply`], of updates with which no view is asked for before [`Fresh::caught_up`].
    ///
    /// # Errors
    /// As [`Fresh::apply`].
    pub fn catch_up(&mut self, updates: &[Update]) -> Result<Vec<(u64, Error)>> {
        self.apply_up_to(TABLE_ROWS_UNSEEN, updates, Fresh::seal)
    }

    /// Brings what updates have made that nobody has seen into the segments that it is searched in.
    ///
    /// # Errors
    /// `Overloaded` where memory cannot be had.
    pub fn caught_up(&mut self) -> Result<()> {
        if self.table.len() >= TABLE_ROWS {
            self.seal()?;
        }
        self.join()
    }

    /// Applies the updates that follow, the first at the position after the last one. Returns those that this snapshot's model
    /// can make nothing of, each with the reason: they change nothing.
    ///
    /// # Errors
    /// Where memory cannot be had, or the item tower's tables do not answer; the updates up to [`Fresh::position`] are applied then, and those after it may be tried again.
    pub fn apply(&mut self, updates: &[Update]) -> Result<Vec<(u64, Error)>> {
        self.apply_up_to(TABLE_ROWS, updates, |fresh| {
            fresh.seal()?;
            fresh.join()
        })
    }

    /// Applies updates; `full` makes room in a table of so many rows.
    fn apply_up_to(
        &mut self,
        rows: usize,
        updates: &[Update],
        full: fn(&mut Self) -> Result<()>,
    ) -> Result<Vec<(u64, Error)>> {
        let mut refused = Vec::new();
        let made = self.maker.rows(updates);
        for (update, row) in updates.iter().zip(made) {
            let position = self.position + 1;
            let applied = match (update, row) {
                // What makes vectors does not answer now: the update must not be passed over for that.
                (_, Some(Err(e))) if is_passing(e.kind()) => return Err(e),
                (_, Some(row)) => row.map(|row| self.put(row)),
                (Update::Set { id, attributes }, None) => self.set(*id, attributes),
                (Update::Delete { id }, None) => {
                    self.delete(*id);
                    Ok(())
                }
                (Update::Put(_) | Update::Call { .. }, None) => Ok(()),
            };
            refused.extend(applied.err().map(|e| (position, e)));
            self.position = position;
            if self.table.len() >= rows {
                full(self)?;
            }
        }
        Ok(refused)
    }

    /// What is seen at this position.
    ///
    /// # Errors
    /// `Overloaded` where memory cannot be had.
    pub fn view(&mut self) -> Result<View> {
        let mut segments = self.segments.clone();
        segments.extend(self.table_segment()?.map(|segment| (segment, Tombstones::default())));
        Ok(View::at(self.position, self.main.clone(), self.gone.clone(), segments))
    }

    fn set(&mut self, id: i64, given: &[(String, Attribute)]) -> Result<()> {
        let columns = &self.main.columns;
        if let Some(row) = self.table.get_mut(&id) {
            for (column, attribute) in changes(columns, given)? {
                row.attributes[column] = attribute;
            }
            self.built = None;
            return Ok(());
        }
        let Some(mut row) = self.row(id)? else { return Ok(()) };
        for (column, attribute) in changes(columns, given)? {
            row.attributes[column] = attribute;
        }
        self.put(row);
        Ok(())
    }

    /// An item that lies outside of the table, as it is now.
    fn row(&self, id: i64) -> Result<Option<Row>> {
        let rows = VectorRows::of(&self.main.package.spec.item.vectors)?;
        for (segment, gone) in &self.segments {
            if let Some(slot) = segment.ids().slot(ItemId(id)).filter(|&slot| !gone.contains(slot)) {
                return Ok(Some(segment.item(&rows, slot)));
            }
        }
        let main = &self.main;
        let Some(slot) = main.ids.slot(ItemId(id)).filter(|&slot| !self.gone.contains(slot)) else { return Ok(None) };
        let (mut vector, mut kept) = (vec![0.0; main.index.dimension()], Vec::with_capacity(rows.bytes()));
        main.index.row(slot, &mut vector);
        rows.read(&main.vectors, slot, &mut kept);
        let attributes = main.columns.list().map(|column| column.cell(slot).into()).collect();
        Ok(Some(Row { id, list: main.index.list_of(slot).0, vector, kept, attributes }))
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
        }
    }

    fn table_segment(&mut self) -> Result<Option<Arc<Segment>>> {
        if self.built.is_none() && !self.table.is_empty() {
            let rows: Vec<Row> = self.table.values().cloned().collect();
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
        let live = |(segment, gone): &(Arc<Segment>, Tombstones)| segment.index().items() - gone.len();
        self.segments.retain(|segment| live(segment) > 0);
        let mut rest = self.segments.len();
        let mut rows = 0;
        while let Some(next) = rest.checked_sub(1).map(|n| &self.segments[n]) {
            // The newest is always taken; a larger one where it is no more than so many times what follows it.
            let is_sparse = next.1.len() > live(next);
            if rows > 0 && live(next) >= RATIO * rows && !is_sparse {
                break;
            }
            rows += live(next);
            rest -= 1;
        }
        if self.segments.len() - rest > 1 {
            let merged = self.merged(rest)?;
            self.segments.truncate(rest);
            self.segments.push((Arc::new(merged), Tombstones::default()));
        }
        Ok(())
    }

    /// The items of the segments from one on, in one.
    fn merged(&self, from: usize) -> Result<Segment> {
        let (mut rows, of_vectors) = (Vec::new(), VectorRows::of(&self.main.package.spec.item.vectors)?);
        for (segment, gone) in &self.segments[from..] {
            let live = segment.index().filled_slots().filter(|slot: &Slot| !gone.contains(*slot));
            rows.extend(live.map(|slot| segment.item(&of_vectors, slot)));
        }
        rows.sort_unstable_by_key(|row: &Row| row.id);
        Segment::build(&self.main, &self.maker.assigner, &rows)
    }
}
