//! Graphs that cannot serve are rejected at publication, by name, and the active version keeps serving.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataLocation, DataType, NodeProto, StringStringEntryProto, TensorProto,
    ValueInfoProto,
};
use serde_json::{Value, json};
use sterling::error::Error;
use sterling::snapshot::sandbox::{Bounds, ProcessSandbox, SandboxMode};
use sterling::snapshot::{GraphRecord, Manifest};
use sterling::storage::files::Checksum;
use tempfile::TempDir;

use crate::onnx::{Onnx, floats, integers, node, typed, value};
use crate::support::{Server, ids, root, run, sterling, until};

const MODEL: &str = "
name = 'm'
dimension = 4
[[tasks]]
name = 't'
[overarch]
graph = 'overarch.onnx'
[value]
expression = 't'
";

const USER: &str = "
[user]
tower = 'user.onnx'
[[user.features]]
name = 'x'
kind = 'dense'
width = 3
";

const RETRIEVE: &str = "/v1/models/m:retrieve";
/// An operator that programs do not support.
const FOREIGN: &str = "unit = LpNormalization(item)";

fn query() -> ValueInfoProto {
    value("query", &[0, 4])
}

fn item() -> ValueInfoProto {
    value("item", &[0, 0, 4])
}

fn logits() -> ValueInfoProto {
    value("logits", &[0, 0, 1])
}

/// Returns a reranker of these nodes.
fn overarch(nodes: &[&str]) -> Onnx {
    Onnx::new(&[query(), item()], &[logits()], nodes).with(&[integers("last", &[2]), integers("first", &[0])])
}

/// Returns the sum of an item's numbers, as a program.
fn good() -> Onnx {
    overarch(&["logits = ReduceSum(item, last)"])
}

/// The same in the ONNX runtime, with nodes in between.
fn foreign(nodes: &[&str]) -> Onnx {
    overarch(&[&[FOREIGN], nodes].concat())
}

fn user(nodes: &[&str]) -> Onnx {
    let ways = [1.0, -1.0, 0.5, 0.25, 0.5, 1.0, -0.5, 0.75, 0.25, -0.25, 1.0, 0.5];
    Onnx::new(&[value("x", &[0, 3])], &[value("query", &[0, 4])], nodes).with(&[floats("w", &[3, 4], &ways)])
}

struct Folder {
    folder: TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let line = |n: i64| json!({"id": n, "embedding": [n % 7, 1, -1, 0.5], "attributes": {"price": n}}).to_string();
        std::fs::write(folder.path().join("items.jsonl"), (0..60).map(|n| line(n) + "\n").collect::<String>()).unwrap();
        std::fs::create_dir(folder.path().join("package")).unwrap();
        Folder { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn package(&self, model: &str, files: &[(&str, Vec<u8>)]) -> PathBuf {
        let package = self.path("package");
        std::fs::write(package.join("model.toml"), model).unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(package.join(name), bytes).unwrap());
        package
    }

    /// Publishes with the command line: returns the exit code, stdout and stderr.
    fn publish(&self, model: &str, files: &[(&str, Vec<u8>)]) -> (i32, String, String) {
        let package = self.package(model, files);
        let [package, items, store] = [package, self.path("items.jsonl"), self.path("store")];
        let [package, items, store] = [&package, &items, &store].map(|path| path.to_str().unwrap());
        run(&["publish", package, "--items", items, "--store", store])
    }
}

fn big_tensor(dims: &[i64]) -> TensorProto {
    TensorProto { dims: dims.to_vec(), float_data: Vec::new(), ..floats("w", &[1], &[0.0]) }
}

/// Returns a node with nested subgraphs of this depth.
fn nested(depth: usize) -> Vec<u8> {
    let field = |key: u8, bytes: &[u8]| {
        let mut length = bytes.len();
        let mut out = vec![key << 3 | 2];
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        [&out[..], bytes].concat()
    };
    let graph = (0..depth).fold(Vec::new(), |graph, _| field(1, &field(5, &field(6, &graph))));
    field(7, &graph)
}

