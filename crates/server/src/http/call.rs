//! Calls that workers answer: caller and parsed body.

use axum::http::request::Parts;

use super::access::Caller;
use super::bodies::BodyMemory;
use super::call_id::CallId;
use super::content_type::BodyType;
use super::flow::flow_of;
use super::form::Form;
use sterling_api::{Retrievals, Shape};
use sterling_core::error::Result;
use sterling_core::quota::Flow;
use sterling_core::request::{CallOptions, Embed, Origin, Rank};

/// Caller, and format of the answer.
pub(super) struct Call {
    pub(super) caller: Option<Caller>,
    pub(super) flow: Flow,
    pub(super) origin: Origin,
    pub(super) form: Form,
}

impl Call {
    /// Reads the call from the head of an admitted request.
    pub(super) fn of(head: &Parts) -> Self {
        let (caller, flow) = (head.extensions.get::<Caller>().cloned(), flow_of(&head.extensions));
        Call { caller, flow, origin: CallId::origin(&head.extensions), form: Form::of(head) }
    }

    /// Switches the answer to JSON.
    pub(super) fn answered_in_json(self) -> Self {
        Call { form: Form::Json, ..self }
    }
}

/// Parsed body, by call.
pub(super) enum Parsed {
    Retrieve(Retrievals),
    Rank(Rank, CallOptions, Shape),
    Embed(Embed, CallOptions),
}

impl Parsed {
    /// Parses the body of `:retrieve`, in JSON or Arrow.
    pub(super) fn retrieve(sent: BodyType, body: &[u8], mut memory: BodyMemory) -> Result<Self> {
        Ok(Parsed::Retrieve(match sent {
            BodyType::Arrow => sterling_api::arrow_retrievals(body, &mut |bytes| memory.hold(bytes))?,
            _ => sterling_api::retrievals(body)?,
        }))
    }

    /// Parses the body of `:rank`.
    pub(super) fn rank(_: BodyType, body: &[u8], _: BodyMemory) -> Result<Self> {
        let (rank, terms, shape) = sterling_api::rank(body)?;
        Ok(Parsed::Rank(rank, terms, shape))
    }

    /// Parses the body of `:embed`.
    pub(super) fn embed(_: BodyType, body: &[u8], _: BodyMemory) -> Result<Self> {
        let (embed, terms) = sterling_api::embed(body)?;
        Ok(Parsed::Embed(embed, terms))
    }
}

/// Charges a list of requests to the rate of its caller's key, regardless of the outcome. Admission already charged one request.
pub(super) fn charge(caller: Option<&Caller>, requests: usize) {
    if let Some(caller) = caller {
        caller.charge(requests.saturating_sub(1));
    }
}
