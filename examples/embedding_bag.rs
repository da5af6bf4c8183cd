//! Pooled lookups over embedding tables, with TorchRec's names and semantics: jagged ids in, one embedding per feature out.
//!
//! `cargo run --example embedding_bag`

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, RowFormat, Table, Unseen,
};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Row `r` of the table is [r, r, r, r].
    let rows: Vec<f32> = (0..1_000).flat_map(|row| [row as f32; 4]).collect();
    let table = Table::from_f32("products", 4, &rows, RowFormat::F32, Unseen::Zero)?;
    let int8 = table.converted(RowFormat::Int8)?;
    println!("f32: {} bytes, int8: {} bytes", table.bytes_here(), int8.bytes_here());

    let bag = |feature: &str, pooling| BagConfig { feature: feature.into(), table: "products".into(), pooling };
    let bags = [bag("viewed", Pooling::Sum), bag("bought", Pooling::Mean)];
    let collection = EmbeddingBagCollection::new(vec![Arc::new(table)], &bags)?;

    // Two users: the first viewed 1, 2 and 3 and bought 10 and 20; the second viewed 5 and bought nothing.
    let ids = KeyedJaggedTensor::from_lengths(["viewed", "bought"], vec![1, 2, 3, 5, 10, 20], &[3, 1, 2, 0], None)?;
    let (pooled, report) = collection.lookup(&ids, &Lookup::default())?;
    for user in 0..ids.stride() {
        println!("user {user}: viewed {:?}, bought {:?}", pooled.row("viewed", user), pooled.row("bought", user));
    }
    assert_eq!(pooled.row("viewed", 0), Some(&[6.0; 4][..]));
    assert_eq!(pooled.row("bought", 0), Some(&[15.0; 4][..]));
    assert_eq!(pooled.row("bought", 1), Some(&[0.0; 4][..]));
    assert_eq!(report[0].ids, 6);
    Ok(())
}
