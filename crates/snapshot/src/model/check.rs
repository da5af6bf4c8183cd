//! Validation of `model.toml`: unique names, a table for every feature, no ambiguous names.

use std::collections::BTreeSet;

use super::spec::{ModelSpec, OverArchSpec, SIMILARITY, VectorSpec};
use super::train::{LossKind, TrainSpec};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_embedding::{Pooling, RowFormat};
use sterling_graph::tower::{FeatureKind, FeatureSpec};

/// Inputs of an OverArch whose names have the same meaning in every package.
const RESERVED: [(&str, &str); 3] =
    [("query", "the query embedding"), ("item", "the candidate's row"), (SIMILARITY, "the retrieval score")];

impl ModelSpec {
    /// Reads `model.toml`.
    ///
    /// # Errors
    /// `Invalid` with the line or field, the received value and the expected value.
    pub fn parse(text: &str) -> Result<Self> {
        let spec: ModelSpec = toml::from_str(text).map_err(|e| Error::invalid(e.to_string().trim_end().to_owned()))?;
        spec.check()?;
        Ok(spec)
    }

    fn check(&self) -> Result<()> {
        in_range("dimension", self.dimension, limits::DIMENSION_MAX)?;
        once("tables", self.tables.iter().map(|t| &t.name))?;
        for table in &self.tables {
            let place = |e: Error| e.within(format!("tables `{}`", table.name));
            table.unseen().and(table.row_format()).map_err(place)?;
            if table.managed && table.vocabulary.is_some() {
                return Err(place(Error::invalid("got a vocabulary and managed ids, expected one of them")));
            }
            if table.managed && table.tokenizer.is_some() {
                return Err(place(Error::invalid("got a tokenizer and managed ids, expected one of them")));
            }
        }
        once("tasks", self.tasks.iter().map(|t| &t.name))?;
        once("item.columns", self.item.columns.iter().map(|c| &c.name))?;
        self.check_columns(self.item.columns.iter().map(|c| c.name.as_str())).map_err(|e| e.within("item.columns"))?;
        if self.tasks.iter().any(|t| t.name == SIMILARITY) {
            return Err(Error::invalid(format!("tasks: `{SIMILARITY}` is the retrieval score, expected another name")));
        }
        self.check_queries()?;
        self.check_features()?;
        self.check_candidates()?;
        self.train.as_ref().map_or(Ok(()), |train| self.check_train(train)).map_err(|e| e.within("train"))?;
        match (&self.overarch, self.tasks.len()) {
            (Some(_), 0) => {
                Err(Error::invalid("overarch is set without tasks, expected one task for each of its logits"))
            }
            (None, 1..) => Err(Error::invalid("tasks are set without overarch, expected the graph that predicts them")),
            _ => Ok(()),
        }
    }

    /// Rejects item columns whose names have another meaning in the value model.
    ///
    /// # Errors
    /// `Invalid` with the name and its other meaning.
    pub fn check_columns<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Result<()> {
        let meaning = |name: &str| match name {
            SIMILARITY => Some("the retrieval score"),
            _ if self.tasks.iter().any(|t| t.name == name) => Some("a task"),
            _ if self.value.constants.contains_key(name) => Some("a constant of the value model"),
            _ => None,
        };
        match names.find_map(|name| Some((name, meaning(name)?))) {
            Some((name, what)) => {
                Err(Error::invalid(format!("column `{name}`: this is {what}, expected another name")))
            }
            None => Ok(()),
        }
    }

    fn check_train(&self, train: &TrainSpec) -> Result<()> {
        train.check()?;
        if self.user.is_none() {
            return Err(Error::invalid("[user] is missing, expected the user tower to train"));
        }
        if !self.queries().is_empty() {
            return Err(Error::invalid(
                "user.queries: got several queries, expected none: such models are not trained",
            ));
        }
        if train.loss == LossKind::Tasks && (self.overarch.is_none() || self.tasks.is_empty()) {
            return Err(Error::invalid(
                "loss: got `tasks`, expected `softmax` for a model without [overarch] and [[tasks]]",
            ));
        }
        if let Some(task) = train.tasks.keys().find(|task| self.tasks.iter().all(|known| known.name != **task)) {
            let known: Vec<&str> = self.tasks.iter().map(|t| t.name.as_str()).collect();
            let expected = format!("tasks: got `{task}`, expected one of [[tasks]]: {}", known.join(", "));
            return Err(Error::invalid(expected));
        }
        let is_managed = |name: &str| self.tables.iter().any(|declared| declared.name == name && declared.managed);
        if let Some(table) = train.tables.iter().find(|table| table.managed.is_some() && !is_managed(&table.name)) {
            let expected = Error::invalid("managed: its ids are row numbers, expected `managed = true` in [[tables]]");
            return Err(expected.within(format!("tables `{}`", table.name)));
        }
        match train.tables.iter().find(|table| self.tables.iter().all(|declared| declared.name != table.name)) {
            None => Ok(()),
            Some(table) => {
                let known: Vec<&str> = self.tables.iter().map(|t| t.name.as_str()).collect();
                let expected = format!("not declared in [[tables]], expected one of: {}", known.join(", "));
                Err(Error::invalid(expected).within(format!("tables `{}`", table.name)))
            }
        }
    }

