//! Reader of JSON lines, one item per line.

use std::fmt;
use std::io::{BufRead, ErrorKind};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::builder::Builder;
use sterling_core::error::{Error, Result};
use sterling_core::items::EMBEDDING;
use sterling_storage::arrow::Cell;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: i64,
    #[serde(default)]
    embedding: Option<Vec<f32>>,
    #[serde(default)]
    attributes: Attributes,
}

/// Members of an object in order; a map would drop the first of two members with the same name.
#[derive(Default)]
struct Attributes(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Attributes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of attributes")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Attributes, A::Error> {
                let mut attributes = Attributes::default();
                while let Some(member) = members.next_entry()? {
                    attributes.0.push(member);
                }
                Ok(attributes)
            }
        }
        from.deserialize_map(Members)
    }
}

/// Counts the lines that hold items.
pub(super) fn count(lines: impl BufRead) -> std::io::Result<usize> {
    let is_item = |line: &String| !line.trim_start_matches('\u{feff}').trim().is_empty();
    lines.lines().try_fold(0, |count, line| Ok(count + usize::from(is_item(&line?))))
}

pub(super) fn read(lines: impl BufRead, builder: &mut Builder) -> Result<()> {
    for (number, line) in lines.lines().enumerate() {
        let place = || format!("line {}", number + 1);
        let line = line.map_err(|e| match e.kind() {
            ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => {
                Error::invalid(e.to_string()).within(place())
            }
            _ => Error::io(place(), e),
        })?;
        // Some editors and Windows programs begin a file with a byte-order mark.
        let line = if number == 0 { line.trim_start_matches('\u{feff}') } else { &line };
        if line.trim().is_empty() {
            continue;
        }
        read_line(line, builder).map_err(|e| e.within(place()))?;
    }
    Ok(())
}

fn read_line(line: &str, builder: &mut Builder) -> Result<()> {
    let line: Line = serde_json::from_str(line).map_err(|e| {
        Error::invalid(format!("not an item: {e}; expected {{\"id\": 1, \"embedding\": [..], \"attributes\": {{..}}}}"))
    })?;
    builder.begin_item(line.id);
    if let Some(vector) = line.embedding {
        builder.cell(EMBEDDING, Cell::Vector(vector))?;
    }
    for (name, value) in line.attributes.0 {
        let cell = cell(value).map_err(|e| e.within(format!("attribute `{name}`")))?;
        builder.cell(&name, cell)?;
    }
    builder.end_item()
}

fn number(n: &serde_json::Number) -> Result<Cell> {
    match (n.as_i64(), n.as_u64(), n.as_f64()) {
        (Some(integer), ..) => Ok(Cell::Integers(vec![integer])),
        (None, Some(_), _) | (None, None, None) => {
            Err(Error::invalid(format!("got {n}, expected an integer of at most {}", i64::MAX)))
        }
        // serde_json parses `-0` as a float, but it is an integer.
        (None, None, Some(0.0)) => Ok(Cell::Integers(vec![0])),
        (None, None, Some(float)) => Ok(Cell::Number(float)),
    }
}

