//! Server embedded in a Rust program.

use std::net::SocketAddr;
use std::thread::JoinHandle;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_server::config::Config;
use sterling_server::http::Stop;
use sterling_server::startup;
use sterling_snapshot::sandbox::SandboxMode;

/// HTTP server over a store, which runs until it is stopped or dropped, like `sterling serve`.
///
/// New versions are loaded as they are published. Graphs that were not validated when they were published run in this process;
/// serve foreign stores with the command-line program, which runs graphs in a sandbox. Signal handling is left to the caller.
#[derive(Debug)]
pub struct Server {
    url: String,
    address: SocketAddr,
    stop: UnboundedSender<Stop>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Server {
    /// Starts a server and returns when the newest versions of the store are loaded. Port 0 of `listen` selects any free port. This
    /// call blocks: use it through `spawn_blocking` in an async runtime.
    ///
    /// ```no_run
    /// use sterling::{Config, Server};
    ///
    /// let config = Config { store: "store".into(), listen: ([127, 0, 0, 1], 0).into(), ..Config::default() };
    /// let server = Server::start(&config)?;
    /// println!("answers on {}", server.url());
    /// server.stop()?;
    /// # Ok::<(), sterling::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Io` for an address in use; the error in the configuration or the store. A version that cannot be loaded is no error of this
    /// call: the server reports the failure when that version is requested.
    pub fn start(config: &Config) -> Result<Self> {
        let server = startup::Server::bind(config, SandboxMode::Here)?;
        let address = server.address()?;
        let url = format!("{}://{address}", server.scheme());
        server.registry().refresh();
        let (stop, stops) = unbounded_channel();
        let thread = Some(tasks::SERVER.start(move || server.run_until(stops))?);
        Ok(Server { url, address, stop, thread })
    }

    /// Returns the URL of the server, such as `http://127.0.0.1:8080`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the server: running requests are answered first, new requests are not accepted.
    ///
    /// # Errors
    /// The error with which the server ended before this call.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        // Sending fails if the server has already ended, which is no error.
        let _ = self.stop.send(Stop::Now);
        let ended = self.thread.take().map(JoinHandle::join);
        ended.unwrap_or(Ok(Ok(()))).unwrap_or_else(|_| Err(Error::internal("the thread of the server panicked")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the server ended with an error");
        }
    }
}
