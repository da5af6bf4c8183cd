//! The bounds of what a request, a model or a catalogue may ask for, with the relations that must hold between them checked
//! when it compiles. What bounds one part alone stands in that part.

use std::ops::RangeInclusive;

/// Widest query or item embedding, D.
pub const DIMENSION_MAX: usize = 8192;
/// Largest magnitude of a number in a query or an item's vector, 2^56: no product of two vectors leaves f32.
pub const COMPONENT_MAX: f32 = 7.205_759_4e16;
/// Most results of a request, K.
pub const RESULTS_MAX: usize = 100_000;
/// Most candidates of a request, K0.
pub const CANDIDATES_MAX: usize = 200_000;
/// Recalls that a request may ask for.
pub const RECALLS: RangeInclusive<f64> = 0.5..=0.999;
/// Most requests in one `requests` list.
pub const BATCH_REQUESTS_MAX: usize = 1024;
/// Most ids of one feature of one request.
pub const FEATURE_IDS_MAX: usize = 100_000;
/// Most rows of a sequence, S.
pub const SEQUENCE_MAX: usize = 16_384;
/// Most numbers of one tensor of a user or a candidate that a graph reads or makes.
pub const TENSOR_NUMBERS_MAX: usize = 1 << 20;
/// Most queries of one user, Tq.
pub const QUERIES_MAX: usize = 64;
/// Largest weight of one of several queries, 2^32.
pub const QUERY_WEIGHT_MAX: f32 = 4_294_967_296.0;
/// Most features of one request.
pub const FEATURES_MAX: usize = 1024;
/// Most excluded item ids of a request.
pub const EXCLUDE_MAX: usize = 100_000;
/// Most item columns that a request may have returned.
pub const COLUMNS_MAX: usize = 256;
/// Most constants of the value model that a request may override.
pub const CONSTANTS_MAX: usize = 256;
/// Most query embeddings that a server keeps of a version.
pub const RECORDED_MAX: usize = 1024;
/// Most items of one snapshot; slots are 32-bit.
pub const ITEMS_MAX: usize = u32::MAX as usize / 2;
/// Most document shards of a version.
pub const SHARDS_MAX: u32 = 1024;
/// Most lists of an index, C.
pub const LISTS_MAX: usize = 1 << 20;
/// Longest filter expression, in bytes.
pub const FILTER_BYTES_MAX: usize = 64 * 1024;
/// Most leaves of a filter expression.
pub const FILTER_LEAVES_MAX: usize = 1024;
/// Deepest nesting of a filter expression.
pub const FILTER_DEPTH_MAX: usize = 64;
/// Longest value-model expression, in bytes.
pub const VALUE_BYTES_MAX: usize = 64 * 1024;
/// Deepest nesting of a value-model expression.
pub const VALUE_DEPTH_MAX: usize = 64;
/// Items beside a snapshot, or as many as it has where that is more: beyond it updates are refused until a version is published.
pub const FRESH_ITEMS: usize = 100_000;
/// Bytes in memory of what updates have laid beside a snapshot, or as many as its files have where that is more: the same.
pub const FRESH_BYTES: u64 = 1 << 30;
/// Most bytes of the attributes of an item that is brought, as they are kept in memory.
pub const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// Largest request body, in bytes.
pub const BODY_BYTES_MAX: usize = 32 << 20;
/// Most work of one call, in milliseconds of one core as `pass::Cost` counts them.
pub const WORK_MS_MAX: u64 = 5_000;
/// Most memory of one call between its parsing and its answer, in bytes as `pass::Cost` counts them.
pub const MEMORY_BYTES_MAX: usize = 256 << 20;
/// Longest time-out that a request may ask for, in milliseconds.
pub const TIMEOUT_MS_MAX: u64 = 600_000;

const _: () = assert!(RESULTS_MAX <= CANDIDATES_MAX);
const _: () = assert!(CANDIDATES_MAX <= ITEMS_MAX);
const _: () = assert!(FILTER_LEAVES_MAX < FILTER_BYTES_MAX);
// Half of f32's range is left to the rounding of rows and codes.
const _: () = assert!(DIMENSION_MAX as f64 * COMPONENT_MAX as f64 * COMPONENT_MAX as f64 <= f32::MAX as f64 / 2.0);

/// Whether a text names a server, as `HOST:PORT`.
pub fn names_server(text: &str) -> bool {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    // A URL is none: its host would be looked up with the scheme in it, again and again.
    !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
}
