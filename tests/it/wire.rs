//! Other formats of the HTTP API than plain JSON: Arrow, columns, base64, codings, pages. Each has the same content as plain
//! JSON.

use std::collections::HashMap;
use std::io::{Cursor, Read, Write as _};
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type, Int64Type, UInt32Type};
use arrow_array::{Array, ArrayRef, FixedSizeListArray, Int64Array, RecordBatch, StringArray, StringViewArray};
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Schema};
use arrow_select::concat::concat_batches;
use axum::http::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::in_process::{Callee, InProcess};
use crate::support::{Server, ids, put, tiny, until, vectors};

const ARROW: &str = "application/vnd.apache.arrow.stream";
const VECTORS: &str = "/v1/models/vectors:retrieve";

/// A store of `count` items with columns of every kind.
fn catalogue(count: usize) -> TempDir {
    let store = tempfile::tempdir().unwrap();
    let line = |n: usize| {
        let years: Vec<usize> = (0..n % 3).map(|i| 2000 + n + i).collect();
        let price = if n.is_multiple_of(4) { Value::Null } else { json!(n as f64 / 3.0) };
        let angle = n as f64;
        let attributes = json!({"title": format!("item \u{fc} {n}"), "years": years, "price": price, "rank": n});
        json!({"id": n, "embedding": [angle.cos(), angle.sin()], "attributes": attributes}).to_string() + "\n"
    };
    put(store.path(), &vectors(store.path(), &(0..count).map(line).collect::<String>())).unwrap();
    store
}

/// Posts JSON with headers; returns the status, headers and bytes of the answer.
fn send(server: &impl Callee, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, HeaderMap, Vec<u8>) {
    server.call("POST", path, &[headers, &[("content-type", "application/json")]].concat(), body)
}

/// Returns an answer in Arrow as one table, with its metadata.
fn arrow(server: &impl Callee, path: &str, body: &Value) -> (RecordBatch, Value) {
    let headers = [("accept", ARROW), ("x-request-id", "seven")];
    let (status, headers, bytes) = send(server, path, &headers, body.to_string().as_bytes());
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (200, ARROW), "{bytes:?}");
    let reader = StreamReader::try_new(Cursor::new(bytes), None).unwrap();
    let schema = reader.schema();
    let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
    assert!(batches.iter().all(|batch| batch.num_rows() > 0 && batch.num_rows() <= 4096));
    let reported: Value = serde_json::from_str(&schema.metadata()["sterling"]).unwrap();
    assert_eq!(reported["request_id"], "seven");
    (concat_batches(&schema, &batches).unwrap(), reported)
}

/// Returns the value of a row as JSON represents it.
fn cell(array: &dyn Array, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        // Converts through text, because JSON has the shortest decimal of the 32 bits.
        DataType::Float32 => {
            serde_json::from_str(&serde_json::to_string(&array.as_primitive::<Float32Type>().value(row)).unwrap())
                .unwrap()
        }
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::List(_) => {
            let list = array.as_list::<i32>().value(row);
            let all: Vec<Value> = (0..list.len()).map(|n| cell(&list, n)).collect();
            // JSON represents a list of one value by the value alone.
            if let [one] = &all[..] { one.clone() } else { all.into() }
        }
        DataType::Null => Value::Null,
        other => panic!("{other}"),
    }
}

/// Rows as the items of plain JSON.
fn items(table: &RecordBatch) -> Vec<Value> {
    let row = |row: usize| {
        let mut item = json!({});
        for (field, array) in table.schema().fields().iter().zip(table.columns()) {
            let value = cell(array, row);
            match field.name().split_once('.') {
                _ if field.name() == "request" => {}
                Some((group, name)) => item[group][name] = value,
                None => item[field.name()] = value,
            }
        }
        item
    };
    (0..table.num_rows()).map(row).collect()
}

