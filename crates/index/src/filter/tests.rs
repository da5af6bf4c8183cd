//! Tests filters on random catalogues and random expressions against a naive evaluation of the items.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use proptest::prelude::*;

use super::index::{Hashing, encode_by};
use super::*;
use crate::columns::{self, Columns, ItemColumn, ItemValues, Operator, Overlay, Value};
use sterling_core::units::{ListId, NO_ITEM, Slot};
use sterling_storage::files::{TensorFile, Tensors};

/// Item with plain attributes.
#[derive(Clone, Debug, Default)]
struct Item {
    tags: Vec<String>,
    years: Vec<i64>,
    price: Option<f64>,
}

fn naive(expr: &Expr, item: &Item) -> bool {
    match expr {
        Expr::All => true,
        Expr::Not(inner) => !naive(inner, item),
        Expr::And(parts) => parts.iter().all(|p| naive(p, item)),
        Expr::Or(parts) => parts.iter().any(|p| naive(p, item)),
        Expr::Leaf(Leaf { feature, test, .. }) => match (feature.as_str(), test) {
            ("tag", Test::Has(values)) => values.iter().any(|v| item.tags.contains(v)),
            ("first", Test::Has(values)) => item.years.first().is_some_and(|year| values.contains(&year.to_string())),
            ("year", Test::Has(values)) => values.iter().any(|v| item.years.contains(&v.parse().unwrap())),
            ("year", Test::Compares(op, n)) => item.years.iter().any(|&y| op.holds(y as f64, n.parse().unwrap())),
            ("first", Test::Compares(op, n)) => {
                item.years.first().is_some_and(|&y| op.holds(y as f64, n.parse().unwrap()))
            }
            ("tag", Test::IsPresent) => !item.tags.is_empty(),
            ("year" | "first", Test::IsPresent) => !item.years.is_empty(),
            ("price", Test::IsPresent) => item.price.is_some(),
            ("price", Test::Compares(op, n)) => item.price.is_some_and(|p| op.holds(p, n.parse().unwrap())),
            other => panic!("no such question: {other:?}"),
        },
    }
}

struct Catalogue {
    items: Vec<Item>,
    order: Vec<u32>,
    columns: Columns,
    index: Index,
    overlay: Arc<Overlay>,
}

fn catalogue(items: Vec<Item>, lists: usize, options: &Options) -> Catalogue {
    catalogue_by(Hashing::Spaced, items, lists, options)
}

