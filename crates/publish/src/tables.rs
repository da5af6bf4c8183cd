//! Embedding tables of a package in the formats of a recipe.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::plan::Plan;
use sterling_core::error::{Error, Result};
use sterling_embedding::{RowFormat, Table};
use sterling_snapshot::model::{ModelSpec, Package};
use sterling_storage::files::{Checksum, TensorFile};

/// Converts the tables of a package to the formats of a recipe, and updates `model.toml` accordingly.
fn converted(package: &Package, formats: &BTreeMap<String, RowFormat>) -> Result<(ModelSpec, Vec<Arc<Table>>)> {
    let known = || package.tables.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    if let Some(name) = formats.keys().find(|n| package.tables.iter().all(|t| t.name() != *n)) {
        return Err(Error::invalid(format!(
            "tables.{name}: the model has no such table, expected some of: {}",
            known()
        )));
    }
    let mut spec = package.spec.clone();
    let convert = |table: &Arc<Table>| match formats.get(table.name()) {
        Some(format) if *format != table.spec().format => table.converted(*format).map(Arc::new),
        _ => Ok(table.clone()),
    };
    let tables: Vec<Arc<Table>> = package.tables.iter().map(convert).collect::<Result<_>>()?;
    for (spec, table) in spec.tables.iter_mut().zip(&tables) {
        let format = table.spec().format;
        spec.format = format.is_quantised().then(|| format.name().to_owned());
    }
    Ok((spec, tables))
}

/// Returns the `model.toml` to publish, for items with vectors of this width, and the converted tables.
pub(super) fn described(
    plan: &Plan,
    package: Option<&Package>,
    dimension: usize,
) -> Result<(ModelSpec, Vec<Arc<Table>>)> {
    match (package, plan.source.name()) {
        (Some(package), _) => converted(package, &plan.recipe.tables),
        (None, Some(name)) => Ok((ModelSpec::embedding_only(name, dimension), Vec::new())),
        (None, None) => Err(Error::invalid("name: missing, expected a name for an embedding-only model")),
    }
}

/// Returns whether a table in this file of the package was converted to another format.
pub(super) fn is_converted(file: &str, package: &Package, tables: &[Arc<Table>]) -> bool {
    in_file(file, package, tables).any(|(before, now)| before.spec().format != now.spec().format)
}

/// Writes the tables of one file of the package.
pub(super) fn write(path: &Path, file: &str, package: &Package, tables: &[Arc<Table>]) -> Result<Checksum> {
    let mut out = TensorFile::new();
    in_file(file, package, tables).try_for_each(|(_, table)| table.encode(&mut out))?;
    out.write(path)
}

/// Returns pairs of tables from one file: as in the package, and as published.
fn in_file<'a>(
    file: &'a str,
    package: &'a Package,
    tables: &'a [Arc<Table>],
) -> impl Iterator<Item = (&'a Table, &'a Table)> {
    let both = package.tables.iter().zip(tables).map(|(before, now)| (&**before, &**now));
    package.spec.tables.iter().zip(both).filter(move |(spec, _)| spec.file == file).map(|(_, both)| both)
}
