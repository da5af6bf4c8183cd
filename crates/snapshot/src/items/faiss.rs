//! Reader of Faiss index files: an IVF index built elsewhere, with its inverted lists.
//!
//! 1. The file is parsed once. Every length is checked against the remaining bytes before an allocation, and no bytes may remain
//!    at the end.
//! 2. Vectors are decoded on demand, in the requested order.
//!
//! The layout is little-endian; `[T]` is a u64 count followed by that number of T:
//!
//! | section | fields |
//! |---|---|
//! | header | fourcc, D i32, vectors i64, 16 unused bytes, trained u8, metric i32 |
//! | `IxMp`, `IxM2` | header, the inner index, `[i64]` the ids by position, to which the inner ids refer |
//! | `IwFl`, `IwSq` | header, C u64, probes u64, the coarse quantizer, direct map; a codec in `IwSq`; lists |
//! | `IxFI`, `IxF2`, `IxFl` | header, `[f32]` the centroids: a coarse quantizer |
//! | direct map | kind u8, `[i64]`, for kind 2 also `[(i64, i64)]`; not used here |
//! | codec | type i32, 8 unused bytes, D u64, code bytes u64, `[f32]` ranges, code bytes u64, by residual u8 |
//! | lists | `ilar`, C u64, code bytes u64, sizes, then the codes and the i64 ids of each non-empty list |
//! | sizes | `full`, `[u64]` of all lists, or `sprs`, `[u64]` pairs of a list and its size |
//!
//! Source: Faiss 1.15, `faiss/impl/index_write.cpp`, `index_read.cpp` and `scalar_quantizer/`
//! (<https://github.com/facebookresearch/faiss>).

use std::path::Path;

use half::{bf16, f16};
use rayon::prelude::*;

use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_index::ivf::Lists;
use sterling_kernels::map::Map;

const METRIC_INNER_PRODUCT: i32 = 0;
const METRIC_L2: i32 = 1;
/// Relative tolerance of vector norms within which L2 and inner product give the same order.
const LENGTH_TOLERANCE: f32 = 1e-3;

/// A parsed and validated index file.
#[derive(Debug)]
pub struct IndexFile {
    map: Map,
    index: Inverted,
}

impl IndexFile {
    /// Opens an index file and parses everything except the vectors.
    ///
    /// # Errors
    /// With the path: `NotFound` or `Io`; `Corrupt` with the byte offset of invalid data; `Unsupported` with the fourcc, metric
    /// or codec and the supported ones.
    pub fn open(path: &Path) -> Result<Self> {
        let map = Map::read(path)?;
        let index = Inverted::parse(&map).map_err(|e| e.within(path.display()))?;
        Ok(IndexFile { map, index })
    }

    /// Returns the width of a vector, D.
    pub fn dimension(&self) -> usize {
        self.index.dimension
    }

    /// Returns the ids, `[N]`, list by list: `ids()[e]` is the item of entry `e`. Ids are not negative; duplicates are possible.
    pub fn ids(&self) -> &[i64] {
        &self.index.ids
    }

    /// Returns the inverted lists of the file for a matrix whose rows are the given `entries`.
    ///
    /// # Panics
    /// If the file does not have one of the entries.
    pub fn lists(&self, entries: &[u32]) -> Lists {
        Lists {
            centroids: self.index.centroids.clone(),
            of_rows: entries.iter().map(|&entry| self.index.list_of(entry) as u32).collect(),
            nearest: self.index.nearest,
        }
    }

    /// Decodes the vectors of the given `entries`, `[entries, D]`, row-major.
    ///
    /// # Errors
    /// `Corrupt` with the id for a number that is not finite. `Unsupported` if the file's metric is L2 and vector norms differ by
    /// more than a thousandth beyond quantization error, because L2 then orders items differently from the inner product.
    ///
    /// # Panics
    /// If the file does not have one of the entries.
    pub fn vectors(&self, entries: &[u32]) -> Result<Vec<f32>> {
        let dimension = self.index.dimension;
        let mut values = vec![0f32; entries.len() * dimension];
        values.par_chunks_exact_mut(dimension).zip(entries).try_for_each(|(row, &entry)| {
            self.index.decode(&self.map, entry, row);
            match row.iter().all(|x| x.is_finite()) {
                true => Ok(()),
                false => Err(Error::corrupt(format!(
                    "the vector of id {} holds a number that is not finite",
                    self.index.ids[entry as usize]
                ))),
            }
        })?;
        if self.index.metric == METRIC_L2 {
            self.check_lengths(&values, entries)?;
        }
        Ok(values)
    }

