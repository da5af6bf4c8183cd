//! Attention of several heads as one operator of ONNX or of ONNX Runtime: two products, with a softmax between them.
//!
//! A query that may attend no key has the result 0, as the operators define.

use rten_onnx::onnx::{DataType, NodeProto};

use super::fused::MICROSOFT;
use super::known::{Attributes, Importer, Known, fixed, refused};
use crate::dense::ir::Id;
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Queries, keys and values `[batch, heads, steps, width]`, and parameters of the attention.
struct Heads {
    q: Id,
    k: Id,
    v: Id,
    /// Factor of the products `q kᵀ`; `None` for 1 / √width.
    scale: Option<f32>,
    /// Bound of the magnitude of the products; 0 for no bound.
    softcap: f32,
    /// Values that are added to the products, for example -inf for masked keys.
    biases: Vec<Id>,
}

/// Returns whether an operator is imported by this module. Its result is a float even if masks and positions are
/// integers.
pub(super) fn is_attention(operator: &str) -> bool {
    let own = operator.strip_prefix(MICROSOFT);
    matches!(operator, "Attention") || matches!(own, Some("MultiHeadAttention" | "GroupQueryAttention"))
}

/// Rejects a node with an input that compiled graphs do not support.
fn check_absent(node: &NodeProto, inputs: &[(usize, &str)]) -> Result<()> {
    match inputs.iter().find(|(n, _)| Importer::has(node, *n)) {
        Some((_, name)) => Err(refused(format!("input `{name}` is not supported"))),
        None => Ok(()),
    }
}

/// Reads an attribute whose only supported value is `only`.
fn check_attribute(attributes: &mut Attributes<'_>, name: &str, only: i64) -> Result<()> {
    match attributes.integer(name, only) {
        got if got == only => Ok(()),
        got => Err(refused(format!("`{name}` is {got}, expected {only}"))),
    }
}

fn count(attributes: &mut Attributes<'_>, name: &str, default: usize) -> Result<usize> {
    let got = attributes.integer(name, default as i64);
    usize::try_from(got)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| refused(format!("`{name}` is {got}, expected 1 or more")))
}

