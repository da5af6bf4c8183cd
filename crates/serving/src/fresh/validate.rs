//! Validates items from callers against a view, and converts them to updates.

use std::collections::BTreeSet;

use super::update::{Put, Update};
use crate::view::{Attribute, View};
use sterling_core::items::{EMBEDDING, GivenItem, GivenValues, InvalidItem, shard_of};
use sterling_core::limits::{ATTRIBUTE_BYTES_MAX, COMPONENT_MAX};
use sterling_core::units::ItemId;
use sterling_graph::tower::FeatureKind;
use sterling_index::columns::ColumnKind;
use sterling_snapshot::VectorRows;

/// Converts an item to an update. `seen` are the ids of the call so far. The existence of a changed item is not checked: an update
/// that the view does not show yet may insert it.
///
/// # Errors
/// An error with the field, the received and the expected value.
pub fn update_of(item: &GivenItem, view: &View, seen: &mut BTreeSet<i64>) -> Result<Update, InvalidItem> {
    Check { item, view }.update(seen)
}

/// An item and the view that it is checked against.
struct Check<'a> {
    item: &'a GivenItem,
    view: &'a View,
}

impl Check<'_> {
    fn update(&self, seen: &mut BTreeSet<i64>) -> Result<Update, InvalidItem> {
        let view = self.view;
        if !seen.insert(self.item.id) {
            return Err(self
                .item
                .invalid("id", format!("{} occurs twice in the call, expected each id once", self.item.id)));
        }
        if let Some(part) = view.main().manifest.shard
            && shard_of(ItemId(self.item.id), part.shards) != part.shard
        {
            let (its, shards) = (shard_of(ItemId(self.item.id), part.shards), part.shards);
            return Err(self
                .item
                .invalid("id", format!("the item belongs to shard {its} of {shards}, this is shard {}", part.shard)));
        }
        self.check_vector()?;
        let (mut attributes, mut dense) = (Vec::new(), Vec::new());
        let (mut named, mut bytes) = (BTreeSet::new(), 0);
        for (name, values) in &self.item.attributes {
            if !named.insert(name) {
                return Err(self.item.invalid(GivenItem::field(self.item.whole, name), "given twice, expected once"));
            }
            match self.attribute(name, values)? {
                Brought::Attribute(attribute) => {
                    bytes += values.bytes();
                    attributes.push((name.clone(), attribute));
                }
                Brought::Dense(numbers) => dense.push((name.clone(), numbers)),
            }
        }
        if bytes > ATTRIBUTE_BYTES_MAX {
            let reason = format!("the values take {bytes} bytes of memory, expected {ATTRIBUTE_BYTES_MAX} at most");
            return Err(self.item.invalid(GivenItem::field(self.item.whole, ""), reason));
        }
        if !self.item.whole {
            return Ok(Update::Set { id: self.item.id, attributes });
        }
        self.check_vectors(&dense)?;
        self.check_read(&dense)?;
        let put = Put { id: self.item.id, vector: self.item.embedding.clone(), attributes, dense };
        if let Some(tower) = &view.main().package.item
            && let Err(e) = tower.read(put.features(tower.features()))
        {
            return Err(self.item.invalid("attributes", e.to_string()));
        }
        Ok(Update::Put(put))
    }

    fn check_vector(&self) -> Result<(), InvalidItem> {
        let has_tower = self.view.main().package.item.is_some();
        let width = self.view.dimension();
        match &self.item.embedding {
            Some(_) if !self.item.whole => {
                Err(self.item.invalid(EMBEDDING, "got a vector with `set`, expected the whole item with `attributes`"))
            }
            Some(_) if has_tower => {
                Err(self.item.invalid(EMBEDDING, "got a vector, expected none: the model's item tower computes it"))
            }
            None if self.item.whole && !has_tower => {
                Err(self.item.invalid(EMBEDDING, format!("missing, expected {width} numbers")))
            }
            Some(vector) if vector.len() != width => {
                Err(self.item.invalid(EMBEDDING, format!("got {} numbers, expected {width}", vector.len())))
            }
            Some(vector) => match vector.iter().position(|x| x.is_nan() || x.abs() > COMPONENT_MAX) {
                Some(at) => Err(self
                    .item
                    .invalid(EMBEDDING, format!("number {} is {:e}, which cannot be searched", at + 1, vector[at]))),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Checks that the rows of `[[item.vectors]]` that come from columns are present and can be stored.
    fn check_vectors(&self, dense: &[(String, Vec<f32>)]) -> Result<(), InvalidItem> {
        let mut retained = Vec::new();
        for spec in &self.view.main().package.spec.item.vectors {
            let Some(column) = &spec.column else { continue };
            let wrong = |reason: String| self.item.invalid(format!("attributes.{column}"), reason);
            let row = dense.iter().find(|(name, _)| name == column).map(|(_, row)| row.as_slice());
            let row = row.ok_or_else(|| wrong(format!("missing, expected {} numbers", spec.width)))?;
            let rows = VectorRows::of(std::slice::from_ref(spec));
            rows.and_then(|rows| rows.encode(|_| row, &mut retained)).map_err(|e| wrong(e.to_string()))?;
        }
        Ok(())
    }

    /// Checks that the vectors that the item tower reads are present. Publishing rejects items without vectors too, since
    /// zeros would be a valid vector.
    fn check_read(&self, dense: &[(String, Vec<f32>)]) -> Result<(), InvalidItem> {
        let main = self.view.main();
        let specs = main.package.item.as_ref().map_or(&[][..], |tower| tower.features());
        // A missing number in a column is 0 at publish time too.
        let vectors = specs.iter().filter(|spec| spec.kind == FeatureKind::Dense && spec.width.unwrap_or(0) > 1);
        for spec in vectors {
            let (source, width) = (spec.source(), spec.width.unwrap_or(0));
            let is_column = main.columns.list().any(|column| column.name() == source);
            if !is_column && dense.iter().all(|(name, _)| name != source) {
                let reason = format!("missing, expected {width} numbers, which the item tower reads");
                return Err(self.item.invalid(GivenItem::field(true, source), reason));
            }
        }
        Ok(())
    }

    /// Converts the values of an attribute for its column, the item tower or one of `[[item.vectors]]`.
    fn attribute(&self, name: &str, values: &GivenValues) -> Result<Brought, InvalidItem> {
        let main = self.view.main();
        let field = || GivenItem::field(self.item.whole, name);
        let source = main.package.item.as_ref().and_then(|t| t.features().iter().find(|f| f.source() == name));
        if let (Some(_), false) = (source, self.item.whole) {
            let reason = "the item tower reads it: expected the whole item, to compute its embedding again";
            return Err(self.item.invalid(field(), reason));
        }
        let is_kept = main.package.spec.item.vectors.iter().any(|spec| spec.column.as_deref() == Some(name));
        if is_kept && !self.item.whole {
            return Err(self.item.invalid(field(), "it is a vector per item: expected the whole item"));
        }
        let column = main.columns.list().find(|column| column.name() == name);
        let kind = match (column, source) {
            _ if is_kept || column.is_none() && source.is_some_and(|source| source.kind == FeatureKind::Dense) => {
                let numbers: Vec<f32> = match values {
                    GivenValues::Integers(values) => values.iter().map(|&x| x as f32).collect(),
                    GivenValues::Numbers(values) => values.iter().map(|&x| x as f32).collect(),
                    GivenValues::Missing => return Ok(Brought::Attribute(Attribute::Missing)),
                    GivenValues::Texts(_) => return Err(self.item.invalid(field(), "got texts, expected numbers")),
                };
                return Ok(Brought::Dense(numbers));
            }
            (Some(column), _) => column.kind(),
            (None, Some(_)) if matches!(values, GivenValues::Texts(_)) => ColumnKind::Texts,
            (None, Some(_)) => ColumnKind::Integers,
            (None, None) => {
                let known: Vec<&str> = main.columns.list().map(|column| column.name()).collect();
                return Err(self.item.invalid(field(), format!("unknown, expected one of: {}", known.join(", "))));
            }
        };
        let expected = match kind {
            ColumnKind::Floats => "a number that a 64-bit float represents exactly",
            _ => kind.plural(),
        };
        let attribute = as_kind(values, kind);
        attribute
            .map(Brought::Attribute)
            .ok_or_else(|| self.item.invalid(field(), format!("got {}, expected {expected}", values.shown())))
    }
}

enum Brought {
    Attribute(Attribute),
    Dense(Vec<f32>),
}

fn as_kind(values: &GivenValues, kind: ColumnKind) -> Option<Attribute> {
    match (kind, values) {
        (_, GivenValues::Missing) => Some(Attribute::Missing),
        (ColumnKind::Integers, GivenValues::Integers(values)) => Some(Attribute::Integers(values.clone())),
        (ColumnKind::Texts, GivenValues::Texts(values)) => Some(Attribute::Texts(values.clone())),
        (ColumnKind::Floats, GivenValues::Numbers(one)) if one.len() == 1 && one[0].is_finite() => {
            Some(Attribute::Number(one[0]))
        }
        (ColumnKind::Floats, GivenValues::Integers(one)) if one.len() == 1 => {
            let number = one[0] as f64;
            (number as i128 == i128::from(one[0])).then_some(Attribute::Number(number))
        }
        _ => None,
    }
}