#[test]
fn arrow_and_columns_equal_items() {
    let store = catalogue(300);
    put(store.path(), &tiny()).unwrap();
    let server = InProcess::start(store.path());
    let columns = json!(["title", "years", "price", "rank"]);
    let user = json!({"installed": [1, 5]});
    let cases = [
        (VECTORS, json!({"vector": [1, 0.5], "k": 200, "columns": columns})),
        (VECTORS, json!({"vector": [1, 0.5], "k": 3, "explain": true})),
        (VECTORS, json!({"vector": [1, 0.5], "filter": "rank < 0", "columns": columns})),
        ("/v1/models/tiny:retrieve", json!({"features": user, "k": 50, "columns": ["title", "section", "popularity"]})),
        ("/v1/models/tiny:rank", json!({"features": user, "items": [3, 1, -5], "columns": ["title"]})),
    ];
    for (path, body) in cases {
        let plain = server.ask(path, &body);
        let (table, reported) = arrow(&server, path, &body);
        assert!(Value::from(items(&table)) == plain["items"], "{body}");
        for (name, value) in
            plain.as_object().unwrap().iter().filter(|(name, _)| !["items", "explain"].contains(&name.as_str()))
        {
            assert_eq!(reported[name], *value, "{name}");
        }
        assert_eq!(reported["explain"]["returned"], plain["explain"]["returned"]);
        let mut by_columns = body.clone();
        by_columns["format"] = "columns".into();
        let answer = server.ask(path, &by_columns);
        assert!(answer.get("items").is_none());
        let table = answer["table"].as_object().unwrap();
        for (n, item) in plain["items"].as_array().unwrap().iter().enumerate() {
            for (name, value) in item.as_object().unwrap() {
                match value.as_object().filter(|_| ["tasks", "columns"].contains(&name.as_str())) {
                    None => assert_eq!(table[name][n], *value),
                    Some(group) => group.iter().for_each(|(key, value)| assert_eq!(table[name][key][n], *value)),
                }
            }
        }
        assert_eq!(table["id"].as_array().unwrap().len(), ids(&plain).len());
    }
}

#[test]
fn the_type_of_an_arrow_column_is_the_models_and_a_large_answer_comes_in_batches() {
    let store = catalogue(9000);
    let server = InProcess::start(store.path());
    let columns = json!(["title", "years", "price", "rank"]);
    let all = json!({"vector": [1, 0], "k": 9000, "candidates": 9000, "exact": true, "columns": columns});
    let (table, _) = arrow(&server, VECTORS, &all);
    assert_eq!(table.num_rows(), 9000);
    let plain = server.ask(VECTORS, &all);
    assert!(Value::from(items(&table)) == plain["items"]);
    // Of items that have one year each, and of none at all.
    for filter in ["years:2001", "rank < 0"] {
        let (few, _) = arrow(&server, VECTORS, &json!({"vector": [1, 0], "filter": filter, "columns": columns}));
        assert_eq!(few.schema().fields(), table.schema().fields(), "{filter}");
    }
    let list = DataType::new_list(DataType::Int64, true);
    let kinds: Vec<DataType> = table.schema().fields().iter().map(|f| f.data_type().clone()).collect();
    let (f32, text) = (DataType::Float32, DataType::Utf8);
    assert_eq!(kinds, [DataType::Int64, f32.clone(), f32, text, list, DataType::Float64, DataType::Int64]);
}

#[test]
fn a_batch_as_arrow_names_the_request_of_each_row_and_the_problem_of_each_wrong_one() {
    let store = catalogue(300);
    let server = InProcess::start(store.path());
    let requests = json!([
        {"vector": [1, 0], "k": 3, "columns": ["title"]},
        {"vector": [1, 0], "filter": "title:"},
        {"vector": [0, 1], "k": 2, "columns": ["price", "title"]},
        {"vector": [0, 1], "filter": "rank < 0"},
        {"vector": [1, 1], "k": 1},
    ]);
    let body = json!({"requests": requests});
    let plain = server.ask(VECTORS, &body);
    let (table, reported) = arrow(&server, VECTORS, &body);
    let of: Vec<u32> = table.column_by_name("request").unwrap().as_primitive::<UInt32Type>().values().to_vec();
    assert_eq!(of, [0, 0, 0, 2, 2, 4]);
    let (rows, results) = (items(&table), plain["results"].as_array().unwrap());
    for (row, request) in rows.iter().zip(&of) {
        let place = rows.iter().zip(&of).take_while(|(other, _)| *other != row).filter(|(_, r)| *r == request).count();
        let item = &results[*request as usize]["items"][place];
        assert_eq!((&row["id"], &row["score"]), (&item["id"], &item["score"]));
        for name in ["title", "price"] {
            assert_eq!(row["columns"][name], item["columns"].get(name).cloned().unwrap_or_default(), "{name}");
        }
    }
    for (n, (said, result)) in reported["results"].as_array().unwrap().iter().zip(results).enumerate() {
        assert_eq!(said.get("problem"), result.get("problem"), "{n}");
        let rows = result["items"].as_array().map(Vec::len);
        assert_eq!(said["rows"].as_u64().map(|n| n as usize), rows, "{n}");
    }
    // A call that is invalid as a whole is answered by a problem, regardless of the requested format.
    let (status, headers, _) = send(&server, VECTORS, &[("accept", ARROW)], b"{}");
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (400, "application/problem+json"));
}

