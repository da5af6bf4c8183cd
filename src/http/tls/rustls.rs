//! TLS 1.2 and 1.3 by rustls.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::TlsOptions;
use crate::error::{Error, Result};
use crate::http::settled::Settled;
use crate::locks::locked;

/// The name of HTTP/2 in a handshake.
const HTTP2: &[u8] = b"h2";
/// Most of a file of certificates, in bytes.
const FILE_BYTES_MAX: usize = 4 << 20;

/// The certificate that is shown now.
pub struct Tls {
    options: TlsOptions,
    config: ArcSwap<ServerConfig>,
    files: Mutex<Settled<Files>>,
}

/// The bytes of the files.
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

    fn config(&self) -> Result<ServerConfig> {
        let wrong = |what: &str, error: &dyn std::fmt::Display| Error::invalid(format!("tls.{what}: {error}"));
        let certificates = |what: &str, bytes: &[u8]| {
            let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
            match read {
                Ok(list) if list.is_empty() => Err(wrong(what, &"no certificate in it, expected PEM")),
                Ok(list) => Ok(list),
                Err(error) => Err(wrong(what, &error)),
            }
        };
        let chain = certificates("certificate", &self.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|e| wrong("key", &e))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::internal(format!("tls: {e}")))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(bytes) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates("client_ca", bytes)? {
                    roots.add(certificate).map_err(|e| wrong("client_ca", &e))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|e| wrong("client_ca", &e))?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|e| wrong("certificate", &e))?;
        config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl Tls {
    /// Reads the certificates; nothing where none is named.
    ///
    /// # Errors
    /// `Invalid` for options that do not fit together, files that are none and a key that is not the certificate's; `NotFound` or `Io` for
    /// files that cannot be read.
    pub fn open(options: &TlsOptions) -> Result<Option<Self>> {
        let Some(files) = Files::read(options)? else { return Ok(None) };
        let config = ArcSwap::from_pointee(files.config()?);
        Ok(Some(Tls { options: options.clone(), config, files: Mutex::new(Settled::new(files)) }))
    }

    /// The connection behind the handshake, and whether HTTP/2 was agreed upon there.
    pub(in crate::http) async fn accept(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, bool)> {
        let accepted = TlsAcceptor::from(self.config.load_full()).accept(stream).await;
        let accepted = accepted.inspect_err(|_| metrics::counter!("sterling_tls_failures_total").increment(1))?;
        let is_http2 = accepted.get_ref().1.alpn_protocol() == Some(HTTP2);
        Ok((accepted, is_http2))
    }

    /// Reads the files again where they have changed. Those that cannot be used change nothing: while certificate and key are
    /// written one after the other they do not fit together.
    pub(in crate::http) fn reload(&self) {
        let found = match Files::read(&self.options) {
            Ok(None) => return,
            Ok(Some(files)) => Ok(files),
            Err(error) => Err(error),
        };
        let mut files = locked(&self.files);
        match files.look(found).and_then(|files| files.map(Files::config).transpose()) {
            Ok(None) => {}
            Ok(Some(config)) => {
                self.config.store(Arc::new(config));
                tracing::info!("read the certificate again");
                count("read");
            }
            Err(error) => {
                tracing::error!(%error, "the certificate stays as it was");
                count("failed");
            }
        }
    }
}

fn count(outcome: &'static str) {
    metrics::counter!("sterling_certificate_reloads_total", "outcome" => outcome).increment(1);
}
