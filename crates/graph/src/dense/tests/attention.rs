//! Fused attention against the same graph without fusion, bit for bit, and against the evaluation of the graph.

use super::*;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    steps: usize,
    heads: usize,
    width: usize,
}

/// How the logits become weights.
#[derive(Clone, Copy, Debug)]
enum Chain {
    /// Scale, padding mask, causal mask, softmax.
    Causal,
    /// Softmax of logits, of which padding is replaced by a constant.
    Replaced,
    /// SiLU, bias by distance, and a mask that multiplies.
    Gated,
    /// Softmax of logits, of which padding is infinite, with zeros if everything is padding. The mask is looked up by a
    /// product, as PyTorch exports that of an encoder.
    Guarded,
}

const CHAINS: [Chain; 4] = [Chain::Causal, Chain::Replaced, Chain::Gated, Chain::Guarded];
const FAR: f32 = -1e9;

/// Builds self-attention over a sequence, input 0, with a mask, input 1, of each row or of the user.
fn attention(sizes: Sizes, chain: Chain, side: Side) -> Result<Graph> {
    let Sizes { steps, heads, width } = sizes;
    let all = heads * width;
    let rows = (side == Side::Pair).then_some(0);
    let given = |shape: Vec<usize>| GraphInput { side, shape, rows };
    let one = GraphInput { side: Side::Pair, shape: vec![1, 1], rows: Some(0) };
    let mut graph = Graph::new(vec![given(vec![1, steps, all]), given(vec![1, steps]), one]);
    let (x, mask, column) = (graph.input(0)?, graph.input(1)?, graph.input(2)?);
    let mut projected = |seed: usize, order: &[usize; 4]| {
        let scale = 2.0 / (all as f32).sqrt();
        let weights = numbers(all * all, seed).iter().map(|x| x * scale).collect();
        let weights = graph.number(vec![all, all], weights)?;
        let made = graph.matmul(x, weights)?;
        let made = graph.reshape(made, vec![1, steps, heads, width], rows)?;
        graph.transpose(made, order)
    };
    let (q, k, v) = (projected(1, &[0, 2, 1, 3])?, projected(2, &[0, 2, 3, 1])?, projected(3, &[0, 2, 1, 3])?);
    let scores = graph.matmul(q, k)?;
    let scale = graph.number(vec![], vec![1.0 / (width as f32).sqrt()])?;
    let scores = graph.binary(Binary::Mul, scores, scale)?;
    let mask = graph.reshape(mask, vec![1, 1, 1, steps], rows)?;
    let is_past = (0..steps * steps).map(|n| f32::from(u8::from(n % steps <= n / steps))).collect::<Vec<f32>>();
    let logits = match chain {
        Chain::Causal => {
            let future = is_past.iter().map(|x| (1.0 - x) * FAR).collect();
            let (one, far, future) = (
                graph.number(vec![], vec![1.0])?,
                graph.number(vec![], vec![FAR])?,
                graph.number(vec![steps, steps], future)?,
            );
            let missing = graph.binary(Binary::Sub, one, mask)?;
            let less = graph.binary(Binary::Mul, missing, far)?;
            let logits = graph.binary(Binary::Add, scores, less)?;
            graph.binary(Binary::Add, future, logits)?
        }
        Chain::Replaced => {
            let far = graph.number(vec![], vec![FAR])?;
            let (retained, dropped) =
                (graph.binary(Binary::Keep, mask, scores)?, graph.binary(Binary::Drop, mask, far)?);
            graph.binary(Binary::Add, retained, dropped)?
        }
        Chain::Gated => {
            let bias = graph.number(vec![heads, 1, steps], numbers(heads * steps, 4))?;
            let silu = graph.unary(Unary::Silu, scores)?;
            graph.binary(Binary::Add, silu, bias)?
        }
        Chain::Guarded => {
            let same = (0..steps * steps).map(|n| f32::from(u8::from(n % steps == n / steps))).collect();
            let (same, far) = (graph.number(vec![steps, steps], same)?, graph.number(vec![], vec![f32::NEG_INFINITY])?);
            let mask = graph.matmul(mask, same)?;
            let less = graph.binary(Binary::Drop, mask, far)?;
            graph.binary(Binary::Add, scores, less)?
        }
    };
    let mut weights = match chain {
        Chain::Gated => {
            let is_past = graph.number(vec![1, 1, steps, steps], is_past)?;
            let past = graph.binary(Binary::Mul, logits, is_past)?;
            graph.binary(Binary::Mul, past, mask)?
        }
        _ => {
            let most = graph.fold(Fold::Max, logits, &[3])?;
            let less = graph.binary(Binary::Sub, logits, most)?;
            let each = graph.unary(Unary::Exp, less)?;
            let sum = graph.fold(Fold::Sum, each, &[3])?;
            graph.binary(Binary::Div, each, sum)?
        }
    };
    if let Chain::Guarded = chain {
        let is_nan = graph.unary(Unary::IsNan, weights)?;
        weights = graph.binary(Binary::Drop, is_nan, weights)?;
    }
    let seen = graph.matmul(weights, v)?;
    let seen = graph.transpose(seen, &[0, 2, 1, 3])?;
    let seen = graph.reshape(seen, vec![1, steps * all], rows)?;
    graph.outputs = vec![graph.binary(Binary::Mul, seen, column)?];
    Ok(graph)
}

