//! Access control: checks keys, roles and rates of calls.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::keys::{ApiKey, ApiKeys};
use super::options::AccessOptions;
use super::record::{AuditLog, Change, LoggedCall};
use super::role::{DataScope, EntryPoint, Role};
use crate::http::answer::Rejection;
use crate::http::settled::Settled;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Longest accepted key, in bytes.
const SECRET_BYTES_MAX: usize = 512;

/// Requirements of a call.
#[derive(Clone, Copy, Debug)]
pub(in crate::http) struct Needs<'a> {
    pub(in crate::http) role: Role,
    pub(in crate::http) reach: DataScope,
    /// Model in the path of the call.
    pub(in crate::http) model: Option<&'a str>,
}

/// Identity behind a call.
#[derive(Clone, Debug)]
pub struct Caller(CallerIdentity);

#[derive(Clone, Debug)]
enum CallerIdentity {
    /// The server has no keys, so every caller may make every call.
    Anybody,
    /// Call that requires no key, made without one.
    Nobody,
    Key(Arc<ApiKey>),
}

impl Caller {
    /// Returns whether the caller may see this model.
    pub(in crate::http) fn may_see(&self, model: &str) -> bool {
        match &self.0 {
            CallerIdentity::Anybody => true,
            CallerIdentity::Nobody => false,
            CallerIdentity::Key(key) => key.is_for(model),
        }
    }

    /// Returns whether the caller may see all models.
    pub(in crate::http) fn may_see_all(&self) -> bool {
        match &self.0 {
            CallerIdentity::Anybody => true,
            CallerIdentity::Nobody => false,
            CallerIdentity::Key(key) => key.is_for_all(),
        }
    }

    /// Charges further requests of one call to the rate of the caller's key.
    pub(in crate::http) fn charge(&self, count: usize) {
        if let CallerIdentity::Key(key) = &self.0
            && let Some(meter) = &key.meter
        {
            meter.charge(count as u64);
        }
    }

    /// Returns whether the caller has the key of a router, which may name the client of each call.
    pub(in crate::http) fn is_router(&self) -> bool {
        match &self.0 {
            CallerIdentity::Anybody | CallerIdentity::Nobody => false,
            CallerIdentity::Key(key) => key.is_router,
        }
    }

    /// Returns the name of the caller's key.
    pub(in crate::http) fn name(&self) -> Option<&str> {
        match &self.0 {
            CallerIdentity::Anybody | CallerIdentity::Nobody => None,
            CallerIdentity::Key(key) => Some(&key.name),
        }
    }
}

/// Current keys of a server and the file they come from.
#[derive(Debug)]
struct LoadedKeys {
    path: PathBuf,
    keys: ArcSwap<ApiKeys>,
    text: Mutex<Settled<Vec<u8>>>,
    /// True if the file has changed and could not be loaded.
    is_stale: AtomicBool,
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::io(format!("keys: {}", path.display()), e))
}

/// Keys and audit log of a server.
#[derive(Debug, Default)]
pub struct AccessControl {
    kept: Option<LoadedKeys>,
    has_admin_door: bool,
    log: Arc<AuditLog>,
}

impl AccessControl {
    /// Reads the keys and opens the audit log.
    ///
    /// # Errors
    /// `Invalid` for invalid keys, `NotFound` or `Io` for files that cannot be opened.
    pub fn open(options: &AccessOptions) -> Result<Self> {
        let open = |path: &PathBuf| {
            let text = read(path)?;
            let keys = ApiKeys::parse(path, &text, &ApiKeys::default())?;
            tracing::info!(keys = keys.len(), "calls need a key");
            Ok::<_, Error>(LoadedKeys {
                path: path.clone(),
                keys: ArcSwap::from_pointee(keys),
                text: Mutex::new(Settled::new(text)),
                is_stale: AtomicBool::new(false),
            })
        };
        Ok(AccessControl {
            kept: options.keys.as_ref().map(open).transpose()?,
            has_admin_door: options.admin_listen.is_some(),
            log: Arc::new(AuditLog::open(options.audit_log.as_deref())?),
        })
    }

    /// Returns whether calls require a key.
    pub fn is_guarded(&self) -> bool {
        self.kept.is_some()
    }

    /// Reloads the keys if their file has changed. An unreadable or invalid file changes nothing.
    pub(in crate::http) fn reload(&self) {
        let Some(kept) = &self.kept else { return };
        let mut text = locked(&kept.text);
        let parse = |text: &Vec<u8>| ApiKeys::parse(&kept.path, text, &kept.keys.load());
        match text.look(read(&kept.path)).and_then(|text| text.map(parse).transpose()) {
            Ok(None) => {}
            Ok(Some(keys)) => {
                tracing::info!(keys = keys.len(), "reloaded the access keys");
                kept.keys.store(Arc::new(keys));
                kept.is_stale.store(false, Ordering::Relaxed);
                count("read");
            }
            Err(error) => {
                tracing::error!(%error, "access keys not reloaded; the previous ones stay valid");
                kept.is_stale.store(true, Ordering::Relaxed);
                count("failed");
            }
        }
    }

