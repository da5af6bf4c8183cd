//! Validates items from callers against a view, and converts them to updates.

use std::collections::BTreeSet;

use super::update::{Put, Update, Wrong};
use crate::view::{Attribute, View};
use sterling_core::limits::{ATTRIBUTE_BYTES_MAX, COMPONENT_MAX};
use sterling_core::units::ItemId;
use sterling_graph::tower::FeatureKind;
use sterling_index::columns::ColumnKind;
use sterling_snapshot::items::EMBEDDING;
use sterling_snapshot::{VectorRows, shard_of};

/// Maximum number of updates per call.
pub const UPDATES_MAX: usize = 10_000;

/// Maximum bytes of received text that a reason repeats.
const SHOWN_BYTES: usize = 40;

/// Values of one attribute as a caller sends them; their meaning depends on the model's columns.
#[derive(Clone, Debug, PartialEq)]
pub enum GivenValues {
    /// No value, which removes the attribute.
    Missing,
    /// Integers.
    Integers(Vec<i64>),
    /// Numbers, at least one of them not an integer.
    Numbers(Vec<f64>),
    /// Strings.
    Texts(Vec<String>),
}

/// Item as a caller sends it.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenItem {
    /// Item id of the user.
    pub id: i64,
    /// Embedding of the item.
    pub embedding: Option<Vec<f32>>,
    /// All of its attributes, or those that change.
    pub attributes: Vec<(String, GivenValues)>,
    /// True for a complete item, false for a change of some attributes of an existing one.
    pub whole: bool,
}

impl GivenItem {
    fn wrong(&self, field: impl Into<String>, reason: impl Into<String>) -> Wrong {
        Wrong { id: Some(self.id), field: field.into(), reason: reason.into() }
    }

    /// Name of an attribute's field in the call, or of the parent field if `name` is empty.
    pub fn field(whole: bool, name: &str) -> String {
        let of = if whole { "attributes" } else { "set" };
        if name.is_empty() { of.into() } else { format!("{of}.{name}") }
    }

    /// Converts the item to an update. `seen` are the ids of the call so far. The existence of a changed item is not checked: an
    /// update that the view does not show yet may insert it.
    ///
    /// # Errors
    /// The field, the received and the expected value.
    pub fn checked(self, view: &View, seen: &mut BTreeSet<i64>) -> Result<Update, Wrong> {
        if !seen.insert(self.id) {
            return Err(self.wrong("id", format!("{} occurs twice in the call, expected each id once", self.id)));
        }
        if let Some(part) = view.main().manifest.shard
            && shard_of(ItemId(self.id), part.shards) != part.shard
        {
            let (its, shards) = (shard_of(ItemId(self.id), part.shards), part.shards);
            return Err(
                self.wrong("id", format!("it belongs to shard {its} of {shards}, this is shard {}", part.shard))
            );
        }
        self.check_vector(view)?;
        let (mut attributes, mut dense) = (Vec::new(), Vec::new());
        let (mut named, mut bytes) = (BTreeSet::new(), 0);
        for (name, values) in &self.attributes {
            if !named.insert(name) {
                return Err(self.wrong(GivenItem::field(self.whole, name), "given twice"));
            }
            match self.attribute(view, name, values)? {
                Brought::Attribute(attribute) => {
                    bytes += values.bytes();
                    attributes.push((name.clone(), attribute));
                }
                Brought::Dense(numbers) => dense.push((name.clone(), numbers)),
            }
        }
        if bytes > ATTRIBUTE_BYTES_MAX {
            let reason = format!("they take {bytes} bytes of memory, expected {ATTRIBUTE_BYTES_MAX} at most");
            return Err(self.wrong(GivenItem::field(self.whole, ""), reason));
        }
        if !self.whole {
            return Ok(Update::Set { id: self.id, attributes });
        }
        self.check_vectors(view, &dense)?;
        self.check_read(view, &dense)?;
        let put = Put { id: self.id, vector: self.embedding.clone(), attributes, dense };
        if let Some(tower) = &view.main().package.item
            && let Err(e) = tower.read(put.features(tower.features()))
        {
            return Err(self.wrong("attributes", e.to_string()));
        }
        Ok(Update::Put(put))
    }

    fn check_vector(&self, view: &View) -> Result<(), Wrong> {
        let has_tower = view.main().package.item.is_some();
        let width = view.dimension();
        match &self.embedding {
            Some(_) if !self.whole => {
                Err(self.wrong(EMBEDDING, "a vector beside `set`: expected the whole item with `attributes`"))
            }
            Some(_) if has_tower => Err(self.wrong(EMBEDDING, "the model's item tower makes it, expected none")),
            None if self.whole && !has_tower => {
                Err(self.wrong(EMBEDDING, format!("missing, expected {width} numbers")))
            }
            Some(vector) if vector.len() != width => {
                Err(self.wrong(EMBEDDING, format!("got {} numbers, expected {width}", vector.len())))
            }
            Some(vector) => {
                match vector.iter().position(|x| x.is_nan() || x.abs() > COMPONENT_MAX) {
                    Some(at) => Err(self
                        .wrong(EMBEDDING, format!("number {} is {:e}, which cannot be searched", at + 1, vector[at]))),
                    None => Ok(()),
                }
            }
            None => Ok(()),
        }
    }

