//! Rows in full precision, compared with the index of the CPU.

use sterling::cuda::ops::rows::{CandidateColumns, SlotRows};
use sterling::cuda::ops::scan::Collection;
use sterling::cuda::ops::top::{self, Scored, Ties};
use sterling::cuda::partition::Share;
use sterling::index::ivf::{DeviceIndex, Rescore};
use sterling::index::topk::unkey;
use sterling::units::Slot;

use crate::emulation::{Random, device};
use crate::scan::index;

fn close(got: f32, want: f32) -> bool {
    (got - want).abs() <= 2e-5 * want.abs().max(1.0)
}

/// A warp gathers 32 columns at a time.
#[test]
fn more_columns_than_a_warp_has_lanes_are_gathered() {
    let (index, _) = index(40, 8, 1, Rescore::None, true);
    let device = device();
    let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
    let (columns, mut random) = (70, Random::new(70));
    let values: Vec<Vec<f32>> = (0..columns).map(|_| random.numbers(index.slots())).collect();
    let on_device: Vec<_> = values.iter().map(|values| device.copy(values).unwrap()).collect();
    let addresses: Vec<u64> = on_device.iter().map(|column| column.address()).collect();
    let (slots, counts) = ([7u32, 0, 31], [3u32]);
    let (slots_on, counts_on) = (device.copy(&slots).unwrap(), device.copy(&counts).unwrap());
    let (addresses, similarity) = (device.copy(&addresses).unwrap(), device.copy(&[0u32; 3]).unwrap());
    let candidates = CandidateColumns { addresses: &addresses, similarity: &similarity, at: 0 };
    let out = device.room(slots.len() * columns).unwrap();
    let of = SlotRows { slots: &slots_on, counts: &counts_on, stride: slots.len() };
    copied.rows().gather(&device, &of, None, &candidates, (&out, columns)).unwrap();
    let want: Vec<f32> =
        slots.iter().flat_map(|&slot| values.iter().map(move |column| column[slot as usize])).collect();
    assert_eq!(out.to_vec().unwrap(), want);
}

