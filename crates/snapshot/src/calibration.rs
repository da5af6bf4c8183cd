//! Calibration of nprobe against recall: measured when a version is published, and used for requests that set a recall in place of
//! a number of probes.
//!
//! A curve belongs to a number of candidates and a pass rate: the share of items that pass a filter which is
//! independent of the embedding. A point of a curve is the smallest number of inverted lists whose recall reaches a
//! target with 95 % confidence. Under a filter, only lists with eligible items count. More candidates or a lower pass
//! rate never need fewer lists.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::limits;
use sterling_index::ivf::{OodProbing, ResidualQuantiles};
use sterling_storage::files::{self, Checksum};

/// Recall targets of the measured points.
pub const TARGETS: [f64; 12] = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999];

/// Measured recall curves of a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Source of the queries.
    pub source: String,
    /// Number of measured queries.
    pub queries: usize,
    /// Recall targets of the points of each curve, ascending.
    pub targets: Vec<f64>,
    /// Score-residual quantiles: how far the score of an item exceeds the score of its list's centroid. A filtered
    /// search estimates the value of unscanned lists from these quantiles.
    pub margins: ResidualQuantiles,
    /// Reach (score of the best centroid divided by the length of the query) below which a query is out of
    /// distribution, see [`OodProbing`]. `None` if queries out of distribution were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ood_reach: Option<f32>,
    /// Curves by ascending `k`, then by descending `pass_rate`, whose first value is 1.
    pub curves: Vec<RecallCurve>,
}

/// Recall against number of probes for one number of candidates and one pass rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecallCurve {
    /// Number of candidates (k of recall@k).
    pub k: usize,
    /// Share of items that are eligible.
    pub pass_rate: f64,
    /// Smallest number of probes for each target.
    pub probes: Vec<usize>,
    /// Mean recall with each of the numbers in `probes`.
    pub recall: Vec<f64>,
    /// Lower 95 % confidence bound of the mean recall.
    pub low: Vec<f64>,
    /// Candidates that a filtered search may still expect in unscanned lists when it terminates, as a share of K0.
    pub left: Vec<f64>,
    /// Number of candidates to select by int8 rows for each target, if int8 rows lose some of the best items. 0, or an empty list,
    /// if the default number of candidates loses no best item.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub selected: Vec<usize>,
    /// Smallest number of probes for each target, for queries that are out of distribution. Empty for curves of filtered searches,
    /// which adapt to the query, and if no queries out of distribution were measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ood_probes: Vec<usize>,
    /// Settings for requests that exclude items, measured with the items that the calibration requests exclude. `None` for curves
    /// of filtered searches, and if too few of the requests exclude items.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluding: Option<ExcludingCurve>,
    /// Settings of searches by first-pass codes. `None` if the index has no codes, or if codes were not measured because few items
    /// pass. All other fields describe int8 rows, as for an index without codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<CodedCurve>,
}

/// Settings of a search without a filter whose request excludes items, for each target of a curve.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExcludingCurve {
    /// Largest number of items that a measured request excludes.
    pub excluded: usize,
    /// Smallest number of probes for each target.
    pub probes: Vec<usize>,
    /// Mean recall among the best items that the requests do not exclude.
    pub recall: Vec<f64>,
}

/// Settings of a search by first-pass codes, for each target of a curve; zeros if int8 rows are faster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodedCurve {
    /// Number of candidates to select by codes.
    pub selected: Vec<usize>,
    /// Smallest number of probes, including those that compensate for the loss by codes.
    pub probes: Vec<usize>,
    /// Mean recall, including the loss by codes.
    pub recall: Vec<f64>,
    /// Lower 95 % confidence bound of the mean recall, including the losses by both probing and codes.
    pub low: Vec<f64>,
    /// Candidates that a filtered search may still expect in unscanned lists when it terminates, as a share of K0.
    pub left: Vec<f64>,
}

/// Search settings chosen for a recall target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// Number of probes; under a filter, only lists with eligible items count.
    pub probes: usize,
    /// Number of probes without a filter for a query that is out of distribution; 0 if not measured.
    pub ood_probes: usize,
    /// Measured recall with this number of probes.
    pub recall: f64,
    /// Candidates that a filtered search may still expect in unscanned lists when it terminates, as a share of K0.
    pub left: f64,
    /// Number of eligible items to select by first-pass codes; `None` if int8 rows are faster.
    pub by_codes: Option<usize>,
    /// Least number of items to select by int8 rows; 0 if the default number suffices.
    pub by_int8: usize,
}

