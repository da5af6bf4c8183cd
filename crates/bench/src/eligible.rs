//! Checks whether an item passes a filter (`docs/reference/filter-language.md`), by the column values that the API
//! returns. The check shares no code with the filter index of the server, so that an independent implementation checks
//! the server.

use serde_json::{Map, Value};

use sterling_core::error::Result;
use sterling_index::columns::Threshold;
use sterling_index::filter::{Expr, Leaf, Test, parse};

/// A filter over the columns of a model.
pub(super) struct Eligibility {
    expression: Expr,
    columns: Vec<String>,
}

impl Eligibility {
    /// Parses a filter; `columns` are the names of all columns of the model in order.
    ///
    /// # Errors
    /// An invalid filter.
    pub(super) fn new(filter: &str, columns: &[String]) -> Result<Self> {
        let expression = parse(filter)?;
        Ok(Eligibility { expression, columns: columns.to_vec() })
    }

    /// Returns the columns that the filter refers to, each once.
    pub(super) fn requested(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.collect(&self.expression, &mut names);
        names.sort_unstable();
        names.dedup();
        names
    }

    fn collect<'a>(&'a self, expression: &'a Expr, names: &mut Vec<&'a str>) {
        match expression {
            Expr::All => {}
            Expr::Leaf(leaf) => names.push(self.column(leaf)),
            Expr::Not(inner) => self.collect(inner, names),
            Expr::And(parts) | Expr::Or(parts) => parts.iter().for_each(|part| self.collect(part, names)),
        }
    }

    /// Returns the name of the column of a leaf; the filter may refer to the column by its index.
    fn column<'a>(&'a self, leaf: &'a Leaf) -> &'a str {
        let name = &leaf.feature;
        let by_place = || name.parse().ok().and_then(|place: usize| self.columns.get(place));
        if self.columns.contains(name) { name } else { by_place().unwrap_or(name) }
    }

    /// Returns whether an item with these column values passes the filter.
    pub(super) fn passes(&self, values: &Map<String, Value>) -> bool {
        self.holds(&self.expression, values)
    }

    fn holds(&self, expression: &Expr, values: &Map<String, Value>) -> bool {
        match expression {
            Expr::All => true,
            Expr::Not(inner) => !self.holds(inner, values),
            Expr::And(parts) => parts.iter().all(|part| self.holds(part, values)),
            Expr::Or(parts) => parts.iter().any(|part| self.holds(part, values)),
            Expr::Leaf(leaf) => match values.get(self.column(leaf)) {
                None | Some(Value::Null) => false,
                Some(Value::Array(all)) => all.iter().any(|value| answers(&leaf.test, value)),
                Some(one) => answers(&leaf.test, one),
            },
        }
    }
}

/// Returns whether one value passes a test.
fn answers(test: &Test, value: &Value) -> bool {
    match (test, value) {
        (Test::Has(texts), Value::String(value)) => texts.contains(value),
        (Test::Has(texts), value) => {
            texts.iter().any(|text| text.parse().is_ok_and(|n: i64| value.as_i64() == Some(n)))
        }
        // Integers are compared exactly, because distinct large integers may be equal as floats.
        (Test::Compares(operator, text), value) => match (value.as_i64(), text.parse()) {
            (Some(left), _) => Threshold::of(text).holds(*operator, left),
            (None, Ok(right)) => value.as_f64().is_some_and(|left| operator.holds(left, right)),
            (None, Err(_)) => false,
        },
        (Test::IsPresent, _) => true,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const PAGE: &str = include_str!("../../../docs/reference/filter-language.md");

    fn block<'a>(marker: &str) -> Vec<&'a str> {
        let blocks = PAGE.split("```").skip(1).step_by(2);
        blocks.filter_map(|block| block.strip_prefix(marker)).flat_map(str::lines).filter(|l| !l.is_empty()).collect()
    }

    #[test]
    fn the_examples_of_the_page_give_its_results() {
        let items: Vec<Map<String, Value>> =
            block("jsonl\n").iter().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(items.len(), 8);
        let columns: Vec<String> = ["title", "lang", "genre", "year", "price", "edition"].map(String::from).to_vec();
        let mut tried = 0;
        for line in block("filter\n") {
            let Some((filter, expected)) = line.split_once('→') else { continue };
            // Only the server rejects constants that do not suit an integer column.
            let Ok(filter) = Eligibility::new(filter.trim(), &columns) else { continue };
            let passing = items.iter().filter(|item| filter.passes(item["attributes"].as_object().unwrap()));
            let found: Vec<String> = passing.map(|item| item["id"].to_string()).collect();
            assert_eq!(found.join(" "), expected.trim(), "{line}");
            tried += 1;
        }
        assert!(tried > 30, "{tried} examples");
    }

    #[test]
    fn columns_are_found_by_name_and_by_index() {
        let columns = ["price".to_owned(), "7".to_owned(), "lang".to_owned()];
        let filter = Eligibility::new("0 < 5 AND NOT (7:1 OR lang:en OR lang:de) AND 2:fr", &columns).unwrap();
        assert_eq!(filter.requested(), ["7", "lang", "price"]);
        let item = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        assert!(filter.passes(&item("{\"price\": 4.5, \"lang\": [\"fr\", \"es\"], \"7\": null}")));
        assert!(!filter.passes(&item("{\"price\": 4.5, \"lang\": [\"fr\", \"en\"]}")));
        assert!(!filter.passes(&item("{\"price\": 5, \"lang\": \"fr\"}")));
        assert!(!filter.passes(&item("{\"lang\": \"fr\", \"7\": 1}")));
        // 2^53 + 1 and 2^53 are equal as floats.
        for text in ["price > 9007199254740992", "price > 9007199254740992.0", "price >= 9007199254740992.5"] {
            let large = Eligibility::new(text, &columns).unwrap();
            assert!(large.passes(&item("{\"price\": 9007199254740993}")), "{text}");
            assert!(!large.passes(&item("{\"price\": 9007199254740992}")), "{text}");
        }
    }
}
