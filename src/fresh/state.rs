//! A snapshot with the updates up to a position.
//!
//! Rows that came last stand in a small table, which is built anew for each view. Once it is full it becomes a segment, and
//! segments of about one size become one: there are never more than a handful, each some times as large as the next, and a
//! row is built a few times at most (O'Neil et al., "The Log-Structured Merge-Tree", 1996).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::update::{Put, Update};
use crate::columns::ColumnKind;
use crate::embedding::Lookup;
use crate::error::{Error, Result};
use crate::ivf::Assigner;
use crate::limits::COMPONENT_MAX;
use crate::registry::is_passing;
use crate::search::Tombstones;
use crate::snapshot::Snapshot;
use crate::tensor::Matrix;
use crate::tower::{self, FeatureRow, Pooled, Threads, Tower};
use crate::units::{ItemId, Slot};
use crate::view::{Attribute, Row, Segment, View};

/// Rows after which the table becomes a segment: it takes about a millisecond to build so many.
const TABLE_ROWS: usize = 1024;
/// The same while nobody looks yet: the fewer segments are made on the way, the sooner a start is done.
const TABLE_ROWS_UNSEEN: usize = 65_536;
/// A segment is at least so many times as large as the one after it.
const RATIO: usize = 4;
/// Items that the item tower takes at a time.
const TOWER_BATCH: usize = 512;

/// A snapshot with updates, as who applies them sees it.
pub struct Fresh {
    main: Arc<Snapshot>,
    assigner: Assigner,
    /// What is gone of the main snapshot.
    gone: Tombstones,
    /// The oldest and largest first; no item lies in two of them, or in one and in the main snapshot, without a tombstone.
    segments: Vec<(Arc<Segment>, Tombstones)>,
    /// Rows that came after the last segment; none of them lies elsewhere without a tombstone.
    table: BTreeMap<i64, Row>,
    /// The table as a segment, until it changes.
    built: Option<Arc<Segment>>,
    position: u64,
    threads: Threads,
    graphs: tower::Scratch,
}

impl Fresh {
    /// A snapshot that contains the updates up to a position, and none after it yet.
    pub fn new(main: Arc<Snapshot>, position: u64) -> Self {
        Fresh {
            assigner: Assigner::new(&main.index),
            main,
            gone: Tombstones::default(),
            segments: Vec::new(),
            table: BTreeMap::new(),
            built: None,
            position,
            threads: Threads::new(1),
            graphs: tower::Scratch::default(),
        }
    }

    /// The position of the last update.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Applies updates that follow, of which no view is asked for before all of them are applied.
    ///
    /// # Errors
    /// As [`Fresh::apply`].
    pub fn catch_up(&mut self, updates: &[Update]) -> Result<Vec<(u64, Error)>> {
        self.apply_up_to(TABLE_ROWS_UNSEEN, updates)
    }

    /// Applies the updates that follow, the first at the position after the last one. Returns those that this snapshot's model
    /// can make nothing of, each with the reason: they change nothing.
    ///
    /// # Errors
    /// Where memory cannot be had, or the item tower's tables do not answer; the updates up to [`Fresh::position`] are applied then, and those after it may be tried again.
    pub fn apply(&mut self, updates: &[Update]) -> Result<Vec<(u64, Error)>> {
        self.apply_up_to(TABLE_ROWS, updates)
    }