    /// Rejects vectors of different norms. A code at an end of its range may stand for any value beyond it, because Faiss trains
    /// ranges on a sample. The norm of a vector with such a code is unknown, so the vector is skipped; a file in which most vectors
    /// have such codes is rejected.
    fn check_lengths(&self, values: &[f32], entries: &[u32]) -> Result<()> {
        let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
        let (least, most, judged) = values
            .par_chunks_exact(self.index.dimension)
            .zip(entries)
            .filter(|(_, entry)| !self.index.codec.is_clipped(self.index.code(&self.map, **entry)))
            .map(|(row, _)| (length(row), length(row), 1))
            .reduce(|| (f32::INFINITY, 0.0, 0), |a, b| (a.0.min(b.0), a.1.max(b.1), a.2 + b.2));
        let refused = |what: String| {
            Error::unsupported(format!(
                "the metric of the index is L2 and {what}: scores here are inner products, which order as L2 does only if all \
                 vectors have one norm, to a thousandth"
            ))
        };
        if judged < entries.len().div_ceil(2) {
            let clipped = entries.len() - judged;
            return Err(refused(format!(
                "{clipped} of {} codes are at a limit of the quantizer's range",
                entries.len()
            )));
        }
        if most - least > 2.0 * (LENGTH_TOLERANCE * most + self.index.codec.rounding(most)) {
            return Err(refused(format!("the norms of its vectors range from {least} to {most}")));
        }
        Ok(())
    }
}

/// A parsed `IwFl` or `IwSq` index, except its codes.
#[derive(Debug)]
struct Inverted {
    dimension: usize,
    metric: i32,
    centroids: Vec<f32>,
    /// True if the metric of the coarse quantizer is L2.
    nearest: bool,
    codec: Codec,
    by_residual: bool,
    /// First entry of each list, and one past the last.
    firsts: Vec<u32>,
    /// File offset of each list's codes.
    starts: Vec<usize>,
    ids: Vec<i64>,
}

impl Inverted {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader { bytes, at: 0 };
        let fourcc = reader.fourcc("index")?;
        let index = match &fourcc {
            b"IxMp" | b"IxM2" => {
                reader.header()?;
                let inside = reader.fourcc("index")?;
                let mut index = Inverted::read(&mut reader, inside)?;
                let ids = reader.vector::<8>("ids of the map")?;
                for id in &mut index.ids {
                    let mapped = usize::try_from(*id).ok().and_then(|at| ids.get(at));
                    *id = i64::from_le_bytes(*mapped.ok_or_else(|| {
                        reader.corrupt(format!("id {id} is outside of the map of {} ids", ids.len()))
                    })?);
                }
                index
            }
            _ => Inverted::read(&mut reader, fourcc)?,
        };
        match index.ids.iter().find(|id| **id < 0) {
            Some(id) => {
                Err(Error::invalid(format!("id {id}: negative ids mark empty results in Faiss, expected 0 or more")))
            }
            None if reader.at < bytes.len() => {
                Err(reader.corrupt(format!("{} bytes after the index, expected none", bytes.len() - reader.at)))
            }
            None => Ok(index),
        }
    }

    fn read(reader: &mut Reader<'_>, fourcc: [u8; 4]) -> Result<Self> {
        if !matches!(&fourcc, b"IwFl" | b"IwSq") {
            return Err(reader.unsupported(
                "index",
                fourcc,
                "IwFl (IndexIVFFlat) and IwSq (IndexIVFScalarQuantizer), alone or in IxMp or IxM2 (IndexIDMap)",
            ));
        }
        let Header { dimension, vectors, metric } = reader.header()?;
        let lists = reader.u64("lists")?;
        if lists == 0 || lists > limits::LISTS_MAX as u64 {
            return Err(reader.corrupt(format!("{lists} lists, expected 1 to {}", limits::LISTS_MAX)));
        }
        reader.u64("probes")?;
        let (centroids, nearest) = read_centroids(reader, lists as usize, dimension)?;
        skip_direct_map(reader)?;
        let (codec, by_residual) = match &fourcc {
            b"IwSq" => Codec::read(reader, dimension)?,
            _ => (Codec::F32, false),
        };
        let (firsts, starts, ids) = read_lists(reader, lists as usize, codec.bytes(dimension))?;
        // Faiss counts non-finite vectors but stores them in no list.
        if ids.len() as u64 > vectors {
            return Err(reader.corrupt(format!(
                "the lists have {} vectors, expected at most {vectors} as in the header",
                ids.len()
            )));
        }
        Ok(Inverted { dimension, metric, centroids, nearest, codec, by_residual, firsts, starts, ids })
    }

    fn list_of(&self, entry: u32) -> usize {
        self.firsts.partition_point(|&first| first <= entry) - 1
    }

    fn code<'a>(&self, file: &'a [u8], entry: u32) -> &'a [u8] {
        let list = self.list_of(entry);
        let bytes = self.codec.bytes(self.dimension);
        &file[self.starts[list] + (entry - self.firsts[list]) as usize * bytes..][..bytes]
    }

    fn decode(&self, file: &[u8], entry: u32, out: &mut [f32]) {
        self.codec.decode(self.code(file, entry), out);
        if self.by_residual {
            let centroid = &self.centroids[self.list_of(entry) * self.dimension..][..self.dimension];
            out.iter_mut().zip(centroid).for_each(|(x, c)| *x += c);
        }
    }
}

