//! Publishing versions from a Rust program.

use std::path::{Path, PathBuf};

use sterling_core::error::Result;
use sterling_publish::{Plan, Source, publish};
use sterling_snapshot::{CacheOptions, Recipe, Store};

/// Publishes versions of a model to a store, as `sterling publish` does.
///
/// A model comes from a package (graphs, tables, `model.toml`), or consists of named vectors without graphs.
///
/// ```no_run
/// use sterling::Publisher;
///
/// let published = Publisher::new("store").package("models/debian").publish()?;
/// println!("{} version {}", published.model, published.version);
/// # Ok::<(), sterling::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Publisher {
    store: PathBuf,
    package: Option<PathBuf>,
    name: Option<String>,
    items: Option<PathBuf>,
    vectors: Option<PathBuf>,
    recipe: Recipe,
    queries: Option<PathBuf>,
}

/// Version in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// Name of the model.
    pub model: String,
    /// Version number, from 1 on.
    pub version: u64,
}

impl Publisher {
    /// Creates a publisher to a folder, or to a bucket such as `s3://models/search` (feature `object-store`).
    pub fn new(store: impl Into<PathBuf>) -> Self {
        Publisher {
            store: store.into(),
            package: None,
            name: None,
            items: None,
            vectors: None,
            recipe: Recipe::default(),
            queries: None,
        }
    }

    /// Publishes the model of this package folder (`models/README.md`).
    pub fn package(mut self, folder: impl Into<PathBuf>) -> Self {
        self.package = Some(folder.into());
        self
    }

    /// Names a model that has no package: a catalogue of vectors.
    pub fn name(mut self, model: impl Into<String>) -> Self {
        self.name = Some(model.into());
        self
    }

    /// Reads ids and attributes of items from this Parquet or JSON-lines file, in place of the package's item file.
    pub fn items(mut self, file: impl Into<PathBuf>) -> Self {
        self.items = Some(file.into());
        self
    }

    /// Reads the vectors of items from this `.npy` matrix, one row per item.
    pub fn vectors(mut self, file: impl Into<PathBuf>) -> Self {
        self.vectors = Some(file.into());
        self
    }

    /// Builds the index by this recipe (`indexes/README.md`).
    pub fn recipe(mut self, recipe: Recipe) -> Self {
        self.recipe = recipe;
        self
    }

    /// Calibrates recall with these queries: a `.npy` matrix, or a `:retrieve` body per line.
    pub fn queries(mut self, file: impl Into<PathBuf>) -> Self {
        self.queries = Some(file.into());
        self
    }

    /// Publishes a version. The graphs of the package run in this process first; publish foreign packages with the command-line
    /// program, which runs graphs in a sandbox.
    ///
    /// # Errors
    /// The error in the package, the recipe or the items, with its location. After an error the store is unchanged.
    pub fn publish(&self) -> Result<Published> {
        let Publisher { package, name, items, vectors, .. } = self.clone();
        let source = Source::of(package, name, items, vectors)?;
        let plan = Plan { recipe: self.recipe.clone(), queries: self.queries.clone(), ..Plan::new(source) };
        let store = Store::open(Path::new(&self.store), &CacheOptions::default())?;
        store.renew()?;
        let (model, version) = publish(&store, &plan, &|_, _, _| {})?;
        Ok(Published { model, version })
    }
}
