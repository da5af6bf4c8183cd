//! What the graphs of a package say to one another: what the OverArch may read, and where each of its inputs comes from.

use super::spec::ModelSpec;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_embedding::Table;
use sterling_graph::tower::{FeatureTensor, Graph, Readable, Reads, Tower, TowerOutput, Whose, shown};

/// The output of a user tower that is searched with.
pub(super) const QUERY: &str = "query";
/// The output of an item tower that is indexed, and the OverArch's input of it.
pub(super) const ITEM: &str = Reads::ITEM;

/// Where an input of the OverArch that tells of the user comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserInput {
    /// The query embeddings.
    Query,
    /// This one of the user tower's outputs.
    Output(usize),
    /// This one of the tensors that its features make.
    Feature(usize),
}

/// Where an input of the OverArch that is a row of each candidate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateInput {
    /// What is kept of each item of what the OverArch says.
    Part,
    /// The index.
    Item,
    /// This one of `[[item.vectors]]`.
    Vector(usize),
    /// This one of `[[overarch.features]]`.
    Feature(usize),
    /// The mask of this one of them, a sequence.
    Mask(usize),
}

/// What the user tower makes: the queries, and what the `overarch` reads besides.
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
            let shape = port.shape.as_deref().map_or("none that the file tells".into(), shown);
            return Err(Error::invalid(format!(
                "{place} has shape {shape}, expected fixed dimensions after the first, for the OverArch reads it"
            )));
        };
        check_numbers(&shape).map_err(|e| e.within(place))?;
        outputs.push(TowerOutput::new(&port.name, &shape));
    }
    Ok(outputs)
}

/// What the item tower makes: what is indexed, and what is kept of each item.
pub(super) fn item_outputs(spec: &ModelSpec) -> Vec<TowerOutput> {
    let kept = spec.item.vectors.iter().filter(|v| v.column.is_none());
    let kept = kept.map(|v| TowerOutput::new(&v.name, &[v.width]));
    std::iter::once(TowerOutput::new(ITEM, &[spec.dimension])).chain(kept).collect()
}

/// All tensors that the OverArch of a package may read.
pub(super) fn readable(spec: &ModelSpec, user: Option<&Tower>, table: &dyn Fn(&str) -> usize) -> Result<Vec<Readable>> {
    let tensor = |name: &str, whose, shape: &[usize]| Readable { name: name.into(), whose, shape: shape.to_vec() };
    let query = match spec.queries().len() {
        0 => vec![spec.dimension],
        queries => vec![queries, spec.dimension],
    };
    let mut all = vec![tensor(QUERY, Whose::User, &query), tensor(ITEM, Whose::Candidate, &[spec.dimension])];
    all.extend(spec.item.vectors.iter().map(|v| tensor(&v.name, Whose::Candidate, &[v.width])));
    for feature in spec.overarch.iter().flat_map(|o| &o.features) {
        let width = table(feature.table.as_deref().unwrap_or_default());
        let Some(length) = feature.length.filter(|_| feature.is_sequence()) else {
            all.push(tensor(&feature.name, Whose::Candidate, &[width]));
            continue;
        };
        check_numbers(&[length, width]).map_err(|e| e.within(format!("overarch.features `{}`", feature.name)))?;
        all.push(tensor(&feature.name, Whose::Candidate, &[length, width]));
        all.push(tensor(&feature.mask(), Whose::Candidate, &[length]));
    }
    let outputs = user.map_or(&[][..], |tower| &tower.outputs()[1..]);
    let outputs = outputs.iter().map(|o| (o.name.as_str(), &o.shape));
    let features = user.iter().flat_map(|tower| tower.tensors()).map(|t: &FeatureTensor| (t.name.as_str(), &t.shape));
    for (name, shape) in outputs.chain(features) {
        let is_reserved = [QUERY, ITEM].contains(&name);
        match all.iter().find(|r| r.name == name) {
            None => all.push(tensor(name, Whose::User, shape)),
            Some(_) if is_reserved => {}
            Some(_) => {
                return Err(Error::invalid(format!(
                    "overarch: input `{name}` is an output of the user tower and something else, expected one meaning"
                )));
            }
        }
    }
    Ok(all)
}

/// Where an input of the OverArch that tells of the user comes from.
pub(super) fn user_input(name: &str, user: Option<&Tower>) -> Option<UserInput> {
    if name == QUERY {
        return Some(UserInput::Query);
    }
    let user = user?;
    let output = user.outputs().iter().position(|o| o.name == name).map(UserInput::Output);
    output.or_else(|| user.tensors().iter().position(|t| t.name == name).map(UserInput::Feature))
}

/// Where an input of the OverArch that is a row of each candidate comes from.
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

/// Bounds the tensors that the features of a tower make.
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

/// The width of one of `tables` by its name.
pub(super) fn width_of<'a>(tables: impl Iterator<Item = &'a Table>, name: &str) -> usize {
    let mut tables = tables;
    tables.find(|t| t.name() == name).map_or(0, Table::width)
}
