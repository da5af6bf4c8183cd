//! Lowers a value model to the steps that a GPU runs.

use super::{Program, Step};
use sterling_cuda::ops::value_model::ValueStep;

impl Program {
    /// Returns the program in the form that a device runs.
    pub fn lower(&self) -> Vec<ValueStep> {
        let lowered = |step: &Step| match step {
            Step::Number(x) => (0, x.to_bits()),
            Step::Input(n) => (1, *n as u32),
            Step::Constant(n) => (2, *n as u32),
            Step::Unary(f) => (3 + *f as u32, 0),
            Step::Binary(f) => (9 + *f as u32, 0),
            Step::Choose => (22, 0),
        };
        self.steps.iter().map(lowered).map(|(operation, operand)| ValueStep { operation, operand }).collect()
    }
}
