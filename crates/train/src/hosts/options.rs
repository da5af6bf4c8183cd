//! Hosts of a run, as the command line lists them.

use std::time::Duration;

use sterling_core::error::{Error, Result};

/// Maximum number of hosts.
const HOSTS_MAX: usize = 64;

/// Hosts of a run.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// Address `NAME:PORT` of each host, in the same order on all of them.
    pub addresses: Vec<String>,
    /// Rank of this host. Host 0 writes checkpoints and the package.
    pub rank: usize,
    /// Secret key that all hosts share; none if any host may join.
    pub key: Option<String>,
    /// Time without a message after which another host counts as lost.
    pub timeout: Duration,
    /// Time within which all hosts have to connect.
    pub join_timeout: Duration,
}

impl Hosts {
    /// Default of [`Hosts::timeout`].
    pub const TIMEOUT: Duration = Duration::from_secs(30);
    /// Default of [`Hosts::join_timeout`].
    pub const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

    /// Creates hosts without a key and with default timeouts.
    pub fn new(addresses: Vec<String>, rank: usize) -> Self {
        Hosts { addresses, rank, key: None, timeout: Hosts::TIMEOUT, join_timeout: Hosts::JOIN_TIMEOUT }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let count = self.addresses.len();
        if !(1..=HOSTS_MAX).contains(&count) {
            return Err(Error::invalid(format!("hosts: got {count}, expected 1 to {HOSTS_MAX}")));
        }
        if self.rank >= count {
            return Err(Error::invalid(format!(
                "rank: got {}, expected less than the number of hosts, {count}",
                self.rank
            )));
        }
        for (n, address) in self.addresses.iter().enumerate() {
            let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
            if port.is_none_or(|port| port == 0) {
                return Err(Error::invalid(format!("hosts: got `{address}`, expected NAME:PORT")));
            }
            if self.addresses[..n].contains(address) {
                return Err(Error::invalid(format!("hosts: `{address}` is given twice, expected once")));
            }
        }
        if self.timeout.is_zero() || self.join_timeout.is_zero() {
            return Err(Error::invalid("timeout of hosts: got 0, expected more than 0 s"));
        }
        match &self.key {
            Some(key) if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(Error::invalid("key of hosts: expected printable ASCII characters without spaces"))
            }
            _ => Ok(()),
        }
    }
}
