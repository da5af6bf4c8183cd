//! Number of the best K items that fall into one shard.

/// Maximum probability that any shard of a request has more of the best items than requested.
const MISS_MAX: f64 = 1e-4;
/// Weights below this share of the largest one are neglected.
const NEGLIGIBLE: f64 = 1e-18;

/// Returns the number of items to request from each of `shards` so that with probability 1 - 10^-4 no shard has more of
/// the best `k`. This is the smallest k' with P(X > k') at most 10^-4 / S, where X counts which of k items are in a
/// shard, each with probability 1/S.
pub fn likely(k: usize, shards: u32) -> usize {
    if shards <= 1 || k == 0 {
        return k;
    }
    let odds = 1.0 / f64::from(shards - 1);
    // Weights relative to the mode, upwards and downwards from it until they are negligible.
    let mode = ((k + 1) as f64 / f64::from(shards)) as usize;
    let rises = |at: usize| (k - at) as f64 / (at + 1) as f64 * odds;
    let mut above = vec![1.0];
    for at in mode..k {
        let weight = above[above.len() - 1] * rises(at);
        if weight < NEGLIGIBLE {
            break;
        }
        above.push(weight);
    }
    let (mut below, mut weight) = (0.0, 1.0);
    for at in (0..mode).rev() {
        weight /= rises(at);
        if weight < NEGLIGIBLE {
            break;
        }
        below += weight;
    }
    let total = below + above.iter().sum::<f64>();
    let most = MISS_MAX / f64::from(shards) * total;
    let mut tail = 0.0;
    for (n, weight) in above.iter().enumerate().rev() {
        tail += weight;
        if tail > most {
            return mode + n;
        }
    }
    mode
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_per_shard_exceed_their_share_slightly() {
        for k in [0, 1, 20, 1000, 200_000] {
            assert_eq!(likely(k, 1), k);
        }
        // A simulation of a hundred thousand requests gave these numbers, to within one or two.
        for (k, shards, expected) in [
            (100, 4, 44),
            (100, 16, 19),
            (100, 64, 10),
            (1000, 4, 307),
            (1000, 16, 98),
            (1000, 64, 37),
            (10_000, 4, 2677),
            (10_000, 16, 733),
            (10_000, 64, 217),
        ] {
            let found = likely(k, shards);
            assert!(found.abs_diff(expected) <= 2, "{k} of {shards}: {found}, expected about {expected}");
        }
        for shards in [2, 3, 5, 64, 1024] {
            let requested: Vec<usize> = (0..3000).map(|k| likely(k, shards)).collect();
            assert!(requested.is_sorted() && requested.iter().enumerate().all(|(k, requested)| *requested <= k));
        }
        assert!(likely(200_000, 2) < 102_000);
    }
}
