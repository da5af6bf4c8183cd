//! The HTTP server ([`http`]), the shard router ([`route`]) with the merge of shard answers ([`gather`]), their [`config`] and
//! the [`doctor`]. [`startup::Server`] starts a server from a configuration.
//!
//! ```
//! use sterling_server::config::Config;
//! use sterling_server::http::Stop;
//! use sterling_server::startup::Server;
//! use sterling_snapshot::sandbox::SandboxMode;
//!
//! let store = tempfile::tempdir()?;
//! let config = Config {
//!     store: store.path().into(),
//!     listen: ([127, 0, 0, 1], 0).into(),
//!     device: "cpu".into(),
//!     ..Config::default()
//! };
//! let server = Server::bind(&config, SandboxMode::Here)?;
//! assert_ne!(server.address()?.port(), 0);
//!
//! // It serves until it is stopped, here at once.
//! let (stop, stops) = tokio::sync::mpsc::unbounded_channel();
//! stop.send(Stop::Now)?;
//! server.run_until(stops)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod config;
pub mod describe;
pub mod doctor;
pub mod gather;
pub mod http;
pub mod route;
pub mod startup;
