//! Configuration of `sterling serve`, and of `sterling route` ([`RouterConfig`]): defaults, then one TOML file, then `STERLING_*`
//! variables, then flags.
//!
//! `docs/reference/configuration.md` lists every key; the module `reference` generates it from the types here.
//!
//! A variable joins the path of its key by two underscores: `STERLING_ENGINE__QUEUE=64`. A variable that nearly names a key is an
//! error. Other variables that begin with `STERLING_` are ignored with a warning, because an orchestrator sets some: Kubernetes
//! does for a service called `sterling`.

#[cfg(test)]
mod reference;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http;
use crate::route;
use crate::route::PeerOptions;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::spelling::nearest;
use sterling_cuda::Choice;
use sterling_journal::StreamOptions;
use sterling_publish::compact;
use sterling_serving::engine;
use sterling_snapshot::{CacheOptions, PlacementOptions, check_name};

/// The configuration of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Store of published versions: a folder, or a bucket such as `s3://bucket/prefix`.
    #[schema(value_type = String)]
    pub store: PathBuf,
    /// Local copies of versions from a bucket.
    pub cache: CacheOptions,
    /// Folder of the update journals, one per model, or the servers of a NATS cluster (`nats://` or `tls://`,
    /// comma-separated). Without it the server accepts no updates.
    #[schema(value_type = Option<String>)]
    pub updates: Option<PathBuf>,
    /// Address to listen on, or a name and a port, such as `localhost:8080`.
    #[serde(deserialize_with = "http::read_address")]
    #[schema(value_type = String)]
    pub listen: SocketAddr,
    /// The only model to serve; without it, all models of the store.
    pub model: Option<String>,
    /// Shard to serve of sharded versions; without it, unsharded versions.
    pub shard: Option<u32>,
    /// Device of the forward pass: `cpu`, `cuda:N`, several GPUs that share the items (`cuda:0,cuda:1` or
    /// `cuda:all`), or `auto`: GPU 0 if it works, else the CPU.
    pub device: String,
    /// Interval between two polls of the store, in milliseconds.
    pub refresh_ms: u64,
    /// True if the server activates the desired version of the store, or else the newest one, automatically.
    pub follow: bool,
    /// Memory for all loaded versions, in MiB; 0: most of the memory that is free at startup.
    pub memory_mb: u64,
    /// Number of query embeddings recorded per version in memory, for `GET /v1/models/{model}/queries`; 0: none.
    pub recorded_queries: usize,
    /// Share of retrievals that run again exactly after their answer, to measure recall; 0: none.
    pub audit_share: f64,
    /// Access keys and audit log.
    pub access: http::AccessOptions,
    /// TLS in front of HTTP, in builds that have it (feature `tls`, part of `full`).
    pub tls: http::TlsOptions,
    /// Export of traces.
    pub traces: http::TraceOptions,
    /// Placement of embedding tables.
    pub tables: PlacementOptions,
    /// Requests for table rows to the servers of other hosts.
    pub peers: PeerOptions,
    /// Queue and workers.
    pub engine: engine::Options,
    /// Limits of connections, bodies and shutdown.
    pub http: http::Options,
    /// Automatic merges of updates into a new version.
    pub merge: compact::Options,
    /// Update streams on NATS JetStream.
    pub streams: StreamOptions,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            store: "store".into(),
            cache: CacheOptions::default(),
            updates: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            model: None,
            shard: None,
            device: "auto".into(),
            refresh_ms: 1000,
            follow: true,
            memory_mb: 0,
            recorded_queries: 0,
            audit_share: 0.001,
            access: http::AccessOptions::default(),
            tls: http::TlsOptions::default(),
            traces: http::TraceOptions::default(),
            tables: PlacementOptions::default(),
            peers: PeerOptions::default(),
            engine: engine::Options::default(),
            http: http::Options::default(),
            merge: compact::Options::default(),
            streams: StreamOptions::default(),
        }
    }
}

