//! Tables and settings of a training step as kernel arguments.

use bytemuck::{Pod, Zeroable};

use super::layout::LearningLayout;
use crate::memory::{Array, Device};
use crate::ops::need;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::update::{Decay, RuleKind, Step};

/// A table's rows with their optimizer state on the device, and the settings of the step.
#[derive(Clone, Copy, Debug)]
pub struct Master<'a> {
    /// Rows with their optimizer state, `[rows, stride]`.
    pub stretches: &'a Array<f32>,
    /// Settings of this step; `None` for a frozen table.
    pub step: Option<Step>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct MasterArgs {
    stretches: u64,
    first_row: u32,
    width: u32,
    stride: u32,
    rule: u32,
    decay: u32,
    rate: f32,
    epsilon: f32,
    beta1: f32,
    beta2: f32,
    lambda: f32,
    max_norm: f32,
    clip: f32,
}

impl LearningLayout {
    /// Copies the tables with their settings to the device, in the order of the kernels.
    pub(super) fn masters(&self, device: &Device, masters: &[Master<'_>]) -> Result<Array<MasterArgs>> {
        if masters.len() != self.masters.len() {
            return Err(Error::internal(format!(
                "{} tables in training, expected {}",
                masters.len(),
                self.masters.len()
            )));
        }
        let arguments = self.table_order.iter().enumerate().map(|(place, &table)| {
            let (shape, master) = (&self.masters[table], &masters[table]);
            need("a table in training", master.stretches, shape.rows as usize * shape.stride)?;
            let mut arguments = MasterArgs {
                stretches: master.stretches.address(),
                first_row: self.first_rows[place.min(self.learning())],
                width: shape.width as u32,
                stride: shape.stride as u32,
                ..MasterArgs::zeroed()
            };
            if shape.learns {
                let step = master.step.ok_or_else(|| Error::internal("a table in training has no update rule"))?;
                if shape.width + step.kind.state_width(shape.width) > shape.stride {
                    return Err(Error::internal("a table in training has no memory for its optimizer state"));
                }
                arguments.set(&step);
            }
            Ok(arguments)
        });
        device.copy(&arguments.collect::<Result<Vec<_>>>()?)
    }
}

impl MasterArgs {
    fn set(&mut self, step: &Step) {
        self.rule = match step.kind {
            RuleKind::Sgd => 0,
            RuleKind::Adagrad => 1,
            RuleKind::RowwiseAdagrad => 2,
            RuleKind::Adam => 3,
            RuleKind::RowwiseAdam => 4,
        };
        (self.decay, self.lambda) = match step.decay {
            Decay::None => (0, 0.0),
            Decay::L2(lambda) => (1, lambda),
            Decay::Decoupled(lambda) => (2, lambda),
        };
        (self.rate, self.epsilon, self.beta1, self.beta2) = (step.rate, step.epsilon, step.beta1, step.beta2);
        (self.max_norm, self.clip) = (step.max_norm.unwrap_or(0.0), step.clip.unwrap_or(0.0));
    }
}
