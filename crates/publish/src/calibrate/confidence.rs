//! Confidence of a mean over queries.

/// Number of standard deviations above the mean below which 95 % of a normal distribution lie.
const ONE_SIDED: f64 = 1.645;

/// Returns the mean recall of the queries, and the mean's lower bound with 95 % confidence.
pub(super) fn bounded(hits: u64, squares: u64, queries: usize, k: usize) -> (f64, f64) {
    let (queries, k) = (queries as f64, k as f64);
    let mean = hits as f64 / (queries * k);
    let variance = (squares as f64 / (queries * k * k) - mean * mean).max(0.0);
    (mean, (mean - ONE_SIDED * (variance / (queries - 1.0).max(1.0)).sqrt()).max(0.0))
}