    /// Checks that the rows of `[[item.vectors]]` that come from columns are present and can be stored.
    fn check_vectors(&self, view: &View, dense: &[(String, Vec<f32>)]) -> Result<(), Wrong> {
        let mut kept = Vec::new();
        for spec in &view.main().package.spec.item.vectors {
            let Some(column) = &spec.column else { continue };
            let wrong = |reason: String| self.wrong(format!("attributes.{column}"), reason);
            let row = dense.iter().find(|(name, _)| name == column).map(|(_, row)| row.as_slice());
            let row = row.ok_or_else(|| wrong(format!("missing, expected {} numbers", spec.width)))?;
            let rows = VectorRows::of(std::slice::from_ref(spec));
            rows.and_then(|rows| rows.encode(|_| row, &mut kept)).map_err(|e| wrong(e.to_string()))?;
        }
        Ok(())
    }

    /// Checks that the vectors that the item tower reads are present. Publishing rejects items without them too, since zeros
    /// would be a valid vector.
    fn check_read(&self, view: &View, dense: &[(String, Vec<f32>)]) -> Result<(), Wrong> {
        let main = view.main();
        let specs = main.package.item.as_ref().map_or(&[][..], |tower| tower.features());
        // A missing number in a column is 0 at publish time too.
        let vectors = specs.iter().filter(|spec| spec.kind == FeatureKind::Dense && spec.width.unwrap_or(0) > 1);
        for spec in vectors {
            let (source, width) = (spec.source(), spec.width.unwrap_or(0));
            let is_column = main.columns.list().any(|column| column.name() == source);
            if !is_column && dense.iter().all(|(name, _)| name != source) {
                let reason = format!("missing, expected {width} numbers, which the item tower reads");
                return Err(self.wrong(GivenItem::field(true, source), reason));
            }
        }
        Ok(())
    }

    /// Converts the values of an attribute for its column, the item tower or one of `[[item.vectors]]`.
    fn attribute(&self, view: &View, name: &str, values: &GivenValues) -> Result<Brought, Wrong> {
        let main = view.main();
        let field = || GivenItem::field(self.whole, name);
        let source = main.package.item.as_ref().and_then(|t| t.features().iter().find(|f| f.source() == name));
        if let (Some(_), false) = (source, self.whole) {
            let reason = "the item tower reads it: expected the whole item, from which a new vector is made";
            return Err(self.wrong(field(), reason));
        }
        let is_kept = main.package.spec.item.vectors.iter().any(|spec| spec.column.as_deref() == Some(name));
        if is_kept && !self.whole {
            return Err(self.wrong(field(), "it is a vector per item: expected the whole item"));
        }
        let column = main.columns.list().find(|column| column.name() == name);
        let kind = match (column, source) {
            _ if is_kept || column.is_none() && source.is_some_and(|source| source.kind == FeatureKind::Dense) => {
                let numbers: Vec<f32> = match values {
                    GivenValues::Integers(values) => values.iter().map(|&x| x as f32).collect(),
                    GivenValues::Numbers(values) => values.iter().map(|&x| x as f32).collect(),
                    GivenValues::Missing => return Ok(Brought::Attribute(Attribute::Missing)),
                    GivenValues::Texts(_) => return Err(self.wrong(field(), "got texts, expected numbers")),
                };
                return Ok(Brought::Dense(numbers));
            }
            (Some(column), _) => column.kind(),
            (None, Some(_)) if matches!(values, GivenValues::Texts(_)) => ColumnKind::Texts,
            (None, Some(_)) => ColumnKind::Integers,
            (None, None) => {
                let known: Vec<&str> = main.columns.list().map(|column| column.name()).collect();
                return Err(self.wrong(field(), format!("unknown, expected one of: {}", known.join(", "))));
            }
        };
        let expected = match kind {
            ColumnKind::Floats => "a number that a float of 64 bits keeps exactly",
            _ => kind.plural(),
        };
        let attribute = values.as_kind(kind);
        attribute
            .map(Brought::Attribute)
            .ok_or_else(|| self.wrong(field(), format!("got {}, expected {expected}", values.shown())))
    }
}

enum Brought {
    Attribute(Attribute),
    Dense(Vec<f32>),
}

impl GivenValues {
    fn as_kind(&self, kind: ColumnKind) -> Option<Attribute> {
        match (kind, self) {
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

    /// Bytes of memory.
    fn bytes(&self) -> usize {
        match self {
            GivenValues::Missing => 0,
            GivenValues::Integers(values) => size_of_val(values.as_slice()),
            GivenValues::Numbers(values) => size_of_val(values.as_slice()),
            GivenValues::Texts(values) => values.iter().map(|text| size_of::<String>() + text.len()).sum(),
        }
    }

    fn shown(&self) -> String {
        match self {
            GivenValues::Missing => "nothing".into(),
            GivenValues::Integers(values) if values.len() == 1 => values[0].to_string(),
            // Printed with a decimal point to show that it is not an integer.
            GivenValues::Numbers(values) if values.len() == 1 => format!("{:?}", values[0]),
            GivenValues::Integers(values) => format!("{} integers", values.len()),
            GivenValues::Numbers(values) => format!("{} numbers", values.len()),
            GivenValues::Texts(values) => match &values[..] {
                [one] if one.len() <= SHOWN_BYTES => format!("the text `{one}`"),
                _ => format!("{} texts", values.len()),
            },
        }
    }
}
