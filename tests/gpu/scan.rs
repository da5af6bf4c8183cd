//! Scans, compared bit for bit with those of the CPU: all widths, penalties, filter bitmaps, excluded slots, and queries that
//! share lists.

use sterling::cuda::Device;
use sterling::cuda::ops::scan::{Collection, Eligible, LiveItems, Order};
use sterling::cuda::ops::top::{self, Scored, Ties};
use sterling::cuda::partition::Share;
use sterling::index::ivf::{
    self, DeviceIndex, Index, Lists, OodProbing, Options, Probing, Rescore, RowSurvey, Scratch,
};
use sterling::index::topk::{Selector, key, unkey};
use sterling::storage::rows::RowStore;
use sterling::tensor::Matrix;
use sterling::units::{ListId, Slot};

use crate::emulation::{Random, device};

/// Returns an index of rows with given lists.
fn listed(rows: &RowStore<'_>, lists: Lists, rescore: Rescore) -> Index {
    let built = ivf::from_lists(&RowSurvey::of(rows).unwrap(), lists, rescore).unwrap();
    Index::open(&built.in_memory(rows, "index").unwrap()).unwrap()
}

/// Returns an index over clustered vectors, with lists of very different length.
pub fn index(items: usize, dimension: usize, lists: usize, rescore: Rescore, nearest: bool) -> (Index, Vec<f32>) {
    let mut random = Random::new((items * 31 + dimension) as u64);
    let centroids = random.numbers(lists * dimension);
    let mut values = Vec::with_capacity(items * dimension);
    let mut of_rows = Vec::with_capacity(items);
    for _ in 0..items {
        let list = random.below(lists).min(random.below(lists));
        let row: Vec<f32> = (0..dimension).map(|d| centroids[list * dimension + d] + 0.4 * random.number()).collect();
        values.extend(row);
        of_rows.push(list as u32);
    }
    let rows = RowStore::from(Matrix::new(&values, dimension).unwrap());
    if nearest {
        return (listed(&rows, Lists { centroids, of_rows, nearest }, rescore), values);
    }
    let options = Options { lists, rescore, ..Options::default() };
    let built = ivf::build(&rows, &RowSurvey::of(&rows).unwrap(), &options, &|_| ()).unwrap();
    (Index::open(&built.in_memory(&rows, "index").unwrap()).unwrap(), values)
}

/// Returns the scores and slots that the CPU finds, best first, without the excluded ones.
fn on_cpu(index: &Index, vector: &[f32], probes: usize, k: usize, excluded: &[u32]) -> Vec<(f32, Slot)> {
    let mut selector = Selector::new();
    selector.reset(k + excluded.len());
    let probing = Probing::of(probes, probes);
    let (room, mut scratch) = (k + excluded.len(), Scratch::default());
    index.search(vector, probing, None, &mut selector, room, &mut scratch);
    let found = selector.finish().iter().map(|&key| unkey(key));
    found.filter(|(_, slot)| !excluded.contains(&slot.0)).take(k).collect()
}

/// Returns scores and slots of each query, best first.
fn selected(device: &Device, from: &Collection, k: usize) -> Vec<Vec<(f32, Slot)>> {
    let scored = Scored { keys: &from.keys, slots: Some(&from.slots), counts: Some(&from.counts), stride: from.room() };
    let best = top::select(device, &scored, &Ties::default(), &from.wanted, k).unwrap();
    let best = top::sort(device, best, &Ties::default()).unwrap();
    let (keys, slots) = (best.keys.to_vec().unwrap(), best.slots.to_vec().unwrap());
    let counts = best.counts.to_vec().unwrap();
    let of_query = |q: usize| {
        let places = q * best.stride..q * best.stride + counts[q] as usize;
        places.map(|n| (unkey(u64::from(keys[n]) << 32).0, Slot(slots[n]))).collect()
    };
    (0..from.queries()).map(of_query).collect()
}

