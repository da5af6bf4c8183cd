//! Writes answers from columns directly to JSON in chunks, in the types of `response`.

use super::entry::{Entry, Items, write_cell, write_integer, write_json, write_number};
use super::response::{EmbedResponse, Served, Step};
use sterling_core::error::{Error, Result};
use sterling_core::request::{Answer, Content};

/// Bytes after which a chunk of a reply is sent.
pub(super) const PIECE_BYTES: usize = 64 << 10;
/// Bytes by which a chunk may exceed [`PIECE_BYTES`], in addition to its last value.
pub(super) const PIECE_END_BYTES: usize = 4096;
/// Approximate bytes per item.
const ITEM_BYTES: usize = 256;

/// A reply of items, written in chunks as an iterator; only the columnar answer and one chunk are in memory.
#[derive(Clone, Debug)]
pub struct Reply {
    pub(super) served: Served,
    pub(super) entries: Vec<Entry>,
    pub(super) is_list: bool,
    at: Cursor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cursor {
    Start,
    Entry(usize),
    /// Item: index of the entry, index of the item.
    Row(usize, usize),
    /// Rest of an item, from an offset of [`Items::row_rest`].
    OtherFields(usize, usize, usize),
    /// Value of an item: index of the entry, field of the item table, index of the item.
    Cell(usize, usize, usize),
    End,
}

impl Reply {
    /// Creates the reply to one request.
    pub fn one(served: Served, entry: Entry) -> Self {
        Reply { served, entries: vec![entry], is_list: false, at: Cursor::Start }
    }

    /// Creates the reply to a list of requests.
    pub fn many(served: Served, entries: Vec<Entry>) -> Self {
        Reply { served, entries, is_list: true, at: Cursor::Start }
    }

    /// Returns the number of items in all entries.
    pub fn len(&self) -> usize {
        self.entries.iter().map(Entry::len).sum()
    }

    /// Returns whether the reply has no items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the steps of the answer to a single request with `explain`.
    pub fn steps(&self) -> &[Step] {
        match self.entries.as_slice() {
            [entry] if !self.is_list => entry.steps(),
            _ => &[],
        }
    }

    /// Returns whether all chunks are written.
    pub fn is_done(&self) -> bool {
        self.at == Cursor::End
    }

    fn advance(&mut self, out: &mut Vec<u8>) {
        self.at = match self.at {
            Cursor::Start => {
                write_json(out, &self.served);
                out.pop();
                out.extend_from_slice(if self.is_list { b",\"results\":[" } else { b"," });
                Cursor::Entry(0)
            }
            Cursor::Entry(n) => self.enter(n, out),
            Cursor::Row(n, row) => match &self.entries[n].0 {
                Ok(items) if row < items.len() => {
                    items.row(row, out);
                    rest_of_row(items, (n, row, 0), out)
                }
                Ok(items) => {
                    out.push(b']');
                    items.rest(out);
                    self.end_of_entry(n, out)
                }
                Err(_) => Cursor::Entry(n + 1),
            },
            Cursor::OtherFields(n, row, from) => match &self.entries[n].0 {
                Ok(items) => rest_of_row(items, (n, row, from), out),
                Err(_) => Cursor::Entry(n + 1),
            },
            Cursor::Cell(n, field, row) => match &self.entries[n].0 {
                Ok(items) if row < items.len() => {
                    items.value(field, row, out);
                    Cursor::Cell(n, field, row + 1)
                }
                Ok(items) if field + 1 < items.fields() => {
                    out.push(b']');
                    items.begin(field + 1, out);
                    Cursor::Cell(n, field + 1, 0)
                }
                Ok(items) => {
                    out.push(b']');
                    items.end_of_table(out);
                    items.rest(out);
                    self.end_of_entry(n, out)
                }
                Err(_) => Cursor::Entry(n + 1),
            },
            Cursor::End => Cursor::End,
        }
    }

    fn enter(&self, n: usize, out: &mut Vec<u8>) -> Cursor {
        let Some(entry) = self.entries.get(n) else {
            out.extend_from_slice(if self.is_list { b"]}" } else { b"}" });
            return Cursor::End;
        };
        if self.is_list {
            out.extend_from_slice(if n == 0 { b"{" } else { b",{" });
        }
        match &entry.0 {
            Ok(items) if items.is_table => {
                out.extend_from_slice(b"\"table\":{");
                items.begin(0, out);
                Cursor::Cell(n, 0, 0)
            }
            Ok(_) => {
                out.extend_from_slice(b"\"items\":[");
                Cursor::Row(n, 0)
            }
            Err(problem) => {
                out.extend_from_slice(b"\"problem\":");
                write_json(out, problem);
                self.end_of_entry(n, out)
            }
        }
    }

