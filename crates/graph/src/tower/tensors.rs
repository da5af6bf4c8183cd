//! Tensors of the features of a row: the inputs that graphs read under the names of the features.

use std::ops::Range;

use super::row::{FeatureRow, FeatureValues};
use super::spec::{FeatureKind, FeatureSpec};
use sterling_embedding::keyed::Layout;

/// Looked-up embeddings of one row of features.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pooled {
    /// Concatenated pooled embeddings in the order of the tower's bags, `[sum of widths]`.
    pub values: Vec<f32>,
    /// Rows of each sequence, `[ids, width]`.
    pub sequences: Vec<Vec<f32>>,
    /// Number of ids that got a default row.
    pub degraded_rows: u64,
}

impl Pooled {
    /// Returns the bytes of the embeddings.
    pub fn bytes(&self) -> usize {
        4 * (self.values.len() + self.sequences.iter().map(Vec::len).sum::<usize>())
    }
}

/// A tensor of one row of features.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureTensor {
    /// Name of the input.
    pub name: String,
    /// Name of the feature.
    pub feature: String,
    /// Dimensions after the row dimension.
    pub shape: Vec<usize>,
    holds: Holds,
}

/// Source of a tensor's numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Holds {
    /// Columns of the pooled embeddings.
    Bag(Range<usize>),
    /// Values of a dense feature, by the feature's index.
    Dense(usize),
    /// Rows of a sequence, by index among the sequence features.
    Sequence(usize),
    /// 1 for each value of a feature, by the feature's index, and 0 for padding.
    Mask(usize),
}

impl FeatureTensor {
    /// Returns the tensors of features: first pooled embeddings, whose columns `bags` defines, then dense features,
    /// then sequences of rows of `widths` numbers, each followed by its mask.
    pub(super) fn of(features: &[FeatureSpec], bags: &Layout, widths: &[usize]) -> Vec<FeatureTensor> {
        let tensor = |name: &str, feature: &str, shape: Vec<usize>, holds| FeatureTensor {
            name: name.into(),
            feature: feature.into(),
            shape,
            holds,
        };
        let keys = bags.keys().iter().enumerate();
        let mut all: Vec<FeatureTensor> =
            keys.map(|(k, key)| tensor(key, key, vec![bags.columns(k).len()], Holds::Bag(bags.columns(k)))).collect();
        let numbered = || features.iter().enumerate();
        all.extend(
            numbered()
                .filter(|(_, f)| f.kind == FeatureKind::Dense)
                .map(|(n, f)| tensor(&f.name, &f.name, vec![f.width.unwrap_or(0)], Holds::Dense(n))),
        );
        for ((sequence, (n, f)), width) in numbered().filter(|(_, f)| f.is_sequence()).enumerate().zip(widths) {
            let length = f.length.unwrap_or(0);
            all.push(tensor(&f.name, &f.name, vec![length, *width], Holds::Sequence(sequence)));
            all.push(tensor(&f.mask(), &f.name, vec![length], Holds::Mask(n)));
        }
        all
    }

    /// Returns the count of numbers per row.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the source of the tensor's numbers.
    #[cfg(feature = "cuda")]
    pub(super) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Writes the tensor of a row, `[count]`.
    ///
    /// # Panics
    /// If `out` has another length, or the row belongs to another tower.
    pub fn write(&self, row: &FeatureRow, pooled: &Pooled, out: &mut [f32]) {
        match &self.holds {
            Holds::Bag(columns) => out.copy_from_slice(&pooled.values[columns.clone()]),
            Holds::Dense(feature) => match &row.values[*feature] {
                FeatureValues::Dense(numbers) => out.copy_from_slice(numbers),
                FeatureValues::Ids { .. } => out.fill(0.0),
            },
            Holds::Sequence(sequence) => {
                let rows = &pooled.sequences[*sequence];
                let (values, padding) = out.split_at_mut(rows.len());
                values.copy_from_slice(rows);
                padding.fill(0.0);
            }
            Holds::Mask(feature) => {
                let (values, padding) = out.split_at_mut(row.values[*feature].ids());
                values.fill(1.0);
                padding.fill(0.0);
            }
        }
    }
}
