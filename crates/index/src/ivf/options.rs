//! Build options of an index.

use serde::{Deserialize, Serialize};

use super::first_pass::{CodeChoice, CodeKind, CodeShape, FirstPass, IndexExtent};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_kernels::cpu::kernels::BLOCK;

/// Lists per square root of the items. With more lists, scoring centroids costs more than is saved on items
/// (`docs/internals/index.md`).
const LISTS_PER_ROOT: f64 = 4.0;
/// Lists per square root of the items with first-pass codes: scanning an item costs less, while a centroid costs the same.
const CODED_LISTS_PER_ROOT: f64 = 2.0;

/// Format of the rescoring rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rescore {
    /// No rescoring rows: candidates keep their int8 scores.
    None,
    /// bfloat16, 2 D bytes per item.
    Bf16,
    /// Half precision, 2 D bytes per item; f32 if a vector exceeds the range of half precision.
    #[default]
    F16,
    /// f32, 4 D bytes per item.
    F32,
}

impl Rescore {
    /// Returns the bytes per number; 0 without rescoring rows.
    pub(super) fn width(self) -> usize {
        match self {
            Rescore::None => 0,
            Rescore::Bf16 | Rescore::F16 => 2,
            Rescore::F32 => 4,
        }
    }
}

/// Build options of an index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Number of lists, C. 0 means about 4 √N, half of it with first-pass codes, and at least 16 items per list on average.
    pub lists: usize,
    /// Training rows of the centroids, as a multiple of the lists.
    pub sample_per_list: usize,
    /// Rounds of k-means.
    pub iterations: usize,
    /// Random seed.
    pub seed: u64,
    /// Format of the rescoring rows.
    pub rescore: Rescore,
    /// First-pass codes that are scanned in place of int8 rows if that is faster.
    #[serde(skip_serializing_if = "FirstPass::is_none")]
    pub first_pass: FirstPass,
}

impl Default for Options {
    fn default() -> Self {
        let first_pass = FirstPass::default();
        Options { lists: 0, sample_per_list: 64, iterations: 10, seed: 1, rescore: Rescore::F16, first_pass }
    }
}

/// Structure of an index that follows from the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexShape {
    /// Number of lists, C.
    pub lists: usize,
    /// First-pass codes.
    pub codes: Option<CodeShape>,
    /// Estimated times of the alternatives for the codes, if the recipe has `auto`.
    pub choice: Option<CodeChoice>,
}

impl Options {
    /// Returns the lists and codes of an index. If lists exist already, the codes are chosen as if they did not.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range; also for codes without rows to rescore.
    pub fn shape_of(&self, extent: &IndexExtent) -> Result<IndexShape> {
        let by_rows = self.lists_of(extent.items, false)?;
        let by_codes = self.lists_of(extent.items, true)?;
        let named = self.codes(extent.dimension)?;
        let (codes, choice) = match self.first_pass.codes {
            CodeKind::Auto => extent.choose(by_rows, by_codes).map(|(codes, choice)| (codes, Some(choice)))?,
            _ => (named, None),
        };
        Ok(IndexShape { lists: if codes.is_some() { by_codes } else { by_rows }, codes, choice })
    }

    /// Returns the number of lists of an index of `items` items, C.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn lists_of(&self, items: usize, is_coded: bool) -> Result<usize> {
        if items == 0 {
            return Err(Error::invalid("index: no items, expected at least one"));
        }
        for (name, value, most) in
            [("sample_per_list", self.sample_per_list, 1 << 20), ("iterations", self.iterations, 1000)]
        {
            if value == 0 || value > most {
                return Err(Error::invalid(format!("index.{name}: got {value}, expected 1 to {most}")));
            }
        }
        match self.lists {
            0 => {
                let per_root = if is_coded { CODED_LISTS_PER_ROOT } else { LISTS_PER_ROOT };
                let lists = (per_root * (items as f64).sqrt()) as usize;
                Ok(lists.clamp(1, (items / BLOCK).max(1)).min(limits::LISTS_MAX))
            }
            lists if lists > items.min(limits::LISTS_MAX) => Err(Error::invalid(format!(
                "index.lists: got {lists} lists for {items} items, expected 1 to {}",
                items.min(limits::LISTS_MAX)
            ))),
            lists => Ok(lists),
        }
    }

    /// Returns the first-pass codes that the options name, for vectors of this dimension; `None` without codes.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range; also for codes without rows to rescore.
    pub fn codes(&self, dimension: usize) -> Result<Option<CodeShape>> {
        let codes = self.first_pass.shape_of(dimension)?;
        match (self.rescore, codes) {
            (Rescore::None, Some(codes)) => Err(Error::invalid(format!(
                "index.first_pass.codes: {} with index.rescore = \"none\", expected rows to rescore the candidates that the codes find",
                codes.kind.name()
            ))),
            _ => Ok(codes),
        }
    }

    /// Returns the number of training rows for `lists` centroids.
    pub(super) fn sample(&self, items: usize, lists: usize) -> usize {
        lists.saturating_mul(self.sample_per_list).clamp(lists, items.max(lists)).min(items)
    }
}
