//! Rows of a Parquet file: the role of each column, and the requests that rows make with them.
//!
//! | column | role |
//! |---|---|
//! | `id` | the row's id |
//! | name of a user tower feature | its values: a scalar or a list of ids, texts or numbers |
//! | feature name and `.weights` | weights of the feature's ids |
//! | `vector` | the query vector, in place of features |
//! | `filter` `exclude` `k`; for ranking `items` | request fields of these names; null: the value of the job |
//! | for items: name of a source of the item tower | its values; other columns are ignored |

use arrow_array::RecordBatch;
use arrow_schema::Schema;

use super::questions::{Question, Questions, RowRequest, Template};
use sterling_core::error::{Error, Result};
use sterling_core::items::ID;
use sterling_core::limits::EXCLUDE_MAX;
use sterling_core::request::{Features, Rank, Request, Retrieve, User, Values};
use sterling_core::units::ItemId;
use sterling_graph::tower::Tower;
use sterling_snapshot::model::Package;
use sterling_storage::arrow::ArrowColumn;

const VECTOR: &str = "vector";
const WEIGHTS: &str = ".weights";

/// Role of a column.
#[derive(Clone, Debug, PartialEq)]
enum Role {
    Id,
    Feature(String),
    Weights(String),
    Vector,
    Filter,
    Exclude,
    K,
    Items,
    /// An item column that the item tower does not read.
    Unread,
}

/// Roles of the columns of a file.
#[derive(Debug)]
pub(super) struct Roles {
    /// Columns in file order, with their names.
    columns: Vec<(String, Role)>,
    /// True if a feature of the tower is named like the id column.
    reads_id: bool,
}

/// Returns the source names of a tower's features.
pub(super) fn sources(tower: Option<&Tower>) -> Vec<String> {
    tower.map_or(&[][..], Tower::features).iter().map(|feature| feature.source().to_owned()).collect()
}

/// Returns the names of the features that rows may have.
fn features(package: &Package, template: &Template) -> Vec<String> {
    sources(if *template == Template::Items { package.item.as_ref() } else { package.user.as_ref() })
}

/// Returns the role of a column with this name, if it has one.
fn role(name: &str, features: &[String], template: &Template) -> Option<Role> {
    match name {
        ID => Some(Role::Id),
        name if features.iter().any(|feature| feature == name) => Some(Role::Feature(name.into())),
        _ if *template == Template::Items => Some(Role::Unread),
        VECTOR => Some(Role::Vector),
        "filter" | "exclude" | "k" if matches!(template, Template::Rank(_)) => None,
        "filter" => Some(Role::Filter),
        "exclude" => Some(Role::Exclude),
        "k" => Some(Role::K),
        "items" if matches!(template, Template::Rank(_)) => Some(Role::Items),
        name => {
            let feature = name.strip_suffix(WEIGHTS)?;
            features.iter().any(|known| known == feature).then(|| Role::Weights(feature.into()))
        }
    }
}

/// Rejects a file in a folder `NAME=VALUE` if NAME is a field of a row, because the files lack that column.
///
/// # Errors
/// `Unsupported` with the column.
pub(super) fn check_folders(columns: &[(String, String)], package: &Package, template: &Template) -> Result<()> {
    let features = features(package, template);
    let is_read = |name: &str| !matches!(role(name, &features, template), None | Some(Role::Unread));
    match columns.iter().find(|(name, _)| is_read(name)) {
        Some((name, value)) => Err(Error::unsupported(format!(
            "partition folder `{name}={value}`: `score` does not read the field `{name}` from folder names, expected a \
             column"
        ))),
        None => Ok(()),
    }
}

