//! Misspelled names.

/// Returns the name that differs from `name` in the fewest letters, if these are at most a third of them.
pub fn nearest<'n>(name: &str, known: &[&'n str]) -> Option<&'n str> {
    // Longer names are not typing errors, and take long: the time grows with the product of the lengths.
    const LETTERS_MAX: usize = 64;
    let wanted: Vec<char> = name.to_lowercase().chars().take(LETTERS_MAX).collect();
    let by_edits = known.iter().map(|near| (edits(&wanted, near), *near));
    by_edits.min_by_key(|(edits, _)| *edits).filter(|(edits, _)| *edits <= wanted.len() / 3).map(|(_, near)| near)
}

/// Returns the number of letters to insert, delete or replace (Levenshtein 1966).
fn edits(wanted: &[char], name: &str) -> usize {
    let mut row: Vec<usize> = (0..=wanted.len()).collect();
    for letter in name.to_lowercase().chars() {
        let mut diagonal = row[0];
        row[0] += 1;
        for (n, &other) in wanted.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != other);
            diagonal = row[n + 1];
            row[n + 1] = replaced.min(row[n] + 1).min(diagonal + 1);
        }
    }
    row[wanted.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_a_likely_typing_error() {
        let known = ["colour", "year", "größe", "Price"];
        for (name, expected) in [
            ("color", Some("colour")),
            ("coulor", Some("colour")),
            ("groesse", None),
            ("grösse", Some("größe")),
            ("price", Some("Price")),
            ("yeer", Some("year")),
            ("ye", None),
            ("", None),
            ("genre", None),
        ] {
            assert_eq!(nearest(name, &known), expected, "{name}");
        }
        assert_eq!(nearest("x", &[]), None);
        for (one, other, expected) in [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0)] {
            assert_eq!(edits(&one.chars().collect::<Vec<char>>(), other), expected, "{one} {other}");
        }
    }
}
