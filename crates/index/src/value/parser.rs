//! Single-pass compiler from text to stack code: recursive descent that emits operators after their operands.

use std::collections::BTreeMap;

use super::{Binary, Program, Step, Unary, choose};
use sterling_core::error::{Error, Result};
use sterling_core::limits::{VALUE_BYTES_MAX, VALUE_DEPTH_MAX};

impl Program {
    /// Compiles an expression over the given input names and named constants.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use sterling_index::value::{Program, Scratch};
    /// let constants = BTreeMap::from([("w".to_string(), 0.5)]);
    /// let program = Program::compile("click + w * buy", &["click", "buy", "price"], &constants)?;
    /// assert_eq!(program.inputs(), ["click", "buy"]);
    /// let mut value = [0.0; 2];
    /// program.evaluate(&[&[1.0, 2.0], &[4.0, 8.0]], &program.constants(&BTreeMap::new())?, &mut Scratch::default(), &mut value);
    /// assert_eq!(value, [3.0, 6.0]);
    /// # Ok::<(), sterling_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Invalid` with the byte offset, the received token and the expected tokens.
    pub fn compile(text: &str, names: &[&str], constants: &BTreeMap<String, f32>) -> Result<Self> {
        if text.len() > VALUE_BYTES_MAX {
            return Err(Error::invalid(format!("value: {} bytes, expected at most {VALUE_BYTES_MAX}", text.len()))
                .at(VALUE_BYTES_MAX));
        }
        check_constants(names, constants)?;
        let program = Program { steps: Vec::new(), inputs: Vec::new(), constants: constants.clone(), depth: 0 };
        let mut compiler = Compiler { text, at: 0, nesting: 0, height: 0, names, program };
        compiler.comparison()?;
        compiler.skip_space();
        if compiler.at < text.len() {
            return Err(compiler.invalid("an operator or the end"));
        }
        Ok(compiler.program)
    }
}

/// Rejects a constant with the name of an input, which it would hide, and one that is not finite, which JSON cannot represent.
fn check_constants(names: &[&str], constants: &BTreeMap<String, f32>) -> Result<()> {
    for (name, value) in constants {
        let invalid = if names.contains(&name.as_str()) {
            "is also a task or a numeric item column, expected a name of its own".to_owned()
        } else if !value.is_finite() {
            format!("is {value}, expected a finite number")
        } else {
            continue;
        };
        return Err(Error::invalid(format!("value: constant `{name}` {invalid}")));
    }
    Ok(())
}

const OPERAND: &str = "a number, a name or `(`";

/// Returns a name in expression syntax: in backquotes if it is not a plain word.
fn written(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_alphabetic() || c == '_') && !name.contains(|c| !in_word(c));
    if plain { name.into() } else { format!("`{name}`") }
}

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

struct Compiler<'a> {
    text: &'a str,
    at: usize,
    nesting: usize,
    height: usize,
    names: &'a [&'a str],
    program: Program,
}

const COMPARISONS: [(&str, Binary); 6] = [
    ("<=", Binary::LessEqual),
    (">=", Binary::GreaterEqual),
    ("==", Binary::Equal),
    ("!=", Binary::NotEqual),
    ("<", Binary::Less),
    (">", Binary::Greater),
];
const SUMS: [(&str, Binary); 2] = [("+", Binary::Add), ("-", Binary::Subtract)];
const PRODUCTS: [(&str, Binary); 2] = [("*", Binary::Multiply), ("/", Binary::Divide)];
const UNARY: [(&str, Unary); 5] =
    [("log", Unary::Log), ("exp", Unary::Exp), ("sqrt", Unary::Sqrt), ("sigmoid", Unary::Sigmoid), ("abs", Unary::Abs)];