/// Returns rerankers that cannot be served, each with the text of its error.
fn rerankers() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let whole = good().bytes();
    let chain = |count: usize| {
        let mut nodes = vec![node("n0 = LpNormalization(item)")];
        nodes.extend((1..count).map(|n| node(&format!("n{n} = LpNormalization(n{})", n - 1))));
        nodes.push(node(&format!("logits = ReduceSum(n{}, last)", count - 1)));
        let mut graph = good();
        graph.graph.node = nodes;
        graph.bytes()
    };
    let doubling = |first: &str| {
        let mut graph = overarch(&[first]);
        for n in 0..28 {
            let from = if n == 0 { "unit".to_owned() } else { format!("d{}", n - 1) };
            graph.graph.node.push(node(&format!("d{n} = Concat({from}, {from})")));
            graph = graph.attribute("axis", 2);
        }
        graph.graph.node.push(node("logits = ReduceSum(d27, last)"));
        graph.bytes()
    };
    let external = TensorProto {
        data_location: Some(DataLocation::EXTERNAL),
        external_data: vec![StringStringEntryProto { key: Some("location".into()), value: Some("/dev/zero".into()) }],
        ..big_tensor(&[4, 1])
    };
    let branch = AttributeProto {
        name: Some("then_branch".into()),
        g: Some(good().graph),
        r#type: Some(AttributeType::GRAPH),
        ..AttributeProto::default()
    };
    let mut branching = good();
    branching.graph.node[0].attribute.push(branch);
    let mut far = good();
    far.graph.node.push(NodeProto { domain: Some("com.example".into()), ..node("more = Frobnicate(item)") });
    far.graph.node[0] = node("logits = ReduceSum(more, last)");
    far.graph.node.swap(0, 1);
    let product = |tensor: TensorProto| overarch(&["logits = MatMul(item, w)"]).with(&[tensor]).bytes();
    let shaped = |output: ValueInfoProto, nodes: &[&str]| {
        Onnx::new(&[query(), item()], &[output], nodes).with(&[integers("last", &[2])])
    };
    let given = |inputs: &[ValueInfoProto]| {
        Onnx::new(inputs, &[logits()], &["logits = ReduceSum(item, last)"]).with(&[integers("last", &[2])]).bytes()
    };
    let sized = |size: &[i64]| integers("size", size);
    let bad: &[&str] = &["overarch.onnx: "];
    vec![
        ("nothing", Vec::new(), &["overarch.onnx: not a usable ONNX graph: the file has no graph"]),
        (
            "before opset 7",
            good().bytes_of_opset(Some(6)),
            &["overarch.onnx: operators of opset 6, expected opset 7 to 25"],
        ),
        ("opset 99", good().bytes_of_opset(Some(99)), &["overarch.onnx: operators of opset 99", "opset_version=25"]),
        ("no opset", good().bytes_of_opset(None), &["overarch.onnx: no version of the operators"]),
        ("text", b"no graph at all".to_vec(), &["overarch.onnx: not a usable ONNX graph"]),
        ("cut off", whole[..whole.len() - 9].to_vec(), &["overarch.onnx", "truncated"]),
        ("nested", nested(3000), &["overarch.onnx", "a graph within a node"]),
        ("branches", branching.bytes(), &["a graph within a node (If, Loop, Scan)"]),
        ("functions", [&whole[..], &[0xca, 1, 0]].concat(), &["functions of its own"]),
        (
            "circle",
            overarch(&["a = Add(b, item)", "b = Relu(a)", "logits = ReduceSum(b, last)"]).bytes(),
            &["overarch.onnx: node `make_a` (Add): reads `b`, which no earlier node computes"],
        ),
        ("long", chain(20_000), &["overarch.onnx: 20001 nodes, expected at most"]),
        ("deep", chain(5_000), &["(LpNormalization): ends a chain of more than 2048 nodes"]),
        (
            "made twice",
            overarch(&["a = Relu(item)", "a = Neg(item)", "logits = ReduceSum(a, last)"]).bytes(),
            &["`make_a` (Neg): `a` is computed twice"],
        ),
        ("never made", overarch(&["a = Relu(item)"]).bytes(), &["output `logits`: no node computes it"]),
        ("unknown operator", overarch(&["logits = Frobnicate(item)"]).bytes(), &["overarch.onnx: ", "Frobnicate"]),
        ("unknown domain", far.bytes(), bad),
        (
            "other file",
            product(external),
            &["overarch.onnx: constant `w`: external data in `/dev/zero`, expected a file in the folder of the graph"],
        ),
        (
            "bomb",
            product(big_tensor(&[1 << 20, 1 << 20])),
            &["constant `w`: got shape [1048576, 1048576], expected at most"],
        ),
        ("bomb that overflows", product(big_tensor(&[1 << 40, 1 << 40])), &["constant `w`: got shape"]),
        ("negative", product(big_tensor(&[-4, 1])), &["constant `w`: got shape [-4, 1]"]),
        ("short", product(floats("w", &[4, 1], &[1.0; 3])), &["constant `w`: 3 numbers for shape [4, 1], expected 4"]),
        ("NaN weights", product(floats("w", &[4, 1], &[1.0, f32::NAN, 0.0, 0.0])), &["constant `w`: got NaN"]),
        (
            "infinite weights",
            product(floats("w", &[4, 1], &[1.0, f32::INFINITY, 0.0, 0.0])),
            &["overarch.onnx: output `logits` holds NaN or infinity"],
        ),
        (
            "infinite",
            overarch(&["z = Sub(item, item)", "q = Div(item, z)", "logits = ReduceSum(q, last)"]).bytes(),
            // Constant folding turns the subtraction into 0 times the item, whose sign is the item's.
            &["overarch.onnx: output `logits` of a candidate of sample 0", "first in node `make_q` (Div)"],
        ),
        (
            "infinite in rten",
            foreign(&["z = Sub(unit, unit)", "q = Div(item, z)", "logits = ReduceSum(q, last)"]).bytes(),
            &["overarch.onnx: output `logits` holds NaN or infinity"],
        ),
        (
            "too large for exp",
            foreign(&["b = Exp(big)", "q = Mul(unit, b)", "logits = ReduceSum(q, last)"])
                .with(&[floats("big", &[1], &[200.0])])
                .bytes(),
            &["overarch.onnx: output `logits` holds NaN or infinity"],
        ),
        ("doubling", doubling(FOREIGN), &["overarch.onnx: ", "memory"]),
        ("doubling as a program", doubling("unit = Relu(item)"), &["overarch.onnx: ", "memory"]),
        (
            "always three",
            Onnx::new(&[query(), item()], &[logits()], &["logits = Identity(c)"])
                .with(&[floats("c", &[1, 3, 1], &[0.0; 3])])
                .bytes(),
            &["overarch.onnx: ", "`logits`", "has shape [1, 3, 1]"],
        ),
        (
            "one candidate",
            given(&[query(), value("item", &[1, 1, 4])]),
            &["overarch.onnx: ", "input `item` has shape [1, 2, 4], expected [1, 1, 4]"],
        ),
        (
            "one query of two",
            given(&[value("query", &[2, 4]), item()]),
            &["overarch.onnx: ", "input `query` has shape [1, 4]"],
        ),
        (
            "even candidates",
            foreign(&[
                "n = ReduceSum(unit, last)",
                "p = Pad(n, zeros)",
                "r = Reshape(p, pairs)",
                "m = ReduceMax(r)",
                "logits = Add(n, m)",
            ])
            .with(&[integers("zeros", &[0, 0, 0, 0, 1, 0]), integers("pairs", &[-1, 2])])
            .bytes(),
            &["overarch.onnx: 2 candidates: overarch.onnx: the graph failed"],
        ),
        (
            "candidates that mix",
            foreign(&["n = ReduceSum(unit, last)", "m = ReduceMax(n)", "logits = Sub(n, m)"]).bytes(),
            &[
                "overarch.onnx: output `logits` of a candidate differs between a run with",
                "in batches of any size, and by shards",
            ],
        ),
        ("width", given(&[query(), value("item", &[0, 0, 5])]), &["overarch.onnx: `item` has shape [?, ?, 5]"]),
        (
            "no item",
            Onnx::new(&[query()], &[logits()], &["logits = Unsqueeze(query, last)"])
                .with(&[integers("last", &[2])])
                .bytes(),
            &["overarch.onnx: no input depends on candidates, expected `item` or another"],
        ),
        (
            "unknown column",
            given(&[query(), item(), value("weight", &[0, 0])]),
            &["input `weight` is not a numeric item column"],
        ),
        (
            "integers",
            given(&[query(), typed("item", DataType::INT64, Some(&[0, 0, 4]))]),
            &["overarch.onnx: input: `item` is tensor(int64), expected tensor(float)"],
        ),
        ("no name", given(&[query(), item(), value("", &[0, 0])]), &["overarch.onnx: input: has no name"]),
        ("twice", given(&[query(), item(), item()]), &["overarch.onnx: input `item` is given twice"]),
        (
            "rank",
            shaped(value("logits", &[0, 0]), &["logits = ReduceSum(item, last)"]).attribute("keepdims", 0).bytes(),
            &["overarch.onnx: `logits` has shape [?, ?], expected [?, ?, 1]"],
        ),
        (
            "undeclared rank",
            shaped(typed("logits", DataType::FLOAT, None), &["logits = ReduceSum(item, last)"])
                .attribute("keepdims", 0)
                .bytes(),
            &["overarch.onnx: 1 candidates", "`logits` has shape [1, 1], expected [1, 1, 1]"],
        ),
        (
            "whole numbers",
            shaped(typed("logits", DataType::INT32, Some(&[0, 0, 1])), &["logits = ReduceSum(item, last)"]).bytes(),
            &["overarch.onnx: output: `logits` is tensor(int32)"],
        ),
        (
            "whole numbers unsaid",
            shaped(ValueInfoProto { r#type: None, ..logits() }, &["s = ReduceSum(item, last)", "logits = Cast(s)"])
                .attribute("to", 6)
                .bytes(),
            &["overarch.onnx: 1 candidates", "output `logits` is not f32"],
        ),
        (
            "huge ConstantOfShape",
            foreign(&["c = ConstantOfShape(size)", "logits = ReduceSum(unit, last)"])
                .with(&[sized(&[1 << 40])])
                .bytes(),
            &["node `make_c` (ConstantOfShape): got a size of [1099511627776]"],
        ),
        (
            "huge Expand",
            foreign(&["c = Expand(item, size)", "logits = ReduceSum(c, last)"])
                .with(&[sized(&[1 << 20, 1 << 20, 4])])
                .bytes(),
            &["node `make_c` (Expand): got a size of"],
        ),
        (
            "huge ConstantOfShape, computed",
            foreign(&["s = Concat(size, size)"])
                .attribute("axis", 0)
                .and("c = ConstantOfShape(s)")
                .and("m = ReduceSum(c)")
                .and("x = Add(unit, m)")
                .and("logits = ReduceSum(x, last)")
                .with(&[sized(&[1 << 15])])
                .bytes(),
            &["overarch.onnx: ", "memory"],
        ),
        (
            "huge Tile",
            foreign(&["c = Tile(unit, size)", "logits = ReduceSum(c, last)"]).with(&[sized(&[1, 1, 1 << 27])]).bytes(),
            &["overarch.onnx: ", "memory"],
        ),
        (
            "sizes from numbers",
            foreign(&["n = ReduceMax(unit)", "i = Cast(n)"])
                .attribute("to", 7)
                .and("c = ConstantOfShape(i)")
                .and("logits = ReduceSum(item, last)")
                .bytes(),
            &["node `make_c` (ConstantOfShape): `i` sets a size that depends on input values"],
        ),
        (
            "results that follow numbers",
            foreign(&["n = NonZero(unit)", "logits = ReduceSum(item, last)"]).bytes(),
            &["node `make_n` (NonZero): the size of the results depends on input values"],
        ),
    ]
}

/// Returns user towers that cannot be served.
fn towers() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let given = |inputs: &[ValueInfoProto]| {
        let mut tower = user(&["query = MatMul(x, w)"]);
        tower.graph.input = inputs.to_vec();
        tower.bytes()
    };
    let output = |output: ValueInfoProto| {
        let mut tower = user(&["query = MatMul(x, w)"]);
        tower.graph.output = vec![output];
        tower.bytes()
    };
    vec![
        ("another input", given(&[value("y", &[0, 3])]), &["user.onnx", "reads `x`"]),
        (
            "one more input",
            given(&[value("x", &[0, 3]), value("y", &[0, 3])]),
            &["user.onnx: input `y` has no feature"],
        ),
        (
            "another width",
            given(&[value("x", &[0, 5])]),
            &["user.onnx: input `x` has shape [?, 5], but the feature has shape [?, 3]"],
        ),
        (
            "one row",
            given(&[value("x", &[1, 3])]),
            &["user.onnx: ", "2 rows", "input `x` has shape [2, 3], expected [1, 3]"],
        ),
        ("another output", output(value("vector", &[0, 4])), &["user.onnx: ", "vector"]),
        ("another dimension", output(value("query", &[0, 8])), &["user.onnx: output `query` has shape [?, 8]"]),
        (
            "NaN",
            user(&["p = MatMul(x, w)", "l = Neg(x)", "n = Log(l)", "m = MatMul(n, w)", "query = Add(p, m)"]).bytes(),
            &["user.onnx: output `query` holds NaN in row 1 of 1"],
        ),
        (
            "too large",
            user(&["e = Mul(x, huge)", "query = MatMul(e, w)"]).with(&[floats("huge", &[1], &[1e30])]).bytes(),
            &["user.onnx: output `query` holds"],
        ),
        (
            "mixed rows",
            user(&["p = MatMul(x, w)", "s = ReduceMax(p, rows)", "query = Sub(p, s)"])
                .with(&[integers("rows", &[0])])
                .bytes(),
            &["user.onnx: output `query` of a row differs between a run with 2 rows and a run of that row alone"],
        ),
        (
            "rows mixed by one percent",
            user(&["p = MatMul(x, w)", "s = ReduceMean(p, rows)", "m = Mul(s, percent)", "query = Sub(p, m)"])
                .with(&[integers("rows", &[0]), floats("percent", &[1], &[0.01])])
                .bytes(),
            &["user.onnx: output `query` of a row differs between a run with 2 rows and a run of that row alone"],
        ),
        (
            "nothing for a user without features",
            user(&["n = ReduceSum(x, last)", "d = Div(x, n)", "query = MatMul(d, w)"])
                .with(&[integers("last", &[1])])
                .bytes(),
            &[
                "user.onnx: output `query` holds NaN for a user without features, first at node `make_d` (Div)",
                "clamp(min=1)",
            ],
        ),
        (
            "an operator that the runtime has wrong",
            user(&["p = MatMul(x, w)", "s = LpNormalization(p)", "query = Sign(s)"]).bytes(),
            &[
                "user.onnx: node `make_query` (Sign): Sign returns 1 for 0, expected 0 in `rten`",
                "operator `LpNormalization`",
            ],
        ),
        (
            "integers beyond 32 bits in the runtime",
            user(&["p = MatMul(x, w)", "s = LpNormalization(p)", "m = Mul(p, large)", "i = Cast(m)"])
                .attribute("to", 7)
                .and("r = Mod(i, n)")
                .and("f = Cast(r)")
                .attribute("to", 1)
                .and("query = Add(s, f)")
                .with(&[floats("large", &[], &[1e12]), integers("n", &[1009])])
                .bytes(),
            &[
                "user.onnx: node `make_r` (Mod): `i` is an int64 tensor with integers from -inf to inf, which the runtime stores in 32 bits",
                "operator `LpNormalization`",
            ],
        ),
        (
            "half precision in the runtime",
            user(&["p = MatMul(x, w)", "h = Cast(p)"])
                .attribute("to", 10)
                .and("g = Cast(h)")
                .attribute("to", 1)
                .and("query = LpNormalization(g)")
                .bytes(),
            &[
                "user.onnx: node `make_h` (Cast): the runtime computes in f32, expected results rounded to half precision",
            ],
        ),
        (
            "fixed rows",
            user(&["p = MatMul(x, w)", "r = Reshape(p, whole)", "query = LpNormalization(r)"])
                .with(&[integers("whole", &[1, 4])])
                .bytes(),
            &["user.onnx: 2 rows: user.onnx: the graph failed"],
        ),
    ]
}

