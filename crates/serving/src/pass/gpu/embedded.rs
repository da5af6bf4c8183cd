//! Steps 1 and 2 on a device: query embeddings, and the other user tensors that the reranker reads.

use super::resident::Resident;
use crate::pass::embed::EmbeddedRequest;
use crate::pass::work::{Prepared, Query};
use sterling_core::error::{Error, Result};
use sterling_core::request::EmbeddedUser;
use sterling_cuda::ops::steps::{self, NumbersAt, PickDestination, RowsOf, take_rows};
use sterling_cuda::{Array, Device};
use sterling_embedding::HotTurn;
use sterling_graph::tower::{DeviceMade, DeviceTower, FeatureRow, Tower};
use sterling_snapshot::model::{Package, UserInput};

/// Requests of a batch with their user tensors on the device.
pub(super) struct Embedded<'a> {
    /// Requests with their indexes in the batch.
    pub(super) requests: Vec<(usize, &'a Prepared)>,
    pub(super) users: Users,
    /// Number of ids per request that were answered with default rows.
    pub(super) degraded_rows: Vec<u64>,
}

/// User tensors of some requests.
#[derive(Debug)]
pub(super) struct Users {
    /// Query embeddings, `[requests, D]` or `[requests, Tq, D]`.
    pub(super) vectors: Array<f32>,
    /// Tensors that the reranker reads, in its order, `[requests, count]` each; `None` for the query itself.
    tensors: Vec<Option<Array<f32>>>,
}

/// User tensors in host memory.
pub(super) struct HostUsers {
    count: usize,
    vectors: Vec<f32>,
    tensors: Vec<Option<Vec<f32>>>,
}

impl HostUsers {
    /// Returns the outputs of the user tower for request `n` that later steps read; `reads_more` includes more than the query.
    pub(super) fn whole(&self, n: usize, reads_more: bool) -> EmbeddedUser {
        let row = |matrix: &Vec<f32>| {
            let width = matrix.len() / self.count.max(1);
            matrix[n * width..(n + 1) * width].to_vec()
        };
        let tensor = |tensor: &Option<Vec<f32>>| tensor.as_ref().map_or(Vec::new(), row);
        let tensors = self.tensors.iter().filter(|_| reads_more).map(tensor).collect();
        EmbeddedUser { query: row(&self.vectors), tensors, largest: None }
    }

    /// Uploads the tensors of selected requests.
    pub(super) fn some(&self, device: &Device, named: &[usize]) -> Result<Users> {
        let rows = |matrix: &Vec<f32>| {
            let width = matrix.len() / self.count.max(1);
            let rows = named.iter().flat_map(|&n| &matrix[n * width..(n + 1) * width]);
            device.copy(&rows.copied().collect::<Vec<f32>>())
        };
        let tensors = self.tensors.iter().map(|tensor| tensor.as_ref().map(rows).transpose()).collect::<Result<_>>()?;
        Ok(Users { vectors: rows(&self.vectors)?, tensors })
    }
}

impl Users {
    /// Downloads the tensors of `count` requests; `with_tensors` includes those besides the query.
    pub(super) fn read(&self, count: usize, with_tensors: bool) -> Result<HostUsers> {
        let tensor = |tensor: &Option<Array<f32>>| tensor.as_ref().map(Array::to_vec).transpose();
        let tensors = self.tensors.iter().filter(|_| with_tensors).map(tensor).collect::<Result<_>>()?;
        Ok(HostUsers { count, vectors: self.vectors.to_vec()?, tensors })
    }

    /// Selects requests by index, out of `count`.
    pub(super) fn some(&self, device: &Device, count: usize, named: &[usize]) -> Result<Users> {
        let rows = |matrix: &Array<f32>| take_rows(device, matrix, matrix.len() / count.max(1), named);
        let tensors = self.tensors.iter().map(|tensor| tensor.as_ref().map(rows).transpose()).collect::<Result<_>>()?;
        Ok(Users { vectors: rows(&self.vectors)?, tensors })
    }

    /// Returns the tensors that the reranker reads, in its order.
    pub(super) fn tensors(&self) -> Vec<&Array<f32>> {
        self.tensors.iter().map(|tensor| tensor.as_ref().unwrap_or(&self.vectors)).collect()
    }
}

