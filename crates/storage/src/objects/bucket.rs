//! Buckets of S3, Google Cloud Storage and Azure, through the crate `object_store`.
//!
//! Credentials, region and endpoint come from the environment variables that each provider's tools use
//! (`docs/guide/versions.md`). Calls run on two threads of the bucket while the caller blocks. Retries of `object_store` are
//! disabled: this module retries calls that are safe to repeat, and signs each retry again. An interrupted read resumes
//! at the byte where it stopped; an interrupted upload resumes at the part that was not completed.

use std::collections::VecDeque;
use std::fs::File;
use std::future::Future;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use hyper::body::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{
    ClientConfigKey, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
    RetryConfig, UpdateVersion,
};
use tokio::time::sleep;

use super::health::back_off;
use super::strays::STRAY;
use super::transport::Transport;
use super::{Objects, Tag, WHOLE_BYTES_MAX, WriteCondition};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks::{self, Runtime};

/// Minimum part size of a multipart upload. Files up to this size are written by one request.
const PART_BYTES: u64 = 16 << 20;
/// Bytes that a request sends at a time, so that its progress is observable.
const STEP_BYTES: usize = 16 << 10;
/// Maximum number of parts of an object; S3 allows 10,000.
const PARTS_MAX: u64 = 9000;
/// Bytes that one read request covers.
const PIECE_BYTES: u64 = 8 << 20;
/// Concurrent range or part requests per object.
const TOGETHER: usize = 4;
/// Maximum number of objects of a store.
const OBJECTS_MAX: usize = 1 << 21;
/// Maximum number of retries of a call.
const REPEATS: u32 = 5;
/// Time after the first failure during which a call is retried: for small calls, and for calls that transfer megabytes.
const SMALL: Duration = Duration::from_secs(15);
const LARGE: Duration = Duration::from_secs(180);
/// Backoff: delay before the first retry, and maximum delay.
const WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Variable that allows a Google endpoint without TLS, like `AWS_ALLOW_HTTP` and `AZURE_ALLOW_HTTP` of the other providers.
const GOOGLE_ALLOW_HTTP: &str = "GOOGLE_ALLOW_HTTP";

/// Operations of `object_store` that a bucket needs.
trait Service: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Service for T {}

/// Bucket with the prefix of its store.
#[derive(Debug)]
struct Bucket {
    url: String,
    prefix: Key,
    store: Arc<dyn Service>,
    /// Number of objects with invalid keys that the last full listing skipped.
    strays: AtomicUsize,
    runtime: Runtime,
}

/// Opens the bucket of a URL: `s3://bucket/prefix`, `gs://bucket/prefix`, or `az://container/prefix` with its account in the
/// environment. Sends no request yet.
///
/// # Errors
/// `Invalid` with the part of the URL or the environment variable that is invalid.
pub fn open(url: &str) -> Result<Arc<dyn Objects>> {
    let invalid = |why: String| Error::invalid(format!("store {url}: {why}"));
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || url.contains(['?', '#']) {
        return Err(invalid("expected SCHEME://BUCKET/PREFIX, as in s3://models/search".into()));
    }
    let prefix = Key::parse(prefix).map_err(|e| invalid(e.to_string()))?;
    // The call fails if another part of the program has installed a TLS provider; that provider is `ring` as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let wrong = |e: object_store::Error| invalid(e.to_string());
    let check = |named: &str, is_setting: fn(&str) -> bool| check_environment(named, is_setting).map_err(invalid);
    let store: Arc<dyn Service> = match scheme {
        "s3" => {
            check("AWS_", |name| AmazonS3ConfigKey::from_str(name).is_ok())?;
            let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
            Arc::new(builder.with_http_connector(Transport).build().map_err(wrong)?)
        }
        "gs" => {
            check("GOOGLE_", |name| GoogleConfigKey::from_str(name).is_ok())?;
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
            // By default `object_store` would allow plain HTTP for any endpoint, because Google's metadata server has no TLS.
            let may = std::env::var(GOOGLE_ALLOW_HTTP).unwrap_or_else(|_| "false".into());
            let builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), may);
            Arc::new(builder.with_http_connector(Transport).build().map_err(wrong)?)
        }
        "az" | "abfs" | "abfss" => {
            check("AZURE_", |name| AzureConfigKey::from_str(name).is_ok())?;
            let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
            Arc::new(builder.with_http_connector(Transport).build().map_err(wrong)?)
        }
        _ => return Err(invalid(format!("`{scheme}`: expected s3, gs, az, abfs or abfss"))),
    };
    let runtime = tasks::BUCKET.runtime(|builder| builder.worker_threads(2).enable_all())?;
    Ok(Arc::new(Bucket { url: url.into(), prefix, store, strays: AtomicUsize::new(0), runtime }))
}

