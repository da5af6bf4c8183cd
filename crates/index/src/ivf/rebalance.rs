//! Rebalancing of existing lists for changed rows, in place of a new training.
//!
//! 1. Strays, rows that the lists were not trained on, are clustered into lists of the mean size.
//! 2. Almost empty lists are dropped. The centroids of all others become the means of their rows, and every row moves to its best
//!    centroid: one round of the k-means that created them.
//! 3. Lists far above the mean size are split in two, the largest first, until no such list is left. Each half keeps its
//!    rows, so the bound also holds for rows that are arbitrarily close together.
//! 4. The centroid of every list becomes the mean of its final rows.

use std::collections::BinaryHeap;

use super::build::{Built, Lists, from_lists};
use super::kmeans::{Centroids, distance, halves, means};
use super::options::Rescore;
use super::statistics::RowSurvey;
use super::stray::Clustered;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_kernels::cpu::Kernels;

/// A list below this share of the mean size is dropped.
const SMALL: f64 = 0.125;
/// A list above this multiple of the mean size is split.
const LARGE: f64 = 3.0;
/// Rounds of the k-means that splits a list.
const ROUNDS: usize = 4;
/// A half of a split list is too small if it has less than one in `LOPSIDED` rows of the list.
const LOPSIDED: usize = 8;

/// Builds an index of `rows` `[N, D]` in the lists `of_rows` `[N]`, except for the `strays` among them. For `nearest`,
/// see [`Lists::nearest`].
///
/// # Errors
/// As [`RowSurvey::of`] and [`from_lists`].
pub fn rebalance(rows: Matrix<'_>, of_rows: &[u32], strays: &[u32], nearest: bool, rescore: Rescore) -> Result<Built> {
    if of_rows.len() != rows.rows() || of_rows.is_empty() {
        return Err(Error::internal(format!("index: {} rows have a list, expected {}", of_rows.len(), rows.rows())));
    }
    let kernels = Kernels::detect()?;
    let survey = RowSurvey::of(&rows.into())?;
    let length = if nearest { None } else { survey.length() };
    let is_spherical = length.is_some();
    let mut lists = of_rows.iter().max().map_or(0, |&list| list as usize + 1);
    let mut of_rows = of_rows.to_vec();
    if !strays.is_empty() {
        let count = (strays.len() * lists / rows.rows()).clamp(1, strays.len());
        let own: Vec<f32> = strays.iter().flat_map(|&row| rows.row(row as usize)).copied().collect();
        let clustered = Clustered::of(Matrix::new(&own, rows.cols())?, count, length)?;
        strays.iter().zip(clustered.of_rows).for_each(|(&row, list)| of_rows[row as usize] = lists as u32 + list);
        lists += count;
    }
    let mut lists = grouped(&of_rows, lists);
    let before = lists.len();
    let mean = rows.rows() as f64 / before as f64;
    lists.retain(|list| list.len() as f64 >= SMALL * mean && !list.is_empty());
    let moved = Centroids::new(means(rows, &lists, is_spherical), rows.cols(), length);
    let mut lists = grouped(&moved.assign_all(kernels, rows, None, &|_| ()), lists.len());
    halve_large(rows, &mut lists, before);
    lists.retain(|list| !list.is_empty());
    let mut places = vec![0u32; rows.rows()];
    for (number, list) in (0..).zip(&lists) {
        list.iter().for_each(|&row| places[row as usize] = number);
    }
    let centroids = means(rows, &lists, is_spherical);
    from_lists(&survey, Lists { centroids, of_rows: places, nearest }, rescore)
}

/// Returns the rows of each of `count` lists.
fn grouped(of_rows: &[u32], count: usize) -> Vec<Vec<u32>> {
    let mut lists = vec![Vec::new(); count];
    of_rows.iter().enumerate().for_each(|(row, &list)| lists[list as usize].push(row as u32));
    lists
}

/// Splits the largest list repeatedly while it is far above the mean size. The mean is over `before` lists, or over the
/// current lists if these are more, so that splits can replace dropped lists.
fn halve_large(rows: Matrix<'_>, lists: &mut Vec<Vec<u32>>, before: usize) {
    let mut by_size: BinaryHeap<(usize, usize)> = lists.iter().map(Vec::len).zip(0..).collect();
    while let Some((length, list)) = by_size.pop() {
        let most = LARGE * rows.rows() as f64 / lists.len().max(before) as f64;
        if length as f64 <= most || length < 2 || lists.len() >= limits::LISTS_MAX {
            return;
        }
        let [one, other] = halve(rows, &lists[list]);
        by_size.extend([(one.len(), list), (other.len(), lists.len())]);
        lists[list] = one;
        lists.push(other);
    }
}

/// Splits a list into two parts of similar size: by a k-means with two centroids, or at the median between both if one
/// centroid attracts nearly all rows.
fn halve(rows: Matrix<'_>, list: &[u32]) -> [Vec<u32>; 2] {
    let (one, other) = halves(rows, list);
    let mut parts = [one, other];
    let mut nearer: Vec<(f32, u32)> = Vec::new();
    for _ in 0..ROUNDS {
        let centres = means(rows, &parts, false);
        let (one, other) = centres.split_at(rows.cols());
        let by = |&row: &u32| (distance(rows.row(row as usize), one) - distance(rows.row(row as usize), other), row);
        nearer = list.iter().map(by).collect();
        nearer.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let near = nearer.partition_point(|(by, _)| *by <= 0.0);
        if near == 0 || near == list.len() {
            break;
        }
        parts = cut(&nearer, near);
    }
    if parts[0].len().min(parts[1].len()) * LOPSIDED < list.len() {
        parts = cut(&nearer, nearer.len() / 2);
    }
    parts
}

