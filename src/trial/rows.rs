//! What a trial runs: towers over rows of features, the reranker over candidates: one, an even and an
//! odd number, and more than a run takes.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::columns::Columns;
use crate::dense::InputRows;
use crate::embedding::Lookup;
use crate::error::{Error, Kind, Result};
use crate::ivf;
use crate::limits::{CANDIDATES_MAX, COMPONENT_MAX};
use crate::model::{Package, UserInput};
use crate::request::{Features, Values};
use crate::tensor::Tensor;
use crate::tower::{
    self, Candidates, FeatureKind, FeatureRow, FeatureSpec, OverArch, Pooled, RUN_CANDIDATES, RUN_ROWS, Readable,
    Threads, Tower, TowerOutput,
};
use crate::units::Slot;

/// Rows that towers are tried with.
const ROWS: [usize; 4] = [1, 2, 3, RUN_ROWS + 1];
/// Candidates that the reranker is tried with.
const CANDIDATES: [usize; 4] = [1, 2, 57, RUN_CANDIDATES + 1];
/// How long the reranker goes on over items as they are published, once it has seen more than a run takes.
const ITEMS_TIME: Duration = Duration::from_secs(2);
/// How far a row may lie from what it is alone, of its largest number: sums in another order, no more.
const TOLERANCE: f32 = 1e-2;

/// Runs the graphs of the package in `folder`; `told` hears what comes next.
pub(super) fn run(folder: &Path, told: &dyn Fn(&str)) -> Result<()> {
    let package = Package::open_told(folder, &|file| told(&format!("{file}: read")))?;
    let mut bench = Bench { package: &package, threads: Threads::new(1), scratch: tower::Scratch::default(), told };
    for tower in package.user.iter().chain(&package.item) {
        bench.tower(tower).map_err(|e| wrong(e.within(tower.graph().0)))?;
    }
    package.overarch.as_ref().map_or(Ok(()), |overarch| bench.overarch(overarch))
}

/// Scores items of a version that is about to be published: all of them, up to the most candidates that a request may have.
/// `rows` writes what the reranker reads of the items in some slots as rows.
///
/// # Errors
/// `Invalid` where the reranker fails or a logit is no finite number.
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
    let mut bench = Bench { package, threads: Threads::new(1), scratch: tower::Scratch::default(), told: &|_| () };
    let user = bench.user(&query.repeat(package.spec.query_count()))?;
    let given = Given { user: &user, count: slots.len(), numbers: &numbers };
    let rows = |given: InputRows<'_>| rows(&slots[given.rows.clone()], given);
    let is_finite = given.score(overarch, &rows, &bench.threads, &mut bench.scratch, Some(ITEMS_TIME));
    match is_finite.map_err(|e| wrong(e.within(format!("{}: {} items", overarch.graph().0, slots.len()))))? {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{}: output `logits` holds NaN or infinity for items as they are published, expected finite numbers",
            overarch.graph().0
        ))),
    }
}

/// What a graph does wrong is wrong with the package, whatever a server would call it.
fn wrong(error: Error) -> Error {
    match error.kind() {
        Kind::Internal => Error::invalid(error.to_string()),
        _ => error,
    }
}

struct Bench<'a> {
    package: &'a Package,
    threads: Threads,
    scratch: tower::Scratch,
    told: &'a dyn Fn(&str),
}

