//! What one request sees: a snapshot at one position of its updates.
//!
//! Everything that a pass reads of items goes through here, so that a pass does not know where an item lies: today all lie in
//! the main snapshot, whose position is 0. Filters are planned here too, and an equal filter of requests that are under way at
//! the same time is planned once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

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
        View { main, plans: Mutex::default() }
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

    fn plans(&self) -> std::sync::MutexGuard<'_, Plans> {
        // A panic under the lock leaves at most a plan less.
        self.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
