//! Folders of row files: Spark outputs, including subfolders and partition columns in folder names (`day=2`).
//!
//! Every file below a folder has rows, in path order, except files whose names begin with a dot or an underscore, which hold the
//! writer's metadata. An entry that is neither a file nor a folder, such as a dangling link, is an error, because rows must not be
//! skipped silently.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use percent_encoding::percent_decode_str;

use sterling_core::error::{Error, Result};
use sterling_storage::arrow::Cell;

/// Value that Hive and Spark write for null.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// A file with rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Partition columns from the folders around the file, outermost first: names and values, as text.
    pub columns: Vec<(String, String)>,
}

impl RowFile {
    /// Returns a file without partition columns, for a path that was named directly.
    pub fn alone(path: PathBuf) -> Self {
        RowFile { path, columns: Vec::new() }
    }

    /// Lists the row files below a folder in path order.
    ///
    /// # Errors
    /// `Invalid` with the path of an entry that is neither a file nor a folder, of a folder that contains itself through a link,
    /// and of a folder `NAME=VALUE` without a name; `NotFound` or `Io` with the path.
    pub fn below(folder: &Path) -> Result<Vec<Self>> {
        let mut found = Vec::new();
        collect(folder, &mut Vec::new(), &mut Vec::new(), &mut found)?;
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }
}

/// Collects the files below `folder`. `above` has the device and inode numbers of the folder's parents, `columns` the partition
/// columns in their names.
fn collect(
    folder: &Path,
    above: &mut Vec<(u64, u64)>,
    columns: &mut Vec<(String, String)>,
    found: &mut Vec<RowFile>,
) -> Result<()> {
    let io = |e| Error::io(folder.display(), e);
    let here = fs::metadata(folder).map_err(io)?;
    let this = (here.dev(), here.ino());
    if above.contains(&this) {
        return Err(Error::invalid(format!("{}: a link to a folder that contains it", folder.display())));
    }
    above.push(this);
    for entry in folder.read_dir().map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default();
        if matches!(name.as_encoded_bytes(), [b'.' | b'_', ..]) {
            continue;
        }
        let kind = fs::metadata(&path).map_err(|e| Error::io(path.display(), e))?.file_type();
        if kind.is_file() {
            found.push(RowFile { columns: columns.clone(), path });
        } else if kind.is_dir() {
            let column = column_of(&path)?;
            let had = columns.len();
            columns.extend(column);
            collect(&path, above, columns, found)?;
            columns.truncate(had);
        } else {
            return Err(Error::invalid(format!("{}: neither a file nor a folder", path.display())));
        }
    }
    above.pop();
    Ok(())
}

/// Parses the partition column in a folder name; names and values are percent-encoded as by Spark and Arrow.
fn column_of(folder: &Path) -> Result<Option<(String, String)>> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let Some((name, value)) = name.split_once('=') else { return Ok(None) };
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().ok().map(String::from);
    match (decoded(name).filter(|name| !name.is_empty()), decoded(value)) {
        (Some(name), Some(value)) => Ok(Some((name, value))),
        _ => Err(Error::invalid(format!("{}: expected a folder NAME=VALUE in UTF-8", folder.display()))),
    }
}

/// Types of partition columns: integer if every value in every file is an integer, else text.
#[derive(Debug, Default)]
pub struct FolderTypes {
    texts: BTreeSet<String>,
}

impl FolderTypes {
    /// Derives the types from the columns of all files.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a [(String, String)]>) -> Self {
        let columns = files.into_iter().flatten();
        let texts = columns.filter(|(_, value)| value != NULL && integer(value).is_none());
        FolderTypes { texts: texts.map(|(name, _)| name.clone()).collect() }
    }

    /// Returns the typed cells of a file's partition columns, which apply to each row.
    pub(super) fn cells(&self, columns: &[(String, String)]) -> Vec<(String, Cell)> {
        let cell = |name: &str, value: &str| match integer(value) {
            _ if value == NULL => Cell::Missing,
            Some(number) if !self.texts.contains(name) => Cell::Integers(vec![number]),
            _ => Cell::Texts(vec![value.to_owned()]),
        };
        columns.iter().map(|(name, value)| (name.clone(), cell(name, value))).collect()
    }
}

/// Parses an integer in its canonical spelling: `007` is not an integer.
fn integer(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number: &i64| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::items::Items;

    fn put(folder: &Path, name: &str, ids: std::ops::Range<i64>) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let line = |id: i64| format!("{{\"id\": {id}, \"embedding\": [1, {id}]}}\n");
        fs::write(path, ids.map(line).collect::<String>()).unwrap();
    }

    fn refused(folder: &Path) -> String {
        Items::read(folder, None).unwrap_err().to_string()
    }

    #[test]
    fn files_of_subfolders_are_read_in_the_order_of_their_paths() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        put(folder, "b.jsonl", 20..30);
        put(folder, "a/deep/x.jsonl", 0..5);
        put(folder, "_temporary/x.jsonl", 100..105);
        put(folder, "a/.hidden", 200..205);
        symlink(folder.join("b.jsonl"), folder.join("_link")).unwrap();
        assert_eq!(Items::read(folder, None).unwrap().ids, (0..5).chain(20..30).collect::<Vec<_>>());
    }

    #[test]
    fn names_of_folders_are_columns_of_their_rows() {
        use sterling_index::columns::ItemValues;
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        put(folder, "day=2/country=a%2Fb/x.jsonl", 0..2);
        put(folder, "day=10/country=7/x.jsonl", 2..3);
        put(folder, "day=__HIVE_DEFAULT_PARTITION__/country=c/x.jsonl", 3..4);
        // The file also stores the partition column, as Polars writes it.
        fs::write(
            folder.join("day=10/country=7/y.jsonl"),
            r#"{"id": 9, "embedding": [1, 2], "attributes": {"day": 11}}"#,
        )
        .unwrap();
        let items = Items::read(folder, None).unwrap();
        let column = |name: &str| &items.columns.iter().find(|column| column.name == name).unwrap().values;
        assert_eq!(items.ids, [2, 9, 0, 1, 3]);
        let ItemValues::Integers { offsets, values } = column("day") else { panic!("no integers") };
        assert_eq!((offsets.as_slice(), values.as_slice()), (&[0, 1, 2, 3, 4, 4][..], &[10, 11, 2, 2][..]));
        let ItemValues::Texts { values, .. } = column("country") else { panic!("no texts") };
        assert_eq!(values, &["7", "7", "a/b", "a/b", "c"]);
    }

    #[test]
    fn entries_without_rows_are_rejected_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        put(folder, "a.jsonl", 0..5);
        symlink("/nowhere/b.jsonl", folder.join("b.jsonl")).unwrap();
        assert!(refused(folder).contains("b.jsonl"), "{}", refused(folder));
        fs::remove_file(folder.join("b.jsonl")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.join("socket")).unwrap();
        assert!(refused(folder).contains("socket: neither a file nor a folder"), "{}", refused(folder));
        fs::remove_file(folder.join("socket")).unwrap();
        fs::create_dir(folder.join("sub")).unwrap();
        symlink(folder, folder.join("sub/back")).unwrap();
        assert!(refused(folder).contains("sub/back: a link to a folder that contains it"), "{}", refused(folder));
        fs::remove_file(folder.join("sub/back")).unwrap();
        fs::create_dir(folder.join("=3")).unwrap();
        assert!(refused(folder).contains("=3: expected a folder NAME=VALUE"), "{}", refused(folder));
    }
}
