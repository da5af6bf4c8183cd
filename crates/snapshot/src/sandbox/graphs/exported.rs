//! Random steps with the operators that exporters write for sequences, indices and integers.

use super::maker::{MASK, Maker, Value, together};
use super::onnx_file::{float, int, node, text};
use rten_onnx::onnx::NodeProto;

const FLOAT: i64 = 1;
const INT32: i64 = 6;
const INT64: i64 = 7;
const BOOL: i64 = 9;
const FLOAT16: i64 = 10;
const BFLOAT16: i64 = 16;

fn microsoft(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto { domain: Some("com.microsoft".into()), ..node(operator, inputs, output) }
}

impl Maker {
    /// Adds one step; adds nothing if the step does not suit the picked value.
    pub(super) fn exported_step(&mut self) {
        let a = self.pick();
        let kind = self.random.below(27);
        if kind > 2 && a.shape.len() <= self.axis + 1 {
            return;
        }
        match kind {
            0 => {
                const FUNCTIONS: [&str; 14] = [
                    "Selu",
                    "Celu",
                    "Softsign",
                    "ThresholdedRelu",
                    "Shrink",
                    "Floor",
                    "Ceil",
                    "Round",
                    "Mean",
                    "Swish",
                    "Sin",
                    "Cos",
                    "Atan",
                    "Asinh",
                ];
                let f = FUNCTIONS[self.random.below(FUNCTIONS.len())];
                let made = self.builder.add(f, &[&a.name]);
                self.keep(made, a.shape, a.is_pair);
            }
            1 => {
                let made = match self.random.below(3) {
                    0 => self.builder.add_node(|output| text(node("Gelu", &[&a.name], output), "approximate", "tanh")),
                    1 => self.builder.add_node(|output| microsoft("QuickGelu", &[&a.name], output)),
                    _ => self.builder.add_node(|output| microsoft("FastGelu", &[&a.name], output)),
                };
                self.keep(made, a.shape, a.is_pair);
            }
            2 => {
                // Integer arithmetic on the row's numbers.
                let whole = self.whole(&a, 9.0);
                let by = self.builder.integers(&[], vec![[2, 3, 4, 41, 97][self.random.below(5)]]);
                let f = ["Div", "Mod"][self.random.below(2)];
                let made = self.builder.add(f, &[&whole, &by]);
                let made = self.cast(&made, FLOAT);
                self.keep(made, a.shape, a.is_pair);
            }
            3 => {
                let (_, written) = self.inner_axis(&a);
                let (exclusive, reverse) = (self.random.below(2) as i64, self.random.below(2) as i64);
                let axis = self.builder.integers(&[], vec![written]);
                let made = self.builder.add_node(|output| {
                    int(int(node("CumSum", &[&a.name, &axis], output), "exclusive", exclusive), "reverse", reverse)
                });
                self.keep(made, a.shape, a.is_pair);
            }
            4 => {
                let (axis, _) = self.inner_axis(&a);
                let (mode, most) = [("constant", 3), ("edge", 3), ("reflect", a.shape[axis])][self.random.below(3)];
                let (before, after) = (self.random.below(most), self.random.below(most));
                let mut pads = vec![0i64; 2 * a.shape.len()];
                (pads[axis], pads[axis + a.shape.len()]) = (before as i64, after as i64);
                let pads = self.builder.integers(&[pads.len()], pads);
                let made = self.builder.add_node(|output| text(node("Pad", &[&a.name, &pads], output), "mode", mode));
                let mut shape = a.shape.clone();
                shape[axis] += before + after;
                self.keep(made, shape, a.is_pair);
            }
            5 => {
                let (axis, written) = self.inner_axis(&a);
                let step = 1 + self.random.below(2);
                let all = [vec![-1], vec![i64::MIN], vec![written], vec![-(step as i64)]];
                let [starts, ends, axes, steps] = all.map(|numbers| self.builder.integers(&[1], numbers));
                let made = self.builder.add("Slice", &[&a.name, &starts, &ends, &axes, &steps]);
                let mut shape = a.shape.clone();
                shape[axis] = shape[axis].div_ceil(step);
                self.keep(made, shape, a.is_pair);
            }
            6 => {
                let (axis, written) = self.inner_axis(&a);
                let count = 1 + self.random.below(a.shape[axis]);
                let k = self.builder.integers(&[1], vec![count as i64]);
                let largest = self.random.below(2) as i64;
                let made = self.builder.add_node(|output| NodeProto {
                    output: vec![output.into(), format!("{output}_places")],
                    ..int(int(node("TopK", &[&a.name, &k], output), "axis", written), "largest", largest)
                });
                let mut shape = a.shape.clone();
                shape[axis] = count;
                let places = self.cast(&format!("{made}_places"), FLOAT);
                self.keep(places, shape.clone(), a.is_pair);
                self.keep(made, shape, a.is_pair);
            }
            7 => {
                // Rows of a table that all rows share; indices may count from the end.
                let whole = self.whole(&a, 3.0);
                let (least, most) = (self.builder.integers(&[], vec![-4]), self.builder.integers(&[], vec![3]));
                let index = self.builder.add("Clip", &[&whole, &least, &most]);
                let numbers = self.random.numbers(8, 1.0);
                let table = self.builder.floats(&[4, 2], numbers);
                let made = self.builder.add("Gather", &[&table, &index]);
                let shape = [&a.shape[..], &[2]].concat();
                self.keep(made, shape, a.is_pair);
            }
            8 => {
                let b = self.pick();
                if b.shape != a.shape || b.is_pair != a.is_pair {
                    return;
                }
                let (axis, written) = self.inner_axis(&a);
                let index = self.index(&b, a.shape[axis]);
                let made = self
                    .builder
                    .add_node(|output| int(node("GatherElements", &[&a.name, &index], output), "axis", written));
                self.keep(made, a.shape, a.is_pair);
            }
            9 => {
                let index = self.index(&a, 3);
                let (depth, numbers) = (self.builder.integers(&[], vec![3]), self.random.numbers(2, 1.0));
                let values = self.builder.floats(&[2], numbers);
                let made = self.builder.add("OneHot", &[&index, &depth, &values]);
                let shape = [&a.shape[..], &[3]].concat();
                self.keep(made, shape, a.is_pair);
            }
            10 => {
                // Constant indices of the last axis, which is moved to the front.
                let rank = a.shape.len();
                let (size, count) = (a.shape[rank - 1], 1 + self.random.below(3));
                let front: Vec<i64> = [rank - 1].into_iter().chain(0..rank - 1).map(|n| n as i64).collect();
                let back: Vec<i64> = (1..rank).chain([0]).map(|n| n as i64).collect();
                let turned = self.transpose(&a.name, &front);
                let index = (0..count).map(|_| self.random.below(size) as i64).collect();
                let index = self.builder.integers(&[count, 1], index);
                let made = self.builder.add("GatherND", &[&turned, &index]);
                let made = self.transpose(&made, &back);
                let mut shape = a.shape.clone();
                shape[rank - 1] = count;
                self.keep(made, shape, a.is_pair);
            }
            11 => {
                // Writes the numbers of another value to constant positions of an axis.
                let b = self.pick();
                if b.shape != a.shape || b.is_pair != a.is_pair {
                    return;
                }
                let (axis, written) = self.inner_axis(&a);
                let size = a.shape[axis];
                let mut shape = vec![1; a.shape.len()];
                shape[axis] = size;
                let first = self.random.below(size);
                let index = self.builder.integers(&shape, (0..size).map(|n| ((n * n + first) % size) as i64).collect());
                let sizes = self.builder.add("Shape", &[&b.name]);
                let index = self.builder.add("Expand", &[&index, &sizes]);
                // If positions are equal, ONNX does not define which update counts, so equal positions get equal
                // updates.
                let reduced = self.builder.integers(&[1], vec![written]);
                let one = self.builder.add("ReduceMax", &[&b.name, &reduced]);
                let updates = self.builder.add("Expand", &[&one, &sizes]);
                let made = self.builder.add_node(|output| {
                    int(node("ScatterElements", &[&a.name, &index, &updates], output), "axis", written)
                });
                self.keep(made, a.shape, a.is_pair);
            }
            12 => {
                let width = *a.shape.last().unwrap();
                let numbers = self.random.numbers(width * 3, 1.0 / (width as f32).sqrt());
                let matrix = self.builder.floats(&[width, 3], numbers);
                let equation = ["...d,de->...e", "...d,de"][self.random.below(2)];
                let made = self
                    .builder
                    .add_node(|output| text(node("Einsum", &[&a.name, &matrix], output), "equation", equation));
                let mut shape = a.shape.clone();
                *shape.last_mut().unwrap() = 3;
                self.keep(made, shape, a.is_pair);
            }
            13 => {
                let (axis, written) = self.inner_axis(&a);
                let axes = self.builder.integers(&[1], vec![written]);
                let made = self.builder.add("ReduceProd", &[&a.name, &axes]);
                let mut shape = a.shape.clone();
                shape[axis] = 1;
                self.keep(made, shape, a.is_pair);
            }
            14 => {
                let b = self.pick();
                if together(&a, &b).as_deref() != Some(&a.shape[..]) || b.shape != a.shape {
                    return;
                }
                let width = *a.shape.last().unwrap();
                let numbers = self.random.numbers(width, 1.0);
                let scale = self.builder.floats(&[width], numbers);
                let f = ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"][self.random.below(2)];
                let made = self.builder.add_node(|output| microsoft(f, &[&a.name, &b.name, &scale], output));
                self.keep(made, a.shape, a.is_pair || b.is_pair);
            }
            15 | 16 => self.windowed(&a),
            17 => {
                let (_, written) = self.inner_axis(&a);
                let made = self.builder.add_node(|output| int(node("Hardmax", &[&a.name], output), "axis", written));
                self.keep(made, a.shape, a.is_pair);
            }
            18 => {
                let rectified = self.builder.add("Relu", &[&a.name]);
                let log = self.builder.add("Log", &[&rectified]);
                let truth = self.builder.add("IsInf", &[&log]);
                let made = self.cast(&truth, FLOAT);
                self.keep(made, a.shape, a.is_pair);
            }
            19 => {
                // A power with a positive base, and a separate exponent for each number.
                let [half, size] = [self.builder.floats(&[], vec![0.5]), self.builder.add("Abs", &[&a.name])];
                let [base, exponent] = [self.builder.add("Add", &[&size, &half]), self.builder.add("Tanh", &[&a.name])];
                let made = self.builder.add("Pow", &[&base, &exponent]);
                self.keep(made, a.shape, a.is_pair);
            }
            20 => {
                // Replaces entries of the last axis, which is moved to the front.
                let rank = a.shape.len();
                let front: Vec<i64> = [rank - 1].into_iter().chain(0..rank - 1).map(|n| n as i64).collect();
                let back: Vec<i64> = (1..rank).chain([0]).map(|n| n as i64).collect();
                let turned = self.transpose(&a.name, &front);
                let place = self.random.below(a.shape[rank - 1]) as i64;
                let index = self.builder.integers(&[1, 1], vec![place]);
                let first = self.builder.integers(&[1], vec![0]);
                let updates = self.builder.add("Gather", &[&turned, &first]);
                let made = self.builder.add("ScatterND", &[&turned, &index, &updates]);
                let made = self.transpose(&made, &back);
                self.keep(made, a.shape, a.is_pair);
            }
            21 => {
                let kind = [FLOAT16, BFLOAT16][self.random.below(2)];
                let half = self.cast(&a.name, kind);
                let f = ["Tanh", "Neg", "Relu", "Identity"][self.random.below(4)];
                let made = self.builder.add(f, &[&half]);
                let made = self.builder.add("CastLike", &[&made, &a.name]);
                self.keep(made, a.shape, a.is_pair);
            }
            22 => {
                // Remainders of integers of more than 32 bits that f32 represents exactly.
                let small = self.whole(&a, 9.0);
                let small = self.cast(&small, FLOAT);
                let factor = [4096.0, 1_048_592.0, 8_590_065_664.0, 1_125_899_906_842_624.0][self.random.below(4)];
                let factor = self.builder.floats(&[], vec![factor]);
                let wide = self.builder.add("Mul", &[&small, &factor]);
                let whole = self.cast(&wide, INT64);
                let by = self.builder.integers(&[], vec![[41, 97, 1009][self.random.below(3)]]);
                let made = self.builder.add("Mod", &[&whole, &by]);
                let made = self.cast(&made, FLOAT);
                self.keep(made, a.shape, a.is_pair);
            }
            23 if a.shape.len() > self.axis + 2 => {
                let mut perm: Vec<i64> = (0..a.shape.len() as i64).collect();
                let last = perm.len() - 1;
                perm.swap(last, last - 1);
                let turned = self.transpose(&a.name, &perm);
                let square = self.builder.add("MatMul", &[&a.name, &turned]);
                let (equation, retained) = [("...ii->...i", 1), ("...ii->...", 2)][self.random.below(2)];
                let made =
                    self.builder.add_node(|output| text(node("Einsum", &[&square], output), "equation", equation));
                self.keep(made, a.shape[..a.shape.len() - retained].to_vec(), a.is_pair);
            }
            24 | 25 => self.attended(&a),
            _ if self.axis == 0 && a.is_pair && a.shape.len() > 2 => self.selected(&a),
            _ => {}
        }
    }