/// Goal of a search: recall of a number of candidates, for a share of eligible items.
#[derive(Clone, Copy, Debug)]
pub struct SearchGoal {
    /// Number of candidates, K0.
    pub candidates: usize,
    /// Estimated share of eligible items.
    pub pass_rate: f64,
    /// Recall to reach among the candidates.
    pub recall: f64,
}

impl Calibration {
    /// Reads the calibration of an index with `lists` lists.
    ///
    /// # Errors
    /// `Corrupt` with the invalid field.
    pub fn read(path: &Path, lists: usize) -> Result<Self> {
        let text = files::read(path)?;
        let corrupt = |what: String| Error::corrupt(format!("{}: {what}", path.display()));
        let calibration: Calibration = serde_json::from_slice(&text).map_err(|e| corrupt(e.to_string()))?;
        calibration.check(lists).map_err(corrupt)?;
        Ok(calibration)
    }

    /// Writes the calibration to a file.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, path: &Path) -> Result<Checksum> {
        let text = self.text()?;
        files::write_atomic(path, |out| out.write_all(&text))
    }

    /// Returns the digest of the calibration: the hash of its JSON, 16 hexadecimal digits.
    ///
    /// # Errors
    /// `Internal` if the calibration cannot be serialized.
    pub fn digest(&self) -> Result<String> {
        Ok(format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&self.text()?)))
    }

    fn text(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::internal(format!("calibration: {e}")))
    }

    fn check(&self, lists: usize) -> Result<(), String> {
        let share = |x: &f64| (0.0..=1.0).contains(x);
        if self.targets.is_empty() || !self.targets.iter().all(share) || !self.targets.is_sorted_by(|a, b| a < b) {
            return Err(format!("targets {:?}, expected ascending numbers between 0 and 1", self.targets));
        }
        self.margins.check()?;
        let mut last: Option<(usize, f64)> = None;
        for curve in &self.curves {
            let (k, pass_rate, points) = (curve.k, curve.pass_rate, self.targets.len());
            let place = format!("curve of k = {k} at pass rate {pass_rate}");
            let follows = match last {
                Some((last_k, last_rate)) if last_k == k => pass_rate < last_rate,
                Some((last_k, _)) => k > last_k && pass_rate == 1.0,
                None => k > 0 && pass_rate == 1.0,
            };
            if !(follows && pass_rate > 0.0 && pass_rate <= 1.0) {
                return Err(format!("{place}: expected curves by ascending k, then by descending pass rate from 1"));
            }
            if [curve.probes.len(), curve.recall.len(), curve.low.len(), curve.left.len()] != [points; 4] {
                return Err(format!(
                    "{place}: got curves of different lengths, expected {points} points: one per recall target"
                ));
            }
            if !curve.probes.is_sorted() || curve.probes.iter().any(|p| *p == 0 || *p > lists) {
                return Err(format!("{place}: probes {:?}, expected ascending numbers of 1 to {lists}", curve.probes));
            }
            let selects = |n: &usize| *n == 0 || (k..=limits::CANDIDATES_MAX).contains(n);
            if ![0, points].contains(&curve.selected.len()) || !curve.selected.iter().all(selects) {
                let most = limits::CANDIDATES_MAX;
                return Err(format!(
                    "{place}: selected {:?}, expected an entry per target: 0, or {k} to {most}",
                    curve.selected
                ));
            }
            if let Some(ExcludingCurve { probes, recall, .. }) = &curve.excluding {
                let fits =
                    probes.is_sorted() && probes.iter().zip(&curve.probes).all(|(n, p)| (*p..=lists).contains(n));
                if [probes.len(), recall.len()] != [points; 2] || !fits || !recall.iter().all(share) {
                    return Err(format!(
                        "{place}: excluding: probes {probes:?} and recall {recall:?}, expected {points} ascending numbers of up to \
                         {lists}, and recalls between 0 and 1"
                    ));
                }
            }
            let ood = &curve.ood_probes;
            let fits = ood.is_sorted() && ood.iter().zip(&curve.probes).all(|(ood, p)| (*p..=lists).contains(ood));
            if ![0, points].contains(&ood.len()) || !fits {
                return Err(format!(
                    "{place}: ood_probes {ood:?}, expected ascending numbers of up to {lists}, or no numbers"
                ));
            }
            if let Some(codes) = &curve.codes {
                codes.check(k, points, lists).map_err(|what| format!("{place}: codes: {what}"))?;
            }
            if !curve.recall.iter().chain(&curve.low).chain(&curve.left).all(share) {
                return Err(format!("{place}: `recall`, `low` and `left`: expected numbers between 0 and 1"));
            }
            last = Some((k, pass_rate));
        }
        Ok(())
    }

    /// Chooses settings as [`Calibration::choose`] if `excluded` items must not be returned. Uses the settings that were measured
    /// with requests that exclude items, if such requests exclude as many. Otherwise assumes that all excluded items rank above the
    /// results, so that a search must be as deep as for the excluded items and the results together.
    pub fn choose_beyond(&self, excluded: usize, wanted: SearchGoal, items: usize, lists: usize) -> Chosen {
        let deep = self.choose_deep(excluded, wanted, items, lists);
        match self.choose_excluding(excluded, wanted, items, lists) {
            Some(measured) if measured.probes < deep.probes => measured,
            _ => deep,
        }
    }

    /// Chooses settings by the measurement of requests that exclude items; `None` if that measurement does not apply.
    fn choose_excluding(&self, excluded: usize, wanted: SearchGoal, items: usize, lists: usize) -> Option<Chosen> {
        if excluded == 0 || wanted.pass_rate < 1.0 || wanted.candidates >= items {
            return None;
        }
        let target = self.targets.iter().position(|t| *t >= wanted.recall)?;
        let curve = self.curves.iter().find(|curve| curve.k >= wanted.candidates && curve.pass_rate == 1.0)?;
        let measured = curve.excluding.as_ref().filter(|measured| excluded <= measured.excluded)?;
        let base = self.choose(wanted, items, lists);
        // Assumes that codes lose the same fraction as without exclusions, and that the number of lists for queries out
        // of distribution grows by the same factor.
        let scaled = |probes: usize| {
            let by_rows = curve.probes[target].max(1);
            (probes * measured.probes[target]).div_ceil(by_rows).min(lists)
        };
        let lost = (curve.recall[target] - base.recall).max(0.0);
        Some(Chosen {
            probes: scaled(base.probes),
            ood_probes: scaled(base.ood_probes),
            recall: (measured.recall[target] - lost).max(0.0),
            ..base
        })
    }

    /// Chooses settings for results that rank below `excluded` items. Interpolates between measured numbers of candidates on a
    /// logarithmic scale.
    fn choose_deep(&self, excluded: usize, wanted: SearchGoal, items: usize, lists: usize) -> Chosen {
        let sought = wanted.candidates + excluded;
        let choose = |candidates| self.choose(SearchGoal { candidates, ..wanted }, items, lists);
        let measured = || self.curves.iter().map(|curve| curve.k);
        let below = measured().filter(|k| (wanted.candidates..=sought).contains(k)).max();
        let above = measured().filter(|k| *k > sought).min();
        match below.zip(above) {
            Some((below, above)) if excluded > 0 => {
                let depth = |k: usize| 1.0 / k as f64;
                between((depth(below), choose(below)), (depth(above), choose(above)), depth(sought))
            }
            _ => choose(sought),
        }
    }

    /// Returns the setting for a query that is out of distribution, if it differs from the ordinary setting.
    pub fn ood(&self, chosen: Chosen) -> Option<OodProbing> {
        let reach = self.ood_reach.filter(|_| chosen.ood_probes > chosen.probes)?;
        Some(OodProbing { probes: chosen.ood_probes, reach })
    }

    /// Returns the measured numbers of candidates, without a filter, for which no number of probes reaches `recall`,
    /// each with the recall that is reached. More probes do not help, because the missing items are lost when int8 rows
    /// or codes select candidates for rescoring.
    pub fn short_of(&self, recall: f64) -> Vec<(usize, f64)> {
        let Some(target) = self.targets.iter().position(|t| *t >= recall) else { return Vec::new() };
        let all = self.curves.iter().filter(|curve| curve.pass_rate == 1.0);
        let found = all.map(|curve| (curve.k, curve.point(target)));
        let found = found.map(|(k, point)| (k, point.by_codes.unwrap_or(point.by_rows).recall));
        // Tolerates rounding, because recalls are stored with five digits.
        found.filter(|(_, found)| found + 1e-4 < recall).collect()
    }

    /// Returns whether a search may scan first-pass codes.
    pub fn uses_codes(&self) -> bool {
        self.curves.iter().any(|curve| curve.codes.is_some())
    }

    /// Chooses search settings for an index with this number of items and lists. Uses first-pass codes if they were measured to be
    /// faster at both adjacent pass rates; otherwise uses the settings of int8 rows at both pass rates.
    ///
    /// Rounds the number of candidates and the target up to the next measured value; interpolates between pass rates on a
    /// logarithmic scale. Beyond the largest measured number of candidates, looks up the same depth at a lower pass rate: the best
    /// K items at pass rate R reach as deep as the best 10 K at pass rate 10 R.
    pub fn choose(&self, wanted: SearchGoal, items: usize, lists: usize) -> Chosen {
        let all = Chosen { probes: lists, ood_probes: 0, recall: 1.0, left: 0.0, by_codes: None, by_int8: 0 };
        let Some(target) = self.targets.iter().position(|t| *t >= wanted.recall) else { return all };
        let mut rate = wanted.pass_rate.clamp(0.0, 1.0);
        let last = wanted.candidates as f64 / items.max(1) as f64;
        if rate <= last {
            return all;
        }
        let most = self.curves.last().map_or(0, |c| c.k);
        let k = self.curves.iter().map(|c| c.k).find(|k| *k >= wanted.candidates).unwrap_or(most);
        let deeper = (wanted.candidates as f64 / k.max(1) as f64).max(1.0);
        rate /= deeper;
        // Scales the selection from the largest measured number of candidates to the requested one.
        let selected = |n: usize| ((n as f64 * deeper).ceil() as usize).min(items.max(1));
        let scaled = |chosen: Chosen| Chosen {
            by_codes: chosen.by_codes.map(selected),
            by_int8: selected(chosen.by_int8),
            ..chosen
        };
        // All lists are scanned if no more items pass than are requested.
        let end = Point { rate: last / deeper, by_rows: all, by_codes: None };
        let curves = self.curves.iter().filter(|c| c.k == k);
        let mut above = end;
        for below in curves.map(|curve| curve.point(target)).chain([end]) {
            if below.rate <= rate {
                return scaled(match below.rate == rate || above.rate <= below.rate {
                    true => below.by_codes.unwrap_or(below.by_rows),
                    false => match above.by_codes.zip(below.by_codes) {
                        Some(by_codes) => between((above.rate, by_codes.0), (below.rate, by_codes.1), rate),
                        None => between((above.rate, above.by_rows), (below.rate, below.by_rows), rate),
                    },
                });
            }
            above = below;
        }
        all
    }
}

