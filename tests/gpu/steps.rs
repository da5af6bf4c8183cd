//! Steps of dense programs compared with those of the CPU, and complete graphs of the models.

use sterling::cuda::ops::steps::{
    self, ChainAt, FactorAt, KeyedFoldAt, MatricesAt, NumbersAt, PickDestination, ProductTo, RowsOf, RunsOfRow,
};
use sterling::cuda::{Array, Device};
use sterling::graph::dense::{DeclaredInput, DeclaredOutput, DeviceProgram, InputRows, RowProgram, Scratch, Size};
use sterling::graph::tower::Graph;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::dense::{
    Binary, CHAIN_MAX, Chain, ChainLink, EqualFold, Fold, Form, Keys, Lines, MapTarget, Operand, PANEL, PairRows, Part,
    Product, STEP, Unary, Weights, pack, pack_pairs, packed_stride,
};

use crate::emulation::{Random, device};

fn portable() -> Kernels {
    Kernels::named("portable").unwrap()
}

fn close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let is_close = (got - want).abs() <= 3e-5 * want.abs().max(1.0) || got.to_bits() == want.to_bits();
        assert!(is_close || (got.is_nan() && want.is_nan()), "{what}: number {at} is {got}, expected {want}");
    }
}

/// Multiplies rows of these depths, one after the other, with packed matrices, whose rows are `row_stride` apart.
fn parts<'a>(rows: &'a [Vec<f32>], packed: &'a [Lines], depths: &[Depth], row_stride: usize) -> Vec<Part<'a>> {
    let part = |((rows, packed), &Depth { depth, room }): ((&'a Vec<f32>, &'a Lines), &Depth)| {
        let weights = Weights { numbers: packed.numbers(), row_stride, panel_stride: row_stride * room };
        Part { rows, stride: room, depth, weights }
    };
    rows.iter().zip(packed).zip(depths).map(part).collect()
}

/// Returns depths without padding.
fn tight(depths: &[usize]) -> Vec<Depth> {
    depths.iter().map(|&depth| Depth { depth, room: depth }).collect()
}

/// Numbers or pairs of a row, and those up to the next row.
#[derive(Clone, Copy)]
struct Depth {
    depth: usize,
    room: usize,
}

/// Returns the same on the device, with `count` rows per request.
fn factors(
    rows: &[Array<f32>],
    packed: &[Array<f32>],
    count: usize,
    depths: &[Depth],
    row_stride: usize,
) -> Vec<FactorAt> {
    let factor = |((rows, packed), &Depth { depth, room }): ((&Array<f32>, &Array<f32>), &Depth)| {
        let rows = NumbersAt::of(rows, 0, count * room, room);
        FactorAt::new(rows, NumbersAt::of(packed, 0, 0, 0), depth, (row_stride, row_stride * room))
    };
    rows.iter().zip(packed).zip(depths).map(factor).collect()
}

/// A product with seven columns. For pairs, a GPU with few blocks uses wide tiles and one with many uses narrow ones: the
/// emulation alternates, and both must give the same result.
fn in_all_tiles(
    device: &Device,
    rows: RowsOf<'_>,
    factors: &[FactorAt],
    count: usize,
    to: impl Fn(&Array<f32>) -> ProductTo,
) -> Vec<f32> {
    let [narrow, wide] = [0, 1].map(|_| {
        let out = device.copy(&vec![7f32; count]).unwrap();
        steps::product(device, rows, factors, &to(&out)).unwrap();
        out.to_vec().unwrap()
    });
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    assert_eq!(bits(&narrow), bits(&wide), "narrow tiles and wide ones");
    wide
}

