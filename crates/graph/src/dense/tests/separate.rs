//! Rerankers over fields of the user and of the item: computations on one side's fields alone are separated.

use super::super::separate::separated;
use super::super::split::{best_cut, split};
use super::*;

/// Reranker over `fields` fields each of the user and the item, `width` wide.
struct Fields {
    graph: Graph,
    /// `[1, 1, 2 * fields, width]`
    all: Id,
    fields: usize,
    width: usize,
}

impl Fields {
    fn new(fields: usize, width: usize) -> Result<Fields> {
        let mut graph = Graph::new(vec![input(Side::User, fields * width), input(Side::Pair, fields * width)]);
        let (user, item) = (graph.input(0)?, graph.input(1)?);
        let count = fields * width;
        let expanded = graph.pick(user, (0..count as u32).collect(), vec![1, 1, fields, width], Some(1))?;
        let item = graph.reshape(item, vec![1, 1, fields, width], Some(1))?;
        let all = graph.concat(2, &[expanded, item])?;
        Ok(Fields { graph, all, fields, width })
    }

    fn flat(&mut self, id: Id) -> Result<Id> {
        let count = self.graph.values[id].count();
        self.graph.reshape(id, vec![1, 1, count], Some(1))
    }

    fn layer(&mut self, a: Id, columns: usize, seed: usize) -> Result<Id> {
        let depth = *self.graph.shape(a).last().unwrap_or(&1);
        let weights = numbers(depth * columns, seed).iter().map(|x| x / depth as f32).collect();
        let weights = self.graph.number(vec![depth, columns], weights)?;
        self.graph.matmul(a, weights)
    }

    /// First layer of a network over all fields.
    fn deep(&mut self) -> Result<Id> {
        let flat = self.flat(self.all)?;
        let hidden = self.layer(flat, 24, 3)?;
        let hidden = self.graph.unary(Unary::Relu, hidden)?;
        self.layer(hidden, 1, 5)
    }

    /// Square of the sum of all fields, and sum of their squares.
    fn pairs(&mut self) -> Result<Id> {
        let sum = self.graph.fold(Fold::Sum, self.all, &[2])?;
        let square = self.graph.binary(Binary::Mul, sum, sum)?;
        let squares = self.graph.binary(Binary::Mul, self.all, self.all)?;
        let squares = self.graph.fold(Fold::Sum, squares, &[2])?;
        let less = self.graph.binary(Binary::Sub, square, squares)?;
        self.flat(less)
    }

    /// Dot products of all pairs of fields.
    fn products(&mut self) -> Result<Id> {
        let turned = self.graph.transpose(self.all, &[0, 1, 3, 2])?;
        let products = self.graph.matmul(self.all, turned)?;
        let n = 2 * self.fields as u32;
        let index: Vec<u32> = (0..n).flat_map(|a| (a + 1..n).map(move |b| a * n + b)).collect();
        let shape = vec![1, 1, index.len()];
        let above = self.graph.pick(products, index, shape, Some(1))?;
        self.layer(above, 20, 7)
    }

    /// Two cross layers.
    fn crosses(&mut self) -> Result<Id> {
        let first = self.flat(self.all)?;
        let count = 2 * self.fields * self.width;
        let mut x = first;
        for seed in [11, 13] {
            let low = self.layer(x, 6, seed)?;
            let made = self.layer(low, count, seed + 1)?;
            let product = self.graph.binary(Binary::Mul, first, made)?;
            x = self.graph.binary(Binary::Add, product, x)?;
        }
        self.layer(x, 9, 17)
    }

    /// A layer over each field, and a nonlinear sum of all of them.
    fn of_each_field(&mut self) -> Result<Id> {
        let made = self.layer(self.all, 5, 19)?;
        let made = self.graph.unary(Unary::Tanh, made)?;
        let most = self.graph.fold(Fold::Max, made, &[3])?;
        self.flat(most)
    }
}

