//! Kinds of the columns in each part. A part is read and embedded separately. The inputs of vectors and features must therefore
//! have the same kind in all parts, or the complete catalogue would have been read differently. Other columns get their final
//! kind when the parts are combined.

use std::collections::BTreeMap;

use super::super::embed;
use super::piece::PieceNote;
use super::terms::{PartFolders as _, PartItems, PartTerms};
use sterling_batch::jobs::JobFolder;
use sterling_core::error::{Error, Result};
use sterling_index::columns::ItemValues;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::Package;

/// Start of the name of a vector column's kind; the width follows.
const VECTORS: &str = "vectors of ";

/// Returns the kind of each column that has a value, by column name.
pub(super) fn kinds(items: &Items) -> BTreeMap<String, String> {
    let columns = items.columns.iter().map(|column| (column.name.clone(), kind(&column.values).to_owned()));
    let dense = items.dense.iter().map(|(name, rows)| (name.clone(), format!("{VECTORS}{} numbers", rows.cols())));
    columns.chain(dense).collect()
}

fn kind(values: &ItemValues) -> &'static str {
    match values {
        ItemValues::Integers { .. } => "integers",
        ItemValues::Texts { .. } => "texts",
        ItemValues::Floats(_) => "numbers",
    }
}

/// Rejects vector columns that are missing or have another kind in another part, and rows of a vector file that do not match the
/// items.
///
/// # Errors
/// `Invalid` with the column and both files; `Conflict` with the file if an earlier file has changed.
pub(super) fn check_vectors(job: &JobFolder<PartTerms>, parts: &[PieceNote<PartItems>]) -> Result<()> {
    let mut before = 0;
    for (unit, part) in parts.iter().enumerate() {
        if let Some(first) = part.holds.first_row.filter(|first| *first != before) {
            return Err(Error::conflict(format!(
                "{}: its vectors begin at row {first} of the vector file, but {before} items precede {}; remove the \
                 folder to rebuild it",
                job.part(unit).display(),
                job.units()[unit].input.display()
            )));
        }
        before += part.holds.items;
        for (name, expected) in part.holds.kinds.iter().filter(|(_, kind)| kind.starts_with(VECTORS)) {
            let place = job.units()[unit].input.display();
            check_column(job, parts, (name, expected), false, &place)?;
        }
    }
    Ok(())
}

/// Rejects a catalogue without a column that the item tower reads, or in which such a column has different kinds in the parts.
///
/// # Errors
/// `Invalid` with the column and the file.
pub(super) fn check_sources(
    job: &JobFolder<PartTerms>,
    parts: &[PieceNote<PartItems>],
    package: Option<&Package>,
    items: &Items,
) -> Result<()> {
    let is_vectors =
        |name: &str| parts.iter().any(|part| part.holds.kinds.get(name).is_some_and(|k| k.starts_with(VECTORS)));
    embed::check_sources(package, |name| items.has(name) || is_vectors(name))?;
    for source in embed::sources(package) {
        if let Some(column) = items.columns.iter().find(|column| column.name == source) {
            // If no item of a part has a value in the column, each item of the part counts as one with a missing value.
            check_column(job, parts, (source, kind(&column.values)), true, &"all files together")?;
        }
    }
    Ok(())
}

fn check_column(
    job: &JobFolder<PartTerms>,
    parts: &[PieceNote<PartItems>],
    (name, expected): (&str, &str),
    may_miss: bool,
    place: &dyn std::fmt::Display,
) -> Result<()> {
    for (unit, part) in parts.iter().enumerate().filter(|(_, part)| part.holds.items > 0) {
        let got = part.holds.kinds.get(name).map(String::as_str);
        if got.map_or(!may_miss, |got| got != expected) {
            return Err(Error::invalid(format!(
                "column `{name}`: {} in {}, expected {expected} as in {place}",
                got.unwrap_or("no values"),
                job.units()[unit].input.display()
            )));
        }
    }
    Ok(())
}
