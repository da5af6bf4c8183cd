//! Output of a unit: answers as a Parquet file, and problems, if any, as a JSON lines file.
//!
//! | column | holds |
//! |---|---|
//! | `id` | the row's id |
//! | `items` `scores` `similarities` | lists, best first: ids, the value model's scores, retrieval scores |
//! | `task_NAME` | list of the scores of a task |
//! | `column_NAME` | list of the values of a requested item column, as text; several values of an item as a JSON list |
//! | `unknown` | ranking only: list of the requested items that the model does not have |
//! | `vector` | items only, in place of all others: embedding from the item tower |

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, Int64Builder, ListBuilder, StringBuilder};
use arrow_array::{ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, SchemaRef};
use parquet::arrow::{ArrowSchemaConverter, ArrowWriter};
use parquet::basic::{Compression, Type, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

use super::counts::{ORIGIN, PROBLEMS, Problem};
use super::job::JobSettings;
use super::questions::{Questions, Template};
use crate::jobs::JobFolder;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::Ranked;
use sterling_core::units::ItemId;
use sterling_index::columns::{Cell, Stacked};
use sterling_serving::view::View;
use sterling_storage::files;

/// Encoded bytes after which a row group is closed.
const GROUP_BYTES: usize = 32 << 20;
/// Text bytes of one column after which a batch ends. Arrow addresses the texts of a column with 31 bits.
const TEXT_BYTES: usize = 64 << 20;

/// Answers of consecutive rows in their order, and the problems of rows without an answer.
pub(super) struct Scored {
    /// Answers of as many first rows as fit one batch; of all rows if their texts are short.
    pub(super) first: RecordBatch,
    /// Answers of the other rows, converted to columns when they are written.
    pub(super) rest: VecDeque<(i64, RowAnswer)>,
    pub(super) problems: Vec<Problem>,
}

/// Answer to one row.
pub(super) enum RowAnswer {
    Items(Ranked),
    /// Embedding of an item, `[D]`.
    Vector(Vec<f32>),
}

/// Columns of a job's outputs, and the source of their values.
pub(super) enum Layout {
    Items {
        tasks: Vec<String>,
        columns: Stacked,
        /// Names and column numbers of the requested item columns.
        picked: Vec<(String, usize)>,
        /// True if requests name items, because the model may lack some of these.
        unknown: bool,
    },
    Vectors {
        width: usize,
    },
}

impl Layout {
    /// Returns the layout of the answers of a view.
    pub(super) fn new(view: &View, questions: &Questions) -> Result<Self> {
        if *questions.template() == Template::Items {
            return match view.main().package.item {
                Some(_) => Ok(Layout::Vectors { width: view.dimension() }),
                None => Err(Error::unsupported("items: this model has no item tower")),
            };
        }
        let columns = view.columns();
        let picked = questions.columns().iter().map(|name| Ok((name.clone(), columns.first().number(name)?)));
        let picked = picked.collect::<Result<Vec<_>>>()?;
        let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.clone()).collect();
        Ok(Layout::Items { tasks, columns, picked, unknown: matches!(questions.template(), Template::Rank(_)) })
    }

    fn schema(&self) -> Result<SchemaRef> {
        Ok(self.batch(&mut VecDeque::new())?.schema())
    }

    /// Returns empty builders of the requested item columns.
    fn texts(&self) -> Vec<Texts<'_>> {
        let Layout::Items { columns, picked, .. } = self else { return Vec::new() };
        let lists = || ListBuilder::new(StringBuilder::new());
        picked.iter().map(|(name, number)| Texts { name, number: *number, columns, lists: lists() }).collect()
    }

    /// Removes the first rows, until the texts of a column reach [`TEXT_BYTES`], and converts them to columns.
    ///
    /// # Errors
    /// `TooCostly` if the texts of one row and column take more bytes than Arrow can address.
    pub(super) fn batch(&self, rows: &mut VecDeque<(i64, RowAnswer)>) -> Result<RecordBatch> {
        let (mut ids, mut ranked, mut vectors) = (Vec::new(), Vec::new(), Vec::new());
        let mut texts = self.texts();
        while texts.iter().all(|texts| texts.bytes() < TEXT_BYTES)
            && let Some((id, answer)) = rows.pop_front()
        {
            ids.push(id);
            match answer {
                RowAnswer::Items(items) => {
                    let appended = texts.iter_mut().try_for_each(|texts| texts.append(&items));
                    appended.map_err(|e| e.within(format!("id {id}")))?;
                    ranked.push(items);
                }
                RowAnswer::Vector(vector) => vectors.extend(vector),
            }
        }
        let mut all: Vec<(String, ArrayRef)> = vec![("id".into(), Arc::new(Int64Array::from(ids)))];
        match self {
            Layout::Items { tasks, unknown, .. } => {
                all.extend(of_items(&ranked, tasks));
                all.extend(texts.into_iter().map(Texts::finish));
                if *unknown {
                    all.push(("unknown".into(), lists(&ranked, |ranked| &ranked.unknown)));
                }
            }
            Layout::Vectors { width } => {
                let field = Arc::new(Field::new("item", DataType::Float32, false));
                let numbers = Arc::new(Float32Array::from(vectors));
                let vectors = i32::try_from(*width).map_err(|e| e.to_string()).and_then(|width| {
                    FixedSizeListArray::try_new(field, width, numbers, None).map_err(|e| e.to_string())
                });
                all.push(("vector".into(), Arc::new(vectors.map_err(|e| Error::internal(format!("vectors: {e}")))?)));
            }
        }
        RecordBatch::try_from_iter(all).map_err(|e| Error::internal(format!("answers: {e}")))
    }
}

