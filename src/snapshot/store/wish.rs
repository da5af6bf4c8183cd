//! What people wish of a model: one small file of the store, which all servers of it follow.
//!
//! Who changes it says what it was before: of two who change it at once one wins, and the other is told what is.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};

use super::{Store, check_name};
use crate::error::{Error, Kind, Result};

/// The file of a model's wish.
pub const WISH_FILE: &str = "wish.json";
/// The format of the file.
const FORMAT: u32 = 1;
/// Most labels of a model.
const LABELS_MAX: usize = 256;

/// Which version of a model is to answer, and which ones labels point to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Tells it from another one of the same revision.
    nonce: String,
}

impl Wish {
    /// What it says, for people.
    pub fn told(&self) -> String {
        let version = self.version.map_or("the newest version".into(), |version| format!("version {version}"));
        let labels: Vec<String> = self.labels.iter().map(|(label, version)| format!("`{label}` = {version}")).collect();
        match labels.is_empty() {
            true => version,
            false => format!("{version}, labels {}", labels.join(", ")),
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
        Ok(wish)
    }
}

impl Store {
    /// What is wished of a model; nothing, where nobody has said anything.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` with what is wrong with the file; `Io`, `Unavailable`.
    pub fn wish(&self, model: &str) -> Result<Wish> {
        self.parsed(model, self.shelf.read(model, WISH_FILE)).map(|(wish, _)| wish)
    }

    /// The same as it was at the last look.
    ///
    /// # Errors
    /// As [`Store::wish`].
    pub fn seen_wish(&self, model: &str) -> Result<Wish> {
        self.parsed(model, self.shelf.glance(model, WISH_FILE)).map(|(wish, _)| wish)
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
    /// `Conflict` with what it is where somebody else changed it meanwhile; `Invalid` for a label that cannot be one or beyond
    /// 256 of them; `NotFound` for a version that is not published; as [`Store::wish`].
    pub fn change_wish(&self, model: &str, before: &Wish, change: impl FnOnce(&mut Wish)) -> Result<Wish> {
        check_name("model name", model)?;
        let (now, bytes) = self.parsed(model, self.shelf.read(model, WISH_FILE))?;
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
        match self.shelf.swap(model, WISH_FILE, bytes.as_deref(), &text)? {
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
        let mut published = self.versions(model)?;
        published.extend(self.cut_versions(model)?);
        let labelled = wish.labels.iter().filter(|(label, version)| before.labels.get(*label) != Some(*version));
        let answering = wish.version.filter(|version| before.version != Some(*version));
        let mut new = answering.into_iter().chain(labelled.map(|(_, version)| *version));
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