impl Roles {
    /// Returns the roles of the columns of a file.
    ///
    /// # Errors
    /// `Invalid` with a column that is duplicate, unknown or missing.
    pub(super) fn of(schema: &Schema, package: &Package, template: &Template) -> Result<Self> {
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        if let Some(name) = names.iter().enumerate().find(|(n, name)| names[..*n].contains(name)).map(|(_, name)| name)
        {
            return Err(Error::invalid(format!("column `{name}`: it occurs twice, expected once")));
        }
        if !names.contains(&ID) {
            return Err(Error::invalid("column `id` is missing, expected 64-bit integers"));
        }
        let features = features(package, template);
        let known = || {
            let own = [VECTOR, "filter", "exclude", "k", "items"].map(str::to_owned);
            let weights = features.iter().map(|feature| format!("{feature}{WEIGHTS}"));
            let all = [ID.to_owned()].into_iter().chain(features.iter().cloned()).chain(weights).chain(own);
            let all: Vec<String> = all.filter(|name| role(name, &features, template).is_some()).collect();
            all.join(", ")
        };
        let mut roles = Vec::with_capacity(names.len());
        for name in &names {
            let role = role(name, &features, template).ok_or_else(|| {
                Error::invalid(format!("column `{name}`: no such field of a request, expected some of: {}", known()))
            })?;
            roles.push(((*name).to_owned(), role));
        }
        let roles = Roles { columns: roles, reads_id: features.iter().any(|feature| feature == ID) };
        roles.check(&features, template)?;
        Ok(roles)
    }

    /// Rejects a set of columns that does not make a valid row.
    fn check(&self, features: &[String], template: &Template) -> Result<()> {
        let has = |role: &Role| self.columns.iter().any(|(_, r)| r == role);
        let feature = self.columns.iter().find(|(_, role)| matches!(role, Role::Feature(_)));
        match template {
            Template::Items => {
                match features.iter().find(|name| *name != ID && !has(&Role::Feature((*name).clone()))) {
                    Some(name) => Err(Error::invalid(format!("no column `{name}`, which the item tower reads"))),
                    None => Ok(()),
                }
            }
            _ if has(&Role::Vector) && feature.is_some() => {
                Err(Error::invalid("columns of features beside `vector`: expected only one of the two"))
            }
            _ if !has(&Role::Vector) && feature.is_none() => {
                let names = features.join(", ");
                Err(Error::invalid(format!("got neither `vector` nor a column of a feature: {names}")))
            }
            Template::Rank(_) if !has(&Role::Items) => Err(Error::invalid("column `items` is missing")),
            _ => Ok(()),
        }
    }

    /// Builds the requests of the rows of a batch. `first_row` is the number, within the file, of the batch's first
    /// row.
    pub(super) fn rows(&self, batch: &RecordBatch, first_row: u64, questions: &Questions) -> Vec<RowRequest> {
        let of = |batch: &RecordBatch, first: u64| match Columns::read(self, batch, first) {
            Ok(columns) => Ok((0..batch.num_rows()).map(|row| columns.asking(row, questions)).collect()),
            Err(e) => Err(e),
        };
        of(batch, first_row).unwrap_or_else(|_| {
            // Some rows have unreadable values: reads each row separately to find these rows.
            let alone = |row: usize| {
                let (one, number) = (batch.slice(row, 1), first_row + row as u64);
                of(&one, number).map_or_else(|e| (None, Err(e)), |mut rows: Vec<RowRequest>| rows.swap_remove(0))
            };
            (0..batch.num_rows()).map(alone).collect()
        })
    }
}

/// Columns of a batch with their roles.
struct Columns<'a> {
    columns: Vec<(&'a str, &'a Role, ArrowColumn)>,
    reads_id: bool,
}

impl<'a> Columns<'a> {
    fn read(roles: &'a Roles, batch: &RecordBatch, first_row: u64) -> Result<Self> {
        let columns = roles.columns.iter().zip(batch.columns()).filter(|((_, role), _)| *role != Role::Unread);
        let read = columns.map(|((name, role), array)| {
            let column = ArrowColumn::read(array, first_row as usize);
            Ok((name.as_str(), role, column.map_err(|e| e.within(format!("column `{name}`")))?))
        });
        Ok(Columns { columns: read.collect::<Result<_>>()?, reads_id: roles.reads_id })
    }