/// Command-line flags of a server; only flags that are present override.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Flags {
    /// As [`Config::store`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// As [`Config::cache`].
    #[serde(skip_serializing_if = "CacheFlags::is_empty")]
    pub cache: CacheFlags,
    /// As [`Config::updates`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updates: Option<PathBuf>,
    /// As [`Config::listen`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// As [`Config::model`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// As [`Config::shard`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<u32>,
    /// As [`Config::device`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// As [`Config::tables`].
    #[serde(skip_serializing_if = "TableFlags::is_empty")]
    pub tables: TableFlags,
}

/// Command-line flags of the cache of fetched versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheFlags {
    /// As [`CacheOptions::folder`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
}

impl CacheFlags {
    fn is_empty(&self) -> bool {
        *self == CacheFlags::default()
    }
}

/// Command-line flags of embedding tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TableFlags {
    /// As [`PlacementOptions::plan`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PathBuf>,
    /// As [`PlacementOptions::topology`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology: Option<PathBuf>,
    /// As [`PlacementOptions::host`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
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
    /// Combines defaults, file, environment variables and flags.
    ///
    /// # Errors
    /// `Invalid` with the key, the received and the expected value and the source; `NotFound` for a missing file.
    pub fn read(file: Option<&Path>, flags: &Flags) -> Result<Self> {
        let config: Config = combined(Config::default(), file, flags)?;
        config.engine.check()?;
        config.http.check()?;
        config.merge.check()?;
        config.streams.check().map_err(|e| e.within("configuration"))?;
        config.traces.check().map_err(|e| e.within("configuration"))?;
        config.device.parse::<Choice>().map_err(|e| e.within("configuration"))?;
        if config.listen.port() != 0 && config.access.admin_listen == Some(config.listen) {
            let what = format!("configuration: access.admin_listen: got {}, which is `listen` too", config.listen);
            return Err(Error::invalid(format!("{what}, expected a separate address")));
        }
        if let Some(model) = &config.model {
            check_name("model", model).map_err(|e| e.within("configuration"))?;
        }
        if config.refresh_ms == 0 {
            return Err(Error::invalid("configuration: refresh_ms: got 0, expected at least 1"));
        }
        if !(0.0..=1.0).contains(&config.audit_share) {
            return Err(Error::invalid(format!(
                "configuration: audit_share: got {}, expected 0 to 1",
                config.audit_share
            )));
        }
        if config.recorded_queries > limits::RECORDED_MAX {
            return Err(Error::invalid(format!(
                "configuration: recorded_queries: got {}, expected at most {}",
                config.recorded_queries,
                limits::RECORDED_MAX
            )));
        }
        Ok(config)
    }
}

/// Configuration of `sterling route`, from the same sources as [`Config`].
///
/// ```toml
/// listen = "127.0.0.1:8090"
/// [route]
/// servers = ["shards.search:8080"]  # HOST:PORT of the servers of all shards; a name stands for all of its addresses
/// refresh_ms = 1000                 # interval between two polls of the servers
/// min_replicas = 1                  # servers that each shard of a version needs before the version answers
/// min_coverage = 1.0                # default for the share of the items that an answer must cover
/// least_coverage = 0.0              # least `min_coverage` that a request may ask for
/// timeout_ms = 1000                 # default deadline of requests
/// requests = 1024                   # maximum number of concurrent requests
/// audit_share = 0.0                 # share of retrievals that run again exactly after their answers
/// key = ""                          # sent to the servers, if they require keys
/// tls = {ca = "ca.pem"}             # authorities of the servers' certificates; `certificate` and `key` are the router's own
/// [traces]                          # as for `serve`
/// [access]                          # as for `serve`; routers have no administrators' calls
/// [http]                            # as for `serve`
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Address to listen on, or a name and a port, such as `localhost:8080`.
    #[serde(deserialize_with = "http::read_address")]
    pub listen: SocketAddr,
    /// Servers and defaults of routed requests.
    pub route: route::Options,
    /// Access keys and audit log.
    pub access: http::AccessOptions,
    /// Limits of connections, bodies and shutdown.
    pub http: http::Options,
    /// Export of traces.
    pub traces: http::TraceOptions,
}

