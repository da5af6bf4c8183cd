//! An embedding table: its specification, the shards that hold its rows, and optionally a vocabulary, managed ids or a tokenizer.
//!
//! An unsharded table has one shard; a sharded table has several shards, which are rectangles (rows x columns), each with a
//! [`Source`] in any tier. The sharding types differ only in their rectangles.

mod ids;
#[cfg(feature = "redis")]
mod on_cluster;

use std::ops::Range;
use std::sync::Arc;

use super::format::{encode_row, encode_rows};
use super::managed::ManagedIds;
use super::place::{CardShare, Sharding};
use super::spec::{TableSpec, Unseen};
use super::tiers::slices::Slice;
use super::tiers::{RowSource, Source};
use super::tokenizer::Tokenizer;
use super::vocabulary::Vocabulary;
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::pool::{RowFormat, Rows};
use sterling_storage::files::{Dtype, TensorFile, Tensors};

/// One shard of a table: a rectangle of rows and columns.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Rows of the complete table that the shard holds.
    pub rows: Range<u64>,
    /// Columns of the complete table that the shard holds.
    pub columns: Range<usize>,
    /// Index of the table's replica to which the shard belongs; 0 if there is only one.
    pub copy: usize,
    /// Device that serves the shard, for errors.
    pub device: String,
    /// Source of the shard's rows.
    pub source: Source,
}

/// Shards that get the same requests: equal rows of the same replica.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) rows: Range<u64>,
    pub(super) copy: usize,
    pub(super) shards: Vec<usize>,
}

/// An embedding table.
#[derive(Clone, Debug)]
pub struct Table {
    spec: TableSpec,
    /// `None` if the table is not sharded.
    sharding: Option<Sharding>,
    copies: usize,
    shards: Vec<Shard>,
    /// Groups of shards of the same rows, ordered by replica, then by first row.
    groups: Vec<Group>,
    vocabulary: Option<Arc<Vocabulary>>,
    /// `None` if ids are row numbers.
    ids: Option<Arc<ManagedIds>>,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Planned cache in GPU memory, if the GPU should not hold the complete table.
    planned_gpu_cache: Option<CardShare>,
    /// Slices that are served to other servers for the lifetime of the table.
    _slices: Vec<Arc<Slice>>,
}

impl Table {
    /// Creates a table whose rows lie in memory, `[rows, row_bytes]`.
    ///
    /// # Errors
    /// `Invalid` if the bytes do not match the specification.
    pub fn host(spec: TableSpec, bytes: Buffer<u8>) -> Result<Self> {
        Table::in_one_piece(spec, Source::Host(bytes))
    }

    /// Creates a table whose rows are fetched from a source.
    ///
    /// # Errors
    /// `Invalid` if the source does not match the specification.
    pub fn fetched(spec: TableSpec, source: Arc<dyn RowSource>) -> Result<Self> {
        Table::in_one_piece(spec, Source::Fetched(source))
    }

    fn in_one_piece(spec: TableSpec, source: Source) -> Result<Self> {
        let spec = spec.checked()?;
        check_source(&spec, spec.rows, spec.width, &source).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
        let (rows, columns) = (0..spec.rows, 0..spec.width);
        let groups = vec![Group { rows: rows.clone(), copy: 0, shards: vec![0] }];
        let shards = vec![Shard { rows, columns, copy: 0, device: "here".into(), source }];
        Ok(Table {
            spec,
            sharding: None,
            copies: 1,
            shards,
            groups,
            vocabulary: None,
            ids: None,
            tokenizer: None,
            _slices: Vec::new(),
            planned_gpu_cache: None,
        })
    }

    /// Creates a table of shards.
    ///
    /// # Errors
    /// `Invalid` if the source of a shard does not match its rectangle, or the shards of a replica do not cover every number of the
    /// table exactly once.
    pub fn of_shards(spec: TableSpec, sharding: Sharding, shards: Vec<Shard>) -> Result<Self> {
        let spec = spec.checked()?;
        let place = format!("table `{}`, {}", spec.name, sharding.name());
        for shard in &shards {
            check_shard(&spec, shard).map_err(|e| e.within(&place))?;
        }
        let copies = shards.iter().map(|s| s.copy + 1).max().unwrap_or(0);
        let mut groups: Vec<Group> = Vec::new();
        for (number, shard) in shards.iter().enumerate() {
            match groups.iter_mut().find(|g| g.copy == shard.copy && g.rows == shard.rows) {
                Some(group) => group.shards.push(number),
                None => groups.push(Group { rows: shard.rows.clone(), copy: shard.copy, shards: vec![number] }),
            }
        }
        groups.sort_by_key(|g| (g.copy, g.rows.start));
        for copy in 0..copies.max(1) {
            check_cover(&spec, &shards, groups.iter().filter(|g| g.copy == copy)).map_err(|e| e.within(&place))?;
        }
        Ok(Table {
            spec,
            sharding: Some(sharding),
            copies,
            shards,
            groups,
            vocabulary: None,
            ids: None,
            tokenizer: None,
            _slices: Vec::new(),
            planned_gpu_cache: None,
        })
    }

