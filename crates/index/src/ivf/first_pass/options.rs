//! Options of the first-pass codes in a recipe.

use serde::{Deserialize, Serialize};

use super::rotation::Rotation;
use super::signs::DIMENSIONS;
use sterling_core::error::{Error, Result};

/// Subspaces per line of codes; the number of subspaces is a multiple of this number.
pub(super) const OF_LINE: usize = 8;
/// Values per subspace: a code has four bits.
pub(super) const VALUES: usize = 16;
/// Default number of dimensions per code.
const DIMENSIONS_PER_CODE: usize = 2;

/// Kind of first-pass codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeKind {
    /// No codes: int8 rows are scanned.
    #[default]
    None,
    /// 4-bit product quantization of the residuals.
    Pq4,
    /// Signs of the rotated residuals: one bit per dimension, for wide vectors.
    Rabitq,
    /// The kind with the lowest estimated search time.
    Auto,
}

/// First-pass options of a recipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FirstPass {
    /// Kind of the codes.
    pub codes: CodeKind,
    /// Number of subspaces of product codes, M, a multiple of 8; an item takes half a byte per subspace. 0 means one per two
    /// dimensions, rounded up.
    pub subspaces: usize,
}

/// Layout of the first-pass codes for vectors of a given dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeShape {
    /// Kind of the codes; never `None` or `Auto`.
    pub kind: CodeKind,
    /// Number of subspaces, M.
    pub subspaces: usize,
}

impl CodeShape {
    /// Returns the size of a slot in bytes.
    pub fn slot_bytes(&self) -> usize {
        self.subspaces / 2 + if self.kind == CodeKind::Rabitq { size_of::<f32>() } else { 0 }
    }

    /// Returns the size of the codebooks or rotation in bytes, for vectors of the given dimension.
    pub fn shared_bytes(&self, dimension: usize) -> usize {
        match self.kind {
            CodeKind::None | CodeKind::Auto => 0,
            CodeKind::Pq4 => dimension * VALUES * size_of::<f32>(),
            CodeKind::Rabitq => Rotation::shape(dimension).iter().product::<usize>() * size_of::<u64>(),
        }
    }
}

impl CodeKind {
    /// Returns the name in recipes.
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
    /// Returns true if these are the default options.
    pub fn is_none(&self) -> bool {
        *self == FirstPass::default()
    }

    /// Returns the layout of the codes for vectors of the given dimension; `None` for `none` and `auto`.
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
                "index.first_pass.subspaces: got {got}, expected index.first_pass.codes = \"pq4\" if it is set"
            ))),
            (CodeKind::Rabitq, 0) => Ok(Some(Rotation::width_of(dimension) / DIMENSIONS)),
            (CodeKind::Rabitq, got) => Err(Error::invalid(format!(
                "index.first_pass.subspaces: got {got}, expected none: codes of \"rabitq\" have one bit per dimension"
            ))),
            (CodeKind::Pq4, 0) => Ok(Some(dimension.div_ceil(DIMENSIONS_PER_CODE).next_multiple_of(OF_LINE))),
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
    fn subspaces_fill_complete_lines() {
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