/// Point of a curve for one target.
#[derive(Clone, Copy)]
struct Point {
    rate: f64,
    by_rows: Chosen,
    by_codes: Option<Chosen>,
}

impl RecallCurve {
    fn point(&self, target: usize) -> Point {
        let by_rows = Chosen {
            probes: self.probes[target],
            ood_probes: self.ood_probes.get(target).copied().unwrap_or(0),
            recall: self.recall[target],
            left: self.left[target],
            by_codes: None,
            by_int8: self.selected.get(target).copied().unwrap_or(0),
        };
        let by_codes = self.codes.as_ref().filter(|codes| codes.selected[target] > 0).map(|codes| Chosen {
            probes: codes.probes[target],
            // Assumes that codes lose the same fraction for queries that are out of distribution.
            ood_probes: (by_rows.ood_probes * codes.probes[target]).div_ceil(by_rows.probes),
            recall: codes.recall[target],
            left: codes.left[target],
            by_codes: Some(codes.selected[target]),
            ..by_rows
        });
        Point { rate: self.pass_rate, by_rows, by_codes }
    }
}

impl CodedCurve {
    fn check(&self, k: usize, points: usize, lists: usize) -> Result<(), String> {
        let [recall, low, left] = [&self.recall, &self.low, &self.left].map(Vec::len);
        let lengths = [self.selected.len(), self.probes.len(), recall, low, left];
        if lengths != [points; 5] {
            return Err(format!("got {lengths:?} points, expected {points}: one per recall target"));
        }
        for (&selected, &probes) in self.selected.iter().zip(&self.probes) {
            let fits = (k..=limits::CANDIDATES_MAX).contains(&selected) && (1..=lists).contains(&probes);
            if !fits && (selected, probes) != (0, 0) {
                return Err(format!(
                    "selected {selected} with probes {probes}, expected both 0, or {k} to {} with 1 to {lists}",
                    limits::CANDIDATES_MAX
                ));
            }
        }
        match self.recall.iter().chain(&self.low).chain(&self.left).all(|x| (0.0..=1.0).contains(x)) {
            true => Ok(()),
            false => Err("`recall`, `low` and `left`: expected numbers between 0 and 1".into()),
        }
    }
}

