//! Towers: features looked up in their tables and run through a graph.

use super::Scratch;
use super::row::{FeatureRow, FeatureValues};
use super::spec::{FeatureKind, FeatureSpec};
use crate::dense::{Given, RowProgram, Size};
use crate::embedding::{
    BagConfig, EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor, Lookup, LookupReport, Table,
};
use crate::error::{Error, Result};
use crate::request;
use crate::tensor::Tensor;
use crate::tower::{Graph, Input, Runs, Threads};

/// Most rows that a run of `rten` takes.
pub const RUN_ROWS: usize = 512;

/// A graph with the features it takes and the tables that these are looked up in.
#[derive(Debug)]
pub struct Tower {
    features: Vec<FeatureSpec>,
    bags: EmbeddingBagCollection,
    graph: Graph,
    runs: Runs,
    output: &'static str,
    dimension: usize,
}

/// The pooled embeddings of one row, side by side in the order of the tower's bags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pooled {
    /// `[sum of widths]`
    pub values: Vec<f32>,
    /// Ids that were answered with default rows.
    pub degraded_rows: u64,
}

impl Tower {
    /// Joins a graph with its features. `tables` serve the features of kind `ids` and `category`.
    ///
    /// # Errors
    /// `Invalid` where an input of the graph has no feature, a feature no input, or their widths differ.
    pub fn new(
        side: &'static str,
        features: &[FeatureSpec],
        tables: &[std::sync::Arc<crate::embedding::Table>],
        mut graph: Graph,
        output: &'static str,
        dimension: usize,
    ) -> Result<Self> {
        let bags: Vec<BagConfig> = features
            .iter()
            .filter_map(|f| Some(BagConfig { feature: f.name.clone(), table: f.table.clone()?, pooling: f.pooling }))
            .collect();
        let bags = EmbeddingBagCollection::new(tables.to_vec(), &bags)?;
        for feature in features {
            let port =
                graph.input(&feature.name).map_err(|e| e.within(format!("{side}.features `{}`", feature.name)))?;
            let width = match feature.width {
                Some(width) => width,
                None => bags
                    .layout()
                    .keys()
                    .iter()
                    .position(|k| *k == feature.name)
                    .map_or(0, |k| bags.layout().columns(k).len()),
            };
            if port.shape.as_ref().is_some_and(|s| s.len() != 2 || s[1].is_some_and(|w| w != width)) {
                return Err(Error::invalid(format!(
                    "{}: input `{}` has shape {}, and the feature is [?, {width}]",
                    graph.name(),
                    feature.name,
                    crate::tower::shown(port.shape.as_deref().unwrap_or(&[]))
                )));
            }
        }
        if let Some(port) = graph.inputs().find(|p| features.iter().all(|f| f.name != p.name)) {
            return Err(Error::invalid(format!(
                "{}: input `{}` has no feature in {side}.features",
                graph.name(),
                port.name
            )));
        }
        let made = graph.output(output)?;
        if made.shape.as_ref().is_some_and(|s| s.len() != 2 || s[1].is_some_and(|d| d != dimension)) {
            return Err(Error::invalid(format!(
                "{}: output `{output}` has shape {}, expected [?, {dimension}]",
                graph.name(),
                crate::tower::shown(made.shape.as_deref().unwrap_or(&[]))
            )));
        }
        let row = |name: &str, width: usize| Given {
            name: name.into(),
            is_pair: true,
            shape: vec![Size::Rows, Size::Fixed(width as i64)],
        };
        let layout = bags.layout();
        let mut given: Vec<Given> =
            layout.keys().iter().enumerate().map(|(k, key)| row(key, layout.columns(k).len())).collect();
        let dense = features.iter().filter(|f| f.kind == FeatureKind::Dense);
        given.extend(dense.map(|f| row(&f.name, f.width.unwrap_or(0))));
        let runs = graph.lower(&given, (output, &[Size::Rows, Size::Fixed(dimension as i64)]))?;
        Ok(Tower { features: features.to_vec(), bags, graph, runs, output, dimension })
    }

