//! Tests of Arrow bodies: contents, rejected input, and memory use.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow_array::builder::StringViewBuilder;
use arrow_array::types::{Float32Type, Int32Type};
use arrow_array::*;
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_ipc::{FieldArgs, Int, IntArgs, Message, MessageArgs, MessageHeader, MetadataVersion, SchemaArgs, Type};
use arrow_schema::{DataType, Field, Schema};
use flatbuffers::FlatBufferBuilder;
use half::f16;
use serde_json::json;

use super::super::{Retrievals, divided, retrievals, upserts};
use super::*;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::items::{GivenItem, GivenValues, UPDATES_MAX, shard_of};
use sterling_core::limits::{BATCH_REQUESTS_MAX, BODY_BYTES_MAX};
use sterling_core::request::{User, Values};
use sterling_core::units::ItemId;

/// Returns a stream of columns in batches of this number of rows, with shared fields.
fn stream(columns: &[(&str, ArrayRef)], rows: usize, shared: Option<&str>) -> Vec<u8> {
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let metadata: HashMap<String, String> =
        shared.map(|text| ("sterling".to_owned(), text.to_owned())).into_iter().collect();
    let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
    let mut writer = StreamWriter::try_new(Vec::new(), &schema).unwrap();
    let batch = RecordBatch::try_new(schema, columns.iter().map(|(_, array)| array.clone()).collect()).unwrap();
    for first in (0..batch.num_rows()).step_by(rows) {
        writer.write(&batch.slice(first, rows.min(batch.num_rows() - first))).unwrap();
    }
    writer.into_inner().unwrap()
}

fn read(body: &[u8]) -> Result<Vec<Result<sterling_core::request::Retrieve>>> {
    match arrow_retrievals(body, &mut |_| Ok(()))? {
        Retrievals::Many(requests) => {
            Ok(requests.into_iter().map(|request| request.map(|(request, ..)| request)).collect())
        }
        Retrievals::One(..) => panic!("one"),
    }
}

fn fixed(rows: &[Option<[f32; 2]>]) -> ArrayRef {
    let rows = rows.iter().map(|row| row.map(|row| row.map(Some)));
    Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(rows, 2))
}

fn lists<T: arrow_array::ArrowPrimitiveType>(rows: Vec<Option<Vec<T::Native>>>) -> ArrayRef {
    Arc::new(ListArray::from_iter_primitive::<T, _, _>(
        rows.into_iter().map(|row| row.map(|row| row.into_iter().map(Some))),
    ))
}

fn texts(rows: &[Option<&str>]) -> ArrayRef {
    Arc::new(StringArray::from(rows.to_vec()))
}

#[test]
fn rows_and_json_requests_are_equal() {
    let columns: [(&str, ArrayRef); 4] = [
        ("vector", fixed(&[Some([1.0, 0.5]), Some([0.25, -2.0]), Some([3.0, 0.0])])),
        ("filter", texts(&[Some("a:b"), None, Some("")])),
        ("exclude", lists::<Int32Type>(vec![None, Some(vec![4, -1]), Some(vec![])])),
        ("k", Arc::new(UInt16Array::from(vec![None, Some(7), None]))),
    ];
    let shared = r#"{"k": 3, "filter": "c:d", "exclude": [9], "columns": ["name"], "explain": true, "timeout_ms": 50}"#;
    let rest = json!({"columns": ["name"], "explain": true, "timeout_ms": 50});
    let with = |more: serde_json::Value| {
        let mut all = rest.clone();
        more.as_object().unwrap().iter().for_each(|(name, value)| all[name] = value.clone());
        all
    };
    let same = json!({"requests": [
        with(json!({"vector": [1, 0.5], "filter": "a:b", "exclude": [9], "k": 3})),
        with(json!({"vector": [0.25, -2], "filter": "c:d", "exclude": [4, -1], "k": 7})),
        with(json!({"vector": [3, 0], "filter": "", "exclude": [], "k": 3})),
    ]});
    let expected = format!("{:?}", retrievals(same.to_string().as_bytes()).unwrap());
    for rows in 1..4 {
        let body = stream(&columns, rows, Some(shared));
        assert_eq!(format!("{:?}", arrow_retrievals(&body, &mut |_| Ok(())).unwrap()), expected, "{rows} rows a batch");
    }
}

