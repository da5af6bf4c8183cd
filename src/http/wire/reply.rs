//! Answers written from columns straight to text, a piece at a time, in the shapes of `response`.

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter as _};

use super::problem::Problem;
use super::response::{EmbedResponse, Explain, Served, Step};
use crate::columns::{Cell, Stacked};
use crate::error::{Error, Result};
use crate::request::{Answer, Content, Ranked};
use crate::route::protocol::Written;

/// Bytes after which a piece of a reply is sent.
const PIECE_BYTES: usize = 64 << 10;

/// Items with the names of what they have.
#[derive(Clone, Debug)]
struct Items {
    ranked: Ranked,
    explain: Option<Explain>,
    degraded_rows: u64,
    rest: Rest,
}

/// What items say besides ids and scores.
#[derive(Clone, Debug)]
enum Rest {
    /// Told here.
    Told(Box<Told>),
    /// Told elsewhere.
    Written(Written),
}

/// Tasks and columns with their names.
#[derive(Clone, Debug)]
struct Told {
    /// `"name":` of each task and of each column, ready to be copied.
    task_keys: Vec<Vec<u8>>,
    column_keys: Vec<Vec<u8>>,
    columns: Stacked,
    picked: Vec<usize>,
}

/// One answer of a reply, or the problem in its place.
#[derive(Clone, Debug)]
pub struct Entry(std::result::Result<Box<Items>, Problem>);

impl Entry {
    /// Items; `tasks` are the names of the model's tasks, `asked` those of the columns that were asked for.
    ///
    /// # Errors
    /// `Internal` for an answer without items or with a number that JSON has not; `Invalid` for a column that is not there.
    pub fn items<'a>(
        answer: Answer,
        tasks: impl IntoIterator<Item = &'a str>,
        columns: impl Into<Stacked>,
        asked: &[String],
    ) -> Result<Self> {
        let Content::Items(ranked) = answer.content else {
            return Err(Error::internal("an embedding came in place of items"));
        };
        let numbers = ranked.scores.iter().chain(&ranked.similarities).chain(&ranked.tasks);
        if let Some(x) = numbers.into_iter().find(|x| !x.is_finite()) {
            return Err(Error::internal(format!("an item is worth {x}, expected a finite number")));
        }
        let columns = columns.into();
        let picked = asked.iter().map(|name| columns.first().number(name)).collect::<Result<Vec<_>>>()?;
        let names: Vec<String> = columns.first().list().map(|c| c.name().to_owned()).collect();
        Ok(Entry(Ok(Box::new(Items {
            ranked,
            explain: answer.explain.as_ref().map(Explain::from),
            degraded_rows: answer.degraded_rows,
            rest: Rest::Told(Box::new(Told {
                task_keys: tasks.into_iter().map(key).collect(),
                column_keys: picked.iter().map(|&c| key(&names[c])).collect(),
                columns,
                picked,
            })),
        }))))
    }

    /// Items that others found, with what these say of them.
    pub fn gathered(ranked: Ranked, rest: Written, explain: Option<Explain>, degraded_rows: u64) -> Self {
        Entry(Ok(Box::new(Items { ranked, explain, degraded_rows, rest: Rest::Written(rest) })))
    }

    /// The items, and what they say besides ids and scores, for whoever writes them.
    pub fn written(self) -> (Ranked, Written) {
        let mut written = Written::default();
        let Ok(items) = self.0 else { return (Ranked::default(), written) };
        let mut text = Vec::new();
        for row in 0..items.ranked.ids.len() {
            text.clear();
            items.row_rest(row, &mut text);
            written.push(&text);
        }
        (
            Ranked { tasks: Vec::new(), ..items.ranked },
            if written.text.is_empty() { Written::default() } else { written },
        )
    }

    /// The steps of an explained answer.
    pub fn steps(&self) -> &[Step] {
        self.0.as_ref().ok().and_then(|items| items.explain.as_ref()).map_or(&[], |e| &e.steps)
    }
}

impl From<Problem> for Entry {
    fn from(problem: Problem) -> Self {
        Entry(Err(problem))
    }
}

fn key(name: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.len() + 3);
    json(&mut key, name);
    key.push(b':');
    key
}

