//! Convolutions, pools, and normalisation of channels, over `[batch, channels, axes..]`.

use super::arithmetic::Arithmetic;
use super::array::{Array, strides};
use super::call::Call;
use super::stop::Stop;

/// Work per normalised number, in multiply-adds.
const NORM_WORK: usize = 24;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let made = match call.operator() {
        "Conv" => convolution(call, arithmetic)?,
        "MaxPool" | "AveragePool" => pool(call, arithmetic)?,
        "GlobalMaxPool" | "GlobalAveragePool" => pool_of_all(call, arithmetic)?,
        "InstanceNormalization" | "GroupNormalization" => normalised(call, arithmetic)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

fn invalid(a: &Array) -> Stop {
    Stop::Invalid(format!("the input has shape {:?}, expected a batch, channels and further axes", a.shape))
}

/// Positions of a kernel along the axes after the channels.
struct Kernel {
    sizes: Vec<usize>,
    own: Vec<usize>,
    out: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    before: Vec<usize>,
    after: Vec<usize>,
}

impl Kernel {
    fn read(call: &Call<'_>, sizes: &[usize], own: Vec<usize>) -> Result<Kernel, Stop> {
        let axes = sizes.len();
        let list = |name: &str, count: usize, default: i64| -> Result<Vec<usize>, Stop> {
            let all = call.ints(name).unwrap_or_else(|| vec![default; count]);
            let all: Option<Vec<usize>> = all.iter().map(|&n| usize::try_from(n).ok()).collect();
            let all = all.filter(|all| all.len() == count);
            all.ok_or_else(|| Stop::Invalid(format!("`{name}` is invalid, expected {count} numbers of at least 0")))
        };
        let (strides, dilations) = (list("strides", axes, 1)?, list("dilations", axes, 1)?);
        let pads = list("pads", 2 * axes, 0)?;
        let (mut before, mut after) = (pads[..axes].to_vec(), pads[axes..].to_vec());
        let mut out = Vec::with_capacity(axes);
        for (n, &size) in sizes.iter().enumerate() {
            if strides[n] == 0 || own.get(n).is_none_or(|&k| k == 0) {
                return Err(Stop::Invalid("a stride or a kernel size is 0".into()));
            }
            let reach = (own[n] - 1) * dilations[n] + 1;
            match call.text("auto_pad", "NOTSET") {
                "NOTSET" => {}
                "VALID" => (before[n], after[n]) = (0, 0),
                name => {
                    let wanted = size.div_ceil(strides[n]);
                    let all = ((wanted.max(1) - 1) * strides[n] + reach).saturating_sub(size);
                    let more = all.div_ceil(2);
                    (before[n], after[n]) = if name == "SAME_LOWER" { (more, all - more) } else { (all - more, more) };
                }
            }
            let room = (before[n] + size + after[n]).checked_sub(reach);
            let room = room.ok_or_else(|| {
                Stop::Invalid(format!("a kernel of {reach} elements exceeds the {size} elements of the padded axis"))
            })?;
            let mut count = room / strides[n] + 1;
            if call.is_set("ceil_mode", false) && !room.is_multiple_of(strides[n]) {
                // With `ceil_mode` there is one more window, if that window starts within the input or the padding before the
                // input.
                count += usize::from(count * strides[n] < size + before[n]);
            }
            out.push(count);
        }
        Ok(Kernel { sizes: sizes.to_vec(), own, out, strides, dilations, before, after })
    }

    /// Returns, for each tap of the window at `at`, its index into the axes of the input (`None` in the padding), and whether the
    /// tap lies within the input and its padding.
    fn taps(&self, at: usize) -> Vec<(Option<usize>, bool)> {
        let (own, outs, inner) = (strides(&self.own), strides(&self.out), strides(&self.sizes));
        let tap = |k: usize| {
            let (mut place, mut is_inside) = (Some(0), true);
            for (n, &size) in self.sizes.iter().enumerate() {
                let (p, k) = (at / outs[n] % self.out[n], k / own[n] % self.own[n]);
                let index = p * self.strides[n] + k * self.dilations[n];
                is_inside &= index < self.before[n] + size + self.after[n];
                let index = index.checked_sub(self.before[n]).filter(|&index| index < size);
                place = place.zip(index).map(|(place, index)| place + index * inner[n]);
            }
            (place, is_inside)
        };
        (0..self.own.iter().product()).map(tap).collect()
    }
}

fn convolution(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, weights) = (call.input(0)?, call.input(1)?);
    let groups = usize::try_from(call.int("group", 1)).unwrap_or(0);
    let fits = a.shape.len() > 2 && a.shape.len() == weights.shape.len() && groups > 0;
    if !fits || weights.shape[1] * groups != a.shape[1] || !weights.shape[0].is_multiple_of(groups) {
        return Err(Stop::Invalid(format!(
            "weights of shape {:?}, expected ones whose channels and groups match an input of shape {:?}",
            weights.shape, a.shape
        )));
    }
    let kernel = Kernel::read(call, &a.shape[2..], weights.shape[2..].to_vec())?;
    let (batch, channels, made) = (a.shape[0], a.shape[1], weights.shape[0]);
    let (size, count) = (kernel.sizes.iter().product::<usize>(), kernel.out.iter().product::<usize>());
    let shape = [&[batch, made], &kernel.out[..]].concat();
    let depth: usize = weights.shape[1..].iter().product();
    arithmetic.room(&shape, depth.max(1))?;
    let bias = call.optional(2).map(Array::reals).transpose()?;
    let (x, w, taps) = (a.reals()?, weights.reals()?, depth / weights.shape[1].max(1));
    let mut numbers = vec![0.0; shape.iter().product()];
    for at in 0..count {
        let places = kernel.taps(at);
        for (n, m) in (0..batch).flat_map(|n| (0..made).map(move |m| (n, m))) {
            let first = m / (made / groups) * weights.shape[1];
            let bias = bias.map_or(0.0, |bias| bias[m]);
            let (mut sum, mut magnitude) = (bias, bias.abs());
            for (c, (k, (place, _))) in
                (0..weights.shape[1]).flat_map(|c| places.iter().enumerate().map(move |t| (c, t)))
            {
                let Some(place) = place else { continue };
                let term = x[(n * channels + first + c) * size + place] * w[m * depth + c * taps + k];
                sum += term;
                magnitude += term.abs();
            }
            numbers[(n * made + m) * count + at] = arithmetic.sum(sum, magnitude);
        }
    }
    Ok(Array::real(shape, numbers))
}

