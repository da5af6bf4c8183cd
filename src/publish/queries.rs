//! Queries that a publication brings along: vectors, or requests that go through the user tower.

use std::fs;
use std::path::Path;

use super::calibrate::Queries;
use crate::embedding::Lookup;
use crate::error::{Error, Result};
use crate::http::wire::{Retrievals, retrievals};
use crate::ivf::Index;
use crate::model::Package;
use crate::npy;
use crate::request::User;
use crate::tower::{Pooled, Threads};

/// Reads at most `most` queries of a file, spread over it.
///
/// # Errors
/// `Invalid` with the file and the line that is no query for this index.
pub(super) fn read(path: &Path, package: &Package, index: &Index, most: usize) -> Result<Queries> {
    let vectors = match path.extension().is_some_and(|e| e == "npy") {
        true => matrix(path, most),
        false => requests(path, package, most),
    };
    let vectors = vectors.map_err(|e| e.within(path.display()))?;
    if vectors.is_empty() {
        return Err(Error::invalid(format!("{}: no queries, expected one at least", path.display())));
    }
    for (n, vector) in vectors.iter().enumerate() {
        index.check_query(vector).map_err(|e| e.within(format!("{}: query {}", path.display(), n + 1)))?;
    }
    let source = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(Queries { source, made_of: vec![None; vectors.len()], vectors })
}

/// `most` numbers below `count`, evenly spread.
fn spread(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |n| n * count / taken)
}

fn matrix(path: &Path, most: usize) -> Result<Vec<Vec<f32>>> {
    let (values, rows, width) = npy::read_f32(path)?;
    Ok(spread(rows, most).map(|row| values[row * width..(row + 1) * width].to_vec()).collect())
}

/// Bodies of `:retrieve`, one a line.
fn requests(path: &Path, package: &Package, most: usize) -> Result<Vec<Vec<f32>>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("reading", e))?;
    let lines: Vec<&str> = text.lines().collect();
    spread(lines.len(), most)
        .map(|n| query(lines[n], package).map_err(|e| e.within(format!("line {}", n + 1))))
        .collect()
}

fn query(line: &str, package: &Package) -> Result<Vec<f32>> {
    let Retrievals::One(request, _) = retrievals(line.as_bytes())? else {
        return Err(Error::invalid("got a list of requests, expected one request a line"));
    };
    let features = match request.user {
        User::Vector(vector) => return Ok(vector),
        User::Features(features) => features,
    };
    let Some(tower) = &package.user else {
        return Err(Error::invalid("field `features`: this model has no user tower, expected `vector`"));
    };
    let row = tower.read(features)?;
    let (pooled, _) = tower.lookup(&[&row], &Lookup::default())?;
    let rows: Vec<(_, &Pooled)> =
        vec![(&row, pooled.first().ok_or_else(|| Error::internal("a row without a lookup"))?)];
    Ok(tower.run(&rows, &Threads::new(1))?.data().to_vec())
}
