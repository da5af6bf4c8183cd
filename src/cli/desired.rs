//! `sterling activate` and `sterling label`: change the desired state that all servers of a store follow.

use super::output::say;
use super::store::StoreArgs;
use sterling_core::error::{Error, Result};
use sterling_snapshot::Desired;

/// Arguments of `sterling activate`.
#[derive(Debug, clap::Args)]
pub(super) struct Activate {
    /// Name of the model
    model: String,
    /// Version that answers requests without a pinned version, or `newest` for the last published one; without it, the
    /// desired state is printed
    version: Option<Choice>,
    /// Change the state only if this version, or `newest`, is the current desired version
    #[arg(long, value_name = "VERSION", requires = "version")]
    expect: Option<Choice>,
    #[command(flatten)]
    store: StoreArgs,
}

/// Arguments of `sterling label`.
#[derive(Debug, clap::Args)]
pub(super) struct Label {
    /// Name of the model
    model: String,
    /// Name of the label
    label: String,
    /// Version that the label points to
    #[arg(required_unless_present = "remove", conflicts_with = "remove")]
    version: Option<u64>,
    /// Remove the label
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// A version, or the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice(Option<u64>);

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "newest" => Ok(Choice(None)),
            _ => text.parse().map(|version| Choice(Some(version))).map_err(|_| "expected a version or `newest`".into()),
        }
    }
}

impl Activate {
    pub(super) fn run(self) -> Result<()> {
        let model = &self.model;
        let (store, before) = self.store.desired_of(model)?;
        let Some(Choice(version)) = self.version else { return print_desired(model, &before) };
        if let Some(Choice(expected)) = self.expect.filter(|expected| expected.0 != before.version) {
            let expected = expected.map_or("the newest version".into(), |version| format!("version {version}"));
            let now = before.reported();
            return Err(Error::conflict(format!(
                "model `{model}`: expected {expected} as the desired state, which is {now}"
            )));
        }
        let now = match before.version == version {
            true => before,
            false => store.change_desired(model, &before, |desired_state| desired_state.answer(version))?,
        };
        print_desired(model, &now)
    }
}

impl Label {
    pub(super) fn run(self) -> Result<()> {
        let (model, label) = (&self.model, self.label);
        let (store, before) = self.store.desired_of(model)?;
        if self.remove && !before.labels.contains_key(&label) {
            return Err(Error::not_found(format!(
                "model `{model}`: no label `{label}`; the desired state is {}",
                before.reported()
            )));
        }
        let now = store.change_desired(model, &before, |desired_state| match self.version {
            Some(version) => drop(desired_state.labels.insert(label, version)),
            None => drop(desired_state.labels.remove(&label)),
        })?;
        print_desired(model, &now)
    }
}

/// Prints the desired state of a model.
pub(super) fn print_desired(model: &str, desired_state: &Desired) -> Result<()> {
    say(format_args!("{model}: {}, revision {}", desired_state.reported(), desired_state.revision))
}
