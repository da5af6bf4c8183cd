//! Recommendations as a Parquet file, and the rows that have none as JSON lines beside it.
//!
//! | column | holds |
//! |---|---|
//! | `id` | the row's id |
//! | `items` `scores` `similarities` | lists, the best first: ids, the value model's scores, retrieval scores |
//! | `task_NAME` | a list of each task's scores |
//! | `column_NAME` | a list of each item column that was asked for, as texts; several values as a JSON list |

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Builder, Int64Array, Int64Builder, ListBuilder, RecordBatch, StringBuilder};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};

use crate::columns::{Cell, Stacked};
use crate::error::{Error, Result};
use crate::files;
use crate::request::Ranked;
use crate::view::View;

/// Bytes of encoded rows after which they become a row group.
const GROUP_BYTES: usize = 32 << 20;

/// A row without recommendations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Problem {
    /// Its row of the input, from 0, empty lines not counted.
    pub(super) row: u64,
    /// Its id, where it could be read.
    pub(super) id: Option<i64>,
    /// The kind of the error.
    pub(super) code: String,
    /// What came and what was expected.
    pub(super) reason: String,
}

/// What became of a row.
pub(super) type Scored = std::result::Result<(i64, Ranked), Problem>;

/// The files of a unit while they are written.
pub(super) struct Output {
    writer: ArrowWriter<File>,
    problems: BufWriter<File>,
    /// The names that the files get, and those that they have until they are whole.
    parts: [(PathBuf, PathBuf); 2],
    tasks: Vec<String>,
    columns: Stacked,
    /// The names and numbers of the item columns that are told.
    picked: Vec<(String, usize)>,
}

impl Output {
    /// Begins the files of a unit.
    pub(super) fn create(output: &Path, problems: &Path, view: &View, asked: &[String]) -> Result<Self> {
        let columns = view.columns();
        let picked = asked.iter().map(|name| Ok((name.clone(), columns.first().number(name)?)));
        let picked = picked.collect::<Result<Vec<_>>>()?;
        let tasks: Vec<String> = view.main().package.spec.tasks.iter().map(|task| task.name.clone()).collect();
        let temporary = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            path.with_file_name(format!(".{name}.{}", std::process::id()))
        };
        let parts = [output, problems].map(|path| (path.to_owned(), temporary(path)));
        let create = |n: usize| File::create(&parts[n].1).map_err(|e| Error::io(parts[n].1.display(), e));
        let schema = batch(&tasks, &columns, &picked, &[])?.schema();
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_max_row_group_row_count(Some(usize::MAX))
            .build();
        let writer = ArrowWriter::try_new(create(0)?, schema, Some(properties)).map_err(|e| wrong(&parts[0].0, &e))?;
        let problems = BufWriter::new(create(1)?);
        Ok(Output { writer, problems, parts, tasks, columns, picked })
    }

    /// Adds rows, in their order.
    pub(super) fn write(&mut self, rows: Vec<Scored>) -> Result<()> {
        let (mut scored, mut of_problems) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in rows {
            match row {
                Ok(row) => scored.push(row),
                Err(problem) => {
                    // Neither a `Vec` nor the type refuses anything.
                    let _ = serde_json::to_writer(&mut of_problems, &problem);
                    of_problems.push(b'\n');
                }
            }
        }
        self.problems.write_all(&of_problems).map_err(|e| Error::io(self.parts[1].1.display(), e))?;
        let written = batch(&self.tasks, &self.columns, &self.picked, &scored)?;
        let result = self.writer.write(&written).and_then(|()| match self.writer.in_progress_size() > GROUP_BYTES {
            true => self.writer.flush(),
            false => Ok(()),
        });
        result.map_err(|e| wrong(&self.parts[0].0, &e))
    }

    /// Gives the files their names, the one of the recommendations last.
    pub(super) fn finish(mut self) -> Result<()> {
        let [(output, _), (problems, _)] = &self.parts;
        self.writer.finish().map_err(|e| wrong(output, &e))?;
        let synced = self.writer.inner().sync_all();
        synced.map_err(|e| Error::io(output.display(), e))?;
        let synced = self.problems.flush().and_then(|()| self.problems.get_ref().sync_all());
        synced.map_err(|e| Error::io(problems.display(), e))?;
        for (path, temporary) in self.parts.iter().rev() {
            fs::rename(temporary, path).map_err(|e| Error::io(path.display(), e))?;
        }
        let folder = output.parent().unwrap_or(Path::new("."));
        files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Of files that are whole nothing is left under these names.
        self.parts.iter().for_each(|(_, temporary)| drop(fs::remove_file(temporary)));
    }
}

fn wrong(path: &Path, e: &dyn std::fmt::Display) -> Error {
    Error::new(crate::error::Kind::Io, format!("{}: {e}", path.display()))
}

/// Rows as columns.
fn batch(
    tasks: &[String],
    columns: &Stacked,
    picked: &[(String, usize)],
    rows: &[(i64, Ranked)],
) -> Result<RecordBatch> {
    let floats = |of: &dyn Fn(&Ranked) -> Vec<f32>| -> ArrayRef {
        let mut list = ListBuilder::new(Float32Builder::new());
        for (_, ranked) in rows {
            list.values().append_slice(&of(ranked));
            list.append(true);
        }
        Arc::new(list.finish())
    };
    let mut items = ListBuilder::new(Int64Builder::new());
    for (_, ranked) in rows {
        ranked.ids.iter().for_each(|id| items.values().append_value(id.0));
        items.append(true);
    }
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|(id, _)| *id)));
    let mut all: Vec<(String, ArrayRef)> = vec![
        ("id".into(), ids),
        ("items".into(), Arc::new(items.finish())),
        ("scores".into(), floats(&|ranked| ranked.scores.clone())),
        ("similarities".into(), floats(&|ranked| ranked.similarities.clone())),
    ];
    for (n, task) in tasks.iter().enumerate() {
        let of_task = |ranked: &Ranked| ranked.tasks[n * ranked.ids.len()..][..ranked.ids.len()].to_vec();
        all.push((format!("task_{task}"), floats(&of_task)));
    }
    for (name, number) in picked {
        let mut list = ListBuilder::new(StringBuilder::new());
        for (_, ranked) in rows {
            ranked.slots.iter().for_each(|&slot| list.values().append_option(text(columns.cell(*number, slot))));
            list.append(true);
        }
        all.push((format!("column_{name}"), Arc::new(list.finish())));
    }
    RecordBatch::try_from_iter(all).map_err(|e| Error::internal(format!("recommendations: {e}")))
}

/// A cell as a text; none where it is missing.
fn text(cell: Cell<'_>) -> Option<String> {
    match cell {
        Cell::Missing => None,
        Cell::Integer(x) => Some(x.to_string()),
        Cell::Float(x) => Some(x.to_string()),
        Cell::Text(text) => Some(text.to_owned()),
        Cell::Integers(many) => serde_json::to_string(&many).ok(),
        Cell::Texts(many) => serde_json::to_string(&many).ok(),
    }
}