    fn check_queries(&self) -> Result<()> {
        let Some(user) = &self.user else { return Ok(()) };
        once("user.queries", user.queries.iter().map(|q| &q.name))?;
        if user.queries.len() > limits::QUERIES_MAX {
            return Err(Error::invalid(format!(
                "user.queries: got {}, expected at most {}",
                user.queries.len(),
                limits::QUERIES_MAX
            )));
        }
        if user.merge.is_some() && user.queries.is_empty() {
            return Err(Error::invalid("user.merge is set without user.queries, expected the queries to merge"));
        }
        for query in &user.queries {
            let place = |e: Error| e.within(format!("user.queries `{}`", query.name));
            if let Some(candidates) = query.candidates {
                in_range("candidates", candidates, limits::CANDIDATES_MAX).map_err(place)?;
            }
            if !(query.weight > 0.0 && query.weight <= limits::QUERY_WEIGHT_MAX) {
                return Err(place(Error::invalid(format!(
                    "weight: got {}, expected a number above 0, at most {:e}",
                    query.weight,
                    limits::QUERY_WEIGHT_MAX
                ))));
            }
        }
        Ok(())
    }

    fn check_features(&self) -> Result<()> {
        let user = self.user.as_ref().map_or(&[][..], |u| &u.features);
        let overarch = self.overarch.as_ref().map_or(&[][..], |o| &o.features);
        for (side, features) in [("user", user), ("item", &self.item.features), ("overarch", overarch)] {
            let masks: Vec<String> = features.iter().filter(|f| f.is_sequence()).map(FeatureSpec::mask).collect();
            once(&format!("{side}.features"), features.iter().map(|f| &f.name).chain(&masks))?;
            for feature in features {
                self.check_feature(feature).map_err(|e| e.within(format!("{side}.features `{}`", feature.name)))?;
            }
        }
        if self.item.tower.is_some() && self.item.features.is_empty() {
            return Err(Error::invalid("item.tower is set without item.features, expected the inputs of the tower"));
        }
        if self.item.tower.is_none() && !self.item.features.is_empty() {
            return Err(Error::invalid("item.features are set without item.tower, expected the graph that reads them"));
        }
        Ok(())
    }

    /// Checks the stored vectors of items and the features that are looked up for candidates.
    fn check_candidates(&self) -> Result<()> {
        let looked_up = self.overarch.iter().flat_map(|o: &OverArchSpec| &o.features);
        if let Some(text) = looked_up.clone().find(|f| f.kind == FeatureKind::Text) {
            let invalid = "a text feature: texts of candidates are encoded by the item tower and [[item.vectors]]";
            return Err(Error::invalid(format!("overarch.features `{}`: {invalid}", text.name)));
        }
        if let Some(dense) = looked_up.clone().find(|f| f.kind == FeatureKind::Dense) {
            let invalid = "a dense feature: numeric columns are inputs by their own names";
            return Err(Error::invalid(format!("overarch.features `{}`: {invalid}", dense.name)));
        }
        for vector in &self.item.vectors {
            self.check_vector(vector).map_err(|e| e.within(format!("item.vectors `{}`", vector.name)))?;
        }
        // Meanings of the names of OverArch inputs; all other inputs belong to the graph alone.
        let mut meanings: Vec<(&str, String)> = RESERVED.map(|(name, what)| (name, what.into())).into();
        meanings.extend(self.item.vectors.iter().map(|v| (v.name.as_str(), "one of item.vectors".into())));
        let masks: Vec<String> = looked_up.clone().filter(|f| f.is_sequence()).map(FeatureSpec::mask).collect();
        meanings.extend(looked_up.map(|f| (f.name.as_str(), "one of overarch.features".into())));
        meanings.extend(masks.iter().map(|mask| (mask.as_str(), "the mask of one of overarch.features".into())));
        let user: Vec<String> = self.user.iter().flat_map(|u| &u.features).flat_map(inputs).collect();
        for (n, (name, what)) in meanings.iter().enumerate().skip(RESERVED.len()) {
            let other = meanings[..n].iter().find(|(other, _)| other == name).map(|(_, what)| what.as_str());
            let of_user = user.iter().any(|own| own == name).then_some("one of user.features");
            if let Some(other) = other.or(of_user) {
                return Err(Error::invalid(format!(
                    "overarch: input `{name}` is {what} and {other}, expected one meaning: rename one of them"
                )));
            }
        }
        Ok(())
    }