fn catalogue_by(hashing: Hashing, items: Vec<Item>, lists: usize, options: &Options) -> Catalogue {
    fn jagged<T: Clone>(items: &[Item], of: impl Fn(&Item) -> Vec<T>) -> (Vec<u32>, Vec<T>) {
        let mut offsets = vec![0];
        let mut values = Vec::new();
        for item in items {
            values.extend(of(item));
            offsets.push(values.len() as u32);
        }
        (offsets, values)
    }
    let (offsets, values) = jagged(&items, |i| i.tags.clone());
    let tags = ItemColumn { name: "tag".into(), filter: true, values: ItemValues::Texts { offsets, values } };
    let first = |i: &Item| i.years.first().copied().into_iter().collect();
    let (offsets, values) = jagged(&items, first);
    let first = ItemColumn { name: "first".into(), filter: true, values: ItemValues::Integers { offsets, values } };
    let (offsets, values) = jagged(&items, |i| i.years.clone());
    let years = ItemColumn { name: "year".into(), filter: true, values: ItemValues::Integers { offsets, values } };
    let prices = ItemValues::Floats(items.iter().map(|i| i.price.unwrap_or(f64::NAN)).collect());
    let prices = ItemColumn { name: "price".into(), filter: true, values: prices };

    // Item `i` goes to list `i % lists`; lists are padded to 16 slots.
    let (mut order, mut list_offsets, mut list_lengths) = (Vec::new(), vec![0u32], Vec::new());
    for list in 0..lists {
        let of_list: Vec<u32> = (list..items.len()).step_by(lists).map(|i| i as u32).collect();
        list_lengths.push(of_list.len() as u32);
        order.extend(of_list);
        order.resize(order.len().next_multiple_of(16), NO_ITEM);
        list_offsets.push(order.len() as u32);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.safetensors");
    let mut file = TensorFile::new();
    columns::encode(&[tags, years, first, prices], &order, &mut file).unwrap();
    file.write(&path).unwrap();
    let columns = Columns::open(&Tensors::open(&path).unwrap(), order.len()).unwrap();
    let path = folder.path().join("b.safetensors");
    let mut file = TensorFile::new();
    encode_by(hashing, &columns, (&list_offsets, &list_lengths), options, &mut file).unwrap();
    file.write(&path).unwrap();
    let index = Index::open(&Tensors::open(&path).unwrap(), &list_offsets, &list_lengths, columns.terms()).unwrap();
    Catalogue { items, order, columns, index, overlay: Arc::default() }
}

impl Catalogue {
    /// Gives each item the values of another one in the columns that `changes` selects.
    fn change(&mut self, changes: &[(Item, [bool; 3])]) {
        let mut overlay = Overlay::default();
        let column = |name: &str| self.columns.number(name).unwrap();
        for (slot, row) in self.order.iter().enumerate().filter(|(_, row)| **row != NO_ITEM) {
            let Some((other, [tags, years, price])) = changes.get(*row as usize) else { continue };
            let (slot, item) = (Slot(slot as u32), &mut self.items[*row as usize]);
            if *tags {
                item.tags.clone_from(&other.tags);
                overlay.set(column("tag"), slot, Value::of_texts(&item.tags));
            }
            if *years {
                item.years.clone_from(&other.years);
                overlay.set(column("year"), slot, Value::of_integers(&item.years));
                let first = &item.years[..item.years.len().min(1)];
                overlay.set(column("first"), slot, Value::of_integers(first));
            }
            if *price {
                item.price = other.price;
                overlay.set(column("price"), slot, item.price.map_or(Value::Missing, Value::Float));
            }
        }
        self.overlay = Arc::new(overlay);
    }

    /// Returns the slots whose bit is set, and checks that no bit is set outside of the items.
    fn words(&self, plan: &Plan, scratch: &mut Scratch) -> Vec<Slot> {
        let (mut found, mut all) = (Vec::new(), Vec::new());
        for list in (0..self.index.lists() as u32).map(ListId) {
            let mut words = vec![u64::MAX; self.index.words(list)];
            plan.words(&self.index, list, scratch, &mut words);
            let mut alone = vec![u64::MAX; words.len()];
            plan.words(&self.index, list, &mut Scratch::default(), &mut alone);
            assert_eq!(words, alone, "words of list {list} depend on the lists before it");
            for bit in 0..words.len() * 64 {
                if words[bit / 64] >> (bit % 64) & 1 == 1 {
                    assert!(bit < self.index.length(list), "bit {bit} of list {list} is no item");
                    found.push(Slot(self.index.first_slot(list) + bit as u32));
                }
            }
            all.push(words);
        }
        // Cached from here on: the second sweep evaluates and the third one copies, without any allocation.
        scratch.keep(plan);
        for sweep in 0..2 {
            for (list, words) in all.iter().enumerate() {
                let mut kept = vec![u64::MAX; words.len()];
                let evaluate = || plan.words(&self.index, ListId(list as u32), scratch, &mut kept);
                let allocated = allocation_counter::measure(evaluate).count_total;
                assert_eq!(*words, kept, "words of list {list} differ where they are kept");
                assert!(sweep == 0 || allocated == 0, "{allocated} allocations");
            }
        }
        if let Some(first) = scratch.kept.first_mut().filter(|_| self.overlay.is_empty()) {
            *first ^= 1;
            let mut kept = vec![0; all[0].len()];
            plan.words(&self.index, ListId(0), scratch, &mut kept);
            assert_eq!(kept[0], all[0][0] ^ 1, "words were evaluated again");
        }
        found
    }

    fn check(&self, expr: &Expr, scratch: &mut Scratch) {
        [0, 4096].into_iter().for_each(|slots_max| self.check_by(expr, slots_max, scratch));
    }

    /// Checks an expression, with up to `slots_max` items searched one by one.
    fn check_by(&self, expr: &Expr, slots_max: usize, scratch: &mut Scratch) {
        let filter = expr.canonical();
        let plan = Plan::new(&filter, &self.columns, &self.index, slots_max).unwrap();
        let plan = plan.with_changes(&filter, &self.index, &self.overlay).unwrap();
        let holds = |slot: &Slot| match self.order[slot.index()] {
            NO_ITEM => false,
            row => naive(expr, &self.items[row as usize]),
        };
        let truth: Vec<Slot> = (0..self.order.len() as u32).map(Slot).filter(holds).collect();
        let words = self.words(&plan, scratch);
        assert!(truth.iter().all(|s| words.contains(s)), "{expr:?}: an eligible item was lost");
        if plan.is_exact() {
            assert_eq!(words, truth, "{expr:?}: exact words are not the truth");
        }
        let verified: Vec<Slot> = words.into_iter().filter(|&s| plan.passes(s)).collect();
        assert_eq!(verified, truth, "{expr:?}: verification is not the truth");
        match plan.route() {
            Route::All => assert_eq!(truth.len(), self.items.len()),
            Route::Nothing => assert!(truth.is_empty()),
            Route::Slots(slots) => assert_eq!(*slots, truth, "{expr:?}: posting lists are not the truth"),
            Route::Words => {}
        }
        assert!((0.0..=1.0).contains(&plan.pass_rate()));
        if !self.items.is_empty() && self.has_changed_wholly() {
            let share = truth.len() as f64 / self.items.len() as f64;
            assert!((plan.pass_rate() - share).abs() < 1e-9, "{expr:?}: {} for {share}", plan.pass_rate());
        }
    }

    /// Returns true if all values were updated, so that the number of passing items is exact.
    fn has_changed_wholly(&self) -> bool {
        let of_column = |name: &&str| self.overlay.changed(self.columns.number(name).unwrap()).count();
        ["tag", "year", "first", "price"].iter().all(|name| of_column(name) == self.items.len())
    }
}

fn item() -> impl Strategy<Value = Item> {
    // Most items have tag `t0`, few have `t39`: every catalogue has frequent, medium and rare terms.
    let tags = proptest::collection::vec((0u32..1000).prop_map(|x| format!("t{}", x * x / 25_000)), 0..6);
    (
        tags,
        proptest::collection::vec(prop_oneof![-3i64..4, -40i64..40], 0..3),
        proptest::option::of(prop_oneof![-2i32..3, -60i32..60]),
    )
        .prop_map(|(tags, years, price)| Item { tags, years, price: price.map(|p| f64::from(p) / 2.0) })
}

fn items() -> impl Strategy<Value = Vec<Item>> {
    proptest::collection::vec(item(), 1..300)
}

/// Updates per item: of none, some or all of its values.
fn changes() -> impl Strategy<Value = Vec<(Item, [bool; 3])>> {
    prop_oneof![
        2 => Just(Vec::new()),
        2 => proptest::collection::vec((item(), [any::<bool>(), any::<bool>(), any::<bool>()]), 1..300),
        1 => proptest::collection::vec((item(), Just([true; 3])), 300),
    ]
}

/// Several tests of one column, as generated filters have them.
fn equalities() -> impl Strategy<Value = Expr> {
    let column = prop_oneof![Just("first"), Just("year")];
    let operator = prop_oneof![Just(Operator::Equal), Just(Operator::NotEqual)];
    (column, operator, proptest::collection::vec(-4i64..5, 2..6), any::<[bool; 2]>()).prop_map(
        |(column, operator, values, [is_and, is_negated])| {
            let leaf = |value: i64| Leaf {
                feature: column.into(),
                test: Test::Compares(operator, value.to_string()),
                offset: 0,
            };
            let parts = values.into_iter().map(|value| Expr::Leaf(leaf(value))).collect();
            let joined = if is_and { Expr::And(parts) } else { Expr::Or(parts) };
            if is_negated { Expr::Not(Box::new(joined)) } else { joined }
        },
    )
}

fn expr() -> impl Strategy<Value = Expr> {
    use Operator::*;
    let leaf = |feature: &str, test| Expr::Leaf(Leaf { feature: feature.into(), test, offset: 0 });
    let operator =
        || prop_oneof![Just(Less), Just(LessEqual), Just(Greater), Just(GreaterEqual), Just(Equal), Just(NotEqual)];
    let leaf = prop_oneof![
        6 => proptest::collection::vec(0u32..45, 0..3).prop_map(move |t| leaf("tag", Test::Has(t.iter().map(|t| format!("t{t}")).collect()))),
        2 => prop_oneof![-4i64..5, -42i64..42].prop_map(move |y| leaf("year", Test::Has(vec![y.to_string()]))),
        2 => (operator(), prop_oneof![-4i64..5, -42i64..42]).prop_map(move |(o, y)| leaf("year", Test::Compares(o, y.to_string()))),
        2 => (operator(), prop_oneof![-4i64..5, -42i64..42]).prop_map(move |(o, y)| leaf("first", Test::Compares(o, y.to_string()))),
        1 => (operator(), -7i64..8).prop_map(move |(o, y)| leaf("year", Test::Compares(o, format!("{}", y as f64 / 2.0)))),
        2 => (operator(), prop_oneof![-5i32..6, -130i32..130]).prop_map(move |(o, p)| leaf("price", Test::Compares(o, format!("{:.2}", f64::from(p) / 4.0)))),
        2 => prop_oneof![Just("tag"), Just("year"), Just("first"), Just("price")].prop_map(move |c| leaf(c, Test::IsPresent)),
        3 => equalities(),
        1 => Just(Expr::All),
    ];
    leaf.prop_recursive(4, 20, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|e| Expr::Not(Box::new(e))),
            proptest::collection::vec(inner.clone(), 1..4).prop_map(Expr::And),
            proptest::collection::vec(inner, 1..4).prop_map(Expr::Or),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn only_eligible_items_are_returned_and_none_is_lost(
        (items, changes) in (items(), changes()),
        exprs in proptest::collection::vec(expr(), 8),
        lists in 1usize..12,
        number_buckets in prop_oneof![Just(0u32), Just(1), Just(3), Just(32)],
        exact_share_min in prop_oneof![Just(0.02), Just(0.3), Just(1.0)],
        posting_share_max in prop_oneof![Just(0.0), Just(0.05), Just(0.3)],
        (bits_per_term, hashing) in (1u32..12, prop_oneof![Just(Hashing::Plain), Just(Hashing::Spaced)]),
    ) {
        let options = Options { exact_share_min, posting_share_max, bits_per_term, number_buckets, ..Options::default() };
        let mut catalogue = catalogue_by(hashing, items, lists, &options);
        catalogue.change(&changes);
        if posting_share_max >= exact_share_min {
            // Each term has an exact plane or a posting list.
            let plan = |expr: &Expr| Plan::new(&expr.canonical(), &catalogue.columns, &catalogue.index, 0).unwrap();
            prop_assert!(exprs.iter().all(|expr| plan(expr).is_exact()));
        }
        let mut scratch = Scratch::default();
        exprs.iter().for_each(|e| catalogue.check(e, &mut scratch));
    }
}

fn tagged(n: u32) -> Item {
    let tags = (0..n).map(|t| format!("t{t}")).collect();
    Item { tags, ..Item::default() }
}

#[test]
fn not_of_a_bloom_term_loses_nothing_however_full_the_filter() {
    // Bloom filters so narrow that nearly every bit is set: negating a "maybe" would lose nearly all items.
    let items: Vec<Item> = (0..200).map(|n| tagged(n % 40)).collect();
    let options = Options { fixed_bits: Some(8), exact_share_min: 1.0, posting_share_max: 0.0, ..Options::default() };
    let catalogue = catalogue(items, 3, &options);
    for t in 0..40 {
        let leaf = Expr::Leaf(Leaf { feature: "tag".into(), test: Test::Has(vec![format!("t{t}")]), offset: 0 });
        catalogue.check(&Expr::Not(Box::new(leaf)), &mut Scratch::default());
    }
}

#[test]
fn the_false_positive_rate_falls_with_the_width() {
    // SilverTorch reports 6.98 % at 512 bits and 0.067 % at 1024 for 6 features of 10 values and 5 hashes. In theory the rate is
    // (1 - e^(-kn/m))^k for n terms, k hashes and m bits.
    let items: Vec<Item> =
        (0..512).map(|n| Item { tags: (0..60).map(|t| format!("{n}-{t}")).collect(), ..Item::default() }).collect();
    let mut before = 1.0;
    for bits in [512, 768, 1024, 2048] {
        let options =
            Options { fixed_bits: Some(bits), exact_share_min: 1.0, posting_share_max: 0.0, ..Options::default() };
        let catalogue = catalogue(items.clone(), 1, &options);
        let mut out = vec![0; catalogue.index.words(ListId(0))];
        let mut maybes = 0;
        for absent in 0..500 {
            out.fill(u64::MAX);
            let hash = catalogue.index.hash(format!("tag\0absent-{absent}").as_bytes());
            catalogue.index.bloom(ListId(0), hash, &mut out);
            maybes += out.iter().map(|w| w.count_ones()).sum::<u32>();
        }
        let rate = f64::from(maybes) / (500.0 * 512.0);
        let theory = (1.0 - (-5.0 * 60.0 / f64::from(bits)).exp()).powi(5);
        assert!((rate - theory).abs() < 0.15 * theory + 0.0005, "{bits} bits: rate {rate}, theory {theory}");
        assert!(rate < before);
        before = rate;
    }
}

#[test]
fn cached_filter_bitmaps_stay_those_of_their_plan() {
    let items: Vec<Item> = (0..1000).map(|n| Item { years: vec![i64::from(n % 5)], ..tagged(n % 3) }).collect();
    let catalogue = catalogue(items, 12, &Options::default());
    let plan = |text: &str| {
        let filter = crate::filter::parse(text).unwrap().canonical();
        Plan::new(&filter, &catalogue.columns, &catalogue.index, 0).unwrap()
    };
    let plans = [plan("tag:t1"), plan("NOT tag:t1"), plan("year:3 OR tag:t0")];
    let mut scratch = Scratch::default();
    let mut state = 1u64;
    for _ in 0..4000 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (which, kept, first) =
            ((state >> 40) as usize % 3, (state >> 44) as usize % 6, (state >> 50) as usize % 12);
        if let Some(plan) = plans.get(kept) {
            scratch.keep(plan);
        }
        for list in (first..12).take(1 + (state >> 60) as usize).map(|list| ListId(list as u32)) {
            let mut words = vec![u64::MAX; catalogue.index.words(list)];
            let mut alone = words.clone();
            plans[which].words(&catalogue.index, list, &mut scratch, &mut words);
            plans[which].words(&catalogue.index, list, &mut Scratch::default(), &mut alone);
            assert_eq!(words, alone, "plan {which}, list {list:?}");
        }
    }
}

