//! Which codes a recipe asks for.

use serde::{Deserialize, Serialize};

use super::rotation::Rotation;
use super::signs::DIMENSIONS;
use sterling_core::error::{Error, Result};

/// Subspaces of a line of codes, of which there is a whole number.
pub(super) const OF_LINE: usize = 8;
/// Values of a subspace: what four bits name.
pub(super) const VALUES: usize = 16;
/// Dimensions that share a code where a recipe does not say.
const DIMENSIONS_A_CODE: usize = 2;

/// Codes that a first pass may scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeKind {
    /// None: int8 rows are scanned.
    #[default]
    None,
    /// 4-bit product codes of what items have beside their lists' centroids.
    Pq4,
    /// The signs of that, rotated: one bit a dimension, for wide vectors.
    Rabitq,
    /// Those of the others by which searches are reckoned to take the least time.
    Auto,
}

/// What a first pass scans in place of int8 rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FirstPass {
    /// Its codes.
    pub codes: CodeKind,
    /// Subspaces of product codes, M, a multiple of 8: an item takes half a byte for each. 0 takes one for every two dimensions,
    /// rounded up.
    pub subspaces: usize,
}

/// What the codes of vectors of a width look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeShape {
    /// Their kind, which is one of codes.
    pub kind: CodeKind,
    /// Subspaces, M.
    pub subspaces: usize,
}

impl CodeShape {
    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.subspaces / 2 + if self.kind == CodeKind::Rabitq { size_of::<f32>() } else { 0 }
    }

    /// Bytes of what the codes of all items mean, which are of so many dimensions.
    pub fn shared_bytes(&self, dimension: usize) -> usize {
        match self.kind {
            CodeKind::None | CodeKind::Auto => 0,
            CodeKind::Pq4 => dimension * VALUES * size_of::<f32>(),
            CodeKind::Rabitq => Rotation::shape(dimension).iter().product::<usize>() * size_of::<u64>(),
        }
    }
}

impl CodeKind {
    /// As a recipe says it.
    pub fn name(self) -> &'static str {
        match self {
            CodeKind::None => "none",
            CodeKind::Pq4 => "pq4",
            CodeKind::Rabitq => "rabitq",
            CodeKind::Auto => "auto",
        }
    }
}

impl FirstPass {
    /// True where nothing is asked for.
    pub fn is_none(&self) -> bool {
        *self == FirstPass::default()
    }

    /// The codes of vectors of so many dimensions, where there are some and they are named.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn shape_of(&self, dimension: usize) -> Result<Option<CodeShape>> {
        let subspaces = self.subspaces_of(dimension)?;
        Ok(subspaces.map(|subspaces| CodeShape { kind: self.codes, subspaces }))
    }

    fn subspaces_of(&self, dimension: usize) -> Result<Option<usize>> {
        let most = dimension.next_multiple_of(OF_LINE);
        match (self.codes, self.subspaces) {
            (CodeKind::None | CodeKind::Auto, 0) => Ok(None),
            (CodeKind::None | CodeKind::Auto, got) => Err(Error::invalid(format!(
                "index.first_pass.subspaces: got {got}, expected index.first_pass.codes = \"pq4\" with it"
            ))),
            (CodeKind::Rabitq, 0) => Ok(Some(Rotation::width_of(dimension) / DIMENSIONS)),
            (CodeKind::Rabitq, got) => Err(Error::invalid(format!(
                "index.first_pass.subspaces: got {got}, expected none: codes of \"rabitq\" have one bit a dimension"
            ))),
            (CodeKind::Pq4, 0) => Ok(Some(dimension.div_ceil(DIMENSIONS_A_CODE).next_multiple_of(OF_LINE))),
            (CodeKind::Pq4, got) if got.is_multiple_of(OF_LINE) && got <= most => Ok(Some(got)),
            (CodeKind::Pq4, got) => Err(Error::invalid(format!(
                "index.first_pass.subspaces: got {got} for {dimension} dimensions, expected a multiple of {OF_LINE} up to {most}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn subspaces_are_whole_lines() {
        let of = |codes, subspaces, dimension| FirstPass { codes, subspaces }.subspaces_of(dimension);
        for (dimension, expected) in [(1, 8), (16, 8), (17, 16), (50, 32), (64, 32), (100, 56), (384, 192), (768, 384)]
        {
            assert_eq!(of(CodeKind::Pq4, 0, dimension).unwrap(), Some(expected));
        }
        assert_eq!(of(CodeKind::Pq4, 24, 50).unwrap(), Some(24));
        for (dimension, expected) in [(1, 16), (64, 16), (65, 32), (384, 96), (768, 192)] {
            assert_eq!(of(CodeKind::Rabitq, 0, dimension).unwrap(), Some(expected));
        }
        assert_eq!(of(CodeKind::None, 0, 50).unwrap(), None);
        for (codes, subspaces, reason) in [
            (CodeKind::Pq4, 12, "got 12 for 50 dimensions, expected a multiple of 8 up to 56"),
            (CodeKind::Pq4, 64, "got 64 for 50 dimensions"),
            (CodeKind::None, 8, "got 8, expected index.first_pass.codes"),
            (CodeKind::Auto, 8, "got 8, expected index.first_pass.codes"),
            (CodeKind::Rabitq, 16, "got 16, expected none"),
        ] {
            let error = of(codes, subspaces, 50).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
