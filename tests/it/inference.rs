//! KServe's Open Inference Protocol, version 2: the requests and answers that its documents show, over this server's models.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::in_process::{Callee as _, InProcess};
use crate::support::{ids, put, tiny, vectors};

const INFER: &str = "/v2/models/tiny/infer";

/// The store of all tests of this file, and the server that answers from it.
fn server() -> &'static InProcess {
    static SERVER: LazyLock<(TempDir, InProcess)> = LazyLock::new(|| {
        let store = tempfile::tempdir().unwrap();
        put(store.path(), &tiny()).unwrap();
        let attributes = |n| if n == 2 { json!({"rank": [1, 2], "title": "two"}) } else { json!({"rank": [n]}) };
        let line = |n: i32| json!({"id": n, "embedding": [1, n], "attributes": attributes(n)}).to_string() + "\n";
        put(store.path(), &vectors(store.path(), &(0..4).map(line).collect::<String>())).unwrap();
        let server = InProcess::start(store.path());
        (store, server)
    });
    &SERVER.1
}

/// The outputs of an answer by their names.
fn outputs(answer: &Value) -> BTreeMap<String, Value> {
    answer["outputs"].as_array().unwrap().iter().map(|o| (o["name"].as_str().unwrap().into(), o.clone())).collect()
}

#[test]
fn server_and_models_have_metadata_and_probes() {
    let server = server();
    let reported = server.get_json("/v2");
    assert_eq!(
        (reported["name"].as_str(), &reported["extensions"]),
        (Some("sterling"), &json!(["binary_tensor_data"]))
    );
    assert!(reported["version"].is_string());
    assert_eq!(server.get_json("/v2/health/live"), json!({"live": true}));
    assert_eq!(server.get_json("/v2/health/ready"), json!({"live": true, "ready": true}));
    assert_eq!(server.get_json("/v2/"), reported);
    for path in ["/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"] {
        assert_eq!(server.get_json(path), json!({"name": "tiny", "ready": true}));
    }
    let model = server.get_json("/v2/models/tiny");
    assert_eq!(model, server.get_json("/v2/models/tiny/versions/1"));
    assert_eq!(
        (&model["name"], &model["versions"], &model["platform"]),
        (&json!("tiny"), &json!(["1"]), &json!("sterling"))
    );
    let inputs = json!([
        {"name": "installed", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "section", "datatype": "BYTES", "shape": [-1, -1]},
        {"name": "size", "datatype": "FP32", "shape": [-1, 3]},
    ]);
    assert_eq!(model["inputs"], inputs);
    let names: Vec<&str> = model["outputs"].as_array().unwrap().iter().map(|o| o["name"].as_str().unwrap()).collect();
    let wanted = ["ids", "scores", "similarities", "counts", "tasks.click", "tasks.buy"];
    assert_eq!(names[..6], wanted);
    assert!(names[6..].iter().all(|name| name.starts_with("columns.")));
    let vectors = server.get_json("/v2/models/vectors");
    assert_eq!(vectors["inputs"], json!([{"name": "vector", "datatype": "FP32", "shape": [-1, 2]}]));
}

