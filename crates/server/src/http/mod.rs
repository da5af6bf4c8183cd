//! The HTTP edge: bytes in, JSON out, every error a problem of RFC 9457.
//!
//! `server` lets connections in and ends them, `connections` knows what each is at, `socket` tells it, by `framing` of HTTP/1.1 and `frames` of HTTP/2; `gate` refuses what would wait in vain for
//! a worker; `bodies` reads bodies within a budget.
//! Handlers read a request with [`sterling_api`], hand it to the engine and write the answer; nothing here knows how a pass
//! works. A call is named by a verb after a colon (`/v1/models/debian:retrieve`), which routers do not split, so `paths`
//! does; `parameters` reads what stands behind the question mark, `patience` bounds the time that a body may name before it is parsed. `passes` are the calls that workers answer, `calls` those about models, `inference` those of another protocol. `self_wakes` keeps connections that wake themselves from waking a thread, `in_turn` polls those of callers in turn (`turns`), `writers` make long answers beside the threads that drive connections, `layers` holds what every call shares: ids, metrics, `Server-Timing`, `date`; `clock` watches the clock of the machine, `head` is what a header must say; `form` is the form of an answer, `sent` that of a body, `coding` the coding of both,
//! `cursor` where a page begins, `pages` what a server answers to it. `choice` is which version answers a call, `audit` and `shadow` hold answers against others, `traffic` are the calls that say so. `parts` is what routers ask of a server, `routed` the
//! edge of a router itself: the same calls, answered by shards.

mod access;
mod address;
mod answer;
mod app;
mod asides;
mod audit;
mod bodies;
mod browse;
mod call;
mod call_id;
mod calls;
mod choice;
mod clock;
mod coding;
mod connections;
mod console;
mod cursor;
mod date;
mod failures;
mod flow;
mod form;
mod frames;
mod framing;
mod gate;
mod head;
mod in_turn;
mod inference;
mod items;
mod last_caller;
mod layers;
mod local;
mod meters;
mod openapi;
mod options;
mod pages;
mod parameters;
mod parts;
mod passes;
mod paths;
mod patience;
mod position;
mod retriever;
mod routed;
mod routes;
mod rows;
mod self_wakes;
mod sent;
mod server;
mod settled;
mod shadow;
mod slow;
mod socket;
mod streams;
mod table;
mod tls;
mod trace_context;
mod traces;
mod traffic;
mod turns;
mod verb;
mod watched;
mod worst;
mod writers;

pub use access::{AccessControl, AccessOptions, Door, NewKey, Role, check_keys, new_key};
pub use address::{address, read_address};
pub use app::App;
pub use openapi::document as openapi;
pub use options::Options;
pub use routed::RouterApp;
pub use routes::router;
pub use server::{Sockets, Stop, listen, listen_once_looked, route, serve};
pub use tls::{Tls, TlsOptions};
pub use traces::{TraceOptions, Traces};
