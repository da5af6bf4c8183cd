//! The rows of a table in training: f32, each followed by its optimizer state.

use std::sync::Arc;

use crate::format::encode_row;
use crate::managed::{IdLearner, ManagedIds};
use crate::place::Sharding;
use crate::shard::Cut;
use crate::spec::{TableSpec, Unseen};
use crate::table::Table;
use crate::train::parts::{MasterSource, Parts, StretchLayout};
#[cfg(feature = "cuda")]
use crate::train::resident::DeviceStretches;
use crate::train::rule::Rule;
use crate::train::share::{HostShare, OtherHosts};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::{Buffer, Owned};
use sterling_kernels::cpu::pool::RowFormat;

/// A table in training. Each row `[D]` and its optimizer state are contiguous (a *stretch*), so that an update touches one region
/// of memory. [`MasterTable::served`] converts the master table to a served format.
#[derive(Debug)]
pub struct MasterTable {
    spec: TableSpec,
    rule: Option<Rule>,
    layout: StretchLayout,
    stretches: Stretches,
    /// State of managed ids; none if ids are row numbers.
    ids: Option<IdLearner>,
}

/// Storage of a table's rows with their optimizer state.
#[derive(Debug)]
enum Stretches {
    /// All rows with their state in one array of this process, `[rows, stride]`.
    Whole(Owned<f32>),
    /// Partitions, whose updates are bit-identical to the updates of an unpartitioned table.
    Cut(Parts),
    /// All rows with their state in the memory of a device, whose updates are bit-identical to updates on the CPU.
    #[cfg(feature = "cuda")]
    OnDevice(DeviceStretches),
    /// The rows of this host, one of several hosts that train together.
    Shard(Shard),
}

/// The rows of this host, and access to the rows of the other hosts.
#[derive(Debug)]
struct Shard {
    share: HostShare,
    /// Rows of this host with their state, `[rows, stride]`.
    stretches: Owned<f32>,
    others: Arc<dyn OtherHosts>,
}

/// Rows of a master table with their state as flat arrays, the form stored in checkpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MasterRows {
    /// Row numbers, ascending.
    pub rows: Vec<u32>,
    /// Values of the rows, `[rows, D]`.
    pub values: Vec<f32>,
    /// Optimizer state of the rows, `[rows, state width]`; update counts are stored as bit patterns of u32.
    pub state: Vec<f32>,
}

