//! Attention of several heads and rotary position embeddings, by loops that follow their definitions.

use super::arithmetic::Arithmetic;
use super::array::{Array, Element};
use super::call::Call;
use super::fused::MICROSOFT;
use super::stop::Stop;

/// Work of an exponential, in multiply-adds.
const FUNCTION_WORK: usize = 24;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let made = match call.operator() {
        "Attention" => standard(call, arithmetic)?,
        "RotaryEmbedding" => rotary(call, [1, 2, 3], arithmetic)?,
        operator => match operator.strip_prefix(MICROSOFT) {
            Some("MultiHeadAttention") => multi_head(call, arithmetic)?,
            Some("GroupQueryAttention") => grouped(call, arithmetic)?,
            Some("RotaryEmbedding") => rotary(call, [2, 3, 1], arithmetic)?,
            _ => return Ok(None),
        },
    };
    Ok(Some(vec![made]))
}

fn invalid(what: String) -> Stop {
    Stop::Invalid(what)
}

/// Numbers of queries, keys or values, `[batch, heads, steps, width]`.
struct Heads {
    numbers: Vec<f64>,
    sizes: [usize; 4],
}

impl Heads {
    /// Reads `[batch, steps, heads * width]`, or an array that has four axes already.
    fn read(a: &Array, heads: usize) -> Result<Heads, Stop> {
        let numbers = a.reals()?;
        match a.shape[..] {
            [batch, of_heads, steps, width] if of_heads == heads => {
                Ok(Heads { numbers: numbers.to_vec(), sizes: [batch, heads, steps, width] })
            }
            [batch, steps, all] if heads > 0 && all.is_multiple_of(heads) => {
                let width = all / heads;
                let mut made = Vec::with_capacity(numbers.len());
                for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                    for s in 0..steps {
                        made.extend_from_slice(&numbers[((b * steps + s) * heads + h) * width..][..width]);
                    }
                }
                Ok(Heads { numbers: made, sizes: [batch, heads, steps, width] })
            }
            _ => Err(invalid(format!(
                "shape {:?}, expected three axes of which the last splits into {heads} heads, or four axes",
                a.shape
            ))),
        }
    }

    fn row(&self, b: usize, h: usize, s: usize) -> &[f64] {
        let [batch, heads, steps, width] = self.sizes;
        // A batch of size 1 is shared by all entries.
        let b = if batch == 1 { 0 } else { b };
        &self.numbers[((b * heads + h) * steps + s) * width..][..width]
    }

    /// Returns the result with three axes if the operator's inputs have three.
    fn joined(self, is_flat: bool) -> Array {
        let [batch, heads, steps, width] = self.sizes;
        if !is_flat {
            return Array::real(self.sizes.to_vec(), self.numbers);
        }
        let mut made = Vec::with_capacity(self.numbers.len());
        for (b, s) in (0..batch).flat_map(|b| (0..steps).map(move |s| (b, s))) {
            (0..heads).for_each(|h| made.extend_from_slice(self.row(b, h, s)));
        }
        Array::real(vec![batch, steps, heads * width], made)
    }
}

/// Number that is added to the product of query `i` and key `j`, given the index in the batch, the head, `i` and `j`.
type Bias<'a> = Box<dyn Fn([usize; 4]) -> f64 + 'a>;

fn allowed<'a>(is_allowed: impl Fn([usize; 4]) -> bool + 'a) -> Bias<'a> {
    Box::new(move |at| if is_allowed(at) { 0.0 } else { f64::NEG_INFINITY })
}

/// Numbers broadcast to `[batch, heads, queries, keys]`.
fn spread(a: &Array, [batch, heads, queries, keys]: [usize; 4]) -> Result<(Vec<f64>, [usize; 3]), Stop> {
    let made = a.spread(&[batch, heads, queries, keys])?;
    Ok((made.as_reals(), [heads, queries, keys]))
}

fn at(of: &(Vec<f64>, [usize; 3]), [b, h, i, j]: [usize; 4]) -> f64 {
    let (numbers, [heads, queries, keys]) = of;
    numbers[((b * heads + h) * queries + i) * keys + j]
}

struct Attention<'a> {
    q: Heads,
    k: Heads,
    v: Heads,
    scale: f64,
    softcap: f64,
    biases: Vec<Bias<'a>>,
}

