//! A unit: one thread reads, all others run passes, one writes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};

use super::job::JobFolder;
use super::output::{Output, Problem, Scored};
use super::rows::{self, Chunk, Defaults};
use crate::error::{Error, Result};
use crate::pass::{self, Cpu, Prepared};
use crate::registry::is_passing;
use crate::request::{Answer, Content, Ranked, Request};
use crate::tower::Threads;
use crate::view::View;

/// Chunks under way for each thread that runs passes: those that are read, run, and wait for an earlier one to be written.
const CHUNKS_A_THREAD: usize = 4;

/// What became of the rows of a job. Rows in are rows scored and problems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows of the input files.
    pub rows: u64,
    /// Rows with recommendations.
    pub scored: u64,
    /// Rows without, by the kind of the error.
    pub problems: BTreeMap<String, u64>,
}

impl Counts {
    /// Adds those of another unit.
    pub fn add(&mut self, other: &Counts) {
        self.rows += other.rows;
        self.scored += other.scored;
        for (code, count) in &other.problems {
            *self.problems.entry(code.clone()).or_default() += count;
        }
    }

    /// The counts of a unit, from its files.
    pub(super) fn read(output: &Path, problems: &Path) -> Result<Self> {
        let open = |path: &Path| File::open(path).map_err(|e| Error::io(path.display(), e));
        let corrupt = |path: &Path, e: &dyn std::fmt::Display| Error::corrupt(format!("{}: {e}", path.display()));
        let reader = ParquetRecordBatchReaderBuilder::try_new(open(output)?).map_err(|e| corrupt(output, &e))?;
        let scored = reader.metadata().file_metadata().num_rows() as u64;
        let mut counts = Counts { rows: scored, scored, ..Counts::default() };
        for line in BufReader::new(open(problems)?).lines() {
            let line = line.map_err(|e| Error::io(problems.display(), e))?;
            let problem: Problem = serde_json::from_str(&line).map_err(|e| corrupt(problems, &e))?;
            *counts.problems.entry(problem.code).or_default() += 1;
            counts.rows += 1;
        }
        Ok(counts)
    }
}

/// Scores units over one view.
#[derive(Debug)]
pub struct Scorer {
    view: Arc<View>,
    defaults: Defaults,
    /// The item columns that are told of all rows.
    columns: Vec<String>,
    threads: usize,
}

/// What a worker made of a chunk.
struct Done {
    number: usize,
    bytes: u64,
    rows: Result<Vec<Scored>>,
}

impl Scorer {
    /// A scorer with so many threads that run passes.
    ///
    /// # Errors
    /// What is wrong with the defaults for this model.
    pub fn new(view: Arc<View>, defaults: Defaults, threads: usize) -> Result<Self> {
        let columns = defaults.columns()?;
        columns.iter().try_for_each(|name| view.column(name).map(drop)).map_err(|e| e.within("request"))?;
        Ok(Scorer { view, defaults, columns, threads: threads.max(1) })
    }

    /// Makes the output of a unit. `told` gets the bytes of the input that are done.
    ///
    /// # Errors
    /// What is wrong with the files; what time may mend, such as a cluster that is away, is an error and no problem of a row. The
    /// output is then not there.
    pub fn score(&self, folder: &JobFolder, unit: usize, told: &(dyn Fn(u64) + Sync)) -> Result<Counts> {
        let (output, problems) = (folder.output(unit), folder.problems(unit));
        let input = &folder.job().units[unit].input;
        let mut out = Output::create(&output, &problems, &self.view, &self.columns)?;
        let under_way = self.threads * CHUNKS_A_THREAD;
        let (chunk_sender, chunks) = bounded::<Chunk>(self.threads);
        let (done_sender, done) = bounded::<Done>(self.threads);
        let (token_sender, tokens) = bounded::<()>(under_way);
        for _ in 0..under_way {
            let _ = token_sender.try_send(());
        }
        thread::scope(|scope| {
            let take = move |chunk: Chunk| tokens.recv().is_ok() && chunk_sender.send(chunk).is_ok();
            let reader = scope.spawn(move || rows::read(input, take));
            for _ in 0..self.threads {
                let (chunks, done_sender) = (chunks.clone(), done_sender.clone());
                scope.spawn(move || self.work(&chunks, &done_sender));
            }
            drop((done_sender, chunks));
            let written = write(&mut out, done, token_sender, told);
            let broken = || Err(Error::internal("the thread that reads broke"));
            let read = reader.join().unwrap_or_else(|_| broken());
            written.and(read)
        })?;
        out.finish()?;
        Counts::read(&output, &problems)
    }