impl<'a> Embedded<'a> {
    /// Uploads user tensors that the host has computed.
    pub(super) fn of_host(device: &Device, inputs: &[UserInput], requested: &[EmbeddedRequest<'a>]) -> Result<Self> {
        let all = |of: &dyn Fn(&EmbeddedRequest<'_>) -> Vec<f32>| {
            device.copy(&requested.iter().flat_map(of).collect::<Vec<f32>>())
        };
        let tensor = |(n, input): (usize, &UserInput)| match input {
            UserInput::Query => Ok(None),
            UserInput::Output(_) | UserInput::Feature(_) => all(&|requested| requested.user[n].clone()).map(Some),
        };
        let tensors = inputs.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        Ok(Embedded {
            requests: requested.iter().map(|requested| (requested.place, requested.prepared)).collect(),
            users: Users { vectors: all(&|requested| requested.vector.clone())?, tensors },
            degraded_rows: requested.iter().map(|requested| requested.degraded_rows).collect(),
        })
    }

    /// Computes user tensors on the device, from features or from query embeddings of the caller.
    pub(super) fn of_device(
        device: &Device,
        package: &Package,
        (resident, tower): (&Resident, (&DeviceTower, &Tower)),
        requests: Vec<(usize, &'a Prepared)>,
        turn: &mut Option<HotTurn<'_>>,
    ) -> Result<Self> {
        let (towered, given): (Vec<_>, Vec<_>) =
            requests.into_iter().partition(|(_, prepared)| matches!(prepared.query, Query::Features { .. }));
        let rows: Vec<&FeatureRow> = towered.iter().filter_map(|(_, prepared)| prepared.features()).collect();
        let numbers = resident.queries() * resident.index.dimension();
        let vectors = device.room((towered.len() + given.len()) * numbers)?;
        let mut tensors: Vec<Option<Array<f32>>> = package.user_inputs.iter().map(|_| None).collect();
        if !rows.is_empty() {
            let mut made = tower.0.run(device, tower.1, &rows, turn)?;
            side_by_side(device, &made, 0, (rows.len(), numbers), &vectors)?;
            for (tensor, input) in tensors.iter_mut().zip(&package.user_inputs) {
                *tensor = tensor_of(device, tower.1, &mut made, (*input, rows.len()))?;
            }
        }
        for (n, (_, prepared)) in given.iter().enumerate() {
            if let Query::Vector(vector) = &prepared.query {
                vectors.write_at((rows.len() + n) * numbers, vector)?;
            }
        }
        let requests: Vec<_> = towered.into_iter().chain(given).collect();
        Ok(Embedded { degraded_rows: vec![0; requests.len()], requests, users: Users { vectors, tensors } })
    }
}

/// Returns one input of the reranker for `rows` users; `None` for the query itself.
fn tensor_of(
    device: &Device,
    tower: &Tower,
    made: &mut DeviceMade,
    (input, rows): (UserInput, usize),
) -> Result<Option<Array<f32>>> {
    match input {
        UserInput::Query => Ok(None),
        UserInput::Output(n) => {
            let count = tower.outputs()[n].count();
            let numbers = device.room(rows * count)?;
            side_by_side(device, made, n, (rows, count), &numbers)?;
            Ok(Some(numbers))
        }
        UserInput::Feature(n) => {
            let place = made.tensors.iter().position(|(tensor, _)| *tensor == n);
            let place = place
                .ok_or_else(|| Error::internal("the reranker reads a tensor that the user tower did not retain"))?;
            Ok(Some(made.tensors.swap_remove(place).1))
        }
    }
}

/// Copies output `n` (`rows` rows of `count` numbers) to the start of `to`.
fn side_by_side(
    device: &Device,
    made: &DeviceMade,
    n: usize,
    (rows, count): (usize, usize),
    to: &Array<f32>,
) -> Result<()> {
    let (from, stride) = made.outputs.output(n);
    let counts = device.copy(&[rows as u32])?;
    let of = RowsOf { counts: &counts, most: rows };
    let placing = PickDestination { runs: 1, count, stride: 0, first: 0 };
    steps::pick(device, of, NumbersAt::of(from, 0, 0, stride), None, placing, NumbersAt::of(to, 0, 0, count))
}