#[test]
fn products_equal_those_of_the_cpu() {
    let (device, mut random) = (device(), Random::new(1));
    for (rows, columns, depths, relu) in [
        (1, 1, vec![1], false),
        (70, 33, vec![17, 64], true),
        (5, 130, vec![3, 1, 40, 9], false),
        (129, 64, vec![16], true),
        (64, 5, vec![50], false),
        (150, 200, vec![24, 8], true),
    ] {
        let matrices: Vec<Vec<f32>> = depths.iter().map(|depth| random.numbers(depth * columns)).collect();
        let inputs: Vec<Vec<f32>> = depths.iter().map(|depth| random.numbers(rows * depth)).collect();
        let packed: Vec<Lines> = depths.iter().zip(&matrices).map(|(d, m)| pack(m, *d, columns)).collect();
        let bias = Lines::of(&random.numbers(columns));
        let parts = parts(&inputs, &packed, &tight(&depths), packed_stride(columns));
        let stride = columns + 2;
        let mut want = vec![7f32; rows * stride];
        let product = Product { rows, columns, parts: &parts, bias: bias.numbers(), relu, ..Product::default() };
        portable().product(&product, &mut want, stride);

        // Two requests, the second with fewer rows.
        let twice = |numbers: &[f32]| device.copy(&numbers.repeat(2)).unwrap();
        let (inputs_on, packed_on): (Vec<_>, Vec<_>) =
            inputs.iter().zip(&packed).map(|(i, p)| (twice(i), device.copy(p.numbers()).unwrap())).unzip();
        let bias_on = device.copy(bias.numbers()).unwrap();
        let counts = device.copy(&[rows as u32, rows as u32 / 2]).unwrap();
        let factors = factors(&inputs_on, &packed_on, rows, &tight(&depths), packed_stride(columns));
        let of = RowsOf { counts: &counts, most: rows };
        let got = in_all_tiles(&device, of, &factors, 2 * rows * stride, |out| ProductTo {
            bias: NumbersAt::of(&bias_on, 0, 0, 0),
            out: NumbersAt::of(out, 0, rows * stride, stride),
            runs: 1,
            columns,
            relu,
            factors: Form::Single,
            result: Form::Single,
        });
        let half = rows / 2 * stride;
        close(&got[..rows * stride], &want, "product");
        close(&got[rows * stride..][..half], &want[..half], "product of the second request");
        assert!(got[rows * stride + half..].iter().all(|&x| x == 7.0), "rows that are not there");
    }
}

/// Products of single-precision numbers on tensor cores: within 2^-21 of the sum's magnitude for parts of different magnitude and
/// sums that cancel, and as close as a single-precision sum of this depth.
#[test]
fn tensor_core_products_are_as_exact_as_single_precision() {
    let (device, mut random) = (device(), Random::new(8));
    let (rows, columns, depth) = (40, 70, 512);
    // All bits of a number matter; its magnitude is between 2^-12 and 2^3.
    let mut number = || (random.number() + random.number() / 8191.0) * 2f32.powi(random.below(16) as i32 - 12);
    let input: Vec<f32> = (0..rows * depth).map(|_| number()).collect();
    let matrix: Vec<f32> = (0..depth * columns).map(|_| number()).collect();
    let packed = pack(&matrix, depth, columns);
    let (input_on, packed_on) = ([device.copy(&input).unwrap()], [device.copy(packed.numbers()).unwrap()]);
    let (counts, out) = (device.copy(&[rows as u32]).unwrap(), device.room(rows * columns).unwrap());
    let factors = factors(&input_on, &packed_on, rows, &tight(&[depth]), packed_stride(columns));
    let to = ProductTo {
        bias: NumbersAt::default(),
        out: NumbersAt::of(&out, 0, 0, columns),
        runs: 1,
        columns,
        relu: false,
        factors: Form::Single,
        result: Form::Single,
    };
    steps::product(&device, RowsOf { counts: &counts, most: rows }, &factors, &to).unwrap();
    let got = out.to_vec().unwrap();
    let (mut squares, mut of_chains) = (0f64, 0f64);
    for (at, &got) in got.iter().enumerate() {
        let terms = || (0..depth).map(|k| (input[at / columns * depth + k], matrix[k * columns + at % columns]));
        let of_term = |(x, w): (f32, f32)| f64::from(x) * f64::from(w);
        let (truth, size): (f64, f64) =
            terms().map(of_term).fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        let error = (f64::from(got) - truth).abs();
        // Besides the omitted parts, 64 sums of 8 terms are rounded when they are added, and truncated three times before.
        assert!(error <= size * 2f64.powi(-21) + size * 67.0 * 2f64.powi(-23), "number {at}: {got}, expected {truth}");
        squares += (error / size).powi(2);
        let chain = terms().fold(0f32, |sum, (x, w)| x.mul_add(w, sum));
        of_chains += ((f64::from(chain) - truth) / size).powi(2);
    }
    assert!(squares <= of_chains, "errors of {squares:e}, those of a chain {of_chains:e}");
}

