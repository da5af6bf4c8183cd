//! Filter programs against asking each item.

use sterling::columns::{self, Columns, ItemColumn, ItemValues};
use sterling::device::cuda::cut::{ListCut, Share};
use sterling::files::{TensorFile, Tensors};
use sterling::filter::index::DevicePlanes;
use sterling::filter::{self, Index, Options, Plan};
use sterling::units::{ListId, NO_ITEM, Slot};

use crate::emulation::{Random, device};

struct Catalogue {
    columns: Columns,
    index: Index,
    list_offsets: Vec<u32>,
    list_lengths: Vec<u32>,
}

/// Items of texts, integers, several of both, and numbers that may be missing; frequent and rare values.
fn catalogue(items: usize, lists: usize, options: &Options) -> Catalogue {
    let mut random = Random::new(items as u64);
    let (mut tag_offsets, mut tags, mut year_offsets, mut years) = (vec![0u32], Vec::new(), vec![0u32], Vec::new());
    let (mut price, mut single_offsets, mut single) = (Vec::new(), vec![0u32], Vec::new());
    for _ in 0..items {
        for _ in 0..random.below(4) {
            tags.push(format!("t{}", random.below(12).min(random.below(12))));
        }
        tag_offsets.push(tags.len() as u32);
        for _ in 0..random.below(3) {
            years.push(1990 + random.below(30) as i64);
        }
        year_offsets.push(years.len() as u32);
        if random.below(5) > 0 {
            single.push(random.below(200) as i64);
        }
        single_offsets.push(single.len() as u32);
        price.push(if random.below(6) == 0 { f64::NAN } else { random.below(400) as f64 / 4.0 - 50.0 });
    }
    let column = |name: &str, values| ItemColumn { name: name.into(), filter: true, values };
    let all = [
        column("tag", ItemValues::Texts { offsets: tag_offsets, values: tags }),
        column("year", ItemValues::Integers { offsets: year_offsets, values: years }),
        column("size", ItemValues::Integers { offsets: single_offsets, values: single }),
        column("price", ItemValues::Floats(price)),
    ];
    let (mut order, mut list_offsets, mut list_lengths) = (Vec::new(), vec![0u32], Vec::new());
    for list in 0..lists {
        let of_list: Vec<u32> = (0..items).filter(|i| (i * i + i) % lists == list).map(|i| i as u32).collect();
        list_lengths.push(of_list.len() as u32);
        order.extend(of_list);
        order.resize(order.len().next_multiple_of(16), NO_ITEM);
        list_offsets.push(order.len() as u32);
    }
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str, file: TensorFile<'_>| {
        let path = folder.path().join(name);
        file.write(&path).unwrap();
        Tensors::open(&path).unwrap()
    };
    let mut file = TensorFile::new();
    columns::encode(&all, &order, &mut file).unwrap();
    let columns = Columns::open(&written("columns", file), order.len()).unwrap();
    let mut file = TensorFile::new();
    filter::encode(&columns, &list_offsets, &list_lengths, options, &mut file).unwrap();
    let index = Index::open(&written("filter", file), &list_offsets, &list_lengths, columns.terms()).unwrap();
    Catalogue { columns, index, list_offsets, list_lengths }
}

/// A random expression.
fn expression(random: &mut Random, depth: usize) -> String {
    let signs = ["<", "<=", ">", ">=", "=", "!="];
    if depth == 0 || random.below(3) == 0 {
        return match random.below(7) {
            0 => format!("tag:t{}", random.below(13)),
            1 => format!("tag IN (t{}, t{}, t{})", random.below(12), random.below(12), random.below(12)),
            2 => format!("year:{}", 1988 + random.below(34)),
            3 => format!("year {} {}", signs[random.below(6)], 1988 + random.below(34)),
            4 => format!("size {} {}", signs[random.below(6)], random.below(220)),
            5 => format!("size IN ({}, {})", random.below(200), random.below(200)),
            _ => format!("price {} {}", signs[random.below(6)], random.below(480) as f64 / 4.0 - 60.0),
        };
    }
    match random.below(3) {
        0 => format!("NOT ({})", expression(random, depth - 1)),
        1 => format!("({}) AND ({})", expression(random, depth - 1), expression(random, depth - 1)),
        _ => format!("({}) OR ({})", expression(random, depth - 1), expression(random, depth - 1)),
    }
}

#[test]
fn words_are_the_truth_for_any_filter() {
    let device = device();
    for (items, lists, options) in [
        (700, 6, Options::default()),
        (
            500,
            9,
            Options { exact_share_min: 0.9, number_buckets: 0, hashes: 2, bits_per_term: 2, ..Options::default() },
        ),
        (900, 3, Options { exact_share_min: 0.15, number_buckets: 5, ..Options::default() }),
    ] {
        let catalogue = catalogue(items, lists, &options);
        let (index, columns) = (&catalogue.index, &catalogue.columns);
        let cut = |share| ListCut::of(share, &catalogue.list_offsets, &catalogue.list_lengths);
        let planes = DevicePlanes::copy(&device, index, columns, &cut(Share::WHOLE)).unwrap();
        let cuts = Share::side_by_side(&[0.3, 0.5, 0.2]).into_iter().map(cut);
        let parts: Vec<(ListCut, DevicePlanes)> =
            cuts.map(|cut| (cut.clone(), DevicePlanes::copy(&device, index, columns, &cut).unwrap())).collect();
        let mut random = Random::new(items as u64 + 1);
        let mut inexact = 0;
        for _ in 0..60 {
            let text = expression(&mut random, 3);
            let plan = Plan::new(&filter::parse(&text).unwrap().canonical(), columns, index, 0).unwrap();
            let passing = planes.evaluate(&device, plan.lower(), None).unwrap();
            inexact += u32::from(!plan.is_exact());
            let (words, survivors) = (passing.words.to_vec().unwrap(), passing.survivors.to_vec().unwrap());
            // What several cards have of the lists passes as it does in the whole.
            let passing = |(_, planes): &(ListCut, DevicePlanes)| planes.evaluate(&device, plan.lower(), None).unwrap();
            let on_cards: Vec<Vec<u64>> = parts.iter().map(|part| passing(part).words.to_vec().unwrap()).collect();
            let mut taken = vec![0; parts.len()];
            let mut put_together = Vec::new();
            for list in 0..lists {
                for (n, (cut, _)) in parts.iter().enumerate() {
                    let count = cut.words()[list].len();
                    put_together.extend_from_slice(&on_cards[n][taken[n]..][..count]);
                    taken[n] += count;
                }
            }
            assert_eq!(put_together, words, "`{text}`");
            let mut first = 0;
            for list in (0..lists as u32).map(ListId) {
                let passes =
                    |bit: usize| bit < index.length(list) && plan.passes(Slot(index.first_slot(list) + bit as u32));
                let want: Vec<u64> = (0..index.words(list))
                    .map(|w| (0..64).filter(|b| passes(w * 64 + b)).fold(0, |word, b| word | 1 << b))
                    .collect();
                assert_eq!(words[first..first + want.len()], want, "list {list} of `{text}`");
                assert_eq!(survivors[list.index()], want.iter().map(|w| w.count_ones()).sum::<u32>(), "`{text}`");
                first += want.len();
            }
        }
        assert!(inexact > 0 || options.exact_share_min < 0.1, "no filter had to look items up");
    }
}
