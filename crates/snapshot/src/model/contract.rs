//! Interfaces between the graphs of a package: the tensors that the reranker may read, and the source of each of its inputs.

use super::spec::ModelSpec;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_embedding::Table;
use sterling_graph::tower::{FeatureTensor, Graph, Readable, Reads, TensorOwner, Tower, TowerOutput, shown};

/// Output of a user tower that is the search query.
pub(super) const QUERY: &str = "query";
/// Output of an item tower that is indexed, and the reranker's input of the same name.
pub(super) const ITEM: &str = Reads::ITEM;

/// Source of a user-side input of the reranker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserInput {
    /// Query embeddings.
    Query,
    /// Output of the user tower, by index.
    Output(usize),
    /// Feature tensor of the user tower, by index.
    Feature(usize),
}

/// Source of an input of the reranker that has a row per candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateInput {
    /// Stored item-side precomputation of the reranker.
    Part,
    /// Row of the index.
    Item,
    /// Entry of `[[item.vectors]]`, by index.
    Vector(usize),
    /// Entry of `[[overarch.features]]`, by index.
    Feature(usize),
    /// Mask of a sequence feature of `[[overarch.features]]`, by index.
    Mask(usize),
}

/// Returns the outputs of the user tower: the queries, and tensors that the reranker reads.
pub(super) fn user_outputs(spec: &ModelSpec, tower: &Graph, overarch: Option<&Graph>) -> Result<Vec<TowerOutput>> {
    let query = match spec.queries().len() {
        0 => vec![spec.dimension],
        queries => vec![queries, spec.dimension],
    };
    let mut outputs = vec![TowerOutput::new(QUERY, &query)];
    let is_read = |name: &str| overarch.is_some_and(|graph| graph.inputs().any(|port| port.name == name));
    for port in tower.outputs().filter(|port| port.name != QUERY && port.name != ITEM && is_read(&port.name)) {
        let place = format!("{}: output `{}`", tower.name(), port.name);
        let shape: Option<Vec<usize>> =
            port.shape.as_ref().filter(|s| !s.is_empty()).and_then(|s| s[1..].iter().copied().collect());
        let Some(shape) = shape else {
            let shape = port.shape.as_deref().map_or("unknown".into(), shown);
            return Err(Error::invalid(format!(
                "{place} has shape {shape}, expected fixed dimensions after the first, because the OverArch reads this output"
            )));
        };
        check_numbers(&shape).map_err(|e| e.within(place))?;
        outputs.push(TowerOutput::new(&port.name, &shape));
    }
    Ok(outputs)
}

/// Returns the outputs of the item tower: the indexed embedding, and tensors stored per item.
pub(super) fn item_outputs(spec: &ModelSpec) -> Vec<TowerOutput> {
    let retained = spec.item.vectors.iter().filter(|v| v.column.is_none());
    let retained = retained.map(|v| TowerOutput::new(&v.name, &[v.width]));
    std::iter::once(TowerOutput::new(ITEM, &[spec.dimension])).chain(retained).collect()
}

/// Returns all tensors that the reranker of a package may read.
pub(super) fn readable(spec: &ModelSpec, user: Option<&Tower>, table: &dyn Fn(&str) -> usize) -> Result<Vec<Readable>> {
    let tensor = |name: &str, whose, shape: &[usize]| Readable { name: name.into(), whose, shape: shape.to_vec() };
    let query = match spec.queries().len() {
        0 => vec![spec.dimension],
        queries => vec![queries, spec.dimension],
    };
    let mut all =
        vec![tensor(QUERY, TensorOwner::User, &query), tensor(ITEM, TensorOwner::Candidate, &[spec.dimension])];
    all.extend(spec.item.vectors.iter().map(|v| tensor(&v.name, TensorOwner::Candidate, &[v.width])));
    for feature in spec.overarch.iter().flat_map(|o| &o.features) {
        let width = table(feature.table.as_deref().unwrap_or_default());
        let Some(length) = feature.length.filter(|_| feature.is_sequence()) else {
            all.push(tensor(&feature.name, TensorOwner::Candidate, &[width]));
            continue;
        };
        check_numbers(&[length, width]).map_err(|e| e.within(format!("overarch.features `{}`", feature.name)))?;
        all.push(tensor(&feature.name, TensorOwner::Candidate, &[length, width]));
        all.push(tensor(&feature.mask(), TensorOwner::Candidate, &[length]));
    }
    let outputs = user.map_or(&[][..], |tower| &tower.outputs()[1..]);
    let outputs = outputs.iter().map(|o| (o.name.as_str(), &o.shape));
    let features = user.iter().flat_map(|tower| tower.tensors()).map(|t: &FeatureTensor| (t.name.as_str(), &t.shape));
    for (name, shape) in outputs.chain(features) {
        let is_reserved = [QUERY, ITEM].contains(&name);
        match all.iter().find(|r| r.name == name) {
            None => all.push(tensor(name, TensorOwner::User, shape)),
            Some(_) if is_reserved => {}
            Some(_) => {
                return Err(Error::invalid(format!(
                    "overarch: input `{name}` is both a tensor of the user tower and another tensor, expected one tensor of this name"
                )));
            }
        }
    }
    Ok(all)
}

/// Returns the source of a user-side input of the reranker.
pub(super) fn user_input(name: &str, user: Option<&Tower>) -> Option<UserInput> {
    if name == QUERY {
        return Some(UserInput::Query);
    }
    let user = user?;
    let output = user.outputs().iter().position(|o| o.name == name).map(UserInput::Output);
    output.or_else(|| user.tensors().iter().position(|t| t.name == name).map(UserInput::Feature))
}

/// Returns the source of a per-candidate input of the reranker.
pub(super) fn candidate_input(name: &str, spec: &ModelSpec) -> Option<CandidateInput> {
    match name {
        "" => return Some(CandidateInput::Part),
        ITEM => return Some(CandidateInput::Item),
        _ => {}
    }
    let vector = spec.item.vectors.iter().position(|v| v.name == name).map(CandidateInput::Vector);
    let looked_up = || spec.overarch.iter().flat_map(|o| &o.features);
    let feature = || looked_up().position(|f| f.name == name).map(CandidateInput::Feature);
    let mask = || looked_up().position(|f| f.is_sequence() && f.mask() == name).map(CandidateInput::Mask);
    vector.or_else(feature).or_else(mask)
}

/// Rejects feature tensors of a tower that are too large.
pub(super) fn check_tensors(tower: &Tower) -> Result<()> {
    let bounded = |t: &FeatureTensor| check_numbers(&t.shape).map_err(|e| e.within(format!("feature `{}`", t.feature)));
    tower.tensors().iter().try_for_each(bounded)
}

fn check_numbers(shape: &[usize]) -> Result<()> {
    let numbers = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match numbers.filter(|n| (1..=limits::TENSOR_NUMBERS_MAX).contains(n)) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(format!(
            "a tensor of shape {shape:?}, expected 1 to {} numbers",
            limits::TENSOR_NUMBERS_MAX
        ))),
    }
}

/// Returns the width of a table by name.
pub(super) fn width_of<'a>(tables: impl Iterator<Item = &'a Table>, name: &str) -> usize {
    let mut tables = tables;
    tables.find(|t| t.name() == name).map_or(0, Table::width)
}
