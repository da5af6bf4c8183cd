//! Request bodies and answers in Arrow's IPC stream format.
//!
//! `stream` reads a body within limits, `requests` and `items` convert its rows to retrievals and items; `reply` writes answers.

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
