//! The answers of a model do not depend on the placement of its tables: complete, partitioned, quantized, or with rows on a
//! cluster.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::api::embed;
use sterling::embedding::place::Sharding;
use sterling::embedding::place::{ShardPlan, TablePlan, Tier};
use sterling::embedding::planner::PlacementPlan;
use sterling::embedding::tiers::remote::{Cluster, ClusterOptions};
use sterling::embedding::{BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, Table};
use sterling::error::Kind;
use sterling::graph::tower::Threads;
use sterling::kernels::cpu::pool::RowFormat;
use sterling::publish::{Output, Plan, Remote, Stage};
use sterling::request::Ranked;
use sterling::server::describe::model_info;
use sterling::serving::view::View;
use sterling::snapshot::model::{Decisions, Package};
use sterling::snapshot::{Manifest, Placement, PlacementOptions, Recipe, Snapshot, Store, rows_on_cluster};

use crate::debian;
use crate::redis_cluster::RedisCluster;
use crate::remote::alone;
use crate::support::{Server, ids, loses, put, retrieve, root, run, sterling, tiny, tiny_package, until};

/// A partition of a table: its rows and columns and its tier.
type Part = ([u64; 2], [u32; 2], Tier);

/// Returns the plan of one table.
pub fn planned(table: &Table, sharding: Sharding, parts: &[Part]) -> TablePlan {
    let shard = |(rows, columns, tier): &Part| ShardPlan {
        copy: 0,
        rows: *rows,
        columns: *columns,
        tier: *tier,
        device: "host0".into(),
        backing: (*tier == Tier::Remote).then(|| "cluster".into()),
        cache_bytes: if *tier == Tier::Remote { 1 << 20 } else { 0 },
        bytes: 0,
        micros: 0.0,
    };
    TablePlan {
        table: table.name().into(),
        format: table.spec().format,
        sharding,
        shards: parts.iter().map(shard).collect(),
        bytes: 0,
        micros: 0.0,
        hit_share: 1.0,
        why: "a test".into(),
        ways: Vec::new(),
    }
}

/// Writes a plan to a file.
pub fn plan_file(folder: &Path, tables: Vec<TablePlan>) -> PathBuf {
    let plan = PlacementPlan {
        batch: 1,
        micros: 0.0,
        slowest: "host0".into(),
        bytes: 0,
        candidates: 1,
        tables,
        devices: Vec::new(),
        notes: Vec::new(),
    };
    let path = folder.join("plan.json");
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    path
}

fn placement(plan: PathBuf, remote: Vec<String>) -> Placement {
    let options = PlacementOptions { plan: Some(plan), remote, timeout_ms: 10_000, ..PlacementOptions::default() };
    Placement::open(&options).unwrap()
}

/// Returns the halves of a table by columns, by rows, and by rows with the second half on a cluster.
fn halves(table: &Table) -> [TablePlan; 3] {
    let (rows, columns) = (table.rows(), table.width() as u32);
    // A first column that starts a byte in every format.
    let (half_rows, half_columns) = (rows / 2, columns / 8 * 4);
    let rows_on = |tier| [([0, half_rows], [0, columns], Tier::Host), ([half_rows, rows], [0, columns], tier)];
    let by_columns = [([0, rows], [0, half_columns], Tier::Host), ([0, rows], [half_columns, columns], Tier::Host)];
    [
        planned(table, Sharding::ColumnWise, &by_columns),
        planned(table, Sharding::RowWise, &rows_on(Tier::Host)),
        planned(table, Sharding::RowWise, &rows_on(Tier::Remote)),
    ]
}

fn answers(snapshot: Snapshot, users: &[Value]) -> Vec<Vec<(i64, f32)>> {
    let request = |user: &Value| json!({"features": user["features"], "exclude": user["exclude"], "k": 20});
    let requests: Vec<Value> = users.iter().map(request).collect();
    let answers = retrieve(&Arc::new(View::new(Arc::new(snapshot))), &requests);
    let pairs =
        |(ranked, _): (Ranked, _)| ranked.ids.iter().map(|id| id.0).zip(ranked.scores.iter().copied()).collect();
    answers.into_iter().map(|answer| pairs(answer.unwrap())).collect()
}