    /// Returns the warning that the file of keys could not be reloaded. The reason may quote a key that was pasted into the file, so
    /// the log alone has it.
    pub(in crate::http) fn warning(&self) -> Option<String> {
        let kept = self.kept.as_ref().filter(|kept| kept.is_stale.load(Ordering::Relaxed))?;
        Some(format!(
            "the access keys of {} were not reloaded, because the file is invalid or unreadable; the previous keys stay \
             valid, also deleted ones: the log has the reason",
            kept.path.file_name().unwrap_or_default().display()
        ))
    }

    /// Returns whether a call with this role is answered on this socket.
    pub(in crate::http) fn answers(&self, role: Role, door: EntryPoint) -> bool {
        role < Role::Admin || door == EntryPoint::Admin || !self.has_admin_door
    }

    /// Identifies the owner of a key without checking permissions.
    pub(in crate::http) fn caller(&self, secret: Option<&[u8]>) -> Caller {
        let Some(kept) = &self.kept else { return Caller(CallerIdentity::Anybody) };
        let key = secret.and_then(|secret| kept.keys.load().of(secret).cloned());
        Caller(key.map_or(CallerIdentity::Nobody, CallerIdentity::Key))
    }

    /// Returns the caller if it may make the call, without counting the call against a rate.
    ///
    /// # Errors
    /// 401 for an unknown or missing key, 403 for a key without permission for this call.
    pub(in crate::http) fn look(&self, needs: Needs<'_>, secret: Option<&[u8]>) -> Result<Caller, Rejection> {
        let Some(kept) = &self.kept else { return Ok(Caller(CallerIdentity::Anybody)) };
        let key = secret.and_then(|secret| kept.keys.load().of(secret).cloned());
        let key = match key {
            Some(key) => key,
            None if needs.role == Role::Open => return Ok(Caller(CallerIdentity::Nobody)),
            None => return Err(denied("no_key", Rejection::unauthorized())),
        };
        let name = &key.name;
        if key.role < needs.role {
            let (has, takes) = (key.role.name(), needs.role.name());
            let detail = format!("key `{name}` has the role `{has}`, this call needs `{takes}`");
            return Err(denied("role", Rejection::forbidden(detail)));
        }
        let is_for = match (needs.role, needs.reach, needs.model) {
            (Role::Open, ..) | (_, DataScope::Visible, _) => true,
            (_, DataScope::Model, Some(model)) => key.is_for(model),
            (_, DataScope::Model, None) | (_, DataScope::Server, _) => key.is_for_all(),
        };
        if !is_for {
            let what = needs.model.map_or("all models".to_owned(), |model| format!("model `{model}`"));
            return Err(denied("model", Rejection::forbidden(format!("key `{name}` is not for {what}"))));
        }
        Ok(Caller(CallerIdentity::Key(key)))
    }

    /// Admits a call, and counts it against the rate of its key.
    ///
    /// # Errors
    /// As [`AccessControl::look`]; 429 if the key exceeds its rate.
    pub(in crate::http) fn admit(&self, needs: Needs<'_>, secret: Option<&[u8]>) -> Result<Caller, Rejection> {
        let caller = self.look(needs, secret)?;
        if let CallerIdentity::Key(key) = &caller.0
            && needs.role > Role::Open
            && let Some(meter) = &key.meter
        {
            let late = |wait| {
                let rate = meter.rate().rate;
                if let Some(requests) = meter.reject() {
                    tracing::warn!(key = key.name, rate, requests, "requests rejected: the key exceeds its rate");
                }
                denied(
                    "rate",
                    Rejection::too_early(format!("key `{}` is limited to {rate} requests per second", key.name), wait),
                )
            };
            meter.take().map_err(late)?;
        }
        Ok(caller)
    }

    /// Starts the audit record of a call that changes something, or that was rejected for lack of permission.
    pub(in crate::http) fn change(&self, requested: LoggedCall) -> Change {
        Change::new(self.log.clone(), requested)
    }
}

fn denied(reason: &'static str, refusal: Rejection) -> Rejection {
    metrics::counter!("sterling_denied_total", "reason" => reason).increment(1);
    refusal
}

fn count(outcome: &'static str) {
    metrics::counter!("sterling_key_reloads_total", "outcome" => outcome).increment(1);
}

/// Returns the key of a request's headers, if there is exactly one.
pub(in crate::http) fn secret_in(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { secret_of(value.as_bytes()) }
}

/// Returns the key in the value of an `Authorization` header.
pub(in crate::http) fn secret_of(value: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = value.split_at_checked(7)?;
    let is_fit = !secret.is_empty() && secret.len() <= SECRET_BYTES_MAX;
    (is_fit && scheme.eq_ignore_ascii_case(b"bearer ")).then(|| secret.trim_ascii())
}
