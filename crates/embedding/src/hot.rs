//! Cache of a table's hot rows in device memory; the host's memory holds all rows.
//!
//! The host assigns rows to cache slots ([`CacheSlots`]), because it resolves ids to rows anyway. The device fetches missing rows
//! of a batch from host memory, each row once, and pools them from a staging buffer. Rows that get a cache slot are copied into
//! the slot afterwards, on the same stream, so a slot may be reassigned in the batch that still reads it. If the host's memory
//! cannot be registered with the device, the host gathers the missing rows and sends them with the ids.
//!
//! Batches use the cache one after another ([`HotTables::turn`]), because a stream must not read a slot before another stream has
//! filled it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::whole_bytes;
use super::place::CardShare;
use super::table::Table;
use super::tiers::cache::CacheCounters;
use super::tiers::cache_slots::CacheSlots;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_cuda::ops::bags::{IdBags, SumsTo, TableRows, fetch_rows, pool_staged, scatter_rows};
use sterling_cuda::{Array, Device, HostBytes};
use sterling_kernels::buffer::Buffer;

/// Cache slots of one table.
#[derive(Debug)]
struct HotRows {
    table: String,
    rows: TableRows,
    all: AllRows,
    places: CacheSlots,
    hits: u64,
    misses: u64,
    planned: f64,
}

/// All rows of a table, in host memory.
#[derive(Debug)]
enum AllRows {
    /// Registered memory: the device fetches missing rows.
    Registered(HostBytes),
    /// Plain memory: the host gathers missing rows.
    Plain(Buffer<u8>),
}

/// Hit-rate statistics of a table that is partly cached in device memory.
#[derive(Clone, Debug)]
pub struct HotCounters {
    /// Name of the table.
    pub table: String,
    /// Hits and misses of the cache.
    pub cache: CacheCounters,
    /// Hit rate that the plan expects.
    pub planned: f64,
}

/// Caches of all tables of which a device's memory holds only some rows.
#[derive(Debug, Default)]
pub struct HotTables {
    state: Mutex<HotState>,
}

#[derive(Debug, Default)]
struct HotState {
    /// False while a batch uses the cache: if the batch then fails, some assigned slots may not have been filled.
    is_filled: bool,
    tables: Vec<HotRows>,
}

/// Exclusive access to the caches, for one batch.
#[derive(Debug)]
pub struct HotTurn<'a> {
    state: MutexGuard<'a, HotState>,
}

/// Rows of a batch without a cache slot.
#[derive(Default)]
struct Staged {
    rows: Vec<i64>,
    /// Index of each row among `rows`.
    index: HashMap<i64, usize>,
    /// Slots to fill and the staged row for each; the last assignment of a slot wins.
    taken: HashMap<u32, u32>,
}

impl HotTables {
    /// Adds a cache of `share.bytes`, at most the size of the complete table. A table that already has a cache keeps that cache.
    /// Returns the table's index in this set.
    ///
    /// # Errors
    /// `Unsupported` if this host's memory does not hold the complete table; `Overloaded` if the device has not enough memory.
    pub fn add(&mut self, device: &Device, table: &Table, share: CardShare) -> Result<usize> {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = state.tables.iter().position(|known| known.table == table.name()) {
            return Ok(known);
        }
        let (all, spec) = (AllRows::of(device, table)?, table.spec());
        let row_bytes = spec.row_bytes()?;
        let most = usize::try_from(share.bytes).unwrap_or(usize::MAX) / row_bytes.max(1);
        let most = most.min(spec.rows as usize).min(u32::MAX as usize);
        state.is_filled = true;
        let bytes = device.room(most * row_bytes)?;
        state.tables.push(HotRows {
            table: table.name().to_owned(),
            rows: TableRows { bytes, format: spec.format, width: spec.width },
            all,
            places: CacheSlots::new(most),
            hits: 0,
            misses: 0,
            planned: share.hit_share,
        });
        Ok(state.tables.len() - 1)
    }

    /// Returns true if no table has a cache.
    pub fn is_empty(&self) -> bool {
        self.lock().tables.is_empty()
    }

    /// Waits until no other batch uses the caches.
    pub fn turn(&self) -> HotTurn<'_> {
        let mut state = self.lock();
        if !std::mem::take(&mut state.is_filled) {
            for table in &mut state.tables {
                table.places = CacheSlots::new(table.places.most());
            }
        }
        HotTurn { state }
    }

    /// Returns the statistics of each table.
    pub fn counters(&self) -> Vec<HotCounters> {
        let counters = |table: &HotRows| {
            let cache = CacheCounters { hits: table.hits, misses: table.misses, ..table.places.counters() };
            HotCounters { table: table.table.clone(), cache, planned: table.planned }
        };
        self.lock().tables.iter().map(counters).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HotState> {
        // Continues after a panic of another thread, because `is_filled` records that a batch did not finish.
        locked(&self.state)
    }
}

