//! Distribution of the rows of a table over the hosts that train together.

use sterling_core::error::Result;

/// The rows of every table that one of several hosts has: row `r` is on host `r % hosts`, so that popular ids, which often have
/// neighbouring numbers, are on different hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostShare {
    /// Rank of the host, from 0.
    pub host: u32,
    /// Number of hosts, at least 1.
    pub hosts: u32,
}

impl HostShare {
    /// Returns the host that has a row.
    pub fn owner(&self, row: u32) -> usize {
        (row % self.hosts) as usize
    }

    /// Returns whether this host has a row.
    pub fn owns(&self, row: u32) -> bool {
        row % self.hosts == self.host
    }

    /// Returns the local index of a row: its index among the rows of its host.
    pub(super) fn local(&self, row: u32) -> u32 {
        row / self.hosts
    }

    /// Returns the row with a local index on this host.
    pub(super) fn global(&self, local: u32) -> u32 {
        local * self.hosts + self.host
    }

    /// Returns how many of the rows of a table this host has.
    pub(super) fn count(&self, rows: u64) -> usize {
        let (hosts, host) = (u64::from(self.hosts), u64::from(self.host));
        (rows.saturating_sub(host)).div_ceil(hosts) as usize
    }
}

/// Rows of the other hosts, for checkpoints and for the trained package.
pub trait OtherHosts: std::fmt::Debug + Send + Sync {
    /// Returns ascending rows of a table with their state, `[rows, numbers]`.
    ///
    /// # Errors
    /// If a host does not answer, or if this host is not host 0.
    fn read(&self, table: &str, rows: &[u32], numbers: usize) -> Result<Vec<f32>>;
}
