//! Convolutions and pools over windows of an input `[batch, channels, axes..]`.
//!
//! The input is padded once. A convolution then gathers one row per window, with all channels of each kernel position,
//! and multiplies the row by the constant weights; a depthwise convolution sums the shifted and scaled input over
//! kernel positions. A pool reduces the gathered windows.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, refused};
use crate::dense::ir::{Id, positions, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold};

/// Maximum count of gathered numbers.
const GATHERED_MAX: usize = 1 << 22;

/// Returns whether a value of this shape has more than [`GATHERED_MAX`] numbers.
fn exceeds_gathered(shape: impl IntoIterator<Item = usize>) -> bool {
    shape.into_iter().try_fold(1usize, usize::checked_mul).is_none_or(|numbers| numbers > GATHERED_MAX)
}

/// Windows of a kernel over the axes behind the channels.
struct Windows {
    /// Sizes of the input along these axes.
    sizes: Vec<usize>,
    kernel: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    /// Padding before and after each axis.
    pads: Vec<[usize; 2]>,
    /// Number of windows along each axis.
    out: Vec<usize>,
}

impl Windows {
    /// Reads the attributes of a node. `kernel` is the shape of the kernel if the weights of a convolution determine
    /// it; `more` is padding in addition to the node's.
    fn read(
        attributes: &mut Attributes<'_>,
        sizes: &[usize],
        kernel: Option<&[usize]>,
        more: &[[usize; 2]],
    ) -> Result<Windows> {
        let axes = sizes.len();
        let complete = |name: &str, all: &[i64], least: i64| -> Result<Vec<usize>> {
            let fits = |n: &i64| (least..=1 << 20).contains(n);
            match all.iter().all(fits) {
                true => Ok(all.iter().map(|&n| n as usize).collect()),
                false => Err(refused(format!("`{name}` is {all:?}, expected {least} to {}", 1 << 20))),
            }
        };
        let mut list = |name: &str, count: usize, least: i64| -> Result<Option<Vec<usize>>> {
            let Some(all) = attributes.integers(name) else { return Ok(None) };
            match all.len() == count {
                true => complete(name, &all, least).map(Some),
                false => Err(refused(format!("`{name}` is {all:?}, expected {count} numbers"))),
            }
        };
        let written = list("kernel_shape", axes, 1)?;
        let kernel = match (kernel, written) {
            (Some(kernel), Some(written)) if kernel != written => {
                return Err(refused(format!(
                    "`kernel_shape` {written:?} differs from {kernel:?}, the shape of the weights"
                )));
            }
            (Some(kernel), _) => kernel.to_vec(),
            (None, Some(written)) => written,
            (None, None) => return Err(refused("`kernel_shape` is missing")),
        };
        let strides = list("strides", axes, 1)?.unwrap_or_else(|| vec![1; axes]);
        let dilations = list("dilations", axes, 1)?.unwrap_or_else(|| vec![1; axes]);
        let pads = list("pads", 2 * axes, 0)?.unwrap_or_else(|| vec![0; 2 * axes]);
        let is_ceil = attributes.integer("ceil_mode", 0) != 0;
        let auto = attributes.text("auto_pad", "NOTSET");
        let mut windows = Windows {
            sizes: sizes.to_vec(),
            kernel,
            strides,
            dilations,
            pads: (0..axes).map(|n| [pads[n], pads[n + axes]]).collect(),
            out: Vec::with_capacity(axes),
        };
        if !more.is_empty() {
            windows.pads.iter_mut().zip(more).for_each(|(own, more)| *own = [own[0] + more[0], own[1] + more[1]]);
        }
        for (n, &size) in sizes.iter().enumerate() {
            let (reach, stride) = (windows.reach(n), windows.strides[n]);
            match auto.as_str() {
                "NOTSET" | "" => {}
                "VALID" => windows.pads[n] = [0, 0],
                "SAME_UPPER" | "SAME_LOWER" => {
                    let all = ((size.div_ceil(stride).max(1) - 1) * stride + reach).saturating_sub(size);
                    let (less, more) = (all / 2, all - all / 2);
                    windows.pads[n] = if auto == "SAME_UPPER" { [less, more] } else { [more, less] };
                }
                other => return Err(refused(format!("`auto_pad` {other} is not supported"))),
            }
            let [before, after] = windows.pads[n];
            let Some(room) = (size + before + after).checked_sub(reach) else {
                return Err(refused(format!(
                    "a window of {reach} exceeds {size} elements with pads {before} and {after}"
                )));
            };
            let mut out = if is_ceil { room.div_ceil(stride) } else { room / stride } + 1;
            // A window that starts in the padding behind the input is dropped.
            if is_ceil && (out - 1) * stride >= size + before {
                out -= 1;
            }
            windows.out.push(out);
        }
        Ok(windows)
    }