/// Rows are narrowed on the device and multiplied with matrices that the host or the device packed, into numbers or pairs.
#[test]
fn products_of_pairs_equal_those_of_the_cpu() {
    let (device, mut random) = (device(), Random::new(4));
    for (rows, columns, depths, relu, result) in [
        (1, 1, vec![1], false, Form::Single),
        (130, 70, vec![33, 64], true, Form::Pairs),
        (40, 65, vec![7, 2, 100], false, Form::Pairs),
        (129, 64, vec![32], true, Form::Single),
        (33, 200, vec![48], false, Form::Single),
        (140, 131, vec![40, 64], true, Form::Pairs),
    ] {
        let pairs = depths.iter().map(|&depth| Form::Pairs.room(depth));
        let pairs: Vec<Depth> = pairs.map(|depth| Depth { depth, room: depth.next_multiple_of(STEP) }).collect();
        let inputs: Vec<Vec<f32>> = depths.iter().map(|depth| random.numbers(rows * depth)).collect();
        let matrices: Vec<Vec<f32>> = depths.iter().map(|depth| random.numbers(depth * columns)).collect();
        let packed: Vec<Lines> = depths.iter().zip(&matrices).map(|(d, m)| pack_pairs(m, *d, columns)).collect();
        let narrowed: Vec<Vec<f32>> = (0..depths.len())
            .map(|n| {
                let room = pairs[n].room;
                let mut numbers = vec![0f32; rows * room];
                let operand = Operand { numbers: &inputs[n], row: depths[n], outer: 0, inner: 1 };
                let mut target = MapTarget { numbers: &mut numbers, stride: room, rows, outer: 1, inner: room };
                portable().narrow(&operand, depths[n], &mut target);
                numbers
            })
            .collect();
        let parts = parts(&narrowed, &packed, &pairs, PANEL);
        let bias = Lines::of(&random.numbers(columns));
        let stride = result.room(columns.next_multiple_of(PANEL)) + 3;
        let mut want = vec![7f32; rows * stride];
        let product = Product {
            rows,
            columns,
            parts: &parts,
            bias: bias.numbers(),
            relu,
            factors: Form::Pairs,
            result,
            ..Product::default()
        };
        portable().product(&product, &mut want, stride);

        let of = device.copy(&[rows as u32, rows as u32 / 3]).unwrap();
        let of = RowsOf { counts: &of, most: rows };
        let one = device.copy(&[1u32]).unwrap();
        let (mut rows_on, mut matrices_on) = (Vec::new(), Vec::new());
        for n in 0..depths.len() {
            let room = pairs[n].room;
            let (from, to) =
                (device.copy(&inputs[n].repeat(2)).unwrap(), device.copy(&vec![0f32; 2 * rows * room]).unwrap());
            let at = NumbersAt::of(&from, 0, rows * depths[n], depths[n]);
            steps::narrow(&device, of, at, depths[n], NumbersAt::of(&to, 0, rows * room, room)).unwrap();
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&to.read(rows * room).unwrap()), bits(&narrowed[n]), "rows of {} numbers", depths[n]);
            rows_on.push(to);
            let nothing = vec![0f32; packed[n].numbers().len()];
            let (from, to) = (device.copy(&matrices[n]).unwrap(), device.copy(&nothing).unwrap());
            let at_start = PairRows { all: room, first: 0 };
            let (one, at) = (RowsOf { counts: &one, most: 1 }, NumbersAt::of(&from, 0, 0, 0));
            // With few blocks and with many.
            for _ in 0..2 {
                let to = NumbersAt::of(&to, 0, 0, 0);
                steps::pack_narrow(&device, one, at, (depths[n], columns, at_start), to).unwrap();
            }
            let words = room * columns.next_multiple_of(PANEL);
            assert_eq!(bits(&to.read(words).unwrap()), bits(&packed[n].numbers()[..words]), "a matrix of {columns}");
            matrices_on.push(to);
        }
        let factors = factors(&rows_on, &matrices_on, rows, &pairs, PANEL);
        let bias_on = device.copy(bias.numbers()).unwrap();
        let got = in_all_tiles(&device, of, &factors, 2 * rows * stride, |out| {
            let (bias, out) = (NumbersAt::of(&bias_on, 0, 0, 0), NumbersAt::of(out, 0, rows * stride, stride));
            ProductTo { bias, out, runs: 1, columns, relu, factors: Form::Pairs, result }
        });
        let numbers = |row: &[f32]| -> Vec<f32> {
            let halves = |x: &f32| [f32::from_bits(x.to_bits() << 16), f32::from_bits(x.to_bits() & 0xffff_0000)];
            match result {
                Form::Single => row[..columns].to_vec(),
                Form::Pairs => row[..columns.div_ceil(2)].iter().flat_map(halves).take(columns).collect(),
            }
        };
        for row in 0..rows + rows / 3 {
            let (got, want) = (&got[row * stride..][..stride], &want[row % rows * stride..][..stride]);
            // A sum in another order may be rounded to the next bf16.
            let near = if result == Form::Pairs { 1.0 / 128.0 } else { 3e-5 };
            for (got, want) in numbers(got).iter().zip(numbers(want)) {
                assert!((got - want).abs() <= near * want.abs().max(1.0), "row {row}: {got}, expected {want}");
            }
        }
        assert!(got[(rows + rows / 3) * stride..].iter().all(|&x| x == 7.0), "rows that are not there");
        assert!((0..rows).all(|row| got[row * stride + stride - 1] == 7.0), "beyond the columns");
    }
    let (none, counts) = (NumbersAt::default(), device.copy(&[1u32]).unwrap());
    let to = ProductTo {
        bias: none,
        out: none,
        runs: 1,
        columns: 1,
        relu: false,
        factors: Form::Single,
        result: Form::Pairs,
    };
    assert!(steps::product(&device, RowsOf { counts: &counts, most: 1 }, &[], &to).is_err());
}

