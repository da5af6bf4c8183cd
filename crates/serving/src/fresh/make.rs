//! Encodes upserted items as rows of a snapshot, with its lists and formats.

use std::borrow::Cow;
use std::sync::Arc;

use super::columns::ReadColumns;
use super::early::EarlyEmbeddings;
use super::embed::{Embedded, Embedder};
use super::update::{Put, Update};
use crate::view::{Attribute, Row};
use sterling_core::error::{Error, Result};
use sterling_core::tensor::Matrix;
use sterling_index::columns::{Column, ColumnKind, Columns};
use sterling_index::ivf::Assigner;
use sterling_snapshot::Snapshot;

/// Encodes rows for one snapshot.
pub(super) struct RowEncoder {
    main: Arc<Snapshot>,
    pub(super) assigner: Arc<Assigner>,
    embedder: Embedder,
    /// Embeddings computed before the updates were acknowledged.
    early: Option<Arc<EarlyEmbeddings>>,
}

/// Encoded row of an upserted item, and errors of the attributes that do not fit the snapshot's columns and are therefore
/// missing.
pub(super) struct Fitted {
    pub(super) row: Row,
    pub(super) misfits: Vec<Error>,
}

impl RowEncoder {
    pub(super) fn new(main: Arc<Snapshot>) -> Self {
        let assigner = Arc::new(Assigner::new(&main.index));
        RowEncoder { embedder: Embedder::new(main.clone()), main, assigner, early: None }
    }

    /// Reuses embeddings that were computed earlier.
    pub(super) fn taking(self, early: Arc<EarlyEmbeddings>) -> Self {
        RowEncoder { early: Some(early), ..self }
    }

    /// Encodes the upserted items, or returns why they cannot be encoded; `None` for other updates.
    pub(super) fn rows(&mut self, updates: &[Update]) -> Vec<Option<Result<Fitted>>> {
        let puts: Vec<&Put> =
            updates.iter().filter_map(|update| if let Update::Put(put) = update { Some(put) } else { None }).collect();
        let fitting: Vec<(Changes, Cow<'_, Put>)> = puts.iter().map(|put| self.fitting(put)).collect();
        let embedded = self.embedded(&fitting.iter().map(|(_, put)| &**put).collect::<Vec<&Put>>());
        let mut lists = self.lists(&embedded).into_iter();
        let mut rows = fitting.into_iter().zip(embedded).map(|((changes, put), embedded)| -> Result<Fitted> {
            let Embedded { vector, kept } = embedded?;
            let mut attributes = vec![Attribute::Missing; self.main.columns.list().len()];
            changes.fitting.into_iter().for_each(|(column, attribute)| attributes[column] = attribute);
            let list = lists.next().unwrap_or_default();
            let is_stray = self.assigner.is_stray(&vector, list);
            let vector = self.assigner.coded(&vector);
            Ok(Fitted { row: Row { id: put.id, list, is_stray, vector, kept, attributes }, misfits: changes.misfits })
        });
        let mut rows: Vec<Option<Result<Fitted>>> =
            updates.iter().map(|update| if let Update::Put(_) = update { rows.next() } else { None }).collect();
        self.drop_unscorable(&mut rows);
        rows
    }

    /// Replaces rows that the reranker cannot score by an error: such items would be omitted from every answer, and could not be
    /// published.
    fn drop_unscorable(&self, rows: &mut [Option<Result<Fitted>>]) {
        let Some(columns) = ReadColumns::of(&self.main) else { return };
        let made: Vec<usize> = (0..rows.len()).filter(|&n| matches!(rows[n], Some(Ok(_)))).collect();
        let numbers = made.iter().filter_map(|&n| rows[n].as_ref()?.as_ref().ok());
        let numbers = numbers.map(|fitted| columns.numbers(|column| (&fitted.row.attributes[column]).into())).collect();
        for (place, unscorable) in columns.check(numbers) {
            rows[made[place]] = Some(Err(unscorable.into_error()));
        }
    }

    /// Converts an item's attributes; removes those that do not fit their columns, also from the input of the item tower.
    fn fitting<'p>(&self, put: &'p Put) -> (Changes, Cow<'p, Put>) {
        let changes = changes(&self.main.columns, &put.attributes);
        if changes.misfits.is_empty() {
            return (changes, Cow::Borrowed(put));
        }
        let columns: Vec<&str> = self.main.columns.list().map(Column::name).collect();
        let missing = |(column, attribute): &(usize, Attribute)| {
            matches!(attribute, Attribute::Missing).then_some(columns[*column])
        };
        let missing: Vec<&str> = changes.fitting.iter().filter_map(missing).collect();
        let mut fitting = put.clone();
        fitting.attributes.retain(|(name, _)| !missing.contains(&name.as_str()));
        (changes, Cow::Owned(fitting))
    }

    /// Returns the embeddings of items, computed before the update was acknowledged or now.
    fn embedded(&mut self, puts: &[&Put]) -> Vec<Result<Embedded>> {
        let mut before: Vec<Option<Embedded>> = match &self.early {
            Some(early) if self.main.package.item.is_some() => early.take(&self.main, puts),
            _ => Vec::new(),
        };
        before.resize_with(puts.len(), || None);
        let rest: Vec<&Put> =
            puts.iter().zip(&before).filter(|(_, made)| made.is_none()).map(|(put, _)| *put).collect();
        let mut made = self.embedder.embed(&rest).into_iter();
        let missing = || Err(Error::internal("got too few embeddings, expected one per upserted item"));
        before.into_iter().map(|before| before.map_or_else(|| made.next().unwrap_or_else(missing), Ok)).collect()
    }

    /// Assigns the successful embeddings to inverted lists, in one batch.
    fn lists(&self, embedded: &[Result<Embedded>]) -> Vec<u32> {
        let all: Vec<f32> = embedded.iter().flatten().flat_map(|embedded| &embedded.vector).copied().collect();
        Matrix::new(&all, self.main.index.dimension())
            .map_or_else(|_| Vec::new(), |matrix| self.assigner.assign(matrix))
    }
}

/// Converted attributes of an item by column number. Snapshots may have other columns than those that an update was validated
/// against.
pub(super) struct Changes {
    /// Attributes with a column. A value that does not fit its column is missing.
    pub(super) fitting: Vec<(usize, Attribute)>,
    /// One error per attribute that does not fit.
    pub(super) misfits: Vec<Error>,
}

/// Converts the attributes for which the snapshot has columns.
pub(super) fn changes(columns: &Columns, given: &[(String, Attribute)]) -> Changes {
    let mut changes = Changes { fitting: Vec::with_capacity(given.len()), misfits: Vec::new() };
    for (number, column) in columns.list().enumerate() {
        let Some((_, to)) = given.iter().find(|(name, _)| name == column.name()) else { continue };
        let attribute = match (column.kind(), to) {
            (_, Attribute::Missing) => Attribute::Missing,
            (ColumnKind::Integers, Attribute::Integers(_)) | (ColumnKind::Texts, Attribute::Texts(_)) => to.clone(),
            (ColumnKind::Floats, Attribute::Number(number)) if number.is_finite() => to.clone(),
            (ColumnKind::Floats, Attribute::Integers(one)) if one.len() == 1 => Attribute::Number(one[0] as f64),
            (kind, _) => {
                let (name, got) = (column.name(), to.kind());
                changes
                    .misfits
                    .push(Error::invalid(format!("attribute `{name}`: got {got}, expected {}", kind.plural())));
                Attribute::Missing
            }
        };
        changes.fitting.push((number, attribute));
    }
    changes
}