#[test]
fn lists_are_scored_and_scanned_as_on_the_cpu() {
    // The last three: more numbers than a block has threads, more lists, and more than two such blocks have.
    for (items, dimension, lists, nearest) in [
        (900, 24, 20, false),
        (700, 33, 11, true),
        (1500, 64, 37, false),
        (400, 128, 9, true),
        (60, 5, 3, false),
        (200, 580, 6, true),
        (1300, 4, 1100, true),
        (2600, 4, 2300, true),
    ] {
        let (index, values) = index(items, dimension, lists, Rescore::None, nearest);
        let device = device();
        let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
        let mut random = Random::new(items as u64);
        let queries = 19;
        let mut vectors: Vec<f32> = random.numbers(queries * dimension);
        vectors[..dimension].copy_from_slice(&values[..dimension]);
        vectors[dimension..2 * dimension].fill(0.0);
        // So small that the reciprocal of their scale is infinite.
        vectors[2 * dimension..3 * dimension].iter_mut().for_each(|x| *x *= 1e-40);
        let k = 40;
        let excluded: Vec<Vec<u32>> = (0..queries)
            .map(|q| {
                (0..index.slots() as u32).filter(|s| q % 3 == 1 && s.wrapping_mul(2_654_435_761) % 5 == 0).collect()
            })
            .collect();
        let excluded: Vec<&[u32]> = excluded.iter().map(Vec::as_slice).collect();
        let probes = (lists / 3).max(1);
        let room = copied.items_at_most(probes);
        let wanted = vec![k as u32; queries];
        let on_device = device.copy(&vectors).unwrap();
        let collection = |room| {
            let collection = Collection::new(&device, dimension, room, &wanted, &excluded).unwrap();
            collection.quantize(&device, &on_device, dimension, copied.norm_max()).unwrap();
            collection
        };
        let by_query = collection(room);
        // Scores of lists, and their order.
        let keys = device.room(queries * lists).unwrap();
        copied.centroids.score(&device, &by_query, &keys).unwrap();
        let best = device.copy(&vec![probes as u32; queries]).unwrap();
        let scored = Scored { keys: &keys, slots: None, counts: None, stride: lists };
        let order = top::select(&device, &scored, &Ties::default(), &best, probes).unwrap();
        let order = top::sort(&device, order, &Ties::default()).unwrap();
        let (lists_found, keys_found) = (order.slots.to_vec().unwrap(), order.keys.to_vec().unwrap());
        for (q, vector) in vectors.chunks_exact(dimension).enumerate() {
            let mut scratch = Scratch::default();
            let want: Vec<(ListId, f32)> = index.probe(vector, probes, &mut scratch).collect();
            let at = |n: usize| q * order.stride + n;
            let found = (0..probes).map(|n| (ListId(lists_found[at(n)]), keys_found[at(n)]));
            let found: Vec<(ListId, f32)> = found.map(|(list, key)| (list, unkey(u64::from(key) << 32).0)).collect();
            assert_eq!(found, want, "lists of query {q}");
        }
        // Every other query may be out of distribution.
        let mut scratch = Scratch::default();
        let mut reaches: Vec<f32> =
            vectors.chunks_exact(dimension).map(|vector| index.reach(vector, &mut scratch)).collect();
        let reach = *reaches.select_nth_unstable_by(queries / 2, f32::total_cmp).1;
        let further = OodProbing { probes: 2 * probes, reach };
        let ood: Vec<Option<OodProbing>> = (0..queries).map(|q| (q % 2 == 0).then_some(further)).collect();
        let probed = copied.probed_lists(&device, &by_query, &vec![probes as u32; queries], &ood).unwrap();
        let (counts, found) = (probed.counts.to_vec().unwrap(), probed.slots.to_vec().unwrap());
        for (q, vector) in vectors.chunks_exact(dimension).enumerate() {
            let mut selector = Selector::new();
            selector.reset(k);
            let probing = Probing { ood: ood[q], ..Probing::of(probes, probes) };
            let wanted = index.search(vector, probing, None, &mut selector, k, &mut scratch).lists as usize;
            assert_eq!(counts[q] as usize, wanted, "lists of query {q}, {:?}", ood[q]);
            let mut found = found[q * probed.stride..][..wanted].to_vec();
            let mut lists: Vec<u32> = index.probe(vector, wanted, &mut scratch).take(wanted).map(|l| l.0.0).collect();
            found.sort_unstable();
            lists.sort_unstable();
            assert_eq!(found, lists, "lists of query {q}");
        }
        let is_further = |q: &usize| counts[*q] as usize > probes;
        assert!(lists < 2 || (0..queries).any(|q| is_further(&q)) && !(0..queries).all(|q| is_further(&q)));
        let ordered = Order::first(&order.slots, &order.counts, order.stride);
        copied.lists.scan(&device, &by_query, &ordered, None).unwrap();
        let shared = collection(room);
        copied.lists.scan_shared(&device, &shared, &ordered, None).unwrap();
        let (alone, together) = (selected(&device, &by_query, k), selected(&device, &shared, k));
        for (q, vector) in vectors.chunks_exact(dimension).enumerate() {
            let want = on_cpu(&index, vector, probes, k, excluded[q]);
            assert_eq!(alone[q], want, "query {q} of dimension {dimension}, alone");
            assert_eq!(together[q], want, "query {q} of dimension {dimension}, with others");
        }
        let survivors = by_query.survivors.to_vec().unwrap();
        assert_eq!(survivors, shared.survivors.to_vec().unwrap());
        let of_lists =
            |q: usize| (0..probes).map(|n| index.list_lengths()[lists_found[q * order.stride + n] as usize]).sum();
        assert_eq!(survivors, (0..queries).map(of_lists).collect::<Vec<u32>>());
        let items: Vec<u64> = survivors.iter().map(|&n| u64::from(n)).collect();
        assert_eq!(copied.lists.items(&device, &ordered).unwrap().to_vec().unwrap(), items);
        // The running threshold drops items that cannot be among the best.
        let retained: u32 = by_query.counts.to_vec().unwrap().iter().sum();
        assert!(retained <= survivors.iter().sum());
    }
}

