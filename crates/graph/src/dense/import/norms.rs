//! Softmax and normalisations.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, refused};
use crate::dense::ir::Id;
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Numbers minus their maximum along axes, so that a large common offset does not cost precision.
struct Shifted {
    most: Id,
    less: Id,
    /// Logarithm of the sum of the exponentials of `less`.
    log: Id,
}

/// Largest mean of a batch normalization, in standard deviations, that is multiplied before it is subtracted.
const DEVIATIONS: f32 = 16.0;

impl Importer {
    pub(super) fn norm(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        a: Id,
    ) -> Result<Id> {
        match operator {
            "LayerNormalization" => self.layer_norm(node, attributes),
            "RMSNormalization" | "SimplifiedLayerNormalization" => self.rms_norm(node, attributes),
            "BatchNormalization" => self.batch_norm(node, attributes),
            "InstanceNormalization" | "GroupNormalization" => self.norm_of_groups(operator, node, attributes),
            _ => {
                let axis = attributes.integer("axis", if self.opset < 13 { 1 } else { -1 });
                let axis = self.axis(a, axis)?;
                // Before opset 13, all axes from `axis` on are reduced together.
                let axes: Vec<usize> = if self.opset < 13 { (axis..self.rank(a)).collect() } else { vec![axis] };
                if operator == "LogSoftmax" {
                    let Shifted { less, log, .. } = self.shifted(a, &axes)?;
                    return self.graph.binary(Binary::Sub, less, log);
                }
                let each = self.exponentials(a, &axes)?;
                let sum = self.graph.fold(Fold::Sum, each, &axes)?;
                self.graph.binary(Binary::Div, each, sum)
            }
        }
    }

    /// Returns the exponentials of numbers minus their maximum along axes.
    fn exponentials(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let most = self.graph.fold(Fold::Max, a, axes)?;
        self.graph.still.push(most);
        let less = self.graph.binary(Binary::Sub, a, most)?;
        self.graph.unary(Unary::Exp, less)
    }

    /// Returns the logarithm of the sum of exponentials along axes. If all numbers are -inf, the result is -inf.
    pub(super) fn log_sum_exp(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let Shifted { most, log, .. } = self.shifted(a, axes)?;
        self.graph.binary(Binary::Add, log, most)
    }

    fn shifted(&mut self, a: Id, axes: &[usize]) -> Result<Shifted> {
        let most = self.graph.fold(Fold::Max, a, axes)?;
        let (least, largest) = (self.scalar(f32::MIN)?, self.scalar(f32::MAX)?);
        let most = self.graph.binary(Binary::Max, most, least)?;
        let most = self.graph.binary(Binary::Min, most, largest)?;
        self.graph.still.push(most);
        let less = self.graph.binary(Binary::Sub, a, most)?;
        let each = self.graph.unary(Unary::Exp, less)?;
        let sum = self.graph.fold(Fold::Sum, each, axes)?;
        Ok(Shifted { most, less, log: self.graph.unary(Unary::Log, sum)? })
    }

    pub(super) fn mean(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let count: usize = axes.iter().map(|&axis| self.graph.shape(a)[axis]).product();
        let sum = self.graph.fold(Fold::Sum, a, axes)?;
        self.per_count(sum, vec![], vec![count])
    }

    /// Divides sums by counts of this shape. Reciprocals are factors only if they are exact: the mean of equal numbers
    /// must be that number, so that a difference from the mean is 0.
    pub(super) fn per_count(&mut self, sums: Id, shape: Vec<usize>, counts: Vec<usize>) -> Result<Id> {
        let is_exact = counts.iter().all(|count| count.is_power_of_two());
        let by = |count: usize| if is_exact { 1.0 / count as f32 } else { count as f32 };
        let by = self.graph.number(shape, counts.into_iter().map(by).collect())?;
        self.graph.binary(if is_exact { Binary::Mul } else { Binary::Div }, sums, by)
    }

