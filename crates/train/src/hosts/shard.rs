//! How host 0 reads the rows of the other hosts, for checkpoints and the package: the other hosts wait for requests of host 0.
//!
//! A request is a list of u32: its kind, the index of the table among the tables that learn, and row indices.

use std::sync::Arc;

use super::{Kind, Mesh};
use sterling_core::error::{Error, Result};
use sterling_embedding::train::OtherHosts;

/// Kinds of requests, the first word of each.
const ROWS: u32 = 0;
const TOUCHED: u32 = 1;
const END: u32 = 2;
/// Rows per request.
const ROWS_MAX: usize = 4096;

/// Rows of the other hosts, which wait for requests.
#[derive(Debug)]
pub(crate) struct Pulled {
    pub(crate) mesh: Arc<Mesh>,
    /// Names of the tables that learn, in the order of the model.
    pub(crate) tables: Vec<String>,
}

fn encoded(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn decoded(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

impl OtherHosts for Pulled {
    fn read(&self, table: &str, rows: &[u32], numbers: usize) -> Result<Vec<f32>> {
        let mesh = &self.mesh;
        let number = self.tables.iter().position(|name| name == table).filter(|_| mesh.rank() == 0);
        let number = number
            .ok_or_else(|| Error::internal(format!("rows of table `{table}` are not fetched from other hosts here")))?;
        let mut out = vec![0f32; rows.len() * numbers];
        for (rows, out) in rows.chunks(ROWS_MAX).zip(out.chunks_mut(ROWS_MAX * numbers)) {
            let of = |host: usize| rows.iter().copied().filter(move |row| mesh.rows().owner(*row) == host);
            for host in mesh.others().filter(|host| of(*host).next().is_some()) {
                mesh.send(
                    host,
                    Kind::Request,
                    encoded(&[ROWS, number as u32].into_iter().chain(of(host)).collect::<Vec<_>>()),
                )?;
            }
            for host in mesh.others() {
                let count = of(host).count();
                if count == 0 {
                    continue;
                }
                let received = mesh.numbers(host, Kind::Answer, count * numbers)?;
                let own = rows.iter().zip(out.chunks_exact_mut(numbers));
                let own = own.filter(|(row, _)| mesh.rows().owner(**row) == host);
                own.zip(received.chunks_exact(numbers)).for_each(|((_, to), from)| to.copy_from_slice(from));
            }
        }
        Ok(out)
    }
}

impl Pulled {
    /// Returns the rows that another host changed in a table of `rows` rows, whose index among the tables that learn is `table`.
    ///
    /// # Errors
    /// If the host is lost, or returns a row that does not exist.
    pub(crate) fn touched(&self, host: usize, table: usize, rows: u64) -> Result<Vec<u32>> {
        self.mesh.send(host, Kind::Request, encoded(&[TOUCHED, table as u32]))?;
        let touched = decoded(&self.mesh.bytes(host, Kind::Answer, 0, rows as usize * size_of::<u32>())?);
        match touched.iter().find(|row| u64::from(**row) >= rows) {
            None => Ok(touched),
            Some(row) => {
                let what = format!("host {host}: changed row {row} of table {table}, expected a row below {rows}");
                Err(Error::unavailable(what))
            }
        }
    }

    /// Requests that the other hosts continue the run.
    ///
    /// # Errors
    /// If a host is lost.
    pub(crate) fn end(&self, is_full: bool) -> Result<()> {
        self.mesh.send_all(Kind::Request, encoded(&[END, u32::from(is_full)]))
    }
}

/// A request of host 0.
#[derive(Debug)]
pub(crate) enum Request {
    /// Rows of a table, which is given by its index among the tables that learn.
    Rows(usize, Vec<u32>),
    /// Indexes of the rows of a table that changed since the last checkpoint with all rows.
    Touched(usize),
    /// The host continues the run; true if the checkpoint has all rows.
    End(bool),
}

/// Receives a request of host 0.
///
/// # Errors
/// `Unavailable` for an invalid request, and if host 0 is lost or failed.
pub(crate) fn requested(mesh: &Mesh) -> Result<Request> {
    let most = (2 + ROWS_MAX) * size_of::<u32>();
    let request = decoded(&mesh.bytes(0, Kind::Request, 2 * size_of::<u32>(), most)?);
    match request.as_slice() {
        [ROWS, table, rows @ ..] => Ok(Request::Rows(*table as usize, rows.to_vec())),
        [TOUCHED, table] => Ok(Request::Touched(*table as usize)),
        [END, is_full] => Ok(Request::End(*is_full == 1)),
        other => {
            let what = format!(
                "host 0 sent a request of {} words of kind {:?}, expected kind 0, 1 or 2 with its arguments",
                other.len(),
                other.first()
            );
            Err(Error::unavailable(what))
        }
    }
}

/// Answers a request for the indices of changed rows.
///
/// # Errors
/// If host 0 is lost.
pub(crate) fn answer_touched(mesh: &Mesh, rows: &[u32]) -> Result<()> {
    mesh.send(0, Kind::Answer, encoded(rows))
}
