//! A partitioned table in training: rows with their optimizer state, partitioned by rows and columns, with replicas, in this
//! process or on other hosts.
//!
//! As in lookups ([`crate::shard`]), rows are transferred and sums are not. A batch's distinct rows with their state
//! (*stretches*) are assembled, updated by the same kernels as an unpartitioned table, and written back to every partition that
//! has a part of them. The update is the same computation for every partitioning, so its results are bit-identical.

use std::ops::Range;
use std::sync::Arc;

use crate::report::Lookup;
use crate::shard::Cut;
use crate::spec::TableSpec;
use crate::tiers::{Fetched, RowSource, RowState};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Owned;
use sterling_kernels::cpu::update::RuleKind;

/// Rows and state of a remote partition, such as on another host: little-endian f32, `[row | state]` of its columns.
pub trait MasterSource: RowSource {
    /// Writes ascending rows with their state, `[rows, row_bytes]`. Later reads of these rows return the written values.
    ///
    /// # Errors
    /// If a row may not have been written: training then stops, and resumes from its checkpoint.
    fn write(&self, rows: &[u64], stretches: &[u8]) -> Result<()>;
}

/// f32 values per cache line.
const LINE_NUMBERS: usize = 16;

/// Layout of a row with its optimizer state: the row, state vectors of the row's width, then scalars per row.
#[derive(Clone, Copy, Debug)]
pub(super) struct StretchLayout {
    width: usize,
    /// Number of vectors of the row's width, the row included.
    vectors: usize,
    numbers: usize,
}

impl StretchLayout {
    pub(super) fn new(width: usize, kind: Option<RuleKind>) -> Self {
        let (vectors, numbers) = kind.map_or((0, 0), |kind| (kind.state_vectors(), kind.state_numbers()));
        StretchLayout { width, vectors: vectors + 1, numbers }
    }

    /// Returns the number of f32 values of a row and its state.
    pub(super) fn used(&self) -> usize {
        self.vectors * self.width + self.numbers
    }

    /// Returns the distance between the starts of rows: a multiple of the cache line if that adds at most a quarter. Rows that
    /// start at a cache line are pooled in a quarter less time than rows that straddle two (docs/internals/learning.md).
    pub(super) fn stride(&self) -> usize {
        let lines = self.used().next_multiple_of(LINE_NUMBERS);
        if 4 * lines <= 5 * self.used() { lines } else { self.used() }
    }

    /// Returns the contiguous ranges that `columns` occupy, each in a complete row with state and in the partition's.
    fn runs(self, columns: &Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let (first, part) = (columns.start, columns.len());
        let vector = move |v: usize| {
            let whole = v * self.width + first;
            (whole..whole + part, v * part..(v + 1) * part)
        };
        let numbers = self.vectors * self.width..self.used();
        let behind = self.vectors * part..self.vectors * part + self.numbers;
        (0..self.vectors).map(vector).chain([(numbers, behind)])
    }
}

/// Returns the bytes of a row of `width` values and its optimizer state, in a table that is not partitioned.
pub fn stretch_bytes(width: usize, kind: RuleKind) -> usize {
    StretchLayout::new(width, Some(kind)).stride() * size_of::<f32>()
}

/// The partitions of a table.
#[derive(Debug)]
pub(super) struct Parts {
    layout: StretchLayout,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    rows: Range<u32>,
    columns: Range<usize>,
    copy: usize,
    device: String,
    layout: StretchLayout,
    stretches: Stretches,
}

#[derive(Debug)]
enum Stretches {
    Here(Owned<f32>),
    Elsewhere(Arc<dyn MasterSource>),
}

/// Rows with their state, received from one partition.
#[derive(Debug)]
pub(super) struct RequestedStretches {
    /// Index of the partition.
    pub(super) part: usize,
    /// Range of the requested rows that the partition has.
    pub(super) range: Range<usize>,
    /// Rows of the range with their state, `[rows, the partition's stride]`.
    pub(super) stretches: Vec<f32>,
}

