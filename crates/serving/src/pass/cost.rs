//! Cost estimate of a request, from its parameters alone, before it runs.
//!
//! The model counts what each step touches (for a search, `search::Expected`) and multiplies by CPU nanoseconds of a server of
//! 2023; the engine scales the result by its measured service rate. The estimate need not be exact: it orders, sums and limits
//! requests. The constants are from `docs/benchmarks/pass.md` (steps of the Debian model) and `docs/internals/index.md` (probed
//! items).

use super::work::{Cost, Prepared, Search, Task};
use crate::view::View;

/// Nanoseconds per scanned byte of int8 codes, and per probed list and dimension.
const SCAN_NS_PER_BYTE: f64 = 0.05;
/// Nanoseconds per number of a wide row, read randomly for rescoring or sequentially by an exact scan.
const ROW_NS_PER_NUMBER: f64 = 0.4;
const EXACT_NS_PER_NUMBER: f64 = 0.15;
/// Nanoseconds per excluded item, per candidate that is verified, selected, scored and sorted, and per returned item.
const EXCLUDE_NS: f64 = 100.0;
const CANDIDATE_NS: f64 = 150.0;
const RESULT_NS: f64 = 300.0;
const CELL_NS: f64 = 60.0;
/// Nanoseconds per multiply-add of a graph, or an operation of equal cost.
const MULTIPLY_ADD_NS: f64 = 0.02;
/// Fixed nanoseconds per request: parsing, queueing, the user tower of a small model.
const REQUEST_NS: f64 = 100_000.0;

/// Bytes per candidate in a worker's buffers: selectors, slots, scores, values.
const CANDIDATE_BYTES: usize = 96;
/// Bytes per returned item, without its task scores.
const RESULT_BYTES: usize = 24;

/// Estimates the cost of a prepared request.
pub(super) fn of(view: &View, prepared: &Prepared) -> Cost {
    let tower = view.main().package.user.as_ref().filter(|_| prepared.features().is_some()).map_or(0, |t| t.work(1));
    let ids_ns = prepared.ids() as f64 * view.dimension() as f64 * ROW_NS_PER_NUMBER;
    let mut work_ns = REQUEST_NS + tower as f64 * MULTIPLY_ADD_NS + ids_ns;
    let candidates = prepared.candidates();
    let results = match &prepared.task {
        Task::Retrieve(search) => {
            work_ns += search_ns(view, search);
            search.k.min(candidates)
        }
        Task::Select { search, selection } => {
            work_ns += search_ns(view, search);
            candidates + selection.ahead.unwrap_or(0)
        }
        Task::Rerank { k, .. } => candidates.min(*k),
        Task::Rank { .. } | Task::Embed { .. } => candidates,
    };
    let tasks = view.overarch().map_or(0, |o| o.tasks());
    // Number of values per candidate that the reranker reads, at least the dimension of the row that retrieval scores.
    let rows = view.overarch().map_or(0, |o| o.row_width()).max(view.dimension());
    let row = rows as f64 * ROW_NS_PER_NUMBER;
    work_ns += candidates as f64 * (CANDIDATE_NS + row);
    let valued = match &prepared.task {
        Task::Select { search, selection } => selection.ahead.map_or(0, |_| search.candidates()),
        _ => candidates,
    };
    work_ns += view.overarch().map_or(0, |o| o.work(valued)) as f64 * MULTIPLY_ADD_NS;
    work_ns += results as f64 * (RESULT_NS + prepared.reading.columns.len() as f64 * CELL_NS);
    let answer_bytes = results * (RESULT_BYTES + 4 * tasks);
    let memory_bytes = candidates * (CANDIDATE_BYTES + 4 * tasks) + answer_bytes + prepared.bytes();
    Cost { work_ns, memory_bytes, answer_bytes, items: results }
}

fn search_ns(view: &View, search: &Search) -> f64 {
    let segments = view.searched();
    let catalogue = view.catalogue(&segments);
    let dimension = view.dimension() as f64;
    let of_query = |query| {
        let expected = catalogue.expected(&query);
        let scanned = (expected.lists * dimension + expected.block_bytes) * SCAN_NS_PER_BYTE;
        let rows = (expected.rows * ROW_NS_PER_NUMBER + expected.exact_rows * EXACT_NS_PER_NUMBER) * dimension;
        search.excluded.len() as f64 * EXCLUDE_NS + expected.filter_ns + scanned + rows
    };
    search.planned.planning_ns() + search.queries(view).map(of_query).sum::<f64>()
}
