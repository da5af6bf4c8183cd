//! Protection against cross-site requests: pages of other sites in a browser that reaches this server can send requests without
//! reading the answers. Without keys, sending is enough to change something.

use axum::http::header::{HOST, HeaderName, ORIGIN};
use axum::http::{HeaderMap, Method, StatusCode, Uri};

use crate::http::answer::Rejection;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Rejects requests by pages of other sites. `GET` and `HEAD` are allowed, because pages of other sites cannot read the answer.
///
/// # Errors
/// 403 with the reason.
pub(in crate::http) fn check_site(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Rejection> {
    if *method == Method::GET || *method == Method::HEAD {
        return Ok(());
    }
    let is_own = match (headers.get(FETCH_SITE), headers.get(ORIGIN)) {
        (Some(site), _) => site == "same-origin" || site == "none",
        (None, Some(origin)) => {
            let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
            // An authority in the request target takes precedence over the `Host` header: RFC 9112, 3.2.2. An HTTP/2 request may
            // have no `Host` header.
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            let host = uri.authority().map(|authority| authority.as_str()).or(host);
            origin.zip(host).is_some_and(|((scheme, origin), host)| {
                let place = |text| without_default_port(scheme, text);
                place(origin).eq_ignore_ascii_case(place(host))
            })
        }
        (None, None) => true,
    };
    if is_own {
        return Ok(());
    }
    Err(Rejection::http(StatusCode::FORBIDDEN, "cross_site", "a page of another site may not call this server"))
}

/// Strips the default port of a scheme from a host: RFC 9110, 4.2.3.
fn without_default_port<'a>(scheme: &str, host: &'a str) -> &'a str {
    let port = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => return host,
    };
    host.strip_suffix(port).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn pages_of_other_sites_may_only_read() {
        for (headers, own) in [
            (vec![], true),
            (vec![("host", "a:80")], true),
            (vec![("host", "a:80"), ("origin", "http://a:80")], true),
            (vec![("host", "A:80"), ("origin", "https://a:80")], true),
            (vec![("host", "a:80"), ("origin", "http://a")], true),
            (vec![("host", "a"), ("origin", "http://a:80")], true),
            (vec![("host", "[::1]:443"), ("origin", "https://[::1]")], true),
            (vec![("host", "a:443"), ("origin", "http://a")], false),
            (vec![("host", "a:80"), ("origin", "https://a")], false),
            (vec![("host", "a:80"), ("origin", "http://b:80")], false),
            (vec![("host", "a:80"), ("origin", "http://a:81")], false),
            (vec![("host", "a:80"), ("origin", "null")], false),
            (vec![("origin", "http://a")], false),
            (vec![("host", "b"), ("origin", "http://a"), ("sec-fetch-site", "same-origin")], true),
            (vec![("sec-fetch-site", "none")], true),
            (vec![("host", "a"), ("origin", "http://a"), ("sec-fetch-site", "cross-site")], false),
            (vec![("sec-fetch-site", "same-site")], false),
        ] {
            let map: HeaderMap =
                headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
            let target = Uri::from_static("/v1/models/a:retrieve");
            assert_eq!(check_site(&Method::POST, &target, &map).is_ok(), own, "{headers:?}");
            assert!(check_site(&Method::GET, &target, &map).is_ok(), "{headers:?}");
        }
        let map = HeaderMap::from_iter([(HOST, "b".parse().unwrap()), (ORIGIN, "http://a".parse().unwrap())]);
        assert!(
            check_site(&Method::POST, &Uri::from_static("http://a:80/x"), &map).is_ok(),
            "the target names its host"
        );
        assert!(check_site(&Method::POST, &Uri::from_static("http://b/x"), &map).is_err());
    }
}