/// Builds the columns of item ids, scores and task scores.
fn of_items(ranked: &[Ranked], tasks: &[String]) -> Vec<(String, ArrayRef)> {
    let floats = |of: &dyn for<'a> Fn(&'a Ranked) -> &'a [f32]| -> ArrayRef {
        let mut list = ListBuilder::new(Float32Builder::new());
        for ranked in ranked {
            list.values().append_slice(of(ranked));
            list.append(true);
        }
        Arc::new(list.finish())
    };
    let mut all: Vec<(String, ArrayRef)> = vec![
        ("items".into(), lists(ranked, |ranked| &ranked.ids)),
        ("scores".into(), floats(&|ranked| &ranked.scores)),
        ("similarities".into(), floats(&|ranked| &ranked.similarities)),
    ];
    for (n, task) in tasks.iter().enumerate() {
        let of_task = |ranked: &Ranked| n * ranked.ids.len()..(n + 1) * ranked.ids.len();
        all.push((format!("task_{task}"), floats(&|ranked| &ranked.tasks[of_task(ranked)])));
    }
    all
}

fn lists(ranked: &[Ranked], of: impl for<'a> Fn(&'a Ranked) -> &'a [ItemId]) -> ArrayRef {
    let mut list = ListBuilder::new(Int64Builder::new());
    for ranked in ranked {
        of(ranked).iter().for_each(|id| list.values().append_value(id.0));
        list.append(true);
    }
    Arc::new(list.finish())
}

/// Values of a requested item column in a batch, as texts.
struct Texts<'a> {
    name: &'a str,
    number: usize,
    columns: &'a Stacked,
    lists: ListBuilder<StringBuilder>,
}

impl Texts<'_> {
    fn bytes(&self) -> usize {
        self.lists.values_ref().values_slice().len()
    }

    /// Appends the values of this column for the results of one row.
    fn append(&mut self, ranked: &Ranked) -> Result<()> {
        for &slot in &ranked.slots {
            let text = text(self.columns.cell(self.number, slot));
            if self.bytes() + text.as_ref().map_or(0, String::len) > i32::MAX as usize {
                return Err(Error::too_costly(format!(
                    "column `{}`: the texts of a batch exceed {} bytes, expected fewer results",
                    self.name,
                    i32::MAX
                )));
            }
            self.lists.values().append_option(text);
        }
        self.lists.append(true);
        Ok(())
    }

    fn finish(mut self) -> (String, ArrayRef) {
        (format!("column_{}", self.name), Arc::new(self.lists.finish()))
    }
}

/// Formats a cell as text; `None` if it is missing.
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

/// Files of a unit while they are written.
pub(super) struct Output {
    writer: ArrowWriter<File>,
    problems: BufWriter<File>,
    problem_count: u64,
    output: Growing,
    of_problems: Growing,
}