/// Rejects environment variables with unusable values: a secret that contains a line break, or an empty endpoint.
fn check_environment(named: &str, is_setting: fn(&str) -> bool) -> std::result::Result<(), String> {
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with(named)) else { continue };
        if !is_setting(&name.to_ascii_lowercase()) {
            continue;
        }
        let Some(value) = value.to_str() else { return Err(format!("{name}: expected UTF-8")) };
        let is_endpoint =
            ["ENDPOINT", "ENDPOINT_URL", "ENDPOINT_URL_S3", "BASE_URL"].iter().any(|end| name.ends_with(end));
        if is_endpoint && value.trim().is_empty() {
            return Err(format!("{name}: empty, expected a URL; unset it for the service's own address"));
        }
        // Account keys and certificates have several lines.
        let is_text = ["SERVICE_ACCOUNT_KEY", "CERTIFICATE"].iter().any(|end| name.ends_with(end));
        if !is_text && value.contains(char::is_control) {
            let is_inside = value.trim_end_matches(['\n', '\r']).contains(char::is_control);
            let what =
                if is_inside { "the value holds a control character" } else { "the value ends with a line break" };
            return Err(format!(
                "{name}: {what}, expected none (`echo` ends a secret with a line break, `printf %s` does not)"
            ));
        }
    }
    Ok(())
}

/// Returns true if a retry may succeed: unclassified errors of `object_store`, except status 501 and most client errors
/// (4xx).
fn is_transient(error: &object_store::Error) -> bool {
    let object_store::Error::Generic { .. } = error else { return false };
    let text = error.to_string();
    let is_callers = text.contains("status code: 4") || text.contains("status code: 501");
    !is_callers || ["RequestTimeout", "status code: 408", "status code: 429"].iter().any(|code| text.contains(code))
}

/// Retries an idempotent call while it fails with transient errors.
async fn repeated<T, F: Future<Output = object_store::Result<T>>>(
    most: Duration,
    mut call: impl FnMut() -> F,
) -> object_store::Result<T> {
    let mut patience = RetryBudget::new(most);
    loop {
        match call().await {
            Err(error) => patience.wait(error).await?,
            done => return done,
        }
    }
}

/// Retry budget of one call.
struct RetryBudget {
    most: Duration,
    first: Option<Instant>,
    failures: u32,
}

impl RetryBudget {
    fn new(most: Duration) -> Self {
        RetryBudget { most, first: None, failures: 0 }
    }

    /// Waits until the next retry, or returns the error if the budget is spent.
    async fn wait(&mut self, error: object_store::Error) -> object_store::Result<()> {
        self.failures += 1;
        let failing = self.first.get_or_insert_with(Instant::now).elapsed();
        if !is_transient(&error) || self.failures > REPEATS || failing > self.most {
            return Err(error);
        }
        tracing::debug!(%error, "call to the store failed, retrying");
        sleep(back_off(WAIT, self.failures)).await;
        Ok(())
    }
}

/// Translates the error code of a service's answer into a kind and an explanation.
fn explained(error: &object_store::Error) -> Option<(Kind, &'static str)> {
    let text = error.to_string();
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map_or("", |(code, _)| code);
    let lacks = Some((Kind::Io, "this caller lacks permission"));
    let reported = match code {
        "AccessDenied" | "AllAccessDisabled" | "AuthorizationPermissionMismatch" => return lacks,
        "RequestTimeTooSkewed" | "RequestExpired" => {
            "the clocks of this machine and of the bucket differ: set this machine's clock"
        }
        "SignatureDoesNotMatch" | "AuthenticationFailed" => {
            "the signature is wrong: the secret key does not belong to the access key, or a proxy changes requests"
        }
        "InvalidAccessKeyId" => "the bucket does not know the access key",
        "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" => "the session token is wrong or has expired",
        _ => {
            return match error {
                object_store::Error::PermissionDenied { .. } => lacks,
                object_store::Error::Unauthenticated { .. } => {
                    Some((Kind::Unavailable, "the bucket does not know this caller"))
                }
                _ => None,
            };
        }
    };
    Some((Kind::Unavailable, reported))
}

impl Bucket {
    fn key(&self, key: &str) -> Result<Key> {
        let complete = if self.prefix.as_ref().is_empty() { key.to_owned() } else { format!("{}/{key}", self.prefix) };
        Key::parse(complete.trim_end_matches('/')).map_err(|e| Error::invalid(format!("store {}: {e}", self.url)))
    }

