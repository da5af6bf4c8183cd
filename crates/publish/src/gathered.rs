//! What a view shows, as the items of a version that is made of it, and what such a merge tells.

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

/// What a merge has made.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedVersion {
    /// The version.
    pub version: u64,
    /// The position of the last update that is in it.
    pub position: u64,
    /// Its items.
    pub items: usize,
    /// Its lists.
    pub lists: usize,
    /// True where the lists were trained anew.
    pub is_trained: bool,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The items of a view: those of its main snapshot that are not gone, then those beside it. Of a view without items it is one that
/// is gone: the files of a version hold one at least, and its manifest says whether it counts ([`Manifest::is_emptied`]).
///
/// [`Manifest::is_emptied`]: sterling_snapshot::Manifest::is_emptied
pub(super) struct ViewItems {
    ids: Vec<i64>,
    columns: Vec<ItemColumn>,
    /// `[N, D]`, as exact as they are kept.
    vectors: Vec<f32>,
    dimension: usize,
    /// The rows of `[[item.vectors]]`, as they are stored.
    kept: Vec<u8>,
    /// The list of each in the main snapshot.
    pub(super) lists: Vec<u32>,
    /// Those that the lists were not made for, ascending.
    pub(super) strays: Vec<u32>,
    /// How many lie beside the main snapshot.
    pub(super) brought: usize,
    /// Which of them lie together within a list.
    alike: Vec<u64>,
}

impl ViewItems {
    /// Gathers them.
    ///
    /// # Errors
    /// What is wrong with the recipe's columns.
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

    /// Their vectors `[N, D]`.
    ///
    /// # Errors
    /// None that could come: the vectors have one width.
    pub(super) fn rows(&self) -> Result<Matrix<'_>> {
        Matrix::new(&self.vectors, self.dimension)
    }

    /// The items with the slots of an index of their vectors, and which of them lie together within a list.
    ///
    /// # Errors
    /// As [`ViewItems::rows`].
    pub(super) fn arranged(self, built: Built) -> Result<(Arranged, Vec<u64>)> {
        let ViewItems { ids, columns, vectors, dimension, kept, alike, .. } = self;
        let embedded = Embedded { vectors: RowStore::owned(vectors, dimension)?, kept };
        Ok((Arranged { ids, columns, built, embedded, bucket_bytes: u64::MAX }, alike))
    }
}
