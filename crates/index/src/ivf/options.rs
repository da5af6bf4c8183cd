//! How an index is built.

use serde::{Deserialize, Serialize};

use super::first_pass::{CodeChoice, CodeKind, CodeShape, FirstPass, IndexExtent};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_kernels::cpu::kernels::BLOCK;

/// Lists for the square root of the items: with more, queries lose on centroids what they save on items (`docs/internals/index.md`).
const LISTS_PER_ROOT: f64 = 4.0;
/// The same where codes are scanned: an item costs less then, and a centroid what it did.
const CODED_LISTS_PER_ROOT: f64 = 2.0;

/// The rows that rescore candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rescore {
    /// None: candidates keep the int8 scores.
    None,
    /// bfloat16, 2 D bytes an item.
    Bf16,
    /// Half precision, 2 D bytes an item; f32 where an item's vector leaves the range of half precision.
    #[default]
    F16,
    /// f32, 4 D bytes an item.
    F32,
}

impl Rescore {
    /// Bytes of a number of a row; 0 without rows.
    pub(super) fn width(self) -> usize {
        match self {
            Rescore::None => 0,
            Rescore::Bf16 | Rescore::F16 => 2,
            Rescore::F32 => 4,
        }
    }
}

/// How an index is built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Lists, C; 0 takes about 4 √N, half of it with codes for a first pass, but no fewer than 1 and no list smaller than 16 items on
    /// average.
    pub lists: usize,
    /// Rows that train the centroids, as a multiple of the lists.
    pub sample_per_list: usize,
    /// Rounds of k-means.
    pub iterations: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// The rows that rescore.
    pub rescore: Rescore,
    /// What is scanned in place of int8 rows, where that takes less time.
    #[serde(skip_serializing_if = "FirstPass::is_none")]
    pub first_pass: FirstPass,
}

impl Default for Options {
    fn default() -> Self {
        let first_pass = FirstPass::default();
        Options { lists: 0, sample_per_list: 64, iterations: 10, seed: 1, rescore: Rescore::F16, first_pass }
    }
}

/// What an index is made of, as options have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexShape {
    /// Lists, C.
    pub lists: usize,
    /// The first pass's codes.
    pub codes: Option<CodeShape>,
    /// What these were chosen between, where the recipe leaves the choice.
    pub choice: Option<CodeChoice>,
}

impl Options {
    /// The lists and codes of an index over rows. Where lists come with the rows the codes are the same as without.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range; for codes without rows that score what they find.
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

    /// Lists of an index over so many items, C.
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

    /// The first pass's codes that are named, of vectors of so many dimensions; none without codes.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range; for codes without rows that score what they find.
    pub fn codes(&self, dimension: usize) -> Result<Option<CodeShape>> {
        let codes = self.first_pass.shape_of(dimension)?;
        match (self.rescore, codes) {
            (Rescore::None, Some(codes)) => Err(Error::invalid(format!(
                "index.first_pass.codes: {} with index.rescore = \"none\", expected rows that score what the codes find",
                codes.kind.name()
            ))),
            _ => Ok(codes),
        }
    }

    /// Rows of `items` that train `lists` centroids.
    pub(super) fn sample(&self, items: usize, lists: usize) -> usize {
        lists.saturating_mul(self.sample_per_list).clamp(lists, items.max(lists)).min(items)
    }
}
