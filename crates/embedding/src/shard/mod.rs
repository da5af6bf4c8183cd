//! Tables cut into shards, looked up as if they were whole.
//!
//! A lookup in such a table takes TorchRec's three steps, the same for every sharding type and tier:
//!
//! 1. `input`: ids become rows of the whole table (the fate of unseen ids is decided here, once).
//! 2. `gather`: rows that travel are asked for, each once, of the shards that hold them; where a table is cut in rows, those of
//!    the batch are put together.
//! 3. `output`: bags are pooled by the kernels that pool whole tables, in the order of their ids, columns side by side.
//!
//! TorchRec's shards of rows answer with sums of their own, which a last step adds. Sums in another order round otherwise; here a bag
//! gets the very bits that the whole table gives, however that is cut, and rows travel in place of sums.

mod cut;
pub(super) mod gather;
pub(super) mod input;
pub(super) mod output;

pub use cut::Cut;
