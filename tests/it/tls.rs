//! HTTPS and client certificates, tested with the client of the same library.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::time_provider::TimeProvider;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::{Server, put, root, run, sterling, until, vectors};

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/golden/tls").join(name)
}

/// Returns a folder with a store and the certificate and key of `server`.
pub fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &vectors(folder.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    show(folder.path(), "server");
    folder
}

/// Copies a certificate to the path that the server reads.
pub fn show(folder: &Path, name: &str) {
    for kind in ["pem", "key"] {
        std::fs::copy(golden(&format!("{name}.{kind}")), folder.join(format!("tls.{kind}"))).unwrap();
    }
}

pub fn serve(folder: &Path, more: &str) -> Server {
    let config = folder.join("sterling.toml");
    let (certificate, key) = (folder.join("tls.pem"), folder.join("tls.key"));
    std::fs::write(
        &config,
        format!("[http]\nheader_ms = 1000\n[tls]\ncertificate = {certificate:?}\nkey = {key:?}\n{more}\n"),
    )
    .unwrap();
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0");
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(folder).arg("--config").arg(config);
    Server::spawn(&mut command)
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

fn connect(server: &Server, client: Option<&str>) -> Stream {
    connect_by(server, client, &[])
}

/// Returns a connection of a client with these protocols.
fn connect_by(server: &Server, client: Option<&str>, protocols: &[&[u8]]) -> Stream {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(authority("ca.pem"));
    let mut config = match client {
        None => builder.with_no_client_auth(),
        Some(name) => {
            let chain = vec![CertificateDer::from_pem_file(golden(&format!("{name}.pem"))).unwrap()];
            let key = PrivateKeyDer::from_pem_file(golden(&format!("{name}.key"))).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    connected(server, config)
}

fn authority(name: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(golden(name)).unwrap()).unwrap();
    roots
}

fn connected(server: &Server, config: ClientConfig) -> Stream {
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
}

#[test]
fn the_handshake_agrees_on_http2_where_the_client_speaks_it() {
    let folder = folder();
    let server = serve(folder.path(), "");
    for (protocols, expected) in [
        (&[&b"h2"[..], b"http/1.1"][..], Some(&b"h2"[..])),
        (&[b"http/1.1", b"h2"], Some(b"h2")),
        (&[b"http/1.1"], Some(b"http/1.1")),
        (&[], None),
    ] {
        let mut stream = connect_by(&server, None, protocols);
        if expected != Some(b"h2") {
            let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            assert!(ask(&mut stream, request).unwrap().starts_with("HTTP/1.1 200"));
        } else {
            // The preface with empty settings, which the server answers with its own: a frame of type 4.
            stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
            let mut frame = [0; 9];
            stream.read_exact(&mut frame).unwrap();
            assert_eq!(frame[3], 4, "{frame:?}");
        }
        assert_eq!(stream.conn.alpn_protocol(), expected);
    }
}

/// Returns the answer to one request, or the error.
fn ask(stream: &mut Stream, request: &str) -> std::io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut text = Vec::new();
    match stream.read_to_end(&mut text) {
        // The server closes the connection after its answer; a TLS close notification is optional.
        Err(e) if text.is_empty() => Err(e),
        _ => Ok(String::from_utf8(text).unwrap()),
    }
}

/// A clock at which the certificate of `expired` was valid.
#[derive(Debug)]
struct ClockWhenValid;

impl TimeProvider for ClockWhenValid {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(1_577_900_000)))
    }
}

/// Returns status and text of a path of a server with an expired certificate, for a client whose clock is earlier.
pub fn get_before_it_expired(server: &Server, path: &str) -> (u16, String) {
    let builder = ClientConfig::builder_with_details(Arc::new(ring::default_provider()), Arc::new(ClockWhenValid));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let config = builder.with_root_certificates(authority("expired-ca.pem")).with_no_client_auth();
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let answer = ask(&mut connected(server, config), &request).unwrap();
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), text.to_owned())
}

/// Waits for the nth failed reload of certificates.
fn wait_for_failed_reload(server: &Server, nth: u32) {
    let metrics = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let failed = format!("sterling_certificate_reloads_total{{outcome=\"failed\"}} {nth}");
    until("a failed reload", || ask(&mut connect(server, None), metrics).is_ok_and(|answer| answer.contains(&failed)));
}

const READY: &str = "GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

