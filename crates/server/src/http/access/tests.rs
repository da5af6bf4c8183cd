//! Tests every call of the table with every kind of key.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

use super::*;
use crate::http::connections::Peer;
use crate::http::flow::{self, ConnectionFlow};
use crate::http::table::{self, Matched, TABLE};
use crate::http::verb::Verb;
use crate::http::{App, Options, RouterApp, Traces, router, routes};
use crate::route::protocol::CLIENT_HEADER;
use crate::route::{self, Fleet};
use sterling_core::quota::Flow;
use sterling_serving::engine::{self, Engine, Passes};
use sterling_serving::registry::{self, Registry, Snapshots};
use sterling_snapshot::Store;

/// Server without models, and its keys by name.
struct TestServer {
    runtime: Runtime,
    router: Router,
    app: Arc<App>,
    secrets: BTreeMap<&'static str, String>,
    _folder: TempDir,
}

const ALL: [&str; 0] = [];
/// Keys with their roles and models.
const KEYS: [(&str, Role, &[&str]); 6] = [
    ("read", Role::Read, &ALL),
    ("router", Role::Read, &ALL),
    ("write", Role::Write, &ALL),
    ("admin", Role::Admin, &ALL),
    ("admin-of-m", Role::Admin, &["m"]),
    ("admin-of-other", Role::Admin, &["other"]),
];

impl TestServer {
    fn new(admin_listen: Option<SocketAddr>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (mut secrets, mut text) = (BTreeMap::new(), String::new());
        for (name, role, models) in KEYS {
            let models: Vec<String> = models.iter().map(|model| model.to_string()).collect();
            let made = new_key(name, role, &models, None, None).unwrap();
            let made = if name == "router" { made.for_router() } else { made };
            secrets.insert(name, made.secret);
            text += &made.entry;
        }
        let keys: PathBuf = folder.path().join("keys.toml");
        std::fs::write(&keys, text).unwrap();
        let access = AccessControl::open(&AccessOptions { keys: Some(keys), admin_listen, audit_log: None }).unwrap();
        let registry = Registry::new(Store::new(folder.path()), Snapshots::default(), registry::Options::default());
        let engine =
            Engine::start(Passes::default(), &engine::Options { workers: 1, ..engine::Options::default() }).unwrap();
        let app = Arc::new(App::new(registry, engine, &Options::default()).unwrap().with_access(access));
        TestServer { runtime: Runtime::new().unwrap(), router: router(app.clone()), app, secrets, _folder: folder }
    }

    /// Replaces the server by a router with the same keys.
    fn routed(self) -> Self {
        let keys = Some(self._folder.path().join("keys.toml"));
        let access = AccessControl::open(&AccessOptions { keys, admin_listen: None, audit_log: None }).unwrap();
        let servers = route::Options { servers: vec!["127.0.0.1:1".into()], ..route::Options::default() };
        let app =
            RouterApp::new(Fleet::open(servers).unwrap(), access, Traces::default(), &Options::default()).unwrap();
        TestServer { router: routes::of_router(Arc::new(app)), ..self }
    }

    fn send(&self, request: Request<Body>) -> (StatusCode, HeaderMap, String) {
        self.runtime.block_on(async {
            let response = self.router.clone().oneshot(request).await.unwrap();
            let (parts, body) = response.into_parts();
            (parts.status, parts.headers, String::from_utf8(to_bytes(body, 1 << 24).await.unwrap().to_vec()).unwrap())
        })
    }

    fn ask(&self, method: &Method, path: &str, authorization: Option<&str>) -> (StatusCode, HeaderMap, String) {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        self.send(request.body(Body::empty()).unwrap())
    }

    fn bearer(&self, name: &str) -> String {
        format!("Bearer {}", self.secrets[name])
    }
}

/// Path of a call, for the model `m`.
fn path_of(route: &table::Route) -> String {
    let mut path = route.path.to_owned();
    for (name, text) in [("{model}", "m"), ("{version}", "1"), ("{label}", "l"), ("{column*}", "c"), ("{id}", "1")] {
        path = path.replace(name, text);
    }
    assert!(!path.contains('{'), "{path}");
    path
}

#[test]
fn every_call_takes_its_role_and_its_model() {
    check_roles(&TestServer::new(None));
    check_roles(&TestServer::new(None).routed());
}

