//! External data: constants whose numbers are in another file in the folder of the graph, which is the default of
//! PyTorch's exporter.
//!
//! [`inlined`] rewrites the protobuf messages that lead to such constants and copies every other field unchanged.

use std::collections::BTreeMap;

use super::BYTES_MAX;
use super::wire::{self, BYTES, Field, next_field};
use sterling_core::error::{Error, Result};

/// A message type on the path from the file to the constants.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
}

impl Message {
    /// Returns the message type of a field that may lead to a constant; `None` for other fields.
    fn field(self, number: u64) -> Option<Message> {
        match (self, number) {
            (Message::Model, 7) => Some(Message::Graph),
            (Message::Graph, 1) => Some(Message::Node),
            (Message::Graph, 5) | (Message::Attribute, 5) => Some(Message::Tensor),
            (Message::Node, 5) => Some(Message::Attribute),
            _ => None,
        }
    }
}

const NAME: u64 = 8;
const RAW_DATA: u64 = 9;
const EXTERNAL_DATA: u64 = 13;
const DATA_LOCATION: u64 = 14;

/// Returns the next field of a message that passed [`wire::check`].
fn field<'a>(bytes: &mut &'a [u8]) -> Result<Option<Field<'a>>> {
    next_field(bytes).map_err(|malformed| malformed.of("message"))
}

/// Files with external data, and the ranges of these files that constants refer to.
struct Files<'a> {
    read: &'a mut dyn FnMut(&str) -> Result<Vec<u8>>,
    files: BTreeMap<String, Vec<u8>>,
    /// Name of the constant, per file and byte range.
    ranges: BTreeMap<(String, u64, u64), String>,
    bytes: usize,
    /// Maximum bytes of the rewritten graph file.
    most: usize,
}

/// Returns a graph file that contains all external data. `read` returns the contents of another file in the folder;
/// file names have no path.
///
/// # Errors
/// `Invalid` with the constant and its file if the file is missing, too short or outside the folder, if ranges of two constants
/// overlap, or if the result exceeds the maximum size; errors of `read`.
pub fn inlined(bytes: Vec<u8>, read: &mut dyn FnMut(&str) -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    inlined_within(BYTES_MAX, bytes, read)
}

fn inlined_within(most: usize, bytes: Vec<u8>, read: &mut dyn FnMut(&str) -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    // Other malformed files are rejected when they are loaded.
    if bytes.len() > most || wire::check(&bytes).is_err() || !has_external(Message::Model, &bytes)? {
        return Ok(bytes);
    }
    let mut files = Files { read, files: BTreeMap::new(), ranges: BTreeMap::new(), bytes: bytes.len(), most };
    let made = files.rewritten(Message::Model, &bytes)?;
    files.check_overlaps()?;
    Ok(made)
}

