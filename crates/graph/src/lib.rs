//! ONNX graphs as compiled programs ([`dense`]), and the user tower and reranker that run these programs ([`tower`]).
//!
//! ```
//! use sterling_graph::dense::{DeclaredInput, DeclaredOutput, InputRows, RowProgram, Scratch, Size};
//!
//! // A cross network over a query and many items: the computations on the query alone run once.
//! let onnx = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/dense/dcn.onnx"))?;
//! let vector = [Size::Fixed(1), Size::Fixed(8)];
//! let per_item = |width| vec![Size::Fixed(1), Size::Rows, Size::Fixed(width)];
//! let given = [
//!     DeclaredInput { name: "query".into(), is_pair: false, shape: vector.to_vec() },
//!     DeclaredInput { name: "item".into(), is_pair: true, shape: per_item(8) },
//! ];
//! let program = RowProgram::lower(&onnx, &given, &[DeclaredOutput { name: "out".into(), shape: per_item(2) }])?;
//!
//! let mut scores = Vec::new();
//! program.run(
//!     3,
//!     &[&[0.5; 8]],
//!     &mut Scratch::default(),
//!     &mut |items: InputRows<'_>| items.each(|n, item| item.fill(n as f32)),
//!     &mut |_, count, block| {
//!         scores.extend((0..count).map(|n| block.output(0).row(n).to_vec()));
//!         Ok(())
//!     },
//! )?;
//! assert_eq!((scores.len(), scores[0].len()), (3, 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod dense;
pub mod tower;
