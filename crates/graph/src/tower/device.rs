//! A tower on a device: looks up ids in tables in device memory, pooled or as sequences, and runs the compiled graph.

use std::sync::Arc;

use super::features::{Tower, gather_ids};
use super::row::{FeatureRow, FeatureValues};
use super::spec::FeatureSpec;
use super::tensors::{FeatureTensor, Holds, Pooled};
use crate::dense::{DeviceOutputs, DeviceProgram};
use sterling_core::error::{Error, Result};
use sterling_cuda::ops::bags::{SumsTo, TableRows, pool};
use sterling_cuda::ops::steps::{self, NumbersAt, PickDestination, RowsOf};
use sterling_cuda::{Array, Device};
use sterling_embedding::device::whole;
use sterling_embedding::{DeviceTables, HostBags, HotCounters, HotTables, HotTurn, Pooling, Table};

/// Tables and compiled graph of a tower in device memory.
#[derive(Debug)]
pub struct DeviceTower {
    program: DeviceProgram,
    sources: Vec<Source>,
    hot: HotTables,
}

/// Location of a table's rows.
#[derive(Debug)]
enum TableLocation {
    /// All rows are on the device.
    Whole(Arc<TableRows>),
    /// The device caches some rows; the value is the index among partly cached tables.
    Hot(usize),
}

/// A tensor that a tower computes from features.
#[derive(Debug)]
struct Source {
    /// Index among the tensors of the tower.
    tensor: usize,
    feature: usize,
    /// Table in which the feature's ids are looked up, if any.
    table: Option<TableLocation>,
    /// First column of the tensor in the graph's inputs, if the graph reads the tensor.
    column: Option<usize>,
    is_kept: bool,
}

/// Results of a tower on a device for rows of features.
#[derive(Debug)]
pub struct DeviceMade {
    /// Outputs of the graph, `[1, rows, stride]` each.
    pub outputs: DeviceOutputs,
    /// Retained tensors, `[rows, count]` each, by their index in the tower.
    pub tensors: Vec<(usize, Array<f32>)>,
}

impl DeviceTower {
    /// Copies a tower to a device. The tensors at `retained` are computed in addition to the tensors that the graph
    /// reads.
    ///
    /// # Errors
    /// `Unsupported` if the tower's graph is not a compiled program, or this host's memory does not hold a complete
    /// table; `Overloaded` if the device does not have enough memory.
    pub fn copy(device: &Device, tower: &Tower, retained: &[usize], tables: &mut DeviceTables) -> Result<Self> {
        let program =
            tower.program().ok_or_else(|| Error::unsupported("the tower's graph is not a compiled program"))?;
        DeviceProgram::check(program)?;
        let mut sources = Vec::new();
        let mut column = 0;
        for &tensor in tower.inputs() {
            sources.push(Source::new(tower, tensor, Some(column), retained.contains(&tensor))?);
            column += tower.tensors()[tensor].count();
        }
        for &tensor in retained.iter().filter(|tensor| !tower.inputs().contains(tensor)) {
            sources.push(Source::new(tower, tensor, None, true)?);
        }
        // Checked first, so that nothing is copied if the tower must stay on the host.
        let table_of = |source: &Source| tower.table(&tower.features()[source.feature]);
        for table in sources.iter().filter_map(table_of) {
            whole(table)?;
        }
        let mut hot = HotTables::default();
        for source in &mut sources {
            let is_looked_up = !matches!(tower.tensors()[source.tensor].holds(), Holds::Mask(_));
            if let Some(table) = table_of(source).filter(|_| is_looked_up) {
                source.table = Some(match table.planned_gpu_cache() {
                    Some(share) => TableLocation::Hot(hot.add(device, table, share)?),
                    None => TableLocation::Whole(tables.copy(device, table)?),
                });
            }
        }
        Ok(DeviceTower { program: DeviceProgram::copy(device, program)?, sources, hot })
    }

    /// Locks the partly cached tables for a batch; `None` if there are no such tables.
    pub fn turn(&self) -> Option<HotTurn<'_>> {
        (!self.hot.is_empty()).then(|| self.hot.turn())
    }

    /// Returns the hit-rate statistics of each partly cached table.
    pub fn counters(&self) -> Vec<HotCounters> {
        self.hot.counters()
    }

    /// Runs the tower over rows of features. `tower`, the original of this copy, has read the rows, and `turn` holds
    /// the lock of the partly cached tables for their batch.
    ///
    /// # Errors
    /// `Internal` if a launch fails; `Overloaded` if the device does not have enough memory.
    pub fn run(
        &self,
        device: &Device,
        tower: &Tower,
        rows: &[&FeatureRow],
        turn: &mut Option<HotTurn<'_>>,
    ) -> Result<DeviceMade> {
        let looking = PendingFeatures { device, tower, rows };
        let given = self.program.given(device, 1, rows.len())?;
        let counts = device.copy(&[rows.len() as u32])?;
        let of = RowsOf { counts: &counts, most: rows.len() };
        let mut tensors = Vec::new();
        for source in &self.sources {
            let tensor = &tower.tensors()[source.tensor];
            if let (Holds::Bag(_), Some(column), false) = (tensor.holds(), source.column, source.is_kept) {
                let to = SumsTo { data: &given.numbers, stride: given.stride, column };
                source.pool(&looking, turn, &to)?;
                continue;
            }
            let (numbers, count) = (source.numbers(&looking, turn, tensor)?, tensor.count());
            if let Some(first) = source.column {
                let placing = PickDestination { runs: 1, count, stride: 0, first };
                let out = NumbersAt::of(&given.numbers, 0, 0, given.stride);
                steps::pick(device, of, NumbersAt::of(&numbers, 0, 0, count), None, placing, out)?;
            }
            if source.is_kept {
                tensors.push((source.tensor, numbers));
            }
        }
        Ok(DeviceMade { outputs: self.program.run(device, of, &[], given)?, tensors })
    }
}

