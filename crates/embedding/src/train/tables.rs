//! A training step over a set of tables: forward, then the fused backward pass.

use std::borrow::Cow;
use std::sync::Arc;

use crate::jagged::{JaggedTensor, KeyedJaggedTensor};
use crate::keyed::{KeyedTensor, Layout};
use crate::lookup::{BagConfig, Pooling, Sequence, SequenceConfig};
use crate::train::batch::{Features, PreparedBatch, Preparer};
#[cfg(feature = "cuda")]
use crate::train::device::DeviceSteps;
use crate::train::master::MasterTable;
use crate::train::report::{TableUpdate, UpdateReport};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::pool::{BagSums, Bags, Rows, pool};
use sterling_kernels::cpu::update::{BLOCK, GradientRows, GroupsPart, RowGroups, Step, Stretches, update};
use sterling_kernels::threads::Threads;

/// Tables in training, looked up as an `EmbeddingBagCollection` and an `EmbeddingCollection` over the same tables.
#[derive(Debug)]
pub struct LearningTables {
    /// Computes the steps if the tables are on a device.
    #[cfg(feature = "cuda")]
    device: Option<DeviceSteps>,
    tables: Vec<MasterTable>,
    preparer: Preparer,
    kernels: Kernels,
    steps: u64,
    /// Per table, the gradients of its bags and sequences in one buffer, reused between steps.
    gradients: Vec<Vec<[f32; BLOCK]>>,
}

impl LearningTables {
    /// Creates the lookups `bags` and `sequences` over `tables`. The pooled output has the same keys as the output of an
    /// `EmbeddingBagCollection`.
    ///
    /// # Errors
    /// `Invalid` for a missing or duplicate table, a duplicate feature of the same table, or a bag without pooling; `Unsupported`
    /// if the requested kernels do not run on this CPU.
    pub fn new(
        tables: Vec<MasterTable>,
        bags: &[BagConfig],
        sequences: &[SequenceConfig],
        threads: &Threads,
    ) -> Result<Self> {
        let features = Features::new(&tables, bags, sequences, threads.clone())?;
        let gradients = vec![Vec::new(); tables.len()];
        let preparer = Preparer { features: Arc::new(features) };
        Ok(LearningTables {
            #[cfg(feature = "cuda")]
            device: None,
            tables,
            preparer,
            kernels: Kernels::detect()?,
            steps: 0,
            gradients,
        })
    }

    /// Moves all tables to the memory of a device, which computes all further steps. Rows and state get the same bits as on
    /// the CPU.
    ///
    /// # Errors
    /// `Invalid` after a preparer was handed out; `Unsupported` with the table's name if the table is partitioned or wider than
    /// `sterling_cuda::ops::learn::WIDTH_MAX`, or if the tables have 2^31 rows or more; `Overloaded` if the device has not enough
    /// memory.
    #[cfg(feature = "cuda")]
    pub fn on_device(mut self, device: &sterling_cuda::Device) -> Result<Self> {
        let features = Arc::get_mut(&mut self.preparer.features).ok_or_else(|| {
            Error::invalid("batches were prepared already, expected the tables to be moved to a device before")
        })?;
        let steps = DeviceSteps::new(device, &mut self.tables, features)?;
        features.sort_nothing();
        self.device = Some(steps);
        Ok(self)
    }

    /// Replaces the kernels of lookups and updates.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Returns the master tables.
    pub fn tables(&self) -> &[MasterTable] {
        &self.tables
    }

    /// Returns the master tables, mutable, to restore rows and state. Call this before batches are prepared: prepared batches may
    /// already have requested the old rows.
    pub fn tables_mut(&mut self) -> &mut [MasterTable] {
        &mut self.tables
    }

    /// Returns the master table with a name.
    pub fn table(&self, name: &str) -> Option<&MasterTable> {
        self.tables.iter().find(|table| table.spec().name == name)
    }

