//! The rows of a table that learns: f32, each with its optimizer's state behind it.

use crate::format::encode_row;
use crate::spec::{TableSpec, Unseen};
use crate::table::Table;
use crate::train::rule::Rule;
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::{Buffer, Owned};
use sterling_kernels::cpu::pool::{RowFormat, Rows};

/// A table that learns. Each row `[D]` lies in one stretch with the optimizer's state, so that an update touches one place. What is
/// served is made of it ([`MasterTable::served`]), in any format.
#[derive(Debug)]
pub struct MasterTable {
    spec: TableSpec,
    rule: Option<Rule>,
    stride: usize,
    stretches: Owned<f32>,
}

/// Rows of a master with their state, as flat arrays: what a checkpoint holds of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MasterRows {
    /// Row numbers, rising.
    pub rows: Vec<u32>,
    /// `[rows, D]`.
    pub values: Vec<f32>,
    /// `[rows, state width]`; counts of updates are bit patterns of u32.
    pub state: Vec<f32>,
}

impl MasterTable {
    /// A table of f32 rows `[rows, width]`, with zeros as state. Without a rule it is frozen: it is read and never changes.
    ///
    /// # Errors
    /// `Invalid` where the values are no whole rows, are not finite, or the rule is wrong; `Unsupported` for more than 2^32 - 1 rows;
    /// `Overloaded` where the memory cannot be had.
    pub fn from_f32(name: &str, width: usize, values: &[f32], unseen: Unseen, rule: Option<Rule>) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{name}`"));
        if width == 0 || !values.len().is_multiple_of(width) {
            return Err(place(Error::invalid(format!("{} numbers do not make rows of {width}", values.len()))));
        }
        let rows = (values.len() / width) as u64;
        let mut table = MasterTable::zeros(name, rows, width, unseen, rule)?;
        for (row, values) in values.chunks_exact(width).enumerate() {
            table.set_row(row, values).map_err(place)?;
        }
        Ok(table)
    }

    /// A table of the rows of another one, of any format, whole in this process's memory.
    ///
    /// # Errors
    /// As [`MasterTable::from_f32`]; `Unsupported` where the rows lie elsewhere.
    pub fn from_table(table: &Table, rule: Option<Rule>) -> Result<Self> {
        let spec = table.spec();
        let rows = table.host_rows().ok_or_else(|| {
            Error::unsupported(format!("table `{}`: its rows are not in this host's memory", spec.name))
        })?;
        let mut master = MasterTable::zeros(&spec.name, spec.rows, spec.width, spec.unseen, rule)?;
        let mut values = vec![0f32; spec.width];
        for row in 0..rows.len() {
            rows.decode(row, &mut values);
            master.set_row(row, &values).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
        }
        Ok(master)
    }

    /// A table of zeros.
    ///
    /// # Errors
    /// As [`MasterTable::from_f32`].
    pub fn zeros(name: &str, rows: u64, width: usize, unseen: Unseen, rule: Option<Rule>) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{name}`"));
        let spec = TableSpec { name: name.to_owned(), rows, width, format: RowFormat::F32, unseen }.checked()?;
        if u32::try_from(rows).is_err() {
            return Err(place(Error::unsupported(format!("{rows} rows that learn, expected at most {}", u32::MAX))));
        }
        let rule = rule.map(Rule::checked).transpose().map_err(place)?;
        let stride = width + rule.map_or(0, |rule| rule.kind.state_width(width));
        let stretches = Owned::zeros((rows as usize).saturating_mul(stride)).map_err(place)?;
        Ok(MasterTable { spec, rule, stride, stretches })
    }

    /// Name, rows, width, and the fate of unseen ids.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// How it learns; none where it is frozen.
    pub fn rule(&self) -> Option<&Rule> {
        self.rule.as_ref()
    }

    /// Numbers of the state behind a row.
    pub fn state_width(&self) -> usize {
        self.stride - self.spec.width
    }

    /// Bytes of rows and state.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.stretches) as u64
    }

    /// Row `n`, `[D]`.
    ///
    /// # Panics
    /// Where there is no such row.
    pub fn row(&self, n: usize) -> &[f32] {
        &self.stretch(n)[..self.spec.width]
    }

    /// The optimizer's state of row `n`, `[state width]`.
    ///
    /// # Panics
    /// Where there is no such row.
    pub fn state(&self, n: usize) -> &[f32] {
        &self.stretch(n)[self.spec.width..]
    }

    fn stretch(&self, n: usize) -> &[f32] {
        &self.stretches[n * self.stride..][..self.stride]
    }

    /// The rows, with their state between them.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows::strided(self.spec.width, self.stride, &self.stretches)
            .expect("whole stretches, checked when they were made")
    }

    /// All stretches, and numbers from one to the next.
    pub(super) fn stretches_mut(&mut self) -> (&mut [f32], usize) {
        (&mut self.stretches, self.stride)
    }

    /// Writes row `n` and leaves its state.
    ///
    /// # Errors
    /// `Invalid` where there is no such row, it has another width, or a number is not finite.
    pub fn set_row(&mut self, n: usize, values: &[f32]) -> Result<()> {
        self.check_row(n, values)?;
        self.stretches[n * self.stride..][..self.spec.width].copy_from_slice(values);
        Ok(())
    }

    fn check_row(&self, n: usize, values: &[f32]) -> Result<()> {
        if n as u64 >= self.spec.rows {
            return Err(Error::invalid(format!("row {n}, expected one below {}", self.spec.rows)));
        }
        if values.len() != self.spec.width {
            return Err(Error::invalid(format!("row {n}: {} numbers, expected {}", values.len(), self.spec.width)));
        }
        match values.iter().position(|x| !x.is_finite()) {
            Some(at) => {
                Err(Error::invalid(format!("row {n}: column {at} is {}, expected a finite number", values[at])))
            }
            None => Ok(()),
        }
    }

    /// Copies rows out with their state.
    ///
    /// # Errors
    /// `Invalid` for a row that is not there.
    pub fn export(&self, rows: impl IntoIterator<Item = u32>) -> Result<MasterRows> {
        let mut out = MasterRows::default();
        for row in rows {
            if u64::from(row) >= self.spec.rows {
                let what = format!("table `{}`: row {row}, expected one below {}", self.spec.name, self.spec.rows);
                return Err(Error::invalid(what));
            }
            out.rows.push(row);
            out.values.extend_from_slice(self.row(row as usize));
            out.state.extend_from_slice(self.state(row as usize));
        }
        Ok(out)
    }

    /// Writes rows with their state, as [`MasterTable::export`] gave them.
    ///
    /// # Errors
    /// `Invalid` where the arrays are not those rows, and nothing is written.
    pub fn import(&mut self, rows: &MasterRows) -> Result<()> {
        let place = |e: Error| e.within(format!("table `{}`", self.spec.name));
        let (count, width, state_width) = (rows.rows.len(), self.spec.width, self.state_width());
        if rows.values.len() != count * width || rows.state.len() != count * state_width {
            return Err(place(Error::invalid(format!(
                "{} numbers and {} of state for {count} rows, expected {width} and {state_width} per row",
                rows.values.len(),
                rows.state.len()
            ))));
        }
        for (row, values) in rows.rows.iter().zip(rows.values.chunks_exact(width)) {
            self.check_row(*row as usize, values).map_err(place)?;
        }
        for (n, row) in rows.rows.iter().enumerate() {
            let stretch = &mut self.stretches[*row as usize * self.stride..][..self.stride];
            stretch[..width].copy_from_slice(&rows.values[n * width..][..width]);
            stretch[width..].copy_from_slice(&rows.state[n * state_width..][..state_width]);
        }
        Ok(())
    }

    /// All rows without their state, `[rows, D]`.
    pub fn values(&self) -> Vec<f32> {
        self.stretches.chunks_exact(self.stride).flat_map(|stretch| &stretch[..self.spec.width]).copied().collect()
    }

    /// The table as it is served, in any format.
    ///
    /// # Errors
    /// `Invalid` where a row cannot be stored in the format; table and row are named. `Overloaded` where the memory cannot be had.
    pub fn served(&self, format: RowFormat) -> Result<Table> {
        let spec = TableSpec { format, ..self.spec.clone() };
        let row_bytes = spec.row_bytes()?;
        let mut stored = Ok(());
        let bytes = Buffer::filled(spec.rows as usize * row_bytes, |out| {
            stored = out.chunks_exact_mut(row_bytes).enumerate().try_for_each(|(row, out)| {
                let place = |e: Error| e.within(format!("table `{}`, row {row}", spec.name));
                encode_row(format, self.row(row), out).map_err(place)
            });
        })?;
        stored?;
        Table::host(spec, bytes)
    }
}
