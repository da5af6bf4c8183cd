//! Pooled lookups row by row, for CPUs without a faster implementation.

use super::bags::{BagSums, Bags, bag_factor};
use super::rows::Rows;

pub(super) fn pool(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let mut row = vec![0f32; rows.width];
    for bag in 0..bags.offsets.len().saturating_sub(1) {
        let sum = &mut out.data[bag * out.stride + out.column..][..rows.width];
        sum.fill(0.0);
        for at in bags.range(bag) {
            let Ok(id) = usize::try_from(bags.ids[at]) else { continue };
            rows.decode(id, &mut row);
            let weight = bags.weights.map_or(1.0, |w| w[at]);
            sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * x);
        }
        let factor = bag_factor(bags, bag);
        if factor != 1.0 {
            sum.iter_mut().for_each(|s| *s *= factor);
        }
    }
}