    /// Returns keys and columns of the pooled output and its gradients.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.preparer.features.layout
    }

    /// Returns the number of steps done, the time axis of learning-rate schedules.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of steps done, from a checkpoint.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Returns a preparer of batches, which may run on another thread while these tables compute.
    pub fn preparer(&self) -> Preparer {
        self.preparer.clone()
    }

    /// Prepares a batch; see [`Preparer::prepare`].
    ///
    /// # Errors
    /// As [`Preparer::prepare`].
    pub fn prepare(&self, ids: KeyedJaggedTensor) -> Result<PreparedBatch> {
        self.preparer.prepare(ids)
    }

    /// Returns the pooled embeddings of all bags, and the rows of all sequences in the order of their configuration.
    ///
    /// # Errors
    /// `Invalid` for a batch that other tables prepared; errors of the source of remote rows.
    pub fn forward(&self, batch: &PreparedBatch) -> Result<(KeyedTensor, Vec<Sequence>)> {
        self.check_batch(batch)?;
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return device.forward(&self.tables, batch);
        }
        let stretches = (0..self.tables.len()).map(|table| self.stretches(batch, table)).collect::<Result<Vec<_>>>()?;
        let rows = self.tables.iter().zip(&stretches).map(|(table, stretches)| rows(table, stretches));
        self.lookups(batch, &rows.collect::<Result<Vec<_>>>()?)
    }

    /// As [`LearningTables::forward`]; for tables spread over hosts, `staged` has the distinct rows of the batch, `[rows, D]`.
    pub(super) fn forward_staged(
        &self,
        batch: &PreparedBatch,
        staged: &[Option<Vec<f32>>],
    ) -> Result<(KeyedTensor, Vec<Sequence>)> {
        self.check_batch(batch)?;
        let rows = self.tables.iter().zip(staged).map(|(table, staged)| match (staged, table.whole()) {
            (Some(staged), _) => Rows::strided(table.spec().width, table.spec().width, staged),
            (None, Some(whole)) => rows(table, whole),
            (None, None) => Err(Error::internal("rows of a table on several hosts were not fetched")),
        });
        self.lookups(batch, &rows.collect::<Result<Vec<_>>>()?)
    }

    fn lookups(&self, batch: &PreparedBatch, rows: &[Rows<'_>]) -> Result<(KeyedTensor, Vec<Sequence>)> {
        let features = &self.preparer.features;
        let mut pooled = KeyedTensor::zeros(features.layout.clone(), batch.ids.stride());
        self.pool_bags(batch, rows, &mut pooled);
        let sequence = |number| self.sequence(batch, rows, number);
        Ok((pooled, (features.bags..features.uses.len()).map(sequence).collect()))
    }

    /// Returns all rows of an unpartitioned table, or the batch's distinct rows of a partitioned table, with their state.
    fn stretches(&self, batch: &PreparedBatch, number: usize) -> Result<Cow<'_, [f32]>> {
        let table = &self.tables[number];
        if let Some(stretches) = table.whole() {
            return Ok(Cow::Borrowed(stretches));
        }
        let in_parts = self.preparer.features.in_parts[number].as_ref();
        let parts = table.parts().zip(in_parts).zip(batch.travelling[number].as_ref());
        let ((parts, in_parts), travelling) =
            parts.ok_or_else(|| Error::internal("the batch was not prepared for a partitioned table"))?;
        let rows = batch.rows(number);
        let stretches =
            travelling.stretches(&in_parts.recent, rows, table.stride(), |requested| parts.assemble(rows, requested));
        stretches.map(Cow::Owned).map_err(|e| e.within(format!("table `{}`", table.spec().name)))
    }

    fn pool_bags(&self, batch: &PreparedBatch, tables: &[Rows<'_>], pooled: &mut KeyedTensor) {
        let features = &self.preparer.features;
        let stride = features.layout.width();
        if stride == 0 || batch.ids.stride() == 0 {
            return;
        }
        let bags = self.share(batch.ids.stride());
        let parts = pooled.values_mut().chunks_mut(bags * stride).enumerate().collect();
        features.threads.run(parts, |(part, data): (usize, &mut [f32])| {
            let (first, count) = (part * bags, data.len() / stride);
            for (number, used) in features.uses[..features.bags].iter().enumerate() {
                let (feature, rows) = (batch.feature(number), batch.rows_of(number));
                let offsets = &feature.offsets()[first..=first + count];
                let ids = offsets[0] - feature.base()..offsets[count] - feature.base();
                let bags = Bags {
                    ids: &rows[ids.clone()],
                    offsets,
                    weights: feature.weights().map(|weights| &weights[ids]),
                    mean: used.pooling == Pooling::Mean,
                };
                let column = features.layout.columns(number).start;
                pool(self.kernels, &tables[used.table], &bags, &mut BagSums { data: &mut *data, stride, column });
            }
        });
    }

    fn sequence(&self, batch: &PreparedBatch, tables: &[Rows<'_>], number: usize) -> Sequence {
        let used = &batch.features.uses[number];
        let (feature, rows) = (batch.feature(number), batch.rows_of(number));
        let (table, width) = (&tables[used.table], tables[used.table].width());
        let mut values = vec![0f32; rows.len() * width];
        let ids = self.share(rows.len());
        let parts = values.chunks_mut(ids * width).zip(rows.chunks(ids)).collect();
        batch.features.threads.run(parts, |(data, ids): (&mut [f32], &[i64])| {
            let offsets: Vec<usize> = (0..=ids.len()).collect();
            let bags = Bags { ids, offsets: &offsets, weights: None, mean: false };
            pool(self.kernels, table, &bags, &mut BagSums { data, stride: width, column: 0 });
        });
        let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
        (used.feature.clone(), JaggedTensor::of_rows(values, width, offsets))
    }

    /// Returns the number of elements per task for `count` elements in total.
    fn share(&self, count: usize) -> usize {
        count.div_ceil(self.preparer.features.threads.tasks()).max(1)
    }

    /// Updates the rows of a batch by the gradients of its pooled embeddings and of the rows of its sequences `[ids, D]`, in the
    /// order of their configuration. The rows of a mean over L ids get `1 / L` of the bag's gradient, also with weights.
    ///
    /// # Errors
    /// `Invalid` for a batch that other tables prepared, or for gradients of other keys, widths or examples; in these cases no
    /// row has changed. Errors of the source of remote rows; if a write fails, some rows may have changed.
    pub fn backward(
        &mut self,
        mut batch: PreparedBatch,
        pooled: &KeyedTensor,
        sequences: &[Vec<f32>],
    ) -> Result<UpdateReport> {
        self.check_batch(&batch)?;
        self.check_gradients(&batch, pooled, sequences)?;
        let mut report = self.update(&mut batch, pooled, sequences)?;
        self.step_ids(&batch, &mut report)?;
        Ok(report)
    }

    /// Applies the rules to the rows of a batch.
    fn update(
        &mut self,
        batch: &mut PreparedBatch,
        pooled: &KeyedTensor,
        sequences: &[Vec<f32>],
    ) -> Result<UpdateReport> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            let tables = device.backward(&self.tables, self.steps, batch, pooled, sequences)?;
            return Ok(UpdateReport { tables });
        }
        let features = batch.features.clone();
        let (threads, kernels, steps) = (&features.threads, self.kernels, self.steps);
        let learns = |number: &usize| self.tables[*number].rule().is_some();
        let in_parts = (0..self.tables.len()).filter(learns).filter(|number| self.tables[*number].parts().is_some());
        let mut staged: Vec<Staged> = in_parts
            .map(|number| {
                let stretches = self.stretches(batch, number)?.into_owned();
                Ok(Staged { number, stretches, groups: batch.groups[number].renumbered() })
            })
            .collect::<Result<_>>()?;
        // Gradients of all tables first, then rows of all tables: two parallel rounds for any number of tables.
        let tables = self.tables.iter_mut().zip(&mut self.gradients).enumerate();
        let mut parts = staged.iter_mut();
        let mut learning: Vec<Learning<'_>> = tables
            .filter_map(|(number, (table, gradients))| {
                let (step, width, stride) = (table.rule()?.at(steps), table.spec().width, table.stride());
                let (data, groups) = match table.whole_mut() {
                    Some(stretches) => (stretches, &batch.groups[number]),
                    None => parts.next().map(|staged| (staged.stretches.as_mut_slice(), &staged.groups))?,
                };
                Some(Learning { number, step, width, data, stride, groups, gradients })
            })
            .collect();
        threads.run(learning.iter_mut().collect(), |table| {
            concatenate_gradients(batch, table.number, pooled, sequences, table.width, table.gradients);
        });
        let mut rejected = update_all(threads, kernels, &mut learning);
        for Staged { number, stretches, .. } in &staged {
            let of_table = rejected.iter_mut().filter(|(table, _)| table == number);
            of_table
                .flat_map(|(_, rows)| rows)
                .for_each(|place| *place = batch.groups[*number].rows()[*place as usize]);
            self.tables[*number].write(batch.groups[*number].rows(), stretches)?;
            // The batch no longer needs earlier updates to be retained.
            batch.travelling[*number] = None;
            if let Some(in_parts) = &features.in_parts[*number] {
                in_parts.recent.keep(batch.groups[*number].rows(), stretches);
            }
        }
        Ok(report(&self.tables, batch, rejected))
    }

    /// Updates the rows of this host. `gradients` has the gradients of each table, indexed by the slots of the batch's groups. Rows
    /// of the report are local indices.
    pub(super) fn update_own(
        &mut self,
        batch: &PreparedBatch,
        mut gradients: Vec<Vec<[f32; BLOCK]>>,
    ) -> Result<UpdateReport> {
        self.check_batch(batch)?;
        let (kernels, steps) = (self.kernels, self.steps);
        let tables = self.tables.iter_mut().zip(&mut gradients).enumerate();
        let mut learning: Vec<Learning<'_>> = tables
            .filter_map(|(number, (table, gradients))| {
                let (step, width, stride) = (table.rule()?.at(steps), table.spec().width, table.stride());
                let data = table.own_mut()?;
                Some(Learning { number, step, width, data, stride, groups: &batch.groups[number], gradients })
            })
            .collect();
        let rejected = update_all(&batch.features.threads, kernels, &mut learning);
        Ok(report(&self.tables, batch, rejected))
    }

    /// Ends a step: counts managed ids, and reassigns rows if that is due.
    pub(super) fn step_ids(&mut self, batch: &PreparedBatch, report: &mut UpdateReport) -> Result<()> {
        self.steps += 1;
        for (number, (table, update)) in self.tables.iter_mut().zip(&mut report.tables).enumerate() {
            update.assigned = table.step_ids(number, batch, self.steps)?;
            if !update.assigned.is_empty() {
                update.rows.extend(update.assigned.iter().map(|(row, _)| *row));
                update.rows.sort_unstable();
                update.rows.dedup();
            }
        }
        Ok(())
    }

    fn check_batch(&self, batch: &PreparedBatch) -> Result<()> {
        if !Arc::ptr_eq(&batch.features, &self.preparer.features) {
            return Err(Error::invalid("got a batch that other tables prepared, expected a batch of these tables"));
        }
        let Some(table) = batch.outdated() else { return Ok(()) };
        let name = &batch.features.tables[table].name;
        Err(Error::invalid(format!(
            "table `{name}`: rows were reassigned to other ids, expected a newly prepared batch"
        )))
    }

    fn check_gradients(&self, batch: &PreparedBatch, pooled: &KeyedTensor, sequences: &[Vec<f32>]) -> Result<()> {
        let (features, layout) = (&batch.features, self.layout());
        let is_alike = pooled.keys() == layout.keys()
            && (0..features.bags).map(|k| layout.columns(k).len()).eq(pooled.length_per_key());
        if !is_alike || (features.bags > 0 && pooled.examples() != batch.ids.stride()) {
            return Err(Error::invalid(format!(
                "gradients of {} examples of {:?} ({} wide), expected {} of {:?} ({} wide)",
                pooled.examples(),
                pooled.keys(),
                pooled.width(),
                batch.ids.stride(),
                layout.keys(),
                layout.width()
            )));
        }
        let count = features.uses.len() - features.bags;
        if sequences.len() != count {
            return Err(Error::invalid(format!("gradients of {} sequences, expected {count}", sequences.len())));
        }
        for (number, gradients) in (features.bags..).zip(sequences) {
            let used = &features.uses[number];
            let expected = batch.slots(number) * features.tables[used.table].width;
            if gradients.len() != expected {
                let what = format!("{} gradients of sequence `{}`, expected {expected}", gradients.len(), used.feature);
                return Err(Error::invalid(what));
            }
        }
        Ok(())
    }
}

