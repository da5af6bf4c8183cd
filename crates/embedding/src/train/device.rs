//! Training steps of tables in the memory of a GPU: rows and state are bit-identical to those that the CPU computes.

use std::borrow::Cow;

use crate::jagged::JaggedTensor;
use crate::keyed::KeyedTensor;
use crate::lookup::{Pooling, Sequence};
use crate::train::batch::{Features, PreparedBatch, Use};
use crate::train::master::MasterTable;
use crate::train::report::TableUpdate;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_cuda::ops::learn::{
    FeatureRows, FeatureShape, LearningBatch, LearningLayout, Master, MasterShape, Touched, look_up, update,
};

/// Computes the steps of tables on a device.
#[derive(Debug)]
pub(super) struct DeviceSteps {
    /// CUDA stream of the steps, whose work is done whenever a call returns.
    stream: Device,
    layout: LearningLayout,
}

impl DeviceSteps {
    /// Moves tables to a device.
    ///
    /// # Errors
    /// `Unsupported` with the table's name for a table that is partitioned or too wide; `Overloaded` if the device has not
    /// enough memory.
    pub(super) fn new(device: &Device, tables: &mut [MasterTable], features: &Features) -> Result<Self> {
        let shapes: Vec<MasterShape> = tables.iter().map(MasterTable::shape).collect();
        for (shape, table) in shapes.iter().zip(&*tables) {
            let place = |e: Error| e.within(format!("table `{}`", table.spec().name));
            shape.check().map_err(place)?;
            if table.whole().is_none() {
                return Err(place(Error::unsupported(
                    "the table is partitioned, expected an unpartitioned table for a GPU",
                )));
            }
        }
        let feature = |(number, used): (usize, &Use)| FeatureShape {
            table: used.table,
            column: (used.pooling != Pooling::None).then(|| features.layout.columns(number).start),
            is_mean: used.pooling == Pooling::Mean,
        };
        let of_features: Vec<FeatureShape> = features.uses.iter().enumerate().map(feature).collect();
        let layout = LearningLayout::new(&shapes, &of_features, features.layout.width())?;
        let (free, _) = device.memory()?;
        let bytes: u64 = tables.iter().map(MasterTable::bytes).sum();
        if bytes > free {
            let each = tables.iter().map(|table| format!("`{}` {}", table.spec().name, table.bytes()));
            return Err(Error::overloaded(format!(
                "tables with their optimizer state take {bytes} bytes ({}), {} has {free} free: train them on the CPU",
                each.collect::<Vec<_>>().join(", "),
                device.name()
            )));
        }
        tables.iter_mut().try_for_each(|table| table.move_to(device))?;
        Ok(DeviceSteps { stream: device.lane()?, layout })
    }

    /// Copies a batch to the device. The stream reuses its memory only while no array refers to this memory: a batch
    /// that stayed on the device between its forward and its backward pass would force all lookups in between to
    /// allocate memory.
    fn batch(&self, batch: &PreparedBatch) -> Result<LearningBatch> {
        self.stream.begin()?;
        let features = &batch.features;
        let rows: Vec<Cow<'_, [i64]>> = (0..features.uses.len()).map(|number| batch.rows_of(number)).collect();
        let ids = rows.iter().enumerate().map(|(number, rows)| {
            let feature = batch.feature(number);
            FeatureRows { rows, offsets: feature.offsets(), weights: feature.weights() }
        });
        self.layout.copy(&self.stream, batch.ids.stride(), &ids.collect::<Vec<_>>())
    }

    /// Returns the pooled embeddings and the rows of sequences.
    pub(super) fn forward(
        &self,
        tables: &[MasterTable],
        batch: &PreparedBatch,
    ) -> Result<(KeyedTensor, Vec<Sequence>)> {
        let (on_device, features) = (self.batch(batch)?, &batch.features);
        let values = self.stream.room(on_device.values())?;
        look_up(&self.stream, &self.layout, &masters(tables, 0)?, &on_device, &values)?;
        let values = values.to_vec()?;
        let mut pooled = KeyedTensor::zeros(features.layout.clone(), batch.ids.stride());
        let count = pooled.values().len();
        pooled.values_mut().copy_from_slice(&values[..count]);
        let sequences = (features.bags..features.uses.len()).zip(&on_device.starts()[1..]).map(|(number, &start)| {
            let (used, feature) = (&features.uses[number], batch.feature(number));
            let width = features.tables[used.table].width;
            let rows = values[start..start + feature.values().len() * width].to_vec();
            let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
            (used.feature.clone(), JaggedTensor::of_rows(rows, width, offsets))
        });
        Ok((pooled, sequences.collect()))
    }

    /// Updates the rows of a batch at a step.
    pub(super) fn backward(
        &self,
        tables: &[MasterTable],
        step: u64,
        batch: &PreparedBatch,
        pooled: &KeyedTensor,
        sequences: &[Vec<f32>],
    ) -> Result<Vec<TableUpdate>> {
        let on_device = self.batch(batch)?;
        let gradients = self.stream.room(on_device.values())?;
        let regions = std::iter::once(pooled.values()).chain(sequences.iter().map(Vec::as_slice));
        for (&start, region) in on_device.starts().iter().zip(regions) {
            gradients.write_at(start, region)?;
        }
        let touched: Touched = update(&self.stream, &self.layout, &masters(tables, step)?, &on_device, &gradients)?;
        let of_tables = tables.iter().zip(touched.read(&self.layout)?).zip(&batch.skipped);
        let update = of_tables.map(|((table, touched), &skipped_ids)| TableUpdate {
            table: table.spec().name.clone(),
            rows: touched.rows,
            assigned: Vec::new(),
            skipped_ids,
            rejected_rows: touched.rejected,
        });
        Ok(update.collect())
    }
}

/// Returns the tables with their settings at a step.
fn masters(tables: &[MasterTable], step: u64) -> Result<Vec<Master<'_>>> {
    fn master(table: &MasterTable, step: u64) -> Result<Master<'_>> {
        let stretches = table.on_device().ok_or_else(|| Error::internal("the table is not on the device"))?;
        Ok(Master { stretches: &stretches.data, step: table.rule().map(|rule| rule.at(step)) })
    }
    tables.iter().map(|table| master(table, step)).collect()
}
