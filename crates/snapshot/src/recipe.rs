//! Index recipes: build options of an index, and serving defaults.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_embedding::RowFormat;
use sterling_index::filter;
use sterling_index::ivf;

/// An index recipe, the contents of `indexes/*.toml`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// Options of the inverted lists: number, training and rescoring rows.
    pub index: ivf::Options,
    /// Options of Bloom planes and posting lists.
    pub filter: filter::Options,
    /// Row formats that embedding tables are converted to, by table name; other tables keep theirs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tables: BTreeMap<String, RowFormat>,
    /// Precomputation for the reranker.
    pub reranking: Reranking,
    /// Defaults of requests.
    pub serving: Serving,
}

/// Precomputation for the reranker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reranking {
    /// Storage format of the reranker's item-side precomputation, which is used if it makes candidates cheaper.
    pub item_part: PartFormat,
}

/// Storage format of the reranker's item-side precomputation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartFormat {
    /// Not stored: computed for each candidate.
    None,
    /// Stored as computed, in f32.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit codes with the row's scale and bias.
    Int8,
}

impl PartFormat {
    /// Returns the row format; none if nothing is stored.
    pub fn rows(self) -> Option<RowFormat> {
        match self {
            PartFormat::None => None,
            PartFormat::F32 => Some(RowFormat::F32),
            PartFormat::F16 => Some(RowFormat::F16),
            PartFormat::Bf16 => Some(RowFormat::Bf16),
            PartFormat::Int8 => Some(RowFormat::Int8),
        }
    }
}

/// Defaults of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serving {
    /// Recall to reach among the candidates; the calibration gives the number of probes.
    pub recall: f64,
    /// Number of probed lists, nprobe, in place of a recall; 0 means unset, and an eighth of the lists if there is no
    /// calibration.
    pub probes: usize,
    /// Maximum number of lists that a filtered request may probe; 0 means all.
    pub probes_max: usize,
    /// Candidates that are reranked, K0.
    pub candidates: usize,
}

impl Default for Serving {
    fn default() -> Self {
        Serving { recall: 0.98, probes: 0, probes_max: 0, candidates: 1000 }
    }
}

impl Recipe {
    /// Parses a recipe.
    ///
    /// # Errors
    /// `Invalid` with the line or the option, its value and its range.
    pub fn parse(text: &str) -> Result<Self> {
        let recipe: Recipe = toml::from_str(text).map_err(|e| Error::invalid(e.to_string().trim_end().to_owned()))?;
        recipe.filter.check()?;
        recipe.index.codes(limits::DIMENSION_MAX)?;
        let candidates = recipe.serving.candidates;
        if candidates == 0 || candidates > limits::CANDIDATES_MAX {
            return Err(Error::invalid(format!(
                "serving.candidates: got {candidates}, expected 1 to {}",
                limits::CANDIDATES_MAX
            )));
        }
        let (recall, between) = (recipe.serving.recall, limits::RECALLS);
        if !between.contains(&recall) {
            return Err(Error::invalid(format!(
                "serving.recall: got {recall}, expected {} to {}",
                between.start(),
                between.end()
            )));
        }
        Ok(recipe)
    }

    /// Reads a recipe file.
    ///
    /// # Errors
    /// As [`Recipe::parse`], with the path.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
        Recipe::parse(&text).map_err(|e| e.within(path.display()))
    }

    /// Returns whether the recipe stores numbers below half precision: converted tables, or a coarse format of rescoring rows or
    /// of the item-side precomputation.
    pub fn is_coarse(&self) -> bool {
        let is_part_coarse = matches!(self.reranking.item_part, PartFormat::Bf16 | PartFormat::Int8);
        !self.tables.is_empty()
            || is_part_coarse
            || matches!(self.index.rescore, ivf::Rescore::None | ivf::Rescore::Bf16)
    }

    /// Serializes the recipe as TOML.
    ///
    /// # Errors
    /// `Internal` if it cannot be serialized.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::internal(format!("recipe: {e}")))
    }
}

impl Serving {
    /// Returns the default number of probes of `lists` lists without a calibration.
    pub fn probes_of(&self, lists: usize) -> usize {
        if self.probes == 0 { lists.div_ceil(8) } else { self.probes.min(lists) }
    }

    /// Returns the maximum number of lists that a filtered request may probe.
    pub fn probes_max_of(&self, lists: usize) -> usize {
        if self.probes_max == 0 { lists } else { self.probes_max.min(lists) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_default_recipe_is_the_one_in_indexes() {
        assert_eq!(Recipe::parse(include_str!("../../../indexes/default.toml")).unwrap(), Recipe::default());
    }

    #[test]
    fn invalid_recipes_are_rejected() {
        assert_eq!(Recipe::parse("").unwrap(), Recipe::default());
        for (text, expected) in [
            ("[index]\nlist = 3", "unknown field `list`"),
            ("[index]\nlists = -3", "invalid"),
            ("[index.first_pass]\ncodes = \"pq8\"", "unknown variant `pq8`"),
            ("[index.first_pass]\ncodes = \"pq4\"\nsubspaces = 12", "index.first_pass.subspaces: got 12"),
            ("[index.first_pass]\nsubspaces = 8", "index.first_pass.subspaces: got 8, expected"),
            ("[index]\nrescore = \"none\"\n[index.first_pass]\ncodes = \"pq4\"", "expected rows to rescore"),
            ("[filter]\nhashes = 0", "filter.hashes: got 0, expected 1 to 32"),
            ("[filter]\nfixed_bits = 0", "filter.fixed_bits: got 0"),
            ("[serving]\nrecall = 1.0", "serving.recall: got 1, expected 0.5 to 0.999"),
            ("[serving]\ncandidates = 0", "serving.candidates: got 0"),
            ("[tables]\npackages = \"int9\"", "unknown variant `int9`"),
            ("[index]\nrescore = \"f8\"", "unknown variant `f8`"),
            ("[reranking]\nitem_part = \"f8\"", "unknown variant `f8`"),
            ("index", "expected"),
        ] {
            let error = Recipe::parse(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(
            !Recipe::default().to_toml().unwrap().contains("first_pass"),
            "recipes of versions without it stay as they were"
        );
        let recipe =
            Recipe::parse("[index]\nlists = 7\nrescore = \"f32\"\n[index.first_pass]\ncodes = \"pq4\"").unwrap();
        assert_eq!(Recipe::parse(&recipe.to_toml().unwrap()).unwrap(), recipe);
    }
}
