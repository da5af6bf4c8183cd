//! Whose updates a journal has.

use std::fmt;

/// A model, or a shard of it: each has a journal of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Topic {
    /// The model's name.
    pub model: String,
    /// Which shard of how many, of a version that was cut. Another number of shards is another cut, with other journals.
    pub shard: Option<(u32, u32)>,
}

impl Topic {
    /// A model that is not cut.
    pub fn whole(model: impl Into<String>) -> Self {
        Topic { model: model.into(), shard: None }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shard {
            // The names of models have no such sign.
            Some((shard, shards)) => write!(f, "{}@{shard}of{shards}", self.model),
            None => f.write_str(&self.model),
        }
    }
}
