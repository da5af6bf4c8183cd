//! The HTTP edge: bytes in, JSON out, every error a problem of RFC 9457.
//!
//! Connections: `server` accepts and ends them, `connections` holds their states, and `socket` updates these with `framing`
//! (HTTP/1.1) and `frames` (HTTP/2). `gate` rejects calls that would wait for a worker in vain, and `bodies` reads bodies within
//! a memory budget. `self_wakes` polls connections in place that wake themselves. `fair_scheduling` polls the connections of callers in
//! rotation (`caller_rotation`), and `writers` computes long answers on threads of its own.
//!
//! Handlers read a request with [`sterling_api`], submit it to the engine and write the answer; no module here depends on how the
//! forward pass works. The verb of a call follows a colon (`/v1/models/debian:retrieve`), which the HTTP router does not split, so
//! `paths` does. `parameters` reads the query string, and `timeout_bound` limits the time that a body may set before it is parsed.
//! `passes` has the calls that workers answer, `calls` those about models, `inference` those of KServe's protocol. `layers` adds
//! the parts that all calls share: ids, metrics, `Server-Timing`, `date`. `clock` watches the machine's clock, and `head` checks
//! request headers. `form` is the format of an answer, `content_type` that of a body, `coding` the content coding of both.
//!
//! Pages: `cursor` encodes the start of a page, `pages` answers them. Rollouts: `choice` selects the version that answers a call,
//! `audit` and `shadow` compare answers with others, and `traffic` has the calls that configure rollouts. Routers: `parts`
//! answers routers' queries to a server, and `routed` is the edge of a router itself: the same calls, answered by shards.

mod access;
mod address;
mod answer;
mod app;
mod audit;
mod bodies;
mod browse;
mod call;
mod call_id;
mod caller_rotation;
mod calls;
mod choice;
mod clock;
mod coding;
mod connections;
mod console;
mod content_type;
mod cursor;
mod date;
mod failures;
mod fair_scheduling;
mod flow;
mod form;
mod frames;
mod framing;
mod gate;
mod head;
mod inference;
mod items;
mod last_caller;
mod layers;
mod local;
mod meters;
mod offload;
mod openapi;
mod options;
mod pages;
mod parameters;
mod parts;
mod passes;
mod paths;
mod position;
mod retriever;
mod routed;
mod routes;
mod rows;
mod self_wakes;
mod server;
mod settled;
mod shadow;
mod slow;
mod socket;
mod streams;
mod table;
mod timeout_bound;
mod tls;
mod trace_context;
mod traces;
mod traffic;
mod verb;
mod watched;
mod worst;
mod writers;

pub use access::{AccessControl, AccessOptions, EntryPoint, NewKey, Role, check_keys, new_key};
pub use address::{address, read_address};
pub use app::App;
pub use openapi::document as openapi;
pub use options::Options;
pub use routed::RouterApp;
pub use routes::router;
pub use server::{Sockets, Stop, listen, listen_after_first_poll, route, serve};
pub use tls::{Tls, TlsOptions};
pub use traces::{TraceOptions, Traces};