#[test]
fn a_vector_is_one_in_every_type_that_writers_have() {
    let expected = [vec![1.0, -2.0], vec![0.0, 4.0]];
    let field = |kind| Arc::new(Field::new_list_field(kind, true));
    let offsets = || OffsetBuffer::from_lengths([2, 2]);
    let of = |values: ArrayRef| -> ArrayRef {
        Arc::new(ListArray::new(field(values.data_type().clone()), offsets(), values, None))
    };
    let halves: Vec<f16> = [1.0, -2.0, 0.0, 4.0].map(f16::from_f32).to_vec();
    let large = LargeListArray::new(
        field(DataType::Float64),
        OffsetBuffer::from_lengths([2, 2]),
        Arc::new(Float64Array::from(vec![1.0, -2.0, 0.0, 4.0])),
        None,
    );
    let fixed_halves =
        FixedSizeListArray::new(field(DataType::Float16), 2, Arc::new(Float16Array::from(halves.clone())), None);
    let all: [ArrayRef; 7] = [
        fixed(&[Some([1.0, -2.0]), Some([0.0, 4.0])]),
        of(Arc::new(Float64Array::from(vec![1.0, -2.0, 0.0, 4.0]))),
        of(Arc::new(Float16Array::from(halves))),
        of(Arc::new(Int8Array::from(vec![1, -2, 0, 4]))),
        of(Arc::new(Int64Array::from(vec![1, -2, 0, 4]))),
        Arc::new(large),
        Arc::new(fixed_halves),
    ];
    for array in all {
        let kind = array.data_type().clone();
        let requests = read(&stream(&[("vector", array)], 1, None)).unwrap();
        for (request, vector) in requests.into_iter().zip(&expected) {
            assert_eq!(request.unwrap().user, User::Vector(vector.clone()), "{kind}");
        }
    }
}

#[test]
fn features_are_lists_texts_numbers_and_ids_with_weights() {
    let views: ArrayRef = Arc::new(StringViewArray::from(vec![Some("de"), Some("a text of more than twelve bytes")]));
    let columns: [(&str, ArrayRef); 6] = [
        ("features.installed", lists::<Int32Type>(vec![Some(vec![3, 1]), Some(vec![])])),
        ("features.bag", lists::<Int32Type>(vec![Some(vec![7]), None])),
        ("features.bag.weights", lists::<Float32Type>(vec![Some(vec![0.5]), None])),
        ("features.lang", views),
        ("features.age", Arc::new(Float64Array::from(vec![Some(0.5), Some(f64::NAN)]))),
        ("features.of.weights", Arc::new(BooleanArray::from(vec![true, false]))),
    ];
    let users: Vec<User> = read(&stream(&columns, 2, None)).unwrap().into_iter().map(|r| r.unwrap().user).collect();
    let text = |text: &str| Values::Texts(vec![text.to_owned()]);
    let of = |features: Vec<(&str, Values)>| {
        User::Features(features.into_iter().map(|(name, values)| (name.to_owned(), values)).collect::<BTreeMap<_, _>>())
    };
    let first = of(vec![
        ("installed", Values::Integers(vec![3, 1])),
        ("bag", Values::Weighted { ids: vec![7], weights: vec![0.5] }),
        ("lang", text("de")),
        ("age", Values::Numbers(vec![0.5])),
        ("of.weights", text("true")),
    ]);
    let second = of(vec![
        ("installed", Values::Integers(vec![])),
        ("lang", text("a text of more than twelve bytes")),
        ("of.weights", text("false")),
    ]);
    assert_eq!(users, [first, second]);
    // A user without any feature is valid.
    let nothing = read(&stream(&[("features.lang", texts(&[None]))], 1, None)).unwrap();
    assert_eq!(nothing[0].as_ref().unwrap().user, of(vec![]));
}