fn row_flops(graph: &Graph) -> u64 {
    RowProgram::of(graph, Precision::F32, Kernels::best())
        .unwrap()
        .figures()
        .map(|f| f.row_flops)
        .into_iter()
        .min()
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn separated_rerankers_compute_what_their_files_define(fields in 1usize..6, width in 1usize..20, rows in 1usize..70) {
        let mut of = Fields::new(fields, width).unwrap();
        let made = [of.deep(), of.pairs(), of.products(), of.crosses(), of.of_each_field()].map(Result::unwrap);
        of.graph.outputs = made.to_vec();
        let (query, row) = (numbers(fields * width, 5), |n: usize| numbers(fields * width, n + 9));
        let want: Vec<Vec<f32>> = (0..rows).map(|n| {
            let output = |&id: &Id| interpret::row(&of.graph.values, id, &[&query, &row(n)]);
            made.iter().flat_map(output).collect()
        }).collect();
        let apart = separated(&of.graph).unwrap().unwrap();
        let both = RowProgram::of(&apart, Precision::F32, Kernels::best()).unwrap();
        for plan in [&both.straight, &both.collapsed] {
            let program = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
            let made = run(&program, rows, &[&query], &row);
            for (n, (got, want)) in made.iter().zip(&want).enumerate() {
                near(got, want, &format!("row {n}"));
                prop_assert_eq!(&run(&program, 1, &[&query], &|_| row(n))[0], got);
            }
        }
        // Both halves of the best cut compute the same.
        if let Some(cut) = best_cut(&apart, &[false, true], &[0, 1 << 20]).unwrap() {
            let parts = split(&apart, &[false, true], &cut).unwrap();
            let item = RowProgram::of(&parts.item.graph, Precision::F32, Kernels::best()).unwrap();
            let candidates = RowProgram::of(&parts.candidates.graph, Precision::F32, Kernels::best()).unwrap();
            let stored = run(&item, rows, &[], &row);
            let reads_item = parts.candidates.inputs.contains(&1);
            let left = |n: usize| [stored[n].clone(), if reads_item { row(n) } else { Vec::new() }].concat();
            for (n, (got, want)) in run(&candidates, rows, &[&query], &left).iter().zip(&want).enumerate() {
                near(got, want, &format!("halves, row {n}"));
            }
        }
    }
}

/// The user's fields take no work per row.
#[test]
fn the_users_numbers_are_computed_once() {
    let share = |make: fn(&mut Fields) -> Result<Id>| {
        let mut of = Fields::new(8, 16).unwrap();
        of.graph.outputs = vec![make(&mut of).unwrap()];
        let apart = separated(&of.graph).unwrap().unwrap();
        row_flops(&apart) as f64 / row_flops(&of.graph) as f64
    };
    let shares = [Fields::deep, Fields::products, Fields::of_each_field].map(share);
    assert!(shares[0] < 0.52 && shares[1] < 0.8 && shares[2] < 0.55, "{shares:?}");
}

/// The first layer of the item's fields is computed once per item.
#[test]
fn layers_over_fields_of_the_item_are_precomputed() {
    let mut of = Fields::new(8, 16).unwrap();
    of.graph.outputs = vec![of.deep().unwrap()];
    assert!(best_cut(&of.graph, &[false, true], &[0, 0]).unwrap().is_none());
    let apart = separated(&of.graph).unwrap().unwrap();
    let cut = best_cut(&apart, &[false, true], &[0, 1280]).unwrap().unwrap();
    assert_eq!(split(&apart, &[false, true], &cut).unwrap().width, 24);
}

/// Ids of cuts and digests of item sides are those of the file if nothing is separated.
#[test]
fn graphs_without_numbers_of_the_user_in_sums_stay_as_they_are() {
    let mut of = Fields::new(3, 4).unwrap();
    let first = of.flat(of.all).unwrap();
    let expanded = of.graph.unary(Unary::Relu, first).unwrap();
    of.graph.outputs = vec![expanded];
    assert!(separated(&of.graph).unwrap().is_none());
    let mut graph = Graph::new(vec![input(Side::User, 4), input(Side::Pair, 4)]);
    let (user, item) = (graph.input(0).unwrap(), graph.input(1).unwrap());
    let weights = graph.number(vec![4, 4], numbers(16, 3)).unwrap();
    let layer = graph.matmul(item, weights).unwrap();
    let product = graph.binary(Binary::Mul, layer, user).unwrap();
    graph.outputs = vec![graph.fold(Fold::Sum, product, &[2]).unwrap()];
    assert!(separated(&graph).unwrap().is_none());
    let (bytes, inputs, output) = reranker();
    let outputs = [made(output.0, &output.1)];
    let of_file = import::import(&bytes, &inputs, &outputs).unwrap();
    let read = ReadGraph::read(&bytes, &inputs, &outputs).unwrap().graph;
    assert_eq!(format!("{read:?}"), format!("{of_file:?}"));
}

