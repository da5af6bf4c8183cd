//! Search for category values that contain a text.

use super::cell::Cell;
use super::view::Column;

/// Match quality of a value and a searched text, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contains {
    /// The value equals the text.
    Whole,
    /// The value starts with the text.
    Start,
    /// The value contains the text elsewhere.
    Inside,
    /// No match.
    Not,
}

impl Contains {
    /// Matches `value` against `text`, ignoring the case of ASCII letters.
    pub fn of(value: &str, text: &str) -> Self {
        let (value, text) = (value.as_bytes(), text.as_bytes());
        if value.eq_ignore_ascii_case(text) {
            Contains::Whole
        } else if value.get(..text.len()).is_some_and(|start| start.eq_ignore_ascii_case(text)) {
            Contains::Start
        } else if !text.is_empty() && value.windows(text.len()).any(|part| part.eq_ignore_ascii_case(text)) {
            Contains::Inside
        } else {
            Contains::Not
        }
    }
}

impl Column {
    /// Matches `text` against each value of the dictionary, `[V]`; integers are matched in decimal notation.
    pub fn containing(&self, text: &str) -> Vec<Contains> {
        let of = |code: usize| match self.value(code as u32) {
            Cell::Text(value) => Contains::of(value, text),
            Cell::Integer(value) => Contains::of(&value.to_string(), text),
            _ => Contains::Not,
        };
        (0..self.dictionary_len()).map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_comes_first() {
        for (value, text, how) in [
            ("vim", "VIM", Contains::Whole),
            ("vim-nox", "vim", Contains::Start),
            ("neovim", "vIm", Contains::Inside),
            ("emacs", "vim", Contains::Not),
            ("vi", "vim", Contains::Not),
            ("", "", Contains::Whole),
            ("vim", "", Contains::Start),
            ("", "v", Contains::Not),
            ("größe", "ö", Contains::Inside),
            ("-17", "7", Contains::Inside),
        ] {
            assert_eq!(Contains::of(value, text), how, "{value:?} {text:?}");
        }
        assert!(
            Contains::Whole < Contains::Start && Contains::Start < Contains::Inside && Contains::Inside < Contains::Not
        );
    }
}
