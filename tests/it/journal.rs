//! The journal under `kill -9`: afterwards every record that was reported as durable is present, in order and complete.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use sterling::journal::{Append, Journal, Log, LogOptions};

const FOLDER: &str = "STERLING_TEST_JOURNAL";
/// Number of concurrent appends that wait for the disk.
const AHEAD: usize = 20;

fn open(folder: &Path) -> Log {
    Log::open(folder, LogOptions { segment_bytes: 20_000, ..LogOptions::default() }).unwrap()
}

/// Returns the payload of a position: any other bytes are wrong.
fn payload(position: u64) -> Vec<u8> {
    let length = 1 + position as usize * 7919 % 900;
    (0..length as u64).map(|n| (position * 31 + n) as u8).collect()
}

/// Runs in its own process until it is killed: appends, and prints the records that were reported as durable.
#[test]
fn writes_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let log = open(Path::new(&folder));
    let (tell, reported) = mpsc::sync_channel(AHEAD);
    for position in log.last() + 1.. {
        let tell = tell.clone();
        let done = Box::new(move |result: sterling::error::Result<std::ops::Range<u64>>| {
            tell.send(result.unwrap().start).unwrap();
        });
        log.append(Append { records: vec![payload(position)], expected: None }, done);
        if position % AHEAD as u64 == 0 {
            (0..AHEAD).for_each(|_| acknowledge(reported.recv().unwrap()));
        }
        reported.try_iter().for_each(acknowledge);
    }
}

fn acknowledge(position: u64) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "durable {position}").and_then(|()| out.flush()).unwrap();
}

fn kill_repeatedly(rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["journal::writes_until_it_is_killed", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reader = std::thread::spawn(move || {
            let durable = |line: String| line.split("durable ").nth(1)?.parse::<u64>().ok();
            lines.map_while(Result::ok).filter_map(durable).last()
        });
        std::thread::sleep(Duration::from_millis(30 + round * 37 % 120));
        child.kill().unwrap();
        child.wait().unwrap();
        let acknowledged = reader.join().unwrap().unwrap_or(checked);
        let log = open(folder.path());
        assert!(log.last() >= acknowledged, "round {round}: {acknowledged} was durable, {} is there", log.last());
        let mut follower = log.follow(checked.min(log.last())).unwrap();
        while let Some(record) = follower.next(Duration::ZERO).unwrap() {
            checked += 1;
            assert_eq!((record.position, record.payload), (checked, payload(checked)), "round {round}");
        }
        assert_eq!(checked, log.last(), "round {round}");
    }
    assert!(checked > rounds, "{checked} records in {rounds} rounds");
}

#[test]
#[ignore = "long: kills writers again and again"]
fn nothing_that_was_acknowledged_is_lost_by_kill_9() {
    // A thousand kills take minutes: `scripts/kill_journal.sh`.
    let kills = std::env::var("STERLING_TEST_KILLS").ok().and_then(|count| count.parse().ok());
    kill_repeatedly(kills.unwrap_or(25));
}