/// A reply of items, written piece by piece as an iterator: what is held is the columnar answer and one piece.
#[derive(Clone, Debug)]
pub struct Reply {
    served: Served,
    entries: Vec<Entry>,
    is_list: bool,
    at: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    Entry(usize),
    Row(usize, usize),
    End,
}

impl Reply {
    /// The reply to one request.
    pub fn one(served: Served, entry: Entry) -> Self {
        Reply { served, entries: vec![entry], is_list: false, at: Place::Start }
    }

    /// The reply to a list of requests.
    pub fn many(served: Served, entries: Vec<Entry>) -> Self {
        Reply { served, entries, is_list: true, at: Place::Start }
    }

    /// Items in all of its entries.
    pub fn len(&self) -> usize {
        self.entries.iter().filter_map(|entry| entry.0.as_ref().ok()).map(|items| items.ranked.ids.len()).sum()
    }

    /// True where it tells of no item.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The steps of the answer to a single request that asked for them.
    pub fn steps(&self) -> &[Step] {
        match self.entries.as_slice() {
            [entry] if !self.is_list => entry.steps(),
            _ => &[],
        }
    }

    /// True where no piece is left.
    pub fn is_done(&self) -> bool {
        self.at == Place::End
    }

    fn advance(&mut self, out: &mut Vec<u8>) {
        self.at = match self.at {
            Place::Start => {
                json(out, &self.served);
                out.pop();
                out.extend_from_slice(if self.is_list { b",\"results\":[" } else { b"," });
                Place::Entry(0)
            }
            Place::Entry(n) => match self.entries.get(n) {
                None => {
                    out.extend_from_slice(if self.is_list { b"]}" } else { b"}" });
                    Place::End
                }
                Some(entry) => {
                    if self.is_list {
                        out.extend_from_slice(if n == 0 { b"{" } else { b",{" });
                    }
                    match &entry.0 {
                        Ok(_) => {
                            out.extend_from_slice(b"\"items\":[");
                            Place::Row(n, 0)
                        }
                        Err(problem) => {
                            out.extend_from_slice(b"\"problem\":");
                            json(out, problem);
                            self.end_of_entry(n, out)
                        }
                    }
                }
            },
            Place::Row(n, row) => match &self.entries[n].0 {
                Ok(items) if row < items.ranked.ids.len() => {
                    items.row(row, out);
                    Place::Row(n, row + 1)
                }
                Ok(items) => {
                    items.rest(out);
                    self.end_of_entry(n, out)
                }
                Err(_) => Place::Entry(n + 1),
            },
            Place::End => Place::End,
        }
    }

    fn end_of_entry(&self, n: usize, out: &mut Vec<u8>) -> Place {
        if self.is_list {
            out.push(b'}');
        }
        Place::Entry(n + 1)
    }
}

impl Iterator for Reply {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.is_done() {
            return None;
        }
        let mut out = Vec::with_capacity(4096);
        while out.len() < PIECE_BYTES && !self.is_done() {
            self.advance(&mut out);
        }
        Some(out)
    }
}

impl Items {
    fn row(&self, row: usize, out: &mut Vec<u8>) {
        let ranked = &self.ranked;
        out.extend_from_slice(if row == 0 { b"{\"id\":" } else { b",{\"id\":" });
        integer(out, ranked.ids[row].0);
        out.extend_from_slice(b",\"score\":");
        number(out, ranked.scores[row]);
        out.extend_from_slice(b",\"similarity\":");
        number(out, ranked.similarities[row]);
        self.row_rest(row, out);
        out.push(b'}');
    }

    /// What stands behind the scores of an item.
    fn row_rest(&self, row: usize, out: &mut Vec<u8>) {
        match &self.rest {
            Rest::Told(told) => told.row(&self.ranked, row, out),
            Rest::Written(written) => out.extend_from_slice(written.of(row)),
        }
    }

    /// What stands behind the items.
    fn rest(&self, out: &mut Vec<u8>) {
        out.push(b']');
        if let Some(explain) = &self.explain {
            out.extend_from_slice(b",\"explain\":");
            json(out, explain);
        }
        if self.degraded_rows > 0 {
            out.extend_from_slice(b",\"degraded_rows\":");
            json(out, &self.degraded_rows);
        }
        if !self.ranked.unknown.is_empty() {
            out.extend_from_slice(b",\"unknown\":");
            json(out, &self.ranked.unknown);
        }
    }
}