impl MasterTable {
    /// Creates a table of f32 rows `[rows, width]` with zeros as state. Without a rule the table is frozen: it is read and
    /// never changes.
    ///
    /// # Errors
    /// `Invalid` if the number of values is not a multiple of the width, a value is not finite, or the rule is invalid;
    /// `Unsupported` for more than 2^32 - 1 rows; `Overloaded` if memory cannot be allocated.
    pub fn from_f32(name: &str, width: usize, values: &[f32], unseen: Unseen, rule: Option<Rule>) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{name}`"));
        if width == 0 || !values.len().is_multiple_of(width) {
            return Err(place(Error::invalid(format!(
                "got {} numbers, expected rows of {width} numbers",
                values.len()
            ))));
        }
        let rows = (values.len() / width) as u64;
        let mut table = MasterTable::zeros(name, rows, width, unseen, rule)?;
        for (row, values) in values.chunks_exact(width).enumerate() {
            table.set_row(row, values).map_err(place)?;
        }
        Ok(table)
    }

    /// Creates a table from the rows of another table, of any format, in this process's memory.
    ///
    /// # Errors
    /// As [`MasterTable::from_f32`]; `Unsupported` if the rows are not in this process's memory.
    pub fn from_table(table: &Table, rule: Option<Rule>) -> Result<Self> {
        let spec = table.spec();
        let rows = table.host_rows().ok_or_else(|| {
            Error::unsupported(format!("table `{}`: the rows are not in this host's memory", spec.name))
        })?;
        let mut master = MasterTable::zeros(&spec.name, spec.rows, spec.width, spec.unseen, rule)?;
        let mut values = vec![0f32; spec.width];
        for row in 0..rows.len() {
            rows.decode(row, &mut values);
            master.set_row(row, &values).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
        }
        Ok(master)
    }

    /// Creates a table of zeros.
    ///
    /// # Errors
    /// As [`MasterTable::from_f32`].
    pub fn zeros(name: &str, rows: u64, width: usize, unseen: Unseen, rule: Option<Rule>) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{name}`"));
        let spec = TableSpec { name: name.to_owned(), rows, width, format: RowFormat::F32, unseen }.checked()?;
        if u32::try_from(rows).is_err() {
            return Err(place(Error::unsupported(format!(
                "got {rows} rows of a trained table, expected at most {}",
                u32::MAX
            ))));
        }
        let rule = rule.map(Rule::checked).transpose().map_err(place)?;
        let layout = StretchLayout::new(width, rule.map(|rule| rule.kind));
        let stretches = Owned::zeros((rows as usize).saturating_mul(layout.stride())).map_err(place)?;
        Ok(MasterTable { spec, rule, layout, stretches: Stretches::Whole(stretches), ids: None })
    }

    /// Partitions the table. Each partition has the state of its columns, and a copy of the per-row scalars of the state, if the
    /// rule has any. The partitioning changes no bit of the training result.
    ///
    /// # Errors
    /// As [`MasterTable::partition_reusing`].
    pub fn cut(self, sharding: Sharding, cuts: &[Cut]) -> Result<Self> {
        self.partition_reusing(sharding, cuts, |_| None)
    }

    /// Partitions the table. `elsewhere(n)` returns the source of partition `n` if the partition is remote and already
    /// holds its rows with their optimizer state, which are then not copied.
    ///
    /// # Errors
    /// `Invalid` if the cuts do not cover every number of the table once per replica, or a source has another number or size of
    /// rows; `Unsupported` for a table that is already partitioned; `Overloaded` if memory cannot be allocated.
    pub fn partition_reusing(
        self,
        sharding: Sharding,
        cuts: &[Cut],
        elsewhere: impl Fn(usize) -> Option<Arc<dyn MasterSource>>,
    ) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{}`, {}", self.spec.name, sharding.name()));
        let Stretches::Whole(whole) = &self.stretches else {
            return Err(place(Error::unsupported("the table is already partitioned, or on a device")));
        };
        let parts = Parts::new(&self.spec, self.layout, whole, cuts, elsewhere).map_err(place)?;
        Ok(MasterTable { stretches: Stretches::Cut(parts), ..self })
    }

    /// Retains the rows that this host owns, and frees the rows of the other hosts, which `others` reads. Writes to rows of other
    /// hosts are ignored: each host writes its own rows.
    ///
    /// # Errors
    /// `Unsupported` for a partitioned or frozen table; `Overloaded` if memory cannot be allocated.
    pub fn on_host(self, share: HostShare, others: Arc<dyn OtherHosts>) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
        let Stretches::Whole(whole) = &self.stretches else {
            return Err(place(Error::unsupported("the table is partitioned, expected an unpartitioned table")));
        };
        if self.rule.is_none() {
            return Err(place(Error::unsupported("the table is frozen, expected a trained table")));
        }
        let stride = self.layout.stride();
        let mut stretches = Owned::zeros(share.count(self.spec.rows) * stride).map_err(place)?;
        for (local, to) in (0..).zip(stretches.chunks_exact_mut(stride)) {
            to.copy_from_slice(&whole[share.global(local) as usize * stride..][..stride]);
        }
        Ok(MasterTable { stretches: Stretches::Shard(Shard { share, stretches, others }), ..self })
    }

    /// Returns rows of this host with their state, `[rows, numbers]`, for another host ([`OtherHosts`]).
    ///
    /// # Errors
    /// `Invalid` for a row that does not exist, is out of order, or belongs to another host.
    pub fn own_rows(&self, rows: &[u32]) -> Result<Vec<f32>> {
        self.check_rows(rows)?;
        let foreign = self.share().and_then(|share| rows.iter().find(|row| !share.owns(**row)));
        if let Some(row) = foreign {
            return Err(Error::invalid(format!(
                "table `{}`: row {row} belongs to another host, expected rows of this host",
                self.spec.name
            )));
        }
        let stretches = self.read(rows)?;
        let stretches = stretches.chunks_exact(self.layout.stride());
        Ok(stretches.flat_map(|stretch| &stretch[..self.layout.used()]).copied().collect())
    }

    /// Returns whether this host has a row.
    pub fn owns(&self, row: u32) -> bool {
        self.share().is_none_or(|share| share.owns(row))
    }

    /// Returns which rows this host has; none if this process has all rows.
    pub(super) fn share(&self) -> Option<HostShare> {
        match &self.stretches {
            Stretches::Shard(shard) => Some(shard.share),
            _ => None,
        }
    }

    /// Returns this host's rows with their state, `[rows, stride]`.
    pub(super) fn own(&self) -> Option<&[f32]> {
        match &self.stretches {
            Stretches::Shard(shard) => Some(&shard.stretches),
            _ => None,
        }
    }

    /// Returns this host's rows with their state, `[rows, stride]`, mutable.
    pub(super) fn own_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.stretches {
            Stretches::Shard(shard) => Some(&mut shard.stretches),
            _ => None,
        }
    }

    pub(super) fn ids(&self) -> Option<&IdLearner> {
        self.ids.as_ref()
    }

    pub(super) fn ids_mut(&mut self) -> Option<&mut IdLearner> {
        self.ids.as_mut()
    }

    pub(super) fn set_ids(&mut self, ids: IdLearner) {
        self.ids = Some(ids);
    }

    /// Returns name, rows, width, and the handling of unseen ids.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Returns the optimizer rule; none if the table is frozen.
    pub fn rule(&self) -> Option<&Rule> {
        self.rule.as_ref()
    }

    /// Returns the number of f32 values of optimizer state per row.
    pub fn state_width(&self) -> usize {
        self.layout.used() - self.spec.width
    }

    /// Returns the bytes of rows and state in the memory of this process and its device.
    pub fn bytes(&self) -> u64 {
        match &self.stretches {
            Stretches::Whole(stretches) => size_of_val(&**stretches) as u64,
            Stretches::Cut(parts) => parts.bytes(),
            #[cfg(feature = "cuda")]
            Stretches::OnDevice(stretches) => stretches.bytes(),
            Stretches::Shard(shard) => size_of_val(&*shard.stretches) as u64,
        }
    }

    /// Moves the rows and state of an unpartitioned table to a device.
    #[cfg(feature = "cuda")]
    pub(super) fn move_to(&mut self, device: &sterling_cuda::Device) -> Result<()> {
        if let Stretches::Whole(stretches) = &self.stretches {
            let copied = DeviceStretches::copy(device, stretches, self.layout.stride());
            let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
            self.stretches = Stretches::OnDevice(copied.map_err(place)?);
        }
        Ok(())
    }

    /// Returns the rows and state of a table on a device.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self) -> Option<&DeviceStretches> {
        match &self.stretches {
            Stretches::OnDevice(stretches) => Some(stretches),
            _ => None,
        }
    }

    /// Returns the shape of the table for a device.
    #[cfg(feature = "cuda")]
    pub(super) fn shape(&self) -> sterling_cuda::ops::learn::MasterShape {
        sterling_cuda::ops::learn::MasterShape {
            rows: self.spec.rows,
            width: self.spec.width,
            stride: self.layout.stride(),
            learns: self.rule.is_some(),
        }
    }

    /// Returns row `n`, `[D]`.
    ///
    /// # Panics
    /// If there is no such row, or the table is partitioned or on a device (use [`MasterTable::export`]).
    pub fn row(&self, n: usize) -> &[f32] {
        &self.stretch(n)[..self.spec.width]
    }

    /// Returns the optimizer state of row `n`, `[state width]`.
    ///
    /// # Panics
    /// As [`MasterTable::row`].
    pub fn state(&self, n: usize) -> &[f32] {
        &self.stretch(n)[self.spec.width..self.layout.used()]
    }

    fn stretch(&self, n: usize) -> &[f32] {
        let stride = self.layout.stride();
        &self.whole().expect("an unpartitioned table in this process's memory")[n * stride..][..stride]
    }

    /// Returns the distance between the starts of consecutive rows in storage, in f32 values.
    pub(super) fn stride(&self) -> usize {
        self.layout.stride()
    }

    /// Returns all rows with their state, if the table is neither partitioned nor on a device.
    pub(super) fn whole(&self) -> Option<&[f32]> {
        match &self.stretches {
            Stretches::Whole(stretches) => Some(stretches),
            _ => None,
        }
    }

    /// Returns all rows with their state, mutable, if the table is neither partitioned nor on a device.
    pub(super) fn whole_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.stretches {
            Stretches::Whole(stretches) => Some(stretches),
            _ => None,
        }
    }

    /// Returns the partitions of a partitioned table.
    pub(super) fn parts(&self) -> Option<&Parts> {
        match &self.stretches {
            Stretches::Cut(parts) => Some(parts),
            _ => None,
        }
    }

    /// Copies ascending rows with their state, `[rows, stride]`.
    pub(super) fn read(&self, rows: &[u32]) -> Result<Vec<f32>> {
        match &self.stretches {
            Stretches::Whole(_) => Ok(rows.iter().flat_map(|row| self.stretch(*row as usize)).copied().collect()),
            Stretches::Cut(parts) => parts.read(rows),
            #[cfg(feature = "cuda")]
            Stretches::OnDevice(stretches) => stretches.read(rows),
            Stretches::Shard(shard) => shard.read(&self.spec.name, rows, self.layout),
        }
    }

    /// Writes ascending rows with their state, `[rows, stride]`.
    pub(super) fn write(&mut self, rows: &[u32], from: &[f32]) -> Result<()> {
        let stride = self.layout.stride();
        match &mut self.stretches {
            Stretches::Whole(stretches) => {
                for (row, from) in rows.iter().zip(from.chunks_exact(stride)) {
                    stretches[*row as usize * stride..][..stride].copy_from_slice(from);
                }
                Ok(())
            }
            Stretches::Cut(parts) => parts.write(rows, from),
            #[cfg(feature = "cuda")]
            Stretches::OnDevice(stretches) => stretches.write(rows, from),
            Stretches::Shard(Shard { share, stretches, .. }) => {
                let own = rows.iter().zip(from.chunks_exact(stride)).filter(|(row, _)| share.owns(**row));
                for (row, from) in own {
                    stretches[share.local(*row) as usize * stride..][..stride].copy_from_slice(from);
                }
                Ok(())
            }
        }
    }

    /// Writes the values of row `n`; its optimizer state stays unchanged.
    ///
    /// # Errors
    /// `Invalid` if there is no such row, the width differs, or a value is not finite; errors of the row's source if it is on
    /// another host.
    pub fn set_row(&mut self, n: usize, values: &[f32]) -> Result<()> {
        self.check_row(n, values)?;
        if !self.owns(n as u32) {
            return Ok(());
        }
        let mut stretch = self.read(&[n as u32])?;
        stretch[..self.spec.width].copy_from_slice(values);
        self.write(&[n as u32], &stretch)
    }

    fn check_row(&self, n: usize, values: &[f32]) -> Result<()> {
        if n as u64 >= self.spec.rows {
            return Err(Error::invalid(format!("got row {n}, expected less than {}", self.spec.rows)));
        }
        if values.len() != self.spec.width {
            return Err(Error::invalid(format!("row {n}: got {} numbers, expected {}", values.len(), self.spec.width)));
        }
        match values.iter().position(|x| !x.is_finite()) {
            Some(at) => {
                Err(Error::invalid(format!("row {n}: column {at} is {}, expected a finite number", values[at])))
            }
            None => Ok(()),
        }
    }

    /// Copies rows with their state. Row numbers must be ascending and distinct.
    ///
    /// # Errors
    /// `Invalid` for a row that does not exist or is out of order; errors of the source of remote rows.
    pub fn export(&self, rows: impl IntoIterator<Item = u32>) -> Result<MasterRows> {
        let rows: Vec<u32> = rows.into_iter().collect();
        self.check_rows(&rows)?;
        let stretches = self.read(&rows)?;
        let (width, count) = (self.spec.width, rows.len());
        let mut out = MasterRows {
            rows,
            values: Vec::with_capacity(count * width),
            state: Vec::with_capacity(count * self.state_width()),
        };
        for stretch in stretches.chunks_exact(self.layout.stride()) {
            out.values.extend_from_slice(&stretch[..width]);
            out.state.extend_from_slice(&stretch[width..self.layout.used()]);
        }
        Ok(out)
    }

    /// Writes rows with their state, as returned by [`MasterTable::export`].
    ///
    /// # Errors
    /// `Invalid` if the arrays do not fit the table, and nothing is written; errors of the source of remote rows.
    pub fn import(&mut self, rows: &MasterRows) -> Result<()> {
        self.check_rows(&rows.rows)?;
        let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
        let (count, width, state_width) = (rows.rows.len(), self.spec.width, self.state_width());
        if rows.values.len() != count * width || rows.state.len() != count * state_width {
            return Err(place(Error::invalid(format!(
                "got {} values and {} state values for {count} rows, expected {width} and {state_width} per row",
                rows.values.len(),
                rows.state.len()
            ))));
        }
        for (row, values) in rows.rows.iter().zip(rows.values.chunks_exact(width)) {
            self.check_row(*row as usize, values).map_err(place)?;
        }
        let mut stretches = vec![0f32; count * self.layout.stride()];
        for (n, stretch) in stretches.chunks_exact_mut(self.layout.stride()).enumerate() {
            stretch[..width].copy_from_slice(&rows.values[n * width..][..width]);
            stretch[width..self.layout.used()].copy_from_slice(&rows.state[n * state_width..][..state_width]);
        }
        self.write(&rows.rows, &stretches)
    }

    fn check_rows(&self, rows: &[u32]) -> Result<()> {
        let invalid = |what: String| Err(Error::invalid(what).within(format!("table `{}`", self.spec.name)));
        if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            return invalid(format!("row {} after row {}, expected rising rows", pair[1], pair[0]));
        }
        match rows.last() {
            Some(row) if u64::from(*row) >= self.spec.rows => {
                invalid(format!("got row {row}, expected less than {}", self.spec.rows))
            }
            _ => Ok(()),
        }
    }

    /// Returns all rows without their state, `[rows, D]`.
    ///
    /// # Errors
    /// Errors of the source of remote rows.
    pub fn values(&self) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.spec.rows as usize * self.spec.width);
        self.each_row(|row| {
            values.extend_from_slice(row);
            Ok(())
        })?;
        Ok(values)
    }

    /// Converts the table to a served format, with the map of managed ids.
    ///
    /// # Errors
    /// As [`MasterTable::served_rows`].
    pub fn served(&self, format: RowFormat) -> Result<Table> {
        let table = self.served_rows(format)?;
        match &self.ids {
            None => Ok(table),
            Some(ids) => {
                let ids = ManagedIds::new(table.spec(), Buffer::copied(ids.by_row())?)?;
                Ok(table.with_ids(ids))
            }
        }
    }

    /// Converts the rows to a served format, without managed ids, which [`MasterTable::id_by_row`] returns.
    ///
    /// # Errors
    /// `Invalid` with table and row if a row cannot be stored in the format; `Overloaded` if memory cannot be allocated; errors
    /// of the source of remote rows.
    pub fn served_rows(&self, format: RowFormat) -> Result<Table> {
        let spec = TableSpec { format, ..self.spec.clone() };
        let row_bytes = spec.row_bytes()?;
        let mut stored = Ok(());
        let bytes = Buffer::filled(spec.rows as usize * row_bytes, |out| {
            let mut out = out.chunks_exact_mut(row_bytes).enumerate();
            stored = self.each_row(|values| {
                let (row, out) = out.next().expect("as many rows as the table has");
                let place = |e: Error| e.within(format!("table `{}`, row {row}", spec.name));
                encode_row(format, values, out).map_err(place)
            });
        })?;
        stored?;
        Table::host(spec, bytes)
    }

    /// Visits all rows in order.
    fn each_row(&self, mut visit: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let mut visit_all = |stretches: &[f32]| {
            stretches.chunks_exact(self.layout.stride()).try_for_each(|stretch| visit(&stretch[..self.spec.width]))
        };
        match self.whole() {
            Some(stretches) => visit_all(stretches),
            None => (0..self.spec.rows as u32).step_by(EXPORT_ROWS).try_for_each(|first| {
                let rows: Vec<u32> = (first..self.spec.rows as u32).take(EXPORT_ROWS).collect();
                visit_all(&self.read(&rows)?)
            }),
        }
    }
}

impl Shard {
    /// Returns ascending rows with their state, `[rows, stride]`; requests rows of other hosts from them.
    fn read(&self, table: &str, rows: &[u32], layout: StretchLayout) -> Result<Vec<f32>> {
        let (stride, used) = (layout.stride(), layout.used());
        let mut out = vec![0f32; rows.len() * stride];
        let foreign: Vec<u32> = rows.iter().copied().filter(|row| !self.share.owns(*row)).collect();
        let received = if foreign.is_empty() { Vec::new() } else { self.others.read(table, &foreign, used)? };
        if received.len() != foreign.len() * used {
            return Err(Error::internal(format!(
                "other hosts returned {} numbers for {} rows, expected {used} per row",
                received.len(),
                foreign.len()
            )));
        }
        let mut received = received.chunks_exact(used);
        for (row, to) in rows.iter().zip(out.chunks_exact_mut(stride)) {
            if self.share.owns(*row) {
                to.copy_from_slice(&self.stretches[self.share.local(*row) as usize * stride..][..stride]);
            } else if let Some(from) = received.next() {
                to[..used].copy_from_slice(from);
            }
        }
        Ok(out)
    }
}

/// Number of rows per read when all rows of a partitioned table are visited.
const EXPORT_ROWS: usize = 4096;