impl Attention<'_> {
    fn sizes(&self) -> [usize; 4] {
        let [batch, heads, queries, _] = self.q.sizes;
        [batch.max(self.k.sizes[0]), heads, queries, self.k.sizes[2]]
    }

    fn run(&self, arithmetic: &mut Arithmetic) -> Result<Heads, Stop> {
        let [batch, heads, queries, keys] = self.sizes();
        let [_, of_k, _, width] = self.k.sizes;
        let columns = self.v.sizes[3];
        if of_k == 0
            || !heads.is_multiple_of(of_k)
            || self.q.sizes[3] != width
            || self.v.sizes[..3] != self.k.sizes[..3]
        {
            return Err(invalid(format!(
                "queries of shape {:?}, keys {:?}, values {:?}: expected heads of equal width, as many values as keys, and query heads in groups",
                self.q.sizes, self.k.sizes, self.v.sizes
            )));
        }
        let products = batch.saturating_mul(heads).saturating_mul(queries).saturating_mul(keys);
        arithmetic.spend(products.saturating_mul(width + columns + FUNCTION_WORK))?;
        let mut made = Vec::with_capacity(batch * heads * queries * columns);
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let of = h / (heads / of_k);
            for i in 0..queries {
                let mut scores = Vec::with_capacity(keys);
                for j in 0..keys {
                    let terms = self.q.row(b, h, i).iter().zip(self.k.row(b, of, j)).map(|(x, y)| x * y);
                    let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), x: f64| (s + x, m + x.abs()));
                    let product = arithmetic.sum(sum, magnitude);
                    let mut score = arithmetic.result(product * self.scale);
                    if self.softcap > 0.0 {
                        score = arithmetic.result(self.softcap * (score / self.softcap).tanh());
                    }
                    for bias in &self.biases {
                        score = arithmetic.result(score + bias([b, h, i, j]));
                    }
                    scores.push(score);
                }
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let most = if most == f64::NEG_INFINITY { 0.0 } else { most };
                let each: Vec<f64> = scores.iter().map(|x| arithmetic.result((x - most).exp())).collect();
                let total: f64 = each.iter().sum();
                let total = if total == 0.0 { 1.0 } else { arithmetic.sum(total, total) };
                let weights: Vec<f64> = each.iter().map(|x| arithmetic.result(x / total)).collect();
                for column in 0..columns {
                    let terms = weights.iter().enumerate().map(|(j, w)| w * self.v.row(b, of, j)[column]);
                    let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), x: f64| (s + x, m + x.abs()));
                    made.push(arithmetic.sum(sum, magnitude));
                }
            }
        }
        Ok(Heads { numbers: made, sizes: [batch, heads, queries, columns] })
    }
}

fn root_scale(width: usize) -> f64 {
    1.0 / (width as f64).sqrt()
}

fn heads_of(call: &Call<'_>, name: &str, default: usize) -> Result<usize, Stop> {
    let got = call.int(name, default as i64);
    usize::try_from(got)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| invalid(format!("`{name}` is {got}, expected 1 or more")))
}

fn no_inputs(call: &Call<'_>, inputs: &[usize]) -> Result<(), Stop> {
    match inputs.iter().find(|n| call.optional(**n).is_some()) {
        Some(n) => Err(Stop::Unknown(format!("input {n} of `{}`", call.operator()))),
        None => Ok(()),
    }
}

fn standard(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    no_inputs(call, &[4, 5])?;
    let is_flat = call.input(0)?.shape.len() == 3;
    let own = |n: usize| Ok::<usize, Stop>(call.input(n)?.shape.get(1).copied().filter(|_| !is_flat).unwrap_or(1));
    let (of_q, of_k) = (heads_of(call, "q_num_heads", own(0)?)?, heads_of(call, "kv_num_heads", own(1)?)?);
    let read = |n: usize, heads: usize| Heads::read(call.input(n)?, heads);
    let (q, k, v) = (read(0, of_q)?, read(1, of_k)?, read(2, of_k)?);
    let scale = call.given_float("scale").unwrap_or(root_scale(q.sizes[3]));
    let mut attention = Attention { q, k, v, scale, softcap: call.float("softcap", 0.0), biases: Vec::new() };
    let sizes = attention.sizes();
    let steps = sizes[2] as i64;
    let lengths = call.optional(6).map(Array::wholes).transpose()?.map(<[i64]>::to_vec);
    let (left, right) = (call.int("left_window_size", -1), call.int("right_window_size", -1));
    let is_causal = call.is_set("is_causal", false);
    let mut biases: Vec<Bias<'_>> = Vec::new();
    let length = move |b: usize| lengths.as_ref().map(|all| all[if all.len() == 1 { 0 } else { b }]);
    biases.push(allowed(move |[b, _, i, j]| {
        let (i, j) = (i as i64, j as i64);
        let place = length(b).map_or(0, |length| length - steps) + i;
        let is_valid = length(b).is_none_or(|length| j < length);
        let is_past = !is_causal || j <= place;
        is_valid && is_past && (left < 0 || j >= place - left) && (right < 0 || j <= place + right)
    }));
    if let Some(mask) = call.optional(3) {
        let is_truth = mask.element == Element::Truth;
        let mask = spread(mask, sizes)?;
        biases.push(match is_truth {
            true => allowed(move |place| at(&mask, place) != 0.0),
            false => Box::new(move |place| at(&mask, place)),
        });
    }
    attention.biases = biases;
    Ok(attention.run(arithmetic)?.joined(is_flat))
}