impl Default for RouterConfig {
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 8090));
        RouterConfig {
            listen,
            route: route::Options::default(),
            access: http::AccessOptions::default(),
            http: http::Options::default(),
            traces: http::TraceOptions::default(),
        }
    }
}

/// Command-line flags of a router.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RouterFlags {
    /// As [`RouterConfig::listen`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// As [`RouterConfig::route`].
    #[serde(skip_serializing_if = "ServerFlags::is_empty")]
    pub route: ServerFlags,
}

/// Command-line flags that name servers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ServerFlags {
    /// As [`route::Options::servers`].
    pub servers: Vec<String>,
}

impl ServerFlags {
    fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }
}

impl RouterConfig {
    /// Combines defaults, file, environment variables and flags.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn read(file: Option<&Path>, flags: &RouterFlags) -> Result<Self> {
        let config: RouterConfig = combined(RouterConfig::default(), file, flags)?;
        config.route.check().map_err(|e| e.within("route"))?;
        if let Some(address) = config.access.admin_listen {
            let what =
                format!("access.admin_listen: got {address}, expected none: routers answer no calls of administrators");
            return Err(Error::invalid(what));
        }
        config.http.check()?;
        config.traces.check().map_err(|e| e.within("configuration"))?;
        Ok(config)
    }
}

/// Merges defaults, a file, environment variables and flags; later sources override earlier ones.
fn combined<T: Serialize + DeserializeOwned>(defaults: T, file: Option<&Path>, flags: &impl Serialize) -> Result<T> {
    let reported = Value::serialize(&defaults).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    let mut sources = Figment::from(Serialized::defaults(defaults));
    if let Some(path) = file {
        std::fs::metadata(path).map_err(|e| Error::io(path.display(), e))?;
        sources = sources.merge(Renamed(Toml::file_exact(path)));
    }
    let variables = std::env::vars_os().map(|(name, text)| (name.to_string_lossy().into_owned(), text));
    let sources = sources.merge(parse_variables(&reported, variables)?).merge(Serialized::defaults(flags));
    sources.extract().map_err(|e| Error::invalid(format!("configuration: {}", shown(e))))
}

/// Renamed keys: name in the previous release, current name.
const RENAMED: [(&str, &str); 1] = [("engine.dear_ms", "engine.expensive_request_ms")];

/// Source that renames keys of the previous release, with a warning.
struct Renamed<P>(P);

impl<P: Provider> Provider for Renamed<P> {
    fn metadata(&self) -> Metadata {
        self.0.metadata()
    }

    fn data(&self) -> std::result::Result<Map<Profile, Dict>, figment::Error> {
        let mut data = self.0.data()?;
        for values in data.values_mut() {
            for (old, new) in RENAMED {
                let Some(value) = remove(values, old) else { continue };
                if remove(values, new).is_some() {
                    return Err(format!("key `{old}` was renamed to `{new}`: got both, expected `{new}` alone").into());
                }
                warn_renamed(old, new);
                insert(values, new, value);
            }
        }
        Ok(data)
    }
}

fn warn_renamed(old: &str, new: &str) {
    tracing::warn!("configuration: `{old}` was renamed to `{new}`; the old name is accepted in this release only");
}

const PREFIX: &str = "STERLING_";
/// Environment variables that other code reads, before the configuration exists.
const OTHERS: [&str; 4] = ["STERLING_LOG", "STERLING_KERNEL", "STERLING_KEY", "STERLING_BLESS"];

/// Environment variables as a source of the configuration.
struct Variables(Dict);

impl Provider for Variables {
    fn metadata(&self) -> Metadata {
        Metadata::named("the environment's variables")
    }

