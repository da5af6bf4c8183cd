//! What an OverArch reads, found by the names of its inputs, and candidates that bring it.

use super::graph::{Graph, shown};
use super::onnx::Port;
use crate::dense::{Given, InputRows, ReadGraph, Size};
use sterling_core::error::{Error, Result};

/// What is scored: one user and the candidates.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    /// The tensors of [`Reads::user`], each flat.
    pub user: &'a [&'a [f32]],
    /// How many candidates.
    pub count: usize,
    /// Writes the rows of some candidates, those of [`Reads::rows`] side by side.
    pub rows: &'a dyn Fn(InputRows<'_>),
    /// The numbers of [`Reads::numbers`], each `[count]`.
    pub numbers: &'a [&'a [f32]],
}

impl Candidates<'_> {
    /// Writes what is read of some candidates: of each its rows, of so many numbers together, and then its numbers.
    pub(super) fn write(&self, width: usize, given: InputRows<'_>) {
        let InputRows { rows, numbers, stride, .. } = given;
        for (column, of_candidates) in self.numbers.iter().enumerate() {
            let places = numbers[width + column..].iter_mut().step_by(stride);
            places.zip(&of_candidates[rows.clone()]).for_each(|(place, number)| *place = *number);
        }
        (self.rows)(InputRows { rows, numbers, stride, width });
    }
}

/// Multiply-adds that take as long as to read a number of a candidate that is in the caches, and one of a column.
const NEAR_NUMBER_WORK: usize = 4;
const COLUMN_WORK: usize = 400;

/// Whose a tensor is that an OverArch may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user's: the same for all candidates, `[Q, ...]`.
    User,
    /// Each candidate's: `[Q, K0, ...]`.
    Candidate,
}

/// A tensor that an OverArch may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readable {
    /// The name of the input.
    pub name: String,
    /// Whose it is.
    pub whose: Whose,
    /// Its dimensions after those of users and candidates.
    pub shape: Vec<usize>,
}

impl Readable {
    /// Numbers of one user or candidate.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows that lie each somewhere else: those of a sequence, or one.
    pub(super) fn places(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, places)| places.iter().product())
    }

    pub(super) fn sizes(&self, count: usize) -> Vec<usize> {
        let ahead: &[usize] = if self.whose == Whose::User { &[1] } else { &[1, count] };
        [ahead, &self.shape].concat()
    }

    fn given(&self) -> Given {
        let is_pair = self.whose == Whose::Candidate;
        let ahead = [Size::Fixed(1), Size::Rows];
        let ahead = ahead[..1 + usize::from(is_pair)].iter().copied();
        Given {
            name: self.name.clone(),
            is_pair,
            shape: ahead.chain(self.shape.iter().map(|&n| Size::Fixed(n as i64))).collect(),
        }
    }
}

/// The inputs of a graph that sees users and candidates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Tensors of the user.
    pub user: Vec<Readable>,
    /// Rows of each candidate.
    pub rows: Vec<Readable>,
    /// Numbers of each candidate: item columns, and [`Reads::SIMILARITY`].
    pub numbers: Vec<Readable>,
}

impl Reads {
    /// The name of the candidate's row in the index.
    pub const ITEM: &'static str = "item";
    /// The name of the retrieval score among the numbers of candidates.
    pub const SIMILARITY: &'static str = "similarity";

    /// The inputs of a graph, which are some of `readable`, or numbers of candidates.
    pub(super) fn of(graph: &Graph, readable: &[Readable]) -> Result<Self> {
        let mut reads = Reads::default();
        for port in graph.inputs() {
            let known = readable.iter().find(|r| r.name == port.name);
            match known {
                Some(known) => check(graph, port, &known.given().shape)?,
                None => check_number(graph, port, readable)?,
            }
            match known {
                Some(known) if known.whose == Whose::User => reads.user.push(known.clone()),
                Some(known) => reads.rows.push(known.clone()),
                None => {
                    reads.numbers.push(Readable {
                        name: port.name.clone(),
                        whose: Whose::Candidate,
                        shape: Vec::new(),
                    });
                }
            }
        }
        Ok(reads)
    }

