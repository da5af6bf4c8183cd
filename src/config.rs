//! The configuration of `sterling serve`: defaults, then one TOML file, then `STERLING_*`, then flags.
//!
//! ```toml
//! store = "store"
//! listen = "127.0.0.1:8080"
//! model = "debian"            # without it, every model of the store
//! refresh_ms = 1000           # how often the store is looked at for new versions
//! follow = true               # the newest published version is activated by itself; else `:activate` does it
//! memory_mb = 8192            # what versions may take together; without it 7/8 of what is free at the start
//! [tables]                    # where embedding tables lie; without it whole, in this host's memory
//! plan = "plan.json"          # as `sterling plan --json` printed it
//! topology = "machines.toml"  # or planned at each load: for these machines
//! remote = ["redis://10.0.0.1:6379"]  # the cluster that `publish --remote` brought rows to
//! timeout_ms = 200            # rows of the cluster that take longer are degraded
//! [engine]
//! queue = 1024                # requests that may wait
//! batch = 32                  # most requests that a worker takes together
//! workers = 0                 # 0: one a core
//! timeout_ms = 1000           # of requests that name none
//! ```
//!
//! A variable joins the path by two underscores: `STERLING_ENGINE__QUEUE=64`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};

use crate::engine;
use crate::error::{Error, Result};
use crate::snapshot::PlacementOptions;

/// The configuration of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where snapshots are published.
    pub store: PathBuf,
    /// The address to answer on.
    pub listen: SocketAddr,
    /// The one model to serve.
    pub model: Option<String>,
    /// Milliseconds between two looks at the store.
    pub refresh_ms: u64,
    /// True where the newest published version is activated by itself.
    pub follow: bool,
    /// Megabytes (2^20 bytes) of memory that loaded versions may take together; most of what is free at the start where none
    /// is given.
    pub memory_mb: Option<u64>,
    /// Where embedding tables lie.
    pub tables: PlacementOptions,
    /// Queue and workers.
    pub engine: engine::Options,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            store: "store".into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            model: None,
            refresh_ms: 1000,
            follow: true,
            memory_mb: None,
            tables: PlacementOptions::default(),
            engine: engine::Options::default(),
        }
    }
}

/// What the command line says; only what is given overrides.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Flags {
    /// As [`Config::store`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// As [`Config::listen`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// As [`Config::model`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// As [`Config::tables`].
    #[serde(skip_serializing_if = "TableFlags::is_empty")]
    pub tables: TableFlags,
}

/// What the command line says of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TableFlags {
    /// As [`PlacementOptions::plan`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PathBuf>,
    /// As [`PlacementOptions::topology`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology: Option<PathBuf>,
    /// As [`PlacementOptions::remote`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remote: Vec<String>,
}

impl TableFlags {
    fn is_empty(&self) -> bool {
        *self == TableFlags::default()
    }
}

impl Config {
    /// Puts the sources together.
    ///
    /// # Errors
    /// `Invalid` naming the key, what came, what was expected and where it stood; `NotFound` for a file that is not there.
    pub fn read(file: Option<&Path>, flags: &Flags) -> Result<Self> {
        let mut sources = Figment::from(Serialized::defaults(Config::default()));
        if let Some(path) = file {
            std::fs::metadata(path).map_err(|e| Error::io(path.display(), e))?;
            sources = sources.merge(Toml::file_exact(path));
        }
        // `STERLING_LOG` and `STERLING_KERNEL` are read elsewhere, before there is a configuration.
        let variables = Env::prefixed("STERLING_").ignore(&["log", "kernel", "bless"]).split("__");
        let config: Config = sources
            .merge(variables)
            .merge(Serialized::defaults(flags))
            .extract()
            .map_err(|e| Error::invalid(format!("configuration: {e}")))?;
        config.engine.check()?;
        if config.refresh_ms == 0 {
            return Err(Error::invalid("configuration: refresh_ms: got 0, expected at least 1"));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str) -> Result<Config> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sterling.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(Some(&path), &Flags { model: Some("flag".into()), ..Flags::default() })
    }

    #[test]
    fn a_flag_is_stronger_than_the_file_and_the_file_than_a_default() {
        let config = read("model = 'file'\n[engine]\nqueue = 7").unwrap();
        assert_eq!((config.model.as_deref(), config.engine.queue), (Some("flag"), 7));
        assert_eq!(config.engine.batch, engine::Options::default().batch);
    }

    #[test]
    fn wrong_keys_and_values_are_named() {
        for (text, expected) in [
            ("listen = 'here'", "listen"),
            ("stroe = 'x'", "stroe"),
            ("[engine]\nqueue = 0", "engine.queue: got 0"),
            ("[engine]\nqueue = 'many'", "queue"),
            ("refresh_ms = 0", "refresh_ms"),
            ("[engine", "TOML"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(Config::read(Some(Path::new("none.toml")), &Flags::default()).is_err());
    }
}