#[test]
fn the_selection_threshold_rises_and_never_drops_a_best_candidate() {
    let (index, _) = index(6000, 16, 4, Rescore::None, true);
    let device = device();
    let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
    let vectors = Random::new(77).numbers(3 * 16);
    let wanted = [1u32, 5, 600];
    let collection = Collection::new(&device, 16, index.slots(), &wanted, &[&[], &[], &[]]).unwrap();
    collection.quantize(&device, &device.copy(&vectors).unwrap(), 16, copied.norm_max()).unwrap();
    let order = device.copy(&[0u32, 1, 2, 3].repeat(3)).unwrap();
    let counts = device.copy(&[4u32; 3]).unwrap();
    copied.lists.scan(&device, &collection, &Order::first(&order, &counts, 4), None).unwrap();
    let retained = collection.counts.to_vec().unwrap();
    // A GPU has as many items in flight at once as this test has in total.
    let is_raised = retained[0] < 3000 && retained[1] < 3000 && retained[2] < 5000;
    assert!(is_raised || device.kind() == "cuda", "of 6000 items {retained:?} were kept");
    let found = selected(&device, &collection, 600);
    for (q, vector) in vectors.chunks_exact(16).enumerate() {
        assert_eq!(found[q], on_cpu(&index, vector, 4, wanted[q] as usize, &[]), "query {q}");
    }
}