    /// Returns how many numbers a kernel spans along an axis.
    fn reach(&self, axis: usize) -> usize {
        (self.kernel[axis] - 1) * self.dilations[axis] + 1
    }

    /// Returns the padding before and after an axis such that every window lies inside the padded axis.
    fn padding(&self, axis: usize) -> [usize; 2] {
        let before = self.pads[axis][0];
        let end = (self.out[axis] - 1) * self.strides[axis] + self.reach(axis);
        [before, end.saturating_sub(before + self.sizes[axis])]
    }

    fn padded_sizes(&self) -> Vec<usize> {
        let size = |axis: usize| self.padding(axis).iter().sum::<usize>() + self.sizes[axis];
        (0..self.sizes.len()).map(size).collect()
    }

    /// Returns the number of windows, and the number of kernel positions.
    fn counts(&self) -> [usize; 2] {
        [self.out.iter().product(), self.kernel.iter().product()]
    }

    /// Returns the offsets of windows and of kernel positions in the padded input; neighbours along the last axis are
    /// `inner` apart.
    fn places(&self, inner: usize) -> [Vec<u32>; 2] {
        let own = strides(&self.padded_sizes());
        let along = |by: &[usize]| own.iter().zip(by).map(|(own, by)| own * by * inner).collect::<Vec<_>>();
        [positions(&self.out, &along(&self.strides)), positions(&self.kernel, &along(&self.dilations))]
    }

    /// Returns for each window the number of kernel positions that count in a mean.
    fn taps_inside(&self, counts_padding: bool) -> Vec<usize> {
        let mut counts = vec![1usize];
        for axis in 0..self.sizes.len() {
            let [before, after] = self.pads[axis];
            let (first, end) = match counts_padding {
                true => (0, before + self.sizes[axis] + after),
                false => (before, before + self.sizes[axis]),
            };
            let tap = |p: usize, k: usize| p * self.strides[axis] + k * self.dilations[axis];
            let inside = |p: usize| (0..self.kernel[axis]).filter(|&k| (first..end).contains(&tap(p, k))).count();
            counts = counts.iter().flat_map(|n| (0..self.out[axis]).map(move |p| n * inside(p))).collect();
        }
        counts
    }
}