fn is_ready(server: &Server) -> bool {
    ask(&mut connect(server, None), READY).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Returns the certificate that the server presents.
fn shown(server: &Server) -> Vec<u8> {
    let mut stream = connect(server, None);
    ask(&mut stream, READY).unwrap();
    stream.conn.peer_certificates().unwrap()[0].to_vec()
}

#[test]
fn calls_are_answered_behind_tls_and_no_others() {
    let folder = folder();
    let server = serve(folder.path(), "");
    assert!(server.said[0].contains("https://"), "{:?}", server.said);
    until("ready", || is_ready(&server));
    let body = "{\"vector\": [1, 0]}";
    let request = format!(
        "POST /v1/models/vectors:retrieve HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = ask(&mut connect(&server, None), &request).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"id\":7"), "{answer}");
    // Clients that speak plain HTTP, or send nothing, are disconnected.
    for sent in [READY, ""] {
        let mut plain = TcpStream::connect(&server.address).unwrap();
        plain.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        plain.write_all(sent.as_bytes()).unwrap();
        let mut came = Vec::new();
        let _ = plain.read_to_end(&mut came);
        assert!(!came.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&came));
    }
    assert!(is_ready(&server));
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn a_certificate_is_changed_without_a_restart() {
    let folder = folder();
    let server = serve(folder.path(), "");
    until("ready", || is_ready(&server));
    let first = shown(&server);
    // A key that does not match the certificate changes nothing.
    std::fs::copy(golden("server-2.pem"), folder.path().join("tls.pem")).unwrap();
    wait_for_failed_reload(&server, 1);
    assert_eq!(shown(&server), first);
    show(folder.path(), "server-2");
    until("the new certificate", || shown(&server) != first);
    std::fs::remove_file(folder.path().join("tls.key")).unwrap();
    wait_for_failed_reload(&server, 2);
    assert!(is_ready(&server));
}

#[test]
fn clients_have_a_certificate_where_they_must() {
    let folder = folder();
    let server = serve(folder.path(), &format!("client_ca = {:?}", golden("ca.pem")));
    let asks = |client| ask(&mut connect(&server, client), READY);
    until("ready", || asks(Some("client")).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")));
    assert!(asks(None).is_err());
    assert!(asks(Some("server")).is_err(), "a certificate of a server is none of a client");
}

#[test]
fn invalid_certificates_end_the_start() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("empty"), "").unwrap();
    let (certificate, key, store) = (path("tls.pem"), path("tls.key"), folder.path().to_str().unwrap());
    for (options, expected) in [
        (format!("certificate = {certificate:?}"), "tls.certificate: set without `tls.key`"),
        (format!("key = {key:?}"), "tls.key: set without `tls.certificate`"),
        (format!("client_ca = {certificate:?}"), "tls.client_ca: set without"),
        (format!("certificate = {:?}\nkey = {key:?}", path("empty")), "tls.certificate: the file has no certificate"),
        (format!("certificate = {certificate:?}\nkey = {certificate:?}"), "tls.key"),
        (format!("certificate = {certificate:?}\nkey = {:?}", golden("server-2.key")), "tls.certificate"),
        (format!("certificate = {:?}\nkey = {key:?}", path("none")), "none"),
        (format!("certificate = {certificate:?}\nkey = {key:?}\nclient_ca = {key:?}"), "tls.client_ca"),
    ] {
        let config = path("wrong.toml");
        std::fs::write(&config, format!("[tls]\n{options}\n")).unwrap();
        let (code, _, err) = run(&["serve", "--check", "--store", store, "--config", &config]);
        assert!(code == 2 && err.contains(expected), "{options}: {code} {err}");
    }
}

#[test]
fn doctor_uses_tls_and_protects_its_key() {
    let folder = folder();
    let server = serve(folder.path(), "");
    until("ready", || is_ready(&server));
    let ca = golden("ca.pem").to_str().unwrap().to_owned();
    let port = server.address.rsplit_once(':').unwrap().1;
    for name in [format!("localhost:{port}"), format!("https://127.0.0.1:{port}")] {
        let (code, out, err) = run(&["doctor", "--server", &name, "--ca", &ca, "--key", "stk_secret"]);
        assert!(code == 0 && out.contains("all is well"), "{out}{err}");
    }
    // Another authority does not verify it.
    let other = golden("expired-ca.pem").to_str().unwrap().to_owned();
    let (code, out, _) = run(&["doctor", "--server", &format!("localhost:{port}"), "--ca", &other]);
    assert!(code != 0 && out.contains("certificate"), "{out}");
    let (code, _, err) = run(&["doctor", "--server", &format!("https://localhost:{port}")]);
    assert!(code == 2 && err.contains("expected a certificate authority to verify it (`--ca`)"), "{err}");
    // A server that waits for a handshake, and prints the received data instead.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (tell, came) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut sent = vec![0; 4096];
            let read = stream.unwrap().read(&mut sent).unwrap_or(0);
            tell.send(String::from_utf8_lossy(&sent[..read]).into_owned()).unwrap();
        }
    });
    for name in [address.clone(), format!("http://{address}")] {
        let (code, out, _) = run(&["doctor", "--server", &name, "--key", "stk_secret"]);
        assert!(code != 0 && out.contains("so that the key was not sent"), "{out}");
    }
    let sent: Vec<String> = came.try_iter().collect();
    assert!(sent.len() >= 2 && sent.iter().all(|sent| !sent.contains("stk_secret")), "{sent:?}");
    // Keys are not sent unencrypted over a network unless the operator allows it. These addresses are unused.
    let (code, out, _) = run(&["doctor", "--server", "192.0.2.1:80", "--key", "stk_secret"]);
    assert!(code != 0 && out.contains("the key would be sent unencrypted"), "{out}");
}

