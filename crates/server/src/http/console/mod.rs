//! The console: one page that holds its styles and its program, and asks nobody but this server.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::IntoResponse;

/// The page. The parts of the program share one scope, in this order.
const PAGE: &str = concat!(
    include_str!("head.html"),
    "<style>\n",
    include_str!("style.css"),
    "</style>\n</head>\n",
    include_str!("body.html"),
    "<script type=\"module\">\n\"use strict\";\n",
    include_str!("page.js"),
    include_str!("charts.js"),
    include_str!("form.js"),
    include_str!("filter.js"),
    include_str!("answer.js"),
    include_str!("query.js"),
    include_str!("models.js"),
    include_str!("traffic.js"),
    include_str!("live.js"),
    include_str!("catalogue.js"),
    include_str!("main.js"),
    "</script>\n</body>\n</html>\n",
);

/// What the page may do: run its own program and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A page to try requests on, and to see what the server is at.
#[utoipa::path(get, path = "/", tag = "health", responses((status = 200, body = String, content_type = "text/html")))]
pub async fn console() -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // The page is of one version of the program.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE)
}
