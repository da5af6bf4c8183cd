//! File of access keys.
//!
//! ```toml
//! [[key]]
//! name = "shop"
//! sha256 = "6c3a...64 digits"   # hash of the key; the key itself is stored nowhere
//! role = "read"                 # read, write or admin
//! models = ["debian"]           # default: all models
//! rate = 200                    # requests per second; default: unlimited
//! burst = 400                   # requests at once; default: those of one second
//! router = true                 # key of a router, which may name the client of each call; default: false
//! ```

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use super::rate::{Meter, Rate};
use super::role::Role;
use sterling_core::error::{Error, Result};
use sterling_snapshot::check_name;

/// Maximum number of keys per file: each key adds some ten nanoseconds to every call.
const KEYS_MAX: usize = 1024;
/// Maximum size of a file, in bytes.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Prefix of generated keys, so that secret scanners recognize them.
const KEY_PREFIX: &str = "stk_";

/// The SHA-256 of a key.
type Digest = [u64; 4];

#[derive(Debug)]
pub(super) struct ApiKey {
    pub(super) name: String,
    pub(super) role: Role,
    /// True if calls may name the client that they are made for.
    pub(super) is_router: bool,
    models: Option<BTreeSet<String>>,
    digest: Digest,
    pub(super) meter: Option<Arc<Meter>>,
}

impl ApiKey {
    /// Returns whether the key permits this model.
    pub(super) fn is_for(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// Returns whether the key permits all models.
    pub(super) fn is_for_all(&self) -> bool {
        self.models.is_none()
    }
}

#[derive(Debug, Default)]
pub(super) struct ApiKeys(Vec<Arc<ApiKey>>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    key: Vec<KeyEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyEntry {
    name: String,
    sha256: String,
    role: Role,
    models: Option<BTreeSet<String>>,
    rate: Option<f64>,
    burst: Option<f64>,
    #[serde(default)]
    router: bool,
}

impl ApiKeys {
    /// Parses the text of a file. Keys of `before` with the same digest and rate pass on their rate state.
    ///
    /// # Errors
    /// `Invalid` with the file, the key and the problem.
    pub(super) fn parse(path: &Path, text: &[u8], before: &ApiKeys) -> Result<Self> {
        let invalid = |what: String| Error::invalid(format!("keys: {}: {what}", path.display()));
        if text.len() > FILE_BYTES_MAX {
            return Err(invalid(format!("{} bytes, expected at most {FILE_BYTES_MAX}", text.len())));
        }
        let text = std::str::from_utf8(text).map_err(|e| invalid(e.to_string()))?;
        // The full error message would quote the line, and the line may contain a key by mistake.
        let file: KeyFile = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(0, |span| text.get(..span.start).unwrap_or(text).matches('\n').count() + 1);
            invalid(format!("line {line}: {}", e.message()))
        })?;
        if file.key.len() > KEYS_MAX {
            return Err(invalid(format!("{} keys, expected at most {KEYS_MAX}", file.key.len())));
        }
        let mut names = BTreeSet::new();
        let mut digests = BTreeSet::new();
        let mut keys = Vec::with_capacity(file.key.len());
        for entry in file.key {
            let named = format!("key `{}`", entry.name);
            let key = entry.read(before).map_err(|e| invalid(format!("{named}: {e}")))?;
            if !names.insert(key.name.clone()) {
                let other = format!("to rotate a key, add it as `{}-2`", key.name);
                return Err(invalid(format!("{named}: the name occurs twice, expected unique names; {other}")));
            }
            if !digests.insert(key.digest) {
                return Err(invalid(format!("{named}: another entry has the same key, expected one entry per key")));
            }
            keys.push(Arc::new(key));
        }
        Ok(ApiKeys(keys))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the entry of a key. All entries are compared in constant time, so timing reveals nothing.
    pub(super) fn of(&self, secret: &[u8]) -> Option<&Arc<ApiKey>> {
        let came = digest(secret);
        let mut found = 0_u32;
        for (place, key) in (1..).zip(&self.0) {
            found.conditional_assign(&place, key.digest.ct_eq(&came));
        }
        self.0.get((found as usize).checked_sub(1)?)
    }
}

impl KeyEntry {
    fn read(self, before: &ApiKeys) -> Result<ApiKey> {
        check_name("name", &self.name)?;
        let digest = digest_of_hex(&self.sha256)
            .ok_or_else(|| Error::invalid("sha256: expected 64 hexadecimal digits, as `sterling key` prints"))?;
        for model in self.models.iter().flatten() {
            check_name("models", model)?;
        }
        let rate = match (self.rate, self.burst) {
            (None, None) => None,
            (Some(rate), burst) if (1e-3..=1e9).contains(&rate) => {
                let burst = burst.unwrap_or(rate.max(1.0));
                if !(1.0..=1e9).contains(&burst) {
                    return Err(Error::invalid(format!("burst: got {burst}, expected 1 to 1e9")));
                }
                Some(Rate { rate, burst })
            }
            (Some(rate), _) => return Err(Error::invalid(format!("rate: got {rate}, expected 0.001 to 1e9"))),
            (None, Some(_)) => return Err(Error::invalid("burst: set without `rate`, expected both")),
        };
        let same = before.0.iter().find(|key| key.digest == digest).and_then(|key| key.meter.clone());
        let meter = rate.map(|rate| same.filter(|m| m.rate() == rate).unwrap_or_else(|| Arc::new(Meter::new(rate))));
        let KeyEntry { name, role, models, router: is_router, .. } = self;
        Ok(ApiKey { name, role, is_router, models, digest, meter })
    }
}

fn digest(secret: &[u8]) -> Digest {
    let hash = Sha256::digest(secret);
    let mut words = hash.chunks_exact(8).map(|bytes| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)));
    std::array::from_fn(|_| words.next().unwrap_or_default())
}