/// Reads the centroids of a flat coarse quantizer; also returns whether the quantizer's metric is L2.
fn read_centroids(reader: &mut Reader<'_>, lists: usize, dimension: usize) -> Result<(Vec<f32>, bool)> {
    let fourcc = reader.fourcc("coarse quantizer")?;
    if !matches!(&fourcc, b"IxFI" | b"IxF2" | b"IxFl") {
        return Err(reader.unsupported("coarse quantizer", fourcc, "IxFI, IxF2 and IxFl (IndexFlat)"));
    }
    let header = reader.header()?;
    let numbers = reader.vector::<4>("centroids")?;
    if (header.dimension, header.vectors, numbers.len()) != (dimension, lists as u64, lists * dimension) {
        return Err(reader.corrupt(format!(
            "{} centroids of {} dimensions in {} numbers, expected {lists} of {dimension}",
            header.vectors,
            header.dimension,
            numbers.len()
        )));
    }
    let centroids: Vec<f32> = numbers.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match centroids.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(reader.corrupt(format!("centroid {} holds a number that is not finite", at / dimension))),
        None => Ok((centroids, header.metric == METRIC_L2)),
    }
}

fn skip_direct_map(reader: &mut Reader<'_>) -> Result<()> {
    let [kind] = reader.array("kind of direct map")?;
    reader.vector::<8>("direct map")?;
    match kind {
        0 | 1 => Ok(()),
        2 => reader.vector::<16>("hash table of the direct map").map(drop),
        _ => Err(reader.corrupt(format!("direct map of kind {kind}, expected 0 to 2"))),
    }
}

/// Reads the first entry of each list and one past the last, the file offset of each list's codes, and all ids.
fn read_lists(reader: &mut Reader<'_>, lists: usize, code_bytes: usize) -> Result<(Vec<u32>, Vec<usize>, Vec<i64>)> {
    let fourcc = reader.fourcc("lists")?;
    if &fourcc != b"ilar" {
        return Err(reader.unsupported("inverted lists", fourcc, "ilar (ArrayInvertedLists)"));
    }
    let found = (reader.u64("lists")?, reader.u64("bytes of a code")?);
    if found != (lists as u64, code_bytes as u64) {
        let (n, bytes) = found;
        return Err(reader.corrupt(format!(
            "{n} lists of {bytes} bytes per code, expected {lists} lists of {code_bytes} bytes per code"
        )));
    }
    let sizes = read_sizes(reader, lists)?;
    let (mut firsts, mut starts, mut ids) = (vec![0], Vec::with_capacity(lists), Vec::new());
    for (list, size) in sizes.into_iter().enumerate() {
        starts.push(reader.at);
        reader.take(size, code_bytes, &format!("codes of list {list}"))?;
        let (of_list, _) = reader.take(size, 8, &format!("ids of list {list}"))?.as_chunks::<8>();
        ids.extend(of_list.iter().map(|b| i64::from_le_bytes(*b)));
        if ids.len() > limits::ITEMS_MAX {
            return Err(Error::unsupported(format!("more than {} vectors", limits::ITEMS_MAX)));
        }
        firsts.push(ids.len() as u32);
    }
    Ok((firsts, starts, ids))
}

