//! Work over files that many workers share, without anybody who tells them what to do.
//!
//! 1. A *job* ([`JobFolder`]) is a folder, what is asked ([`Purpose`]), and a list of input files; it is written once, as `_job.json`, and
//!    a run that asks for anything else is refused.
//! 2. Each input file is a *unit*, whose outputs are named by it. They are written under another name, synced and renamed: an output is
//!    there whole or not at all. So a run that was killed goes on where it was, and two that do the same unit write the same bytes.
//! 3. Engines tell a worker the numbers of units by lines ([`serve`]); nobody passes rows.

mod folder;
mod lines;
mod orders;

pub use folder::{JobFolder, Purpose, Unit};
pub use lines::next_line;
pub use orders::{checked, serve};
