//! The package that a run starts from, and the one that it writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};

use crate::model::Model;
use sterling_core::error::{Error, Result};
use sterling_embedding::format::encode_rows;
use sterling_embedding::{RowFormat, Table, TableSpec};
use sterling_snapshot::REQUESTS_FILE;
use sterling_snapshot::items::RowFile;
use sterling_snapshot::model::{Package, WARMUP_FILE};
use sterling_storage::files::{self, Checksum, Element, TensorFile, Tensors, sync_folder, temporary, write_atomic};

/// File of the optimizer state, written into a trained package, so that training can continue from it.
pub(crate) const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Names of a package's items file; the first that exists is used.
const ITEM_FILES: [&str; 2] = ["items.parquet", "items.jsonl"];

/// Returns the items file: the given one, or the package's own.
///
/// # Errors
/// `NotFound` if there is none.
pub(crate) fn items_path(package: &Path, given: Option<&Path>) -> Result<PathBuf> {
    let own = || ITEM_FILES.iter().map(|name| package.join(name)).find(|path| path.exists());
    given.map(Path::to_owned).or_else(own).ok_or_else(|| {
        let [one, other] = ITEM_FILES;
        Error::not_found(format!(
            "items: neither `{one}` nor `{other}` is in {}, expected an item file",
            package.display()
        ))
    })
}

/// Returns a digest of the files of a package and of its items.
///
/// # Errors
/// `NotFound` or `Io` with the path.
pub(crate) fn digest(package: &Package, items: &Path) -> Result<String> {
    let mut sums = BTreeMap::new();
    for name in package.files() {
        let sum = Checksum::of_file(&package.folder().join(&name))?;
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

/// Writes a copy of the trained package with the tables and weights of a model, and the file `optimizer`. The folder is renamed
/// into place once all of it is durable.
///
/// # Errors
/// `Conflict` if `out` exists; `NoSpace` or `Io` with the path; `Invalid` if a row cannot be stored in its table's format.
pub(crate) fn write(
    out: &Path,
    package: &Package,
    model: &Model,
    optimizer: impl FnOnce(&Path) -> Result<Checksum>,
) -> Result<()> {
    if out.exists() {
        return Err(Error::conflict(format!("{}: it exists, expected a name that is free", out.display())));
    }
    let into = temporary(out);
    let io = |e| Error::io(out.display(), e);
    let write = || {
        if into.exists() {
            fs::remove_dir_all(&into).map_err(io)?;
        }
        fs::create_dir_all(&into).map_err(io)?;
        let tables = write_tables(&into, package, model)?;
        let mut written: BTreeSet<String> = tables;
        for side in std::iter::once(&model.user).chain(&model.item) {
            let (file, bytes) = side.written()?;
            write_atomic(&into.join(file), |to| to.write_all(&bytes))?;
            written.insert(file.to_owned());
        }
        // The golden answers of the warm-up belong to the old weights.
        let others = package.files().into_iter().filter(|name| name != WARMUP_FILE);
        let others = others.chain(ITEM_FILES.map(String::from)).chain([REQUESTS_FILE.into()]);
        for name in others.filter(|name| !written.contains(name)) {
            let from = package.folder().join(&name);
            if from.is_file() {
                let bytes = files::read(&from)?;
                write_atomic(&into.join(&name), |to| to.write_all(&bytes))?;
            }
        }
        optimizer(&into.join(OPTIMIZER_FILE))?;
        sync_folder(&into).map_err(io)?;
        fs::rename(&into, out).map_err(io)?;
        let above = out.parent().unwrap_or(Path::new("."));
        sync_folder(above).map_err(io)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_dir_all(&into);
    })
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
        let before = Tensors::open(&package.folder().join(name))?;
        let mut file = TensorFile::new();
        for table in tables {
            match learned(table) {
                Some(master) => add_rows(&mut file, table.spec(), &master.values()?)?,
                None => add_copy(&mut file, table, &before)?,
            }
        }
        file.write(&folder.join(name))?;
    }
    Ok(of_files.into_keys().map(String::from).collect())
}

/// Adds f32 rows in the format of a table.
fn add_rows(file: &mut TensorFile<'_>, spec: &TableSpec, values: &[f32]) -> Result<()> {
    let bytes = encode_rows(spec.format, spec.width, values).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
    fn pairs<T>(bytes: &[u8], of: impl Fn([u8; 2]) -> T) -> Vec<T> {
        bytes.as_chunks::<2>().0.iter().map(|pair| of(*pair)).collect()
    }
    let shape = [spec.rows as usize, spec.width];
    match spec.format {
        RowFormat::F32 => file.add_owned(&spec.name, &shape, values.to_vec()),
        RowFormat::F16 => file.add_owned(&spec.name, &shape, pairs(&bytes, f16::from_le_bytes)),
        RowFormat::Bf16 => file.add_owned(&spec.name, &shape, pairs(&bytes, bf16::from_le_bytes)),
        _ => file.add_owned(&spec.name, &[shape[0], spec.row_bytes()?], bytes),
    }
}

/// Adds a table unchanged from its source file.
fn add_copy(file: &mut TensorFile<'_>, table: &Table, before: &Tensors) -> Result<()> {
    let name = table.name();
    fn copied<T: Element>(file: &mut TensorFile<'_>, name: &str, before: &Tensors) -> Result<()> {
        let (numbers, shape) = before.get::<T>(name, 2)?;
        file.add_owned(name, &shape, numbers.to_vec())
    }
    match table.spec().format {
        RowFormat::F32 => copied::<f32>(file, name, before),
        RowFormat::F16 => copied::<f16>(file, name, before),
        RowFormat::Bf16 => copied::<bf16>(file, name, before),
        _ => copied::<u8>(file, name, before),
    }
}