#[test]
fn an_invalid_row_is_rejected_alone_with_its_column() {
    let vector = fixed(&[Some([1.0, 0.0]), None, Some([f32::NAN, 0.0]), Some([1.0, f32::INFINITY]), Some([2.0, 0.0])]);
    let k: ArrayRef = Arc::new(Int64Array::from(vec![Some(5), None, None, None, Some(-1)]));
    let requests = read(&stream(&[("vector", vector), ("k", k)], 5, None)).unwrap();
    let reported: Vec<String> =
        requests.into_iter().map(|r| r.map_or_else(|e| e.to_string(), |r| format!("k {}", r.k))).collect();
    assert_eq!(reported[0], "k 5");
    for (reported, expected) in reported[1..].iter().zip([
        "requests[1]: fields `features` and `vector`: got neither",
        "requests[2]: column `vector`: got NaN at index 0",
        "requests[3]: column `vector`: got inf at index 1",
        "requests[4]: column `k`: got -1, expected an integer above 0",
    ]) {
        assert!(reported.starts_with(expected), "{reported}");
    }
    // A value that the type cannot represent is an error of its row only.
    let vector = fixed(&[Some([1.0, 0.0]); 3]);
    let large: ArrayRef = Arc::new(UInt64Array::from(vec![1, u64::MAX, 3]));
    let requests = read(&stream(&[("vector", vector), ("k", large)], 2, None)).unwrap();
    let error = requests[1].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("requests[1]: column `k`: row 2: got 18446744073709551615"), "{error}");
    assert_eq!((requests[0].as_ref().unwrap().k, requests[2].as_ref().unwrap().k), (1, 3));
    let weights = [
        ("features.a", lists::<Int32Type>(vec![Some(vec![1]), None])),
        ("features.a.weights", lists::<Float32Type>(vec![Some(vec![1.0, 2.0]), Some(vec![1.0])])),
    ];
    let requests = read(&stream(&weights, 2, None)).unwrap();
    for (request, expected) in
        requests.iter().zip(["got 2 weights, expected one for each of 1 values", "no values in `features.a`"])
    {
        let error = request.as_ref().unwrap_err().to_string();
        assert!(error.contains("column `features.a.weights`") && error.contains(expected), "{error}");
    }
}

#[test]
fn invalid_bodies_are_rejected_with_the_message_or_column() {
    let one = || ("vector", fixed(&[Some([1.0, 0.5])]));
    let good = stream(&[one()], 1, None);
    let dictionary: ArrayRef = Arc::new(["x", "x"].into_iter().collect::<DictionaryArray<Int32Type>>());
    let many = fixed(&vec![Some([1.0, 0.5]); BATCH_REQUESTS_MAX + 1]);
    let field = Arc::new(Field::new_list_field(DataType::Null, true));
    let nothing: ArrayRef = Arc::new(FixedSizeListArray::new(field, 1 << 20, Arc::new(NullArray::new(1 << 20)), None));
    let schema = Arc::new(Schema::new(vec![Field::new("vector", DataType::Int64, true)]));
    let mut file = FileWriter::try_new(Vec::new(), &schema).unwrap();
    file.finish().unwrap();
    let mut after = good.clone();
    after.extend_from_slice(b"x");
    let shared = |text: &str| stream(&[one()], 1, Some(text));
    for (body, expected) in [
        (Vec::new(), "body: message 1: the stream is empty, expected a schema"),
        (b"{\"vector\": [1]}".to_vec(), "body: message 1: not a stream of Arrow's IPC format"),
        (vec![0xff; 4], "body: message 1: the Arrow stream is truncated: a message has 4 bytes"),
        (vec![0xff; 400], "body: message 1: a message header of 4294967295 bytes"),
        ([&[0xff; 4][..], &[0; 4]].concat(), "body: message 1: the stream is empty"),
        ([&[0xff; 4][..], &[8, 0, 0, 0], &[0; 8]].concat(), "body: message 1: got NONE, expected a schema"),
        ([&[0xff; 4][..], &[8, 0, 0, 0], &[0xff; 8]].concat(), "body: message 1: not an Arrow message"),
        (file.into_inner().unwrap(), "a file of Arrow's IPC format, expected a stream of it"),
        (after, "1 bytes follow the end of the stream"),
        (good[..good.len() - 9].to_vec(), "body: message 2: the Arrow stream is truncated"),
        ([&good[..good.len() - 8], &good].concat(), "body: message 3: got Schema, expected a record batch"),
        (stream(&[one()], 1, Some("{")), "metadata `sterling` of the Arrow schema: body: not JSON"),
        (shared("{\"kk\": 1}"), "metadata `sterling` of the Arrow schema: field `kk`: unknown field `kk`"),
        (shared("{\"vector\": [1]}"), "expected them as columns"),
        (stream(&[("query", fixed(&[None]))], 1, None), "column `query`: no such field of a request"),
        (stream(&[("features.", fixed(&[None]))], 1, None), "column `features.`: no such field of a request"),
        (stream(&[one(), one()], 1, None), "column `vector`: it occurs twice"),
        (stream(&[("filter", dictionary)], 2, None), "column `filter`: got Dictionary(Int32, Utf8), expected integers"),
        (stream(&[("vector", nothing)], 1, None), "column `vector`: got FixedSizeList"),
        (stream(&[("vector", many)], 4096, None), "body: message 2: expected 0 to 1024 rows in all"),
        (stream(&[("vector", fixed(&[]))], 1, None), "body: 0 rows, expected 1 to 1024"),
    ] {
        let error = read(&body).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}, expected {expected}");
        assert!([Kind::Invalid, Kind::Unsupported].contains(&error.kind()), "{error}");
    }
    let unmarked = &good[..good.len() - 8];
    assert_eq!(read(unmarked).unwrap().len(), 1, "a stream may end without its mark");
    let full = stream(&[("vector", fixed(&vec![Some([1.0, 0.5]); BATCH_REQUESTS_MAX]))], 100, None);
    assert_eq!(read(&full).unwrap().len(), BATCH_REQUESTS_MAX);
}

