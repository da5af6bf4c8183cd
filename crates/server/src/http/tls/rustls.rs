//! TLS 1.2 and 1.3 by rustls.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::verify_server_cert_signed_by_trust_anchor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::{self, CertificateError, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::{TlsOptions, Validity};
use crate::http::settled::Settled;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// ALPN name of HTTP/2.
const HTTP2: &[u8] = b"h2";
/// A time after which every certificate has expired: their dates have four-digit years.
const AFTER_ALL_TIME: u64 = 1 << 40;
/// Maximum size of a file of certificates, in bytes.
const FILE_BYTES_MAX: usize = 4 << 20;

/// TLS configuration with the current certificate.
pub struct Tls {
    options: TlsOptions,
    config: ArcSwap<ServerConfig>,
    validity: Mutex<Option<Validity>>,
    files: Mutex<Settled<Files>>,
}

/// Bytes of the configured files.
#[derive(Clone, PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Files {
    fn read(options: &TlsOptions) -> Result<Option<Self>> {
        let Some((certificate, key)) = options.pair()? else { return Ok(None) };
        let read = |path: &Path| {
            let bytes = std::fs::read(path).map_err(|e| Error::io(format!("tls: {}", path.display()), e))?;
            match bytes.len() {
                0..=FILE_BYTES_MAX => Ok(bytes),
                many => Err(Error::invalid(format!(
                    "tls: {}: {many} bytes, expected at most {FILE_BYTES_MAX}",
                    path.display()
                ))),
            }
        };
        let client_ca = options.client_ca.as_deref().map(read).transpose()?;
        Ok(Some(Files { certificate: read(certificate)?, key: read(key)?, client_ca }))
    }

    /// Returns the validity of the server's certificate, the first of the file.
    fn validity(&self) -> Option<Validity> {
        validity(&CertificateDer::pem_slice_iter(&self.certificate).next()?.ok()?)
    }

    fn config(&self) -> Result<ServerConfig> {
        let invalid = |what: &str, error: &dyn std::fmt::Display| Error::invalid(format!("tls.{what}: {error}"));
        let certificates = |what: &str, bytes: &[u8]| {
            let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
            match read {
                Ok(list) if list.is_empty() => Err(invalid(what, &"the file has no certificate, expected PEM")),
                Ok(list) => Ok(list),
                Err(error) => Err(invalid(what, &error)),
            }
        };
        let chain = certificates("certificate", &self.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|e| invalid("key", &e))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::internal(format!("tls: {e}")))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(bytes) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates("client_ca", bytes)? {
                    roots.add(certificate).map_err(|e| invalid("client_ca", &e))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|e| invalid("client_ca", &e))?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|e| invalid("certificate", &e))?;
        config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// Determines a certificate's validity period from the verification errors at times before and after the period.
fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let message = |seconds| {
        let (nobody, at) = (RootCertStore::empty(), UnixTime::since_unix_epoch(Duration::from_secs(seconds)));
        verify_server_cert_signed_by_trust_anchor(&parsed, &nobody, &[], at, algorithms)
    };
    let (before, after) = (message(0), message(AFTER_ALL_TIME));
    let from = match before {
        Err(rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before, .. })) => {
            not_before.as_secs()
        }
        _ => 0,
    };
    match after {
        Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            Some(Validity { from, until: not_after.as_secs() })
        }
        _ => None,
    }
}

impl Tls {
    /// Reads the certificates; `None` if none is configured.
    ///
    /// # Errors
    /// `Invalid` for inconsistent options, invalid files or a key of another certificate; `NotFound` or `Io` for unreadable
    /// files.
    pub fn open(options: &TlsOptions) -> Result<Option<Self>> {
        let Some(files) = Files::read(options)? else { return Ok(None) };
        let (config, validity) = (ArcSwap::from_pointee(files.config()?), Mutex::new(files.validity()));
        Ok(Some(Tls { options: options.clone(), config, validity, files: Mutex::new(Settled::new(files)) }))
    }

    /// Performs the handshake. Returns the connection, and whether HTTP/2 was negotiated.
    pub(in crate::http) async fn accept(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, bool)> {
        let accepted = TlsAcceptor::from(self.config.load_full()).accept(stream).await;
        let accepted = accepted.inspect_err(|_| metrics::counter!("sterling_tls_failures_total").increment(1))?;
        let is_http2 = accepted.get_ref().1.alpn_protocol() == Some(HTTP2);
        Ok((accepted, is_http2))
    }

    /// Returns the validity of the current certificate.
    pub(in crate::http) fn validity(&self) -> Option<Validity> {
        *locked(&self.validity)
    }

    /// Reloads the files if they have changed. Unusable files change nothing: while certificate and key are written one after the
    /// other, they do not match.
    pub(in crate::http) fn reload(&self) {
        let found = match Files::read(&self.options) {
            Ok(None) => return,
            Ok(Some(files)) => Ok(files),
            Err(error) => Err(error),
        };
        let mut files = locked(&self.files);
        let read = |files: &Files| Ok((files.config()?, files.validity()));
        match files.look(found).and_then(|files| files.map(read).transpose()) {
            Ok(None) => {}
            Ok(Some((config, validity))) => {
                self.config.store(Arc::new(config));
                *locked(&self.validity) = validity;
                tracing::info!("reloaded the certificate");
                count("read");
            }
            Err(error) => {
                tracing::error!(%error, "certificate not reloaded; the previous one stays in use");
                count("failed");
            }
        }
    }
}

fn count(outcome: &'static str) {
    metrics::counter!("sterling_certificate_reloads_total", "outcome" => outcome).increment(1);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_dates_of_a_certificate_are_read() {
        let read = |name: &str| {
            let path = format!("{}/tests/golden/tls/{name}.pem", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
            validity(&CertificateDer::from_pem_file(path).unwrap()).unwrap()
        };
        // Valid for the first two days of 2020, and for a hundred years.
        assert_eq!(read("expired"), Validity { from: 1_577_836_800, until: 1_577_923_200 });
        let Validity { from, until } = read("server");
        assert_eq!(until - from, 36_500 * 86_400);
    }
}