    /// Adds attention of a tower's sequence over itself, or a rotation by positions.
    fn attended(&mut self, a: &Value) {
        let (0, true, &[1, steps, width]) = (self.axis, a.is_pair, &a.shape[..]) else { return };
        let heads = if width.is_multiple_of(2) { 2 } else { 1 };
        let mask = self.values.iter().find(|value| value.name == MASK && value.shape == [1, steps]).cloned();
        let own = width / heads;
        let made = match self.random.below(4) {
            0 => {
                let mut inputs = vec![a.name.clone(); 3];
                if let Some(mask) = &mask {
                    let axes = self.builder.integers(&[2], vec![1, 2]);
                    let wide = self.builder.add("Unsqueeze", &[&mask.name, &axes]);
                    let sizes = self.builder.integers(&[4], vec![1, 1, steps as i64, 1]);
                    let wide = self.builder.add("Expand", &[&wide, &sizes]);
                    inputs.push(match self.random.below(2) {
                        0 => self.cast(&wide, BOOL),
                        _ => self.builder.add("Log", &[&wide]),
                    });
                }
                let (is_causal, softcap) = (self.random.below(2) as i64, self.random.below(2) as f32 * 3.0);
                let windows = [0, 1].map(|_| self.random.below(4) as i64 - 1);
                self.builder.add_node(|output| {
                    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
                    let made = node("Attention", &inputs, output);
                    let made = int(int(made, "q_num_heads", heads as i64), "kv_num_heads", heads as i64);
                    let made = float(int(made, "is_causal", is_causal), "softcap", softcap);
                    int(int(made, "left_window_size", windows[0]), "right_window_size", windows[1])
                })
            }
            1 => {
                let mask = mask.map_or(String::new(), |mask| self.cast(&mask.name, INT32));
                let numbers = self.random.numbers(3 * width, 1.0);
                let bias = self.builder.floats(&[3 * width], numbers);
                let is_causal = self.random.below(2) as i64;
                self.builder.add_node(|output| {
                    let inputs = [&a.name, &a.name, &a.name, &bias, &mask].map(String::as_str);
                    let made = int(microsoft("MultiHeadAttention", &inputs, output), "num_heads", heads as i64);
                    int(float(made, "mask_filter_value", -4.0), "unidirectional", is_causal)
                })
            }
            2 => {
                let numbers = self.random.numbers(width * own, 1.0 / (width as f32).sqrt());
                let weights = self.builder.floats(&[width, own], numbers);
                let shared = self.builder.add("MatMul", &[&a.name, &weights]);
                let last = self.random.below(steps) as i64;
                let [last, total] = [last, steps as i64].map(|n| self.builder.integers(&[1], vec![n]));
                let window = self.random.below(4) as i64 - 1;
                self.builder.add_node(|output| {
                    let inputs = [&a.name, &shared, &shared, "", "", &last, &total];
                    let made = int(microsoft("GroupQueryAttention", &inputs, output), "num_heads", heads as i64);
                    int(int(made, "kv_num_heads", 1), "local_window_size", window)
                })
            }
            _ => {
                let (half, is_interleaved) = (own / 2, self.random.below(2) as i64);
                if half == 0 {
                    return;
                }
                let [cos, sin] = [0, 1].map(|_| self.random.numbers(8 * half, 1.0));
                let [cos, sin] = [cos, sin].map(|numbers| self.builder.floats(&[8, half], numbers));
                let places = (0..steps).map(|_| self.random.below(8) as i64).collect();
                let places = self.builder.integers(&[1, steps], places);
                let rotated = |made: NodeProto| {
                    let made = int(int(made, "num_heads", heads as i64), "interleaved", is_interleaved);
                    int(made, "rotary_embedding_dim", 2 * half as i64)
                };
                match self.random.below(2) {
                    0 => self
                        .builder
                        .add_node(|output| rotated(node("RotaryEmbedding", &[&a.name, &cos, &sin, &places], output))),
                    _ => self.builder.add_node(|output| {
                        rotated(microsoft("RotaryEmbedding", &[&a.name, &places, &cos, &sin], output))
                    }),
                }
            }
        };
        self.keep(made, a.shape.clone(), true);
    }

