//! Memory of an answer while it is written, in addition to ids and scores. The size is computed from the requested
//! columns, so that the memory can be reserved before the pass starts.

use super::arrow::{BATCH_BYTES, BATCH_COPIES, ROWS_MAX};
use super::reply::{PIECE_BYTES, PIECE_END_BYTES};
use sterling_core::error::Result;
use sterling_index::columns::Stacked;

/// Chunks of an answer in memory: the one that is sent and the one that is written.
const PIECES: usize = 2;
/// Chunks in memory while the written one grows beyond its initial capacity: its old and its new copy both count.
const GROWN_PIECES: usize = 3;
/// Maximum bytes per byte of text in JSON: a control character becomes `\u0007`.
const ESCAPED: usize = 6;
/// Bytes of an item as text without its tasks and columns, and of a task.
const ITEM_BYTES: usize = 128;
const TASK_BYTES: usize = 64;
/// Bytes of an item in Arrow without its tasks and columns: request, id, score and similarity.
const SCORES_BYTES: usize = 20;
/// Bytes per value in addition to the value itself: an offset, or a name with quotes.
const CELL_BYTES: usize = 8;

/// Maximum sizes of an item's values in the columns of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widths {
    /// Maximum bytes of all values of an item.
    row: usize,
    /// Maximum bytes of an item's values in one column.
    cell: usize,
    tasks: usize,
}

impl Widths {
    /// Returns the widths of the columns with these names, and of this number of tasks.
    ///
    /// # Errors
    /// `Invalid` for an unknown column.
    pub fn of(columns: &Stacked, requested: &[String], tasks: usize) -> Result<Self> {
        let mut widths = Widths { tasks, ..Widths::default() };
        for name in requested {
            let bytes = CELL_BYTES + columns.cell_bytes(columns.first().number(name)?);
            widths.row += bytes + name.len();
            widths.cell = widths.cell.max(bytes);
        }
        Ok(widths)
    }

    /// Combines the widths of two answers that are sent as one.
    pub fn or(self, other: Widths) -> Self {
        Widths { row: self.row.max(other.row), cell: self.cell.max(other.cell), tasks: self.tasks.max(other.tasks) }
    }

    /// Returns the maximum bytes for writing this number of items as text.
    pub fn as_text(self, items: usize) -> usize {
        let all = items.saturating_mul(ITEM_BYTES + TASK_BYTES * self.tasks + ESCAPED * self.row);
        let cell = ESCAPED * self.cell;
        let pieces = if cell > PIECE_END_BYTES / 2 { GROWN_PIECES } else { PIECES };
        pieces * all.min(PIECE_BYTES + PIECE_END_BYTES + cell)
    }

