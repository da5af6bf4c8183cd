//! Journals in streams, as several servers open them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;
use sterling::error::{Kind, Result};
use sterling::journal::nats::{Nats, NatsOptions};
use sterling::journal::{Append, Journal, Journals, Record, StreamOptions, Topic};

use super::{Broker, Stop, ask, message, send};
use crate::support::until;

fn connect(servers: String) -> Nats {
    Nats::connect(NatsOptions { servers, streams: StreamOptions::default(), notes: None }).unwrap()
}

fn open(servers: String) -> Box<dyn Journal> {
    connect(servers).open(&Topic::whole("m"), 0).unwrap()
}

/// Appends, and waits for the result.
fn append(journal: &dyn Journal, records: Vec<Vec<u8>>, expected: Option<u64>) -> Result<Range<u64>> {
    let (tell, reported) = channel();
    journal.append(Append { records, expected }, Box::new(move |result| tell.send(result).unwrap()));
    reported.recv_timeout(Duration::from_secs(60)).expect("every append is reported")
}

/// Returns the records after a position, up to another.
fn records(journal: &dyn Journal, after: u64, last: u64) -> Vec<Record> {
    let mut follower = journal.follow(after).unwrap();
    let read: Vec<Record> = (after..last)
        .map(|n| follower.next(Duration::from_secs(20)).unwrap().unwrap_or_else(|| panic!("{n}")))
        .collect();
    assert!(read.iter().zip(after + 1..).all(|(record, position)| record.position == position));
    read
}

fn reached(journal: &dyn Journal, position: u64) {
    let start = Instant::now();
    while journal.last() < position {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {position}: {:?}", journal.last(), journal.trouble());
        sleep(Duration::from_millis(5));
    }
}

fn name(writer: usize, n: usize, part: usize) -> Vec<u8> {
    format!("{writer} {n} {part}").into_bytes()
}

/// Makes `appends` appends of `parts` records each.
fn fill(journal: &dyn Journal, writer: usize, appends: usize, parts: usize) {
    for n in 0..appends {
        append(journal, (0..parts).map(|part| name(writer, n, part)).collect(), None).unwrap();
    }
}

/// Appends from several servers until they are stopped. Returns the acknowledged positions with their records.
fn write(journals: &[Box<dyn Journal>], until: impl FnOnce()) -> BTreeMap<u64, Vec<u8>> {
    let (stop, acknowledged) = (AtomicBool::new(false), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for (writer, journal) in journals.iter().enumerate() {
            let (stop, acknowledged) = (&stop, &acknowledged);
            scope.spawn(move || {
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let records: Vec<Vec<u8>> = (0..1 + n % 3).map(|part| name(writer, n, part)).collect();
                    match append(&**journal, records.clone(), None) {
                        Ok(range) => acknowledged.lock().unwrap().extend(range.zip(records)),
                        Err(e) => assert_eq!(e.kind(), Kind::Unavailable, "{e}"),
                    }
                }
            });
        }
        let _stop = Stop(&stop);
        until();
    });
    acknowledged.into_inner().unwrap()
}

/// Compares the records read with the acknowledged ones: each is present once, complete and at its position.
fn hold(journals: &[Box<dyn Journal>], acknowledged: &BTreeMap<u64, Vec<u8>>) {
    let last = *acknowledged.keys().next_back().expect("something was acknowledged");
    journals.iter().for_each(|journal| reached(&**journal, last));
    let last = journals.iter().map(|journal| journal.last()).max().unwrap();
    let all = records(&*journals[0], 0, last);
    let mut seen = BTreeMap::new();
    for record in &all {
        assert!(seen.insert(record.payload.clone(), record.position).is_none(), "{record:?} is there twice");
    }
    for (position, payload) in acknowledged {
        assert_eq!(seen.get(payload), Some(position), "{}", String::from_utf8_lossy(payload));
    }
    // The records of a call are complete and contiguous.
    let part = |record: &Record| {
        let text = String::from_utf8(record.payload.clone()).unwrap();
        let numbers: Vec<usize> = text.split(' ').map(|number| number.parse().unwrap()).collect();
        (numbers[0], numbers[1], numbers[2])
    };
    for pair in all.windows(2) {
        let ((writer, n, before), (next, m, after)) = (part(&pair[0]), part(&pair[1]));
        let goes_on = (writer, n, before + 1) == (next, m, after);
        assert!(goes_on || (before == n % 3 && after == 0), "{:?} before {:?}", part(&pair[0]), part(&pair[1]));
    }
    journals.iter().for_each(|journal| assert_eq!(records(&**journal, 0, last), all));
}