fn cut(rows: &[(f32, u32)], at: usize) -> [Vec<u32>; 2] {
    let (one, other) = rows.split_at(at);
    [one, other].map(|part| part.iter().map(|(_, row)| *row).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::statistics::common_length;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_row_lies_in_one_list_and_no_list_is_far_above_the_mean(
            numbers in proptest::collection::vec(-3i8..=3, 2..900),
            lists in 1u32..20,
            clump in 0usize..200,
            nearest: bool,
        ) {
            let mut numbers: Vec<f32> = numbers.iter().map(|&x| f32::from(x)).collect();
            // Many identical rows cannot be separated, but must be split all the same.
            numbers.extend(std::iter::repeat_n([2.0, 1.0], clump).flatten());
            numbers.truncate(numbers.len() / 2 * 2);
            let rows = Matrix::new(&numbers, 2).unwrap();
            let of_rows: Vec<u32> = (0..rows.rows() as u32).map(|row| row * row % lists).collect();
            let built = rebalance(rows, &of_rows, &[], nearest, Rescore::F32).unwrap();
            let mut found: Vec<u32> = built.order.iter().copied().filter(|&row| row != sterling_core::units::NO_ITEM).collect();
            found.sort_unstable();
            prop_assert_eq!(found, (0..rows.rows() as u32).collect::<Vec<_>>());
            let mean = rows.rows() as f64 / built.list_lengths.len() as f64;
            for &length in &built.list_lengths {
                prop_assert!(length > 0 && f64::from(length) <= (4.0 * mean).max(1.0), "{length} of a mean of {mean}");
            }
            let is_spherical = !nearest && common_length(rows).is_some();
            for (number, list) in lists_of(&built).into_iter().enumerate() {
                let mean = means(rows, &[list], is_spherical);
                prop_assert!(distance(&mean, built.centroid(number)) < 1e-6, "{mean:?}: {:?}", built.centroid(number));
            }
        }
    }

    fn lists_of(built: &Built) -> Vec<Vec<u32>> {
        let bounds = built.list_offsets.iter().zip(&built.list_lengths);
        bounds.map(|(&first, &length)| built.order[first as usize..][..length as usize].to_vec()).collect()
    }

    #[test]
    fn halves_of_a_list_get_their_own_centroids_where_other_lists_lose_all_rows() {
        let mut numbers: Vec<f32> = Vec::new();
        let mut of_rows: Vec<u32> = Vec::new();
        let mut put = |row: [f32; 2], list: u32| {
            numbers.extend(row);
            of_rows.push(list);
        };
        // Equal rows in the first and in the last list; one of the lists takes all.
        (0..10).for_each(|_| put([100.0, 0.0], 0));
        (0..10).for_each(|_| put([100.0, 0.0], 11));
        // A list that has grown and consists of two groups.
        (0..50).for_each(|n| put([-50.0 + n as f32 / 50.0, 300.0], 1));
        (0..50).for_each(|n| put([50.0 + n as f32 / 50.0, 300.0], 1));
        (2..11).for_each(|list| (0..10).for_each(|n| put([-500.0 * list as f32, n as f32], list)));
        let rows = Matrix::new(&numbers, 2).unwrap();
        for nearest in [true, false] {
            let built = rebalance(rows, &of_rows, &[], nearest, Rescore::F32).unwrap();
            for (number, list) in lists_of(&built).into_iter().enumerate() {
                let far = |row: &&u32| distance(rows.row(**row as usize), built.centroid(number)) > 60.0 * 60.0;
                assert_eq!(list.iter().find(far), None, "nearest {nearest}: {:?}", built.centroid(number));
            }
        }
    }

    #[test]
    fn strays_get_lists_of_their_own() {
        // Old lists, and three distant groups (one of them small), all assigned to the first list.
        let row = |n: usize| match n {
            0..200 => [if n.is_multiple_of(2) { 10.0 } else { -10.0 }, n as f32 / 200.0],
            200..260 => [9.0, 90.0 + n as f32 / 260.0],
            260..320 => [9.0, -90.0 + n as f32 / 320.0],
            _ => [90.0, 9.0],
        };
        let numbers: Vec<f32> = (0..340).flat_map(row).collect();
        let rows = Matrix::new(&numbers, 2).unwrap();
        let of_rows: Vec<u32> = (0..340).map(|n| if n < 200 { n % 10 } else { 0 }).collect();
        let strays: Vec<u32> = (200..340).collect();
        let built = rebalance(rows, &of_rows, &strays, true, Rescore::F32).unwrap();
        for (number, list) in lists_of(&built).into_iter().enumerate() {
            let far = |row: &&u32| distance(rows.row(**row as usize), built.centroid(number)) > 50.0 * 50.0;
            assert_eq!(list.iter().find(far), None, "{:?}", built.centroid(number));
        }
    }

    #[test]
    fn rebalancing_keeps_clusters_together() {
        // Two groups in one list, and a list that becomes almost empty.
        let numbers: Vec<f32> =
            (0..400).flat_map(|n| if n % 2 == 0 { [10.0, n as f32 / 400.0] } else { [-10.0, 1.0] }).collect();
        let rows = Matrix::new(&numbers, 2).unwrap();
        let of_rows: Vec<u32> = (0..400)
            .map(|n| {
                if n == 0 {
                    1
                } else if n % 16 == 1 {
                    2 + n % 9
                } else {
                    0
                }
            })
            .collect();
        let built = rebalance(rows, &of_rows, &[], true, Rescore::F32).unwrap();
        for list in lists_of(&built) {
            assert!(list.iter().all(|row| row % 2 == list[0] % 2), "{list:?}");
        }
    }
}
