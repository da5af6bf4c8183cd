//! Protobuf messages of a file: reads the fields of a message, and checks nesting before a parser that recurses without
//! limit.

use sterling_core::error::{Error, Result};

/// An ONNX message type, with its fields that may contain the type itself or that are forbidden.
struct Message {
    name: &'static str,
    parts: &'static [(u64, Part)],
}

enum Part {
    Within(&'static Message),
    /// A field that no file may have; the text describes the field in the error.
    Never(&'static str),
}

static MODEL: Message =
    Message { name: "ModelProto", parts: &[(7, Part::Within(&GRAPH)), (25, Part::Never("functions of its own"))] };

static GRAPH: Message = Message {
    name: "GraphProto",
    parts: &[
        (1, Part::Within(&NODE)),
        (11, Part::Within(&VALUE)),
        (12, Part::Within(&VALUE)),
        (13, Part::Within(&VALUE)),
        (15, Part::Never("sparse constants")),
    ],
};

static NODE: Message = Message { name: "NodeProto", parts: &[(5, Part::Within(&ATTRIBUTE))] };

static ATTRIBUTE: Message = Message {
    name: "AttributeProto",
    parts: &[
        (6, Part::Never("a graph within a node (If, Loop, Scan)")),
        (11, Part::Never("graphs within a node")),
        (22, Part::Never("a sparse constant")),
        (23, Part::Never("sparse constants")),
    ],
};

static VALUE: Message = Message { name: "ValueInfoProto", parts: &[(2, Part::Within(&TYPE))] };

static TYPE: Message = Message {
    name: "TypeProto",
    parts: &[
        (4, Part::Never("a value that is a sequence")),
        (5, Part::Never("a value that is a map")),
        (8, Part::Never("a value that is a sparse tensor")),
        (9, Part::Never("a value that is optional")),
    ],
};

/// Rejects truncated files and files with unbounded nesting.
pub(super) fn check(bytes: &[u8]) -> Result<()> {
    walk(&MODEL, bytes)
}

fn walk(message: &Message, mut bytes: &[u8]) -> Result<()> {
    while let Some(field) = next_field(&mut bytes).map_err(|malformed| malformed.of(message.name))? {
        match message.parts.iter().find(|(number, _)| *number == field.number) {
            Some((_, Part::Within(inner))) => walk(inner, field.payload)?,
            Some((_, Part::Never(what))) => {
                return Err(Error::invalid(format!("the file holds {what}, which is not supported")));
            }
            None => {}
        }
    }
    Ok(())
}

/// Wire type of fields with a length: messages, texts and bytes.
pub(super) const BYTES: u64 = 2;

/// A field of a message.
pub(super) struct Field<'a> {
    pub(super) number: u64,
    wire_type: u64,
    /// Bytes of the field, including its key.
    pub(super) all: &'a [u8],
    /// Bytes of the field after its key and length; empty for a varint.
    payload: &'a [u8],
    /// Value of a varint field; 0 for other fields.
    pub(super) value: u64,
}

impl<'a> Field<'a> {
    /// Returns the contents of a field with a length; `None` for other fields.
    pub(super) fn contents(&self) -> Option<&'a [u8]> {
        (self.wire_type == BYTES).then_some(self.payload)
    }
}

/// Reason why the next field of a message cannot be read.
pub(super) enum Malformed {
    CutOff,
    WireType(u64),
}

impl Malformed {
    /// Returns the error for a message type with this name.
    pub(super) fn of(self, message: &str) -> Error {
        Error::invalid(match self {
            Malformed::CutOff => format!("the {message} is truncated"),
            Malformed::WireType(wire_type) => {
                format!("the {message} has a field of wire type {wire_type}, expected 0, 1, 2 or 5")
            }
        })
    }
}

/// Returns the next field of a message, and moves `bytes` behind that field; `None` at the end.
pub(super) fn next_field<'a>(bytes: &mut &'a [u8]) -> Result<Option<Field<'a>>, Malformed> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let before = *bytes;
    let key = varint(bytes).ok_or(Malformed::CutOff)?;
    let wire_type = key & 7;
    let mut value = 0;
    let payload = match wire_type {
        0 => varint(bytes).map(|varint| {
            value = varint;
            &[][..]
        }),
        1 => take(bytes, 8),
        BYTES => varint(bytes).and_then(|length| take(bytes, length)),
        5 => take(bytes, 4),
        _ => return Err(Malformed::WireType(wire_type)),
    };
    let payload = payload.ok_or(Malformed::CutOff)?;
    let all = &before[..before.len() - bytes.len()];
    Ok(Some(Field { number: key >> 3, wire_type, all, payload, value }))
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (field, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(field)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for place in 0..10 {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