    fn end_of_entry(&self, n: usize, out: &mut Vec<u8>) -> Cursor {
        if self.is_list {
            out.push(b'}');
        }
        Cursor::Entry(n + 1)
    }
}

impl Iterator for Reply {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.is_done() {
            return None;
        }
        let mut out =
            Vec::with_capacity((ITEM_BYTES * self.len()).clamp(PIECE_END_BYTES, PIECE_BYTES + PIECE_END_BYTES));
        while out.len() < PIECE_BYTES && !self.is_done() {
            self.advance(&mut out);
        }
        Some(out)
    }
}

/// Writes the rest of an item until a chunk is full. Returns what to write next.
fn rest_of_row(items: &Items, (n, row, from): (usize, usize, usize), out: &mut Vec<u8>) -> Cursor {
    match items.row_rest(row, from, PIECE_BYTES, out) {
        Some(from) => Cursor::OtherFields(n, row, from),
        None => {
            out.push(b'}');
            Cursor::Row(n, row + 1)
        }
    }
}

/// Fields of a table before its tasks: ids, scores, similarities.
const FIELDS: usize = 3;

impl Items {
    fn row(&self, row: usize, out: &mut Vec<u8>) {
        let ranked = &self.ranked;
        out.extend_from_slice(if row == 0 { b"{\"id\":" } else { b",{\"id\":" });
        write_integer(out, ranked.ids[row].0);
        out.extend_from_slice(b",\"score\":");
        write_number(out, ranked.scores[row]);
        out.extend_from_slice(b",\"similarity\":");
        write_number(out, ranked.similarities[row]);
    }

    /// Returns the number of fields of the table of these items.
    fn fields(&self) -> usize {
        FIELDS + self.tasks().len() + self.columns().len()
    }

    /// Writes the JSON before the values of a field.
    fn begin(&self, field: usize, out: &mut Vec<u8>) {
        let (tasks, columns) = (self.tasks(), self.columns());
        let begin = |out: &mut Vec<u8>, group: &[u8], place: usize, key: &[u8]| {
            out.extend_from_slice(if place == 0 { group } else { b"," });
            out.extend_from_slice(key);
        };
        match field {
            0 => out.extend_from_slice(b"\"id\":"),
            1 => out.extend_from_slice(b",\"score\":"),
            2 => out.extend_from_slice(b",\"similarity\":"),
            _ if field < FIELDS + tasks.len() => {
                begin(out, b",\"tasks\":{", field - FIELDS, &tasks[field - FIELDS].json);
            }
            _ => {
                let column = field - FIELDS - tasks.len();
                if column == 0 && !tasks.is_empty() {
                    out.push(b'}');
                }
                begin(out, b",\"columns\":{", column, &columns[column].json);
            }
        }
        out.push(b'[');
    }

    /// Writes the value of an item in a field.
    fn value(&self, field: usize, row: usize, out: &mut Vec<u8>) {
        if row > 0 {
            out.push(b',');
        }
        let tasks = self.task_count();
        match field {
            0 => write_integer(out, self.ranked.ids[row].0),
            1 => write_number(out, self.ranked.scores[row]),
            2 => write_number(out, self.ranked.similarities[row]),
            _ if field < FIELDS + tasks => write_number(out, self.task(field - FIELDS)[row]),
            _ => write_cell(out, &self.cell(field - FIELDS - tasks, row)),
        }
    }

    fn end_of_table(&self, out: &mut Vec<u8>) {
        if self.fields() > FIELDS {
            out.push(b'}');
        }
        out.push(b'}');
    }

    /// Writes the JSON after the items.
    pub(super) fn rest(&self, out: &mut Vec<u8>) {
        if let Some(explain) = &self.explain {
            out.extend_from_slice(b",\"explain\":");
            write_json(out, explain);
        }
        if self.degraded_rows > 0 {
            out.extend_from_slice(b",\"degraded_rows\":");
            write_json(out, &self.degraded_rows);
        }
        if !self.ranked.unknown.is_empty() {
            out.extend_from_slice(b",\"unknown\":");
            write_json(out, &self.ranked.unknown);
        }
        if let Some(cursor) = &self.cursor {
            out.extend_from_slice(b",\"cursor\":");
            write_json(out, cursor);
        }
    }
}