fn answer(server: &Server) -> Value {
    server.ask(RETRIEVE, json!({"vector": [1, 0, 0, 0], "k": 3, "timeout_ms": 60000}))
}

#[test]
fn unservable_versions_are_rejected_and_the_previous_one_keeps_serving() {
    let folder = Folder::new();
    let (code, said, errors) = folder.publish(MODEL, &[("overarch.onnx", good().bytes())]);
    assert_eq!(code, 0, "{errors}");
    assert!(said.contains("overarch.onnx is compiled, digest "), "{said}");
    let server = Server::start(&folder.path("store"));
    let before = answer(&server);
    assert_eq!((before["version"].as_u64(), ids(&before).len()), (Some(1), 3));

    let both = format!("{MODEL}{USER}");
    let rerankers =
        rerankers().into_iter().map(|(name, bytes, expected)| (name, MODEL, "overarch.onnx", bytes, expected));
    let towers = towers().into_iter().map(|(name, bytes, expected)| (name, &both[..], "user.onnx", bytes, expected));
    std::fs::write(folder.path("package").join("overarch.onnx"), good().bytes()).unwrap();
    let mut wrong = Vec::new();
    let mut count = 0;
    for (name, model, file, bytes, expected) in towers.chain(rerankers) {
        count += 1;
        let (code, said, errors) = folder.publish(model, &[(file, bytes)]);
        if code != 2
            || !said.is_empty()
            || !expected.iter().all(|part| errors.contains(part))
            || errors.contains("panicked at")
        {
            wrong.push(format!("{name}: {code}: {said}{errors}      expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty() && count > 50, "{} of {count}\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(
        std::fs::read_dir(folder.path("store").join("m"))
            .unwrap()
            .filter(|e| { e.as_ref().unwrap().file_name().to_str().unwrap().parse::<u64>().is_ok() })
            .count(),
        1,
        "a rejected version is in the store"
    );
    let after = answer(&server);
    assert_eq!((after["version"].as_u64(), ids(&after)), (Some(1), ids(&before)));
    assert_eq!(server.stop(), Some(0));
}

/// Writes a version as an older program published it, whose reranker was not validated.
fn smuggle(folder: &Folder, number: u64, graph: &[u8]) {
    let [from, to] = [1, number].map(|n: u64| folder.path("store").join(format!("m/{n}")));
    let aside = folder.path("aside");
    std::fs::create_dir(&aside).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), aside.join(entry.file_name())).unwrap();
    }
    std::fs::write(aside.join("overarch.onnx"), graph).unwrap();
    let mut manifest = Manifest::read(&from).unwrap();
    manifest.files.insert("overarch.onnx".into(), Checksum::of(graph));
    (manifest.version, manifest.graphs) = (number, None);
    manifest.write(&aside).unwrap();
    std::fs::rename(aside, to).unwrap();
}

#[test]
fn versions_of_older_releases_are_validated_at_load() {
    let folder = Folder::new();
    assert_eq!(folder.publish(MODEL, &[("overarch.onnx", good().bytes())]).0, 0);
    let server = Server::start(&folder.path("store"));
    let bomb =
        foreign(&["c = Tile(unit, size)", "logits = ReduceSum(c, last)"]).with(&[integers("size", &[1, 1, 1 << 27])]);
    smuggle(&folder, 2, &bomb.bytes());
    let state = |number: usize| server.get_json("/v1/models/m/versions")["versions"][number - 1].clone();
    until("the rejection", || state(2)["refused"].is_string());
    assert!(
        state(2)["refused"]
            .as_str()
            .unwrap()
            .contains("overarch.onnx: 1 candidates: the sandbox validation needs more than")
    );
    let (status, said) = server.post("/v1/models/m/versions/2:activate", json!({}));
    assert!(status >= 400, "{said}");
    assert_eq!(answer(&server)["version"], 1);
    let other = overarch(&["n = Neg(item)", "logits = ReduceSum(n, last)"]);
    smuggle(&folder, 3, &other.bytes());
    until("version 3", || answer(&server)["version"] == 3);
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn hung_sandbox_validations_are_killed() {
    let folder = Folder::new();
    let side = 2048;
    let mut nodes = vec![
        "a = ConstantOfShape(size)".to_owned(),
        FOREIGN.to_owned(),
        "n = ReduceMax(unit)".into(),
        "m0 = Add(a, n)".into(),
    ];
    nodes.extend((1..2000).map(|n| format!("m{n} = MatMul(m{}, m0)", n - 1)));
    nodes.extend(["s = ReduceMax(m1999)".into(), "x = Add(unit, s)".into(), "logits = ReduceSum(x, last)".into()]);
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let slow = overarch(&nodes).with(&[integers("size", &[side, side])]);
    let package = folder.package(MODEL, &[("overarch.onnx", slow.bytes())]);
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sterling"));
    let tried = |bounds: Bounds| {
        SandboxMode::ProcessSandbox(ProcessSandbox { program: program.clone(), bounds })
            .run(&package)
            .unwrap_err()
            .to_string()
    };
    let cpu = tried(Bounds { cpu: Duration::from_secs(1), ..Bounds::default() });
    assert!(
        cpu.contains("overarch.onnx: 1 candidates: the sandbox validation was not done after 1 s of CPU time"),
        "{cpu}"
    );
    let clock = tried(Bounds { clock: Duration::from_millis(300), ..Bounds::default() });
    assert!(
        clock.contains("overarch.onnx: ") && clock.contains("the sandbox validation was not done after 0 s"),
        "{clock}"
    );
    let missing = ProcessSandbox { program: "/nowhere".into(), bounds: Bounds::default() };
    let error: Error = SandboxMode::ProcessSandbox(missing).run(&package).unwrap_err();
    assert!(error.to_string().contains("the sandbox validation process"), "{error}");
}

#[test]
fn graphs_as_deep_as_they_may_be_are_served() {
    let folder = Folder::new();
    for operator in ["LpNormalization", "Relu", "Neg"] {
        let mut graph = overarch(&["n0 = Relu(item)"]);
        graph.graph.node.extend((1..2000).map(|n| node(&format!("n{n} = {operator}(n{})", n - 1))));
        let (code, _, errors) =
            folder.publish(MODEL, &[("overarch.onnx", graph.and("logits = ReduceSum(n1999, last)").bytes())]);
        assert_eq!(code, 0, "{operator}: {errors}");
        let server = Server::start(&folder.path("store"));
        assert_eq!(ids(&answer(&server)).len(), 3, "{operator}");
    }
}

#[test]
fn a_graph_of_the_runtime_runs_on_the_threads_of_the_workers() {
    let folder = Folder::new();
    let graph = foreign(&["logits = ReduceSum(unit, last)"]).bytes();
    let (code, said, errors) = folder.publish(MODEL, &[("overarch.onnx", graph)]);
    assert!(code == 0 && said.contains("is not compiled and runs in rten"), "{said}{errors}");
    let config = folder.path("sterling.toml");
    std::fs::write(&config, "[engine]\nworkers = 1\n").unwrap();
    let server = Server::start_with(&folder.path("store"), &["--config", config.to_str().unwrap()]);
    // The pool of a worker has one thread, that of the process one per core: its second one, if there is one, sleeps.
    let woken = || -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
        let texts = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
        let others = texts.filter(|text| text.starts_with("Name:\trten-") && !text.starts_with("Name:\trten-0\n"));
        let of = |text: String| {
            text.lines().filter(|line| line.contains("Pid:") || line.contains("ctxt")).collect::<String>()
        };
        others.map(of).collect()
    };
    answer(&server);
    until("the threads have begun, and sleep", || {
        woken().iter().all(|of| !of.contains("voluntary_ctxt_switches:\t0nonvoluntary"))
    });
    let before = woken();
    for _ in 0..40 {
        assert_eq!(ids(&answer(&server)).len(), 3);
    }
    assert_eq!(woken(), before);
}

#[test]
fn programs_are_printed_and_recorded() {
    let folder = Folder::new();
    let (code, said, errors) =
        folder.publish(MODEL, &[("overarch.onnx", foreign(&["logits = ReduceSum(unit, last)"]).bytes())]);
    assert_eq!(code, 0, "{errors}");
    assert!(
        said.contains("overarch.onnx is not compiled and runs in rten: ")
            && said.contains("operator `LpNormalization` `make_unit`"),
        "{said}"
    );
    let both = format!("{MODEL}{USER}");
    let files = [("overarch.onnx", good().bytes()), ("user.onnx", user(&["query = MatMul(x, w)"]).bytes())];
    let (code, said, errors) = folder.publish(&both, &files);
    assert_eq!(code, 0, "{errors}");
    let version = folder.path("store").join("m/2");
    let graphs: BTreeMap<String, GraphRecord> = Manifest::read(&version).unwrap().graphs.unwrap();
    assert_eq!(graphs.len(), 2);
    for target in [version.as_path(), &folder.path("package")] {
        let (code, shown, errors) = run(&["inspect", target.to_str().unwrap()]);
        assert_eq!(code, 0, "{errors}");
        for (file, record) in &graphs {
            let GraphRecord::Program(digest) = record else { panic!("{file}: {record}") };
            assert!(said.contains(&format!("{file} is compiled, digest {digest}")), "{said}");
            assert!(shown.contains(&format!("graph {file} is compiled, digest {digest}")), "{shown}");
        }
        assert!(shown.contains("product in[1, 3] x c0[3, 4]") && shown.contains("24 FLOP"), "{shown}");
        assert!(!shown.contains("when it was published"), "{shown}");
    }
    // A version with another program is still served, and inspect reports it.
    let mut manifest = Manifest::read(&version).unwrap();
    let other = GraphRecord::Program("0123456789abcdef".into());
    manifest.graphs.as_mut().unwrap().insert("user.onnx".into(), other);
    manifest.write(&version).unwrap();
    let (_, shown, _) = run(&["inspect", version.to_str().unwrap()]);
    assert!(shown.contains("when it was published: user.onnx is compiled, digest 0123456789abcdef"), "{shown}");
    Server::start(&folder.path("store")).stop();
}

#[test]
fn incomparable_graphs_are_published_and_reported() {
    let folder = Folder::new();
    let nodes = [
        "q = QuantizeLinear(unit, scale, zero)",
        "w = DequantizeLinear(q, scale, zero)",
        "logits = ReduceSum(w, last)",
    ];
    let zero = TensorProto { data_type: Some(DataType::UINT8), int32_data: vec![128], ..floats("zero", &[], &[]) };
    let graph = foreign(&nodes).with(&[floats("scale", &[], &[0.125]), zero]).bytes();
    let (code, said, errors) = folder.publish(MODEL, &[("overarch.onnx", graph)]);
    assert_eq!(code, 0, "{said}{errors}");
    let reported =
        "overarch.onnx was not compared with an independent evaluation of the graph file: operator `QuantizeLinear`";
    assert!(errors.contains(reported), "{errors}");
    let (code, _, errors) = folder.publish(MODEL, &[("overarch.onnx", good().bytes())]);
    assert!(code == 0 && !errors.contains("was not compared"), "{errors}");
}

/// Attention takes S x S numbers per row: a run takes fewer rows of longer sequences.
#[test]
fn memory_of_a_trial_does_not_grow_with_the_length_of_sequences() {
    let folder = Folder::new();
    let model = "name = 'm'\ndimension = 4\n[[tables]]\nname = 'words'\nfile = 'tables.safetensors'\n[user]\ntower = \
                 'user.onnx'\n[[user.features]]\nname = 'h'\nkind = 'ids'\ntable = 'words'\npooling = 'none'\nlength = 1024\n";
    let tower = Onnx::new(
        &[value("h", &[0, 1024, 8])],
        &[value("query", &[0, 4])],
        &[
            "column = MatMul(h, to_one)",
            "row = Reshape(column, shape)",
            "scores = Mul(column, row)",
            "rows = LpNormalization(scores)",
            "sum = ReduceSum(rows, axes)",
            "one = Reshape(sum, flat)",
            "query = MatMul(one, to_query)",
        ],
    )
    .with(&[
        floats("to_one", &[8, 1], &[0.01; 8]),
        integers("shape", &[-1, 1, 1024]),
        integers("axes", &[1, 2]),
        integers("flat", &[-1, 1]),
        floats("to_query", &[1, 4], &[1.0, -1.0, 0.5, 0.25]),
    ]);
    let tables = std::fs::read(root().join("tests/golden/text/tables.safetensors")).unwrap();
    let package = folder.package(model, &[("user.onnx", tower.bytes()), ("tables.safetensors", tables)]);
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sterling"));
    let tried = |memory_bytes| {
        let bounds = Bounds { memory_bytes, ..Bounds::default() };
        SandboxMode::ProcessSandbox(ProcessSandbox { program: program.clone(), bounds }).run(&package)
    };
    // 513 rows would take 4 GiB.
    tried(Bounds::default().memory_bytes).unwrap();
    let error = tried(1 << 20).unwrap_err().to_string();
    assert!(!error.contains("note:"), "{error}");
}

#[test]
fn numbers_of_a_request_that_overflow_are_its_fault() {
    let folder = Folder::new();
    let both = format!("{MODEL}{USER}");
    let files = [("overarch.onnx", good().bytes()), ("user.onnx", user(&["query = MatMul(x, w)"]).bytes())];
    let (code, _, errors) = folder.publish(&both, &files);
    assert_eq!(code, 0, "{errors}");
    let server = Server::start(&folder.path("store"));
    for features in [json!({"x": [1e38, 1e38, 1e38]}), json!({"x": [-3e38, 0, 1]})] {
        for path in [RETRIEVE, "/v1/models/m:embed"] {
            let mut body = json!({"features": features});
            if path == RETRIEVE {
                body["k"] = json!(3);
            }
            let (status, said) = server.post(path, body);
            assert!((400..500).contains(&status), "{path} {features}: {status} {said}");
            assert!(said.to_string().contains("expected at most"), "{said}");
        }
    }
    let good = server.ask(RETRIEVE, json!({"features": {"x": [1, 0.5, 0]}, "k": 3}));
    assert_eq!(ids(&good).len(), 3);
}

/// The exponential of 300 is beyond f32.
#[test]
fn finite_numbers_that_overflow_a_graph_are_invalid_by_feature_and_spoil_no_other_request() {
    let folder = Folder::new();
    let both = format!("{MODEL}{USER}");
    let reranker = overarch(&["e = Exp(query)", "same = Div(e, e)", "wide = Unsqueeze(same, middle)"])
        .and("product = Mul(item, wide)")
        .and("logits = ReduceSum(product, last)")
        .with(&[integers("middle", &[1])])
        .bytes();
    for (tower, number) in [("e = Exp(x)", 300), ("e = Identity(x)", 200)] {
        let files = [
            ("overarch.onnx", if number == 300 { good().bytes() } else { reranker.clone() }),
            ("user.onnx", user(&[tower, "query = MatMul(e, w)"]).bytes()),
        ];
        let (code, _, errors) = folder.publish(&both, &files);
        assert_eq!(code, 0, "{errors}");
        let server = Server::start(&folder.path("store"));
        let body = |x: i64| json!({"features": {"x": [x, 0.5, 0]}, "k": 3});
        let mut calls = vec![
            (RETRIEVE, body(number)),
            ("/v1/models/m:rank", json!({"features": {"x": [number, 0.5, 0]}, "items": [1, 2]})),
        ];
        if number == 300 {
            calls.push(("/v1/models/m:embed", json!({"features": {"x": [number, 0.5, 0]}})));
        }
        for (path, body) in calls {
            let (status, said) = server.post(path, &body);
            assert_eq!(status, 400, "{path} {body}: {said}");
            assert!(said.to_string().contains("feature `x`: got the number"), "{said}");
        }
        let several = json!({"requests": [body(1), body(number), body(0)]});
        let said = server.ask(RETRIEVE, several);
        let answers = said["results"].as_array().unwrap_or_else(|| panic!("{said}"));
        assert_eq!(answers[1]["problem"]["code"], "invalid", "{said}");
        for (n, x) in [(0, 1), (2, 0)] {
            assert_eq!(ids(&answers[n]), ids(&server.ask(RETRIEVE, body(x))), "{said}");
        }
    }
}

#[test]
fn a_sandbox_process_ends_with_the_process_that_started_it() {
    let folder = tempfile::tempdir().unwrap();
    // Reading a pipe without a writer never ends.
    let made = Command::new("mkfifo").arg(folder.path().join("model.toml")).status().unwrap();
    assert!(made.success());
    let mut trial = sterling()
        .arg("trial")
        .arg(folder.path())
        .args(["--memory-bytes", "1000000000", "--cpu-seconds", "5", "--until-input-ends"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert!(trial.try_wait().unwrap().is_none());
    drop(trial.stdin.take());
    assert_eq!(trial.wait().unwrap().signal(), Some(9));
}

#[test]
fn sandbox_validation_is_distinguished_from_users() {
    let output =
        sterling().args(["trial", "nowhere", "--memory-bytes", "1000000000", "--cpu-seconds", "5"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("refused") && said.contains("nowhere"), "{said}");
    assert!(!String::from_utf8(sterling().arg("--help").output().unwrap().stdout).unwrap().contains("trial"));
    assert!(SandboxMode::Here.run(Path::new("nowhere")).is_err());
}
