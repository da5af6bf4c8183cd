//! Settings that decide which ids get the rows of a managed table, and scores as TorchRec's eviction policies compute
//! them.

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};

/// Settings of the managed ids of a table: its field `managed` in `[train]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManagedSpec {
    /// Number of rows of the table; if absent, that of the package.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Score by which ids keep or get a row.
    #[serde(default)]
    pub evict: Evict,
    /// Exponent of the age in the score of `lru` and `distance_lfu`.
    #[serde(default = "one")]
    pub exponent: f64,
    /// Steps between evictions.
    #[serde(default = "thousand")]
    pub every: u64,
    /// Minimum number of occurrences between two evictions for which an id may get a row. If it is at least 2, a sketch
    /// counts the occurrences, which takes less memory than a counter per id.
    #[serde(default = "once")]
    pub admit: u8,
    /// Hours without an occurrence, by the times of the events, after which an id loses its row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_hours: Option<f64>,
}

/// Eviction policies: those of TorchRec (`torchrec/modules/mc_modules.py`). The age of an id is the number of steps since its last
/// occurrence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evict {
    /// Number of occurrences.
    Lfu,
    /// Last occurrence: `-(age + 1) ^ exponent`.
    Lru,
    /// Recency and frequency: `occurrences / (age + 1) ^ exponent`.
    #[default]
    DistanceLfu,
}

fn one() -> f64 {
    1.0
}

fn thousand() -> u64 {
    1000
}

fn once() -> u8 {
    1
}

impl Default for ManagedSpec {
    fn default() -> Self {
        let evict = Evict::default();
        ManagedSpec { rows: None, evict, exponent: one(), every: thousand(), admit: once(), ttl_hours: None }
    }
}

impl ManagedSpec {
    /// Checks the range of each setting.
    ///
    /// # Errors
    /// `Invalid` with the field, the received and the expected number.
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::invalid(what));
        if self.rows.is_some_and(|rows| rows == 0 || rows > u64::from(u32::MAX)) {
            return invalid(format!("rows: got {}, expected 1 to {}", self.rows.unwrap_or(0), u32::MAX));
        }
        if !(self.exponent > 0.0 && self.exponent <= 100.0) {
            return invalid(format!("exponent: got {}, expected a number above 0, at most 100", self.exponent));
        }
        if self.every == 0 {
            return invalid("every: got 0, expected at least 1".into());
        }
        if self.admit == 0 {
            return invalid("admit: got 0, expected 1 to 255".into());
        }
        match self.ttl_hours.filter(|hours| !(*hours > 0.0 && hours.is_finite())) {
            Some(hours) => invalid(format!("ttl_hours: got {hours}, expected a finite number above 0")),
            None => Ok(()),
        }
    }

    /// Returns the score of an id that occurred `count` times, last at step `seen`; ids with higher scores keep their rows.
    pub(super) fn score(&self, count: u64, seen: u64, step: u64) -> i64 {
        // TorchRec's tensors are f32. A power in f64, rounded, is the same on every machine.
        let distance = || (step.saturating_sub(seen).saturating_add(1) as f32 as f64).powf(self.exponent) as f32;
        match self.evict {
            Evict::Lfu => i64::try_from(count).unwrap_or(i64::MAX),
            Evict::Lru => ordered(-distance()),
            Evict::DistanceLfu => ordered(count as f32 / distance()),
        }
    }

    /// Returns the seconds without an occurrence after which an id loses its row.
    pub(super) fn ttl_seconds(&self) -> Option<u64> {
        self.ttl_hours.map(|hours| (hours * 3600.0) as u64)
    }
}

/// Maps a float to an integer so that integers compare like the floats.
fn ordered(x: f32) -> i64 {
    let bits = x.to_bits() as i32;
    i64::from(bits ^ ((bits >> 31) as u32 >> 1) as i32)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn scores_have_the_order_of_their_definition() {
        let numbers = [f32::NEG_INFINITY, -3.0, -1.5, -0.0, 0.0, 1e-40, 0.5, 2.0, f32::INFINITY];
        assert!(numbers.windows(2).all(|pair| ordered(pair[0]) < ordered(pair[1])));
        let spec = |evict| ManagedSpec { evict, exponent: 0.5, ..ManagedSpec::default() };
        let better =
            |evict, a: (u64, u64), b: (u64, u64)| spec(evict).score(a.0, a.1, 100) > spec(evict).score(b.0, b.1, 100);
        assert!(better(Evict::Lfu, (3, 1), (2, 100)) && better(Evict::Lru, (2, 100), (3, 1)));
        // 3 / sqrt(4) against 2 / sqrt(1), and against 1 / sqrt(1).
        assert!(better(Evict::DistanceLfu, (2, 100), (3, 97)) && better(Evict::DistanceLfu, (3, 97), (1, 100)));
    }

    #[test]
    fn values_out_of_bounds_are_named() {
        let default = ManagedSpec::default();
        default.check().unwrap();
        for (spec, expected) in [
            (ManagedSpec { rows: Some(0), ..default }, "rows: got 0"),
            (ManagedSpec { exponent: f64::NAN, ..default }, "exponent: got NaN"),
            (ManagedSpec { every: 0, ..default }, "every: got 0"),
            (ManagedSpec { admit: 0, ..default }, "admit: got 0"),
            (ManagedSpec { ttl_hours: Some(-1.0), ..default }, "ttl_hours: got -1"),
        ] {
            let reported = spec.check().unwrap_err().to_string();
            assert!(reported.contains(expected), "{reported}");
        }
    }
}
