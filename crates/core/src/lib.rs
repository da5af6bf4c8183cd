//! What every other crate of Sterling needs: the [`error`] type, [`units`] of ids and slots, [`limits`], [`tensor`] shapes and the
//! [`request`] types that the edge reads and the pass answers.

pub mod blocking;
pub mod clock;
pub mod draws;
pub mod error;
pub mod limits;
pub mod locks;
pub mod logging;
pub mod packed;
pub mod request;
pub mod tensor;
pub mod units;
