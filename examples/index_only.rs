//! The item index alone: inverted lists over vectors, a filter over their columns, top-k by inner product. No model, no store.
//!
//! `cargo run --example index_only`

#![allow(clippy::print_stdout)]

use sterling::index::columns::{self, Columns, ItemColumn, ItemValues};
use sterling::index::filter::{self, Plan};
use sterling::index::ivf;
use sterling::index::search::{Catalogue, Found, Query, Scratch, SearchPlan, Segment, Sink};
use sterling::storage::files::TensorFile;
use sterling::storage::rows::RowStore;

const ITEMS: usize = 20_000;
const DIMENSION: usize = 32;
const K: usize = 10;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Rows, and a column for the filter: row `n` is of group `n % 10`.
    let rows = RowStore::owned(vectors(ITEMS), DIMENSION)?;
    let groups = ItemColumn {
        name: "group".into(),
        filter: true,
        values: ItemValues::Integers {
            offsets: (0..=ITEMS as u32).collect(),
            values: (0..ITEMS as i64).map(|row| row % 10).collect(),
        },
    };

    // Build: cluster the rows, then write index, columns and filter planes, here to memory instead of files.
    let options = ivf::Options { lists: 128, ..ivf::Options::default() };
    let built = ivf::build(&rows, &ivf::RowSurvey::of(&rows)?, &options, &|_| {})?;
    let index = ivf::Index::open(&built.in_memory(&rows, "index")?)?;
    let mut file = TensorFile::new();
    columns::encode(&[groups], &built.order, &mut file)?;
    let columns = Columns::open(&file.in_memory("columns")?, built.order.len())?;
    let mut file = TensorFile::new();
    filter::encode(&columns, &built.list_offsets, &built.list_lengths, &filter::Options::default(), &mut file)?;
    let planes = file.in_memory("filter")?;
    let filter = filter::Index::open(&planes, index.list_offsets(), index.list_lengths(), columns.terms())?;
    println!("{} items in {} lists, {} bytes, {}", index.items(), index.lists(), index.bytes(), index.kernel());

    // Search: the first row is its own nearest neighbour in group 0.
    let part = Segment { index: &index, filter: &filter, ids: None, tombstones: None, first_slot: 0 };
    let catalogue = Catalogue { segments: &[part], probes_max: index.lists() };
    let vector = &vectors(1);
    for (expression, exact) in [("group:0", true), ("group:0", false), ("group:1 OR group:3", false)] {
        let plan = Plan::new(&filter::parse(expression)?.canonical(), &columns, &filter, index.slots_max())?;
        let search = SearchPlan { k: K, k0: K, probes: 16, exact, ..SearchPlan::default() };
        let query = Query { vector, search, plan: &plan, beside: &[], excluded: &[], ending: None };
        let mut best = Best(Vec::new());
        catalogue.search(&[query], &mut Scratch::default(), &mut best);
        let found: Vec<(f32, u32)> = best.0.iter().map(|&(score, slot)| (score, built.order[slot])).collect();
        println!("{expression} (exact: {exact}): {:?}", &found[..3]);
        assert_eq!(found.len(), K);
        assert!(expression != "group:0" || found[0].1 == 0);
    }
    Ok(())
}

/// Collects the scores and slots of the results.
struct Best(Vec<(f32, usize)>);

impl Sink for Best {
    fn is_wanted(&mut self, _: usize) -> bool {
        true
    }

    fn found(&mut self, _: usize, found: Found<'_>) {
        self.0 = found.candidates.iter().map(|&(score, slot)| (score, slot.index())).collect();
    }
}

/// Returns unit vectors of a fixed pseudo-random sequence.
fn vectors(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let vector = |_| -> Vec<f32> {
        let numbers: Vec<f32> = (0..DIMENSION).map(|_| next()).collect();
        let length = numbers.iter().map(|x| x * x).sum::<f32>().sqrt();
        numbers.iter().map(|x| x / length).collect()
    };
    (0..count).flat_map(vector).collect()
}
