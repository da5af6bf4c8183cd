//! Lookups of all features of a batch in one call: embedding bags (pooled) and sequences.
//!
//! A lookup has two phases. *Begin* resolves ids to rows and sends requests for rows of remote sources, without waiting. *Finish*
//! pools rows in memory while these requests are in progress, then waits for the answers. Features of an unsharded table in
//! memory are pooled straight into the output; [`super::shard`] describes lookups in sharded tables.

use std::borrow::Cow;
use std::sync::Arc;

use super::jagged::{Feature, JaggedTensor, KeyedJaggedTensor};
use super::keyed::{KeyedTensor, Layout};
use super::report::{Lookup, LookupReport, TableCounts};
use super::shard::gather::{self, Travelling};
use super::shard::input::{self, FeatureBags, ShardedInput};
use super::shard::output;
use super::table::Table;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::pool::{self, BagSums, Bags};

/// Combination of the rows of a bag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Sum of the rows, each multiplied by its id's weight if there are weights.
    #[default]
    Sum,
    /// Mean: the weighted sum divided by the number of ids, as in TorchRec (not by the sum of the weights).
    Mean,
    /// No pooling: each row remains an element of a sequence ([`EmbeddingCollection`]).
    None,
}

/// A feature that is looked up and pooled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BagConfig {
    /// Key of the feature in the batch ([`KeyedJaggedTensor`]).
    pub feature: String,
    /// Name of the table.
    pub table: String,
    /// Combination of the rows.
    pub pooling: Pooling,
}

/// A feature that is looked up without pooling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceConfig {
    /// Key of the feature in the batch ([`KeyedJaggedTensor`]).
    pub feature: String,
    /// Name of the table.
    pub table: String,
}

/// Rows of one feature: the feature's key, and one list of rows per example.
pub type Sequence = (String, JaggedTensor<f32>);

/// A feature that reads one of the tables.
#[derive(Clone, Debug)]
struct Use {
    feature: String,
    /// Index of the table.
    table: usize,
    pooling: Pooling,
}

impl Use {
    fn new(tables: &[Arc<Table>], feature: &str, table: &str, pooling: Pooling) -> Result<Self> {
        let mut found = tables.iter().enumerate().filter(|(_, t)| t.name() == table).map(|(i, _)| i);
        let place = match (found.next(), found.next()) {
            (Some(place), None) => place,
            (None, _) => return Err(Error::invalid(format!("no table is named `{table}`"))),
            _ => return Err(Error::invalid(format!("table `{table}` occurs twice"))),
        };
        Ok(Use { feature: feature.to_owned(), table: place, pooling })
    }

    /// Returns the ids of the feature.
    fn of<'a>(&self, ids: &'a KeyedJaggedTensor) -> Result<Feature<'a>> {
        let key = &self.feature;
        ids.get(key).ok_or_else(|| Error::invalid(format!("feature `{key}` is missing, got {:?}", ids.keys())))
    }
}

/// Pooled lookups over a set of tables, in memory, sharded or remote.
#[derive(Clone, Debug)]
pub struct EmbeddingBagCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    layout: Arc<Layout>,
    kernels: Kernels,
}

/// A pooled lookup between its two phases: remote rows have been requested.
pub struct StartedBags<'a> {
    layout: &'a Arc<Layout>,
    examples: usize,
    started: Started<'a>,
}

impl EmbeddingBagCollection {
    /// Creates a collection of the features of `bags` over `tables`. The output's keys are the features in the order of `bags`; a
    /// feature that reads several tables becomes `feature@table`.
    ///
    /// # Errors
    /// `Invalid` for an unknown or duplicate table, a feature that occurs twice with the same table, or a feature without
    /// pooling; `Unsupported` if the requested kernels cannot run on this CPU.
    pub fn new(tables: Vec<Arc<Table>>, bags: &[BagConfig]) -> Result<Self> {
        if let Some(bag) = bags.iter().find(|b| b.pooling == Pooling::None) {
            return Err(Error::invalid(format!("feature `{}` has no pooling, expected sum or mean", bag.feature)));
        }
        let used = |b: &BagConfig| Use::new(&tables, &b.feature, &b.table, b.pooling);
        let uses: Vec<Use> = bags.iter().map(used).collect::<Result<_>>()?;
        let keys = bags.iter().map(|b| match bags.iter().filter(|o| o.feature == b.feature).count() {
            1 => b.feature.clone(),
            _ => format!("{}@{}", b.feature, b.table),
        });
        let layout = Arc::new(Layout::new(keys.collect(), &widths(&tables, &uses))?);
        Ok(EmbeddingBagCollection { tables, uses, layout, kernels: Kernels::detect()? })
    }