/// Rows of two runs are twice as many rows, of numbers and of pairs; the last pair is half empty.
#[test]
fn runs_of_a_row_are_multiplied_as_rows_are() {
    let (device, mut random) = (device(), Random::new(9));
    let (rows, columns, depth) = (34, 9, 12);
    for form in [Form::Single, Form::Pairs] {
        let words =
            |count: usize| random.numbers(count).iter().map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)).collect();
        let [input, matrix]: [Vec<f32>; 2] = [rows * depth, depth * PANEL].map(words);
        let (input, matrix) = (device.copy(&input).unwrap(), device.copy(&matrix).unwrap());
        let stride = form.room(columns);
        let [one, two] = [1, 2].map(|runs| {
            let (counts, out) = (device.copy(&[(rows / runs) as u32]).unwrap(), device.zeros(rows * stride).unwrap());
            let from = NumbersAt::of(&input, 0, 0, runs * depth);
            let factor = FactorAt::new(from, NumbersAt::of(&matrix, 0, 0, 0), depth, (PANEL, PANEL * depth));
            let (bias, out_at) = (NumbersAt::default(), NumbersAt::of(&out, 0, 0, runs * stride));
            let to = ProductTo { bias, out: out_at, runs, columns, relu: false, factors: form, result: form };
            steps::product(&device, RowsOf { counts: &counts, most: rows / runs }, &[factor], &to).unwrap();
            out.to_vec().unwrap().iter().map(|x: &f32| x.to_bits()).collect::<Vec<u32>>()
        });
        assert!(one.iter().all(|&word| word != 0), "{form:?}");
        assert_eq!(one, two, "{form:?}");
    }
}