/// Expanded values of the user are multiplied once.
#[test]
fn layers_over_expanded_values_of_the_user_are_separated() {
    let mut of = Fields::new(1, 16).unwrap();
    let (user, item) = (of.graph.input(0).unwrap(), of.graph.input(1).unwrap());
    let mut made = of.graph.pick(user, (0..16).collect(), vec![1, 1, 16], Some(1)).unwrap();
    for seed in [3, 5] {
        made = of.layer(made, 16, seed).unwrap();
        made = of.graph.unary(Unary::Tanh, made).unwrap();
    }
    of.graph.outputs = vec![of.graph.binary(Binary::Mul, made, item).unwrap()];
    let (apart, complete) = (row_flops(&separated(&of.graph).unwrap().unwrap()), row_flops(&of.graph));
    assert!(apart < complete, "{apart} of {complete}");
}

/// Numbers of the user in another shape, without a copy per row.
#[test]
fn reshaped_values_of_the_user_are_taken_in_their_order() {
    let user = GraphInput { side: Side::User, shape: vec![8, 1], rows: None };
    let mut graph = Graph::new(vec![user, input(Side::Pair, 4)]);
    let (user, item) = (graph.input(0).unwrap(), graph.input(1).unwrap());
    let expanded = graph.pick(user, vec![3, 1, 2, 0], vec![1, 1, 4], Some(1)).unwrap();
    let all = graph.concat(2, &[expanded, item]).unwrap();
    let own = graph.reshape(user, vec![1, 1, 8], Some(1)).unwrap();
    let sum = graph.binary(Binary::Add, all, own).unwrap();
    let weights = graph.number(vec![8, 2], numbers(16, 3)).unwrap();
    graph.outputs = vec![graph.matmul(sum, weights).unwrap()];
    let program = RowProgram::of(&separated(&graph).unwrap().unwrap(), Precision::F32, Kernels::best()).unwrap();
    let query = numbers(8, 5);
    for (n, got) in run(&program, 3, &[&query], &|n| numbers(4, n)).iter().enumerate() {
        let want: Vec<f32> = interpret::row(&graph.values, graph.outputs[0], &[&query, &numbers(4, n)]);
        near(got, &want, &format!("row {n}"));
    }
}

/// A thread with a small stack reads graphs of any depth.
#[test]
fn deep_graphs_are_separated() {
    let deep = || {
        let mut of = Fields::new(2, 3).unwrap();
        let (first, mut scaled) = (of.flat(of.all).unwrap(), of.graph.input(1).unwrap());
        let one = of.graph.number(vec![], vec![1.0]).unwrap();
        let item = scaled;
        scaled = of.graph.concat(2, &[item, item]).unwrap();
        for _ in 0..20_000 {
            scaled = of.graph.binary(Binary::Mul, scaled, one).unwrap();
        }
        let sum = of.graph.binary(Binary::Add, first, scaled).unwrap();
        let mut made = of.layer(sum, 4, 3).unwrap();
        for _ in 0..20_000 {
            made = of.graph.unary(Unary::Relu, made).unwrap();
        }
        let mut other = of.layer(first, 4, 3).unwrap();
        for _ in 0..20_000 {
            other = of.graph.unary(Unary::Relu, other).unwrap();
        }
        of.graph.outputs = vec![made, other];
        assert!(separated(&of.graph).unwrap().is_some());
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(deep).unwrap().join().unwrap();
}
