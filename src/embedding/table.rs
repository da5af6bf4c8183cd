//! An embedding table: rows of one width and format, a fate for ids it has not seen, and where its shards lie.

use std::collections::HashMap;
use std::sync::Arc;

use safetensors::Dtype;

use crate::device::buffer::Buffer;
use crate::device::cpu::pool::{RowFormat, Rows};
use crate::embedding::format::{encode_row, encode_rows};
use crate::embedding::shard::ShardedTable;
use crate::embedding::tiers::RowSource;
use crate::error::{Error, Result};
use crate::files::{TensorFile, Tensors};

/// What becomes of an id that is no row of its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unseen {
    /// It adds nothing to a sum and is a row of zeros in a sequence.
    #[default]
    Zero,
    /// It takes a row chosen by a hash of the id.
    Hash,
    /// It takes this row.
    Row(u64),
}

impl Unseen {
    /// Reads `zero`, `hash` or `row:N`.
    ///
    /// # Errors
    /// `Invalid` for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        let row = || text.strip_prefix("row:").and_then(|n| n.parse().ok()).map(Unseen::Row);
        match text {
            "zero" => Ok(Unseen::Zero),
            "hash" => Ok(Unseen::Hash),
            _ => row().ok_or_else(|| Error::invalid(format!("unseen = `{text}`, expected zero, hash or row:N"))),
        }
    }
}

/// What a table is, apart from its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Its name, for errors and reports.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Numbers of a row, D.
    pub width: usize,
    /// How they are stored.
    pub format: RowFormat,
    /// The fate of ids outside `0..rows`.
    pub unseen: Unseen,
}

impl TableSpec {
    /// Bytes of a row.
    ///
    /// # Errors
    /// `Invalid` where the width does not suit the format.
    pub fn row_bytes(&self) -> Result<usize> {
        self.format.row_bytes(self.width).map_err(|e| e.within(format!("table `{}`", self.name)))
    }

    /// The row that an id takes: none where it adds nothing. The flag says that the id was unseen.
    pub fn resolve(&self, id: i64) -> (Option<u64>, bool) {
        if (0..self.rows as i64).contains(&id) {
            return (Some(id as u64), false);
        }
        let row = match self.unseen {
            Unseen::Zero => None,
            Unseen::Hash => Some(xxhash_rust::xxh3::xxh3_64(&id.to_le_bytes()) % self.rows),
            Unseen::Row(row) => Some(row),
        };
        (row, true)
    }

    pub(crate) fn checked(self) -> Result<Self> {
        self.row_bytes()?;
        let wrong = |what: String| Err(Error::invalid(format!("table `{}`: {what}", self.name)));
        if self.rows == 0 || i64::try_from(self.rows).is_err() {
            return wrong(format!("{} rows, expected 1 to {}", self.rows, i64::MAX));
        }
        match self.unseen {
            Unseen::Row(row) if row >= self.rows => {
                wrong(format!("unseen ids take row {row}, expected one below {}", self.rows))
            }
            _ => Ok(self),
        }
    }
}

/// Where the rows of a shard are.
#[derive(Clone, Debug)]
pub enum Source {
    /// In this process's memory, mapped or owned: `[rows, row_bytes]`.
    Host(Buffer<u8>),
    /// Asked for.
    Fetched(Arc<dyn RowSource>),
    /// In parts, each with a place of its own.
    Sharded(Arc<ShardedTable>),
}

/// The values of a category, each with its row.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    rows: HashMap<String, i64>,
}

impl Vocabulary {
    /// One value a line; the value's line number, from 0, is its row.
    ///
    /// # Errors
    /// `Invalid` where a value comes twice.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rows = HashMap::new();
        for (row, value) in text.lines().enumerate() {
            if let Some(first) = rows.insert(value.to_owned(), row as i64) {
                return Err(Error::invalid(format!(
                    "vocabulary: `{value}` stands on lines {} and {}, expected once",
                    first + 1,
                    row + 1
                )));
            }
        }
        Ok(Vocabulary { rows })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True without values.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The row of a value, if it has one.
    pub fn row(&self, value: &str) -> Option<i64> {
        self.rows.get(value).copied()
    }