/// Items of one bin, each better than those before it.
#[test]
fn the_bin_of_the_threshold_is_scanned() {
    let (items, dimension, k) = (6000, 4, 5);
    let values: Vec<f32> =
        (0..items).flat_map(|n| [1.0, 0.5, -0.5, 0.25].map(|x| x * (1.0 + n as f32 * 2e-7))).collect();
    let rows = RowStore::from(Matrix::new(&values, dimension).unwrap());
    let lists = Lists { centroids: vec![0.0; dimension], of_rows: vec![0; items], nearest: true };
    let index = listed(&rows, lists, Rescore::None);
    let device = device();
    let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
    let vector = &values[..dimension];
    let (order, counts) = (device.copy(&[0u32]).unwrap(), device.copy(&[1u32]).unwrap());
    let ordered = Order::first(&order, &counts, 1);
    let collection = || {
        let made = Collection::new(&device, dimension, index.slots(), &[k as u32], &[&[]]).unwrap();
        made.quantize(&device, &device.copy(vector).unwrap(), dimension, copied.norm_max()).unwrap();
        made
    };
    let (alone, together) = (collection(), collection());
    copied.lists.scan(&device, &alone, &ordered, None).unwrap();
    copied.lists.scan_shared(&device, &together, &ordered, None).unwrap();
    let want = on_cpu(&index, vector, 1, k, &[]);
    for found in [alone, together] {
        assert_eq!(selected(&device, &found, k)[0], want);
    }
}

/// No bitmap word is skipped: neither with as many words as the warps of few blocks scan together, nor with more, nor with many
/// blocks.
#[test]
fn long_lists_are_scanned_completely() {
    for items in [33_000, 24 * 32 * 64, 60_000] {
        let (dimension, k) = (4, 30);
        let (index, values) = index(items, dimension, 1, Rescore::None, true);
        let device = device();
        let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
        let vectors = device.copy(&values[..2 * dimension]).unwrap();
        let (order, counts) = (device.copy(&[0u32; 2]).unwrap(), device.copy(&[1u32; 2]).unwrap());
        let ordered = Order::first(&order, &counts, 1);
        let collection = || {
            let made = Collection::new(&device, dimension, index.slots(), &[k as u32; 2], &[&[], &[]]).unwrap();
            made.quantize(&device, &vectors, dimension, copied.norm_max()).unwrap();
            made
        };
        // An emulated GPU alternates between few and many blocks per launch.
        let (one, other, together) = (collection(), collection(), collection());
        copied.lists.scan(&device, &one, &ordered, None).unwrap();
        copied.lists.scan(&device, &other, &ordered, None).unwrap();
        copied.lists.scan_shared(&device, &together, &ordered, None).unwrap();
        let want: Vec<_> = values[..2 * dimension].chunks(dimension).map(|v| on_cpu(&index, v, 1, k, &[])).collect();
        for found in [one, other, together] {
            assert_eq!(selected(&device, &found, k), want);
            assert_eq!(found.survivors.to_vec().unwrap(), [items as u32; 2]);
        }
    }
}

#[test]
fn only_eligible_items_are_scanned() {
    let (index, _) = index(2500, 40, 6, Rescore::None, true);
    let device = device();
    let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
    let (queries, k, dimension) = (3, 50, 40);
    let vectors = Random::new(5).numbers(queries * dimension);
    let mut firsts = vec![0u32];
    for list in 0..index.lists() {
        let slots = index.list_offsets()[list + 1] - index.list_offsets()[list];
        firsts.push(firsts[list] + slots.div_ceil(64));
    }
    let total = firsts[index.lists()] as usize;
    let mut random = Random::new(6);
    // Every item, few, and hardly any.
    let words: Vec<Vec<u64>> = (0..queries)
        .map(|q| {
            let word =
                |random: &mut Random| (0..q * 3).fold(u64::MAX, |w, _| w & (random.next() ^ random.next() << 31));
            (0..total).map(|_| word(&mut random)).collect()
        })
        .collect();
    let copies: Vec<_> = words.iter().map(|words| device.copy(words).unwrap()).collect();
    let addresses: Vec<u64> = copies.iter().map(|copy| copy.address()).collect();
    let (addresses, firsts_on) = (device.copy(&addresses).unwrap(), device.copy(&firsts).unwrap());
    // Eligible and ineligible ones.
    let excluded: Vec<u32> = (0..index.slots() as u32).filter(|slot| slot % 7 == 3).collect();
    let excluded: [&[u32]; 3] = [&[], &excluded, &excluded[5..]];
    let collection = Collection::new(&device, dimension, index.slots(), &[k; 3], &excluded).unwrap();
    collection.quantize(&device, &device.copy(&vectors).unwrap(), dimension, copied.norm_max()).unwrap();
    let lists: Vec<u32> = (0..index.lists() as u32).rev().collect();
    let order = device.copy(&lists.repeat(queries)).unwrap();
    let counts = device.copy(&vec![index.lists() as u32; queries]).unwrap();
    let ordered = Order::first(&order, &counts, index.lists());
    let eligible = Eligible { words: &addresses, firsts: &firsts_on };
    copied.lists.scan(&device, &collection, &ordered, Some(&eligible)).unwrap();
    let found = selected(&device, &collection, k as usize);
    let survivors = collection.survivors.to_vec().unwrap();
    for (q, vector) in vectors.chunks_exact(dimension).enumerate() {
        let is_eligible = |slot: Slot| {
            let list = index.list_offsets().partition_point(|&o| o <= slot.0) - 1;
            let bit = (slot.0 - index.list_offsets()[list]) as usize;
            bit < index.list_lengths()[list] as usize
                && words[q][firsts[list] as usize + bit / 64] >> (bit % 64) & 1 == 1
        };
        // All eligible items of the index by their int8 score.
        let all = on_cpu(&index, vector, index.lists(), index.items(), &[]);
        let mut want: Vec<(f32, Slot)> = all.into_iter().filter(|(_, slot)| is_eligible(*slot)).collect();
        want.retain(|(_, slot)| !excluded[q].contains(&slot.0));
        assert_eq!(survivors[q] as usize, want.len());
        want.sort_by_key(|&(score, slot)| std::cmp::Reverse(key(score, slot)));
        want.truncate(k as usize);
        assert_eq!(found[q], want, "query {q}");
    }
}