    /// Returns the maximum bytes for writing this number of items as Arrow.
    pub fn as_arrow(self, items: usize) -> usize {
        let beside = items.min(ROWS_MAX) * (SCORES_BYTES + size_of::<f32>() * self.tasks);
        BATCH_COPIES * (beside + items.saturating_mul(self.row).min(BATCH_BYTES + self.row))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::inference::STEP_VALUES;
    use crate::{ArrowReply, Entry, InferenceSizer, Reply, Served, inference};
    use sterling_core::quota::{Flow, Memory, Quota};
    use sterling_core::request::{Answer, Content, Ranked};
    use sterling_core::units::{ItemId, Slot};
    use sterling_index::columns::{Columns, ItemColumn, ItemValues, encode};
    use sterling_storage::files::{TensorFile, Tensors};

    /// Maximum bytes of an Arrow stream without its values.
    const METADATA_BYTES: usize = 16 << 10;

    fn text(length: usize) -> String {
        // A sixth of the text is six times as long in JSON.
        "\u{7}lorem".chars().cycle().take(length).collect()
    }

    /// Returns columns of texts with these lengths; the second has several per item.
    fn columns(lengths: &[usize]) -> Columns {
        let count = lengths.len() as u32;
        let list = [
            ItemColumn {
                name: "one".into(),
                filter: false,
                values: ItemValues::Texts {
                    offsets: (0..=count).collect(),
                    values: lengths.iter().map(|&length| text(length)).collect(),
                },
            },
            ItemColumn {
                name: "several".into(),
                filter: false,
                values: ItemValues::Texts {
                    offsets: (0..=count).map(|n| 2 * n).collect(),
                    values: lengths.iter().flat_map(|&length| [text(length / 2), format!("{length}")]).collect(),
                },
            },
            ItemColumn {
                name: "numbers".into(),
                filter: false,
                values: ItemValues::Integers {
                    offsets: lengths
                        .iter()
                        .scan(0, |end, length| {
                            *end += *length as u32 % 3000;
                            Some(*end)
                        })
                        .fold(vec![0], |mut ends, end| {
                            ends.push(end);
                            ends
                        }),
                    values: lengths
                        .iter()
                        .flat_map(|length| (0..*length as i64 % 3000).map(|n| i64::MIN + n))
                        .collect(),
                },
            },
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("columns.safetensors");
        let mut file = TensorFile::new();
        encode(&list, &(0..count).collect::<Vec<_>>(), &mut file).unwrap();
        file.write(&path).unwrap();
        Columns::open(&Tensors::open(&path).unwrap(), lengths.len()).unwrap()
    }

    fn answer(count: usize) -> Answer {
        let numbers = |of: f32| (0..count).map(|n| n as f32 * of).collect::<Vec<f32>>();
        let ranked = Ranked {
            slots: (0..count as u32).map(Slot).collect(),
            ids: (0..count as i64).map(ItemId).collect(),
            scores: numbers(-1.5),
            similarities: numbers(0.25),
            tasks: numbers(0.125),
            unknown: Vec::new(),
            undefined: 0,
        };
        Answer { content: Content::Items(ranked), degraded_rows: 0, explain: None }
    }

    fn served() -> Served {
        let (positions, missing) = (Vec::new(), Vec::new());
        Served { model: "m".into(), version: 1, digest: "a".into(), coverage: 1.0, position: 0, positions, missing }
    }

    fn memory() -> Memory {
        Quota::new("answer", 1 << 30).hold(Flow::default(), 0).unwrap()
    }

    /// Joins chunks, and checks that none is longer than `most`.
    fn joined(pieces: impl Iterator<Item = Vec<u8>>, most: usize) -> Vec<u8> {
        pieces
            .flat_map(|piece| {
                assert!(piece.len() <= most, "a piece of {} bytes, expected at most {most}", piece.len());
                piece
            })
            .collect()
    }

    /// Returns the maximum memory of building the chunks, if at most two exist at once.
    fn taken<P>(pieces: impl Iterator<Item = P>) -> usize {
        let mut sent = None;
        let used = allocation_counter::measure(|| pieces.for_each(|piece| drop(sent.replace(piece))));
        drop(sent);
        used.bytes_max as usize
    }

    #[test]
    fn a_list_as_arrow_takes_no_more_than_its_rows() {
        let columns = columns(&[1]);
        let entries = || [2047, 2047, 2].map(|k| Entry::items(answer(k), ["task"], &columns, &[]).unwrap()).to_vec();
        let widths = Widths::of(&(&columns).into(), &[], 1).unwrap();
        let stream = ArrowReply::new(Reply::many(served(), entries()), "id", &memory()).unwrap();
        assert!(taken(stream.map(Result::unwrap)) <= widths.as_arrow(4096) + BATCH_COPIES * METADATA_BYTES);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn no_form_holds_more_than_was_set_aside(
            lengths in prop::collection::vec(prop_oneof![3 => 0usize..300, 1 => 0usize..=65_536], 1..60),
            k in 1usize..60, picked in 0usize..8,
        ) {
            let columns = columns(&lengths);
            let k = k.min(lengths.len());
            let names = ["one", "several", "numbers"].into_iter().enumerate();
            let requested: Vec<String> = names.filter(|(n, _)| picked >> n & 1 == 1).map(|(_, name)| name.into()).collect();
            let widths = Widths::of(&(&columns).into(), &requested, 1).unwrap();
            let entry = || Entry::items(answer(k), ["task"], &columns, &requested).unwrap();
            let piece = widths.as_text(k) / PIECES;
            let spare = 16 << 10;
            let head = 1024;
            let rows = joined(Reply::one(served(), entry()), piece + head);
            let rows: Value = serde_json::from_slice(&rows).unwrap();
            prop_assert_eq!(rows["items"].as_array().unwrap().len(), k);
            prop_assert!(taken(Reply::one(served(), entry())) <= widths.as_text(k) + spare);
            let stream = ArrowReply::new(Reply::one(served(), entry()), "id", &memory()).unwrap();
            prop_assert!(taken(stream.map(Result::unwrap)) <= widths.as_arrow(k) + BATCH_COPIES * METADATA_BYTES);
            let table = entry().as_table(&memory()).unwrap();
            prop_assert!(taken(Reply::one(served(), table.clone())) <= widths.as_text(k) + spare);
            let table: Value = serde_json::from_slice(&joined(Reply::one(served(), table), piece + head)).unwrap();
            // As in a router: the written data has the announced size and the same contents.
            let written_memory = memory();
            let (ranked, written) = entry().written(&written_memory).unwrap();
            prop_assert!(written_memory.bytes() as usize >= 3 * written.text.len());
            let routed = || Entry::gathered(ranked.clone(), written.clone(), None, 0);
            let gathered = joined(Reply::one(served(), routed()), PIECE_BYTES + PIECE_END_BYTES);
            prop_assert_eq!(serde_json::from_slice::<Value>(&gathered).unwrap(), rows.clone());
            let read = routed().as_table(&memory()).unwrap();
            let read: Value = serde_json::from_slice(&joined(Reply::one(served(), read), piece + head)).unwrap();
            for name in &requested {
                prop_assert_eq!(&read["table"]["columns"][name], &table["table"]["columns"][name]);
                let of_rows = rows["items"].as_array().unwrap().iter().map(|item| item["columns"][name].clone());
                prop_assert_eq!(&table["table"]["columns"][name], &Value::from(of_rows.collect::<Vec<_>>()));
            }
            let batch = widths.as_arrow(k) / BATCH_COPIES + METADATA_BYTES;
            for entry in [entry(), routed()] {
                let stream = ArrowReply::new(Reply::one(served(), entry), "id", &memory()).unwrap();
                let stream = joined(stream.map(Result::unwrap), batch);
                let reader = arrow_ipc::reader::StreamReader::try_new(std::io::Cursor::new(stream), None).unwrap();
                prop_assert_eq!(reader.map(|batch| batch.unwrap().num_rows()).sum::<usize>(), k);
            }
            for is_binary in [false, true] {
                let names = requested.iter().map(|name| format!("columns.{name}")).chain(["ids".into(), "tasks.task".into()]);
                let outputs: Vec<Value> =
                    names.map(|name| json!({"name": name, "parameters": {"binary_data": is_binary}})).collect();
                let input = json!({"name": "vector", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]});
                let body = json!({"inputs": [input], "outputs": outputs}).to_string();
                let call = inference("m", body.as_bytes(), None, &BTreeSet::new()).unwrap();
                let fewer = Entry::items(answer(k / 2), ["task"], &columns, &requested).unwrap();
                let sized = |entries| {
                    let mut sizer = InferenceSizer::new(&call, &served(), entries).unwrap();
                    let mut steps = std::iter::from_fn(|| Some(sizer.step())).enumerate();
                    let (steps, reply) = steps.find_map(|(n, reply)| Some((n, reply?))).unwrap();
                    let values = if is_binary { requested.len() * 2 * k } else { 0 };
                    assert!(steps * STEP_VALUES >= values, "{values} values in {steps} steps");
                    reply
                };
                let reply = sized(vec![entry(), fewer]);
                let header = reply.header_bytes();
                let most = widths.as_text(2 * k).max(2 * PIECE_BYTES);
                prop_assert!(taken(sized(vec![entry(), entry()])) <= most + spare);
                prop_assert_eq!(header.is_some(), is_binary);
                let bytes = joined(reply, most / PIECES + head);
                let (text, rest) = bytes.split_at(header.unwrap_or(bytes.len()));
                let reported: Value = serde_json::from_slice(text).unwrap();
                let sizes = reported["outputs"].as_array().unwrap().iter().map(|o| o["parameters"]["binary_data_size"].as_u64());
                prop_assert_eq!(sizes.map(|size| size.unwrap_or(0)).sum::<u64>(), rest.len() as u64);
                let values = |o: &Value| o["data"].as_array().map_or(0, Vec::len);
                if !is_binary {
                    prop_assert!(reported["outputs"].as_array().unwrap().iter().all(|output| values(output) == 2 * k));
                }
            }
        }
    }
}
