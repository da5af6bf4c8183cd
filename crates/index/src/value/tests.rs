//! Tests the language of docs/reference/value-model.md, and stack code against an interpreter of the tree.

#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn value(text: &str) -> f32 {
    let constants = BTreeMap::from([("w".to_string(), 0.5)]);
    let program = Program::compile(text, &["a", "b"], &constants).unwrap_or_else(|e| panic!("{text}: {e}"));
    let columns: Vec<[f32; 1]> = program.inputs().iter().map(|n| [if n == "a" { 2.0 } else { -3.0 }]).collect();
    let columns: Vec<&[f32]> = columns.iter().map(|c| &c[..]).collect();
    let mut out = [0.0];
    program.evaluate(&columns, &program.constants(&BTreeMap::new()).unwrap(), &mut Scratch::default(), &mut out);
    out[0]
}

#[test]
fn expressions_evaluate_by_their_definition() {
    for (text, expected) in [
        ("1 + 2 * 3", 7.0),
        ("(1 + 2) * 3", 9.0),
        ("8 - 4 - 2", 2.0),
        ("8 / 4 / 2", 1.0),
        ("-a + b", -5.0),
        ("--a", 2.0),
        ("2 * -b", 6.0),
        ("a > b", 1.0),
        ("a + 1 <= b * 2", 0.0),
        ("a == 2", 1.0),
        ("a != 2", 0.0),
        ("if(a > 1, w, 9)", 0.5),
        ("if(0/0, 1, 2)", 2.0),
        ("min(a, b)", -3.0),
        ("max(a, b, 7)", 7.0),
        ("clamp(b, -1, 1)", -1.0),
        ("abs(b)", 3.0),
        ("pow(a, 3)", 8.0),
        ("sqrt(a * 2)", 2.0),
        ("exp(log(a))", 2.0),
        ("sigmoid(0)", 0.5),
        ("1.5e1 + .5", 15.5),
        ("log(b)", f32::MIN),
        ("1 / 0", f32::MAX),
        ("-1 / 0", f32::MIN),
    ] {
        assert!((value(text) - expected).abs() <= 1e-6 * expected.abs(), "{text}: {}", value(text));
    }
}

