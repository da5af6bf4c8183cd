//! `model.toml`: features, tables, towers, item columns, tasks and the value model of a package.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::dense::Precision;
use crate::embedding::{RowFormat, Unseen};
use crate::error::{Error, Result};
use crate::limits;
use crate::tower::{FeatureKind, FeatureSpec};

/// Everything that `model.toml` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The name it is published and served under.
    pub name: String,
    /// What it answers, for people.
    #[serde(default)]
    pub description: String,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// In which precision the graphs of a request compute.
    #[serde(default, skip_serializing_if = "Precision::is_f32")]
    pub precision: Precision,
    /// Sparse embedding tables.
    #[serde(default)]
    pub tables: Vec<DeclaredTable>,
    /// The user side; without it requests bring a `vector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserSpec>,
    /// The item side.
    #[serde(default)]
    pub item: ItemSpec,
    /// The tasks of the OverArch, in the order of its last dimension.
    #[serde(default)]
    pub tasks: Vec<TaskSpec>,
    /// The reranker; without it the candidates keep the order of their similarity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overarch: Option<OverArchSpec>,
    /// The value model; without it the value is the similarity.
    #[serde(default)]
    pub value: ValueSpec,
}

/// A sparse embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredTable {
    /// The name, also of the tensor `[rows, width]`.
    pub name: String,
    /// The `.safetensors` file that holds the tensor.
    pub file: String,
    /// The format of rows that are stored as u8: `int8`, `int4` or `int2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What an id outside the table becomes: `zero`, `hash` or `row:N`.
    #[serde(default = "zero")]
    pub unseen: String,
    /// A text file whose line `n` is the value of row `n`; `category` features need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<String>,
}

fn zero() -> String {
    "zero".into()
}

impl DeclaredTable {
    /// What an id outside the table becomes.
    ///
    /// # Errors
    /// `Invalid` with what was given.
    pub fn unseen(&self) -> Result<Unseen> {
        Unseen::parse(&self.unseen)
    }

    /// The format of rows stored as u8.
    ///
    /// # Errors
    /// `Invalid` with what was given.
    pub fn row_format(&self) -> Result<Option<RowFormat>> {
        self.format.as_deref().map(RowFormat::named).transpose()
    }
}

/// The user tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserSpec {
    /// The ONNX file; its output is `query`.
    pub tower: String,
    /// Its inputs.
    pub features: Vec<FeatureSpec>,
}

/// The item tower, if any, and the columns that are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemSpec {
    /// The ONNX file; its output is `item`. Without it items bring a column `embedding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tower: Option<String>,
    /// Its inputs.
    #[serde(default)]
    pub features: Vec<FeatureSpec>,
    /// Item columns to keep; none means all of the item file.
    #[serde(default)]
    pub columns: Vec<ColumnSpec>,
}

/// An item column that is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnSpec {
    /// The name in the item file.
    pub name: String,
    /// True where filters may ask about it.
    #[serde(default = "yes")]
    pub filter: bool,
}

fn yes() -> bool {
    true
}

/// A task that the OverArch predicts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskSpec {
    /// The name that the value model and replies use.
    pub name: String,
}

/// The reranker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverArchSpec {
    /// The ONNX file; its output is `logits`.
    pub graph: String,
}

/// The value model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// The expression over tasks, numeric columns, `similarity` and constants.
    #[serde(default = "similarity")]
    pub expression: String,
    /// Named constants, which a request may override.
    #[serde(default)]
    pub constants: BTreeMap<String, f32>,
}

/// The name of the retrieval score in value models.
pub const SIMILARITY: &str = "similarity";

fn similarity() -> String {
    SIMILARITY.into()
}

impl Default for ValueSpec {
    fn default() -> Self {
        ValueSpec { expression: similarity(), constants: BTreeMap::new() }
    }
}

impl ModelSpec {
    /// In which precision a graph computes: that of items, which run once, in f32.
    pub fn precision_of(&self, file: &str) -> Precision {
        if self.item.tower.as_deref() == Some(file) { Precision::F32 } else { self.precision }
    }

    /// The features of the user tower that read a table.
    pub fn readers<'a>(&'a self, table: &'a str) -> impl Iterator<Item = &'a FeatureSpec> {
        let features: &[FeatureSpec] = self.user.as_ref().map_or(&[], |user| &user.features);
        features.iter().filter(move |f| f.table.as_deref() == Some(table))
    }