#[test]
fn maps_and_reductions_are_those_of_the_cpu() {
    let (device, mut random) = (device(), Random::new(2));
    // More numbers than the threads of a grid of few blocks.
    let (rows, outer, inner) = (13, 3, 37);
    let mut numbers: Vec<f32> = random.numbers(rows * outer * inner).iter().map(|x| x * 9.0).collect();
    (numbers[3], numbers[50], numbers[77], numbers[100]) = (f32::NAN, 100.0, -100.0, -0.0);
    let others: Vec<f32> = random.numbers(rows * outer * inner);
    let b = device.copy(&others).unwrap();
    let counts = device.copy(&[rows as u32]).unwrap();
    let of = RowsOf { counts: &counts, most: rows };
    let row = outer * inner;
    let operand = |numbers| Operand { numbers, row, outer: inner, inner: 1 };
    let runs = RunsOfRow { outer, inner };
    use Unary::{
        Abs, Erf, Exp, Gelu, IsNan, Log, Neg, Not, Reciprocal, Relu, Sigmoid, Silu, Softplus, Sqrt, Tanh, Trunc,
    };
    let mapped =
        [Relu, Sigmoid, Tanh, Exp, Log, Sqrt, Abs, Neg, Reciprocal, Erf, Gelu, Silu, Softplus, Trunc, Not, IsNan];
    (numbers[5], numbers[6]) = (0.0, 3.0);
    let a = device.copy(&numbers).unwrap();
    for f in mapped {
        let mut want = vec![0f32; numbers.len()];
        let mut target = MapTarget { numbers: &mut want, stride: row, rows, outer, inner };
        portable().map1(f, &operand(&numbers), &mut target);
        let out = device.room(numbers.len()).unwrap();
        let from = NumbersAt::of(&a, 0, 0, row).runs(inner, 1);
        steps::map1(&device, of, f, runs, from, NumbersAt::of(&out, 0, 0, row)).unwrap();
        close(&out.to_vec().unwrap(), &want, &format!("{f:?}"));
    }
    // Some numbers of the first operand equal those of the second.
    let mut mixed = numbers.clone();
    (0..rows).for_each(|r| mixed[r * row + 7] = others[r * row]);
    let mixed_on = device.copy(&mixed).unwrap();
    use Binary::{Add, Div, Drop, Equal, Keep, Less, LessOrEqual, Max, Min, Mul, Sub};
    for f in [Add, Sub, Mul, Div, Max, Min, Equal, Less, LessOrEqual, Keep, Drop] {
        // A run of the second operand is one number of each row.
        let mut want = vec![0f32; numbers.len()];
        let single = Operand { numbers: &others[..], row, outer: 1, inner: 0 };
        let mut target = MapTarget { numbers: &mut want, stride: row, rows, outer, inner };
        portable().map2(f, &operand(&mixed), &single, &mut target);
        let out = device.room(numbers.len()).unwrap();
        let (x, y) = (NumbersAt::of(&mixed_on, 0, 0, row).runs(inner, 1), NumbersAt::of(&b, 0, 0, row).runs(1, 0));
        steps::map2(&device, of, f, runs, [x, y], NumbersAt::of(&out, 0, 0, row)).unwrap();
        close(&out.to_vec().unwrap(), &want, &format!("{f:?}"));
    }
    for f in [Fold::Sum, Fold::Max, Fold::Min] {
        let mut want = vec![0f32; rows * outer];
        let mut target = MapTarget { numbers: &mut want, stride: outer, rows, outer, inner: 1 };
        portable().fold(f, &operand(&numbers), inner, &mut target);
        let out = device.room(rows * outer).unwrap();
        steps::fold(&device, of, f, runs, NumbersAt::of(&a, 0, 0, row), NumbersAt::of(&out, 0, 0, outer)).unwrap();
        close(&out.to_vec().unwrap(), &want, &format!("{f:?}"));
    }
}

/// More rows than warps of a grid, requests that differ in rows, a key without equal, NaN and infinite numbers beside some.
#[test]
fn reductions_by_equal_keys_are_those_of_the_cpu() {
    let (device, mut random) = (device(), Random::new(11));
    let (counts, most) = ([45u32, 7], 45);
    for (count, folded) in [(1, 3), (31, 1), (100, 4)] {
        let of_rows: Vec<f32> = (0..2 * most).map(|n| (n * 5 % 64) as f32).collect();
        let shared: Vec<f32> = (0..2 * count).map(|n| (n * 3 % 48) as f32).collect();
        let mut values = [random.numbers(2 * count), random.numbers(2 * count)];
        (values[1][0], values[1][2 * count - 1]) = (f32::INFINITY, f32::NAN);
        let folds = &[(Fold::Sum, 0), (Fold::Max, 0), (Fold::Min, 0), (Fold::Sum, 1)][..folded];
        let stride = folded + 1;
        let mut want = vec![-3.0f32; 2 * most * stride];
        for request in 0..2 {
            let part = |numbers: &'_ [f32]| numbers[request * count..][..count].to_vec();
            let (keys, values) = (part(&shared), values.each_ref().map(|values| part(values)));
            let beside: Vec<EqualFold<'_>> = folds.iter().map(|&(f, n)| EqualFold { f, values: &values[n] }).collect();
            let rows = counts[request] as usize;
            let (of_rows, out) = (&of_rows[request * most..], &mut want[request * most * stride..]);
            portable().fold_equal(&Keys { of_rows, stride: 1, rows, shared: &keys }, &beside, out, stride);
        }
        let on = |numbers: &[f32]| device.copy(numbers).unwrap();
        let (keys, shared, values) = (on(&of_rows), on(&shared), values.each_ref().map(|values| on(values)));
        let made = on(&vec![-3.0; 2 * most * stride]);
        let out = NumbersAt::of(&made, 0, most * stride, stride);
        let at = |&(f, n): &(Fold, usize)| KeyedFoldAt::new(f, NumbersAt::of(&values[n], 0, count, 0));
        let on_device: Vec<KeyedFoldAt> = folds.iter().map(at).collect();
        let counts = device.copy(&counts).unwrap();
        let keys = (NumbersAt::of(&keys, 0, most, 1), NumbersAt::of(&shared, 0, count, 0));
        let rows = RowsOf { counts: &counts, most };
        steps::fold_equal(&device, rows, keys, count, (&on_device, out)).unwrap();
        close(&made.to_vec().unwrap(), &want, &format!("{folded} reductions of {count}"));
        let five = vec![on_device[0]; 5];
        let refused = steps::fold_equal(&device, rows, keys, count, (&five, out)).unwrap_err();
        assert!(refused.to_string().contains("a step has 5 reductions, expected at most 4"), "{refused}");
    }
}

