//! GRU, LSTM and RNN, step by step.

use super::arithmetic::Arithmetic;
use super::array::Array;
use super::call::Call;
use super::stop::Stop;

/// Work of a gate's function, in multiply-adds.
const GATE_WORK: usize = 32;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    match call.operator() {
        "GRU" => layer(call, 3, arithmetic).map(Some),
        "LSTM" => layer(call, 4, arithmetic).map(Some),
        "RNN" => layer(call, 1, arithmetic).map(Some),
        _ => Ok(None),
    }
}

/// Weights of a direction; `w` and `r` have a row per gate and state.
struct Weights<'a> {
    w: &'a [f64],
    r: &'a [f64],
    /// Biases of the input, followed by biases of the state; `None` stands for zeros.
    bias: Option<&'a [f64]>,
    gates: usize,
    depth: usize,
    hidden: usize,
}

impl Weights<'_> {
    /// Returns the product of weight row `gate * hidden + n` with an input (`is_input`) or a state, with its bias, and the sum of
    /// the magnitudes of its terms.
    fn of(&self, is_input: bool, gate: usize, n: usize, x: &[f64]) -> (f64, f64) {
        let row = gate * self.hidden + n;
        let (matrix, width) = if is_input { (self.w, self.depth) } else { (self.r, self.hidden) };
        let first = if is_input { 0 } else { self.gates * self.hidden };
        let bias = self.bias.map_or(0.0, |bias| bias[first + row]);
        let terms = || matrix[row * width..][..width].iter().zip(x).map(|(w, x)| w * x);
        (bias + terms().sum::<f64>(), bias.abs() + terms().map(f64::abs).sum::<f64>())
    }
}

fn sigmoid(x: f64, arithmetic: &mut Arithmetic) -> f64 {
    arithmetic.result(1.0 / (1.0 + (-x).exp()))
}

/// Computes the next hidden state and cell state.
fn step(
    call: &Call<'_>,
    weights: &Weights<'_>,
    x: &[f64],
    (h, c): (&[f64], &[f64]),
    arithmetic: &mut Arithmetic,
) -> (Vec<f64>, Vec<f64>) {
    let hidden = weights.hidden;
    let mut both = |gate: usize, n: usize| {
        let ((a, a_size), (b, b_size)) = (weights.of(true, gate, n, x), weights.of(false, gate, n, h));
        arithmetic.sum(a + b, a_size + b_size)
    };
    match weights.gates {
        1 => {
            let sums: Vec<f64> = (0..hidden).map(|n| both(0, n)).collect();
            (sums.into_iter().map(|sum| arithmetic.result(sum.tanh())).collect(), Vec::new())
        }
        4 => {
            let sums: Vec<[f64; 4]> = (0..hidden).map(|n| std::array::from_fn(|gate| both(gate, n))).collect();
            let mut made = (Vec::new(), Vec::new());
            for (n, [input, output, forget, new]) in sums.into_iter().enumerate() {
                let (input, output, forget) =
                    (sigmoid(input, arithmetic), sigmoid(output, arithmetic), sigmoid(forget, arithmetic));
                let new = arithmetic.result(new.tanh());
                let (retained, taken) = (forget * c[n], input * new);
                let cell = arithmetic.sum(retained + taken, retained.abs() + taken.abs());
                let seen = arithmetic.result(cell.tanh());
                made.0.push(arithmetic.result(output * seen));
                made.1.push(cell);
            }
            made
        }
        _ => {
            let sums: Vec<[f64; 2]> = (0..hidden).map(|n| [both(0, n), both(1, n)]).collect();
            let gates: Vec<[f64; 2]> =
                sums.into_iter().map(|[z, r]| [sigmoid(z, arithmetic), sigmoid(r, arithmetic)]).collect();
            let scaled: Vec<f64> = gates.iter().zip(h).map(|([_, r], h)| arithmetic.result(r * h)).collect();
            let is_after = call.is_set("linear_before_reset", false);
            let mut made = Vec::new();
            for (n, [z, r]) in gates.iter().enumerate() {
                let (a, a_size) = weights.of(true, 2, n, x);
                let (b, b_size) = if is_after {
                    let (b, b_size) = weights.of(false, 2, n, h);
                    (r * b, r * b_size)
                } else {
                    weights.of(false, 2, n, &scaled)
                };
                let sum = arithmetic.sum(a + b, a_size + b_size);
                let new = arithmetic.result(sum.tanh());
                let (taken, retained) = ((1.0 - z) * new, z * h[n]);
                made.push(arithmetic.sum(taken + retained, new.abs() + retained.abs()));
            }
            (made, Vec::new())
        }
    }
}