#[test]
fn constants_fold_unless_a_request_may_change_them() {
    let constants = BTreeMap::from([("w".to_string(), 0.5)]);
    let program = Program::compile("a * (2 + 3 * 4) + if(1 > 2, 5, sqrt(16))", &["a"], &constants).unwrap();
    let folded = [
        Step::Input(0),
        Step::Number(14.0),
        Step::Binary(Binary::Multiply),
        Step::Number(4.0),
        Step::Binary(Binary::Add),
    ];
    assert_eq!(program.steps, folded);
    let program = Program::compile("w * 2", &[], &constants).unwrap();
    let mut out = [0.0];
    let overridden = program.constants(&BTreeMap::from([("w".to_string(), 4.0)])).unwrap();
    program.evaluate(&[], &overridden, &mut Scratch::default(), &mut out);
    assert_eq!(out, [8.0]);
    for (name, number, expected) in [("v", 1.0, "`v` is not a constant"), ("w", f32::NAN, "`w` is NaN")] {
        let error = program.constants(&BTreeMap::from([(name.to_string(), number)])).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn invalid_expressions_name_the_position() {
    for (text, offset, expected) in [
        ("", 0, "got the end at byte 0, expected a number, a name or `(`"),
        ("a +", 3, "got the end at byte 3"),
        ("a b", 2, "got `b` at byte 2, expected an operator or the end"),
        ("colour", 0, "unknown name `colour` at byte 0, expected one of: a, b, w"),
        ("a + tan(a)", 4, "unknown function `tan` at byte 4"),
        ("min(a)", 0, "`min` takes 2 or more"),
        ("if(a, 1)", 0, "`if` takes 3"),
        ("sqrt(a, b)", 0, "`sqrt` takes 1"),
        ("(a", 2, "got the end at byte 2, expected `)`"),
        ("a < b < 3", 6, "got `<` at byte 6"),
        ("1.2.3", 3, "got `.3` at byte 3"),
        ("a $ b", 2, "got `$` at byte 2"),
        ("min(a,)", 6, "got `)` at byte 6"),
        ("1e999", 0, "`1e999` at byte 0 is too large"),
        ("*", 0, "got `*` at byte 0, expected a number, a name or `(`"),
        ("a + + b", 4, "got `+` at byte 4"),
        ("()", 1, "got `)` at byte 1"),
        ("a)", 1, "got `)` at byte 1, expected an operator or the end"),
        ("a, b", 1, "got `,` at byte 1"),
        ("if(a 1, 2)", 5, "got `1` at byte 5, expected `,` or `)`"),
        ("min()", 4, "got `)` at byte 4"),
        ("clamp(a, 1)", 0, "`clamp` takes 3 arguments, got 2"),
        ("pow(a, b, 2)", 0, "`pow` takes 2 arguments, got 3"),
        ("min", 0, "unknown name `min` at byte 0"),
        ("a(1)", 0, "unknown function `a` at byte 0"),
        ("A", 0, "unknown name `A` at byte 0"),
        ("a = 2", 2, "got `=` at byte 2"),
        ("a && b", 2, "got `&` at byte 2"),
        ("!a", 0, "got `!` at byte 0"),
        ("a ^ 2", 2, "got `^` at byte 2"),
        ("1e", 1, "got `e` at byte 1"),
        (".", 0, "got `.` at byte 0"),
        ("0x10", 1, "got `x10` at byte 1"),
        ("é", 0, "unknown name `é` at byte 0"),
        ("a + 日本", 4, "unknown name `日本` at byte 4"),
        ("a + \u{1F600}", 4, "got `\u{1F600}` at byte 4"),
        ("`a", 0, "does not end, expected a closing backquote"),
        ("``", 0, "unknown name `` at byte 0"),
        ("`a`(1)", 3, "got `(` at byte 3"),
    ] {
        let error = Program::compile(text, &["a", "b"], &BTreeMap::from([("w".to_string(), 0.5)])).expect_err(text);
        assert!(error.to_string().contains(expected), "{text}: {error}");
        assert_eq!(error.offset(), Some(offset), "{text}: {error}");
    }
    let deep = format!("{}1{}", "(".repeat(5000), ")".repeat(5000));
    assert!(Program::compile(&deep, &[], &BTreeMap::new()).unwrap_err().to_string().contains("nests deeper"));
    assert!(Program::compile(&"-".repeat(5000), &[], &BTreeMap::new()).is_err());
    let long = "1+".repeat(sterling_core::limits::VALUE_BYTES_MAX);
    assert!(
        Program::compile(&long, &[], &BTreeMap::new()).unwrap_err().to_string().contains("bytes, expected at most")
    );
}

#[test]
fn names_that_are_no_identifiers_are_quoted() {
    let constants = BTreeMap::from([("w 2".to_string(), 0.5)]);
    let names = ["installed-size", "1st", "größe"];
    let program = Program::compile("`1st` + `installed-size` * `w 2` - größe", &names, &constants).unwrap();
    assert_eq!(program.inputs(), ["1st", "installed-size", "größe"]);
    let error = Program::compile("size", &names, &constants).unwrap_err().to_string();
    assert!(
        error.ends_with("expected one of: `installed-size`, `1st`, größe, `w 2`; columns of text cannot be used"),
        "{error}"
    );
}

#[test]
fn constants_have_their_own_names_and_are_finite() {
    for (name, value, expected) in [
        ("a", 1.0, "constant `a` is also a task or a numeric item column"),
        ("w", f32::NAN, "constant `w` is NaN, expected a finite number"),
        ("w", f32::INFINITY, "constant `w` is inf"),
    ] {
        let constants = BTreeMap::from([(name.to_string(), value)]);
        let error = Program::compile("a", &["a"], &constants).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Rows of the tables in docs/reference/value-model.md whose first cell is code.
fn rows_of_the_page() -> Vec<(String, String)> {
    let page = include_str!("../../../../docs/reference/value-model.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `` ")?.strip_suffix(" |"));
    rows.map(|row| row.split_once(" `` | ").unwrap()).map(|(code, cell)| (code.into(), cell.into())).collect()
}

#[test]
fn the_examples_of_the_page_are_true() {
    let columns = [("click", 0.5), ("buy", 0.25), ("price", 40.0), ("age-days", 3.0), ("similarity", 0.8)];
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let constants = BTreeMap::from([("w_buy".to_string(), 2.0)]);
    let (mut values, mut errors) = (0, 0);
    for (text, cell) in rows_of_the_page() {
        match Program::compile(&text, &names, &constants) {
            Ok(program) => {
                let of = |name: &String| columns.iter().find(|(n, _)| n == name).unwrap().1;
                let inputs: Vec<[f32; 1]> = program.inputs().iter().map(|name| [of(name)]).collect();
                let inputs: Vec<&[f32]> = inputs.iter().map(|column| &column[..]).collect();
                let mut out = [0.0];
                program.evaluate(&inputs, &[2.0], &mut Scratch::default(), &mut out);
                let want = match cell.as_str() {
                    "lowest" => f32::MIN,
                    "largest" => f32::MAX,
                    number => number.parse().unwrap_or_else(|_| panic!("`{text}` has the value {out:?}, not {cell}")),
                };
                assert!((out[0] - want).abs() <= 1e-4 * want.abs(), "`{text}` is {}, not {want}", out[0]);
                values += 1;
            }
            Err(error) => {
                assert_eq!(cell, error.to_string(), "{text}");
                errors += 1;
            }
        }
    }
    assert!(values >= 30 && errors >= 8, "{values} values and {errors} errors");
}

#[derive(Clone, Debug)]
enum Tree {
    Leaf(usize),
    Number(f32),
    One(Unary, Box<Tree>),
    Two(Binary, Box<Tree>, Box<Tree>),
    If(Box<Tree>, Box<Tree>, Box<Tree>),
}

fn text(tree: &Tree) -> String {
    match tree {
        Tree::Leaf(n) => format!("x{n}"),
        Tree::Number(x) => format!("({x})"),
        Tree::One(Unary::Negate, a) => format!("(-{})", text(a)),
        Tree::One(f, a) => format!("{}({})", format!("{f:?}").to_lowercase(), text(a)),
        Tree::Two(f @ (Binary::Min | Binary::Max), a, b) => {
            format!("{}({}, {})", format!("{f:?}").to_lowercase(), text(a), text(b))
        }
        Tree::Two(Binary::Power, a, b) => format!("pow({}, {})", text(a), text(b)),
        Tree::Two(f, a, b) => {
            let sign = ["+", "-", "*", "/", "", "", "", "<", "<=", ">", ">=", "==", "!="][*f as usize];
            format!("({} {sign} {})", text(a), text(b))
        }
        Tree::If(c, a, b) => format!("if({}, {}, {})", text(c), text(a), text(b)),
    }
}

fn naive(tree: &Tree, x: &[f32; 3]) -> f32 {
    match tree {
        Tree::Leaf(n) => x[*n],
        Tree::Number(v) => *v,
        Tree::One(f, a) => f.of(naive(a, x)),
        Tree::Two(f, a, b) => f.of(naive(a, x), naive(b, x)),
        Tree::If(c, a, b) => choose(naive(c, x), naive(a, x), naive(b, x)),
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    use Binary::*;
    let leaf = prop_oneof![(0usize..3).prop_map(Tree::Leaf), (-4i8..5).prop_map(|x| Tree::Number(f32::from(x) / 2.0))];
    let one = prop_oneof![
        Just(Unary::Negate),
        Just(Unary::Log),
        Just(Unary::Exp),
        Just(Unary::Sqrt),
        Just(Unary::Sigmoid),
        Just(Unary::Abs)
    ];
    let two = proptest::sample::select(vec![
        Add,
        Subtract,
        Multiply,
        Divide,
        Power,
        Min,
        Max,
        Less,
        LessEqual,
        Greater,
        GreaterEqual,
        Equal,
        NotEqual,
    ]);
    leaf.prop_recursive(5, 40, 3, move |inner| {
        prop_oneof![
            (one.clone(), inner.clone()).prop_map(|(f, a)| Tree::One(f, Box::new(a))),
            (two.clone(), inner.clone(), inner.clone()).prop_map(|(f, a, b)| Tree::Two(f, Box::new(a), Box::new(b))),
            (inner.clone(), inner.clone(), inner).prop_map(|(c, a, b)| Tree::If(Box::new(c), Box::new(a), Box::new(b))),
        ]
    })
}

proptest! {
    #[test]
    fn stack_code_over_columns_equals_the_expression_tree_per_item(tree in tree(), seed in 0usize..1000, count in 1usize..600) {
        let at = |n: usize, c: usize| ((seed + n * 31 + c * 17) % 13) as f32 / 3.0 - 2.0;
        let columns: Vec<Vec<f32>> = (0..3).map(|c| (0..count).map(|n| at(n, c)).collect()).collect();
        let program = Program::compile(&text(&tree), &["x0", "x1", "x2"], &BTreeMap::new()).unwrap();
        let inputs: Vec<&[f32]> = program.inputs().iter().map(|n| &columns[n[1..].parse::<usize>().unwrap()][..]).collect();
        let mut out = vec![0.0; count];
        program.evaluate(&inputs, &[], &mut Scratch::default(), &mut out);
        for (n, &got) in out.iter().enumerate() {
            let want = naive(&tree, &[at(n, 0), at(n, 1), at(n, 2)]);
            let want = if want.is_nan() { f32::MIN } else { want.clamp(f32::MIN, f32::MAX) };
            prop_assert_eq!(got, want);
        }
    }

    #[test]
    fn no_text_makes_the_compiler_panic(text in "\\PC{0,50}|[ab0-9.,()<>=!+*/ -]{0,50}") {
        let _ = Program::compile(&text, &["a", "b"], &BTreeMap::new());
    }
}