#[test]
fn truncated_or_changed_bytes_never_panic() {
    let columns: [(&str, ArrayRef); 4] = [
        ("vector", fixed(&[Some([1.0, 0.5]), None, Some([3.0, 0.0])])),
        ("filter", Arc::new(StringViewArray::from(vec!["a:b", "a text of more than twelve bytes", ""]))),
        ("exclude", lists::<Int32Type>(vec![None, Some(vec![4, -1]), Some(vec![])])),
        ("k", Arc::new(Int8Array::from(vec![None, Some(7), None]))),
    ];
    let good = stream(&columns, 2, Some("{\"k\": 3}"));
    for length in 0..good.len() {
        // A stream may end between two messages; it then has fewer rows.
        if let Ok(requests) = read(&good[..length]) {
            assert!(requests.len() == 2 || length + 8 >= good.len(), "{length} of {}", good.len());
        }
    }
    for at in 0..good.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff, good[at] ^ 1, good[at] ^ 0x10] {
            let mut invalid = good.clone();
            invalid[at] = value;
            // Parsing must not panic; its result is irrelevant.
            drop(read(&invalid));
            drop(arrow_upserts(&invalid, &mut |_| Ok(())));
        }
    }
}

/// A schema whose fields all share one table.
fn repeated(count: usize, name: usize) -> Vec<u8> {
    let mut buffer = FlatBufferBuilder::new();
    let name = buffer.create_string(&"x".repeat(name));
    let kind = Int::create(&mut buffer, &IntArgs { bitWidth: 64, is_signed: true }).as_union_value();
    let args =
        FieldArgs { name: Some(name), nullable: true, type_type: Type::Int, type_: Some(kind), ..FieldArgs::default() };
    let field = arrow_ipc::Field::create(&mut buffer, &args);
    let fields = Some(buffer.create_vector(&vec![field; count]));
    let schema = arrow_ipc::Schema::create(&mut buffer, &SchemaArgs { fields, ..SchemaArgs::default() });
    let message = MessageArgs {
        version: MetadataVersion::V5,
        header_type: MessageHeader::Schema,
        header: Some(schema.as_union_value()),
        bodyLength: 0,
        custom_metadata: None,
    };
    let message = Message::create(&mut buffer, &message);
    buffer.finish(message, None);
    let mut description = buffer.finished_data().to_vec();
    description.resize(description.len().next_multiple_of(8), 0);
    [&[0xff; 4][..], &(description.len() as u32).to_le_bytes(), &description].concat()
}

#[test]
fn a_schema_whose_fields_are_one_costs_what_its_bytes_do() {
    let body = repeated(20_000, 50_000);
    let used = allocation_counter::measure(|| assert!(read(&body).is_err()));
    assert!(used.bytes_max < 8 * body.len() as u64, "{} bytes for {}", used.bytes_max, body.len());
    let error = read(&repeated(3, 5)).unwrap_err().to_string();
    assert!(error.contains("column `xxxxx`: it occurs twice"), "{error}");
}