    fn failed(&self, key: &str, error: object_store::Error) -> Error {
        let place = if key.is_empty() { self.url.clone() } else { format!("{}/{key}", self.url) };
        match &error {
            object_store::Error::NotFound { .. } => Error::not_found(format!("{place}: no such object")),
            object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. } => {
                Error::conflict(format!("{place}: another object exists there"))
            }
            _ => match explained(&error) {
                Some((kind, reported)) => Error::new(kind, format!("{place}: {reported}: {error}")),
                None => Error::unavailable(format!("{place}: {error}")),
            },
        }
    }

    /// Runs a call on the bucket's threads and waits for it.
    fn call<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        may_block();
        let (tell, reported) = sync_channel(1);
        // Sending fails if the thread of the caller has ended; the result is then dropped.
        self.runtime.spawn(async move { drop(tell.send(work.await)) });
        match reported.recv() {
            Ok(done) => done.map_err(|e| self.failed(key, e)),
            Err(_) => Err(Error::internal(format!("{}/{key}: the task of the call panicked", self.url))),
        }
    }

    /// Reports the number of objects with invalid keys; logs it when it changes.
    fn report_strays(&self, strays: usize) {
        metrics::gauge!("sterling_store_stray_objects").set(strays as f64);
        if self.strays.swap(strays, Ordering::Relaxed) != strays && strays > 0 {
            tracing::warn!(
                store = self.url,
                strays,
                "skipped objects whose keys are not valid paths: an empty name between two `/`, `.`, `..` or a control character"
            );
        }
    }
}

/// Makes a 404 of a listing retryable: the bucket is missing, or a replica of the service does not know the bucket yet.
fn listing_failed(error: object_store::Error) -> object_store::Error {
    match error.to_string().contains("status code: 404") {
        true => object_store::Error::Generic { store: "store", source: "there is no such bucket".into() },
        false => error,
    }
}

/// Lists all objects under a prefix. A failed listing resumes after its last object, if the service lists in order.
async fn listed(store: &dyn ObjectStore, prefix: Option<&Key>) -> object_store::Result<Vec<ObjectMeta>> {
    let mut found: Vec<ObjectMeta> = Vec::new();
    let (mut furthest, mut patience) = (0, RetryBudget::new(SMALL));
    loop {
        let after = found.last().map(|last| last.location.clone());
        let mut pages = match &after {
            Some(after) => store.list_with_offset(prefix, after),
            None => store.list(prefix),
        };
        loop {
            match pages.next().await {
                // Some services ignore the start offset of a listing.
                Some(Ok(meta)) if after.as_ref().is_some_and(|after| meta.location <= *after) => {}
                Some(Ok(meta)) if found.len() <= OBJECTS_MAX => {
                    found.push(meta);
                    if found.len() > furthest {
                        furthest = found.len();
                        patience = RetryBudget::new(SMALL);
                    }
                }
                Some(Err(error)) => break patience.wait(listing_failed(error)).await?,
                _ => return Ok(found),
            }
        }
        if !found.is_sorted_by(|one, next| one.location < next.location) {
            found.clear();
        }
    }
}

/// Streams a byte range of an object. A failed read resumes where it stopped.
async fn piece(
    store: Arc<dyn Service>,
    at: Key,
    if_match: Option<String>,
    range: Range<u64>,
    give: Sender<object_store::Result<Bytes>>,
) {
    let (mut from, mut patience) = (range.start, RetryBudget::new(SMALL));
    while from < range.end {
        let options = GetOptions {
            range: Some(GetRange::Bounded(from..range.end)),
            if_match: if_match.clone(),
            ..GetOptions::default()
        };
        let before = from;
        let read = async {
            let mut body = store.get_opts(&at, options).await?.into_stream();
            while let Some(bytes) = body.try_next().await? {
                from += bytes.len() as u64;
                if give.send(Ok(bytes)).is_err() {
                    return Ok(false);
                }
            }
            match from >= range.end {
                true => Ok(true),
                false => Err(object_store::Error::Generic { store: "store", source: "the answer was cut off".into() }),
            }
        };
        match read.await {
            // The receiver of the bytes has ended, so reading stops.
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => {
                if from > before {
                    patience = RetryBudget::new(SMALL);
                }
                if let Err(error) = patience.wait(error).await {
                    let _ = give.send(Err(error));
                    return;
                }
            }
        }
    }
}

/// Splits bytes into small chunks, so that the progress of a request is observable.
fn payload(bytes: Vec<u8>) -> PutPayload {
    let bytes = Bytes::from(bytes);
    let steps = (0..bytes.len()).step_by(STEP_BYTES);
    steps.map(|from| bytes.slice(from..(from + STEP_BYTES).min(bytes.len()))).collect()
}