#[test]
fn the_debian_model_answers_alike_wherever_its_tables_lie() {
    let _alone = alone();
    let _published = debian::server();
    let folder = debian::store().join("debian/1");
    let manifest = Manifest::read(&folder).unwrap();
    let users: Vec<Value> = debian::heldout().into_iter().step_by(150).collect();
    let expected = answers(Snapshot::load(&folder, &Placement::whole()).unwrap(), &users);

    let package = Package::open(&folder).unwrap();
    // Tables that are looked up for candidates are not partitioned.
    let is_placed =
        |t: &&Table| package.spec.readers(t.name()).next().is_some() && !package.spec.serves_candidates(t.name());
    let tables: Vec<&Table> = package.tables.iter().map(|t| &**t).filter(is_placed).collect();
    assert_eq!(tables.len(), 10);
    let redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    for table in &tables {
        let named = rows_on_cluster(&package.spec, &manifest, table.name()).unwrap();
        table.load(&cluster, &named, |_| {}).unwrap();
    }
    for kind in 0..3 {
        let plans = tempfile::tempdir().unwrap();
        let plan = plan_file(plans.path(), tables.iter().map(|t| halves(t)[kind].clone()).collect());
        let snapshot = Snapshot::load(&folder, &placement(plan, redis.seeds())).unwrap();
        let info = model_info(&snapshot);
        let placed = &info.tables.iter().find(|t| t.name == "packages").unwrap().placed;
        assert_eq!(
            placed,
            ["column_wise on host0, host0", "row_wise on host0, host0", "row_wise on host0, cluster"][kind]
        );
        // Equal bit for bit, for every partitioning.
        assert_eq!(answers(snapshot, &users), expected, "{placed}");
    }
}