    fn check_vector(&self, vector: &VectorSpec) -> Result<()> {
        if vector.name.is_empty() {
            return Err(Error::invalid("name: missing, expected a name"));
        }
        in_range("width", vector.width, limits::TENSOR_NUMBERS_MAX)?;
        let known = [RowFormat::F32, RowFormat::F16, RowFormat::Bf16, RowFormat::Int8];
        if !known.contains(&vector.format) {
            let format = vector.format.name();
            return Err(Error::invalid(format!("format: got {format}, expected f32, f16, bf16 or int8")));
        }
        match (&vector.column, &self.item.tower) {
            (None, None) => Err(Error::invalid("column is missing: without item.tower, a column supplies it")),
            _ => Ok(()),
        }
    }

    fn check_feature(&self, feature: &FeatureSpec) -> Result<()> {
        in_range("max_ids", feature.max_ids, limits::FEATURE_IDS_MAX)?;
        check_sequence(feature)?;
        if !feature.weights && (feature.kind != FeatureKind::Ids || feature.is_sequence()) {
            return Err(Error::invalid("weights = false is only valid for pooled `ids`: no other feature has weights"));
        }
        match (feature.kind, feature.table.as_deref(), feature.width) {
            (FeatureKind::Dense, Some(_), _) => Err(Error::invalid("a dense feature has no table")),
            (FeatureKind::Dense, None, Some(width)) if (1..=limits::DIMENSION_MAX).contains(&width) => Ok(()),
            (FeatureKind::Dense, None, width) => Err(Error::invalid(format!(
                "width: got {width:?}, expected 1 to {} for a dense feature",
                limits::DIMENSION_MAX
            ))),
            (_, _, Some(_)) => {
                Err(Error::invalid("width is only valid for dense features; this feature has the width of its table"))
            }
            (_, None, _) => Err(Error::invalid("table is missing, expected the name of one of [[tables]]")),
            (kind, Some(name), None) => {
                let known: Vec<&str> = self.tables.iter().map(|t| t.name.as_str()).collect();
                let Some(table) = self.tables.iter().find(|t| t.name == name) else {
                    return Err(Error::invalid(format!(
                        "table `{name}` is not declared, expected one of: {}",
                        known.join(", ")
                    )));
                };
                if kind == FeatureKind::Category && table.vocabulary.is_none() && !table.managed {
                    return Err(Error::invalid(format!(
                        "table `{name}` has no vocabulary, which a category feature needs"
                    )));
                }
                if kind == FeatureKind::Text && table.tokenizer.is_none() {
                    return Err(Error::invalid(format!("table `{name}` has no tokenizer, which a text feature needs")));
                }
                Ok(())
            }
        }
    }
}

/// Returns the names of the graph inputs of a feature.
fn inputs(feature: &FeatureSpec) -> Vec<String> {
    let mask = feature.is_sequence().then(|| feature.mask());
    std::iter::once(feature.name.clone()).chain(mask).collect()
}

fn check_sequence(feature: &FeatureSpec) -> Result<()> {
    if feature.kind == FeatureKind::Dense && feature.pooling == Pooling::None {
        return Err(Error::invalid("pooling: a dense feature has no rows to pool, expected no pooling"));
    }
    match (feature.is_sequence() || feature.kind == FeatureKind::Text, feature.length) {
        (true, None) => {
            Err(Error::invalid("length is missing, expected the rows of the sequence, or tokens of the text"))
        }
        (true, Some(length)) => in_range("length", length, limits::SEQUENCE_MAX.min(feature.max_ids)),
        (false, Some(_)) => Err(Error::invalid("length is only valid for sequences (pooling = \"none\") and texts")),
        (false, None) if feature.keep.is_some() => {
            Err(Error::invalid("keep is only valid for sequences (pooling = \"none\") and texts"))
        }
        (false, None) => Ok(()),
    }
}

fn in_range(field: &str, value: usize, most: usize) -> Result<()> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{field}: got {value}, expected 1 to {most}"))),
    }
}