impl HotTurn<'_> {
    /// Releases the cache after the batch's work is done.
    pub fn end(mut self) {
        self.state.is_filled = true;
    }

    /// Pools bags of rows of the table with index `table`.
    ///
    /// # Errors
    /// `Internal` if the table or a row does not exist, or a launch fails; `Overloaded` if the device has not enough memory.
    pub fn pool(&mut self, device: &Device, table: usize, mut bags: HostBags<'_>, to: &SumsTo<'_>) -> Result<()> {
        let missing = || Error::internal("the table has no cache slots in device memory");
        let HotRows { rows, all, places, hits, misses, .. } = self.state.tables.get_mut(table).ok_or_else(missing)?;
        let row_bytes = rows.format.row_bytes(rows.width)?;
        let mut staged = Staged::default();
        for id in bags.ids.iter_mut().filter(|id| **id >= 0) {
            *id = staged.place(places, *id);
        }
        *misses += staged.index.len() as u64;
        *hits += (bags.ids.iter().filter(|id| **id >= 0).count() - staged.index.len()) as u64;
        let bytes = all.some(device, &staged.rows, row_bytes)?;
        bags.on(device, |bags| pool_staged(device, (rows, Some(&bytes)), bags, to))?;
        staged.fill(device, &bytes, rows)
    }
}

/// Bags of ids in host memory.
#[derive(Debug)]
pub struct HostBags<'a> {
    /// Row indices in the complete table; negative indices add nothing.
    pub ids: Vec<i64>,
    /// Offsets of the bags in `ids`, `[bags + 1]`, nondecreasing from 0.
    pub offsets: &'a [u32],
    /// One weight per id; `None` means 1.
    pub weights: Option<&'a [f32]>,
    /// True if each sum is divided by the length of its bag.
    pub is_mean: bool,
}

impl HostBags<'_> {
    /// Copies the bags to a device and passes them to `pool`.
    ///
    /// # Errors
    /// `Overloaded` if the device has not enough memory; errors of `pool`.
    pub fn on(&self, device: &Device, pool: impl FnOnce(&IdBags<'_>) -> Result<()>) -> Result<()> {
        let (ids, offsets) = (device.copy(&self.ids)?, device.copy(self.offsets)?);
        let weights = self.weights.map(|weights| device.copy(weights)).transpose()?;
        pool(&IdBags { ids: &ids, offsets: &offsets, weights: weights.as_ref(), is_mean: self.is_mean })
    }
}

impl AllRows {
    fn of(device: &Device, table: &Table) -> Result<Self> {
        let bytes = whole_bytes(table)?;
        Ok(match device.register(bytes.clone()) {
            Ok(registered) => AllRows::Registered(registered),
            Err(reason) => {
                let table = table.name();
                tracing::warn!(table, %reason, "host memory registration failed: the host gathers rows that miss the device cache");
                AllRows::Plain(bytes.clone())
            }
        })
    }

    /// Returns some of the rows, contiguous on the device.
    fn some(&self, device: &Device, rows: &[i64], row_bytes: usize) -> Result<Array<u8>> {
        match self {
            AllRows::Registered(bytes) => fetch_rows(device, bytes, rows, row_bytes),
            AllRows::Plain(bytes) => {
                let row = |row: &i64| &bytes[*row as usize * row_bytes..][..row_bytes];
                device.copy(&rows.iter().map(row).collect::<Vec<_>>().concat())
            }
        }
    }
}

impl Staged {
    /// Returns the index that the kernel uses for a row: its slot, or its index among the missing rows.
    fn place(&mut self, places: &mut CacheSlots, row: i64) -> i64 {
        let resident = places.most() as i64;
        if let Some(&index) = self.index.get(&row) {
            return resident + index as i64;
        }
        if let Some(place) = places.find(row as u64) {
            return i64::from(place);
        }
        let index = self.index.len();
        self.index.insert(row, index);
        self.rows.push(row);
        if let Some(place) = places.insert(row as u64) {
            self.taken.insert(place, index as u32);
        }
        resident + index as i64
    }

    /// Copies each row that got a slot into its slot.
    fn fill(&self, device: &Device, bytes: &Array<u8>, rows: &TableRows) -> Result<()> {
        if self.taken.is_empty() {
            return Ok(());
        }
        let (places, taken): (Vec<u32>, Vec<u32>) = self.taken.iter().map(|(&place, &taken)| (place, taken)).unzip();
        let row_bytes = rows.format.row_bytes(rows.width)?;
        scatter_rows(device, bytes, (&device.copy(&taken)?, &device.copy(&places)?), (&rows.bytes, row_bytes))
    }
}