#[test]
fn scalar_chains_equal_those_of_the_cpu() {
    let (device, mut random) = (device(), Random::new(29));
    for (most, counts, links) in [(1, [1u32, 1], 2), (40, [40, 3], 7), (300, [0, 299], CHAIN_MAX)] {
        let on = |numbers: &[f32]| device.copy(numbers).unwrap();
        // Adjacent, with gaps, per request, and shared by all requests.
        let at = [(2 * most, most, 1), (6 * most, 3 * most, 3), (2, 1, 0), (1, 0, 0)];
        let from: Vec<Vec<f32>> = at.iter().map(|&(count, ..)| random.numbers(count)).collect();
        let read = links + at.len();
        let links: Vec<ChainLink> = (0..links)
            .map(|n| match n % 5 {
                0 => ChainLink::Two(Binary::Mul, [n % 4, 1]),
                1 => ChainLink::One(Unary::Abs, at.len() + n - 1),
                2 => ChainLink::Two(Binary::Sub, [at.len() + n - 1, 2]),
                3 => ChainLink::One(Unary::Sigmoid, n % 4),
                _ => ChainLink::Two(Binary::Max, [at.len() + n - 2, 3]),
            })
            .collect();
        let kept: Vec<usize> = (at.len()..read).rev().step_by(2).collect();
        let stride = kept.len() + 1;
        let mut want = vec![-3.0f32; 2 * most * stride];
        for request in 0..2 {
            let of_request = |(numbers, &(_, apart, row)): (&'_ Vec<f32>, &(usize, usize, usize))| {
                (numbers[request * apart..].to_vec(), row)
            };
            let from: Vec<(Vec<f32>, usize)> = from.iter().zip(&at).map(of_request).collect();
            let reads: Vec<(&[f32], usize)> = from.iter().map(|(numbers, row)| (&numbers[..], *row)).collect();
            let chain = Chain { reads: &reads, links: &links, kept: &kept };
            let out = &mut want[request * most * stride..];
            if counts[request] > 0 {
                portable().chain(&chain, counts[request] as usize, &mut Lines::default(), out, stride);
            }
        }
        let arrays: Vec<Array<f32>> = from.iter().map(|numbers| on(numbers)).collect();
        let reads: Vec<NumbersAt> =
            arrays.iter().zip(at).map(|(array, (_, request, row))| NumbersAt::of(array, 0, request, row)).collect();
        let (made, counts) = (on(&vec![-3.0; 2 * most * stride]), device.copy(&counts).unwrap());
        let (rows, out) = (RowsOf { counts: &counts, most }, NumbersAt::of(&made, 0, most * stride, stride));
        steps::chain(&device, rows, &ChainAt { reads: &reads, links: &links, kept: &kept }, out).unwrap();
        close(&made.to_vec().unwrap(), &want, &format!("{} links over {most} rows", links.len()));
        let long = vec![links[0]; CHAIN_MAX + 1];
        let refused =
            steps::chain(&device, rows, &ChainAt { reads: &reads, links: &long, kept: &kept }, out).unwrap_err();
        assert!(
            refused.to_string().contains("a chain has 25 inputs, functions or outputs, expected at most 24"),
            "{refused}"
        );
    }
}