    /// Reads `model.toml`.
    ///
    /// # Errors
    /// `Invalid` with the line, or the field, what came and what was expected.
    pub fn parse(text: &str) -> Result<Self> {
        let spec: ModelSpec = toml::from_str(text).map_err(|e| Error::invalid(e.to_string().trim_end().to_owned()))?;
        spec.check()?;
        Ok(spec)
    }

    /// The file's text.
    ///
    /// # Errors
    /// `Internal` where it cannot be written.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::internal(format!("model.toml: {e}")))
    }

    /// A model without towers: requests bring a vector, items bring theirs.
    pub fn embedding_only(name: &str, dimension: usize) -> Self {
        ModelSpec {
            name: name.into(),
            description: String::new(),
            dimension,
            precision: Precision::F32,
            tables: Vec::new(),
            user: None,
            item: ItemSpec::default(),
            tasks: Vec::new(),
            overarch: None,
            value: ValueSpec::default(),
        }
    }

    fn check(&self) -> Result<()> {
        if self.dimension == 0 || self.dimension > limits::DIMENSION_MAX {
            return Err(Error::invalid(format!(
                "dimension: got {}, expected 1 to {}",
                self.dimension,
                limits::DIMENSION_MAX
            )));
        }
        once("tables", self.tables.iter().map(|t| &t.name))?;
        for table in &self.tables {
            table.unseen().and(table.row_format()).map_err(|e| e.within(format!("tables `{}`", table.name)))?;
        }
        once("tasks", self.tasks.iter().map(|t| &t.name))?;
        once("item.columns", self.item.columns.iter().map(|c| &c.name))?;
        self.check_columns(self.item.columns.iter().map(|c| c.name.as_str())).map_err(|e| e.within("item.columns"))?;
        if self.tasks.iter().any(|t| t.name == SIMILARITY) {
            return Err(Error::invalid(format!("tasks: `{SIMILARITY}` is the retrieval score, expected another name")));
        }
        let user = self.user.iter().flat_map(|u| &u.features);
        once("user.features", user.clone().map(|f| &f.name))?;
        once("item.features", self.item.features.iter().map(|f| &f.name))?;
        for (side, feature) in user.map(|f| ("user", f)).chain(self.item.features.iter().map(|f| ("item", f))) {
            self.check_feature(feature).map_err(|e| e.within(format!("{side}.features `{}`", feature.name)))?;
        }
        if self.item.tower.is_some() && self.item.features.is_empty() {
            return Err(Error::invalid("item.tower is given without item.features, expected its inputs"));
        }
        if self.item.tower.is_none() && !self.item.features.is_empty() {
            return Err(Error::invalid(
                "item.features are given without item.tower, expected the graph that takes them",
            ));
        }
        match (&self.overarch, self.tasks.len()) {
            (Some(_), 0) => Err(Error::invalid("overarch is given without tasks, expected one for each of its logits")),
            (None, 1..) => {
                Err(Error::invalid("tasks are given without overarch, expected the graph that predicts them"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses item columns with names that mean something else to the value model.
    ///
    /// # Errors
    /// `Invalid` with the name and what it means.
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

    fn check_feature(&self, feature: &FeatureSpec) -> Result<()> {
        if feature.max_ids == 0 || feature.max_ids > limits::FEATURE_IDS_MAX {
            return Err(Error::invalid(format!(
                "max_ids: got {}, expected 1 to {}",
                feature.max_ids,
                limits::FEATURE_IDS_MAX
            )));
        }
        let table = feature.table.as_deref();
        match (feature.kind, table, feature.width) {
            (FeatureKind::Dense, Some(_), _) => Err(Error::invalid("a dense feature has no table")),
            (FeatureKind::Dense, None, Some(width)) if (1..=limits::DIMENSION_MAX).contains(&width) => Ok(()),
            (FeatureKind::Dense, None, width) => Err(Error::invalid(format!(
                "width: got {width:?}, expected 1 to {} for a dense feature",
                limits::DIMENSION_MAX
            ))),
            (_, _, Some(_)) => {
                Err(Error::invalid("width belongs to dense features; the table says how wide this one is"))
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
                if kind == FeatureKind::Category && table.vocabulary.is_none() {
                    return Err(Error::invalid(format!(
                        "table `{name}` has no vocabulary, which a category feature needs"
                    )));
                }
                Ok(())
            }
        }
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
}
