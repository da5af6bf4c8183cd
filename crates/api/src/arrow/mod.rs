//! Arrow's IPC stream format: bodies of requests and answers.
//!
//! `stream` reads a body within bounds, `requests` and `items` make retrievals and items of its rows; `reply` writes answers.

mod items;
mod reply;
mod requests;
mod stream;
#[cfg(test)]
mod tests;

pub use items::{arrow_divided, arrow_upserts};
pub use reply::{ARROW_STREAM, ArrowReply};
pub(super) use reply::{BATCH_BYTES, BATCH_COPIES, ROWS_MAX};
pub use requests::arrow_retrievals;