fn cell(value: Value) -> Result<Cell> {
    let scalar = |v: &Value| match v {
        Value::Bool(b) => Ok(Some(Cell::Texts(vec![b.to_string()]))),
        Value::String(s) => Ok(Some(Cell::Texts(vec![s.clone()]))),
        Value::Number(n) => number(n).map(Some),
        _ => Ok(None),
    };
    match value {
        Value::Null => Ok(Cell::Missing),
        Value::Array(values) if values.is_empty() => Ok(Cell::Missing),
        Value::Array(values) => {
            let (mut texts, mut integers, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
            for v in &values {
                match scalar(v)? {
                    Some(Cell::Texts(t)) => texts.extend(t),
                    Some(Cell::Integers(i)) => {
                        numbers.push(i[0] as f32);
                        integers.extend(i);
                    }
                    Some(Cell::Number(n)) => numbers.push(n as f32),
                    _ => return Err(Error::invalid(format!("got {v} in a list, expected texts or numbers"))),
                }
            }
            match values.len() {
                n if n == texts.len() => Ok(Cell::Texts(texts)),
                n if n == integers.len() => Ok(Cell::Integers(integers)),
                n if n == numbers.len() => Ok(Cell::Vector(numbers)),
                _ => Err(Error::invalid("got texts and numbers in one list, expected one kind")),
            }
        }
        other => {
            scalar(&other)?.ok_or_else(|| Error::invalid(format!("got {other}, expected a text, a number or a list")))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::items::Items;
    use sterling_index::columns::ItemValues;
    use sterling_storage::rows::Spill;

    fn parse(text: &str) -> Result<Items> {
        let mut builder = Builder::new(Spill::never());
        read(text.as_bytes(), &mut builder)?;
        builder.finish()
    }

    #[test]
    fn columns_take_their_type_from_the_values() {
        let items = parse(concat!(
            "{\"id\": 7, \"embedding\": [1, 0.5], \"attributes\": {\"lang\": [\"en\", \"fr\"], \"year\": 2024, \"price\": 9}}\n\n",
            "{\"id\": -8, \"embedding\": [0, 1], \"attributes\": {\"price\": 9.5, \"late\": true, \"pca\": [0.5, 1]}}\n",
        ));
        assert!(items.unwrap_err().to_string().contains("column `pca`"));
        let items = parse(concat!(
            "{\"id\": 7, \"embedding\": [1, 0.5], \"attributes\": {\"lang\": [\"en\", \"fr\"], \"year\": 2024, \"price\": 9}}\n",
            "{\"id\": -8, \"embedding\": [0, 1], \"attributes\": {\"price\": 9.5, \"late\": true, \"lang\": null}}\n",
        ))
        .unwrap();
        assert_eq!(items.ids, [7, -8]);
        assert_eq!(items.dense[EMBEDDING].all().unwrap(), [1.0, 0.5, 0.0, 1.0]);
        for column in &items.columns {
            match (column.name.as_str(), &column.values) {
                ("lang", ItemValues::Texts { offsets, values }) => {
                    assert_eq!((&offsets[..], values.len()), (&[0, 2, 2][..], 2))
                }
                ("year", ItemValues::Integers { offsets, values }) => {
                    assert_eq!((&offsets[..], values[0]), (&[0, 1, 1][..], 2024))
                }
                ("price", ItemValues::Floats(v)) => assert_eq!(v, &[9.0, 9.5]),
                ("late", ItemValues::Texts { offsets, .. }) => assert_eq!(&offsets[..], &[0, 0, 1]),
                (name, _) => panic!("column {name} has the wrong type"),
            }
        }
    }

    #[test]
    fn invalid_lines_are_named() {
        for (text, expected) in [
            ("{}", "line 1: not an item: missing field `id`"),
            ("{\"id\": 1.5}", "line 1: not an item"),
            ("{\"id\": 1}\n{\"id\": ", "line 2: not an item"),
            ("{\"id\": 1, \"extra\": 2}", "unknown field `extra`"),
            ("{\"id\": 1, \"attributes\": {\"a\": {\"b\": 1}}}", "attribute `a`: got {\"b\":1}"),
            ("{\"id\": 1, \"attributes\": {\"a\": [1, \"x\"]}}", "attribute `a`: got texts and numbers"),
            ("{\"id\": 1, \"attributes\": {\"a\": [[1]]}}", "attribute `a`: got [1] in a list"),
            (
                "{\"id\": 1, \"attributes\": {\"a\": 1}}\n{\"id\": 2, \"attributes\": {\"a\": \"x\"}}",
                "line 2: column `a`: got texts, expected integers",
            ),
            (
                "{\"id\": 1, \"attributes\": {\"a\": [1, 2]}}\n{\"id\": 2, \"attributes\": {\"a\": 0.5}}",
                "line 2: column `a`: got a number",
            ),
            (
                "{\"id\": 1, \"embedding\": []}",
                "line 1: column `embedding`: got a vector of 0 numbers, expected at least one",
            ),
            (
                "{\"id\": 1, \"embedding\": [1, 2]}\n{\"id\": 2, \"embedding\": [1]}",
                "line 2: column `embedding`: got a vector of 1 numbers, expected 2",
            ),
            (
                "{\"id\": 1, \"embedding\": [1, 2]}\n{\"id\": 2}",
                "line 2: column `embedding`: got nothing, expected vectors",
            ),
            (
                "{\"id\": 1}\n{\"id\": 2, \"embedding\": [1, 2]}",
                "line 2: column `embedding`: got a vector, expected a vector on every item",
            ),
            ("{\"id\": 1, \"attributes\": {\"id\": 3}}", "column `id`"),
            ("{\"id\": 1, \"id\": 3}", "duplicate field `id`"),
            ("{\"id\": 1, \"attributes\": {\"a\": 1, \"b\": 2, \"a\": 3}}", "line 1: column `a`: given twice"),
            (
                "{\"id\": 1, \"attributes\": {\"a\": 9223372036854775808}}",
                "line 1: attribute `a`: got 9223372036854775808, expected an integer of at most 9223372036854775807",
            ),
            (
                "{\"id\": 1, \"attributes\": {\"a\": 9007199254740993}}\n{\"id\": 2, \"attributes\": {\"a\": 0.5}}",
                "line 2: column `a`: got a number, 0.5, expected an integer, because the column holds 9007199254740993",
            ),
            (
                "{\"id\": 1, \"attributes\": {\"a\": 0.5}}\n{\"id\": 2, \"attributes\": {\"a\": 9007199254740993}}",
                "line 2: column `a`: got 9007199254740993, expected a number that a float represents exactly",
            ),
            (
                "{\"id\": 1, \"attributes\": {\"a\": 1}}\n{\"id\": 2, \"attributes\": {\"a\": 18446744073709551616}}",
                "line 2: column `a`: got a number, 18446744073709552000, expected a 64-bit integer, as in earlier items",
            ),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
    #[test]
    fn numbers_are_stored_exactly() {
        let floats: Vec<f64> = (1..500).map(|n| f64::from(n).sqrt() * 9.334749517884099 - 100.0).collect();
        let lines: Vec<String> =
            floats.iter().map(|x| format!("{{\"id\": 1, \"attributes\": {{\"a\": {x:?}}}}}")).collect();
        match &parse(&lines.join("\n")).unwrap().columns[0].values {
            ItemValues::Floats(read) => assert_eq!(read, &floats),
            _ => panic!("not floats"),
        }
        let lines = ["-0", "7", "-9223372036854775808", "9223372036854775807", "0.0"];
        let lines = lines.map(|n| format!("{{\"id\": 1, \"attributes\": {{\"a\": {n}}}}}"));
        match &parse(&lines.join("\n")).unwrap().columns[0].values {
            ItemValues::Integers { values, .. } => assert_eq!(values, &[0, 7, i64::MIN, i64::MAX, 0]),
            _ => panic!("not integers"),
        }
    }
}
