//! Table of all calls: method, path, required role, verb, implementer (server, router or both) and query parameters.
//!
//! The HTTP routes are built from the table (`routes`), admission and access control use it, and tests iterate over it. A call
//! that is missing here cannot be made.

use std::pin::Pin;
use std::sync::Arc;

use axum::extract::Request;
use axum::handler::Handler;
use axum::http::Method;
use axum::response::{IntoResponse as _, Response};

use super::access::DataScope::{self, Model, Server, Visible};
use super::access::Needs;
use super::access::Role::{self, Admin, Open, Read, Write};
use super::answer::Rejection;
use super::app::App;
use super::paths::{PathNames, Segments};
use super::routed::RouterApp;
use super::verb::Verb;
use super::{browse, calls, console, inference, items, openapi, parts, passes, rows, traffic};
use sterling_core::error::Error;

/// Future of an answer.
pub(super) type AnswerFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

pub(super) struct Route {
    pub(super) method: Method,
    /// Pattern, as `paths` defines it.
    pub(super) path: &'static str,
    /// Role that a key needs.
    pub(super) role: Role,
    pub(super) reach: DataScope,
    pub(super) verb: Verb,
    /// Allowed query parameters.
    pub(super) parameters: &'static [&'static str],
    server: fn(Arc<App>, Request) -> AnswerFuture,
    /// Handler at a router; `None` if only servers answer the call.
    router: Option<fn(Arc<RouterApp>, Request) -> AnswerFuture>,
}

impl Route {
    fn model<'n>(&self, names: &'n PathNames) -> Option<&'n str> {
        names.first().filter(|_| self.reach == Model)
    }

    /// Returns whether the call belongs to the versioned API. Other calls accept any query parameter, because scrapers, probes and links
    /// add their own.
    pub(super) fn is_of_api(&self) -> bool {
        self.path.starts_with("/v")
    }

    /// Answers a request, whose extensions hold the [`PathNames`], at a server.
    pub(super) fn at_server(&self, app: Arc<App>, request: Request) -> AnswerFuture {
        (self.server)(app, request)
    }

    /// Answers a request at a router.
    pub(super) fn at_router(&self, app: Arc<RouterApp>, request: Request) -> AnswerFuture {
        match self.router {
            Some(answer) => answer(app, request),
            None => {
                let what =
                    format!("a router does not answer {} {}: call the servers of the shards", self.method, self.path);
                Box::pin(async { Rejection::from(Error::unsupported(what)).into_response() })
            }
        }
    }
}

/// Implementer of a call: `both` uses a handler that is generic over [`Retriever`](super::retriever::Retriever), `alike` a
/// handler without that parameter, and `server` supports servers only.
macro_rules! answers {
    (both $($answer:ident)::+) => {
        (|app, request| run($($answer)::+::<App>, app, request), Some(|app, request| run($($answer)::+::<RouterApp>, app, request)))
    };
    (alike $($answer:ident)::+) => {
        (|app, request| run($($answer)::+, app, request), Some(|app, request| run($($answer)::+, app, request)))
    };
    (server $($answer:ident)::+) => {
        (|app, request| run($($answer)::+, app, request), None)
    };
}

macro_rules! table {
    ($($method:ident $path:literal, $role:ident, $reach:ident, $verb:ident, $by:ident $($answer:ident)::+ $(, $parameter:ident)*;)*) => {
        [$({
            let (server, router): Answers = answers!($by $($answer)::+);
            Route {
                method: Method::$method,
                path: $path,
                role: $role,
                reach: $reach,
                verb: Verb::$verb,
                parameters: &[$(stringify!($parameter)),*],
                server,
                router,
            }
        }),*]
    };
}

type Answers = (fn(Arc<App>, Request) -> AnswerFuture, Option<fn(Arc<RouterApp>, Request) -> AnswerFuture>);