/// Rows of features, for which the device computes tensors.
struct PendingFeatures<'a> {
    device: &'a Device,
    tower: &'a Tower,
    rows: &'a [&'a FeatureRow],
}

/// Returns the row of an id; -1 if the id has no row, so that no uploaded index exceeds the table.
fn row_of(table: &Table, id: i64) -> i64 {
    table.resolve(id).0.map_or(-1, |row| row as i64)
}

impl Source {
    fn new(tower: &Tower, tensor: usize, column: Option<usize>, is_kept: bool) -> Result<Self> {
        let name = &tower.tensors()[tensor].feature;
        let feature = tower.features().iter().position(|spec| spec.name == *name);
        let feature = feature.ok_or_else(|| Error::internal(format!("tensor `{name}` belongs to no feature")))?;
        Ok(Source { tensor, feature, table: None, column, is_kept })
    }

    /// Returns the tensor of all rows, `[rows, count]`.
    fn numbers(
        &self,
        looking: &PendingFeatures<'_>,
        turn: &mut Option<HotTurn<'_>>,
        tensor: &FeatureTensor,
    ) -> Result<Array<f32>> {
        let (PendingFeatures { device, rows, .. }, count) = (looking, tensor.count());
        match tensor.holds() {
            Holds::Bag(_) => {
                let numbers = device.room(rows.len() * count)?;
                self.pool(looking, turn, &SumsTo { data: &numbers, stride: count, column: 0 })?;
                Ok(numbers)
            }
            Holds::Sequence(_) => self.in_turn(looking, turn, tensor),
            Holds::Dense(_) | Holds::Mask(_) => {
                let mut numbers = vec![0f32; rows.len() * count];
                let nothing = Pooled::default();
                let places = numbers.chunks_exact_mut(count.max(1));
                rows.iter().zip(places).for_each(|(row, out)| tensor.write(row, &nothing, out));
                device.copy(&numbers)
            }
        }
    }

    /// Pools the bags of all rows.
    fn pool(&self, looking: &PendingFeatures<'_>, turn: &mut Option<HotTurn<'_>>, to: &SumsTo<'_>) -> Result<()> {
        let (spec, table) = self.table(looking.tower)?;
        let rows = looking.rows;
        let any_weights = rows.iter().flat_map(|r| &r.values).any(FeatureValues::has_weights);
        let bags = gather_ids(self.feature, rows, any_weights)?;
        let offsets: Vec<u32> = bags.offsets().iter().map(|&o| o as u32).collect();
        let ids = bags.values().iter().map(|&id| row_of(table, id)).collect();
        let is_mean = spec.pooling == Pooling::Mean;
        self.look_up(
            looking.device,
            table,
            turn,
            HostBags { ids, offsets: &offsets, weights: bags.weights(), is_mean },
            to,
        )
    }

    /// Looks up the rows of sequences as bags of one id: one row per id, and zeros after the last id.
    fn in_turn(
        &self,
        looking: &PendingFeatures<'_>,
        turn: &mut Option<HotTurn<'_>>,
        tensor: &FeatureTensor,
    ) -> Result<Array<f32>> {
        let (_, table) = self.table(looking.tower)?;
        let (length, width) = (tensor.shape[0], tensor.shape[1]);
        let mut ids = vec![-1i64; looking.rows.len() * length];
        for (row, places) in looking.rows.iter().zip(ids.chunks_exact_mut(length.max(1))) {
            if let FeatureValues::Ids { ids: of_row, .. } = &row.values[self.feature] {
                places.iter_mut().zip(of_row).for_each(|(place, &id)| *place = row_of(table, id));
            }
        }
        let offsets: Vec<u32> = (0..=ids.len() as u32).collect();
        let numbers = looking.device.room(ids.len() * width)?;
        let bags = HostBags { ids, offsets: &offsets, weights: None, is_mean: false };
        self.look_up(looking.device, table, turn, bags, &SumsTo { data: &numbers, stride: width, column: 0 })?;
        Ok(numbers)
    }

    fn table<'a>(&self, tower: &'a Tower) -> Result<(&'a FeatureSpec, &'a Table)> {
        let spec = &tower.features()[self.feature];
        let missing = || Error::internal(format!("feature `{}` has no table", spec.name));
        Ok((spec, tower.table(spec).ok_or_else(missing)?))
    }

    fn look_up(
        &self,
        device: &Device,
        table: &Table,
        turn: &mut Option<HotTurn<'_>>,
        bags: HostBags<'_>,
        to: &SumsTo<'_>,
    ) -> Result<()> {
        match (&self.table, turn) {
            (Some(TableLocation::Whole(copied)), _) => bags.on(device, |bags| pool(device, copied, bags, to)),
            (Some(TableLocation::Hot(number)), Some(turn)) => turn.pool(device, *number, bags, to),
            _ => Err(Error::internal(format!("rows of table `{}` are not on the device", table.name()))),
        }
    }
}