#[test]
fn a_vector_in_base64_is_the_list() {
    let store = catalogue(100);
    let server = InProcess::start(store.path());
    let vector = [0.1f32, -0.7];
    let text = STANDARD.encode(vector.map(f32::to_le_bytes).concat());
    let listed = server.ask(VECTORS, json!({"vector": vector, "k": 10}));
    assert_eq!(server.ask(VECTORS, json!({"vector": text, "k": 10})), listed);
    for (wrong, expected) in [("AAAA", "got 3 bytes in base64"), ("....", "not base64"), ("AACAPw==", "1")] {
        let (status, problem) = server.post(VECTORS, json!({"vector": wrong}));
        assert_eq!(status, 400);
        assert!(problem["detail"].as_str().unwrap().contains(expected), "{problem}");
    }
}

/// Returns columns as an Arrow stream; `shared` are the values that all rows share.
pub fn stream(columns: &[(&str, ArrayRef)], shared: Option<Value>) -> Vec<u8> {
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let metadata: HashMap<String, String> =
        shared.map(|shared| ("sterling".to_owned(), shared.to_string())).into_iter().collect();
    let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
    let batch = RecordBatch::try_new(schema.clone(), columns.iter().map(|(_, array)| array.clone()).collect()).unwrap();
    let mut writer = StreamWriter::try_new(Vec::new(), &schema).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

pub fn pairs(rows: &[Option<[f32; 2]>]) -> ArrayRef {
    let rows = rows.iter().map(|row| row.map(|row| row.map(Some)));
    Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(rows, 2))
}

/// Posts a body in Arrow; returns the status and the JSON of the answer.
pub fn send_arrow(server: &impl Callee, path: &str, body: &[u8]) -> (u16, Value) {
    let (status, _, bytes) = server.call("POST", path, &[("content-type", ARROW)], body);
    (status, serde_json::from_slice(&bytes).unwrap())
}

