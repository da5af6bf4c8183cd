//! Upper bounds of requests, models and catalogues; relations between them are checked at compile time. Bounds of a single module
//! are defined in that module.

use std::ops::RangeInclusive;

/// Maximum dimension of a query or item embedding, D.
pub const DIMENSION_MAX: usize = 8192;
/// Maximum magnitude of a component of a query or item vector, 2^56: no dot product of two vectors overflows f32.
pub const COMPONENT_MAX: f32 = 7.205_759_4e16;
/// Maximum number of results of a request, K.
pub const RESULTS_MAX: usize = 100_000;
/// Maximum number of candidates of a request, K0.
pub const CANDIDATES_MAX: usize = 200_000;
/// Recall targets that a request may set.
pub const RECALLS: RangeInclusive<f64> = 0.5..=0.999;
/// Maximum number of requests in one `requests` list.
pub const BATCH_REQUESTS_MAX: usize = 1024;
/// Maximum number of ids of one feature of one request.
pub const FEATURE_IDS_MAX: usize = 100_000;
/// Maximum number of rows of a sequence, S.
pub const SEQUENCE_MAX: usize = 16_384;
/// Maximum number of elements of one tensor per user or candidate that a graph reads or produces.
pub const TENSOR_NUMBERS_MAX: usize = 1 << 20;
/// Maximum number of queries per user, Tq.
pub const QUERIES_MAX: usize = 64;
/// Maximum weight of one of several queries, 2^32.
pub const QUERY_WEIGHT_MAX: f32 = 4_294_967_296.0;
/// Maximum number of features of one request.
pub const FEATURES_MAX: usize = 1024;
/// Maximum number of excluded item ids of a request.
pub const EXCLUDE_MAX: usize = 100_000;
/// Maximum number of item columns that a request may return.
pub const COLUMNS_MAX: usize = 256;
/// Maximum number of value-model constants that a request may override.
pub const CONSTANTS_MAX: usize = 256;
/// Maximum number of query embeddings that a server records per version.
pub const RECORDED_MAX: usize = 1024;
/// Maximum number of items of one snapshot; slots are 32-bit.
pub const ITEMS_MAX: usize = u32::MAX as usize / 2;
/// Maximum number of document shards of a version.
pub const SHARDS_MAX: u32 = 1024;
/// Maximum number of inverted lists of an index, C.
pub const LISTS_MAX: usize = 1 << 20;
/// Maximum length of a filter expression, in bytes.
pub const FILTER_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of leaves of a filter expression.
pub const FILTER_LEAVES_MAX: usize = 1024;
/// Maximum nesting depth of a filter expression.
pub const FILTER_DEPTH_MAX: usize = 64;
/// Maximum length of a value-model expression, in bytes.
pub const VALUE_BYTES_MAX: usize = 64 * 1024;
/// Maximum nesting depth of a value-model expression.
pub const VALUE_DEPTH_MAX: usize = 64;
/// Maximum items of the delta, or the snapshot's item count if larger; beyond the limit updates are rejected until a
/// publication.
pub const FRESH_ITEMS: usize = 100_000;
/// Maximum bytes of the delta, or of the snapshot's files if larger; beyond the limit updates are rejected until a publication.
pub const FRESH_BYTES: u64 = 1 << 30;
/// Maximum size of the attributes of an upserted item, in bytes as stored in memory.
pub const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// Maximum size of a request body, in bytes.
pub const BODY_BYTES_MAX: usize = 32 << 20;
/// Maximum work of one call, in milliseconds of one core as `pass::Cost` estimates them.
pub const WORK_MS_MAX: u64 = 5_000;
/// Maximum memory of one call between its parsing and its answer, in bytes as `pass::Cost` estimates them.
pub const MEMORY_BYTES_MAX: usize = 256 << 20;
/// Maximum timeout that a request may set, in milliseconds.
pub const TIMEOUT_MS_MAX: u64 = 600_000;

const _: () = assert!(RESULTS_MAX <= CANDIDATES_MAX);
const _: () = assert!(CANDIDATES_MAX <= ITEMS_MAX);
const _: () = assert!(FILTER_LEAVES_MAX < FILTER_BYTES_MAX);
// Dot products use at most half of the range of f32; the other half is headroom for the rounding of rows and quantized vectors.
const _: () = assert!(DIMENSION_MAX as f64 * COMPONENT_MAX as f64 * COMPONENT_MAX as f64 <= f32::MAX as f64 / 2.0);

/// Returns true if the text is the address of a server, `HOST:PORT`.
pub fn names_server(text: &str) -> bool {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    // A URL is rejected here: otherwise every call would try to resolve a host name that contains the scheme.
    !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
}
