//! Topic of a journal: the model or shard whose updates it has.

use std::fmt;

/// A model, or a shard of it; each has its own journal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Topic {
    /// Name of the model.
    pub model: String,
    /// Shard number and number of shards of a partitioned version. Another number of shards is another partition with other
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