#[test]
fn a_batch_in_arrow_is_answered_as_the_same_in_json() {
    let store = catalogue(300);
    let server = InProcess::start(store.path());
    let vectors = [Some([1.0, 0.0]), Some([0.6, 0.8]), None, Some([0.0, 1.0]), Some([1.0, 1.0])];
    let filters = [None, Some("rank < 50"), None, Some("rank <"), Some("years:2001")];
    let k = [3, 2, 1, 1, 4];
    let requests: Vec<Value> = vectors
        .iter()
        .zip(filters)
        .zip(k)
        .map(|((vector, filter), k)| {
            json!({"vector": vector, "filter": filter.unwrap_or("rank < 200"), "k": k, "columns": ["title", "price"]})
        })
        .collect();
    let columns: [(&str, ArrayRef); 3] = [
        ("vector", pairs(&vectors)),
        ("filter", Arc::new(StringViewArray::from(filters.to_vec()))),
        ("k", Arc::new(Int64Array::from(k.to_vec()))),
    ];
    let body = stream(&columns, Some(json!({"filter": "rank < 200", "columns": ["title", "price"]})));
    let expected = server.ask(VECTORS, json!({"requests": requests}));
    let (status, answer) = send_arrow(&server, VECTORS, &body);
    assert_eq!(status, 200, "{answer}");
    for (n, (got, wanted)) in
        answer["results"].as_array().unwrap().iter().zip(expected["results"].as_array().unwrap()).enumerate()
    {
        // The message about a missing vector differs, because JSON has it as null.
        match n {
            2 => assert!(got["problem"]["detail"].as_str().unwrap().starts_with("requests[2]: fields"), "{got}"),
            3 => assert!(got["problem"]["status"] == 400 && wanted["problem"]["status"] == 400),
            _ => assert_eq!(got, wanted),
        }
    }
    // The same there and back, compressed.
    let headers = [("content-type", ARROW), ("accept", ARROW), ("content-encoding", "zstd")];
    let (status, headers, bytes) = server.call("POST", VECTORS, &headers, &zstd(&body));
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (200, ARROW));
    let rows: usize =
        StreamReader::try_new(Cursor::new(bytes), None).unwrap().map(|batch| batch.unwrap().num_rows()).sum();
    let found = |result: &Value| result["items"].as_array().map_or(0, Vec::len);
    assert_eq!(rows, expected["results"].as_array().unwrap().iter().map(found).sum::<usize>());
    let one = stream(&[("vector", pairs(&[Some([1.0, 0.0])]))], None);
    assert_eq!(send_arrow(&server, "/v1/models/vectors/versions/1:retrieve", &one).0, 200);
    for (path, body, status, expected) in [
        ("/v1/models/vectors:rank", &one[..], 415, "expected application/json"),
        ("/v1/models/vectors:embed", &one, 415, "expected application/json"),
        (VECTORS, b"{\"vector\": [1, 0]}", 400, "body: message 1: not a stream of Arrow's IPC format"),
        (VECTORS, &one[..one.len() - 20], 400, "body: message 2: the Arrow stream is truncated"),
    ] {
        let (got, problem) = send_arrow(&server, path, body);
        assert!(got == status && problem["detail"].as_str().unwrap().contains(expected), "{path}: {problem}");
    }
    let (status, _, problem) = server.call("POST", VECTORS, &[("content-type", "text/csv")], b"1,0");
    let problem = String::from_utf8(problem).unwrap();
    assert!(
        status == 415 && problem.contains("expected application/json or application/vnd.apache.arrow.stream"),
        "{problem}"
    );
}

#[test]
fn items_in_arrow_are_put_and_changed() {
    let store = catalogue(30);
    let updates = tempfile::tempdir().unwrap();
    let server = Server::start_with(store.path(), &["--updates", updates.path().to_str().unwrap()]);
    const UPSERT: &str = "/v1/models/vectors/items:upsert";
    let ids = |ids: &[Option<i64>]| ("id", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef);
    let put = stream(
        &[
            ids(&[Some(1000), Some(1001), None, Some(1003)]),
            ("embedding", pairs(&[Some([9.0, 0.0]), Some([0.0, 9.0]), Some([1.0, 1.0]), None])),
            ("attributes.title", Arc::new(StringArray::from(vec!["new", "other", "x", "x"]))),
            ("attributes.rank", Arc::new(Int64Array::from(vec![Some(7), None, None, None]))),
        ],
        None,
    );
    let (status, made) = send_arrow(&server, UPSERT, &put);
    assert_eq!((status, made["accepted"].as_u64()), (200, Some(2)), "{made}");
    let refused: Vec<(u64, &str)> = made["refused"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| (item["place"].as_u64().unwrap(), item["field"].as_str().unwrap()))
        .collect();
    assert_eq!(refused, [(2, "id"), (3, "embedding")]);
    assert_eq!(server.get("/v1/models/vectors/items:position?min_position=2").0, 200);
    let set = stream(&[ids(&[Some(1001), Some(4)]), ("set.rank", Arc::new(Int64Array::from(vec![8, 9])))], None);
    let (status, made) = send_arrow(&server, UPSERT, &set);
    assert_eq!((status, made["accepted"].as_u64()), (200, Some(2)), "{made}");
    let path = format!("{VECTORS}?min_position={}", made["position"]);
    let found = server.ask(&path, json!({"vector": [0, 1], "k": 1, "columns": ["title", "rank"]}));
    assert_eq!(found["items"][0]["columns"], json!({"title": "other", "rank": 8}));
    let item = server.get_json(&format!("/v1/models/vectors/items/4?min_position={}", made["position"]));
    assert_eq!((&item["attributes"]["rank"], &item["attributes"]["title"]), (&json!(9), &json!("item \u{fc} 4")));
    let (status, problem) = send_arrow(&server, "/v1/models/vectors/items:delete", &set);
    assert!(status == 415 && problem["detail"].as_str().unwrap().ends_with("expected application/json"), "{problem}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut coder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    coder.write_all(bytes).unwrap();
    coder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 3).unwrap()
}

