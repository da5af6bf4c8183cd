//! Filtered searches on a GPU end where those of the CPU end, if they check as often.

use sterling::cuda::Device;
use sterling::cuda::ops::scan::{Collection, Eligible};
use sterling::cuda::ops::termination::{RunningSearches, Schedule};
use sterling::cuda::partition::Share;
use sterling::index::ivf::{
    CheckInterval, DeviceIndex, EligibleParts, Ending, FilteredSearch, Index, Probing, Rescore, ResidualQuantiles,
    Scratch,
};
use sterling::index::topk::Selector;
use sterling::units::ListId;

use crate::emulation::{Random, device};
use crate::scan::index;

const DIMENSION: usize = 24;

/// Eligible items of every list, with different probabilities per list, as filter bitmaps of the filter index.
struct Catalogue {
    index: Index,
    firsts: Vec<u32>,
    words: Vec<u64>,
    vectors: Vec<f32>,
    margins: ResidualQuantiles,
    pass_rate: f64,
}

fn catalogue(lists: usize, thin: u32, is_regional: bool) -> Catalogue {
    let (index, values) = index(2600, DIMENSION, lists, Rescore::None, false);
    let mut random = Random::new(u64::from(thin) + lists as u64);
    let (mut firsts, mut words, mut passing) = (vec![0u32], Vec::new(), 0);
    for list in 0..index.lists() {
        let length = index.list_lengths()[list] as usize;
        let slots = index.list_offsets()[list + 1] - index.list_offsets()[list];
        firsts.push(firsts[list] + slots.div_ceil(64));
        let thin = if is_regional && list % 4 > 0 { thin + 4 } else { thin };
        for word in 0..slots.div_ceil(64) as usize {
            let filled = length.saturating_sub(word * 64).min(64);
            let bits = (0..thin).fold(u64::MAX, |bits, _| bits & (random.next() ^ random.next() << 31));
            words.push(bits & if filled == 64 { u64::MAX } else { (1 << filled) - 1 });
            passing += words[words.len() - 1].count_ones();
        }
    }
    let rows = values.chunks_exact(DIMENSION);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let pair = |(a, b): (&[f32], &[f32])| (dot(a, b) / dot(b, b).sqrt() + a[0], dot(a, b) / dot(b, b).sqrt());
    let sample: Vec<(f32, f32)> = rows.clone().zip(rows.skip(7)).map(pair).collect();
    let pass_rate = f64::from(passing) / index.items() as f64;
    Catalogue {
        index,
        firsts,
        words,
        vectors: random.numbers(5 * DIMENSION),
        margins: ResidualQuantiles::of(&sample),
        pass_rate,
    }
}

/// Returns the numbers of lists, items and survivors of a search on the CPU.
fn on_cpu(of: &Catalogue, vector: &[f32], search: &FilteredSearch<'_>, excluded: &[u32]) -> [u64; 3] {
    let mut selector = Selector::new();
    selector.reset(search.enough);
    let mut fill = |list: ListId, out: &mut [u64]| {
        let first = of.firsts[list.index()] as usize;
        let count = of.firsts[list.index() + 1] as usize - first;
        out[..count].copy_from_slice(&of.words[first..first + count]);
        for slot in excluded {
            let bit = slot.wrapping_sub(of.index.list_offsets()[list.index()]) as usize;
            if bit / 64 < count {
                out[bit / 64] &= !(1 << (bit % 64));
            }
        }
    };
    let scratch = &mut Scratch::default();
    let found = of.index.search(vector, search.probing, Some(&mut fill), &mut selector, search.enough, scratch);
    [found.lists, found.items, found.survivors]
}