#[test]
fn rows_of_tensors_are_retrievals() {
    let server = server();
    let users = [
        json!({"installed": [1, 5], "section": ["games"], "size": [0.5, 1, -2]}),
        json!({"installed": [3], "section": ["admin"], "size": [0, 0, 0]}),
        json!({"installed": {"values": [], "weights": []}, "section": ["python"], "size": [1, 1, 1]}),
    ];
    let plain: Vec<Value> = users
        .iter()
        .map(|user| {
            let filter = "popularity < 6";
            server.ask(
                "/v1/models/tiny:retrieve",
                json!({"features": user, "k": 4, "filter": filter, "columns": ["title"]}),
            )
        })
        .collect();
    let input = |name: &str, shape: Value, datatype: &str, data: Value| json!({"name": name, "shape": shape, "datatype": datatype, "data": data});
    let flat = json!([
        input("installed", json!([3, 2]), "INT64", json!([1, 5, 3, 0, 0, 0])),
        input("installed.counts", json!([3]), "INT32", json!([2, 1, 0])),
        input("section", json!([3, 1]), "BYTES", json!(["games", "admin", "python"])),
        input("size", json!([3, 3]), "FP32", json!([0.5, 1, -2, 0, 0, 0, 1, 1, 1])),
    ]);
    let nested = json!([
        input("installed", json!([3, 2]), "UINT32", json!([[1, 5], [3, 0], [0, 0]])),
        input("installed.counts", json!([3, 1]), "INT64", json!([[2], [1], [0]])),
        input("section", json!([3, 1]), "BYTES", json!([["games"], ["admin"], ["python"]])),
        input("size", json!([3, 3]), "FP64", json!([[0.5, 1.0, -2.0], [0, 0, 0], [1, 1, 1]])),
    ]);
    for inputs in [flat, nested] {
        let parameters = json!({"k": 4, "filter": "popularity < 6"});
        let body = json!({"id": "42", "parameters": parameters, "inputs": inputs});
        let answer = server.ask(INFER, &body);
        assert_eq!(
            (&answer["id"], &answer["model_name"], &answer["model_version"]),
            (&json!("42"), &json!("tiny"), &json!("1"))
        );
        assert_eq!(answer["parameters"]["digest"], plain[0]["digest"]);
        let all = outputs(&answer);
        let names: Vec<&str> = all.keys().map(String::as_str).collect();
        assert_eq!(names, ["counts", "ids", "scores", "similarities", "tasks.buy", "tasks.click"]);
        assert_eq!((&all["ids"]["shape"], &all["ids"]["datatype"]), (&json!([3, 4]), &json!("INT64")));
        let data = |name: &str| all[name]["data"].as_array().unwrap();
        for (row, answer) in plain.iter().enumerate() {
            let items = answer["items"].as_array().unwrap();
            assert_eq!(data("counts")[row], items.len());
            for (n, item) in items.iter().enumerate() {
                let at = row * 4 + n;
                assert_eq!((&data("ids")[at], &data("scores")[at]), (&item["id"], &item["score"]));
                assert_eq!(data("tasks.buy")[at], item["tasks"]["buy"]);
            }
        }
    }
    let ask = json!({
        "inputs": [input("installed", json!([1, 2]), "INT64", json!([1, 5])), input("installed.weights", json!([1, 2]), "FP32", json!([0.5, 2]))],
        "outputs": [{"name": "columns.title"}, {"name": "ids"}],
    });
    let weighted = json!({"features": {"installed": {"values": [1, 5], "weights": [0.5, 2]}}, "columns": ["title"]});
    let (answer, plain) = (server.ask(INFER, ask), server.ask("/v1/models/tiny:retrieve", weighted));
    assert_eq!(answer["outputs"][1]["data"], json!(ids(&plain)));
    let titles: Vec<&Value> = plain["items"].as_array().unwrap().iter().map(|item| &item["columns"]["title"]).collect();
    assert_eq!(answer["outputs"][0]["data"], json!(titles));
}

#[test]
fn vectors_come_as_tensors_and_short_rows_are_filled() {
    let server = server();
    let body = json!({
        "inputs": [{"name": "vector", "shape": [2, 2], "datatype": "FP32", "data": [1, 0, 1, 5]}],
        "parameters": {"k": 9, "filter": "rank > 0"},
        "outputs": [{"name": "ids"}, {"name": "counts"}, {"name": "columns.rank"}, {"name": "columns.title"}],
    });
    let answer = server.ask("/v2/models/vectors/versions/1/infer", body);
    let all = outputs(&answer);
    assert_eq!(all["ids"]["data"], json!([1, 2, 3, 3, 2, 1]));
    assert_eq!(all["counts"], json!({"name": "counts", "datatype": "INT64", "shape": [2], "data": [3, 3]}));
    assert_eq!(all["columns.rank"]["data"], json!(["1", "[1,2]", "3", "3", "[1,2]", "1"]));
    assert_eq!(all["columns.title"]["data"], json!(["", "two", "", "", "two", ""]));
    let body = json!({"inputs": [{"name": "vector", "shape": [1, 2], "datatype": "FP32", "data": [1, 0]}], "parameters": {"filter": "rank < 0"}});
    let answer = server.ask("/v2/models/vectors/infer", body);
    assert_eq!((&outputs(&answer)["ids"]["shape"], &outputs(&answer)["counts"]["data"]), (&json!([1, 0]), &json!([0])));
}