#[test]
fn memory_of_a_decoded_body_is_reserved_first() {
    let count = 200_000;
    let int8: ArrayRef = Arc::new(Int8Array::from(vec![7; count]));
    let bools: ArrayRef = Arc::new(BooleanArray::from(vec![true; count]));
    let empty: ArrayRef = Arc::new(StringArray::from(vec![""; count]));
    // String views that all point to one long text.
    let views: ArrayRef = {
        let mut views = StringViewBuilder::new();
        let block = views.append_block("x".repeat(100_000).into_bytes().into());
        (0..1000).for_each(|_| views.try_append_view(block, 0, 100_000).unwrap());
        Arc::new(views.finish())
    };
    let listed = |values: ArrayRef| -> ArrayRef {
        let field = Arc::new(Field::new_list_field(values.data_type().clone(), true));
        Arc::new(ListArray::new(field, OffsetBuffer::from_lengths([values.len() / 2, values.len() / 2]), values, None))
    };
    let wide: Vec<(String, ArrayRef)> =
        (0..500).map(|n| (format!("attributes.a{n}"), Arc::new(Int8Array::from(vec![1; 1000])) as ArrayRef)).collect();
    let mut columns: Vec<(&str, ArrayRef)> = vec![("id", Arc::new(Int64Array::from_iter_values(0..1000)))];
    columns.extend(wide.iter().map(|(name, array)| (name.as_str(), array.clone())));
    let shared = json!({"exclude": vec![1; 5000]}).to_string();
    let bodies = [
        stream(&[("features.a", listed(int8))], 2, None),
        stream(&[("features.a", listed(bools))], 2, None),
        stream(&[("features.a", listed(empty))], 2, None),
        stream(&[("features.a", views)], 1000, None),
        stream(&[("vector", fixed(&[Some([1.0, 0.5]); 1000]))], 1000, Some(&shared)),
        stream(&columns, 1000, None),
    ];
    for body in bodies {
        let mut held = 0;
        let used = allocation_counter::measure(|| {
            let mut hold = |bytes| {
                held += bytes;
                Ok(())
            };
            let taken = match columns_are_items(&body) {
                true => arrow_upserts(&body, &mut hold).map(|items| items.len()),
                false => arrow_retrievals(&body, &mut hold).map(|_| 0),
            };
            assert!(taken.is_ok());
        });
        let bound = held as u64 + 3 * body.len() as u64 + (1 << 20);
        assert!(used.bytes_max < bound, "{} bytes, {held} were taken for {}", used.bytes_max, body.len());
        // A caller without memory rejects the reservation.
        let refuse = || Error::overloaded("full");
        let most = used.bytes_max as usize / 4;
        let mut held = 0;
        let used = allocation_counter::measure(|| {
            let mut hold = |bytes| {
                held += bytes;
                if held > most { Err(refuse()) } else { Ok(()) }
            };
            let done = match columns_are_items(&body) {
                true => arrow_upserts(&body, &mut hold).map(|_| ()),
                false => arrow_retrievals(&body, &mut hold).map(|_| ()),
            };
            assert_eq!(done.unwrap_err().kind(), Kind::Overloaded);
        });
        assert!(used.bytes_max < (most + 3 * body.len() + (1 << 20)) as u64);
    }
    assert!(BODY_BYTES_MAX < i32::MAX as usize / 8, "a bit a value has a place in a list");
}

fn columns_are_items(body: &[u8]) -> bool {
    body.windows(13).any(|bytes| bytes == b"attributes.a0")
}

fn item_columns(count: i64) -> Vec<(&'static str, ArrayRef)> {
    let n = || 0..count;
    vec![
        ("attributes.title", Arc::new(StringArray::from_iter_values(n().map(|n| format!("t{n}"))))),
        ("id", Arc::new(Int64Array::from_iter_values(n()))),
        (
            "attributes.years",
            lists::<Int32Type>(n().map(|n| (n % 3 > 0).then(|| vec![n as i32; n as usize % 3])).collect()),
        ),
        ("attributes.price", Arc::new(Float64Array::from_iter(n().map(|n| (n % 4 > 0).then_some(n as f64 / 3.0))))),
        ("attributes.is_new", Arc::new(BooleanArray::from_iter(n().map(|n| Some(n % 2 == 0))))),
        ("embedding", lists::<Float32Type>(n().map(|n| Some(vec![n as f32, 0.1])).collect())),
    ]
}

#[test]
fn items_are_those_of_json() {
    let items: Vec<serde_json::Value> = (0..20)
        .map(|n: i64| {
            let years = vec![n; n as usize % 3];
            let price = if n % 4 > 0 { json!(n as f64 / 3.0) } else { json!(null) };
            let attributes = json!({"title": format!("t{n}"), "years": years, "price": price, "is_new": n % 2 == 0});
            json!({"id": n, "embedding": [n, 0.1], "attributes": attributes})
        })
        .collect();
    let expected = upserts(json!({"items": items}).to_string().as_bytes(), false).unwrap();
    for rows in [1, 7, 20] {
        assert_eq!(arrow_upserts(&stream(&item_columns(20), rows, None), &mut |_| Ok(())).unwrap(), expected);
    }
    let set: [(&str, ArrayRef); 3] = [
        ("id", Arc::new(Int16Array::from(vec![3, 4]))),
        ("set.title", texts(&[Some("x"), None])),
        ("set.price", Arc::new(Float32Array::from(vec![f32::NAN, 0.5]))),
    ];
    let changed = arrow_upserts(&stream(&set, 2, None), &mut |_| Ok(())).unwrap();
    let item = |id, title, price| {
        let attributes = vec![("title".to_owned(), title), ("price".to_owned(), price)];
        Ok(GivenItem { id, embedding: None, attributes, whole: false })
    };
    assert_eq!(
        changed,
        [
            item(3, GivenValues::Texts(vec!["x".into()]), GivenValues::Missing),
            item(4, GivenValues::Missing, GivenValues::Numbers(vec![0.5])),
        ]
    );
}

