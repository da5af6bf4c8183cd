//! Lookups of all features of a batch in one call.
//!
//! A lookup has two phases. *Begin* finds the rows of ids and sends for those that are fetched; it
//! waits for nothing. *Finish* pools what lies in memory while those rows travel, then waits for them. The features of a table that is
//! whole in memory are pooled straight into their place in the output; those of a cut table go the way that [`super::shard`] tells.

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

/// How the rows of a bag become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their sum, each times its id's weight where there are weights.
    #[default]
    Sum,
    /// That sum divided by the number of ids (not by the sum of the weights, as TorchRec does it).
    Mean,
    /// They do not: each keeps its place in a sequence, which is an [`EmbeddingCollection`]'s.
    None,
}

/// One pooled feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BagConfig {
    /// The key of the ids.
    pub feature: String,
    /// The name of the table.
    pub table: String,
    /// How its rows become one.
    pub pooling: Pooling,
}

/// One feature whose rows are kept apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceConfig {
    /// The key of the ids.
    pub feature: String,
    /// The name of the table.
    pub table: String,
}

/// The rows of one feature: its key and one run of rows an example.
pub type Sequence = (String, JaggedTensor<f32>);

/// One feature that reads one of the tables.
#[derive(Clone, Debug)]
struct Use {
    feature: String,
    /// Its place among the tables.
    table: usize,
    pooling: Pooling,
}

impl Use {
    fn new(tables: &[Arc<Table>], feature: &str, table: &str, pooling: Pooling) -> Result<Self> {
        let mut found = tables.iter().enumerate().filter(|(_, t)| t.name() == table).map(|(i, _)| i);
        let place = match (found.next(), found.next()) {
            (Some(place), None) => place,
            (None, _) => return Err(Error::invalid(format!("table `{table}` is not among the tables"))),
            _ => return Err(Error::invalid(format!("table `{table}` comes twice"))),
        };
        Ok(Use { feature: feature.to_owned(), table: place, pooling })
    }

    /// The ids of the feature.
    fn of<'a>(&self, ids: &'a KeyedJaggedTensor) -> Result<Feature<'a>> {
        let key = &self.feature;
        ids.get(key).ok_or_else(|| Error::invalid(format!("feature `{key}` is missing, got {:?}", ids.keys())))
    }
}

/// Pooled lookups over a set of tables, each whole in memory, in shards, or fetched.
#[derive(Clone, Debug)]
pub struct EmbeddingBagCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    layout: Arc<Layout>,
    kernels: Kernels,
}

/// A pooled lookup that has begun: rows that are fetched are on their way.
pub struct StartedBags<'a> {
    layout: &'a Arc<Layout>,
    examples: usize,
    started: Started<'a>,
}

impl EmbeddingBagCollection {
    /// The features of `bags` over `tables`. The output's keys are the features in the order of `bags`; a feature that several
    /// tables serve becomes `feature@table`.
    ///
    /// # Errors
    /// `Invalid` for a table that is not there or comes twice, a feature that comes twice with the same table, or one without
    /// pooling; `Unsupported` where the kernels asked for do not run here.
    pub fn new(tables: Vec<Arc<Table>>, bags: &[BagConfig]) -> Result<Self> {
        if let Some(bag) = bags.iter().find(|b| b.pooling == Pooling::None) {
            return Err(Error::invalid(format!("feature `{}` without pooling, expected sum or mean", bag.feature)));
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

    /// The same collection with other kernels.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Keys and columns of the output.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// The pooled embeddings of all examples of `ids`, and what became of the ids: both phases, one after the other.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::begin`] and [`StartedBags::finish`].
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(KeyedTensor, LookupReport)> {
        self.begin(ids, terms)?.finish()
    }

    /// True where a row of some id is fetched, so that a lookup may have to wait for another machine.
    pub fn needs_fetch(&self, ids: &KeyedJaggedTensor) -> bool {
        let fetches = |used: &Use| {
            let table = &self.tables[used.table];
            table.is_fetched() && ids.get(&used.feature).is_some_and(|f| f.values().iter().any(|&id| table.fetches(id)))
        };
        self.uses.iter().any(fetches)
    }

    /// Begins a lookup: sends for the rows that are fetched and returns at once.
    ///
    /// # Errors
    /// `Invalid` where a feature is missing in `ids`.
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
    /// The pooled embeddings of all examples, and what became of the ids.
    ///
    /// # Errors
    /// `Unavailable` or `DeadlineExceeded` where rows could not be fetched and the terms refuse that; `Corrupt` where a source
    /// answers with other rows than it was asked for.
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

/// Sequence lookups over a set of tables: every id keeps its own row.
#[derive(Clone, Debug)]
pub struct EmbeddingCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    kernels: Kernels,
}

impl EmbeddingCollection {
    /// The features of `sequences` over `tables`.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::new`]; a feature may come once.
    pub fn new(tables: Vec<Arc<Table>>, sequences: &[SequenceConfig]) -> Result<Self> {
        let used = |s: &SequenceConfig| Use::new(&tables, &s.feature, &s.table, Pooling::Sum);
        let uses: Vec<Use> = sequences.iter().map(used).collect::<Result<_>>()?;
        // A feature comes once, which a layout of them checks.
        Layout::new(uses.iter().map(|u| u.feature.clone()).collect(), &widths(&tables, &uses))?;
        Ok(EmbeddingCollection { tables, uses, kernels: Kernels::detect()? })
    }

    /// The tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// One jagged tensor of rows a feature, in the order of the configuration. Ids without a row are rows of zeros; weights
    /// are not applied.
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

/// What a lookup of either kind is between its phases.
struct Started<'a> {
    tables: &'a [Arc<Table>],
    kernels: Kernels,
    terms: Lookup,
    input: ShardedInput<'a>,
    travelling: Travelling<'a>,
    report: LookupReport,
}

/// Writes the embeddings of one feature to their place.
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

    /// Pools the features of tables that are whole in memory; `place` is given each one's number and what writes it.
    fn pool_whole(&mut self, mut place: impl FnMut(usize, Write<'_>)) {
        for (number, feature) in self.input.features.iter().enumerate() {
            let table = &self.tables[feature.table];
            let Some(rows) = table.host_rows() else { continue };
            let resolved = resolve(table, feature.ids, &mut self.report[feature.table]);
            let bags = Bags { ids: &resolved, offsets: &feature.offsets, weights: feature.weights, mean: feature.mean };
            place(number, &mut |out| pool::pool(self.kernels, &rows, &bags, out));
        }
    }

    /// Waits for the rows that are fetched and puts together the features of all other tables, as [`Started::pool_whole`] does.
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

/// The rows that ids take, -1 for none. Ids that are all rows are taken as they are.
fn resolve<'a>(table: &Table, ids: &'a [i64], counts: &mut TableCounts) -> Cow<'a, [i64]> {
    counts.ids += ids.len() as u64;
    // A negative id is a large one without its sign; without an early exit the comparison runs in vectors.
    let unseen = ids.iter().filter(|&&id| id as u64 >= table.rows()).count();
    if unseen == 0 {
        return Cow::Borrowed(ids);
    }
    counts.unseen += unseen as u64;
    Cow::Owned(ids.iter().map(|&id| table.resolve(id).0.map_or(-1, |row| row as i64)).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::spec::Unseen;
    use sterling_kernels::cpu::pool::RowFormat;

    #[test]
    fn a_small_collection_pools_by_hand() {
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
