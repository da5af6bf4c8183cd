//! Training state as one file of tensors: rows and optimizer state of tables, weights and their moments, item frequencies.
//!
//! | tensor | holds |
//! |---|---|
//! | `table.NAME.rows` `[n]` | row numbers, ascending; missing if all rows are in the file |
//! | `table.NAME.values` `[n, D]`, `table.NAME.state` `[n, S]` | f32 values, and the optimizer's state of each row |
//! | `graph.NAME.PARAMETER`, `graph.NAME.PARAMETER.moment.N` | weights of `user`, `item` or `reranker` if it learns, and moments of its optimizer |
//! | `items.ids` `items.counts` `items.gaps` `items.last` `[N]` | how often each item was chosen, its mean gap and last event, in events |
//! | `managed.NAME`, `managed.NAME.*` | managed ids of a table (`managed`) |
//! | `about` | steps, as JSON |

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalogue::Catalogue;
use crate::frequency::Frequency;
use crate::managed;
use crate::model::Model;
use crate::row_set::RowSet;
use crate::weights::Weights;
use sterling_core::error::{Error, Result};
use sterling_embedding::train::{MasterRows, MasterTable};
use sterling_graph::dense::train::{DenseOptimizer, Parameter};
use sterling_storage::files::{Checksum, TensorFile, TensorWriter, Tensors};

/// State of a run that belongs to no table or graph of the model.
#[derive(Debug)]
pub(crate) struct RunState {
    pub(crate) frequency: Frequency,
    /// Number of events per item, by item index.
    pub(crate) counts: Vec<u64>,
}

/// Values that are not tensors.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    table_steps: u64,
    counted_events: u64,
    dense_steps: Vec<(String, u64)>,
}

/// Largest number of steps or events of a run, so that counters never overflow.
const COUNT_MAX: u64 = 1 << 53;

impl About {
    fn check(&self) -> Result<()> {
        let steps = self.dense_steps.iter().map(|(_, steps)| *steps);
        match steps.chain([self.table_steps, self.counted_events]).find(|count| *count > COUNT_MAX) {
            Some(count) => {
                Err(Error::corrupt(format!("tensor `about`: got a count of {count}, expected at most {COUNT_MAX}")))
            }
            None => Ok(()),
        }
    }
}

impl RunState {
    /// Creates the state of a run that has seen no event.
    pub(crate) fn new(items: usize, batch: usize) -> Self {
        RunState { frequency: Frequency::new(items, batch), counts: vec![0; items] }
    }
}

/// Part of the state that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Everything: a checkpoint that needs no other checkpoint.
    All,
    /// All state, but only rows that changed since the last checkpoint with all rows (Eisenman et al. 2022, *Check-N-Run*, NSDI).
    Touched,
    /// Optimizer state and frequencies: the package has the rows and weights.
    Optimizers,
}

/// Rows that are copied at once.
const ROWS_TOGETHER: usize = 4096;

/// Rows of one table in a state file.
struct Stored<'a> {
    table: &'a MasterTable,
    /// Row indices; none means all rows of the table.
    rows: Option<Vec<u32>>,
}

impl Stored<'_> {
    fn count(&self) -> usize {
        self.rows.as_ref().map_or(self.table.spec().rows as usize, Vec::len)
    }

    /// Writes values and state of the rows, a few at a time.
    fn fill(&self, content: Content, places: &mut TensorWriter<'_>) -> Result<()> {
        let (name, width, count) = (&self.table.spec().name, self.table.spec().width, self.count());
        for first in (0..count).step_by(ROWS_TOGETHER) {
            let range = first..count.min(first + ROWS_TOGETHER);
            let MasterRows { values, state, .. } = match &self.rows {
                Some(rows) => self.table.export(rows[range].iter().copied())?,
                None => self.table.export(range.start as u32..range.end as u32)?,
            };
            if content != Content::Optimizers {
                places.put(&format!("table.{name}.values"), first * width, &values)?;
            }
            places.put(&format!("table.{name}.state"), first * self.table.state_width(), &state)?;
        }
        Ok(())
    }
}

