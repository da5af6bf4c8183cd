//! Towers: look up features in their tables and run the results through a graph.

use std::sync::{Arc, OnceLock};

use metrics::{Counter, counter};

use super::Scratch;
use super::row::{FeatureRow, FeatureValues};
use super::spec::{FeatureKind, FeatureSpec};
use super::tensors::{FeatureTensor, Pooled};
use crate::dense::{DeclaredInput, DeclaredOutput, InputRows, Precision, RowProgram, Size};
use crate::tower::{Graph, Input, Port, Runs, Threads, shown};
use sterling_core::error::{Error, Result};
use sterling_core::request;
use sterling_core::tensor::Tensor;
use sterling_embedding::{
    BagConfig, EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, Lookup, LookupReport,
    SequenceConfig, Table,
};

/// Maximum number of rows per run of `rten`.
const RUN_ROWS: usize = 512;
/// Maximum number of sequence positions per run: attention over sequences of S positions takes S times as much memory
/// per head.
const RUN_POSITIONS: usize = 4096;

/// A graph with its input features and their tables.
#[derive(Debug)]
pub struct Tower {
    features: Vec<FeatureSpec>,
    bags: EmbeddingBagCollection,
    sequences: EmbeddingCollection,
    /// All tensors of the features, whether the graph reads them or not.
    tensors: Vec<FeatureTensor>,
    /// Indexes of the tensors that the graph reads.
    inputs: Vec<usize>,
    graph: Graph,
    runs: Runs,
    outputs: Vec<TowerOutput>,
    /// Metrics per table of a lookup report, created on first use.
    meters: OnceLock<Vec<TableMeters>>,
}

/// Metric handles of a table, kept because finding a handle by its labels takes longer than looking up some rows.
#[derive(Debug)]
struct TableMeters {
    unseen: Counter,
    degraded: Counter,
}

impl TableMeters {
    fn of(table: &str) -> Self {
        let labels = [("table", table.to_owned())];
        TableMeters {
            unseen: counter!("sterling_unseen_ids_total", &labels),
            degraded: counter!("sterling_degraded_rows_total", &labels),
        }
    }
}

/// An output of a tower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerOutput {
    /// Name in the file.
    pub name: String,
    /// Dimensions after the rows dimension.
    pub shape: Vec<usize>,
}

impl TowerOutput {
    /// Creates an output with rows of this shape.
    pub fn new(name: &str, shape: &[usize]) -> Self {
        TowerOutput { name: name.into(), shape: shape.to_vec() }
    }

    /// Returns the numbers per row.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    fn of_rows(&self, rows: usize) -> Vec<usize> {
        std::iter::once(rows).chain(self.shape.iter().copied()).collect()
    }
}

