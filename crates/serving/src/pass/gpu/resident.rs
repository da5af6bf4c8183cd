//! Snapshot in device memory, or the partition of it on one of several devices.

use std::sync::Arc;

use super::delta::DeviceDelta;
use crate::view::Segment;
use sterling_core::error::{Error, Kind, Result};
use sterling_cuda::ops::value_model::{ValueInput, ValueProgram};
use sterling_cuda::partition::{ListCut, Share};
use sterling_cuda::spare::SlotLease;
use sterling_cuda::{Array, Device};
use sterling_embedding::DeviceTables;
use sterling_graph::dense::DeviceProgram;
use sterling_graph::tower::{DeviceTower, OverArch, Readable};
use sterling_index::filter::index::DevicePlanes;
use sterling_index::ivf::DeviceIndex;
use sterling_kernels::cpu::kernels::BLOCK;
use sterling_snapshot::model::{Merge, UserInput};
use sterling_snapshot::{DeviceCandidates, Snapshot};

/// Reranker on a device.
#[derive(Debug)]
pub(super) struct Reranker {
    pub(super) program: DeviceProgram,
    /// Candidate features that the reranker reads as rows.
    pub(super) rows: DeviceCandidates,
    /// Addresses of the columns that the reranker reads; 0 for the retrieval score.
    pub(super) columns: Array<u64>,
}

/// Merging of a user's queries on a device.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) how: Merge,
    /// Weights of the queries.
    pub(super) weights: Array<f32>,
}

/// Snapshot in device memory, or the partition of it on one of several devices.
#[derive(Debug)]
pub(super) struct Resident {
    pub(super) index: DeviceIndex,
    pub(super) planes: DevicePlanes,
    /// Item id of each slot.
    pub(super) ids: Array<i64>,
    /// User tower; `None` if it runs on the host or on the first device.
    pub(super) tower: Option<DeviceTower>,
    /// Merging of a user's queries; `None` if a user has one query.
    pub(super) merging: Option<Merging>,
    pub(super) reranker: Option<Reranker>,
    pub(super) value: ValueProgram,
    /// Number of user inputs of the reranker.
    pub(super) user_numbers: usize,
    /// Columns whose addresses `reranker` and `value` hold.
    columns: Vec<Array<f32>>,
    /// Delta of the snapshot on the device.
    pub(super) beside: DeviceDelta,
    pub(super) taken: Option<OccupiedBytes>,
}

/// Bytes of device memory, reported as a metric while they are occupied.
#[derive(Debug)]
pub(super) struct OccupiedBytes {
    device: String,
    bytes: f64,
}

impl OccupiedBytes {
    pub(super) fn new(device: &Device, bytes: usize) -> Self {
        let (device, bytes) = (device.name(), bytes as f64);
        metrics::gauge!("sterling_device_bytes", "device" => device.clone()).increment(bytes);
        OccupiedBytes { device, bytes }
    }
}

impl Drop for OccupiedBytes {
    fn drop(&mut self) {
        metrics::gauge!("sterling_device_bytes", "device" => self.device.clone()).decrement(self.bytes);
    }
}

/// Returns the number of spare slots behind a device's part of a snapshot, for items added later: one eighth of its
/// slots, plus padding of small lists, tables of a few views, and a separating block.
pub(super) fn spare_slots(cut: &ListCut) -> usize {
    let slots = cut.slots() / SPARE_SHARE + BLOCK * (1 + cut.lengths().len()) + SPARE_MIN;
    slots.next_multiple_of(BLOCK)
}

/// Constants of [`spare_slots`]: the divisor of the snapshot's slots, and the minimum number of spare slots.
const SPARE_SHARE: usize = 8;
const SPARE_MIN: usize = 16 << 10;

