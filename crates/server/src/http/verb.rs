//! Verbs of calls.

macro_rules! verbs {
    ($($verb:ident = $name:literal,)*) => {
        /// Action of a call. Several calls share a verb: `retrieve` exists for the active version, a version and a label.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Verb {
            $($verb,)*
            Other,
        }

        impl Verb {
            /// Names of all verbs in order, `other` last; they label calls in metrics.
            pub(super) const NAMES: [&'static str; Verb::Other as usize + 1] = [$($name,)* "other"];
        }
    };
}

verbs! {
    Retrieve = "retrieve",
    Rank = "rank",
    Embed = "embed",
    Pass = "pass",
    Rows = "rows",
    Parts = "parts",
    Activate = "activate",
    Load = "load",
    Unload = "unload",
    Models = "models",
    Model = "model",
    Versions = "versions",
    Version = "version",
    Labels = "labels",
    Label = "label",
    Index = "index",
    Shards = "shards",
    Column = "column",
    Find = "find",
    Item = "item",
    Position = "position",
    Upsert = "upsert",
    Delete = "delete",
    Merge = "merge",
    Queries = "queries",
    Slow = "slow",
    Traffic = "traffic",
    Shadow = "shadow",
    Metrics = "metrics",
    Health = "health",
    Openapi = "openapi",
    Console = "console",
    Inference = "inference",
    Infer = "infer",
}

impl Verb {
    /// Returns the verb's name in paths, logs and metrics.
    pub(super) fn name(self) -> &'static str {
        Verb::NAMES[self as usize]
    }

    /// Returns the verb of a call that workers answer, by its name in a path.
    pub(super) fn parse_worker_verb(name: &str) -> Option<Self> {
        [Verb::Retrieve, Verb::Rank, Verb::Embed, Verb::Pass].into_iter().find(|verb| verb.name() == name)
    }

    /// Returns whether workers answer the call, in any protocol.
    pub(super) fn is_pass(self) -> bool {
        self == Verb::Infer || Verb::parse_worker_verb(self.name()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_have_their_names() {
        assert_eq!([Verb::Retrieve, Verb::Infer, Verb::Other].map(Verb::name), ["retrieve", "infer", "other"]);
        assert_eq!(Verb::parse_worker_verb("rank"), Some(Verb::Rank));
        assert_eq!(Verb::parse_worker_verb("load"), None);
        assert!(Verb::Infer.is_pass() && !Verb::Upsert.is_pass());
    }
}