#[test]
fn tensors_come_and_go_as_bytes() {
    let server = server();
    let sections: Vec<u8> =
        ["games", "admin"].iter().flat_map(|t| [&(t.len() as u32).to_le_bytes()[..], t.as_bytes()].concat()).collect();
    let installed: Vec<u8> = [1i64, 5].iter().flat_map(|x| x.to_le_bytes()).collect();
    let head = json!({
        "inputs": [
            {"name": "installed", "shape": [2, 1], "datatype": "INT64", "parameters": {"binary_data_size": installed.len()}},
            {"name": "section", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": sections.len()}},
        ],
        "parameters": {"k": 3, "binary_data_output": true},
        "outputs": [{"name": "ids"}, {"name": "scores"}, {"name": "columns.title"}, {"name": "counts", "parameters": {"binary_data": false}}],
    })
    .to_string();
    let body = [head.as_bytes(), &installed, &sections].concat();
    let send = |length: &str, body: &[u8]| {
        const LENGTH: &str = "inference-header-content-length";
        let headers = [("content-type", "application/octet-stream"), (LENGTH, length)];
        let (status, headers, answer) = server.call("POST", INFER, &headers, body);
        (status, headers.get(LENGTH).map(|l| l.to_str().unwrap().parse::<usize>().unwrap()), answer)
    };
    let (status, length, bytes) = send(&head.len().to_string(), &body);
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&bytes));
    let (json_part, mut rest) = bytes.split_at(length.unwrap());
    let answer: Value = serde_json::from_slice(json_part).unwrap();
    let plain = server.ask(
        INFER,
        json!({"inputs": [{"name": "installed", "shape": [2, 1], "datatype": "INT64", "data": [1, 5]},
                          {"name": "section", "shape": [2, 1], "datatype": "BYTES", "data": ["games", "admin"]}],
               "parameters": {"k": 3},
               "outputs": [{"name": "ids"}, {"name": "scores"}, {"name": "columns.title"}, {"name": "counts"}]}),
    );
    for (output, wanted) in answer["outputs"].as_array().unwrap().iter().zip(plain["outputs"].as_array().unwrap()) {
        let (name, wanted) = (output["name"].as_str().unwrap(), wanted["data"].as_array().unwrap());
        let Some(size) = output["parameters"]["binary_data_size"].as_u64() else {
            assert_eq!((name, output["data"].as_array().unwrap()), ("counts", wanted));
            continue;
        };
        assert!(output.get("data").is_none());
        let (own, left) = rest.split_at(size as usize);
        rest = left;
        let read: Vec<Value> = match name {
            "ids" => own.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b).into()).collect(),
            "scores" => own
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| serde_json::from_str(&serde_json::to_string(&f32::from_le_bytes(*b)).unwrap()).unwrap())
                .collect(),
            _ => {
                let (mut texts, mut own) = (Vec::new(), own);
                while let Some((length, left)) = own.split_first_chunk::<4>() {
                    let (text, left) = left.split_at(u32::from_le_bytes(*length) as usize);
                    texts.push(String::from_utf8(text.to_vec()).unwrap().into());
                    own = left;
                }
                texts
            }
        };
        assert_eq!(&read, wanted, "{name}");
    }
    assert!(rest.is_empty());
    let complete = head.len().to_string();
    for (length, body) in [
        ("x", &body[..]),
        ("-1", &body),
        ("99999999", &body),
        ("18446744073709551616", &body),
        ("5", &body),
        (&complete, &body[..body.len() - 1]),
        (&complete, &[&body[..], b"x"].concat()),
        (&complete, head.as_bytes()),
    ] {
        let (status, _, bytes) = send(length, body);
        let error: Value = serde_json::from_slice(&bytes).unwrap();
        assert!(status == 400 && error["error"].is_string(), "{length}: {error}");
    }
}

