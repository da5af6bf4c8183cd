//! The one table of all calls: method, path, the right that it takes, its name in metrics, what answers it, and what it may be told behind the question mark.
//!
//! The router is built from it (`routes`), the gate and the access check look into it, and tests go over it: a call that does not stand
//! here cannot be made.

use std::pin::Pin;
use std::sync::Arc;

use axum::extract::Request;
use axum::handler::Handler;
use axum::http::Method;
use axum::response::Response;

use super::access::Needs;
use super::access::Reach::{self, Model, Server, Visible};
use super::access::Role::{self, Admin, Open, Read, Write};
use super::app::App;
use super::paths::{PathNames, Segments};
use super::{browse, calls, console, inference, items, openapi, parts, passes, rows, traffic};

/// An answer on its way.
pub(super) type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// A call.
pub(super) struct Route {
    pub(super) method: Method,
    /// As `paths` reads it.
    pub(super) path: &'static str,
    /// The right that a key must have.
    pub(super) role: Role,
    pub(super) reach: Reach,
    /// The call's label in metrics.
    pub(super) call: &'static str,
    /// What may stand behind the question mark.
    pub(super) parameters: &'static [&'static str],
    answer: fn(Arc<App>, Request) -> Answering,
}

impl Route {
    fn model<'n>(&self, names: &'n PathNames) -> Option<&'n str> {
        names.first().filter(|_| self.reach == Model)
    }

    /// Whether it is one of the calls that have versions. Others may be told whatever stands behind their question mark: scrapers, probes and links add
    /// parameters of their own.
    pub(super) fn is_of_api(&self) -> bool {
        self.path.starts_with("/v")
    }

    /// Answers a request, whose extensions hold the [`PathNames`].
    pub(super) fn answer(&self, app: Arc<App>, request: Request) -> Answering {
        (self.answer)(app, request)
    }
}

macro_rules! table {
    ($($method:ident $path:literal, $role:ident, $reach:ident, $call:literal, $answer:path $(, $parameter:ident)*;)*) => {
        [$(Route {
            method: Method::$method,
            path: $path,
            role: $role,
            reach: $reach,
            call: $call,
            parameters: &[$(stringify!($parameter)),*],
            answer: |app, request| run($answer, app, request),
        }),*]
    };
}