impl Importer {
    /// Returns the result of an attention operator.
    pub(super) fn attention(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Vec<Option<Id>>> {
        let made = match operator.strip_prefix(MICROSOFT) {
            None => self.standard_attention(node, attributes),
            Some("MultiHeadAttention") => self.multi_head_attention(node, attributes),
            Some(_) => self.grouped_attention(node, attributes),
        };
        Ok(vec![Some(made?)])
    }

    fn standard_attention(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        check_absent(node, &[(4, "past_key"), (5, "past_value")])?;
        let parts = [self.value(node, 0)?, self.value(node, 1)?, self.value(node, 2)?];
        let is_flat = self.rank(parts[0]) == 3;
        let axis = |importer: &Importer, id: Id| {
            if is_flat { 1 } else { importer.graph.shape(id).get(1).copied().unwrap_or(1) }
        };
        let (of_q, of_k) = (axis(self, parts[0]), axis(self, parts[1]));
        let (of_q, of_k) = (count(attributes, "q_num_heads", of_q)?, count(attributes, "kv_num_heads", of_k)?);
        let [q, k, v] = [self.heads(parts[0], of_q)?, self.heads(parts[1], of_k)?, self.heads(parts[2], of_k)?];
        let (steps, keys) = (self.graph.shape(q)[2], self.graph.shape(k)[2]);
        // The attribute concerns an output that compiled graphs do not compute.
        attributes.integer("qk_matmul_output_mode", 0);
        let precision = DataType(i32::try_from(attributes.integer("softmax_precision", 1)).unwrap_or(0));
        if precision != DataType::FLOAT && precision != DataType::DOUBLE {
            return Err(refused(format!("`softmax_precision` {precision} is not supported")));
        }
        let is_causal = attributes.integer("is_causal", 0) != 0;
        let windows = ["left_window_size", "right_window_size"].map(|name| attributes.integer(name, -1));
        let lengths = if Importer::has(node, 6) { Some(self.number(node, 6)?) } else { None };
        let mut biases = Vec::new();
        if let Some(lengths) = lengths {
            if windows != [-1, -1] {
                return Err(refused("a key window and `nonpad_kv_seqlen` are not supported together"));
            }
            let lengths = self.column(lengths)?;
            let places: Vec<f32> = (0..keys).map(|j| j as f32).collect();
            let places = self.graph.number(vec![1, keys], places)?;
            let allowed = self.graph.binary(Binary::Less, places, lengths)?;
            biases.push(self.masked(allowed)?);
            if is_causal {
                // A query `i` may attend key `j` if `j <= i + length - steps`.
                let distance = |n: usize| ((n % keys) + steps) as f32 - (n / keys) as f32;
                let distances = self.graph.number(vec![steps, keys], (0..steps * keys).map(distance).collect())?;
                let allowed = self.graph.binary(Binary::LessOrEqual, distances, lengths)?;
                biases.push(self.masked(allowed)?);
            }
        } else {
            let [left, right] = windows;
            let right = if is_causal { 0 } else { right };
            biases.extend(self.window(steps, keys, left, right)?);
        }
        if Importer::has(node, 3) {
            let mask = self.number(node, 3)?;
            if self.graph.shape(mask).last() != Some(&keys) {
                return Err(refused(format!(
                    "the mask has shape {:?}, expected {keys} keys on the last axis",
                    self.graph.shape(mask)
                )));
            }
            let is_truth = node.input.get(3).and_then(|name| self.types.of(name)) == Some(DataType::BOOL);
            biases.push(if is_truth { self.masked(mask)? } else { mask });
        }
        let scale = attributes.take("scale").and_then(|a| a.f);
        let softcap = attributes.float("softcap", 0.0);
        let made = self.attended(Heads { q, k, v, scale, softcap, biases })?;
        if is_flat { self.joined_heads(made) } else { Ok(made) }
    }

    fn multi_head_attention(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        check_absent(
            node,
            &[(6, "past_key"), (7, "past_value"), (8, "past_sequence_length"), (9, "cache_indirection")],
        )?;
        let mut parts = [self.value(node, 0)?, self.value(node, 1)?, self.value(node, 2)?];
        let heads = count(attributes, "num_heads", 1)?;
        if Importer::has(node, 3) {
            let bias = self.value(node, 3)?;
            let mut first = 0;
            for part in &mut parts {
                let [_, _, width] = self.graph.shape(*part)[..] else {
                    return Err(refused(format!(
                        "queries, keys or values have shape {:?}, expected 3 axes if there is a bias",
                        self.graph.shape(*part)
                    )));
                };
                if first + width > self.graph.values[bias].count() {
                    return Err(refused(format!(
                        "the bias has shape {:?}, expected an element per column",
                        self.graph.shape(bias)
                    )));
                }
                let own = self.along(bias, 0, &(first..first + width).collect::<Vec<_>>())?;
                *part = self.graph.binary(Binary::Add, *part, own)?;
                first += width;
            }
        }
        let [q, k, v] = [self.heads(parts[0], heads)?, self.heads(parts[1], heads)?, self.heads(parts[2], heads)?];
        let (steps, keys) = (self.graph.shape(q)[2], self.graph.shape(k)[2]);
        let value = self.scalar(attributes.float("mask_filter_value", -10_000.0))?;
        let right = if attributes.integer("unidirectional", 0) != 0 { 0 } else { -1 };
        let mut biases: Vec<Id> = self.window(steps, keys, -1, right)?.into_iter().collect();
        if Importer::has(node, 4) {
            let mask = self.number(node, 4)?;
            let (shape, rows) = (self.graph.shape(mask).to_vec(), self.rows(mask));
            let to = match shape[..] {
                [batch, of_keys] if of_keys == keys && rows.is_none_or(|r| r == 0) => vec![batch, 1, 1, keys],
                [batch, of_steps, of_keys] if [of_steps, of_keys] == [steps, keys] && rows.is_none_or(|r| r == 0) => {
                    vec![batch, 1, steps, keys]
                }
                _ => {
                    return Err(refused(format!(
                        "the mask has shape {shape:?}, which does not fit {steps} queries and {keys} keys"
                    )));
                }
            };
            let mask = self.graph.reshape(mask, to, rows)?;
            let zero = self.scalar(0.0)?;
            let is_masked = self.graph.binary(Binary::LessOrEqual, mask, zero)?;
            biases.push(self.graph.binary(Binary::Mul, is_masked, value)?);
        }
        if Importer::has(node, 5) {
            biases.push(self.value(node, 5)?);
        }
        let scale = attributes.take("scale").and_then(|a| a.f).filter(|scale| *scale != 0.0);
        let made = self.attended(Heads { q, k, v, scale, softcap: 0.0, biases })?;
        self.joined_heads(made)
    }

    /// Returns causal attention in which each group of query heads shares one head of keys and values.
    fn grouped_attention(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        check_absent(node, &[(3, "past_key"), (4, "past_value"), (11, "head_sink"), (12, "k_scale"), (13, "v_scale")])?;
        let (of_q, of_k) = (count(attributes, "num_heads", 0)?, count(attributes, "kv_num_heads", 0)?);
        for (name, only) in [("smooth_softmax", 0), ("qk_output", 0)] {
            check_attribute(attributes, name, only)?;
        }
        let a = self.value(node, 0)?;
        let parts = match Importer::has(node, 1) {
            true => [a, self.value(node, 1)?, self.value(node, 2)?],
            false => {
                let all = self.graph.shape(a).last().copied().unwrap_or(0);
                if self.rank(a) != 3 || !all.is_multiple_of(of_q + 2 * of_k) {
                    return Err(refused(format!(
                        "packed queries, keys and values have shape {:?}, expected [batch, steps, heads * width]",
                        self.graph.shape(a)
                    )));
                }
                let width = all / (of_q + 2 * of_k);
                let ends = [0, of_q * width, (of_q + of_k) * width, all];
                let part = |n: usize| (ends[n]..ends[n + 1]).collect::<Vec<_>>();
                [self.along(a, 2, &part(0))?, self.along(a, 2, &part(1))?, self.along(a, 2, &part(2))?]
            }
        };
        let [mut q, mut k, v] = [self.heads(parts[0], of_q)?, self.heads(parts[1], of_k)?, self.heads(parts[2], of_k)?];
        let (steps, keys) = (self.graph.shape(q)[2], self.graph.shape(k)[2]);
        let total = self.fixed(node, 6)?;
        if total != [keys as i64] || steps != keys {
            return Err(refused(format!(
                "got {steps} queries, {keys} keys and a total length of {total:?}, expected equal numbers"
            )));
        }
        let is_interleaved = attributes.integer("rotary_interleaved", 0) != 0;
        if attributes.integer("do_rotary", 0) != 0 {
            let angles = match Importer::has(node, 9) {
                true => self.angles_at(node, [7, 8], 9)?,
                false => self.angles(node, [7, 8], 0, steps)?,
            };
            (q, k) = (self.rotated(q, angles, is_interleaved)?, self.rotated(k, angles, is_interleaved)?);
        }
        // A query may attend the keys up to the last valid one, `seqlens_k`.
        let last = self.number(node, 5)?;
        let last = self.column(last)?;
        let places = self.graph.number(vec![1, keys], (0..keys).map(|j| j as f32).collect())?;
        let allowed = self.graph.binary(Binary::LessOrEqual, places, last)?;
        let mut biases = vec![self.masked(allowed)?];
        let window = attributes.integer("local_window_size", -1);
        let left = if window < 0 { -1 } else { (window - 1).max(0) };
        biases.extend(self.window(steps, keys, left, 0)?);
        if Importer::has(node, 10) {
            biases.push(self.value(node, 10)?);
        }
        let scale = attributes.take("scale").and_then(|a| a.f).filter(|scale| *scale != 0.0);
        let softcap = attributes.float("softcap", 0.0);
        let made = self.attended(Heads { q, k, v, scale, softcap, biases })?;
        self.joined_heads(made)
    }

    /// Returns `softmax(f(q kᵀ scale) + biases) v`. With a soft cap, `f(x)` is `softcap tanh(x / softcap)`;
    /// otherwise it is `x`.
    fn attended(&mut self, heads: Heads) -> Result<Id> {
        let Heads { q, k, v, scale, softcap, biases } = heads;
        let [of_q, of_k] = [q, k].map(|id| self.graph.shape(id)[1]);
        if of_k == 0 || !of_q.is_multiple_of(of_k) || self.graph.shape(v)[1] != of_k {
            return Err(refused(format!("{of_q} heads of queries do not fit {of_k} heads of keys")));
        }
        let shared: Vec<usize> = (0..of_q).map(|n| n / (of_q / of_k)).collect();
        let each = |importer: &mut Importer, id| {
            if of_k == of_q || of_k == 1 { Ok(id) } else { importer.along(id, 1, &shared) }
        };
        let (k, v) = (each(self, k)?, each(self, v)?);
        let width = self.graph.shape(q)[3];
        let turned = self.graph.transpose(k, &[0, 1, 3, 2])?;
        let mut scores = self.graph.matmul(q, turned)?;
        let scale = self.scalar(scale.unwrap_or(1.0 / (width as f32).sqrt()))?;
        scores = self.graph.binary(Binary::Mul, scores, scale)?;
        if softcap > 0.0 {
            let [down, up] = [1.0 / softcap, softcap].map(|x| self.scalar(x));
            let inner = self.graph.binary(Binary::Mul, scores, down?)?;
            let bound = self.graph.unary(Unary::Tanh, inner)?;
            scores = self.graph.binary(Binary::Mul, bound, up?)?;
        }
        let is_masked = !biases.is_empty();
        for bias in biases {
            scores = self.binary(Binary::Add, scores, bias)?;
        }
        let mut most = self.graph.fold(Fold::Max, scores, &[3])?;
        if is_masked {
            let least = self.scalar(f32::MIN)?;
            most = self.graph.binary(Binary::Max, most, least)?;
        }
        self.graph.still.push(most);
        let less = self.graph.binary(Binary::Sub, scores, most)?;
        let each = self.graph.unary(Unary::Exp, less)?;
        let mut sum = self.graph.fold(Fold::Sum, each, &[3])?;
        if is_masked {
            // If all keys are masked, all exponentials are 0, and so are the attention weights.
            let is_zero = self.graph.unary(Unary::Not, sum)?;
            sum = self.graph.binary(Binary::Add, sum, is_zero)?;
        }
        let weights = self.graph.binary(Binary::Div, each, sum)?;
        self.graph.matmul(weights, v)
    }

    /// Splits `[batch, steps, heads * width]` into `[batch, heads, steps, width]`; returns a value of four axes
    /// unchanged.
    pub(super) fn heads(&mut self, a: Id, heads: usize) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let is_batch_first = rows.is_none_or(|r| r == 0);
        match shape[..] {
            [_, of_heads, _, _] if of_heads == heads && is_batch_first => Ok(a),
            [batch, steps, width] if heads > 0 && width.is_multiple_of(heads) && is_batch_first => {
                let split = self.graph.reshape(a, vec![batch, steps, heads, width / heads], rows)?;
                self.graph.transpose(split, &[0, 2, 1, 3])
            }
            _ => Err(refused(format!(
                "shape {shape:?} does not split into {heads} heads, expected a batch, steps and their values"
            ))),
        }
    }

