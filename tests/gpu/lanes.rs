//! Work that is recorded, submitted and replayed, compared with the same work run directly.

use std::sync::Arc;

use sterling::cuda::Device;
use sterling::cuda::emulated::Emulated;
use sterling::cuda::ops::top::{self, Scored, Ties};

use crate::emulation::{Random, cards, emulated, seeded};

/// Selects the best of a row with some launches, uploads, zeroed arrays and results.
fn best(device: &Device, keys: &[u32], k: u32) -> sterling::error::Result<impl FnOnce() -> Vec<u32> + use<>> {
    let (keys, wanted) = (device.copy(keys)?, device.copy(&[k])?);
    let scored = Scored { keys: &keys, slots: None, counts: None, stride: keys.len() };
    let found = top::select_by(device, 2, &scored, &Ties::default(), (&wanted, k as usize))?;
    let found = top::sort(device, found, &Ties::default())?;
    let slots = found.slots.later(k as usize)?;
    Ok(move || slots.get().unwrap())
}

fn second_signal_error(keys: &[u32], k: u32) -> Vec<u32> {
    best(&Device::over(emulated()), keys, k).unwrap()()
}

fn keys(random: &mut Random, count: usize) -> Vec<u32> {
    (0..count).map(|_| random.below(50) as u32).collect()
}

fn lane() -> (Arc<Emulated>, Device) {
    let driver = emulated();
    let lane = Device::over(driver.clone()).lane().unwrap();
    (driver, lane)
}

#[test]
fn replayed_work_equals_direct_work() {
    let driver = Arc::new(seeded(1).late());
    let lane = Device::over(driver.clone()).lane().unwrap();
    let mut random = Random::new(1);
    for turn in 0..6 {
        lane.begin().unwrap();
        let keys = keys(&mut random, 300);
        let found = best(&lane, &keys, 20).unwrap();
        let (before, ran) = (driver.counts(), driver.launches());
        lane.flush().unwrap();
        assert_eq!(driver.counts().waits, before.waits, "the host waited to send work off");
        assert_eq!(driver.launches(), ran, "something ran before anybody waited");
        assert_eq!(found(), second_signal_error(&keys, 20), "turn {turn}");
        assert_eq!(driver.counts().waits, before.waits + 1, "the host waited more than once");
        assert!(driver.launches() > ran);
    }
    let counts = driver.counts();
    // The first turn allocates outside of the stream's memory, the second is new, the third is recorded.
    assert_eq!((counts.submitted, counts.recorded, counts.replayed), (2, 1, 4), "{counts:?}");
}

#[test]
fn sizes_change_from_stretch_to_stretch() {
    let (driver, lane) = lane();
    let mut random = Random::new(2);
    for count in [10, 5000, 40, 5000, 3, 5000, 5000, 70_000, 70_000] {
        lane.begin().unwrap();
        let keys = keys(&mut random, count);
        let k = 1 + random.below(count.min(60)) as u32;
        assert_eq!(best(&lane, &keys, k).unwrap()(), second_signal_error(&keys, k), "{k} of {count}");
    }
    assert!(driver.counts().waits >= 9);
}

#[test]
fn arrays_are_overwritten_in_the_order_of_the_work() {
    let (_, lane) = lane();
    for _ in 0..3 {
        lane.begin().unwrap();
        let array = lane.copy(&[1u32, 2, 3, 4]).unwrap();
        let first = array.later(4).unwrap();
        array.write_at(1, &[7, 8]).unwrap();
        let second = array.later(3).unwrap();
        array.clear().unwrap();
        let zeros = lane.zeros::<u32>(3).unwrap();
        zeros.write(&[5]).unwrap();
        assert_eq!(first.get().unwrap(), [1, 2, 3, 4]);
        assert_eq!(second.get().unwrap(), [1, 7, 8]);
        // Work that is queued after a wait runs as well.
        assert_eq!((array.to_vec().unwrap(), zeros.to_vec().unwrap()), (vec![0; 4], vec![5, 0, 0]));
        array.write(&[9]).unwrap();
        assert_eq!(array.read(2).unwrap(), [9, 0]);
        assert!(array.later(5).is_err() && array.write_at(3, &[1, 2]).is_err());
    }
}

/// Consecutive results are copied to the host by one launch, four bytes per thread; the last thread copies the rest.
#[test]
fn results_of_any_length_come_together() {
    let (_, lane) = lane();
    for turn in 0..3u8 {
        lane.begin().unwrap();
        let lengths = [1usize, 5, 1024, 4, 1030, 512, 7, 256, 2048, 3, 1024, 2];
        let bytes = |(array, length): (usize, usize)| (0..length).map(|n| (7 * array + n) as u8 ^ turn).collect();
        let sent: Vec<Vec<u8>> = lengths.into_iter().enumerate().map(bytes).collect();
        let arrays: Vec<_> = sent.iter().map(|bytes| lane.copy(bytes).unwrap()).collect();
        // Queued in another order than in memory, so that bytes beyond the end of a result differ from the next result.
        let results: Vec<_> = arrays.iter().rev().map(|array| array.later(array.len()).unwrap()).collect();
        let mut found: Vec<Vec<u8>> = results.into_iter().map(|result| result.get().unwrap()).collect();
        found.reverse();
        assert_eq!(found, sent, "turn {turn}");
    }
}

