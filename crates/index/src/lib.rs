//! The item index: inverted lists of quantized vectors ([`ivf`]), eligibility filters ([`filter`]), item [`columns`], the [`value`]
//! expression language, top-k selection ([`topk`]) and the [`search`] that puts them together.

pub mod columns;
pub mod filter;
pub mod ivf;
pub mod search;
pub mod topk;
pub mod value;