/// A file that is written under a temporary name.
struct Growing {
    path: PathBuf,
    temporary: PathBuf,
}

impl Growing {
    fn create(path: PathBuf) -> Result<(Self, File)> {
        let temporary = files::temporary(&path);
        let file = File::create_new(&temporary).map_err(|e| Error::io(temporary.display(), e))?;
        Ok((Growing { path, temporary }, file))
    }

    fn invalid(&self, e: &dyn std::fmt::Display) -> Error {
        Error::new(Kind::Io, format!("{}: {e}", self.path.display()))
    }

    /// Renames the file to its final name.
    fn publish(&self) -> Result<()> {
        match fs::rename(&self.temporary, &self.path) {
            // Another worker completed the same unit, ended the job and removed the temporary files.
            Err(e) if e.kind() == ErrorKind::NotFound && self.path.exists() => Ok(()),
            renamed => renamed.map_err(|e| Error::io(self.path.display(), e)),
        }
    }

    /// Removes an older problem file, whose output file no longer exists.
    fn withdraw(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io(self.path.display(), e)),
            _ => Ok(()),
        }
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        // After a successful rename nothing is left under the temporary name.
        let _ = fs::remove_file(&self.temporary);
    }
}

impl Output {
    /// Creates the temporary files of a unit.
    pub(super) fn create(folder: &JobFolder<JobSettings>, unit: usize, layout: &Layout) -> Result<Self> {
        let (output, file) = Growing::create(folder.output(unit))?;
        let (of_problems, problems) = Growing::create(folder.problems(unit))?;
        let origin = KeyValue::new(ORIGIN.to_owned(), folder.origin(unit)?);
        let schema = layout.schema()?;
        let leaves = ArrowSchemaConverter::new().convert(&schema).map_err(|e| output.invalid(&e))?;
        let mut properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_max_row_group_row_count(Some(usize::MAX))
            .set_key_value_metadata(Some(vec![origin]));
        // Scores rarely repeat: dictionary encoding cost 5 % of the time per row.
        for leaf in leaves.columns().iter().filter(|leaf| leaf.physical_type() == Type::FLOAT) {
            properties = properties.set_column_dictionary_enabled(leaf.path().clone(), false);
        }
        let writer = ArrowWriter::try_new(file, schema, Some(properties.build())).map_err(|e| output.invalid(&e))?;
        Ok(Output { writer, problems: BufWriter::new(problems), problem_count: 0, output, of_problems })
    }

    /// Appends rows in their order.
    pub(super) fn write(&mut self, rows: Scored, layout: &Layout) -> Result<()> {
        let Scored { mut first, mut rest, problems } = rows;
        self.problem_count += problems.len() as u64;
        for problem in &problems {
            let line = serde_json::to_string(problem).map_err(|e| Error::internal(format!("problem: {e}")))?;
            writeln!(self.problems, "{line}").map_err(|e| Error::io(self.of_problems.path.display(), e))?;
        }
        loop {
            self.append(&first)?;
            if rest.is_empty() {
                return Ok(());
            }
            first = layout.batch(&mut rest)?;
        }
    }

    /// Appends a batch, and closes the row group if it is large enough.
    fn append(&mut self, answers: &RecordBatch) -> Result<()> {
        let written = self.writer.write(answers);
        let written = written.and_then(|()| match self.writer.in_progress_size() > GROUP_BYTES {
            true => self.writer.flush(),
            false => Ok(()),
        });
        written.map_err(|e| self.output.invalid(&e))
    }

    /// Renames the files to their final names, the answers after the problems.
    pub(super) fn finish(mut self) -> Result<()> {
        self.writer.append_key_value_metadata(KeyValue::new(PROBLEMS.to_owned(), self.problem_count.to_string()));
        self.writer.finish().map_err(|e| self.output.invalid(&e))?;
        self.writer.inner().sync_all().map_err(|e| self.output.invalid(&e))?;
        let synced = self.problems.flush().and_then(|()| self.problems.get_ref().sync_all());
        synced.map_err(|e| self.of_problems.invalid(&e))?;
        match self.problem_count {
            0 => self.of_problems.withdraw()?,
            _ => self.of_problems.publish()?,
        }
        self.output.publish()?;
        let folder = self.output.path.parent().unwrap_or(Path::new("."));
        files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))
    }
}