fn read_sizes(reader: &mut Reader<'_>, lists: usize) -> Result<Vec<u64>> {
    let fourcc = reader.fourcc("sizes of the lists")?;
    let numbers: Vec<u64> = match &fourcc {
        b"full" | b"sprs" => reader.vector::<8>("sizes of the lists")?.iter().map(|b| u64::from_le_bytes(*b)).collect(),
        _ => return Err(reader.unsupported("sizes of the lists", fourcc, "full and sprs")),
    };
    if &fourcc == b"full" {
        return match numbers.len() == lists {
            true => Ok(numbers),
            false => {
                Err(reader
                    .corrupt(format!("the file has the sizes of {} lists, expected {lists} sizes", numbers.len())))
            }
        };
    }
    let mut sizes = vec![0; lists];
    let (pairs, rest) = numbers.as_chunks::<2>();
    let mut next = 0;
    for &[list, size] in pairs {
        // Faiss writes the sizes in one iteration over the lists, so list numbers ascend.
        if list < next || list >= lists as u64 {
            return Err(
                reader.corrupt(format!("got the size of list {list}, expected that of list {next} to {}", lists - 1))
            );
        }
        sizes[list as usize] = size;
        next = list + 1;
    }
    if rest.is_empty() { Ok(sizes) } else { Err(reader.corrupt("the last entry has a list number but no size".into())) }
}

/// Encoding of vectors in the file.
#[derive(Debug)]
enum Codec {
    F32,
    F16,
    Bf16,
    /// One byte per number: the number is `first + code`.
    Whole {
        first: f32,
    },
    /// One byte per number: number `d` is `first[d] + code × step[d]`.
    Ranges {
        first: Vec<f32>,
        step: Vec<f32>,
    },
}

impl Codec {
    /// Reads the codec of `IwSq`; also returns whether codes encode residuals.
    fn read(reader: &mut Reader<'_>, dimension: usize) -> Result<(Self, bool)> {
        let kind = reader.i32("type of scalar quantizer")?;
        reader.array::<8>("kind of range")?;
        let sizes = [reader.u64("dimension")?, reader.u64("bytes of a code")?];
        let mut ranges = |expected: usize| {
            let found = reader.vector::<4>("ranges")?;
            match found.len() == expected {
                true => Ok(found.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()),
                false => Err(reader.corrupt(format!("{} numbers of ranges, expected {expected}", found.len()))),
            }
        };
        // A code stands for the middle of its quantization step.
        let scaled = |least: &[f32], width: &[f32]| {
            let step: Vec<f32> = width.iter().map(|w| w / 255.0).collect();
            Codec::Ranges { first: least.iter().zip(&step).map(|(least, step)| least + step / 2.0).collect(), step }
        };
        let codec = match kind {
            0 => ranges(2 * dimension).map(|r| scaled(&r[..dimension], &r[dimension..]))?,
            2 => ranges(2).map(|r| scaled(&vec![r[0]; dimension], &vec![r[1]; dimension]))?,
            4 => ranges(0).map(|_| Codec::F16)?,
            5 => ranges(0).map(|_| Codec::Whole { first: 0.0 })?,
            7 => ranges(0).map(|_| Codec::Bf16)?,
            8 => ranges(0).map(|_| Codec::Whole { first: -128.0 })?,
            _ => {
                return Err(Error::unsupported(format!(
                    "scalar quantizer of type {kind}: supported are QT_8bit (0), QT_8bit_uniform (2), QT_fp16 (4), \
                     QT_8bit_direct (5), QT_bf16 (7) and QT_8bit_direct_signed (8)"
                )));
            }
        };
        let sizes = [sizes[0], sizes[1], reader.u64("bytes of a code")?];
        let expected = [dimension, codec.bytes(dimension), codec.bytes(dimension)];
        if sizes != expected.map(|n| n as u64) {
            return Err(reader.corrupt(format!("dimension and bytes of a code are {sizes:?}, expected {expected:?}")));
        }
        Ok((codec, reader.flag("by residual")?))
    }

