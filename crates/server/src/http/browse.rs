//! Catalogue calls for people: items by name, values of a column, shape of the index.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::Uri;

use super::answer::{Outcome, Rejection, Share, held_json, json};
use super::app::App;
use super::parameters::Parameters;
use super::paths::Names;
use super::position::seen;
use super::retriever::Retriever;
use crate::describe::{column_info, column_value, files, percentiles};
use sterling_api::{
    ColumnResponse, FindRequest, FindResponse, FoundItem, IndexResponse, Problem, Served, ShardsResponse,
    ValuesRequest, attributes,
};
use sterling_core::error::{Error, Result};
use sterling_core::quota::Flow;
use sterling_core::request::VersionSelector;
use sterling_core::units::Slot;
use sterling_index::columns::ColumnKind;
use sterling_serving::view::View;

const FOUND_DEFAULT: usize = 20;
const ITEMS_MAX: usize = 100;
const VALUES_MAX: usize = 1000;
/// Longest search text, in bytes.
const CONTAINS_BYTES_MAX: usize = 256;

/// Copies of a value while it becomes an answer: as a JSON value, and in the text buffer. The budget counts both copies in full.
const COPIES: usize = 2;

/// Text search in a column: view, text and limit of results.
struct TextSearch {
    served: Served,
    view: Arc<View>,
    contains: String,
    limit: usize,
    share: Share,
}

impl TextSearch {
    async fn of(
        app: &App,
        model: &str,
        (uri, flow): (&Uri, Flow),
        contains: String,
        (limit, most): (Option<usize>, usize),
    ) -> Result<TextSearch, Rejection> {
        let loaded = app.registry.get(model, VersionSelector::Active)?;
        if contains.len() > CONTAINS_BYTES_MAX {
            let bytes = contains.len();
            return Err(
                Error::invalid(format!("contains: got {bytes} bytes, expected at most {CONTAINS_BYTES_MAX}")).into()
            );
        }
        let limit = limit.unwrap_or(FOUND_DEFAULT);
        if !(1..=most).contains(&limit) {
            return Err(Error::invalid(format!("limit: got {limit}, expected 1 to {most}")).into());
        }
        let view = seen(app, &loaded, uri).await?;
        let share = app.bodies.hold_answer(flow, 0)?;
        Ok(TextSearch { served: app.served(&loaded, &view), view, contains, limit, share })
    }
}

/// Items with a column value that contains a text: finds the id of an item by its name.
#[utoipa::path(get, path = "/v1/models/{model}/items", tag = "items", params(("model" = String, Path, description = "The model's name"), FindRequest),
    responses((status = 200, body = FindResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn find(
    State(app): State<Arc<App>>,
    Names(model): Names<String>,
    Parameters(requested): Parameters<FindRequest>,
    Extension(flow): Extension<Flow>,
    uri: Uri,
) -> Outcome {
    let TextSearch { served, view, contains, limit, share } =
        TextSearch::of(&app, &model, (&uri, flow), requested.contains, (requested.limit, ITEMS_MAX)).await?;
    let memory = share.clone();
    let written = app.asides.run(move || {
        let column = match requested.column {
            Some(column) => column,
            None => first_texts(&view)?,
        };
        let found = view.find(&column, &contains, limit)?;
        let item = |slot| {
            memory.add((COPIES * row_bytes(&view, slot)) as u64)?;
            Ok(FoundItem { id: view.id(slot).0, attributes: attributes(&view.columns(), slot) })
        };
        let items = found.into_iter().map(item).collect::<Result<Vec<_>>>()?;
        Ok(held_json(&FindResponse { served, items }, share))
    });
    written.await?
}

/// Returns the bytes of all column values of an item.
fn row_bytes(view: &View, slot: Slot) -> usize {
    let columns = view.columns();
    (0..columns.first().list().len()).map(|column| columns.cell(column, slot).bytes()).sum()
}

fn first_texts(view: &View) -> Result<String> {
    let mut columns = view.main().columns.list();
    let texts = columns.find(|column| column.kind() == ColumnKind::Texts);
    let none = || Error::invalid("column: this model has no text columns, expected the name of an integer column");
    texts.map(|column| column.name().to_owned()).ok_or_else(none)
}

/// The values of a column with their number of items; of a numeric column, its minimum and maximum.
#[utoipa::path(get, path = "/v1/models/{model}/columns/{column}", tag = "items",
    params(("model" = String, Path, description = "The model's name"), ("column" = String, Path, description = "The column's name"), ValuesRequest),
    responses((status = 200, body = ColumnResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn column(
    State(app): State<Arc<App>>,
    Names((model, column)): Names<(String, String)>,
    Parameters(requested): Parameters<ValuesRequest>,
    Extension(flow): Extension<Flow>,
    uri: Uri,
) -> Outcome {
    let TextSearch { served, view, contains, limit, share } =
        TextSearch::of(&app, &model, (&uri, flow), requested.contains, (requested.limit, VALUES_MAX)).await?;
    let number = view.main().columns.number(&column)?;
    let counting = app.bodies.hold_answer(flow, view.counting_bytes(number))?;
    let memory = share.clone();
    let written = app.asides.run(move || {
        let found = view.values(&column, &contains, limit)?;
        let bytes: usize = found.values.iter().map(|(value, _)| value.bytes()).sum();
        memory.add((COPIES * bytes) as u64)?;
        drop(counting);
        let (least, greatest) = found.range.unzip();
        let values = found.values.into_iter().map(column_value).collect();
        let column = column_info(view.column(&column)?);
        let response = ColumnResponse { served, column, values, found: found.found, least, greatest };
        Ok(held_json(&response, share))
    });
    written.await?
}

/// The shards of the active version, and the number of servers that have each.
#[utoipa::path(get, path = "/v1/models/{model}/shards", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = ShardsResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn shards<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&app.shards(&model)?))
}

/// The shape of the active version's index.
#[utoipa::path(get, path = "/v1/models/{model}/index", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = IndexResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn index(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    let loaded = app.registry.get(&model, VersionSelector::Active)?;
    let view = loaded.view();
    let index = &view.main().index;
    Ok(json(&IndexResponse {
        served: app.served(&loaded, &view),
        items: view.items(),
        fresh_items: view.fresh_items(),
        durable: app.feed(&loaded).ok().map(|feed| feed.last()),
        slots: index.slots(),
        lists: index.lists(),
        list_items: percentiles(index.list_lengths()),
        files: files(view.main()),
    }))
}
