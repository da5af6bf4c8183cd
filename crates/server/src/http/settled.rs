//! Files that are read again while somebody may be writing them.

use sterling_core::error::Result;

/// What was found in files that are looked at again and again. Whoever writes them may be in the middle, and half of a file may be
/// one that can be read: what two looks in a row have found counts.
#[derive(Debug)]
pub(super) struct Settled<T> {
    /// What counts; nothing where nothing could be read.
    taken: Option<T>,
    /// What the last look found.
    seen: Option<T>,
}

impl<T: Clone + PartialEq> Settled<T> {
    pub(super) fn new(found: T) -> Self {
        Settled { seen: Some(found.clone()), taken: Some(found) }
    }

    /// What counts from this look on, where that is something else than before: each once.
    ///
    /// # Errors
    /// Those of the look, likewise once.
    pub(super) fn look(&mut self, found: Result<T>) -> Result<Option<&T>> {
        let (found, error) = match found {
            Ok(found) => (Some(found), None),
            Err(error) => (None, Some(error)),
        };
        let is_settled = found == self.seen;
        self.seen = found;
        if !is_settled || self.seen == self.taken {
            return Ok(None);
        }
        self.taken.clone_from(&self.seen);
        error.map_or(Ok(self.taken.as_ref()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterling_core::error::Error;

    #[test]
    fn what_is_found_twice_counts_once() {
        let mut settled = Settled::new("a");
        let mut look = |found: Option<&'static str>| {
            let counts = settled.look(found.ok_or_else(|| Error::invalid("none")));
            counts.map(|text| text.copied()).map_err(|_| ())
        };
        assert_eq!(look(Some("a")), Ok(None));
        // Half of a text, then all of it.
        assert_eq!(
            [look(Some("")), look(Some("b")), look(Some("b")), look(Some("b"))],
            [Ok(None), Ok(None), Ok(Some("b")), Ok(None)]
        );
        // Gone for one look, and for good.
        assert_eq!(
            [look(None), look(Some("b")), look(None), look(None), look(None)],
            [Ok(None), Ok(None), Ok(None), Err(()), Ok(None)]
        );
        // Back as it was.
        assert_eq!([look(Some("b")), look(Some("b"))], [Ok(None), Ok(Some("b"))]);
    }
}