/// Deleted items are scanned for no query, alone or with others, and are not counted.
#[test]
fn only_items_that_are_there_are_scanned_together() {
    for (items, dimension, lists) in [(2500, 40, 6), (900, 21, 30), (5000, 8, 2)] {
        let (index, _) = index(items, dimension, lists, Rescore::None, true);
        let device = device();
        let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
        let (queries, k, mut random) = (21, 60, Random::new(items as u64));
        let vectors = device.copy(&random.numbers(queries * dimension)).unwrap();
        let mut firsts = vec![0u32];
        for list in 0..index.lists() {
            let slots = index.list_offsets()[list + 1] - index.list_offsets()[list];
            firsts.push(firsts[list] + slots.div_ceil(64));
        }
        let total = firsts[index.lists()] as usize;
        let random_word = |random: &mut Random, n: usize| match n % 3 {
            0 => random.next() ^ random.next() << 32,
            1 => 0xffff << (16 * random.below(4)),
            _ => u64::MAX,
        };
        let words: Vec<u64> = (0..total).map(|n| random_word(&mut random, n)).collect();
        let (words, firsts) = (device.copy(&words).unwrap(), device.copy(&firsts).unwrap());
        let order: Vec<u32> =
            (0..queries as u32).flat_map(|q| (0..lists as u32).map(move |l| (l + q) % lists as u32)).collect();
        let (order, counts) = (device.copy(&order).unwrap(), device.copy(&vec![lists as u32 - 1; queries]).unwrap());
        let ordered = Order::first(&order, &counts, lists);
        let collection = || {
            let none: Vec<&[u32]> = vec![&[]; queries];
            let made = Collection::new(&device, dimension, index.slots(), &vec![k as u32; queries], &none).unwrap();
            made.quantize(&device, &vectors, dimension, copied.norm_max()).unwrap();
            made
        };
        let (alone, together) = (collection(), collection());
        let addresses = device.copy(&vec![words.address(); queries]).unwrap();
        copied.lists.scan(&device, &alone, &ordered, Some(&Eligible { words: &addresses, firsts: &firsts })).unwrap();
        let live = LiveItems { words: &words, firsts: &firsts };
        copied.lists.scan_shared(&device, &together, &ordered, Some(&live)).unwrap();
        assert_eq!(alone.survivors.to_vec().unwrap(), together.survivors.to_vec().unwrap());
        assert_eq!(selected(&device, &alone, k), selected(&device, &together, k));
    }
}