impl Tower {
    /// Joins a graph with its features. `tables` serve the features of kind `ids` and `category`; each run returns
    /// `outputs` in this order.
    ///
    /// # Errors
    /// `Invalid` if an input of the graph has no feature, or an input or output has the wrong shape.
    pub fn new(
        side: &'static str,
        features: &[FeatureSpec],
        tables: &[Arc<Table>],
        mut graph: Graph,
        outputs: &[TowerOutput],
    ) -> Result<Self> {
        let (bags, sequences) = collections(features, tables)?;
        let width = |f: &FeatureSpec| sequences.tables().iter().find(|t| Some(t.name()) == f.table.as_deref());
        let widths: Vec<usize> =
            features.iter().filter(|f| f.is_sequence()).map(|f| width(f).map_or(0, |t| t.width())).collect();
        let tensors = FeatureTensor::of(features, bags.layout(), &widths);
        for port in graph.inputs() {
            let Some(tensor) = tensors.iter().find(|t| t.name == port.name) else {
                return Err(Error::invalid(format!(
                    "{}: input `{}` has no feature in {side}.features",
                    graph.name(),
                    port.name
                )));
            };
            if let Some(shape) = port.shape.as_ref().filter(|s| !is_of(s, &tensor.shape)) {
                return Err(Error::invalid(format!(
                    "{}: input `{}` has shape {}, but the feature has shape {}",
                    graph.name(),
                    port.name,
                    shown(shape),
                    shown(&of_rows(&tensor.shape))
                )));
            }
        }
        let is_read = |n: &usize| graph.inputs().any(|port| port.name == tensors[*n].name);
        let inputs: Vec<usize> = (0..tensors.len()).filter(is_read).collect();
        for output in outputs {
            let made = graph.output(&output.name)?;
            if let Some(shape) = made.shape.as_ref().filter(|s| !is_of(s, &output.shape)) {
                return Err(Error::invalid(format!(
                    "{}: output `{}` has shape {}, expected {}",
                    graph.name(),
                    output.name,
                    shown(shape),
                    shown(&of_rows(&output.shape))
                )));
            }
        }
        let sizes = |shape: &[usize]| -> Vec<Size> {
            std::iter::once(Size::Rows).chain(shape.iter().map(|&n| Size::Fixed(n as i64))).collect()
        };
        let given = |&n: &usize| DeclaredInput {
            name: tensors[n].name.clone(),
            is_pair: true,
            shape: sizes(&tensors[n].shape),
        };
        let given: Vec<DeclaredInput> = inputs.iter().map(given).collect();
        let made =
            outputs.iter().map(|o| DeclaredOutput { name: o.name.clone(), shape: sizes(&o.shape) }).collect::<Vec<_>>();
        let runs = graph.lower(&given, &made)?;
        let (features, outputs) = (features.to_vec(), outputs.to_vec());
        Ok(Tower { features, bags, sequences, tensors, inputs, graph, runs, outputs, meters: OnceLock::new() })
    }

    /// Returns the input features.
    pub fn features(&self) -> &[FeatureSpec] {
        &self.features
    }

    /// Returns all tensors computed from the features.
    pub fn tensors(&self) -> &[FeatureTensor] {
        &self.tensors
    }

    /// Returns the outputs of a run.
    pub fn outputs(&self) -> &[TowerOutput] {
        &self.outputs
    }

    /// Returns the graph's input named `name`.
    ///
    /// # Errors
    /// As [`Graph::input`].
    pub fn input(&self, name: &str) -> Result<&Port> {
        self.graph.input(name)
    }

    /// Returns whether the graph reads a tensor of a feature.
    pub fn reads(&self, feature: &str) -> bool {
        self.inputs.iter().any(|&n| self.tensors[n].feature == feature)
    }

    /// Returns the cost of `rows` rows in multiply-adds or equivalents: the cost of the compiled program, or one
    /// multiply-add per weight of the graph and position of its sequences.
    pub fn work(&self, rows: usize) -> usize {
        match &self.runs {
            Runs::Program(program) => program.work(rows),
            Runs::Runtime(_) => self.graph.weights().saturating_mul(self.positions()).saturating_mul(rows),
        }
    }

    /// Returns the maximum number of rows per run of `rten`, and of rows that callers should collect at a time: 512
    /// rows, or fewer if the longest sequence would have more than 4,096 positions in total.
    pub fn run_rows(&self) -> usize {
        (RUN_POSITIONS / self.positions()).clamp(1, RUN_ROWS)
    }

    /// Returns the length of the tower's longest sequence, at least 1.
    fn positions(&self) -> usize {
        self.features.iter().filter(|f| f.is_sequence()).filter_map(|f| f.length).max().unwrap_or(1).max(1)
    }