/// Some matrices of a row are multiplied twice, in no order, at an offset.
#[test]
fn matrices_of_a_row_are_multiplied_where_they_start() {
    let (device, mut random) = (device(), Random::new(31));
    for (most, counts, [m, k, n], lefts, rights) in [
        (3, [3u32, 1], [2, 5, 3], vec![10u32, 0, 10], vec![0u32, 30, 15]),
        (70, [0, 69], [1, 7, 4], vec![7, 14], vec![28, 0]),
        (300, [300, 2], [3, 1, 1], vec![6], vec![1]),
    ] {
        let room = |starts: &[u32], each| *starts.iter().max().unwrap() as usize + each;
        let (left_row, right_row) = (room(&lefts, m * k), room(&rights, k * n));
        let out_row = lefts.len() * m * n + 2;
        // The left ones are per request, the right ones shared by all.
        let (left, right) = (random.numbers(2 * most * left_row), random.numbers(most * right_row));
        let mut want = vec![-3.0f32; 2 * most * out_row];
        for request in 0..2 {
            for row in 0..counts[request] as usize {
                let left = &left[(request * most + row) * left_row..][..left_row];
                let right = &right[row * right_row..][..right_row];
                let out = &mut want[(request * most + row) * out_row..];
                for (b, (&from, &to)) in lefts.iter().zip(&rights).enumerate() {
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let terms = (0..k).map(|d| left[from as usize + i * k + d] * right[to as usize + d * n + j]);
                        out[(b * m + i) * n + j] = terms.sum();
                    }
                }
            }
        }
        let on = |numbers: &[f32]| device.copy(numbers).unwrap();
        let (left, right, made) = (on(&left), on(&right), on(&vec![-3.0; want.len()]));
        let (counts, lefts) = (device.copy(&counts).unwrap(), device.copy(&lefts).unwrap());
        let rights = device.copy(&rights).unwrap();
        let of = MatricesAt {
            left: (NumbersAt::of(&left, 0, most * left_row, left_row), &lefts),
            right: (NumbersAt::of(&right, 0, 0, right_row), &rights),
            shape: [m, k, n],
        };
        let out = NumbersAt::of(&made, 0, most * out_row, out_row);
        steps::matrices(&device, RowsOf { counts: &counts, most }, &of, out).unwrap();
        close(&made.to_vec().unwrap(), &want, &format!("[{m}, {k}] times [{k}, {n}] in {most} rows"));
    }
}

#[test]
fn picked_numbers_are_appended_in_runs() {
    let (device, mut random) = (device(), Random::new(37));
    for (most, counts, placing) in [
        (4, [4u32, 2], PickDestination { runs: 3, count: 2, stride: 5, first: 4 }),
        (90, [1, 90], PickDestination { runs: 1, count: 7, stride: 0, first: 3 }),
        (300, [299, 0], PickDestination { runs: 4, count: 1, stride: 2, first: 1 }),
    ] {
        let PickDestination { runs, count, stride, first } = placing;
        let (width, out_row) = (11, first + (runs - 1) * stride + count + 1);
        let from = random.numbers(2 * most * width);
        let index: Vec<u32> = (0..runs * count).map(|_| random.below(width) as u32).collect();
        let on = |numbers: &[f32]| device.copy(numbers).unwrap();
        let (array, named) = (on(&from), device.copy(&index).unwrap());
        let of_counts = device.copy(&counts).unwrap();
        for is_named in [true, false] {
            let which = |n: usize| if is_named { index[n] as usize } else { n };
            let mut want = vec![-3.0f32; 2 * most * out_row];
            for (request, row) in (0..2).flat_map(|r| (0..counts[r] as usize).map(move |row| (r, row))) {
                for n in 0..runs * count {
                    let place = first + n / count * stride + n % count;
                    want[(request * most + row) * out_row + place] = from[(request * most + row) * width + which(n)];
                }
            }
            let made = on(&vec![-3.0; want.len()]);
            let (rows, out) = (RowsOf { counts: &of_counts, most }, NumbersAt::of(&made, 0, most * out_row, out_row));
            let at = NumbersAt::of(&array, 0, most * width, width);
            steps::pick(&device, rows, at, is_named.then_some(&named), placing, out).unwrap();
            assert_eq!(made.to_vec().unwrap(), want, "{placing:?}");
        }
    }
}