/// Writes the state of a model and a run.
///
/// # Errors
/// `NoSpace` or `Io` with the file.
pub(crate) fn write(
    path: &Path,
    content: Content,
    model: &Model,
    carried: &RunState,
    catalogue: &Catalogue,
) -> Result<Checksum> {
    let mut file = TensorFile::new();
    let mut stored = Vec::new();
    for (table, touched) in model.learning_tables() {
        let rows = (content == Content::Touched).then(|| touched.rows());
        let (name, of) = (&table.spec().name, Stored { table, rows });
        if let Some(rows) = &of.rows {
            file.add_owned(format!("table.{name}.rows"), &[rows.len()], rows.clone())?;
        }
        if content != Content::Optimizers {
            file.reserve::<f32>(format!("table.{name}.values"), &[of.count(), table.spec().width])?;
        }
        file.reserve::<f32>(format!("table.{name}.state"), &[of.count(), table.state_width()])?;
        managed::write(&mut file, table)?;
        stored.push(of);
    }
    let mut dense_steps = Vec::new();
    for weights in model.weights() {
        let Some(optimizer) = &weights.optimizer else { continue };
        for Parameter { name, shape, range } in weights.parameters() {
            let tensor = format!("graph.{}.{name}", weights.name());
            if content != Content::Optimizers {
                file.add(&tensor, shape, &weights.numbers[range.clone()])?;
            }
            for (n, moment) in optimizer.moments().iter().enumerate() {
                file.add(format!("{tensor}.moment.{n}"), shape, &moment[range.clone()])?;
            }
        }
        dense_steps.push((weights.name().to_owned(), optimizer.steps()));
    }
    let items = catalogue.len();
    let RunState { frequency, counts } = carried;
    file.add("items.ids", &[items], catalogue.ids())?;
    file.add("items.counts", &[items], counts)?;
    file.add("items.gaps", &[items], frequency.gaps())?;
    file.add("items.last", &[items], frequency.last())?;
    let about = About { table_steps: model.tables.steps(), counted_events: frequency.events(), dense_steps };
    file.add_json("about", &about)?;
    file.write_filled(path, |places| stored.iter().try_for_each(|of| of.fill(content, places)))
}

/// Part of the state that is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// Everything: the file is a checkpoint.
    All,
    /// Optimizer state and frequencies only: the package that is trained further has the rows and weights. Tables and graphs may
    /// lack state if PyTorch trained the package (`sterling.write_optimizer`); their state starts at zero.
    OptimizersOnly,
}

/// Restores the state of a model and a run.
///
/// # Errors
/// `NotFound` or `Io`; `Corrupt` if tensors are missing, or their shapes do not fit this model.
pub(crate) fn read(
    path: &Path,
    take: Take,
    model: &mut Model,
    carried: &mut RunState,
    catalogue: &Catalogue,
) -> Result<()> {
    let tensors = Tensors::read(path)?;
    let place = |e: Error| e.within(path.display());
    let about: About = tensors.json("about").map_err(place)?;
    about.check().map_err(place)?;
    for (table, touched) in model.learning_tables_mut() {
        restore_table(&tensors, take, table, touched).map_err(place)?;
        managed::read(&tensors, take == Take::All, table).map_err(place)?;
    }
    model.tables.set_steps(about.table_steps);
    for weights in model.weights_mut() {
        restore_weights(&tensors, take, &about, weights).map_err(place)?;
    }
    match take == Take::OptimizersOnly && !tensors.has("items.ids") {
        true => Ok(()),
        false => restore_items(&tensors, &about, catalogue, carried).map_err(place),
    }
}