fn once<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        if name.is_empty() || !seen.insert(name) {
            return Err(Error::invalid(format!(
                "{what}: name `{name}` is empty or given twice, expected each name once"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::model::train;

    #[test]
    fn columns_have_names_of_their_own() {
        let spec = |columns: &str| {
            let text = format!(
                "name = 'm'\ndimension = 2\n[overarch]\ngraph = 'o.onnx'\n[[tasks]]\nname = 'click'\n[value]\nexpression = \
                 'click'\nconstants = {{ w = 1.0 }}\n{columns}"
            );
            ModelSpec::parse(&text)
        };
        for (name, meaning) in
            [("similarity", "the retrieval score"), ("click", "a task"), ("w", "a constant of the value model")]
        {
            let expected = format!("column `{name}`: this is {meaning}, expected another name");
            let error = spec(&format!("[[item.columns]]\nname = '{name}'")).unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
            let error = spec("").unwrap().check_columns(["price", name].into_iter()).unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
        }
        for name in ["price", "max", "and", "if", "Similarity"] {
            spec(&format!("[[item.columns]]\nname = '{name}'")).unwrap();
        }
    }

    fn parse_train(train: &str) -> Result<ModelSpec> {
        let user = "[user]\ntower = 'u.onnx'\n[[user.features]]\nname = 'h'\nkind = 'ids'\ntable = 't'\n";
        let tables = "[[tables]]\nname = 't'\nfile = 't.safetensors'\n";
        ModelSpec::parse(&format!("name = 'm'\ndimension = 2\n{tables}{user}[train]\n{train}"))
    }

    #[test]
    fn training_has_a_default_for_everything_but_the_label() {
        let spec = parse_train("label = 'click'").unwrap();
        let train = spec.train.as_ref().unwrap();
        assert_eq!((train.batch, train.uniform, train.temperature, train.log_q), (512, 256, 1.0, true));
        assert!(train.learns(train::TowerSide::User) && train.learns(train::TowerSide::Item));
        assert_eq!(train.optimizer.kind, sterling_embedding::train::RuleKind::RowwiseAdagrad);
        assert_eq!(ModelSpec::parse(&spec.to_toml().unwrap()).unwrap(), spec);
    }

    #[test]
    fn invalid_training_fields_are_named() {
        for (text, expected) in [
            ("", "missing field `label`"),
            ("label = ''", "train: label: got an empty text"),
            ("label = 'c'\nloss = 'hinge'", "unknown variant `hinge`"),
            ("label = 'c'\nbatches = 3", "unknown field `batches`"),
            ("label = 'c'\nbatch = 0", "train: batch: got 0, expected 1 to 65536"),
            ("label = 'c'\nbatch = 1\nuniform = 0", "expected at least two candidates"),
            ("label = 'c'\nuniform = 70000", "uniform: got 70000"),
            ("label = 'c'\ntemperature = 0.0", "temperature: got 0, expected a finite number above 0"),
            ("label = 'c'\ntemperature = nan", "temperature: got NaN"),
            ("label = 'c'\noptimizer = { kind = 'ftrl', rate = 1 }", "unknown variant `ftrl`"),
            ("label = 'c'\noptimizer = { kind = 'sgd', rate = -1.0 }", "optimizer, field `rate`: got -1"),
            ("label = 'c'\noptimizer = { kind = 'sgd', rate = 1.0, clip = 0.0 }", "optimizer, field `clip`: got 0"),
            ("label = 'c'\ndense_optimizer = { kind = 'adam', rate = inf }", "dense_optimizer: field `rate`: got inf"),
            ("label = 'c'\ndense_optimizer = { kind = 'adam', rate = 1.0, decay = -0.5 }", "field `decay`: got -0.5"),
            ("label = 'c'\ndense = ['user', 'user']", "dense: a tower is listed twice"),
            (
                "label = 'c'\nloss = 'tasks'",
                "train: loss: got `tasks`, expected `softmax` for a model without [overarch]",
            ),
            ("label = 'c'\ntasks = { buy = 1.0 }", "train: tasks: got `buy`, expected one of [[tasks]]"),
            ("label = 'c'\ntasks = { buy = 0.0 }", "train: tasks.buy: got 0, expected a finite number above 0"),
            ("label = 'c'\nnegatives = 0.0", "train: negatives: got 0, expected a share above 0, at most 1"),
            ("label = 'c'\nnegatives = 1.5", "train: negatives: got 1.5"),
            ("label = 'c'\n[[train.tables]]\nname = 'x'", "tables `x`: not declared in [[tables]], expected one of: t"),
            ("label = 'c'\n[[train.tables]]\nname = 't'\n[[train.tables]]\nname = 't'", "tables `t`: given twice"),
            ("label = 'c'\n[[train.tables]]\nname = 't'\nrate = 0.0", "tables `t`: rate: got 0"),
        ] {
            let error = parse_train(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = ModelSpec::parse("name = 'm'\ndimension = 2\n[train]\nlabel = 'c'").unwrap_err().to_string();
        assert!(error.contains("train: [user] is missing"), "{error}");
    }
}
