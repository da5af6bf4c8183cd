//! Starts a server for a store from a program and calls it over HTTP.
//!
//! `cargo run --example serve`

#![allow(clippy::print_stdout)]

use sterling::{Client, Config, Publisher, Reading, Retrieve, Server, User};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (store, items) = (folder.path().join("store"), folder.path().join("items.jsonl"));
    std::fs::write(
        &items,
        concat!(
            "{\"id\": 1, \"embedding\": [1.0, 0.0], \"attributes\": {\"name\": \"east\"}}\n",
            "{\"id\": 2, \"embedding\": [0.0, 1.0], \"attributes\": {\"name\": \"north\"}}\n",
            "{\"id\": 3, \"embedding\": [-1.0, 0.0], \"attributes\": {\"name\": \"west\"}}\n",
        ),
    )?;
    Publisher::new(&store).name("compass").items(&items).publish()?;

    let config = Config { store, listen: ([127, 0, 0, 1], 0).into(), device: "cpu".into(), ..Config::default() };
    let server = Server::start(&config)?;
    println!("answers on {}", server.url());

    let client = Client::new(server.url());
    let request = Retrieve {
        k: 2,
        reading: Reading { columns: vec!["name".into()], ..Reading::default() },
        ..Retrieve::of(User::Vector(vec![0.9, 0.4]))
    };
    let answer = client.retrieve("compass", &request)?;
    for item in &answer.result.items {
        println!("{:.2}  {}", item.score, item.columns["name"]);
    }
    assert_eq!(answer.result.items[0].columns["name"], "east");

    let unknown = client.retrieve("atlas", &request).expect_err("there is no such model");
    println!("{:?}: {unknown}", unknown.kind());
    server.stop()?;
    Ok(())
}
