//! Times lookups of managed ids on one thread: a table of 10 million rows that all have an id of 64 bits, batches of 10,000.
//!
//! `cargo bench -p sterling-embedding --bench managed_ids` prints a table. `python python/bench_managed.py` alternates
//! this benchmark with TorchRec's method, `torch.searchsorted` over the sorted ids. With `--turns`, each input line
//! names a case, and the output is the nanoseconds per id of a round of this case.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterling_core::random::splitmix64;
use sterling_embedding::managed::ManagedIds;
use sterling_embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, RowFormat, Table, TableSpec, Unseen,
};
use sterling_kernels::buffer::Buffer;

const ROWS: u64 = 10_000_000;
const BATCH: usize = 10_000;
/// Ids per bag.
const POOLING: usize = 20;
const WIDTH: usize = 16;
const BATCHES: u64 = 64;
const ROUND: Duration = Duration::from_millis(200);
const CASES: [&str; 4] = ["map", "map, no id held", "pooled by rows", "pooled by ids"];

/// Id of row `n`.
fn id(n: u64) -> i64 {
    splitmix64(n) as i64
}

struct Bench {
    managed: ManagedIds,
    spec: TableSpec,
    by_rows: EmbeddingBagCollection,
    by_ids: EmbeddingBagCollection,
}

impl Bench {
    fn new() -> Self {
        let spec =
            TableSpec { name: "t".into(), rows: ROWS, width: WIDTH, format: RowFormat::F16, unseen: Unseen::Zero };
        let managed = || {
            let ids = Buffer::filled(ROWS as usize, |to| (0..).zip(to).for_each(|(n, to)| *to = id(n)));
            ManagedIds::new(&spec, ids.unwrap()).unwrap()
        };
        // The rows are written, because unwritten pages would all map the zero page.
        let rows = Buffer::filled(ROWS as usize * WIDTH * 2, |to: &mut [u8]| to.fill(0x11)).unwrap();
        let table = Table::host(spec.clone(), rows).unwrap();
        let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum }];
        let collection = |table: Table| EmbeddingBagCollection::new(vec![Arc::new(table)], &bags).unwrap();
        Bench {
            by_rows: collection(table.clone()),
            by_ids: collection(table.with_ids(managed())),
            managed: managed(),
            spec,
        }
    }

    /// Returns the nanoseconds per id of a round.
    fn round(&self, case: &str) -> f64 {
        let draw = |batch: u64, n: usize| splitmix64(splitmix64(batch) ^ n as u64) % ROWS;
        let ids = |batch: u64| -> Vec<i64> {
            let of = |n: usize| match case {
                "pooled by rows" => draw(batch, n) as i64,
                "map, no id held" => id(ROWS + draw(batch, n)),
                _ => id(draw(batch, n)),
            };
            (0..BATCH).map(of).collect()
        };
        let lengths = [POOLING as i64; BATCH / POOLING];
        let batches: Vec<KeyedJaggedTensor> = (0..BATCHES)
            .map(|batch| KeyedJaggedTensor::from_lengths(["f"], ids(batch), &lengths, None).unwrap())
            .collect();
        let (mut rows, mut done) = (Vec::new(), 0u64);
        let start = Instant::now();
        while start.elapsed() < ROUND {
            let batch = &batches[(done % BATCHES) as usize];
            match case {
                "pooled by rows" => drop(black_box(self.by_rows.lookup(batch, &Lookup::default()).unwrap())),
                "pooled by ids" => drop(black_box(self.by_ids.lookup(batch, &Lookup::default()).unwrap())),
                _ => {
                    rows.clear();
                    let ids = batch.get("f").unwrap();
                    black_box(self.managed.append_rows(&self.spec, ids.values(), &mut rows));
                }
            }
            done += 1;
        }
        start.elapsed().as_nanos() as f64 / (done as f64 * BATCH as f64)
    }
}

fn main() {
    let bench = Bench::new();
    if std::env::args().any(|argument| argument == "--turns") {
        println!("ready");
        for case in std::io::stdin().lock().lines() {
            println!("{}", bench.round(&case.unwrap()));
        }
        return;
    }
    println!("{:.1} bytes of map per row", bench.managed.bytes() as f64 / ROWS as f64);
    for case in CASES {
        let mut rounds: Vec<f64> = (0..9).map(|_| bench.round(case)).collect();
        rounds.sort_by(f64::total_cmp);
        println!("{case:>16}: {:5.1} ns per id", rounds[rounds.len() / 2]);
    }
}