/// Returns the program without fused attention.
fn unfused(graph: &Graph, program: &RowProgram) -> RowProgram {
    let plan = |is_eager| plan::plan(&collapse::collapse(graph, is_eager).unwrap(), Precision::F32, false).unwrap();
    RowProgram { straight: plan(false), collapsed: plan(true), ..program.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn fused_attention_computes_what_its_graph_says(
        steps in prop_oneof![2 => 32usize..40, 2 => 40usize..60], heads in 1usize..4, width in 1usize..24,
        chain in 0usize..4, rows in 1usize..20, is_user in any::<bool>(),
    ) {
        let sizes = Sizes { steps, heads, width };
        let side = if is_user { Side::User } else { Side::Pair };
        let graph = attention(sizes, CHAINS[chain], side).unwrap();
        let both = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        prop_assert!(both.straight.has_attention() && both.collapsed.has_attention(), "{}", both);
        let is_guarded = matches!(CHAINS[chain], Chain::Guarded);
        prop_assert_eq!(both.to_string().contains("softmax or zeros"), is_guarded, "{}", both);
        let sequence = |n: usize| numbers(steps * heads * width, n);
        // Padding on the left, on the right, everywhere, and nowhere.
        let mask = |n: usize| {
            let there = n * 5 % (steps + 1);
            let is_there = |step: usize| if n.is_multiple_of(2) { step < there } else { step + there >= steps };
            (0..steps).map(|step| f32::from(u8::from(is_there(step)))).collect::<Vec<f32>>()
        };
        let (of_user, mask_of_user) = (sequence(3), mask(7));
        let user: Vec<&[f32]> = if is_user { vec![&of_user, &mask_of_user] } else { Vec::new() };
        let row = |n: usize| match is_user {
            true => vec![n as f32 + 0.5],
            false => [sequence(n), mask(n), vec![n as f32 + 0.5]].concat(),
        };
        for kernels in Kernels::all() {
            let fused = RowProgram { kernels, ..both.clone() };
            let made = run(&fused, rows, &user, &row);
            prop_assert_eq!(&run(&unfused(&graph, &fused), rows, &user, &row), &made);
            for (n, got) in made.iter().enumerate() {
                let (x, mask) = if is_user { (of_user.clone(), mask_of_user.clone()) } else { (sequence(n), mask(n)) };
                let want = interpret::row(&graph.values, graph.outputs[0], &[&x, &mask, &[n as f32 + 0.5]]);
                near(got, &want, &format!("{} row {n}", kernels.name()));
                prop_assert_eq!(&run(&fused, 1, &user, &|_| row(n))[0], got);
            }
        }
    }
}

#[test]
fn attention_whose_weights_are_an_output_is_not_fused() {
    let sizes = Sizes { steps: 33, heads: 2, width: 4 };
    for chain in CHAINS {
        let mut graph = attention(sizes, chain, Side::Pair).unwrap();
        let of = graph.values.iter().rev().find_map(|value| match value.op {
            ir::Op::MatMul(weights, _) => Some(weights),
            _ => None,
        });
        graph.outputs.push(of.unwrap());
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        assert!(!program.straight.has_attention(), "{program}");
    }
}