fn multi_head(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    no_inputs(call, &[6, 7, 8, 9])?;
    let heads = heads_of(call, "num_heads", 0)?;
    let mut parts = [call.input(0)?.clone(), call.input(1)?.clone(), call.input(2)?.clone()];
    if let Some(bias) = call.optional(3) {
        let (bias, mut first) = (bias.reals()?, 0);
        for part in &mut parts {
            let width = part.shape.last().copied().unwrap_or(0);
            let own = bias.get(first..first + width).ok_or_else(|| {
                invalid(format!(
                    "the bias has {} elements, expected one per element of queries, keys and values",
                    bias.len()
                ))
            })?;
            let sums = part.reals()?.iter().enumerate().map(|(n, x)| arithmetic.result(x + own[n % width])).collect();
            *part = Array::real(part.shape.clone(), sums);
            first += width;
        }
    }
    let [q, k, v] = parts.each_ref().map(|part| Heads::read(part, heads));
    let (q, k, v) = (q?, k?, v?);
    let scale = call.given_float("scale").filter(|scale| *scale != 0.0).unwrap_or(root_scale(q.sizes[3]));
    let mut attention = Attention { q, k, v, scale, softcap: 0.0, biases: Vec::new() };
    let sizes = attention.sizes();
    let mut biases: Vec<Bias<'_>> = Vec::new();
    if call.is_set("unidirectional", false) {
        biases.push(allowed(|[_, _, i, j]| j <= i));
    }
    if let Some(mask) = call.optional(4) {
        let value = call.float("mask_filter_value", -10_000.0);
        let shape = match mask.shape[..] {
            [batch, keys] if keys == sizes[3] => vec![batch, 1, 1, keys],
            [batch, queries, keys] => vec![batch, 1, queries, keys],
            _ => return Err(Stop::Unknown(format!("a mask of shape {:?}", mask.shape))),
        };
        let mask = spread(&mask.shaped(shape)?, sizes)?;
        biases.push(Box::new(move |place| if at(&mask, place) > 0.0 { 0.0 } else { value }));
    }
    if let Some(bias) = call.optional(5) {
        let bias = spread(bias, sizes)?;
        biases.push(Box::new(move |place| at(&bias, place)));
    }
    attention.biases = biases;
    Ok(attention.run(arithmetic)?.joined(true))
}

fn grouped(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    no_inputs(call, &[3, 4, 11, 12, 13])?;
    let (of_q, of_k) = (heads_of(call, "num_heads", 0)?, heads_of(call, "kv_num_heads", 0)?);
    if call.int("smooth_softmax", 0) > 0 || call.int("qk_output", 0) != 0 {
        return Err(Stop::Unknown("`smooth_softmax` or `qk_output`".into()));
    }
    let (mut q, mut k, v) = match call.optional(1) {
        Some(k) => (Heads::read(call.input(0)?, of_q)?, Heads::read(k, of_k)?, Heads::read(call.input(2)?, of_k)?),
        None => {
            let all = Heads::read(call.input(0)?, of_q + 2 * of_k)?;
            let [batch, heads, steps, width] = all.sizes;
            let part = |first: usize, count: usize| Heads {
                numbers: (0..batch)
                    .flat_map(|b| all.numbers[(b * heads + first) * steps * width..][..count * steps * width].to_vec())
                    .collect(),
                sizes: [batch, count, steps, width],
            };
            (part(0, of_q), part(of_q, of_k), part(of_q + of_k, of_k))
        }
    };
    let keys = k.sizes[2];
    if call.integers(6)? != [keys as i64] || q.sizes[2] != keys {
        return Err(Stop::Unknown("keys of the past".into()));
    }
    if call.is_set("do_rotary", false) {
        let is_interleaved = call.is_set("rotary_interleaved", false);
        let (cos, sin) = (call.input(7)?, call.input(8)?);
        let places = call.optional(9).map(Array::wholes).transpose()?.map(<[i64]>::to_vec);
        let place = |b: usize, s: usize| match &places {
            Some(all) => all[(b * keys + s) % all.len()],
            None => s as i64,
        };
        q = rotated(q, [cos, sin], &|b, s| Ok(place(b, s) as usize), is_interleaved, arithmetic)?;
        k = rotated(k, [cos, sin], &|b, s| Ok(place(b, s) as usize), is_interleaved, arithmetic)?;
    }
    let scale = call.given_float("scale").filter(|scale| *scale != 0.0).unwrap_or(root_scale(q.sizes[3]));
    let mut attention = Attention { q, k, v, scale, softcap: call.float("softcap", 0.0), biases: Vec::new() };
    let (last, window) = (call.integers(5)?, call.int("local_window_size", -1));
    let mut biases: Vec<Bias<'_>> = vec![allowed(move |[b, _, i, j]| {
        let (i, j) = (i as i64, j as i64);
        j <= i && j <= last[if last.len() == 1 { 0 } else { b }] && (window < 0 || j > i - window.max(1))
    })];
    if let Some(bias) = call.optional(10) {
        let bias = spread(bias, attention.sizes())?;
        biases.push(Box::new(move |place| at(&bias, place)));
    }
    attention.biases = biases;
    Ok(attention.run(arithmetic)?.joined(true))
}

