//! `sterling remote`.

use std::collections::BTreeSet;

use super::publish::connect;
use super::say;
use crate::embedding::tiers::remote::{TableState, TableVersion, delete, find};
use crate::error::{Error, Result};

/// Arguments of `sterling remote`.
#[derive(Debug, clap::Args)]
pub(super) struct Remote {
    /// A node of the cluster, such as redis://10.0.0.1:6379; several may be given
    #[arg(required = true)]
    nodes: Vec<String>,
    /// Remove the rows of one version of a model; servers that have it open see degraded rows from then on
    #[arg(long, value_name = "MODEL/VERSION")]
    delete: Option<String>,
}

impl Remote {
    pub(super) fn run(self) -> Result<()> {
        let cluster = connect(self.nodes)?;
        let tables = cluster.tables()?;
        let Some(asked) = self.delete else {
            say(format_args!("{:32} {:>7} {:>12} {:>9} {:>10} state", "table", "version", "rows", "row bytes", "MB"))?;
            for named in &tables {
                let Some(m) = find(&cluster, named)? else { continue };
                let state = match m.state {
                    TableState::Complete => "complete",
                    TableState::Loading => "loading",
                    TableState::Deleting => "deleting",
                };
                let megabytes = m.rows as f64 * m.row_bytes as f64 / 1e6;
                let (name, version) = (named.label(), named.version());
                say(format_args!(
                    "{name:32} {version:>7} {:>12} {:>9} {megabytes:>10.1} {state}",
                    m.rows, m.row_bytes
                ))?;
            }
            return Ok(());
        };
        let wrong = || Error::invalid(format!("--delete {asked}: expected MODEL/VERSION, such as debian/3"));
        let (model, version) = asked.rsplit_once('/').ok_or_else(wrong)?;
        let version: u64 = version.parse().map_err(|_| wrong())?;
        let of_version: Vec<&TableVersion> =
            tables.iter().filter(|t| t.model() == model && t.version() == version).collect();
        if of_version.is_empty() {
            let known: BTreeSet<String> = tables.iter().map(|t| format!("{}/{}", t.model(), t.version())).collect();
            return Err(Error::not_found(format!(
                "the cluster has no rows of {asked}; there are: {}",
                if known.is_empty() { "none".into() } else { Vec::from_iter(known).join(", ") }
            )));
        }
        for named in of_version {
            delete(&cluster, named)?;
            say(format_args!("deleted {} version {version}", named.label()))?;
        }
        Ok(())
    }
}