#[test]
fn comparisons_with_buckets_are_exact_and_excluded_slots_are_cleared() {
    let price = |n: u32| Some(f64::from(n * n % 997) / 8.0).filter(|_| !n.is_multiple_of(7));
    let items: Vec<Item> = (0..2000).map(|n| Item { price: price(n), ..tagged(n % 3) }).collect();
    let catalogue = catalogue(items, 9, &Options::default());
    let mut scratch = Scratch::default();
    for text in
        ["price < 40.1", "NOT price >= 3", "price = 0.5", "price != 0.5 AND tag:t1", "NOT price = 77.75", "price > 1e9"]
    {
        let expr = crate::filter::parse(text).unwrap();
        assert!(Plan::new(&expr.canonical(), &catalogue.columns, &catalogue.index, 0).unwrap().is_exact(), "{text}");
        catalogue.check(&expr, &mut scratch);
    }
    let excluded: Vec<Slot> = (0..catalogue.order.len() as u32).step_by(3).map(Slot).collect();
    for list in (0..catalogue.index.lists() as u32).map(ListId) {
        let mut words = vec![u64::MAX; catalogue.index.words(list)];
        catalogue.index.exclude(list, &excluded, &mut words);
        for bit in 0..words.len() * 64 {
            let slot = Slot(catalogue.index.first_slot(list) + bit as u32);
            let inside = slot.0 < catalogue.index.first_slot(ListId(list.0 + 1).min(ListId(8))) || list.0 == 8;
            let cleared = inside && excluded.contains(&slot);
            assert_eq!(words[bit / 64] >> (bit % 64) & 1 == 0, cleared, "list {list} bit {bit}");
        }
    }
}