#[test]
fn an_invalid_item_is_rejected_alone_with_its_field() {
    let columns: [(&str, ArrayRef); 3] = [
        ("id", Arc::new(UInt64Array::from(vec![Some(1), None, Some(u64::MAX), Some(4), Some(5)]))),
        ("embedding", lists::<Float32Type>(vec![Some(vec![1.0]), None, None, Some(vec![f32::NAN]), None])),
        ("attributes.n", lists::<Float32Type>(vec![None, None, None, None, Some(vec![1.0, f32::INFINITY])])),
    ];
    let items = arrow_upserts(&stream(&columns, 3, None), &mut |_| Ok(())).unwrap();
    let reported: Vec<(Option<i64>, String, String)> =
        items[1..].iter().map(|item| item.clone().unwrap_err()).map(|w| (w.id, w.field, w.reason)).collect();
    for ((id, field, reason), expected) in reported.iter().zip([
        (None, "id", "expected a 64-bit integer"),
        (None, "", "column `id`: row 3: got 18446744073709551615"),
        (Some(4), "embedding", "got NaN at index 0"),
        (Some(5), "attributes.n", "got inf at index 1"),
    ]) {
        assert!(
            (*id, field.as_str()) == (expected.0, expected.1) && reason.contains(expected.2),
            "{id:?} {field} {reason}"
        );
    }
    assert!(items[0].is_ok());
    let ids = |name: &'static str| (name, Arc::new(Int64Array::from(vec![1])) as ArrayRef);
    for (columns, expected) in [
        (vec![ids("n")], "column `n`: no such field of an item"),
        (vec![ids("attributes.n")], "column `id` is missing"),
        (vec![ids("id"), ids("attributes.n"), ids("set.m")], "column `set.m` beside `attributes.n`"),
    ] {
        let error = arrow_upserts(&stream(&columns, 1, None), &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let many: ArrayRef = Arc::new(Int64Array::from_iter_values(0..UPDATES_MAX as i64 + 1));
    let error = arrow_upserts(&stream(&[("id", many)], 4096, None), &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("message 4: expected 0 to 10000 rows in all"), "{error}");
}

#[test]
fn items_are_divided_by_the_shards_that_they_belong_to() {
    let mut columns = item_columns(40);
    columns[1].1 = Arc::new(Int64Array::from_iter((0..40).map(|n| (n % 9 != 4).then_some(n))));
    let all: Vec<GivenItem> = arrow_upserts(&stream(&columns, 40, None), &mut |_| Ok(()))
        .unwrap()
        .into_iter()
        .filter_map(Result::ok)
        .collect();
    for (rows, shards) in [(40, 1), (7, 2), (11, 7)] {
        let (parts, refused) = arrow_divided(&stream(&columns, rows, None), shards, &mut |_| Ok(())).unwrap();
        assert_eq!(refused.iter().map(|item| item.place).collect::<Vec<_>>(), [4, 13, 22, 31]);
        let mut seen = Vec::new();
        for (shard, (places, body)) in parts.iter().enumerate().filter(|(_, (places, _))| !places.is_empty()) {
            let items = arrow_upserts(body, &mut |_| Ok(())).unwrap();
            assert_eq!(items.len(), places.len());
            for (place, item) in places.iter().zip(items) {
                let item = item.unwrap();
                assert_eq!((item.id as usize, shard_of(ItemId(item.id), shards as u32) as usize), (*place, shard));
                seen.push(item);
            }
        }
        seen.sort_by_key(|item| item.id);
        assert_eq!(seen, all);
    }
    assert!(divided(b"{}", false, 2).is_err() && arrow_divided(b"{}", 2, &mut |_| Ok(())).is_err());
}