/// File name of a calibration that was measured again after publication.
pub const RECALIBRATION_FILE: &str = "recalibration.json";

/// A calibration that was measured again after the version was published. The recalibration is stored in the version's folder but
/// does not belong to its published files: the version keeps its digest, and the recalibration has a digest of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recalibration {
    /// Digest of the version that was calibrated.
    pub version_digest: String,
    /// Digest of the recalibration: [`Calibration::digest`].
    pub digest: String,
    /// Measured recall curves.
    pub calibration: Calibration,
}

impl Recalibration {
    /// Creates a recalibration of the version with this manifest.
    ///
    /// # Errors
    /// As [`Calibration::digest`].
    pub fn of(manifest: &Manifest, calibration: Calibration) -> Result<Self> {
        Ok(Recalibration { version_digest: manifest.digest(), digest: calibration.digest()?, calibration })
    }

    /// Writes the recalibration to the folder of its version, and replaces an earlier recalibration.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|e| Error::internal(format!("calibration: {e}")))?;
        files::write_atomic(&folder.join(RECALIBRATION_FILE), |out| out.write_all(&text)).map(drop)
    }

    /// Reads the recalibration in a version's folder, if there is one.
    ///
    /// # Errors
    /// `Corrupt` if the file is damaged or belongs to a version with another digest; `Io`.
    pub fn read(folder: &Path, manifest: &Manifest) -> Result<Option<Calibration>> {
        let path = folder.join(RECALIBRATION_FILE);
        let corrupt = |what: String| Error::corrupt(format!("{}: {what}", path.display()));
        let text = match files::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == Kind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let read: Recalibration = serde_json::from_slice(&text).map_err(|e| corrupt(e.to_string()))?;
        if read.version_digest != manifest.digest() {
            let (found, expected) = (read.version_digest, manifest.digest());
            return Err(corrupt(format!("it belongs to version digest {found}, expected {expected}")));
        }
        if read.digest != read.calibration.digest()? {
            return Err(corrupt(format!("digest {}, expected {}", read.digest, read.calibration.digest()?)));
        }
        read.calibration.check(manifest.lists).map_err(corrupt)?;
        Ok(Some(read.calibration))
    }
}

