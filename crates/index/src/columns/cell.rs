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

/// Bytes of an integer and of a number with a comma, as text, at most.
const INTEGER_BYTES: usize = 21;
pub(super) const FLOAT_BYTES: usize = 26;

/// Bytes of a text in an answer that needs no escapes: quotes and a comma, or an offset.
pub(super) const fn text_bytes(text_len: usize) -> usize {
    text_len + 4
}

/// Bytes of so many integers in an answer, at most.
pub(super) const fn integer_bytes(count: usize) -> usize {
    count * INTEGER_BYTES
}

impl Cell<'_> {
    /// Bytes that an answer takes for it at most, where its texts need no escapes.
    pub fn bytes(&self) -> usize {
        match self {
            Cell::Missing => 0,
            Cell::Integer(_) => INTEGER_BYTES,
            Cell::Integers(many) => integer_bytes(many.len()),
            Cell::Float(_) => FLOAT_BYTES,
            Cell::Text(text) => text_bytes(text.len()),
            Cell::Texts(many) => many.iter().map(|text| text_bytes(text.len())).sum(),
        }
    }
}
