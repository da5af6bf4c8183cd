//! Arguments by which commands name a store.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

use sterling_core::error::{Error, Result};
use sterling_server::startup::check_folder;
use sterling_snapshot::{CacheOptions, Desired, Store, check_name};
use sterling_storage::objects;

/// Arguments of all commands that use a store.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct StoreArgs {
    /// Store of published versions: a folder, or a bucket such as s3://models/search (docs/guide/versions.md)
    #[arg(long, default_value = "store")]
    pub(super) store: PathBuf,
    /// Folder for local copies of versions from a bucket [default: ~/.cache/sterling]
    #[arg(long, value_name = "DIR", env = "STERLING_CACHE__FOLDER")]
    cache: Option<PathBuf>,
}

impl StoreArgs {
    fn options(&self) -> CacheOptions {
        CacheOptions { folder: self.cache.clone(), ..CacheOptions::default() }
    }

    /// Opens the store, which need not exist yet; a bucket is listed.
    pub(super) fn open(&self) -> Result<Store> {
        let store = Store::open(&self.store, &self.options())?;
        store.renew()?;
        Ok(store)
    }

    /// Opens the store, which must exist.
    pub(super) fn existing(&self) -> Result<Store> {
        let store = self.open_unlisted()?;
        store.renew()?;
        Ok(store)
    }

    /// Opens the store and reads the desired state of a model, which must be published or have a desired state.
    pub(super) fn desired_of(&self, model: &str) -> Result<(Store, Desired)> {
        let store = self.existing()?;
        check_name("model name", model)?;
        let desired = store.desired_state(model)?;
        if desired.revision == 0 {
            check_model(&store, model)?;
        }
        Ok((store, desired))
    }

    /// Opens the store, which must exist if it is a folder; a bucket is not listed yet.
    pub(super) fn open_unlisted(&self) -> Result<Store> {
        check_folder(&self.store)?;
        Store::open(&self.store, &self.options())
    }

    /// Returns the arguments for a store that a command takes by an argument other than `--store`.
    pub(super) fn of(store: &Path) -> Self {
        StoreArgs { store: store.to_owned(), cache: std::env::var_os("STERLING_CACHE__FOLDER").map(Into::into) }
    }
}

/// Rejects a model that the store does not have; the error lists the models that the store has.
pub(super) fn check_model(store: &Store, model: &str) -> Result<()> {
    let models: Vec<String> = store.models()?.into_iter().chain(store.sharded_models()?).collect();
    if models.iter().any(|known| known == model) {
        return Ok(());
    }
    let models = if models.is_empty() { "none".into() } else { models.join(", ") };
    Err(Error::not_found(format!("model `{model}` is not in the store; there are: {models}")))
}

/// Splits `STORE/MODEL/VERSION` or `MODEL/VERSION`; `None` for other text.
pub(super) fn published(text: &str) -> Option<(Option<&str>, &str, u64)> {
    let mut parts = text.trim_end_matches('/').rsplitn(3, '/');
    let (version, model, store) = (parts.next()?.parse().ok()?, parts.next()?, parts.next());
    // A URL without a model name leaves a store part that ends with a slash.
    let is_one = !model.is_empty() && store.is_none_or(|store| !store.ends_with('/'));
    is_one.then_some((store, model, version))
}

/// Parses the path of a local file or folder. Without this check `--out s3://bucket/x` would create a local folder `s3:`.
pub(super) fn local_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match objects::is_url(&path) {
        true => Err("a URL, expected a file or folder of this machine; only --store accepts buckets"),
        false => Ok(path),
    })
}