    /// Returns the same table with its rows in other shards.
    pub(super) fn in_shards(&self, sharding: Sharding, shards: Vec<Shard>) -> Result<Self> {
        Ok(self.over(Table::of_shards(self.spec.clone(), sharding, shards)?))
    }

    /// Returns `rows`, a table of the same rows, with the vocabulary, managed ids and tokenizer of this table.
    fn over(&self, rows: Table) -> Self {
        Table { vocabulary: self.vocabulary.clone(), ids: self.ids.clone(), tokenizer: self.tokenizer.clone(), ..rows }
    }

    /// Creates a table from f32 rows `[rows, width]`, stored in `format`.
    ///
    /// # Errors
    /// `Invalid` if the values are not complete rows, or a row cannot be stored in the format; the error names table and row.
    pub fn from_f32(name: &str, width: usize, values: &[f32], format: RowFormat, unseen: Unseen) -> Result<Self> {
        let bytes = encode_rows(format, width, values).map_err(|e| e.within(format!("table `{name}`")))?;
        let rows = values.len().checked_div(width).unwrap_or(0) as u64;
        Table::host(TableSpec { name: name.to_owned(), rows, width, format, unseen }, Buffer::copied(&bytes)?)
    }

    /// Returns the same table, vocabulary, managed ids and tokenizer included, in another format: rows are decoded to f32 and encoded
    /// again.
    ///
    /// # Errors
    /// `Invalid` if a row cannot be stored in the format; the error names table and row. `Unsupported` for rows that are not in
    /// this process's memory.
    pub fn converted(&self, format: RowFormat) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
        let rows = Rows::new(self.spec.format, self.spec.width, self.bytes()?)?;
        let row_bytes = format.row_bytes(self.spec.width).map_err(place)?;
        let mut wide = vec![0f32; self.spec.width];
        let mut stored = Ok(());
        let bytes = Buffer::filled(self.spec.rows as usize * row_bytes, |out| {
            stored = out.chunks_exact_mut(row_bytes).enumerate().try_for_each(|(row, out)| {
                rows.decode(row, &mut wide);
                encode_row(format, &wide, out).map_err(|e| place(e.within(format!("row {row}"))))
            });
        })?;
        stored?;
        let spec = TableSpec { format, ..self.spec.clone() };
        Ok(self.over(Table::host(spec, bytes)?))
    }

    /// Adds the rows as the tensor that [`Table::mapped`] reads, and managed ids as the tensor of [`Table::with_mapped_ids`].
    ///
    /// # Errors
    /// `Unsupported` for rows that are not in this process's memory; errors of [`TensorFile::add`].
    pub fn encode<'a>(&'a self, file: &mut TensorFile<'a>) -> Result<()> {
        let bytes = self.bytes()?;
        self.encode_ids(file)?;
        let (name, rows) = (self.name(), self.spec.rows as usize);
        let shape = [rows, self.spec.width];
        match self.spec.format {
            RowFormat::F32 => file.add::<f32>(name, &shape, bytemuck::cast_slice(bytes)),
            RowFormat::F16 => file.add::<half::f16>(name, &shape, bytemuck::cast_slice(bytes)),
            RowFormat::Bf16 => file.add::<half::bf16>(name, &shape, bytemuck::cast_slice(bytes)),
            RowFormat::Int8 | RowFormat::Int4 | RowFormat::Int2 => {
                file.add::<u8>(name, &[rows, self.spec.row_bytes()?], bytes)
            }
        }
    }

    /// Returns the tensor `name` of a mapped file as a table, without a copy: `[rows, width]` f32, f16 or bf16, or
    /// `[rows, row_bytes]` u8 in `format`.
    ///
    /// # Errors
    /// `Corrupt` if the tensor is missing or has another shape or type; `Invalid` if a u8 tensor comes without a
    /// quantized format, or a float tensor with a different format.
    pub fn mapped(tensors: &Tensors, name: &str, format: Option<RowFormat>, unseen: Unseen) -> Result<Self> {
        let (dtype, _) = tensors.info(name)?;
        let (found, (bytes, shape)) = match dtype {
            Dtype::F32 => (RowFormat::F32, bytes_of::<f32>(tensors, name)?),
            Dtype::F16 => (RowFormat::F16, bytes_of::<half::f16>(tensors, name)?),
            Dtype::BF16 => (RowFormat::Bf16, bytes_of::<half::bf16>(tensors, name)?),
            Dtype::U8 => {
                let quantised = format.filter(|f| f.is_quantised()).ok_or_else(|| {
                    Error::invalid(format!("table `{name}` is u8, expected a `format`: int8, int4 or int2"))
                })?;
                (quantised, bytes_of::<u8>(tensors, name)?)
            }
            other => {
                return Err(Error::invalid(format!("table `{name}` is {other:?}, expected F32, F16, BF16 or U8")));
            }
        };
        if let Some(requested) = format.filter(|&f| f != found) {
            return Err(Error::invalid(format!(
                "table `{name}` is {dtype:?}, expected format {} or no format, got {}",
                found.name(),
                requested.name()
            )));
        }
        let width = match found.is_quantised() {
            true => found.width_of(shape[1]).map_err(|e| e.within(format!("table `{name}`")))?,
            false => shape[1],
        };
        Table::host(TableSpec { name: name.to_owned(), rows: shape[0] as u64, width, format: found, unseen }, bytes)
    }

    /// Adds a vocabulary to the table.
    ///
    /// # Errors
    /// `Invalid` if there are more values than rows.
    pub fn with_vocabulary(mut self, vocabulary: Vocabulary) -> Result<Self> {
        if vocabulary.len() as u64 > self.spec.rows {
            return Err(Error::invalid(format!(
                "table `{}`: got a vocabulary of {} values, expected at most one per row of {}",
                self.spec.name,
                vocabulary.len(),
                self.spec.rows
            )));
        }
        self.vocabulary = Some(Arc::new(vocabulary));
        Ok(self)
    }

    /// Adds a tokenizer to the table.
    ///
    /// # Errors
    /// `Invalid` if the id of a token exceeds the rows of the table.
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        if tokenizer.rows() > self.spec.rows {
            return Err(Error::invalid(format!(
                "table `{}`: the tokenizer has {} tokens, expected at most {} (rows)",
                self.spec.name,
                tokenizer.rows(),
                self.spec.rows
            )));
        }
        self.tokenizer = Some(tokenizer);
        Ok(self)
    }

    /// Attaches slices that are served to other servers for the lifetime of the table.
    pub fn holding(self, slices: Vec<Arc<Slice>>) -> Self {
        Table { _slices: slices, ..self }
    }

    /// Returns the bytes of the table's rows in this process's memory.
    pub fn bytes_here(&self) -> u64 {
        let here = |shard: &Shard| match &shard.source {
            Source::Host(bytes) => bytes.len() as u64,
            Source::Fetched(_) => 0,
        };
        self.shards.iter().map(here).sum()
    }

    /// Limits the table's GPU memory to a cache of hot rows.
    pub fn with_gpu_cache(self, share: CardShare) -> Self {
        Table { planned_gpu_cache: Some(share), ..self }
    }

    /// Returns the planned cache in GPU memory, if the GPU should not hold the complete table.
    pub fn planned_gpu_cache(&self) -> Option<CardShare> {
        self.planned_gpu_cache
    }

    /// Returns the specification.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the width of a row, D.
    pub fn width(&self) -> usize {
        self.spec.width
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.spec.rows
    }

    /// Returns the sharding type; `None` if the table is not sharded.
    pub fn sharding(&self) -> Option<Sharding> {
        self.sharding
    }

    /// Returns the shards that hold the table's rows; one shard if the table is not sharded.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub(super) fn copies(&self) -> usize {
        self.copies
    }

    pub(super) fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns true if some rows of the table are fetched from a source.
    pub fn is_fetched(&self) -> bool {
        self.shards.iter().any(Shard::is_fetched)
    }

    /// Returns true if the row of an id, or some of its columns, are fetched from a source.
    pub fn fetches(&self, id: i64) -> bool {
        let Some(row) = self.resolve(id).0 else { return false };
        self.shards.iter().any(|s| s.is_fetched() && s.rows.contains(&row))
    }

    /// Returns the vocabulary, if any.
    pub fn vocabulary(&self) -> Option<&Vocabulary> {
        self.vocabulary.as_deref()
    }

    /// Returns the tokenizer, if any.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    /// Returns the same table with its rows copied to memory if they were in a mapped file.
    ///
    /// # Errors
    /// `Overloaded` if memory allocation fails; `Io` if the file has changed since it was mapped.
    pub fn in_memory(&self) -> Result<Self> {
        let shards = self.shards.iter().cloned().map(Shard::in_memory).collect::<Result<_>>();
        let shards = shards.map_err(|e: Error| e.within(format!("table `{}`", self.spec.name)))?;
        Ok(Table { shards, ..self.clone() })
    }

    /// Returns the bytes of all rows, if the table is unsharded and in memory.
    pub fn host_bytes(&self) -> Option<&Buffer<u8>> {
        match self.shards.as_slice() {
            [Shard { source: Source::Host(bytes), .. }] => Some(bytes),
            _ => None,
        }
    }

    /// Returns the rows, if the table is unsharded and in memory.
    pub fn host_rows(&self) -> Option<Rows<'_>> {
        let rows =
            |bytes| Rows::new(self.spec.format, self.spec.width, bytes).expect("checked when the table was made");
        self.host_bytes().map(|bytes| rows(bytes))
    }

    fn bytes(&self) -> Result<&[u8]> {
        let elsewhere =
            || Error::unsupported(format!("table `{}`: the rows are not in this host's memory", self.name()));
        self.host_bytes().map(|bytes| &**bytes).ok_or_else(elsewhere)
    }
}

