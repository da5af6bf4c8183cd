//! `sterling plan`, and the tables of the Debian model in every partitioning.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sterling::embedding::place::{Sharding, TablePlan, Tier};
use sterling::embedding::planner::{PlacementPlan, Topology, Workload, plan};
use sterling::embedding::shard::Cut;
use sterling::embedding::tiers::remote::{Cluster, ClusterOptions, RemoteOptions, RowSet};
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, OnDegraded, Pooling, RowFormat, Table, Unseen,
};
use sterling::storage::files::Tensors;

use crate::redis_cluster::RedisCluster;
use crate::remote::alone;
use crate::support::{root, run, tiny_package};

/// Two hosts with two GPUs each.
const TOPOLOGY: &str = r#"
[network]
bandwidth_gb_s = 10
latency_us = 30

[[hosts]]
name = "h0"
dram_gib = 2
bandwidth_gb_s = 40
row_ns = 4
call_us = 2

[[hosts]]
name = "h1"
dram_gib = 2
bandwidth_gb_s = 40
row_ns = 4
call_us = 2

[[gpus]]
name = "g0"
host = "h0"
hbm_gib = 1
bandwidth_gb_s = 1500
row_ns = 0.1
call_us = 6
link_gb_s = 25
link_us = 10

[[gpus]]
name = "g1"
host = "h0"
hbm_gib = 1
bandwidth_gb_s = 1500
row_ns = 0.1
call_us = 6
link_gb_s = 25
link_us = 10
"#;

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_workload_is_planned_and_explained() {
    let folder = tempfile::tempdir().unwrap();
    let topology = write(folder.path(), "topology.toml", TOPOLOGY);
    let text = "batch = 64\nrequests_per_s = 100000\n\
        [[tables]]\nname = 'users'\nrows = 4000000\nwidth = 64\nformat = 'f16'\nskew = 1.05\n\
        [[tables]]\nname = 'items'\nrows = 100000\nwidth = 64\npooling = 50\nfeatures = ['seen', 'bought']\n";
    let workload = write(folder.path(), "workload.toml", text);
    let (code, reported, errors) = run(&["plan", "--workload", &workload, "--topology", &topology]);
    assert_eq!(code, 0, "{errors}");
    for part in ["Planner statistics", "users", "items", "h1", "g1", "Critical path", "1 of 2 tables state no skew"] {
        assert!(reported.contains(part), "{part} in\n{reported}");
    }
    let (code, json, _) = run(&["plan", "--workload", &workload, "--topology", &topology, "--json"]);
    let planned: PlacementPlan = serde_json::from_str(&json).unwrap();
    assert_eq!((code, planned.tables.len(), planned.batch), (0, 2, 64));
    let library = plan(&Topology::parse(TOPOLOGY).unwrap(), &Workload::parse(text).unwrap()).unwrap();
    assert_eq!(json.trim_end(), serde_json::to_string_pretty(&library).unwrap(), "JSON carries the whole plan");
}

#[test]
fn a_model_is_planned_from_its_own_tables() {
    let model = root().join("models/debian");
    let sample = model.join("heldout.jsonl");
    let (model, sample) = (model.to_str().unwrap(), sample.to_str().unwrap());
    let (code, reported, errors) = run(&["plan", model, "--sample", sample, "--batch", "16"]);
    assert_eq!(code, 0, "{errors}");
    for part in ["packages", "texts", "sections", "host0", "Batch of each host: 16 requests"] {
        assert!(reported.contains(part), "{part} in\n{reported}");
    }
    assert!(reported.contains("table `multi_arch` is read only when items are published"), "{reported}");
    let (code, reported, errors) = run(&["plan", tiny_package().to_str().unwrap()]);
    assert!(code == 0 && reported.contains("--sample measures both"), "{reported}{errors}");
}

#[test]
fn impossible_plans_have_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let topology = write(folder.path(), "topology.toml", TOPOLOGY);
    let table = |rows: u64| format!("[[tables]]\nname = 't'\nrows = {rows}\nwidth = 64\n");
    let huge = write(folder.path(), "huge.toml", &table(1 << 30));
    let wrong = write(folder.path(), "wrong.toml", "[[tables]]\nname = 't'\nrows = 'many'\n");
    let good = write(folder.path(), "good.toml", &table(1000));
    let sample = write(folder.path(), "sample.jsonl", "{\"features\": {\"t\": [1]}}\n{\"features\": 7}\n");
    for (arguments, part) in [
        (vec!["plan"], "expected a model's folder"),
        (vec!["plan", "nowhere"], "nowhere"),
        (vec!["plan", "--workload", &huge, "--topology", &topology], "table `t` fits nowhere"),
        (vec!["plan", "--workload", &wrong], "wrong.toml: line 3"),
        (vec!["plan", "--workload", &good, "--topology", &wrong], "wrong.toml: line 1"),
        (vec!["plan", "--workload", &good, "--batch", "0"], "`batch` is 0"),
        (vec!["plan", "--workload", &good, "--sample", &sample], "sample.jsonl: line 2"),
        (vec!["plan", "nowhere", "--workload", &good], "cannot be used with"),
        (vec!["plan", "--device", "gpu", "--workload", &good], "device: got `gpu`"),
    ] {
        let (code, reported, errors) = run(&arguments);
        assert!(code == 2 && errors.contains(part), "{arguments:?}: {code} {reported} {errors}");
    }
    // Fails for lack of the feature, the driver or the GPU.
    let (code, reported, errors) = run(&["plan", "--device", "cuda:99", "--workload", &good]);
    assert!(code != 0 && errors.contains("cuda"), "{code} {reported} {errors}");
}