/// A table that a step updates.
struct Learning<'a> {
    number: usize,
    step: Step,
    width: usize,
    data: &'a mut [f32],
    stride: usize,
    groups: &'a RowGroups,
    gradients: &'a mut Vec<[f32; BLOCK]>,
}

/// Assembled rows of a batch in a partitioned table, with their state; the groups use indices into these rows.
struct Staged {
    number: usize,
    stretches: Vec<f32>,
    groups: RowGroups,
}

/// Rows of a table that one thread updates.
struct Task<'a> {
    number: usize,
    step: Step,
    part: GroupsPart<'a>,
    gradients: &'a [[f32; BLOCK]],
    masters: Stretches<'a>,
}

impl Learning<'_> {
    /// Splits the rows of the batch and the table's memory into `parts` tasks.
    fn tasks(&mut self, parts: usize) -> Vec<Task<'_>> {
        let (mut rest, mut first_row) = (&mut *self.data, 0);
        let mut tasks = Vec::with_capacity(parts);
        for part in self.groups.whole().split(parts) {
            let end = part.rows().last().map_or(first_row, |row| row + 1);
            let (data, behind) = rest.split_at_mut((end - first_row) as usize * self.stride);
            let masters = Stretches { data, first_row, width: self.width, stride: self.stride };
            tasks.push(Task { number: self.number, step: self.step, part, gradients: self.gradients, masters });
            (rest, first_row) = (behind, end);
        }
        tasks
    }
}