impl Bench<'_> {
    /// Rows of known and of unknown features, alone and together.
    fn tower(&mut self, tower: &Tower) -> Result<()> {
        let mut alone: Vec<Tensor> = Vec::new();
        for count in ROWS {
            (self.told)(&format!("{}: {count} rows", tower.graph().0));
            let rows = (0..count).map(|n| tower.read(self.features(tower.features(), n)));
            let rows: Vec<FeatureRow> = rows.collect::<Result<_>>()?;
            let made = self.run(tower, &rows).map_err(|e| e.within(format!("{count} rows")))?;
            for (n, (output, tensor)) in tower.outputs().iter().zip(&made).enumerate() {
                check_rows(output, tensor, count, alone.get(n))?;
            }
            if count == 1 {
                alone = made;
            }
        }
        Ok(())
    }

    fn run(&mut self, tower: &Tower, rows: &[FeatureRow]) -> Result<Vec<Tensor>> {
        let rows: Vec<&FeatureRow> = rows.iter().collect();
        let (pooled, _) = tower.lookup(&rows, &Lookup::default())?;
        let rows: Vec<(&FeatureRow, &Pooled)> = rows.into_iter().zip(&pooled).collect();
        tower.run(&rows, &self.threads, &mut self.scratch)
    }

    /// The features of row `n`: known ids, unknown categories, numbers between 0 and 1.
    fn features(&self, specs: &[FeatureSpec], n: usize) -> Features {
        let mut features = Features::new();
        if is_blank(n) {
            return features;
        }
        // Ids last: a field that feeds a category too then holds them, which serves both.
        let mut specs: Vec<(usize, &FeatureSpec)> = specs.iter().enumerate().collect();
        specs.sort_by_key(|(_, spec)| spec.kind == FeatureKind::Ids);
        for (place, spec) in specs {
            let seed = n * 31 + place * 7;
            let values = match spec.kind {
                FeatureKind::Ids => {
                    let rows = spec.table.as_deref().and_then(|name| self.package.table(name)).map_or(0, |t| t.rows());
                    let id = |k: usize| ((seed + 13 * k) as u64).checked_rem(rows).map(|id| id as i64);
                    Values::Integers((0..spec.max_ids.min(3)).filter_map(id).collect())
                }
                FeatureKind::Category => Values::Texts(vec!["?".into()]),
                FeatureKind::Dense => {
                    let width = spec.width.unwrap_or(0);
                    Values::Numbers((0..width).map(|k| 0.5 + fraction(seed + k) / 2.0).collect())
                }
            };
            features.insert(spec.source().into(), values);
        }
        features
    }

    /// What the reranker reads of a user: this query and, where it reads more, what the tower and the features say of one.
    fn user(&mut self, query: &[f32]) -> Result<Vec<Vec<f32>>> {
        let inputs = &self.package.user_inputs;
        let Some(tower) = self.package.user.as_ref().filter(|_| self.package.needs_features()) else {
            return Ok(inputs.iter().map(|_| query.to_vec()).collect());
        };
        let row = tower.read(self.features(tower.features(), 0))?;
        let (pooled, _) = tower.lookup(&[&row], &Lookup::default())?;
        let made = tower.run(&[(&row, &pooled[0])], &self.threads, &mut self.scratch)?;
        let mut made: Vec<Vec<f32>> = made.into_iter().map(Tensor::into_data).collect();
        let tensors = self.package.user_tensors(&row, &pooled[0], &mut made);
        let tensor = |(input, tensor): (&UserInput, Vec<f32>)| match input {
            UserInput::Query => made[0].clone(),
            UserInput::Output(_) | UserInput::Feature(_) => tensor,
        };
        Ok(inputs.iter().zip(tensors).map(tensor).collect())
    }

    /// Candidates of made-up numbers: whether the graph runs, not what it says of them.
    fn overarch(&mut self, overarch: &OverArch) -> Result<()> {
        let of_user = |readable: &Readable| (0..readable.count()).map(fraction).collect();
        let user: Vec<Vec<f32>> = overarch.user().iter().map(of_user).collect();
        for count in CANDIDATES {
            let file = overarch.graph().0;
            (self.told)(&format!("{file}: {count} candidates"));
            let numbers: Vec<Vec<f32>> = overarch.numbers().map(|_| vec![0.5; count]).collect();
            let row = |n: usize, row: &mut [f32]| {
                row.iter_mut().enumerate().for_each(|(place, x)| *x = fraction(n * 17 + place));
            };
            let rows = |given: InputRows<'_>| given.each(row);
            let given = Given { user: &user, count, numbers: &numbers };
            let scored = given.score(overarch, &rows, &self.threads, &mut self.scratch, None);
            scored.map_err(|e| wrong(e.within(format!("{file}: {count} candidates"))))?;
        }
        Ok(())
    }
}

/// Refuses an output of so many rows that holds numbers without a bound, or whose first row is another one than `alone`.
fn check_rows(output: &TowerOutput, made: &Tensor, count: usize, alone: Option<&Tensor>) -> Result<()> {
    let (name, width) = (&output.name, output.count());
    // Of a row without any features a model may have nothing to say.
    let told = made.data().chunks_exact(width.max(1)).enumerate().filter(|(n, _)| !is_blank(*n));
    for (n, vector) in told {
        if let Some(x) = vector.iter().find(|x| x.abs() > COMPONENT_MAX || x.is_nan()) {
            return Err(Error::invalid(format!(
                "output `{name}` holds {x} in row {} of {count}, expected numbers up to 2^56",
                n + 1
            )));
        }
    }
    let first = &made.data()[..width];
    let most = first.iter().fold(1e-6, |most: f32, x| most.max(x.abs()));
    let differs = |alone: &Tensor| alone.data().iter().zip(first).any(|(a, b)| (a - b).abs() > TOLERANCE * most);
    match alone.is_some_and(differs) {
        true => Err(Error::invalid(format!(
            "output `{name}` of a row is another one among {count} rows than alone, expected rows that do not mix: those of a \
             batch are of different users"
        ))),
        false => Ok(()),
    }
}

/// Candidates of one user, but for their rows.
struct Given<'a> {
    user: &'a [Vec<f32>],
    count: usize,
    numbers: &'a [Vec<f32>],
}

impl Given<'_> {
    /// Whether all logits are finite numbers. `enough`: how long to go on once more candidates were scored than a run takes.
    fn score(
        &self,
        overarch: &OverArch,
        rows: &dyn Fn(InputRows<'_>),
        threads: &Threads,
        scratch: &mut tower::Scratch,
        enough: Option<Duration>,
    ) -> Result<bool> {
        let user: Vec<&[f32]> = self.user.iter().map(Vec::as_slice).collect();
        let numbers: Vec<&[f32]> = self.numbers.iter().map(Vec::as_slice).collect();
        let candidates = Candidates { user: &user, count: self.count, rows, numbers: &numbers };
        let mut tasks = vec![0.0; overarch.tasks() * self.count];
        let started = Instant::now();
        let mut between = || match enough.is_some_and(|enough| started.elapsed() > enough) {
            true => Err(Error::deadline("enough was tried")),
            false => Ok(()),
        };
        overarch.try_out(&candidates, threads, scratch, &mut between, &mut tasks)
    }
}

/// Rows without features stand among the others.
fn is_blank(n: usize) -> bool {
    n % 3 == 1
}

/// Numbers between -1 and 1.
fn fraction(n: usize) -> f32 {
    ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0
}
