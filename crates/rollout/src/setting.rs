//! Operators' rollout settings of a model: as stored in the store, and as read and returned over HTTP.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result, ShortNumber};
use sterling_core::logging::printable;

/// Longest name of a header or a feature, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// Maximum rate of shadow traffic, in requests per second.
const PER_SECOND_MAX: f64 = 10_000.0;
/// Shortest and longest window, in seconds.
const WINDOW_SECONDS: (u64, u64) = (60, 86_400);
/// Default header with the sticky key of a request.
const STICKY_HEADER: &str = "x-sterling-sticky";

/// Versions that take part in a model's unpinned requests besides the active one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Traffic {
    /// A version that answers a share of the requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
    /// A version to which a share of the requests is repeated; its answers are only compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<Shadow>,
}

/// Version that a setting refers to, by its number or by a label of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficTarget<'a> {
    /// The version with this number.
    Version(u64),
    /// The version to which this label points.
    Label(&'a str),
}

/// A version that answers a share of the unpinned requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// Version number, alternative to `label`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Label of the store that points to the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Share of keys, 0 to 1.
    pub share: f64,
    /// Key of a request: `user` (the header `x-sterling-sticky`, or else the features or the vector of the request),
    /// `header:NAME`, `feature:NAME` (both: or else the user), or `request` (the request id: every request is divided
    /// separately).
    #[serde(default)]
    #[schema(value_type = String, default = "user")]
    pub sticky: Sticky,
    /// True if the canary is rolled back automatically when it is worse than the active version: its share becomes 0.
    #[serde(default = "is_true")]
    pub automatic: bool,
    /// Margins by which it may be worse than the active version.
    #[serde(default)]
    pub margins: CanaryMargins,
    /// Length of the window of measurements, in seconds, 60 to 86,400.
    #[serde(default = "ten_minutes")]
    pub window_seconds: u64,
    /// Set if it was rolled back automatically; setting the canary again clears it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<Stopped>,
}

fn is_true() -> bool {
    true
}

fn ten_minutes() -> u64 {
    600
}

/// Margins by which a canary may be worse.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CanaryMargins {
    /// Largest increase of the share of failed requests.
    pub errors: f64,
    /// Largest factor on latency; differences below one millisecond are ignored.
    pub latency: f64,
    /// Largest decrease of the audited recall.
    pub recall: f64,
}

impl Default for CanaryMargins {
    fn default() -> Self {
        CanaryMargins { errors: 0.01, latency: 1.5, recall: 0.02 }
    }
}

/// Reason and time of a rollback.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stopped {
    /// Time, in UTC.
    pub time: String,
    /// Share of keys before the rollback.
    pub share: f64,
    /// Metric in which it was worse, with the numbers.
    pub reason: String,
}

/// Report of a canary that is worse, sent by a router or another client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Desired state of the canary. The report is ignored if the desired state has changed since.
    pub canary: Canary,
    /// Explanation for operators.
    #[schema(min_length = 1, max_length = 4096)]
    pub reason: String,
}

/// A version to which a share of the requests is repeated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Shadow {
    /// Version number, alternative to `label`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Label of the store that points to the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Share of requests, 0 to 1.
    pub share: f64,
    /// Maximum rate in requests per second, per server or router.
    #[serde(default = "ten")]
    pub per_second: f64,
}

fn ten() -> f64 {
    10.0
}

/// Source of a request's sticky key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Sticky {
    /// The header `x-sterling-sticky`, or else the user of the request.
    #[default]
    User,
    /// The header with this name, in lower case, or else the user.
    Header(String),
    /// The feature with this name, or else the user.
    Feature(String),
    /// The request id.
    Request,
}

impl Sticky {
    /// Returns the header with the key, in lower case, if a header may contain it.
    pub fn header(&self) -> Option<&str> {
        match self {
            Sticky::User => Some(STICKY_HEADER),
            Sticky::Header(name) => Some(name),
            Sticky::Feature(_) | Sticky::Request => None,
        }
    }
}

impl std::str::FromStr for Sticky {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let is_token = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
        let is_name = |name: &str| !name.is_empty() && name.len() <= NAME_BYTES_MAX;
        match text.split_once(':') {
            None if text == "user" => Ok(Sticky::User),
            None if text == "request" => Ok(Sticky::Request),
            Some(("header", name)) if is_name(name) && is_token(name) => Ok(Sticky::Header(name.to_ascii_lowercase())),
            Some(("feature", name)) if is_name(name) => Ok(Sticky::Feature(name.to_owned())),
            _ => Err(Error::invalid(format!(
                "sticky: got `{}`, expected `user`, `request`, `header:NAME` or `feature:NAME`, names of 1 to {NAME_BYTES_MAX} bytes",
                &text[..text.floor_char_boundary(NAME_BYTES_MAX)]
            ))),
        }
    }
}

