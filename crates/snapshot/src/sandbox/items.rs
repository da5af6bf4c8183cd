//! Validation of a reranker over the items of a version to be published.

use std::time::Duration;

use super::columns::ColumnCheck;
use super::rows::{Bench, UserCandidates, invalid};
use crate::model::Package;
use sterling_core::error::{Error, Result};
use sterling_core::limits::CANDIDATES_MAX;
use sterling_core::units::Slot;
use sterling_graph::dense::InputRows;
use sterling_graph::tower::OverArch;
use sterling_index::columns::Columns;
use sterling_index::ivf;

/// Time limit for scoring the items to be published; it applies once more items are scored than one run takes.
const ITEMS_TIME: Duration = Duration::from_secs(2);

/// Scores the items of a version to be published: all of them, up to the maximum number of candidates. `rows` writes the
/// reranker's input rows of the items in some slots.
///
/// # Errors
/// `Invalid` if the reranker fails or a logit is not finite.
pub fn score_items(
    package: &Package,
    index: &ivf::Index,
    columns: &Columns,
    rows: &dyn Fn(&[Slot], InputRows<'_>),
) -> Result<()> {
    let Some(overarch) = &package.overarch else { return Ok(()) };
    let slots: Vec<Slot> = index.filled_slots().take(CANDIDATES_MAX).collect();
    let numbers = overarch.numbers().map(|name| {
        if name == OverArch::SIMILARITY {
            return Ok(vec![0.5; slots.len()]);
        }
        let numbers = columns.column(name)?.numbers();
        let numbers = numbers.ok_or_else(|| Error::invalid(format!("column `{name}` has no numbers")))?;
        Ok(slots.iter().map(|slot| numbers[slot.index()]).collect())
    });
    let numbers: Vec<Vec<f32>> = numbers.collect::<Result<_>>()?;
    let mut query = vec![0.0; index.dimension()];
    if let Some(&slot) = slots.last() {
        index.row(slot, &mut query);
    }
    let mut bench = Bench::new(package, &|_| ());
    let user = bench.user(&query.repeat(package.spec.query_count()), 0)?;
    let rows = |given: InputRows<'_>| rows(&slots[given.rows.clone()], given);
    let given = UserCandidates { overarch, user: &user, count: slots.len(), numbers: &numbers, rows: &rows };
    let mut tasks = vec![0.0; overarch.tasks() * slots.len()];
    let is_finite = given.score(&bench.threads, &mut bench.scratch, Some(ITEMS_TIME), &mut tasks);
    match is_finite.map_err(|e| invalid(e.within(format!("{}: {} items", overarch.graph().0, slots.len()))))? {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{}: output `logits` holds NaN or infinity for items as they are published, expected finite numbers{}",
            overarch.graph().0,
            cause(package, columns, &slots)
        ))),
    }
}

/// Returns the end of the error message that names the first column whose number alone causes the invalid output; empty if there is
/// no such column.
fn cause(package: &Package, columns: &Columns, slots: &[Slot]) -> String {
    let Ok(Some(check)) = ColumnCheck::of(package) else { return String::new() };
    let numbers = |name: &String| columns.column(name).ok()?.numbers();
    let Some(numbers) = check.columns().iter().map(numbers).collect::<Option<Vec<Vec<f32>>>>() else {
        return String::new();
    };
    let items: Vec<Vec<f32>> =
        slots.iter().map(|slot| numbers.iter().map(|of_column| of_column[slot.index()]).collect()).collect();
    let named = check.invalid(package, &items).into_iter().find_map(|invalid| Some((invalid.item, invalid.column?)));
    named.map_or_else(String::new, |(item, column)| {
        let (name, number) = (&check.columns()[column], items[item][column]);
        format!("; column `{name}` is {number} (a missing value counts as 0) in the first invalid item")
    })
}