impl Compiler<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn takes(&mut self, sign: &str) -> bool {
        self.skip_space();
        let found = self.rest().starts_with(sign);
        self.at += if found { sign.len() } else { 0 };
        found
    }

    fn operator(&mut self, of: &[(&str, Binary)]) -> Option<Binary> {
        of.iter().find(|(sign, _)| self.takes(sign)).map(|(_, operator)| *operator)
    }

    fn invalid(&self, expected: &str) -> Error {
        let in_word = |c: char| in_word(c) || c == '.';
        let shown = match self.rest().chars().next() {
            None => "the end".into(),
            Some(c) if in_word(c) => {
                let end = self.rest().find(|c| !in_word(c)).unwrap_or(self.rest().len());
                format!("`{}`", &self.rest()[..end])
            }
            Some(c) => format!("`{c}`"),
        };
        Error::invalid(format!("value: got {shown} at byte {}, expected {expected}", self.at)).at(self.at)
    }

    fn enter(&mut self) -> Result<()> {
        self.nesting += 1;
        if self.nesting > VALUE_DEPTH_MAX {
            return Err(Error::invalid(format!(
                "value: the expression at byte {} nests deeper than {VALUE_DEPTH_MAX}",
                self.at
            ))
            .at(self.at));
        }
        Ok(())
    }

    fn comparison(&mut self) -> Result<()> {
        self.sum()?;
        if let Some(operator) = self.operator(&COMPARISONS) {
            self.sum()?;
            self.binary(operator);
        }
        Ok(())
    }

    fn sum(&mut self) -> Result<()> {
        self.product()?;
        while let Some(operator) = self.operator(&SUMS) {
            self.product()?;
            self.binary(operator);
        }
        Ok(())
    }

    fn product(&mut self) -> Result<()> {
        self.unary()?;
        while let Some(operator) = self.operator(&PRODUCTS) {
            self.unary()?;
            self.binary(operator);
        }
        Ok(())
    }

    fn unary(&mut self) -> Result<()> {
        let mut negated = false;
        while self.takes("-") {
            negated = !negated;
        }
        self.primary()?;
        if negated {
            self.apply(Unary::Negate);
        }
        Ok(())
    }

    fn primary(&mut self) -> Result<()> {
        self.skip_space();
        let start = self.at;
        match self.rest().chars().next() {
            Some('(') => {
                self.enter()?;
                self.at += 1;
                self.comparison()?;
                if !self.takes(")") {
                    return Err(self.invalid("`)`"));
                }
                self.nesting -= 1;
                Ok(())
            }
            Some(c) if c.is_ascii_digit() || c == '.' => self.number(),
            Some(c) if c.is_alphabetic() || c == '_' => {
                let end = self.rest().find(|c| !in_word(c)).unwrap_or(self.rest().len());
                let name = self.rest()[..end].to_owned();
                self.at += end;
                if self.takes("(") { self.call(&name, start) } else { self.name(&name, start) }
            }
            Some('`') => {
                let end = self.rest()[1..].find('`');
                let end = end.ok_or_else(|| {
                    Error::invalid(format!(
                        "value: the name at byte {start} does not end, expected a closing backquote"
                    ))
                    .at(start)
                })?;
                let name = self.rest()[1..=end].to_owned();
                self.at += end + 2;
                self.name(&name, start)
            }
            _ => Err(self.invalid(OPERAND)),
        }
    }

    fn number(&mut self) -> Result<()> {
        let start = self.at;
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        self.at += digits(self.rest());
        if self.rest().starts_with('.') {
            self.at += 1 + digits(&self.rest()[1..]);
        }
        if let Some(exponent) = self.rest().strip_prefix(['e', 'E']) {
            let sign = usize::from(exponent.starts_with(['+', '-']));
            let length = digits(&exponent[sign..]);
            self.at += if length > 0 { 1 + sign + length } else { 0 };
        }
        let text = &self.text[start..self.at];
        match text.parse::<f32>() {
            Ok(x) if x.is_finite() => {
                self.push(Step::Number(x));
                Ok(())
            }
            Ok(_) => {
                Err(Error::invalid(format!("value: `{text}` at byte {start} is too large for a number")).at(start))
            }
            Err(_) => {
                self.at = start;
                Err(self.invalid(OPERAND))
            }
        }
    }

    fn name(&mut self, name: &str, start: usize) -> Result<()> {
        if let Some(n) = self.program.constants.keys().position(|c| c == name) {
            self.push(Step::Constant(n));
            return Ok(());
        }
        if !self.names.contains(&name) {
            let constants = self.program.constants.keys().map(String::as_str);
            let known: Vec<String> = self.names.iter().copied().chain(constants).map(written).collect();
            let message = format!(
                "value: unknown name `{name}` at byte {start}, expected one of: {}; columns of text cannot be used",
                known.join(", ")
            );
            return Err(Error::invalid(message).at(start));
        }
        let n = self.program.inputs.iter().position(|i| i == name).unwrap_or_else(|| {
            self.program.inputs.push(name.into());
            self.program.inputs.len() - 1
        });
        self.push(Step::Input(n));
        Ok(())
    }

    fn call(&mut self, function: &str, start: usize) -> Result<()> {
        self.enter()?;
        let mut count = 0;
        // Arguments of `min` and `max` are combined one by one, to keep the stack low.
        let fold = match function {
            "min" => Some(Binary::Min),
            "max" => Some(Binary::Max),
            _ => None,
        };
        loop {
            self.comparison()?;
            count += 1;
            if let (Some(fold), true) = (fold, count > 1) {
                self.binary(fold);
            }
            if self.takes(")") {
                break;
            }
            if !self.takes(",") {
                return Err(self.invalid("`,` or `)`"));
            }
        }
        self.nesting -= 1;
        let takes = |what: &str| {
            Err(Error::invalid(format!("value: `{function}` takes {what} arguments, got {count} at byte {start}"))
                .at(start))
        };
        match (function, count) {
            ("min" | "max", 2..) => {}
            ("min" | "max", _) => return takes("2 or more"),
            ("if", 3) => self.choose(),
            ("if", _) => return takes("3"),
            ("clamp", 3) => {
                // clamp(x, low, high) = min(max(x, low), high), with `low` and `high` already on the stack.
                let high = self.take_operand();
                self.binary(Binary::Max);
                self.program.steps.extend(high);
                self.height += 1;
                self.binary(Binary::Min);
            }
            ("clamp", _) => return takes("3"),
            ("pow", 2) => self.binary(Binary::Power),
            ("pow", _) => return takes("2"),
            _ => match UNARY.iter().find(|(name, _)| *name == function) {
                Some((_, operator)) if count == 1 => self.apply(*operator),
                Some(_) => return takes("1"),
                None => {
                    let known = "if, min, max, clamp, log, exp, sqrt, sigmoid, abs, pow";
                    return Err(Error::invalid(format!(
                        "value: unknown function `{function}` at byte {start}, expected one of: {known}"
                    ))
                    .at(start));
                }
            },
        }
        Ok(())
    }

    /// Removes and returns the steps that compute the topmost operand.
    fn take_operand(&mut self) -> Vec<Step> {
        let mut wanted = 1usize;
        let mut from = self.program.steps.len();
        while wanted > 0 {
            from -= 1;
            wanted -= 1;
            wanted += match self.program.steps[from] {
                Step::Number(_) | Step::Input(_) | Step::Constant(_) => 0,
                Step::Unary(_) => 1,
                Step::Binary(_) => 2,
                Step::Choose => 3,
            };
        }
        self.height -= 1;
        self.program.steps.split_off(from)
    }

    fn push(&mut self, step: Step) {
        self.program.steps.push(step);
        self.height += 1;
        // `clamp` pushes its third operand again after a combination, which needs one entry more than the current height.
        self.program.depth = self.program.depth.max(self.height + 1);
    }

    fn apply(&mut self, operator: Unary) {
        match self.program.steps.last_mut() {
            Some(Step::Number(x)) => *x = operator.of(*x),
            _ => self.program.steps.push(Step::Unary(operator)),
        }
    }

    fn binary(&mut self, operator: Binary) {
        self.height -= 1;
        match self.program.steps[..] {
            [.., Step::Number(a), Step::Number(b)] => {
                self.program.steps.truncate(self.program.steps.len() - 2);
                self.program.steps.push(Step::Number(operator.of(a, b)));
            }
            _ => self.program.steps.push(Step::Binary(operator)),
        }
    }

    fn choose(&mut self) {
        self.height -= 2;
        match self.program.steps[..] {
            [.., Step::Number(c), Step::Number(a), Step::Number(b)] => {
                self.program.steps.truncate(self.program.steps.len() - 3);
                self.program.steps.push(Step::Number(choose(c, a, b)));
            }
            _ => self.program.steps.push(Step::Choose),
        }
    }
}