#[test]
fn all_servers_read_all_updates_in_one_order() {
    let broker = Broker::start();
    let journals: Vec<Box<dyn Journal>> = (0..3).map(|_| open(broker.url())).collect();
    assert_eq!((journals[0].first(), journals[0].last()), (1, 0));
    let acknowledged = write(&journals, || sleep(Duration::from_millis(700)));
    assert!(acknowledged.len() > 20, "{}", acknowledged.len());
    hold(&journals, &acknowledged);
    // From the middle, by a server that starts later; a start position beyond the end is rejected.
    let (late, last) = (open(broker.url()), journals[0].last());
    assert_eq!((late.first(), late.last()), (1, last));
    for after in [0, 1, last / 2, last - 1, last] {
        assert_eq!(records(&*late, after, last), records(&*journals[1], after, last));
    }
    assert_eq!(late.follow(last + 1).err().unwrap().kind(), Kind::NotFound);
    // A new record wakes waiting readers.
    let mut follower = late.follow(last).unwrap();
    assert!(follower.next(Duration::from_millis(50)).unwrap().is_none());
    append(&*journals[2], vec![b"new".to_vec()], None).unwrap();
    assert_eq!(follower.next(Duration::from_secs(10)).unwrap().unwrap().payload, b"new");
}

#[test]
fn a_stream_begins_at_a_position_and_splits_large_appends() {
    let broker = Broker::start();
    let nats = connect(broker.url());
    let journal = nats.open(&Topic::whole("a.model"), 41).unwrap();
    assert_eq!((journal.first(), journal.last()), (42, 41));
    assert_eq!(nats.open(&Topic::whole("a.model"), 7).unwrap().last(), 41, "it is there already");
    let large: Vec<Vec<u8>> = (0..30u8).map(|n| vec![n; 100_000]).collect();
    assert_eq!(append(&*journal, large.clone(), Some(41)).unwrap(), 42..72);
    let read: Vec<Vec<u8>> = records(&*journal, 41, 71).into_iter().map(|record| record.payload).collect();
    assert_eq!(read, large);
    assert_eq!(append(&*journal, Vec::new(), None).unwrap(), 72..72);
    assert_eq!(append(&*journal, vec![vec![0; 2 << 20]], None).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(append(&*journal, vec![Vec::new()], None).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(journal.follow(40).err().unwrap().kind(), Kind::NotFound);
    journal.release(60).unwrap();
    assert_eq!(journal.first(), 42, "others may need them");
}

#[test]
fn one_of_several_appends_at_an_expected_position_succeeds() {
    let broker = Broker::start();
    let journals: Vec<Box<dyn Journal>> = (0..3).map(|_| open(broker.url())).collect();
    for round in 0..15u64 {
        let reported: Vec<Result<Range<u64>>> = std::thread::scope(|scope| {
            let mut all = Vec::new();
            for (n, journal) in journals.iter().enumerate() {
                let records = vec![name(n, round as usize, 0)];
                all.push(scope.spawn(move || append(&**journal, records, Some(round))));
            }
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let right: Vec<&Range<u64>> = reported.iter().flatten().collect();
        assert_eq!(right, [&(round + 1..round + 2)]);
        assert!(reported.iter().filter_map(|one| one.as_ref().err()).all(|e| e.kind() == Kind::Conflict));
    }
    // An expected position beyond the one that this server has read is valid too.
    let range = append(&*journals[0], vec![b"x".to_vec()], Some(15)).unwrap();
    assert_eq!(append(&*journals[1], vec![b"y".to_vec()], Some(range.end - 1)).unwrap(), 17..18);
}

#[test]
#[ignore = "long: kills a broker again and again"]
fn nothing_that_was_acknowledged_is_lost_or_twice_when_the_broker_is_killed() {
    let mut broker = Broker::start();
    let journals: Vec<Box<dyn Journal>> = (0..2).map(|_| open(broker.url())).collect();
    let acknowledged = write(&journals, || {
        for _ in 0..3 {
            let before = journals[0].last();
            reached(&*journals[0], before + 5);
            broker.kill();
            sleep(Duration::from_millis(300));
            broker.restart();
        }
        let before = journals[0].last();
        reached(&*journals[0], before + 5);
    });
    hold(&journals, &acknowledged);
}

#[test]
fn a_disconnected_server_reports_it_and_catches_up_while_others_continue() {
    let broker = Broker::start();
    let wire = broker.behind_a_wire();
    let journals = [open(wire.url()), open(broker.url())];
    let acknowledged = write(&journals, || {
        for _ in 0..2 {
            reached(&*journals[0], journals[0].last() + 5);
            wire.cut();
            until("it is reported", || journals[0].trouble().is_some());
            assert!(journals[0].trouble().unwrap().contains("has not answered for"));
            let (mine, others) = (journals[0].last(), journals[1].last());
            reached(&*journals[1], others + 20);
            assert!(journals[1].trouble().is_none() && journals[0].last() == mine);
            wire.mend();
            reached(&*journals[0], others + 20);
        }
        reached(&*journals[0], journals[1].last());
    });
    hold(&journals, &acknowledged);
    until("it answers again", || journals[0].trouble().is_none());
}

#[test]
fn unsuitable_streams_are_rejected_with_the_reason() {
    let broker = Broker::start();
    let nats = connect(broker.url());
    for (model, config, reason) in [
        ("memory", json!({"storage": "memory"}), "stored in memory"),
        ("queue", json!({"retention": "workqueue"}), "deletes messages that were read"),
        ("other", json!({"subjects": ["something.else"]}), "has other subjects"),
    ] {
        let name = format!("sterling-{model}");
        let mut stream = json!({"name": name, "subjects": [format!("sterling.{model}")], "storage": "file"});
        stream.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        assert!(ask(broker.port, &format!("$JS.API.STREAM.CREATE.{name}"), &stream.to_string()).is_some());
        let error = nats.open(&Topic::whole(model), 0).err().unwrap();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains(reason) && error.to_string().contains(&name), "{error}");
    }
    // Fewer copies than configured; Debian's broker syncs every two minutes.
    nats.open(&Topic::whole("one"), 0).unwrap();
    let streams = StreamOptions { replicas: 3, ..StreamOptions::default() };
    let three = Nats::connect(NatsOptions { servers: broker.url(), streams, notes: None }).unwrap();
    let error = three.open(&Topic::whole("one"), 0).err().unwrap();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.to_string().contains("stores 1 copies of a message, expected at least 3"), "{error}");
    let streams = StreamOptions { monitors: vec![broker.monitor()], ..StreamOptions::default() };
    let error = Nats::connect(NatsOptions { servers: broker.url(), streams, notes: None }).err().unwrap();
    assert!(error.kind() == Kind::Unsupported && error.to_string().contains("sync_interval: always"), "{error}");
    let nowhere =
        NatsOptions { servers: "nats://u:secret@127.0.0.1:1".into(), streams: StreamOptions::default(), notes: None };
    let error = Nats::connect(nowhere).err().unwrap();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(error.to_string().contains("nats://127.0.0.1:1") && !error.to_string().contains("secret"), "{error}");
}

/// Publishes a message that the protocol can carry as text.
fn publish(broker: &Broker, message: &str) {
    assert!(ask(broker.port, "sterling.m", message).is_some(), "the stream acknowledges it");
}

#[test]
fn messages_that_no_journal_wrote_there_are_skipped_by_all_also_after_a_restart() {
    let broker = Broker::start();
    let journals = [open(broker.url()), open(broker.url())];
    let mut acknowledged = BTreeMap::new();
    let mut write = |n: usize| {
        let records: Vec<Vec<u8>> = (0..1 + n % 3).map(|part| name(n % 2, n, part)).collect();
        let range = append(&*journals[n % 2], records.clone(), None).unwrap();
        let last = range.end - 1;
        acknowledged.extend(range.zip(records));
        last
    };
    for n in 0..12 {
        let last = write(n);
        match n % 4 {
            0 => publish(&broker, "hello"),
            1 => publish(&broker, ""),
            2 => publish(&broker, &"x".repeat(900_000)),
            // The first commits again: their positions are already taken.
            _ => (1..4).for_each(|sequence| {
                send(broker.port, "sterling.m", &message(broker.port, "sterling-m", sequence));
            }),
        }
        // A server that starts now finds the position, regardless of other messages in the stream.
        let late = open(broker.url());
        assert_eq!(late.last(), last, "after {n}");
        assert_eq!(records(&*late, 0, last).len() as u64, last);
        assert!(late.trouble().is_none());
    }
    write(12);
    hold(&journals, &acknowledged);
    let last = acknowledged.len() as u64;
    for after in 0..=last {
        assert_eq!(records(&*journals[0], after, last).len() as u64, last - after);
    }
    for journal in &journals {
        until("all are reported", || journal.warning().is_some_and(|why| why.contains("18 messages were skipped")));
        assert!(journal.trouble().is_none());
    }
}

#[test]
fn a_damaged_commit_ends_following_and_is_never_skipped() {
    let broker = Broker::start();
    let journal = open(broker.url());
    append(&*journal, vec![b"one".to_vec()], None).unwrap();
    // A message that begins like a commit may be a commit that was reported as durable.
    publish(&broker, "STRLSTRM and what a later release may write");
    let mut follower = journal.follow(0).unwrap();
    assert_eq!(follower.next(Duration::from_secs(10)).unwrap().unwrap().payload, b"one");
    let start = Instant::now();
    let error = loop {
        match follower.next(Duration::from_millis(100)) {
            Ok(None) => assert!(start.elapsed() < Duration::from_secs(20), "it is not reported"),
            Ok(Some(record)) => panic!("{record:?}"),
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), Kind::Corrupt);
    assert!(error.to_string().contains("message 3") && error.to_string().contains("damaged"), "{error}");
    assert_eq!(append(&*journal, vec![b"two".to_vec()], None).unwrap_err().kind(), Kind::Corrupt);
    assert!(journal.trouble().unwrap().contains("message 3"));
}

#[test]
fn a_stream_with_recorded_positions_is_not_restarted_without_them() {
    let mut broker = Broker::start();
    let notes = tempfile::tempdir().unwrap();
    let noted = || {
        let options = NatsOptions {
            servers: broker.url(),
            streams: StreamOptions::default(),
            notes: Some(notes.path().to_owned()),
        };
        Nats::connect(options).unwrap()
    };
    let journal = noted().open(&Topic::whole("m"), 0).unwrap();
    fill(&*journal, 0, 6, 1);
    let note = notes.path().join(".positions/sterling-m");
    until("it is noted", || std::fs::read_to_string(&note).is_ok_and(|text| text.starts_with("00000000000000000006 ")));
    drop(journal);
    let copy = broker.backup();
    let noted = |broker: &Broker| {
        let (servers, streams) = (broker.url(), StreamOptions::default());
        Nats::connect(NatsOptions { servers, streams, notes: Some(notes.path().to_owned()) }).unwrap()
    };
    broker.lose_all();
    let topic = Topic::whole("m");
    for _ in 0..2 {
        let error = noted(&broker).open(&topic, 5).err().unwrap();
        // The open is retried: the stream may come back.
        assert_eq!(error.kind(), Kind::Unavailable);
        let said = error.to_string();
        assert!(said.contains("position 6") && said.contains(".positions/sterling-m"), "{said}");
    }
    assert!(
        ask(broker.port, "$JS.API.STREAM.INFO.sterling-m", "").unwrap().contains("stream not found"),
        "it was made"
    );
    broker.restore(&copy);
    assert_eq!(noted(&broker).open(&topic, 0).unwrap().last(), 6);
    // A version with all updates may recreate it.
    broker.lose_all();
    let journal = noted(&broker).open(&topic, 6).unwrap();
    assert_eq!((journal.first(), journal.last()), (7, 6));
    assert_eq!(append(&*journal, vec![b"x".to_vec()], None).unwrap(), 7..8);
    // A truncated file is as bad as a missing one.
    until("it is noted", || std::fs::read_to_string(&note).is_ok_and(|text| text.starts_with("00000000000000000007 ")));
    drop(journal);
    broker.restore(&copy);
    let error = noted(&broker).open(&topic, 6).err().unwrap();
    assert!(error.to_string().contains("ends at position 6, expected at least position 7"), "{error}");
    std::fs::remove_file(&note).unwrap();
    assert_eq!(noted(&broker).open(&topic, 6).unwrap().last(), 6);
}

#[test]
fn a_stream_recreated_after_the_last_position_is_followed() {
    let mut broker = Broker::start();
    let (ahead, behind) = (open(broker.url()), open(broker.url()));
    fill(&*ahead, 0, 5, 2);
    reached(&*behind, 10);
    let (mut seen, mut unseen) = (ahead.follow(10).unwrap(), behind.follow(4).unwrap());
    assert_eq!(unseen.next(Duration::from_secs(10)).unwrap().unwrap().position, 5);
    broker.lose_all();
    until("it is reported", || ahead.trouble().is_some_and(|why| why.contains("no such stream")));
    assert_eq!(append(&*ahead, vec![b"x".to_vec()], None).unwrap_err().kind(), Kind::Unavailable);
    assert!(seen.next(Duration::ZERO).unwrap().is_none(), "visible updates stay visible");
    // As a server with a version that holds position 10 does.
    let anew = connect(broker.url()).open(&Topic::whole("m"), 10).unwrap();
    until("both go on", || ahead.trouble().is_none() && behind.trouble().is_none());
    assert_eq!(append(&*ahead, vec![b"eleven".to_vec()], None).unwrap(), 11..12);
    assert_eq!(append(&*anew, vec![b"twelve".to_vec()], None).unwrap(), 12..13);
    for position in [11, 12] {
        assert_eq!(seen.next(Duration::from_secs(10)).unwrap().unwrap().position, position);
    }
    // A reader that missed deleted records is notified, after the records that it has read.
    let reported = std::iter::repeat_with(|| unseen.next(Duration::from_secs(10)))
        .find_map(|next| match next {
            Ok(Some(record)) if record.position <= 10 => None,
            other => Some(other),
        })
        .unwrap();
    assert!(reported.map_or_else(|e| e.kind() == Kind::NotFound, |record| record.unwrap().position == 11));
}

#[test]
fn limits_of_a_stream_split_or_reject_large_appends() {
    let broker = Broker::start();
    let stream = |bytes: i32| {
        json!({"name": "sterling-m", "subjects": ["sterling.m"], "storage": "file", "max_msg_size": bytes}).to_string()
    };
    assert!(ask(broker.port, "$JS.API.STREAM.CREATE.sterling-m", &stream(2047)).is_some());
    let error = connect(broker.url()).open(&Topic::whole("m"), 0).err().unwrap();
    assert!(error.kind() == Kind::Unsupported && error.to_string().contains("max_msg_size"), "{error}");
    assert!(ask(broker.port, "$JS.API.STREAM.UPDATE.sterling-m", &stream(4096)).is_some());
    let journal = open(broker.url());
    let many: Vec<Vec<u8>> = (0..50u8).map(|n| vec![n; 1000]).collect();
    assert_eq!(append(&*journal, many.clone(), None).unwrap(), 1..51);
    let read: Vec<Vec<u8>> = records(&*journal, 0, 50).into_iter().map(|record| record.payload).collect();
    assert_eq!(read, many);
    let start = Instant::now();
    assert_eq!(append(&*journal, vec![vec![1; 4000]], None).unwrap_err().kind(), Kind::Invalid);
    // A limit that is set later is kept too.
    assert!(ask(broker.port, "$JS.API.STREAM.UPDATE.sterling-m", &stream(2048)).is_some());
    let error = append(&*journal, vec![vec![1; 2500]], None).unwrap_err();
    assert!(error.kind() == Kind::Invalid && start.elapsed() < Duration::from_secs(8), "{error}");
    assert_eq!(append(&*journal, vec![vec![1; 500]; 4], None).unwrap(), 51..55);
}

#[test]
fn two_installations_share_a_broker_by_a_prefix() {
    let broker = Broker::start();
    let [staging, production] = ["staging", "production"].map(|prefix| {
        let streams = StreamOptions { prefix: prefix.into(), ..StreamOptions::default() };
        Nats::connect(NatsOptions { servers: broker.url(), streams, notes: None }).unwrap()
    });
    let topic = Topic::whole("m");
    let (ours, theirs) = (staging.open(&topic, 0).unwrap(), production.open(&topic, 0).unwrap());
    assert_eq!(append(&*ours, vec![b"one".to_vec(); 3], None).unwrap(), 1..4);
    assert_eq!(append(&*theirs, vec![b"two".to_vec()], None).unwrap(), 1..2);
    assert!(ask(broker.port, "$JS.API.STREAM.INFO.staging-m", "").unwrap().contains("staging.m"));
}

#[test]
fn deleted_positions_are_rejected_and_the_rest_is_read() {
    let broker = Broker::start();
    let journal = open(broker.url());
    fill(&*journal, 0, 20, 2);
    // Messages 1 to 10: the one that begins the stream, and nine of two records.
    assert!(ask(broker.port, "$JS.API.STREAM.PURGE.sterling-m", "{\"seq\": 11}").is_some());
    let late = open(broker.url());
    assert_eq!((late.first(), late.last()), (19, 40));
    assert_eq!(records(&*late, 18, 40).len(), 22);
    assert_eq!(late.follow(17).err().unwrap().kind(), Kind::NotFound);
    // An empty stream has no position, unless a server that knows it still runs.
    assert!(ask(broker.port, "$JS.API.STREAM.PURGE.sterling-m", "").is_some());
    let name_is_known = || connect(broker.url()).open(&Topic::whole("m"), 0).is_ok_and(|again| again.last() == 40);
    until("it is written", name_is_known);
    assert_eq!(append(&*late, vec![b"x".to_vec()], None).unwrap(), 41..42);
    let unknown = json!({"name": "sterling-unknown", "subjects": ["sterling.unknown"], "storage": "file"}).to_string();
    assert!(ask(broker.port, "$JS.API.STREAM.CREATE.sterling-unknown", &unknown).is_some());
    assert!(ask(broker.port, "sterling.unknown", "hello").is_some());
    let error = connect(broker.url()).open(&Topic::whole("unknown"), 0).err().unwrap();
    assert!(error.kind() == Kind::Corrupt && error.to_string().contains("no more journal messages"), "{error}");
    assert!(ask(broker.port, "$JS.API.STREAM.PURGE.sterling-unknown", "").is_some());
    assert_eq!(connect(broker.url()).open(&Topic::whole("unknown"), 0).err().unwrap().kind(), Kind::Corrupt);
}

#[test]
fn slow_servers_are_not_starved_by_near_ones() {
    let broker = Broker::start();
    let wire = broker.behind_a_wire();
    wire.delay(Duration::from_millis(15));
    let far = open(wire.url());
    let near = [open(broker.url()), open(broker.url())];
    let mut mine = BTreeMap::new();
    let mut acknowledged = write(&near, || {
        let (start, mut written) = (Instant::now(), 0);
        for n in 0.. {
            let records: Vec<Vec<u8>> = (0..1 + n % 3).map(|part| name(2, n, part)).collect();
            let before = near[0].last();
            match append(&*far, records.clone(), None) {
                Ok(range) => {
                    mine.extend(range.zip(records));
                    written += 1;
                }
                // If other processes use all cores, ten seconds may not suffice for one server; all of them have more.
                Err(e) => assert_eq!(e.kind(), Kind::Unavailable, "{e}"),
            }
            assert!(start.elapsed() < Duration::from_secs(90), "{written} of 6 are written");
            if written == 6 {
                return;
            }
            // The others do not lose records either.
            reached(&*near[0], before + 5);
        }
    });
    acknowledged.extend(mine);
    let [one, two] = near;
    hold(&[far, one, two], &acknowledged);
}

#[test]
fn messages_deleted_unread_are_reported() {
    let broker = Broker::start();
    let wire = broker.behind_a_wire();
    let (cut_off, other) = (open(wire.url()), open(broker.url()));
    append(&*other, vec![b"one".to_vec()], None).unwrap();
    reached(&*cut_off, 1);
    let mut behind = open(broker.url()).follow(0).unwrap();
    let mut seen = cut_off.follow(1).unwrap();
    wire.cut();
    fill(&*other, 0, 20, 1);
    assert!(ask(broker.port, "$JS.API.STREAM.PURGE.sterling-m", "{\"seq\": 11}").is_some());
    wire.mend();
    // The content of the lost messages is unknown: nothing is skipped.
    until("it is reported", || cut_off.trouble().is_some_and(|why| why.contains("the stream has messages 11 to 22")));
    assert_eq!(seen.next(Duration::from_secs(10)).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(append(&*cut_off, vec![b"x".to_vec()], None).unwrap_err().kind(), Kind::Corrupt);
    // A server that reads later than the retention of the broker does not skip them either.
    let error = loop {
        match behind.next(Duration::from_millis(100)) {
            Ok(_) => {}
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(error.to_string().contains("was released before it was read"), "{error}");
}

#[test]
fn a_message_that_is_missing_between_others_ends_following() {
    let broker = Broker::start();
    // A stream made by hand, from which its user may also delete.
    let stream = json!({"name": "sterling-m", "subjects": ["sterling.m"], "storage": "file"}).to_string();
    assert!(ask(broker.port, "$JS.API.STREAM.CREATE.sterling-m", &stream).is_some());
    let wire = broker.behind_a_wire();
    let (cut_off, other) = (open(wire.url()), open(broker.url()));
    wire.cut();
    fill(&*other, 0, 6, 1);
    assert!(ask(broker.port, "$JS.API.STREAM.MSG.DELETE.sterling-m", "{\"seq\": 4}").is_some());
    wire.mend();
    until("it is reported", || cut_off.trouble().is_some_and(|why| why.contains("up to 7, but message 4 is missing")));
    assert_eq!(cut_off.last(), 2);
    // A server that starts later does not skip them either.
    let mut late = open(broker.url()).follow(0).unwrap();
    let error = std::iter::repeat_with(|| late.next(Duration::from_secs(10))).find_map(Result::err).unwrap();
    assert!(error.kind() == Kind::NotFound && error.to_string().contains("was released before it was read"), "{error}");
}

#[test]
fn rewritten_messages_are_distinguished_from_the_read_ones() {
    let mut broker = Broker::start();
    let wire = broker.behind_a_wire();
    let journal = open(wire.url());
    fill(&*journal, 0, 3, 1);
    let mut follower = journal.follow(3).unwrap();
    wire.cut();
    broker.lose_all();
    // As many as were lost, and one more.
    let other = open(broker.url());
    fill(&*other, 1, 4, 1);
    wire.mend();
    until("it is reported", || {
        journal.trouble().is_some_and(|why| why.contains("message 5 does not continue the message before it"))
    });
    assert_eq!(follower.next(Duration::from_secs(10)).unwrap_err().kind(), Kind::Corrupt);
}