/// Updates the rows of tables; returns the rejected rows, each list with the index of its table.
fn update_all(threads: &Threads, kernels: Kernels, learning: &mut [Learning<'_>]) -> Vec<(usize, Vec<u32>)> {
    let updates: Vec<Task<'_>> = learning.iter_mut().flat_map(|table| table.tasks(threads.tasks())).collect();
    threads.run(updates, |task| {
        let gradients = GradientRows::new(task.masters.width, task.gradients);
        let Task { number, step, part, mut masters, .. } = task;
        (number, update(kernels, &step, &part, &gradients, &mut masters))
    })
}

/// Returns a view of the rows of a table, without their optimizer state.
fn rows<'a>(table: &MasterTable, stretches: &'a [f32]) -> Result<Rows<'a>> {
    Rows::strided(table.spec().width, table.stride(), stretches)
}

/// Copies the gradients of a table's bags and sequences into one buffer of complete blocks, and divides gradients of means by
/// the bag's length.
fn concatenate_gradients(
    batch: &PreparedBatch,
    table: usize,
    pooled: &KeyedTensor,
    sequences: &[Vec<f32>],
    width: usize,
    out: &mut Vec<[f32; BLOCK]>,
) {
    let features = &batch.features;
    let blocks = width.div_ceil(BLOCK);
    let slots: usize = features.of_table(table).map(|(number, _)| batch.slots(number)).sum();
    // The padding columns of a row stay zero after the first step.
    out.resize(slots * blocks, [0.0; BLOCK]);
    let mut rows = out.as_flattened_mut().chunks_exact_mut(blocks * BLOCK).map(|row| &mut row[..width]);
    for (number, used) in features.of_table(table) {
        if used.pooling == Pooling::None {
            let gradients = sequences[number - features.bags].chunks_exact(width);
            gradients.zip(&mut rows).for_each(|(from, to)| to.copy_from_slice(from));
            continue;
        }
        let column = features.layout.columns(number).start;
        let offsets = batch.feature(number).offsets();
        for (bag, gradients) in pooled.values().chunks_exact(pooled.width()).enumerate() {
            let Some(to) = rows.next() else { break };
            to.copy_from_slice(&gradients[column..column + width]);
            let length = offsets[bag + 1] - offsets[bag];
            if used.pooling == Pooling::Mean && length > 1 {
                let factor = 1.0 / length as f32;
                to.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}

fn report(tables: &[MasterTable], batch: &PreparedBatch, rejected: Vec<(usize, Vec<u32>)>) -> UpdateReport {
    let mut by_table: Vec<Vec<u32>> = vec![Vec::new(); tables.len()];
    rejected.into_iter().for_each(|(table, rows)| by_table[table].extend(rows));
    let update = |((number, table), rejected): ((usize, &MasterTable), Vec<u32>)| {
        let touched = if table.rule().is_some() { batch.rows(number) } else { &[] };
        let rows = touched.iter().copied().filter(|row| rejected.binary_search(row).is_err()).collect();
        TableUpdate {
            table: table.spec().name.clone(),
            rows,
            assigned: Vec::new(),
            skipped_ids: batch.skipped[number],
            rejected_rows: rejected,
        }
    };
    UpdateReport { tables: tables.iter().enumerate().zip(by_table).map(update).collect() }
}