fn bytes_of<T: sterling_storage::files::Element>(tensors: &Tensors, name: &str) -> Result<(Buffer<u8>, Vec<usize>)> {
    let (buffer, shape) = tensors.get::<T>(name, 2)?;
    Ok((buffer.into_bytes(), shape))
}

impl Shard {
    /// Copies the rows to memory if they were in a mapped file.
    ///
    /// # Errors
    /// As [`Table::in_memory`].
    pub fn in_memory(self) -> Result<Self> {
        match &self.source {
            Source::Host(bytes) => Ok(Shard { source: Source::Host(bytes.in_memory()?), ..self }),
            Source::Fetched(_) => Ok(self),
        }
    }

    /// Returns true if the shard's rows are fetched from a source.
    pub fn is_fetched(&self) -> bool {
        matches!(self.source, Source::Fetched(_))
    }
}

/// Checks that a source holds `rows` rows of `width` numbers of a table.
fn check_source(spec: &TableSpec, rows: u64, width: usize, source: &Source) -> Result<()> {
    let row_bytes = spec.format.row_bytes(width)?;
    let problem = match source {
        Source::Host(bytes) => {
            let expected = row_bytes as u128 * u128::from(rows);
            let format = spec.format.name();
            (bytes.len() as u128 != expected).then(|| {
                format!("got {} bytes, expected {expected} ({rows} rows of {width} numbers in {format})", bytes.len())
            })
        }
        Source::Fetched(source) => (source.row_bytes() != row_bytes || source.rows() != rows).then(|| {
            format!(
                "the source has {} rows of {} bytes, expected {rows} rows of {row_bytes} bytes",
                source.rows(),
                source.row_bytes()
            )
        }),
    };
    problem.map_or(Ok(()), |problem| Err(Error::invalid(problem)))
}

