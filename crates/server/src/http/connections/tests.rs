//! Tests of connections at each stage.

use std::net::{Ipv4Addr, SocketAddrV4};

use super::*;

const PEER: Peer = Peer { address: SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1)), door: EntryPoint::Main };

fn options() -> Options {
    Options { idle_ms: 1000, header_ms: 100, stall_ms: 10, ..Options::default() }
}

/// Returns a connection that was opened `ms` milliseconds ago and has been at this stage since then.
fn aged(stage: u8, ms: u64) -> Connection {
    let opened = Instant::now() - std::time::Duration::from_millis(ms);
    Connection { opened, stage: AtomicU8::new(stage), ..Connection::new(PEER) }
}

#[test]
fn each_stage_has_its_bound() {
    for (stage, ms, expected) in [
        (IDLE, 500, None),
        (IDLE, 1500, Some("idle")),
        (HEADER, 50, None),
        (HEADER, 500, Some("header")),
        (BUSY, 1_000_000, None),
        (LINGER, 4000, None),
        (LINGER, 6000, Some("unread")),
    ] {
        assert_eq!(aged(stage, ms).overdue(&options()), expected, "{stage} {ms}");
    }
    let slow = aged(BUSY, 1000);
    slow.blocked.store(500, Ordering::Relaxed);
    assert_eq!(slow.overdue(&options()), Some("stalled"));
    slow.sent(true);
    assert_eq!(slow.overdue(&options()), None);
    slow.sent(false);
    assert_eq!(slow.overdue(&options()), None, "it has only just stopped to read");
    assert!(slow.waits().is_none());
}

#[test]
fn a_header_begins_with_the_first_byte_and_ends_with_the_request() {
    let connection = aged(IDLE, 5000);
    connection.received();
    assert_eq!(connection.stage.load(Ordering::Relaxed), HEADER);
    assert_eq!(connection.overdue(&options()), None, "the header's time begins with its first byte");
    let began = connection.since.load(Ordering::Relaxed);
    connection.received();
    assert_eq!(connection.since.load(Ordering::Relaxed), began, "and not again with each byte");
    connection.begin(Request::new(Body::empty()));
    assert_eq!(connection.stage.load(Ordering::Relaxed), BUSY);
    connection.received();
    assert_eq!(connection.stage.load(Ordering::Relaxed), BUSY);
    let connection = Arc::new(connection);
    let answer = || drop(TrackedBody::of(Response::new(Body::empty()), connection.clone()));
    answer();
    assert_eq!(connection.stage.load(Ordering::Relaxed), IDLE);
    for (is_ahead, is_early) in [(true, false), (false, true)] {
        connection.begin(Request::new(Body::empty()));
        connection.ahead(is_ahead, is_early);
        answer();
        assert_eq!(connection.stage.load(Ordering::Relaxed), HEADER, "the next one has begun");
    }
    connection.begin(Request::new(Body::empty()));
    answer();
    assert_eq!(connection.stage.load(Ordering::Relaxed), IDLE, "and began with all that had come of it");
}

#[test]
fn the_connections_that_waited_longest_are_evicted() {
    let all = Connections::new(4);
    let made = [(IDLE, 10), (IDLE, 3000), (HEADER, 9000), (BUSY, 90_000)].map(|(stage, ms)| Arc::new(aged(stage, ms)));
    for (n, connection) in made.iter().enumerate() {
        all.open()[0].insert(n as u64, connection.clone());
    }
    assert!(all.is_full(EntryPoint::Main) && all.make_room(EntryPoint::Main));
    assert!(!all.is_full(EntryPoint::Admin) && !all.make_room(EntryPoint::Admin), "which has room of its own");
    let is_cut = |c: &Connection| {
        let cut = std::pin::pin!(c.cut.notified());
        cut.poll(&mut Context::from_waker(std::task::Waker::noop())).is_ready()
    };
    assert_eq!(made.each_ref().map(|c| is_cut(c)), [false, true, false, false]);
    all.open()[0].remove(&0);
    all.open()[0].remove(&1);
    assert!(all.make_room(EntryPoint::Main));
    assert_eq!(made.each_ref().map(|c| is_cut(c)), [false, false, true, false]);
    all.open()[0].remove(&2);
    assert!(!all.make_room(EntryPoint::Main), "active connections stay open");
}

#[test]
fn a_poll_passes_on_a_bounded_part_of_an_answer() {
    use std::sync::atomic::AtomicUsize;
    use std::task::{Wake, Waker};

    #[derive(Default)]
    struct Wakes(AtomicUsize);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(wakes.clone());
    let mut cx = Context::from_waker(&waker);
    let sizes = [10, 3 * POLL_BYTES, POLL_BYTES - 11, 1, 0, 1, POLL_BYTES, 5];
    for body in [
        Body::from(vec![7; sizes.iter().sum()]),
        Body::from_stream(futures_util::stream::iter(sizes.map(|size| Ok::<_, std::io::Error>(vec![7; size])))),
    ] {
        let exact = body.size_hint().exact();
        let answer = TrackedBody::of(Response::new(body), Arc::new(Connection::new(PEER)));
        let (mut body, mut all, mut in_poll, mut polls) = (answer.into_body(), 0, 0, 1);
        while !body.is_end_stream() {
            assert_eq!(body.size_hint().exact(), exact.map(|exact| exact - all as u64));
            match Pin::new(&mut body).poll_frame(&mut cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let bytes = frame.into_data().map_or(0, |data| data.len());
                    (all, in_poll) = (all + bytes, in_poll + bytes);
                    assert!(in_poll <= POLL_BYTES);
                }
                Poll::Pending => {
                    assert_eq!(wakes.0.swap(0, Ordering::Relaxed), 1, "the connection is polled again");
                    (in_poll, polls) = (0, polls + 1);
                }
                Poll::Ready(None) => break,
                Poll::Ready(Some(Err(error))) => panic!("{error}"),
            }
        }
        assert_eq!((all, polls), (sizes.iter().sum(), 6));
    }
}
