//! The console: one page with inline styles and scripts, which sends requests to this server only.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::IntoResponse;

/// The page. The scripts share one module scope, in this order.
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

/// Content security policy: only inline scripts and styles, and requests to this server only.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The console: a page to try requests and to watch the server.
#[utoipa::path(get, path = "/", tag = "health", responses((status = 200, body = String, content_type = "text/html")))]
pub async fn console() -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // The page belongs to one version of the binary.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE)
}