    /// Adds a convolution, a pool or a normalisation of channels over a tower's value with channels and further axes.
    fn windowed(&mut self, a: &Value) {
        let (1, 3..=4, true) = (a.shape[0], a.shape.len(), self.axis == 0) else { return };
        let (channels, sizes) = (a.shape[1], a.shape[2..].to_vec());
        let axes = sizes.len();
        let kernel: Vec<usize> = sizes.iter().map(|&d| 1 + self.random.below(d.min(4))).collect();
        let pads: Vec<usize> = (0..2 * axes).map(|n| self.random.below(kernel[n % axes])).collect();
        let strides: Vec<usize> = (0..axes).map(|_| 1 + self.random.below(2)).collect();
        let out: Vec<usize> =
            (0..axes).map(|n| (sizes[n] + pads[n] + pads[n + axes] - kernel[n]) / strides[n] + 1).collect();
        let whole = |all: &[usize]| all.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let placed = |node: NodeProto| {
            let node = super::ints(super::ints(node, "pads", &whole(&pads)), "strides", &whole(&strides));
            super::ints(node, "kernel_shape", &whole(&kernel))
        };
        let kind = self.random.below(7);
        let (made, made_channels, out) = match kind {
            0..=2 => {
                let groups = if self.random.below(2) == 0 { 1 } else { channels };
                let made_channels = groups * (1 + self.random.below(3));
                let shape = [&[made_channels, channels / groups], &kernel[..]].concat();
                let count: usize = shape[1..].iter().product();
                let numbers = self.random.numbers(made_channels * count, 1.0 / (count as f32).sqrt());
                let weights = self.builder.floats(&shape, numbers);
                let numbers = self.random.numbers(made_channels, 0.5);
                let bias = self.builder.floats(&[made_channels], numbers);
                let made = self.builder.add_node(|output| {
                    int(placed(node("Conv", &[&a.name, &weights, &bias], output)), "group", groups as i64)
                });
                (made, made_channels, out)
            }
            3 => (self.builder.add_node(|output| placed(node("MaxPool", &[&a.name], output))), channels, out),
            4 => {
                let counts = self.random.below(2) as i64;
                let made = self.builder.add_node(|output| {
                    int(placed(node("AveragePool", &[&a.name], output)), "count_include_pad", counts)
                });
                (made, channels, out)
            }
            5 => {
                let f = ["GlobalAveragePool", "GlobalMaxPool"][self.random.below(2)];
                (self.builder.add(f, &[&a.name]), channels, vec![1; axes])
            }
            _ => {
                let [scale, bias] = [self.random.numbers(channels, 1.0), self.random.numbers(channels, 1.0)];
                let (scale, bias) = (self.builder.floats(&[channels], scale), self.builder.floats(&[channels], bias));
                let made = self.builder.add_node(|output| match channels.is_multiple_of(2) {
                    true => int(node("GroupNormalization", &[&a.name, &scale, &bias], output), "num_groups", 2),
                    false => node("InstanceNormalization", &[&a.name, &scale, &bias], output),
                });
                (made, channels, sizes)
            }
        };
        self.keep(made, [&[1, made_channels], &out[..]].concat(), a.is_pair);
    }

