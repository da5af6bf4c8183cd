//! Recursive-descent parser with limits on length, leaves and depth. Precedence: NOT binds tighter than AND, AND tighter than OR.

use super::date::DateUnit;
use super::expr::{Expr, Leaf, Test};
use super::lexer::{Token, tokens};
use crate::columns::Operator;
use sterling_core::error::{Error, Result};
use sterling_core::limits::{FILTER_BYTES_MAX, FILTER_DEPTH_MAX, FILTER_LEAVES_MAX};

/// Parses a filter expression.
///
/// ```
/// use sterling_index::filter::parse;
/// let filter = parse("section:python AND NOT priority IN (required, important)")?;
/// assert_eq!(filter.canonical().to_string(), "NOT priority IN (important, required) AND section:python");
/// let error = parse("section:python AND").unwrap_err();
/// assert_eq!(error.offset(), Some(18));
/// # Ok::<(), sterling_core::error::Error>(())
/// ```
///
/// # Errors
/// `Invalid` with the byte offset, the received token and the expected tokens.
pub fn parse(text: &str) -> Result<Expr> {
    if text.len() > FILTER_BYTES_MAX {
        return Err(Error::invalid(format!("filter: {} bytes, expected at most {FILTER_BYTES_MAX}", text.len()))
            .at(FILTER_BYTES_MAX));
    }
    let mut parser = Parser { tokens: tokens(text)?, next: 0, leaves: 0, depth: 0 };
    if matches!(parser.peek(), Token::End) {
        return Ok(Expr::All);
    }
    let expr = parser.or()?;
    match parser.peek() {
        Token::End => Ok(expr),
        _ => Err(parser.invalid("AND, OR or the end")),
    }
}