    /// Joins the heads of each step to one axis.
    pub(super) fn joined_heads(&mut self, a: Id) -> Result<Id> {
        let [batch, heads, steps, width] = self.graph.shape(a)[..] else {
            return Err(refused(format!("attention heads have shape {:?}, expected 4 axes", self.graph.shape(a))));
        };
        let turned = self.graph.transpose(a, &[0, 2, 1, 3])?;
        self.graph.reshape(turned, vec![batch, steps, heads * width], self.rows(turned))
    }

    /// Reshapes one number per entry of the batch, `[batch]` or `[batch, 1]`, so that it broadcasts over attention scores.
    fn column(&mut self, a: Id) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        match (shape[..].iter().product::<usize>(), rows) {
            (1, None | Some(0)) => self.graph.reshape(a, vec![1; 4], rows),
            _ => Err(refused(format!("lengths have shape {shape:?}, expected one per row"))),
        }
    }

    /// Returns 0 where a mask is set, and -inf elsewhere.
    fn masked(&mut self, allowed: Id) -> Result<Id> {
        let never = self.scalar(f32::NEG_INFINITY)?;
        self.graph.binary(Binary::Drop, allowed, never)
    }

    /// Returns a bias that masks all keys except those at most `left` before a query and at most `right` after it; -1
    /// is no limit.
    fn window(&mut self, steps: usize, keys: usize, left: i64, right: i64) -> Result<Option<Id>> {
        if left < 0 && right < 0 {
            return Ok(None);
        }
        let is_inside =
            |i: i64, j: i64| (left < 0 || j >= i.saturating_sub(left)) && (right < 0 || j <= i.saturating_add(right));
        let bias = |n: usize| match is_inside((n / keys) as i64, (n % keys) as i64) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        };
        self.graph.number(vec![steps, keys], (0..steps * keys).map(bias).collect()).map(Some)
    }
}

