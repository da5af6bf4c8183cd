//! The machines that can hold tables: hosts with DRAM, their GPUs, a remote cluster, and their network.
//!
//! A topology is read from TOML (grammar in `docs/reference/planner.md`), or detected on the current machine. Each constant is a
//! measurable quantity with its unit last: `_gib` is 2^30 bytes, `_gb_s` is 10^9 bytes per second, which is one byte per
//! nanosecond.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use sterling_core::error::{Error, Result};
use sterling_core::limits::names_server;
#[cfg(feature = "cuda")]
use sterling_cuda::Device;
use sterling_kernels::memory::installed_bytes;

/// Maximum number of hosts.
pub const HOSTS_MAX: usize = 1024;
/// Maximum number of GPUs.
pub const GPUS_MAX: usize = 4096;
/// Maximum number of servers of a host.
const SERVERS_MAX: usize = 256;
pub(super) const GIB: f64 = (1u64 << 30) as f64;

/// A host and its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name, unique among all devices.
    pub name: String,
    /// Memory.
    pub dram_gib: f64,
    /// Memory that tables must leave free: system, item index, towers, and a second version during a version switch.
    #[serde(default)]
    pub reserved_gib: f64,
    /// Read bandwidth of row bytes with all cores together.
    pub bandwidth_gb_s: f64,
    /// Cost per row beyond its bytes, with all cores in use.
    pub row_ns: f64,
    /// Cost per lookup call beyond its rows.
    pub call_us: f64,
    /// Servers as `HOST:PORT`, which other hosts' servers request rows from; several servers are replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
}

/// A GPU and its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name, unique among all devices.
    pub name: String,
    /// Name of the GPU's host.
    pub host: String,
    /// Memory.
    pub hbm_gib: f64,
    /// Memory that tables must leave free.
    #[serde(default)]
    pub reserved_gib: f64,
    /// Read bandwidth of row bytes.
    pub bandwidth_gb_s: f64,
    /// Cost per row beyond its bytes.
    pub row_ns: f64,
    /// Cost per lookup call (a kernel launch) beyond its rows.
    pub call_us: f64,
    /// Bandwidth of the link to its host.
    pub link_gb_s: f64,
    /// Latency of the link, paid once per batch by a device that uses it.
    pub link_us: f64,
}

/// A Redis or Valkey Cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// Name, unique among all devices.
    pub name: String,
    /// Number of nodes that hold rows, without replicas.
    pub nodes: u32,
    /// Memory for rows per node.
    pub node_gib: f64,
    /// Bytes that a node stores per byte of rows.
    #[serde(default = "one")]
    pub overhead: f64,
    /// Round trip, paid once per batch by a host that reads the cluster.
    pub round_trip_us: f64,
    /// Rows per second that one node answers.
    pub rows_per_s: f64,
    /// Send bandwidth of one node.
    pub bandwidth_gb_s: f64,
}

/// Network between the hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bandwidth of one host, per direction.
    pub bandwidth_gb_s: f64,
    /// Round trip to a server of another host, paid once per batch by a device that requests rows of others or serves theirs.
    pub latency_us: f64,
}

fn one() -> f64 {
    1.0
}

/// All machines that can hold tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// At least one host; each serves its own requests.
    pub hosts: Vec<Host>,
    /// GPUs; each names its host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// At most one remote cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<Remote>,
    /// Required with several hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
}

