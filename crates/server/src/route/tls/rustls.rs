//! TLS 1.2 and 1.3 by rustls.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::ServersTls;
use sterling_core::error::{Error, Result};

/// TLS client for connections to servers.
pub(in crate::route) struct Connector(TlsConnector);

impl Connector {
    /// Reads the certificates; `None` if no authority is configured.
    ///
    /// # Errors
    /// `Invalid` for inconsistent options, invalid files or a key of another certificate; `NotFound` or `Io` for unreadable
    /// files.
    pub(in crate::route) fn open(options: &ServersTls) -> Result<Option<Self>> {
        let Some((ca, own)) = options.files()? else { return Ok(None) };
        let invalid = |what: &str, error: &dyn std::fmt::Display| Error::invalid(format!("tls.{what}: {error}"));
        let mut roots = RootCertStore::empty();
        for certificate in certificates("ca", ca)? {
            roots.add(certificate).map_err(|e| invalid("ca", &e))?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::internal(format!("tls: {e}")))?
            .with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates("certificate", certificate)?;
                let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|e| invalid("key", &e))?;
                builder.with_client_auth_cert(chain, key).map_err(|e| invalid("certificate", &e))?
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Connector(TlsConnector::from(Arc::new(config)))))
    }

    /// Performs the handshake with a server, whose certificate must be valid for the host.
    pub(in crate::route) async fn secure(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        self.0.connect(name, stream).await.map_err(explained)
    }
}

/// Explains the rejection of a server certificate that is marked as an authority's, as OpenSSL creates it by default.
fn explained(error: io::Error) -> io::Error {
    if !error.to_string().contains("CaUsedAsEndEntity") {
        return error;
    }
    let what = "the certificate is that of an authority (`CA:TRUE`), expected a server certificate: with `openssl req -x509`, add \
                `-addext basicConstraints=critical,CA:FALSE`";
    io::Error::new(error.kind(), what)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::io(format!("tls: {}", path.display()), e))
}

fn certificates(what: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let invalid = |error: &dyn std::fmt::Display| Error::invalid(format!("tls.{what}: {}: {error}", path.display()));
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(list) if list.is_empty() => Err(invalid(&"the file has no certificate, expected PEM")),
        Ok(list) => Ok(list),
        Err(error) => Err(invalid(&error)),
    }
}