    /// All of them: the user's, rows, numbers.
    pub fn all(&self) -> impl Iterator<Item = &Readable> {
        self.user.iter().chain(&self.rows).chain(&self.numbers)
    }

    /// The names of the numbers.
    pub fn number_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.numbers.iter().map(|number| number.name.as_str())
    }

    /// The numeric item columns.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.number_names().filter(|name| *name != Reads::SIMILARITY)
    }

    /// Numbers of the rows of a candidate.
    pub fn row_width(&self) -> usize {
        self.rows.iter().map(Readable::count).sum()
    }

    pub(super) fn given(&self) -> Vec<Given> {
        self.all().map(Readable::given).collect()
    }

    /// Of each, in the order of [`Reads::all`], whether it is the same for an item whoever asks.
    pub(super) fn are_of_item(&self) -> Vec<bool> {
        self.all().map(|input| input.whose == Whose::Candidate && input.name != Reads::SIMILARITY).collect()
    }

    /// Of each, how many multiply-adds take as long as to read it for a candidate. The row in the index is near, retrieval has just
    /// read it, and columns are read one after the other.
    pub(super) fn work(&self) -> Vec<usize> {
        let work = |input: &Readable| match input.whose {
            Whose::User => 0,
            Whose::Candidate if input.name == Reads::ITEM => NEAR_NUMBER_WORK * input.count(),
            Whose::Candidate if input.name == Reads::SIMILARITY => NEAR_NUMBER_WORK,
            Whose::Candidate if input.shape.is_empty() => COLUMN_WORK,
            Whose::Candidate => input.places() * ReadGraph::work_of_row(input.shape.last().copied().unwrap_or(1)),
        };
        self.all().map(work).collect()
    }

    /// Some of them, by their places in [`Reads::all`].
    pub(super) fn some(&self, places: &[usize]) -> Reads {
        let (users, rows) = (self.user.len(), self.user.len() + self.rows.len());
        let among = |first: usize, inputs: &[Readable]| -> Vec<Readable> {
            let kept = |(n, _): &(usize, &Readable)| places.contains(&(first + n));
            inputs.iter().enumerate().filter(kept).map(|(_, input)| input.clone()).collect()
        };
        Reads { user: among(0, &self.user), rows: among(users, &self.rows), numbers: among(rows, &self.numbers) }
    }
}

/// Refuses an input that is nothing known and no number of each candidate.
fn check_number(graph: &Graph, port: &Port, readable: &[Readable]) -> Result<()> {
    let Some(shape) = port.shape.as_ref().filter(|shape| shape.len() != 2) else { return Ok(()) };
    let known: Vec<&str> = readable.iter().map(|r| r.name.as_str()).collect();
    Err(Error::invalid(format!(
        "{}: input `{}` of shape {} is none of: {}; a numeric item column is [?, ?]",
        graph.name(),
        port.name,
        shown(shape),
        known.join(", ")
    )))
}

/// Refuses an input or output that is not of these sizes but for the number of users and candidates.
pub(super) fn check(graph: &Graph, port: &Port, sizes: &[Size]) -> Result<()> {
    let Some(declared) = &port.shape else { return Ok(()) };
    let ahead = if sizes.get(1) == Some(&Size::Rows) { 2 } else { 1 };
    let wanted = |n: usize, size: &Size| match size {
        Size::Fixed(size) if n >= ahead => Some(*size as usize),
        _ => None,
    };
    let wanted: Vec<Option<usize>> = sizes.iter().enumerate().map(|(n, size)| wanted(n, size)).collect();
    let fits = |(own, want): (&Option<usize>, &Option<usize>)| own.zip(*want).is_none_or(|(own, want)| own == want);
    if declared.len() == wanted.len() && declared.iter().zip(&wanted).all(fits) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{}: `{}` has shape {}, expected {}",
        graph.name(),
        port.name,
        shown(declared),
        shown(&wanted)
    )))
}