impl Importer {
    /// Imports a convolution or a pool.
    pub(super) fn windowed(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        a: Id,
    ) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        if shape.len() < 3 || self.rows(a).is_some_and(|r| r != 0) {
            let what = if shape.len() < 3 {
                "expected a batch, channels and further axes"
            } else {
                "the operator does not support the candidate axis"
            };
            return Err(refused(format!("shape {shape:?}, {what}")));
        }
        let axes: Vec<usize> = (2..shape.len()).collect();
        match operator {
            "Conv" => self.convolution(node, attributes, a),
            "GlobalMaxPool" => self.graph.fold(Fold::Max, a, &axes),
            "GlobalAveragePool" => self.mean(a, &axes),
            _ => self.pool(operator, attributes, a),
        }
    }

    fn convolution(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let weights = self.value(node, 1)?;
        let of_weights = self.graph.shape(weights).to_vec();
        let Some(numbers) = self.graph.constant(weights).map(<[f32]>::to_vec) else {
            return Err(refused("weights are not constant"));
        };
        let (batch, channels) = (shape[0], shape[1]);
        let groups = usize::try_from(attributes.integer("group", 1)).ok().filter(|n| *n > 0).unwrap_or(0);
        let fits = of_weights.len() == shape.len() && groups > 0;
        if !fits || of_weights[1] * groups != channels || !of_weights[0].is_multiple_of(groups) {
            return Err(refused(format!(
                "weights of shape {of_weights:?} in {groups} groups do not fit an input of shape {shape:?}"
            )));
        }
        let made = of_weights[0];
        let (own, each) = (of_weights[1], made / groups);
        let (a, shape, before) = self.without_padding(a, attributes);
        let windows = Windows::read(attributes, &shape[2..], Some(&of_weights[2..]), &before)?;
        let [count, taps] = windows.counts();
        let rows = self.rows(a);
        let order: Vec<usize> = [0].into_iter().chain(2..shape.len()).chain([1]).collect();
        let last = self.turn(a, &order)?;
        let padded = self.padded(last, 1, &windows, 0.0)?;
        let room = self.graph.values[padded].count() / batch;
        let [places, steps] = windows.places(channels);
        // `[batch, windows, made]`
        let sums = if own == 1 && each == 1 {
            let mut sum = None;
            for (k, &step) in steps.iter().enumerate() {
                let of_window = |at: u32| (0..channels as u32).map(move |c| at + step + c);
                let index = (0..batch).flat_map(|n| places.iter().map(move |at| at + (n * room) as u32));
                let index = index.flat_map(of_window).collect();
                let tap = self.graph.pick(padded, index, vec![batch, count, channels], rows)?;
                let factors = (0..channels).map(|c| numbers[c * taps + k]).collect();
                let factors = self.graph.number(vec![channels], factors)?;
                let product = self.graph.binary(Binary::Mul, tap, factors)?;
                sum = Some(match sum {
                    Some(sum) => self.graph.binary(Binary::Add, sum, product)?,
                    None => product,
                });
            }
            sum.ok_or_else(|| refused("the kernel has no weights"))?
        } else {
            let gathered = [batch, groups, count, taps, own];
            if exceeds_gathered(gathered) {
                return Err(refused(format!("windows gather {gathered:?} elements, expected at most {GATHERED_MAX}")));
            }
            let mut index = Vec::with_capacity(gathered.iter().product());
            for first in (0..batch).flat_map(|n| (0..groups).map(move |g| n * room + g * own)) {
                for (at, step) in places.iter().flat_map(|at| steps.iter().map(move |step| (at, step))) {
                    index.extend((0..own as u32).map(|c| first as u32 + at + step + c));
                }
            }
            let depth = taps * own;
            let mut matrix = vec![0.0; groups * depth * each];
            for (m, of_output) in numbers.chunks_exact(depth).enumerate() {
                let (g, m) = (m / each, m % each);
                for (n, &weight) in of_output.iter().enumerate() {
                    let (c, k) = (n / taps, n % taps);
                    matrix[(g * depth + k * own + c) * each + m] = weight;
                }
            }
            if groups == 1 {
                let rows_of = self.graph.pick(padded, index, vec![batch, count, depth], rows)?;
                let matrix = self.graph.number(vec![depth, each], matrix)?;
                self.graph.matmul(rows_of, matrix)?
            } else {
                let rows_of = self.graph.pick(padded, index, vec![batch, groups, count, depth], rows)?;
                let matrix = self.graph.number(vec![groups, depth, each], matrix)?;
                let product = self.graph.matmul(rows_of, matrix)?;
                let turned = self.graph.transpose(product, &[0, 2, 1, 3])?;
                self.graph.reshape(turned, vec![batch, count, made], rows)?
            }
        };
        let sums = match Importer::has(node, 2) {
            true => {
                let bias = self.value(node, 2)?;
                if self.graph.shape(bias)[..] != [made] {
                    return Err(refused(format!("the bias has shape {:?}, expected [{made}]", self.graph.shape(bias))));
                }
                self.graph.binary(Binary::Add, sums, bias)?
            }
            false => sums,
        };
        let split = [&[batch], &windows.out[..], &[made]].concat();
        let complete = self.graph.reshape(sums, split, rows)?;
        let back = [0, shape.len() - 1].into_iter().chain(1..shape.len() - 1).collect();
        self.turned_from(complete, back)
    }

    /// If a zero-padded value is the input of a convolution, which can pad the input itself, returns the value before
    /// padding, its shape, and the padding of the axes behind the channels.
    fn without_padding(&self, a: Id, attributes: &Attributes<'_>) -> (Id, Vec<usize>, Vec<[usize; 2]>) {
        // With another `auto_pad`, the padding of a convolution depends on the input's size.
        let is_explicit =
            attributes.all.iter().all(|a| a.name.as_deref() != Some("auto_pad") || a.s.as_deref() == Some("NOTSET"));
        match self.padded.get(&a) {
            Some((of, around)) if is_explicit && around[..2] == [[0, 0]; 2] => {
                (*of, self.graph.shape(*of).to_vec(), around[2..].to_vec())
            }
            _ => (a, self.graph.shape(a).to_vec(), Vec::new()),
        }
    }

    /// Transposes axes and records the transposition, so that the inverse transposition can be skipped.
    pub(super) fn turned_from(&mut self, a: Id, order: Vec<usize>) -> Result<Id> {
        let made = self.graph.transpose(a, &order)?;
        self.turned.insert(made, (a, order));
        Ok(made)
    }

    /// Transposes axes; if this undoes an earlier transposition, returns the value before both.
    pub(super) fn turn(&mut self, a: Id, order: &[usize]) -> Result<Id> {
        match self.turned.get(&a) {
            Some((of, own)) if order.iter().enumerate().all(|(n, &axis)| own[axis] == n) => Ok(*of),
            _ => self.graph.transpose(a, order),
        }
    }

    fn pool(&mut self, operator: &str, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        attributes.integer("storage_order", 0);
        let counts_padding = attributes.integer("count_include_pad", 0) != 0;
        let windows = Windows::read(attributes, &shape[2..], None, &[])?;
        let [count, taps] = windows.counts();
        let (fold, nothing) = match operator {
            "MaxPool" => (Fold::Max, f32::NEG_INFINITY),
            _ => (Fold::Sum, 0.0),
        };
        let padded = self.padded(a, 2, &windows, nothing)?;
        let outer = shape[0] * shape[1];
        let gathered = [shape[0], shape[1], count, taps];
        if exceeds_gathered(gathered) {
            return Err(refused(format!("windows gather {gathered:?} elements, expected at most {GATHERED_MAX}")));
        }
        let room = self.graph.values[padded].count() / outer;
        let [places, steps] = windows.places(1);
        let window = |first: u32| steps.iter().map(move |step| first + step);
        let index = (0..outer).flat_map(|n| places.iter().map(move |at| at + (n * room) as u32));
        let index = index.flat_map(window).collect();
        let gathered = self.graph.pick(padded, index, vec![shape[0], shape[1], count, taps], rows)?;
        let mut made = self.graph.fold(fold, gathered, &[3])?;
        if operator == "AveragePool" {
            made = self.per_count(made, vec![count, 1], windows.taps_inside(counts_padding))?;
        }
        self.graph.reshape(made, [&shape[..2], &windows.out[..]].concat(), rows)
    }

    /// Pads the axes from `first` on with the number `with`, so that every window lies inside.
    fn padded(&mut self, a: Id, first: usize, windows: &Windows, with: f32) -> Result<Id> {
        let outer: usize =
            self.graph.shape(a).iter().product::<usize>() / windows.sizes.iter().product::<usize>().max(1);
        let sizes = windows.padded_sizes();
        if exceeds_gathered(sizes.iter().copied().chain([outer])) {
            return Err(refused(format!("padded sizes are {sizes:?}, expected at most {GATHERED_MAX} elements")));
        }
        let number = self.scalar(with)?;
        let mut made = a;
        for (n, axis) in (0..windows.sizes.len()).map(|n| (n, first + n)) {
            let mut parts = Vec::with_capacity(3);
            for (place, count) in windows.padding(n).into_iter().enumerate() {
                if count > 0 {
                    let mut shape = self.graph.shape(made).to_vec();
                    shape[axis] = count;
                    let index = vec![0; shape.iter().product()];
                    parts.push(self.graph.pick(number, index, shape, self.rows(made))?);
                }
                if place == 0 {
                    parts.push(made);
                }
            }
            if parts.len() > 1 {
                made = self.graph.concat(axis, &parts)?;
            }
        }
        Ok(made)
    }
}
