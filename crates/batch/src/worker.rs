//! Scoring of a chunk of rows.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::counts::Problem;
use super::output::{Layout, RowAnswer, Scored};
use super::questions::{Question, Questions};
use super::rows::Chunk;
use sterling_core::error::{Error, Result, panic_message};
use sterling_core::limits::COMPONENT_MAX;
use sterling_core::request::{Answer, Content, Ranked};
use sterling_embedding::Lookup;
use sterling_graph::tower::{self, FeatureRow, Pooled, Threads, Tower};
use sterling_serving::pass::{self, Cpu, Prepared};
use sterling_serving::view::View;

/// Memory for the requests that run together; the requests of a chunk that need more run in several batches.
const BATCH_BYTES: usize = 64 << 20;

/// A thread that runs passes.
pub(super) struct Worker<'a> {
    view: &'a Arc<View>,
    questions: &'a Questions,
    layout: &'a Layout,
    threads: Threads,
    pass: Cpu,
    graphs: tower::Scratch,
}

/// A parsed row and the work of the row.
struct Row<T> {
    number: u64,
    id: i64,
    ready: T,
}

impl Row<()> {
    fn with<T>(self, ready: T) -> Row<T> {
        Row { number: self.number, id: self.id, ready }
    }
}

/// Work for a parsed row.
enum Understood {
    Pass(Box<Prepared>),
    Item(FeatureRow),
}

/// Answers and problems of rows, in row order.
#[derive(Default)]
struct Outcome {
    answers: Vec<(i64, RowAnswer)>,
    problems: Vec<Problem>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(view: &'a Arc<View>, questions: &'a Questions, layout: &'a Layout) -> Self {
        let threads = Threads::new(1);
        let pass = Cpu::new(threads.clone());
        Worker { view, questions, layout, pass, threads, graphs: tower::Scratch::default() }
    }

    /// Scores the rows of a chunk.
    ///
    /// # Errors
    /// Transient errors, such as an unreachable cluster; these are not problems of a row.
    pub(super) fn score(&mut self, chunk: Chunk) -> Result<Scored> {
        let (first, rows) = (chunk.first_row + 1, chunk.len() as u64);
        let lines = chunk.lines();
        let scored = self.guarded(|worker| {
            let Outcome { answers, mut problems } = worker.outcome(chunk)?;
            // Rows that cannot be parsed were recorded before the rows that ran.
            problems.sort_by_key(|problem| problem.row);
            if let Some(lines) = &lines {
                problems.iter_mut().for_each(|problem| problem.line = Some(lines[(problem.row + 1 - first) as usize]));
            }
            let mut rest = answers.into();
            Ok(Scored { first: worker.layout.batch(&mut rest)?, rest, problems })
        });
        let scored = scored.unwrap_or_else(|why| Err(broken(&*why)));
        scored.map_err(|e| e.within(format!("rows {first} to {}", first + rows - 1)))
    }

    /// Calls `run`; after a panic replaces the scratch state, which may be inconsistent.
    fn guarded<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> std::result::Result<T, Box<dyn Any + Send>> {
        let ran = catch_unwind(AssertUnwindSafe(|| run(self)));
        if ran.is_err() {
            self.pass = Cpu::new(self.threads.clone());
            self.graphs = tower::Scratch::default();
        }
        ran
    }

