//! Item index: inverted lists of quantized vectors ([`ivf`]), eligibility filters ([`filter`]), item [`columns`], the [`value`]
//! expression language, top-k selection ([`topk`]), and the [`search`] that combines them.
//!
//! ```
//! use sterling_index::ivf::{Index, Options, Probing, RowSurvey, Scratch, build};
//! use sterling_index::topk::{Selector, unkey};
//! use sterling_storage::rows::RowStore;
//!
//! // 1,000 unit vectors on a circle, in 16 lists; 4 of them are probed for the three nearest to the first vector.
//! let vector = |n: usize| [(n as f32 / 100.0).cos(), (n as f32 / 100.0).sin()];
//! let rows = RowStore::owned((0..1000).flat_map(vector).collect(), 2)?;
//! let built = build(&rows, &RowSurvey::of(&rows)?, &Options { lists: 16, ..Options::default() }, &|_| {})?;
//! let index = Index::open(&built.in_memory(&rows, "index")?)?;
//!
//! let mut best = Selector::new();
//! best.reset(3);
//! index.search(&vector(0), Probing::of(4, 16), None, &mut best, 3, &mut Scratch::default());
//! for &key in best.finish() {
//!     let (score, slot) = unkey(key);
//!     println!("row {}: {score}", built.order[slot.index()]);
//! }
//! assert_eq!(best.len(), 3);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```
//!
//! Filters and value models are small languages:
//!
//! ```
//! use sterling_index::{filter, value};
//!
//! let filter = filter::parse("year >= 2020 AND NOT (lang:de OR lang:fr)")?.canonical();
//! assert_eq!(filter.to_string(), "NOT lang:de AND NOT lang:fr AND year >= 2020");
//!
//! let constants = [("w".to_owned(), 3.0)].into();
//! let program = value::Program::compile("click + w * buy", &["click", "buy"], &constants)?;
//! let mut values = [0.0; 2];
//! let inputs: [&[f32]; 2] = [&[0.5, 0.25], &[0.125, 0.5]];
//! program.evaluate(&inputs, &[3.0], &mut value::Scratch::default(), &mut values);
//! assert_eq!(values, [0.875, 1.75]);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod columns;
pub mod filter;
pub mod ivf;
pub mod search;
pub mod topk;
pub mod value;
