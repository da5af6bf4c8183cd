//! Inputs of the reranker, identified by their names, and candidates that provide these inputs.

use super::graph::{Graph, shown};
use super::onnx::Port;
use crate::dense::{DeclaredInput, InputRows, ReadGraph, Size};
use sterling_core::error::{Error, Result};

/// Inputs of scoring: one user and the candidates.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    /// Tensors listed in [`Reads::user`], each flattened.
    pub user: &'a [&'a [f32]],
    /// Number of candidates.
    pub count: usize,
    /// Writes the rows of some candidates: the rows of [`Reads::rows`], concatenated per candidate.
    pub rows: &'a dyn Fn(InputRows<'_>),
    /// Numbers listed in [`Reads::numbers`], each `[count]`.
    pub numbers: &'a [&'a [f32]],
}

impl Candidates<'_> {
    /// Writes the inputs of some candidates: per candidate its concatenated rows, `width` numbers, followed by its
    /// single numbers.
    pub(super) fn write(&self, width: usize, given: InputRows<'_>) {
        let InputRows { rows, numbers, stride, .. } = given;
        for (column, of_candidates) in self.numbers.iter().enumerate() {
            let places = numbers[width + column..].iter_mut().step_by(stride);
            places.zip(&of_candidates[rows.clone()]).for_each(|(place, number)| *place = *number);
        }
        (self.rows)(InputRows { rows, numbers, stride, width });
    }
}

/// Cost of reading a candidate's number in multiply-adds: one that is in the cache, and one of a column.
const NEAR_NUMBER_WORK: usize = 4;
const COLUMN_WORK: usize = 400;

/// Owner of a tensor that a reranker may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorOwner {
    /// The user: the same for all candidates, `[Q, ...]`.
    User,
    /// Each candidate: `[Q, K0, ...]`.
    Candidate,
}

/// A tensor that a reranker may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readable {
    /// Name of the input.
    pub name: String,
    /// Owner of the tensor.
    pub whose: TensorOwner,
    /// Dimensions after the dimensions of users and candidates.
    pub shape: Vec<usize>,
}

impl Readable {
    /// Returns the count of numbers per user or candidate.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of rows in separate memory locations: the rows of a sequence, or one.
    pub(super) fn places(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, places)| places.iter().product())
    }

    pub(super) fn sizes(&self, count: usize) -> Vec<usize> {
        let ahead: &[usize] = if self.whose == TensorOwner::User { &[1] } else { &[1, count] };
        [ahead, &self.shape].concat()
    }

    fn given(&self) -> DeclaredInput {
        let is_pair = self.whose == TensorOwner::Candidate;
        let ahead = [Size::Fixed(1), Size::Rows];
        let ahead = ahead[..1 + usize::from(is_pair)].iter().copied();
        DeclaredInput {
            name: self.name.clone(),
            is_pair,
            shape: ahead.chain(self.shape.iter().map(|&n| Size::Fixed(n as i64))).collect(),
        }
    }
}

/// Inputs of a graph that scores candidates for users.
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
    /// Name of the candidate's row in the index.
    pub const ITEM: &'static str = "item";
    /// Name of the retrieval score among the numbers of candidates.
    pub const SIMILARITY: &'static str = "similarity";

    /// Returns the inputs of a graph; each is one of `readable`, or one number per candidate.
    pub(super) fn of(graph: &Graph, readable: &[Readable]) -> Result<Self> {
        let mut reads = Reads::default();
        for port in graph.inputs() {
            let known = readable.iter().find(|r| r.name == port.name);
            match known {
                Some(known) => check(graph, port, &known.given().shape)?,
                None => check_number(graph, port, readable)?,
            }
            match known {
                Some(known) if known.whose == TensorOwner::User => reads.user.push(known.clone()),
                Some(known) => reads.rows.push(known.clone()),
                None => {
                    reads.numbers.push(Readable {
                        name: port.name.clone(),
                        whose: TensorOwner::Candidate,
                        shape: Vec::new(),
                    });
                }
            }
        }
        Ok(reads)
    }

    /// Returns all inputs: tensors of the user, then rows, then numbers.
    pub fn all(&self) -> impl Iterator<Item = &Readable> {
        self.user.iter().chain(&self.rows).chain(&self.numbers)
    }

    /// Returns the names of [`Reads::numbers`].
    pub fn number_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.numbers.iter().map(|number| number.name.as_str())
    }

    /// Returns the names of the numeric item columns.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.number_names().filter(|name| *name != Reads::SIMILARITY)
    }

    /// Returns the count of numbers in the rows of a candidate.
    pub fn row_width(&self) -> usize {
        self.rows.iter().map(Readable::count).sum()
    }

    pub(super) fn given(&self) -> Vec<DeclaredInput> {
        self.all().map(Readable::given).collect()
    }

    /// Returns, in the order of [`Reads::all`], whether each input depends on the item alone.
    pub(super) fn are_of_item(&self) -> Vec<bool> {
        self.all().map(|input| input.whose == TensorOwner::Candidate && input.name != Reads::SIMILARITY).collect()
    }

    /// Returns the cost of reading each input of a candidate, in multiply-adds. The index row is cached, because
    /// retrieval has just read the row, and columns are read sequentially.
    pub(super) fn work(&self) -> Vec<usize> {
        let work = |input: &Readable| match input.whose {
            TensorOwner::User => 0,
            TensorOwner::Candidate if input.name == Reads::ITEM => NEAR_NUMBER_WORK * input.count(),
            TensorOwner::Candidate if input.name == Reads::SIMILARITY => NEAR_NUMBER_WORK,
            TensorOwner::Candidate if input.shape.is_empty() => COLUMN_WORK,
            TensorOwner::Candidate => input.places() * ReadGraph::work_of_row(input.shape.last().copied().unwrap_or(1)),
        };
        self.all().map(work).collect()
    }

    /// Selects inputs by their indexes in [`Reads::all`].
    pub(super) fn some(&self, places: &[usize]) -> Reads {
        let (users, rows) = (self.user.len(), self.user.len() + self.rows.len());
        let among = |first: usize, inputs: &[Readable]| -> Vec<Readable> {
            let retained = |(n, _): &(usize, &Readable)| places.contains(&(first + n));
            inputs.iter().enumerate().filter(retained).map(|(_, input)| input.clone()).collect()
        };
        Reads { user: among(0, &self.user), rows: among(users, &self.rows), numbers: among(rows, &self.numbers) }
    }
}

/// Rejects an input that is not in `readable` and not one number per candidate.
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

/// Rejects an input or output whose sizes differ from `sizes`, except for the numbers of users and candidates.
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