/// Cosines and sines of the rotation angles of each step, `[batch, 1, steps, angles]`.
#[derive(Clone, Copy)]
pub(super) struct Angles {
    cos: Id,
    sin: Id,
}

impl Importer {
    /// Returns the result of a rotary position embedding, an operator of ONNX or of ONNX Runtime.
    pub(super) fn rotary(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Vec<Option<Id>>> {
        let is_own = operator.starts_with(MICROSOFT);
        let (caches, positions) = if is_own { ([2, 3], 1) } else { ([1, 2], 3) };
        let is_interleaved = attributes.integer("interleaved", 0) != 0;
        if is_own {
            check_attribute(attributes, "is_packed_batching", 0)?;
            // ONNX Runtime ignores this attribute.
            attributes.float("scale", 1.0);
        }
        let a = self.value(node, 0)?;
        let shape = self.graph.shape(a).to_vec();
        let partial = attributes.integer("rotary_embedding_dim", 0);
        let angles = self.graph.shape(self.value(node, caches[0])?).last().copied().unwrap_or(0);
        let default = match shape[..] {
            [_, heads, _, _] => heads,
            [_, _, width] if is_own && partial == 0 => width / (2 * angles).max(1),
            _ => 0,
        };
        let heads = match attributes.integer("num_heads", 0) {
            0 => default,
            n => usize::try_from(n).map_err(|_| refused(format!("`num_heads` is {n}, expected 0 or more")))?,
        };
        let of_heads = self.heads(a, heads)?;
        let (steps, width) = (self.graph.shape(of_heads)[2], self.graph.shape(of_heads)[3]);
        let expected = if partial == 0 { width as i64 } else { partial };
        if expected != 2 * angles as i64 || 2 * angles > width {
            return Err(refused(format!("{angles} angles do not rotate {expected} of {width} elements of a head")));
        }
        let first = match self.known(node, positions) {
            Ok(Known::Integers(integers)) if is_own && integers.extents.len() == 1 => Some(fixed(integers)?[0]),
            _ => None,
        };
        let angles = match (first, Importer::has(node, positions)) {
            (Some(first), _) => {
                let first = usize::try_from(first)
                    .map_err(|_| refused(format!("position {first} is negative, expected 0 or more")))?;
                self.angles(node, caches, first, steps)?
            }
            (None, true) => self.angles_at(node, caches, positions)?,
            // Without positions, the caches have the angles of each step.
            (None, false) => {
                let [cos, sin] = [self.value(node, caches[0])?, self.value(node, caches[1])?];
                Angles { cos: self.add_head_axis(cos)?, sin: self.add_head_axis(sin)? }
            }
        };
        let made = self.rotated(of_heads, angles, is_interleaved)?;
        Ok(vec![Some(if shape.len() == 3 { self.joined_heads(made)? } else { made })])
    }

    /// Returns the angles of the consecutive positions from `first` on.
    fn angles(&mut self, node: &NodeProto, caches: [usize; 2], first: usize, steps: usize) -> Result<Angles> {
        let at: Vec<usize> = (first..first + steps).collect();
        let [cos, sin] = caches.map(|n| {
            let cache = self.value(node, n)?;
            match self.graph.shape(cache) {
                [positions, _] if *positions >= first + steps => self.along(cache, 0, &at),
                other => Err(refused(format!(
                    "the cache of angles has shape {other:?}, expected a row for each of {} positions",
                    first + steps
                ))),
            }
        });
        Ok(Angles { cos: cos?, sin: sin? })
    }

    /// Returns the angles of positions that are an input of the node.
    fn angles_at(&mut self, node: &NodeProto, caches: [usize; 2], positions: usize) -> Result<Angles> {
        let [cos, sin] = caches.map(|n| {
            let of = |n: usize| node.input.get(n).cloned().unwrap_or_default();
            let looked_up = NodeProto { input: vec![of(n), of(positions)], ..NodeProto::default() };
            let cache = self.value(node, n)?;
            let rows = self.gather(&looked_up, &mut Attributes { all: Vec::new() }, cache)?;
            self.add_head_axis(rows)
        });
        Ok(Angles { cos: cos?, sin: sin? })
    }

    /// Adds an axis for heads to angles `[batch, steps, angles]`.
    fn add_head_axis(&mut self, a: Id) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        match (&shape[..], rows) {
            (&[batch, steps, angles], None | Some(0)) => self.graph.reshape(a, vec![batch, 1, steps, angles], rows),
            _ => Err(refused(format!("angles have shape {shape:?}, expected a batch, steps and angles"))),
        }
    }

