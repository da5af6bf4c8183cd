//! Credentials with which this server logs in to NATS brokers.
//!
//! The addresses may contain a user with a password, or a token. A credentials file may contain a user with a password, a token,
//! the seed of an nkey, or the output of `nsc` for a user (a JWT with its seed). The file is read at every connection, so that
//! credentials are rotated by replacing the file: brokers close connections whose credentials they no longer accept, and the next
//! connection uses the new ones.

use std::path::PathBuf;

use async_nats::{Auth, AuthError};
use nkeys::KeyPair;
use percent_encoding::percent_decode_str;

use sterling_core::error::{Error, Result};

/// Delimiters of a JWT in a file of `nsc`.
const JWT: (&str, &str) = ("-----BEGIN NATS USER JWT-----", "------END NATS USER JWT------");
/// Delimiters of an nkey seed in a file of `nsc`.
const SEED: (&str, &str) = ("-----BEGIN USER NKEY SEED-----", "------END USER NKEY SEED------");

/// Source of the credentials.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// No credentials.
    Nowhere,
    Addresses(Credentials),
    File(PathBuf),
}

/// Credentials that are sent when a connection is opened.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    User { name: String, password: String },
    Token(String),
    Seed(String),
    Jwt { jwt: String, seed: String },
}

impl Source {
    /// Returns the source of the credentials: the file if one is configured, else the addresses.
    ///
    /// # Errors
    /// `Invalid` if addresses have different credentials, or credentials that are not UTF-8; `Io` or `Invalid` for an unusable
    /// file.
    pub(super) fn of(servers: &[String], file: Option<&PathBuf>) -> Result<Self> {
        if let Some(file) = file {
            let source = Source::File(file.clone());
            source.read()?;
            return Ok(source);
        }
        let mut found: Option<Credentials> = None;
        for server in servers {
            let Some(credentials) = of_address(server)? else { continue };
            if found.as_ref().is_some_and(|found| *found != credentials) {
                return Err(Error::invalid("updates: the addresses of one cluster have different credentials"));
            }
            found = Some(credentials);
        }
        Ok(found.map_or(Source::Nowhere, Source::Addresses))
    }

    fn read(&self) -> Result<Option<Credentials>> {
        match self {
            Source::Nowhere => Ok(None),
            Source::Addresses(credentials) => Ok(Some(credentials.clone())),
            Source::File(path) => {
                let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
                let invalid = |why: &str| Error::invalid(format!("streams.credentials: {}: {why}", path.display()));
                parse_credentials(&text).map(Some).map_err(|why| invalid(&why))
            }
        }
    }

    /// Returns the credentials to send to a broker, with the signature of its nonce if an nkey is used.
    pub(super) fn answer(&self, nonce: &[u8]) -> std::result::Result<Auth, AuthError> {
        let answered = self.read().and_then(|credentials| match credentials {
            Some(credentials) => credentials.answer(nonce),
            None => Ok(Auth::new()),
        });
        answered.map_err(AuthError::new)
    }
}

impl Credentials {
    fn answer(self, nonce: &[u8]) -> Result<Auth> {
        let mut auth = Auth::new();
        match self {
            Credentials::User { name, password } => (auth.username, auth.password) = (Some(name), Some(password)),
            Credentials::Token(token) => auth.token = Some(token),
            Credentials::Seed(seed) => {
                let pair = pair(&seed)?;
                auth.nkey = Some(pair.public_key());
                auth.signature = Some(signed(&pair, nonce)?);
            }
            Credentials::Jwt { jwt, seed } => {
                auth.signature = Some(signed(&pair(&seed)?, nonce)?);
                auth.jwt = Some(jwt);
            }
        }
        Ok(auth)
    }
}

fn pair(seed: &str) -> Result<KeyPair> {
    // Error messages never contain the seed.
    KeyPair::from_seed(seed).map_err(|_| Error::invalid("streams.credentials: the seed is not an nkey seed"))
}

fn signed(pair: &KeyPair, nonce: &[u8]) -> Result<Vec<u8>> {
    pair.sign(nonce).map_err(|_| Error::invalid("streams.credentials: the seed cannot sign"))
}

/// Parses the user with a password, or the token, of an address.
fn of_address(server: &str) -> Result<Option<Credentials>> {
    let host = server.split_once("://").map_or(server, |(_, rest)| rest);
    let Some((user, _)) = host.rsplit_once('@') else { return Ok(None) };
    let decoded = |text: &str| {
        let text = percent_decode_str(text).decode_utf8();
        text.map(|text| text.into_owned())
            .map_err(|_| Error::invalid("updates: the credentials in an address are not UTF-8"))
    };
    Ok(Some(match user.split_once(':') {
        Some((name, password)) => Credentials::User { name: decoded(name)?, password: decoded(password)? },
        None => Credentials::Token(decoded(user)?),
    }))
}