struct Parser {
    tokens: Vec<(Token, usize)>,
    next: usize,
    leaves: usize,
    depth: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.next].0
    }

    fn offset(&self) -> usize {
        self.tokens[self.next].1
    }

    fn advance(&mut self) {
        self.next = (self.next + 1).min(self.tokens.len() - 1);
    }

    fn takes(&mut self, sign: &str) -> bool {
        let found = matches!(self.peek(), Token::Sign(s) if *s == sign);
        if found {
            self.advance();
        }
        found
    }

    fn takes_keyword(&mut self, keyword: &str) -> bool {
        let found = self.peek().is_keyword(keyword);
        if found {
            self.advance();
        }
        found
    }

    fn invalid(&self, expected: &str) -> Error {
        let at = self.offset();
        Error::invalid(format!("filter: got {} at byte {at}, expected {expected}", self.peek().shown())).at(at)
    }

    fn or(&mut self) -> Result<Expr> {
        let mut parts = vec![self.and()?];
        while self.takes("|") || self.takes_keyword("or") {
            parts.push(self.and()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expr::Or(parts) })
    }

    fn and(&mut self) -> Result<Expr> {
        let mut parts = vec![self.not()?];
        while self.takes("&") || self.takes_keyword("and") {
            parts.push(self.not()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expr::And(parts) })
    }

    fn not(&mut self) -> Result<Expr> {
        let mut negated = false;
        while self.takes("!") || self.takes_keyword("not") {
            negated = !negated;
        }
        let inner = self.primary()?;
        Ok(if negated { Expr::Not(Box::new(inner)) } else { inner })
    }

    fn primary(&mut self) -> Result<Expr> {
        let at = self.offset();
        if !self.takes("(") {
            return self.leaf();
        }
        self.depth += 1;
        if self.depth > FILTER_DEPTH_MAX {
            return Err(Error::invalid(format!(
                "filter: parentheses at byte {at} nest deeper than {FILTER_DEPTH_MAX}"
            ))
            .at(at));
        }
        if self.takes(")") {
            self.depth -= 1;
            return Ok(Expr::All);
        }
        let inner = self.or()?;
        if !self.takes(")") {
            return Err(self.invalid("AND, OR or `)`"));
        }
        self.depth -= 1;
        Ok(inner)
    }

    fn name(&mut self, expected: &str) -> Result<String> {
        let keyword = ["and", "or", "not", "in"].iter().any(|k| self.peek().is_keyword(k));
        match self.peek() {
            Token::Word(_) if keyword => Err(self.invalid(expected)),
            Token::Word(text) | Token::Quoted(text) => {
                let text = text.clone();
                self.advance();
                Ok(text)
            }
            _ => Err(self.invalid(expected)),
        }
    }

    fn leaf(&mut self) -> Result<Expr> {
        let offset = self.offset();
        let feature = self.name("a term such as `feature:value`, NOT or `(`")?;
        if feature.is_empty() {
            return Err(Error::invalid(format!(
                "filter: got an empty name at byte {offset}, expected the name of a feature"
            ))
            .at(offset));
        }
        let mut negated = false;
        let test = if self.takes(":") {
            let value = self.value()?;
            self.weight()?;
            self.count(1, offset)?;
            Test::Has(vec![value])
        } else if self.takes_keyword("in") {
            Test::Has(self.values(offset)?)
        } else if self.takes_keyword("not") {
            if !self.takes_keyword("in") {
                return Err(self.invalid("IN"));
            }
            negated = true;
            Test::Has(self.values(offset)?)
        } else if self.takes_keyword("is") {
            negated = !self.takes_keyword("not");
            if !self.takes_keyword("null") {
                return Err(self.invalid(if negated { "NULL or NOT NULL" } else { "NULL" }));
            }
            self.count(1, offset)?;
            Test::IsPresent
        } else {
            let operator = self.operator()?;
            let expected = match operator {
                Operator::Equal | Operator::NotEqual => format!("a number; `{feature}:value` matches a text"),
                _ => "a number".to_owned(),
            };
            let number = self.number(&expected)?;
            self.count(1, offset)?;
            Test::Compares(operator, number)
        };
        let leaf = Expr::Leaf(Leaf { feature, test, offset });
        Ok(if negated { Expr::Not(Box::new(leaf)) } else { leaf })
    }

    fn value(&mut self) -> Result<String> {
        // After a colon every word is a value, even if it is a keyword elsewhere.
        let (Token::Word(text) | Token::Quoted(text)) = self.peek() else {
            return Err(self.invalid("a value"));
        };
        let text = text.clone();
        self.advance();
        Ok(text)
    }

    /// Parses a number, or a date with a unit.
    fn number(&mut self, expected: &str) -> Result<String> {
        let number = self.name(expected)?;
        if let Some(unit) = DateUnit::of(&number)
            && self.takes("(")
        {
            const EXPECTED: &str = "a date such as 2024-01-31, or a time such as \"2024-01-31T12:00:00Z\" but in days";
            let date = self.name(EXPECTED)?;
            let Some(number) = unit.since_1970(&date) else {
                self.next -= 1;
                return Err(self.invalid(EXPECTED));
            };
            return if self.takes(")") { Ok(number) } else { Err(self.invalid("`)`")) };
        }
        if !number.parse::<f64>().is_ok_and(f64::is_finite) {
            self.next -= 1;
            return Err(self.invalid(expected));
        }
        Ok(number)
    }

    /// Parses and ignores a weight, which SilverTorch's terms may have.
    fn weight(&mut self) -> Result<()> {
        if self.takes(":") {
            let weight = self.name("a weight")?;
            if weight.parse::<f64>().is_err() {
                self.next -= 1;
                return Err(self.invalid("a weight"));
            }
        }
        Ok(())
    }

    fn values(&mut self, offset: usize) -> Result<Vec<String>> {
        if !self.takes("(") {
            return Err(self.invalid("`(`"));
        }
        let mut values = Vec::new();
        if self.takes(")") {
            self.count(1, offset)?;
            return Ok(values);
        }
        loop {
            values.push(self.value()?);
            self.count(1, offset)?;
            if self.takes(")") {
                return Ok(values);
            }
            if !self.takes(",") {
                return Err(self.invalid("`,` or `)`"));
            }
        }
    }

    fn operator(&mut self) -> Result<Operator> {
        let operator = match self.peek() {
            Token::Sign("<") => Operator::Less,
            Token::Sign("<=") => Operator::LessEqual,
            Token::Sign(">") => Operator::Greater,
            Token::Sign(">=") => Operator::GreaterEqual,
            Token::Sign("=") => Operator::Equal,
            Token::Sign("!=") => Operator::NotEqual,
            _ => return Err(self.invalid("`:`, IN, IS or a comparison")),
        };
        self.advance();
        Ok(operator)
    }

    fn count(&mut self, leaves: usize, offset: usize) -> Result<()> {
        self.leaves += leaves;
        if self.leaves > FILTER_LEAVES_MAX {
            return Err(
                Error::invalid(format!("filter: more than {FILTER_LEAVES_MAX} terms at byte {offset}")).at(offset)
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn errors_name_the_position_and_the_expected_token() {
        for (text, offset, expected) in [
            ("a:1 AND", 7, "got the end at byte 7, expected a term"),
            ("a", 1, "got the end at byte 1, expected `:`, IN, IS or a comparison"),
            ("a:", 2, "got the end at byte 2, expected a value"),
            ("a::b", 2, "got `:` at byte 2, expected a value"),
            ("(a:1", 4, "got the end at byte 4, expected AND, OR or `)`"),
            ("a:1)", 3, "got `)` at byte 3, expected AND, OR or the end"),
            ("a:1 b:2", 4, "got `b` at byte 4, expected AND, OR or the end"),
            ("a IN x", 5, "got `x` at byte 5, expected `(`"),
            ("a IN (,)", 6, "got `,` at byte 6, expected a value"),
            ("a IS 1", 5, "got `1` at byte 5, expected NULL or NOT NULL"),
            ("a IS NOT 1", 9, "got `1` at byte 9, expected NULL"),
            ("a IS \"null\"", 5, "expected NULL or NOT NULL"),
            ("a > s", 4, "got `s` at byte 4, expected a number"),
            ("a > s(2024-02-30)", 6, "got `2024-02-30` at byte 6, expected a date"),
            ("a > s(2024-02-03", 16, "got the end at byte 16, expected `)`"),
            ("a > days(\"2024-01-31T12:00:00Z\")", 9, "expected a date"),
            ("a IN (x y)", 8, "got `y` at byte 8, expected `,` or `)`"),
            ("a NOT x", 6, "expected IN"),
            ("price < ten", 8, "got `ten` at byte 8, expected a number"),
            ("price < ", 8, "got the end at byte 8, expected a number"),
            ("price < inf", 8, "expected a number"),
            ("country = DE", 10, "got `DE` at byte 10, expected a number; `country:value` matches a text"),
            ("a:\"x", 2, "has no end"),
            ("a:\"\\x\"", 3, "expected one of"),
            ("a:1 ^ b:2", 4, "got `^` at byte 4"),
            ("AND a:1", 0, "got `AND` at byte 0, expected a term"),
            ("a:1:x", 4, "got `x` at byte 4, expected a weight"),
            ("\"\":1", 0, "an empty name"),
            ("ü:1 AND é", 11, "got the end at byte 11"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.to_string().contains(expected), "{text}: {error}");
            assert_eq!(error.offset(), Some(offset), "{text}: {error}");
        }
    }

    #[test]
    fn bounds_hold() {
        let deep = |n: usize| format!("{}a:1{}", "(".repeat(n), ")".repeat(n));
        assert!(parse(&deep(FILTER_DEPTH_MAX)).is_ok());
        assert!(parse(&deep(FILTER_DEPTH_MAX + 1)).unwrap_err().to_string().contains("nest deeper"));
        assert!(parse(&deep(30_000)).is_err());
        assert!(parse(&format!("{}a:1", "NOT ".repeat(10_001))).is_ok(), "NOT does not recurse");
        let wide = |n: usize| vec!["a:1"; n].join(" OR ");
        assert!(parse(&wide(FILTER_LEAVES_MAX)).is_ok());
        let empty = vec!["a IN ()"; FILTER_LEAVES_MAX + 1].join(" OR ");
        assert!(parse(&empty).unwrap_err().to_string().contains("more than 1024 terms"));
        assert!(parse(&wide(FILTER_LEAVES_MAX + 1)).unwrap_err().to_string().contains("more than 1024 terms"));
        assert!(parse(&" ".repeat(FILTER_BYTES_MAX + 1)).unwrap_err().to_string().contains("bytes, expected at most"));
    }
}