/// Creates the reply to an `:embed`.
///
/// # Errors
/// `Internal` for an answer without an embedding, or with a number that JSON cannot represent.
pub fn embedding(served: Served, answer: Answer) -> Result<EmbedResponse> {
    match answer.content {
        Content::Embedding(user) if user.query.iter().all(|x| x.is_finite()) => {
            Ok(EmbedResponse { served, embedding: user.query, degraded_rows: answer.degraded_rows })
        }
        Content::Embedding(_) => Err(Error::internal("the user tower returned a number that is not finite")),
        Content::Items(_) | Content::Selected(_) => Err(Error::internal("got items in place of an embedding")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::super::problem::Problem;
    use super::super::response::{BatchEntry, BatchResponse, RetrieveResponse};
    use super::*;
    use sterling_core::error::Kind;
    use sterling_core::quota::{Flow, Quota};
    use sterling_core::request::{EmbeddedUser, Ranked, StepReport};
    use sterling_core::units::{ItemId, Slot};
    use sterling_index::columns::{Columns, ItemColumn, ItemValues, encode};
    use sterling_storage::files::{TensorFile, Tensors};

    fn served() -> Served {
        Served {
            model: "shop".into(),
            version: 7,
            digest: "ab".into(),
            coverage: 1.0,
            positions: Vec::new(),
            position: 0,
            missing: Vec::new(),
        }
    }

    /// Returns columns of `count` slots: a text, a set of integers with a gap, a number.
    fn columns(count: usize) -> Columns {
        let n = count as u32;
        let list = [
            ItemColumn {
                name: "ti\"tle".into(),
                filter: false,
                values: ItemValues::Texts {
                    offsets: (0..=n).collect(),
                    values: (0..n).map(|i| format!("t\u{7}\u{fc}{i}")).collect(),
                },
            },
            ItemColumn {
                name: "years".into(),
                filter: false,
                values: ItemValues::Integers {
                    offsets: std::iter::once(0).chain((1..=n).map(|i| i.saturating_sub(1) * 2)).collect(),
                    values: (0..i64::from(n.saturating_sub(1) * 2)).collect(),
                },
            },
            ItemColumn {
                name: "price".into(),
                filter: false,
                values: ItemValues::Floats((0..n).map(|i| f64::from(i) + 0.1).collect()),
            },
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("columns.safetensors");
        let mut file = TensorFile::new();
        let order: Vec<u32> = (0..n).collect();
        encode(&list, &order, &mut file).unwrap();
        file.write(&path).unwrap();
        Columns::open(&Tensors::open(&path).unwrap(), count).unwrap()
    }

    fn answer(count: usize) -> Answer {
        let of = |scale: f32| (0..count).map(|n| n as f32 * scale - 0.3).collect::<Vec<f32>>();
        let ranked = Ranked {
            slots: (0..count as u32).rev().map(Slot).collect(),
            ids: (0..count as i64).map(|n| ItemId(i64::MAX - n)).collect(),
            scores: of(-0.1),
            similarities: of(1e-9),
            tasks: [of(0.7), of(1e20)].concat(),
            unknown: Vec::new(),
            undefined: 0,
        };
        Answer { content: Content::Items(ranked), degraded_rows: 0, explain: None }
    }

    fn tasks() -> [&'static str; 2] {
        ["click", "b\"uy"]
    }

    fn text(reply: Reply) -> String {
        String::from_utf8(reply.flatten().collect()).unwrap()
    }

    #[test]
    fn items_print_every_number_exactly_and_every_column_by_name() {
        let columns = columns(3);
        let requested = ["price".to_owned(), "ti\"tle".into(), "years".into()];
        let entry = Entry::items(answer(3), tasks(), &columns, &requested).unwrap();
        let read: RetrieveResponse = serde_json::from_str(&text(Reply::one(served(), entry))).unwrap();
        assert_eq!(read.served, served());
        let Content::Items(ranked) = answer(3).content else { panic!() };
        for (n, item) in read.result.items.iter().enumerate() {
            assert_eq!(
                (item.id, item.score, item.similarity),
                (ranked.ids[n].0, ranked.scores[n], ranked.similarities[n])
            );
            assert_eq!((item.tasks["click"], item.tasks["b\"uy"]), (ranked.tasks[n], ranked.tasks[3 + n]));
        }
        let of_columns: Vec<Value> = read.result.items.iter().map(|i| Value::Object(i.columns.clone())).collect();
        assert_eq!(
            of_columns,
            [
                json!({"price": 2.1, "ti\"tle": "t\u{7}\u{fc}2", "years": [2, 3]}),
                json!({"price": 1.1, "ti\"tle": "t\u{7}\u{fc}1", "years": [0, 1]}),
                json!({"price": 0.1, "ti\"tle": "t\u{7}\u{fc}0", "years": null}),
            ]
        );
        let bare = text(Reply::one(served(), Entry::items(answer(1), [], &columns, &[]).unwrap()));
        let start = "{\"model\":\"shop\",\"version\":7,\"digest\":\"ab\",\"coverage\":1.0,\"position\":0,\"items\":[{\"id\":9223372036854775807,";
        assert_eq!(bare, format!("{start}\"score\":-0.3,\"similarity\":-0.3}}]}}"));
    }

    #[test]
    fn a_list_of_answers_keeps_its_order_and_its_problems() {
        let columns = columns(2);
        let mut explained = answer(2);
        let step = StepReport { name: "scan", micros: 3, bytes: 4, items: 5 };
        explained.explain =
            Some(sterling_core::request::Explain { steps: vec![step], route: "words", ..Default::default() });
        explained.degraded_rows = 2;
        let Content::Items(ranked) = &mut explained.content else { panic!() };
        ranked.unknown = vec![ItemId(-5)];
        let problem = Problem::from(&Error::invalid("field `k`: got 0"));
        let entries = vec![
            Entry::from(problem.clone()),
            Entry::items(explained, tasks(), &columns, &[]).unwrap(),
            Entry::items(answer(0), tasks(), &columns, &["price".into()]).unwrap(),
        ];
        assert_eq!(entries[1].steps()[0].micros, 3);
        let read: BatchResponse = serde_json::from_str(&text(Reply::many(served(), entries))).unwrap();
        let [BatchEntry::Problem { problem: first }, BatchEntry::Answer(second), BatchEntry::Answer(third)] =
            &read.results[..]
        else {
            panic!("{read:?}")
        };
        assert_eq!(first, &problem);
        assert_eq!((second.items.len(), second.degraded_rows, &second.unknown[..]), (2, 2, &[-5][..]));
        assert_eq!(second.explain.as_ref().unwrap().route, "words");
        assert!(third.items.is_empty() && third.explain.is_none());
        assert_eq!(text(Reply::many(served(), Vec::new())).matches("\"results\":[]").count(), 1);
    }

    #[test]
    fn tables_hold_the_same_values_as_items() {
        let columns = columns(5);
        let requested = ["price".to_owned(), "ti\"tle".into(), "years".into()];
        for (tasks, requested) in
            [(&tasks()[..], &requested[..]), (&tasks()[..], &[]), (&[], &requested[..]), (&[], &[])]
        {
            let entry = || Entry::items(answer(5), tasks.iter().copied(), &columns, requested).unwrap();
            let plain: RetrieveResponse = serde_json::from_str(&text(Reply::one(served(), entry()))).unwrap();
            let memory = Quota::new("answer", 1 << 20).hold(Flow::default(), 0).unwrap();
            let (ranked, written) = entry().written(&memory).unwrap();
            let gathered = Entry::gathered(ranked, written, None, 0);
            for reported in [entry(), gathered] {
                let reply = Reply::one(served(), reported.as_table(&memory).unwrap());
                let read: RetrieveResponse = serde_json::from_str(&text(reply)).unwrap();
                let (items, table) = (&plain.result.items, read.result.table.unwrap());
                assert!(read.result.items.is_empty());
                assert_eq!(table.id, items.iter().map(|item| item.id).collect::<Vec<_>>());
                assert_eq!(table.score, items.iter().map(|item| item.score).collect::<Vec<_>>());
                assert_eq!(table.similarity, items.iter().map(|item| item.similarity).collect::<Vec<_>>());
                assert_eq!((table.tasks.len(), table.columns.len()), (tasks.len(), requested.len()));
                for (name, scores) in table.tasks {
                    assert_eq!(scores, items.iter().map(|item| item.tasks[&name]).collect::<Vec<_>>());
                }
                for (name, values) in table.columns {
                    let wanted: Vec<Value> = items.iter().map(|item| item.columns[&name].clone()).collect();
                    assert_eq!(values, Value::from(wanted));
                }
            }
        }
    }

    #[test]
    fn large_replies_are_split_into_bounded_chunks() {
        let columns = columns(5000);
        let entry = Entry::items(answer(5000), tasks(), &columns, &["ti\"tle".into()]).unwrap();
        let pieces: Vec<Vec<u8>> = Reply::one(served(), entry).collect();
        assert!(pieces.len() > 5 && pieces.iter().all(|p| p.len() < PIECE_BYTES + 4096));
        let read: RetrieveResponse = serde_json::from_slice(&pieces.concat()).unwrap();
        assert_eq!(read.result.items.len(), 5000);
    }

    #[test]
    fn numbers_without_a_json_form_are_errors() {
        for invalid in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..3 {
                let mut broken = answer(2);
                let Content::Items(ranked) = &mut broken.content else { panic!() };
                [&mut ranked.scores, &mut ranked.similarities, &mut ranked.tasks][at][1] = invalid;
                let error = Entry::items(broken, tasks(), &columns(2), &[]).unwrap_err();
                assert_eq!(error.kind(), Kind::Internal);
            }
            let made = Answer {
                content: Content::Embedding(EmbeddedUser { query: vec![0.0, invalid], ..EmbeddedUser::default() }),
                degraded_rows: 0,
                explain: None,
            };
            assert!(embedding(served(), made).is_err());
        }
        assert!(Entry::items(answer(1), [], &columns(1), &["colour".into()]).is_err());
    }
}