fn has_external(message: Message, mut bytes: &[u8]) -> Result<bool> {
    while let Some(field) = field(&mut bytes)? {
        let is_here = message == Message::Tensor && field.number == EXTERNAL_DATA;
        let inner = message.field(field.number).zip(field.contents());
        if is_here || inner.map_or(Ok(false), |(inner, contents)| has_external(inner, contents))? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn push(out: &mut Vec<u8>, number: u64, contents: &[u8]) {
    for mut n in [number << 3 | BYTES, contents.len() as u64] {
        while n >= 0x80 {
            out.push(n as u8 | 0x80);
            n >>= 7;
        }
        out.push(n as u8);
    }
    out.extend_from_slice(contents);
}

impl Files<'_> {
    fn rewritten(&mut self, message: Message, bytes: &[u8]) -> Result<Vec<u8>> {
        if message == Message::Tensor {
            return self.tensor(bytes);
        }
        let mut out = Vec::with_capacity(bytes.len());
        let mut rest = bytes;
        while let Some(field) = field(&mut rest)? {
            match message.field(field.number).zip(field.contents()) {
                Some((inner, contents)) => push(&mut out, field.number, &self.rewritten(inner, contents)?),
                None => out.extend_from_slice(field.all),
            }
        }
        Ok(out)
    }

    fn tensor(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        let (mut out, mut name, mut entries, mut is_external) = (Vec::new(), String::new(), BTreeMap::new(), false);
        let mut rest = bytes;
        while let Some(field) = field(&mut rest)? {
            match (field.number, field.contents()) {
                (EXTERNAL_DATA, Some(entry)) => entries.extend([pair(entry)?]),
                (DATA_LOCATION, _) => is_external = field.value == 1,
                (number, contents) => {
                    if let (NAME, Some(contents)) = (number, contents) {
                        name = String::from_utf8_lossy(contents).into_owned();
                    }
                    out.extend_from_slice(field.all);
                }
            }
        }
        if is_external {
            let numbers = self.range(&name, &entries).map_err(|e| e.within(format!("constant `{name}`")))?;
            push(&mut out, RAW_DATA, numbers);
        }
        Ok(out)
    }

    /// Returns the bytes of a constant in a file.
    fn range(&mut self, name: &str, entries: &BTreeMap<String, String>) -> Result<&[u8]> {
        let file = entries.get("location").map_or("", String::as_str);
        if file.is_empty() || file.contains(['/', '\\', '\0']) || file.starts_with('.') {
            return Err(Error::invalid(format!(
                "external data in `{file}`, expected a file in the folder of the graph"
            )));
        }
        let number = |key: &str| match entries.get(key) {
            Some(text) => text
                .parse::<u64>()
                .map(Some)
                .map_err(|_| Error::invalid(format!("external data in `{file}`: {key} `{text}`, expected an integer"))),
            None => Ok(None),
        };
        let (offset, length) = (number("offset")?.unwrap_or(0), number("length")?);
        if !self.files.contains_key(file) {
            let contents = (self.read)(file)?;
            self.files.insert(file.to_owned(), contents);
        }
        let contents = &self.files[file];
        let size = contents.len() as u64;
        let length = length.unwrap_or_else(|| size.saturating_sub(offset));
        let end = offset.checked_add(length).filter(|&end| end <= size).ok_or_else(|| {
            Error::invalid(format!(
                "external data of {length} bytes from byte {offset} exceeds `{file}`, which has {size} bytes"
            ))
        })?;
        self.bytes = self.bytes.saturating_add(length as usize);
        if self.bytes > self.most {
            return Err(Error::invalid(format!("the graph with its external data exceeds {} bytes", self.most)));
        }
        if length > 0 {
            self.ranges.insert((file.to_owned(), offset, end), name.to_owned());
        }
        Ok(&contents[offset as usize..end as usize])
    }

    /// Rejects ranges of constants that partly overlap. Several constants may refer to the same range.
    fn check_overlaps(&self) -> Result<()> {
        let mut last: Option<(&(String, u64, u64), &String)> = None;
        for (range, name) in &self.ranges {
            if let Some(((file, _, end), other)) = last.filter(|((file, _, end), _)| *file == range.0 && range.1 < *end)
            {
                return Err(Error::invalid(format!(
                    "constants `{other}` and `{name}` overlap in `{file}`: one ends at byte {end}, one starts at {}",
                    range.1
                )));
            }
            last = Some((range, name));
        }
        Ok(())
    }
}

/// Reads an entry as a key and a value.
fn pair(mut entry: &[u8]) -> Result<(String, String)> {
    let (mut key, mut value) = (String::new(), String::new());
    while let Some(field) = field(&mut entry)? {
        let text = field.contents().map(String::from_utf8_lossy).unwrap_or_default().into_owned();
        match field.number {
            1 => key = text,
            2 => value = text,
            _ => {}
        }
    }
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use rten_onnx::onnx::{
        AttributeProto, DataLocation, DataType, GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto,
    };

    const FILE: &str = "user.onnx.data";

    fn external(name: &str, entries: &[(&str, &str)]) -> TensorProto {
        let entry =
            |&(key, value): &(&str, &str)| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
        TensorProto {
            name: Some(name.into()),
            dims: vec![2],
            data_type: Some(DataType::FLOAT),
            external_data: entries.iter().map(entry).collect(),
            data_location: Some(DataLocation::EXTERNAL),
            ..TensorProto::default()
        }
    }

    fn file(constants: Vec<TensorProto>, attribute: Option<TensorProto>) -> Vec<u8> {
        let attribute = AttributeProto { name: Some("value".into()), t: attribute, ..AttributeProto::default() };
        let node = NodeProto { op_type: Some("Constant".into()), attribute: vec![attribute], ..NodeProto::default() };
        let graph = GraphProto { initializer: constants, node: vec![node], ..GraphProto::default() };
        ModelProto { ir_version: Some(10), graph: Some(graph), ..ModelProto::default() }.write_buf().unwrap()
    }

    fn data() -> Vec<u8> {
        (0..6).flat_map(|n| (n as f32).to_le_bytes()).collect()
    }

    fn made(bytes: Vec<u8>) -> Result<Vec<u8>> {
        inlined(bytes, &mut |name| match name {
            FILE => Ok(data()),
            name => Err(Error::not_found(name.to_owned())),
        })
    }

    #[test]
    fn constants_of_other_files_are_inlined() {
        let all = vec![
            external("a", &[("location", FILE), ("offset", "8"), ("length", "8")]),
            external("shared", &[("location", FILE), ("offset", "8"), ("length", "8"), ("checksum", "?")]),
            external("rest", &[("location", FILE), ("offset", "16")]),
        ];
        let first = external("", &[("length", "8"), ("location", FILE)]);
        let model = ModelProto::parse_buf(&made(file(all, Some(first))).unwrap()).unwrap();
        assert_eq!(model.ir_version, Some(10));
        let graph = model.graph.unwrap();
        let numbers = |t: &TensorProto| {
            assert!(t.external_data.is_empty() && t.data_location.is_none() && t.dims == [2]);
            let raw = t.raw_data.as_ref().unwrap().borrow();
            raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
        };
        let all: Vec<_> = graph.initializer.iter().map(numbers).collect();
        assert_eq!(all, [[2.0, 3.0], [2.0, 3.0], [4.0, 5.0]]);
        assert_eq!(numbers(graph.node[0].attribute[0].t.as_ref().unwrap()), [0.0, 1.0]);
    }

    #[test]
    fn files_without_external_data_stay_as_they_are() {
        for bytes in [file(Vec::new(), None), b"no graph".to_vec(), Vec::new(), vec![0x3a; 40]] {
            assert_eq!(made(bytes.clone()).unwrap(), bytes);
        }
    }

    #[test]
    fn invalid_external_data_is_rejected_with_the_constant() {
        for (entries, expected) in [
            (
                &[("location", "../secret")][..],
                "constant `w`: external data in `../secret`, expected a file in the folder",
            ),
            (&[("location", "/etc/passwd")], "external data in `/etc/passwd`"),
            (&[("location", "a\\b")], "external data in `a\\b`"),
            (&[("location", ".hidden")], "external data in `.hidden`"),
            (&[("location", "a\0b")], "external data in"),
            (&[("offset", "0")], "external data in ``"),
            (&[("location", "gone.data")], "gone.data"),
            (&[("location", FILE), ("offset", "-1")], "offset `-1`"),
            (&[("location", FILE), ("length", "x")], "length `x`"),
            (
                &[("location", FILE), ("offset", "20"), ("length", "8")],
                "8 bytes from byte 20 exceeds `user.onnx.data`, which has 24",
            ),
            (&[("location", FILE), ("offset", "18446744073709551615"), ("length", "2")], "which has 24 bytes"),
        ] {
            let error = made(file(vec![external("w", entries)], None)).unwrap_err().to_string();
            assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
        }
        let range = |name, offset| external(name, &[("location", FILE), ("offset", offset), ("length", "8")]);
        let error = made(file(vec![range("a", "0"), range("b", "4")], None)).unwrap_err().to_string();
        assert!(error.contains("constants `a` and `b` overlap in `user.onnx.data`"), "{error}");
    }

    #[test]
    fn many_constants_of_one_range_are_rejected_at_the_maximum_size() {
        let one = |n: usize| external(&format!("c{n}"), &[("location", FILE)]);
        let bytes = file((0..50).map(one).collect(), None);
        let most = bytes.len() + 49 * data().len();
        assert!(inlined_within(most + data().len(), bytes.clone(), &mut |_| Ok(data())).is_ok());
        let error = inlined_within(most, bytes, &mut |_| Ok(data())).unwrap_err().to_string();
        assert!(error.contains(&format!("exceeds {most} bytes")), "{error}");
    }
}
