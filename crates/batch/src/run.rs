//! Scoring of a unit: one thread reads rows, several threads run passes, one thread writes answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::counts::Counts;
use super::job::JobSettings;
use super::output::{Layout, Output, Scored};
use super::questions::Questions;
use super::rows::{self, Chunk};
use super::table::check_folders;
use super::worker::Worker;
use crate::jobs::{self, JobFolder, Unit};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_serving::view::View;

/// Maximum number of unwritten chunks per worker thread: read, running, or waiting for an earlier chunk to be written.
const CHUNKS_PER_THREAD: usize = 4;

/// Scores units with one view of a model.
pub struct Scorer {
    view: Arc<View>,
    questions: Questions,
    layout: Layout,
    threads: usize,
}

/// Result of a chunk.
struct Done {
    number: usize,
    bytes: u64,
    rows: Result<Scored>,
}

impl Scorer {
    /// Creates a scorer with this number of worker threads.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported` if the requests do not suit the model.
    pub fn new(view: Arc<View>, questions: Questions, threads: usize) -> Result<Self> {
        let layout = Layout::new(&view, &questions).map_err(|e| e.within("request"))?;
        Ok(Scorer { view, questions, layout, threads: threads.max(1) })
    }

    /// Writes the output of a unit. `reported` is called with the number of input bytes processed up to now.
    ///
    /// # Errors
    /// As [`JobFolder::check`] if the input differs from the job's, or changes while it is read; errors of files.
    /// Transient errors, such as an unreachable cluster, are returned as such and not recorded as problems of a row.
    /// After an error there is no output file.
    pub fn score(
        &self,
        folder: &JobFolder<JobSettings>,
        unit: usize,
        reported: &(dyn Fn(u64) + Sync),
    ) -> Result<Counts> {
        let Unit { input, columns, .. } = &folder.units()[unit];
        check_folders(columns, &self.view.main().package, self.questions.template())
            .map_err(|e| e.within(input.display()))?;
        let unchanged = folder.check(unit)?;
        let mut out = Output::create(folder, unit, &self.layout)?;
        let under_way = self.threads * CHUNKS_PER_THREAD;
        let (chunk_sender, chunks) = bounded::<Chunk>(self.threads);
        let (done_sender, done) = bounded::<Done>(self.threads);
        let (token_sender, tokens) = bounded::<()>(under_way);
        for _ in 0..under_way {
            let _ = token_sender.try_send(());
        }
        thread::scope(|scope| {
            let take = move |chunk: Chunk| tokens.recv().is_ok() && chunk_sender.send(chunk).is_ok();
            let (questions, package) = (&self.questions, &self.view.main().package);
            let reader = tasks::READ.start_in(scope, move || rows::read(input, questions, package, take))?;
            for _ in 0..self.threads {
                let (chunks, done_sender) = (chunks.clone(), done_sender.clone());
                tasks::SCORE.start_in(scope, move || self.work(&chunks, &done_sender))?;
            }
            drop((done_sender, chunks));
            let written = write(&mut out, &self.layout, done, token_sender, reported);
            let broken = |_| Err(Error::internal("the reader thread panicked"));
            let read = reader.join().unwrap_or_else(broken);
            written.and(read)
        })
        .and_then(|()| unchanged.check())
        .map_err(|e| unchanged.check().err().unwrap_or(e).within(input.display()))?;
        out.finish()?;
        Counts::read(&folder.output(unit), &folder.problems(unit), &folder.origin(unit)?)
    }

    /// Scores a unit for a processing engine. Returns `None` if the unit is already done; rejects an input that has changed.
    ///
    /// # Errors
    /// As [`Scorer::score`]; `Invalid` for an unknown unit number.
    pub fn order(&self, folder: &JobFolder<JobSettings>, unit: usize) -> Result<Option<Counts>> {
        let unit = jobs::checked(unit, folder.units().len())?;
        if folder.is_done(unit) {
            return Ok(None);
        }
        self.score(folder, unit, &|_| ()).map(Some)
    }

    fn work(&self, chunks: &Receiver<Chunk>, done: &Sender<Done>) {
        let mut worker = Worker::new(&self.view, &self.questions, &self.layout);
        for chunk in chunks {
            let (number, bytes) = (chunk.number, chunk.bytes);
            let rows = worker.score(chunk);
            if done.send(Done { number, bytes, rows }).is_err() {
                return;
            }
        }
    }
}

/// Writes chunks in order, and sends one token per written chunk to the reader.
fn write(
    out: &mut Output,
    layout: &Layout,
    done: Receiver<Done>,
    tokens: Sender<()>,
    reported: &dyn Fn(u64),
) -> Result<()> {
    let (mut early, mut next) = (BTreeMap::new(), 0);
    for one in done {
        early.insert(one.number, one);
        while let Some(Done { rows, bytes, .. }) = early.remove(&next) {
            out.write(rows?, layout)?;
            reported(bytes);
            // If the reader has finished, nothing receives the token.
            let _ = tokens.try_send(());
            next += 1;
        }
    }
    match early.is_empty() {
        true => Ok(()),
        false => Err(Error::internal("a pass thread panicked")),
    }
}
