//! What people wish of a model, which version answers, where labels point and where traffic goes: one small file of the store, which all
//! servers of it follow.
//!
//! Who changes it says what it was before: of two who change it at once one wins, and the other is told what is.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};

use super::{Store, check_model, check_name};
use crate::rollout::{Traffic, TrafficTarget};
use sterling_core::error::{Error, Kind, Result};

/// The file of a model's wish.
pub const WISH_FILE: &str = "wish.json";
/// The format of the file.
const FORMAT: u32 = 1;
/// Most labels of a model.
const LABELS_MAX: usize = 256;

/// Which version of a model is to answer, which ones labels point to, and which ones take part in its traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wish {
    /// The format of the file.
    format: u32,
    /// How often it was changed.
    pub revision: u64,
    /// The version that is to answer requests that pin none; the newest where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// The versions that labels point to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
    /// Where requests go that pin no version, beside the one that answers.
    #[serde(default, skip_serializing_if = "Traffic::is_empty")]
    pub traffic: Traffic,
    /// Tells it from another one of the same revision.
    nonce: String,
}

impl Wish {
    /// What it says, for people.
    pub fn told(&self) -> String {
        let version = self.version.map_or("the newest version".into(), |version| format!("version {version}"));
        let labels: Vec<String> = self.labels.iter().map(|(label, version)| format!("`{label}` = {version}")).collect();
        let labels = (!labels.is_empty()).then(|| format!("labels {}", labels.join(", ")));
        let all: Vec<String> = [version].into_iter().chain(labels).chain(self.traffic.told()).collect();
        all.join(", ")
    }

    /// Has a version answer, or the newest. A canary ends that is this version, or that would stand beside one that changes by itself.
    pub fn answer(&mut self, version: Option<u64>) {
        self.version = version;
        let canary = self.traffic.canary.as_ref().and_then(|canary| self.version_of(canary.target().ok()?));
        if version.is_none() || canary == version {
            self.traffic.canary = None;
        }
    }

    /// The version that is meant.
    pub fn version_of(&self, target: TrafficTarget<'_>) -> Option<u64> {
        match target {
            TrafficTarget::Version(version) => Some(version),
            TrafficTarget::Label(label) => self.labels.get(label).copied(),
        }
    }

    fn parse(place: &str, bytes: &[u8]) -> Result<Self> {
        let corrupt = |why: String| Error::corrupt(format!("{place}: {why}"));
        let wish: Wish = serde_json::from_slice(bytes).map_err(|e| corrupt(format!("not a wish: {e}")))?;
        if wish.format != FORMAT {
            return Err(Error::unsupported(format!("{place}: format {}, expected {FORMAT}", wish.format)));
        }
        if wish.labels.len() > LABELS_MAX {
            return Err(corrupt(format!("{} labels, expected at most {LABELS_MAX}", wish.labels.len())));
        }
        wish.labels.keys().try_for_each(|label| check_name("label", label)).map_err(|e| corrupt(e.to_string()))?;
        wish.traffic.check().map_err(|e| corrupt(e.to_string()))?;
        Ok(wish)
    }
}

impl Store {
    /// What is wished of a model; nothing, where nobody has said anything.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` with what is wrong with the file; `Io`, `Unavailable`.
    pub fn wish(&self, model: &str) -> Result<Wish> {
        check_model(model)?;
        self.parsed(model, self.shelf().read(model, WISH_FILE)).map(|(wish, _)| wish)
    }

    /// The same as it was at the last look.
    ///
    /// # Errors
    /// As [`Store::wish`].
    pub fn seen_wish(&self, model: &str) -> Result<Wish> {
        check_model(model)?;
        self.parsed(model, self.shelf().glance(model, WISH_FILE)).map(|(wish, _)| wish)
    }

    fn parsed(&self, model: &str, read: Result<Vec<u8>>) -> Result<(Wish, Option<Vec<u8>>)> {
        match read {
            Ok(bytes) => {
                let wish = Wish::parse(&format!("{}/{model}/{WISH_FILE}", self.name()), &bytes)?;
                Ok((wish, Some(bytes)))
            }
            Err(e) if e.kind() == Kind::NotFound => Ok((Wish::default(), None)),
            Err(e) => Err(e),
        }
    }