/// Smallest remainder in unscanned lists that is interpolated; smaller ones count as this value, which keeps logarithms finite.
const LEFT_LEAST: f64 = 1e-6;

/// Interpolates settings at `rate` between a point of a higher and a point of a lower pass rate.
fn between(above: (f64, Chosen), below: (f64, Chosen), rate: f64) -> Chosen {
    let share = (above.0 / rate).ln() / (above.0 / below.0).ln();
    let (from, to) = ((above.1.probes as f64).ln(), (below.1.probes as f64).ln());
    let probes = (from + (to - from) * share).exp().ceil() as usize;
    let (least, most) = (above.1.probes.min(below.1.probes), above.1.probes.max(below.1.probes));
    // The remainder falls to zero towards the rate at which all lists are scanned.
    let ends = (above.1.left.max(LEFT_LEAST).ln(), below.1.left.max(LEFT_LEAST).ln());
    let left = ends.0 + (ends.1 - ends.0) * share;
    Chosen {
        probes: probes.clamp(least, most),
        ood_probes: above.1.ood_probes.max(below.1.ood_probes),
        recall: above.1.recall.min(below.1.recall),
        left: left.exp().clamp(above.1.left.min(below.1.left), above.1.left.max(below.1.left)),
        // Between two pass rates, the larger selection of the two suffices.
        by_codes: above.1.by_codes.zip(below.1.by_codes).map(|(above, below)| above.max(below)),
        by_int8: above.1.by_int8.max(below.1.by_int8),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn curve(k: usize, pass_rate: f64, probes: [usize; 3]) -> RecallCurve {
        RecallCurve {
            k,
            pass_rate,
            probes: probes.into(),
            recall: vec![0.91, 0.96, 0.995],
            low: vec![0.9, 0.95, 0.99],
            left: vec![0.1, 0.05, 0.01],
            selected: Vec::new(),
            ood_probes: Vec::new(),
            excluding: None,
            codes: None,
        }
    }

    /// Codes that select these numbers, with 20 % more probes than int8 rows.
    fn by_codes(curve: &RecallCurve, selected: [usize; 3]) -> Option<CodedCurve> {
        let is_taken = |n: usize| selected[n] > 0;
        let of = |values: &[f64]| (0..3).map(|n| if is_taken(n) { values[n] } else { 0.0 }).collect();
        Some(CodedCurve {
            selected: selected.into(),
            probes: (0..3)
                .map(|n| if is_taken(n) { curve.probes[n] + curve.probes[n].div_ceil(5) } else { 0 })
                .collect(),
            recall: of(&curve.recall),
            low: of(&curve.low),
            left: of(&curve.left),
        })
    }

    fn measured() -> Calibration {
        let curves = vec![
            curve(10, 1.0, [1, 2, 4]),
            curve(10, 0.1, [2, 5, 20]),
            curve(10, 0.01, [9, 30, 60]),
            curve(100, 1.0, [3, 5, 20]),
            curve(100, 0.1, [10, 40, 70]),
        ];
        Calibration {
            source: "test".into(),
            queries: 9,
            targets: vec![0.9, 0.95, 0.99],
            margins: ResidualQuantiles::of(&[(0.0, 0.0), (0.0, 1.0)]),
            ood_reach: None,
            curves,
        }
    }

    #[test]
    fn measured_points_are_found_and_the_larger_one_is_taken_between() {
        let choose = |candidates, pass_rate, recall| {
            measured().choose(SearchGoal { candidates, pass_rate, recall }, 10_000, 100).probes
        };
        for (candidates, pass_rate, recall, probes) in [
            (10, 1.0, 0.95, 2),
            (10, 1.0, 0.94, 2),
            (11, 1.0, 0.9, 3),
            (100, 0.1, 0.99, 70),
            (10, 0.1, 0.9, 2),
            (10, 0.01, 0.99, 60),
            (1000, 1.0, 0.95, 40), // as deep as 100 candidates of a tenth of the items
            (10, 0.001, 0.9, 100), // all ten eligible items
            (100, 0.01, 0.5, 100),
            (10, 1.0, 0.9999, 100),
            (20_000, 1.0, 0.5, 100),
        ] {
            assert_eq!(choose(candidates, pass_rate, recall), probes, "{candidates} of {pass_rate} at {recall}");
        }
        let half = choose(10, 0.5, 0.99);
        assert!((4..=20).contains(&half), "{half}");
    }

    #[test]
    fn codes_are_used_if_measured_to_be_faster() {
        let mut measured = measured();
        let plain = measured.clone();
        for (curve, selected) in [(0, [0, 40, 60]), (1, [30, 70, 0]), (3, [250, 300, 0])] {
            measured.curves[curve].codes = by_codes(&measured.curves[curve], selected);
        }
        assert!(measured.uses_codes() && measured.check(100).is_ok() && !plain.uses_codes());
        for (candidates, pass_rate, recall, by_codes) in [
            (10, 1.0, 0.9, None),
            (10, 1.0, 0.95, Some(40)),
            (7, 1.0, 0.97, Some(60)),
            (11, 1.0, 0.9, Some(250)),
            (100, 1.0, 0.99, None),
            (10, 0.5, 0.95, Some(70)),
            (10, 0.1, 0.95, Some(70)),
            (10, 0.05, 0.95, None),
            (10, 0.5, 0.9, None),
            (10, 0.5, 0.99, None),
            (100, 0.5, 0.95, None),
            (101, 1.0, 0.9, None),
            (10, 1.0, 0.9999, None),
        ] {
            let chosen = measured.choose(SearchGoal { candidates, pass_rate, recall }, 10_000, 100);
            assert_eq!(chosen.by_codes, by_codes, "{candidates} of {pass_rate} at {recall}");
            // Points without codes give the same settings as a curve without codes; codes need more probes.
            let without = plain.choose(SearchGoal { candidates, pass_rate, recall }, 10_000, 100);
            match by_codes {
                None => assert_eq!(chosen, without, "{candidates} of {pass_rate} at {recall}"),
                Some(_) => assert!(chosen.probes > without.probes, "{candidates} of {pass_rate} at {recall}"),
            }
        }
    }

    #[test]
    fn code_selection_extrapolates_beyond_the_measured_candidates() {
        let mut measured = measured();
        for curve in [3, 4] {
            measured.curves[curve].codes = by_codes(&measured.curves[curve], [200, 250, 300]);
        }
        let by_codes = |candidates, items| {
            let wanted = SearchGoal { candidates, pass_rate: 1.0, recall: 0.95 };
            measured.choose(wanted, items, 100).by_codes
        };
        assert_eq!([100, 101, 400, 1000].map(|k| by_codes(k, 10_000)), [250, 253, 1000, 2500].map(Some));
        assert_eq!(by_codes(900, 2000), Some(2000), "not more than there are");
    }

    #[test]
    fn exclusions_deepen_the_search() {
        let measured = measured();
        let beyond = |excluded, candidates| {
            let wanted = SearchGoal { candidates, pass_rate: 1.0, recall: 0.99 };
            measured.choose_beyond(excluded, wanted, 10_000, 100).probes
        };
        let probes = [0, 1, 20, 50, 89, 90, 900].map(|excluded| beyond(excluded, 10));
        assert_eq!((probes[0], probes[5], probes[6]), (4, 20, 67));
        assert!(probes.is_sorted() && probes[1] < probes[3], "{probes:?}");
        // Exclusions never reduce the number of probes.
        assert_eq!((beyond(0, 50), beyond(20, 50)), (20, 20));
    }

    #[test]
    fn measured_exclusions_are_used_up_to_their_number_and_without_a_filter() {
        let mut calibration = measured();
        let deep = calibration.clone();
        let own = ExcludingCurve { excluded: 200, probes: vec![3, 4, 7], recall: vec![0.9, 0.95, 0.993] };
        calibration.curves[0].excluding = Some(own);
        assert!(calibration.check(100).is_ok());
        let choose = |of: &Calibration, excluded, pass_rate| {
            let wanted = SearchGoal { candidates: 10, pass_rate, recall: 0.99 };
            of.choose_beyond(excluded, wanted, 10_000, 100)
        };
        let chosen = choose(&calibration, 150, 1.0);
        assert_eq!((chosen.probes, chosen.recall), (7, 0.993));
        // Never more than the assumption that all excluded items rank above the results.
        assert_eq!(choose(&calibration, 1, 1.0).probes, choose(&deep, 1, 1.0).probes.min(7));
        for (excluded, pass_rate) in [(0, 1.0), (201, 1.0), (150, 0.5)] {
            assert_eq!(choose(&calibration, excluded, pass_rate), choose(&deep, excluded, pass_rate));
        }
        for probes in [vec![3, 4], vec![4, 3, 7], vec![3, 4, 101], vec![1, 4, 7]] {
            calibration.curves[0].excluding = Some(ExcludingCurve { probes, ..ExcludingCurve::default() });
            assert!(calibration.check(100).unwrap_err().contains("excluding"));
        }
    }

    proptest! {
        #[test]
        fn larger_targets_never_need_fewer_probes(
            a in (1usize..20_000, 0.0f64..1.0, 0.5f64..1.0),
            b in (1usize..20_000, 0.0f64..1.0, 0.5f64..1.0),
        ) {
            let choose = |(candidates, pass_rate, recall)| {
                measured().choose(SearchGoal { candidates, pass_rate, recall }, 10_000, 100).probes
            };
            let least = choose((a.0.min(b.0), a.1.max(b.1), a.2.min(b.2)));
            prop_assert!(least <= choose((a.0.min(b.0), a.1.max(b.1), a.2.max(b.2))));
            prop_assert!(least <= choose((a.0.min(b.0), a.1.min(b.1), a.2.min(b.2))));
        }
    }

    #[test]
    fn invalid_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let read = |text: String| {
            fs::write(&path, text).unwrap();
            Calibration::read(&path, 100)
        };
        let good = serde_json::to_string(&measured()).unwrap();
        let coded = |selected: &str, probes: &str, recall: &str| {
            let codes =
                format!(r#""selected":{selected},"probes":{probes},"recall":{recall},"low":[0,0,0],"left":[0,0,0]"#);
            format!(r#"0.01],"codes":{{{codes}}}}}"#)
        };
        assert_eq!(read(good.clone()).unwrap(), measured());
        for (from, to, expected) in [
            ("[1,2,4]", "[1,2]", "expected 3 points"),
            ("[1,2,4]", "[1,4,2]", "expected ascending numbers of 1 to 100"),
            ("[1,2,4]", "[0,2,4]", "expected ascending numbers of 1 to 100"),
            ("[1,2,4]", "[1,2,101]", "expected ascending numbers of 1 to 100"),
            ("0.91", "1.91", "expected numbers between 0 and 1"),
            ("\"k\":10,\"pass_rate\":0.1", "\"k\":10,\"pass_rate\":1.0", "by ascending k"),
            ("\"k\":100,\"pass_rate\":1.0", "\"k\":100,\"pass_rate\":0.7", "by ascending k"),
            ("\"pass_rate\":0.01", "\"pass_rate\":-0.01", "by ascending k"),
            ("[0.9,0.95,0.99],\"margins\"", "[0.9,0.9,0.99],\"margins\"", "expected ascending numbers between 0 and 1"),
            ("\"halvings\":[]", "\"halvings\":[2,1]", "score-residual quantiles: expected"),
            ("\"slope\":1.0", "\"slope\":-1.0", "score-residual quantiles: slope -1, expected 0 to 2"),
            ("0.01]}", "0.01],\"codes\":{\"selected\":[20]}}", "missing field `probes`"),
            ("0.01]}", &coded("[20,30]", "[1,1]", "[0,0]"), "codes: got [2, 2, 2, 3, 3] points, expected 3: one per"),
            ("0.01]}", &coded("[0,20,30]", "[0,1,1]", "[0,0]"), "codes: got [3, 3, 2, 3, 3] points"),
            (
                "0.01]}",
                &coded("[9,20,30]", "[1,1,1]", "[0,0,0]"),
                "selected 9 with probes 1, expected both 0, or 10 to",
            ),
            ("0.01]}", &coded("[0,20,9999999]", "[0,1,1]", "[0,0,0]"), "selected 9999999 with probes 1"),
            ("0.01]}", &coded("[0,20,30]", "[1,1,1]", "[0,0,0]"), "selected 0 with probes 1"),
            ("0.01]}", &coded("[0,20,30]", "[0,0,1]", "[0,0,0]"), "selected 20 with probes 0"),
            ("0.01]}", &coded("[0,20,30]", "[0,1,101]", "[0,0,0]"), "selected 30 with probes 101"),
            (
                "0.01]}",
                &coded("[0,20,30]", "[0,1,1]", "[0,0,2]"),
                "codes: `recall`, `low` and `left`: expected numbers between 0 and 1",
            ),
            ("0.01]}", "0.01],\"selected\":[0,0]}", "selected [0, 0], expected an entry per target: 0, or 10 to"),
            (
                "0.01]}",
                "0.01],\"selected\":[0,9,20]}",
                "selected [0, 9, 20], expected an entry per target: 0, or 10 to",
            ),
            (
                "0.01]}",
                "0.01],\"ood_probes\":[4,5]}",
                "ood_probes [4, 5], expected ascending numbers of up to 100, or no numbers",
            ),
            ("0.01]}", "0.01],\"ood_probes\":[4,6,5]}", "ood_probes [4, 6, 5], expected ascending numbers"),
            ("0.01]}", "0.01],\"ood_probes\":[1,1,3]}", "ood_probes [1, 1, 3], expected ascending numbers"),
            ("0.01]}", "0.01],\"ood_probes\":[4,5,101]}", "ood_probes [4, 5, 101], expected ascending numbers"),
            ("\"curves\"", "\"ood_reach\":1e300,\"curves\"", "number out of range"),
            ("\"source\"", "\"sauce\"", "unknown field `sauce`"),
            ("{", "", "calibration.json"),
        ] {
            let error = read(good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
    }

    #[test]
    fn queries_out_of_distribution_take_their_own_probes() {
        let mut measured = measured();
        measured.curves[0].ood_probes = vec![2, 2, 9];
        measured.curves[3].ood_probes = vec![6, 20, 80];
        let ood = |measured: &Calibration, candidates, pass_rate, recall| {
            measured
                .ood(measured.choose(SearchGoal { candidates, pass_rate, recall }, 10_000, 100))
                .map(|ood| ood.probes)
        };
        assert_eq!(ood(&measured, 10, 1.0, 0.9), None, "without a reach");
        measured.ood_reach = Some(0.3);
        assert!(measured.check(100).is_ok());
        assert_eq!([0.9, 0.95, 0.99].map(|recall| ood(&measured, 10, 1.0, recall)), [Some(2), None, Some(9)]);
        assert_eq!(ood(&measured, 100, 1.0, 0.95), Some(20));
        assert_eq!(ood(&measured, 10, 0.1, 0.99), None, "behind a filter");
        measured.curves[3].codes = by_codes(&measured.curves[3], [200, 250, 300]);
        assert_eq!(ood(&measured, 100, 1.0, 0.95), Some(24), "codes need a fifth more");
    }

    #[test]
    fn without_a_curve_all_lists_are_probed() {
        let none = Calibration { curves: Vec::new(), ..measured() };
        for (candidates, items) in [(1, 1), (1, 9), (5, 9), (9, 9), (100, 9)] {
            for pass_rate in [0.0, 0.01, 0.5, 1.0] {
                let chosen = none.choose(SearchGoal { candidates, pass_rate, recall: 0.9 }, items, 4);
                assert_eq!((chosen.probes, chosen.recall), (4, 1.0), "{candidates} of {items} at {pass_rate}");
            }
        }
    }
}