#[test]
fn impossible_options_are_rejected() {
    for options in [
        Options { hashes: 0, ..Options::default() },
        Options { hashes: 33, ..Options::default() },
        Options { bits_per_term: 0, ..Options::default() },
        Options { fixed_bits: Some(0), ..Options::default() },
        Options { exact_share_min: f64::NAN, ..Options::default() },
        Options { number_buckets: 1025, ..Options::default() },
        Options { posting_share_max: 1.5, ..Options::default() },
    ] {
        assert!(options.check().unwrap_err().to_string().contains("expected"), "{options:?}");
    }
}

#[test]
fn invalid_terms_name_their_position() {
    let catalogue = catalogue(vec![tagged(2)], 1, &Options::default());
    for (text, offset, expected) in [
        ("tag:t0 AND colour:red", 11, "unknown column `colour`"),
        ("prices < 5", 0, "unknown column `prices`, did you mean `price`? Expected one of: "),
        ("tag < 5", 0, "holds texts"),
        ("NOT price:9", 4, "compare it"),
        ("year:soon", 0, "expected an integer"),
        ("colour IS NULL", 0, "unknown column `colour`"),
        ("tag:t0 OR price IN ()", 10, "compare it"),
    ] {
        let filter = crate::filter::parse(text).unwrap().canonical();
        let error = Plan::new(&filter, &catalogue.columns, &catalogue.index, 0).unwrap_err();
        assert_eq!(error.offset(), Some(offset), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn equalities_of_one_column_are_planned_as_lists() {
    // Columns with rare values, with frequent values, and with several values per item.
    let items: Vec<Item> = (0..3000)
        .map(|n| Item {
            years: if n % 3 == 0 { vec![i64::from(n), 7] } else { vec![i64::from(n)] },
            price: Some(f64::from(n)),
            ..tagged(n % 3)
        })
        .collect();
    let catalogue = catalogue(items, 7, &Options::default());
    let plan = |text: &str| {
        let expr = crate::filter::parse(text).unwrap();
        catalogue.check(&expr, &mut Scratch::default());
        Plan::new(&expr.canonical(), &catalogue.columns, &catalogue.index, 0).unwrap()
    };
    for (equalities, list) in [
        ("first = 1 OR first = 2 OR first = 2.0 OR first = 3e0 OR first = 2.5 OR first = -9", "first IN (1, 2, 3)"),
        ("year = 7 OR year = 8 OR NOT year:9 OR tag:t0", "year IN (7, 8) OR NOT year:9 OR tag:t0"),
        ("NOT (first = 1 OR first = 2)", "first NOT IN (1, 2)"),
        ("NOT first = 1 AND first NOT IN (2, 3)", "first NOT IN (1, 2, 3)"),
        ("first != 1 AND first != 2 AND first != 3", "first != 1 AND first NOT IN (2, 3)"),
        ("NOT (first != 1 AND first != 2 AND first != 3)", "NOT first != 1 OR first IN (2, 3)"),
        ("tag:t0 OR tag:t1", "tag IN (t0, t1)"),
    ] {
        let (equalities, list) = (plan(equalities), plan(list));
        assert_eq!(equalities, list);
        assert_eq!(equalities.route(), list.route());
        assert_eq!(equalities.pass_rate(), list.pass_rate());
        assert_eq!(equalities.words_ns(), list.words_ns());
    }
    // Too many to be searched one by one, so their number is estimated.
    let many = (0..300).map(|n| format!("first = {}", 10 * n)).collect::<Vec<_>>().join(" OR ");
    let shares = |text: &str| plan(text).pass_rate() * 3000.0;
    for (text, least, most) in [
        (many.as_str(), 299.9, 300.1),
        (&format!("NOT ({many})"), 2699.9, 2700.1),
        ("first = 1 OR first = 2", 1.9, 2.1),
        ("first != 1", 2998.9, 2999.1),
        ("price = 77", 1.0, 40.0),
        ("price != 77", 2960.0, 2999.0),
        ("year = 1 OR year IN ()", 0.9, 1.1),
        ("tag IS NULL", 900.0, 1100.0),
        ("first IS NOT NULL", 2999.9, 3000.1),
    ] {
        let share = shares(text);
        assert!((least..=most).contains(&share), "{text}: {share} of 3000 items");
    }
    assert_eq!(plan("year IN ()").route(), &Route::Nothing);
    assert_eq!(plan("year NOT IN ()").route(), &Route::All);
}