impl Parts {
    pub(super) fn new(
        spec: &TableSpec,
        layout: StretchLayout,
        whole: &[f32],
        cuts: &[Cut],
        elsewhere: impl Fn(usize) -> Option<Arc<dyn MasterSource>>,
    ) -> Result<Self> {
        check_cover(spec, cuts)?;
        let part = |(number, cut): (usize, &Cut)| {
            let Cut { rows, columns, copy, device } = cut.clone();
            let rows = rows.start as u32..rows.end as u32;
            let part = StretchLayout { width: columns.len(), ..layout };
            let stretches = match elsewhere(number) {
                Some(source) => {
                    let expected = (rows.len() as u64, part.used() * size_of::<f32>());
                    if (source.rows(), source.row_bytes()) != expected {
                        return Err(Error::invalid(format!(
                            "shard on `{device}`: the source has {} rows of {} bytes, expected {} rows of {} bytes",
                            source.rows(),
                            source.row_bytes(),
                            expected.0,
                            expected.1
                        )));
                    }
                    Stretches::Elsewhere(source)
                }
                None => {
                    let mut here = Owned::zeros(rows.len() * part.used())?;
                    let of_rows = whole[rows.start as usize * layout.stride()..].chunks_exact(layout.stride());
                    for (to, from) in here.chunks_exact_mut(part.used()).zip(of_rows) {
                        for (of_whole, of_part) in layout.runs(&columns) {
                            to[of_part].copy_from_slice(&from[of_whole]);
                        }
                    }
                    Stretches::Here(here)
                }
            };
            Ok(Part { rows, columns, copy, device, layout: part, stretches })
        };
        Ok(Parts { layout, parts: cuts.iter().enumerate().map(part).collect::<Result<_>>()? })
    }

    /// Returns the bytes of partitions in this process's memory.
    pub(super) fn bytes(&self) -> u64 {
        let here = |part: &Part| match &part.stretches {
            Stretches::Here(stretches) => size_of_val(&**stretches) as u64,
            Stretches::Elsewhere(_) => 0,
        };
        self.parts.iter().map(here).sum()
    }

    /// Returns the remote partitions from which rows are read: those of the first replica.
    pub(super) fn sources(&self) -> Vec<Remote> {
        let source = |(number, part): (usize, &Part)| match &part.stretches {
            Stretches::Elsewhere(source) if part.copy == 0 => Some(Remote {
                part: number,
                rows: part.rows.clone(),
                device: part.device.clone(),
                source: source.clone(),
            }),
            _ => None,
        };
        self.parts.iter().enumerate().filter_map(source).collect()
    }

    /// Returns ascending rows with their state, `[rows, stride]`; requests remote rows from their sources.
    pub(super) fn read(&self, rows: &[u32]) -> Result<Vec<f32>> {
        let requested = self.sources().iter().filter_map(|remote| remote.ask(rows)).collect::<Result<Vec<_>>>()?;
        Ok(self.assemble(rows, &requested))
    }

    /// Assembles ascending rows with their state; `requested` has the rows received from remote partitions.
    pub(super) fn assemble(&self, rows: &[u32], requested: &[RequestedStretches]) -> Vec<f32> {
        let stride = self.layout.stride();
        let mut out = vec![0f32; rows.len() * stride];
        for part in self.parts.iter().filter(|part| part.copy == 0) {
            let Stretches::Here(stretches) = &part.stretches else { continue };
            let range = among(rows, &part.rows);
            let from = rows[range.clone()].iter().map(|row| part.stretch(stretches, *row));
            self.place(part, &mut out[range.start * stride..], from);
        }
        for requested in requested {
            let part = &self.parts[requested.part];
            self.place(
                part,
                &mut out[requested.range.start * stride..],
                requested.stretches.chunks_exact(part.layout.used()),
            );
        }
        out
    }

    /// Copies rows of a partition, with their state, to their columns of the complete rows in `out`.
    fn place<'a>(&self, part: &Part, out: &mut [f32], from: impl Iterator<Item = &'a [f32]>) {
        for (to, from) in out.chunks_exact_mut(self.layout.stride()).zip(from) {
            for (of_whole, of_part) in self.layout.runs(&part.columns) {
                to[of_whole].copy_from_slice(&from[of_part]);
            }
        }
    }

    /// Writes ascending complete rows with their state to all replicas.
    pub(super) fn write(&mut self, rows: &[u32], from: &[f32]) -> Result<()> {
        let Parts { layout, parts } = self;
        for part in parts {
            let range = among(rows, &part.rows);
            let stride = part.layout.used();
            let from = &from[range.start * layout.stride()..range.end * layout.stride()];
            let mut cut = vec![0f32; range.len() * stride];
            for (to, from) in cut.chunks_exact_mut(stride).zip(from.chunks_exact(layout.stride())) {
                for (of_whole, of_part) in layout.runs(&part.columns) {
                    to[of_part].copy_from_slice(&from[of_whole]);
                }
            }
            let numbers = rows[range].iter().map(|row| row - part.rows.start);
            match &mut part.stretches {
                Stretches::Here(stretches) => {
                    for (row, from) in numbers.zip(cut.chunks_exact(stride)) {
                        stretches[row as usize * stride..][..stride].copy_from_slice(from);
                    }
                }
                Stretches::Elsewhere(source) if !cut.is_empty() => {
                    let numbers: Vec<u64> = numbers.map(u64::from).collect();
                    let place = |e: Error| e.within(format!("shard on `{}`", part.device));
                    source.write(&numbers, bytemuck::cast_slice(&cut)).map_err(place)?;
                }
                Stretches::Elsewhere(_) => {}
            }
        }
        Ok(())
    }
}