    /// Replaces the kernels that pool rows.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Returns keys and columns of the output.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// Returns the pooled embeddings of all examples of `ids`, and counts of the ids by outcome. Runs both phases.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::begin`] and [`StartedBags::finish`].
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(KeyedTensor, LookupReport)> {
        self.begin(ids, terms)?.finish()
    }

    /// Returns true if the row of some id is remote, so that a lookup may wait for another machine.
    pub fn needs_fetch(&self, ids: &KeyedJaggedTensor) -> bool {
        let fetches = |used: &Use| {
            let table = &self.tables[used.table];
            table.is_fetched() && ids.get(&used.feature).is_some_and(|f| f.values().iter().any(|&id| table.fetches(id)))
        };
        self.uses.iter().any(fetches)
    }

    /// Begins a lookup: sends requests for remote rows and returns immediately.
    ///
    /// # Errors
    /// `Invalid` if a feature is missing in `ids`.
    pub fn begin<'a>(&'a self, ids: &'a KeyedJaggedTensor, terms: &Lookup) -> Result<StartedBags<'a>> {
        let bags = |used: &Use| {
            let feature = used.of(ids)?;
            Ok(FeatureBags {
                table: used.table,
                ids: feature.values(),
                offsets: Cow::Borrowed(feature.offsets()),
                weights: feature.weights(),
                mean: used.pooling == Pooling::Mean,
                examples: None,
            })
        };
        let features = self.uses.iter().map(bags).collect::<Result<_>>()?;
        let started = Started::new(&self.tables, self.kernels, features, ids.stride(), terms);
        Ok(StartedBags { layout: &self.layout, examples: ids.stride(), started })
    }
}

impl StartedBags<'_> {
    /// Returns the pooled embeddings of all examples, and counts of the ids by outcome.
    ///
    /// # Errors
    /// `Unavailable` or `DeadlineExceeded` if remote rows are missing and the options forbid degraded rows; `Corrupt` if a source
    /// returns other rows than requested.
    pub fn finish(mut self) -> Result<(KeyedTensor, LookupReport)> {
        let mut out = KeyedTensor::zeros(self.layout.clone(), self.examples);
        let (stride, layout) = (self.layout.width(), self.layout);
        self.started.pool_whole(|number, pool| {
            pool(&mut BagSums { data: out.values_mut(), stride, column: layout.columns(number).start });
        });
        let report = self.started.pool_cut(|number, assemble| {
            assemble(&mut BagSums { data: out.values_mut(), stride, column: layout.columns(number).start });
        })?;
        Ok((out, report))
    }
}

/// Sequence lookups over a set of tables, without pooling: one row per id.
#[derive(Clone, Debug)]
pub struct EmbeddingCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    kernels: Kernels,
}

impl EmbeddingCollection {
    /// Creates a collection of the features of `sequences` over `tables`.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::new`]; duplicate features are rejected.
    pub fn new(tables: Vec<Arc<Table>>, sequences: &[SequenceConfig]) -> Result<Self> {
        let used = |s: &SequenceConfig| Use::new(&tables, &s.feature, &s.table, Pooling::Sum);
        let uses: Vec<Use> = sequences.iter().map(used).collect::<Result<_>>()?;
        // `Layout::new` rejects a feature that occurs twice.
        Layout::new(uses.iter().map(|u| u.feature.clone()).collect(), &widths(&tables, &uses))?;
        Ok(EmbeddingCollection { tables, uses, kernels: Kernels::detect()? })
    }

    /// Returns the tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// Returns one jagged tensor of rows per feature, in the order of the configuration. Ids without a row give rows of zeros;
    /// weights are not applied.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::lookup`].
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(Vec<Sequence>, LookupReport)> {
        let features: Vec<Feature<'_>> = self.uses.iter().map(|u| u.of(ids)).collect::<Result<_>>()?;
        let each_id = self.uses.iter().zip(&features).map(|(used, feature)| FeatureBags {
            table: used.table,
            ids: feature.values(),
            offsets: Cow::Owned((0..=feature.values().len()).collect()),
            weights: None,
            mean: false,
            examples: Some(feature.offsets()),
        });
        let bags = each_id.collect();
        let mut started = Started::new(&self.tables, self.kernels, bags, ids.stride(), terms);
        let width = |number: usize| self.tables[self.uses[number].table].width();
        let mut values: Vec<Vec<f32>> =
            features.iter().enumerate().map(|(number, f)| vec![0f32; f.values().len() * width(number)]).collect();
        started.pool_whole(|number, pool| {
            pool(&mut BagSums { data: &mut values[number], stride: width(number), column: 0 });
        });
        let report = started.pool_cut(|number, assemble| {
            assemble(&mut BagSums { data: &mut values[number], stride: width(number), column: 0 });
        })?;
        let sequence = |(number, values): (usize, Vec<f32>)| {
            let feature = &features[number];
            let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
            (self.uses[number].feature.clone(), JaggedTensor::of_rows(values, width(number), offsets))
        };
        Ok((values.into_iter().enumerate().map(sequence).collect(), report))
    }
}