    fn outcome(&mut self, chunk: Chunk) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let (mut asked, mut items, mut bytes) = (Vec::new(), Vec::new(), 0);
        let first = chunk.first_row;
        for (number, (id, question)) in (first..).zip(chunk.asked(self.questions, &self.view.main().package)) {
            let row = Row { number, id: id.unwrap_or_default(), ready: () };
            match question.and_then(|question| self.prepare_question(question)) {
                Ok(Understood::Pass(ready)) => {
                    let more = ready.cost().memory_bytes;
                    if bytes + more > BATCH_BYTES {
                        self.run(std::mem::take(&mut asked), &mut outcome)?;
                        bytes = 0;
                    }
                    bytes += more;
                    asked.push(row.with(*ready));
                }
                Ok(Understood::Item(ready)) => items.push(row.with(ready)),
                Err(e) => outcome.problems.push(problem(number, id, &e)?),
            }
        }
        self.run(asked, &mut outcome)?;
        self.embed(items, &mut outcome)?;
        Ok(outcome)
    }

    fn prepare_question(&self, question: Question) -> Result<Understood> {
        match question {
            Question::Pass(request) => Ok(Understood::Pass(Box::new(pass::prepare(self.view, *request)?))),
            Question::Item(features) => Ok(Understood::Item(self.item_tower()?.read(features)?)),
        }
    }

    fn item_tower(&self) -> Result<&'a Tower> {
        let tower = self.view.main().package.item.as_ref();
        tower.ok_or_else(|| Error::unsupported("this model has no item tower"))
    }

    /// Runs items through the item tower as one batch or, if that fails, one by one.
    fn embed(&mut self, items: Vec<Row<FeatureRow>>, outcome: &mut Outcome) -> Result<()> {
        if items.is_empty() {
            return Ok(());
        }
        let rows: Vec<&FeatureRow> = items.iter().map(|item| &item.ready).collect();
        let vectors = match self.guarded(|worker| worker.vectors(&rows)) {
            Ok(Ok(vectors)) => vectors.into_iter().map(Ok).collect(),
            _ => rows.iter().map(|row| self.vector_alone(row)).collect::<Vec<_>>(),
        };
        for (item, vector) in items.iter().zip(vectors) {
            let fits = |x: &f32| !x.is_nan() && x.abs() <= COMPONENT_MAX;
            let checked = vector.and_then(|vector| match vector.iter().find(|x| !fits(x)) {
                Some(x) => Err(Error::internal(format!("a number of the vector is {x:e}, which cannot be searched"))),
                None => Ok(vector),
            });
            match checked {
                Ok(vector) => outcome.answers.push((item.id, RowAnswer::Vector(vector))),
                Err(e) => outcome.problems.push(problem(item.number, Some(item.id), &e)?),
            }
        }
        Ok(())
    }

    fn vector_alone(&mut self, row: &FeatureRow) -> Result<Vec<f32>> {
        let made = self.guarded(|worker| worker.vectors(&[row])).unwrap_or_else(|why| Err(broken(&*why)))?;
        made.into_iter().next().ok_or_else(|| Error::internal("an item has no vector"))
    }

    fn vectors(&mut self, rows: &[&FeatureRow]) -> Result<Vec<Vec<f32>>> {
        let tower = self.item_tower()?;
        let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
        let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
        let made = tower.run(&pairs, &self.threads, &mut self.graphs)?;
        // The first output is the item's embedding.
        let made = made.first().ok_or_else(|| Error::internal("the item tower has no output"))?;
        Ok(made.data().chunks_exact(self.view.dimension()).map(<[f32]>::to_vec).collect())
    }

    fn run(&mut self, rows: Vec<Row<Prepared>>, outcome: &mut Outcome) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let (rows, mut prepared): (Vec<(u64, i64)>, Vec<Prepared>) =
            rows.into_iter().map(|row| ((row.number, row.id), row.ready)).unzip();
        pass::fetch(&mut prepared.iter_mut().filter(|p| p.needs_fetch()).collect::<Vec<_>>(), None);
        let answers = match self.guarded(|worker| pass::run(&mut worker.pass, &prepared, None)) {
            Ok(answers) => answers,
            // A request of the batch panicked: runs each request separately to find the one.
            Err(_) => prepared.iter().map(|one| self.alone(one)).collect(),
        };
        for ((number, id), answer) in rows.into_iter().zip(answers) {
            match answer.and_then(items) {
                Ok(ranked) => outcome.answers.push((id, RowAnswer::Items(ranked))),
                Err(e) => outcome.problems.push(problem(number, Some(id), &e)?),
            }
        }
        Ok(())
    }

    fn alone(&mut self, one: &Prepared) -> Result<Answer> {
        let ran = self.guarded(|worker| pass::run(&mut worker.pass, std::slice::from_ref(one), None).pop());
        match ran {
            Ok(answer) => answer.unwrap_or_else(|| Err(Error::internal("the pass did not answer a row"))),
            Err(why) => Err(broken(&*why)),
        }
    }
}

fn broken(why: &(dyn Any + Send)) -> Error {
    Error::internal(format!("the pass panicked, which is a defect of this program: {}", panic_message(why)))
}

fn items(answer: Answer) -> Result<Ranked> {
    let Content::Items(ranked) = answer.content else {
        return Err(Error::internal("a retrieval was answered with something other than items"));
    };
    let mut numbers = ranked.scores.iter().chain(&ranked.similarities).chain(&ranked.tasks);
    match numbers.find(|x| !x.is_finite()) {
        Some(x) => Err(Error::internal(format!("the value of an item is {x}, expected a finite number"))),
        None => Ok(ranked),
    }
}

/// Converts an error to a problem of a row; a transient error fails the unit instead.
fn problem(row: u64, id: Option<i64>, error: &Error) -> Result<Problem> {
    match error.kind().is_transient() {
        true => Err(error.again().within(format!("row {}", row + 1))),
        false => Ok(Problem { row, line: None, id, code: error.kind().name().into(), reason: error.to_string() }),
    }
}