impl TryFrom<String> for Sticky {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl fmt::Display for Sticky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sticky::User => f.write_str("user"),
            Sticky::Header(name) => write!(f, "header:{name}"),
            Sticky::Feature(name) => write!(f, "feature:{name}"),
            Sticky::Request => f.write_str("request"),
        }
    }
}

impl From<Sticky> for String {
    fn from(sticky: Sticky) -> Self {
        sticky.to_string()
    }
}

fn target<'a>(what: &str, version: Option<u64>, label: Option<&'a str>) -> Result<TrafficTarget<'a>> {
    match (version, label) {
        (Some(version), None) => Ok(TrafficTarget::Version(version)),
        (None, Some(label)) => Ok(TrafficTarget::Label(label)),
        (None, None) => Err(Error::invalid(format!("{what}: got no version, expected `version` or `label`"))),
        (Some(_), Some(_)) => Err(Error::invalid(format!("{what}: got `version` and `label`, expected one of them"))),
    }
}

fn check_range(what: &str, value: f64, (least, most): (f64, f64)) -> Result<()> {
    match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{what}: got {}, expected {least} to {most}", ShortNumber(value)))),
    }
}

impl fmt::Display for TrafficTarget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrafficTarget::Version(version) => write!(f, "version {version}"),
            TrafficTarget::Label(label) => write!(f, "label `{label}`"),
        }
    }
}

impl Canary {
    /// Returns the version that the setting refers to.
    ///
    /// # Errors
    /// `Invalid` unless exactly one of number and label is set.
    pub fn target(&self) -> Result<TrafficTarget<'_>> {
        target("canary", self.version, self.label.as_deref())
    }

    /// Returns the length of the measurement window.
    pub fn window(&self) -> Duration {
        Duration::from_secs(self.window_seconds)
    }

    fn check(&self) -> Result<()> {
        self.target()?;
        check_range("canary.share", self.share, (0.0, 1.0))?;
        check_range("canary.margins.errors", self.margins.errors, (0.0, 1.0))?;
        check_range("canary.margins.latency", self.margins.latency, (1.0, 100.0))?;
        check_range("canary.margins.recall", self.margins.recall, (0.0, 1.0))?;
        let (least, most) = WINDOW_SECONDS;
        check_range("canary.window_seconds", self.window_seconds as f64, (least as f64, most as f64))
    }
}

impl Shadow {
    /// Returns the version that the setting refers to.
    ///
    /// # Errors
    /// `Invalid` unless exactly one of number and label is set.
    pub fn target(&self) -> Result<TrafficTarget<'_>> {
        target("shadow", self.version, self.label.as_deref())
    }

    fn check(&self) -> Result<()> {
        self.target()?;
        check_range("shadow.share", self.share, (0.0, 1.0))?;
        check_range("shadow.per_second", self.per_second, (0.001, PER_SECOND_MAX))
    }
}

impl Traffic {
    /// Validates the setting.
    ///
    /// # Errors
    /// `Invalid` with the field, its value and the expected range.
    pub fn check(&self) -> Result<()> {
        self.canary.as_ref().map_or(Ok(()), Canary::check)?;
        self.shadow.as_ref().map_or(Ok(()), Shadow::check)
    }

    /// Returns whether neither a canary nor a shadow is set.
    pub fn is_empty(&self) -> bool {
        self.canary.is_none() && self.shadow.is_none()
    }

    /// Returns the versions that the setting refers to, each with its role.
    pub fn targets(&self) -> impl Iterator<Item = (&'static str, TrafficTarget<'_>)> {
        let canary = self.canary.as_ref().and_then(|canary| Some(("canary", canary.target().ok()?)));
        canary.into_iter().chain(self.shadow.as_ref().and_then(|shadow| Some(("shadow", shadow.target().ok()?))))
    }

    /// Describes the setting for operators.
    pub fn reported(&self) -> Vec<String> {
        let canary = self.canary.as_ref().and_then(|canary| {
            let (of, share) = (canary.target().ok()?, canary.share * 100.0);
            let why = canary
                .stopped
                .as_ref()
                .map(|stopped| format!(" (rolled back at {}: {})", stopped.time, printable(&stopped.reason)));
            Some(format!("canary {of} with {share} % by {}{}", canary.sticky, why.unwrap_or_default()))
        });
        let shadow = self.shadow.as_ref().and_then(|shadow| {
            let (of, share) = (shadow.target().ok()?, shadow.share * 100.0);
            Some(format!("shadow {of} with {share} %, at most {} per second", shadow.per_second))
        });
        canary.into_iter().chain(shadow).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str) -> std::result::Result<Traffic, String> {
        let traffic: Traffic = serde_json::from_str(text).map_err(|e| e.to_string())?;
        traffic.check().map_err(|e| e.to_string())?;
        Ok(traffic)
    }

