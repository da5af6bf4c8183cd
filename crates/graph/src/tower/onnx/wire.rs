//! Checks the nesting of a file's protobuf messages before a parser that recurses without limit.

use sterling_core::error::{Error, Result};

/// An ONNX message type: its fields with messages that may lead back to it, and their types.
struct Message {
    name: &'static str,
    parts: &'static [(u64, Part)],
}

enum Part {
    Within(&'static Message),
    /// Not allowed in any file; the text describes it.
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

/// Rejects truncated files and unbounded nesting.
pub(super) fn check(bytes: &[u8]) -> Result<()> {
    walk(&MODEL, bytes)
}

fn walk(message: &Message, mut bytes: &[u8]) -> Result<()> {
    let cut = || Error::invalid(format!("a {} that is cut off", message.name));
    while !bytes.is_empty() {
        let key = varint(&mut bytes).ok_or_else(cut)?;
        let field = match key & 7 {
            0 => varint(&mut bytes).map(|_| &[][..]),
            1 => take(&mut bytes, 8),
            2 => varint(&mut bytes).and_then(|length| take(&mut bytes, length)),
            5 => take(&mut bytes, 4),
            wire => return Err(Error::invalid(format!("a {} with a field of wire type {wire}", message.name))),
        };
        let field = field.ok_or_else(cut)?;
        match message.parts.iter().find(|(number, _)| *number == key >> 3) {
            Some((_, Part::Within(inner))) => walk(inner, field)?,
            Some((_, Part::Never(what))) => return Err(Error::invalid(format!("it holds {what}"))),
            None => {}
        }
    }
    Ok(())
}

pub(super) fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (field, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(field)
}

pub(super) fn varint(bytes: &mut &[u8]) -> Option<u64> {
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