    fn asking(&self, row: usize, questions: &Questions) -> RowRequest {
        let id = self.columns.iter().find(|(_, role, _)| **role == Role::Id);
        let id = match id.map(|(_, _, column)| column.values(row)) {
            Some(Ok(Some(Values::Integers(ids)))) if ids.len() == 1 => ids[0],
            _ => return (None, Err(Error::invalid("column `id`: expected a 64-bit integer"))),
        };
        (Some(id), self.question(id, row, questions))
    }

    fn question(&self, id: i64, row: usize, questions: &Questions) -> Result<Question> {
        let (mut features, mut weights) = (Features::new(), Vec::new());
        let mut vector = None;
        let mut template = questions.template().clone();
        for (name, role, column) in &self.columns {
            let place = |e: Error| e.within(format!("column `{name}`"));
            let Some(values) = column.values(row).map_err(place)? else { continue };
            match role {
                Role::Feature(feature) => drop(features.insert(feature.clone(), values)),
                Role::Weights(feature) => weights.push((feature, numbers(values).map_err(place)?)),
                Role::Vector => vector = Some(numbers(values).map_err(place)?),
                Role::Id | Role::Unread => {}
                Role::Filter | Role::Exclude | Role::K | Role::Items => {
                    fill(&mut template, role, values).map_err(place)?
                }
            }
        }
        for (feature, weights) in weights {
            let place = |e: Error| e.within(format!("column `{feature}{WEIGHTS}`"));
            let values = features.remove(feature);
            let values = values.ok_or_else(|| Error::invalid(format!("got weights, but no values in `{feature}`")));
            let weighted = values.and_then(|values| values.weighted(weights)).map_err(place)?;
            features.insert(feature.clone(), weighted);
        }
        if self.reads_id {
            features.insert(ID.into(), Values::Integers(vec![id]));
        }
        let by_vector = self.columns.iter().any(|(_, role, _)| **role == Role::Vector);
        let user = match (by_vector, vector) {
            (false, _) => User::Features(features),
            (true, Some(vector)) => User::Vector(vector),
            (true, None) => return Err(Error::invalid("column `vector`: got null, expected numbers")),
        };
        match (template, user) {
            (Template::Retrieve(retrieve), user) => {
                questions.bounded(Request::Retrieve(Retrieve { user, ..*retrieve }))
            }
            (Template::Rank(rank), user) => questions.bounded(Request::Rank(Rank { user, ..*rank })),
            (Template::Items, User::Features(features)) => Ok(Question::Item(features)),
            (Template::Items, _) => Err(Error::internal("an item row has a query")),
        }
    }
}

/// Replaces a field of the job's request by the row's value.
fn fill(template: &mut Template, role: &Role, values: Values) -> Result<()> {
    match (template, role, values) {
        (Template::Retrieve(retrieve), Role::Filter, Values::Texts(texts)) if texts.len() == 1 => {
            retrieve.filter = texts.into_iter().collect();
        }
        (Template::Retrieve(retrieve), Role::K, Values::Integers(k)) if k.len() == 1 && k[0] > 0 => {
            retrieve.k = usize::try_from(k[0]).unwrap_or(usize::MAX);
        }
        (Template::Retrieve(retrieve), Role::Exclude, Values::Integers(ids)) if ids.len() <= EXCLUDE_MAX => {
            retrieve.exclude = ids.into_iter().map(ItemId).collect();
        }
        (Template::Rank(rank), Role::Items, Values::Integers(ids)) => {
            rank.items = ids.into_iter().map(ItemId).collect();
        }
        // Empty lists have no element type, so they are read as lists of numbers.
        (Template::Retrieve(retrieve), Role::Exclude, Values::Numbers(none)) if none.is_empty() => {
            retrieve.exclude = Vec::new();
        }
        (_, role, _) => {
            let expected = match role {
                Role::Filter => "a text".to_owned(),
                Role::K => "an integer above 0".to_owned(),
                Role::Exclude => format!("at most {EXCLUDE_MAX} integers"),
                _ => "integers".to_owned(),
            };
            return Err(Error::invalid(format!("expected {expected}")));
        }
    }
    Ok(())
}

fn numbers(values: Values) -> Result<Vec<f32>> {
    values.into_numbers().ok_or_else(|| Error::invalid("got texts, expected numbers"))
}