    /// Changes what is wished of a model where it still is what it was `before`; returns what it is now.
    ///
    /// # Errors
    /// `Conflict` with what it is where somebody else changed it meanwhile, or where traffic needs what would go; `Invalid` for a label that
    /// cannot be one or beyond 256 of them, and for traffic that cannot be; `NotFound` for a version that is not published or a label that
    /// is not there; as [`Store::wish`].
    pub fn change_wish(&self, model: &str, before: &Wish, change: impl FnOnce(&mut Wish)) -> Result<Wish> {
        check_name("model name", model)?;
        let (now, bytes) = self.parsed(model, self.shelf().read(model, WISH_FILE))?;
        let overtaken = |now: &Wish| {
            let told = now.told();
            Error::conflict(format!("model `{model}`: somebody else changed it meanwhile, to {told}; nothing was done"))
        };
        if now != *before {
            return Err(overtaken(&now));
        }
        let mut wish = now;
        change(&mut wish);
        self.check_wish(model, before, &wish)?;
        wish.format = FORMAT;
        wish.revision += 1;
        wish.nonce = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
        let text = serde_json::to_vec_pretty(&wish).map_err(|e| Error::internal(format!("wish: {e}")))?;
        match self.shelf().swap(model, WISH_FILE, bytes.as_deref(), &text)? {
            true => Ok(wish),
            false => Err(overtaken(&self.wish(model)?)),
        }
    }

    /// Refuses what is new in a wish and cannot be.
    fn check_wish(&self, model: &str, before: &Wish, wish: &Wish) -> Result<()> {
        wish.labels.keys().try_for_each(|label| check_name("label", label))?;
        if wish.labels.len() > LABELS_MAX {
            return Err(Error::invalid(format!("{} labels, expected at most {LABELS_MAX}", wish.labels.len())));
        }
        check_traffic(model, wish)?;
        let mut published = self.versions(model)?;
        published.extend(self.cut_versions(model)?);
        let labelled = wish.labels.iter().filter(|(label, version)| before.labels.get(*label) != Some(*version));
        let answering = wish.version.filter(|version| before.version != Some(*version));
        let targets =
            |of: &'_ Wish| of.traffic.targets().filter_map(|(_, target)| of.version_of(target)).collect::<Vec<_>>();
        let known = targets(before);
        let taking_part = targets(wish).into_iter().filter(|version| !known.contains(version));
        let mut new = answering.into_iter().chain(labelled.map(|(_, version)| *version)).chain(taking_part);
        match new.find(|version| !published.contains(version)) {
            Some(version) => {
                published.sort_unstable();
                published.dedup();
                let known = published.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
                let known = if known.is_empty() { "none".into() } else { known };
                let what = format!("version {version} of model `{model}`: not in {}; there are: {known}", self.name());
                Err(Error::not_found(what))
            }
            None => Ok(()),
        }
    }
}

/// Refuses traffic that cannot be beside what else is wished.
fn check_traffic(model: &str, wish: &Wish) -> Result<()> {
    wish.traffic.check()?;
    let missing = wish.traffic.targets().find(|(_, target)| wish.version_of(*target).is_none());
    if let Some((part, target)) = missing {
        let labels: Vec<String> = wish.labels.keys().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "none".into() } else { labels.join(", ") };
        let what =
            format!("model `{model}`: its {part} is {target}, which the store does not have; its labels are: {labels}");
        return Err(Error::not_found(what));
    }
    let Some(canary) = &wish.traffic.canary else { return Ok(()) };
    match (wish.version, wish.version_of(canary.target()?)) {
        (None, _) => Err(Error::conflict(format!(
            "model `{model}`: the newest version answers by itself, so that none would stay beside a canary; have one answer first: \
             `sterling activate {model} VERSION`"
        ))),
        (answering, canary) if answering == canary => {
            let version = canary.unwrap_or_default();
            Err(Error::conflict(format!(
                "model `{model}`: version {version} is the one that answers, expected another one as its canary"
            )))
        }
        _ => Ok(()),
    }
}
