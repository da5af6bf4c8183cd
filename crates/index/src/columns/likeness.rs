//! Ordering of items within a list by their filterable attributes.
//!
//! Any order of items within a list is valid. With items of equal attributes next to each other, the items that pass a filter
//! share blocks, so a scan reads fewer blocks.

use super::build::{ItemColumn, ItemValues, dictionary};
use sterling_core::error::{Error, Result};

/// Returns a sort key per item; items with equal attributes get equal keys. The columns named in `first` are the most
/// significant, in that order. If `first` is empty, the filterable category columns are used, those with the fewest
/// distinct values first. An item with several values counts by its most frequent one.
///
/// # Errors
/// `Invalid` if a name in `first` is not a filterable category column.
pub fn likeness(columns: &[ItemColumn], first: &[String], items: usize) -> Result<Vec<u64>> {
    let mut ranked: Vec<(&str, Ranks)> = Vec::new();
    for column in columns.iter().filter(|c| c.filter && (first.is_empty() || first.contains(&c.name))) {
        match &column.values {
            ItemValues::Integers { offsets, values } => ranked.push((&column.name, Ranks::of(offsets, values))),
            ItemValues::Texts { offsets, values } => ranked.push((&column.name, Ranks::of(offsets, values))),
            ItemValues::Floats(_) => {}
        }
    }
    if let Some(name) = first.iter().find(|name| ranked.iter().all(|(n, _)| n != name)) {
        return Err(Error::invalid(format!("filter.together: `{name}` is not a filterable category column")));
    }
    match first.is_empty() {
        true => ranked.sort_by_key(|(_, ranks)| ranks.distinct),
        false => ranked.sort_by_key(|(name, _)| first.iter().position(|f| f == name)),
    }
    let mut keys = vec![0u64; items];
    let mut free = u64::BITS;
    // A column without any values cannot distinguish items.
    for (_, ranks) in ranked.iter().filter(|(_, ranks)| ranks.distinct > 0) {
        // Items without a value have one extra rank, the last.
        let bits = u64::BITS - (ranks.distinct as u64).leading_zeros();
        if bits > free {
            break;
        }
        free -= bits;
        keys.iter_mut().zip(&ranks.of_items).for_each(|(key, &rank)| *key |= u64::from(rank) << free);
    }
    Ok(keys)
}

/// Ranks of the values of a column by frequency.
struct Ranks {
    distinct: usize,
    /// Rank of each item's value that is most frequent in the column; `distinct` if the item has no value.
    of_items: Vec<u32>,
}

impl Ranks {
    fn of<T: Ord>(offsets: &[u32], values: &[T]) -> Self {
        let (distinct, codes) = dictionary(values);
        let distinct = distinct.len();
        let mut counts = vec![0usize; distinct];
        codes.iter().for_each(|&code| counts[code as usize] += 1);
        let mut by_count: Vec<u32> = (0..distinct as u32).collect();
        by_count.sort_by_key(|&code| std::cmp::Reverse(counts[code as usize]));
        let mut ranks = vec![0u32; distinct];
        by_count.iter().enumerate().for_each(|(rank, &code)| ranks[code as usize] = rank as u32);
        let of_item = |range: &[u32]| {
            let codes = &codes[range[0] as usize..range[1] as usize];
            codes.iter().map(|&code| ranks[code as usize]).min().unwrap_or(distinct as u32)
        };
        Ranks { distinct, of_items: offsets.windows(2).map(of_item).collect() }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn texts(name: &str, items: &[&[&str]]) -> ItemColumn {
        let mut offsets = vec![0];
        offsets.extend(items.iter().scan(0, |end, values| {
            *end += values.len() as u32;
            Some(*end)
        }));
        let values = items.concat().into_iter().map(str::to_owned).collect();
        ItemColumn { name: name.into(), filter: true, values: ItemValues::Texts { offsets, values } }
    }

    fn order(keys: &[u64]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by_key(|&item| keys[item]);
        order
    }

    #[test]
    fn equal_attributes_come_together_and_the_column_with_fewest_values_leads() {
        let kinds = texts("kind", &[&["b"], &["a"], &["b"], &[], &["a"], &["b"]]);
        let langs = texts("lang", &[&["fr"], &["en"], &["en", "fr"], &["en"], &["de"], &["fr"]]);
        // `b` is the most frequent kind; `en` and `fr` are equally frequent, so the smaller value comes first.
        let keys = likeness(&[langs.clone(), kinds.clone()], &[], 6).unwrap();
        assert_eq!(order(&keys), [2, 0, 5, 1, 4, 3]);
        assert_eq!(keys[0], keys[5]);
        let keys = likeness(&[langs.clone(), kinds.clone()], &["lang".into(), "kind".into()], 6).unwrap();
        assert_eq!(order(&keys), [2, 1, 3, 0, 5, 4]);
        let error = likeness(&[langs, kinds], &["price".into()], 6).unwrap_err().to_string();
        assert!(error.contains("filter.together: `price`"), "{error}");
    }

    #[test]
    fn items_without_categories_are_all_alike() {
        let price = ItemColumn { name: "price".into(), filter: true, values: ItemValues::Floats(vec![1.0, 2.0]) };
        let hidden = ItemColumn { filter: false, ..texts("title", &[&["x"], &["y"]]) };
        assert_eq!(likeness(&[price, hidden], &[], 2).unwrap(), [0, 0]);
        assert!(likeness(&[], &[], 0).unwrap().is_empty());
        assert_eq!(likeness(&[texts("empty", &[&[], &[]])], &[], 2).unwrap(), [0, 0]);
    }
}
