//! JSON lines, one item a line.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::builder::{Builder, Cell};
use super::{EMBEDDING, Items};
use crate::error::{Error, Result};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: i64,
    #[serde(default)]
    embedding: Option<Vec<f32>>,
    #[serde(default)]
    attributes: Map<String, Value>,
}

pub(super) fn read(path: &Path) -> Result<Items> {
    let file = File::open(path).map_err(|e| Error::io("items", e))?;
    read_lines(BufReader::with_capacity(1 << 20, file))
}

fn read_lines(lines: impl BufRead) -> Result<Items> {
    let mut builder = Builder::default();
    for (number, line) in lines.lines().enumerate() {
        let place = || format!("line {}", number + 1);
        let line = line.map_err(|e| Error::io(place(), e))?;
        if line.trim().is_empty() {
            continue;
        }
        read_line(&line, &mut builder).map_err(|e| e.within(place()))?;
    }
    Ok(builder.finish())
}

fn read_line(line: &str, builder: &mut Builder) -> Result<()> {
    let line: Line = serde_json::from_str(line).map_err(|e| {
        Error::invalid(format!("not an item: {e}; expected {{\"id\": 1, \"embedding\": [..], \"attributes\": {{..}}}}"))
    })?;
    builder.begin_item(line.id);
    if let Some(vector) = line.embedding {
        builder.cell(EMBEDDING, Cell::Vector(vector))?;
    }
    for (name, value) in line.attributes {
        let cell = cell(value).map_err(|e| e.within(format!("attribute `{name}`")))?;
        builder.cell(&name, cell)?;
    }
    builder.end_item()
}

fn cell(value: Value) -> Result<Cell> {
    let scalar = |v: &Value| match v {
        Value::Bool(b) => Some(Cell::Texts(vec![b.to_string()])),
        Value::String(s) => Some(Cell::Texts(vec![s.clone()])),
        Value::Number(n) => match n.as_i64() {
            Some(i) => Some(Cell::Integers(vec![i])),
            None => n.as_f64().map(Cell::Number),
        },
        _ => None,
    };
    match value {
        Value::Null => Ok(Cell::Missing),
        Value::Array(values) if values.is_empty() => Ok(Cell::Missing),
        Value::Array(values) => {
            let (mut texts, mut integers, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
            for v in &values {
                match scalar(v) {
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
            scalar(&other).ok_or_else(|| Error::invalid(format!("got {other}, expected a text, a number or a list")))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::columns::ItemValues;

    fn parse(text: &str) -> Result<Items> {
        read_lines(text.as_bytes())
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
        assert_eq!(items.dense[EMBEDDING].values, [1.0, 0.5, 0.0, 1.0]);
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
    fn wrong_lines_are_named() {
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
                "{\"id\": 1, \"embedding\": [1, 2]}\n{\"id\": 2, \"embedding\": [1]}",
                "line 2: column `embedding`: got a vector of 1 numbers, expected 2",
            ),
            (
                "{\"id\": 1, \"embedding\": [1, 2]}\n{\"id\": 2}",
                "line 2: column `embedding`: got nothing, expected vectors",
            ),
            (
                "{\"id\": 1}\n{\"id\": 2, \"embedding\": [1, 2]}",
                "line 2: column `embedding`: got a vector, expected one on every item",
            ),
            ("{\"id\": 1, \"attributes\": {\"id\": 3}}", "column `id`"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