#[test]
fn doctor_explains_the_rejection_of_an_authority_as_a_server() {
    let folder = folder();
    show(folder.path(), "self");
    let server = serve(folder.path(), "");
    let (name, ca) = (server.address.replace("127.0.0.1", "localhost"), golden("self.pem"));
    let (code, out, _) = run(&["doctor", "--server", &name, "--ca", ca.to_str().unwrap()]);
    assert!(code != 0 && out.contains("basicConstraints=critical,CA:FALSE"), "{out}");
}

#[test]
fn servers_with_expired_certificates_are_skipped_and_reported() {
    let folder = folder();
    show(folder.path(), "expired");
    let server = serve(folder.path(), "");
    let (_folder, router) = routed(&server, "localhost", &format!("ca = {:?}", golden("expired-ca.pem")));
    until("it says why", || {
        let (status, problem) = router.get("/readyz");
        status == 503 && problem.contains("0 of 1 servers are ready") && problem.to_lowercase().contains("expired")
    });
    let metrics = router.get("/metrics").1;
    assert!(metrics.lines().any(|line| line == "sterling_route_servers{state=\"silent\"} 1"), "{metrics}");
    let (name, ca) = (server.address.replace("127.0.0.1", "localhost"), golden("expired-ca.pem"));
    let (code, out, _) = run(&["doctor", "--server", &name, "--ca", ca.to_str().unwrap()]);
    assert!(code != 0 && out.to_lowercase().contains("expired"), "{out}");
    let (code, out, _) = run(&["doctor", "--router", &router.address]);
    assert!(code != 0 && out.contains("accepts no requests") && out.to_lowercase().contains("expired"), "{out}");
}

/// Returns a router over a server with TLS, with these keys under `[route.tls]`.
fn routed(server: &Server, host: &str, options: &str) -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("router.toml");
    let port = server.address.rsplit_once(':').unwrap().1;
    let route = format!("[route]\nservers = [\"{host}:{port}\"]\nrefresh_ms = 100\n[route.tls]\n{options}\n");
    std::fs::write(&config, route).unwrap();
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").args(["route", "--listen", "127.0.0.1:0", "--config"]).arg(config);
    (folder, Server::spawn(&mut command))
}

#[test]
fn routers_ask_servers_by_tls_and_know_them_by_their_authority() {
    let folder = folder();
    let ca = format!("ca = {:?}", golden("ca.pem"));
    let own = format!("{ca}\ncertificate = {:?}\nkey = {:?}", golden("client.pem"), golden("client.key"));
    let answers = |router: &Server| {
        let (status, reported) = router.post("/v1/models/vectors:retrieve", "{\"vector\": [1, 0], \"k\": 1}");
        (status == 200).then(|| reported["items"][0]["id"].as_i64().unwrap())
    };
    let plain = serve(folder.path(), "");
    for host in ["localhost", "127.0.0.1"] {
        let (_folder, router) = routed(&plain, host, &ca);
        until("the router is ready", || router.get("/readyz").0 == 200);
        // Connections are kept and reused.
        assert!((0..20).all(|_| answers(&router) == Some(7)));
    }
    // The same by environment variables.
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ROUTE__TLS__CA", golden("ca.pem"));
    let by_variables = Server::spawn(command.args(["route", "--listen", "127.0.0.1:0", "--server", &plain.address]));
    until("the router is ready", || by_variables.get("/readyz").0 == 200);
    // A server with client authentication receives a certificate; without it, or with another authority, requests fail.
    let guarded = serve(folder.path(), &format!("client_ca = {:?}", golden("ca.pem")));
    let (_folder, router) = routed(&guarded, "localhost", &own);
    until("the router is ready", || router.get("/readyz").0 == 200);
    assert_eq!(answers(&router), Some(7));
    let other = format!("ca = {:?}", golden("client.pem"));
    for (server, host, options) in
        [(&guarded, "localhost", &ca), (&plain, "localhost", &other), (&plain, "localhost", &String::new())]
    {
        let (_folder, router) = routed(server, host, options);
        router.wait_for_polls("servers");
        assert_eq!((router.get("/readyz").0, answers(&router)), (503, None), "{options}");
    }
    // Invalid settings are reported at the start.
    let wrong = folder.path().join("wrong.toml");
    let (certificate, key) = (golden("client.pem"), golden("server.key"));
    for (options, expected) in [
        ("ca = \"none.pem\"".to_owned(), "none.pem"),
        (format!("certificate = {certificate:?}\nkey = {key:?}"), "set without `tls.ca`"),
        (format!("{ca}\ncertificate = {certificate:?}"), "set without `tls.key`"),
        (format!("{ca}\ncertificate = {certificate:?}\nkey = {key:?}"), "tls.certificate"),
        (format!("ca = {key:?}"), "the file has no certificate"),
    ] {
        std::fs::write(&wrong, format!("[route]\nservers = [\"localhost:1\"]\n[route.tls]\n{options}\n")).unwrap();
        let (code, _, error) = run(&["route", "--listen", "127.0.0.1:0", "--config", wrong.to_str().unwrap()]);
        assert!(code != 0 && error.contains(expected), "{options}: {code} {error}");
    }
}
