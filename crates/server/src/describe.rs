//! Descriptions of snapshots in the types of the API.

use sterling_api::{
    CalibrationInfo, CodedCurveInfo, ColumnInfo, ColumnValue, CurveInfo, FeatureInfo, FileInfo, InputInfo, ModelInfo,
    QueryInfo, ShardInfo, TableInfo, VectorInfo,
};
use sterling_core::error::Result;
use sterling_core::request::Retrieve;
use sterling_embedding::Table;
use sterling_graph::tower::{FeatureKind, FeatureSpec, Readable, TensorOwner};
use sterling_index::columns::{Column, ColumnKind};
use sterling_serving::view::Category;
use sterling_snapshot::model::{Merge, QuerySpec, VectorSpec};
use sterling_snapshot::{Calibration, CodedCurve, RecallCurve, SearchGoal, Snapshot, placed};

fn shard(snapshot: &Snapshot) -> Option<ShardInfo> {
    let (part, all) = (snapshot.manifest.shard?, snapshot.shards.as_ref()?);
    Some(ShardInfo { shard: part.shard, shards: part.shards, items: part.items, digest: all.digest() })
}

/// Describes a snapshot.
pub fn model_info(snapshot: &Snapshot) -> ModelInfo {
    let spec = &snapshot.package.spec;
    let mut features: Vec<FeatureInfo> = spec.user.iter().flat_map(|u| &u.features).map(feature).collect();
    features.sort_by(|a, b| a.name.cmp(&b.name));
    features.dedup_by(|a, b| a.name == b.name);
    let (serving, lists, calibration) =
        (&snapshot.recipe.serving, snapshot.index.lists(), snapshot.calibration.as_ref());
    let candidates = snapshot.candidates(Retrieve::K_DEFAULT);
    let wanted = SearchGoal { candidates, pass_rate: 1.0, recall: serving.recall };
    ModelInfo {
        name: spec.name.clone(),
        version: snapshot.manifest.version,
        digest: snapshot.digest().into(),
        description: spec.description.clone(),
        dimension: spec.dimension,
        items: snapshot.manifest.items,
        lists: snapshot.manifest.lists,
        shard: shard(snapshot),
        features,
        queries: spec.queries().iter().map(|q| query(q, snapshot)).collect(),
        merge: spec.user.as_ref().filter(|u| !u.queries.is_empty()).map(|u| merge(u.merge.unwrap_or_default()).into()),
        tables: snapshot.package.tables.iter().map(|t| table(t)).collect(),
        vectors: spec.item.vectors.iter().map(vector).collect(),
        inputs: snapshot.package.overarch.iter().flat_map(|o| o.declared().all()).map(input).collect(),
        columns: snapshot.columns.list().map(column_info).collect(),
        tasks: spec.tasks.iter().map(|t| t.name.clone()).collect(),
        value: spec.value.expression.clone(),
        constants: spec.value.constants.clone(),
        candidates,
        page_candidates: serving.candidates,
        recall: serving.recall,
        probes: match calibration.filter(|_| serving.probes == 0) {
            Some(calibration) => calibration.choose(wanted, snapshot.index.items(), lists).probes,
            None => serving.probes_of(lists),
        },
        missing: Vec::new(),
        // Cannot fail: a calibration consists of numbers.
        calibration: calibration.and_then(|c| calibration_info(c).ok()),
        bytes: snapshot.manifest.bytes(),
        memory_bytes: 0,
        labels: Vec::new(),
    }
}

/// Describes a calibration.
///
/// # Errors
/// As [`Calibration::digest`].
pub fn calibration_info(calibration: &Calibration) -> Result<CalibrationInfo> {
    let coded = |c: &CodedCurve| CodedCurveInfo {
        selected: c.selected.clone(),
        probes: c.probes.clone(),
        recall: c.recall.clone(),
        low: c.low.clone(),
    };
    let curve = |c: &RecallCurve| CurveInfo {
        k: c.k,
        pass_rate: c.pass_rate,
        probes: c.probes.clone(),
        recall: c.recall.clone(),
        low: c.low.clone(),
        codes: c.codes.as_ref().map(coded),
    };
    Ok(CalibrationInfo {
        digest: calibration.digest()?,
        source: calibration.source.clone(),
        queries: calibration.queries,
        targets: calibration.targets.clone(),
        curves: calibration.curves.iter().map(curve).collect(),
    })
}