impl Part {
    fn stretch<'a>(&self, stretches: &'a [f32], row: u32) -> &'a [f32] {
        let stride = self.layout.used();
        &stretches[(row - self.rows.start) as usize * stride..][..stride]
    }
}

/// A remote partition.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    part: usize,
    rows: Range<u32>,
    device: String,
    source: Arc<dyn MasterSource>,
}

impl Remote {
    /// Requests those of the ascending `rows` that this partition has, and waits for the answer; none if it has no such row.
    pub(super) fn ask(&self, rows: &[u32]) -> Option<Result<RequestedStretches>> {
        let range = among(rows, &self.rows);
        (!range.is_empty()).then(|| {
            let numbers: Vec<u64> = rows[range.clone()].iter().map(|row| u64::from(row - self.rows.start)).collect();
            let place = |e: Error| e.within(format!("shard on `{}`", self.device));
            let pending = self.source.begin(numbers, &Lookup::default());
            self.source.send();
            let stretches = pending.wait().and_then(|fetched| self.checked(fetched, range.len())).map_err(place)?;
            Ok(RequestedStretches { part: self.part, range, stretches })
        })
    }

    fn checked(&self, fetched: Fetched, count: usize) -> Result<Vec<f32>> {
        let Fetched { bytes, states } = fetched;
        if states.len() != count || bytes.len() != count * self.source.row_bytes() {
            return Err(Error::corrupt(format!(
                "the source returned {} rows in {} bytes, expected {count} complete rows",
                states.len(),
                bytes.len()
            )));
        }
        match states.iter().position(|state| *state != RowState::Hit) {
            Some(at) => Err(Error::unavailable(format!("row {at} of {count} did not arrive: {:?}", states[at]))),
            None => Ok(bytes.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number)).collect()),
        }
    }
}

/// Returns which of ascending rows lie in a range of rows.
fn among(rows: &[u32], range: &Range<u32>) -> Range<usize> {
    let at = |row: u32| rows.partition_point(|r| *r < row);
    at(range.start)..at(range.end)
}

/// Checks that the cuts of every replica are disjoint and cover the table.
fn check_cover(spec: &TableSpec, cuts: &[Cut]) -> Result<()> {
    let cells = |cut: &Cut| u128::from(cut.rows.end - cut.rows.start) * cut.columns.len() as u128;
    let overlap = |a: &Cut, b: &Cut| {
        let rows = a.rows.start.max(b.rows.start) < a.rows.end.min(b.rows.end);
        rows && a.columns.start.max(b.columns.start) < a.columns.end.min(b.columns.end)
    };
    for cut in cuts {
        let is_inside = cut.rows.start < cut.rows.end && cut.rows.end <= spec.rows;
        if !is_inside || cut.columns.is_empty() || cut.columns.end > spec.width {
            let what = format!(
                "got rows {:?}, columns {:?}, expected ranges within {} rows and {} columns",
                cut.rows, cut.columns, spec.rows, spec.width
            );
            return Err(Error::invalid(what));
        }
    }
    let copies = cuts.iter().map(|cut| cut.copy + 1).max().unwrap_or(1);
    for copy in 0..copies {
        let of_copy: Vec<&Cut> = cuts.iter().filter(|cut| cut.copy == copy).collect();
        for (at, cut) in of_copy.iter().enumerate() {
            if let Some(other) = of_copy[..at].iter().find(|other| overlap(cut, other)) {
                let what = format!("rows {:?} and rows {:?} of two shards overlap", cut.rows, other.rows);
                return Err(Error::invalid(what));
            }
        }
        let covered: u128 = of_copy.iter().map(|cut| cells(cut)).sum();
        if covered != u128::from(spec.rows) * spec.width as u128 {
            let what = format!(
                "shards of copy {copy} hold {covered} numbers, expected {} rows of {} numbers",
                spec.rows, spec.width
            );
            return Err(Error::invalid(what));
        }
    }
    Ok(())
}