fn check_shard(spec: &TableSpec, shard: &Shard) -> Result<()> {
    let Shard { rows, columns, source, .. } = shard;
    let place = |e: Error| e.within(format!("shard of rows {rows:?}, columns {columns:?}"));
    if rows.is_empty() || rows.end > spec.rows || columns.is_empty() || columns.end > spec.width {
        let what = format!("expected a rectangle within {} rows and {} columns", spec.rows, spec.width);
        return Err(place(Error::invalid(what)));
    }
    check_source(spec, rows.end - rows.start, columns.len(), source).map_err(place)
}

/// Checks that the groups of one replica, in the order of their rows, cover all rows, and each group all columns.
fn check_cover<'a>(spec: &TableSpec, shards: &[Shard], groups: impl Iterator<Item = &'a Group>) -> Result<()> {
    let mut row = 0;
    for group in groups {
        if group.rows.start != row {
            let what = if group.rows.start > row { "no shard holds" } else { "two shards hold" };
            return Err(Error::invalid(format!("{what} row {}, expected one shard", row.min(group.rows.start))));
        }
        row = group.rows.end;
        let mut columns: Vec<&Range<usize>> = group.shards.iter().map(|s| &shards[*s].columns).collect();
        columns.sort_by_key(|c| c.start);
        let mut column = 0;
        for range in columns {
            if range.start != column {
                let what = if range.start > column { "no shard holds" } else { "two shards hold" };
                let column = column.min(range.start);
                return Err(Error::invalid(format!(
                    "{what} column {column} of rows {:?}, expected one shard",
                    group.rows
                )));
            }
            column = range.end;
        }
        if column != spec.width {
            return Err(Error::invalid(format!(
                "no shard holds column {column} of rows {:?}, expected one shard",
                group.rows
            )));
        }
    }
    match row == spec.rows {
        true => Ok(()),
        false => Err(Error::invalid(format!("no shard holds row {row}, expected one shard"))),
    }
}