    /// Reads the features of a request or an item.
    ///
    /// # Errors
    /// `Invalid` with the feature, the received and the expected value.
    pub fn read(&self, mut sent: request::Features) -> Result<FeatureRow> {
        if let Some(unknown) = sent.keys().find(|name| self.features.iter().all(|f| f.source() != *name)) {
            let mut known: Vec<&str> = self.features.iter().map(FeatureSpec::source).collect();
            known.sort_unstable();
            known.dedup();
            return Err(Error::invalid(format!("unknown feature `{unknown}`, expected some of: {}", known.join(", "))));
        }
        let read = |(n, spec): (usize, &FeatureSpec)| {
            let source = spec.source();
            let is_read_again = self.features[n + 1..].iter().any(|f| f.source() == source);
            let values = if is_read_again { sent.get(source).cloned() } else { sent.remove(source) };
            match values {
                None => Ok(FeatureValues::missing(spec)),
                Some(values) => FeatureValues::read(spec, self.table(spec), values)
                    .map_err(|e| e.within(format!("feature `{source}`"))),
            }
        };
        Ok(FeatureRow { values: self.features.iter().enumerate().map(read).collect::<Result<_>>()? })
    }

    /// Returns the compiled program; `None` if `rten` runs the graph.
    #[cfg(feature = "cuda")]
    pub(super) fn program(&self) -> Option<&RowProgram> {
        self.runs.program()
    }

    /// Returns the indexes of the tensors that the graph reads, in the order of the graph's inputs.
    #[cfg(feature = "cuda")]
    pub(super) fn inputs(&self) -> &[usize] {
        &self.inputs
    }

    pub(super) fn table(&self, spec: &FeatureSpec) -> Option<&Table> {
        self.bags.tables().iter().find(|t| Some(t.name()) == spec.table.as_deref()).map(|t| &**t)
    }

    /// Returns true if some rows of a table must be fetched from another machine.
    pub fn needs_fetch(&self, row: &FeatureRow) -> bool {
        let fetches = |(spec, values): (&FeatureSpec, &FeatureValues)| match (self.table(spec), values) {
            (Some(table), FeatureValues::Ids { ids, .. }) => {
                table.is_fetched() && ids.iter().any(|&id| table.fetches(id))
            }
            _ => false,
        };
        self.features.iter().zip(&row.values).any(fetches)
    }

    /// Returns the bytes of the table rows that are looked up for a row of features.
    pub fn row_bytes(&self, row: &FeatureRow) -> u64 {
        let of_feature = |(spec, values): (&FeatureSpec, &FeatureValues)| {
            let table = self.table(spec).map_or(0, |t| t.spec().row_bytes().unwrap_or(0));
            (values.ids() * table) as u64
        };
        self.features.iter().zip(&row.values).map(of_feature).sum()
    }

    /// Returns the inputs of the graph for one row, each as its tensor and the tensor's numbers.
    pub fn input_numbers(&self, row: &FeatureRow, pooled: &Pooled) -> Vec<(&FeatureTensor, Vec<f32>)> {
        let numbers = |tensor: &FeatureTensor| {
            let mut numbers = vec![0.0; tensor.count()];
            tensor.write(row, pooled, &mut numbers);
            numbers
        };
        self.inputs.iter().map(|&n| &self.tensors[n]).map(|tensor| (tensor, numbers(tensor))).collect()
    }

    /// Returns the precision of the compiled graph's products.
    pub fn precision(&self) -> Precision {
        self.graph.precision()
    }

    /// Looks up the ids of all rows in their tables: one call for all pooled features, and one for all sequences.
    /// Remote requests of both calls run concurrently. A feature that is missing in a row is an empty bag or sequence.
    ///
    /// # Errors
    /// Errors of the lookup.
    pub fn lookup(&self, rows: &[&FeatureRow], terms: &Lookup) -> Result<(Vec<Pooled>, LookupReport)> {
        let any_weights = rows.iter().flat_map(|r| &r.values).any(FeatureValues::has_weights);
        let bag_ids = self.keyed(rows, false, any_weights)?;
        let sequence_ids = self.keyed(rows, true, false)?;
        let mut all: Vec<Pooled> = rows.iter().map(|_| Pooled::default()).collect();
        let mut report = LookupReport::new();
        let started = bag_ids.as_ref().map(|ids| self.bags.begin(ids, terms)).transpose()?;
        if let Some(ids) = &sequence_ids {
            let (sequences, counts) = self.sequences.lookup(ids, terms)?;
            for (n, pooled) in all.iter_mut().enumerate() {
                pooled.sequences = sequences.iter().map(|(_, rows)| rows.run(n).to_vec()).collect();
            }
            report.extend(counts);
        }
        if let Some(started) = started {
            let (pooled, counts) = started.finish()?;
            let values = pooled.values().chunks_exact(pooled.width());
            all.iter_mut().zip(values).for_each(|(pooled, values)| pooled.values = values.to_vec());
            report.extend(counts);
        }
        for (n, pooled) in all.iter_mut().enumerate() {
            pooled.degraded_rows = report.iter().filter_map(|t| t.degraded_of.get(n)).sum();
        }
        Ok((all, report))
    }