    /// The id of a value: its row, or a negative number made from the value, which is unseen in every table and so meets
    /// the table's policy (two unknown values hash to rows of their own).
    pub fn id(&self, value: &str) -> i64 {
        self.row(value).unwrap_or_else(|| xxhash_rust::xxh3::xxh3_64(value.as_bytes()) as i64 | i64::MIN)
    }
}

/// An embedding table.
#[derive(Clone, Debug)]
pub struct Table {
    spec: TableSpec,
    source: Source,
    vocabulary: Option<Arc<Vocabulary>>,
}

impl Table {
    /// A table whose rows lie in memory, `[rows, row_bytes]`.
    ///
    /// # Errors
    /// `Invalid` where the bytes are not those rows.
    pub fn host(spec: TableSpec, bytes: Buffer<u8>) -> Result<Self> {
        let spec = spec.checked()?;
        let expected = spec.row_bytes()? as u128 * u128::from(spec.rows);
        if bytes.len() as u128 != expected {
            return Err(Error::invalid(format!(
                "table `{}`: {} bytes, expected {expected} ({} rows of {} in {})",
                spec.name,
                bytes.len(),
                spec.rows,
                spec.width,
                spec.format.name()
            )));
        }
        Ok(Table { spec, source: Source::Host(bytes), vocabulary: None })
    }

    /// A table whose rows are asked for.
    ///
    /// # Errors
    /// `Invalid` where the source's rows are others than the table's.
    pub fn fetched(spec: TableSpec, source: Arc<dyn RowSource>) -> Result<Self> {
        let spec = spec.checked()?;
        if source.row_bytes() != spec.row_bytes()? || source.rows() != spec.rows {
            return Err(Error::invalid(format!(
                "table `{}`: its source has {} rows of {} bytes, expected {} of {}",
                spec.name,
                source.rows(),
                source.row_bytes(),
                spec.rows,
                spec.row_bytes()?
            )));
        }
        Ok(Table { spec, source: Source::Fetched(source), vocabulary: None })
    }

    /// The same table, vocabulary included, with its rows in shards.
    ///
    /// # Errors
    /// `Invalid` where the shards are those of another table.
    pub fn in_shards(&self, shards: ShardedTable) -> Result<Self> {
        if *shards.spec() != self.spec {
            return Err(Error::invalid(format!("shards of {:?}, expected those of {:?}", shards.spec(), self.spec)));
        }
        Ok(Table { source: Source::Sharded(Arc::new(shards)), ..self.clone() })
    }

    /// A table from f32 rows `[rows, width]`, stored in `format`.
    ///
    /// # Errors
    /// `Invalid` where the values are no whole rows, or a row cannot be stored in the format; table and row are named.
    pub fn from_f32(name: &str, width: usize, values: &[f32], format: RowFormat, unseen: Unseen) -> Result<Self> {
        let bytes = encode_rows(format, width, values).map_err(|e| e.within(format!("table `{name}`")))?;
        let rows = values.len().checked_div(width).unwrap_or(0) as u64;
        Table::host(TableSpec { name: name.to_owned(), rows, width, format, unseen }, Buffer::copied(&bytes)?)
    }

