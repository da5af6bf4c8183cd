//! Graphs of random operations with parameters.

use super::*;

/// A step of a random graph: the operation, two of the earlier values, and a size.
pub(super) type Random = (u8, usize, usize, usize);

const FUNCTIONS: [Unary; 14] = [
    Unary::Relu,
    Unary::Sigmoid,
    Unary::Tanh,
    Unary::Neg,
    Unary::Abs,
    Unary::Erf,
    Unary::Gelu,
    Unary::Silu,
    Unary::Softplus,
    Unary::Sin,
    Unary::Cos,
    Unary::Atan,
    Unary::Sinh,
    Unary::Asinh,
];

/// A parameter of a random graph.
fn parameter(graph: &mut Graph, shape: &[usize]) -> Result<Id> {
    graph.inputs.push(GraphInput { side: Side::User, shape: shape.to_vec(), rows: None });
    graph.input(graph.inputs.len() - 1)
}

/// Reshapes a value of one axis to a matrix of two rows.
fn halves(graph: &mut Graph, a: Id) -> Result<Id> {
    let last = graph.shape(a)[2];
    graph.reshape(a, vec![1, 1, 2, last / 2], graph.values[a].rows)
}

fn flat(graph: &mut Graph, a: Id) -> Result<Id> {
    let (width, rows) = (graph.values[a].count(), graph.values[a].rows);
    graph.reshape(a, vec![1, 1, width], rows)
}

