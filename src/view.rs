//! What one request sees: a snapshot at one position of its updates.
//!
//! Everything that a pass reads of items goes through here, so that a pass does not know where an item lies: today all lie in
//! the main snapshot, whose position is 0. Filters are planned here too, and an equal filter of requests that are under way at
//! the same time is planned once. Where a server is told to, a view keeps some of the queries that it was asked, to calibrate by.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::columns::Column;
use crate::error::Result;
use crate::filter::{self, Plan};
use crate::snapshot::Snapshot;
use crate::tower::OverArch;
use crate::units::{ItemId, Slot};
use crate::value::Program;

/// Plans that are remembered before those that no request holds any more are forgotten.
const PLANS_MIN: usize = 64;

/// A snapshot at one position.
#[derive(Debug)]
pub struct View {
    main: Arc<Snapshot>,
    plans: Mutex<Plans>,
    recorded: Recorded,
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
    /// What finds the eligible items.
    pub plan: Plan,
    /// The filter in canonical form.
    pub canonical: String,
}

#[derive(Debug, Default)]
struct Plans {
    by_canonical: HashMap<String, Weak<Planned>>,
    /// How many there may be before the forgotten ones are removed.
    room: usize,
}

impl View {
    /// The view of a snapshot without updates.
    pub fn new(main: Arc<Snapshot>) -> Self {
        View { main, plans: Mutex::default(), recorded: Recorded::default() }
    }

    /// The same view, keeping up to so many of the query embeddings that it will be asked.
    #[must_use]
    pub fn recording(self, most: usize) -> Self {
        View { recorded: Recorded { most: most as u64, ..Recorded::default() }, ..self }
    }

    /// Takes note of a query embedding `[D]`, where the view records some.
    pub fn record(&self, query: &[f32]) {
        let Recorded { most, asked, chance, queries } = &self.recorded;
        if *most == 0 {
            return;
        }
        let asked = asked.fetch_add(1, Ordering::Relaxed);
        let place = if asked < *most { asked } else { chance.hash_one(asked) % (asked + 1) };
        if place < *most {
            let mut queries = unpoisoned(queries);
            match queries.get_mut(place as usize) {
                Some(kept) => kept.copy_from_slice(query),
                None => queries.push(query.to_vec()),
            }
        }
    }

    /// The query embeddings that were recorded, or `None` where the view records none.
    pub fn recorded(&self) -> Option<Vec<Vec<f32>>> {
        (self.recorded.most > 0).then(|| unpoisoned(&self.recorded.queries).clone())
    }

    /// The main snapshot.
    pub fn main(&self) -> &Arc<Snapshot> {
        &self.main
    }

    /// The position of the updates that are seen.
    pub fn position(&self) -> u64 {
        0
    }

    /// Number of items, N.
    pub fn items(&self) -> usize {
        self.main.index.items()
    }

    /// Share of the model's items that a search of this view looks at: all of them, where nothing of the model is left out.
    pub fn coverage(&self) -> f64 {
        match self.main.manifest.items {
            0 => 1.0,
            items => self.items() as f64 / items as f64,
        }
    }

    /// Width of queries and items, D.
    pub fn dimension(&self) -> usize {
        self.main.index.dimension()
    }

    /// Where an item lies, or `None` where the view does not hold it.
    pub fn slot(&self, id: ItemId) -> Option<Slot> {
        self.main.ids.slot(id)
    }

    /// The item in a slot that holds one.
    pub fn id(&self, slot: Slot) -> ItemId {
        self.main.ids.item(slot)
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
        let plan = Plan::new(&parsed, &self.main.columns, &self.main.filter)?;
        let planned = Arc::new(Planned { plan, canonical: canonical.clone() });
        let mut plans = self.plans();
        if plans.by_canonical.len() >= plans.room.max(PLANS_MIN) {
            plans.by_canonical.retain(|_, planned| planned.strong_count() > 0);
            plans.room = plans.by_canonical.len() * 2;
        }
        plans.by_canonical.insert(canonical, Arc::downgrade(&planned));
        Ok(planned)
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        unpoisoned(&self.plans)
    }
}

/// What lies behind a lock: a panic under it leaves at most a plan or a query less.
fn unpoisoned<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
