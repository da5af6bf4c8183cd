//! From a chunk of rows to their answers.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::counts::Problem;
use super::defaults::Defaults;
use super::output::{Layout, Scored};
use super::rows::Chunk;
use crate::error::{Error, Result};
use crate::pass::{self, Cpu, Prepared};
use crate::registry::is_passing;
use crate::request::{Answer, Content, Ranked, Request};
use crate::tower::Threads;
use crate::view::View;

/// Memory of the requests of a chunk that run together, as the pass counts it: those of many candidates run in parts.
const BATCH_BYTES: usize = 64 << 20;

/// One of the threads that run passes.
pub(super) struct Worker<'a> {
    view: &'a Arc<View>,
    defaults: &'a Defaults,
    layout: &'a Layout,
    threads: Threads,
    pass: Cpu,
}

/// A row that was understood.
struct Row {
    number: u64,
    id: i64,
    prepared: Prepared,
}

/// What becomes of rows, in their order.
#[derive(Default)]
struct Outcome {
    answers: Vec<(i64, Ranked)>,
    problems: Vec<Problem>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(view: &'a Arc<View>, defaults: &'a Defaults, layout: &'a Layout) -> Self {
        let threads = Threads::new(1);
        Worker { view, defaults, layout, pass: Cpu::new(threads.clone()), threads }
    }

    /// What becomes of the rows of a chunk.
    ///
    /// # Errors
    /// What time may mend, such as a cluster that is away; that is no problem of a row.
    pub(super) fn score(&mut self, chunk: Chunk) -> Result<Scored> {
        let (first, rows) = (chunk.first_row + 1, chunk.lines.len() as u64);
        let scored = self.guarded(|worker| {
            let Outcome { answers, mut problems } = worker.outcome(chunk)?;
            // Rows that cannot be read are known before those that ran.
            problems.sort_by_key(|problem| problem.row);
            Ok(Scored { answers: worker.layout.batch(&answers)?, problems })
        });
        let scored = scored.unwrap_or_else(|why| Err(broken(&*why)));
        scored.map_err(|e| e.within(format!("rows {first} to {}", first + rows - 1)))
    }

    /// Runs something; what a panic leaves behind is let go of.
    fn guarded<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> std::result::Result<T, Box<dyn Any + Send>> {
        let ran = catch_unwind(AssertUnwindSafe(|| run(self)));
        if ran.is_err() {
            self.pass = Cpu::new(self.threads.clone());
        }
        ran
    }

    fn outcome(&mut self, chunk: Chunk) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let (mut ready, mut bytes) = (Vec::new(), 0);
        for (number, line) in (chunk.first_row..).zip(chunk.lines) {
            let (id, request) = match line {
                Ok(line) => self.defaults.request(&line),
                Err(e) => (None, Err(e)),
            };
            let prepared = request.and_then(|request| pass::prepare(self.view, Request::Retrieve(request)));
            match (id, prepared) {
                (Some(id), Ok(prepared)) => {
                    if bytes + prepared.cost().memory_bytes > BATCH_BYTES {
                        self.run(std::mem::take(&mut ready), &mut outcome)?;
                        bytes = 0;
                    }
                    bytes += prepared.cost().memory_bytes;
                    ready.push(Row { number, id, prepared });
                }
                (id, Err(e)) => outcome.problems.push(problem(number, id, &e)?),
                (None, Ok(_)) => return Err(Error::internal("a row without an id was understood")),
            }
        }
        self.run(ready, &mut outcome)?;
        Ok(outcome)
    }

    fn run(&mut self, rows: Vec<Row>, outcome: &mut Outcome) -> Result<()> {
        let (rows, mut prepared): (Vec<(u64, i64)>, Vec<Prepared>) =
            rows.into_iter().map(|row| ((row.number, row.id), row.prepared)).unzip();
        pass::fetch(&mut prepared.iter_mut().filter(|p| p.needs_fetch()).collect::<Vec<_>>(), None);
        let answers = match self.guarded(|worker| pass::run(&mut worker.pass, &prepared, None)) {
            Ok(answers) => answers,
            // One of them broke it: each alone shows which.
            Err(_) => prepared.iter().map(|one| self.alone(one)).collect(),
        };
        for ((number, id), answer) in rows.into_iter().zip(answers) {
            match answer.and_then(items) {
                Ok(ranked) => outcome.answers.push((id, ranked)),
                Err(e) => outcome.problems.push(problem(number, Some(id), &e)?),
            }
        }
        Ok(())
    }

    fn alone(&mut self, one: &Prepared) -> Result<Answer> {
        let ran = self.guarded(|worker| pass::run(&mut worker.pass, std::slice::from_ref(one), None).pop());
        match ran {
            Ok(answer) => answer.unwrap_or_else(|| Err(Error::internal("the pass left a row unanswered"))),
            Err(why) => Err(broken(&*why)),
        }
    }
}

fn broken(why: &(dyn Any + Send)) -> Error {
    let text = why.downcast_ref::<&str>().copied().or_else(|| why.downcast_ref::<String>().map(String::as_str));
    Error::internal(format!("the pass broke, which is a defect of this program: {}", text.unwrap_or("no reason")))
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
