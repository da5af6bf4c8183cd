//! Filter language: selects the eligible items.
//!
//! A superset of SilverTorch's expression syntax. Text becomes tokens (`lexer`), tokens become an [`Expr`] (`parser`), and
//! the expression gets its canonical form ([`Expr::canonical`]). In canonical form, NOT is at the leaves, nested AND and OR
//! are flattened, and operands are sorted and deduplicated, so that equal filters are equal values. This module does
//! not depend on a catalogue; a plan resolves the leaves. The grammar, with examples that a test runs, is in
//! `docs/reference/filter-language.md`.

mod canonical;
mod date;
mod expr;
mod lexer;
mod parser;

pub use canonical::Canonical;
pub use expr::{Expr, Leaf, Test};
pub use parser::parse;

#[cfg(test)]
mod tests;