fn check_roles(edge: &TestServer) {
    for route in &TABLE {
        let path = path_of(route);
        let is_denied = |authorization: Option<&str>| {
            let (status, headers, body) = edge.ask(&route.method, &path, authorization);
            let denied = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&status);
            assert_eq!(status == StatusCode::UNAUTHORIZED, headers.contains_key("www-authenticate"), "{path}: {body}");
            denied.then_some(status.as_u16())
        };
        let open = route.role == Role::Open;
        for invalid in [None, Some("Bearer stk_0"), Some("Basic YTpi"), Some("")] {
            assert_eq!(is_denied(invalid), (!open).then_some(401), "{} {path} as {invalid:?}", route.method);
        }
        for (name, role, models) in KEYS {
            let is_for = match route.reach {
                DataScope::Model => models.is_empty() || models.contains(&"m"),
                DataScope::Visible => true,
                DataScope::Server => models.is_empty(),
            };
            let expected = (!open && (role < route.role || !is_for)).then_some(403);
            assert_eq!(is_denied(Some(&edge.bearer(name))), expected, "{} {path} as {name}", route.method);
        }
    }
}

#[test]
fn only_routers_name_their_clients() {
    let server = TestServer::new(None);
    let flow = |key: &str, client: &str| {
        let request = Request::builder().uri("/v1/models").header("authorization", server.bearer(key));
        let request = request.header(CLIENT_HEADER, client).body(Body::empty()).unwrap();
        let response = server.runtime.block_on(server.router.clone().oneshot(request)).unwrap();
        // All clients of a router use the same connections, which are scheduled by its key.
        assert_eq!(response.extensions().get(), Some(&ConnectionFlow(Flow::of_key(key))));
        *response.extensions().get::<Flow>().unwrap()
    };
    assert_eq!(flow("router", "1"), flow("router", "1"));
    assert_ne!(flow("router", "1"), flow("router", "2"));
    for invalid in ["", "-1", "shop", "18446744073709551616"] {
        assert_eq!(flow("router", invalid), Flow::of_key("router"), "{invalid}");
    }
    for key in ["read", "write", "admin"] {
        assert_eq!(flow(key, "1"), Flow::of_key(key));
    }
    // Without keys, no caller is known to be a router.
    let open = AccessControl::open(&AccessOptions::default()).unwrap().caller(None);
    let address = Ipv4Addr::LOCALHOST.into();
    assert_eq!(flow::flows(&open, Some(address), Some(b"1")).0, Flow::of_address(address));
}

#[test]
fn changes_need_more_than_the_read_role() {
    for route in &TABLE {
        let is_pass = route.verb.is_pass() || route.verb == Verb::Rows;
        // Requests of other callers are visible to administrators only.
        let reads = (route.method == Method::GET || is_pass) && ![Verb::Slow, Verb::Shadow].contains(&route.verb);
        assert_eq!(reads, route.role <= Role::Read, "{} {}", route.method, route.path);
        assert_eq!(route.path.contains("{model}"), route.reach == DataScope::Model, "{}", route.path);
        let Matched::Call(found, _) = table::find(&route.method, &path_of(route)) else { panic!("{}", route.path) };
        assert!(std::ptr::eq(found, route), "{}", route.path);
    }
}

#[test]
fn the_table_is_the_description() {
    let document = serde_json::to_value(crate::http::openapi()).unwrap();
    let mut described = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            described.insert((method.to_uppercase(), path.clone()));
        }
    }
    let table: BTreeSet<_> =
        TABLE.iter().map(|route| (route.method.to_string(), route.path.replace("*}", "}"))).collect();
    assert_eq!(described, table);
}