/// Rotates heads by the angles at position `place(entry, step)`.
fn rotated(
    heads: Heads,
    [cos, sin]: [&Array; 2],
    place: &dyn Fn(usize, usize) -> Result<usize, Stop>,
    is_interleaved: bool,
    arithmetic: &mut Arithmetic,
) -> Result<Heads, Stop> {
    let [batch, count, steps, width] = heads.sizes;
    let half = cos.shape.last().copied().unwrap_or(0);
    if 2 * half > width || sin.shape != cos.shape {
        return Err(invalid(format!(
            "cosines of shape {:?} and sines of shape {:?}, expected equal shapes, for heads of {width} elements",
            cos.shape, sin.shape
        )));
    }
    arithmetic.spend(heads.numbers.len() * 4)?;
    let (cos, sin) = (cos.reals()?, sin.reals()?);
    let mut made = heads.numbers.clone();
    for (b, h) in (0..batch).flat_map(|b| (0..count).map(move |h| (b, h))) {
        for s in 0..steps {
            let first = place(b, s)? * half;
            let outside = || {
                invalid(format!(
                    "position {}, expected one below the {} cached positions",
                    first / half.max(1),
                    cos.len() / half.max(1)
                ))
            };
            let cos = cos.get(first..first + half).ok_or_else(outside)?;
            let sin = sin.get(first..first + half).ok_or_else(outside)?;
            let row = heads.row(b, h, s);
            let to = &mut made[((b * count + h) * steps + s) * width..][..width];
            for n in 0..half {
                let (left, right) = if is_interleaved { (2 * n, 2 * n + 1) } else { (n, n + half) };
                let (x, y) = (row[left], row[right]);
                let sum = |a: f64, b: f64, arithmetic: &mut Arithmetic| arithmetic.sum(a + b, a.abs() + b.abs());
                to[left] = sum(cos[n] * x, -sin[n] * y, arithmetic);
                to[right] = sum(sin[n] * x, cos[n] * y, arithmetic);
            }
        }
    }
    Ok(Heads { numbers: made, sizes: heads.sizes })
}

/// Evaluates a rotary embedding; `inputs` are the indices of the inputs with cosines, sines and positions.
fn rotary(call: &Call<'_>, inputs: [usize; 3], arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, cos, sin) = (call.input(0)?, call.input(inputs[0])?, call.input(inputs[1])?);
    let is_own = inputs[0] == 2;
    if call.is_set("is_packed_batching", false) {
        return Err(Stop::Unknown("`is_packed_batching`".into()));
    }
    let half = cos.shape.last().copied().unwrap_or(0);
    let default = match a.shape[..] {
        [_, heads, _, _] => heads,
        [_, _, width] if is_own => width / (2 * half).max(1),
        _ => 0,
    };
    let heads = match call.int("num_heads", 0) {
        0 => default,
        n => usize::try_from(n).map_err(|_| invalid(format!("`num_heads` is {n}, expected 0 or more")))?,
    };
    let of_heads = Heads::read(a, heads)?;
    let steps = of_heads.sizes[2];
    let places = call.optional(inputs[2]).map(Array::wholes).transpose()?;
    let place = |b: usize, s: usize| {
        let place = match places {
            // A single number is the offset of all positions.
            Some([first]) if is_own => *first + s as i64,
            Some(all) => all[(b * steps + s) % all.len()],
            None => (b * steps + s) as i64 % (cos.count() / half.max(1)).max(1) as i64,
        };
        usize::try_from(place).map_err(|_| invalid(format!("position {place} is negative, expected 0 or more")))
    };
    let is_interleaved = call.is_set("interleaved", false);
    Ok(rotated(of_heads, [cos, sin], &place, is_interleaved, arithmetic)?.joined(a.shape.len() == 3))
}