#[test]
fn bodies_and_answers_are_compressed_and_bombs_are_rejected() {
    let store = catalogue(2000);
    let server = Server::start(store.path());
    let body = json!({"vector": [1, 0], "k": 2000, "candidates": 2000, "columns": ["title"]}).to_string();
    let (_, headers, plain) = send(&server, VECTORS, &[("accept-encoding", "identity")], body.as_bytes());
    assert!(!headers.contains_key("content-encoding"));
    for (name, coded) in [("gzip", gzip(body.as_bytes())), ("zstd", zstd(body.as_bytes()))] {
        let headers = [("content-encoding", name), ("accept-encoding", name)];
        let (status, headers, bytes) = send(&server, VECTORS, &headers, &coded);
        assert_eq!((status, headers.get("content-encoding").map(|v| v.to_str().unwrap())), (200, Some(name)));
        assert!(bytes.len() * 2 < plain.len());
        let mut read = Vec::new();
        match name {
            "gzip" => flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut read).unwrap(),
            _ => zstd::stream::read::Decoder::new(&bytes[..]).unwrap().read_to_end(&mut read).unwrap(),
        };
        assert!(read == plain, "{name}");
        // Small answers are not compressed.
        let (_, headers, _) = send(&server, VECTORS, &[("accept-encoding", name)], b"{\"vector\": [1, 0]}");
        assert!(!headers.contains_key("content-encoding"));
    }
    let spaces = vec![b' '; 200 << 20];
    for (name, bomb) in [("gzip", gzip(&spaces)), ("zstd", zstd(&spaces))] {
        assert!(bomb.len() < 1 << 20);
        let (status, _, problem) = send(&server, VECTORS, &[("content-encoding", name)], &bomb);
        let problem: Value = serde_json::from_slice(&problem).unwrap();
        assert_eq!(status, 413, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("decompressed"), "{problem}");
    }
    for (name, bytes, expected) in [
        ("gzip", &b"{\"vector\": [1, 0]}"[..], 400),
        ("gzip", &gzip(body.as_bytes())[..20], 400),
        ("zstd", &zstd(body.as_bytes())[..20], 400),
        ("br", b"x", 415),
        ("gzip, gzip", b"x", 415),
    ] {
        let (status, headers, problem) = send(&server, VECTORS, &[("content-encoding", name)], bytes);
        assert_eq!(status, expected, "{name}: {}", String::from_utf8_lossy(&problem));
        assert_eq!(headers.get("accept-encoding").is_some(), expected == 415);
    }
}

/// All pages of a retrieval, in turn.
fn pages(server: &impl Callee, path: &str, body: &Value, between: impl Fn(usize)) -> Vec<i64> {
    let (mut all, mut cursor) = (Vec::new(), String::new());
    for page in 0.. {
        let mut body = body.clone();
        body["cursor"] = cursor.into();
        let answer = server.ask(path, body);
        all.extend(ids(&answer));
        match answer.get("cursor") {
            Some(next) => cursor = next.as_str().unwrap().to_owned(),
            None => break,
        }
        between(page);
    }
    all
}

