//! Buckets of S3, Google Cloud Storage and Azure, by the crate `object_store`.
//!
//! Credentials, region and endpoint come from the environment, as the tools of each have them (`docs/STORE.md`). Calls run on
//! two threads of the bucket's own; who asks waits.

use std::fs::File;
use std::future::Future;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path as Key;
use object_store::{
    ClientConfigKey, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
    RetryConfig, UpdateVersion, WriteMultipart,
};
use tokio::runtime::Runtime;

use super::{Objects, Over, Tag, WHOLE_BYTES_MAX};
use crate::error::{Error, Kind, Result};

/// Files up to this size are written by one request, larger ones in parts of at least as much.
const PART_BYTES: usize = 16 << 20;
/// Most parts of an object: S3 allows ten thousand.
const PARTS_MAX: u64 = 9000;
/// Bytes of a piece that is read by one request.
const PIECE_BYTES: u64 = 8 << 20;
/// Requests for pieces or parts of one object that run side by side.
const TOGETHER: usize = 4;
/// Most objects that a store may hold.
const OBJECTS_MAX: usize = 1 << 21;
/// How long a small call may take, with its repetitions.
const CALL_SECONDS: u64 = 25;
/// How long one request may take.
const REQUEST_SECONDS: &str = "60 seconds";
/// The variable that allows an endpoint of Google's without TLS, as `AWS_ALLOW_HTTP` and `AZURE_ALLOW_HTTP` do of theirs.
const GOOGLE_ALLOW_HTTP: &str = "GOOGLE_ALLOW_HTTP";

/// A bucket.
#[derive(Debug)]
struct Bucket {
    url: String,
    prefix: Key,
    store: Arc<dyn ObjectStore>,
    /// Taken when the bucket goes, which may be on a thread that must not wait for it.
    runtime: Option<Runtime>,
}

/// Opens the bucket of a URL: `s3://bucket/prefix`, `gs://bucket/prefix`, or `az://container/prefix` with its account in the
/// environment. Nothing is asked of it yet.
///
/// # Errors
/// `Invalid` with what is wrong with the URL or the environment's variables.
pub fn open(url: &str) -> Result<Arc<dyn Objects>> {
    let invalid = |why: String| Error::invalid(format!("store {url}: {why}"));
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || url.contains(['?', '#']) {
        return Err(invalid("expected SCHEME://BUCKET/PREFIX, as in s3://models/search".into()));
    }
    let prefix = Key::parse(prefix).map_err(|e| invalid(e.to_string()))?;
    // Another part of the program may have named it first: then it is the same one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: 5, retry_timeout: Duration::from_secs(20), ..RetryConfig::default() };
    let wrong = |e: object_store::Error| invalid(e.to_string());
    let timeout = ClientConfigKey::Timeout;
    let store: Arc<dyn ObjectStore> = match scheme {
        "s3" => {
            let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
            Arc::new(builder.with_config(AmazonS3ConfigKey::Client(timeout), REQUEST_SECONDS).build().map_err(wrong)?)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
            // The crate would send tokens without TLS to any endpoint, for its own place of tokens has none.
            let may = std::env::var(GOOGLE_ALLOW_HTTP).unwrap_or_else(|_| "false".into());
            let builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), may);
            Arc::new(builder.with_config(GoogleConfigKey::Client(timeout), REQUEST_SECONDS).build().map_err(wrong)?)
        }
        "az" | "abfs" | "abfss" => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
            Arc::new(builder.with_config(AzureConfigKey::Client(timeout), REQUEST_SECONDS).build().map_err(wrong)?)
        }
        _ => return Err(invalid(format!("`{scheme}`: expected s3, gs, az, abfs or abfss"))),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("store").enable_all().build();
    let runtime = Some(runtime.map_err(|e| Error::io("threads for the store", e))?);
    Ok(Arc::new(Bucket { url: url.into(), prefix, store, runtime }))
}

impl Drop for Bucket {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Bucket {
    fn key(&self, key: &str) -> Result<Key> {
        let whole = if self.prefix.as_ref().is_empty() { key.to_owned() } else { format!("{}/{key}", self.prefix) };
        Key::parse(whole.trim_end_matches('/')).map_err(|e| Error::invalid(format!("store {}: {e}", self.url)))
    }

    fn failed(&self, key: &str, error: object_store::Error) -> Error {
        let place = if key.is_empty() { self.url.clone() } else { format!("{}/{key}", self.url) };
        let told = |kind| Error::new(kind, format!("{place}: {error}"));
        match &error {
            object_store::Error::NotFound { .. } => Error::not_found(format!("{place}: no such object")),
            object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. } => {
                Error::conflict(format!("{place}: another object stands there"))
            }
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                told(Kind::Io)
            }
            _ => told(Kind::Unavailable),
        }
    }

    /// Runs a call on the bucket's threads, and waits for it: without a bound of time where none is given.
    fn wait<T: Send + 'static>(
        &self,
        key: &str,
        most: Option<Duration>,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (tell, told) = sync_channel(1);
        let Some(runtime) = &self.runtime else { return Err(Error::internal("a bucket without threads")) };
        runtime.spawn(async move {
            let done = match most {
                Some(most) => tokio::time::timeout(most, work).await.ok(),
                None => Some(work.await),
            };
            // Nobody waits any more where the caller's thread has ended.
            let _ = tell.send(done);
        });
        match told.recv() {
            Ok(Some(done)) => done.map_err(|e| self.failed(key, e)),
            Ok(None) => Err(Error::unavailable(format!("{}/{key}: no answer within {CALL_SECONDS} s", self.url))),
            Err(_) => Err(Error::internal(format!("{}/{key}: the call broke", self.url))),
        }
    }

    fn call<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.wait(key, Some(Duration::from_secs(CALL_SECONDS)), work)
    }
}

