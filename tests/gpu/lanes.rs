//! Work that is written down, sent off and replayed, against the same work asked for at once.

use std::sync::Arc;

use sterling::device::cuda::Device;
use sterling::device::cuda::emulated::Emulated;
use sterling::device::cuda::ops::top::{self, Scored, Ties};

use crate::emulation::{Random, emulated};

/// The best of a row, by some launches, uploads, zeros and results.
fn best(device: &Device, keys: &[u32], k: u32) -> sterling::error::Result<impl FnOnce() -> Vec<u32> + use<>> {
    let (keys, wanted) = (device.copy(keys)?, device.copy(&[k])?);
    let scored = Scored { keys: &keys, slots: None, counts: None, stride: keys.len() };
    let found = top::select_by(device, 2, &scored, &Ties::default(), (&wanted, k as usize))?;
    let found = top::sort(device, found, &Ties::default())?;
    let slots = found.slots.later(k as usize)?;
    Ok(move || slots.get().unwrap())
}

fn at_once(keys: &[u32], k: u32) -> Vec<u32> {
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
fn replayed_work_makes_what_it_makes_at_once() {
    let (driver, lane) = lane();
    let mut random = Random::new(1);
    for turn in 0..6 {
        lane.begin().unwrap();
        let keys = keys(&mut random, 300);
        let found = best(&lane, &keys, 20).unwrap();
        let (before, ran) = (driver.counts(), driver.launches());
        lane.flush().unwrap();
        assert_eq!(driver.counts().waits, before.waits, "the host waited to send work off");
        assert_eq!(driver.launches(), ran, "something ran before anybody waited");
        assert_eq!(found(), at_once(&keys, 20), "turn {turn}");
        assert_eq!(driver.counts().waits, before.waits + 1, "the host waited more than once");
        assert!(driver.launches() > ran);
    }
    let counts = driver.counts();
    // The first turn asks for its memory beside the lane's, the second is new, the third is recorded.
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
        assert_eq!(best(&lane, &keys, k).unwrap()(), at_once(&keys, k), "{k} of {count}");
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
        // What is asked for behind a wait runs as well.
        assert_eq!((array.to_vec().unwrap(), zeros.to_vec().unwrap()), (vec![0; 4], vec![5, 0, 0]));
        array.write(&[9]).unwrap();
        assert_eq!(array.read(2).unwrap(), [9, 0]);
        assert!(array.later(5).is_err() && array.write_at(3, &[1, 2]).is_err());
    }
}

/// Results that follow each other go to the host by one launch, four bytes a thread, and what is left by the last.
#[test]
fn results_of_any_length_come_together() {
    let (_, lane) = lane();
    for turn in 0..3u8 {
        lane.begin().unwrap();
        let lengths = [1usize, 5, 1024, 4, 1030, 512, 7, 256, 2048, 3, 1024, 2];
        let bytes = |(array, length): (usize, usize)| (0..length).map(|n| (7 * array + n) as u8 ^ turn).collect();
        let sent: Vec<Vec<u8>> = lengths.into_iter().enumerate().map(bytes).collect();
        let arrays: Vec<_> = sent.iter().map(|bytes| lane.copy(bytes).unwrap()).collect();
        // Asked for in another order than they lie in, so that what leaves a result's end is not what follows it anyway.
        let results: Vec<_> = arrays.iter().rev().map(|array| array.later(array.len()).unwrap()).collect();
        let mut found: Vec<Vec<u8>> = results.into_iter().map(|result| result.get().unwrap()).collect();
        found.reverse();
        assert_eq!(found, sent, "turn {turn}");
    }
}

#[test]
fn lanes_work_side_by_side() {
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
        let want = at_once(&keys, 15);
        // The lane before is waited for once this one is on its way.
        if let Some((found, want)) = before.replace((found, want)) {
            let found: Vec<u32> = found();
            assert_eq!(found, want, "turn {turn}");
        }
    }
    assert!(lanes[0].lane().is_err(), "a lane of a lane");
}

#[test]
fn work_that_nobody_waits_for_is_no_harm() {
    let (driver, lane) = lane();
    let mut random = Random::new(4);
    for turn in 0..8 {
        lane.begin().unwrap();
        let keys = keys(&mut random, 100 + 700 * (turn % 3));
        let found = best(&lane, &keys, 9).unwrap();
        match turn % 4 {
            // Written down alone, or sent off, and then forgotten.
            0 => drop(found),
            1 => {
                lane.flush().unwrap();
                drop(found);
            }
            _ => assert_eq!(found(), at_once(&keys, 9), "turn {turn}"),
        }
    }
    assert!(driver.counts().waits >= 4);
    // An array that somebody still holds keeps its numbers, however often the lane begins.
    let kept = lane.copy(&[1u32, 2, 3]).unwrap();
    lane.begin().unwrap();
    let keys = keys(&mut random, 100);
    assert_eq!(best(&lane, &keys, 9).unwrap()(), at_once(&keys, 9));
    assert_eq!(kept.to_vec().unwrap(), [1, 2, 3]);
}