#[test]
fn unknown_parameters_are_rejected_by_name() {
    let document = serde_json::to_value(crate::http::openapi()).unwrap();
    for edge in [TestServer::new(None), TestServer::new(None).routed()] {
        let admin = edge.bearer("admin");
        for route in &TABLE {
            let described =
                &document["paths"][route.path.replace("*}", "}")][route.method.as_str().to_lowercase()]["parameters"];
            let described = described.as_array().into_iter().flatten().filter(|described| described["in"] == "query");
            let described: BTreeSet<_> = described.map(|described| described["name"].as_str().unwrap()).collect();
            assert_eq!(described, route.parameters.iter().copied().collect(), "{} {}", route.method, route.path);
            let path = path_of(route);
            let unknown = |query: &str, authorization: &str| {
                let (status, _, body) = edge.ask(&route.method, &format!("{path}?{query}"), Some(authorization));
                (body.contains("unknown parameter")).then_some((status, body))
            };
            if !["v1", "v2"].contains(&path.split('/').nth(1).unwrap()) {
                assert!(described.is_empty() && unknown("q=1", &admin).is_none(), "{path}");
                continue;
            }
            let first = described.first().copied().unwrap_or("min_position");
            for (query, named) in [
                ("minposition=3".to_owned(), "minposition".to_owned()),
                ("q".into(), "q".into()),
                ("=".into(), String::new()),
                (format!("{first}=1&{first}%20=1"), format!("{first} ")),
                (first.to_uppercase() + "=1", first.to_uppercase()),
            ] {
                let (status, body) =
                    unknown(&query, &admin).unwrap_or_else(|| panic!("{} {path}?{query}", route.method));
                assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
                let named = if described.is_empty() && query.starts_with(first) { first } else { &named };
                assert!(body.contains(&format!("unknown parameter `{named}`")), "{path}?{query}: {body}");
                assert!(described.iter().all(|known| body.contains(&format!("`{known}`"))), "{body}");
                // Callers without permission learn nothing about the call.
                assert!(route.role == Role::Open || unknown(&query, "Bearer stk_0").is_none(), "{path}");
            }
            for known in ["", "&", "&&"].into_iter().chain(route.parameters.iter().copied()) {
                assert_eq!(unknown(known, &admin), None, "{} {path}?{known}", route.method);
            }
        }
    }
}

#[test]
fn the_page_on_security_lists_every_call_with_its_role() {
    let page = include_str!("../../../../../docs/guide/security.md");
    for route in &TABLE {
        let row = format!("| `{} {}` | {} |", route.method, route.path.replace("*}", "}"), route.role.name());
        assert!(page.contains(&row), "docs/guide/security.md lacks: {row}");
    }
    assert_eq!(page.matches("\n| `").count(), TABLE.len(), "docs/guide/security.md lists a call that is none");
}

#[test]
fn wrong_keys_learn_nothing() {
    let edge = TestServer::new(None);
    let right = &edge.secrets["admin"];
    let mut invalid: Vec<String> = vec![
        String::new(),
        "Bearer".into(),
        "Bearer ".into(),
        right.clone(),
        format!("Basic {right}"),
        format!("Bearer {right}0"),
        format!("Bearer {}", &right[1..]),
        format!("Bearer {}", right.to_uppercase()),
        format!("Bearer {right}, Bearer {right}"),
        format!("Bearer {}", "x".repeat(4000)),
    ];
    // Every prefix of the valid key.
    invalid.extend((0..right.len()).map(|length| format!("Bearer {}", &right[..length])));
    invalid.extend((0..2000).map(|n| format!("Bearer stk_{:064x}", n * 7919)));
    let reported = |method: &Method, path: &str, invalid: &str| {
        let (status, mut headers, body) = edge.ask(method, path, Some(invalid));
        headers.remove("x-request-id");
        headers.remove("server-timing");
        headers.remove("date");
        (status, format!("{headers:?}"), body)
    };
    let first = reported(&Method::GET, "/v1/models", &invalid[0]);
    assert_eq!(first.0, StatusCode::UNAUTHORIZED);
    for invalid in &invalid {
        assert_eq!(reported(&Method::GET, "/v1/models", invalid), first, "{invalid}");
    }
    // Only callers with a key learn whether something exists.
    for (method, path) in [
        (Method::GET, "/v1/models/none"),
        (Method::GET, "/nowhere"),
        (Method::GET, "/v1/models/%ff"),
        (Method::POST, "/metrics"),
        (Method::OPTIONS, "/v1/models"),
        (Method::POST, "/v1/models/m:nothing"),
        (Method::DELETE, "/v1/models/m/labels/l"),
    ] {
        assert_eq!(reported(&method, path, &invalid[5]), first, "{method} {path}");
    }
    let twice = Request::builder().uri("/v1/models").header("authorization", edge.bearer("admin"));
    let twice = twice.header("authorization", edge.bearer("admin")).body(Body::empty()).unwrap();
    assert_eq!(edge.send(twice).0, StatusCode::UNAUTHORIZED);
    let lower = format!("bearer {right}");
    assert_eq!(edge.ask(&Method::GET, "/v1/models", Some(&lower)).0, StatusCode::OK);
}

