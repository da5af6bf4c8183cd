//! Topic of a journal: the model or shard whose updates the journal holds.

use std::fmt;

/// A model, or one shard of a model; each has its own journal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Topic {
    /// Name of the model.
    pub model: String,
    /// Shard number and number of shards of a partitioned version. Versions with different numbers of shards have different
    /// journals.
    pub shard: Option<(u32, u32)>,
}

impl Topic {
    /// Returns the topic of a model without shards.
    pub fn whole(model: impl Into<String>) -> Self {
        Topic { model: model.into(), shard: None }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shard {
            // Model names cannot contain `@`.
            Some((shard, shards)) => write!(f, "{}@{shard}of{shards}", self.model),
            None => f.write_str(&self.model),
        }
    }
}
