//! Checks updates against the item columns that the reranker reads: an item whose task scores are not finite would be omitted
//! from every answer, and the model could not be published any more.

use super::update::{Put, Update};
use crate::view::View;
use sterling_core::error::Error;
use sterling_core::items::{GivenItem, InvalidItem};
use sterling_core::units::ItemId;
use sterling_index::columns::Value;
use sterling_snapshot::Snapshot;
use sterling_snapshot::sandbox::{ColumnCheck, InvalidNumber};

/// Item columns that the reranker of a snapshot reads.
pub(super) struct ReadColumns<'a> {
    main: &'a Snapshot,
    check: &'a ColumnCheck,
    /// Indexes of the columns in the snapshot.
    columns: Vec<usize>,
}

/// Reason why the reranker cannot score an item.
pub(super) struct Unscorable {
    column: Option<String>,
    reason: String,
}

impl Unscorable {
    /// Converts the reason to the error that rejects the update.
    pub(super) fn into_error(self) -> Error {
        match self.column {
            Some(column) => Error::invalid(format!("attribute `{column}`: {}", self.reason)),
            None => Error::invalid(self.reason),
        }
    }
}

impl<'a> ReadColumns<'a> {
    /// Returns the columns that the reranker of a snapshot reads; `None` if it reads none.
    pub(super) fn of(main: &'a Snapshot) -> Option<Self> {
        let check = main.column_check.as_ref()?;
        let columns = check.columns().iter().map(|name| main.columns.number(name).ok()).collect::<Option<_>>()?;
        Some(ReadColumns { main, check, columns })
    }

    /// Returns whether the reranker reads a column.
    pub(super) fn has(&self, name: &str) -> bool {
        self.check.columns().iter().any(|column| column == name)
    }

    /// Returns the numeric columns of an item as the reranker reads them; `value` returns the item's value in a column of the
    /// snapshot.
    pub(super) fn numbers(&self, value: impl Fn(usize) -> Value) -> Vec<f32> {
        self.columns.iter().map(|&column| value(column).number()).collect()
    }

    /// Returns the items, by their index in `items`, that the reranker cannot score.
    pub(super) fn check(&self, items: Vec<Vec<f32>>) -> Vec<(usize, Unscorable)> {
        let unscorable = |InvalidNumber { item, column }: InvalidNumber| {
            let all = || self.check.columns().join("`, `");
            let file = self.main.package.overarch.as_ref().map_or("overarch", |overarch| overarch.graph().0);
            let (column, reason) = match column {
                Some(column) => {
                    let number = items[item][column];
                    let why =
                        format!("{number} (a missing value counts as 0) makes `logits` of {file} NaN or infinite");
                    (Some(self.check.columns()[column].clone()), why)
                }
                None => (None, format!("the numbers of columns `{}` make `logits` of {file} NaN or infinite", all())),
            };
            (item, Unscorable { column, reason: format!("{reason}, expected a number for which `logits` is finite") })
        };
        self.check.invalid(&self.main.package, &items).into_iter().map(unscorable).collect()
    }
}

/// Returns the updates, by their index, after which the reranker of a view's model could not score the item. Changes of items
/// that the view does not show are not checked; such changes have no effect if they fail when they are applied.
pub fn unscorable<'u>(view: &View, updates: impl Iterator<Item = &'u Update>) -> Vec<(usize, InvalidItem)> {
    let Some(columns) = ReadColumns::of(view.main()) else { return Vec::new() };
    let (mut places, mut numbers) = (Vec::new(), Vec::new());
    for (place, update) in updates.enumerate() {
        let (id, attributes, slot) = match update {
            Update::Put(Put { id, attributes, .. }) => (*id, attributes, None),
            Update::Set { id, attributes } if attributes.iter().any(|(name, _)| columns.has(name)) => {
                let Some(slot) = view.slot(ItemId(*id)) else { continue };
                (*id, attributes, Some(slot))
            }
            Update::Set { .. } | Update::Delete { .. } | Update::Call { .. } | Update::AnsweredCall { .. } => continue,
        };
        let value = |column: usize| {
            let name = view.main().columns.at(column).name();
            let changed = attributes.iter().find(|(given, _)| given == name);
            match (changed, slot) {
                (Some((_, attribute)), _) => attribute.into(),
                (None, Some(slot)) => view.value_of(column, slot),
                (None, None) => Value::Missing,
            }
        };
        numbers.push(columns.numbers(value));
        places.push((place, id, slot.is_none()));
    }
    let invalid = |(n, Unscorable { column, reason }): (usize, Unscorable)| {
        let (place, id, is_whole) = places[n];
        let field = GivenItem::field(is_whole, column.as_deref().unwrap_or_default());
        (place, InvalidItem { id: Some(id), field, reason })
    };
    columns.check(numbers).into_iter().map(invalid).collect()
}