#[test]
fn ten_thousand_wrong_keys_are_none() {
    let edge = TestServer::new(None);
    let needs = Needs { role: Role::Read, reach: DataScope::Visible, model: None };
    for n in 0..10_000_u32 {
        let secret = format!("stk_{:064x}", n.wrapping_mul(2_654_435_761));
        assert!(edge.app.entrance.access.look(needs, Some(secret.as_bytes())).is_err());
    }
    assert!(edge.app.entrance.access.look(needs, Some(edge.secrets["read"].as_bytes())).is_ok());
}

#[test]
fn no_spelling_of_a_path_bypasses_its_role() {
    let edge = TestServer::new(None);
    let read = edge.bearer("read");
    for path in [
        "/v1/models/m/versions/1:activate",
        "/v1/models/m/versions/1%3Aactivate",
        "/v1/models/m/versions/1%3aactivate",
        "/v1/models/%6d/versions/1:%61ctivate",
        "/%76%31/models/m/versions/1:activate",
        "/v1/models/m/versions/1:activate?x=:retrieve",
        "/v1/models/m/items%3Amerge",
        "/v1/models/m/items:upsert",
    ] {
        assert_eq!(edge.ask(&Method::POST, path, Some(&read)).0, StatusCode::FORBIDDEN, "{path}");
    }
    // Paths that resemble the path of a call, but differ from it.
    for path in [
        "//v1/models/m/versions/1:activate",
        "/v1/models/m/versions/1:activate/",
        "/v1/models/m/versions//1:activate",
        "/v1/models/m/./versions/1:activate",
        "/v1/models/x/../m/versions/1:activate",
        "/v1/models%2Fm/versions/1:activate",
        "/v1/models/m/versions/1:Activate",
        "/v1/models/m/versions/1:activate%00",
    ] {
        let status = edge.ask(&Method::POST, path, Some(&edge.bearer("admin"))).0;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
    }
    // An escaped model name is the same name as the unescaped one.
    let other = edge.bearer("admin-of-other");
    assert_eq!(edge.ask(&Method::GET, "/v1/models/%6d", Some(&other)).0, StatusCode::FORBIDDEN);
}

#[test]
fn administrators_have_an_address_of_their_own() {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let edge = TestServer::new(Some(address));
    for route in &TABLE {
        let ask = |door: EntryPoint| {
            let request = Request::builder().method(&route.method).uri(path_of(route));
            let request = request.header("authorization", edge.bearer("admin")).header("host", "here");
            let request = request.extension(Peer { address, door });
            edge.send(request.body(Body::empty()).unwrap())
        };
        let nowhere = |body: &str| body.contains("no call has the path");
        assert_eq!(nowhere(&ask(EntryPoint::Main).2), route.role == Role::Admin, "{}", route.path);
        assert!(!nowhere(&ask(EntryPoint::Admin).2), "{}", route.path);
    }
}

#[test]
fn answers_are_not_readable_by_pages_of_other_sites() {
    let edge = TestServer::new(None);
    for (method, path) in [(Method::GET, "/livez"), (Method::OPTIONS, "/v1/models"), (Method::GET, "/v1/models")] {
        let request = Request::builder().method(&method).uri(path).header("origin", "http://elsewhere");
        let request = request.header("authorization", edge.bearer("admin")).header("host", "here");
        let request = request.header("access-control-request-method", "POST").body(Body::empty()).unwrap();
        let (_, headers, _) = edge.send(request);
        assert!(!headers.keys().any(|name| name.as_str().starts_with("access-control")), "{method} {path}");
    }
    let request = Request::builder().method("POST").uri("/v1/models/m:retrieve").header("origin", "http://elsewhere");
    let request = request.header("authorization", edge.bearer("admin")).header("host", "here");
    let (status, _, body) = edge.send(request.body(Body::empty()).unwrap());
    assert!(status == StatusCode::FORBIDDEN && body.contains("cross_site"), "{body}");
}

#[test]
fn reasons_of_readiness_need_a_key() {
    for (edge, said) in [
        (TestServer::new(None), "the server is not ready"),
        (TestServer::new(None).routed(), "the router is not ready"),
    ] {
        let (status, _, body) = edge.ask(&Method::GET, "/readyz", None);
        assert!(status == StatusCode::SERVICE_UNAVAILABLE && body.contains(said), "{body}");
        let (status, _, full) = edge.ask(&Method::GET, "/readyz", Some(&edge.bearer("read")));
        assert!(status == StatusCode::SERVICE_UNAVAILABLE && !full.contains(said), "{full}");
    }
}