/// Uploads a large file in parts, each with its own retries.
async fn upload(store: Arc<dyn Service>, at: Key, file: Arc<File>, length: u64) -> object_store::Result<()> {
    let size = PART_BYTES.max(length.div_ceil(PARTS_MAX));
    let id = &repeated(SMALL, || store.create_multipart(&at)).await?;
    let part = |n: u64| {
        let (store, at, file) = (&store, &at, file.clone());
        async move {
            let (from, bytes) = (n * size, size.min(length - n * size));
            let read = tasks::blocking(move || {
                let mut part = vec![0; bytes as usize];
                file.read_exact_at(&mut part, from).map_err(|e| Error::io("the file to upload", e))?;
                Ok(payload(part))
            });
            let unread = |e: Error| object_store::Error::Generic { store: "file", source: e.into() };
            let part = read.await.map_err(unread)?;
            repeated(LARGE, || store.put_part(at, id, n as usize, part.clone())).await
        }
    };
    let written = async {
        let parts = stream::iter(0..length.div_ceil(size)).map(part).buffered(TOGETHER);
        let parts: Vec<_> = parts.try_collect().await?;
        match repeated(SMALL, || store.complete_multipart(&at, id, parts.clone())).await {
            // An earlier call completed the upload, but its answer was lost.
            Err(object_store::Error::NotFound { .. })
                if repeated(SMALL, || store.head(&at)).await.is_ok_and(|meta| meta.size == length) =>
            {
                Ok(())
            }
            done => done.map(drop),
        }
    };
    let written = written.await;
    if written.is_err() {
        // If the abort fails too, the upload's invisible parts remain until the bucket's lifecycle rules remove them.
        let _ = store.abort_multipart(&at, id).await;
    }
    written
}

/// Formats an entity tag as HTTP does. Azure's listings omit the quotes.
fn quoted(e_tag: String) -> String {
    if e_tag.ends_with('"') { e_tag } else { format!("\"{e_tag}\"") }
}

fn tag(meta: &ObjectMeta) -> Tag {
    Tag {
        e_tag: meta.e_tag.clone().map(quoted),
        generation: meta.version.clone(),
        bytes: meta.size,
        modified_ms: meta.last_modified.timestamp_millis(),
    }
}

impl Objects for Bucket {
    fn list(&self, under: &str) -> Result<Vec<(String, Tag)>> {
        let (store, prefix) = (self.store.clone(), self.key(under)?);
        let found = self.call(under, async move {
            listed(&*store, Some(&prefix).filter(|prefix| !prefix.as_ref().is_empty())).await
        })?;
        if found.len() > OBJECTS_MAX {
            return Err(Error::invalid(format!(
                "{}/{under}: got {} objects, expected at most {OBJECTS_MAX}",
                self.url,
                found.len()
            )));
        }
        if under.is_empty() {
            self.report_strays(found.iter().filter(|meta| meta.location.as_ref() == STRAY).count());
        }
        let own = self.prefix.as_ref();
        let relative = |meta: ObjectMeta| {
            let key = meta.location.as_ref();
            let inner = if own.is_empty() { Some(key) } else { key.strip_prefix(own)?.strip_prefix('/') };
            Some((inner.filter(|_| key != STRAY)?.to_owned(), tag(&meta)))
        };
        Ok(found.into_iter().filter_map(relative).collect())
    }