#[test]
fn rows_of_every_width_are_those_of_the_cpu() {
    for (rescore, dimension) in
        [(Rescore::None, 30), (Rescore::Bf16, 64), (Rescore::F16, 33), (Rescore::F32, 128), (Rescore::F16, 264)]
    {
        let (index, _) = index(300, dimension, 7, rescore, true);
        let device = device();
        let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
        let mut random = Random::new(dimension as u64);
        let (queries, stride) = (2, 45);
        let vectors = random.numbers(queries * dimension);
        let is_item = |slot: u32| {
            let list = index.list_offsets().partition_point(|&o| o <= slot) - 1;
            slot - index.list_offsets()[list] < index.list_lengths()[list]
        };
        let items: Vec<u32> = (0..index.slots() as u32).filter(|&slot| is_item(slot)).collect();
        let slots: Vec<u32> = (0..queries * stride).map(|_| items[random.below(items.len())]).collect();
        let counts = [45u32, 13];
        let (on_device, vectors_on) = (device.copy(&slots).unwrap(), device.copy(&vectors).unwrap());
        let counts_on = device.copy(&counts).unwrap();
        let of = SlotRows { slots: &on_device, counts: &counts_on, stride };
        let keys = device.room(queries * stride).unwrap();
        copied.rows().products(&device, (&vectors_on, None), &of, &keys).unwrap();
        let keys = keys.to_vec().unwrap();

        // Two skipped numbers, the row, one more, the price, the retrieval score, and one more.
        let prices: Vec<f32> = random.numbers(index.slots());
        let column = device.copy(&prices).unwrap();
        let addresses = device.copy(&[column.address(), 0]).unwrap();
        let scores = device.copy(&keys).unwrap();
        let columns = CandidateColumns { addresses: &addresses, similarity: &scores, at: dimension + 3 };
        let out_stride = dimension + 6;
        let gather = |row_at| {
            let out = device.copy(&vec![9f32; queries * stride * out_stride]).unwrap();
            copied.rows().gather(&device, &of, row_at, &columns, (&out, out_stride)).unwrap();
            out.to_vec().unwrap()
        };
        let (out, without_rows) = (gather(Some(2)), gather(None));
        let short = device.room(queries * stride * (dimension + 2)).unwrap();
        assert!(copied.rows().gather(&device, &of, Some(2), &columns, (&short, dimension + 2)).is_err());
        for q in 0..queries {
            let vector = &vectors[q * dimension..][..dimension];
            for n in 0..counts[q] as usize {
                let place = q * stride + n;
                let slot = Slot(slots[place]);
                let (got, want) = (unkey(u64::from(keys[place]) << 32).0, index.product(vector, slot));
                assert!(close(got, want), "{rescore:?} {dimension}: {got}, expected {want}");
                let mut row = vec![9f32; dimension + 2];
                index.row(slot, &mut row[2..]);
                row.extend([9.0, prices[slot.index()], got, 9.0]);
                assert_eq!(out[place * out_stride..][..out_stride], row, "{rescore:?} {dimension}");
                row[..dimension + 2].fill(9.0);
                assert_eq!(without_rows[place * out_stride..][..out_stride], row, "{rescore:?} {dimension}");
            }
            assert!(
                out[(q * stride + counts[q] as usize) * out_stride..(q + 1) * stride * out_stride]
                    .iter()
                    .all(|&x| x == 9.0)
            );
        }
        // No item exceeds the maximal norm, and one reaches it.
        let norm = |slot: u32| {
            let mut row = vec![0f32; dimension];
            index.row(Slot(slot), &mut row);
            row.iter().map(|x| x * x).sum::<f32>().sqrt()
        };
        let longest = items.iter().map(|&slot| norm(slot)).fold(0f32, f32::max);
        assert!(copied.norm_max() >= longest * 0.9999 && copied.norm_max() < longest * 1.05);

        // Exact scan of every second item.
        let (mut word_slots, mut words) = (Vec::new(), Vec::new());
        for list in 0..index.lists() {
            let (first, end) = (index.list_offsets()[list], index.list_offsets()[list + 1]);
            for word in (first..end).step_by(64) {
                word_slots.push(word);
                let bits = (0..64).filter(|bit| word + bit < end && is_item(word + bit) && (word + bit) % 2 == 0);
                words.push(bits.fold(0u64, |bits, bit| bits | 1 << bit));
            }
        }
        let wanted = [20u32, 400];
        let collection = Collection::new(&device, dimension, index.slots(), &wanted, &[&[], &[]]).unwrap();
        collection.quantize(&device, &vectors_on, dimension, copied.norm_max()).unwrap();
        let words = device.copy(&words).unwrap();
        let addresses = device.copy(&[words.address(); 2]).unwrap();
        let word_slots = device.copy(&word_slots).unwrap();
        copied.rows().scan(&device, &collection, &vectors_on, &addresses, &word_slots).unwrap();
        let eligible = items.iter().filter(|&slot| slot % 2 == 0).count() as u32;
        assert_eq!(collection.survivors.to_vec().unwrap(), [eligible; 2], "{rescore:?} {dimension}");
        let room = collection.room();
        let scored = Scored {
            keys: &collection.keys,
            slots: Some(&collection.slots),
            counts: Some(&collection.counts),
            stride: room,
        };
        let best = top::select(&device, &scored, &Ties::default(), &collection.wanted, 400).unwrap();
        let best = top::sort(&device, best, &Ties::default()).unwrap();
        let (keys, counts) = (best.keys.to_vec().unwrap(), best.counts.to_vec().unwrap());
        for q in 0..queries {
            let vector = &vectors[q * dimension..][..dimension];
            let mut want: Vec<f32> =
                items.iter().filter(|&s| s % 2 == 0).map(|&s| index.product(vector, Slot(s))).collect();
            want.sort_by(|a, b| b.total_cmp(a));
            want.truncate(wanted[q] as usize);
            assert_eq!(counts[q] as usize, want.len());
            let got = (0..want.len()).map(|n| unkey(u64::from(keys[q * best.stride + n]) << 32).0);
            assert!(got.zip(&want).all(|(got, &want)| close(got, want)), "{rescore:?} {dimension}");
        }
    }
}