fn pool(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let own = call.ints("kernel_shape").unwrap_or_default();
    let own: Vec<usize> = own.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
    if a.shape.len() < 3 || own.len() != a.shape.len() - 2 {
        return Err(invalid(a));
    }
    let kernel = Kernel::read(call, &a.shape[2..], own)?;
    let (is_max, counts_padding) = (call.operator() == "MaxPool", call.is_set("count_include_pad", false));
    let (size, count) = (kernel.sizes.iter().product::<usize>(), kernel.out.iter().product::<usize>());
    let shape = [&a.shape[..2], &kernel.out[..]].concat();
    arithmetic.room(&shape, 4 * kernel.own.iter().product::<usize>())?;
    let mut numbers = vec![0.0; shape.iter().product()];
    for at in 0..count {
        let places = kernel.taps(at);
        let counted =
            places.iter().filter(|(place, is_inside)| if counts_padding { *is_inside } else { place.is_some() });
        let counted = counted.count() as f64;
        for (n, plane) in a.reals()?.chunks_exact(size.max(1)).enumerate() {
            let retained: Vec<f64> = places.iter().filter_map(|(place, _)| place.map(|place| plane[place])).collect();
            numbers[n * count + at] = match is_max {
                true => {
                    retained.iter().fold(f64::NEG_INFINITY, |most, &x| if x.is_nan() || x > most { x } else { most })
                }
                false => {
                    let sum = arithmetic.sum(retained.iter().sum(), retained.iter().map(|x| x.abs()).sum());
                    arithmetic.result(sum / counted)
                }
            };
        }
    }
    Ok(Array::real(shape, numbers))
}

fn pool_of_all(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    if a.shape.len() < 3 {
        return Err(invalid(a));
    }
    arithmetic.spend(a.count() * 4)?;
    let size = a.shape[2..].iter().product::<usize>().max(1);
    let largest =
        |plane: &[f64]| plane.iter().fold(f64::NEG_INFINITY, |most, &x| if x.is_nan() || x > most { x } else { most });
    let mut one = |plane: &[f64]| match call.operator() {
        "GlobalMaxPool" => largest(plane),
        _ => {
            let sum = arithmetic.sum(plane.iter().sum(), plane.iter().map(|x| x.abs()).sum());
            arithmetic.result(sum / size as f64)
        }
    };
    let shape = [&a.shape[..2], &vec![1; a.shape.len() - 2]].concat();
    Ok(Array::real(shape, a.reals()?.chunks_exact(size).map(&mut one).collect()))
}

/// Normalizes each channel of each entry of the batch, or each group of channels of an entry.
fn normalised(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, scale, bias) = (call.input(0)?, call.input(1)?, call.input(2)?);
    if a.shape.len() < 3 {
        return Err(invalid(a));
    }
    let channels = a.shape[1];
    let groups = match call.operator() {
        "InstanceNormalization" => channels,
        _ => usize::try_from(call.int("num_groups", 0)).unwrap_or(0),
    };
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(Stop::Invalid(format!("{groups} groups do not divide {channels} channels")));
    }
    let epsilon = call.float("epsilon", 1e-5);
    arithmetic.spend(a.count() * NORM_WORK)?;
    let inner: usize = a.shape[2..].iter().product();
    let (scale, bias) = (scale.reals()?, bias.reals()?);
    if [scale, bias].iter().any(|all| all.len() != channels && all.len() != groups) {
        return Err(Stop::Invalid(format!("got {} scales, expected {channels}", scale.len())));
    }
    let of_channel = |all: &[f64], c: usize| if all.len() == channels { all[c] } else { all[c / (channels / groups)] };
    let mut made = Vec::with_capacity(a.count());
    for numbers in a.reals()?.chunks_exact((channels / groups * inner).max(1)) {
        let count = numbers.len() as f64;
        let sum = arithmetic.sum(numbers.iter().sum(), numbers.iter().map(|x| x.abs()).sum());
        let mean = arithmetic.result(sum / count);
        let away: Vec<f64> = numbers.iter().map(|x| arithmetic.result(x - mean)).collect();
        let squares: f64 = away.iter().map(|x| x * x).sum();
        let variance = arithmetic.sum(squares, squares) / count;
        let root = arithmetic.result((variance + epsilon).sqrt());
        made.extend(away.iter().map(|x| arithmetic.result(x / root)));
    }
    for (n, x) in made.iter_mut().enumerate() {
        let channel = n / inner.max(1) % channels;
        let scaled = arithmetic.result(*x * of_channel(scale, channel));
        *x = arithmetic.result(scaled + of_channel(bias, channel));
    }
    Ok(Array::real(a.shape.clone(), made))
}
