//! What a column tells of a slot.

/// The values of one slot in one column.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Cell<'a> {
    Missing,
    Integer(i64),
    Integers(Vec<i64>),
    Float(f64),
    Text(&'a str),
    Texts(Vec<&'a str>),
}
