//! Which feature reads which table: what every collection, over whole tables or over shards, is told when it is made.

use std::sync::Arc;

use crate::embedding::jagged::{Feature, KeyedJaggedTensor};
use crate::embedding::keyed::Layout;
use crate::embedding::lookup::{BagConfig, Pooling, SequenceConfig};
use crate::embedding::table::TableSpec;
use crate::error::{Error, Result};

/// One feature that reads one of the tables.
#[derive(Clone, Debug)]
pub(super) struct Use {
    pub(super) feature: String,
    /// Its place among the tables.
    pub(super) table: usize,
    pub(super) pooling: Pooling,
}

impl Use {
    /// The ids of the feature.
    pub(super) fn of<'a>(&self, ids: &'a KeyedJaggedTensor) -> Result<Feature<'a>> {
        let key = &self.feature;
        ids.get(key).ok_or_else(|| Error::invalid(format!("feature `{key}` is missing, got {:?}", ids.keys())))
    }
}

/// Pooled features over `tables`, and the keys and columns of what they give.
pub(super) fn of_bags<'a>(
    tables: impl Iterator<Item = &'a TableSpec>,
    bags: &[BagConfig],
) -> Result<(Vec<Use>, Arc<Layout>)> {
    let tables: Vec<&TableSpec> = tables.collect();
    let used =
        |b: &BagConfig| Ok(Use { feature: b.feature.clone(), table: find(&tables, &b.table)?, pooling: b.pooling });
    let uses: Vec<Use> = bags.iter().map(used).collect::<Result<_>>()?;
    let keys = bags.iter().map(|b| match bags.iter().filter(|o| o.feature == b.feature).count() {
        1 => b.feature.clone(),
        _ => format!("{}@{}", b.feature, b.table),
    });
    let layout = Layout::new(keys.collect(), &widths(&tables, &uses))?;
    Ok((uses, Arc::new(layout)))
}

/// Features over `tables` whose rows are kept apart; each comes once, which the layout of them checks.
pub(super) fn of_sequences<'a>(
    tables: impl Iterator<Item = &'a TableSpec>,
    sequences: &[SequenceConfig],
) -> Result<Vec<Use>> {
    let tables: Vec<&TableSpec> = tables.collect();
    let used = |s: &SequenceConfig| {
        Ok(Use { feature: s.feature.clone(), table: find(&tables, &s.table)?, pooling: Pooling::Sum })
    };
    let uses: Vec<Use> = sequences.iter().map(used).collect::<Result<_>>()?;
    Layout::new(uses.iter().map(|u| u.feature.clone()).collect(), &widths(&tables, &uses))?;
    Ok(uses)
}

fn widths(tables: &[&TableSpec], uses: &[Use]) -> Vec<usize> {
    uses.iter().map(|u| tables[u.table].width).collect()
}

fn find(tables: &[&TableSpec], name: &str) -> Result<usize> {
    let mut found = tables.iter().enumerate().filter(|(_, t)| t.name == name).map(|(i, _)| i);
    match (found.next(), found.next()) {
        (Some(table), None) => Ok(table),
        (None, _) => Err(Error::invalid(format!("table `{name}` is not among the tables"))),
        _ => Err(Error::invalid(format!("table `{name}` comes twice"))),
    }
}