#[test]
fn streams_run_concurrently() {
    let driver = emulated();
    let device = Device::over(driver);
    let lanes = [device.lane().unwrap(), device.lane().unwrap()];
    let mut random = Random::new(3);
    let mut before = None;
    for turn in 0..9 {
        let lane = &lanes[turn % 2];
        lane.begin().unwrap();
        let keys = keys(&mut random, 200);
        let found = best(lane, &keys, 15).unwrap();
        lane.flush().unwrap();
        let want = second_signal_error(&keys, 15);
        // The previous stream is awaited once this one is submitted.
        if let Some((found, want)) = before.replace((found, want)) {
            let found: Vec<u32> = found();
            assert_eq!(found, want, "turn {turn}");
        }
    }
    assert!(lanes[0].lane().is_err(), "a branch of a branch");
}

#[test]
fn unawaited_work_is_harmless() {
    let (driver, lane) = lane();
    let mut random = Random::new(4);
    for turn in 0..8 {
        lane.begin().unwrap();
        let keys = keys(&mut random, 100 + 700 * (turn % 3));
        let found = best(&lane, &keys, 9).unwrap();
        match turn % 4 {
            // Recorded only, or submitted, and then dropped.
            0 => drop(found),
            1 => {
                lane.flush().unwrap();
                drop(found);
            }
            _ => assert_eq!(found(), second_signal_error(&keys, 9), "turn {turn}"),
        }
    }
    assert!(driver.counts().waits >= 4);
    // An array with another owner keeps its numbers, however often the stream begins a turn.
    let retained = lane.copy(&[1u32, 2, 3]).unwrap();
    lane.begin().unwrap();
    let keys = keys(&mut random, 100);
    assert_eq!(best(&lane, &keys, 9).unwrap()(), second_signal_error(&keys, 9));
    assert_eq!(retained.to_vec().unwrap(), [1, 2, 3]);
}

/// A new turn would overwrite a result that was not read yet.
#[test]
fn a_stream_does_not_begin_while_results_are_unfetched() {
    let (_, lane) = lane();
    lane.begin().unwrap();
    let results = [[1u32; 40], [2; 40]].map(|numbers| lane.copy(&numbers).unwrap().later(40).unwrap());
    let error = lane.begin().unwrap_err().to_string();
    assert!(error.contains("2 unfetched results"), "{error}");
    let [first, second] = results;
    assert_eq!(first.get().unwrap(), [1; 40]);
    assert!(lane.begin().is_err());
    drop(second);
    lane.begin().unwrap();
    let finished = lane.copy(&[3u32; 40]).unwrap().later(40).unwrap();
    lane.flush().unwrap();
    lane.finish().unwrap();
    assert_eq!(finished.get().unwrap(), [3; 40]);
}

/// If memory cannot be allocated, a stream frees its memory once, and works again when memory is available.
#[test]
fn a_stream_without_room_returns_its_memory_once() {
    for left in (0..700).step_by(100) {
        let card = cards(&[4 << 20]).remove(0);
        let device = Device::over(card.clone());
        let lane = device.lane().unwrap();
        lane.begin().unwrap();
        drop(lane.copy(&vec![1u8; 100 << 10]).unwrap());
        lane.begin().unwrap();
        drop((lane.copy(&vec![1u8; 100 << 10]).unwrap(), lane.copy(&vec![1u8; 1 << 20]).unwrap()));
        // All other memory is taken, except this number of KiB.
        let (free, all) = device.memory().unwrap();
        let other = device.room::<u8>((free as usize).saturating_sub(left << 10).max(1)).unwrap();
        let started = lane.begin();
        assert_eq!(started.is_ok(), left >= 300, "{left} KiB: {started:?}");
        drop(other);
        lane.begin().unwrap();
        let array = lane.copy(&vec![7u8; 1 << 20]).unwrap();
        assert!(array.to_vec().unwrap().iter().all(|&x| x == 7));
        drop(array);
        drop(lane);
        assert_eq!(device.memory().unwrap(), (all, all), "{left} KiB");
        assert_eq!(device.lanes().taken(), 0);
    }
}

/// One large turn does not reserve its memory forever, and streams stay within their limit.
#[test]
fn streams_return_unneeded_memory() {
    let card = cards(&[1 << 30]).remove(0);
    let device = Device::over(card.clone());
    let lane = device.lane().unwrap();
    let run = |numbers: usize| {
        lane.begin().unwrap();
        let copied = lane.copy(&vec![5u32; numbers]).unwrap();
        assert!(copied.to_vec().unwrap().iter().all(|&x| x == 5));
    };
    (0..3).for_each(|_| run(1 << 20));
    let most = device.lanes().taken();
    assert!(most >= 4 << 20, "{most}");
    (0..600).for_each(|_| run(10));
    assert!(device.lanes().taken() < 1 << 20, "{} of {most}", device.lanes().taken());
    device.lanes().set_most(2 << 20);
    lane.begin().unwrap();
    let error = lane.room::<u8>(3 << 20).unwrap_err().to_string();
    assert!(error.contains("need 3145728 more, expected at most 2097152"), "{error}");
    // The stream tries to allocate that much for the next turn, and continues with less.
    assert!(lane.begin().is_err());
    run(10);
}
