//! Checks of request headers that apply to all calls.

use axum::extract::Request;
use axum::http::header::{HOST, TRANSFER_ENCODING};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Version};

use super::answer::Rejection;
use sterling_core::error::Error;

/// Rejects an HTTP/1.1 header that a proxy and this server might interpret differently. The header must name exactly one host
/// (RFC 9112, 3.2), and may use no transfer coding but `chunked` (6.1), since no other is decoded here.
///
/// # Errors
/// 400 or 501 with the received and the expected value.
pub(super) fn check_head(request: &Request) -> Result<(), Rejection> {
    if request.version() != Version::HTTP_11 {
        return Ok(());
    }
    check_host(request.headers())?;
    check_transfer(request.headers())
}

fn check_host(headers: &HeaderMap) -> Result<(), Rejection> {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        let count = headers.get_all(HOST).iter().count();
        return Err(Error::invalid(format!("header `host`: got {count} headers, expected one")).into());
    };
    // A target without an authority has an empty host.
    let is_place = |authority: Authority| !authority.as_str().contains('@');
    if host.is_empty() || Authority::try_from(host.as_bytes()).is_ok_and(is_place) {
        return Ok(());
    }
    Err(Error::invalid(format!("header `host`: got {host:?}, expected a host and a port")).into())
}

fn check_transfer(headers: &HeaderMap) -> Result<(), Rejection> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => Ok(()),
        (Some(coding), _) => {
            let detail = format!("transfer encoding {coding:?}: expected `chunked`; compress by `content-encoding`");
            Err(Rejection::http(StatusCode::NOT_IMPLEMENTED, "unsupported_transfer_encoding", detail))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::body::Body;

    use super::*;

    #[test]
    fn ambiguous_headers_are_rejected() {
        let check = |version, headers: &[(&str, &str)]| {
            let request = Request::builder().version(version);
            let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
            check_head(&request.body(Body::empty()).unwrap()).map_err(|refusal| refusal.status().as_u16())
        };
        for (headers, expected) in [
            (&[("host", "a")][..], Ok(())),
            (&[("host", "a_b:80")], Ok(())),
            (&[("host", "[::1]:8080")], Ok(())),
            (&[("host", "")], Ok(())),
            (&[], Err(400)),
            (&[("host", "a"), ("host", "a")], Err(400)),
            (&[("host", "a b")], Err(400)),
            (&[("host", "a/b")], Err(400)),
            (&[("host", "u@a")], Err(400)),
            (&[("host", "a"), ("transfer-encoding", "chunked")], Ok(())),
            (&[("host", "a"), ("transfer-encoding", "Chunked")], Ok(())),
            (&[("host", "a"), ("transfer-encoding", "gzip, chunked")], Err(501)),
            (&[("host", "a"), ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")], Err(501)),
        ] {
            assert_eq!(check(Version::HTTP_11, headers), expected, "{headers:?}");
        }
        assert_eq!(check(Version::HTTP_10, &[]), Ok(()));
        assert_eq!(check(Version::HTTP_2, &[]), Ok(()));
    }
}