    fn cast(&mut self, name: &str, to: i64) -> String {
        self.builder.add_node(|output| int(node("Cast", &[name], output), "to", to))
    }

    fn transpose(&mut self, name: &str, perm: &[i64]) -> String {
        self.builder.add_node(|output| super::ints(node("Transpose", &[name], output), "perm", perm))
    }

    /// Adds the state of each row at its own position, as both of PyTorch's exporters write it.
    fn selected(&mut self, a: &Value) {
        let all: Vec<Value> = self.values.iter().filter(|b| b.is_pair && b.shape.len() == 2).cloned().collect();
        let Some(b) = all.last() else { return };
        let axes = self.builder.integers(&[1], vec![1]);
        let sum = self.builder.add_node(|output| int(node("ReduceSum", &[&b.name, &axes], output), "keepdims", 0));
        let index = self.index(&Value { name: sum, shape: vec![1], is_pair: true }, a.shape[1]);
        let sizes = self.builder.add("Shape", &[&a.name]);
        let [zero, one, size] = [0, 1, a.shape[1] as i64].map(|n| self.builder.integers(&[], vec![n]));
        let rows = self.builder.add("Gather", &[&sizes, &zero]);
        let rows = self.builder.add("Range", &[&zero, &rows, &one]);
        let made = if self.random.below(2) == 0 {
            let last = self.builder.integers(&[1], vec![-1]);
            let columns = [rows, index].map(|part| self.builder.add("Unsqueeze", &[&part, &last]));
            let index =
                self.builder.add_node(|output| int(node("Concat", &[&columns[0], &columns[1]], output), "axis", -1));
            self.builder.add("GatherND", &[&a.name, &index])
        } else {
            let inner: Vec<i64> = a.shape[2..].iter().map(|&d| d as i64).collect();
            let flat = self.builder.integers(&[1 + inner.len()], [&[-1], &inner[..]].concat());
            let flat = self.builder.add("Reshape", &[&a.name, &flat]);
            let first = self.builder.add("Mul", &[&rows, &size]);
            let index = self.builder.add("Add", &[&index, &first]);
            self.builder.add("Gather", &[&flat, &index])
        };
        let mut shape = a.shape.clone();
        shape.remove(1);
        self.keep(made, shape, true);
    }