impl Resident {
    /// Copies a device's part of a snapshot, followed by `spare` slots. Only the first device has the user tower.
    pub(super) fn copy(device: &Device, snapshot: &Snapshot, part: &DevicePart, spare: usize) -> Result<Self> {
        let (package, cut) = (&snapshot.package, &*part.cut);
        let numbers = &snapshot.numbers;
        let column = |(_, numbers): &(String, Vec<f32>)| cut.copy(device, numbers, 1, spare);
        let columns = numbers.iter().map(column).collect::<Result<Vec<Array<f32>>>>()?;
        let column = |name: &str| numbers.iter().position(|(known, _)| known == name).map(|n| &columns[n]);
        let mut tables = DeviceTables::default();
        let reranker = match &package.overarch {
            None => None,
            Some(overarch) => {
                let program = overarch
                    .program()
                    .ok_or_else(|| Error::unsupported("the reranker's graph is not a compiled program"))?;
                let missing = |name: &str| Error::internal(format!("column `{name}` is not a numeric column"));
                let address = |name: &str| match name {
                    OverArch::SIMILARITY => Ok(0),
                    name => column(name).map(Array::address).ok_or_else(|| missing(name)),
                };
                let columns = overarch.numbers().map(address).collect::<Result<Vec<u64>>>()?;
                Some(Reranker {
                    program: DeviceProgram::copy(device, program)?,
                    rows: DeviceCandidates::copy(device, &snapshot.candidates, &mut tables, (cut, spare))?,
                    columns: device.copy(&columns)?,
                })
            }
        };
        let value = value_program(device, snapshot, &column)?;
        let weights: Vec<f32> = package.spec.queries().iter().map(|query| query.weight).collect();
        let how = package.spec.user.as_ref().and_then(|user| user.merge).unwrap_or_default();
        let merging =
            (!weights.is_empty()).then(|| Ok(Merging { how, weights: device.copy(&weights)? })).transpose()?;
        let retained: Vec<usize> = package
            .user_inputs
            .iter()
            .filter_map(|input| if let UserInput::Feature(n) = input { Some(*n) } else { None })
            .collect();
        let tower = package.user.as_ref().filter(|_| part.is_first);
        let tower = tower.map(|tower| DeviceTower::copy(device, tower, &retained, &mut tables));
        let tower = match tower {
            Some(Err(e)) if e.kind() == Kind::Unsupported => {
                tracing::info!(reason = %e, "the user tower runs on the host");
                None
            }
            tower => tower.transpose()?,
        };
        Ok(Resident {
            index: DeviceIndex::copy(device, &snapshot.index, cut, spare)?,
            planes: DevicePlanes::copy(device, &snapshot.filter, &snapshot.columns, cut)?,
            ids: cut.copy(device, snapshot.ids.of_slots(), 1, spare)?,
            tower,
            merging,
            reranker,
            value,
            user_numbers: package.overarch.iter().flat_map(|o| o.user()).map(Readable::count).sum(),
            columns,
            beside: DeviceDelta::new((part.share, part.cut.clone()), spare),
            taken: None,
        })
    }

    /// Returns the bytes that the snapshot takes on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.taken.as_ref().map_or(0, |taken| taken.bytes as u64)
    }

    /// Returns the number of queries per user.
    pub(super) fn queries(&self) -> usize {
        self.merging.as_ref().map_or(1, |merging| merging.weights.len())
    }

    /// Writes a segment's per-slot data (except its index) to spare slots from `first` on. Keys are stored in leased slots of the
    /// spare capacity.
    ///
    /// # Errors
    /// `Overloaded` if there is no room; as [`Array::write_at`].
    pub(super) fn put(&self, (segment, cut): (&Segment, &ListCut), first: u32) -> Result<Vec<SlotLease>> {
        let at = first as usize;
        cut.write(&self.ids, segment.ids().of_slots(), 1, at)?;
        for (column, numbers) in self.columns.iter().zip(segment.numbers()) {
            cut.write(column, numbers, 1, at)?;
        }
        self.reranker.as_ref().map_or(Ok(Vec::new()), |reranker| reranker.rows.put((segment.candidates(), cut), first))
    }
}

/// Part of a snapshot for one device.
#[derive(Debug)]
pub(super) struct DevicePart {
    share: Share,
    pub(super) cut: Arc<ListCut>,
    is_first: bool,
}

impl DevicePart {
    pub(super) fn of(snapshot: &Snapshot, share: Share, is_first: bool) -> Self {
        DevicePart { share, cut: Arc::new(snapshot.index.cut(share)), is_first }
    }

    /// Returns the bytes that an upload would take, without allocating them.
    pub(super) fn bytes(&self, device: &Device, snapshot: &Snapshot, spare: usize) -> Result<u64> {
        device.bytes_of(|device| Resident::copy(device, snapshot, self, spare)).map(|bytes| bytes as u64)
    }
}

/// Compiles the value model; `column` returns the device array of a numeric column.
fn value_program<'a>(
    device: &Device,
    snapshot: &Snapshot,
    column: &dyn Fn(&str) -> Option<&'a Array<f32>>,
) -> Result<ValueProgram> {
    let tasks = &snapshot.package.spec.tasks;
    let input = |name: &String| match (tasks.iter().position(|task| task.name == *name), column(name)) {
        (Some(task), _) => ValueInput::task(task),
        (None, Some(column)) => ValueInput::column(column),
        (None, None) => ValueInput::similarity(),
    };
    let program = &snapshot.value;
    let inputs: Vec<ValueInput> = program.inputs().iter().map(input).collect();
    Ok(ValueProgram {
        steps: device.copy(&program.lower())?,
        inputs: device.copy(&inputs)?,
        constants: program.constants(&std::collections::BTreeMap::new())?.len(),
        tasks: snapshot.package.overarch.as_ref().map_or(0, |o| o.tasks()),
        depth: program.depth(),
    })
}