    /// What the tower takes.
    pub fn features(&self) -> &[FeatureSpec] {
        &self.features
    }

    /// What so many rows cost, in multiply-adds and what takes as long: those of the program, or one for each of the graph's
    /// weights.
    pub fn work(&self, rows: usize) -> usize {
        match &self.runs {
            Runs::Program(program) => program.work(rows),
            Runs::Runtime(_) => self.graph.weights().saturating_mul(rows),
        }
    }

    /// Reads the features of a request or an item.
    ///
    /// # Errors
    /// `Invalid` with the feature, what came and what was expected.
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
                Some(values) => FeatureValues::read(spec, self.table(spec).and_then(|t| t.vocabulary()), values)
                    .map_err(|e| e.within(format!("feature `{source}`"))),
            }
        };
        Ok(FeatureRow { values: self.features.iter().enumerate().map(read).collect::<Result<_>>()? })
    }

    fn table(&self, spec: &FeatureSpec) -> Option<&Table> {
        self.bags.tables().iter().find(|t| Some(t.name()) == spec.table.as_deref()).map(|t| &**t)
    }

    /// True where a row asks for rows of a table that must be fetched from another machine.
    pub fn needs_fetch(&self, row: &FeatureRow) -> bool {
        let fetches = |(spec, values): (&FeatureSpec, &FeatureValues)| match (self.table(spec), values) {
            (Some(table), FeatureValues::Ids { ids, .. }) => {
                table.is_fetched() && ids.iter().any(|&id| table.fetches(id))
            }
            _ => false,
        };
        self.features.iter().zip(&row.values).any(fetches)
    }

    /// Bytes of the rows that a row of features asks for.
    pub fn row_bytes(&self, row: &FeatureRow) -> u64 {
        let of_feature = |(spec, values): (&FeatureSpec, &FeatureValues)| {
            let table = self.table(spec).map_or(0, |t| t.spec().row_bytes().unwrap_or(0));
            (values.ids() * table) as u64
        };
        self.features.iter().zip(&row.values).map(of_feature).sum()
    }

    /// Looks the ids of all rows up in their tables: one call for all of them. A feature that a row does not bring is an empty
    /// bag.
    ///
    /// # Errors
    /// What the lookup returns.
    pub fn lookup(&self, rows: &[&FeatureRow], terms: &Lookup) -> Result<(Vec<Pooled>, LookupReport)> {
        let bagged = self.features.iter().enumerate().filter(|(_, spec)| spec.kind != FeatureKind::Dense);
        let any_weights = rows.iter().flat_map(|r| &r.values).any(FeatureValues::has_weights);
        let jagged = bagged.map(|(n, spec)| Ok((spec.name.clone(), gather_ids(n, rows, any_weights)?)));
        let jagged: Vec<(String, JaggedTensor<i64>)> = jagged.collect::<Result<_>>()?;
        if jagged.is_empty() {
            return Ok((rows.iter().map(|_| Pooled::default()).collect(), Vec::new()));
        }
        let (pooled, report) = self.bags.lookup(&KeyedJaggedTensor::from_jagged(jagged)?, terms)?;
        let of_row = |(n, values): (usize, &[f32])| Pooled {
            values: values.to_vec(),
            degraded_rows: report.iter().filter_map(|t| t.degraded_of.get(n)).sum(),
        };
        Ok((pooled.values().chunks_exact(pooled.width()).enumerate().map(of_row).collect(), report))
    }

    /// The graph's file, and what runs it.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
    }

    /// Runs the graph over rows and their pooled embeddings: `[rows, D]`.
    ///
    /// # Errors
    /// `Internal` where the graph fails or makes something else.
    pub fn run(&self, rows: &[(&FeatureRow, &Pooled)], threads: &Threads, scratch: &mut Scratch) -> Result<Tensor> {
        match &self.runs {
            Runs::Program(program) => self.run_program(program, rows, scratch),
            Runs::Runtime(_) => {
                let mut made = Vec::with_capacity(rows.len() * self.dimension);
                for rows in rows.chunks(RUN_ROWS) {
                    made.extend_from_slice(self.run_graph(rows, threads)?.data());
                }
                Tensor::new(vec![rows.len(), self.dimension], made)
            }
        }
    }

    fn run_program(
        &self,
        program: &RowProgram,
        rows: &[(&FeatureRow, &Pooled)],
        scratch: &mut Scratch,
    ) -> Result<Tensor> {
        let layout = self.bags.layout();
        let mut made = Vec::with_capacity(rows.len() * self.dimension);
        let mut fill = |n: usize, mut given: &mut [f32]| {
            let (row, pooled) = rows[n];
            let bagged = (0..layout.keys().len()).map(|k| &pooled.values[layout.columns(k)]);
            let dense =
                row.values.iter().filter_map(|v| if let FeatureValues::Dense(x) = v { Some(&x[..]) } else { None });
            for values in bagged.chain(dense) {
                let (here, rest) = given.split_at_mut(values.len());
                here.copy_from_slice(values);
                given = rest;
            }
        };
        program.run(rows.len(), &[], &mut scratch.program, &mut fill, &mut |_, count, block| {
            (0..count).for_each(|n| made.extend_from_slice(block.row(n)));
            Ok(())
        })?;
        Tensor::new(vec![rows.len(), self.dimension], made)
    }

    fn run_graph(&self, rows: &[(&FeatureRow, &Pooled)], threads: &Threads) -> Result<Tensor> {
        let layout = self.bags.layout();
        let mut tensors: Vec<(&str, Tensor)> = Vec::with_capacity(self.features.len());
        for (k, key) in layout.keys().iter().enumerate() {
            let columns = layout.columns(k);
            let values = rows.iter().flat_map(|(_, pooled)| &pooled.values[columns.clone()]).copied().collect();
            tensors.push((key, Tensor::new(vec![rows.len(), columns.len()], values)?));
        }
        for (n, spec) in self.features.iter().enumerate().filter(|(_, spec)| spec.kind == FeatureKind::Dense) {
            tensors.push((&spec.name, gather_dense(n, spec, rows)?));
        }
        let inputs: Vec<Input<'_>> =
            tensors.iter().map(|(name, tensor)| Input { name, shape: tensor.shape(), values: tensor.data() }).collect();
        let made = self.graph.run(&inputs, self.output, threads)?;
        if made.shape() != [rows.len(), self.dimension] {
            return Err(Error::internal(format!(
                "{}: `{}` came out as {:?}, expected [{}, {}]",
                self.graph.name(),
                self.output,
                made.shape(),
                rows.len(),
                self.dimension
            )));
        }
        Ok(made)
    }
}

/// The ids of feature `n` of all rows; where `any_weights`, ids without one have weight 1.
fn gather_ids(n: usize, rows: &[&FeatureRow], any_weights: bool) -> Result<JaggedTensor<i64>> {
    let mut all = Vec::new();
    let mut all_weights = any_weights.then(Vec::new);
    let mut lengths = Vec::with_capacity(rows.len());
    for row in rows {
        let FeatureValues::Ids { ids, weights } = &row.values[n] else {
            return Err(Error::internal("numbers where a tower takes ids"));
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

fn gather_dense(n: usize, spec: &FeatureSpec, rows: &[(&FeatureRow, &Pooled)]) -> Result<Tensor> {
    let width = spec.width.unwrap_or(0);
    let mut all = Vec::with_capacity(rows.len() * width);
    for (row, _) in rows {
        match &row.values[n] {
            FeatureValues::Dense(numbers) => all.extend_from_slice(numbers),
            FeatureValues::Ids { .. } => return Err(Error::internal("ids where a tower takes numbers")),
        }
    }
    Tensor::new(vec![rows.len(), width], all)
}