/// Returns the packages of the Debian model and the installed ones of 64 of its users.
fn packages() -> (Table, KeyedJaggedTensor) {
    let model = root().join("models/debian");
    let tensors = Tensors::open(&model.join("tables.safetensors")).unwrap();
    let table = Table::mapped(&tensors, "packages", None, Unseen::Zero).unwrap();
    let text = std::fs::read_to_string(model.join("heldout.jsonl")).unwrap();
    let (mut ids, mut lengths) = (Vec::new(), Vec::new());
    for line in text.lines().take(64) {
        let request: Value = serde_json::from_str(line).unwrap();
        let installed = request["features"]["installed"].as_array().unwrap();
        lengths.push(installed.len() as i64);
        ids.extend(installed.iter().map(|id| id.as_i64().unwrap()));
    }
    (table, KeyedJaggedTensor::from_lengths(["installed"], ids, &lengths, None).unwrap())
}

fn mean_of_installed() -> [BagConfig; 1] {
    [BagConfig { feature: "installed".into(), table: "packages".into(), pooling: Pooling::Mean }]
}

#[test]
fn the_tables_of_the_debian_model_answer_alike_however_they_are_cut() {
    let (table, ids) = packages();
    let mut dense = vec![0f32; table.rows() as usize * table.width()];
    let rows = table.host_rows().unwrap();
    dense.chunks_exact_mut(table.width()).enumerate().for_each(|(row, to)| rows.decode(row, to));
    let topology = Topology::parse(TOPOLOGY).unwrap();
    for format in [RowFormat::F32, RowFormat::F16, RowFormat::Int8, RowFormat::Int4] {
        let table = Table::from_f32("packages", table.width(), &dense, format, Unseen::Zero).unwrap();
        let bag = mean_of_installed();
        let complete = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &bag).unwrap();
        let (expected, _) = complete.lookup(&ids, &Lookup::default()).unwrap();
        for sharding in Sharding::ALL {
            let planned = planned(&topology, &table, sharding);
            assert_eq!(planned.sharding, sharding);
            let sharded = Arc::new(table.planned(&planned, None).unwrap());
            assert_eq!(sharded.shards().len() > 1, sharding != Sharding::TableWise);
            let collection = EmbeddingBagCollection::new(vec![sharded], &bag).unwrap();
            let (got, _) = collection.lookup(&ids, &Lookup::default()).unwrap();
            let by_rows = matches!(sharding, Sharding::RowWise | Sharding::TableRowWise | Sharding::Grid);
            for (got, expected) in got.values().iter().zip(expected.values()) {
                let bound = if by_rows { 1e-5 * (1.0 + expected.abs()) } else { 0.0 };
                assert!((got - expected).abs() <= bound, "{sharding:?} {}: {got} for {expected}", format.name());
            }
        }
    }
}

#[test]
fn the_debian_model_answers_alike_with_half_a_table_on_a_cluster() {
    let _one = alone();
    let redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let (table, ids) = packages();
    let (rows, width) = (table.rows(), table.width());
    let cut = |rows: Range<u64>, device: &str| Cut { rows, columns: 0..width, copy: 0, device: device.into() };
    let [near, far] = [cut(0..rows / 2, "here"), cut(rows / 2..rows, "cluster")];
    let on_cluster = |table: &Table, version: u64| {
        let named = RowSet::new("debian", "packages", version).unwrap();
        table.load(&cluster, &named, |_| {}).unwrap();
        let options = RemoteOptions { timeout: Duration::from_secs(10), ..RemoteOptions::default() };
        Table::on_cluster(&cluster, &named, table.spec().clone(), &options).unwrap()
    };
    let shards = vec![near.take(&table).unwrap(), far.take(&on_cluster(&table, 1)).unwrap()];
    let half = Table::of_shards(table.spec().clone(), Sharding::RowWise, shards).unwrap();
    let half = EmbeddingBagCollection::new(vec![Arc::new(half)], &mean_of_installed()).unwrap();
    let all = Arc::new(on_cluster(&table, 2));
    let all = EmbeddingBagCollection::new(vec![all], &mean_of_installed()).unwrap();
    let complete = EmbeddingBagCollection::new(vec![Arc::new(table)], &mean_of_installed()).unwrap();

    let strict = Lookup { on_degraded: OnDegraded::Fail, ..Lookup::default() };
    let (expected, counts) = complete.lookup(&ids, &strict).unwrap();
    // The second time from the cache of the host.
    for _ in 0..2 {
        assert_eq!(all.lookup(&ids, &strict).unwrap(), (expected.clone(), counts.clone()));
        let (got, got_counts) = half.lookup(&ids, &strict).unwrap();
        assert_eq!(got_counts, counts);
        for (got, expected) in got.values().iter().zip(expected.values()) {
            assert!((got - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{got} for {expected}");
        }
    }
}

/// Returns the plan of one table over the GPUs with this sharding.
fn planned(topology: &Topology, table: &Table, sharding: Sharding) -> TablePlan {
    let (rows, width, format) = (table.rows(), table.width(), table.spec().format.name());
    let text = format!(
        "[[tables]]\nname = 'packages'\nrows = {rows}\nwidth = {width}\nformat = '{format}'\nfeatures = ['installed']\n\
         tiers = ['host', 'hbm']\nsharding = ['{}']\nwidth_min = 16\n",
        sharding.name()
    );
    let planned = plan(topology, &Workload::parse(&text).unwrap()).unwrap();
    assert!(planned.tables[0].shards.iter().all(|s| matches!(s.tier, Tier::Host | Tier::Hbm)));
    planned.tables[0].clone()
}