impl Topology {
    /// Parses a topology.
    ///
    /// ```
    /// use sterling_embedding::planner::topology::Topology;
    /// let text = "[[hosts]]\nname = 'h'\ndram_gib = 64\nbandwidth_gb_s = 20\nrow_ns = 15\ncall_us = 1\n";
    /// assert_eq!(Topology::parse(text).unwrap().hosts[0].dram_gib, 64.0);
    /// ```
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`], naming the line, or the device and the field.
    pub fn parse(text: &str) -> Result<Topology> {
        let topology: Topology = parse_toml(text)?;
        topology.validate()?;
        Ok(topology)
    }

    /// Returns text that [`Topology::parse`] accepts.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Internal`] if serialization fails.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::internal(format!("cannot write the topology as TOML: {e}")))
    }

    /// Validates every number and every name.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Invalid`], naming the device, the field, the value and the expected range.
    pub fn validate(&self) -> Result<()> {
        if self.hosts.is_empty() || self.hosts.len() > HOSTS_MAX {
            return Err(Error::invalid(format!("{} hosts, expected 1 to {HOSTS_MAX}", self.hosts.len())));
        }
        if self.gpus.len() > GPUS_MAX {
            return Err(Error::invalid(format!("{} gpus, expected at most {GPUS_MAX}", self.gpus.len())));
        }
        for host in &self.hosts {
            host.validate().map_err(|e| e.within(format!("host `{}`", host.name)))?;
        }
        for gpu in &self.gpus {
            gpu.validate().map_err(|e| e.within(format!("gpu `{}`", gpu.name)))?;
            if !self.hosts.iter().any(|h| h.name == gpu.host) {
                return Err(Error::invalid(format!("gpu `{}`: no host is named `{}`", gpu.name, gpu.host)));
            }
        }
        if let Some(remote) = &self.remote {
            remote.validate().map_err(|e| e.within(format!("remote `{}`", remote.name)))?;
        }
        match &self.network {
            Some(network) => network.validate().map_err(|e| e.within("network"))?,
            None if self.hosts.len() > 1 => {
                return Err(Error::invalid(format!(
                    "{} hosts without [network], expected this table",
                    self.hosts.len()
                )));
            }
            None => {}
        }
        let mut names = BTreeSet::new();
        for name in self.names() {
            if name.trim().is_empty() {
                return Err(Error::invalid("a device has an empty name"));
            }
            if !names.insert(name) {
                return Err(Error::invalid(format!("two devices are named `{name}`")));
            }
        }
        Ok(())
    }

    /// Returns the names of the devices: hosts, GPUs, the remote cluster.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let hosts = self.hosts.iter().map(|h| h.name.as_str());
        let gpus = self.gpus.iter().map(|g| g.name.as_str());
        hosts.chain(gpus).chain(self.remote.iter().map(|r| r.name.as_str()))
    }

    /// Returns the current machine as one host: its memory as reported by the system (or its container), and default
    /// constants, which [`super::calibrate`] can replace by measured values.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Unsupported`] if the system does not report its memory.
    pub fn detect() -> Result<Topology> {
        let total = installed_bytes()
            .ok_or_else(|| Error::unsupported("this system does not report its memory; pass a topology"))?;
        let dram_gib = (total as f64 / GIB * 100.0).floor() / 100.0;
        let reserved_gib = (dram_gib * 10.0).ceil() / 100.0;
        // Typical values of a current server core; `--calibrate` replaces them.
        let (name, servers) = ("host0".into(), Vec::new());
        let host = Host { name, dram_gib, reserved_gib, bandwidth_gb_s: 10.0, row_ns: 15.0, call_us: 1.0, servers };
        Ok(Topology { hosts: vec![host], gpus: Vec::new(), remote: None, network: None })
    }

    /// Adds GPUs to the first host: their memory as they report it, and default constants, which [`super::calibrate_gpu`]
    /// can replace by measured values.
    ///
    /// # Errors
    /// [`sterling_core::error::Kind::Unavailable`] if a GPU does not respond.
    #[cfg(feature = "cuda")]
    pub fn with_cards(mut self, cards: &[Device]) -> Result<Topology> {
        for card in cards {
            let (_, bytes) = card.memory()?;
            let hbm_gib = (bytes as f64 / GIB * 100.0).floor() / 100.0;
            self.gpus.push(Gpu {
                name: card.name(),
                host: self.hosts[0].name.clone(),
                hbm_gib,
                reserved_gib: (hbm_gib * 10.0).ceil() / 100.0,
                // Typical values of a current GPU; `--calibrate` replaces them.
                bandwidth_gb_s: 1500.0,
                row_ns: 0.01,
                call_us: 5.0,
                link_gb_s: 25.0,
                link_us: 10.0,
            });
        }
        Ok(self)
    }
}