/// Returns the result of a step, scaled so that numbers stay small.
fn random(graph: &mut Graph, (kind, a, b, size): Random) -> Result<Id> {
    let last = graph.shape(a)[2];
    let share = graph.number(vec![], vec![1.0 / last as f32])?;
    let one = graph.number(vec![], vec![1.0])?;
    let rows = graph.values[a].rows;
    match kind {
        0..=2 => {
            let matrix = parameter(graph, &[last, size])?;
            let product = graph.matmul(a, matrix)?;
            graph.binary(Binary::Mul, product, share)
        }
        // A layer as PyTorch stores it, with a transposed matrix.
        3 => {
            let (matrix, bias) = (parameter(graph, &[size, last])?, parameter(graph, &[size])?);
            let turned = graph.transpose(matrix, &[1, 0])?;
            let product = graph.matmul(a, turned)?;
            let sum = graph.binary(Binary::Add, product, bias)?;
            graph.unary(Unary::Relu, sum)
        }
        4 => graph.binary(Binary::Add, a, b),
        5 => graph.binary(Binary::Sub, a, b),
        6 => graph.binary(Binary::Mul, a, b),
        7 => {
            let square = graph.binary(Binary::Mul, b, b)?;
            let above = graph.binary(Binary::Add, square, one)?;
            graph.binary(Binary::Div, a, above)
        }
        8 | 9 => graph.unary(FUNCTIONS[size % FUNCTIONS.len()], a),
        10 => graph.fold([Fold::Sum, Fold::Max, Fold::Min][size % 3], a, &[2]),
        11 => graph.concat(2, &[a, b, a]),
        12 => graph.binary([Binary::Max, Binary::Min][size % 2], a, b),
        13 => {
            let most = graph.fold(Fold::Max, a, &[2])?;
            if size.is_multiple_of(2) {
                graph.still.push(most);
            }
            let less = graph.binary(Binary::Sub, a, most)?;
            let each = graph.unary(Unary::Exp, less)?;
            let sum = graph.fold(Fold::Sum, each, &[2])?;
            graph.binary(Binary::Div, each, sum)
        }
        14 => {
            let squares = graph.binary(Binary::Mul, a, a)?;
            let sum = graph.fold(Fold::Sum, squares, &[2])?;
            let sum = graph.binary(Binary::Add, sum, one)?;
            let (length, log) = (graph.unary(Unary::Sqrt, sum)?, graph.unary(Unary::Log, sum)?);
            let inverse = graph.unary(Unary::Reciprocal, length)?;
            let scaled = graph.binary(Binary::Mul, a, inverse)?;
            graph.binary(Binary::Mul, scaled, log)
        }
        // Picks some numbers, one of them more than once.
        15 => {
            let index: Vec<u32> = (0..last).step_by(1 + size % 3).chain([size % last]).map(|n| n as u32).collect();
            let shape = vec![1, 1, index.len()];
            graph.pick(a, index, shape, rows)
        }
        // Concatenated to each matrix row, multiplied by a number and by a factor per matrix row, and normalised over matrix
        // rows.
        16 if last.is_multiple_of(2) => {
            let (own, each) = (parameter(graph, &[last / 2])?, parameter(graph, &[2, 1])?);
            let matrix = halves(graph, a)?;
            let sum = graph.binary(Binary::Add, matrix, own)?;
            let product = graph.binary(Binary::Mul, sum, each)?;
            let rest = graph.fold(Fold::Max, product, &[2])?;
            let less = graph.binary(Binary::Sub, product, rest)?;
            flat(graph, less)
        }
        // Several matrix rows per row, multiplied by one matrix, and by one matrix each.
        17 if last.is_multiple_of(2) => {
            let shape = if size.is_multiple_of(2) { vec![last / 2, size] } else { vec![1, 2, last / 2, size] };
            let matrix = parameter(graph, &shape)?;
            let mut rows_within = halves(graph, a)?;
            if shape.len() == 4 {
                rows_within = graph.reshape(rows_within, vec![1, 2, 1, last / 2], rows.map(|_| 0))?;
            }
            let product = graph.matmul(rows_within, matrix)?;
            let product = graph.binary(Binary::Mul, product, share)?;
            let (width, rows) = (graph.values[product].count(), rows.map(|_| 1));
            graph.reshape(product, vec![1, 1, width], rows)
        }
        // Multiplied by its own transpose; a parameter as the left factor.
        18 if last.is_multiple_of(2) => {
            let matrix = halves(graph, a)?;
            let turned = graph.transpose(matrix, &[0, 1, 3, 2])?;
            let product = graph.matmul(matrix, turned)?;
            let left = parameter(graph, &[3, 2])?;
            let product = graph.matmul(left, product)?;
            let made = flat(graph, product)?;
            graph.binary(Binary::Mul, made, share)
        }
        // Shared values, repeated per matrix row.
        19 => {
            let own = parameter(graph, &[1, 1, size])?;
            let index = (0..size as u32).chain([0]).collect();
            graph.pick(own, index, vec![1, 1, size + 1], Some(1))
        }
        20 => {
            let is_less = graph.binary([Binary::Less, Binary::LessOrEqual, Binary::Equal][size % 3], a, b)?;
            let (retained, dropped) =
                (graph.binary(Binary::Keep, is_less, a)?, graph.binary(Binary::Drop, is_less, b)?);
            graph.binary(Binary::Add, retained, dropped)
        }
        21 => {
            let shape = vec![1, 1, last + 3];
            let index: Vec<u32> = (0..last as u32).map(|n| n * 3 % (last as u32 + 3)).collect();
            graph.add(Op::Spread(a, index.into()), shape, rows)
        }
        _ => {
            let scale = parameter(graph, &[1])?;
            graph.binary(Binary::Mul, a, scale)
        }
    }
}

/// Returns a graph of random operations over a row, a column and shared values.
pub(super) fn graph(width: usize, steps: &[Random]) -> Graph {
    let input = |side: Side, width: usize| {
        let rows = (side == Side::Pair).then_some(1);
        GraphInput { side, shape: vec![1, 1, width], rows }
    };
    let mut graph = Graph::new(vec![input(Side::User, width), input(Side::Pair, width), input(Side::Pair, 1)]);
    let mut values: Vec<Id> = (0..3).map(|n| graph.input(n).unwrap()).collect();
    for &(kind, a, b, size) in steps {
        let (a, b) = (values[a % values.len()], values[b % values.len()]);
        let made = random(&mut graph, (kind % 24, a, b, size));
        values.extend(made.ok().filter(|&id| graph.values[id].count() <= 200));
    }
    let pairs: Vec<Id> = values.iter().copied().filter(|&id| graph.values[id].side == Side::Pair).collect();
    let retained: Vec<Id> = pairs.iter().rev().take(3).copied().collect();
    let all = graph.concat(2, &retained).unwrap();
    graph.outputs = vec![graph.unary(Unary::Sigmoid, all).unwrap()];
    graph.outputs.extend(retained);
    graph
}