    fn work(&self, chunks: &Receiver<Chunk>, done: &Sender<Done>) {
        let threads = Threads::new(1);
        let mut pass = Cpu::new(threads.clone());
        for chunk in chunks {
            let (number, bytes) = (chunk.number, chunk.bytes);
            let rows = self.chunk(chunk, &mut pass, &threads);
            if done.send(Done { number, bytes, rows }).is_err() {
                return;
            }
        }
    }

    /// What becomes of the rows of a chunk.
    fn chunk(&self, chunk: Chunk, pass: &mut Cpu, threads: &Threads) -> Result<Vec<Scored>> {
        let (mut scored, mut prepared): (Vec<Option<Scored>>, Vec<Prepared>) = Default::default();
        let mut places = Vec::new();
        for (n, line) in chunk.lines.iter().enumerate() {
            let row = chunk.first_row + n as u64;
            let (id, request) = self.defaults.request(line);
            match request.and_then(|request| pass::prepare(&self.view, Request::Retrieve(request))) {
                Ok(ready) => {
                    places.push((n, row, id));
                    prepared.push(ready);
                    scored.push(None);
                }
                Err(e) => scored.push(Some(Err(problem(row, id, &e)?))),
            }
        }
        pass::fetch(&mut prepared.iter_mut().filter(|p| p.needs_fetch()).collect::<Vec<_>>(), None);
        let ran = catch_unwind(AssertUnwindSafe(|| pass::run(pass, &prepared, None)));
        let answers = ran.unwrap_or_else(|_| {
            // One of them broke it: each alone shows which.
            *pass = Cpu::new(threads.clone());
            let alone = |one: &Prepared| {
                let ran = catch_unwind(AssertUnwindSafe(|| pass::run(pass, std::slice::from_ref(one), None).pop()));
                let broken = || Some(Err(Error::internal("the pass broke on this row; this is a defect")));
                ran.unwrap_or_else(|_| {
                    *pass = Cpu::new(threads.clone());
                    broken()
                })
            };
            let unanswered = || Err(Error::internal("the pass left a row unanswered"));
            prepared.iter().map(alone).map(|answer| answer.unwrap_or_else(unanswered)).collect()
        });
        for ((n, row, id), answer) in places.into_iter().zip(answers) {
            scored[n] = Some(match answer.and_then(items) {
                Ok(ranked) => Ok((id.unwrap_or_default(), ranked)),
                Err(e) => Err(problem(row, id, &e)?),
            });
        }
        Ok(scored.into_iter().flatten().collect())
    }
}

fn items(answer: Answer) -> Result<Ranked> {
    let Content::Items(ranked) = answer.content else {
        return Err(Error::internal("a retrieval was answered with something else"));
    };
    let mut numbers = ranked.scores.iter().chain(&ranked.similarities).chain(&ranked.tasks);
    match numbers.find(|x| !x.is_finite()) {
        Some(x) => Err(Error::internal(format!("an item is worth {x}, expected a finite number"))),
        None => Ok(ranked),
    }
}

/// What is wrong with a row. What time may mend is wrong with the unit.
fn problem(row: u64, id: Option<i64>, error: &Error) -> Result<Problem> {
    match is_passing(error.kind()) {
        true => Err(error.again().within(format!("row {}", row + 1))),
        false => Ok(Problem { row, id, code: error.kind().name().into(), reason: error.to_string() }),
    }
}

/// Writes chunks in their order, and gives a token back for each.
fn write(out: &mut Output, done: Receiver<Done>, tokens: Sender<()>, told: &dyn Fn(u64)) -> Result<()> {
    let (mut early, mut next) = (BTreeMap::new(), 0);
    for one in done {
        early.insert(one.number, one);
        while let Some(Done { rows, bytes, .. }) = early.remove(&next) {
            out.write(rows?)?;
            told(bytes);
            // One whose reader is done needs none any more.
            let _ = tokens.try_send(());
            next += 1;
        }
    }
    match early.is_empty() {
        true => Ok(()),
        false => Err(Error::internal("a thread that runs passes broke")),
    }
}
