//! Value model: computes one number from the task scores and columns of a candidate.
//!
//! An expression such as `depends + w_rec * recommends + if(section_age > 5, 0.1, 0)` is compiled once into stack code
//! ([`Program`]) with constant folding. The program is evaluated over columns of candidates in chunks that fit the cache, not
//! through a tree per item. Comparisons yield 1 or 0. NaN becomes the lowest f32 and thus ranks last; infinities become the
//! largest and the lowest f32, so that every value can be written as JSON.
//!
//! The grammar, with examples that a test runs, is in `docs/reference/value-model.md`.

#[cfg(feature = "cuda")]
mod lower;
mod parser;

use std::collections::BTreeMap;

use sterling_core::error::{Error, Result};

/// Candidates evaluated at a time, so that a chunk of each stack entry fits the L1 cache.
const CHUNK: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Unary {
    Negate,
    Log,
    Exp,
    Sqrt,
    Sigmoid,
    Abs,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    Min,
    Max,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    NotEqual,
}

impl Unary {
    fn of(self, x: f32) -> f32 {
        match self {
            Unary::Negate => -x,
            Unary::Log => x.ln(),
            Unary::Exp => x.exp(),
            Unary::Sqrt => x.sqrt(),
            Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Unary::Abs => x.abs(),
        }
    }
}

impl Binary {
    fn of(self, a: f32, b: f32) -> f32 {
        let truth = |t: bool| f32::from(u8::from(t));
        match self {
            Binary::Add => a + b,
            Binary::Subtract => a - b,
            Binary::Multiply => a * b,
            Binary::Divide => a / b,
            Binary::Power => a.powf(b),
            Binary::Min => a.min(b),
            Binary::Max => a.max(b),
            Binary::Less => truth(a < b),
            Binary::LessEqual => truth(a <= b),
            Binary::Greater => truth(a > b),
            Binary::GreaterEqual => truth(a >= b),
            Binary::Equal => truth(a == b),
            Binary::NotEqual => truth(a != b),
        }
    }
}

/// Evaluates `if(c, a, b)`: `a` if `c` is neither 0 nor NaN.
fn choose(c: f32, a: f32, b: f32) -> f32 {
    if c != 0.0 && !c.is_nan() { a } else { b }
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Number(f32),
    Input(usize),
    Constant(usize),
    Unary(Unary),
    Binary(Binary),
    Choose,
}

/// Compiled value model.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    steps: Vec<Step>,
    inputs: Vec<String>,
    constants: BTreeMap<String, f32>,
    depth: usize,
}

/// Buffers of an evaluation, reused between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    stack: Vec<f32>,
}

impl Program {
    /// Returns the names of the inputs that the expression reads, in the order of [`Program::evaluate`].
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Returns the maximum height of the stack.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the values of the named constants with a request's overrides.
    ///
    /// # Errors
    /// `Invalid` for a name that is not a constant of this model, or a value that is not finite.
    pub fn constants(&self, overrides: &BTreeMap<String, f32>) -> Result<Vec<f32>> {
        for (name, value) in overrides {
            if !self.constants.contains_key(name) {
                let known: Vec<&str> = self.constants.keys().map(String::as_str).collect();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                return Err(Error::invalid(format!(
                    "constants: `{name}` is not a constant of the value model, expected one of: {known}"
                )));
            }
            if !value.is_finite() {
                return Err(Error::invalid(format!("constants: `{name}` is {value}, expected a finite number")));
            }
        }
        Ok(self.constants.iter().map(|(name, value)| *overrides.get(name).unwrap_or(value)).collect())
    }

    /// Evaluates the program for `out.len()` candidates. Column `inputs[n]` is input `n` of [`Program::inputs`] and as long as
    /// `out`.
    ///
    /// # Panics
    /// If columns are missing or shorter than `out`.
    pub fn evaluate(&self, inputs: &[&[f32]], constants: &[f32], scratch: &mut Scratch, out: &mut [f32]) {
        assert_eq!(inputs.len(), self.inputs.len());
        scratch.stack.resize(self.depth * CHUNK, 0.0);
        for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
            let range = chunk * CHUNK..chunk * CHUNK + out.len();
            self.evaluate_chunk(inputs, range, constants, &mut scratch.stack);
            for (out, value) in out.iter_mut().zip(&scratch.stack) {
                // Adding +0 turns -0 into +0, so that both zeros sort as equal everywhere.
                *out = if value.is_nan() { f32::MIN } else { value.clamp(f32::MIN, f32::MAX) + 0.0 };
            }
        }
    }

    fn evaluate_chunk(&self, inputs: &[&[f32]], range: std::ops::Range<usize>, constants: &[f32], stack: &mut [f32]) {
        let len = range.len();
        let mut top = 0;
        for step in &self.steps {
            match step {
                Step::Number(x) => stack[top * CHUNK..][..len].fill(*x),
                Step::Constant(n) => stack[top * CHUNK..][..len].fill(constants[*n]),
                Step::Input(n) => stack[top * CHUNK..][..len].copy_from_slice(&inputs[*n][range.clone()]),
                Step::Unary(f) => {
                    stack[(top - 1) * CHUNK..][..len].iter_mut().for_each(|x| *x = f.of(*x));
                    continue;
                }
                Step::Binary(f) => {
                    top -= 1;
                    let (below, above) = stack.split_at_mut(top * CHUNK);
                    below[(top - 1) * CHUNK..][..len]
                        .iter_mut()
                        .zip(&above[..len])
                        .for_each(|(a, b)| *a = f.of(*a, *b));
                    continue;
                }
                Step::Choose => {
                    top -= 2;
                    let (below, above) = stack.split_at_mut(top * CHUNK);
                    let (yes, no) = above.split_at(CHUNK);
                    let places = below[(top - 1) * CHUNK..][..len].iter_mut();
                    places.zip(yes.iter().zip(no)).for_each(|(c, (a, b))| *c = choose(*c, *a, *b));
                    continue;
                }
            }
            top += 1;
        }
    }
}

#[cfg(test)]
mod tests;