fn digest_of_hex(text: &str) -> Option<Digest> {
    let is_hex = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let mut words = text.as_bytes().chunks(16).map(|digits| {
        std::str::from_utf8(digits).ok().and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or_default()
    });
    is_hex.then(|| std::array::from_fn(|_| words.next().unwrap_or_default()))
}

/// Generated key and its entry for a file of keys.
pub struct NewKey {
    /// Secret key, which only its user may know.
    pub secret: String,
    /// Lines for the file, without the key.
    pub entry: String,
}

impl NewKey {
    /// Marks the key as a router's.
    #[must_use]
    pub fn for_router(mut self) -> Self {
        self.entry.push_str("router = true\n");
        self
    }
}

/// Generates a key of 256 random bits, with a rate and burst in requests per second, if given.
///
/// # Errors
/// `Invalid` for an invalid name or rate; `Internal` if the system provides no random numbers.
pub fn new_key(name: &str, role: Role, models: &[String], rate: Option<f64>, burst: Option<f64>) -> Result<NewKey> {
    check_name("name", name)?;
    for model in models {
        check_name("model", model)?;
    }
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|e| Error::internal(format!("the system provides no random numbers: {e}")))?;
    let hex = |bytes: &mut dyn Iterator<Item = u8>| {
        bytes.fold(String::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    };
    let secret = format!("{KEY_PREFIX}{}", hex(&mut random.into_iter()));
    let hash = hex(&mut Sha256::digest(secret.as_bytes()).into_iter());
    let mut entry = format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\nrole = \"{}\"\n", role.name());
    if !models.is_empty() {
        let models = models.iter().map(|model| format!("\"{model}\"")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(entry, "models = [{models}]");
    }
    for (field, number) in [("rate", rate), ("burst", burst)] {
        if let Some(number) = number {
            let _ = writeln!(entry, "{field} = {number:?}");
        }
    }
    check_keys(Path::new("key"), entry.as_bytes())?;
    Ok(NewKey { secret, entry })
}

