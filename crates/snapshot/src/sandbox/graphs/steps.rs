//! Random steps with the operators of towers and rerankers; each step adds a value to the graph.

use super::maker::{MASK, Maker, Value, together};
use super::onnx_file::{int, ints, node, text};

impl Maker {
    pub(super) fn step(&mut self) {
        let a = self.pick();
        let kind = self.random.below(29);
        match kind {
            0 | 1 => {
                const FUNCTIONS: [&str; 17] = [
                    "Relu",
                    "Sigmoid",
                    "Tanh",
                    "Neg",
                    "Abs",
                    "Erf",
                    "Softplus",
                    "Elu",
                    "HardSigmoid",
                    "HardSwish",
                    "Mish",
                    "LeakyRelu",
                    "Sign",
                    "Identity",
                    "Softplus",
                    "Tanh",
                    "Sigmoid",
                ];
                let f = FUNCTIONS[self.random.below(FUNCTIONS.len())];
                let made = self.builder.add(f, &[&a.name]);
                self.keep(made, a.shape, a.is_pair);
            }
            2 | 3 => {
                // An operator on two values that broadcast.
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let f = ["Add", "Sub", "Mul", "Max", "Min", "Sub"][self.random.below(6)];
                let made = self.builder.add(f, &[&a.name, &b.name]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            4 => {
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let size = self.builder.add("Abs", &[&b.name]);
                let half = self.builder.floats(&[], vec![0.5]);
                let divisor = self.builder.add("Add", &[&size, &half]);
                let made = self.builder.add("Div", &[&a.name, &divisor]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            5 | 6 => {
                let constant = self.beside(&a, 2.0);
                let f = ["Add", "Mul", "Sub", "Max"][self.random.below(4)];
                let made = self.builder.add(f, &[&a.name, &constant]);
                let rank = self.rank_with(&a, &constant);
                self.keep(made, rank, a.is_pair);
            }
            7..=9 => {
                let depth = *a.shape.last().unwrap();
                if a.shape.len() < self.axis + 2 || a.shape.len() < 2 {
                    return;
                }
                let width = 1 + self.random.below(9);
                let scale = 1.0 / (depth as f32).sqrt();
                let numbers = self.random.numbers(depth * width, scale);
                let matrix = self.builder.floats(&[depth, width], numbers);
                let made = self.builder.add("MatMul", &[&a.name, &matrix]);
                let mut shape = a.shape.clone();
                *shape.last_mut().unwrap() = width;
                self.keep(made, shape, a.is_pair);
            }
            10 | 11 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                const REDUCED: [&str; 8] = [
                    "ReduceSum",
                    "ReduceMean",
                    "ReduceMax",
                    "ReduceMin",
                    "ReduceL1",
                    "ReduceL2",
                    "ReduceSumSquare",
                    "ReduceLogSumExp",
                ];
                let f = REDUCED[self.random.below(REDUCED.len())];
                let keep = self.random.below(2);
                let axes = self.builder.integers(&[1], vec![written]);
                let made =
                    self.builder.add_node(|output| int(node(f, &[&a.name, &axes], output), "keepdims", keep as i64));
                let mut shape = a.shape.clone();
                if keep == 1 {
                    shape[axis] = 1;
                } else {
                    shape.remove(axis);
                }
                self.keep(made, shape, a.is_pair);
            }
            12 if a.shape.len() > self.axis + 1 => {
                let (_, written) = self.inner_axis(&a);
                let f = ["Softmax", "LogSoftmax"][self.random.below(2)];
                let made = self.builder.add_node(|output| int(node(f, &[&a.name], output), "axis", written));
                self.keep(made, a.shape, a.is_pair);
            }
            13 if a.shape.len() > self.axis + 1 => {
                let width = *a.shape.last().unwrap();
                let numbers = self.random.numbers(width, 1.0);
                let scale = self.builder.floats(&[width], numbers);
                let made = self.builder.add("LayerNormalization", &[&a.name, &scale]);
                self.keep(made, a.shape, a.is_pair);
            }
            14 if a.shape.len() > self.axis + 1 => {
                // Reshapes the axes after the row axis.
                let inner: usize = a.shape[self.axis + 1..].iter().product();
                let parts = (1..=inner).filter(|n| inner.is_multiple_of(*n)).collect::<Vec<_>>();
                let part = parts[self.random.below(parts.len())];
                let mut sizes = vec![0i64; self.axis + 1];
                sizes.extend([part as i64, -1]);
                let sizes = self.builder.integers(&[sizes.len()], sizes);
                let made = self.builder.add("Reshape", &[&a.name, &sizes]);
                let mut shape = a.shape[..=self.axis].to_vec();
                shape.extend([part, inner / part]);
                self.keep(made, shape, a.is_pair);
            }
            15 if a.shape.len() > self.axis + 2 => {
                let mut order: Vec<usize> = (0..a.shape.len()).collect();
                let n = a.shape.len();
                order.swap(n - 1, n - 2);
                let perm: Vec<i64> = order.iter().map(|&axis| axis as i64).collect();
                let made = self.builder.add_node(|output| ints(node("Transpose", &[&a.name], output), "perm", &perm));
                let shape = order.iter().map(|&axis| a.shape[axis]).collect();
                self.keep(made, shape, a.is_pair);
            }
            16 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let all: Vec<Value> = self.values.clone();
                let fits = |b: &&Value| {
                    b.is_pair == a.is_pair
                        && b.shape.len() == a.shape.len()
                        && (0..a.shape.len()).all(|n| n == axis || a.shape[n] == b.shape[n])
                };
                let fitting: Vec<&Value> = all.iter().filter(fits).collect();
                let b = fitting[self.random.below(fitting.len())];
                let made =
                    self.builder.add_node(|output| int(node("Concat", &[&a.name, &b.name], output), "axis", written));
                let mut shape = a.shape.clone();
                shape[axis] += b.shape[axis];
                self.keep(made, shape, a.is_pair);
            }
            17 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let size = a.shape[axis];
                let first = self.random.below(size);
                let end = first + 1 + self.random.below(size - first);
                let step = 1 + self.random.below(2);
                let (start, stop) = match self.random.below(2) {
                    0 => (first as i64, end as i64),
                    _ => (first as i64 - size as i64, if end == size { i64::MAX } else { end as i64 - size as i64 }),
                };
                let all = [vec![start], vec![stop], vec![written], vec![step as i64]];
                let names = all.map(|numbers| self.builder.integers(&[1], numbers));
                let [starts, ends, axes, steps] = &names;
                let made = self.builder.add("Slice", &[&a.name, starts, ends, axes, steps]);
                let mut shape = a.shape.clone();
                shape[axis] = (end - first).div_ceil(step);
                self.keep(made, shape, a.is_pair);
            }
            18 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let size = a.shape[axis];
                let count = 1 + self.random.below(3);
                let index = (0..count).map(|_| self.random.below(2 * size) as i64 - size as i64).collect();
                let index = self.builder.integers(&[count], index);
                let made =
                    self.builder.add_node(|output| int(node("Gather", &[&a.name, &index], output), "axis", written));
                let mut shape = a.shape.clone();
                shape[axis] = count;
                self.keep(made, shape, a.is_pair);
            }
            19 => {
                // A boolean that is cast to a number, or that selects between two values.
                let constant = self.beside(&a, 1.0);
                let f = ["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"][self.random.below(5)];
                let truth = self.builder.add(f, &[&a.name, &constant]);
                let shape = self.rank_with(&a, &constant);
                let made = match self.random.below(2) {
                    0 => self.builder.add_node(|output| int(node("Cast", &[&truth], output), "to", 1)),
                    _ => {
                        let other = self.builder.floats(&[], vec![-1e4]);
                        self.builder.add("Where", &[&truth, &a.name, &other])
                    }
                };
                self.keep(made, shape, a.is_pair);
            }
            20 => self.relative(&a),
            21 => {
                // A cast to integers and back.
                let three = self.builder.floats(&[], vec![3.0]);
                let wide = self.builder.add("Mul", &[&a.name, &three]);
                let complete = self.builder.add_node(|output| int(node("Cast", &[&wide], output), "to", 7));
                let two = self.builder.integers(&[1], vec![2]);
                let f = ["Add", "Mul", "Max", "Min", "Sub"][self.random.below(5)];
                let more = self.builder.add(f, &[&complete, &two]);
                let made = self.builder.add_node(|output| int(node("Cast", &[&more], output), "to", 1));
                let shape = if a.shape.is_empty() { vec![1] } else { a.shape };
                self.keep(made, shape, a.is_pair);
            }
            22 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let f = ["ArgMax", "ArgMin"][self.random.below(2)];
                let last = self.random.below(2) as i64;
                let place = self.builder.add_node(|output| {
                    int(int(node(f, &[&a.name], output), "axis", written), "select_last_index", last)
                });
                let made = self.builder.add_node(|output| int(node("Cast", &[&place], output), "to", 1));
                let mut shape = a.shape.clone();
                shape[axis] = 1;
                self.keep(made, shape, a.is_pair);
            }
            23 => {
                // A large factor over a difference, as in masks and timestamps.
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let less = self.builder.add("Sub", &[&a.name, &b.name]);
                let large = [1e4, -1e9, 5e5, 2048.0][self.random.below(4)];
                let large = self.builder.floats(&[], vec![large]);
                let far = self.builder.add("Mul", &[&less, &large]);
                let made = self.builder.add("Tanh", &[&far]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            24 => {
                let exponent = [2.0, 3.0, 1.0][self.random.below(3)];
                let shape = vec![1; self.random.below(a.shape.len() + 2)];
                let exponent = self.builder.floats(&shape, vec![exponent]);
                let made = self.builder.add("Pow", &[&a.name, &exponent]);
                let shape = self.rank_with(&a, &exponent);
                self.keep(made, shape, a.is_pair);
            }
            25 if self.axis == 0 && a.shape.len() == 3 => {
                // Flattens rows and inner axes into one axis, and back.
                let written = [-1, 2][self.random.below(2)];
                let flat = self.builder.add_node(|output| int(node("Flatten", &[&a.name], output), "axis", written));
                let inner = a.shape[1] * a.shape[2];
                let sizes = self.builder.integers(&[2], vec![-1, inner as i64]);
                let made = self.builder.add("Reshape", &[&flat, &sizes]);
                self.keep(made, vec![1, inner], a.is_pair);
            }
            26 => {
                // GELU as exporters write it, sometimes with a constant of more axes.
                let [root, half] = [std::f32::consts::FRAC_1_SQRT_2, 0.5].map(|x| self.builder.floats(&[], vec![x]));
                let shape = vec![1; self.random.below(a.shape.len() + 2)];
                let one = self.builder.floats(&shape, vec![1.0]);
                let scaled = self.builder.add("Mul", &[&a.name, &root]);
                let erf = self.builder.add("Erf", &[&scaled]);
                let sum = self.builder.add("Add", &[&erf, &one]);
                let gate = self.builder.add("Mul", &[&sum, &half]);
                let made = self.builder.add("Mul", &[&a.name, &gate]);
                let shape = self.rank_with(&a, &one);
                self.keep(made, shape, a.is_pair);
            }
            27 if a.shape.len() > self.axis + 1 => {
                // A sum over the entries that a mask keeps, possibly none.
                let (axis, written) = self.inner_axis(&a);
                let [zero, never] = [0.0, f32::NEG_INFINITY].map(|x| self.builder.floats(&[], vec![x]));
                let truth = self.builder.add("Greater", &[&a.name, &zero]);
                let masked = self.builder.add("Where", &[&truth, &a.name, &never]);
                let axes = self.builder.integers(&[1], vec![written]);
                let sum = self.builder.add("ReduceLogSumExp", &[&masked, &axes]);
                let made = self.builder.add("Exp", &[&sum]);
                let mut shape = a.shape.clone();
                shape[axis] = 1;
                self.keep(made, shape, a.is_pair);
            }
            _ if a.shape.len() > self.axis + 1 => {
                // Adds an axis of size 1, and removes it again.
                let rank = a.shape.len() + 1;
                let axis = self.axis + 1 + self.random.below(rank - self.axis - 1);
                let written = if self.random.below(2) == 0 { axis as i64 } else { axis as i64 - rank as i64 };
                let axes = self.builder.integers(&[1], vec![written]);
                let made = self.builder.add("Unsqueeze", &[&a.name, &axes]);
                let mut shape = a.shape.clone();
                shape.insert(axis, 1);
                self.keep(made, shape, a.is_pair);
            }
            _ => {}
        }
    }

    /// Adds a recurrent layer over a sequence `[1, steps, width]` of a tower, and a value of its outputs.
    pub(super) fn recur(&mut self, a: &Value) {
        let &[1, steps, width] = &a.shape[..] else { return };
        let hidden = 1 + self.random.below(7);
        let (f, gates) = [("GRU", 3), ("LSTM", 4), ("RNN", 1)][self.random.below(3)];
        let direction = ["forward", "reverse", "bidirectional"][self.random.below(3)];
        let directions = if direction == "bidirectional" { 2 } else { 1 };
        let rows = gates * hidden;
        let mut constant = |shape: &[usize], scale: f32| {
            let numbers = self.random.numbers(shape.iter().product(), scale);
            self.builder.floats(shape, numbers)
        };
        let weights = constant(&[directions, rows, width], 1.0);
        let recurrence = constant(&[directions, rows, hidden], 0.7);
        let bias = constant(&[directions, 2 * rows], 0.5);
        let turned = self.builder.add_node(|output| ints(node("Transpose", &[&a.name], output), "perm", &[1, 0, 2]));
        let mut inputs = vec![turned, weights, recurrence];
        if self.random.below(3) > 0 {
            inputs.push(bias);
            if self.random.below(2) == 0 {
                let axes = self.builder.integers(&[1], vec![1]);
                let count =
                    self.builder.add_node(|output| int(node("ReduceSum", &[MASK, &axes], output), "keepdims", 0));
                // Every length of the test inputs fits: the mask may be shorter or longer than the sequence.
                let most = self.builder.floats(&[], vec![steps as f32]);
                let count = self.builder.add("Min", &[&count, &most]);
                inputs.push(self.builder.add_node(|output| int(node("Cast", &[&count], output), "to", 6)));
            }
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let (is_scaled, is_last) = (self.random.below(2), self.random.below(2) == 0);
        let made = self.builder.add_node(|output| {
            let outputs = if is_last { ["", output] } else { [output, ""] };
            let mut layer = int(node(f, &inputs, output), "hidden_size", hidden as i64);
            layer.output = outputs.iter().map(|&name| name.to_owned()).collect();
            if f == "GRU" {
                layer = int(layer, "linear_before_reset", is_scaled as i64);
            }
            text(layer, "direction", direction)
        });
        // Batch first: `[1, directions, hidden]`, or `[1, steps, directions, hidden]`.
        let (perm, shape) = match is_last {
            true => (vec![1, 0, 2], vec![1, directions, hidden]),
            false => (vec![2, 0, 1, 3], vec![1, steps, directions, hidden]),
        };
        let made = self.builder.add_node(|output| ints(node("Transpose", &[&made], output), "perm", &perm));
        self.keep(made, shape, true);
    }

    /// Multiplies by a matrix made from the difference, equality or minimum of row and column numbers, as in relative position
    /// biases and masks.
    fn relative(&mut self, a: &Value) {
        let Some(&size) = a.shape.last() else { return };
        if a.shape.len() < self.axis + 2 || size > 12 {
            return;
        }
        let [zero, one, end] = [0, 1, size as i64].map(|n| self.builder.integers(&[], vec![n]));
        let range = self.builder.add("Range", &[&zero, &end, &one]);
        let [first, second] = [0, 1].map(|n| self.builder.integers(&[1], vec![n]));
        let (column, row) =
            (self.builder.add("Unsqueeze", &[&range, &second]), self.builder.add("Unsqueeze", &[&range, &first]));
        let matrix = match self.random.below(3) {
            0 => {
                let away = self.builder.add("Sub", &[&column, &row]);
                let most = self.builder.integers(&[], vec![size as i64 - 1]);
                let index = self.builder.add("Add", &[&away, &most]);
                let numbers = self.random.numbers(2 * size - 1, 1.0);
                let bias = self.builder.floats(&[2 * size - 1], numbers);
                self.builder.add("Gather", &[&bias, &index])
            }
            1 => {
                let same = self.builder.add("Equal", &[&column, &row]);
                self.builder.add_node(|output| int(node("Cast", &[&same], output), "to", 1))
            }
            _ => {
                let least = self.builder.add("Min", &[&column, &row]);
                self.builder.add_node(|output| int(node("Cast", &[&least], output), "to", 1))
            }
        };
        let made = self.builder.add("MatMul", &[&a.name, &matrix]);
        self.keep(made, a.shape.clone(), a.is_pair);
    }
}
