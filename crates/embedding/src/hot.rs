//! The rows of a table that are asked for often, in the memory of a device; all of them lie in the memory of its host.
//!
//! The host keeps which row has which place ([`Places`]), since it turns ids into rows anyway. What a batch asks for and has no place
//! the device fetches from the memory of the host, each row once, and pools it from where it arrives; what is given a place is put
//! there behind that, in the order of the same stream. So a place may be given away in the batch that still reads it. Where the
//! host's memory cannot be registered, the host gathers these rows, and they travel with the ids.
//!
//! Batches take turns ([`HotTables::turn`]): a place that one stream fills must not be read by another before it is filled.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::whole_bytes;
use super::place::CardShare;
use super::table::Table;
use super::tiers::cache::CacheCounters;
use super::tiers::places::Places;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_cuda::ops::bags::{IdBags, SumsTo, TableRows, fetch_rows, place_rows, pool_staged};
use sterling_cuda::{Array, Device, HostBytes};
use sterling_kernels::buffer::Buffer;

/// The places of one table.
#[derive(Debug)]
struct HotRows {
    table: String,
    rows: TableRows,
    all: AllRows,
    places: Places,
    hits: u64,
    misses: u64,
    planned: f64,
}

/// All rows of a table, in the memory of the host.
#[derive(Debug)]
enum AllRows {
    /// The device fetches those that are missing.
    Registered(HostBytes),
    /// The host gathers them.
    Plain(Buffer<u8>),
}

/// How a table does of which only some rows are on a device.
#[derive(Clone, Debug)]
pub struct HotCounters {
    /// Its name.
    pub table: String,
    /// How often its rows were asked for.
    pub cache: CacheCounters,
    /// The share of them that were to be there by the plan.
    pub planned: f64,
}

/// The places of all tables of a device of which only some rows are there.
#[derive(Debug, Default)]
pub struct HotTables {
    state: Mutex<HotState>,
}

#[derive(Debug, Default)]
struct HotState {
    /// False from the beginning of a turn until what it asked for is done: places of one that failed may never have been filled.
    is_filled: bool,
    tables: Vec<HotRows>,
}

/// The turn of a batch.
#[derive(Debug)]
pub struct HotTurn<'a> {
    state: MutexGuard<'a, HotState>,
}

/// Rows of a batch that have no place.
#[derive(Default)]
struct Staged {
    rows: Vec<i64>,
    /// Which of them a row is.
    index: HashMap<i64, usize>,
    /// What goes to a place, the last one that is given it.
    taken: HashMap<u32, u32>,
}

impl HotTables {
    /// Room for as many rows of a table as so many bytes hold, all of them at most; nothing more for a table that has some. Returns
    /// the number by which the table is asked.
    ///
    /// # Errors
    /// `Unsupported` where the table is not whole in the memory of this host; `Overloaded` where the device has not enough memory.
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
            places: Places::new(most),
            hits: 0,
            misses: 0,
            planned: share.hit_share,
        });
        Ok(state.tables.len() - 1)
    }

    /// True where every table is whole on the device.
    pub fn is_empty(&self) -> bool {
        self.lock().tables.is_empty()
    }

    /// Waits until no other batch is at it.
    pub fn turn(&self) -> HotTurn<'_> {
        let mut state = self.lock();
        if !std::mem::take(&mut state.is_filled) {
            for table in &mut state.tables {
                table.places = Places::new(table.places.most());
            }
        }
        HotTurn { state }
    }

    /// How each table does.
    pub fn counters(&self) -> Vec<HotCounters> {
        let counters = |table: &HotRows| {
            let cache = CacheCounters { hits: table.hits, misses: table.misses, ..table.places.counters() };
            HotCounters { table: table.table.clone(), cache, planned: table.planned }
        };
        self.lock().tables.iter().map(counters).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HotState> {
        // Of whoever panicked `is_filled` tells.
        locked(&self.state)
    }
}

impl HotTurn<'_> {
    /// Everything that was asked for in this turn is done.
    pub fn end(mut self) {
        self.state.is_filled = true;
    }

    /// Pools bags of rows of a table, by its number.
    ///
    /// # Errors
    /// `Internal` for a table or a row that is not there, or where a launch fails; `Overloaded` where the device has not enough memory.
    pub fn pool(&mut self, device: &Device, table: usize, mut bags: HostBags<'_>, to: &SumsTo<'_>) -> Result<()> {
        let missing = || Error::internal("a table without places");
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

/// Bags of ids as the host has them.
#[derive(Debug)]
pub struct HostBags<'a> {
    /// Rows of the whole table, or negative ones, which add nothing.
    pub ids: Vec<i64>,
    /// `[bags + 1]`, rising from 0.
    pub offsets: &'a [u32],
    /// One an id; none means 1.
    pub weights: Option<&'a [f32]>,
    /// Divides each sum by the length of its bag.
    pub is_mean: bool,
}

impl HostBags<'_> {
    /// Copies them to a device for `pool`, which pools them there.
    ///
    /// # Errors
    /// `Overloaded` where the device has not enough memory; that of `pool`.
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
                tracing::warn!(table, %reason, "the host gathers rows that the device has not: their memory is not registered");
                AllRows::Plain(bytes.clone())
            }
        })
    }

    /// Some of them side by side on the device.
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
    /// What a kernel is told of a row: its place, or its number among those that are missing.
    fn place(&mut self, places: &mut Places, row: i64) -> i64 {
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

    /// Puts what is given a place there.
    fn fill(&self, device: &Device, bytes: &Array<u8>, rows: &TableRows) -> Result<()> {
        if self.taken.is_empty() {
            return Ok(());
        }
        let (places, taken): (Vec<u32>, Vec<u32>) = self.taken.iter().map(|(&place, &taken)| (place, taken)).unzip();
        let row_bytes = rows.format.row_bytes(rows.width)?;
        place_rows(device, bytes, (&device.copy(&taken)?, &device.copy(&places)?), (&rows.bytes, row_bytes))
    }
}