    /// Adds the counts in the report of a [`Tower::lookup`] to the metrics.
    pub fn count(&self, report: &LookupReport) {
        // All reports of a tower list the same tables, in the same order.
        let meters = self.meters.get_or_init(|| report.iter().map(|counts| TableMeters::of(&counts.table)).collect());
        for (meters, counts) in meters.iter().zip(report) {
            meters.unseen.increment(counts.unseen);
            meters.degraded.increment(counts.degraded);
        }
    }

    /// Returns the ids of all rows: of the sequence features if `are_sequences`, else of the pooled features. `None` if
    /// there is no such feature.
    fn keyed(&self, rows: &[&FeatureRow], are_sequences: bool, any_weights: bool) -> Result<Option<KeyedJaggedTensor>> {
        let wanted = |spec: &FeatureSpec| spec.kind != FeatureKind::Dense && spec.is_sequence() == are_sequences;
        let features = self.features.iter().enumerate().filter(|(_, spec)| wanted(spec));
        let jagged: Vec<(String, JaggedTensor<i64>)> = features
            .map(|(n, spec)| Ok((spec.name.clone(), gather_ids(n, rows, any_weights)?)))
            .collect::<Result<_>>()?;
        if jagged.is_empty() { Ok(None) } else { KeyedJaggedTensor::from_jagged(jagged).map(Some) }
    }