    /// Returns the bytes per vector.
    fn bytes(&self, dimension: usize) -> usize {
        match self {
            Codec::F32 => 4 * dimension,
            Codec::F16 | Codec::Bf16 => 2 * dimension,
            Codec::Whole { .. } | Codec::Ranges { .. } => dimension,
        }
    }

    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (twos, fours) = (code.as_chunks::<2>().0, code.as_chunks::<4>().0);
        match self {
            Codec::F32 => out.iter_mut().zip(fours).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
            Codec::F16 => out.iter_mut().zip(twos).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32()),
            Codec::Bf16 => out.iter_mut().zip(twos).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32()),
            Codec::Whole { first } => out.iter_mut().zip(code).for_each(|(x, &c)| *x = first + f32::from(c)),
            Codec::Ranges { first, step } => {
                let ranges = first.iter().zip(step);
                out.iter_mut()
                    .zip(code)
                    .zip(ranges)
                    .for_each(|((x, &c), (first, step))| *x = first + f32::from(c) * step);
            }
        }
    }

    /// Returns whether a number of the vector may have been outside of the quantizer's range.
    fn is_clipped(&self, code: &[u8]) -> bool {
        matches!(self, Codec::Ranges { .. }) && code.iter().any(|c| [0, u8::MAX].contains(c))
    }

    /// Returns the largest distance by which quantization can move a vector of this norm.
    fn rounding(&self, length: f32) -> f32 {
        match self {
            Codec::F32 | Codec::Whole { .. } => 0.0,
            Codec::F16 => length * f32::from(f16::EPSILON) / 2.0,
            Codec::Bf16 => length * f32::from(bf16::EPSILON) / 2.0,
            Codec::Ranges { step, .. } => step.iter().map(|s| s * s).sum::<f32>().sqrt() / 2.0,
        }
    }
}

/// Fields with which every Faiss index begins.
struct Header {
    dimension: usize,
    vectors: u64,
    metric: i32,
}

/// Cursor over the bytes of a file.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn corrupt(&self, what: String) -> Error {
        Error::corrupt(format!("before byte {}: {what}", self.at))
    }

    fn unsupported(&self, thing: &str, fourcc: [u8; 4], supported: &str) -> Error {
        let (name, at) = (fourcc.escape_ascii(), self.at - 4);
        Error::unsupported(format!("byte {at}: {thing} of kind `{name}`, supported are {supported}"))
    }

    /// Reads `count` elements of `bytes` bytes each.
    fn take(&mut self, count: u64, bytes: usize, what: &str) -> Result<&'a [u8]> {
        let left = &self.bytes[self.at..];
        let wanted = usize::try_from(count).ok().and_then(|n| n.checked_mul(bytes));
        let part = wanted.and_then(|n| left.get(..n)).ok_or_else(|| {
            let (at, left) = (self.at, left.len());
            Error::corrupt(format!("byte {at}: {what} take {count} × {bytes} bytes, the file has {left} more"))
        })?;
        self.at += part.len();
        Ok(part)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(1, N, what)?);
        Ok(array)
    }

    fn fourcc(&mut self, what: &str) -> Result<[u8; 4]> {
        self.array(what)
    }

    fn i32(&mut self, what: &str) -> Result<i32> {
        self.array(what).map(i32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn flag(&mut self, what: &str) -> Result<bool> {
        match self.array(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(self.corrupt(format!("{what}: got {other}, expected 0 or 1"))),
        }
    }

    /// Reads a count and that number of elements of N bytes.
    fn vector<const N: usize>(&mut self, what: &str) -> Result<&'a [[u8; N]]> {
        let count = self.u64(what)?;
        Ok(self.take(count, N, what)?.as_chunks().0)
    }

    fn header(&mut self) -> Result<Header> {
        let (dimension, vectors) = (self.i32("dimension")?, self.u64("number of vectors")?);
        if dimension < 1 || dimension as usize > limits::DIMENSION_MAX {
            let most = limits::DIMENSION_MAX;
            return Err(self.corrupt(format!("vectors of {dimension} dimensions, expected 1 to {most}")));
        }
        self.array::<16>("unused numbers")?;
        if !self.flag("trained")? {
            return Err(Error::unsupported("the index is not trained"));
        }
        let metric = self.i32("metric")?;
        if ![METRIC_INNER_PRODUCT, METRIC_L2].contains(&metric) {
            return Err(Error::unsupported(format!("metric {metric}: supported are inner product (0) and L2 (1)")));
        }
        Ok(Header { dimension: dimension as usize, vectors, metric })
    }
}

#[cfg(test)]
mod tests;
