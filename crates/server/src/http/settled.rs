//! Reads files repeatedly while other processes may be writing them.

use sterling_core::error::Result;

/// Content of a file that is read periodically. A writer may be in the middle of a write, and a partial file may be
/// valid. New content is therefore accepted once two successive reads agree.
#[derive(Debug)]
pub(super) struct Settled<T> {
    /// Accepted content; `None` if the file could not be read.
    taken: Option<T>,
    /// Content at the last read.
    seen: Option<T>,
}

impl<T: Clone + PartialEq> Settled<T> {
    pub(super) fn new(found: T) -> Self {
        Settled { seen: Some(found.clone()), taken: Some(found) }
    }

    /// Takes the result of a read. Returns newly accepted content, once per change.
    ///
    /// # Errors
    /// The error of the read, once per change of the error.
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
    fn a_listing_counts_after_two_equal_polls() {
        let mut settled = Settled::new("a");
        let mut look = |found: Option<&'static str>| {
            let counts = settled.look(found.ok_or_else(|| Error::invalid("none")));
            counts.map(|text| text.copied()).map_err(|_| ())
        };
        assert_eq!(look(Some("a")), Ok(None));
        // A partial text, then the complete text.
        assert_eq!(
            [look(Some("")), look(Some("b")), look(Some("b")), look(Some("b"))],
            [Ok(None), Ok(None), Ok(Some("b")), Ok(None)]
        );
        // Missing for one read, then permanently.
        assert_eq!(
            [look(None), look(Some("b")), look(None), look(None), look(None)],
            [Ok(None), Ok(None), Ok(None), Err(()), Ok(None)]
        );
        // Restored without a change.
        assert_eq!([look(Some("b")), look(Some("b"))], [Ok(None), Ok(Some("b"))]);
    }
}