    #[test]
    fn a_setting_is_read_as_it_was_written() {
        let text = r#"{"canary": {"version": 8, "share": 0.05}, "shadow": {"label": "next", "share": 1}}"#;
        let traffic = read(text).unwrap();
        let canary = traffic.canary.as_ref().unwrap();
        assert_eq!(
            (canary.target().unwrap(), canary.sticky.header()),
            (TrafficTarget::Version(8), Some("x-sterling-sticky"))
        );
        assert!(canary.automatic && canary.margins == CanaryMargins::default() && canary.window_seconds == 600);
        assert_eq!(traffic.shadow.as_ref().unwrap().target().unwrap(), TrafficTarget::Label("next"));
        assert_eq!(read(&serde_json::to_string(&traffic).unwrap()).unwrap(), traffic);
        assert_eq!(
            traffic.reported(),
            ["canary version 8 with 5 % by user", "shadow label `next` with 100 %, at most 10 per second"]
        );
        assert!(read("{}").unwrap().is_empty());
        for (text, expected) in [
            ("header:X-User-Id", Sticky::Header("x-user-id".into())),
            ("feature:user id", Sticky::Feature("user id".into())),
            ("feature:a:b", Sticky::Feature("a:b".into())),
            ("request", Sticky::Request),
        ] {
            assert_eq!(text.parse::<Sticky>().unwrap(), expected);
        }
    }

    #[test]
    fn invalid_settings_are_rejected_by_field() {
        let canary = |fields: &str| format!("{{\"canary\": {{\"version\": 8, \"share\": 0.5, {fields}}}}}");
        let shadow = |fields: &str| format!("{{\"shadow\": {{\"version\": 8, {fields}}}}}");
        let long = "x".repeat(300);
        for (text, expected) in [
            ("{\"canary\": {\"share\": 0.5}}".into(), "got no version"),
            ("{\"canary\": {\"version\": 8}}".into(), "missing field `share`"),
            ("{\"canary\": {\"version\": -8, \"share\": 1}}".into(), "-8"),
            ("{\"canary\": {\"version\": 8, \"share\": 1.01}}".into(), "canary.share: got 1.01, expected 0 to 1"),
            ("{\"canary\": {\"version\": 8, \"share\": -0.1}}".into(), "canary.share: got -0.1"),
            ("{\"canary\": {\"version\": 8, \"share\": \"1\"}}".into(), "expected f64"),
            ("{\"canary\": []}".into(), "expected struct Canary"),
            ("{\"canaries\": {}}".into(), "unknown field `canaries`"),
            (canary("\"label\": \"next\""), "got `version` and `label`"),
            (canary("\"weight\": 1"), "unknown field `weight`"),
            (canary("\"sticky\": \"cookie\""), "sticky: got `cookie`"),
            (canary("\"sticky\": \"header:\""), "sticky: got `header:`"),
            (canary("\"sticky\": \"header:a b\""), "sticky: got `header:a b`"),
            (canary("\"sticky\": \"feature:\""), "sticky: got `feature:`"),
            (canary(&format!("\"sticky\": \"header:{long}\"")), "names of 1 to 256 bytes"),
            (canary("\"sticky\": \"User\""), "sticky: got `User`"),
            (canary("\"margins\": {\"errors\": 2}"), "canary.margins.errors: got 2"),
            (canary("\"margins\": {\"latency\": 0.5}"), "canary.margins.latency: got 0.5, expected 1 to 100"),
            (canary("\"margins\": {\"recall\": -1}"), "canary.margins.recall: got -1"),
            (canary("\"margins\": {\"p99\": 2}"), "unknown field `p99`"),
            (canary("\"window_seconds\": 59"), "canary.window_seconds: got 59, expected 60 to 86400"),
            (canary("\"window_seconds\": 1.5"), "1.5"),
            (canary("\"automatic\": 1"), "expected a boolean"),
            (shadow("\"share\": 2"), "shadow.share: got 2"),
            (shadow("\"share\": 1, \"per_second\": 0"), "shadow.per_second: got 0"),
            (shadow("\"share\": 1, \"per_second\": 1e9"), "shadow.per_second: got 1000000000"),
            (shadow("\"share\": 1, \"sticky\": \"user\""), "unknown field `sticky`"),
        ] {
            let why = read(&text).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