/// Two rerankers for several requests, whose numbers of candidates differ.
#[test]
fn rerankers_compute_on_a_device_as_on_the_cpu() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let (device, mut random) = (device(), Random::new(3));
    for file in ["tests/golden/reranker.onnx", "tests/golden/tiny/overarch.onnx"] {
        let bytes = std::fs::read(root.join(file)).unwrap();
        let graph = Graph::load("overarch.onnx", bytes.clone()).unwrap();
        let width = |name: &str| graph.input(name).unwrap().shape.as_ref().unwrap().last().unwrap().unwrap();
        let (dimension, tasks) = (width("query"), graph.output("logits").unwrap().shape.as_ref().unwrap()[2].unwrap());
        let (d, one) = (Size::Fixed(dimension as i64), Size::Fixed(1));
        let given =
            |name: &str, is_pair, shape: &[Size]| DeclaredInput { name: name.into(), is_pair, shape: shape.to_vec() };
        let mut inputs = vec![given("query", false, &[one, d]), given("item", true, &[one, Size::Rows, d])];
        let columns = graph.inputs().filter(|p| !["query", "item"].contains(&p.name.as_str()));
        inputs.extend(columns.map(|port| given(&port.name, true, &[one, Size::Rows])));
        let logits = DeclaredOutput { name: "logits".into(), shape: vec![one, Size::Rows, Size::Fixed(tasks as i64)] };
        let program = RowProgram::lower(&bytes, &inputs, &[logits]).unwrap();
        let copied = DeviceProgram::copy(&device, &program).unwrap();
        // Few candidates, for which one plan is cheaper, and many, for which the other one is.
        for counts in [[3u32, 1], [90, 37]] {
            let most = counts[0] as usize;
            let users = random.numbers(2 * dimension);
            let rows = random.numbers(2 * most * (dimension + inputs.len() - 2));
            let each = dimension + inputs.len() - 2;
            let given = copied.given(&device, 2, most).unwrap();
            let mut numbers = vec![f32::NAN; 2 * most * given.stride];
            for (n, row) in rows.chunks_exact(each).enumerate() {
                numbers[n * given.stride..][..each].copy_from_slice(row);
            }
            given.numbers.write(&numbers).unwrap();
            let (counts_on, users_on) = (device.copy(&counts).unwrap(), device.copy(&users).unwrap());
            let made = copied.run(&device, RowsOf { counts: &counts_on, most }, &[&users_on], given).unwrap();
            let (numbers, stride) = made.output(0);
            let numbers = numbers.to_vec().unwrap();
            for (request, &count) in counts.iter().enumerate() {
                let user = &users[request * dimension..][..dimension];
                let row = |n: usize| &rows[(request * most + n) * each..][..each];
                let mut want = Vec::new();
                let mut fill = |given: InputRows<'_>| given.each(|n, to| to.copy_from_slice(row(n)));
                program
                    .run(count as usize, &[user], &mut Scratch::default(), &mut fill, &mut |_, rows, block| {
                        (0..rows).for_each(|n| want.extend_from_slice(block.output(0).row(n)));
                        Ok(())
                    })
                    .unwrap();
                for (n, want) in want.chunks_exact(tasks).enumerate() {
                    close(&numbers[(request * most + n) * stride..][..tasks], want, file);
                }
            }
        }
    }
}

#[test]
fn selected_rows_are_gathered_contiguously() {
    let (device, mut random) = (device(), Random::new(6));
    for (rows, width) in [(5, 1), (40, 300), (1, 7)] {
        let numbers = random.numbers(rows * width);
        let matrix = device.copy(&numbers).unwrap();
        let named: Vec<usize> = (0..2 * rows).map(|_| random.below(rows)).collect();
        let taken = steps::take_rows(&device, &matrix, width, &named).unwrap().to_vec().unwrap();
        let want: Vec<f32> = named.iter().flat_map(|row| numbers[row * width..][..width].iter().copied()).collect();
        assert_eq!(taken, want);
        assert!(steps::take_rows(&device, &matrix, width, &[rows]).is_err());
        assert!(steps::take_rows(&device, &matrix, width, &[]).unwrap().is_empty());
    }
}