impl Told {
    fn row(&self, ranked: &Ranked, row: usize, out: &mut Vec<u8>) {
        let count = ranked.ids.len();
        for (task, key) in self.task_keys.iter().enumerate() {
            out.extend_from_slice(if task == 0 { b",\"tasks\":{" } else { b"," });
            out.extend_from_slice(key);
            number(out, ranked.tasks[task * count + row]);
        }
        if !self.task_keys.is_empty() {
            out.push(b'}');
        }
        for (n, (&column, key)) in self.picked.iter().zip(&self.column_keys).enumerate() {
            out.extend_from_slice(if n == 0 { b",\"columns\":{" } else { b"," });
            out.extend_from_slice(key);
            match self.columns.cell(column, ranked.slots[row]) {
                Cell::Missing => out.extend_from_slice(b"null"),
                Cell::Integer(x) => integer(out, x),
                Cell::Integers(many) => json(out, &many),
                Cell::Float(x) => json(out, &x),
                Cell::Text(text) => json(out, text),
                Cell::Texts(many) => json(out, &many),
            }
        }
        if !self.picked.is_empty() {
            out.push(b'}');
        }
    }
}

fn json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // Neither a `Vec` nor the types here refuse anything.
    let _ = serde_json::to_writer(out, value);
}

fn integer(out: &mut Vec<u8>, x: i64) {
    let _ = CompactFormatter.write_i64(out, x);
}

fn number(out: &mut Vec<u8>, x: f32) {
    let _ = CompactFormatter.write_f32(out, x);
}

/// The reply to an `:embed`.
///
/// # Errors
/// `Internal` for an answer without an embedding, or with a number that JSON has not.
pub fn embedding(served: Served, answer: Answer) -> Result<EmbedResponse> {
    match answer.content {
        Content::Embedding(user) if user.query.iter().all(|x| x.is_finite()) => {
            Ok(EmbedResponse { served, embedding: user.query, degraded_rows: answer.degraded_rows })
        }
        Content::Embedding(_) => Err(Error::internal("the user tower made a number that is not finite")),
        Content::Items(_) | Content::Selected(_) => Err(Error::internal("items came in place of an embedding")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::super::response::{BatchEntry, BatchResponse, RetrieveResponse};
    use super::*;
    use crate::columns::{Columns, ItemColumn, ItemValues, encode};
    use crate::error::Kind;
    use crate::files::{TensorFile, Tensors};
    use crate::request::{EmbeddedUser, StepReport};
    use crate::units::{ItemId, Slot};

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

    /// Columns of `count` slots: a text, a set of whole numbers with a gap, a number.
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
    fn items_say_every_number_exactly_and_every_column_by_its_name() {
        let columns = columns(3);
        let asked = ["price".to_owned(), "ti\"tle".into(), "years".into()];
        let entry = Entry::items(answer(3), tasks(), &columns, &asked).unwrap();
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
        explained.explain = Some(crate::request::Explain { steps: vec![step], route: "words", ..Default::default() });
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
    fn a_large_reply_comes_in_pieces_of_a_bounded_size() {
        let columns = columns(5000);
        let entry = Entry::items(answer(5000), tasks(), &columns, &["ti\"tle".into()]).unwrap();
        let pieces: Vec<Vec<u8>> = Reply::one(served(), entry).collect();
        assert!(pieces.len() > 5 && pieces.iter().all(|p| p.len() < PIECE_BYTES + 4096));
        let read: RetrieveResponse = serde_json::from_slice(&pieces.concat()).unwrap();
        assert_eq!(read.result.items.len(), 5000);
    }

    #[test]
    fn numbers_that_json_has_not_are_errors() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..3 {
                let mut broken = answer(2);
                let Content::Items(ranked) = &mut broken.content else { panic!() };
                [&mut ranked.scores, &mut ranked.similarities, &mut ranked.tasks][at][1] = wrong;
                let error = Entry::items(broken, tasks(), &columns(2), &[]).unwrap_err();
                assert_eq!(error.kind(), Kind::Internal);
            }
            let made = Answer {
                content: Content::Embedding(EmbeddedUser { query: vec![0.0, wrong], tensors: Vec::new() }),
                degraded_rows: 0,
                explain: None,
            };
            assert!(embedding(served(), made).is_err());
        }
        assert!(Entry::items(answer(1), [], &columns(1), &["colour".into()]).is_err());
    }
}