    fn head(&self, key: &str) -> Result<Tag> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        self.call(key, async move { repeated(SMALL, || store.head(&at)).await }).map(|meta| tag(&meta))
    }

    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        let complete = move || {
            let (store, at) = (store.clone(), at.clone());
            async move {
                let got = store.get(&at).await?;
                let tag = tag(&got.meta);
                let bytes = if tag.bytes > WHOLE_BYTES_MAX { None } else { Some(got.bytes().await?) };
                Ok((bytes, tag))
            }
        };
        let (bytes, tag) = self.call(key, async move { repeated(LARGE, complete).await })?;
        match bytes {
            Some(bytes) => Ok((bytes.to_vec(), tag)),
            None => Err(Error::corrupt(format!(
                "{}/{key}: got an object of {} bytes, expected at most {WHOLE_BYTES_MAX}",
                self.url, tag.bytes
            ))),
        }
    }

    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (at, if_match) = (self.key(key)?, of.strong().map(str::to_owned));
        let mut take = |(range, bytes): (Range<u64>, Receiver<object_store::Result<Bytes>>)| {
            let mut taken = range.start;
            for bytes in bytes {
                let bytes = bytes.map_err(|e| self.failed(key, e))?;
                taken += bytes.len() as u64;
                take(&bytes)?;
            }
            match taken == range.end {
                true => Ok(()),
                false => Err(Error::unavailable(format!(
                    "{}/{key}: got {} bytes from offset {} on, expected {}",
                    self.url,
                    taken - range.start,
                    range.start,
                    range.end - range.start
                ))),
            }
        };
        let mut under_way = VecDeque::new();
        for from in (range.start..range.end).step_by(PIECE_BYTES as usize) {
            if under_way.len() == TOGETHER
                && let Some(first) = under_way.pop_front()
            {
                take(first)?;
            }
            let range = from..(from + PIECE_BYTES).min(range.end);
            let (give, bytes) = channel();
            self.runtime.spawn(piece(self.store.clone(), at.clone(), if_match.clone(), range.clone(), give));
            under_way.push_back((range, bytes));
        }
        under_way.into_iter().try_for_each(take)
    }

    fn put(&self, key: &str, bytes: Vec<u8>, over: &WriteCondition) -> Result<Tag> {
        let (store, at, length) = (self.store.clone(), self.key(key)?, bytes.len() as u64);
        let mode = match over {
            WriteCondition::Anything => PutMode::Overwrite,
            WriteCondition::Nothing => PutMode::Create,
            WriteCondition::This(tag) if tag.generation.is_none() && tag.strong().is_none() => {
                return Err(Error::unsupported(format!(
                    "{}/{key}: entity tag {}, expected a strong tag, which conditional writes need",
                    self.url,
                    tag.e_tag.as_deref().unwrap_or("missing")
                )));
            }
            WriteCondition::This(tag) => {
                PutMode::Update(UpdateVersion { e_tag: tag.e_tag.clone(), version: tag.generation.clone() })
            }
        };
        let payload = payload(bytes);
        let once = *over != WriteCondition::Anything;
        let most = if length > STEP_BYTES as u64 { LARGE } else { SMALL };
        let put = self.call(key, async move {
            let put = || store.put_opts(&at, payload.clone(), mode.clone().into());
            if once { put().await } else { repeated(most, put).await }
        })?;
        Ok(Tag { e_tag: put.e_tag.map(quoted), generation: put.version, bytes: length, modified_ms: 0 })
    }

    fn upload(&self, key: &str, file: &Path) -> Result<()> {
        let unread = |e| Error::io(file.display(), e);
        let mut open = File::open(file).map_err(unread)?;
        let length = open.metadata().map_err(unread)?.len();
        if length <= PART_BYTES {
            let mut bytes = Vec::new();
            open.read_to_end(&mut bytes).map_err(unread)?;
            return self.put(key, bytes, &WriteCondition::Anything).map(drop);
        }
        self.call(key, upload(self.store.clone(), self.key(key)?, Arc::new(open), length))
    }

    fn remove(&self, key: &str) -> Result<()> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        match self.call(key, async move { repeated(SMALL, || store.delete(&at)).await }) {
            Err(e) if e.kind() == Kind::NotFound => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic_error(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn retries_transient_errors_of_the_protocol() {
        let passing = [
            "status code: 500 Internal Server Error: ",
            "status code: 503 Service Unavailable: ",
            "status code: 429 Too Many Requests: ",
            "status code: 400 Bad Request: <Error><Code>RequestTimeout</Code></Error>",
            "HTTP error: connection reset",
            "Got invalid list response: unexpected end",
        ];
        assert_eq!(passing.map(|text| is_transient(&generic_error(text))), [true; 6]);
        let lasting =
            ["status code: 400 Bad Request: <Code>InvalidArgument</Code>", "status code: 501 Not Implemented: "];
        assert_eq!(lasting.map(|text| is_transient(&generic_error(text))), [false; 2]);
    }

    #[test]
    fn distinguishes_rejections() {
        let reported = |code: &str| {
            let source = format!("status code: 403 Forbidden: <Error><Code>{code}</Code></Error>").into();
            explained(&object_store::Error::PermissionDenied { path: "a".into(), source })
        };
        let codes =
            ["RequestTimeTooSkewed", "SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "AccessDenied"];
        let texts: std::collections::BTreeSet<_> =
            codes.iter().filter_map(|code| reported(code)).map(|(_, text)| text).collect();
        assert_eq!(texts.len(), codes.len(), "{texts:?}");
        assert_eq!(reported("AccessDenied").map(|(kind, _)| kind), Some(Kind::Io));
        assert_eq!(reported("RequestTimeTooSkewed").map(|(kind, _)| kind), Some(Kind::Unavailable));
    }
}