#[test]
fn errors_are_those_of_the_protocol() {
    let server = server();
    let with = |inputs: Value| json!({"inputs": inputs}).to_string();
    let installed = |shape: Value, datatype: &str, data: Value| {
        with(json!([{"name": "installed", "shape": shape, "datatype": datatype, "data": data}]))
    };
    let huge = u64::MAX;
    let deep = format!(
        "{{\"inputs\": [{{\"name\": \"installed\", \"shape\": [1], \"datatype\": \"INT64\", \"data\": {}",
        "[".repeat(100_000)
    );
    for (body, expected) in [
        (String::new(), "not JSON"),
        ("{}".into(), "missing field `inputs`"),
        (with(json!([])), "got 0 rows"),
        (installed(json!([0, 2]), "INT64", json!([])), "got 0 rows"),
        (installed(json!([2000, 0]), "INT64", json!([])), "got 2000 rows, expected 1 to 1024"),
        (installed(json!([]), "INT64", json!([1])), "expected 1 to 8 dimensions"),
        (installed(json!([1, 2]), "INT64", json!([1])), "1 values, expected 2"),
        (installed(json!([huge, huge]), "INT64", json!([1])), "expected one of fewer values"),
        (installed(json!([1, 1, 1, 1, 1, 1, 1, 1, 1]), "INT64", json!([1])), "expected 1 to 8 dimensions"),
        (installed(json!([-1, 2]), "INT64", json!([1])), "invalid value"),
        (installed(json!([1, 1]), "BOOL", json!([true])), "invalid type: boolean"),
        (installed(json!([1, 1]), "BF16", json!([1])), "datatype `BF16`"),
        (installed(json!([1, 1]), "FP16", json!([1])), "JSON cannot represent FP16"),
        (installed(json!([1, 1]), "INT64", json!([0.5])), "got values that are not INT64"),
        (installed(json!([1, 1]), "INT64", json!({})), "invalid type: map"),
        (deep, "8 deep at most"),
        (with(json!([{"name": "colour", "shape": [1, 1], "datatype": "INT64", "data": [1]}])), "no such feature, expected: installed, section, size"),
        (with(json!([{"name": "installed", "shape": [1, 1], "datatype": "INT64"}])), "expected either `data`"),
        (with(json!([{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]},
                     {"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}])), "is given twice"),
        (with(json!([{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]},
                     {"name": "section", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "b"]}])), "2 rows, expected 1"),
        (with(json!([{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]},
                     {"name": "installed.counts", "shape": [1], "datatype": "INT64", "data": [2]}])), "got 2 in row 0, expected 0 to 1"),
        (with(json!([{"name": "section", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]},
                     {"name": "section.weights", "shape": [1, 1], "datatype": "FP32", "data": [1]}])), "only ids have weights"),
        (json!({"inputs": [{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}], "outputs": [{"name": "colour"}]}).to_string(), "output `colour`"),
        (json!({"inputs": [{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}], "outputs": [{"name": "columns.colour"}]}).to_string(), "unknown column `colour`"),
        (json!({"inputs": [{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}], "outputs": [{"name": "ids"}, {"name": "ids"}]}).to_string(), "requested twice"),
        (json!({"inputs": [{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}], "parameters": {"kk": 1}}).to_string(), "unknown field `kk`"),
        (json!({"inputs": [{"name": "installed", "shape": [2, 1], "datatype": "INT64", "data": [1, 1]}], "parameters": {"filter": "a:"}}).to_string(), "row 0"),
        (json!({"inputs": [{"name": "installed", "shape": [1, 1], "datatype": "INT64", "data": [1]}], "parameters": {"k": 0}}).to_string(), "got 0, expected 1"),
    ] {
        let (status, error) = server.post(INFER, &body);
        assert_eq!(status, 400, "{body:.200}: {error}");
        assert_eq!(error.as_object().unwrap().len(), 1, "{error}");
        assert!(error["error"].as_str().unwrap().contains(expected), "{body:.200}: {error}");
    }
    let rows: Vec<i64> = vec![1; 1000];
    let tensor = json!({"name": "installed", "shape": [1000, 1], "datatype": "INT64", "data": rows});
    let filter = format!("section:{}", "x".repeat(50_000));
    let (status, error) = server.post(INFER, json!({"inputs": [tensor], "parameters": {"filter": filter}}));
    assert!(status == 422 && error["error"].as_str().unwrap().contains("for each of 1000 rows"), "{error}");
    for (path, expected) in [
        ("/v2/models/none", 404),
        ("/v2/models/none/ready", 404),
        ("/v2/models/tiny/versions/9/ready", 404),
        ("/v2/models/tiny/versions/x", 400),
        ("/v2/models/tiny/infer", 405),
        ("/v2/nothing", 404),
    ] {
        let (status, text) = server.get(path);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(status == expected && error["error"].is_string(), "{path}: {status} {error}");
    }
    assert_eq!(server.get("/v22").0, 404);
    assert_eq!(server.get_json("/v2/health/live"), json!({"live": true}));
}