fn layer(call: &Call<'_>, gates: usize, arithmetic: &mut Arithmetic) -> Result<Vec<Array>, Stop> {
    let unknown = |what: &str| Err(Stop::Unknown(format!("`{}` with {what}", call.operator())));
    let functions: &[&str] = match gates {
        1 => &["Tanh"],
        3 => &["Sigmoid", "Tanh"],
        _ => &["Sigmoid", "Tanh", "Tanh"],
    };
    for attribute in &call.node.attribute {
        match attribute.name.as_deref() {
            Some("activations") if attribute.strings.chunks(functions.len()).all(|own| own == functions) => {}
            Some("activations" | "activation_alpha" | "activation_beta") => return unknown("other activations"),
            _ => {}
        }
    }
    if call.given_float("clip").is_some() || call.is_set("input_forget", false) || call.optional(7).is_some() {
        return unknown("clipping, coupled gates or peepholes");
    }
    let reverse: &[bool] = match call.text("direction", "forward") {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        _ => return unknown("another direction"),
    };
    let is_batch_first = call.is_set("layout", false);
    let (x, w, r) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let invalid = || {
        Stop::Invalid(format!(
            "a sequence of shape {:?}, expected one that matches weights of shapes {:?} and {:?}",
            x.shape, w.shape, r.shape
        ))
    };
    let (&[first, second, depth], &[directions, rows, of_input], &[_, _, hidden]) =
        (&x.shape[..], &w.shape[..], &r.shape[..])
    else {
        return Err(invalid());
    };
    let (steps, batch) = if is_batch_first { (second, first) } else { (first, second) };
    if directions != reverse.len()
        || rows != gates * hidden
        || of_input != depth
        || r.shape != [directions, rows, hidden]
        || call.optional(3).is_some_and(|bias| bias.shape != [directions, 2 * rows])
    {
        return Err(invalid());
    }
    let work = directions.saturating_mul(steps).saturating_mul(batch).saturating_mul(rows);
    arithmetic.spend(work.saturating_mul(depth + hidden + GATE_WORK))?;
    let of_states = if is_batch_first { vec![batch, directions, hidden] } else { vec![directions, batch, hidden] };
    for state in [call.optional(5), call.optional(6)].into_iter().flatten() {
        if state.shape != of_states {
            return Err(invalid());
        }
    }
    let lengths = call.optional(4).map(|lengths| lengths.as_reals());
    if lengths.as_ref().is_some_and(|lengths| lengths.len() != batch) {
        return Err(invalid());
    }
    let at_state = |direction: usize, row: usize| match is_batch_first {
        true => (row * directions + direction) * hidden,
        false => (direction * batch + row) * hidden,
    };
    let at_step = |t: usize, direction: usize, row: usize| match is_batch_first {
        true => ((row * steps + t) * directions + direction) * hidden,
        false => ((t * directions + direction) * batch + row) * hidden,
    };
    let mut all = vec![0.0; steps * directions * batch * hidden];
    let mut last = [vec![0.0; directions * batch * hidden], vec![0.0; directions * batch * hidden]];
    for (direction, &is_reverse) in reverse.iter().enumerate() {
        let bias = call.optional(3).map(Array::reals).transpose()?;
        let weights = Weights {
            w: &w.reals()?[direction * rows * depth..][..rows * depth],
            r: &r.reals()?[direction * rows * hidden..][..rows * hidden],
            bias: bias.map(|bias| &bias[direction * 2 * rows..][..2 * rows]),
            gates,
            depth,
            hidden,
        };
        for row in 0..batch {
            let state = |n: usize| -> Result<Vec<f64>, Stop> {
                match call.optional(n) {
                    Some(state) => Ok(state.reals()?[at_state(direction, row)..][..hidden].to_vec()),
                    None => Ok(vec![0.0; hidden]),
                }
            };
            let (mut h, mut c) = (state(5)?, state(6)?);
            let count =
                lengths.as_ref().map_or(steps, |lengths| (0..steps).filter(|&t| (t as f64) < lengths[row]).count());
            for n in 0..count {
                let t = if is_reverse { count - 1 - n } else { n };
                let from = if is_batch_first { row * steps + t } else { t * batch + row } * depth;
                (h, c) = step(call, &weights, &x.reals()?[from..][..depth], (&h, &c), arithmetic);
                all[at_step(t, direction, row)..][..hidden].copy_from_slice(&h);
            }
            last[0][at_state(direction, row)..][..hidden].copy_from_slice(&h);
            last[1][at_state(direction, row)..][..c.len()].copy_from_slice(&c);
        }
    }
    let shape =
        if is_batch_first { vec![batch, steps, directions, hidden] } else { vec![steps, directions, batch, hidden] };
    let [h, c] = last;
    Ok(vec![Array::real(shape, all), Array::real(of_states.clone(), h), Array::real(of_states, c)])
}
