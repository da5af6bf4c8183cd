//! Filter programs compared with the evaluation of each item.

use sterling::cuda::Device;
use sterling::cuda::ops::scan::Order;
use sterling::cuda::ops::words::NO_FILTER;
use sterling::cuda::partition::{ListCut, Share};
use sterling::index::columns::{self, Columns, ItemColumn, ItemValues};
use sterling::index::filter::index::DevicePlanes;
use sterling::index::filter::{self, Index, Options, Plan};
use sterling::storage::files::{TensorFile, Tensors};
use sterling::units::{ListId, NO_ITEM, Slot};

use crate::emulation::{Random, device};

struct Catalogue {
    columns: Columns,
    index: Index,
    list_offsets: Vec<u32>,
    list_lengths: Vec<u32>,
}

/// Returns items with texts, integers, several of both, and numbers that may be missing; frequent and rare values.
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

/// Returns a random expression.
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

/// Returns the items of all lists that pass each of the plans, `[plans][words]`.
fn evaluated(device: &Device, planes: &DevicePlanes, plans: &[Plan]) -> Vec<Vec<u64>> {
    let filters = planes.filters(device, plans.iter().map(Plan::lower).collect(), None).unwrap();
    planes.index().evaluate(device, &filters).unwrap();
    let words = filters.words.to_vec().unwrap();
    words.chunks(words.len() / plans.len()).map(<[u64]>::to_vec).collect()
}

/// Returns the items of all lists that pass a plan, evaluated per item.
fn asked(index: &Index, plan: &Plan) -> Vec<u64> {
    let of_list = |list: ListId| {
        let passes =
            move |bit: usize| bit < index.length(list) && plan.passes(Slot(index.first_slot(list) + bit as u32));
        (0..index.words(list)).map(move |w| (0..64).filter(|b| passes(w * 64 + b)).fold(0, |word, b| word | 1 << b))
    };
    (0..index.lists() as u32).map(ListId).flat_map(of_list).collect()
}

#[test]
fn filter_bitmaps_are_exact_for_any_filter() {
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
        // Numbers that items have, with each operator, and other numbers.
        let signs = ["<", "<=", ">", ">=", "=", "!="].into_iter().flat_map(|sign| {
            ["price", "size"]
                .map(|name| [0.0, 12.5, -7.25, 42.0].map(|number| format!("{name} {sign} {number}")))
                .concat()
        });
        let texts: Vec<String> = signs.chain((0..60).map(|_| expression(&mut random, 3))).collect();
        let plan = |text: &String| Plan::new(&filter::parse(text).ok()?.canonical(), columns, index, 0).ok();
        let (texts, plans): (Vec<&String>, Vec<Plan>) =
            texts.iter().filter_map(|text| Some((text, plan(text)?))).unzip();
        assert!(plans.len() >= 60 + 24, "{texts:?}");
        let words = evaluated(&device, &planes, &plans);
        // The partitions of several GPUs pass the same items as the complete index.
        let on_cards: Vec<Vec<Vec<u64>>> = parts.iter().map(|(_, part)| evaluated(&device, part, &plans)).collect();
        for (n, (text, plan)) in texts.iter().zip(&plans).enumerate() {
            assert_eq!(words[n], asked(index, plan), "`{text}`");
            let mut taken = vec![0; parts.len()];
            let mut put_together = Vec::new();
            for list in 0..lists {
                for (card, (cut, _)) in parts.iter().enumerate() {
                    let count = cut.words()[list].len();
                    put_together.extend_from_slice(&on_cards[card][n][taken[card]..][..count]);
                    taken[card] += count;
                }
            }
            assert_eq!(put_together, words[n], "`{text}`");
        }
        let inexact = plans.iter().filter(|plan| !plan.is_exact()).count();
        assert!(inexact > 0 || options.exact_share_min < 0.1, "no filter had to look items up");
        by_list(&device, (&planes, index), (&plans, &words), &mut random);
    }
}

/// For the lists that queries scan next, the bitmaps are equal; those of other lists stay unchanged.
fn by_list(
    device: &Device,
    (planes, index): (&DevicePlanes, &Index),
    (plans, words): (&[Plan], &[Vec<u64>]),
    random: &mut Random,
) {
    let lists = index.lists();
    let filters = planes.filters(device, plans.iter().map(Plan::lower).collect(), None).unwrap();
    const BEFORE: u64 = 0x1234_5678_9abc_def0;
    filters.words.write(&vec![BEFORE; filters.words.len()]).unwrap();
    // Every third filter has two queries, and some queries have none.
    let queries: Vec<Option<usize>> =
        (0..plans.len()).flat_map(|n| [Some(n), if n % 3 == 0 { Some(n) } else { None }]).collect();
    let order: Vec<u32> = queries.iter().flat_map(|_| shuffled(lists, random)).collect();
    let spans: Vec<[u32; 2]> = queries
        .iter()
        .map(|_| {
            let [a, b] = [(); 2].map(|()| random.below(lists + 1) as u32);
            [a.min(b), a.max(b)]
        })
        .collect();
    let of_queries: Vec<u32> = queries.iter().map(|filter| filter.map_or(NO_FILTER, |n| n as u32)).collect();
    let [begins, ends] =
        [0, 1].map(|end| device.copy(&spans.iter().map(|span| span[end]).collect::<Vec<u32>>()).unwrap());
    let (order_there, of_queries) = (device.copy(&order).unwrap(), device.copy(&of_queries).unwrap());
    let next = Order { order: &order_there, begins: Some(&begins), ends: &ends, stride: lists, most: lists };
    planes.index().evaluate_lists(device, (&filters, &of_queries), &next).unwrap();
    let firsts: Vec<usize> = std::iter::once(0)
        .chain((0..lists as u32).scan(0, |end, list| {
            *end += index.words(ListId(list));
            Some(*end)
        }))
        .collect();
    let mut want = vec![vec![BEFORE; words[0].len()]; plans.len()];
    for (q, filter) in queries.iter().enumerate() {
        let Some(filter) = *filter else { continue };
        for &list in &order[q * lists..][spans[q][0] as usize..spans[q][1] as usize] {
            let of_list = firsts[list as usize]..firsts[list as usize + 1];
            want[filter][of_list.clone()].copy_from_slice(&words[filter][of_list]);
        }
    }
    assert_eq!(filters.words.to_vec().unwrap(), want.concat());
    // Without a start list, the evaluation starts at the first list.
    filters.words.write(&vec![BEFORE; filters.words.len()]).unwrap();
    planes.index().evaluate_lists(device, (&filters, &of_queries), &Order { begins: None, ..next }).unwrap();
    let first = filters.words.read(words[0].len()).unwrap();
    let is_first = |list: &usize| order[..spans[0][1] as usize].contains(&(*list as u32));
    let is_second = |list: &usize| order[lists..][..spans[1][1] as usize].contains(&(*list as u32));
    for list in 0..lists {
        let of_list = firsts[list]..firsts[list + 1];
        let there = first[of_list.clone()] == words[0][of_list];
        assert_eq!(there, is_first(&list) || is_second(&list) || firsts[list] == firsts[list + 1], "list {list}");
    }
}

fn shuffled(count: usize, random: &mut Random) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count as u32).collect();
    (1..count).rev().for_each(|n| all.swap(n, random.below(n + 1)));
    all
}
