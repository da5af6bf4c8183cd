//! `sterling canary` and `sterling shadow`: route or copy traffic to other versions, on all servers of a store.

use super::desired::print_desired;
use super::store::StoreArgs;
use sterling_core::error::{Error, Result};
use sterling_rollout::{self as rollout, CanaryMargins, Sticky, Traffic};
use sterling_snapshot::check_name;

/// Arguments of `sterling canary`.
#[derive(Debug, clap::Args)]
pub(super) struct Canary {
    #[command(flatten)]
    part: Part,
    /// Request key: user, header:NAME, feature:NAME or request
    #[arg(long, value_name = "KEY", default_value = "user")]
    sticky: Sticky,
    /// Disable automatic rollback
    #[arg(long)]
    no_rollback: bool,
    /// Tolerated increase of the share of failed requests
    #[arg(long, value_name = "SHARE", default_value_t = CanaryMargins::default().errors)]
    errors: f64,
    /// Tolerated latency, as a multiple of the active version's
    #[arg(long, value_name = "TIMES", default_value_t = CanaryMargins::default().latency)]
    latency: f64,
    /// Tolerated loss of audited recall
    #[arg(long, value_name = "SHARE", default_value_t = CanaryMargins::default().recall)]
    recall: f64,
    /// Evaluation window in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    window: u64,
}

/// Arguments of `sterling shadow`.
#[derive(Debug, clap::Args)]
pub(super) struct Shadow {
    #[command(flatten)]
    part: Part,
    /// Maximum number of copies per second and server or router
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    per_second: f64,
}

/// Version that takes part in a rollout as canary or shadow, and its fraction of the requests.
#[derive(Debug, clap::Args)]
struct Part {
    /// Name of the model
    model: String,
    /// Version, or label of the store; without it, the desired state is printed
    version: Option<Chosen>,
    /// Share of the requests that pin no version, 0 to 1
    #[arg(long, requires = "version")]
    share: Option<f64>,
    /// End this canary or shadow
    #[arg(long, conflicts_with = "version")]
    remove: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// Version by number or by label.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Chosen {
    Version(u64),
    Label(String),
}

impl std::str::FromStr for Chosen {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            Ok(version) => Ok(Chosen::Version(version)),
            Err(_) => check_name("label", text).map(|()| Chosen::Label(text.to_owned())).map_err(|e| e.to_string()),
        }
    }
}

impl Part {
    /// Prints the desired traffic, or changes it: `change` receives the version, the label and the share, or `None` to remove the
    /// canary or shadow.
    fn run(self, change: impl FnOnce(&mut Traffic, Option<(Option<u64>, Option<String>, f64)>)) -> Result<()> {
        let model = &self.model;
        let (store, before) = self.store.desired_of(model)?;
        let chosen = match (self.version, self.share, self.remove) {
            (None, _, false) => return print_desired(model, &before),
            (None, _, true) => None,
            (Some(_), None, _) => return Err(Error::invalid("expected --share, 0 to 1")),
            (Some(Chosen::Version(version)), Some(share), _) => Some((Some(version), None, share)),
            (Some(Chosen::Label(label)), Some(share), _) => Some((None, Some(label), share)),
        };
        let now = store.change_desired(model, &before, |desired_state| change(&mut desired_state.traffic, chosen))?;
        print_desired(model, &now)
    }
}

impl Canary {
    pub(super) fn run(self) -> Result<()> {
        let Canary { part, sticky, no_rollback, errors, latency, recall, window } = self;
        part.run(|traffic, chosen| {
            traffic.canary = chosen.map(|(version, label, share)| rollout::Canary {
                version,
                label,
                share,
                sticky,
                automatic: !no_rollback,
                margins: CanaryMargins { errors, latency, recall },
                window_seconds: window,
                stopped: None,
            });
        })
    }
}

impl Shadow {
    pub(super) fn run(self) -> Result<()> {
        let Shadow { part, per_second } = self;
        part.run(|traffic, chosen| {
            traffic.shadow =
                chosen.map(|(version, label, share)| rollout::Shadow { version, label, share, per_second });
        })
    }
}
