//! Topology entry of a remote cluster, from the statistics that the running cluster reports.

use super::topology::{GIB, Remote};
use crate::tiers::remote::ClusterStatistics;

/// Bytes that primaries store per byte of rows, the larger of two measurements (`docs/guide/remote-tables.md`).
const REMOTE_OVERHEAD: f64 = 1.08;
/// Rows per second that one node answers, and its bandwidth, measured on two shared cores; a topology file may override them.
const REMOTE_ROWS_PER_S: f64 = 400_000.0;
const REMOTE_BANDWIDTH_GB_S: f64 = 1.0;

impl From<ClusterStatistics> for Remote {
    /// Values that the cluster does not report are the measured constants of this module.
    fn from(survey: ClusterStatistics) -> Self {
        Remote {
            name: "cluster".into(),
            nodes: survey.primaries,
            node_gib: (survey.node_bytes as f64 / GIB * 1000.0).floor() / 1000.0,
            overhead: REMOTE_OVERHEAD,
            round_trip_us: (survey.round_trip.as_secs_f64() * 1e7).round() / 10.0,
            rows_per_s: REMOTE_ROWS_PER_S,
            bandwidth_gb_s: REMOTE_BANDWIDTH_GB_S,
        }
    }
}
