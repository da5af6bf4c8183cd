//! `sterling calibrate`.

use std::path::PathBuf;

use super::inspect::calibration;
use super::output::say;
use super::store::StoreArgs;
use sterling_api::calibration_info;
use sterling_core::error::{Error, Result};
use sterling_publish::calibrate;

/// Arguments of `sterling calibrate`.
#[derive(Debug, clap::Args)]
pub(super) struct Calibrate {
    /// The model
    name: String,
    /// The version; the newest where it is not given
    #[arg(long)]
    version: Option<u64>,
    /// Queries like those that will be asked: vectors as .npy, or a `:retrieve` body a line; else items with some noise
    #[arg(long, value_name = "FILE")]
    queries: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArgs,
}

impl Calibrate {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let store = self.store.existing()?;
        let versions = store.versions(&self.name)?;
        let version = match self.version {
            Some(version) if versions.contains(&version) => version,
            None if !versions.is_empty() => versions[versions.len() - 1],
            _ => {
                return Err(Error::not_found(format!(
                    "model `{}`: got no such version, there are {versions:?}",
                    self.name
                )));
            }
        };
        let bar = indicatif::ProgressBar::new(1);
        let told = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let made = calibrate::again(&store, &self.name, version, self.queries.as_deref(), &told);
        bar.finish_and_clear();
        let made = made?;
        say(format_args!("calibrated {} version {version} again: calibration {}", self.name, made.digest))?;
        calibration(&calibration_info(&made.calibration)?)
    }
}