    fn apply_up_to(&mut self, rows: usize, updates: &[Update]) -> Result<Vec<(u64, Error)>> {
        let mut refused = Vec::new();
        let mut vectors = self.embed(updates);
        for (update, vector) in updates.iter().zip(&mut vectors) {
            let position = self.position + 1;
            let vector = match vector.take() {
                // What makes vectors does not answer now: the update must not be passed over for that.
                Some(Err(e)) if is_passing(e.kind()) => return Err(e),
                vector => vector,
            };
            let applied = match (update, vector) {
                (Update::Put(put), Some(vector)) => vector.and_then(|vector| self.put(put, vector)),
                (Update::Set { id, attributes }, _) => self.set(*id, attributes),
                (Update::Delete { id }, _) => {
                    self.delete(*id);
                    Ok(())
                }
                (Update::Put(_) | Update::Call { .. }, _) => Ok(()),
            };
            refused.extend(applied.err().map(|e| (position, e)));
            self.position = position;
            if self.table.len() >= rows {
                self.seal()?;
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

    /// The vectors of the items that are put, each its own or that of the item tower; `None` for other updates.
    fn embed(&mut self, updates: &[Update]) -> Vec<Option<Result<Vec<f32>>>> {
        let main = self.main.clone();
        let puts = |update: &Update| if let Update::Put(put) = update { Some(put.clone()) } else { None };
        let Some(tower) = &main.package.item else {
            let own = |put: Put| put.vector.ok_or_else(|| Error::invalid("no vector, and the model has no item tower"));
            return updates.iter().map(|update| puts(update).map(own)).collect();
        };
        let mut vectors: Vec<Option<Result<Vec<f32>>>> = Vec::with_capacity(updates.len());
        for updates in updates.chunks(TOWER_BATCH) {
            let read = |put: Put| tower.read(put.features(tower.features()));
            let rows: Vec<Option<Result<FeatureRow>>> = updates.iter().map(|u| puts(u).map(read)).collect();
            let whole: Vec<&FeatureRow> = rows.iter().flatten().flatten().collect();
            let mut made = self.run(tower, &whole).into_iter();
            let missing = || Err(Error::internal("an item without a vector"));
            vectors.extend(
                rows.into_iter().map(|row| row.map(|row| row.and_then(|_| made.next().unwrap_or_else(missing)))),
            );
        }
        vectors
    }

    /// Runs rows through the item tower: all together, or, where that fails, each alone.
    fn run(&mut self, tower: &Tower, rows: &[&FeatureRow]) -> Vec<Result<Vec<f32>>> {
        if rows.is_empty() {
            return Vec::new();
        }
        let Fresh { threads, graphs, .. } = self;
        let mut run = |rows: &[&FeatureRow]| -> Result<Vec<Result<Vec<f32>>>> {
            let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
            let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
            let made = tower.run(&pairs, threads, graphs)?;
            // The first output is the item's vector.
            let made = made.first().ok_or_else(|| Error::internal("the item tower makes nothing"))?;
            Ok(made.data().chunks_exact(made.shape()[1]).map(|row| Ok(row.to_vec())).collect())
        };
        match run(rows) {
            Ok(vectors) => vectors,
            Err(e) if rows.len() == 1 => vec![Err(e)],
            Err(_) => rows.iter().map(|row| run(&[*row]).and_then(|mut made| made.swap_remove(0))).collect(),
        }
    }

    fn put(&mut self, put: &Put, vector: Vec<f32>) -> Result<()> {
        let dimension = self.main.index.dimension();
        if vector.len() != dimension {
            return Err(Error::invalid(format!("a vector of {} numbers, expected {dimension}", vector.len())));
        }
        if let Some(at) = vector.iter().position(|x| x.is_nan() || x.abs() > COMPONENT_MAX) {
            return Err(Error::invalid(format!("number {} of the vector is {:e}", at + 1, vector[at])));
        }
        let mut attributes = vec![Attribute::Missing; self.main.columns.list().len()];
        self.change(&mut attributes, &put.attributes)?;
        let list = self.assigner.assign(Matrix::new(&vector, dimension)?)[0];
        self.delete(put.id);
        self.insert(Row { id: put.id, list, vector, attributes });
        Ok(())
    }

    fn set(&mut self, id: i64, changes: &[(String, Attribute)]) -> Result<()> {
        if let Some(mut row) = self.table.remove(&id) {
            self.built = None;
            let mut attributes = row.attributes.clone();
            let changed = self.change(&mut attributes, changes);
            if changed.is_ok() {
                row.attributes = attributes;
            }
            self.table.insert(id, row);
            return changed;
        }
        let Some(mut row) = self.row(id) else { return Ok(()) };
        self.change(&mut row.attributes, changes)?;
        self.delete(id);
        self.insert(row);
        Ok(())
    }

    /// Changes the attributes that this snapshot has columns for; other versions may have others.
    fn change(&self, attributes: &mut [Attribute], changes: &[(String, Attribute)]) -> Result<()> {
        let columns = self.main.columns.list();
        for (attribute, column) in attributes.iter_mut().zip(columns) {
            let Some((_, to)) = changes.iter().find(|(name, _)| name == column.name()) else { continue };
            *attribute = match (column.kind(), to) {
                (_, Attribute::Missing) => Attribute::Missing,
                (ColumnKind::Integers, Attribute::Integers(_)) | (ColumnKind::Texts, Attribute::Texts(_)) => to.clone(),
                (ColumnKind::Floats, Attribute::Number(number)) if number.is_finite() => to.clone(),
                (ColumnKind::Floats, Attribute::Integers(one)) if one.len() == 1 => Attribute::Number(one[0] as f64),
                (kind, _) => {
                    let (name, got) = (column.name(), to.kind());
                    return Err(Error::invalid(format!("attribute `{name}`: got {got}, expected {}", kind.plural())));
                }
            };
        }
        Ok(())
    }

    /// An item as it is now.
    fn row(&self, id: i64) -> Option<Row> {
        if let Some(row) = self.table.get(&id) {
            return Some(row.clone());
        }
        for (segment, gone) in &self.segments {
            if let Some(slot) = segment.ids().slot(ItemId(id)).filter(|&slot| !gone.contains(slot)) {
                return Some(segment.item(slot));
            }
        }
        let slot = self.main.ids.slot(ItemId(id)).filter(|&slot| !self.gone.contains(slot))?;
        let mut vector = vec![0.0; self.main.index.dimension()];
        self.main.index.row(slot, &mut vector);
        let attributes = self.main.columns.list().map(|column| column.cell(slot).into()).collect();
        Some(Row { id, list: self.main.index.list_of(slot).0, vector, attributes })
    }

    fn insert(&mut self, row: Row) {
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
            self.built = Some(Arc::new(Segment::build(&self.main, &self.assigner, &rows)?));
        }
        Ok(self.built.clone())
    }

    /// Makes a segment of the table, and one of all that are not much larger than those after them.
    fn seal(&mut self) -> Result<()> {
        if let Some(segment) = self.table_segment()? {
            self.segments.push((segment, Tombstones::default()));
            self.table.clear();
            self.built = None;
        }
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
        let mut rows: Vec<Row> = Vec::new();
        for (segment, gone) in &self.segments[from..] {
            let live = segment.index().filled_slots().filter(|slot: &Slot| !gone.contains(*slot));
            rows.extend(live.map(|slot| segment.item(slot)));
        }
        rows.sort_unstable_by_key(|row| row.id);
        Segment::build(&self.main, &self.assigner, &rows)
    }
}
