//! `sterling calibrate`.

use std::path::PathBuf;

use super::inspect::calibration;
use super::output::say;
use super::store::{StoreArgs, check_model};
use sterling_core::error::{Error, Result};
use sterling_publish::calibrate;
use sterling_server::describe::calibration_info;

/// Arguments of `sterling calibrate`.
#[derive(Debug, clap::Args)]
pub(super) struct Calibrate {
    /// Name of the model
    name: String,
    /// Version; default: the newest
    #[arg(long)]
    version: Option<u64>,
    /// Representative queries: vectors as .npy, or one `:retrieve` body per line; default: items with noise
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
            wanted => {
                check_model(&store, &self.name)?;
                let wanted = wanted.map_or_else(String::new, |version| format!(" {version}"));
                return Err(Error::not_found(format!(
                    "model `{}` has no version{wanted}, its versions are {versions:?}",
                    self.name
                )));
            }
        };
        let bar = indicatif::ProgressBar::new(1);
        let reported = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let made = calibrate::again(&store, &self.name, version, self.queries.as_deref(), &reported);
        bar.finish_and_clear();
        let made = made?;
        say(format_args!("calibrated {} version {version} again: calibration {}", self.name, made.digest))?;
        calibration(&calibration_info(&made.calibration)?)
    }
}
