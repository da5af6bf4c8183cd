//! The command line: its output, its errors and their exit codes.

use crate::support::{Server, root, run, sterling, tiny_package};

#[test]
fn publish_and_inspect_go_together() {
    let store = tempfile::tempdir().unwrap();
    let (path, package) = (store.path().to_str().unwrap(), tiny_package());
    let items = package.join("items.jsonl");
    let (package, items) = (package.to_str().unwrap(), items.to_str().unwrap());
    let (code, said, errors) = run(&["publish", package, "--items", items, "--store", path]);
    assert_eq!((code, said.starts_with("published tiny version 1: 13 items")), (0, true), "{said} {errors}");
    let (code, said, _) = run(&["inspect", path]);
    assert!(code == 0 && said.lines().nth(1).unwrap().starts_with("tiny"), "{said}");
    let (code, said, _) = run(&["inspect", store.path().join("tiny/1").to_str().unwrap()]);
    assert!(code == 0 && said.contains("every checksum holds") && said.contains("codes U8"), "{said}");
    let (code, said, _) = run(&["inspect", package]);
    assert!(code == 0 && said.contains("model package tiny"), "{said}");
    // The second publication of the same package is another version.
    let recipe = root().join("indexes/default.toml");
    let (_, said, _) =
        run(&["publish", package, "--items", items, "--store", path, "--index", recipe.to_str().unwrap()]);
    assert!(said.starts_with("published tiny version 2"), "{said}");
}

#[test]
fn invalid_input_exits_with_2_and_one_line_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let store = folder.path().join("store");
    let store = store.to_str().unwrap();
    let items = file("items.jsonl", "{\"id\": 1, \"embedding\": [1, 2]}\n");
    let recipe = file("recipe.toml", "[index]\nlists = 5\n");
    let zero = file("zero.toml", "[filter]\nhashes = 0\n");
    let config = file("config.toml", "[engine]\nqueue = 0\n");
    let package = tiny_package();
    let bare = folder.path().join("bare");
    std::fs::create_dir(&bare).unwrap();
    for file in std::fs::read_dir(&package).unwrap().map(|file| file.unwrap().path()) {
        if !file.ends_with("items.jsonl") {
            std::fs::copy(&file, bare.join(file.file_name().unwrap())).unwrap();
        }
    }
    let package = package.to_str().unwrap();
    let there = folder.path().to_str().unwrap();
    let keys = folder.path().join("keys.toml");
    let keys = keys.to_str().unwrap();
    assert_eq!(run(&["key", "shop", "--file", keys]).0, 0);
    let admin = file("admin.toml", "listen = \"127.0.0.1:8080\"\n[access]\nadmin_listen = \"127.0.0.1:8080\"\n");
    let publish = ["publish", "--name", "x", "--store", store, "--items"];
    let with = |rest: &[&str]| publish.iter().chain(rest).map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let plain = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    for (arguments, expected) in [
        (with(&["none.jsonl"]), "none.jsonl"),
        (with(&[&items, "--index", &recipe]), "lists"),
        (with(&[&items, "--index", &zero]), "filter.hashes: got 0"),
        (with(&[&items, "--index", "none.toml"]), "none.toml"),
        (with(&[&items, "--vectors", &items]), "items.jsonl"),
        (plain(&["publish", "--name", "a/b", "--items", &items, "--store", store]), "model name `a/b`"),
        (
            plain(&["publish", bare.to_str().unwrap(), "--store", store]),
            "neither `items.parquet` nor `items.jsonl` is in",
        ),
        (plain(&["publish", "nowhere", "--store", store]), "nowhere"),
        (plain(&["publish"]), "required"),
        (plain(&["publish", package, "--name", "x", "--items", &items]), "cannot be used with"),
        (plain(&["inspect", "nowhere"]), "nowhere"),
        (plain(&["serve", "--store", "nowhere"]), "store nowhere"),
        (plain(&["serve", "--store", store, "--config", &config]), "engine.queue: got 0"),
        (plain(&["serve", "--store", store, "--listen", "here"]), "here"),
        (plain(&["serve", "--store", there, "--updates", &items]), "items.jsonl: expected a folder"),
        (plain(&["serve", "--store", there, "--model", "a/b"]), "model `a/b`"),
        (
            plain(&["serve", "--store", there, "--config", &admin]),
            "admin_listen: got 127.0.0.1:8080, which is `listen` too",
        ),
        // A key file that no server would accept is not written.
        (plain(&["key", "shop", "--file", keys]), "key `shop`: the name occurs twice"),
        (plain(&["key", "other", "--file", &items]), "items.jsonl: line 1"),
        (plain(&["doctor", "--server", "http://127.0.0.1:1/"]), "got `http://127.0.0.1:1/`, expected HOST:PORT"),
        (plain(&["sreve"]), "unrecognized subcommand"),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (code, said, errors) = run(&arguments);
        assert_eq!((code, said.as_str()), (2, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(expected) && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
    assert_eq!(std::fs::read_to_string(keys).unwrap().matches("[[key]]").count(), 1);
    assert_eq!(std::fs::read_to_string(&items).unwrap().lines().count(), 1);
}

#[test]
fn kernels_are_listed_and_one_is_forced_by_name() {
    let reported = sterling().arg("kernels").env_remove("STERLING_KERNEL").output().unwrap();
    let said = String::from_utf8(reported.stdout).unwrap();
    let line = said.lines().next().unwrap();
    let (all, used) = line.strip_prefix("cpu: portable").and_then(|line| line.split_once(", in use ")).unwrap();
    assert!(reported.status.success() && format!("portable{all}").ends_with(used), "{said}");
    let forced = |name: &str| sterling().arg("kernels").env("STERLING_KERNEL", name).output().unwrap();
    assert!(forced("portable").stdout.starts_with(format!("cpu: portable{all}, in use portable\n").as_bytes()));
    let refused = forced("sse9");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(2) && said.contains("STERLING_KERNEL: kernel `sse9` does not run here"),
        "{said}"
    );
}

#[test]
fn an_address_in_use_is_a_failure_not_bad_input() {
    let store = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, _, errors) = run(&["serve", "--store", store.path().to_str().unwrap(), "--listen", &address]);
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains(&address), "{errors}");
}

#[test]
fn a_server_without_a_model_is_live_and_not_ready() {
    let store = tempfile::tempdir().unwrap();
    let server = Server::spawn(sterling().args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path()));
    assert_eq!(server.get("/livez").0, 200);
    let (status, body) = server.get("/readyz");
    assert_eq!(status, 503, "{body}");
    assert_eq!(server.stop(), Some(0));
}