#[test]
fn quantised_tables_of_the_debian_model_keep_the_stated_error() {
    let folder = root().join("models/debian");
    let package = Package::open(&folder).unwrap();
    let users = debian::heldout();
    let tower = package.user.as_ref().unwrap();
    let query = |package: &Package, user: &Value| {
        let tower = package.user.as_ref().unwrap();
        let body = json!({"features": user["features"]}).to_string();
        let row = tower.read(embed(body.as_bytes()).unwrap().0.features).unwrap();
        let (pooled, _) = tower.lookup(&[&row], &Lookup::default()).unwrap();
        tower.run(&[(&row, &pooled[0])], &Threads::new(1), &mut Default::default()).unwrap()[0].data().to_vec()
    };
    assert!(tower.features().iter().any(|f| f.name == "installed"));
    let bags = [BagConfig { feature: "installed".into(), table: "packages".into(), pooling: Pooling::Sum }];
    let pooled = |table: &std::sync::Arc<Table>, ids: &[i64]| {
        let ids = KeyedJaggedTensor::from_lengths(["installed"], ids.to_vec(), &[ids.len() as i64], None).unwrap();
        let collection = EmbeddingBagCollection::new(vec![table.clone()], &bags).unwrap();
        collection.lookup(&ids, &Lookup::default()).unwrap().0.values().to_vec()
    };
    for (format, cosine_min) in [(RowFormat::F16, 0.9999), (RowFormat::Int8, 0.999), (RowFormat::Int4, 0.97)] {
        let convert = |tables: Vec<std::sync::Arc<Table>>| {
            tables.iter().map(|t| t.converted(format).map(std::sync::Arc::new)).collect()
        };
        let quantised = Package::open_placed(&folder, &Decisions::default(), |_, tables| convert(tables)).unwrap();
        let [before, after] = [&package, &quantised].map(|p| p.tables.iter().find(|t| t.name() == "packages").unwrap());
        assert_eq!(after.spec().format, format);
        let stored = after.host_rows().unwrap();
        let wide = before.host_rows().unwrap();
        for user in users.iter().step_by(40) {
            let ids: Vec<i64> =
                user["features"]["installed"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
            let mut row = vec![0f32; before.width()];
            let mut bound = 1e-5;
            for &id in &ids {
                wide.decode(id as usize, &mut row);
                let size = row.iter().fold(0f32, |most, x| most.max(x.abs()));
                bound += loses(format, size, &row, stored.row(id as usize)) * 1.000_01;
            }
            for (a, b) in pooled(after, &ids).iter().zip(pooled(before, &ids)) {
                assert!((a - b).abs() <= bound, "{format:?}: {a}, expected {b} within {bound}");
            }
            let (a, b) = (query(&quantised, user), query(&package, user));
            let cosine: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum::<f32>()
                / (a.iter().map(|x| x * x).sum::<f32>() * b.iter().map(|x| x * x).sum::<f32>()).sqrt();
            assert!(cosine >= cosine_min, "{format:?}: a query whose cosine to the whole table's is {cosine}");
        }
    }
}

#[test]
fn recipes_convert_tables_and_snapshots_record_the_format() {
    let store = tempfile::tempdir().unwrap();
    let mut what = tiny();
    what.recipe.tables = [("packages".to_owned(), RowFormat::Int8)].into();
    put(store.path(), &what).unwrap();
    let snapshot = Snapshot::load(&store.path().join("tiny/1"), &Placement::whole()).unwrap();
    let formats: Vec<(String, String)> = model_info(&snapshot).tables.into_iter().map(|t| (t.name, t.format)).collect();
    assert_eq!(formats, [("packages".into(), "int8".into()), ("sections".into(), "f16".to_owned())]);
    assert_eq!(snapshot.recipe.tables, what.recipe.tables);
    for (name, format, expected) in [
        ("packages", RowFormat::F16, None),
        (
            "package",
            RowFormat::Int8,
            Some("tables.package: the model has no such table, expected some of: packages, sections"),
        ),
        ("sections", RowFormat::Int2, Some("rows of 2 numbers in int2, expected a positive multiple of 4")),
    ] {
        let mut other = tiny();
        other.recipe = Recipe { tables: [(name.to_owned(), format)].into(), ..other.recipe };
        match (put(store.path(), &other), expected) {
            (Ok(_), None) => {}
            (Err(e), Some(words)) => assert!(e.to_string().contains(words), "{e}"),
            (outcome, _) => panic!("{name} in {format:?}: {outcome:?}"),
        }
    }
}

#[test]
fn impossible_plans_are_rejected_with_the_reason() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let folder = store.path().join("tiny/1");
    let package = Package::open(&tiny_package()).unwrap();
    let packages = &package.tables[0];
    let rows = packages.rows();
    let whole = |tier| planned(packages, Sharding::TableWise, &[([0, rows], [0, 4], tier)]);
    let change = |change: &dyn Fn(&mut TablePlan)| {
        let mut plan = halves(packages)[1].clone();
        change(&mut plan);
        plan
    };
    let cases = [
        (
            change(&|p| p.shards[1].tier = Tier::Hbm),
            Kind::Unsupported,
            "is planned in 2 shards, expected tiers host and remote",
        ),
        (whole(Tier::Remote), Kind::Invalid, "table `packages` is planned on a cluster, got none"),
        (
            change(&|p| p.shards[1].device = "host1".into()),
            Kind::Unsupported,
            "{\"host0\", \"host1\"}, expected one host, or",
        ),
        (
            change(&|p| p.format = RowFormat::Int8),
            Kind::Invalid,
            "table `packages` in format int8, expected table `packages` in format f32",
        ),
        (change(&|p| p.shards[1].rows[1] += 1), Kind::Invalid, &format!("expected a range within {rows} rows")),
        (change(&|p| drop(p.shards.pop())), Kind::Invalid, "no shard holds row"),
        (change(&|p| p.shards[0].columns = [0, 5]), Kind::Invalid, "expected a range within 4 columns"),
    ];
    for (plan, kind, words) in cases {
        let error = Snapshot::load(&folder, &placement(plan_file(store.path(), vec![plan]), Vec::new())).unwrap_err();
        assert!(error.to_string().contains(words), "{error}: expected `{words}` in it");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let open = |text: &str, both: bool| {
        let file = store.path().join("wrong");
        std::fs::write(&file, text).unwrap();
        let topology = both.then(|| file.clone());
        Placement::open(&PlacementOptions { plan: Some(file), topology, ..PlacementOptions::default() })
            .unwrap_err()
            .to_string()
    };
    assert!(open("{\"tables\": 3}", false).contains("not a plan"));
    assert!(open("{}", true).contains("expected one of them"));
    let missing = PlacementOptions { topology: Some("none.toml".into()), ..PlacementOptions::default() };
    assert_eq!(Placement::open(&missing).unwrap_err().kind(), Kind::NotFound);
    // A machine too small for the tables: the missing memory is reported before serving starts.
    let small = store.path().join("small.toml");
    let host = "[[hosts]]\nname = 'h'\ndram_gib = 1e-8\nbandwidth_gb_s = 10\nrow_ns = 10\ncall_us = 1\n";
    std::fs::write(&small, host).unwrap();
    let options = PlacementOptions { topology: Some(small.clone()), ..PlacementOptions::default() };
    let error = Snapshot::load(&folder, &Placement::open(&options).unwrap()).unwrap_err();
    assert!(error.to_string().contains("packages"), "{error}");
    std::fs::write(&small, host.replace("1e-8", "1")).unwrap();
    let planned = Snapshot::load(&folder, &Placement::open(&options).unwrap()).unwrap();
    assert_eq!(model_info(&planned).tables[0].placed, "table_wise on h");
}

/// Returns the name of the rows of the first table of a version of the tiny model.
fn rows_of_tiny(package: &Package, manifest: &Manifest) -> String {
    rows_on_cluster(&package.spec, manifest, "packages").unwrap().tag()
}

/// Makes all rows look as if they had been loaded long ago.
fn make_old(redis: &RedisCluster) {
    for key in redis.keys("sterling:*:manifest") {
        let node = redis.primary_of(&key);
        let text: String = redis::cmd("GET").arg(&key).query(&mut redis.connection(node)).unwrap();
        let mut manifest: Value = serde_json::from_str(&text).unwrap();
        assert!(manifest["loaded"].as_u64().unwrap() > 0, "{manifest}");
        manifest["loaded"] = json!(1);
        redis.ask(node, &["SET", &key, &manifest.to_string()]);
    }
}

#[test]
fn published_rows_are_served_from_a_cluster_and_taken_out_of_it() {
    let _alone = alone();
    let redis = RedisCluster::start(5000);
    let store = tempfile::tempdir().unwrap();
    let (package, seed) = (tiny_package(), redis.seeds()[2].clone());
    let (package, items) = (package.display().to_string(), package.join("items.jsonl").display().to_string());
    let at = store.path().display().to_string();
    let publish = ["publish", &package, "--items", &items, "--remote", &seed, "--store", &at];
    // A failed publication has used its number, here one of another store.
    let nowhere = format!("{at}/nowhere");
    let (code, _, said) = run(&[&publish[..7], &[&nowhere, "--remote-table", "packs"]].concat());
    assert!(code == 2 && said.contains("remote table `packs`: the model has no such table"), "{code}: {said}");
    let (code, out, said) = run(&publish);
    assert!(code == 0 && out.contains("published tiny version 1"), "{out}{said}");
    let (_, listed, _) = run(&["remote", &seed]);
    assert!(listed.contains("tiny/packages") && listed.contains("tiny/sections"), "{listed}");
    assert_eq!(listed.matches("complete").count(), 2, "{listed}");
    let (code, out, said) = run(&["plan", &package, "--remote", &seed, "--json"]);
    let plan: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{code}: {e}: {out}{said}"));
    assert!(plan["devices"].as_array().unwrap().iter().any(|d| d["device"] == "cluster"), "{plan}");

    // Every row of the users' tables on the cluster.
    let package = Package::open(&tiny_package()).unwrap();
    let all = |table: &std::sync::Arc<Table>| {
        planned(table, Sharding::TableWise, &[([0, table.rows()], [0, table.width() as u32], Tier::Remote)])
    };
    let plan = plan_file(store.path(), package.tables.iter().map(all).collect());
    let config = store.path().join("sterling.toml");
    let tables = format!("[tables]\nplan = '{}'\nremote = ['{seed}']\ntimeout_ms = 10000\n", plan.display());
    std::fs::write(&config, tables).unwrap();
    let server = Server::start_with(store.path(), &["--config", &config.display().to_string()]);
    let here = Server::start(store.path());
    let request = |on_degraded: &str| {
        json!({"features": {"installed": [1, 5, 7], "section": "games", "size": [1, 2, 3]}, "k": 13, "exact": true,
               "on_degraded": on_degraded, "timeout_ms": 5000})
    };
    let [remote, local] = [&server, &here].map(|s| s.ask("/v1/models/tiny:retrieve", request("fail")));
    assert_eq!(ids(&remote), ids(&local));
    let tables = server.get_json("/v1/models/tiny")["tables"].clone();
    assert_eq!(tables[0]["placed"], "table_wise on cluster");

    // Another store, or a publication that was aborted before its folder was named, loads other rows under the same number.
    let elsewhere = tempfile::tempdir().unwrap();
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let mut other =
        Plan { output: Output::Whole { position: 0, remote: Some(Remote { cluster, tables: Vec::new() }) }, ..tiny() };
    other.recipe.tables = [("packages".to_owned(), RowFormat::Int8)].into();
    put(elsewhere.path(), &other).unwrap();
    let (_, listed, _) = run(&["remote", &seed]);
    assert_eq!(listed.matches("tiny/packages").count(), 2, "{listed}");
    assert_eq!(ids(&server.ask("/v1/models/tiny:retrieve", request("fail"))), ids(&local));

    // A version with the same tables is served from the existing rows.
    put(store.path(), &tiny()).unwrap();
    until("the second version", || server.get_json("/v1/models/tiny")["version"] == 2);
    assert_eq!(ids(&server.ask("/v1/models/tiny:retrieve", request("fail"))), ids(&local));
    let (_, listed, _) = run(&["remote", &seed]);
    assert_eq!(listed.matches("tiny/packages").count(), 2, "{listed}");

    // A version without rows on the cluster is rejected, and the previous one keeps serving.
    let mut unlike = tiny();
    unlike.recipe.tables = [("packages".to_owned(), RowFormat::F16)].into();
    put(store.path(), &unlike).unwrap();
    let third = || {
        let versions = server.get_json("/v1/models/tiny/versions");
        versions["versions"].as_array().unwrap().iter().find(|v| v["version"] == 3).cloned()
    };
    until("the third version is rejected", || third().is_some_and(|v| v["refused"].is_string()));
    let why = third().unwrap()["refused"].as_str().unwrap().to_owned();
    assert!(why.contains("packages rows ") && why.contains(": not in the cluster; sets of this table: "), "{why}");
    assert_eq!(ids(&server.ask("/v1/models/tiny:retrieve", request("fail"))), ids(&local));

    // Rows without a version in the store are deleted, but not while their publication may be in progress. Rows of another store
    // are deleted only by name.
    let retained = rows_of_tiny(&package, &Manifest::read(&store.path().join("tiny/1")).unwrap());
    let others = rows_of_tiny(&package, &Manifest::read(&elsewhere.path().join("tiny/1")).unwrap());
    let (here, there) = (store.path().display().to_string(), elsewhere.path().display().to_string());
    let (code, out, said) = run(&["remote", &seed, "--prune", &here]);
    assert!(code == 0 && out.contains("deleted 0 sets of rows"), "rows of this hour: {out}{said}");
    make_old(&redis);
    let (code, out, said) = run(&["remote", &seed, "--prune", &here, "--prune", &there]);
    assert!(code == 0 && out.contains("deleted 0 sets of rows"), "{out}{said}");
    let (code, out, said) = run(&["remote", &seed, "--prune", &here]);
    assert!(code == 0 && out.contains(&format!("deleted tiny/packages rows {others}")), "{out}{said}");
    assert!(!out.contains(&retained), "{out}");
    assert_eq!(ids(&server.ask("/v1/models/tiny:retrieve", request("fail"))), ids(&local));

    // Rows deleted while they are served: the policy of the request decides, and the answer reports it.
    let (code, _, said) = run(&["remote", &seed, "--delete", "tiny/1"]);
    assert!(
        code == 2 && said.contains(&format!("the cluster has no rows tiny/1; there are: tiny/{retained}")),
        "{said}"
    );
    let (code, out, _) = run(&["remote", &seed, "--delete", &format!("tiny/{retained}")]);
    assert!(code == 0 && out.contains(&format!("deleted tiny/packages rows {retained}")), "{out}");
    let (code, _, said) = run(&["remote", &seed, "--delete", &format!("tiny/{retained}")]);
    assert!(code == 2 && said.contains("; there are: none"), "{said}");
    let (code, _, said) = run(&["remote", &seed, "--verify"]);
    assert!(code == 1 && said.contains("the cluster has no sets of rows, expected at least one"), "{code} {said}");
    let (code, _, said) = run(&["remote", &seed, "--delete", "tiny"]);
    assert!(code == 2 && said.contains("expected MODEL/ROWS"), "{said}");
    // Ids that no cache holds.
    let fresh = |on_degraded: &str| {
        let mut request = request(on_degraded);
        request["features"]["installed"] = json!([2, 3]);
        request
    };
    let (status, problem) = server.post("/v1/models/tiny:retrieve", fresh("fail"));
    assert_eq!(status, 503, "{problem}");
    let answer = server.ask("/v1/models/tiny:retrieve", fresh("default_rows"));
    assert_eq!(answer["degraded_rows"], 2, "{answer}");

    // A server that starts without the rows loads the version once they are there.
    for version in ["2", "3"] {
        std::fs::remove_dir_all(store.path().join("tiny").join(version)).unwrap();
    }
    let config = config.display().to_string();
    let (code, _, said) = run(&["serve", "--check", "--store", &at, "--config", &config]);
    assert!(code != 0 && said.contains("packages rows ") && said.contains("not in the cluster"), "{code} {said}");
    let mut command = sterling();
    command.env("STERLING_REFRESH_MS", "100").args(["serve", "--listen", "127.0.0.1:0", "--store", &at]);
    let late = Server::spawn(command.args(["--config", &config]));
    until("the store is read", || late.get("/v1/models/tiny/versions").0 == 200);
    let of_late = || late.get_json("/v1/models/tiny/versions")["versions"][0].clone();
    until("the version is rejected", || of_late()["refused"].is_string());
    assert!(of_late()["retry_in_ms"].is_number(), "{}", of_late());
    let (code, out, said) = run(&["remote", &seed, "--load", &format!("{at}/tiny/1")]);
    assert_eq!(code, 0, "{out}{said}");
    until("the version is loaded", || of_late()["active"] == true);
    assert_eq!(ids(&late.ask("/v1/models/tiny:retrieve", request("fail"))), ids(&local));
    let (code, out, said) = run(&["serve", "--check", "--store", &at, "--config", &config]);
    assert!(code == 0 && out.contains("tiny version 1"), "{code} {out}{said}");
    std::fs::write(&config, format!("[tables]\nplan = '{}'\n", plan.display())).unwrap();
    let (code, _, said) = run(&["serve", "--check", "--store", &at, "--config", &config]);
    assert!(code == 2 && said.contains("table `packages` is planned on a cluster, got none"), "{code} {said}");
}

#[test]
fn loads_do_not_wait_for_missing_replicas_and_report_their_time() {
    let _alone = alone();
    let redis = RedisCluster::start_one();
    let store = tempfile::tempdir().unwrap();
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let what =
        Plan { output: Output::Whole { position: 0, remote: Some(Remote { cluster, tables: Vec::new() }) }, ..tiny() };
    // A load takes as long as its observer delays it.
    let (pause, waited) = (Duration::from_millis(400), AtomicBool::new(false));
    let slow = |stage: Stage, _: usize, _: usize| {
        if stage == Stage::Loading && !waited.swap(true, Ordering::Relaxed) {
            std::thread::sleep(pause);
        }
    };
    let at = Store::new(store.path());
    let start = Instant::now();
    let (name, version) = sterling::publish::publish(&at, &what, &slow).unwrap();
    let took = start.elapsed().as_secs_f64();
    assert!(waited.load(Ordering::Relaxed) && redis.calls("set") > 0, "rows were loaded");
    assert_eq!(redis.calls("wait"), 0, "there is nothing to wait for");
    let reported = Manifest::read(&at.folder(&name, version)).unwrap().provenance.seconds;
    assert!((pause.as_secs_f64()..=took).contains(&reported), "reported {reported} s, took {took} s");
}