    /// The same table, vocabulary included, in another format: rows are widened to f32 and stored anew.
    ///
    /// # Errors
    /// `Invalid` where a row cannot be stored in the format; table and row are named. `Unsupported` for rows that are not in
    /// this process's memory.
    pub fn converted(&self, format: RowFormat) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
        let Some(rows) = self.host_rows() else {
            return Err(place(Error::unsupported("its rows are not in this host's memory")));
        };
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
        Ok(Table { spec, source: Source::Host(bytes), vocabulary: self.vocabulary.clone() })
    }

    /// Adds the rows as the tensor that [`Table::mapped`] reads.
    ///
    /// # Errors
    /// `Unsupported` for rows that are not in this process's memory; as [`TensorFile::add`].
    pub fn encode<'a>(&'a self, file: &mut TensorFile<'a>) -> Result<()> {
        let Source::Host(bytes) = &self.source else {
            return Err(Error::unsupported(format!("table `{}`: its rows are not in memory", self.spec.name)));
        };
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

    /// The tensor `name` of a mapped file as a table, without a copy: `[rows, width]` f32, f16 or bf16, or
    /// `[rows, row_bytes]` u8 in `format`.
    ///
    /// # Errors
    /// `Corrupt` where the tensor is missing or has another shape or type; `Invalid` where a u8 tensor comes without a
    /// quantised format or a float tensor with another one.
    pub fn mapped(tensors: &Tensors, name: &str, format: Option<RowFormat>, unseen: Unseen) -> Result<Self> {
        let (dtype, _) = tensors.info(name)?;
        let (found, (bytes, shape)) = match dtype {
            Dtype::F32 => (RowFormat::F32, bytes_of::<f32>(tensors, name)?),
            Dtype::F16 => (RowFormat::F16, bytes_of::<half::f16>(tensors, name)?),
            Dtype::BF16 => (RowFormat::Bf16, bytes_of::<half::bf16>(tensors, name)?),
            Dtype::U8 => {
                let quantised = format.filter(|f| f.is_quantised()).ok_or_else(|| {
                    Error::invalid(format!("table `{name}` is u8, expected a format of int8, int4 or int2 with it"))
                })?;
                (quantised, bytes_of::<u8>(tensors, name)?)
            }
            other => {
                return Err(Error::invalid(format!("table `{name}` is {other:?}, expected F32, F16, BF16 or U8")));
            }
        };
        if let Some(asked) = format.filter(|&f| f != found) {
            return Err(Error::invalid(format!(
                "table `{name}` is {dtype:?}, expected format {} or none, not {}",
                found.name(),
                asked.name()
            )));
        }
        let width = match found.is_quantised() {
            true => found.width_of(shape[1]).map_err(|e| e.within(format!("table `{name}`")))?,
            false => shape[1],
        };
        Table::host(TableSpec { name: name.to_owned(), rows: shape[0] as u64, width, format: found, unseen }, bytes)
    }

    /// The same table with the values of a category.
    ///
    /// # Errors
    /// `Invalid` where there are more values than rows.
    pub fn with_vocabulary(mut self, vocabulary: Vocabulary) -> Result<Self> {
        if vocabulary.len() as u64 > self.spec.rows {
            return Err(Error::invalid(format!(
                "table `{}`: a vocabulary of {} values for {} rows",
                self.spec.name,
                vocabulary.len(),
                self.spec.rows
            )));
        }
        self.vocabulary = Some(Arc::new(vocabulary));
        Ok(self)
    }

    /// What the table is.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Numbers of a row, D.
    pub fn width(&self) -> usize {
        self.spec.width
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.spec.rows
    }

    /// Where its rows are.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The values of its category, if it has one.
    pub fn vocabulary(&self) -> Option<&Vocabulary> {
        self.vocabulary.as_deref()
    }

    /// The rows, where they lie in memory.
    pub fn host_rows(&self) -> Option<Rows<'_>> {
        match &self.source {
            Source::Host(bytes) => {
                Some(Rows::new(self.spec.format, self.spec.width, bytes).expect("checked when the table was made"))
            }
            Source::Fetched(_) | Source::Sharded(_) => None,
        }
    }

    /// True where rows are asked for elsewhere than in this process.
    pub fn is_remote(&self) -> bool {
        match &self.source {
            Source::Host(_) => false,
            Source::Fetched(_) => true,
            Source::Sharded(shards) => shards.is_remote(),
        }
    }

    /// [`TableSpec::resolve`].
    pub fn resolve(&self, id: i64) -> (Option<u64>, bool) {
        self.spec.resolve(id)
    }
}

fn bytes_of<T: crate::files::Element>(tensors: &Tensors, name: &str) -> Result<(Buffer<u8>, Vec<usize>)> {
    let (buffer, shape) = tensors.get::<T>(name, 2)?;
    Ok((buffer.into_bytes(), shape))
}
