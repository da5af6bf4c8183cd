//! Items of a view, gathered for a merged version, and the result of a merge.

use std::borrow::Cow;

use super::catalogue::Arranged;
use super::embed::Embedded;
use sterling_core::error::Result;
use sterling_core::tensor::Matrix;
use sterling_core::units::Slot;
use sterling_index::columns::{self, ItemColumn};
use sterling_index::ivf::Built;
use sterling_kernels::priority::breathe;
use sterling_serving::view::{Attribute, View, item_columns};
use sterling_snapshot::VectorRows;
use sterling_storage::rows::RowStore;

/// Result of a merge.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedVersion {
    /// Version number.
    pub version: u64,
    /// Position of the last merged update.
    pub position: u64,
    /// Number of items.
    pub items: usize,
    /// Number of lists.
    pub lists: usize,
    /// True if the lists were retrained.
    pub is_trained: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Items of a view: the live items of its main snapshot, then the items of segments. An empty view yields one deleted item: the
/// files of a version hold at least one item, and the manifest states whether that item counts ([`Manifest::is_emptied`]).
///
/// [`Manifest::is_emptied`]: sterling_snapshot::Manifest::is_emptied
pub(super) struct ViewItems {
    ids: Vec<i64>,
    columns: Vec<ItemColumn>,
    /// Vectors `[N, D]`, in the most precise stored format.
    vectors: Vec<f32>,
    dimension: usize,
    /// Rows of `[[item.vectors]]`, in storage format.
    kept: Vec<u8>,
    /// List of each item, in the index of the main snapshot.
    pub(super) lists: Vec<u32>,
    /// Rows of items unlike those that the lists were trained on (strays), ascending.
    pub(super) strays: Vec<u32>,
    /// Number of items that come from segments of the delta.
    pub(super) brought: usize,
    /// Sort keys that place similar items together within a list.
    alike: Vec<u64>,
}

impl ViewItems {
    /// Gathers the items of a view.
    ///
    /// # Errors
    /// Error in a column that the recipe names.
    pub(super) fn of(view: &View) -> Result<Self> {
        let main = view.main();
        let mut slots: Vec<Slot> = view.filled_slots().collect();
        if slots.is_empty() {
            slots.extend(main.index.filled_slots().next());
        }
        let dimension = view.dimension();
        let mut vectors = vec![0.0; slots.len() * dimension];
        vectors.chunks_exact_mut(dimension).zip(&slots).for_each(|(row, slot)| {
            view.row(*slot, row);
            breathe();
        });
        let stacked = view.columns();
        let attribute = |row: usize, column: usize| Cow::Owned(Attribute::from(stacked.cell(column, slots[row])));
        let columns = item_columns(&main.columns, slots.len(), attribute)?;
        let alike = columns::likeness(&columns, &main.recipe.filter.together, slots.len())?;
        let rows = VectorRows::of(&main.package.spec.item.vectors)?;
        let mut kept = Vec::with_capacity(slots.len() * rows.bytes());
        slots.iter().for_each(|slot| view.read_vectors(&rows, *slot, &mut kept));
        let ids = slots.iter().map(|slot| view.id(*slot).0).collect();
        let lists = slots.iter().map(|slot| view.list_of(*slot)).collect();
        let strays = (0..).zip(&slots).filter(|(_, slot)| view.is_stray(**slot)).map(|(row, _)| row).collect();
        let brought = slots.iter().filter(|slot| slot.index() >= main.index.slots()).count();
        Ok(ViewItems { ids, columns, vectors, dimension, kept, lists, strays, brought, alike })
    }

    /// Returns the vectors of the items, `[N, D]`.
    ///
    /// # Errors
    /// Does not occur, because all vectors have the same width.
    pub(super) fn rows(&self) -> Result<Matrix<'_>> {
        Matrix::new(&self.vectors, self.dimension)
    }

    /// Returns the items with their slots from the index `built`, and the keys by which items are sorted within lists.
    ///
    /// # Errors
    /// As [`ViewItems::rows`].
    pub(super) fn arranged(self, built: Built) -> Result<(Arranged, Vec<u64>)> {
        let ViewItems { ids, columns, vectors, dimension, kept, alike, .. } = self;
        let embedded = Embedded { vectors: RowStore::owned(vectors, dimension)?, kept };
        Ok((Arranged { ids, columns, built, embedded, bucket_bytes: u64::MAX }, alike))
    }
}