/// An entity tag as HTTP writes it. Azure's listings leave its quotes out.
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
        let found = self.wait(under, Some(Duration::from_secs(4 * CALL_SECONDS)), async move {
            let prefix = Some(&prefix).filter(|prefix| !prefix.as_ref().is_empty());
            store.list(prefix).take(OBJECTS_MAX + 1).try_collect::<Vec<_>>().await
        })?;
        if found.len() > OBJECTS_MAX {
            return Err(Error::invalid(format!("{}/{under}: expected at most {OBJECTS_MAX} objects", self.url)));
        }
        let own = self.prefix.as_ref();
        let relative = |meta: ObjectMeta| {
            let key = meta.location.as_ref().strip_prefix(own)?.trim_start_matches('/').to_owned();
            Some((key, tag(&meta)))
        };
        Ok(found.into_iter().filter_map(relative).collect())
    }

    fn head(&self, key: &str) -> Result<Tag> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        self.call(key, async move { store.head(&at).await }).map(|meta| tag(&meta))
    }

    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        let (bytes, tag) = self.call(key, async move {
            let got = store.get(&at).await?;
            let tag = tag(&got.meta);
            let bytes = if tag.bytes > WHOLE_BYTES_MAX { None } else { Some(got.bytes().await?) };
            Ok((bytes, tag))
        })?;
        match bytes {
            Some(bytes) => Ok((bytes.to_vec(), tag)),
            None => Err(Error::corrupt(format!(
                "{}/{key}: {} bytes, expected at most {WHOLE_BYTES_MAX}",
                self.url, tag.bytes
            ))),
        }
    }

    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (store, at, if_match) = (self.store.clone(), self.key(key)?, of.e_tag.clone());
        let Some(runtime) = &self.runtime else { return Err(Error::internal("a bucket without threads")) };
        let pieces = (range.start..range.end).step_by(PIECE_BYTES as usize);
        let pieces = pieces.map(move |from| from..(from + PIECE_BYTES).min(range.end));
        let (tell, told) = sync_channel(1);
        runtime.spawn(async move {
            let piece = |range: Range<u64>| {
                let (store, at) = (store.clone(), at.clone());
                let options = GetOptions {
                    range: Some(GetRange::Bounded(range.clone())),
                    if_match: if_match.clone(),
                    ..GetOptions::default()
                };
                async move { Ok((range, store.get_opts(&at, options).await?.bytes().await?)) }
            };
            let mut pieces = stream::iter(pieces.map(piece)).buffered(TOGETHER);
            while let Some(piece) = pieces.next().await {
                let has_failed = piece.is_err();
                // The thread is the bucket's own: another one serves its other calls meanwhile.
                let is_over = tokio::task::block_in_place(|| tell.send(piece)).is_err();
                if has_failed || is_over {
                    return;
                }
            }
        });
        for piece in told {
            let (range, bytes) = piece.map_err(|e| self.failed(key, e))?;
            if bytes.len() as u64 != range.end - range.start {
                let (url, got, expected) = (&self.url, bytes.len(), range.end - range.start);
                return Err(Error::unavailable(format!(
                    "{url}/{key}: {got} bytes from {}, expected {expected}",
                    range.start
                )));
            }
            take(&bytes)?;
        }
        Ok(())
    }

    fn put(&self, key: &str, bytes: Vec<u8>, over: &Over) -> Result<Tag> {
        let (store, at, length) = (self.store.clone(), self.key(key)?, bytes.len() as u64);
        let mode = match over {
            Over::Anything => PutMode::Overwrite,
            Over::Nothing => PutMode::Create,
            Over::This(tag) => {
                PutMode::Update(UpdateVersion { e_tag: tag.e_tag.clone(), version: tag.generation.clone() })
            }
        };
        let put = self.call(key, async move { store.put_opts(&at, PutPayload::from(bytes), mode.into()).await })?;
        Ok(Tag { e_tag: put.e_tag.map(quoted), generation: put.version, bytes: length, modified_ms: 0 })
    }

    fn upload(&self, key: &str, file: &Path) -> Result<()> {
        let unread = |e| Error::io(file.display(), e);
        let mut open = File::open(file).map_err(unread)?;
        let length = open.metadata().map_err(unread)?.len();
        if length <= PART_BYTES as u64 {
            let mut bytes = Vec::new();
            open.read_to_end(&mut bytes).map_err(unread)?;
            return self.put(key, bytes, &Over::Anything).map(drop);
        }
        let (store, at) = (self.store.clone(), self.key(key)?);
        let part = PART_BYTES.max(length.div_ceil(PARTS_MAX) as usize);
        self.wait(key, None, async move {
            let mut upload = WriteMultipart::new_with_chunk_size(store.put_multipart(&at).await?, part);
            let mut bytes = vec![0; part];
            loop {
                let ready = upload.wait_for_capacity(TOGETHER).await;
                let read = ready.and_then(|()| {
                    open.read(&mut bytes).map_err(|e| object_store::Error::Generic { store: "file", source: e.into() })
                });
                match read {
                    Ok(0) => return upload.finish().await,
                    Ok(read) => upload.write(&bytes[..read]),
                    Err(e) => {
                        // Its parts lie unseen until the bucket's rules remove them, where this fails too.
                        let _ = upload.abort().await;
                        return Err(e);
                    }
                }
            }
        })
        .map(drop)
    }

    fn remove(&self, key: &str) -> Result<()> {
        let (store, at) = (self.store.clone(), self.key(key)?);
        match self.call(key, async move { store.delete(&at).await }) {
            Err(e) if e.kind() == Kind::NotFound => Ok(()),
            other => other,
        }
    }
}
