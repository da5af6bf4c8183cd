//! Parses listen addresses of the configuration and the command line.

use std::net::{SocketAddr, ToSocketAddrs as _};

use serde::{Deserialize as _, Deserializer};

use sterling_core::error::{Error, Result};

/// Parses an address, or a name and a port such as `localhost:8080`. A name resolves to its first IPv4 address, else to its first
/// address.
///
/// # Errors
/// `Invalid` with the received and the expected value.
pub fn address(text: &str) -> Result<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let invalid = |why: &dyn std::fmt::Display| {
        Error::invalid(format!(
            "got `{text}`, expected HOST:PORT such as 127.0.0.1:8080, [::1]:8080 or localhost:8080: {why}"
        ))
    };
    let found: Vec<SocketAddr> = text.to_socket_addrs().map_err(|e| invalid(&e))?.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| invalid(&"the name has no address"))
}

/// Deserializes a listen address.
///
/// # Errors
/// As [`address`].
pub fn read_address<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<SocketAddr, D::Error> {
    address(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

/// Deserializes an optional listen address.
pub(super) fn read_any_address<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<Option<SocketAddr>, D::Error> {
    Option::<String>::deserialize(from)?.map(|text| address(&text)).transpose().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_and_names_are_read() {
        for (text, expected) in [
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("[::1]:0", "[::1]:0"),
            ("0.0.0.0:8080", "0.0.0.0:8080"),
            ("localhost:8080", "127.0.0.1:8080"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), expected, "{text}");
        }
        for text in ["here", "localhost", ":", "127.0.0.1", "localhost:http", "localhost:70000", "[::1]", ""] {
            let error = address(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("got `{text}`, expected HOST:PORT")), "{error}");
        }
    }
}