    fn layer_norm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let a = self.value(node, 0)?;
        let axis = self.axis(a, attributes.integer("axis", -1))?;
        let axes: Vec<usize> = (axis..self.rank(a)).collect();
        let centred = self.centred(a, &axes)?;
        attributes.integer("stash_type", 1);
        let scaled = self.scaled_by_root(centred, self.value(node, 1)?, attributes.float("epsilon", 1e-5), &axes)?;
        match Importer::has(node, 2) {
            true => self.graph.binary(Binary::Add, scaled, self.value(node, 2)?),
            false => Ok(scaled),
        }
    }

    fn rms_norm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let a = self.value(node, 0)?;
        let axis = self.axis(a, attributes.integer("axis", -1))?;
        let axes: Vec<usize> = (axis..self.rank(a)).collect();
        attributes.integer("stash_type", 1);
        self.scaled_by_root(a, self.value(node, 1)?, attributes.float("epsilon", 1e-5), &axes)
    }

    /// Subtracts the mean along axes, and then the mean of the differences: for numbers that are large and nearly
    /// equal, the rounding error of the first mean may be as large as their differences.
    pub(super) fn centred(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let mean = self.mean(a, axes)?;
        let less = self.graph.binary(Binary::Sub, a, mean)?;
        let rest = self.mean(less, axes)?;
        self.graph.still.push(rest);
        self.graph.binary(Binary::Sub, less, rest)
    }

    /// Divides numbers by the root of the mean of their squares, and multiplies them by a scale.
    pub(super) fn scaled_by_root(&mut self, a: Id, scale: Id, epsilon: f32, axes: &[usize]) -> Result<Id> {
        let epsilon = self.scalar(epsilon)?;
        let squares = self.graph.binary(Binary::Mul, a, a)?;
        let variance = self.mean(squares, axes)?;
        let shifted = self.graph.binary(Binary::Add, variance, epsilon)?;
        let deviation = self.graph.unary(Unary::Sqrt, shifted)?;
        let normal = self.graph.binary(Binary::Div, a, deviation)?;
        self.graph.binary(Binary::Mul, normal, scale)
    }

    /// Normalizes each group of channels and scales each channel; for `InstanceNormalization` a group is one channel.
    fn norm_of_groups(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let (a, scale, bias) = (self.value(node, 0)?, self.value(node, 1)?, self.value(node, 2)?);
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        if shape.len() < 3 || rows.is_some_and(|r| r != 0) {
            return Err(refused(format!("shape {shape:?}, expected a batch, channels and further axes")));
        }
        attributes.integer("stash_type", 1);
        let epsilon = attributes.float("epsilon", 1e-5);
        let channels = shape[1];
        let groups = match operator {
            "InstanceNormalization" => channels,
            _ => usize::try_from(attributes.integer("num_groups", 0)).unwrap_or(0),
        };
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(refused(format!("`num_groups` is {groups}, expected a divisor of {channels} channels")));
        }
        let inner = shape[2..].iter().product::<usize>();
        let of_groups = self.graph.reshape(a, vec![shape[0], groups, channels / groups * inner], rows)?;
        let centred = self.centred(of_groups, &[2])?;
        let one = self.scalar(1.0)?;
        let normal = self.scaled_by_root(centred, one, epsilon, &[2])?;
        let normal = self.graph.reshape(normal, vec![shape[0], channels, inner], rows)?;
        let mut made = normal;
        for (f, factor) in [(Binary::Mul, scale), (Binary::Add, bias)] {
            // Before opset 21, scale and bias have one number per group.
            let of_channels = match self.graph.shape(factor) {
                [n] if *n == channels => factor,
                [n] if *n == groups => {
                    let index: Vec<usize> = (0..channels).map(|c| c / (channels / groups)).collect();
                    self.along(factor, 0, &index)?
                }
                other => {
                    return Err(refused(format!("the scale or the bias has shape {other:?}, expected [{channels}]")));
                }
            };
            let column = self.graph.reshape(of_channels, vec![channels, 1], None)?;
            made = self.graph.binary(f, made, column)?;
        }
        self.graph.reshape(made, shape, rows)
    }

    /// Returns `(a - mean) scale / √(variance + epsilon) + bias`, with the running statistics of training. If the means
    /// are constant and within [`DEVIATIONS`], they are multiplied by the factor and added to the bias once.
    fn batch_norm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        attributes.float("momentum", 0.9);
        if attributes.integer("training_mode", 0) != 0 {
            return Err(refused("training mode is not supported"));
        }
        let all = (0..5).map(|n| self.value(node, n)).collect::<Result<Vec<_>>>()?;
        let &[a, scale, bias, mean, variance] = &all[..] else {
            return Err(refused("inputs for mean and variance are missing"));
        };
        let epsilon = self.scalar(attributes.float("epsilon", 1e-5))?;
        let shape = self.graph.shape(a);
        if shape.len() < 2 || self.rows(a) == Some(1) {
            return Err(refused(format!("the input has shape {shape:?}, expected a batch and channels")));
        }
        let mut channels = vec![1; shape.len() - 1];
        channels[0] = shape[1];
        let shifted = self.graph.binary(Binary::Add, variance, epsilon)?;
        let deviation = self.graph.unary(Unary::Sqrt, shifted)?;
        let factor = self.graph.binary(Binary::Div, scale, deviation)?;
        let numbers = [mean, deviation].map(|id| self.graph.constant(id));
        let is_near = matches!(numbers, [Some(means), Some(deviations)]
            if means.iter().zip(deviations).all(|(mean, deviation)| mean.abs() <= DEVIATIONS * deviation));
        if !is_near {
            let [mean, factor, bias] = [mean, factor, bias].map(|id| self.graph.reshape(id, channels.clone(), None));
            let less = self.graph.binary(Binary::Sub, a, mean?)?;
            let scaled = self.graph.binary(Binary::Mul, less, factor?)?;
            return self.graph.binary(Binary::Add, scaled, bias?);
        }
        let back = self.graph.binary(Binary::Mul, mean, factor)?;
        let offset = self.graph.binary(Binary::Sub, bias, back)?;
        let factor = self.graph.reshape(factor, channels.clone(), None)?;
        let offset = self.graph.reshape(offset, channels, None)?;
        let scaled = self.graph.binary(Binary::Mul, a, factor)?;
        self.graph.binary(Binary::Add, scaled, offset)
    }
}