    /// Adds a step of a layer over products of a sequence with itself, selected by the file or by the row.
    pub(super) fn squared(&mut self) {
        let rank = self.axis + 3;
        let is_sequence = |a: &&Value| a.is_pair && a.shape.len() == rank;
        let Some(a) = self.values.iter().rev().find(is_sequence).cloned() else { return };
        let mut order: Vec<i64> = (0..rank as i64).collect();
        order.swap(rank - 1, rank - 2);
        let bounded = self.builder.add("Tanh", &[&a.name]);
        let turned = self.transpose(&bounded, &order);
        let products = self.builder.add("MatMul", &[&bounded, &turned]);
        let products = self.builder.add("Tanh", &[&products]);
        let twice = self.builder.add("MatMul", &[&products, &products]);
        let layer = self.builder.add("MatMul", &[&twice, &bounded]);
        let name = self.builder.add("Tanh", &[&layer]);
        if self.axis == 0 && self.random.below(2) == 0 {
            return self.selected(&Value { name, ..a });
        }
        let step = self.random.below(a.shape[rank - 2]) as i64;
        let index = self.builder.integers(&[], vec![step]);
        let axis = (rank - 2) as i64;
        let made = self.builder.add_node(|output| int(node("Gather", &[&name, &index], output), "axis", axis));
        let mut shape = a.shape.clone();
        shape.remove(rank - 2);
        self.keep(made, shape, true);
    }

    /// Casts a multiple of a value to integers.
    fn whole(&mut self, a: &Value, factor: f32) -> String {
        let factor = self.builder.floats(&[], vec![factor]);
        let wide = self.builder.add("Tanh", &[&a.name]);
        let wide = self.builder.add("Mul", &[&wide, &factor]);
        self.cast(&wide, INT64)
    }

    /// Returns indices from 0 to `size`, exclusive.
    fn index(&mut self, a: &Value, size: usize) -> String {
        let whole = self.whole(a, size as f32);
        let [zero, last] = [0, size as i64 - 1].map(|n| self.builder.integers(&[], vec![n]));
        self.builder.add("Clip", &[&whole, &zero, &last])
    }
}