    /// Rotates pairs of numbers of each head by angles; a pair consists of neighbours (`is_interleaved`) or of numbers
    /// half a rotation width apart.
    fn rotated(&mut self, a: Id, angles: Angles, is_interleaved: bool) -> Result<Id> {
        let Angles { cos, sin } = angles;
        let half = self.graph.shape(cos).last().copied().unwrap_or(0);
        let width = self.graph.shape(a)[3];
        if self.graph.shape(sin).last() != Some(&half) || 2 * half > width {
            return Err(refused(format!("{half} angles do not fit heads of {width} elements")));
        }
        let place = |part: usize, n: usize| if is_interleaved { 2 * n + part } else { part * half + n };
        let [x, y] = [0, 1].map(|part| self.along(a, 3, &(0..half).map(|n| place(part, n)).collect::<Vec<_>>()));
        let (x, y) = (x?, y?);
        let mut product = |a: Id, b: Id| self.graph.binary(Binary::Mul, a, b);
        let (cos_x, sin_y, sin_x, cos_y) = (product(cos, x)?, product(sin, y)?, product(sin, x)?, product(cos, y)?);
        let first = self.graph.binary(Binary::Sub, cos_x, sin_y)?;
        let second = self.graph.binary(Binary::Add, sin_x, cos_y)?;
        let mut parts = vec![first, second];
        if 2 * half < width {
            parts.push(self.along(a, 3, &(2 * half..width).collect::<Vec<_>>())?);
        }
        let made = self.graph.concat(3, &parts)?;
        if !is_interleaved {
            return Ok(made);
        }
        let from = |n: usize| if n < 2 * half { n % 2 * half + n / 2 } else { n };
        self.along(made, 3, &(0..width).map(from).collect::<Vec<_>>())
    }
}