/// State of a lookup of bags or sequences between its two phases.
struct Started<'a> {
    tables: &'a [Arc<Table>],
    kernels: Kernels,
    terms: Lookup,
    input: ShardedInput<'a>,
    travelling: Travelling<'a>,
    report: LookupReport,
}

/// Writes the embeddings of one feature to an output.
type Write<'a> = &'a mut dyn FnMut(&mut BagSums<'_>);

impl<'a> Started<'a> {
    fn new(
        tables: &'a [Arc<Table>],
        kernels: Kernels,
        features: Vec<FeatureBags<'a>>,
        examples: usize,
        terms: &Lookup,
    ) -> Self {
        let counts = |t: &Arc<Table>| TableCounts { table: t.name().to_owned(), ..TableCounts::default() };
        let mut report = tables.iter().map(counts).collect();
        let input = input::distribute(tables, features, examples, &mut report);
        let travelling = gather::ask(tables, &input, terms);
        Started { tables, kernels, terms: terms.clone(), input, travelling, report }
    }

    /// Pools the features of unsharded tables in memory; calls `place` with each feature's index and a function that writes its
    /// embeddings.
    fn pool_whole(&mut self, mut place: impl FnMut(usize, Write<'_>)) {
        for (number, feature) in self.input.features.iter().enumerate() {
            let table = &self.tables[feature.table];
            let Some(rows) = table.host_rows() else { continue };
            let resolved = table.rows_of(feature.ids, &mut self.report[feature.table]);
            let bags = Bags { ids: &resolved, offsets: &feature.offsets, weights: feature.weights, mean: feature.mean };
            place(number, &mut |out| pool::pool(self.kernels, &rows, &bags, out));
        }
    }

    /// Waits for remote rows and assembles the features of all other tables; calls `place` like [`Started::pool_whole`].
    fn pool_cut(mut self, mut place: impl FnMut(usize, Write<'_>)) -> Result<LookupReport> {
        let Started { tables, kernels, ref terms, ref input, .. } = self;
        if tables.iter().all(|t| t.host_rows().is_some()) {
            return Ok(self.report);
        }
        let pieces = gather::gather(tables, input, self.travelling, terms, &mut self.report)?;
        let mut pooled = Ok(());
        for (number, feature) in input.features.iter().enumerate() {
            let table = &tables[feature.table];
            if table.host_rows().is_none() && pooled.is_ok() {
                place(number, &mut |out| {
                    pooled = output::pool_feature(table, number, input, (&pieces, kernels), out);
                });
            }
        }
        pooled.map(|()| self.report)
    }
}

fn widths(tables: &[Arc<Table>], uses: &[Use]) -> Vec<usize> {
    uses.iter().map(|u| tables[u.table].width()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::spec::Unseen;
    use sterling_kernels::cpu::pool::RowFormat;

    #[test]
    fn pooling_matches_a_hand_computed_example() {
        let items =
            Arc::new(Table::from_f32("items", 2, &[1., 2., 3., 4., 5., 6.], RowFormat::F32, Unseen::Zero).unwrap());
        let tags = Arc::new(Table::from_f32("tags", 1, &[10., 20.], RowFormat::F16, Unseen::Row(1)).unwrap());
        let bag =
            |feature: &str, table: &str, pooling| BagConfig { feature: feature.into(), table: table.into(), pooling };
        let bags = [bag("a", "items", Pooling::Sum), bag("b", "tags", Pooling::Mean), bag("c", "items", Pooling::Mean)];
        let ebc = EmbeddingBagCollection::new(vec![items, tags], &bags).unwrap();
        let ids =
            KeyedJaggedTensor::from_lengths(["c", "a", "b"], vec![0, 1, 2, 2, 7, 0, 99], &[2, 0, 1, 2, 2, 0], None)
                .unwrap();
        let (out, report) = ebc.lookup(&ids, &Lookup::default()).unwrap();
        assert_eq!(out.keys(), ["a", "b", "c"]);
        assert_eq!(out.values(), [5., 6., 15., 2., 3., 5., 6., 0., 0., 0.]);
        assert_eq!((report[0].ids, report[0].unseen, report[1].unseen), (5, 1, 1));
        assert!(ebc.lookup(&ids.permute(&[0]).unwrap(), &Lookup::default()).is_err());
    }
}