/// Rejects a text that servers would not accept as a file of keys.
///
/// # Errors
/// `Invalid` with the file, the key and the problem.
pub fn check_keys(path: &Path, text: &[u8]) -> Result<()> {
    ApiKeys::parse(path, text, &ApiKeys::default()).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(text: &str) -> Result<ApiKeys> {
        ApiKeys::parse(Path::new("keys.toml"), text.as_bytes(), &ApiKeys::default())
    }

    #[test]
    fn generated_keys_authenticate_and_no_others_do() {
        let made: Vec<NewKey> =
            ["a", "b", "c"].iter().map(|name| new_key(name, Role::Write, &["m".into()], None, None).unwrap()).collect();
        let keys = parse(&made.iter().map(|key| key.entry.as_str()).collect::<String>()).unwrap();
        for (key, name) in made.iter().zip(["a", "b", "c"]) {
            let known = keys.of(key.secret.as_bytes()).unwrap();
            assert_eq!((known.name.as_str(), known.role), (name, Role::Write));
            assert!(known.is_for("m") && !known.is_for("n") && !known.is_for_all());
            assert!(!key.entry.contains(&key.secret) && key.secret.len() == 68);
            for invalid in [&key.secret[1..], &key.secret[..67], &key.secret.to_uppercase(), "", "stk_"] {
                assert!(keys.of(invalid.as_bytes()).is_none());
            }
        }
        assert!(ApiKeys::default().of(made[0].secret.as_bytes()).is_none());
    }

    #[test]
    fn the_digest_is_that_of_sha_256() {
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest(b"abc"), digest_of_hex(abc).unwrap());
        assert_eq!(digest_of_hex(&abc.to_uppercase()), digest_of_hex(abc));
    }

    #[test]
    fn invalid_key_files_are_rejected_with_the_key_and_without_secrets() {
        let hash = "0".repeat(64);
        let entry = |rest: &str| format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\nrole = \"read\"\n{rest}\n");
        assert_eq!(parse("").unwrap().len(), 0);
        assert_eq!(parse(&entry("rate = 0.5\nburst = 7")).unwrap().len(), 1);
        assert!(!parse(&entry("")).unwrap().0[0].is_router && parse(&entry("router = true")).unwrap().0[0].is_router);
        let twice = format!("{}{}", entry(""), entry(""));
        let shared = format!("{}{}", entry(""), entry("").replace("\"a\"", "\"b\""));
        for (text, expected) in [
            (entry("rate = 0"), "key `a`: rate: got 0"),
            (entry("rate = nan"), "rate: got NaN"),
            (entry("rate = 5\nburst = 0.5"), "burst: got 0.5"),
            (entry("burst = 5"), "burst: set without `rate`"),
            (entry("models = [\"../x\"]"), "models"),
            (entry("until = 5"), "line 5: unknown field"),
            (entry("").replace("read", "root"), "line 4"),
            (entry("").replace("read", "open"), "line 4"),
            (entry("").replace("\"a\"", "\"a b\""), "name"),
            (entry("").replace(&hash, "stk_secret"), "key `a`: sha256: expected 64"),
            (entry("").replace(&hash, &"g".repeat(64)), "sha256"),
            (twice, "twice"),
            (shared, "key `b`: another entry has the same key"),
            ("stk_secret".into(), "line 1"),
            ("x".repeat(FILE_BYTES_MAX + 1), "bytes, expected at most"),
            ((0..=KEYS_MAX).map(|_| entry("")).collect(), "1025 keys"),
        ] {
            let error = parse(&text).expect_err(expected).to_string();
            assert!(error.starts_with("keys: keys.toml: ") && error.contains(expected), "{error}");
            assert!(!error.contains("stk_secret"), "{error}");
        }
    }

    #[test]
    fn counts_survive_a_reload_if_the_rate_stays() {
        let entry =
            |rate: u32| format!("[[key]]\nname = \"a\"\nsha256 = \"{:064}\"\nrole = \"read\"\nrate = {rate}\n", 7);
        let before = parse(&entry(5)).unwrap();
        let again = |rate| ApiKeys::parse(Path::new("k"), entry(rate).as_bytes(), &before).unwrap();
        let meter = |keys: &ApiKeys| keys.0[0].meter.clone().unwrap();
        assert!(Arc::ptr_eq(&meter(&before), &meter(&again(5))));
        assert!(!Arc::ptr_eq(&meter(&before), &meter(&again(6))));
    }
}