/// All calls.
pub(super) static TABLE: [Route; 54] = table! {
    POST "/v1/models/{model}:retrieve", Read, Model, "retrieve", passes::of_active, min_position, min_coverage;
    POST "/v1/models/{model}:rank", Read, Model, "rank", passes::of_active, min_position, min_coverage;
    POST "/v1/models/{model}:embed", Read, Model, "embed", passes::of_active, min_position;
    POST "/v1/models/{model}/versions/{version}:retrieve", Read, Model, "retrieve", passes::of_version, min_position, min_coverage;
    POST "/v1/models/{model}/versions/{version}:rank", Read, Model, "rank", passes::of_version, min_position, min_coverage;
    POST "/v1/models/{model}/versions/{version}:embed", Read, Model, "embed", passes::of_version, min_position;
    POST "/v1/models/{model}/labels/{label}:retrieve", Read, Model, "retrieve", passes::of_label, min_position, min_coverage;
    POST "/v1/models/{model}/labels/{label}:rank", Read, Model, "rank", passes::of_label, min_position, min_coverage;
    POST "/v1/models/{model}/labels/{label}:embed", Read, Model, "embed", passes::of_label, min_position;
    GET "/v1/models", Read, Visible, "models", calls::models;
    GET "/v1/models/{model}", Read, Model, "model", calls::model;
    GET "/v1/models/{model}/versions", Read, Model, "versions", calls::versions;
    GET "/v1/models/{model}/versions/{version}", Read, Model, "version", calls::version;
    POST "/v1/models/{model}/versions/{version}:load", Admin, Model, "load", calls::load;
    POST "/v1/models/{model}/versions/{version}:activate", Admin, Model, "activate", calls::activate, scope;
    POST "/v1/models/{model}/versions/{version}:unload", Admin, Model, "unload", calls::unload;
    GET "/v1/models/{model}/labels", Read, Model, "labels", calls::labels;
    GET "/v1/models/{model}/labels/{label}", Read, Model, "label", calls::label;
    PUT "/v1/models/{model}/labels/{label}", Admin, Model, "label", calls::put_label;
    DELETE "/v1/models/{model}/labels/{label}", Admin, Model, "label", calls::delete_label;
    GET "/v1/models/{model}/traffic", Read, Model, "traffic", traffic::traffic;
    PUT "/v1/models/{model}/traffic", Admin, Model, "traffic", traffic::put_traffic;
    DELETE "/v1/models/{model}/traffic", Admin, Model, "traffic", traffic::delete_traffic, revision;
    POST "/v1/models/{model}/traffic:stop", Write, Model, "traffic", traffic::stop;
    GET "/v1/models/{model}/index", Read, Model, "index", browse::index;
    GET "/v1/models/{model}/shards", Read, Model, "shards", browse::shards;
    GET "/v1/models/{model}/columns/{column*}", Read, Model, "column", browse::column, contains, limit, min_position;
    GET "/v1/models/{model}/items", Read, Model, "find", browse::find, column, contains, limit, min_position;
    GET "/v1/models/{model}/items/{id}", Read, Model, "item", items::item, min_position;
    GET "/v1/models/{model}/items:position", Read, Model, "position", items::position, min_position;
    POST "/v1/models/{model}/items:upsert", Write, Model, "upsert", items::upsert, if_position, min_position;
    POST "/v1/models/{model}/items:delete", Write, Model, "delete", items::delete, if_position, min_position;
    POST "/v1/models/{model}/items:merge", Admin, Model, "merge", items::merge, min_position;
    GET "/v1/models/{model}/queries", Read, Model, "queries", calls::queries;
    POST "/v1/models/{model}/versions/{version}:pass", Read, Model, "pass", parts::pass;
    POST "/v1/models/{model}:rows", Read, Model, "rows", rows::rows;
    GET "/v1/parts", Read, Visible, "parts", parts::parts;
    GET "/v1/debug/slow", Admin, Server, "slow", calls::slow;
    GET "/v1/debug/shadow", Admin, Server, "shadow", traffic::shadow;
    GET "/v2", Open, Server, "inference", inference::server;
    GET "/v2/", Open, Server, "inference", inference::server_too;
    GET "/v2/health/live", Open, Server, "health", inference::live;
    GET "/v2/health/ready", Open, Server, "health", inference::ready;
    GET "/v2/models/{model}", Read, Model, "inference", inference::model;
    GET "/v2/models/{model}/versions/{version}", Read, Model, "inference", inference::version;
    GET "/v2/models/{model}/ready", Read, Model, "inference", inference::model_ready;
    GET "/v2/models/{model}/versions/{version}/ready", Read, Model, "inference", inference::version_ready;
    POST "/v2/models/{model}/infer", Read, Model, "infer", inference::infer, min_position, min_coverage;
    POST "/v2/models/{model}/versions/{version}/infer", Read, Model, "infer", inference::infer_version, min_position, min_coverage;
    GET "/livez", Open, Server, "health", calls::live;
    GET "/readyz", Open, Server, "health", calls::ready;
    GET "/metrics", Read, Server, "metrics", calls::metrics;
    GET "/openapi.json", Open, Server, "openapi", openapi::openapi;
    GET "/", Open, Server, "console", console::console;
};

/// Answers a request by a function of axum's kind.
pub(super) fn run<T: 'static, S, H: Handler<T, S>>(handler: H, app: S, request: Request) -> Answering {
    Box::pin(handler.call(request, app))
}

/// What the table has for a request.
#[derive(Clone)]
pub(super) enum Matched {
    /// A call, with the names in its path.
    Call(&'static Route, PathNames),
    /// A path whose calls have other methods: these, for `Allow`.
    Method(String),
    /// A path with a verb that it does not have, and those that it has.
    Verb(String, Vec<&'static str>),
    /// Nothing.
    Nowhere,
    /// A path that is no text.
    NoText,
}

impl Matched {
    /// What the call takes. To be told that there is no such call takes a key, whichever.
    pub(super) fn needs(&self) -> Needs<'_> {
        match self {
            Matched::Call(route, names) => Needs { role: route.role, reach: route.reach, model: route.model(names) },
            _ => Needs { role: Read, reach: Visible, model: None },
        }
    }

    /// The label in metrics.
    pub(super) fn call(&self) -> &'static str {
        match self {
            Matched::Call(route, _) => route.call,
            _ => "other",
        }
    }
}

/// The call that a request asks for.
pub(super) fn find(method: &Method, path: &str) -> Matched {
    let Some(segments) = Segments::of(path) else { return Matched::NoText };
    let wanted = if *method == Method::HEAD { &Method::GET } else { method };
    let mut allowed = Vec::new();
    for route in &TABLE {
        let Some(names) = segments.names(route.path) else { continue };
        if route.method == *wanted {
            return Matched::Call(route, PathNames::new(route.call, names));
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
