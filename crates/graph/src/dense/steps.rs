//! What a program is made of: steps over buffers, each with its result and what it does to each row.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use sterling_kernels::cpu::dense::{Binary, ChainLink, Fold, Form, Lines, PairRows, Unary};

/// In which precision products of rows are computed. Their sums, and all else, are in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Factors as they are.
    #[default]
    F32,
    /// Factors rounded to bf16.
    Bf16,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        })
    }
}

/// Where numbers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Constant(usize),
    User(usize),
    Rows(usize),
    /// The inputs of the rows.
    Given,
}

/// Numbers from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) memory: Memory,
    pub(super) offset: usize,
}

/// A matrix as a factor of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor {
    pub(super) rows: Place,
    pub(super) depth: usize,
    pub(super) matrix: Place,
    pub(super) row_stride: usize,
    pub(super) panel_stride: usize,
}

/// An operand of an element-wise step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) place: Place,
    pub(super) outer: usize,
    pub(super) inner: usize,
}

/// A fold of numbers that lie beside keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoldBeside {
    pub(super) f: Fold,
    pub(super) values: Place,
}

/// A step; its result fills buffer `out`.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) out: usize,
    pub(super) work: Work,
}

/// What a step does to each row.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// `runs` rows of each part, of `columns` each.
    Product {
        parts: Vec<Factor>,
        bias: Option<Place>,
        runs: usize,
        columns: usize,
        relu: bool,
        factors: Form,
        result: Form,
    },
    /// So many numbers of each row as pairs, from pair `first` on.
    Narrow {
        a: Place,
        count: usize,
        first: usize,
    },
    /// A matrix of the user, packed in pairs into rows of the panels of its buffer.
    PackNarrow {
        a: Place,
        depth: usize,
        columns: usize,
        rows: PairRows,
    },
    /// Products of matrices that differ from row to row: `[m, k]` at each of `left`, `[k, n]` at each of `right`.
    Matrices {
        a: Place,
        b: Place,
        left: Arc<[u32]>,
        right: Arc<[u32]>,
        shape: [usize; 3],
    },
    Map1 {
        f: Unary,
        a: Place,
        count: usize,
    },
    Map2 {
        f: Binary,
        a: Operand,
        b: Operand,
        outer: usize,
        inner: usize,
    },
    Fold {
        f: Fold,
        a: Place,
        runs: usize,
        count: usize,
    },
    /// Folds numbers beside those of `keys` that are a row's `key`: fold `n` makes number `n` of a row.
    FoldEqual {
        key: Place,
        keys: Place,
        count: usize,
        folds: Vec<FoldBeside>,
    },
    /// Works on single numbers: what is read fills the first registers of a row, each link the next one, and number `n` of a row is
    /// register `kept[n]`.
    Chain {
        reads: Vec<Place>,
        links: Vec<ChainLink>,
        kept: Vec<usize>,
    },
    /// Puts parts side by side in runs of so many numbers.
    Concat {
        runs: usize,
        parts: Vec<(Place, usize)>,
    },
    /// Runs of so many numbers, each from its place on.
    Pick {
        a: Place,
        index: Arc<[u32]>,
        run: usize,
    },
    /// Adds runs of so many numbers to those of a row of `count`, each from its place on.
    Spread {
        a: Place,
        index: Arc<[u32]>,
        run: usize,
        count: usize,
    },
}

#[cfg(test)]
impl Work {
    /// Where its operands lie.
    pub(super) fn places(&self) -> Vec<Place> {
        match self {
            Work::Product { parts, bias, .. } => {
                parts.iter().flat_map(|part| [part.rows, part.matrix]).chain(*bias).collect()
            }
            Work::Matrices { a, b, .. } => vec![*a, *b],
            Work::Map2 { a, b, .. } => vec![a.place, b.place],
            Work::Chain { reads, .. } => reads.clone(),
            Work::Concat { parts, .. } => parts.iter().map(|(place, _)| *place).collect(),
            Work::FoldEqual { key, keys, folds, .. } => {
                folds.iter().map(|fold| fold.values).chain([*key, *keys]).collect()
            }
            Work::Narrow { a, .. }
            | Work::PackNarrow { a, .. }
            | Work::Map1 { a, .. }
            | Work::Fold { a, .. }
            | Work::Pick { a, .. }
            | Work::Spread { a, .. } => vec![*a],
        }
    }
}

/// A graph as steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) constants: Vec<Lines>,
    pub(super) user: Vec<Step>,
    pub(super) rows: Vec<Step>,
    /// Numbers of each buffer of the user.
    pub(super) user_counts: Vec<usize>,
    /// From a row to the next in each buffer of rows.
    pub(super) strides: Vec<usize>,
    /// The same in the inputs of the rows.
    pub(super) given_stride: usize,
    /// The buffers of the user's inputs that are read, by the number among the user's inputs.
    pub(super) user_inputs: Vec<(usize, usize)>,
    /// Where each output lies.
    pub(super) outputs: Vec<Place>,
    /// Multiply-adds once a request, and once a row.
    pub(super) user_work: usize,
    pub(super) row_work: usize,
    /// Rows that run through all steps together.
    pub(super) block_rows: usize,
}
