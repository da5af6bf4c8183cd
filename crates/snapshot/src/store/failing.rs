//! Fault injection: a store whose calls fail on demand.

use std::fmt;

use super::*;

/// Callback before each operation; the operation fails with the error that the callback returns.
pub(super) type Fail = dyn Fn(&'static str) -> Result<()> + Send + Sync;

struct Failing {
    shelf: Arc<dyn Shelf>,
    fail: Arc<Fail>,
}

impl fmt::Debug for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shelf.fmt(f)
    }
}

/// Wraps a store so that each call may fail before it has an effect.
pub fn failing(store: Store, fail: Arc<Fail>) -> Store {
    let shelf = store.shelf.clone();
    Store { shelf: Arc::new(Failing { shelf, fail }), ..store }
}

impl Shelf for Failing {
    fn name(&self) -> String {
        self.shelf.name()
    }
    fn root(&self) -> &Path {
        self.shelf.root()
    }
    fn renew(&self) -> Result<()> {
        (self.fail)("Shelf::renew").and_then(|()| self.shelf.renew())
    }
    fn trouble(&self) -> Option<String> {
        self.shelf.trouble()
    }
    fn is_bucket(&self) -> bool {
        self.shelf.is_bucket()
    }
    fn has_copies(&self, model: Option<&str>) -> bool {
        self.shelf.has_copies(model)
    }
    fn prove(&self) -> Result<()> {
        (self.fail)("Shelf::prove").and_then(|()| self.shelf.prove())
    }
    fn names(&self) -> Result<Vec<String>> {
        (self.fail)("Shelf::names").and_then(|()| self.shelf.names())
    }
    fn numbers(&self, model: &str, files: &[String]) -> Result<Vec<u64>> {
        (self.fail)("Shelf::numbers").and_then(|()| self.shelf.numbers(model, files))
    }
    fn stamp(&self, unit: Unit<'_>) -> Option<Stamp> {
        (self.fail)("Shelf::stamp").ok().and_then(|()| self.shelf.stamp(unit))
    }
    fn outline(&self, unit: Unit<'_>) -> Result<PathBuf> {
        (self.fail)("Shelf::outline").and_then(|()| self.shelf.outline(unit))
    }
    fn ensure_local(&self, unit: Unit<'_>) -> Result<PinnedVersion> {
        (self.fail)("Shelf::ensure_local").and_then(|()| self.shelf.ensure_local(unit))
    }
    fn discard(&self, unit: Unit<'_>) -> Result<bool> {
        (self.fail)("Shelf::discard").and_then(|()| self.shelf.discard(unit))
    }
    fn read(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        (self.fail)("Shelf::read").and_then(|()| self.shelf.read(model, file))
    }
    fn glance(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        (self.fail)("Shelf::glance").and_then(|()| self.shelf.glance(model, file))
    }
    fn swap(&self, model: &str, file: &str, before: Option<&[u8]>, bytes: &[u8]) -> Result<bool> {
        (self.fail)("Shelf::swap").and_then(|()| self.shelf.swap(model, file, before, bytes))
    }
    fn publish(&self, what: &mut Publication<'_>) -> Result<u64> {
        (self.fail)("Shelf::publish")?;
        let Publication { model, is_derived, .. } = *what;
        // Fails at the latest possible point of a publication, after all files are written.
        let mut fill =
            |folder: &Path, version| (what.fill)(folder, version).and_then(|()| (self.fail)("Shelf::publish, filled"));
        self.shelf.publish(&mut Publication { model, is_derived, fill: &mut fill })
    }
    fn add(&self, unit: Unit<'_>, files: &[&str], fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
        (self.fail)("Shelf::add").and_then(|()| self.shelf.add(unit, files, fill))
    }
    fn remove(&self, model: &str, version: u64) -> Result<()> {
        (self.fail)("Shelf::remove").and_then(|()| self.shelf.remove(model, version))
    }
}