impl Host {
    /// Returns the bytes that tables may occupy.
    pub fn capacity_bytes(&self) -> u64 {
        ((self.dram_gib - self.reserved_gib) * GIB) as u64
    }

    fn validate(&self) -> Result<()> {
        memory("dram_gib", self.dram_gib, self.reserved_gib)?;
        rate("bandwidth_gb_s", self.bandwidth_gb_s)?;
        duration("row_ns", self.row_ns)?;
        duration("call_us", self.call_us)?;
        if self.servers.len() > SERVERS_MAX {
            return Err(Error::invalid(format!("{} `servers`, expected at most {SERVERS_MAX}", self.servers.len())));
        }
        match self.servers.iter().find(|server| !names_server(server)) {
            Some(invalid) => Err(Error::invalid(format!("`servers` has `{invalid}`, expected HOST:PORT"))),
            None => Ok(()),
        }
    }
}

impl Gpu {
    /// Returns the bytes that tables may occupy.
    pub fn capacity_bytes(&self) -> u64 {
        ((self.hbm_gib - self.reserved_gib) * GIB) as u64
    }

    fn validate(&self) -> Result<()> {
        memory("hbm_gib", self.hbm_gib, self.reserved_gib)?;
        rate("bandwidth_gb_s", self.bandwidth_gb_s)?;
        rate("link_gb_s", self.link_gb_s)?;
        duration("row_ns", self.row_ns)?;
        duration("call_us", self.call_us)?;
        duration("link_us", self.link_us)
    }
}

impl Remote {
    /// Returns the bytes that all nodes together may store, overhead included.
    pub fn capacity_bytes(&self) -> u64 {
        (self.node_gib * f64::from(self.nodes) * GIB) as u64
    }

    fn validate(&self) -> Result<()> {
        if self.nodes == 0 || self.nodes > 1000 {
            return Err(Error::invalid(format!("`nodes` is {}, expected 1 to 1000", self.nodes)));
        }
        memory("node_gib", self.node_gib, 0.0)?;
        if !(1.0..=100.0).contains(&self.overhead) {
            return Err(Error::invalid(format!("`overhead` is {}, expected 1 to 100", self.overhead)));
        }
        duration("round_trip_us", self.round_trip_us)?;
        rate("bandwidth_gb_s", self.bandwidth_gb_s)?;
        rate("rows_per_s", self.rows_per_s)
    }
}

impl Network {
    fn validate(&self) -> Result<()> {
        rate("bandwidth_gb_s", self.bandwidth_gb_s)?;
        duration("latency_us", self.latency_us)
    }
}

fn memory(field: &str, gib: f64, reserved_gib: f64) -> Result<()> {
    if !(gib > 0.0 && gib <= 1e6) {
        return Err(Error::invalid(format!("`{field}` is {gib}, expected above 0 and at most 1000000")));
    }
    if !(reserved_gib >= 0.0 && reserved_gib < gib) {
        return Err(Error::invalid(format!(
            "`reserved_gib` is {reserved_gib}, expected 0 to less than `{field}`, {gib}"
        )));
    }
    Ok(())
}

fn rate(field: &str, value: f64) -> Result<()> {
    if value > 0.0 && value <= 1e15 {
        return Ok(());
    }
    Err(Error::invalid(format!("`{field}` is {value}, expected above 0")))
}

fn duration(field: &str, value: f64) -> Result<()> {
    if (0.0..=1e9).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("`{field}` is {value}, expected 0 to 1000000000")))
}

/// Parses TOML into `T`; an error names the line.
pub(super) fn parse_toml<T: DeserializeOwned>(text: &str) -> Result<T> {
    toml::from_str(text).map_err(|e| {
        let message = e.message().trim().replace('\n', ", ");
        match e.span() {
            Some(span) => {
                let line = 1 + text.as_bytes()[..span.start.min(text.len())].iter().filter(|b| **b == b'\n').count();
                Error::invalid(format!("line {line}: {message}")).at(span.start)
            }
            None => Error::invalid(message),
        }
    })
}