pub(super) static TABLE: [Route; 54] = table! {
    POST "/v1/models/{model}:retrieve", Read, Model, Retrieve, both passes::retrieve, min_position, min_coverage;
    POST "/v1/models/{model}:rank", Read, Model, Rank, both passes::rank, min_position, min_coverage;
    POST "/v1/models/{model}:embed", Read, Model, Embed, both passes::embed, min_position;
    POST "/v1/models/{model}/versions/{version}:retrieve", Read, Model, Retrieve, both passes::retrieve, min_position, min_coverage;
    POST "/v1/models/{model}/versions/{version}:rank", Read, Model, Rank, both passes::rank, min_position, min_coverage;
    POST "/v1/models/{model}/versions/{version}:embed", Read, Model, Embed, both passes::embed, min_position;
    POST "/v1/models/{model}/labels/{label}:retrieve", Read, Model, Retrieve, both passes::retrieve, min_position, min_coverage;
    POST "/v1/models/{model}/labels/{label}:rank", Read, Model, Rank, both passes::rank, min_position, min_coverage;
    POST "/v1/models/{model}/labels/{label}:embed", Read, Model, Embed, both passes::embed, min_position;
    GET "/v1/models", Read, Visible, Models, both calls::models;
    GET "/v1/models/{model}", Read, Model, Model, both calls::model;
    GET "/v1/models/{model}/versions", Read, Model, Versions, both calls::versions;
    GET "/v1/models/{model}/versions/{version}", Read, Model, Version, both calls::version;
    POST "/v1/models/{model}/versions/{version}:load", Admin, Model, Load, server calls::load;
    POST "/v1/models/{model}/versions/{version}:activate", Admin, Model, Activate, server calls::activate, scope;
    POST "/v1/models/{model}/versions/{version}:unload", Admin, Model, Unload, server calls::unload;
    GET "/v1/models/{model}/labels", Read, Model, Labels, both calls::labels;
    GET "/v1/models/{model}/labels/{label}", Read, Model, Label, both calls::label;
    PUT "/v1/models/{model}/labels/{label}", Admin, Model, Label, server calls::put_label;
    DELETE "/v1/models/{model}/labels/{label}", Admin, Model, Label, server calls::delete_label;
    GET "/v1/models/{model}/traffic", Read, Model, Traffic, both traffic::traffic;
    PUT "/v1/models/{model}/traffic", Admin, Model, Traffic, server traffic::put_traffic;
    DELETE "/v1/models/{model}/traffic", Admin, Model, Traffic, server traffic::delete_traffic, revision;
    POST "/v1/models/{model}/traffic:stop", Write, Model, Traffic, server traffic::stop;
    GET "/v1/models/{model}/index", Read, Model, Index, server browse::index;
    GET "/v1/models/{model}/shards", Read, Model, Shards, both browse::shards;
    GET "/v1/models/{model}/columns/{column*}", Read, Model, Column, server browse::column, contains, limit, min_position;
    GET "/v1/models/{model}/items", Read, Model, Find, server browse::find, column, contains, limit, min_position;
    GET "/v1/models/{model}/items/{id}", Read, Model, Item, both items::item, min_position;
    GET "/v1/models/{model}/items:position", Read, Model, Position, both items::position, min_position;
    POST "/v1/models/{model}/items:upsert", Write, Model, Upsert, both items::upsert, if_position, min_position;
    POST "/v1/models/{model}/items:delete", Write, Model, Delete, both items::delete, if_position, min_position;
    POST "/v1/models/{model}/items:merge", Admin, Model, Merge, server items::merge, min_position;
    GET "/v1/models/{model}/queries", Read, Model, Queries, server calls::queries;
    POST "/v1/models/{model}/versions/{version}:pass", Read, Model, Pass, server parts::pass;
    POST "/v1/models/{model}:rows", Read, Model, Rows, server rows::rows;
    GET "/v1/parts", Read, Visible, Parts, server parts::parts;
    GET "/v1/debug/slow", Admin, Server, Slow, both calls::slow;
    GET "/v1/debug/shadow", Admin, Server, Shadow, both traffic::shadow;
    GET "/v2", Open, Server, Inference, alike inference::server;
    GET "/v2/", Open, Server, Inference, alike inference::server_too;
    GET "/v2/health/live", Open, Server, Health, alike inference::live;
    GET "/v2/health/ready", Open, Server, Health, both inference::ready;
    GET "/v2/models/{model}", Read, Model, Inference, server inference::model;
    GET "/v2/models/{model}/versions/{version}", Read, Model, Inference, server inference::version;
    GET "/v2/models/{model}/ready", Read, Model, Inference, server inference::model_ready;
    GET "/v2/models/{model}/versions/{version}/ready", Read, Model, Inference, server inference::version_ready;
    POST "/v2/models/{model}/infer", Read, Model, Infer, server inference::infer, min_position, min_coverage;
    POST "/v2/models/{model}/versions/{version}/infer", Read, Model, Infer, server inference::infer_version, min_position, min_coverage;
    GET "/livez", Open, Server, Health, alike calls::live;
    GET "/readyz", Open, Server, Health, both calls::ready;
    GET "/metrics", Read, Server, Metrics, alike calls::metrics;
    GET "/openapi.json", Open, Server, Openapi, alike openapi::openapi;
    GET "/", Open, Server, Console, alike console::console;
};

/// Calls an axum handler.
fn run<T: 'static, S, H: Handler<T, S>>(handler: H, app: S, request: Request) -> AnswerFuture {
    Box::pin(handler.call(request, app))
}

/// Result of matching a request with the table.
#[derive(Clone)]
pub(super) enum Matched {
    /// A call, with the names in its path.
    Call(&'static Route, PathNames),
    /// The path exists with other methods, listed for `Allow`.
    Method(String),
    /// Unknown verb, with the verbs that the path has.
    Verb(String, Vec<&'static str>),
    Nowhere,
    /// The path is not UTF-8.
    NoText,
}

impl Matched {
    /// Returns the requirements of the call. Even an answer about a missing call requires a key.
    pub(super) fn needs(&self) -> Needs<'_> {
        match self {
            Matched::Call(route, names) => Needs { role: route.role, reach: route.reach, model: route.model(names) },
            _ => Needs { role: Read, reach: Visible, model: None },
        }
    }

    pub(super) fn verb(&self) -> Verb {
        match self {
            Matched::Call(route, _) => route.verb,
            _ => Verb::Other,
        }
    }
}

/// Matches a request with the table.
pub(super) fn find(method: &Method, path: &str) -> Matched {
    let Some(segments) = Segments::of(path) else { return Matched::NoText };
    let wanted = if *method == Method::HEAD { &Method::GET } else { method };
    let mut allowed = Vec::new();
    for route in &TABLE {
        let Some(names) = segments.names(route.path) else { continue };
        if route.method == *wanted {
            return Matched::Call(route, PathNames::new(route.path, names));
        }
        allowed.push(if route.method == Method::GET { "GET, HEAD" } else { route.method.as_str() });
    }
    if !allowed.is_empty() {
        return Matched::Method(allowed.join(", "));
    }
    match segments.verb() {
        Some((verb, rest)) => {
            let of_rest = |route: &'static Route| {
                let (path, verb) = route.path.rsplit_once(':')?;
                rest.names(path).map(|_| verb)
            };
            let mut verbs: Vec<&str> = TABLE.iter().filter_map(of_rest).collect();
            verbs.dedup();
            if verbs.is_empty() { Matched::Nowhere } else { Matched::Verb(verb, verbs) }
        }
        None => Matched::Nowhere,
    }
}