#[test]
fn pages_are_slices_of_one_ranking() {
    let store = catalogue(500);
    put(store.path(), &tiny()).unwrap();
    let server = InProcess::start(store.path());
    let user = json!({"installed": [1, 5]});
    for (path, body) in [
        (VECTORS, json!({"vector": [1, 0.5], "candidates": 100})),
        (VECTORS, json!({"vector": [1, 0.5], "candidates": 100, "filter": "rank < 70"})),
        (VECTORS, json!({"vector": [1, 0.5], "filter": "rank < 0"})),
        ("/v1/models/tiny:retrieve", json!({"features": user, "constants": {"w_buy": 0.5}})),
    ] {
        for size in [7, 100, 50] {
            let (mut complete, mut paged) = (body.clone(), body.clone());
            (complete["k"], paged["k"]) = (100.into(), size.into());
            let wanted = ids(&server.ask(path, complete));
            let got = pages(&server, path, &paged, |_| {});
            assert_eq!(got[..wanted.len().min(got.len())], wanted[..], "{body} by {size}");
        }
    }
    // As many as there are candidates, and no more.
    let deep = json!({"vector": [1, 0.5], "candidates": 100, "k": 30});
    assert_eq!(pages(&server, VECTORS, &deep, |_| {}).len(), 100);
    let first = server.ask(VECTORS, json!({"vector": [1, 0.5], "cursor": ""}));
    let cursor = first["cursor"].as_str().unwrap();
    let with = |more: Value| {
        let mut body = json!({"vector": [1, 0.5], "cursor": cursor});
        more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    assert_eq!(server.post(VECTORS, with(json!({"k": 3, "explain": true}))).0, 200, "its size may change");
    for (wrong, expected) in [
        (with(json!({"vector": [1, 0.25]})), "of another request"),
        (with(json!({"filter": "rank < 70"})), "of another request"),
        (with(json!({"cursor": "x"})), "not a cursor of an answer"),
        (with(json!({"cursor": format!("{cursor}A")})), "not a cursor of an answer"),
        (with(json!({"cursor": 3})), "invalid type"),
        (with(json!({"cursor": "", "candidates": 0})), "field `candidates`: got 0, expected 1 to"),
        (with(json!({"cursor": "", "candidates": 4, "k": 5})), "field `candidates`: got 4, expected at least k = 5"),
    ] {
        let (status, problem) = server.post(VECTORS, &wrong);
        assert!(status == 400 && problem["detail"].as_str().unwrap().contains(expected), "{wrong}: {problem}");
    }
    let listed = server.ask(VECTORS, json!({"requests": [with(json!({}))]}));
    assert!(listed["results"][0]["problem"]["detail"].as_str().unwrap().contains("pages are requested one by one"));
    let (status, problem) = server.post("/v1/models/tiny:retrieve", json!({"features": user, "cursor": cursor}));
    assert_eq!(status, 400, "of another model: {problem}");
}

fn serve_updates(folder: &Path) -> Server {
    Server::start_with(folder, &["--updates", folder.join("updates").to_str().unwrap()])
}

#[test]
fn updates_and_publications_change_no_page() {
    let store = catalogue(300);
    let server = serve_updates(store.path());
    let body = json!({"vector": [1, 0.5], "candidates": 120, "k": 20});
    let mut complete = body.clone();
    complete["k"] = 120.into();
    let wanted = ids(&server.ask(VECTORS, complete.clone()));
    let change = |page: usize| {
        let item = json!({"id": 1000 + page, "embedding": [1, 0.5], "attributes": {"title": "new"}});
        let made = server.ask("/v1/models/vectors/items:upsert", json!({"items": [item]}));
        let position = format!("/v1/models/vectors/items:position?min_position={}", made["position"]);
        server.get_json(&position);
        server.ask("/v1/models/vectors/items:delete", json!({"ids": [wanted[page]]}));
    };
    assert_eq!(pages(&server, VECTORS, &body, change), wanted);
    assert_ne!(ids(&server.ask(VECTORS, complete)), wanted, "a new listing sees the updates");
    let mut first = body.clone();
    first["cursor"] = "".into();
    let cursor = server.ask(VECTORS, first)["cursor"].clone();
    let mut next = body.clone();
    next["cursor"] = cursor;
    let line = "{\"id\": 1, \"embedding\": [1, 0]}\n";
    put(store.path(), &vectors(store.path(), line)).unwrap();
    until("version 2", || server.get_json("/v1/models/vectors")["version"] == 2);
    let (status, problem) = server.post(VECTORS, &next);
    if status == 200 {
        // The previous version stays in memory as long as its memory is not needed.
        assert_eq!(server.post("/v1/models/vectors/versions/1:unload", "").0, 200);
    }
    let (status, problem) = if status == 200 { server.post(VECTORS, &next) } else { (status, problem) };
    assert_eq!((status, problem["code"].as_str()), (410, Some("gone")), "{problem}");
}