    fn data(&self) -> std::result::Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

/// Reads the configuration keys that environment variables set. A variable that nearly names a key is an error: with a misspelt
/// variable for access keys, a server would start unprotected.
fn parse_variables(defaults: &Value, variables: impl Iterator<Item = (String, OsString)>) -> Result<Variables> {
    let mut reported = Dict::new();
    let mut unknown = Vec::new();
    let known = keys(defaults);
    for (name, text) in variables {
        let Some(path) = name.strip_prefix(PREFIX).filter(|_| !OTHERS.contains(&name.as_str())) else { continue };
        let mut path = path.to_lowercase().replace("__", ".");
        if let Some((old, new)) = RENAMED.into_iter().find(|(old, _)| *old == path) {
            warn_renamed(old, new);
            path = new.to_owned();
        }
        let found = defaults.find_ref(&path).filter(|found| !matches!(found, Value::Dict(..)));
        let Some(found) = found else {
            check_misspelled(&name, &path, &known)?;
            unknown.push(name);
            continue;
        };
        let text = text.into_string().map_err(|text| {
            let text = text.to_string_lossy().into_owned();
            Error::invalid(format!("configuration: {name}: got `{text}`, expected UTF-8"))
        })?;
        match found {
            Value::Empty(..) if path == "shard" => {
                let shard: u32 = text.parse().map_err(|_| {
                    Error::invalid(format!("configuration: {name}: got `{text}`, expected the number of a shard"))
                })?;
                insert(&mut reported, &path, shard.into());
            }
            // A text key stays text even if its value looks like a number; a key without a default is text.
            Value::String(..) | Value::Empty(..) => insert(&mut reported, &path, text.into()),
            _ => {
                let value = text.parse().map_err(|e| Error::invalid(format!("configuration: {name}: {e}")))?;
                insert(&mut reported, &path, value);
            }
        }
    }
    if !unknown.is_empty() {
        unknown.sort_unstable();
        tracing::warn!("ignored environment variables that are not configuration keys: {}", unknown.join(", "));
    }
    Ok(Variables(reported))
}

/// Lists the keys of the configuration as dotted paths.
fn keys(defaults: &Value) -> Vec<String> {
    fn add(value: &Value, path: &str, keys: &mut Vec<String>) {
        let Value::Dict(_, section) = value else { return keys.push(path.into()) };
        for (name, value) in section {
            add(value, &if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, keys);
        }
    }
    let mut keys = Vec::new();
    add(defaults, "", &mut keys);
    keys
}

/// Rejects a variable that names an unknown key of a known section, a misspelled section, or a key whose underscores differ.
fn check_misspelled(name: &str, path: &str, known: &[String]) -> Result<()> {
    let variable = |key: &str| format!("{PREFIX}{}", key.replace('.', "__").to_uppercase());
    let plain = |key: &str| key.replace(['.', '_'], "");
    if let Some(key) = known.iter().find(|key| plain(key) == plain(path)) {
        return Err(Error::invalid(format!("configuration: {name}: unknown key, expected {}", variable(key))));
    }
    let Some((section, _)) = path.split_once('.').filter(|(_, rest)| !rest.is_empty()) else { return Ok(()) };
    let sections: BTreeSet<&str> = known.iter().filter_map(|key| Some(key.split_once('.')?.0)).collect();
    if let Some(near) = nearest(section, &Vec::from_iter(sections)).filter(|near| *near != section) {
        return Err(Error::invalid(format!("configuration: {name}: unknown section `{section}`, expected `{near}`")));
    }
    let of_section = known.iter().filter(|key| key.split_once('.').is_some_and(|(of, _)| of == section));
    let of_section: Vec<String> = of_section.map(|key| variable(key)).collect();
    if of_section.is_empty() {
        return Ok(());
    }
    let expected = of_section.join(", ");
    Err(Error::invalid(format!(
        "configuration: {name}: unknown key of section `{section}`, expected one of {expected}"
    )))
}

/// Inserts a value at a dotted path.
fn insert(to: &mut Dict, path: &str, value: Value) {
    match path.split_once('.') {
        None => drop(to.insert(path.into(), value)),
        Some((section, rest)) => {
            let section = to.entry(section.into()).or_insert_with(|| Dict::new().into());
            if let Value::Dict(_, section) = section {
                insert(section, rest, value);
            }
        }
    }
}

/// Removes the value at a dotted path.
fn remove(from: &mut Dict, path: &str) -> Option<Value> {
    match path.split_once('.') {
        None => from.remove(path),
        Some((section, rest)) => match from.get_mut(section) {
            Some(Value::Dict(_, section)) => remove(section, rest),
            _ => None,
        },
    }
}

/// Formats configuration errors: key, received value, expected value and source.
fn shown(error: figment::Error) -> String {
    let of_one = |e: figment::Error| {
        let key = if e.path.is_empty() { String::new() } else { format!("{}: ", e.path.join(".")) };
        let source = e.metadata.as_ref().map(|from| match &from.source {
            Some(source) => format!(" in {source}"),
            None => format!(" in {}", from.name),
        });
        format!("{key}{}{}", e.kind, source.unwrap_or_default())
    };
    error.into_iter().map(of_one).collect::<Vec<_>>().join("; ")
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
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let config = read("model = 'file'\n[engine]\nqueue = 7").unwrap();
        assert_eq!((config.model.as_deref(), config.engine.queue), (Some("flag"), 7));
        assert_eq!(config.engine.batch, engine::Options::default().batch);
    }