/// Parses the contents of a credentials file.
fn parse_credentials(text: &str) -> std::result::Result<Credentials, String> {
    let between = |(begin, end): (&str, &str)| {
        let (_, rest) = text.split_once(begin)?;
        Some(rest.split_once(end)?.0.trim().to_owned()).filter(|found| !found.is_empty())
    };
    let is_seed = |seed: &str| KeyPair::from_seed(seed).is_ok();
    if text.contains(JWT.0) {
        let (Some(jwt), Some(seed)) = (between(JWT), between(SEED)) else {
            return Err("expected a JWT and a seed, as `nsc generate creds` writes them".into());
        };
        return if is_seed(&seed) {
            Ok(Credentials::Jwt { jwt, seed })
        } else {
            Err("the seed is not an nkey seed".into())
        };
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let &[line] = lines.as_slice() else {
        let lines = lines.len();
        return Err(format!(
            "got {lines} lines, expected one: USER:PASSWORD, a token or the seed of an nkey; or a file of `nsc generate creds`"
        ));
    };
    Ok(match line.split_once(':') {
        Some((name, password)) => Credentials::User { name: name.into(), password: password.into() },
        None if is_seed(line) => Credentials::Seed(line.into()),
        None => Credentials::Token(line.into()),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    fn of(servers: &[&str]) -> Result<Source> {
        Source::of(&servers.iter().map(|&server| server.to_owned()).collect::<Vec<_>>(), None)
    }

    #[test]
    fn addresses_hold_a_user_or_a_token() {
        let answer = |server: &str| of(&["nats://plain:4222", server]).unwrap().answer(b"nonce").unwrap();
        let user = answer("tls://me:p%40ss%3Aw@host:4222");
        assert_eq!((user.username.as_deref(), user.password.as_deref()), (Some("me"), Some("p@ss:w")));
        assert_eq!(answer("nats://s3cret@host").token.as_deref(), Some("s3cret"));
        assert!(of(&["nats://host", "host:4222"]).unwrap() == Source::Nowhere);
        assert_eq!(of(&["nats://a:b@host", "nats://a:c@host"]).err().unwrap().kind(), Kind::Invalid);
        assert_eq!(of(&["nats://a:%ff@host"]).err().unwrap().kind(), Kind::Invalid);
    }

    #[test]
    fn a_file_is_read_at_every_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        let (pair, other) = (KeyPair::new_user(), KeyPair::new_user());
        std::fs::write(&path, "me:one:two\n").unwrap();
        let source = Source::of(&[], Some(&path)).unwrap();
        let user = source.answer(b"nonce").unwrap();
        assert_eq!((user.username.as_deref(), user.password.as_deref()), (Some("me"), Some("one:two")));
        std::fs::write(&path, "\n  t0ken \n").unwrap();
        assert_eq!(source.answer(b"nonce").unwrap().token.as_deref(), Some("t0ken"));
        std::fs::write(&path, format!("{}\n", pair.seed().unwrap())).unwrap();
        let nkey = source.answer(b"nonce").unwrap();
        assert_eq!(nkey.nkey, Some(pair.public_key()));
        pair.verify(b"nonce", &nkey.signature.unwrap()).unwrap();
        let seed = other.seed().unwrap();
        std::fs::write(&path, format!("{}\na.b.c\n{}\n\n{}\n{seed}\n{}\n", JWT.0, JWT.1, SEED.0, SEED.1)).unwrap();
        let user = source.answer(b"nonce").unwrap();
        assert_eq!((user.jwt.as_deref(), &user.nkey), (Some("a.b.c"), &None));
        other.verify(b"nonce", &user.signature.unwrap()).unwrap();
    }

    #[test]
    fn unusable_credential_files_are_rejected_without_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        assert_eq!(Source::of(&[], Some(&path)).err().unwrap().kind(), Kind::NotFound);
        for text in ["", "s3cret\ntwo", &format!("{}\na.b.c\n{}", JWT.0, JWT.1)] {
            std::fs::write(&path, text).unwrap();
            let error = Source::of(&[], Some(&path)).err().unwrap();
            assert_eq!(error.kind(), Kind::Invalid);
            let reported = error.to_string();
            assert!(
                reported.contains("credentials") && !reported.contains("s3cret") && !reported.contains("a.b.c"),
                "{reported}"
            );
        }
    }
}