    /// Returns the name of the graph's file, and how the graph runs.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
    }

    /// Runs the graph over rows and their looked-up embeddings; returns `[rows, ...]` per output.
    ///
    /// # Errors
    /// `Internal` if the graph fails or an output has the wrong shape.
    pub fn run(
        &self,
        rows: &[(&FeatureRow, &Pooled)],
        threads: &Threads,
        scratch: &mut Scratch,
    ) -> Result<Vec<Tensor>> {
        let room = |output: &TowerOutput| Vec::with_capacity(rows.len() * output.count());
        let mut made: Vec<Vec<f32>> = self.outputs.iter().map(room).collect();
        match &self.runs {
            Runs::Program(program) => self.run_program(program, rows, scratch, &mut made)?,
            Runs::Runtime(_) => {
                for rows in rows.chunks(self.run_rows()) {
                    let tensors = self.run_graph(rows, threads)?;
                    made.iter_mut().zip(&tensors).for_each(|(made, tensor)| made.extend_from_slice(tensor.data()));
                }
            }
        }
        self.outputs
            .iter()
            .zip(made)
            .map(|(output, numbers)| Tensor::new(output.of_rows(rows.len()), numbers))
            .collect()
    }

    fn run_program(
        &self,
        program: &RowProgram,
        rows: &[(&FeatureRow, &Pooled)],
        scratch: &mut Scratch,
        made: &mut [Vec<f32>],
    ) -> Result<()> {
        let write = |n: usize, mut given: &mut [f32]| {
            let (row, pooled) = rows[n];
            for tensor in self.inputs.iter().map(|&n| &self.tensors[n]) {
                let (here, rest) = given.split_at_mut(tensor.count());
                tensor.write(row, pooled, here);
                given = rest;
            }
        };
        let mut fill = |given: InputRows<'_>| given.each(write);
        program.run(rows.len(), &[], &mut scratch.program, &mut fill, &mut |_, count, block| {
            for (o, made) in made.iter_mut().enumerate() {
                let output = block.output(o);
                (0..count).for_each(|n| made.extend_from_slice(output.row(n)));
            }
            Ok(())
        })
    }

    fn run_graph(&self, rows: &[(&FeatureRow, &Pooled)], threads: &Threads) -> Result<Vec<Tensor>> {
        let tensor = |&n: &usize| {
            let (name, shape) = (&self.tensors[n].name, &self.tensors[n].shape);
            let mut values = Tensor::zeros([&[rows.len()], &shape[..]].concat());
            let count = self.tensors[n].count();
            for ((row, pooled), out) in rows.iter().zip(values.data_mut().chunks_exact_mut(count)) {
                self.tensors[n].write(row, pooled, out);
            }
            (name, values)
        };
        let tensors: Vec<(&String, Tensor)> = self.inputs.iter().map(tensor).collect();
        let inputs: Vec<Input<'_>> =
            tensors.iter().map(|(name, tensor)| Input { name, shape: tensor.shape(), values: tensor.data() }).collect();
        let names: Vec<&str> = self.outputs.iter().map(|output| output.name.as_str()).collect();
        let made = self.graph.run_all(&inputs, &names, threads)?;
        for (made, output) in made.iter().zip(&self.outputs) {
            if made.shape() != output.of_rows(rows.len()) {
                return Err(Error::internal(format!(
                    "{}: `{}` has shape {:?}, expected {:?}",
                    self.graph.name(),
                    output.name,
                    made.shape(),
                    output.of_rows(rows.len())
                )));
            }
        }
        Ok(made)
    }
}

/// Creates the two lookups of features: pooled features, and sequences.
fn collections(
    features: &[FeatureSpec],
    tables: &[Arc<Table>],
) -> Result<(EmbeddingBagCollection, EmbeddingCollection)> {
    let (mut bags, mut sequences) = (Vec::new(), Vec::new());
    for spec in features {
        let Some(table) = spec.table.clone() else { continue };
        let feature = spec.name.clone();
        match spec.is_sequence() {
            true => sequences.push(SequenceConfig { feature, table }),
            false => bags.push(BagConfig { feature, table, pooling: spec.pooling }),
        }
    }
    Ok((EmbeddingBagCollection::new(tables.to_vec(), &bags)?, EmbeddingCollection::new(tables.to_vec(), &sequences)?))
}

fn of_rows(shape: &[usize]) -> Vec<Option<usize>> {
    std::iter::once(None).chain(shape.iter().map(|&n| Some(n))).collect()
}

/// Returns whether a declared shape is that of rows with this `shape`.
fn is_of(declared: &[Option<usize>], shape: &[usize]) -> bool {
    declared.len() == shape.len() + 1 && declared[1..].iter().zip(shape).all(|(own, n)| own.is_none_or(|own| own == *n))
}

/// Collects the ids of feature `n` of all rows. If `any_weights`, ids without a weight get weight 1.
pub(super) fn gather_ids(n: usize, rows: &[&FeatureRow], any_weights: bool) -> Result<JaggedTensor<i64>> {
    let mut all = Vec::new();
    let mut all_weights = any_weights.then(Vec::new);
    let mut lengths = Vec::with_capacity(rows.len());
    for row in rows {
        let FeatureValues::Ids { ids, weights } = &row.values[n] else {
            return Err(Error::internal("a feature of ids has numbers as its value"));
        };
        all.extend_from_slice(ids);
        lengths.push(ids.len() as i64);
        if let Some(all_weights) = &mut all_weights {
            all_weights.extend_from_slice(weights.as_deref().unwrap_or(&[]));
            all_weights.resize(all.len(), 1.0);
        }
    }
    JaggedTensor::from_lengths(all, &lengths, all_weights)
}