    #[test]
    fn invalid_keys_and_values_are_named() {
        for (text, expected) in [
            ("listen = 'here'", "got `here`, expected HOST:PORT"),
            ("[access]\nadmin_listen = 'here'", "got `here`, expected HOST:PORT"),
            ("stroe = 'x'", "stroe"),
            ("[engine]\nqueue = 0", "engine.queue: got 0"),
            ("[engine]\nqueue = 'many'", "queue"),
            ("refresh_ms = 0", "refresh_ms"),
            ("recorded_queries = 1025", "recorded_queries: got 1025, expected at most 1024"),
            ("audit_share = 2", "audit_share: got 2, expected 0 to 1"),
            ("[traces]\nshare = 2", "traces.share: got 2"),
            ("[traces]\ncollector = 'collector:4318'", "traces.collector: got `collector:4318`"),
            ("[merge]\nshare = -1", "merge.share: got -1, expected 0 to 10"),
            ("[merge]\ncores = 1.5", "merge.cores: got 1.5"),
            ("[merge]\nshare = nan", "merge.share: got NaN"),
            ("[streams]\nreplicas = 0", "streams.replicas: got 0, expected 1 to 5"),
            ("[streams]\nreplicas = 6", "streams.replicas: got 6"),
            ("[streams]\nmonitors = ['broker:8222']", "streams.monitors: got `broker:8222`"),
            ("[engine", "TOML"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(!read("[engine]\nqueue = 'many'").unwrap_err().to_string().contains("default"));
        assert!(Config::read(Some(Path::new("none.toml")), &Flags::default()).is_err());
    }
    fn with_variables(variables: &[(&str, &str)]) -> Result<Config> {
        let pairs = variables.iter().map(|(name, text)| (name.to_string(), text.into()));
        let sources = Figment::from(Serialized::defaults(Config::default()));
        let config = sources.merge(parse_variables(&Value::serialize(Config::default()).unwrap(), pairs)?).extract();
        config.map_err(|e| Error::invalid(shown(e)))
    }

    #[test]
    fn variables_set_the_keys_that_there_are() {
        let config = with_variables(&[
            ("STERLING_MODEL", "123"),
            ("STERLING_STORE", "true"),
            ("STERLING_LISTEN", "[::1]:90"),
            ("STERLING_REFRESH_MS", "5"),
            ("STERLING_MEMORY_MB", "512"),
            ("STERLING_ENGINE__QUEUE", "64"),
            ("STERLING_ENGINE__BATCH", "8"),
            ("STERLING_TABLES__PLAN", "1.5"),
            ("STERLING_TABLES__REMOTE", "[\"redis://a:1\", \"redis://b:2\"]"),
        ]);
        let config = config.unwrap();
        assert_eq!((config.model.as_deref(), config.store.to_str()), (Some("123"), Some("true")));
        assert_eq!((config.listen.to_string().as_str(), config.refresh_ms, config.memory_mb), ("[::1]:90", 5, 512));
        assert_eq!((config.engine.queue, config.engine.batch, config.engine.workers), (64, 8, 0));
        assert_eq!(config.tables.plan.as_deref(), Some(Path::new("1.5")));
        assert_eq!(config.tables.remote, ["redis://a:1", "redis://b:2"]);
        let error = with_variables(&[("STERLING_ENGINE__QUEUE", "many")]).unwrap_err().to_string();
        assert!(
            error.starts_with("engine.queue: ")
                && error.ends_with("the environment's variables")
                && error.contains("many")
                && !error.contains("default"),
            "{error}"
        );
    }

    #[test]
    fn keys_of_the_previous_release_get_their_names_of_today() {
        assert_eq!(read("[engine]\ndear_ms = 7").unwrap().engine.expensive_request_ms, 7);
        assert_eq!(read("[engine]\nexpensive_request_ms = 8").unwrap().engine.expensive_request_ms, 8);
        let config = with_variables(&[("STERLING_ENGINE__DEAR_MS", "9")]).unwrap();
        assert_eq!(config.engine.expensive_request_ms, 9);
        let both = read("[engine]\ndear_ms = 7\nexpensive_request_ms = 8").unwrap_err().to_string();
        assert!(both.contains("`engine.dear_ms` was renamed to `engine.expensive_request_ms`: got both"), "{both}");
        let invalid = read("[engine]\ndear_ms = 0").unwrap_err().to_string();
        assert!(invalid.contains("engine.expensive_request_ms: got 0"), "{invalid}");
    }

    #[test]
    fn variables_that_nearly_name_a_key_are_errors() {
        for (name, expected) in [
            (
                "STERLING_ACCESS__KEY",
                "STERLING_ACCESS__KEY: unknown key of section `access`, expected one of STERLING_ACCESS__",
            ),
            ("STERLING_ACCESS_KEYS", "STERLING_ACCESS_KEYS: unknown key, expected STERLING_ACCESS__KEYS"),
            ("STERLING_REFRESHMS", "expected STERLING_REFRESH_MS"),
            ("STERLING_REFRESH__MS", "expected STERLING_REFRESH_MS"),
            ("STERLING_HTTP__ACCESS__KEYS", "unknown key of section `http`"),
            ("STERLING_ACESS__KEYS", "STERLING_ACESS__KEYS: unknown section `acess`, expected `access`"),
        ] {
            let error = with_variables(&[(name, "x")]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        use std::os::unix::ffi::OsStringExt as _;
        let variables = [("STERLING_ACCESS__KEYS".to_owned(), OsString::from_vec(b"/keys-\xff".to_vec()))];
        let defaults = Value::serialize(Config::default()).unwrap();
        let error = parse_variables(&defaults, variables.into_iter()).map(drop).unwrap_err().to_string();
        assert!(error.contains("STERLING_ACCESS__KEYS: got `/keys-\u{fffd}`, expected UTF-8"), "{error}");
    }

    #[test]
    fn variables_of_others_change_nothing() {
        let config = with_variables(&[
            ("STERLING_SERVICE_HOST", "10.0.0.1"),
            ("STERLING_SERVICE_PORT", "8080"),
            ("STERLING_PORT", "tcp://10.0.0.1:8080"),
            ("STERLING_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
            ("STERLING_ENGINE", "x"),
            ("STERLING_ENGINE__", "x"),
            ("STERLING___QUEUE", "x"),
            ("STERLING_", "x"),
            ("STERLING_LOG", "debug"),
            // A key of routers, whose environment a server may share.
            ("STERLING_ROUTE__KEY", "x"),
            ("STORE", "elsewhere"),
        ]);
        assert_eq!(config.unwrap(), Config::default());
    }
}