fn on_device(
    device: &Device,
    of: &Catalogue,
    copied: &DeviceIndex,
    searches: &[FilteredSearch<'_>],
    (excluded, pace): (&[&[u32]], CheckInterval),
) -> Vec<[u64; 3]> {
    let queries = searches.len();
    let wanted: Vec<u32> = searches.iter().map(|s| s.enough as u32).collect();
    let collection = Collection::new(device, DIMENSION, of.index.slots(), &wanted, excluded).unwrap();
    let vectors = device.copy(&of.vectors[..queries * DIMENSION]).unwrap();
    collection.quantize(device, &vectors, DIMENSION, copied.norm_max()).unwrap();
    let (words, firsts) = (device.copy(&of.words).unwrap(), device.copy(&of.firsts).unwrap());
    let addresses = device.copy(&vec![words.address(); queries]).unwrap();
    let eligible = Eligible { words: &addresses, firsts: &firsts };
    let parts = EligibleParts { main: eligible, beside: Vec::new() };
    let (lists, items) = copied.scan_until(device, &collection, &vectors, &parts, (searches, pace)).unwrap();
    let (lists, items) = (lists.to_vec().unwrap(), items[0].to_vec().unwrap());
    let survivors = collection.survivors.to_vec().unwrap();
    (0..queries).map(|q| [u64::from(lists[q]), items[q], u64::from(survivors[q])]).collect()
}

#[test]
fn searches_terminate_where_those_of_the_cpu_do() {
    let device = device();
    let (mut ended_early, mut rarely) = (0, [0, 0]);
    for (lists, thin, is_regional) in [(60, 1, false), (60, 3, true), (130, 2, true), (300, 1, false), (7, 1, false)] {
        let of = catalogue(lists, thin, is_regional);
        let copied = DeviceIndex::copy(&device, &of.index, &of.index.cut(Share::WHOLE), 0).unwrap();
        // The last searches with a termination rule continue because of the gain per list, regardless of the estimate
        // for unscanned lists.
        for (probes, probes_max, enough, ending) in [
            (8, lists, 10, Some((0.93, 0.02))),
            (3, lists, 25, Some((0.93, 0.3))),
            (2, lists, 40, Some((0.8, 0.5))),
            (8, lists, 150, Some((0.9, 0.3))),
            (5, lists / 2, 12, None),
            (1, lists, 1, None),
            (lists, lists, 5, None),
        ] {
            let ending = ending.map(|(recall, left)| Ending { margins: &of.margins, recall, left });
            let probing = Probing { pass_rate: of.pass_rate, ending, ..Probing::of(probes, probes_max) };
            // Some queries want more results than the recall needs.
            let least = |q: usize| if q.is_multiple_of(2) { 0 } else { 3 * enough };
            // Others are out of distribution, and scan more lists before their first check.
            let least_lists = |q: usize| if q == 3 { probes_max / 2 } else { 0 };
            let search = |q: usize| FilteredSearch {
                probing: Probing { least: least(q), least_lists: least_lists(q), ..probing },
                enough: enough + q,
                suffices: None,
            };
            let searches: Vec<FilteredSearch<'_>> = (0..5).map(search).collect();
            let excluded: Vec<Vec<u32>> =
                (0..5).map(|q| (0..of.index.slots() as u32).filter(|s| q % 2 == 1 && s % 11 == 3).collect()).collect();
            let excluded: Vec<&[u32]> = excluded.iter().map(Vec::as_slice).collect();
            let often = on_device(&device, &of, &copied, &searches, (&excluded, CheckInterval::Often));
            let rare = on_device(&device, &of, &copied, &searches, (&excluded, CheckInterval::Rare));
            for (q, vector) in of.vectors.chunks_exact(DIMENSION).enumerate() {
                let want = on_cpu(&of, vector, &searches[q], excluded[q]);
                let what = format!("query {q} of {lists} lists, {probes} to {probes_max}, {enough}, {ending:?}");
                assert_eq!(often[q], want, "{what}");
                ended_early += usize::from(want[0] < probes_max as u64);
                rarely[0] += rare[q][0];
                rarely[1] += want[0];
            }
        }
    }
    assert!(ended_early > 20, "only {ended_early} searches ended before all lists");
    assert!(rarely[0] >= rarely[1], "a search with rare checks scans more: {rarely:?} lists");
}

#[test]
fn a_sufficient_result_ends_a_search() {
    let (device, of) = (device(), catalogue(60, 0, false));
    let copied = DeviceIndex::copy(&device, &of.index, &of.index.cut(Share::WHOLE), 0).unwrap();
    let ending = Some(Ending { margins: &of.margins, recall: 0.93, left: 0.0 });
    let probing = Probing { ending, ..Probing::of(6, 60) };
    for (survivors, ends) in [(1, true), (2600, false)] {
        let search = FilteredSearch { probing, enough: 30, suffices: Some((6, survivors)) };
        let found = on_device(&device, &of, &copied, &[search], (&[&[]], CheckInterval::Rare));
        assert_eq!(found[0][0] == 6, ends, "{found:?}");
    }
}

#[test]
fn unsorted_termination_checks_are_rejected() {
    let device = device();
    for looks in [vec![], vec![5, 4]] {
        let gains = vec![0.0; looks.len()];
        assert!(RunningSearches::new(&device, &[Schedule { looks, gains, ..Schedule::default() }]).is_err());
    }
}