fn feature(spec: &FeatureSpec) -> FeatureInfo {
    let kind = match spec.kind {
        FeatureKind::Ids => "ids",
        FeatureKind::Category => "category",
        FeatureKind::Dense => "dense",
        FeatureKind::Text => "text",
    };
    FeatureInfo { name: spec.source().into(), kind: kind.into(), width: spec.width, length: spec.length }
}

fn query(spec: &QuerySpec, snapshot: &Snapshot) -> QueryInfo {
    let candidates = spec.candidates.unwrap_or(snapshot.recipe.serving.candidates);
    QueryInfo { name: spec.name.clone(), candidates, weight: spec.weight }
}

fn merge(how: Merge) -> &'static str {
    match how {
        Merge::Union => "union",
        Merge::Intersection => "intersection",
        Merge::Weighted => "weighted",
    }
}

fn vector(spec: &VectorSpec) -> VectorInfo {
    VectorInfo { name: spec.name.clone(), width: spec.width, format: spec.format.name().into() }
}

fn input(readable: &Readable) -> InputInfo {
    let whose = match readable.whose {
        TensorOwner::User => "user",
        TensorOwner::Candidate => "candidate",
    };
    InputInfo { name: readable.name.clone(), whose: whose.into(), shape: readable.shape.clone() }
}

/// Describes a column.
pub fn column_info(column: &Column) -> ColumnInfo {
    let kind = match column.kind() {
        ColumnKind::Integers => "integers",
        ColumnKind::Texts => "texts",
        ColumnKind::Floats => "floats",
    };
    ColumnInfo {
        name: column.name().into(),
        kind: kind.into(),
        filter: column.is_filterable(),
        distinct: (column.kind() != ColumnKind::Floats).then(|| column.dictionary_len()),
    }
}

fn table(table: &Table) -> TableInfo {
    TableInfo {
        name: table.name().into(),
        rows: table.rows(),
        width: table.width(),
        format: table.spec().format.name().into(),
        bytes: table.rows() * table.spec().row_bytes().unwrap_or_default() as u64,
        bytes_here: table.bytes_here(),
        placed: placed(table),
    }
}

/// Returns a value of a category with its number of items.
pub fn column_value((value, items): (Category<'_>, Option<usize>)) -> ColumnValue {
    let value = match value {
        Category::Integer(value) => value.into(),
        Category::Text(text) => text.into(),
    };
    ColumnValue { value, items }
}

/// Returns the files of a snapshot, by name.
pub fn files(snapshot: &Snapshot) -> Vec<FileInfo> {
    let files = snapshot.manifest.files.iter();
    files.map(|(name, sum)| FileInfo { name: name.clone(), bytes: sum.bytes }).collect()
}

/// Returns the 0th to the 100th percentile of `sizes`; empty for no sizes.
pub fn percentiles(sizes: &[u32]) -> Vec<u32> {
    let mut sorted = sizes.to_vec();
    sorted.sort_unstable();
    match sorted.len().checked_sub(1) {
        Some(last) => (0..=100).map(|percent| sorted[last * percent / 100]).collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::percentiles;

    #[test]
    fn percentiles_are_of_the_sizes() {
        let sizes: Vec<u32> = (0..201).rev().collect();
        assert_eq!(percentiles(&sizes), (0..=100).map(|p| p * 2).collect::<Vec<u32>>());
        assert_eq!(percentiles(&[7]), [7; 101]);
        assert!(percentiles(&[]).is_empty());
    }
}
