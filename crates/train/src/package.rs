//! The package that a run starts from, and the one that it writes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use crate::model::Model;
use crate::requests::RequestSample;
use sterling_core::error::{Error, Kind, Result};
use sterling_embedding::Table;
use sterling_embedding::managed::tensor_name;
use sterling_embedding::train::MasterTable;
use sterling_snapshot::REQUESTS_FILE;
use sterling_snapshot::items::{ITEM_FILES, RowFile};
use sterling_snapshot::model::{Package, WARMUP_FILE};
use sterling_storage::files::{self, Checksum, TensorFile, write_atomic};

/// File of the optimizer state, written into a trained package, so that training can continue from it.
pub(crate) const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// File of the checksum of [`OPTIMIZER_FILE`], as JSON. Absent if another program wrote the state.
pub(crate) const OPTIMIZER_SUM_FILE: &str = "optimizer.checksum.json";

/// Compares the optimizer state in a package with its checksum, if there is one.
///
/// # Errors
/// `Corrupt` for another checksum or an invalid one; `Io` with the path.
pub(crate) fn check_optimizer(folder: &Path) -> Result<()> {
    let (file, of_sum) = (folder.join(OPTIMIZER_FILE), folder.join(OPTIMIZER_SUM_FILE));
    let text = match files::read(&of_sum) {
        Err(e) if e.kind() == Kind::NotFound => return Ok(()),
        text => text?,
    };
    let expected: Checksum =
        serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("{}: {e}", of_sum.display())))?;
    let found = Checksum::of_file(&file)?;
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (&found.xxh3, &expected.xxh3);
    Err(Error::corrupt(format!("{}: checksum {found}, expected {expected} of {OPTIMIZER_SUM_FILE}", file.display())))
}

/// Returns a digest of the files of a package and of its items.
///
/// # Errors
/// `NotFound` or `Io` with the path.
pub(crate) fn digest(package: &Package, items: &Path) -> Result<String> {
    let mut sums = BTreeMap::new();
    for name in package.files() {
        let sum = package.checksum(&name)?;
        sums.insert(name, sum.xxh3);
    }
    let optimizer = package.folder().join(OPTIMIZER_FILE);
    if optimizer.exists() {
        sums.insert(OPTIMIZER_FILE.into(), Checksum::of_file(&optimizer)?.xxh3);
    }
    let files = if items.is_dir() { RowFile::below(items)? } else { vec![RowFile::alone(items.to_owned())] };
    for RowFile { path, .. } in files {
        sums.insert(format!("items {}", path.display()), Checksum::of_file(&path)?.xxh3);
    }
    Ok(Checksum::of(format!("{sums:?}").as_bytes()).xxh3)
}

/// Writes a copy of the trained package with the tables and weights of a model, the sample requests, and the file
/// `optimizer`. The folder is renamed into place once all of it is durable. An existing folder with the same bytes,
/// left by a run that was killed afterwards, stays.
///
/// # Errors
/// `Conflict` if `out` is anything else; `NoSpace` or `Io` with the path; `Invalid` if a row cannot be stored in its table's
/// format.
pub(crate) fn write(
    out: &Path,
    package: &Package,
    model: &Model,
    requests: Option<&RequestSample>,
    optimizer: impl FnOnce(&Path) -> Result<Checksum>,
) -> Result<()> {
    if out.exists() {
        let again = files::temporary(out);
        write(&again, package, model, requests, optimizer)?;
        let is_same = sums(&again).map(|expected| sums(out).is_ok_and(|has| has == expected));
        fs::remove_dir_all(&again).map_err(|e| Error::io(again.display(), e))?;
        return match is_same? {
            true => Ok(()),
            false => Err(Error::conflict(format!(
                "{}: it exists and is not the package of this run, expected a path that does not exist; the checkpoints stay, \
                 so that the run ends with another one",
                out.display()
            ))),
        };
    }
    if let Some(above) = out.parent() {
        fs::create_dir_all(above).map_err(|e| Error::io(above.display(), e))?;
    }
    files::write_folder(out, |into| {
        let mut written = write_tables(into, package, model)?;
        for weights in model.weights() {
            let (file, bytes) = weights.written()?;
            write_atomic(&into.join(file), |to| to.write_all(&bytes))?;
            written.insert(file.to_owned());
        }
        // The golden answers of the warm-up belong to the old weights.
        let others = package.files().into_iter().filter(|name| name != WARMUP_FILE);
        let others = others.chain(ITEM_FILES.map(String::from)).chain(requests.is_none().then(|| REQUESTS_FILE.into()));
        for name in others.filter(|name| !written.contains(name)) {
            let from = package.folder().join(&name);
            if from.is_file() {
                let bytes = package.read_file(&name)?;
                write_atomic(&into.join(&name), |to| to.write_all(&bytes))?;
            }
        }
        let sum = optimizer(&into.join(OPTIMIZER_FILE))?;
        let text = serde_json::to_vec(&sum).map_err(|e| Error::internal(format!("{OPTIMIZER_SUM_FILE}: {e}")))?;
        write_atomic(&into.join(OPTIMIZER_SUM_FILE), |to| to.write_all(&text))?;
        if let Some(requests) = requests {
            let is_earlier = package.folder().join(REQUESTS_FILE).is_file();
            let earlier = if is_earlier { package.read_file(REQUESTS_FILE)? } else { Vec::new() };
            let text = requests.text(&String::from_utf8_lossy(&earlier));
            if !text.is_empty() {
                write_atomic(&into.join(REQUESTS_FILE), |to| to.write_all(text.as_bytes()))?;
            }
        }
        Ok(())
    })
}

/// Returns the checksums of a folder's files by name.
fn sums(folder: &Path) -> Result<BTreeMap<OsString, Checksum>> {
    let io = |e| Error::io(folder.display(), e);
    let sum = |entry: std::io::Result<fs::DirEntry>| -> Result<(OsString, Checksum)> {
        let entry = entry.map_err(io)?;
        Ok((entry.file_name(), Checksum::of_file(&entry.path())?))
    };
    fs::read_dir(folder).map_err(io)?.map(sum).collect()
}

/// Writes the table files that have a trained table, each table in its original format; other tables are copied unchanged.
fn write_tables(folder: &Path, package: &Package, model: &Model) -> Result<BTreeSet<String>> {
    let mut of_files: BTreeMap<&str, Vec<&Table>> = BTreeMap::new();
    for (declared, table) in package.spec.tables.iter().zip(&package.tables) {
        of_files.entry(&declared.file).or_default().push(table);
    }
    let learned = |table: &Table| model.tables.table(table.name()).filter(|master| master.rule().is_some());
    of_files.retain(|_, tables| tables.iter().any(|table| learned(table).is_some()));
    for (name, tables) in &of_files {
        let trained = |table: &&Table| learned(table).map(|master| master.served_rows(table.spec().format)).transpose();
        let trained: Vec<Option<Table>> = tables.iter().map(trained).collect::<Result<_>>()?;
        let mut file = TensorFile::new();
        for (table, trained) in tables.iter().zip(&trained) {
            if let Some(ids) = learned(table).and_then(MasterTable::id_by_row) {
                file.add(tensor_name(table.name()), &[ids.len()], ids)?;
            }
            trained.as_ref().unwrap_or(table).encode(&mut file)?;
        }
        file.write(&folder.join(name))?;
    }
    Ok(of_files.into_keys().map(String::from).collect())
}
