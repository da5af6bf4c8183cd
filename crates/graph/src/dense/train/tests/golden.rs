//! Comparison with the gradients and optimizers of PyTorch (`python/make_grad_golden.py`).

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Array {
    name: String,
    #[serde(default)]
    is_pair: bool,
    shape: Vec<usize>,
    values: String,
}

#[derive(Deserialize)]
struct Gradient {
    name: String,
    shape: Vec<usize>,
    step: usize,
    largest: f64,
    values: String,
}

#[derive(Deserialize)]
struct GoldenCase {
    graph: String,
    axis: usize,
    inputs: Vec<Array>,
    outputs: Vec<Array>,
    input_gradients: Vec<Gradient>,
    constant_gradients: Vec<Gradient>,
}

/// Constants that are not parameters: masks, and statistics of batch norms.
const CONSTANTS: [&str; 8] = [
    "unsqueeze_2",
    "module.earlier",
    "module.later",
    "norm.running_mean",
    "norm.running_var",
    // Batch-norm statistics of `operators`, and the source of a mask.
    "c20",
    "c21",
    "c56",
];

fn floats(digits: &str) -> Vec<f32> {
    let bytes: Vec<u8> =
        (0..digits.len() / 2).map(|n| u8::from_str_radix(&digits[2 * n..2 * n + 2], 16).unwrap()).collect();
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

pub(super) fn file(path: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

impl GoldenCase {
    fn rows(&self) -> usize {
        self.inputs.iter().find(|input| input.is_pair).unwrap().shape[self.axis]
    }

    /// Returns the axis that counts rows; some outputs of `operators` have another axis before it.
    fn axis_of(&self, shape: &[usize]) -> usize {
        if shape[self.axis] == self.rows() { self.axis } else { shape.len() - 2 }
    }

    fn sizes(&self, shape: &[usize], is_pair: bool) -> Vec<Size> {
        let axis = self.axis_of(shape);
        let size = |(n, &size)| if is_pair && n == axis { Size::Rows } else { Size::Fixed(size as i64) };
        shape.iter().enumerate().map(size).collect()
    }

    fn read(&self) -> Result<TrainableGraph> {
        let given = |i: &Array| DeclaredInput {
            name: i.name.clone(),
            is_pair: i.is_pair,
            shape: self.sizes(&i.shape, i.is_pair),
        };
        let made = |o: &Array| DeclaredOutput { name: o.name.clone(), shape: self.sizes(&o.shape, true) };
        let (given, made): (Vec<_>, Vec<_>) =
            (self.inputs.iter().map(given).collect(), self.outputs.iter().map(made).collect());
        TrainableGraph::read(&file(&self.graph), &given, &made, &[])
    }

    /// Moves the axis of rows of numbers `[.., rows, ..]` to the front.
    fn by_row(&self, shape: &[usize], values: &[f32]) -> Vec<f32> {
        let axis = self.axis_of(shape);
        let (rows, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let outer: usize = shape[..axis].iter().product();
        let runs = (0..rows).flat_map(|row| (0..outer).map(move |o| o * rows + row));
        runs.flat_map(|run| values[run * inner..(run + 1) * inner].to_vec()).collect()
    }
}

/// Returns the first number that differs from the expected gradient. The tolerance is 1e-5 of the gradient's largest number, or
/// of 1 % of the largest of all gradients, for gradients that are 0 except for rounding.
fn far(got: &[f32], want: &Gradient, most: f64) -> Option<String> {
    assert_eq!(got.len(), want.shape.iter().product::<usize>(), "`{}`", want.name);
    let bound = 1e-5 * want.largest.max(most / 100.0);
    let mut all = floats(&want.values).into_iter().enumerate().map(|(n, x)| (n * want.step, x));
    let is_near = |n: usize, x: f32| f64::from((got[n] - x).abs()) <= bound;
    let (n, x) = all.find(|&(n, x)| !is_near(n, x))?;
    Some(format!("`{}`, number {n}: {} is not {x}, largest {} of {most}", want.name, got[n], want.largest))
}

#[test]
fn gradients_of_packages_and_of_every_operator_match_pytorch() {
    let cases: Vec<GoldenCase> = serde_json::from_slice(&file("tests/golden/train/gradients.json")).unwrap();
    let mut invalid = Vec::new();
    for case in &cases {
        let place = format!("{} by axis {}", case.graph, case.axis);
        let graph = case.read().unwrap_or_else(|e| panic!("{place}: {e}"));
        let rows = case.rows();
        let inputs: Vec<(bool, Vec<f32>)> =
            case.inputs.iter().map(|input| (input.is_pair, floats(&input.values))).collect();
        let shared: Vec<&[f32]> = inputs.iter().filter(|(is_pair, _)| !is_pair).map(|(_, x)| &x[..]).collect();
        let of_rows: Vec<Vec<f32>> = case
            .inputs
            .iter()
            .zip(&inputs)
            .filter(|(i, _)| i.is_pair)
            .map(|(i, (_, x))| case.by_row(&i.shape, x))
            .collect();
        let fill = |given: InputRows<'_>| {
            given.each(|n, row| {
                let own = of_rows.iter().flat_map(|all| &all[n * all.len() / rows..(n + 1) * all.len() / rows]);
                row.iter_mut().zip(own).for_each(|(to, x)| *to = *x);
            });
        };
        let worth: Vec<Vec<f32>> = case.outputs.iter().map(|o| case.by_row(&o.shape, &floats(&o.values))).collect();
        let worth: Vec<&[f32]> = worth.iter().map(|x| &x[..]).collect();
        let (mut workspace, mut gradients) = (Workspace::new(&Threads::new(2).unwrap()), Gradients::default());
        let batch = Batch { rows, shared: &shared, fill: &fill };
        graph.backward(graph.initial(), &batch, &worth, &mut workspace, &mut gradients).unwrap();
        let all = case.input_gradients.iter().chain(&case.constant_gradients);
        let most = all.fold(0.0, |most: f64, gradient| most.max(gradient.largest));
        let mut made = (gradients.inputs.iter(), gradients.shared.iter());
        for (want, input) in case.input_gradients.iter().zip(&case.inputs) {
            if !input.is_pair {
                invalid.extend(far(made.1.next().unwrap(), want, most).map(|what| format!("{place}: {what}")));
                continue;
            }
            // Back to the order of the file.
            let own: Vec<f32> = (0..input.shape.iter().product()).map(|n| n as f32).collect();
            let order = case.by_row(&input.shape, &own);
            let mut in_file = vec![0.0; order.len()];
            order.iter().zip(made.0.next().unwrap()).for_each(|(&n, x)| in_file[n as usize] = *x);
            invalid.extend(far(&in_file, want, most).map(|what| format!("{place}: {what}")));
        }
        for want in &case.constant_gradients {
            match graph.parameters().iter().find(|parameter| parameter.name == want.name) {
                Some(parameter) => {
                    let made = &gradients.parameters[parameter.range.clone()];
                    invalid.extend(far(made, want, most).map(|what| format!("{place}: {what}")));
                }
                None if want.largest == 0.0 || CONSTANTS.contains(&&want.name[..]) => {}
                // An epsilon or a factor of the exporter.
                None if want.shape.iter().product::<usize>() == 1 && !want.name.contains('.') => {}
                None => invalid.push(format!("{place}: `{}` is no parameter", want.name)),
            }
        }
        let is_known = |p: &&Parameter| case.constant_gradients.iter().any(|want| want.name == p.name);
        assert_eq!(graph.parameters().iter().find(|p| !is_known(p)), None, "{place}");
    }
    assert!(invalid.is_empty(), "{}", invalid.join("\n"));
    assert_eq!(cases.len(), 9 + 2 * 8 + 2 * 6);
}

#[derive(Deserialize)]
struct OptimizerCase {
    spec: OptimizerSpec,
    before: String,
    gradients: String,
    after: String,
}

#[test]
fn optimizers_take_the_steps_of_pytorch() {
    let cases: Vec<OptimizerCase> = serde_json::from_slice(&file("tests/golden/train/optimizers.json")).unwrap();
    for case in &cases {
        let (mut parameters, gradients) = (floats(&case.before), floats(&case.gradients));
        let count = parameters.len();
        let mut optimizer = DenseOptimizer::new(case.spec, count).unwrap();
        for (n, gradients) in gradients.chunks_exact(count).enumerate() {
            if n % 7 == 3 {
                let (steps, moments) = (optimizer.steps(), optimizer.moments().to_vec());
                optimizer = DenseOptimizer::restore(case.spec, count, steps, moments).unwrap();
            }
            optimizer.step(&mut parameters, gradients).unwrap();
        }
        for (got, want) in parameters.iter().zip(floats(&case.after)) {
            assert!((got - want).abs() <= 2e-6 * want.abs().max(1.0), "{:?}: {got} is not {want}", case.spec);
        }
    }
    assert_eq!(cases.len(), 8);
}

#[test]
fn optimizers_reject_what_they_cannot_use() {
    let spec = OptimizerSpec::new(OptimizerKind::Adam, 0.1);
    for (invalid, field) in [
        (OptimizerSpec { rate: f32::NAN, ..spec }, "rate"),
        (OptimizerSpec { rate: -1.0, ..spec }, "rate"),
        (OptimizerSpec { betas: [0.9, 1.0], ..spec }, "betas"),
        (OptimizerSpec { epsilon: Some(-1e-8), ..spec }, "epsilon"),
        (OptimizerSpec { decay: f32::INFINITY, ..spec }, "decay"),
        (OptimizerSpec { clip: Some(0.0), ..spec }, "clip"),
    ] {
        let error = DenseOptimizer::new(invalid, 3).unwrap_err().to_string();
        assert!(error.contains(&format!("field `{field}`")), "{error}");
    }
    assert!(DenseOptimizer::restore(spec, 3, 1, vec![vec![0.0; 3]]).is_err());
    let mut optimizer = DenseOptimizer::new(spec, 3).unwrap();
    let mut parameters = [1.0, 2.0, 3.0];
    for gradients in [&[0.0, f32::NAN, 0.0][..], &[f32::INFINITY, 0.0, 0.0], &[0.0; 2]] {
        assert!(optimizer.step(&mut parameters, gradients).is_err());
    }
    assert_eq!((parameters, optimizer.steps()), ([1.0, 2.0, 3.0], 0));
}