fn restore_table(tensors: &Tensors, take: Take, table: &mut MasterTable, touched: &mut RowSet) -> Result<()> {
    let name = table.spec().name.clone();
    if take == Take::OptimizersOnly && !tensors.has(&format!("table.{name}.state")) {
        return Ok(());
    }
    let (width, state_width) = (table.spec().width, table.state_width());
    let some = format!("table.{name}.rows");
    let rows = tensors.has(&some).then(|| tensors.get::<u32>(&some, 1)).transpose()?.map(|(rows, _)| rows);
    let all = table.spec().rows as usize;
    let count = match &rows {
        Some(rows) => rows.len(),
        // Rows that were added after this state was written have no state yet.
        None if take == Take::OptimizersOnly && table.has_ids() => {
            tensors.get::<f32>(&format!("table.{name}.state"), 2)?.1[0].min(all)
        }
        None => all,
    };
    let numbers = |kind: &str, width: usize| {
        let tensor = format!("table.{name}.{kind}");
        let (numbers, shape) = tensors.get::<f32>(&tensor, 2)?;
        match shape == [count, width] {
            true => Ok(numbers),
            false => {
                Err(Error::corrupt(format!("tensor `{tensor}`: got shape {shape:?}, expected [{count}, {width}]")))
            }
        }
    };
    let values = (take == Take::All).then(|| numbers("values", width)).transpose()?;
    let state = numbers("state", state_width)?;
    for first in (0..count).step_by(ROWS_TOGETHER) {
        let range = first..count.min(first + ROWS_TOGETHER);
        let row = |n: usize| rows.as_ref().map_or(n as u32, |rows| rows[n]);
        // The rows of other hosts are restored on those hosts.
        let own: Vec<usize> = range.filter(|n| table.owns(row(*n))).collect();
        let of_range: Vec<u32> = own.iter().map(|n| row(*n)).collect();
        let cut = |all: &[f32], width: usize| own.iter().flat_map(|n| &all[n * width..][..width]).copied().collect();
        let values = match &values {
            Some(values) => cut(values, width),
            None => table.export(of_range.iter().copied())?.values,
        };
        let state = cut(&state, state_width);
        table.import(&MasterRows { rows: of_range, values, state })?;
    }
    if let Some(rows) = &rows {
        rows.iter().for_each(|row| touched.insert(*row));
    }
    Ok(())
}

fn restore_weights(tensors: &Tensors, take: Take, about: &About, weights: &mut Weights) -> Result<()> {
    let name = weights.name();
    let Some(optimizer) = &weights.optimizer else { return Ok(()) };
    let steps = about.dense_steps.iter().find(|(other, _)| other == name).map(|(_, steps)| *steps);
    let steps = match (steps, take) {
        (Some(steps), _) => steps,
        // The state is of a run that did not train this graph.
        (None, Take::OptimizersOnly) => return Ok(()),
        (None, Take::All) => {
            return Err(Error::corrupt(format!(
                "tensor `about`: no number of steps for graph `{name}`, expected one per trained graph"
            )));
        }
    };
    let mut moments = optimizer.moments().to_vec();
    let mut numbers = weights.numbers.clone();
    for Parameter { name: parameter, shape, range } in weights.parameters() {
        let own = format!("graph.{name}.{parameter}");
        let copy = |tensor: &str, to: &mut [f32]| {
            let (from, found) = tensors.get::<f32>(tensor, shape.len())?;
            if found != *shape {
                let what = format!("tensor `{tensor}`: got shape {found:?}, expected {shape:?}");
                return Err(Error::corrupt(what));
            }
            to.copy_from_slice(&from);
            Ok(())
        };
        for (n, moment) in moments.iter_mut().enumerate() {
            copy(&format!("{own}.moment.{n}"), &mut moment[range.clone()])?;
        }
        if take == Take::All {
            copy(&own, &mut numbers[range.clone()])?;
        }
    }
    weights.optimizer = Some(DenseOptimizer::restore(*optimizer.spec(), numbers.len(), steps, moments)?);
    weights.numbers = numbers;
    Ok(())
}

/// Restores the frequencies of items that are still in the catalogue, and drops the frequencies of other items.
fn restore_items(tensors: &Tensors, about: &About, catalogue: &Catalogue, carried: &mut RunState) -> Result<()> {
    let (ids, _) = tensors.get::<i64>("items.ids", 1)?;
    let counts = tensors.vector::<u64>("items.counts", ids.len())?;
    let gaps = tensors.vector::<f32>("items.gaps", ids.len())?;
    let last = tensors.vector::<u64>("items.last", ids.len())?;
    carried.frequency.set_events(about.counted_events);
    for (n, place) in ids.iter().enumerate().filter_map(|(n, id)| Some((n, catalogue.place(*id)?))) {
        carried.frequency.restore(place, gaps[n], last[n])?;
        carried.counts[place as usize] = counts[n];
    }
    Ok(())
}
