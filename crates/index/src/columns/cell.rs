//! Value of a column at a slot.

/// Values of one slot in one column.
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

/// Maximum length of an integer and of a float in a JSON answer, each with a comma, in bytes.
const INTEGER_BYTES: usize = 21;
pub(super) const FLOAT_BYTES: usize = 26;

/// Returns the bytes of a text in an answer if it needs no escapes: the text, and either quotes and a comma, or an
/// offset.
pub(super) const fn text_bytes(text_len: usize) -> usize {
    text_len + 4
}

/// Returns the maximum length of `count` integers in an answer, in bytes.
pub(super) const fn integer_bytes(count: usize) -> usize {
    count * INTEGER_BYTES
}

impl Cell<'_> {
    /// Returns the maximum length of the value in an answer, in bytes, if its texts need no escapes.
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
