//! Training state as one file of tensors: rows and optimizer state of tables, weights and their moments, item frequencies.
//!
//! | tensor | holds |
//! |---|---|
//! | `table.NAME.values` `[rows, D]`, `table.NAME.state` `[rows, S]` | masters, and the optimizer's state of each row |
//! | `tower.SIDE.parameters`, `tower.SIDE.moment.N` | weights of a tower that learns, and moments of its optimizer |
//! | `items.ids` `items.counts` `items.gaps` `items.last` `[N]` | how often each item was chosen, its mean gap and last event, in events |
//! | `about` | steps, as JSON |

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalogue::Catalogue;
use crate::frequency::Frequency;
use crate::model::Model;
use crate::side::Side;
use sterling_core::error::{Error, Result};
use sterling_embedding::train::{MasterRows, MasterTable};
use sterling_graph::dense::train::DenseOptimizer;
use sterling_storage::files::{Checksum, TensorFile, Tensors};

/// State that a run carries on besides the model.
#[derive(Debug)]
pub(crate) struct Carried {
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

impl Carried {
    /// Creates the state of a run that has seen no event.
    pub(crate) fn new(items: usize, batch: usize) -> Self {
        Carried { frequency: Frequency::new(items, batch), counts: vec![0; items] }
    }
}

fn sides(model: &Model) -> impl Iterator<Item = &Side> {
    std::iter::once(&model.user).chain(&model.item)
}

/// Writes the state of a model and a run.
///
/// # Errors
/// `NoSpace` or `Io` with the file.
pub(crate) fn write(path: &Path, model: &Model, carried: &Carried, catalogue: &Catalogue) -> Result<Checksum> {
    let mut file = TensorFile::new();
    for table in model.tables.tables() {
        let (name, rows) = (&table.spec().name, table.spec().rows as usize);
        let MasterRows { values, state, .. } = table.export(0..table.spec().rows as u32)?;
        file.add_owned(format!("table.{name}.values"), &[rows, table.spec().width], values)?;
        file.add_owned(format!("table.{name}.state"), &[rows, table.state_width()], state)?;
    }
    let mut dense_steps = Vec::new();
    for side in sides(model) {
        let Some(optimizer) = &side.optimizer else { continue };
        let (name, count) = (side.name(), side.parameters.len());
        file.add(format!("tower.{name}.parameters"), &[count], &side.parameters)?;
        for (n, moment) in optimizer.moments().iter().enumerate() {
            file.add(format!("tower.{name}.moment.{n}"), &[count], moment)?;
        }
        dense_steps.push((name.to_owned(), optimizer.steps()));
    }
    let items = catalogue.len();
    let Carried { frequency, counts } = carried;
    file.add("items.ids", &[items], catalogue.ids())?;
    file.add("items.counts", &[items], counts)?;
    file.add("items.gaps", &[items], frequency.gaps())?;
    file.add("items.last", &[items], frequency.last())?;
    let about = About { table_steps: model.tables.steps(), counted_events: frequency.events(), dense_steps };
    file.add_json("about", &about)?;
    file.write(path)
}

/// Which part of a state is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// Everything: for a checkpoint.
    All,
    /// Optimizer state and frequencies only: the package that is trained on has the rows and weights.
    OptimizersOnly,
}

/// Restores the state of a model and a run.
///
/// # Errors
/// `NotFound` or `Io`; `Corrupt` if tensors are missing, or their shapes are not those of this model.
pub(crate) fn read(
    path: &Path,
    take: Take,
    model: &mut Model,
    carried: &mut Carried,
    catalogue: &Catalogue,
) -> Result<()> {
    let tensors = Tensors::read(path)?;
    let place = |e: Error| e.within(path.display());
    let about: About = tensors.json("about").map_err(place)?;
    for table in model.tables.tables_mut() {
        restore_table(&tensors, take, table).map_err(place)?;
    }
    model.tables.set_steps(about.table_steps);
    for side in std::iter::once(&mut model.user).chain(&mut model.item) {
        restore_side(&tensors, take, &about, side).map_err(place)?;
    }
    restore_items(&tensors, &about, catalogue, carried).map_err(place)
}

fn restore_table(tensors: &Tensors, take: Take, table: &mut MasterTable) -> Result<()> {
    let name = table.spec().name.clone();
    let (rows, width, state_width) = (table.spec().rows as usize, table.spec().width, table.state_width());
    let numbers = |kind: &str, width: usize| {
        let tensor = format!("table.{name}.{kind}");
        let (numbers, shape) = tensors.get::<f32>(&tensor, 2)?;
        match shape == [rows, width] {
            true => Ok(numbers.to_vec()),
            false => Err(Error::corrupt(format!("tensor `{tensor}`: got shape {shape:?}, expected [{rows}, {width}]"))),
        }
    };
    let values = match take {
        Take::All => numbers("values", width)?,
        Take::OptimizersOnly => table.values()?,
    };
    table.import(&MasterRows { rows: (0..rows as u32).collect(), values, state: numbers("state", state_width)? })
}

fn restore_side(tensors: &Tensors, take: Take, about: &About, side: &mut Side) -> Result<()> {
    let (name, count) = (side.name(), side.parameters.len());
    let Some(optimizer) = &side.optimizer else { return Ok(()) };
    let steps = about.dense_steps.iter().find(|(other, _)| other == name).map(|(_, steps)| *steps);
    let steps = steps.ok_or_else(|| Error::corrupt(format!("no steps of tower `{name}`")))?;
    let numbers = |kind: &str| Ok(tensors.vector::<f32>(&format!("tower.{name}.{kind}"), count)?.to_vec());
    let moments = (0..optimizer.moments().len()).map(|n| numbers(&format!("moment.{n}"))).collect::<Result<_>>()?;
    side.optimizer = Some(DenseOptimizer::restore(*optimizer.spec(), count, steps, moments)?);
    if take == Take::All {
        side.parameters = numbers("parameters")?;
    }
    Ok(())
}

/// Restores the frequencies of items that are still in the catalogue, and drops those of others.
fn restore_items(tensors: &Tensors, about: &About, catalogue: &Catalogue, carried: &mut Carried) -> Result<()> {
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
