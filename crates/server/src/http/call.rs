//! A call that workers answer: who calls, and what its body says.

use axum::http::request::Parts;

use super::access::Caller;
use super::bodies::BodyMemory;
use super::call_id::CallId;
use super::flow::flow_of;
use super::form::Form;
use super::sent::Sent;
use sterling_api::{Retrievals, Shape};
use sterling_core::error::Result;
use sterling_core::request::{Embed, Origin, Rank};
use sterling_serving::engine::Terms;
use sterling_serving::quota::Flow;

/// Who calls, and how the answer is to be read.
pub(super) struct Call {
    pub(super) caller: Option<Caller>,
    pub(super) flow: Flow,
    pub(super) origin: Origin,
    pub(super) form: Form,
}

impl Call {
    /// Of a request that was let in.
    pub(super) fn of(head: &Parts) -> Self {
        let (caller, flow) = (head.extensions.get::<Caller>().cloned(), flow_of(&head.extensions));
        Call { caller, flow, origin: CallId::origin(&head.extensions), form: Form::of(head) }
    }

    /// The same, whose answer is text.
    pub(super) fn in_text(self) -> Self {
        Call { form: Form::Json, ..self }
    }
}

/// A parsed body.
pub(super) enum Parsed {
    /// Of `:retrieve`.
    Retrieve(Retrievals),
    /// Of `:rank`.
    Rank(Rank, Terms, Shape),
    /// Of `:embed`.
    Embed(Embed, Terms),
}

impl Parsed {
    /// Parses the body of `:retrieve`, in JSON or Arrow.
    pub(super) fn retrieve(sent: Sent, body: &[u8], mut memory: BodyMemory) -> Result<Self> {
        Ok(Parsed::Retrieve(match sent {
            Sent::Arrow => sterling_api::arrow_retrievals(body, &mut |bytes| memory.hold(bytes))?,
            _ => sterling_api::retrievals(body)?,
        }))
    }

    /// Parses the body of `:rank`.
    pub(super) fn rank(_: Sent, body: &[u8], _: BodyMemory) -> Result<Self> {
        let (rank, terms, shape) = sterling_api::rank(body)?;
        Ok(Parsed::Rank(rank, terms, shape))
    }

    /// Parses the body of `:embed`.
    pub(super) fn embed(_: Sent, body: &[u8], _: BodyMemory) -> Result<Self> {
        let (embed, terms) = sterling_api::embed(body)?;
        Ok(Parsed::Embed(embed, terms))
    }
}

/// Counts a list of requests against the rate of its caller's key, which has paid for one of them, whatever becomes of the list.
pub(super) fn charge(caller: Option<&Caller>, requests: usize) {
    if let Some(caller) = caller {
        caller.charge(requests.saturating_sub(1));
    }
}
